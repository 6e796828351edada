"""The folder that a training run leaves behind, read without running any of it.

A run's folder may come from somebody else. HyperPyYAML would build whatever objects its
YAML names, and a pickle whatever it likes; here only a few plain values are read from
the one and only tensors from the other, and only from regular files of that folder.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import yaml

from speechbrain_rev.inference.fingerprint import fingerprint_of
from speechbrain_rev.inference.own_files import open_own, own_file
from speechbrain_rev.inference.plain_yaml import YamlFile, plain_values
from speechbrain_rev.inference.run_objects import RunObjects
from speechbrain_rev.inference.state_dicts import load_tensors
from speechbrain_rev.lobes.checkpointer import (
    BRAIN,
    COUNTER,
    check_known,
    place_of,
)
from speechbrain_rev.locks import writing_alone
from speechbrain_rev.whole_files import check_sum, folder_whole, write_whole

HYPERPARAMS = "hyperparams.yaml"
WEIGHTS = "embedding_model.ckpt"

METAFNAME = "CKPT.yaml"
#: What recipes/VoxCeleb/train.py leaves of its data, and no other script.
PREPARED = "save/prepared.json"

_MAX_NUMBER = 20


@dataclass(frozen=True)
class Weights:
    """The parameters and buffers of a trained encoder.

    Attributes
    ----------
    path : pathlib.Path
        The file they are from.
    fingerprint : str
        What tells one state of training from another, see ``fingerprint_of``.
    state_dict : dict of str to torch.Tensor
        On the CPU.
    """

    path: Path
    fingerprint: str
    state_dict: dict[str, torch.Tensor]


def read_settings(
    folder: str | PathLike[str], names: Sequence[str], *, optional: Sequence[str] = ()
) -> dict[str, Any]:
    r"""Read plain values from a run's ``hyperparams.yaml``, following no tag.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.
    names : sequence of str
        The keys wanted, all at top level; everything else in the file is passed over.
    optional : sequence of str
        Keys that are read too where they are there.

    Returns
    -------
    dict
        A number, string, truth value, None, list or mapping for each name there.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no hyperparams.yaml in it.
    ValueError
        If the file is no YAML mapping, lacks a name, or has a tag where a plain value
        is needed.

    Example
    -------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "hyperparams.yaml")
    ...     _ = path.write_text("arch: revnet57\nmodel: !new:os.system [ls]\n")
    ...     read_settings(folder, ["arch"])
    {'arch': 'revnet57'}
    """
    found = plain_values(Path(folder), HYPERPARAMS, [*names, *optional])
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(
            f"{Path(folder, HYPERPARAMS)} lacks {', '.join(missing)}. Give the "
            "output_folder of a run of recipes/VoxCeleb/train.py. Where another recipe "
            "trained an encoder of this package, add these to the file as plain values."
        )
    return found


def read_objects(folder: str | PathLike[str]) -> RunObjects:
    """Read which objects a run's ``hyperparams.yaml`` describes, building none.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.

    Returns
    -------
    RunObjects
        To ask for the encoder and for what its checkpoints are called.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no hyperparams.yaml in it.
    ValueError
        If the file is no YAML mapping, or too large.
    """
    return RunObjects(YamlFile(Path(folder), HYPERPARAMS))


def read_weights(folder: str | PathLike[str]) -> Weights:
    """Read the weights a run ended with, or those of its newest checkpoint.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run. ``embedding_model.ckpt``, written at
        the end of training, is taken if it is there, else the encoder in the newest of
        the checkpoints, under the name that the Checkpointer of hyperparams.yaml gives it.

    Returns
    -------
    Weights
        The state dict and where it is from.

    Raises
    ------
    FileNotFoundError
        If the folder holds neither.
    ValueError
        If the file holds anything but tensors, they are not finite, or it is not as
        training wrote it.
    """
    folder = Path(folder)
    if (folder / WEIGHTS).exists():
        path = own_file(folder, WEIGHTS)
        check_sum(path, folder=folder / "save")
        return _read_tensors(path)
    objects = _objects(folder)
    name = objects.saved_encoder() if objects else Path(WEIGHTS).stem
    return _read_tensors(_newest_checkpoint(folder, name, objects))


def read_classifier(folder: str | PathLike[str]) -> Weights:
    """Read the classifier of a run's newest checkpoint.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.

    Returns
    -------
    Weights
        The state dict and where it is from.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint with a classifier.
    ValueError
        If the file holds anything but tensors, or they are not finite.
    """
    folder = Path(folder)
    objects = _objects(folder)
    name = objects.saved_classifier() if objects else "classifier"
    return _read_tensors(_newest_checkpoint(folder, name, objects))


def by_our_recipe(folder: str | PathLike[str]) -> bool:
    """Tell whether recipes/VoxCeleb/train.py made a run, which extract.py and score.py read.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.

    Returns
    -------
    bool
        False of runs of SpeechBrain's own script, whatever classes their YAML names.

    Example
    -------
    >>> by_our_recipe(getfixture("tmp_path"))
    False
    """
    return Path(folder, PREPARED).exists()


def trained_epochs(folder: str | PathLike[str], checkpoint: Path) -> int | None:
    """Give the epoch at whose end a checkpoint was written.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.
    checkpoint : pathlib.Path
        The folder of a checkpoint in it.

    Returns
    -------
    int or None
        From 1 on; None if it was written within an epoch, or does not say.
    """
    epoch, ended, *_ = _place(Path(folder), checkpoint.relative_to(folder))
    return epoch if ended else None


def _objects(folder: Path) -> RunObjects | None:
    """Read the objects of a run's YAML, where there is one."""
    return read_objects(folder) if (folder / HYPERPARAMS).exists() else None


def _read_tensors(path: Path) -> Weights:
    state_dict = load_tensors(
        path,
        "Remove it to use a checkpoint before it, train again, or ask whoever made it "
        "for torch.save(encoder.state_dict(), ...).",
    )
    broken = [
        name for name, value in state_dict.items() if not bool(value.isfinite().all())
    ]
    if broken:
        raise ValueError(
            f"{path} holds NaN or infinity in {broken[0]}: this training has diverged. "
            "Train with a lower lr, or remove the checkpoint to use one before it."
        )
    return Weights(path, fingerprint_of(state_dict), state_dict)


def write_run(
    folder: str | PathLike[str],
    settings: Mapping[str, Any],
    state_dict: Mapping[str, torch.Tensor],
) -> None:
    """Write a folder that ``read_settings`` and ``read_weights`` read.

    Parameters
    ----------
    folder : str or path-like
        A new or an empty folder.
    settings : mapping of str to object
        Plain values.
    state_dict : mapping of str to torch.Tensor
        The encoder's.

    Raises
    ------
    ValueError
        If there is something of that name already, or another process writes it.
    OSError
        If it cannot be written; then nothing of it stays.
    """
    # "." and ".." have no name that one beside them could begin with.
    folder = Path(folder).resolve()
    # Which makes the folders above, and deletes what one that was killed at its end left.
    with writing_alone(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"{folder} is there already, and nothing is written over it. Give the "
                "name of a new folder."
            )
        with folder_whole(folder) as part:
            write_whole(part / WEIGHTS, saved_bytes(state_dict))
            text = yaml.safe_dump(dict(settings), sort_keys=False)
            write_whole(part / HYPERPARAMS, text)


def saved_bytes(state_dict: Mapping[str, torch.Tensor]) -> bytes:
    """Give what ``torch.save`` writes of a state dict."""
    content = io.BytesIO()
    torch.save(dict(state_dict), content)
    return content.getvalue()


def _newest_checkpoint(folder: Path, stem: str, objects: RunObjects | None) -> Path:
    """Find a file in the newest of the checkpoints that have it."""
    name, place = f"{stem}.ckpt", objects.checkpoints() if objects else Path("save")
    found = [
        meta.parent.relative_to(folder)
        for meta in (folder / place).glob(f"CKPT*/{METAFNAME}")
        if (meta.parent / name).exists()
    ]
    if not found:
        raise FileNotFoundError(
            f"{folder} has neither {name} nor a checkpoint with it in {place}: has this run "
            "been trained? Give its output_folder once the first checkpoint is there "
            "(ckpt_interval_steps, or the end of an epoch)."
        )
    newest = max(found, key=lambda one: (_place(folder, one), one))
    path = own_file(folder, newest / name)
    check_known(folder / newest, [name])
    return path


def _place(folder: Path, checkpoint: Path) -> tuple[int, bool, int, float]:
    """Tell how far a checkpoint is; SpeechBrain's loader of CKPT.yaml builds objects."""
    meta, counter, brain = (checkpoint / name for name in (METAFNAME, COUNTER, BRAIN))
    check_known(folder / checkpoint, (METAFNAME, COUNTER, BRAIN))
    try:
        return place_of(
            plain_values(folder, meta, ["unixtime", "end-of-epoch"]),
            _text(folder, counter) if (folder / counter).exists() else None,
            plain_values(folder, brain, ["step"]) if (folder / brain).exists() else {},
        )
    except ValueError as error:
        raise ValueError(
            f"{folder / checkpoint} does not say its epoch and step ({error}), so that the "
            "newest checkpoint is not known. Remove that checkpoint to use another."
        ) from error


def _text(folder: Path, name: Path) -> str:
    """Read a file of one number."""
    with open_own(folder, name) as file:
        return file.read(_MAX_NUMBER).decode()
