"""One training of the study, from its settings to its scores, in a process of its own.

``python recipes/study/one_run.py FILE --output_folder=RUN --key=value ...``: the recipe's
train.py, extract.py and score.py, one after the other. Given again, it goes on where it
was interrupted. It ends with the process that began it. --train_only leaves the rest out.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "VoxCeleb"))

import extract
import score
import torch
import train
from design.sizes import COHORT_UTTERANCES
from running.determinism import compute_repeatably
from running.origin import write_origin
from running.orphans import end_with_parent
from running.trainings import THREADS, precision_of

from speechbrain_rev.cli import run_script
from speechbrain_rev.locks import writing_alone

TRAIN_ONLY = "--train_only"


def main() -> None:
    """Train, embed and score."""
    end_with_parent()
    compute_repeatably()
    torch.set_num_threads(THREADS)
    argv = [a for a in sys.argv[1:] if a != TRAIN_ONLY]
    given = dict(a.removeprefix("--").split("=", 1) for a in argv if "=" in a)
    folder, device = given["output_folder"], given["device"]
    with writing_alone(Path(folder)):
        write_origin(Path(folder), device, precision_of(given))
        train.main(argv)
        if TRAIN_ONLY in sys.argv:
            return
        extract.main(
            [
                folder,
                f"--device={device}",
                f"--utterances_per_speaker={COHORT_UTTERANCES}",
            ]
        )
        # Intervals are drawn over speakers and seeds together, by the report.
        score.main([folder, "--bootstrap=0"])


if __name__ == "__main__":
    run_script(main)
