"""Random draws that depend on a place in the run, not on what ran before."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)

from speechbrain_rev.files import read_json
from speechbrain_rev.processes import gathered, process_rank

logger = logging.getLogger(__name__)


def generator(*place: int | str) -> torch.Generator:
    """Make a random generator for one place of the run.

    Parameters
    ----------
    *place : int or str
        What names the place: the purpose, the seed, then rank and step, or epoch
        and utterance, ...

    Returns
    -------
    torch.Generator
        The same for the same place; unrelated ones for neighbouring places, which
        seeding with a sum would not give.

    Example
    -------
    >>> draw = torch.rand(2, generator=generator("chunk", 1986, 7))
    >>> torch.equal(draw, torch.rand(2, generator=generator("chunk", 1986, 7)))
    True
    """
    # torch.Generator takes signed 64-bit seeds.
    return torch.Generator().manual_seed(_number(place) >> 1)


def draw_below(count: int, *place: int | str) -> int:
    """Draw one number for one place of the run, in a fraction of the time.

    Parameters
    ----------
    count : int
        The number is below; at most 2**32, to which no number is likelier than others
        by more than one in 2**32.
    *place : int or str
        As for ``generator``.

    Returns
    -------
    int

    Example
    -------
    >>> draw_below(1, "chunk", 1986, 7), draw_below(6, "die", 1) < 6
    (0, True)
    """
    return _number(place) % count


def write_step(path: str | Path, step: int, steps_per_epoch: int | None = None) -> None:
    """Write the step by which an object knows its place in the run.

    Parameters
    ----------
    path : str or Path
        A file of a checkpoint.
    step : int
    steps_per_epoch : int or None
        Steps of an epoch, of an object whose place is one among epochs.
    """
    written = {"step": step}
    if steps_per_epoch is not None:
        written["steps_per_epoch"] = steps_per_epoch
    Path(path).write_text(json.dumps(written), encoding="utf-8")


def read_step(
    path: str | Path, kept: str, setting: str, steps_per_epoch: int | None = None
) -> int:
    """Read what ``write_step`` wrote.

    Parameters
    ----------
    path : str or Path
        A file of a checkpoint.
    kept, setting : str
        Whose step it is, and the setting that gives that object, for the error.
    steps_per_epoch : int or None
        Steps of an epoch now. Where there were others, as of another batch, the place
        among the epochs is kept.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        If the file holds no step.

    Example
    -------
    >>> path = getfixture("tmp_path") / "step.ckpt"
    >>> write_step(path, 7)
    >>> read_step(path, "step of a SpeakerAugment", "wav_augment")
    7
    """
    try:
        written = read_json(path)
        step = int(written["step"])
        if steps_per_epoch is None:
            return step
        return step * steps_per_epoch // int(written["steps_per_epoch"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} does not hold the {kept}. Resume with the {setting} that wrote it, "
            "or give another output_folder."
        ) from error


def _number(place: tuple[int | str, ...]) -> int:
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@partial(register_checkpoint_hooks, save_on_main_only=False)
class GlobalRandomState:
    """The random states of torch, CUDA, numpy and Python, saved with checkpoints.

    The data's draws depend on the place in the run alone. This is for all else
    that may draw in a training step, such as dropout. Every process has its own; those
    beyond the processes that saved fold their rank into the first one's.

    Example
    -------
    >>> from speechbrain.utils.checkpoints import Checkpointer
    >>> recoverables = {"random_state": GlobalRandomState()}
    >>> checkpointer = Checkpointer(getfixture("tmp_path"), recoverables)
    >>> _ = checkpointer.save_checkpoint()
    >>> drawn = torch.rand(1)
    >>> _ = checkpointer.recover_if_possible()
    >>> torch.equal(torch.rand(1), drawn)
    True
    """

    def fold_rank(self) -> None:
        """Make each process but the first draw something else than the others from now on.

        To be called once the modules are built, which must be the same everywhere.
        """
        if rank := process_rank():
            draws = generator("process", torch.initial_seed(), rank)
            torch.manual_seed(_seed(63, draws))
            np.random.seed(_seed(32, draws))  # noqa: NPY002
            random.seed(_seed(63, draws))

    @mark_as_saver
    def _save(self, path: str | Path) -> None:
        states = gathered(_state())
        if process_rank() == 0:
            torch.save(states[0] | {"others": states[1:]}, path)

    @mark_as_loader
    def _load(self, path: str | Path, end_of_epoch: bool) -> None:
        del end_of_epoch
        state = torch.load(path, weights_only=True)
        states = [state, *state["others"]]
        rank = process_rank()
        _restore(states[rank] if rank < len(states) else state)
        if rank >= len(states):
            self.fold_rank()


def processes_saved(path: str | Path) -> int:
    """Count the processes whose states ``GlobalRandomState`` saved in a file.

    Parameters
    ----------
    path : str or Path
        The file of a checkpoint.

    Returns
    -------
    int

    Example
    -------
    >>> path = getfixture("tmp_path") / "random_state.ckpt"
    >>> GlobalRandomState()._save(path)
    >>> processes_saved(path)
    1
    """
    return 1 + len(torch.load(path, weights_only=True)["others"])


def _seed(bits: int, draws: torch.Generator) -> int:
    return int(torch.randint(2**63 - 1, (), generator=draws)) >> (63 - bits)


def _state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    # As a list, for only plain values are read back from a file.
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": numpy_state,
        "python": (version, list(words), gauss),
    }


def _restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    else:
        logger.warning(
            f"There were {len(state['cuda'])} GPUs when the checkpoint was made, and are "
            f"{torch.cuda.device_count()} now: their random states begin anew."
        )
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    state["numpy"]["state"]["key"] = key
    np.random.set_state(state["numpy"])  # noqa: NPY002
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
