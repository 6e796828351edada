"""Draw the pictures of docs/study.md: python -m tests.docs.study_figures.

They are those of the study's report, made of the archive of it that is committed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.study_tables import ARCHIVE
from tests.recipes.study import study

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: Of the report's, those that the page shows.
SHOWN = (
    "differences_resnet34.png",
    "differences_df_resnet56.png",
    "training_resnet34.png",
    "training_df_resnet56.png",
    "angles.png",
    "state_errors.png",
)


@contextlib.contextmanager
def unpacked() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Unpack the archive for a while: the study, and its results.json."""
    archive, conditions = study("archive"), study("design.conditions")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "study")
        archive.unpack(ARCHIVE, folder, Path(scratch), Path(scratch))
        results = json.loads((folder / "results.json").read_text())
        yield (
            study("results.runs").Study(
                folder,
                conditions.conditions(),
                conditions.comparisons(),
                results["figures"]["seeds"],
            ),
            results,
        )


def draw(folder: Path) -> None:
    """Draw the pictures into a folder."""
    with unpacked() as (whole, results):
        drawn, failed = study("report.pictures").draw(whole, results)
        if failed or not set(SHOWN) <= set(drawn):
            raise ValueError(f"Not all pictures were drawn: {failed}")
        for name in SHOWN:
            shutil.copyfile(whole.folder / name, folder / f"study_{name}")


if __name__ == "__main__":
    draw(DOCS)
