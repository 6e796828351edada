"""What is kept with checkpoints, and the average of the last ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from speechbrain.utils.checkpoints import (
    Checkpoint,
    Checkpointer,
    average_checkpoints,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)

from speechbrain_rev.lobes.checkpointer import WholeCheckpointer, verify_checkpoint
from speechbrain_rev.lobes.classifier import true_speakers
from speechbrain_rev.lobes.encoder import SpeakerEncoder
from speechbrain_rev.whole_files import check_sum

#: What a checkpointer calls the channels at a time.
CHANNELS = "channels"


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
    >>> from speechbrain_rev.lobes import SpeakerEncoder
    >>> encoder = SpeakerEncoder("revnet57", widths=(4, 4, 4, 4), blocks=(1, 0, 0, 0))
    >>> from speechbrain_rev.lobes.checkpointer import WholeCheckpointer
    >>> checkpointer = WholeCheckpointer(getfixture("tmp_path"))
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
        verify_checkpoint(newest)
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
        If no epoch has been finished, or a checkpoint is damaged.

    Example
    -------
    >>> from speechbrain_rev.lobes.checkpointer import WholeCheckpointer
    >>> model = torch.nn.BatchNorm1d(2)
    >>> checkpointer = WholeCheckpointer(getfixture("tmp_path"), {"model": model})
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
    for checkpoint in last:
        verify_checkpoint(checkpoint)
    load = partial(torch.load, weights_only=True)
    average = average_checkpoints(last, name, load)
    # Averaging turns counters into floats.
    own = load(last[0].paramfiles[name], map_location="cpu")
    return {key: value.to(own[key].dtype) for key, value in average.items()}


def load_finished_run(
    modules: Mapping[str, torch.nn.Module],
    folder: str | Path,
    *,
    narrowed_from: int | None = None,
) -> None:
    """Load encoder and classifier of a finished run.

    Parameters
    ----------
    modules : mapping of str to torch.nn.Module
        "embedding_model" gets the average that the run ended with, "classifier" its
        newest checkpoint.
    folder : str or Path
        The run's output_folder.
    narrowed_from : int, optional
        How many speeds the run's classifier has, where that of `modules` has speed 1.0
        alone and gets the classes of that; by default it gets all classes.

    Raises
    ------
    ValueError
        If the run is not finished, is damaged, or is of another encoder or number of
        classes.
    """
    weights, save = Path(folder, "embedding_model.ckpt"), Path(folder, "save")
    newest = WholeCheckpointer(save).find_checkpoint() if save.is_dir() else None
    if newest is None or not weights.exists():
        raise ValueError(
            f"pretrained_run is {folder}, which lacks embedding_model.ckpt or the "
            "checkpoints in save: give the output_folder of a finished run."
        )
    path = newest.path / "classifier.ckpt"
    check_sum(weights, folder=save)
    verify_checkpoint(Checkpoint(newest.path, {}, {"classifier": path}))
    encoder, classifier = (
        torch.load(file, "cpu", weights_only=True) for file in (weights, path)
    )
    if narrowed_from is not None:
        classifier["weight"] = true_speakers(classifier["weight"], speeds=narrowed_from)
    try:
        modules["embedding_model"].load_state_dict(encoder)
        modules["classifier"].load_state_dict(classifier)
    except RuntimeError as error:
        raise ValueError(
            f"The weights of {folder} do not fit: set arch, widths, blocks, n_mels and "
            f"embedding_dim as in {Path(folder, 'hyperparams.yaml')}. {error}"
        ) from error
