"""The settings that a run's folder keeps, and which of them it cannot go on with."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.distributed import if_main_process, run_on_main

from speechbrain_rev.architectures import architecture
from speechbrain_rev.data.preparation import Prepared
from speechbrain_rev.hparams import OptimizerWarning, plain_settings, resolve
from speechbrain_rev.inference.model_folder import ENCODER_SETTINGS
from speechbrain_rev.inference.run_folder import (
    HYPERPARAMS,
    WEIGHTS,
    read_settings,
    read_weights,
)
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer
from speechbrain_rev.lobes.checkpoints import average_of_last_epochs, is_end_of_epoch
from speechbrain_rev.locks import LOCK, locked
from speechbrain_rev.whole_files import (
    check_sum,
    clear_unfinished,
    digest_of,
    sums_in,
    write_sums,
    write_whole,
)

#: The encoder in checkpoints.
ENCODER = "embedding_model"
#: The run's weights, as checksums in save_folder name them.
RESULT = f"../{WEIGHTS}"
# What shapes of weights depend on; of the data, prepare.py refuses others.
_SHAPES = (*ENCODER_SETTINGS, "pooling", "speeds")
# What write_hyperparams counts.
_COUNTED = ("out_n_neurons", "steps_per_epoch")


def refuse_other_network(settings: Mapping[str, Any]) -> None:
    """Refuse to write into the folder of a run that trained another network.

    Parameters
    ----------
    settings : mapping
        The training's plain settings.

    Raises
    ------
    ValueError
        If the folder has checkpoints or weights of another encoder or classifier.
    """
    folder = Path(settings["output_folder"])
    if not _has_run(settings) or not (folder / HYPERPARAMS).is_file():
        return
    earlier = read_settings(folder, [], optional=_SHAPES)
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


def changed_settings(settings: Mapping[str, Any]) -> list[str]:
    """List settings that a run in output_folder was made with other values of.

    Parameters
    ----------
    settings : mapping
        The training's plain settings.

    Returns
    -------
    list of str
        Name, value then and value now. Numbers that follow from the data are left out,
        what lies in output_folder, and what the run of an earlier version did not know.
    """
    output = str(settings["output_folder"])
    path = Path(output, HYPERPARAMS)
    then = plain_settings(path.read_text(encoding="utf-8"))
    return [
        f"{name}: was {then[name]}, is {value}"
        for name, value in settings.items()
        if name in then
        and name not in _COUNTED
        and value != then[name]
        and not str(value).startswith(output)
    ]


@contextmanager
def owned(folder: Path, save: Path | None = None) -> Iterator[None]:
    """Keep a run's folders from other commands; the main process has them for all.

    What a process that was killed left of files there is deleted.

    Parameters
    ----------
    folder : pathlib.Path
        The output_folder, which is there.
    save : pathlib.Path, optional
        The save_folder, which may lie elsewhere.

    Raises
    ------
    ValueError
        If another command has one of them; host, process and begin are named.
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
            clear_unfinished(path)
        yield


def finished(settings: Mapping[str, Any]) -> bool:
    """Return whether a run has come to its end, as far as the settings want it.

    Parameters
    ----------
    settings : mapping
        The training's plain settings.

    Returns
    -------
    bool
        Whether output_folder has the weights of as many epochs, or more, and of the same
        average.

    Raises
    ------
    ValueError
        If they are not as they were written.
    """
    folder, sums = Path(settings["output_folder"]), sums_in(settings["save_folder"])
    if not (folder / WEIGHTS).is_file() or not (folder / HYPERPARAMS).is_file():
        return False
    if not sums:
        return _has_average(settings)
    if RESULT not in sums:
        return False
    check_sum(folder / WEIGHTS, folder=settings["save_folder"], name=RESULT)
    then = read_settings(folder, ("number_of_epochs", "average_checkpoints"))
    return (
        then["number_of_epochs"] >= settings["number_of_epochs"]
        and then["average_checkpoints"] == settings["average_checkpoints"]
    )


def _has_average(settings: Mapping[str, Any]) -> bool:
    """Return whether weights without a checksum are those that training ends with."""
    checkpointer = WholeCheckpointer(settings["save_folder"])
    newest = checkpointer.find_checkpoint()
    if newest is None or not is_end_of_epoch(newest):
        return False
    if newest.meta.get("epoch", 0) < settings["number_of_epochs"]:
        return False
    kept = sum(map(is_end_of_epoch, checkpointer.list_checkpoints()))
    if kept < min(settings["average_checkpoints"], settings["number_of_epochs"]):
        return True  # of those that are left, they would be another average
    average = average_of_last_epochs(
        checkpointer, ENCODER, settings["average_checkpoints"]
    )
    weights = read_weights(settings["output_folder"]).state_dict
    return average.keys() == weights.keys() and all(
        torch.equal(value, weights[name]) for name, value in average.items()
    )


def refuse_without_checkpoints(settings: Mapping[str, Any]) -> None:
    """Refuse to train a finished run from its beginning, in the place of its weights.

    Parameters
    ----------
    settings : mapping
        The training's plain settings.

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


def mark_finished(settings: Mapping[str, Any], *, done: bool) -> None:
    """Say that the weights in output_folder are the run's last, or that they are not.

    Parameters
    ----------
    settings : mapping
        The training's settings.
    done : bool
        Whether they are: then they have a checksum.
    """
    save = settings["save_folder"]
    sums = sums_in(save)
    was = sums.pop(RESULT, None)
    if done:
        path = Path(settings["output_folder"], WEIGHTS)
        sums[RESULT] = digest_of(path, "sha256")
    if done or was is not None:
        write_sums(save, sums)


@contextmanager
def kept_in(settings: Mapping[str, Any], *, trial: bool) -> Iterator[Path]:
    """Give the folder that a training writes hyperparams.yaml and plan.json into.

    Parameters
    ----------
    settings : mapping
        The training's plain settings.
    trial : bool
        Whether nothing is trained: a run that is in output_folder then keeps its own,
        and there are others below it until the trial ends.

    Yields
    ------
    pathlib.Path
        output_folder, or the folder of such a trial.
    """
    folder = Path(settings["output_folder"])
    if not trial or not _has_run(settings):
        yield folder
        return
    where = {"prefix": "trial_", "dir": folder}
    folder = Path(run_on_main(tempfile.mkdtemp, kwargs=where))
    try:
        yield folder
    finally:
        if if_main_process():
            shutil.rmtree(folder, ignore_errors=True)


def _as_published(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select what shapes depend on; null, where published values are meant, is these."""
    chosen = {name: settings[name] for name in _SHAPES if name in settings}
    for name in ("widths", "blocks"):
        if name in chosen and chosen[name] is None:
            chosen[name] = list(getattr(architecture(settings["arch"]), name))
    return chosen


def _has_run(settings: Mapping[str, Any]) -> bool:
    """Say whether output_folder has weights already."""
    begun = any(Path(settings["save_folder"]).glob("CKPT*/CKPT.yaml"))
    return begun or Path(settings["output_folder"], WEIGHTS).is_file()


def write_hyperparams(
    folder: Path, text: str, settings: Mapping[str, Any], prepared: Prepared
) -> None:
    """Write the complete settings, with the numbers that follow from the data.

    Parameters
    ----------
    folder : pathlib.Path
        Where to.
    text : str
        The composed YAML.
    settings : mapping
        Its plain values.
    prepared : Prepared
        What was listed.
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
        # It was said when the text was composed.
        warnings.simplefilter("ignore", OptimizerWarning)
        text = resolve(path, {**settings, **counted})
    write_whole(path, text)
