"""Checkpoints that are whole or not there, and the average of the last ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.checkpoints import (
    METAFNAME,
    Checkpoint,
    Checkpointer,
    average_checkpoints,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)

from speechbrain_rev.lobes.encoder import SpeakerEncoder

#: What a checkpointer calls the channels at a time.
CHANNELS = "channels"


class WholeCheckpointer(Checkpointer):
    """SpeechBrain's Checkpointer, safe against being killed while it writes.

    SpeechBrain writes the file that makes a folder a checkpoint before all others: a
    run killed in between leaves one that is newest and cannot be loaded. Here that file
    gets its name when the others are complete.

    Example
    -------
    >>> folder = getfixture("tmp_path")
    >>> checkpointer = WholeCheckpointer(folder, {"model": torch.nn.Linear(2, 2)})
    >>> _ = checkpointer.save_and_keep_only(num_to_keep=2)
    >>> len(checkpointer.list_checkpoints())
    1
    """

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Checkpoint | None:
        """Save all recoverables; see SpeechBrain's method for the arguments.

        Returns
        -------
        Checkpoint or None
            None in other processes than the main one.
        """
        checkpoint = super().save_checkpoint(*args, **kwargs)
        if checkpoint is not None:
            folder = Path(checkpoint.path)
            os.replace(_unfinished(folder / METAFNAME), folder / METAFNAME)
        return checkpoint

    def add_state(self, name: str, recoverable: Any) -> None:
        """Save and load with each checkpoint what is no module but has a state dict.

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
        found = {} if newest is None else newest.paramfiles
        for name in names:
            if name in found:
                state = torch.load(found[name], map_location="cpu", weights_only=True)
                self.recoverables[name].load_state_dict(state)

    def _save_checkpoint_metafile(
        self, fpath: Path, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        return super()._save_checkpoint_metafile(_unfinished(fpath), *args, **kwargs)


@register_checkpoint_hooks
class KeptChannels:
    """The channels at a time that an encoder is trained with, saved with checkpoints.

    They decide in which order numbers are added up, so that a training must go on with
    those that it began with.

    Parameters
    ----------
    encoder : SpeakerEncoder
        The encoder.

    Example
    -------
    >>> from speechbrain_rev.lobes import build_encoder
    >>> encoder = build_encoder("revnet57", widths=(4, 4, 4, 4), blocks=(1, 0, 0, 0))
    >>> checkpointer = Checkpointer(getfixture("tmp_path"))
    >>> kept = KeptChannels(encoder)
    >>> checkpointer.add_recoverable(CHANNELS, kept, optional_load=True)
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
        """Give the encoder the channels of the newest checkpoint, if there is one.

        Parameters
        ----------
        checkpointer : Checkpointer
            Which this was added to as ``CHANNELS``.
        chosen : bool
            Whether a plan chooses the chunk; a fixed one must be that of the checkpoint.

        Returns
        -------
        bool
            Whether there is a checkpoint, with channels or of a time without them.

        Raises
        ------
        ValueError
            If a chunk is fixed and is another.
        """
        newest = checkpointer.find_checkpoint()
        if newest is None:
            return False
        if CHANNELS in newest.paramfiles:
            path = Path(newest.paramfiles[CHANNELS])
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept != self._encoder.channels and not chosen:
                raise ValueError(
                    f"This training began with {kept} channels at a time, and its chunk "
                    f"now makes {self._encoder.channels}: gradients would be added up in "
                    "another order. Give chunk as before, or chunk: auto, which goes on "
                    "as it began."
                )
            self._encoder.set_channels(kept)
        return True

    @mark_as_saver
    def _save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self._encoder.channels), encoding="utf-8")

    @mark_as_loader
    def _load(self, path: str | Path, end_of_epoch: bool) -> None:
        """Find what was restored before the first step, when the chunk was chosen."""
        assert json.loads(Path(path).read_text("utf-8")) == self._encoder.channels


def is_end_of_epoch(checkpoint: Checkpoint) -> bool:
    """Tell the checkpoints of finished epochs from those in between.

    Parameters
    ----------
    checkpoint : Checkpoint

    Returns
    -------
    bool
    """
    return bool(checkpoint.meta["end-of-epoch"])


def average_of_last_epochs(
    checkpointer: Checkpointer, name: str, count: int
) -> dict[str, torch.Tensor]:
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
    dict of str to torch.Tensor
        A state dict, with the types that the module's own has.

    Raises
    ------
    ValueError
        If no epoch has been finished.

    Example
    -------
    >>> model = torch.nn.BatchNorm1d(2)
    >>> checkpointer = Checkpointer(getfixture("tmp_path"), {"model": model})
    >>> for epoch in (1, 2, 3):
    ...     _ = model.weight.data.fill_(epoch)
    ...     _ = checkpointer.save_checkpoint(meta={"epoch": epoch})
    >>> average_of_last_epochs(checkpointer, "model", 2)["weight"]
    tensor([2.5000, 2.5000])
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
    load = partial(torch.load, weights_only=True)
    average = average_checkpoints(last, name, load)
    # Averaging turns counters into floats.
    own = load(last[0].paramfiles[name], map_location="cpu")
    return {key: value.to(own[key].dtype) for key, value in average.items()}


def load_finished_run(
    modules: Mapping[str, torch.nn.Module], folder: str | Path
) -> None:
    """Load encoder and classifier of a finished run.

    Parameters
    ----------
    modules : mapping of str to torch.nn.Module
        "embedding_model" gets the average that the run ended with, "classifier" its
        newest checkpoint.
    folder : str or Path
        The run's output_folder.

    Raises
    ------
    ValueError
        If the run is not finished, or is of another encoder or number of classes.
    """
    weights = Path(folder, "embedding_model.ckpt")
    # Their names are their dates.
    newest = max(Path(folder, "save").glob(f"CKPT*/{METAFNAME}"), default=None)
    if newest is None or not weights.exists():
        raise ValueError(
            f"pretrained_run is {folder}, which lacks embedding_model.ckpt or the "
            "checkpoints in save: give the output_folder of a finished run."
        )
    classifier = newest.with_name("classifier.ckpt")
    try:
        for name, path in (("embedding_model", weights), ("classifier", classifier)):
            modules[name].load_state_dict(torch.load(path, "cpu", weights_only=True))
    except RuntimeError as error:
        raise ValueError(
            f"The weights of {folder} do not fit: set arch, widths, blocks, n_mels and "
            f"embedding_dim as in {Path(folder, 'hyperparams.yaml')}. {error}"
        ) from error


def _save_state(recoverable: Any, path: str | Path) -> None:
    torch.save(recoverable.state_dict(), path)


def _load_state(recoverable: Any, path: str | Path, end_of_epoch: bool) -> None:
    del end_of_epoch
    recoverable.load_state_dict(torch.load(path, weights_only=True))


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")
