"""Bars of long work on a terminal or in a notebook; in a log, a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing import parent_process
from typing import Any

from tqdm import tqdm

REDRAW_SECONDS = 0.1
LINE_SECONDS = 60.0
#: Before work of unknown length shows a bar.
LONG_SECONDS = 5.0
# Between two looks of a bar that is kept alive on a terminal.
_ALIVE_SECONDS = 1.0


def progress_bar(
    desc: str,
    iterable: Iterable[Any] | None = None,
    *,
    unit: str,
    total: int | None = None,
    done: int = 0,
    delay: float = 0.0,
    leave: bool = False,
    off: bool = False,
    redraw_seconds: float = REDRAW_SECONDS,
    line_seconds: float = LINE_SECONDS,
) -> tqdm[Any]:
    """Make a bar, which the first process alone shows on stderr.

    Parameters
    ----------
    desc : str
        The text before the bar.
    iterable : iterable or None
        What is counted as it is iterated over; None to call ``update``.
    unit : str
        Of what is counted, in a word.
    total : int or None
        How many there are; None to count the iterable, or where nobody knows.
    done : int
        How many of them were done before.
    delay : float
        Seconds before the bar shows on a terminal.
    leave : bool
        Whether the bar stays on a terminal at the end.
    off : bool
        Whether to show none.
    redraw_seconds : float
        Between two looks of it on a terminal.
    line_seconds : float
        Between two lines of a log, and before the first.

    Returns
    -------
    tqdm
        The bar.

    Examples
    --------
    >>> sum(progress_bar("adding", [1, 2, 3], unit="number"))
    6
    """
    terminal = _draws_anew()
    own: dict[str, Any] = {"mininterval": redraw_seconds, "delay": delay}
    if not terminal:
        own = {"mininterval": line_seconds, "delay": line_seconds, "file": _Lines()}
        # A log has no cursor to move below the bars that are open.
        own["position"] = 0
    # torchrun numbers its processes; those that share work have a parent.
    is_first = os.environ.get("RANK", "0") == "0" and not parent_process()
    return tqdm(
        iterable,
        desc,
        total,
        unit=unit,
        initial=done,
        # The clock is read at every step: their lengths differ.
        miniters=1,
        leave=leave and terminal,
        disable=off or not is_first,
        **own,
    )


def _draws_anew() -> bool:
    """Whether a line can be drawn anew, as by a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextlib.contextmanager
def kept_alive(bar: tqdm[Any]) -> Iterator[tqdm[Any]]:
    """Let a bar whose steps take minutes show that time passes between them.

    Parameters
    ----------
    bar : tqdm
        As ``progress_bar`` makes it. After ``LONG_SECONDS`` it is shown, and then each
        second on a terminal or as a line a minute in a log.

    Yields
    ------
    tqdm
        The bar, which is closed at the end.

    Examples
    --------
    >>> with kept_alive(progress_bar("planning", unit="encoder", total=2)) as bar:
    ...     bar.update(2)
    """
    done = threading.Event()

    def show() -> None:
        seconds = LONG_SECONDS
        while not done.wait(seconds):
            bar.refresh()
            # Steps show it as if they had shown it themselves.
            bar.last_print_t = time.time()
            seconds = _ALIVE_SECONDS if _draws_anew() else LINE_SECONDS

    thread = threading.Thread(target=show, daemon=True)
    if not bar.disable:
        thread.start()
    try:
        yield bar
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
        bar.close()


class _Lines:
    """Writes the bar of a terminal as lines of a log."""

    def write(self, text: str) -> None:
        if text := text.strip():
            sys.stderr.write(f"{text}\n")

    def flush(self) -> None:
        sys.stderr.flush()
