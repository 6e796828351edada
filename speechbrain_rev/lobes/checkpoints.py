"""Checkpoints that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from speechbrain.utils.checkpoints import METAFNAME, Checkpoint, Checkpointer


class WholeCheckpointer(Checkpointer):
    """SpeechBrain's Checkpointer, safe against being killed while it writes.

    SpeechBrain writes the file that makes a folder a checkpoint before all others: a
    run killed in between leaves one that is newest and cannot be loaded. Here that file
    gets its name when the others are complete.

    Example
    -------
    >>> import torch
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

    def _save_checkpoint_metafile(
        self, fpath: Path, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        return super()._save_checkpoint_metafile(_unfinished(fpath), *args, **kwargs)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")
