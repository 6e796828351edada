"""What the commands of the study take, and what they find there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
HPARAMS = REPOSITORY / "hparams" / "minivox.yaml"
TRAIN_LIST, TRIAL_LISTS = "train_list.txt", ("veri_test.txt", "veri_test_*.txt")


def existing_folder(text: str) -> Path:
    """Read the path of a folder that is there."""
    if not text or not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return Path(text)


def positive(text: str) -> int:
    """Read a number of processes or speakers."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it takes 1 or more, not {text!r}")
    return int(text)


def trial_lists(data: Path) -> list[Path]:
    """Find the trial lists of a corpus.

    Raises
    ------
    FileNotFoundError
        If there is none, or no list of training utterances.
    """
    lists = sorted(path for pattern in TRIAL_LISTS for path in data.glob(pattern))
    if not lists or not (data / TRAIN_LIST).is_file():
        raise FileNotFoundError(
            f"{data} lacks {TRAIN_LIST} or trial lists {' or '.join(TRIAL_LISTS)}. Give a "
            "corpus in VoxCeleb's layout that holds both: "
            "wav/<speaker>/<session>/<utterance>.wav or .flac, lines 'speaker path' and "
            "lines 'label path path'."
        )
    return lists


def settings_of_all(
    data: Path, lists: Sequence[Path], noise: Path | None, device: str
) -> dict[str, Any]:
    """Give what all trainings of a study are given of data and device."""
    return {
        "data_folder": data.resolve(),
        "train_list": (data / TRAIN_LIST).resolve(),
        "trial_lists": [path.resolve() for path in lists],
        "noise_folder": noise and noise.resolve(),
        "device": device,
    }
