"""Runs: what happened in a training run's folder, who may write there, and how it ends.

``run.json`` records what happened, as it happens: the settings, the speakers that were
trained on and held out, the augmentation, the epochs that are done, and those whose mean
the weights are. Exports, remarks on unfinished runs and refusals are made of it. It
may come from somebody else: it is data of known names and types, or refused.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shlex
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from speechbrain.utils.distributed import if_main_process, run_on_main

from speechbrain_rev.architectures import architecture
from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.manifest import Cause
from speechbrain_rev.data.preparation import Prepared
from speechbrain_rev.data.seeding import processes_saved
from speechbrain_rev.files import (
    LOCK,
    SUMS,
    check_sum,
    digest_of,
    locked,
    parse_json,
    refusing,
    write_sums,
    write_whole,
)
from speechbrain_rev.heads import head_of
from speechbrain_rev.hparams import OptimizerWarning, resolve
from speechbrain_rev.hparams.document import dump
from speechbrain_rev.inference.trained import (
    WEIGHTS,
    checkpoint_place,
    encoder_file,
    saved_bytes,
)
from speechbrain_rev.inference.untrusted import read_own, short
from speechbrain_rev.lobes.checkpointer import (
    WholeCheckpointer,
    average_of_last_epochs,
    check_known,
    is_end_of_epoch,
    kept_epochs,
)
from speechbrain_rev.processes import process_count, process_rank

logger = logging.getLogger(__name__)

#: The record, and the settings that SpeechBrain's loader builds, in output_folder.
RECORD, HYPERPARAMS = "run.json", "hyperparams.yaml"
#: The encoder, the random states of all processes and the Brain's state in checkpoints.
ENCODER, RANDOM_STATE, BRAIN = "embedding_model", "random_state", "brain"
#: The number of each training speaker, in save_folder.
LABELS = "label_encoder.txt"
#: SpeechBrain's run option, which checkpoints keep.
ACCUMULATION = "grad_accumulation_factor"

_PACKAGES = ("speechbrain_rev", "speechbrain", "torch", "torchaudio")
_MOST_BYTES = 1_000_000
# More epochs, utterances or seconds than any run has.
_LARGEST = 2**60
# Settings that shapes of weights depend on; the data has its own refusals.
_SHAPES = (
    "arch", "widths", "blocks", "n_mels", "embedding_dim", "sample_rate", "pooling",
    "speeds",
)  # fmt: skip
# Settings that are counted of the data: always, and where they are null.
_COUNTED, _COUNTED_IF_NULL = "out_n_neurons", "steps_per_epoch"


@dataclass(frozen=True)
class TrainingRecord:
    """What happened in a run.

    Attributes
    ----------
    settings : mapping of str to object
        The plain settings, as they were composed.
    data : mapping of str to int
        Of the lists: ``utterances`` and ``speakers`` that are trained on,
        ``held_out_speakers`` of validation, ``left_out`` utterances of speakers of trial
        lists.
    augmentation : mapping of str to object
        What the training draws from: ``speeds``, and whether there is ``noise`` and
        ``reverberation``.
    device : str
        Where it was trained, and by how many processes.
    versions : mapping of str to str
        Of the packages.
    epochs : int
        How many are done, as of the last one that ended.
    seconds : float
        Of these epochs, validation included, as train_log.jsonl has them.
    lr, margin : float or None
        Of the last step of these epochs, the learning rate with the batch counted in.
    averaged : tuple of int
        The epochs whose mean ``embedding_model.ckpt`` is; empty while it is not written,
        or is of an earlier end.
    """

    settings: Mapping[str, Any]
    data: Mapping[str, int]
    augmentation: Mapping[str, Any]
    device: str
    versions: Mapping[str, str]
    epochs: int = 0
    seconds: float = 0.0
    lr: float | None = None
    margin: float | None = None
    averaged: tuple[int, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether all epochs that the settings ask for are done, and averaged."""
        wanted = self.settings["number_of_epochs"]
        return bool(self.averaged) and max(self.averaged) >= wanted

    def after(self, rows: Sequence[Mapping[str, Any]]) -> TrainingRecord:
        """Complete the record by the epochs that are done.

        Parameters
        ----------
        rows : sequence of mapping
            Of train_log.jsonl, one for each of them.

        Returns
        -------
        TrainingRecord
        """
        if not rows:
            return self
        last = rows[-1]
        return replace(
            self,
            epochs=last["epoch"],
            seconds=sum(60 * row["minutes"] for row in rows),
            lr=last["lr"],
            margin=last["margin"],
        )

    def write(self, folder: Path) -> None:
        """Write the record into a run's folder, whole."""
        content = json.dumps(dataclasses.asdict(self), indent=1)
        write_whole(folder / RECORD, content + "\n")


#: What a value may be: a type, or a list of values of these types.
_Kind: TypeAlias = type | list[type]
_TYPES: dict[str, tuple[_Kind, ...]] = {
    "settings": (dict,),
    "data": (dict,),
    "augmentation": (dict,),
    "device": (str,),
    "versions": (dict,),
    "epochs": (int,),
    "seconds": (int, float),
    "lr": (int, float, type(None)),
    "margin": (int, float, type(None)),
    "averaged": ([int],),
}
# What whoever loads or exports a run reads of them.
_WITHIN: dict[str, dict[str, tuple[_Kind, ...]]] = {
    "settings": {
        "number_of_epochs": (int,),
        "speeds": ([int, float],),
        "loss": (str,),
        "data_folder": (str, [str]),
        "train_list": (str, type(None)),
        "trial_lists": ([str],),
    },
    "data": {
        "utterances": (int,),
        "speakers": (int,),
        "held_out_speakers": (int,),
        "left_out": (int,),
    },
    "augmentation": {
        "speeds": ([int, float],),
        "noise": (bool,),
        "reverberation": (bool,),
    },
}


def read_record(folder: str | PathLike[str]) -> TrainingRecord | None:
    """Read what happened in a run.

    Parameters
    ----------
    folder : str or path-like
        Its ``output_folder``.

    Returns
    -------
    TrainingRecord or None
        None if recipes/VoxCeleb/train.py has trained nothing there.

    Raises
    ------
    ValueError
        If ``run.json`` is anything else than training writes.

    Example
    -------
    >>> read_record(getfixture("tmp_path")) is None
    True
    """
    path = Path(folder, RECORD)
    if not path.exists():
        return None
    content = read_own(Path(folder), RECORD, _MOST_BYTES)
    with refusing(
        f"{path} is not what recipes/VoxCeleb/train.py writes",
        "Bring the file back as it was.",
    ):
        read = parse_json(content)
        if not isinstance(read, dict) or read.keys() != _TYPES.keys():
            raise ValueError(f"it holds {short(read)}")
        _check_types(read, _TYPES)
        for name, types in _WITHIN.items():
            _check_types(read[name], types)
        return TrainingRecord(**{**read, "averaged": tuple(read["averaged"])})


def _check_types(
    values: Mapping[str, Any], types: Mapping[str, tuple[_Kind, ...]]
) -> None:
    for name, kinds in types.items():
        value = values.get(name)
        if not any(
            _is_of(value, (kind,))
            if isinstance(kind, type)
            else type(value) is list and all(_is_of(each, kind) for each in value)
            for kind in kinds
        ):
            raise ValueError(f"{name} is {short(value)}")


def _is_of(value: object, kinds: Sequence[type]) -> bool:
    """Whether a value has one of these types and, if it is a number, is finite."""
    is_number = isinstance(value, int | float)
    return type(value) in kinds and not (is_number and not abs(value) < _LARGEST)  # type: ignore[arg-type]


def record_of(folder: str | PathLike[str]) -> TrainingRecord:
    """Read what happened in a run, which must be of this package's recipe.

    Parameters
    ----------
    folder : str or path-like
        Its ``output_folder``.

    Returns
    -------
    TrainingRecord

    Raises
    ------
    FileNotFoundError
        If it has no ``run.json``.
    ValueError
        As of ``read_record``.
    """
    record = read_record(folder)
    if record is None:
        raise FileNotFoundError(
            f"{folder} has no {RECORD}: give the output_folder of a run of "
            "recipes/VoxCeleb/train.py."
        )
    return record


def standing(folder: str | PathLike[str], weights: Path) -> str:
    """Say of which epoch weights are, where that is not the end of their run.

    Parameters
    ----------
    folder : str or path-like
        The run's ``output_folder``.
    weights : pathlib.Path
        The file, as ``encoder_file`` finds it.

    Returns
    -------
    str
        A sentence; empty for a finished run, and where nothing is recorded.
    """
    record = read_record(folder)
    if record is None:
        return ""
    wanted = record.settings["number_of_epochs"]
    if weights.parent != Path(folder):
        place = weights.parent.relative_to(folder)
        epoch, ended, step, _ = checkpoint_place(Path(folder), place)
        where = f"of epoch {epoch}" + (f" at step {step}" if not ended else "")
        return (
            f"{folder} is not finished: its weights are {where} of {wanted}, of the "
            "newest checkpoint."
        )
    if record.is_finished:
        return ""
    if not record.averaged:
        return (
            f"{folder} is not finished: it is being extended to {wanted} epochs, "
            f"{record.epochs} are done, and its weights are those of its earlier end."
        )
    return (
        f"{folder} is not finished: its weights are the mean of epochs up to "
        f"{max(record.averaged)} of {wanted}."
    )


def warn_unfinished(source: str | PathLike[str]) -> None:
    """Log a warning where the weights of a run are not those of its end.

    Parameters
    ----------
    source : str or path-like
        A run, or whatever else has weights.
    """
    folder = Path(source)
    if (
        not process_rank()
        and folder.is_dir()
        and (words := standing(folder, encoder_file(folder)))
    ):
        logger.warning(words)


def begin_record(
    settings: Mapping[str, Any],
    prepared: Prepared,
    augmentation: Mapping[str, Any],
    device: str,
) -> TrainingRecord:
    """Begin the record of a run, or of what follows in one that is resumed.

    Parameters
    ----------
    settings : mapping
        The plain settings, numbers counted from the data among them.
    prepared : Prepared
        What was listed.
    augmentation : mapping
        As ``SpeakerAugment.used`` gives it.
    device : str
        Where it is trained.

    Returns
    -------
    TrainingRecord
        Without epochs.
    """
    return TrainingRecord(
        settings=settings,
        data={
            "utterances": prepared.utterances,
            "speakers": prepared.speakers,
            "held_out_speakers": prepared.held_out_speakers,
            "left_out": prepared.left_out.get(Cause.TESTED.words, 0),
        },
        augmentation=augmentation,
        device=device,
        versions={package: metadata.version(package) for package in _PACKAGES},
    )


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
        If another command has locked one of them; which is named.
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
        If the weights are not as they were written.
    """
    folder = Path(settings["output_folder"])
    record = read_record(folder)
    if record is None or not record.averaged or not (folder / WEIGHTS).is_file():
        return False
    check_sum(folder / WEIGHTS)
    same = record.settings["average_checkpoints"] == settings["average_checkpoints"]
    return bool(same) and record.epochs >= settings["number_of_epochs"]


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
    if not has_run(settings) or not _recorded(settings):
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
    """Read the newest checkpoint's processes and accumulated batches."""
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
        counts |= {n: state[n] for n in (ACCUMULATION,) if n in state}
    return counts


def _recorded(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give the settings of the run in output_folder; none where it has no record."""
    record = read_record(settings["output_folder"])
    return {} if record is None else record.settings


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
    if not has_run(settings):
        return
    then, now = _as_published(_recorded(settings)), _as_published(settings)
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


def refuse_fewer_epochs(settings: Mapping[str, Any]) -> None:
    """Refuse to end a run before the epoch that it has come to, or to begin it anew.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Raises
    ------
    ValueError
        If more epochs were trained than number_of_epochs, or than save_folder has
        checkpoints of.
    """
    output, save = settings["output_folder"], settings["save_folder"]
    checkpoints = WholeCheckpointer(save).list_checkpoints()
    ended = [one.meta["epoch"] for one in checkpoints if is_end_of_epoch(one)]
    trained, epochs = max(ended, default=0), settings["number_of_epochs"]
    if trained > epochs:
        raise ValueError(
            f"number_of_epochs is {epochs}, and the run in {output} has trained {trained}: "
            f"its weights would be those of later epochs. Give --number_of_epochs={trained} "
            "or more, or another output_folder."
        )
    record = read_record(output)
    if record is not None and record.epochs > trained:
        raise ValueError(
            f"The run in {output} has trained {record.epochs} epochs, and {save} has "
            f"checkpoints of {trained}: it would train the others anew. Bring its checkpoints "
            "back, or give another output_folder."
        )


def finish(settings: Mapping[str, Any], record: TrainingRecord) -> str:
    """Write the average of the last checkpoints as the run's weights.

    Parameters
    ----------
    settings : mapping
        The run's settings with its ``checkpointer``.
    record : TrainingRecord
        Of its epochs.

    Returns
    -------
    str
        What was written, of how many epochs, in a sentence.
    """
    checkpointer, folder = settings["checkpointer"], Path(settings["output_folder"])
    # A run that was killed after its last checkpoint has one too many.
    checkpointer.delete_checkpoints(
        num_to_keep=kept_epochs(settings["average_checkpoints"]),
        ckpt_predicate=is_end_of_epoch,
    )
    wanted = settings["average_checkpoints"]
    average, epochs = average_of_last_epochs(checkpointer, ENCODER, wanted)
    # A process that is killed before the end leaves weights that nothing vouches for.
    begin_epochs(folder, record)
    weights = folder / WEIGHTS
    write_whole(weights, saved_bytes(average))
    write_sums(folder, {WEIGHTS: digest_of(weights)})
    replace(record, averaged=tuple(epochs)).write(folder)
    averaged = len(epochs)
    of = f"the mean of the last {averaged} epochs" if averaged > 1 else "one epoch's"
    fewer = f" (average_checkpoints is {wanted}, and there are no more)"
    return (
        f"Finished: {weights}, {of}{fewer * (averaged < wanted)}. Next: "
        f"speechbrain-rev embed {shlex.quote(str(folder))} FILE"
    )


def begin_epochs(folder: Path, record: TrainingRecord) -> None:
    """Record that epochs follow: weights that are there are not the run's last ones.

    Parameters
    ----------
    folder : pathlib.Path
        The run's.
    record : TrainingRecord
        Of the epochs that are done.
    """
    replace(record, averaged=()).write(folder)
    (folder / SUMS).unlink(missing_ok=True)


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
    trial : bool
        Whether they never come there.
    """

    folder: Path
    output: Path
    trial: bool

    def take_over(self, record: TrainingRecord) -> None:
        """Put them in the place of the run's, for it has recovered: nothing refuses them.

        From here on its weights are not the last ones.
        """
        if self.trial:
            return
        begin_epochs(self.output, record)
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
    output = Path(settings["output_folder"])
    if not has_run(settings):
        yield RunFiles(output, output, trial=trial)
        return
    folder = output / _ASIDE
    run_on_main(_make_empty, args=[folder])
    try:
        yield RunFiles(folder, output, trial=trial)
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


def has_run(settings: Mapping[str, Any]) -> bool:
    """Return whether output_folder has weights already."""
    begun = _has_checkpoints(Path(settings["save_folder"]))
    return begun or Path(settings["output_folder"], WEIGHTS).is_file()


def _has_checkpoints(save: Path) -> bool:
    return any(save.glob("CKPT*/CKPT.yaml"))


def write_hyperparams(
    folder: Path, text: str, settings: Mapping[str, Any], prepared: Prepared
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
    prepared : Prepared
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


def partial_epoch(settings: Mapping[str, Any], prepared: Prepared) -> str:
    """Say how many of the utterances ``steps_per_epoch`` takes where it is not all.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.
    prepared : Prepared
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
        then = _recorded(settings)
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
    then = (
        record_of(home).settings["output_folder"] if (home / RECORD).exists() else None
    )
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
