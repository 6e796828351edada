"""Statistics of a run's epochs: lines, curves, TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechbrain.utils.distributed import if_main_process

from speechbrain_rev import plots
from speechbrain_rev.files import read_rows, write_whole

if TYPE_CHECKING:
    from speechbrain.utils.train_logger import TensorboardLogger

LOG = "train_log.jsonl"
CURVES = "training_curves.png"
TENSORBOARD = "tensorboard"
#: The file with the name of wandb's run, which a resumed run continues.
WANDB_RUN = "wandb_run.txt"

#: The module of each logger, and the name that it must have.
_NEEDS = {
    "tensorboard": ("torch.utils.tensorboard", "SummaryWriter"),
    "wandb": ("wandb", "init"),
}


logger = logging.getLogger("train")


class EpochLog:
    """Writes the statistics of a run's epochs; as a context, it closes other loggers.

    Parameters
    ----------
    output_folder : str or Path
        The run's folder, which gets train_log.jsonl and training_curves.png.
    to : "tensorboard", "wandb" or None
        Which logger gets the same numbers; wandb's run begins at once.
    config : mapping, optional
        The run's plain settings, for wandb.

    Raises
    ------
    ValueError
        If the lines that are there are not as they were written, or wandb begins no run.

    Example
    -------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, EpochLog(folder) as log:
    ...     log.write({"epoch": 1, "train_loss": 4.5, "lr": 0.1, "margin": 0.2})
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['train_log.jsonl', 'training_curves.png']
    """

    def __init__(
        self,
        output_folder: str | Path,
        *,
        to: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = Path(output_folder)
        self._cannot_draw = False
        # A damaged log is refused now, not after an epoch.
        self.rows()
        self._other: TensorBoard | WeightsAndBiases | None = None
        if to == "tensorboard":
            self._other = TensorBoard(self._folder / TENSORBOARD)
        elif to == "wandb" and if_main_process():
            self._other = WeightsAndBiases(self._folder, config or {})
        # SpeechBrain writes DEBUG into log.txt, where matplotlib lists all fonts.
        logging.getLogger("matplotlib").setLevel(logging.INFO)

    def __enter__(self) -> EpochLog:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._other is not None:
            self._other.close(failed=kind is not None)

    def write(self, stats: dict[str, Any]) -> None:
        """Add an epoch, replacing what a run killed before its checkpoint wrote.

        It is for the main process alone.

        Parameters
        ----------
        stats : dict
            Plain numbers, "epoch" among them.
        """
        rows = [row for row in self.rows() if row["epoch"] < stats["epoch"]]
        rows.append(stats)
        lines = (f"{json.dumps(row)}\n" for row in rows)
        write_whole(self._folder / LOG, "".join(lines))
        self._draw(rows)
        if self._other is not None:
            self._other.log_epoch(stats)

    def rows(self) -> list[dict[str, Any]]:
        """Read the statistics of the epochs that are logged."""
        path = self._folder / LOG
        return read_rows(path) if path.exists() else []

    def _draw(self, rows: list[dict[str, Any]]) -> None:
        path = self._folder / CURVES
        try:
            plots.training_curves(rows, path)
        # Whatever the error: no run ends because of a picture.
        except Exception as error:
            if not self._cannot_draw:
                logger.warning(f"{path} is not drawn: {error}")
            self._cannot_draw = True


class TensorBoard:
    """SpeechBrain's logger for TensorBoard with epochs as steps, none of them twice.

    Parameters
    ----------
    folder : Path
        May hold the epochs of a run that is resumed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logger: TensorboardLogger | None = None

    def log_epoch(self, stats: Mapping[str, Any]) -> None:
        """Add an epoch; what was logged of it and of later ones is hidden."""
        if self._logger is None:
            # Its module warns that torchvision is missing, which nothing here needs.
            from speechbrain.utils.train_logger import TensorboardLogger

            self._logger = TensorboardLogger(self._folder)
            # SpeechBrain's writer hides nothing.
            writer = type(self._logger.writer)
            self._logger.writer.close()
            self._logger.writer = writer(self._folder, purge_step=stats["epoch"])
        self._logger.global_step["meta"] = stats["epoch"] - 1
        numbers = _numbers(stats)
        del numbers["epoch"]
        self._logger.log_stats(numbers)
        # Flush: a run that is killed keeps its epochs.
        self._logger.writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the file of events, if there is one."""
        if self._logger is not None:
            self._logger.writer.close()


class WeightsAndBiases:
    """SpeechBrain's logger for wandb, in one run of wandb however often training resumes.

    Parameters
    ----------
    folder : Path
        The run's folder, which keeps the name of wandb's run, and wandb's files where
        WANDB_DIR names no other place.
    config : mapping
        The run's plain settings.

    Raises
    ------
    ValueError
        If wandb begins no run, or the file that names its run is damaged.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        named = folder / WANDB_RUN
        if not named.exists():
            write_whole(named, f"{secrets.token_hex(4)}\n")
        name = named.read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name):
            raise ValueError(
                f"{named} holds {name[:40]!r}, but takes the name of a run of wandb, of "
                "letters, digits, '-', '_' and '.'. Put the name back, or remove the file: "
                "training then goes on in a new run of wandb."
            )
        try:
            run = wandb.init(
                id=name,
                resume="allow",
                name=os.environ.get("WANDB_NAME", str(folder)),
                dir=_wandb_folder(folder),
                config=dict(config),
                # Resuming may change settings: more epochs, for instance.
                allow_val_change=True,
            )
        except (wandb.errors.Error, ValueError) as error:
            # pydantic raises ValueError for a variable such as WANDB_MODE.
            is_wandbs = isinstance(error, wandb.errors.Error)
            advice = (
                "Log in by `wandb login`, set WANDB_MODE=offline to send it later by "
                "`wandb sync`, or set logger: null."
                if is_wandbs
                else "Correct the variable WANDB_... of that name, or set logger: null."
            )
            reason = " ".join(
                str(error).partition("For further information")[0].split()
            )
            raise ValueError(
                f"logger: wandb cannot begin a run ({reason}). {advice}"
            ) from error
        from speechbrain.utils.train_logger import WandBLogger

        # SpeechBrain's logger calls its argument, and hides its errors.
        self._run, self._logger = run, WandBLogger(lambda: run)

    def log_epoch(self, stats: Mapping[str, Any]) -> None:
        """Add an epoch; one that wandb has already stays as it is."""
        self._logger.log_stats(_numbers(stats))

    def close(self, *, failed: bool) -> None:
        """Finish wandb's run, as failed if training has."""
        self._run.finish(exit_code=int(failed))


def _numbers(stats: Mapping[str, Any]) -> dict[str, int | float]:
    return {k: v for k, v in stats.items() if isinstance(v, int | float)}


def _wandb_folder(folder: Path) -> str:
    return os.environ.get("WANDB_DIR") or str(folder)


def check_logger(to: str | None) -> None:
    """Refuse to begin with a logger whose package is missing.

    Parameters
    ----------
    to : str or None
        The knob logger.

    Raises
    ------
    ImportError
        If the package is missing or too old.
    """
    if to is None:
        return
    module, name = _NEEDS[to]
    try:
        # A folder of wandb's files is imported as a package with nothing in it.
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"logger: {to} needs the package {to}, which cannot be imported here "
            f"({error}): pip install speechbrain_rev[{to}], or set logger: null."
        ) from error


def log_places(folder: str | Path, *, to: str | None) -> str:
    """Return a sentence on where the statistics of a run's epochs would go.

    Parameters
    ----------
    folder : str or Path
        The output_folder.
    to : str or None
        The knob logger.

    Returns
    -------
    str
        A sentence.
    """
    places = [f"{folder}/{LOG}"]
    if to == "tensorboard":
        places.append(f"{folder}/{TENSORBOARD} for TensorBoard")
    if to == "wandb":
        chosen = os.environ.get("WANDB_PROJECT")
        which = f"project {chosen}" if chosen else "its default project"
        files = f"{_wandb_folder(Path(folder))}/wandb"
        places.append(f"wandb in {which}, with files in {files}")
    return f"Logs of each epoch: {' and '.join(places)}."
