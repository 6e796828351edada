"""Adaptation of a small encoder to other speakers, beside training anew for as many steps.

Real speech of the folder that SPEECHBRAIN_REV_SPEECH names: an encoder is trained on two
thirds of minivox's training speakers, and adapted to the others by hparams/fine_tune.yaml.
Trials are between speakers of neither.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speechbrain_rev.files import read_rows

from .harness import Result, require
from .speech import FOLDER

ROOT = Path(__file__).parents[2]
ANEW = "trained anew"
#: Options of each way to adapt; None for training anew.
WAYS: dict[str, tuple[str, ...] | None] = {
    ANEW: None,
    "adapted, directions of means": (),
    "adapted, random directions": ("--head_init=random",),
    "adapted, two epochs frozen": ("--freeze_epochs=2",),
}
_NETWORK = (
    "--arch=revnet46", "--widths=[16, 32, 64, 64]", "--blocks=[1, 1, 1, 1]",
    "--n_mels=40", "--embedding_dim=128", "--optimizer_name=adamw", "--lr=1.0e-3",
    "--final_lr=1.0e-5",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """How long is trained, and how often."""

    seeds: tuple[int, ...] = (1, 2)
    epochs: int = 26
    steps: int = 32
    adapted_epochs: int = 10
    samples: int = 16_000


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Train a source for each seed, and adapt it each way."""
    setting = setting or Setting()
    folder = os.environ.get(FOLDER)
    require(bool(folder), f"{FOLDER} names no folder with real speech")
    corpus = Path(str(folder), "minivox")
    table = []
    with tempfile.TemporaryDirectory() as own:
        first, others = _lists(corpus, Path(own))
        for seed in setting.seeds:
            source = Path(own, f"source{seed}")
            given = (
                *_NETWORK, f"--train_list={first}", f"--steps_per_epoch={setting.steps}",
                f"--number_of_epochs={setting.epochs}", "--batch_size=64",
                "--average_checkpoints=2", f"--chunk_samples={setting.samples}",
            )  # fmt: skip
            started = _train("train", corpus, source, seed, given)
            for way, options in WAYS.items():
                given = (
                    f"--train_list={others}", "--batch_size=32",
                    f"--number_of_epochs={setting.adapted_epochs}",
                    "--average_checkpoints=1", f"--chunk_samples={setting.samples}",
                )  # fmt: skip
                output = Path(own, f"{way} {seed}")
                if options is None:
                    rows = _train("train", corpus, output, seed, (*_NETWORK, *given))
                else:
                    given = (*given, f"--pretrained={source}", *options)
                    rows = _train("fine_tune", corpus, output, seed, given)
                table.append(
                    {
                        "way": way,
                        "seed": seed,
                        "steps": rows[-1]["steps"],
                        "EER of the source, %": started[-1]["valid_eer_percent"],
                        "EER after an epoch, %": rows[0]["valid_eer_percent"],
                        "EER at the end, %": rows[-1]["valid_eer_percent"],
                        "minutes": sum(row["minutes"] for row in rows),
                    }
                )
    steps = {row["steps"] for row in table}
    require(len(steps) == 1, f"ways took other numbers of steps: {steps}")
    for row in table:
        anew = next(r for r in table if (r["way"], r["seed"]) == (ANEW, row["seed"]))
        row["baseline"] = ANEW
        row["times its EER"] = row["EER at the end, %"] / anew["EER at the end, %"]
    return Result(
        "adaptation",
        "Does a pretrained encoder help with other speakers?",
        f"A small revnet46 trained on 80 speakers of real speech for "
        f"{setting.epochs * setting.steps} steps and adapted to 40 others; trials of 60 "
        "more, by cosine",
        table,
        "all ways took as many steps on the same utterances",
    )


def _lists(corpus: Path, folder: Path) -> tuple[Path, Path]:
    """Part the training speakers: two of three, and the third."""
    lines = (corpus / "train_list.txt").read_text().splitlines()
    speakers = sorted({line.split()[0] for line in lines})
    third = set(speakers[::3])
    paths = folder / "first.txt", folder / "others.txt"
    for path, of_third in zip(paths, (False, True), strict=True):
        kept = [line for line in lines if (line.split()[0] in third) == of_third]
        path.write_text("\n".join(kept) + "\n")
    return paths


def _train(
    file: str, corpus: Path, output: Path, seed: int, options: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Train by the recipe in a process of its own; give the rows of its epochs."""
    trials = corpus / "veri_test.txt"
    subprocess.run(
        [
            sys.executable, str(ROOT / "recipes/VoxCeleb/train.py"),
            str(ROOT / f"hparams/{file}.yaml"), f"--data_folder={corpus}",
            f"--valid_trials={trials}", f"--trial_lists=[{trials}]",
            f"--noise_folder={corpus.parent / 'noise'}", f"--output_folder={output}",
            f"--seed={seed}", "--num_workers=0", "--ckpt_interval_steps=0",
            "--device=cpu", *options,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return list(read_rows(output / "train_log.jsonl"))
