"""Draw the pictures of docs/study.md: python -m tests.docs.study_figures.

They are those of the study's report, made of the archive of it that is committed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

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


def draw(folder: Path) -> None:
    """Draw the pictures into a folder."""
    archive, conditions = study("archive"), study("design.conditions")
    pictures, runs = study("report.pictures"), study("results.runs")
    with tempfile.TemporaryDirectory() as scratch:
        unpacked = Path(scratch, "study")
        archive.unpack(ARCHIVE, unpacked, Path(scratch), Path(scratch))
        results = json.loads((unpacked / "results.json").read_text())
        figures = results["figures"]
        whole = runs.Study(
            unpacked,
            conditions.conditions(),
            conditions.comparisons(),
            figures["seeds"],
        )
        drawn, failed = pictures.draw(whole, results)
        if failed or not set(SHOWN) <= set(drawn):
            raise ValueError(f"Not all pictures were drawn: {failed}")
        for name in SHOWN:
            shutil.copyfile(unpacked / name, folder / f"study_{name}")


if __name__ == "__main__":
    draw(DOCS)
