"""The whole path in a few minutes: memory, corpus, training, scoring, embedding.

``make demo``, or ``python recipes/demo/run.py``. Everything is written below one folder
(results/demo); what is there already is not made again. The voices are synthetic: they
prove that the path works, not how accurate a network is on people.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Read by OpenMP when torch is loaded. A thread that waits by spinning takes the core of
# one that works as soon as anything else runs: 6 times slower on 2 shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "VoxCeleb"))

import corpus
import train

from speechbrain_rev import plots, scoring
from speechbrain_rev.data import open_corpus, read_manifest
from speechbrain_rev.inference import (
    FbankStatistics,
    SpeakerEmbedder,
    WaveformEncoder,
)
from speechbrain_rev.inference.evaluation import (
    cohort_files,
    extract,
    score,
    trial_files,
)
from speechbrain_rev.inference.run_folder import read_settings
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.whole_files import read_rows

REPOSITORY = Path(__file__).parents[2]
# A vanilla encoder, as it is trained by default and with each block checkpointed, and a
# reversible one; all as published, on 200 frames (2 seconds) of 80 mel bands.
MEASURED = (
    ("resnet34", "store"),
    ("resnet34", "recompute"),
    ("revnet57", "reconstruct"),
)
FRAMES = 200
QUICK = {
    "widths": [8, 16, 16, 16],
    "chunk_samples": 7840,
    "batch_size": 8,
    "number_of_epochs": 1,
    "warmup_epochs": 0.5,
    "valid_speakers": 2,
    "average_checkpoints": 1,
}
QUICK_CORPUS = corpus.Request(
    train_speakers=8, test_speakers=3, sessions=2, utterances=2, numbers=1
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="default: results/demo")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument(
        "--quick", action="store_true", help="a toy of a corpus and a network"
    )
    options = parser.parse_args(argv)
    name = "demo_quick" if options.quick else "demo"
    output = options.output or REPOSITORY / "results" / name
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    start = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)

    headline(f"1. Memory of a training step, measured on this machine ({device})")
    show_memory(output / "memory.png", device)
    headline("2. A corpus of synthetic voices")
    request = QUICK_CORPUS if options.quick else corpus.Request()
    data = corpus.make_corpus(output / "corpus", request)
    print(f"{data}: {request.train_speakers} voices to train on, ", end="")
    print(f"{request.test_speakers} others to test on")
    headline("3. Training a small reversible encoder with an 8-bit optimizer")
    run = train_run(output / "trained", data, device, QUICK if options.quick else {})
    headline("4. Scoring voices never heard in training")
    reports = score_systems(output, data, run, device)
    headline("5. Embedding files and comparing them")
    compare(run, data, device)
    headline("6. Result")
    summarise(output, run, reports)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes in all")


def headline(text: str) -> None:
    """Open a part of the demo."""
    print(f"\n=== {text}", flush=True)


def bytes_per_utterance(name: str, mode: str, device: str) -> float:
    """Measure what one more utterance in the batch adds to a training step's peak."""
    encoder = build_encoder(name, mode=mode).to(device)

    def peak(batch: int) -> int:
        feats = torch.randn(batch, FRAMES, encoder.n_mels, device=device)
        encoder.zero_grad(set_to_none=True)
        return live_bytes_peak(lambda: encoder(feats).square().mean().backward())

    return (peak(3) - peak(1)) / 2


def show_memory(picture: Path, device: str) -> None:
    """Measure the encoders, print and draw it."""
    rows = []
    for name, mode in MEASURED:
        rows.append((name, mode, bytes_per_utterance(name, mode, device)))
        size, ratio = rows[-1][2] / 1e6, rows[0][2] / rows[-1][2]
        words = f"{ratio:.1f} times less" if len(rows) > 1 else "per utterance of 2 s"
        print(f"{name:<10}{mode:<12}{size:6.1f} MB  {words}", flush=True)
    plots.memory_bars(rows, picture)


def train_run(
    folder: Path, data: Path, device: str, changed: Mapping[str, object]
) -> Path:
    """Train by the recipe, or go on where an interrupted training was."""
    settings = {
        "data_folder": data,
        "train_list": data / "train_list.txt",
        "trial_lists": [str(data / "trials.txt")],
        "output_folder": folder,
        "num_workers": 1,
        **changed,
    }
    overrides = [f"--{name}={value}" for name, value in settings.items()]
    hparams = REPOSITORY / "hparams" / "demo.yaml"
    train.main([str(hparams), *overrides, f"--device={device}"])
    return folder


def systems(run: Path, device: str) -> dict[str, SpeakerEmbedder]:
    """Load what was trained, and what it has to be better than."""
    names = ("arch", "widths", "blocks", "n_mels", "embedding_dim", "seed")
    settings = read_settings(run, names)
    seed, arch = settings.pop("seed"), settings.pop("arch")
    torch.manual_seed(seed)
    untrained = WaveformEncoder(build_encoder(arch, **settings))
    print(f"untrained: {arch} as initialised; baseline: mean and deviation of features")
    return {
        "baseline": SpeakerEmbedder(
            FbankStatistics(), device=device, fingerprint="mean and deviation"
        ),
        "untrained": SpeakerEmbedder(
            untrained, device=device, fingerprint=f"seed {seed}, {arch} {settings}"
        ),
        "trained": SpeakerEmbedder.from_run(run, device=device),
    }


def score_systems(
    output: Path, data: Path, run: Path, device: str
) -> dict[str, dict[str, Any]]:
    """Embed trials and cohort with each system, and score both ways."""
    trial_lists = [data / "trials.txt"]
    manifest = run / "save" / "train.csv"
    speakers = {utterance.ID: utterance.spk_id for utterance in read_manifest(manifest)}
    reports = {}
    for name, embedder in systems(run, device).items():
        folder = output / name
        trials = trial_files(trial_lists, open_corpus(data))
        extract(embedder, folder, trials, cohort_files(manifest))
        report = score(folder, trial_lists, speakers)
        assert report is not None
        for remark in report.remarks:
            print(remark)
        reports[name] = report.content
    return reports


def compare(run: Path, data: Path, device: str) -> None:
    """Embed two files and compare them, of one voice and of two."""
    embedder = SpeakerEmbedder.from_run(run, device=device)
    listed = scoring.read_trials(data / "trials.txt")
    for label, words in ((1, "one voice, two sessions"), (0, "two voices")):
        row = int(np.flatnonzero(listed.labels == label)[0])
        names = listed.enrol[row], listed.test[row]
        a, b = (data / "wav" / name for name in names)
        found = embedder.verify(a, b)
        print(f"{found.score:6.3f}  {words}: {names[0]} and {names[1]}")
    print(f"The same on files of your own: speechbrain-rev verify {run} A.wav B.wav")


def summarise(
    output: Path, run: Path, reports: Mapping[str, Mapping[str, Any]]
) -> None:
    """Print the table and where the pictures are."""
    epochs = read_rows(run / "train_log.jsonl")
    curves = {}
    measure = scoring.MEASURES["eer"]
    print(f"{measure.column:<26}{'cosine':>8}{'AS-Norm':>9}")
    for name, report in reports.items():
        rates = {r["method"]: measure.text(r["eer"]) for r in report["results"]}
        print(f"{name:<26}{rates['cosine']:>8}{rates['as_norm']:>9}")
        scored = output / name / "scores" / "trials.as_norm.txt"
        labels, scores = np.loadtxt(scored, usecols=(2, 3)).T
        curves[f"{name}, AS-Norm"] = scoring.det_curve(scores, labels)
    plots.det_plot(curves, output / "det.png")
    minutes = sum(epoch["minutes"] for epoch in epochs)
    print(f"trained for {epochs[-1]['steps']} steps in {minutes:.1f} minutes")
    print("Synthetic voices prove the path, not the accuracy.")
    for picture in ("memory.png", "trained/training_curves.png", "det.png"):
        print(output / picture)


if __name__ == "__main__":
    main()
