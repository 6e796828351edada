"""The optimizer states of a training run, converted between 8 and 32 bits."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from speechbrain_rev.inference.run_folder import in_newest, read_objects, saved_bytes
from speechbrain_rev.inference.untrusted import REFUSED, in_words
from speechbrain_rev.lobes.checkpointer import (
    CHANNELS,
    check_known,
    clear_unfinished_checkpoints,
    rewrite_checkpoint,
)
from speechbrain_rev.locks import LOCK, locked
from speechbrain_rev.optim import build_optimizer, convert_checkpoint
from speechbrain_rev.optim.checkpoint import placeholders
from speechbrain_rev.whole_files import sums_in


@dataclass(frozen=True)
class ConvertedStates:
    """A checkpoint whose optimizer states have the bits that were asked for.

    Attributes
    ----------
    checkpoint : pathlib.Path
        Its folder.
    name : str
        Of the optimizer.
    were : int
        The bits that its states had.
    """

    checkpoint: Path
    name: str
    were: int


def convert_states(folder: str | PathLike[str], bits: int) -> ConvertedStates:
    """Convert the optimizer states of a run's newest checkpoint, from which it goes on.

    Nothing in the folder is executed. The checkpoint is replaced when the new one is
    whole, see ``rewrite_checkpoint``; earlier checkpoints stay as they are.

    Parameters
    ----------
    folder : str or path-like
        The ``output_folder`` of a training run.
    bits : {8, 32}
        Which the states shall have, see ``convert_checkpoint``; if they have them
        already, nothing is written.

    Returns
    -------
    ConvertedStates
        What was done.

    Raises
    ------
    FileNotFoundError
        If the folder, its hyperparams.yaml or a checkpoint is missing.
    ValueError
        If another process writes into the folder, the checkpoint is damaged, its
        optimizer is none of this package, or it cannot have such bits.
    OSError
        If it cannot be written: then the checkpoint is as it was.
    """
    folder = Path(folder)
    objects = read_objects(folder)
    with locked(folder / LOCK, str(folder), "writing into", instead="run"):
        clear_unfinished_checkpoints(folder / objects.checkpoints())
        path = in_newest(folder, objects.checkpoints(), "optimizer.ckpt")
        check_known(path.parent, sums_in(path.parent))
        kept = path.parent / f"{CHANNELS}.ckpt"
        with _of_optimizer(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
            layout = json.loads(kept.read_bytes()) if kept.is_file() else None
            last = isinstance(layout, dict) and layout["memory_format"] != "contiguous"
            name, were, groups = placeholders(state, channels_last=last)
            if were != bits:
                form = objects.state_form() if bits == 8 else {}
                params = [{"params": group} for group in groups]
                new = build_optimizer(params, name=name, bits=bits, lr=1.0, **form)
                converted = saved_bytes(convert_checkpoint(state, new))
        if were != bits:
            rewrite_checkpoint(path.parent, path.name, converted)
    return ConvertedStates(path.parent, name, were)


@contextlib.contextmanager
def _of_optimizer(path: Path) -> Iterator[None]:
    """Name the file whose states cannot be read or converted."""
    try:
        yield
    except pickle.UnpicklingError as error:
        # Its own message advises to load it all the same.
        raise ValueError(
            f"{path} is not read: it is damaged or holds more than plain tensors."
        ) from error
    except REFUSED as error:
        raise ValueError(f"{path} is not converted: {in_words(error)}") from error
