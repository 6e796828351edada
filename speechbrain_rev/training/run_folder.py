"""The folder of a training run: who may write there, what it begins with, how it ends.

What happened in it is recorded in ``inference.runs``.
"""

from __future__ import annotations

import math
import shlex
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from speechbrain.utils.checkpoints import PARAMFILE_EXT
from speechbrain.utils.distributed import if_main_process, run_on_main

from speechbrain_rev.architectures import architecture
from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.manifest import Cause
from speechbrain_rev.data.preparation import Prepared
from speechbrain_rev.data.seeding import processes_saved
from speechbrain_rev.files import (
    LOCK,
    SUMS,
    digest_of,
    locked,
    write_sums,
    write_whole,
)
from speechbrain_rev.heads import head_of
from speechbrain_rev.hparams import OptimizerWarning, resolve
from speechbrain_rev.hparams.document import dump
from speechbrain_rev.inference.runs import (
    HYPERPARAMS,
    WEIGHTS,
    Augmentation,
    DataCounts,
    FinalWeights,
    TrainingRecord,
    another_run,
    read_record,
)
from speechbrain_rev.inference.trained import read_weights, saved_bytes
from speechbrain_rev.lobes.checkpointer import (
    BRAIN,
    WholeCheckpointer,
    average_of_last_epochs,
    check_known,
    is_end_of_epoch,
    kept_epochs,
    run_in,
)
from speechbrain_rev.processes import process_count
from speechbrain_rev.training.steps import ACCUMULATION

#: The encoder and the random states of all processes in checkpoints.
ENCODER, RANDOM_STATE = "embedding_model", "random_state"

_PACKAGES = ("speechbrain_rev", "speechbrain", "torch", "torchaudio")
# Settings that a run's weights and features depend on; those of the data are refused
# elsewhere.
_NETWORK_SETTINGS = (
    "arch", "widths", "blocks", "n_mels", "embedding_dim", "features", "sample_rate",
    "pooling", "pooling_variance", "speeds",
)  # fmt: skip
# Settings that are counted of the data: always, and where they are null.
_COUNTED, _COUNTED_IF_NULL = "out_n_neurons", "steps_per_epoch"


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
        Without epochs and the name of the run, which its checkpoints have.
    """
    return TrainingRecord(
        run="",
        settings=settings,
        data=DataCounts(
            prepared.utterances,
            prepared.speakers,
            prepared.held_out_speakers,
            prepared.left_out.get(Cause.TESTED.words, 0),
        ),
        augmentation=Augmentation(**augmentation),
        device=device,
        versions={package: metadata.version(package) for package in _PACKAGES},
        epochs=0,
        seconds=0.0,
        lr=None,
        margin=None,
        weights=None,
        earlier=(),
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
    folders = {"output_folder": folder}
    if save is not None and not save.resolve().is_relative_to(folder.resolve()):
        save.mkdir(parents=True, exist_ok=True)
        folders["save_folder"] = save
    with ExitStack() as locks:
        for option, path in folders.items():
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
        If the weights are damaged, or not those that the run wrote.
    """
    folder = Path(settings["output_folder"])
    record = read_record(folder)
    if record is None or not record.weights or not (folder / WEIGHTS).is_file():
        return False
    read_weights(folder / WEIGHTS)
    same = record.settings["average_checkpoints"] == settings["average_checkpoints"]
    return bool(same) and record.is_finished(settings["number_of_epochs"])


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
    output, changes = settings["output_folder"], _list_changes(settings)
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
    if not has_run(settings) or not _read_settings(settings):
        return ""
    # prepare names those that have no effect any more.
    checks = DataSettings("").checks()
    changes = _list_changes({n: v for n, v in settings.items() if n not in checks})
    counts = {"processes": process_count(), ACCUMULATION: accumulated}
    saved_counts = counts | _read_counts(settings["save_folder"])
    changes += [
        f"{name}: was {saved_counts[name]}, is {count}"
        for name, count in counts.items()
        if saved_counts[name] != count
    ]
    if not changes:
        return ""
    rates = _advise_rates(settings, accumulated / saved_counts[ACCUMULATION])
    return (
        f"Settings differ from those that the run in {folder} last had: "
        f"{'; '.join(changes)}.{rates}"
    )


def _advise_rates(settings: Mapping[str, Any], accumulated: float) -> str:
    """Name the options by which another batch keeps the learning rates of the run."""
    recorded = _read_settings(settings)
    # A converted model has no batch size.
    batch_size = recorded.get("batch_size", settings["batch_size"])
    ratio = batch_size / (settings["batch_size"] * accumulated)
    if ratio == 1:
        return ""
    rates = {n: float(f"{ratio * recorded[n]:.6g}") for n in ("lr", "final_lr")}
    if all(math.isclose(settings[n], rate, rel_tol=1e-5) for n, rate in rates.items()):
        return ""
    options = " ".join(f"--{name}={dump(rate)}" for name, rate in rates.items())
    return (
        " The learning rate follows batch_size and grad_accumulation_factor. To keep the "
        f"learning rate, give {options}."
    )


def _read_counts(save_folder: str) -> dict[str, int]:
    """Read the newest checkpoint's processes and accumulated batches."""
    newest = WholeCheckpointer(save_folder).find_checkpoint()
    if newest is None:
        return {}
    folder, counts = Path(newest.path), {}
    # Checkpoints of SpeechBrain's script lack these. prepare refuses them.
    random_state, brain = folder / f"{RANDOM_STATE}{PARAMFILE_EXT}", folder / BRAIN
    check_known(folder, (random_state.name, brain.name))
    if random_state.is_file():
        counts["processes"] = processes_saved(random_state)
    if brain.is_file():
        state = yaml.safe_load(brain.read_text(encoding="utf-8"))
        counts |= {name: state[name] for name in (ACCUMULATION,) if name in state}
    return counts


def _read_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the settings of the run in output_folder; none where it has no record."""
    record = read_record(settings["output_folder"])
    return {} if record is None else record.settings


def _list_changes(settings: Mapping[str, Any]) -> list[str]:
    """List settings with another value than the run in output_folder began with."""
    output, recorded = str(settings["output_folder"]), _read_settings(settings)
    return [
        f"{name}: was {recorded[name]}, is {value}"
        for name, value in settings.items()
        if name in recorded
        and name != _COUNTED
        and (name, value) != (_COUNTED_IF_NULL, None)
        and value != recorded[name]
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
    recorded = _select_network(_read_settings(settings))
    shapes = _select_network(settings)
    changes = [
        f"{name}: was {value}, is {shapes[name]}"
        for name, value in recorded.items()
        if value != shapes[name]
    ]
    if changes:
        raise ValueError(
            f"output_folder {folder} has the weights of another network "
            f"({'; '.join(changes)}). Give another output_folder, or the settings as they "
            "were."
        )


def refuse_other_checkpoints(settings: Mapping[str, Any]) -> None:
    """Refuse another run's checkpoints, those of later epochs, and too few of them.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Raises
    ------
    ValueError
        If a checkpoint is another run's, or if more epochs were trained than
        number_of_epochs, or than save_folder has checkpoints of.
    """
    output, save = settings["output_folder"], settings["save_folder"]
    record = read_record(output)
    checkpoints = WholeCheckpointer(save).list_checkpoints()
    for each in checkpoints:
        path = Path(each.path)
        if record is not None and run_in(path) not in (record.run, None):
            raise ValueError(another_run(path, output))
    ended = [each.meta["epoch"] for each in checkpoints if is_end_of_epoch(each)]
    trained, epochs = max(ended, default=0), settings["number_of_epochs"]
    if trained > epochs:
        raise ValueError(
            f"number_of_epochs is {epochs}, and the run in {output} has trained {trained}: "
            f"its weights would be those of later epochs. Give --number_of_epochs={trained} "
            "or more, or another output_folder."
        )
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
    count = settings["average_checkpoints"]
    trained_epochs = record.epochs - settings["freeze_epochs"]
    average, epochs = average_of_last_epochs(
        checkpointer, ENCODER, min(count, max(1, trained_epochs))
    )
    # Weights that a killed process leaves have no checksum and are not recorded.
    replace(record, weights=None).write(folder)
    (folder / SUMS).unlink(missing_ok=True)
    weights = folder / WEIGHTS
    write_whole(weights, saved_bytes(average))
    write_sums(folder, {WEIGHTS: digest_of(weights)})
    fingerprint = read_weights(weights).fingerprint
    final = FinalWeights(
        tuple(epochs), fingerprint, record.lr, record.margin, record.seconds
    )
    replace(record, weights=final).write(folder)
    averaged = len(epochs)
    of = f"the mean of the last {averaged} epochs" if averaged > 1 else "one epoch's"
    frozen = " in which the encoder was trained" * (settings["freeze_epochs"] > 0)
    fewer = f" (average_checkpoints is {count}, and there are no more{frozen})"
    return (
        f"Finished: {weights}, {of}{fewer * (averaged < count)}. Next: "
        f"speechbrain-rev embed {shlex.quote(str(folder))} FILE"
    )


# A folder in output_folder, for files of a trial or of a run that has not yet recovered.
_ASIDE = ".settings.part"


@dataclass
class RunFiles:
    """Where hyperparams.yaml and plan.json are until a run resumes.

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
        """Replace the run's files, once it has recovered and nothing refuses them."""
        if self.trial:
            return
        record.write(self.output)
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
        In output_folder; of a trial or a run that is resumed there in a folder below it,
        which is deleted at the end.
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


def _select_network(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings of weights and features, with published values for null."""
    chosen = {name: settings[name] for name in _NETWORK_SETTINGS if name in settings}
    if "loss" in settings:
        chosen["head"] = head_of(settings["loss"]).name
    for name in ("widths", "blocks"):
        if name in chosen and chosen[name] is None:
            chosen[name] = list(getattr(architecture(settings["arch"]), name))
    return chosen


def has_run(settings: Mapping[str, Any]) -> bool:
    """Return whether output_folder has weights already."""
    return _has_weights(Path(settings["output_folder"]), Path(settings["save_folder"]))


def _has_weights(output: Path, save: Path) -> bool:
    return _has_checkpoints(save) or (output / WEIGHTS).is_file()


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
        # Composing the text gave this warning already.
        warnings.simplefilter("ignore", OptimizerWarning)
        text = resolve(path, {**settings, **counted})
    write_whole(path, text)


def partial_epoch(settings: Mapping[str, Any], prepared: Prepared) -> str:
    """Return how many of the utterances ``steps_per_epoch`` takes where it is not all.

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
    """Refuse a run that would write into another one's folder.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.
    file : str or Path
        The file that the command line names.

    Raises
    ------
    ValueError
        If the file is the hyperparams.yaml of a run, and output_folder, save_folder or
        train_log lie where that run is, or was before it was moved or copied; the message
        has the options that name where they belong. If save_folder has the checkpoints of
        a run with another output_folder.
    """
    output = Path(settings["output_folder"]).resolve()
    home = Path(file).resolve().parent
    if Path(file).name == HYPERPARAMS and _has_weights(home, home / "save"):
        record = read_record(home)
        old = Path(record.settings["output_folder"] if record else home).resolve()
        new = home if output in (home, old) else output
        misplaced = _list_misplaced(settings, {home, old}, new)
        if misplaced.keys() & {"output_folder", "save_folder", "train_log"}:
            options = (f"--{name}={path}" for name, path in misplaced.items())
            raise ValueError(
                f"{file} is of the run in {home}, and names folders of it, or of where it "
                f"was, that are not in {new}. To train in {new}, give also "
                f"{shlex.join(options)}; to begin another run, give the file in hparams/ "
                "that this one began with."
            )
    # Another recipe's settings may have no save_folder.
    save = Path(settings.get("save_folder") or output / "save").resolve()
    if _has_checkpoints(save) and not save.is_relative_to(output):
        # Checkpoints that were moved to another disk are resumed.
        recorded_settings = _read_settings(settings)
        before = Path(recorded_settings.get("save_folder", output)).resolve()
        if before != save and (not recorded_settings or _has_checkpoints(before)):
            raise ValueError(
                f"save_folder {save} has the checkpoints of a run with another "
                f"output_folder than {output}, which would resume from them. Give another "
                "save_folder, or the output_folder of that run."
            )


def _list_misplaced(
    settings: Mapping[str, Any], folders: Iterable[Path], new: Path
) -> dict[str, Path]:
    """Map settings that name paths in some folders to the same paths in a new one."""
    return {
        name: new / path.relative_to(folder)
        for name, value in settings.items()
        for folder in folders
        if isinstance(value, str)
        and (path := Path(value).resolve()).is_relative_to(folder)
        and not path.is_relative_to(new)
    }
