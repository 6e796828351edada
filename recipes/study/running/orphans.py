"""No training outlives the process that began it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

PARENT = "STUDY_PARENT"
_PR_SET_PDEATHSIG = 1


def parent_told() -> dict[str, str]:
    """Give the variable of the environment that tells children who began them."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Have this process ended when the one that began it ends, however that ends.

    Linux does so; elsewhere a process whose parent was killed goes on, and the lock of
    its folder keeps a second one from it. One that nobody told of a parent goes on.
    """
    if PARENT not in os.environ or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(os.environ[PARENT]):
        # It had ended before that was asked.
        sys.exit("The study that began this training has ended.")


def end_in_order() -> None:
    """Have SIGTERM raise SystemExit, so that what this process began is ended first."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
