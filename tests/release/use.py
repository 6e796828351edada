"""What a user does who has the wheel and no checkout; run where nothing else is."""

import doctest
import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import speechbrain_rev
from speechbrain_rev.inference import SpeakerEmbedder, export_run
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.planner import plan
from speechbrain_rev.planner.saved_profiles import VARIABLE
from tests.run_folders import TINY, speech_like, write_audio, write_finished_run

COMMAND = Path(sys.prefix, "bin", "speechbrain-rev")
DOCTESTS = (
    "architectures",
    "compression.codec",
    "hparams.composition",
    "hparams.shipped",
    "lobes.encoder",
    "planner.memory",
    "optim.optimizer",
    "planner.plan",
    "reversible.chain",
    "scoring.metrics",
    "data.sampling",
)


def command(*arguments: str) -> str:
    done = subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def see_where_it_is() -> str:
    folder = Path(speechbrain_rev.__file__).parent
    assert folder.is_relative_to(sys.prefix), folder
    assert (folder / "py.typed").is_file()
    assert metadata.version("speechbrain_rev") == speechbrain_rev.__version__
    # Of the tree only what writes a small run is here.
    assert not any(map(importlib.util.find_spec, ("recipes", "tests.unit")))
    return f"speechbrain_rev {speechbrain_rev.__version__}, python {sys.version}"


def use_the_command() -> str:
    assert command("--version").strip() == speechbrain_rev.__version__
    versions = command("env")
    assert f"{'torch':<17}{metadata.version('torch')}" in versions
    table = command("models", "--card", "11GB")
    assert "revnet57" in table
    whole = command("resolve", "revnet57", "--data_folder=speech")
    assert "\narch: revnet57" in whole
    assert "PLACEHOLDER" not in whole
    Path("train.yaml").write_text(command("resolve", "train"))
    Path("mine.yaml").write_text("base: train.yaml\narch: df_revnet89\n")
    assert "\narch: df_revnet89" in command("resolve", "mine.yaml")
    assert "revnet46" in command("plan", "revnet46", "--card", "11GB")
    return f"speechbrain-rev env:\n{versions}"


def train_a_step() -> str:
    torch.manual_seed(0)
    encoder = build_encoder(
        TINY["arch"], widths=TINY["widths"], blocks=TINY["blocks"], embedding_dim=16
    )
    optimizer = build_optimizer(
        encoder.parameters(), name="adamw", bits=8, lr=0.001, weight_decay=0.05
    )
    fbank, target = torch.randn(4, 60, 80), torch.randn(4, 1, 16)
    losses = []
    for _ in range(3):
        loss = (encoder(fbank) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    network = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    chosen = plan(network, torch.randn(16, 8), "1MB", blocks=["*"])
    assert chosen.measured_bytes <= chosen.budget_bytes
    return f"losses {losses}"


def embed_and_export() -> str:
    write_finished_run(Path("run"))
    files = [
        str(write_audio(Path(f"{seed}.wav"), speech_like(0.6, seed=seed)))
        for seed in range(2)
    ]
    command("embed", "run", *files, "--out", "embeddings.npz")
    assert "score" in command("verify", "run", *files)
    export_run("run", "model")
    ours = SpeakerEmbedder.from_run("run").embed(files)
    theirs = SpeakerEmbedder.from_hparams("model").embed(files)
    assert ours.shape == (2, TINY["embedding_dim"])
    assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    return f"embeddings {tuple(ours.shape)}"


def run_doctests() -> str:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    tried = 0
    for name in DOCTESTS:
        module = importlib.import_module(f"speechbrain_rev.{name}")
        failed, some = doctest.testmod(module, optionflags=flags)
        assert failed == 0, name
        assert some > 0, name
        tried += some
    return f"{tried} examples of {len(DOCTESTS)} modules"


if __name__ == "__main__":
    # Profiles of this package's are read and written here, not in the user's cache.
    os.environ[VARIABLE] = str(Path("profiles").resolve())
    for step in (
        see_where_it_is,
        use_the_command,
        train_a_step,
        embed_and_export,
        run_doctests,
    ):
        print(f"{step.__name__}: {step()}")
