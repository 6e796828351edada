"""What a training run counts and measures, and how it is shown."""

from __future__ import annotations

import logging
import math
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import speechbrain as sb
import torch
from speechbrain.utils.distributed import if_main_process
from tqdm import tqdm

from speechbrain_rev.compression import ActivationCompression

REDRAW_SECONDS = 1.0
LINE_SECONDS = 300.0
# Two quantities, never under one name: which is logged depends on the device.
PEAKS = {
    "cuda_allocated_peak_bytes": "CUDA allocated peak GiB",
    "process_resident_peak_bytes": "process resident peak GiB",
}
BAR_PEAKS = {
    "cuda_allocated_peak_bytes": "allocated peak",
    "process_resident_peak_bytes": "resident peak",
}


def begin(folder: str | Path) -> None:
    """Make a run's folder and its log.txt, which lacks lines where a disk is full.

    Parameters
    ----------
    folder : str or Path
        The output_folder.

    Raises
    ------
    OSError
        If nothing can be written there.
    """
    # The next line says that some of these first lines are lost.
    told, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        sb.create_experiment_directory(str(folder))
    except ValueError as error:
        # logging makes one of what the system says of log.txt.
        if not isinstance(error.__cause__, OSError):
            raise
        raise OSError(
            f"{Path(folder, 'log.txt')} cannot be written ({error.__cause__.strerror}). "
            "Make room, or give another output_folder."
        ) from error
    finally:
        logging.raiseExceptions = told
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                _lose_lines(handler)


def _lose_lines(handler: logging.StreamHandler[Any]) -> None:
    """Let a log go without what a disk does not take, said once and not at each line."""
    place = getattr(handler, "baseFilename", "stdout")
    said: list[OSError] = []

    def without(record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            type(handler).handleError(handler, record)
        elif not said:
            said.append(error)
            words = f"{place} cannot be written ({error.strerror}): it lacks lines."
            print(words, file=sys.stderr)

    handler.handleError = without  # type: ignore[method-assign]


def shown(stats: dict[str, Any]) -> dict[str, Any]:
    """Select what the log line of an epoch shows, in units for reading.

    Parameters
    ----------
    stats : dict
        What a line of train_log.jsonl holds.

    Returns
    -------
    dict
        Numbers by the words to print.
    """
    line = {
        "epoch": stats["epoch"],
        "loss": stats["train_loss"],
        "accuracy %": stats["train_accuracy_percent"],
        "lr": stats["lr"],
        "margin": stats["margin"],
    }
    if stats["skipped_steps"]:
        line["skipped steps"] = stats["skipped_steps"]
    if stats["unread_files"]:
        line["unread files"] = stats["unread_files"]
    if "unread_validation_files" in stats:
        line["unread validation files"] = stats["unread_validation_files"]
    if "valid_eer_percent" in stats:
        line["valid EER %"] = stats["valid_eer_percent"]
    if "compression_ratio" in stats:
        line["activations compressed"] = stats["compression_ratio"]
    line["minutes"] = stats["minutes"]
    line["utt/s"] = round(stats["utterances_per_second"])
    return line | memory_shown(stats)


def progress_bar(name: str, total: int, done: int, *, off: bool) -> tqdm:
    """Show how many utterances are done, in the main process alone.

    Parameters
    ----------
    name : str
        What stands before the bar.
    total, done : int
        Utterances, and how many of them were seen before.
    off : bool
        Whether to show none. Where nobody watches, as in a log file, it is a line every
        few minutes.

    Returns
    -------
    tqdm
        The bar.
    """
    watched = sys.stderr.isatty()
    return tqdm(
        desc=name,
        total=total,
        initial=done,
        unit="utt",
        disable=off or not if_main_process(),
        leave=False,
        # Whether it is time is asked at every step: steps take longer than asking.
        mininterval=REDRAW_SECONDS if watched else LINE_SECONDS,
        miniters=1,
        file=None if watched else _Lines(),
        delay=0 if watched else LINE_SECONDS,
        # A log has no cursor to move below the bars that are open.
        position=None if watched else 0,
    )


class _Lines:
    """Writes what is a bar on a terminal as lines of a log."""

    def write(self, text: str) -> None:
        if text := text.strip():
            sys.stderr.write(f"{text}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def show_step(
    bar: tqdm, utterances: int, loss: float, device: torch.device | str
) -> None:
    """Count the utterances of a step; where the bar is drawn, tell loss and memory.

    Parameters
    ----------
    bar : tqdm
        A ``progress_bar``.
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
        memory = {BAR_PEAKS[name]: f"{peak / 2**30:.2f}GiB" for name, peak in peaks}
        bar.set_postfix({"loss": f"{loss:.2f}", **memory}, refresh=False)
    bar.update(utterances)


@dataclass
class Tally:
    """What is added up in an epoch and survives an interruption.

    Attributes
    ----------
    correct, skipped, unread, nonfinite : int
        Utterances told right, steps that were skipped, files that could not be read, and
        skipped steps for which no loss scale is to blame.
    largest_streams : dict of str to float
        How large the values in exact streams have become, by stage.
    """

    correct: int = 0
    skipped: int = 0
    unread: int = 0
    nonfinite: int = 0
    largest_streams: dict[str, float] = field(default_factory=dict)

    def ask(self, encoder: torch.nn.Module) -> dict[str, Any]:
        """Ask how large streams are by now, and what was compressed.

        Parameters
        ----------
        encoder : torch.nn.Module
            A speaker encoder, perhaps wrapped for several processes; other modules, and
            encoders without exact streams, have nothing to tell.

        Returns
        -------
        dict
            ``largest_streams`` of the epoch, and what ``compressed`` gives, or nothing.
        """
        encoder = getattr(encoder, "module", encoder)
        for stage, value in getattr(encoder, "largest_streams", dict)().items():
            before = self.largest_streams.get(stage, 0.0)
            # NaN, that of an overflow, stays.
            if math.isnan(value) or value > before:
                self.largest_streams[stage] = value
        found = (
            {"largest_streams": self.largest_streams} if self.largest_streams else {}
        )
        compression = getattr(encoder, "compression", None)
        return found | ({} if compression is None else compressed(compression))


def compressed(compression: ActivationCompression) -> dict[str, Any]:
    """Tell what was compressed in the last step, and within which bounds.

    Parameters
    ----------
    compression : ActivationCompression
        The encoder's.

    Returns
    -------
    dict
        ``compression_ratio`` of all layers' inputs and, by layer, ``error_bounds`` and
        ``compression_ratios``; nothing if no block compresses.
    """
    records = compression.records
    if not records:
        return {}
    original = sum(record.original_bytes for record in records.values())
    kept = sum(record.kept_bytes for record in records.values())
    return {
        "compression_ratio": original / kept,
        "error_bounds": {name: r.error_bound for name, r in records.items()},
        "compression_ratios": {name: r.ratio for name, r in records.items()},
    }


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
    """Select the peak of memory from what was measured, in GiB and words."""
    return {
        words: stats[name] / 2**30 for name, words in PEAKS.items() if name in stats
    }


def forecast(
    steps: int, seconds: float, epochs: int, device: torch.device | str
) -> str:
    """Say what a training would take whose steps take so many seconds."""
    total = seconds * steps * epochs
    duration = f"{total / 3600:.1f} h" if total >= 3600 else f"{total / 60:.1f} min"
    peak = memory_shown(peak_memory(device)).items()
    return (
        f"{steps} steps per epoch, {seconds:.2f} s per step: {duration} for {epochs} "
        f"epochs, without validation and without waiting for the reading of speech; "
        f"{', '.join(f'{name}: {gib:.2f}' for name, gib in peak)}."
    )
