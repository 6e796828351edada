"""One run of the study, from its settings to its scores: a process that run.py starts.

``python recipes/study/one_run.py FILE --output_folder=RUN --key=value ...``: the recipe's
train.py, extract.py and score.py, then the memory of a step, one after the other. Given
again, it goes on where it was interrupted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "VoxCeleb"))

import extract
import score
import torch
import train
from conditions import COHORT_UTTERANCES
from figures import ORIGIN, PEAK
from speechbrain import Stage
from torch.backends.cpu import get_cpu_capability
from torch.utils.data import DataLoader

from speechbrain_rev import __version__, training
from speechbrain_rev.cli import run_script
from speechbrain_rev.data import ChunkBatch
from speechbrain_rev.devices import device_name
from speechbrain_rev.environment import environment
from speechbrain_rev.files import write_whole, writing_alone
from speechbrain_rev.planner import breakdown
from speechbrain_rev.training import ValidatedEpochs


def main() -> None:
    """Train, embed, score and measure."""
    # cuBLAS sums in one order only with workspaces of a fixed size, which it reads here.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # It would write to all memory that is asked for, and no result depends on it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    # The order of sums must not depend on how many cores are idle.
    torch.set_num_threads(1)
    argv = sys.argv[1:]
    given = dict(a.removeprefix("--").split("=", 1) for a in argv if "=" in a)
    folder, device = Path(given["output_folder"]), given["device"]
    with writing_alone(folder):
        write_origin(folder / ORIGIN, device)
        train.main(argv)
        if not (folder / PEAK).is_file():
            write_whole(folder / PEAK, f"{step_peak_bytes(argv)}\n")
        utterances = f"--utterances_per_speaker={COHORT_UTTERANCES}"
        extract.main([str(folder), f"--device={device}", utterances])
        # Intervals are drawn over speakers and seeds together, from all runs.
        score.main([str(folder), "--bootstrap=0"])


def step_peak_bytes(argv: list[str]) -> int:
    """Compare bits in a dry run of the recipe, and count the tensors of one more step.

    Raises
    ------
    RuntimeError
        If what is computed twice in a step has other bits.
    """
    reports = []

    def dry_run(brain: ValidatedEpochs, loader: DataLoader[ChunkBatch]) -> None:
        training.dry_run(brain, loader)
        batch, stage = next(iter(loader)), Stage.TRAIN

        def step() -> None:
            with brain.training_ctx:
                outputs = brain.compute_forward(batch, stage)
                loss = brain.compute_objectives(outputs, batch, stage)
            loss.backward()

        inputs, optimizer = [batch.wavs], brain.optimizer
        reports.append(
            breakdown(brain.modules, step, inputs=inputs, optimizer=optimizer)
        )

    train.main([*argv, "--dry_run"], dry_run)
    return reports[0].total_bytes


def write_origin(path: Path, device: str) -> None:
    """Write down by which code and where a run is made, again if it goes on elsewhere."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        commit = ""  # not installed
    here: dict[str, Any] = {
        "speechbrain_rev": __version__,
        "commit": commit.strip() or None,
        "processor": dict(environment())["processor"],
        "instructions": get_cpu_capability(),
        "device": device_name(torch.device(device)),
        "torch": torch.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(path.read_text()) if path.is_file() else []
    if not any(here.items() <= entry.items() for entry in entries):
        entries.append({"since": date.today().isoformat(), **here})
    write_whole(path, json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
