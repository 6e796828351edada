"""Checkpoints that are whole or not there, verified before they are loaded; their average."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from speechbrain.utils.checkpoints import (
    CKPT_PREFIX,
    METAFNAME,
    PARAMFILE_EXT,
    Checkpoint,
    Checkpointer,
    average_checkpoints,
    ckpt_recency,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from speechbrain.utils.distributed import ddp_barrier, if_main_process

from speechbrain_rev.files import (
    SUMS,
    digest_of,
    plain_yaml,
    read_json,
    read_limited,
    sums_in,
    write_sums,
)
from speechbrain_rev.lobes.encoder import SpeakerEncoder
from speechbrain_rev.processes import gathered, process_rank

logger = logging.getLogger(__name__)

#: Files of a checkpoint with its epoch and its step, as SpeechBrain writes them.
COUNTER, BRAIN = f"counter{PARAMFILE_EXT}", f"brain{PARAMFILE_EXT}"
#: Name in a checkpointer of the channels at a time and the memory format.
CHANNELS = "channels"
# Files of a checkpoint with its epoch and its step are smaller.
_MOST_BYTES = 100_000
# When a disk is full, torch's writer raises a RuntimeError with one of these words.
_TORCH_CANNOT_WRITE = ("inline_container", "iostream", "PytorchStreamWriter")
# Key in a file of the states of all processes.
_EACH = "processes"


class WholeCheckpointer(Checkpointer):
    """SpeechBrain's Checkpointer, safe against being killed while it writes.

    SpeechBrain writes the file that makes a folder a checkpoint before all others: a
    run killed in between leaves one that is newest and cannot be loaded. Here that file
    gets its name when the others are complete and on the disk, and loses it before the
    others are deleted. Checksums are written with them and compared before anything is
    loaded.

    The newest checkpoint is the one of the highest epoch and step (``place_of``).

    Example
    -------
    >>> folder = getfixture("tmp_path")
    >>> checkpointer = WholeCheckpointer(folder, {"model": torch.nn.Linear(2, 2)})
    >>> _ = checkpointer.save_and_keep_only(num_to_keep=2)
    >>> len(checkpointer.list_checkpoints())
    1
    """

    def save_checkpoint(
        self,
        meta: Mapping[str, Any] | None = None,
        end_of_epoch: bool = True,
        name: str | None = None,
        verbosity: int = logging.INFO,
    ) -> Checkpoint | None:
        """Save all recoverables; see SpeechBrain's method for the arguments.

        Returns
        -------
        Checkpoint or None
            None in other processes than the main one.

        Raises
        ------
        OSError
            If it cannot be written: then nothing of it stays, and earlier checkpoints
            are as they were.
        ValueError
            If there is a checkpoint of the name.
        """
        self._clear_unfinished()
        if name is not None and self._custom_checkpoint_dirpath(name).exists():
            raise ValueError(
                f"There is a checkpoint {self._custom_checkpoint_dirpath(name)}. Give "
                "another name, or delete it first."
            )
        try:
            checkpoint = super().save_checkpoint(
                dict(meta or {}), end_of_epoch, name, verbosity
            )
            # Hooks of other processes may write to it, too.
            ddp_barrier()
            if checkpoint is not None:
                _finish(Path(checkpoint.path))
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not any(
                words in str(error) for words in _TORCH_CANNOT_WRITE
            ):
                raise
            _let_go(error)
            with contextlib.suppress(OSError):
                self._clear_unfinished()
            newest = self.find_checkpoint()
            reason = getattr(error, "strerror", None) or error
            kept = "there is none" if newest is None else f"the newest is {newest.path}"
            raise OSError(
                f"No checkpoint could be written to {self.checkpoints_dir} ({reason}). "
                f"Earlier ones are as they were: {kept}. Free some space there, "
                "and give the same command again to go on."
            ) from error
        return checkpoint

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint whose files are as they were written.

        Raises
        ------
        ValueError
            If they are not; it names the first that differs.
        """
        verify_checkpoint(checkpoint)
        super().load_checkpoint(checkpoint)

    def find_checkpoints(
        self,
        importance_key: Callable[[Checkpoint], Any] | None = None,
        max_key: str | None = None,
        min_key: str | None = None,
        ckpt_predicate: Callable[[Checkpoint], bool] | None = None,
        max_num_checkpoints: int | None = None,
    ) -> list[Checkpoint]:
        """Find what SpeechBrain's method of this name would, the newest by their place.

        Returns
        -------
        list of Checkpoint
            The most important first.

        Raises
        ------
        ValueError
            As ``list_checkpoints``.
        """
        if importance_key in (None, ckpt_recency) and not (max_key or min_key):
            importance_key = _place
        checkpoints: list[Checkpoint] = super().find_checkpoints(
            importance_key, max_key, min_key, ckpt_predicate, max_num_checkpoints
        )
        return checkpoints

    def list_checkpoints(self) -> list[Checkpoint]:
        """List all checkpoints.

        Raises
        ------
        ValueError
            If a file with the epoch and step of a checkpoint is damaged; the message
            names the folder.
        """
        for path in self.checkpoints_dir.glob(f"{CKPT_PREFIX}*/{METAFNAME}"):
            try:
                meta = yaml.safe_load(path.read_bytes())
            except yaml.YAMLError:
                meta = None
            if not isinstance(meta, dict):
                raise ValueError(_untrusted(path.parent, f"{METAFNAME} is damaged"))
            # They choose which is loaded, whose files are then compared as a whole.
            check_known(path.parent, (METAFNAME, COUNTER, BRAIN))
        checkpoints: list[Checkpoint] = super().list_checkpoints()
        return checkpoints

    def _clear_unfinished(self) -> None:
        """Delete what a process that was killed left of a checkpoint."""
        if if_main_process():
            clear_unfinished_checkpoints(self.checkpoints_dir)

    def delete_checkpoints(
        self,
        *,
        num_to_keep: int = 1,
        min_keys: Sequence[str] | None = None,
        max_keys: Sequence[str] | None = None,
        importance_keys: Sequence[Any] = (ckpt_recency,),
        ckpt_predicate: Callable[[Checkpoint], bool] | None = None,
        verbosity: int = logging.INFO,
    ) -> None:
        """Delete what SpeechBrain's method of this name would, with these arguments.

        A folder is no checkpoint any more before the first of its files is gone. What a
        process that was killed left of others is deleted as well.
        """
        self._clear_unfinished()
        keys: list[dict[str, Any]] = [{"min_key": key} for key in min_keys or ()]
        keys += [{"max_key": key} for key in max_keys or ()]
        keys += [{"importance_key": key} for key in importance_keys]
        candidates: set[Path] = set()
        kept: set[Path] = set()
        for key in keys:
            listed = self.find_checkpoints(ckpt_predicate=ckpt_predicate, **key)
            candidates.update(checkpoint.path for checkpoint in listed)
            kept.update(checkpoint.path for checkpoint in listed[:num_to_keep])
        ddp_barrier()
        if if_main_process():
            for path in sorted(candidates - kept):
                os.replace(path / METAFNAME, _unfinished(path / METAFNAME))
                shutil.rmtree(path)
                logger.log(verbosity, f"Deleted checkpoint in {path}")
        ddp_barrier()

    def add_state(self, name: str, recoverable: Any) -> None:
        """Save and load with each checkpoint what is no module but has a state dict.

        Every process has its own.

        Parameters
        ----------
        name : str
            Of the file.
        recoverable : object
            With ``state_dict`` and ``load_state_dict``.
        """
        self.add_recoverable(name, recoverable, _load_state, _save_state)

    def restore_states(self, *names: str) -> None:
        """Load some of what the newest checkpoint holds, if there is one.

        Parameters
        ----------
        *names : str
            Of recoverables with a state dict. What the checkpoint lacks stays as it is.
        """
        newest = self.find_checkpoint()
        if newest is None:
            return
        verify_checkpoint(newest)
        for name in names:
            if name in newest.paramfiles:
                path = newest.paramfiles[name]
                state = torch.load(path, map_location="cpu", weights_only=True)
                self.recoverables[name].load_state_dict(_own_state(state))

    def _save_checkpoint_metafile(
        self, fpath: Path, meta_to_include: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        return super()._save_checkpoint_metafile(
            _unfinished(fpath), meta_to_include, *args, **kwargs
        )


def verify_checkpoint(checkpoint: Checkpoint) -> None:
    """Compare a checkpoint's files with the checksums that were written with them.

    Parameters
    ----------
    checkpoint : Checkpoint
        One that ``WholeCheckpointer`` wrote.

    Raises
    ------
    ValueError
        If a file is missing or differs.

    Warns
    -----
    UserWarning
        If the checkpoint has no checksums.

    Example
    -------
    >>> model = torch.nn.Linear(2, 2)
    >>> checkpointer = WholeCheckpointer(getfixture("tmp_path"), {"model": model})
    >>> verify_checkpoint(checkpointer.save_checkpoint())
    """
    folder = Path(checkpoint.path)
    # SpeechBrain's own Checkpointer writes none.
    if not (folder / SUMS).is_file():
        warnings.warn(
            f"{folder} has no {SUMS}: whether its files are as they were written is "
            "not known.",
            stacklevel=2,
        )
        return
    expected = {
        METAFNAME,
        *(Path(path).name for path in checkpoint.paramfiles.values()),
    }
    _compare(folder, expected | sums_in(folder).keys())


def check_known(folder: Path, names: Iterable[str]) -> None:
    """Compare some files of a checkpoint with the checksums that it has of them.

    Parameters
    ----------
    folder : Path
        The checkpoint's.
    names : iterable of str
        The files; what has no checksum, as of SpeechBrain's own Checkpointer, is taken as
        it is.

    Raises
    ------
    ValueError
        If one that has is missing or differs.

    Example
    -------
    >>> check_known(getfixture("tmp_path"), ["CKPT.yaml"])
    """
    _compare(folder, set(names) & sums_in(folder).keys())


def clear_unfinished_checkpoints(folder: Path) -> None:
    """Delete what processes that were killed left of checkpoints.

    Parameters
    ----------
    folder : Path
        Where checkpoints are.

    Example
    -------
    >>> left = getfixture("tmp_path") / "CKPT+2026-01-01+00-00-00+00"
    >>> left.mkdir()
    >>> clear_unfinished_checkpoints(left.parent)
    >>> left.exists()
    False
    """
    for path in folder.glob(f"{CKPT_PREFIX}+*"):
        if path.is_dir() and not (path / METAFNAME).exists():
            shutil.rmtree(path)


def place_of(
    meta: Mapping[str, Any], counter: str | None, brain: Mapping[str, Any]
) -> tuple[int, bool, int, float]:
    """Place a checkpoint in its training run, so that the latest is the largest.

    Parameters
    ----------
    meta : mapping
        What ``CKPT.yaml`` holds.
    counter : str or None
        The content of ``counter.ckpt``, SpeechBrain's of epochs; None if there is none.
    brain : mapping
        What ``brain.ckpt`` holds; empty if there is none.

    Returns
    -------
    epoch : int
        The epoch, 0 if it is not known.
    ended : bool
        Whether it is at its end.
    step : int
        The step in the epoch.
    unixtime : float
        SpeechBrain's order, for checkpoints without a counter.

    Raises
    ------
    ValueError, TypeError
        If one of these is no number.

    Example
    -------
    >>> early = place_of({"end-of-epoch": True, "unixtime": 9.5}, "3", {"step": 0})
    >>> late = place_of({"end-of-epoch": False, "unixtime": 7.5}, "4", {"step": 20})
    >>> early, late > early
    ((3, True, 0, 9.5), True)
    """
    unixtime = float(meta.get("unixtime", 0.0))
    if counter is None:
        return 0, False, 0, unixtime
    step = int(brain.get("step", 0))
    return int(counter), bool(meta.get("end-of-epoch")), step, unixtime


def place_in_run(folder: Path) -> tuple[int, bool, int, float]:
    """Place a checkpoint as ``place_of`` does, by what its files hold.

    Parameters
    ----------
    folder : Path
        The checkpoint's.

    Returns
    -------
    tuple
        As ``place_of``.

    Raises
    ------
    ValueError
        If the files do not give it.
    """
    try:
        contents = {
            name: read_limited(folder / name, _MOST_BYTES)
            for name in (METAFNAME, COUNTER, BRAIN)
            if (folder / name).is_file()
        }
        meta, brain = (
            plain_yaml(contents.get(name) or b"{}") for name in (METAFNAME, BRAIN)
        )
        counter = contents[COUNTER].decode() if COUNTER in contents else None
        return place_of(meta, counter, brain)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        why = f"it does not say its epoch and step ({error})"
        raise ValueError(_untrusted(folder, why)) from error


def run_in(checkpoint: Path) -> str | None:
    """Read which run has written a checkpoint.

    Parameters
    ----------
    checkpoint : Path
        Its folder.

    Returns
    -------
    str or None
        As its record and all its checkpoints name it; None where it does not say.

    Raises
    ------
    ValueError
        If its file is not what training writes.
    """
    if not (checkpoint / BRAIN).is_file():
        return None
    brain = plain_yaml(read_limited(checkpoint / BRAIN, _MOST_BYTES))
    return None if brain.get("run") is None else str(brain["run"])


def _place(checkpoint: Checkpoint) -> tuple[int, bool, int, float]:
    return place_in_run(Path(checkpoint.path))


def _compare(folder: Path, names: Iterable[str]) -> None:
    """Compare files of a checkpoint with the checksums that it has."""
    written = sums_in(folder)
    for name in sorted(names):
        path = folder / name
        if not path.is_file() or digest_of(path) != written.get(name):
            what = "is damaged" if path.is_file() else "is missing"
            raise ValueError(_untrusted(folder, f"{name} {what}"))


def _untrusted(folder: Path, why: str) -> str:
    return (
        f"The checkpoint {folder} cannot be trusted: {why}. Delete that folder to go on "
        f"from the checkpoint before it: rm -r '{folder}'"
    )


def _save_state(recoverable: Any, path: str | Path) -> None:
    states = gathered(recoverable.state_dict())
    if process_rank() == 0:
        torch.save({_EACH: states}, path)


def _load_state(recoverable: Any, path: str | Path, end_of_epoch: bool) -> None:
    del end_of_epoch
    recoverable.load_state_dict(_own_state(torch.load(path, weights_only=True)))


def _own_state(stored: Any) -> Any:
    """Choose what this process saved, or the first one, of states of all processes.

    A module's state is one for all processes.
    """
    if not isinstance(stored, dict) or set(stored) != {_EACH}:
        return stored
    states, rank = stored[_EACH], process_rank()
    return states[rank if rank < len(states) else 0]


def _finish(folder: Path) -> None:
    """Make a checkpoint of a folder whose files are complete."""
    meta = folder / METAFNAME
    names = {path: path.name for path in sorted(folder.iterdir()) if path.is_file()}
    names[_unfinished(meta)] = METAFNAME
    for path in names:
        _to_disk(path)
    write_sums(folder, {name: digest_of(path) for path, name in names.items()})
    os.replace(_unfinished(meta), meta)
    _to_disk(folder)
    _to_disk(folder.parent)


def _let_go(error: BaseException | None) -> None:
    """Close files that the frames of an error hold open, for they hold space on the disk."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _to_disk(path: Path) -> None:
    """Wait until what was written would outlive a loss of power."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


@register_checkpoint_hooks
class KeptArithmetic:
    """Channels at a time and memory format of an encoder, saved with checkpoints.

    They decide in which order numbers are added up and how they are rounded. A run must
    be resumed with those that it began with.

    Parameters
    ----------
    encoder : SpeakerEncoder
        The encoder.

    Example
    -------
    >>> encoder = SpeakerEncoder("revnet46", widths=(4, 4, 4, 4), blocks=(1, 0, 0, 0))
    >>> checkpointer = WholeCheckpointer(getfixture("tmp_path"))
    >>> kept = KeptArithmetic(encoder)
    >>> checkpointer.add_recoverable(CHANNELS, kept)
    >>> kept.restore(checkpointer, chosen=True)
    False
    >>> encoder.set_channels([2, 2, 2, 2])
    >>> _ = checkpointer.save_checkpoint()
    >>> encoder.set_channels([4, 4, 4, 4])
    >>> kept.restore(checkpointer, chosen=True), encoder.channels
    (True, [2, 2, 2, 2])
    """

    def __init__(self, encoder: SpeakerEncoder) -> None:
        self._encoder = encoder

    def restore(self, checkpointer: Checkpointer, *, chosen: bool) -> bool:
        """Give the encoder the channels of the newest checkpoint; compare the memory format.

        Parameters
        ----------
        checkpointer : Checkpointer
            Which this was added to as ``CHANNELS``.
        chosen : bool
            Whether a plan chooses the chunk; a fixed one must be that of the checkpoint.

        Returns
        -------
        bool
            Whether there is a checkpoint.

        Raises
        ------
        ValueError
            If a chunk is fixed and is another, or the memory format is; if the checkpoint
            has no channels.
        """
        newest = checkpointer.find_checkpoint()
        if newest is None:
            return False
        verify_checkpoint(newest)
        _compare(Path(newest.path), [f"{CHANNELS}{PARAMFILE_EXT}"])
        kept = _read_arithmetic(newest.paramfiles[CHANNELS])
        layout = self._encoder.memory_format
        if kept["memory_format"] != layout:
            raise ValueError(
                f"This run began with memory_format: {kept['memory_format']}, and now it is "
                f"{layout}: gradients would be added up in another order. Give "
                f"memory_format={kept['memory_format']}, or another output_folder."
            )
        channels = kept["channels"]
        if channels != self._encoder.channels and not chosen:
            raise ValueError(
                f"This run began with {channels} channels at a time, and its chunk "
                f"now makes {self._encoder.channels}: gradients would be added up in "
                "another order. Give chunk as before, or chunk: auto, which goes on "
                "as it began."
            )
        self._encoder.set_channels(channels)
        return True

    def _arithmetic(self) -> dict[str, Any]:
        return {
            "channels": self._encoder.channels,
            "memory_format": self._encoder.memory_format,
        }

    @mark_as_saver
    def _save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self._arithmetic()), encoding="utf-8")

    @mark_as_loader
    def _load(self, path: str | Path, end_of_epoch: bool) -> None:
        """Check that the channels were restored before the first step."""
        assert _read_arithmetic(path) == self._arithmetic()


def _read_arithmetic(path: str | Path) -> dict[str, Any]:
    kept: dict[str, Any] = read_json(path)
    return kept


def is_end_of_epoch(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of a finished epoch.

    Parameters
    ----------
    checkpoint : Checkpoint

    Returns
    -------
    bool
    """
    return bool(checkpoint.meta["end-of-epoch"])


def kept_epochs(averaged: int) -> int:
    """Return how many of the last epochs keep their checkpoints."""
    return max(10, averaged)


def average_of_last_epochs(
    checkpointer: Checkpointer, name: str, count: int
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Average a module over the checkpoints of the last epochs.

    Parameters
    ----------
    checkpointer : Checkpointer
        Its checkpoints of epochs' ends hold the entry "epoch".
    name : str
        The module's name in the checkpointer.
    count : int
        How many checkpoints; fewer are averaged where fewer epochs were trained.

    Returns
    -------
    average : dict of str to torch.Tensor
        A state dict, with the types that the module's own has.
    epochs : list of int
        Those that were averaged, in their order.

    Raises
    ------
    ValueError
        If no epoch has been finished, or a checkpoint is damaged.

    Example
    -------
    >>> model = torch.nn.BatchNorm1d(2)
    >>> checkpointer = WholeCheckpointer(getfixture("tmp_path"), {"model": model})
    >>> for epoch in (1, 2, 3):
    ...     _ = model.weight.data.fill_(epoch)
    ...     _ = checkpointer.save_checkpoint(meta={"epoch": epoch})
    >>> average, epochs = average_of_last_epochs(checkpointer, "model", 2)
    >>> average["weight"], epochs
    (tensor([2.5000, 2.5000]), [2, 3])
    """
    last = checkpointer.find_checkpoints(
        importance_key=lambda checkpoint: checkpoint.meta["epoch"],
        ckpt_predicate=is_end_of_epoch,
        max_num_checkpoints=count,
    )
    if not last:
        raise ValueError(
            f"{checkpointer.checkpoints_dir} has no checkpoint of a finished epoch."
        )
    for checkpoint in last:
        verify_checkpoint(checkpoint)
    load = partial(torch.load, weights_only=True)
    average = average_checkpoints(last, name, load)
    # Averaging turns counters into floats.
    own = load(last[0].paramfiles[name], map_location="cpu")
    typed = {key: value.to(own[key].dtype) for key, value in average.items()}
    return typed, sorted(checkpoint.meta["epoch"] for checkpoint in last)
