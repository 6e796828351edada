"""Make one of each file that users keep: python -m tests.compatibility.make [--output].

Later versions of the package have to read what is in the archive, resume its runs to the
recorded bits and give the recorded embeddings, scores and figures: `test_kept_files.py`
compares. An archive is made once, by the version whose name it has; changed code gets no
new one, or nothing would be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import speechbrain_rev
from speechbrain_rev import cli
from speechbrain_rev.devices import Gpu
from speechbrain_rev.inference import SpeakerEmbedder, read_cohort
from speechbrain_rev.planner.saved_profiles import VARIABLE
from tests import wespeaker
from tests.compatibility.plans import PLANS, SPEED

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "VoxCeleb"
EXPECTED, TRAINED = "expected.json", "trained"

#: Instructions that every x86-64 processor has, so that unlike ones sum in one order.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}
#: Settings of all runs, which an archive keeps with them.
_COMMON = {
    "arch": "revnet57",
    "widths": "[8, 8, 8, 8]",
    "blocks": "[1, 0, 0, 1]",
    "n_mels": 24,
    "chunk_samples": 4640,
    "number_of_epochs": 2,
    "warmup_epochs": 1.0,
    "margin_start_epoch": 1,
    "margin_end_epoch": 2,
    "ckpt_interval_steps": 2,
    "num_workers": 0,
    "data_folder": "corpus",
    "train_list": "corpus/train_list.txt",
    "trial_lists": "[corpus/trials.txt]",
    "valid_speakers": 0,
    # From 4096 values on states are 8-bit: those of the last layer's weight.
    "embedding_dim": 96,
    "batch_size": 2,
    "average_checkpoints": 1,
    "keep_checkpoints": 1,
}
#: Of two speakers that are left for trials.
HEARD = "spk003/s01/00001.flac", "spk004/s01/00001.flac"
FINISHED = "finished_adamw_8bit"
#: Each run's settings, and the step after which it is killed; None for a finished one.
RUNS: dict[str, tuple[dict[str, object], int | None]] = {
    FINISHED: (
        {
            "optimizer_name": "adamw",
            "valid_trials": "corpus/trials.txt",
            "ckpt_interval_steps": 0,
        },
        None,
    ),
    "mid_epoch_sgd_8bit": ({"optimizer_name": "sgd", "memory_budget": "0.5MB"}, 3),
    "mid_epoch_adamw_32bit": ({"optimizer_name": "adamw", "optimizer_bits": 32}, 3),
}
#: What each subcommand that has --json prints for these arguments.
COMMANDS = {
    "models": ["models", "--card=11GB", "--batch=128"],
    "models_600_frames": ["models", "revnet57", "resnet152", "--frames=600"],
    "memory": ["memory", "--card=11GB"],
    "memory_stages": ["memory", "revnet57", "--stages"],
    "plan": ["plan", "resnet34", "revnet57", "--card=5GB", "--batch=128"],
    "sweep": ["sweep", "revnet57", "--card=11GB", "--batches=64:192:64"],
}  # fmt: skip
_DIES = """
import os, sys
sys.path.insert(0, {recipe!r})
import train

def die(self, *args, _progress=train.SpeakerBrain.on_fit_batch_end):
    _progress(self, *args)
    if self.hparams.lr_annealing.step == {step}:
        os._exit(9)

train.SpeakerBrain.on_fit_batch_end = die
train.main(sys.argv[1:])
"""


def python(
    folder: Path, *argv: object, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder by instructions that all processors have."""
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=folder,
        env={**os.environ, **PORTABLE, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != status:
        raise RuntimeError(
            f"{argv} ended with {done.returncode}: {done.stderr[-3000:]}"
        )
    return done


def command(folder: Path, *argv: object) -> str:
    """Run a subcommand in a folder; give what it prints."""
    return python(folder, "-m", "speechbrain_rev", *argv).stdout


def printed_json(argv: Sequence[str]) -> str:
    """Run a subcommand that estimates the times of one GPU, whichever is listed."""
    with (
        mock.patch.object(Gpu, "speed", SPEED),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        cli.main([*argv, "--json"])
    return printed.getvalue()


def options_of(name: str) -> list[str]:
    """Give the settings of a run as options."""
    settings = {**_COMMON, **RUNS[name][0]}
    return [f"--{key}={value}" for key, value in settings.items()]


def train_arguments(options: Sequence[str], output: str) -> list[str]:
    """Give the command line of train.py in the folder of all files."""
    file = str(ROOT / "hparams" / "train.yaml")
    return [file, *options, f"--output_folder={output}", "--device=cpu"]


def train(folder: Path, options: Sequence[str], output: str) -> None:
    """Train a run, or resume it."""
    python(folder, RECIPE / "train.py", *train_arguments(options, output))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest names, types, shapes and bits of tensors."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        hasher.update(tensor.contiguous().numpy().tobytes())
    return hasher.hexdigest()


def arithmetic() -> str:
    """Digest what this machine computes, by torch alone, in a process as of `python`.

    Where it is the recorded one, resumed runs have to have the recorded bits.
    """
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        torch.nn.Conv2d(8, 32, 1, bias=False),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(96),
    )
    wave = torch.rand(2, 4640) - 0.5
    window = torch.hamming_window(400)
    spectrum = torch.stft(wave, 400, 160, window=window, return_complex=True)
    feats = (spectrum.abs().square().transpose(1, 2) @ torch.rand(201, 24)).log()
    loss = torch.nn.functional.normalize(network(feats.unsqueeze(1))).exp().sum()
    loss.backward()
    gradients = {name: weight.grad for name, weight in network.named_parameters()}
    return digest({"feats": feats, **gradients})


def arithmetic_here(folder: Path) -> str:
    """Give `arithmetic` of a process as those that train, with torch's version."""
    script = "from tests.compatibility.make import arithmetic; print(arithmetic())"
    return f"torch {torch.__version__}: {python(folder, '-c', script).stdout.strip()}"


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Read what a run trained."""
    return torch.load(run / "embedding_model.ckpt", weights_only=True)


def losses_of(run: Path) -> list[float]:
    """Read the loss of each epoch."""
    lines = (run / "train_log.jsonl").read_text().splitlines()
    return [json.loads(line)["train_loss"] for line in lines]


def make_corpus(folder: Path) -> None:
    """Speak the demo's corpus, as small as it can be."""
    sizes = {"train_speakers": 3, "test_speakers": 2, "sessions": 2, "utterances": 1}
    options = [f"--{name}={size}" for name, size in {**sizes, "numbers": 1}.items()]
    python(folder, ROOT / "recipes" / "demo" / "corpus.py", "corpus", *options)


def make_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Train the runs; say what each gives when it is trained to its end."""
    expected = {}
    (folder / TRAINED).mkdir()
    for name, (_, killed) in RUNS.items():
        options = options_of(name)
        with tempfile.TemporaryDirectory(dir=folder) as whole:
            train(folder, options, whole)
            weights = weights_of(folder / whole)
            torch.save(weights, folder / TRAINED / f"{name}.ckpt")
            expected[name] = {
                "options": options,
                "weights": digest(weights),
                "losses": losses_of(folder / whole),
            }
        if killed is None:
            train(folder, options, name)
        else:
            script = _DIES.format(recipe=str(RECIPE), step=killed)
            argv = train_arguments(options, name)
            python(folder, "-c", script, *argv, status=9)
    for script in ("extract.py", "score.py"):
        python(folder, RECIPE / script, FINISHED)
    return expected


def make_models(folder: Path) -> None:
    """Export, pack, embed, enrol and convert."""
    command(folder, "export", FINISHED, "model")
    command(folder, "export", FINISHED, "model.onnx")
    tested = "corpus/wav/spk003"
    python(folder, RECIPE / "prepare.py", "--pack", tested, "spk003.packed")
    command(folder, "embed", FINISHED, tested, "--out=embeddings.npz")
    enrolled = SpeakerEmbedder.from_run(folder / FINISHED).enrol(
        [folder / "corpus" / "wav" / HEARD[0]]
    )
    enrolled.save(folder / "spk003.safetensors")
    theirs = wespeaker.with_statistics(
        wespeaker.ResNet((1, 1, 1, 1), channels=2, feat_dim=80, embed_dim=16)
    )
    torch.save(theirs.state_dict(), folder / "avg_model.pt")
    command(folder, "convert", "wespeaker", "avg_model.pt", "converted_wespeaker")


def make_plans(folder: Path) -> None:
    """Plan, profile, and print what the subcommands say."""
    profiles = folder / "profiles"
    os.environ[VARIABLE] = str(profiles)
    command(folder, "plan", "resnet34", "--card=5GB", "--save=plan.json")
    smallest = min(profiles.iterdir(), key=lambda path: path.stat().st_size)
    smallest.rename(folder / "profile.json")
    (folder / "json").mkdir()
    for name, argv in COMMANDS.items():
        (folder / "json" / f"{name}.json").write_text(printed_json(argv))
    (folder / "plans").mkdir()
    for name, planned in PLANS.items():
        planned().save(folder / "plans" / f"{name}.json")
    shutil.rmtree(profiles)


def heard(folder: Path) -> dict[str, Any]:
    """Embed and compare two voices with each model that is kept."""
    files = [folder / "corpus" / "wav" / name for name in HEARD]
    loaders: dict[str, Callable[[Path], SpeakerEmbedder]] = {
        FINISHED: SpeakerEmbedder.from_run,
        "model": SpeakerEmbedder.from_hparams,
        "converted_wespeaker": SpeakerEmbedder.from_run,
    }
    results: dict[str, Any] = {}
    for name, load in loaders.items():
        embedder = load(folder / name)
        results[name] = {
            "embeddings": np.asarray(embedder.embed(files)).tolist(),
            "cosine": embedder.verify(*files).score,
        }
        if name != "converted_wespeaker":
            cohort = read_cohort(folder / name)
            chosen = embedder.verify(*files, cohort=cohort)
            results[name] |= {"as_norm": chosen.score, "threshold": chosen.threshold}
    return results


def tidy(folder: Path) -> None:
    """Delete pictures, logs and copies of scripts, which nothing reads."""
    for pattern in ("*.png", "log.txt", "env.log", "train_log.txt", "train.py"):
        for path in folder.rglob(pattern):
            path.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and str(ROOT).encode() in path.read_bytes():
            raise RuntimeError(f"{path} names {ROOT}, a path of this machine")


def make(folder: Path) -> None:
    """Make all files in an empty folder."""
    make_corpus(folder)
    expected: dict[str, Any] = {"arithmetic": arithmetic_here(folder)}
    expected["runs"] = make_runs(folder)
    make_models(folder)
    make_plans(folder)
    expected["heard"] = heard(folder)
    tidy(folder)
    (folder / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    name = f"{speechbrain_rev.__version__}.tar.xz"
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / name)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder, tarfile.open(output, "x:xz") as file:
        make(Path(folder))
        file.add(folder, arcname=".")
    print(f"{output}: {output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
