"""Where the statistics of a run's epochs are kept: lines, curves and TensorBoard."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

from speechbrain.utils.train_logger import TensorboardLogger

from speechbrain_rev import plots
from speechbrain_rev.whole_files import read_rows, write_rows

LOG = "train_log.jsonl"
CURVES = "training_curves.png"
TENSORBOARD = "tensorboard"

logger = logging.getLogger("train")


class EpochLog:
    """Keeps the statistics of a run's epochs; for the main process alone.

    Parameters
    ----------
    output_folder : str or Path
        The run's folder, which gets train_log.jsonl and training_curves.png.
    tensorboard : bool
        Whether its folder tensorboard gets the same numbers.

    Raises
    ------
    ValueError
        If the lines that are there are not as they were written.
    """

    def __init__(self, output_folder: str | Path, *, tensorboard: bool = False) -> None:
        self._folder = Path(output_folder)
        self._tensorboard = tensorboard
        self._board: TensorBoard | None = None
        self._cannot_draw = self._knows_gaps = False
        # Now, and not after an epoch.
        self._rows()
        # SpeechBrain writes DEBUG into log.txt, where matplotlib lists all fonts.
        logging.getLogger("matplotlib").setLevel(logging.INFO)

    def write(self, stats: dict[str, Any]) -> None:
        """Add an epoch, replacing what a run killed before its checkpoint wrote.

        Parameters
        ----------
        stats : dict
            Plain numbers, "epoch" among them.
        """
        rows = [row for row in self._rows() if row["epoch"] < stats["epoch"]]
        if len(rows) < stats["epoch"] - 1 and not self._knows_gaps:
            logger.warning(
                f"{self._folder / LOG} has lines of {len(rows)} epochs before epoch "
                f"{stats['epoch']}: the others were cut off or moved away."
            )
        self._knows_gaps = True
        rows.append(stats)
        write_rows(self._folder / LOG, rows)
        self._draw(rows)
        if self._tensorboard:
            if self._board is None:
                self._board = TensorBoard(self._folder / TENSORBOARD, stats["epoch"])
            self._board.log_epoch(stats)

    def _rows(self) -> list[dict[str, Any]]:
        path = self._folder / LOG
        return read_rows(path) if path.exists() else []

    def _draw(self, rows: list[dict[str, Any]]) -> None:
        path = self._folder / CURVES
        try:
            plots.training_curves(rows, path)
        # Of whatever kind: a picture is worth no training.
        except Exception as error:
            if not self._cannot_draw:
                logger.warning(f"{path} is not drawn: {error}")
            self._cannot_draw = True


class TensorBoard(TensorboardLogger):
    """SpeechBrain's logger with epochs as steps, none of them twice.

    Parameters
    ----------
    folder : Path
        Which may hold the epochs of a run that goes on.
    first_epoch : int
        The next epoch; what is there of it and of later ones is hidden.
    """

    def __init__(self, folder: Path, first_epoch: int) -> None:
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(folder)
        # SpeechBrain's writer hides nothing.
        self.writer.close()
        self.writer = SummaryWriter(folder, purge_step=first_epoch)

    def log_epoch(self, stats: dict[str, Any]) -> None:
        """Add the numbers of an epoch under the names that train_log.jsonl has.

        Parameters
        ----------
        stats : dict
            Of these what is a number, beside "epoch".
        """
        self.global_step["meta"] = stats["epoch"] - 1
        numbers = {k: v for k, v in stats.items() if isinstance(v, int | float)}
        del numbers["epoch"]
        self.log_stats(numbers)
        # A run that is killed has its epochs.
        self.writer.flush()


def check_tensorboard() -> None:
    """Refuse to begin without the package tensorboard.

    Raises
    ------
    ImportError
        If it is missing or too old for torch.
    """
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ImportError(
            "tensorboard: true needs the package tensorboard, which cannot be imported "
            f"here ({error}): pip install tensorboard, or set tensorboard: false."
        ) from error
