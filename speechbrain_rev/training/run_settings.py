"""The folder of a run: its settings, when it goes on, when it is finished."""

from __future__ import annotations

import math
import shlex
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from speechbrain.utils.distributed import if_main_process, run_on_main

from speechbrain_rev.architectures import architecture
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.seeding import processes_saved
from speechbrain_rev.files import (
    LOCK,
    check_sum,
    digest_of,
    locked,
    sums_in,
    write_sums,
    write_whole,
)
from speechbrain_rev.heads import HEADS, head_of
from speechbrain_rev.hparams import OptimizerWarning, plain_settings, resolve
from speechbrain_rev.hparams.document import dump
from speechbrain_rev.inference.evaluation import unfinished
from speechbrain_rev.inference.model_folder import ENCODER_SETTINGS
from speechbrain_rev.inference.run_folder import (
    HYPERPARAMS,
    LAST_WEIGHTS,
    WEIGHTS,
    read_settings,
    saved_bytes,
)
from speechbrain_rev.lobes.checkpointer import (
    WholeCheckpointer,
    average_of_last_epochs,
    check_known,
    is_end_of_epoch,
    load_finished_run,
)
from speechbrain_rev.processes import process_count
from speechbrain_rev.training.epochs import kept_epochs
from speechbrain_rev.training.steps import ACCUMULATION, DEBUG

#: The encoder in checkpoints.
ENCODER = "embedding_model"
#: The random states of all processes, in checkpoints.
RANDOM_STATE = "random_state"
#: The Brain's own state, in checkpoints, as SpeechBrain names it.
BRAIN = "brain"
#: The number of each training speaker, in save_folder.
LABELS = "label_encoder.txt"
# Shapes of weights depend on these, and on the data, of which prepare.py refuses others.
_SHAPES = (*ENCODER_SETTINGS, "pooling", "speeds")
# Counted by write_hyperparams: always, and where it is null.
_COUNTED, _COUNTED_IF_NULL = "out_n_neurons", "steps_per_epoch"


class ListedData(Protocol):
    """The size of the training set, as its lists have it."""

    @property
    def utterances(self) -> int:
        """Number of utterances."""

    @property
    def speakers(self) -> int:
        """Number of speakers, at the speed recorded."""


def refuse_other_network(settings: Mapping[str, Any]) -> None:
    """Refuse to write into the folder of a run that trained another network.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Raises
    ------
    ValueError
        If the folder has checkpoints or weights of another encoder or classifier.
    """
    folder = Path(settings["output_folder"])
    if not _has_run(settings) or not (folder / HYPERPARAMS).is_file():
        return
    # A run of SpeechBrain's script and a converted model lack some: prepare, or
    # refuse_without_checkpoints, refuses them.
    earlier = read_settings(folder, [], optional=(*_SHAPES, "loss"))
    then, now = _as_published(earlier), _as_published(settings)
    changes = [
        f"{name}: was {value}, is {now[name]}"
        for name, value in then.items()
        if value != now[name]
    ]
    if changes:
        raise ValueError(
            f"output_folder {folder} has the weights of another network "
            f"({'; '.join(changes)}). Give another output_folder, or the settings as they "
            "were."
        )


def already_finished(settings: Mapping[str, Any]) -> str:
    """Return a sentence on a finished run that is started again, and changed settings.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Returns
    -------
    str
        Settings are listed with their earlier and their new value. Numbers counted from
        the data are left out, and paths in output_folder.
    """
    output, changes = settings["output_folder"], _changes(settings)
    without_effect = f" These settings had no effect: {'; '.join(changes)}."
    return (
        f"{output} is a finished run of at least {settings['number_of_epochs']} epochs: "
        "nothing is trained or changed. To train on, give more by --number_of_epochs; to "
        f"train anew, another output_folder.{without_effect * bool(changes)}"
    )


def changed_settings(settings: Mapping[str, Any], accumulated: int = 1) -> str:
    """Return a sentence on settings that differ from those of a run that has begun.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.
    accumulated : int
        Its ``grad_accumulation_factor``.

    Returns
    -------
    str
        Settings as ``already_finished`` lists them, but for those of how files are
        checked, the number of processes, and ``accumulated``; after another batch of the
        optimizer the options that keep the learning rate. Empty where nothing differs or
        no run has begun.
    """
    folder = Path(settings["output_folder"])
    if not _has_run(settings) or not (folder / HYPERPARAMS).is_file():
        return ""
    # prepare names those that have no effect any more.
    checks = DataSettings("").checks()
    changes = _changes({n: v for n, v in settings.items() if n not in checks})
    now = {"processes": process_count(), ACCUMULATION: accumulated}
    then = now | _counts_of(settings["save_folder"])
    changes += [
        f"{name}: was {then[name]}, is {count}"
        for name, count in now.items()
        if then[name] != count
    ]
    if not changes:
        return ""
    rates = _rates_to_keep(settings, accumulated / then[ACCUMULATION])
    return (
        f"Settings differ from those that the run in {folder} last had: "
        f"{'; '.join(changes)}.{rates}"
    )


def _rates_to_keep(settings: Mapping[str, Any], accumulated: float) -> str:
    """Name the options by which another batch keeps the learning rates of the run."""
    then = _recorded(settings)
    # A converted model has none.
    before = then.get("batch_size", settings["batch_size"])
    larger = before / (settings["batch_size"] * accumulated)
    if larger == 1:
        return ""
    rates = {name: float(f"{larger * then[name]:.6g}") for name in ("lr", "final_lr")}
    if all(math.isclose(settings[n], rate, rel_tol=1e-5) for n, rate in rates.items()):
        return ""
    options = " ".join(f"--{name}={dump(rate)}" for name, rate in rates.items())
    return (
        " The learning rate follows batch_size and grad_accumulation_factor. To keep the "
        f"learning rate, give {options}."
    )


def _counts_of(save_folder: str) -> dict[str, int]:
    """Read the newest checkpoint's processes, accumulated batches, and if it debugs."""
    newest = WholeCheckpointer(save_folder).find_checkpoint()
    files = {} if newest is None else newest.paramfiles
    # Checkpoints of SpeechBrain's script lack these. prepare refuses them.
    names = [n for n in (RANDOM_STATE, BRAIN) if n in files]
    if newest is not None:
        check_known(newest.path, [Path(files[name]).name for name in names])
    counts = {}
    if RANDOM_STATE in names:
        counts["processes"] = processes_saved(files[RANDOM_STATE])
    if BRAIN in names:
        state = yaml.safe_load(Path(files[BRAIN]).read_text(encoding="utf-8"))
        counts |= {n: state[n] for n in (ACCUMULATION, DEBUG) if n in state}
    return counts


def _recorded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings of the run in output_folder."""
    path = Path(settings["output_folder"], HYPERPARAMS)
    return plain_settings(path.read_text(encoding="utf-8"))


def _changes(settings: Mapping[str, Any]) -> list[str]:
    """List settings with another value than the run in output_folder began with."""
    output, then = str(settings["output_folder"]), _recorded(settings)
    return [
        f"{name}: was {then[name]}, is {value}"
        for name, value in settings.items()
        if name in then
        and name != _COUNTED
        and (name, value) != (_COUNTED_IF_NULL, None)
        and value != then[name]
        and not Path(str(value)).is_relative_to(output)
    ]


@contextmanager
def owned(folder: Path, save: Path | None = None) -> Iterator[None]:
    """Lock a run's folders against other commands; the main process does it for all.

    Parameters
    ----------
    folder : pathlib.Path
        The output_folder, which is there.
    save : pathlib.Path, optional
        The save_folder, which may lie elsewhere.

    Raises
    ------
    ValueError
        If another command has locked one of them, which is named.
    """
    if not if_main_process():
        yield
        return
    named = {"output_folder": folder}
    if save is not None and not save.resolve().is_relative_to(folder.resolve()):
        save.mkdir(parents=True, exist_ok=True)
        named["save_folder"] = save
    with ExitStack() as locks:
        for option, path in named.items():
            lock = locked(path / LOCK, str(path), "writing into", instead=option)
            locks.enter_context(lock)
        yield


def finished(settings: Mapping[str, Any]) -> bool:
    """Return whether output_folder holds the finished run of these settings.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Returns
    -------
    bool
        Whether the weights are of as many epochs, or more, and of the same average.

    Raises
    ------
    ValueError
        If they are not as they were written.
    """
    folder, sums = Path(settings["output_folder"]), sums_in(settings["save_folder"])
    if not (folder / WEIGHTS).is_file() or not (folder / HYPERPARAMS).is_file():
        return False
    if LAST_WEIGHTS not in sums:
        return False
    check_sum(folder / WEIGHTS, folder=settings["save_folder"], name=LAST_WEIGHTS)
    then = read_settings(folder, ("number_of_epochs", "average_checkpoints"))
    if then["average_checkpoints"] != settings["average_checkpoints"]:
        return False
    # Where there are no checkpoints any more, the file has the number.
    trained = _epochs_trained(settings["save_folder"]) or then["number_of_epochs"]
    return bool(trained >= settings["number_of_epochs"])


def _epochs_trained(save_folder: str) -> int:
    """Return the last epoch that a checkpoint ends, 0 if none does."""
    checkpoints = WholeCheckpointer(save_folder).list_checkpoints()
    ended = [c.meta["epoch"] for c in checkpoints if is_end_of_epoch(c)]
    return max(ended, default=0)


def refuse_without_checkpoints(settings: Mapping[str, Any]) -> None:
    """Refuse to train a finished run from its beginning, in the place of its weights.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Raises
    ------
    ValueError
        If output_folder has weights, and save_folder no checkpoint to go on from.
    """
    weights = Path(settings["output_folder"], WEIGHTS)
    if (
        weights.is_file()
        and not WholeCheckpointer(settings["save_folder"]).find_checkpoint()
    ):
        raise ValueError(
            f"{weights} is of a finished run without checkpoints in "
            f"{settings['save_folder']}: it cannot go on, and would begin anew. Give another "
            "output_folder, or bring the checkpoints back."
        )


def refuse_short_epochs(settings: Mapping[str, Any], *, debugs: bool) -> None:
    """Refuse to mix checkpoints of debugging with those of a run.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.
    debugs : bool
        Whether it debugs, and keeps checkpoints of that.

    Raises
    ------
    ValueError
        If output_folder has a run and this one debugs, or the reverse.
    """
    if not _has_run(settings):
        return
    short = bool(_counts_of(settings["save_folder"]).get(DEBUG))
    if short and not debugs:
        raise ValueError(
            f"{settings['output_folder']} has checkpoints of --debug_persistently, whose "
            "epochs have a few steps, and a run would go on from them. Give another "
            "output_folder, or delete that one."
        )
    if debugs and not short:
        raise ValueError(
            f"debug_persistently keeps checkpoints of epochs of a few steps, and "
            f"{settings['output_folder']} has a run, which would go on from them. Give "
            "another output_folder, or --debug alone, which keeps none."
        )


def refuse_fewer_epochs(settings: Mapping[str, Any]) -> None:
    """Refuse to end a run before the epoch that it has come to.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Raises
    ------
    ValueError
        If save_folder has a checkpoint of the end of a later epoch than number_of_epochs.
    """
    trained, epochs = (
        _epochs_trained(settings["save_folder"]),
        settings["number_of_epochs"],
    )
    if trained > epochs:
        raise ValueError(
            f"number_of_epochs is {epochs}, and the run in {settings['output_folder']} has "
            f"trained {trained}: its weights would be those of later epochs. Give "
            f"--number_of_epochs={trained} or more, or another output_folder."
        )


def mark_finished(save_folder: str, digest: str | None) -> None:
    """Write or remove the checksum that marks weights in output_folder as the run's last.

    Parameters
    ----------
    save_folder : str
        The run's.
    digest : str or None
        SHA-256 of the weights; None if they are not the last ones.
    """
    sums = sums_in(save_folder)
    was = sums.pop(LAST_WEIGHTS, None)
    if digest is not None:
        sums[LAST_WEIGHTS] = digest
    if digest != was:
        write_sums(save_folder, sums)


def finish(settings: Mapping[str, Any]) -> str:
    """Write the average of the last checkpoints as the run's weights.

    Parameters
    ----------
    settings : mapping
        The run's settings with its ``checkpointer``.

    Returns
    -------
    str
        What was written, of how many epochs, in a sentence.
    """
    checkpointer, wanted = settings["checkpointer"], settings["average_checkpoints"]
    # A run that was killed after its last checkpoint has one too many.
    checkpointer.delete_checkpoints(
        num_to_keep=kept_epochs(wanted), ckpt_predicate=is_end_of_epoch
    )
    average = average_of_last_epochs(checkpointer, ENCODER, wanted)
    weights = Path(settings["output_folder"], WEIGHTS)
    write_whole(weights, saved_bytes(average))
    mark_finished(settings["save_folder"], digest_of(weights))
    averaged = min(wanted, sum(map(is_end_of_epoch, checkpointer.list_checkpoints())))
    epochs = (
        f"the mean of the last {averaged} epochs" if averaged > 1 else "one epoch's"
    )
    fewer = f" (average_checkpoints is {wanted}, and there are no more)"
    return (
        f"Finished: {weights}, {epochs}{fewer * (averaged < wanted)}. Next: "
        f"speechbrain-rev embed {shlex.quote(str(settings['output_folder']))} FILE"
    )


# A folder in output_folder, for files of a trial or of a run that has not yet recovered.
_ASIDE = ".settings.part"


@dataclass
class RunFiles:
    """Where hyperparams.yaml and plan.json are until a run goes on.

    Attributes
    ----------
    folder : pathlib.Path
        Where they are written.
    output : pathlib.Path
        The run's output_folder, whose files hold until then.
    save_folder : str
        The run's, where its weights are marked as the last ones.
    trial : bool
        Whether they never come there.
    """

    folder: Path
    output: Path
    save_folder: str
    trial: bool

    def take_over(self) -> None:
        """Put them in the place of the run's, for it has recovered: nothing refuses them.

        From here on its weights are not the last ones.
        """
        if self.trial:
            return
        mark_finished(self.save_folder, None)
        if self.folder != self.output:
            for path in sorted(self.folder.iterdir()):
                path.replace(self.output / path.name)


@contextmanager
def kept_in(settings: Mapping[str, Any], *, trial: bool) -> Iterator[RunFiles]:
    """Return where hyperparams.yaml and plan.json of a run or a trial are written.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.
    trial : bool
        Whether nothing is trained. A run in output_folder then keeps its own files.

    Yields
    ------
    RunFiles
        In output_folder; of a trial or a run that goes on there in a folder below it,
        which is there until this ends.
    """
    output, save = Path(settings["output_folder"]), settings["save_folder"]
    if not _has_run(settings):
        yield RunFiles(output, output, save, trial=trial)
        return
    folder = output / _ASIDE
    run_on_main(_make_empty, args=[folder])
    try:
        yield RunFiles(folder, output, save, trial=trial)
    finally:
        if if_main_process():
            shutil.rmtree(folder, ignore_errors=True)


def _make_empty(folder: Path) -> None:
    """Make a folder; a killed process may have left it with files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _as_published(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings that shapes depend on, with published values instead of null."""
    chosen = {name: settings[name] for name in _SHAPES if name in settings}
    if "loss" in settings:
        chosen["head"] = head_of(settings["loss"]).name
    for name in ("widths", "blocks"):
        if name in chosen and chosen[name] is None:
            chosen[name] = list(getattr(architecture(settings["arch"]), name))
    return chosen


def _has_run(settings: Mapping[str, Any]) -> bool:
    """Return whether output_folder has weights already."""
    begun = _has_checkpoints(Path(settings["save_folder"]))
    return begun or Path(settings["output_folder"], WEIGHTS).is_file()


def _has_checkpoints(save: Path) -> bool:
    return any(save.glob("CKPT*/CKPT.yaml"))


def write_hyperparams(
    folder: Path, text: str, settings: Mapping[str, Any], prepared: ListedData
) -> None:
    """Write the complete settings, with numbers counted from the data.

    Parameters
    ----------
    folder : pathlib.Path
        Gets hyperparams.yaml.
    text : str
        The composed YAML.
    settings : mapping
        Its plain values.
    prepared : ListedData
        The size of the training set.
    """
    path = folder / HYPERPARAMS
    write_whole(path, text)
    steps = settings["steps_per_epoch"] or prepared.utterances // settings["batch_size"]
    counted = {
        "out_n_neurons": prepared.speakers * len(settings["speeds"]),
        # None where there is not one batch, which the sampler refuses with the numbers.
        "steps_per_epoch": steps or None,
    }
    with warnings.catch_warnings():
        # That warning was given when the text was composed.
        warnings.simplefilter("ignore", OptimizerWarning)
        text = resolve(path, {**settings, **counted})
    write_whole(path, text)


def partial_epoch(settings: Mapping[str, Any], prepared: ListedData) -> str:
    """Say how many of the utterances ``steps_per_epoch`` takes where it is not all.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.
    prepared : ListedData
        The size of the training set.

    Returns
    -------
    str
        A sentence; empty where each utterance is taken once, or null takes them all.
    """
    steps, batch = settings["steps_per_epoch"], settings["batch_size"]
    if steps in (None, prepared.utterances // batch):
        return ""
    return (
        f"steps_per_epoch is {steps}: an epoch takes {steps * batch:,} utterances of the "
        f"{prepared.utterances:,} there are; null takes each once."
    )


def refuse_folders_of_another_run(
    settings: Mapping[str, Any], file: str | Path
) -> None:
    """Refuse a run that would write into that of the hyperparams.yaml it was given.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.
    file : str or Path
        The file that the command line names.

    Raises
    ------
    ValueError
        If save_folder or train_log lie in a folder with a hyperparams.yaml, which is not
        output_folder; if save_folder has the checkpoints of a run with another
        output_folder; if the file is that of a run which was moved or copied, and names
        the folders where it was before.
    """
    output = Path(settings["output_folder"])
    for name in ("save_folder", "train_log"):
        # Another recipe's settings may have none.
        folder = Path(settings.get(name) or output / name).resolve().parent
        if folder != output.resolve() and (folder / HYPERPARAMS).is_file():
            own = _moved_by(settings, folder, output)
            raise ValueError(
                f"{name} is {settings[name]}, of the run in {folder}, and output_folder is "
                f"{output}: that run would be changed. Give the file in hparams/ that the "
                f"run began with and its options, or also {own}"
            )
    save = Path(settings.get("save_folder") or output / "save").resolve()
    if _has_checkpoints(save) and not save.is_relative_to(output.resolve()):
        # Checkpoints that were moved to another disk go on.
        then = _recorded(settings) if (output / HYPERPARAMS).is_file() else {}
        before = Path(then.get("save_folder", output)).resolve()
        if before != save and (not then or _has_checkpoints(before)):
            raise ValueError(
                f"save_folder {save} has the checkpoints of a run with another "
                f"output_folder than {output}, which would go on from them. Give another "
                "save_folder, or the output_folder of that run."
            )
    _refuse_moved(settings, Path(file))


def _refuse_moved(settings: Mapping[str, Any], file: Path) -> None:
    """Refuse the file of a run that was moved or copied and writes where it was."""
    home = file.resolve().parent
    if file.name != HYPERPARAMS or not file.is_file():
        return
    if not _has_checkpoints(home / "save") and not (home / WEIGHTS).is_file():
        return
    then = plain_settings(file.read_text(encoding="utf-8")).get("output_folder")
    if then is None or home.is_relative_to(Path(then).resolve()):
        return
    if options := _moved_by(settings, Path(then).resolve(), home):
        raise ValueError(
            f"{file} is of a run that was moved or copied: it names folders in {then}. To "
            f"go on with the run in {home} give {options}; to begin another one, the file in "
            "hparams/ that it began with."
        )


def _moved_by(settings: Mapping[str, Any], old: Path, new: Path) -> str:
    """Give the options by which all paths in a folder are in another."""
    return " ".join(
        shlex.quote(f"--{name}={new / path.relative_to(old)}")
        for name, value in settings.items()
        if isinstance(value, str)
        and (path := Path(value).resolve()).is_relative_to(old)
    )


def refuse_own_folder(settings: Mapping[str, Any]) -> None:
    """Refuse a run that would write into the finished one it starts from.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Raises
    ------
    ValueError
        If output_folder is pretrained_run or a folder in it.
    """
    ours, theirs = settings["output_folder"], settings["pretrained_run"]
    if theirs is None:
        return
    if Path(ours).resolve().is_relative_to(Path(theirs).resolve()):
        raise ValueError(
            f"output_folder {ours} is pretrained_run {theirs} or in it: the settings and "
            "checkpoints of the finished run would be overwritten. Give another "
            "output_folder, and pretrained_run without a slash at its end."
        )


def start_from(settings: Mapping[str, Any]) -> None:
    """Load encoder and classifier of a finished run.

    A run at the recorded speed alone takes the classes of that speed from a run that had
    more.

    Parameters
    ----------
    settings : mapping
        The run's settings with its ``modules``; its lists are in save_folder.

    Raises
    ------
    ValueError
        If pretrained_run is no finished run, or of other speakers, speeds or shapes, or
        of another pooling or head.
    """
    folder = Path(settings["pretrained_run"])
    record = folder / HYPERPARAMS
    if not record.is_file():
        raise ValueError(
            f"pretrained_run is {folder}, which lacks hyperparams.yaml: give the "
            "output_folder of a finished run."
        )
    run = plain_settings(record.read_text(encoding="utf-8"))
    classes = {"speeds", "pooling", "loss"} <= run.keys()
    if not classes or not (folder / "save" / LABELS).is_file():
        raise ValueError(
            f"pretrained_run is {folder}, which has no classifier and no list of its "
            "training speakers, as an exported model: give the output_folder of a finished "
            "run."
        )
    pooled, pooling = run["pooling"], settings["pooling"]
    if pooled != pooling:
        raise ValueError(
            f"pretrained_run {folder} has the pooling {pooled}, this run {pooling}: its "
            f"embeddings would be other ones. Give pooling: {pooled}, or the output_folder "
            f"of a run with {pooling}."
        )
    heads = [head_of(each["loss"]).name for each in (run, settings)]
    if heads[0] != heads[1]:
        raise ValueError(
            f"pretrained_run {folder} has a classifier of head {heads[0]}, and loss "
            f"{settings['loss']} takes one of {heads[1]}. Give a loss of head {heads[0]}: "
            f"{', '.join(HEADS[heads[0]].losses)}."
        )
    theirs, ours = run["speeds"], list(settings["speeds"])
    if theirs != ours and not (ours == [1.0] and 1.0 in theirs):
        raise _other_classes(record, f"the speeds {theirs}, this run {ours}")
    if read_labels(folder / "save" / LABELS) != read_labels(
        Path(settings["save_folder"], LABELS)
    ):
        raise _other_classes(record, "other speakers, or numbered differently")
    if (folder / WEIGHTS).is_file() and (early := unfinished(folder)):
        raise ValueError(
            f"pretrained_run: {early} Its classifier would be of another epoch. Go on with "
            "it to its end, or give the output_folder of a finished run."
        )
    narrowed_from = None if theirs == ours else len(theirs)
    load_finished_run(settings["modules"], folder, narrowed_from=narrowed_from)


def _other_classes(record: Path, difference: str) -> ValueError:
    return ValueError(
        f"pretrained_run {record.parent} has {difference}: its classifier would be wrong, "
        "and the encoder is not loaded alone. Give seed, data_folder, train_list, "
        f"trial_lists, valid_speakers, valid_trials and speeds as in {record}; speeds may "
        "also be [1.0], for which the classes of other speeds are dropped."
    )
