"""What importing the package costs beyond the libraries that it stands on."""

from __future__ import annotations

import functools
import subprocess
import sys

import torch

from .harness import NotEqual, Result, interleaved_seconds

#: What is imported, and what its libraries alone take.
CASES = {
    "speechbrain_rev": "sys",
    "speechbrain_rev.cli": "argparse",
    "speechbrain_rev.hparams": "ruamel.yaml",
    "speechbrain_rev.scoring": "numpy",
    "speechbrain_rev.lobes": "torch",
    "speechbrain_rev.optim": "torch",
    "speechbrain_rev.data": "torch, torchaudio, speechbrain",
    "speechbrain_rev.inference": "torch, torchaudio, speechbrain",
}
HEAVY = ("bitsandbytes", "triton", "matplotlib")


def in_new_process(modules: str) -> list[str]:
    """Import modules and return the names of all that this brought."""
    program = f"import sys; import {modules}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return done.stdout.split()


def run(device: torch.device) -> Result:
    """Time each in processes of their own; the baseline imports the libraries alone."""
    rows = []
    for module, libraries in CASES.items():
        heavy = sorted(set(HEAVY) & set(in_new_process(module)))
        if heavy:
            raise NotEqual(f"{module} imports {', '.join(heavy)}.")
        seconds = interleaved_seconds(
            {m: functools.partial(in_new_process, m) for m in (module, libraries)},
            torch.device("cpu"),
            repeats=5,
        )
        ours, theirs = (seconds[m]["median"] for m in (module, libraries))
        rows.append(
            {
                "import": module,
                "s": ours,
                "baseline": f"import {libraries}",
                "baseline s": theirs,
                "s beyond it": ours - theirs,
                "times the baseline": ours / theirs,
            }
        )
    return Result(
        "imports",
        "What does importing cost?",
        "new processes, median of 5 interleaved runs",
        rows,
        f"none of them imports {', '.join(HEAVY)}",
    )
