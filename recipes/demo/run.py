"""The point of the package, then the whole path: memory, training, scoring, embedding.

``make demo``, or ``python recipes/demo/run.py``. Everything is written below one folder
(results/demo); what is there already is not made again. The voices are synthetic: they
prove that the path works, not how accurate a network is on people.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

# Read by OpenMP when torch is loaded. A thread that waits by spinning takes the core of
# one that works as soon as anything else runs: 6 times slower on 2 shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "VoxCeleb"))

import corpus
import train
from depth import memory_by_depth

from speechbrain_rev import plots, scoring
from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import counted_peaks
from speechbrain_rev.data import open_sources, read_manifest
from speechbrain_rev.files import read_rows
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
from speechbrain_rev.inference.runs import record_of
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner import live_bytes_peak
from speechbrain_rev.planner.timing import interleaved_seconds
from speechbrain_rev.sizes import MIB

REPOSITORY = Path(__file__).parents[2]
#: Reversible encoders of one kind by their layers, on 200 frames (2 seconds) of 80 mel
#: bands: published ones, and one that is deeper. A step of the one before it is measured.
PUBLISHED = {89: "df_revnet89", 377: "df_revnet377"}
DEPTHS = {layers: architecture(name).blocks for layers, name in PUBLISHED.items()}
DEPTHS[1001] = (3, 8, 152, 3)
KIND, BATCH, FRAMES = "df_revnet377", 2, 200
#: Ways to have the activations that the backward pass needs, and their names.
MODES = {
    "store": "stored",
    "recompute": "checkpointed",
    "reconstruct": "reconstructed",
}
#: For each speaker of the cohort of AS-Norm: with all, scoring takes twice as long.
COHORT_UTTERANCES = 4
#: Fewer epochs than demo.yaml has, at rates of SGD that learn sooner.
SHORT = {"number_of_epochs": 9, "final_lr": 3.0e-3}
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

    headline("1. A deep encoder: its activations stored, checkpointed, reconstructed")
    seen = show_memory(output / "memory.png", device, quick=options.quick)
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
    files = compare(run, data, device)
    headline("6. Error rates")
    rates = print_rates(output, reports)
    headline("7. What you saw, and what to try next")
    sum_up(output, run, seen, rates, files)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes in all")


def headline(text: str) -> None:
    """Open a part of the demo."""
    print(f"\n=== {text}", flush=True)


def train_step(encoder: nn.Module, feats: Tensor) -> None:
    """Run a forward and a backward pass."""
    encoder.zero_grad(set_to_none=True)
    encoder(feats).square().mean().backward()


def show_memory(picture: Path, device: str, *, quick: bool) -> str:
    """Measure a step in each mode, count others; print, draw and sum up both."""
    *_, measured, deepest = list(DEPTHS)[:2] if quick else DEPTHS
    print(
        f"A step of {measured} layers, {BATCH} utterances of {FRAMES / 100:g} s, {device}:"
    )
    feats = torch.randn(BATCH, FRAMES, 80, device=device)
    peaks, seconds = measured_steps(DEPTHS[measured], feats, 1 if quick else 2)
    for mode, name in MODES.items():
        bar = "#" * max(1, round(40 * peaks[mode] / max(peaks.values())))
        size = f"{peaks[mode] / MIB:7,.0f} MiB {seconds[mode]:6.2f} s"
        print(f"  {name:<14}{size}  {bar}", flush=True)

    print("\nMiB for each utterance of the batch, at more and more layers:")
    print("  layers" + "".join(f"{name:>15}" for name in MODES.values()))
    depths: dict[str, dict[int, float]] = {mode: {} for mode in MODES}
    for layers in takewhile(lambda layers: layers <= deepest, DEPTHS):
        for mode, curve in depths.items():
            curve[layers] = counted_bytes(mode, layers)
        row = (f"{curve[layers] / MIB:15,.1f}" for curve in depths.values())
        print(f"  {layers:6,}" + "".join(row), flush=True)

    encoder = build_encoder(KIND, blocks=DEPTHS[deepest], mode="reconstruct").to(device)
    begin = time.monotonic()
    peak = live_bytes_peak(functools.partial(train_step, encoder, feats[:1])) / MIB
    print(
        f"\nA step of {deepest:,} layers with one utterance, reconstructed, ran here: ",
        end="",
    )
    held = sum(p.nbytes for p in encoder.parameters()) / MIB
    print(
        f"{peak:,.0f} MiB, of which {held:,.0f} are gradients; "
        f"{time.monotonic() - begin:.1f} s"
    )
    memory_by_depth(
        {mode: (peaks[mode], seconds[mode]) for mode in MODES},
        depths,
        picture,
        title=f"A training step of {measured} layers, and memory against depth",
        source=f"df_revnets, batch {BATCH}, {FRAMES} frames, float32, {device}. Peak: live "
        "tensors of forward and backward pass, gradients included. recompute: each block "
        "checkpointed. MiB per utterance: what one adds to a large batch, counted.",
    )
    stored, flat = (peaks[mode] / MIB for mode in ("store", "reconstruct"))
    slower = seconds["reconstruct"] / seconds["store"]
    few, many = (depths["reconstruct"][each] / MIB for each in (min(DEPTHS), deepest))
    return (
        f"{measured} layers took {stored:,.0f} MiB stored, and {flat:,.0f} MiB reconstructed in "
        f"{slower:.2f} times the seconds;\nan utterance takes {few:.1f} MiB at {min(DEPTHS)} "
        f"layers, and {many:.1f} MiB at {deepest:,}."
    )


def measured_steps(
    blocks: tuple[int, ...], feats: Tensor, repeats: int
) -> tuple[dict[str, int], dict[str, float]]:
    """Measure bytes at the peak of a step in each mode, and seconds of it."""
    peaks: dict[str, int] = {}
    steps = {}
    for mode in MODES:
        encoder = build_encoder(KIND, blocks=blocks, mode=mode).to(feats.device)
        steps[mode] = functools.partial(train_step, encoder, feats)

    def run(mode: str) -> None:
        if mode in peaks:
            steps[mode]()
        else:  # Its first run, whose seconds do not count.
            peaks[mode] = live_bytes_peak(steps[mode])

    runs = {mode: functools.partial(run, mode) for mode in MODES}
    taken = interleaved_seconds(runs, feats.device, repeats=repeats)
    return peaks, {mode: statistics.median(times) for mode, times in taken.items()}


def counted_bytes(mode: str, layers: int) -> float:
    """Return what one more utterance adds to the peak of a step; count it if need be."""
    if layers in PUBLISHED:
        return counted_peaks()[PUBLISHED[layers], mode, FRAMES].bytes_per_utterance
    with torch.device("meta"):
        encoder = build_encoder(KIND, blocks=DEPTHS[layers], mode=mode)
        batches = [torch.randn(n, FRAMES, encoder.n_mels) for n in (128, 256)]
    few, more = (
        live_bytes_peak(functools.partial(train_step, encoder, feats))
        for feats in batches
    )
    return (more - few) / 128


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
        **SHORT,
        **changed,
    }
    overrides = [f"--{name}={value}" for name, value in settings.items()]
    hparams = REPOSITORY / "hparams" / "demo.yaml"
    train.main([str(hparams), *overrides, f"--device={device}"])
    return folder


def systems(run: Path, device: str) -> dict[str, SpeakerEmbedder]:
    """Load what was trained, and what it has to be better than."""
    names = ("arch", "widths", "blocks", "n_mels", "embedding_dim", "seed")
    settings = {name: record_of(run).settings[name] for name in names}
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
        trials = trial_files(trial_lists, open_sources(data))
        extract(embedder, folder, trials, cohort_files(manifest, COHORT_UTTERANCES))
        report = score(folder, trial_lists, speakers)
        assert report is not None
        for remark in report.remarks:
            print(remark)
        reports[name] = report.content
    return reports


def compare(run: Path, data: Path, device: str) -> tuple[Path, Path]:
    """Embed and compare two files of one voice and two of two; give the first ones."""
    embedder = SpeakerEmbedder.from_run(run, device=device)
    listed = scoring.read_trials(data / "trials.txt")
    pairs = []
    for label, words in ((1, "one voice, two sessions"), (0, "two voices")):
        row = int(np.flatnonzero(listed.labels == label)[0])
        names = listed.enrol[row], listed.test[row]
        a, b = (data / "wav" / name for name in names)
        found = embedder.verify(a, b)
        print(f"{found.score:6.3f}  {words}: {names[0]} and {names[1]}")
        pairs.append((a, b))
    return pairs[0]


def print_rates(
    output: Path, reports: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Print the table of error rates, draw their curves, and give those of AS-Norm."""
    curves, shown = {}, {}
    measure = scoring.MEASURES["eer"]
    print(f"{measure.column:<26}{'cosine':>8}{'AS-Norm':>9}")
    for name, report in reports.items():
        rates = {r["method"]: measure.text(r["eer"]) for r in report["results"]}
        print(f"{name:<26}{rates['cosine']:>8}{rates['as_norm']:>9}")
        shown[name] = rates["as_norm"]
        scored = output / name / "scores" / "trials.as_norm.txt"
        labels, scores = np.loadtxt(scored, usecols=(2, 3)).T
        curves[f"{name}, AS-Norm"] = scoring.det_curve(scores, labels)
    plots.det_plot(curves, output / "det.png")
    return shown


def shown(path: Path) -> Path:
    """Shorten a path below the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def sum_up(
    output: Path, run: Path, seen: str, rates: Mapping[str, str], files: Sequence[Path]
) -> None:
    """Print what was shown, where everything is, and what to try next."""
    epochs = read_rows(run / "train_log.jsonl")
    output, run, *files = map(shown, (output, run, *files))
    minutes = sum(epoch["minutes"] for epoch in epochs)
    pictures = ("memory.png", "trained/training_curves.png", "det.png")
    print(seen)
    print(
        f"A small revnet57 trained for {epochs[-1]['steps']} steps in {minutes:.1f} minutes."
    )
    print(
        f"On voices that it never heard its equal error rate is {rates['trained']} %, untrained "
        f"{rates['untrained']} %, of mean features {rates['baseline']} %."
    )
    print("Synthetic voices prove the path, not the accuracy.")
    print(f"Pictures:    {'  '.join(str(output / picture) for picture in pictures)}")
    print(f"Model:       {run}")
    print(f"Embeddings:  {run / 'embeddings' / 'trials.npz'}")
    print("Try next (after `. .venv/bin/activate`):")
    print(f"  speechbrain-rev verify {run} {files[0]} {files[1]}")
    print("  speechbrain-rev models --card 11GB --batch 128")
    print("  speechbrain-rev data FOLDER_OF_YOUR_SPEECH")


if __name__ == "__main__":
    main()
