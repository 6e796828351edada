"""What a training run shows while it runs: log.txt, bar, line of an epoch, forecast."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from speechbrain_rev.bars import progress_bar
from speechbrain_rev.sizes import GIB

# Memory is measured when the bar is drawn, and epochs take hours.
REDRAW_SECONDS, LINE_SECONDS = 1.0, 300.0
# Two quantities, never under one name: which is logged depends on the device.
PEAKS = {
    "cuda_allocated_peak_bytes": "CUDA allocated peak GiB",
    "process_resident_peak_bytes": "process resident peak GiB",
}
BAR_PEAKS = {
    "cuda_allocated_peak_bytes": "allocated peak",
    "process_resident_peak_bytes": "resident peak",
}

#: SpeechBrain's loggers, and how lines begin there that ask nothing of the reader.
_ROUTINE = {
    "speechbrain.core": ("Run option ",),
    "speechbrain.utils.quirks": ("Applied quirks ", "Excluded quirks "),
    "speechbrain.utils.train_logger": ("torchvision is not available",),
}


def keep_routine_off_terminal() -> None:
    """Let lines of SpeechBrain's that ask nothing of the reader be in log.txt alone."""
    for name in _ROUTINE:
        logging.getLogger(name).addFilter(_as_detail)


def _as_detail(record: logging.LogRecord) -> bool:
    """Make a routine line one of debugging, which terminals are not shown."""
    if record.getMessage().startswith(_ROUTINE[record.name]):
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return True


@contextlib.contextmanager
def beginning_log(folder: str | Path) -> Iterator[None]:
    """Let ``create_experiment_directory`` begin a log that misses lines on a full disk.

    Parameters
    ----------
    folder : str or Path
        The output_folder, which it makes.

    Raises
    ------
    OSError
        If nothing can be written there.
    """
    # Some of the first lines are lost; the next line reports it.
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    except ValueError as error:
        # logging wraps the system's error about log.txt in one.
        if not isinstance(error.__cause__, OSError):
            raise
        raise OSError(
            f"{Path(folder, 'log.txt')} cannot be written ({error.__cause__.strerror}). "
            "Free some space, or give another output_folder."
        ) from error
    finally:
        logging.raiseExceptions = before
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                _allow_lost_lines(handler)


def _allow_lost_lines(handler: logging.StreamHandler[Any]) -> None:
    """Let a log miss lines that a full disk does not take, and print that once."""
    place = getattr(handler, "baseFilename", "stdout")
    reported: list[OSError] = []

    def handle_error(record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            type(handler).handleError(handler, record)
        elif not reported:
            reported.append(error)
            sys.stderr.write(
                f"{place} cannot be written ({error.strerror}): it lacks lines.\n"
            )

    handler.handleError = handle_error  # type: ignore[method-assign]


def log_line(stats: dict[str, Any]) -> dict[str, int | str]:
    """Select the figures of an epoch's log line, in units for reading.

    Parameters
    ----------
    stats : dict
        As in a line of train_log.jsonl.

    Returns
    -------
    dict
        Counts, and texts of other numbers, by the words to print.
    """
    line: dict[str, int | str] = {
        "epoch": stats["epoch"],
        "loss": _plain(stats["train_loss"]),
        "accuracy %": _plain(stats["train_accuracy_percent"]),
        "lr": f"{stats['lr']:.3g}",
        "margin": _plain(stats["margin"]),
    }
    counts = ("skipped_steps", "unread_files", "unread_validation_files")
    line |= {n.replace("_", " "): stats[n] for n in counts if stats.get(n)}
    if "valid_eer_percent" in stats:
        line["valid EER %"] = _plain(stats["valid_eer_percent"])
    if "compression_ratio" in stats:
        line["activations compressed"] = _plain(stats["compression_ratio"])
    if "resumed_after_step" in stats:
        line["resumed after step"] = stats["resumed_after_step"]
    line["minutes"] = _plain(stats["minutes"])
    rate = stats["utterances_per_second"]
    line["utt/s"] = round(rate) if rate >= 10 else _plain(rate)
    line["waited for data %"] = _plain(stats["data_wait_percent"])
    return line | {words: _plain(gib) for words, gib in memory_shown(stats).items()}


def _plain(number: float) -> str:
    """Write a number without an exponent, which SpeechBrain's logger gives those below 1."""
    return f"{number:.2f}" if abs(number) >= 0.1 else f"{number:.2g}"


def epoch_bar(name: str, total: int, done: int, *, off: bool) -> tqdm[Any]:
    """Show how many utterances of an epoch are done.

    Parameters
    ----------
    name : str
        The text before the bar.
    total, done : int
        Utterances, and how many of them were seen before.
    off : bool
        Whether to show none.

    Returns
    -------
    tqdm
        The bar.
    """
    return progress_bar(
        name,
        unit="utt",
        total=total,
        done=done,
        off=off,
        redraw_seconds=REDRAW_SECONDS,
        line_seconds=LINE_SECONDS,
    )


def show_step(
    bar: tqdm[Any], utterances: int, loss: float, device: torch.device | str
) -> None:
    """Count the utterances of a step; where the bar is drawn, show loss and memory.

    Parameters
    ----------
    bar : tqdm
        An ``epoch_bar``.
    utterances : int
        How many the step had, over all processes.
    loss : float
        Of the step, the mean over all processes.
    device : torch.device or str
        Where the training runs.
    """
    if bar.disable:
        return
    waited = bar.format_dict["elapsed"] - (bar.last_print_t - bar.start_t)
    if waited >= bar.mininterval:
        peaks = peak_memory(device).items()
        memory = {BAR_PEAKS[name]: f"{peak / GIB:.2f}GiB" for name, peak in peaks}
        bar.set_postfix({"loss": f"{loss:.2f}", **memory}, refresh=False)
    bar.update(utterances)


def peak_memory(device: torch.device | str) -> dict[str, int]:
    """Measure the peak of memory since the process began, under its name.

    Parameters
    ----------
    device : torch.device or str
        Where the training runs.

    Returns
    -------
    dict
        cuda_allocated_peak_bytes, what tensors took of a GPU, or elsewhere
        process_resident_peak_bytes, which counts the whole process.
    """
    if torch.device(device).type == "cuda":
        return {"cuda_allocated_peak_bytes": torch.cuda.max_memory_allocated(device)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak if sys.platform == "darwin" else 1024 * peak
    return {"process_resident_peak_bytes": peak}


def memory_shown(stats: dict[str, Any]) -> dict[str, float]:
    """Select the peak of memory from the figures of an epoch, in GiB."""
    return {words: stats[name] / GIB for name, words in PEAKS.items() if name in stats}


def forecast(
    steps: int,
    phases: Sequence[tuple[int, float]],
    device: torch.device | str,
    *,
    done_steps: int = 0,
    start_seconds: float = 0.0,
) -> str:
    """Return a sentence on how long training takes if a step takes so many seconds.

    Parameters
    ----------
    steps : int
        Steps of an epoch.
    phases : sequence of (int, float)
        One phase or two, in order: epochs, and the seconds of a step in them.
    device : torch.device or str
        Where the training runs.
    done_steps : int
        Steps of these epochs that an earlier command took.
    start_seconds : float
        Seconds of the work before the first step.

    Returns
    -------
    str
        The time of the steps that are left, and the peak of memory so far.

    Examples
    --------
    >>> forecast(100, [(3, 18.0)], "cpu", done_steps=120).partition(", without")[0]
    '100 steps per epoch, 18.00 s per step: 54.0 min for what is left of 3 epochs (1 done,
    20 steps of the next)'
    >>> sentence = forecast(100, [(1, 6.0), (2, 9.0)], "cpu", start_seconds=300)
    >>> sentence.partition(", without")[0]
    '100 steps per epoch, 6.00 s per step up to epoch 1 and 9.00 s afterwards:
    45.0 min for 3 epochs, 5.0 min of them before the first step'
    """
    total, epochs = start_seconds, 0
    for count, seconds in phases:
        begin_step, epochs = steps * epochs, epochs + count
        total += seconds * max(0, steps * epochs - max(begin_step, done_steps))
    per_step = f"{phases[0][1]:.2f} s per step"
    if len(phases) > 1:
        (last_epoch, _), (_, seconds) = phases
        per_step += f" up to epoch {last_epoch} and {seconds:.2f} s afterwards"
    duration = f"{total / 3600:.1f} h" if total >= 3600 else f"{total / 60:.1f} min"
    whole, more = divmod(done_steps, steps)
    left = f"{epochs} epochs"
    if done_steps:
        begun = f", {more} steps of the next" if more else ""
        left = f"what is left of {left} ({whole} done{begun})"
    if start_seconds:
        left += f", {start_seconds / 60:.1f} min of them before the first step"
    peak = memory_shown(peak_memory(device)).items()
    return (
        f"{steps} steps per epoch, {per_step}: {duration} for {left}, "
        f"without validation and without waiting for the reading of speech; "
        f"{', '.join(f'{name}: {gib:.2f}' for name, gib in peak)}."
    )
