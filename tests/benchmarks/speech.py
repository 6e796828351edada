"""Training steps on speech, for benchmarks that must see real gradients.

The speech is that of the folder named by SPEECHBRAIN_REV_SPEECH, its minivox/ in
VoxCeleb's layout; without it, synthetic voices.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import soundfile
import torch
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization
from torch import Tensor, nn

from speechbrain_rev.architectures import architecture
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.optim import build_optimizer
from tests.corpus import write_corpus

from .harness import require
from .steps import PRECISIONS, Precision

FOLDER = "SPEECHBRAIN_REV_SPEECH"
RECIPE_BATCH = 256
MAX_GRAD_NORM = 5.0
WARMUP_STEPS = 30
#: What is left of a rate that fell.
FINAL_RATE = 1e-3

Batch = tuple[Tensor, Tensor]


class Speech:
    """Mean-normalised filterbanks of utterances by several speakers.

    Attributes
    ----------
    source : str
        What speech it is.
    speakers : int
        How many speak.
    """

    def __init__(self, n_mels: int, frames: int) -> None:
        self.frames = frames
        folder = os.environ.get(FOLDER)
        with tempfile.TemporaryDirectory() as own:
            if folder:
                root = Path(folder, "minivox")
                lines = (root / "train_list.txt").read_text().splitlines()
                files = [root / "wav" / line.split()[1] for line in lines]
                kind = "real speech (minivox)"
            else:
                root = write_corpus(Path(own), speakers=40, seconds=2.0)
                files = sorted(root.glob("wav/*/*/*"))
                kind = f"synthetic voices, for {FOLDER} is not set,"
            self._read(files, n_mels)
        self.source = f"{kind} of {self.speakers} speakers"

    def _read(self, files: list[Path], n_mels: int) -> None:
        fbank = Fbank(n_mels=n_mels)
        normalize = InputNormalization(norm_type="sentence", std_norm=False)
        names = sorted({file.parts[-3] for file in files})
        self.speakers = len(names)
        self._feats, self._labels = [], []
        for file in files:
            wave = torch.from_numpy(soundfile.read(file, dtype="float32")[0])[None]
            feats = normalize(fbank(wave), torch.ones(1))[0]
            if len(feats) >= self.frames:
                self._feats.append(feats)
                self._labels.append(names.index(file.parts[-3]))

    def batch(self, size: int, draw: torch.Generator) -> Batch:
        """Cut random chunks: [batch, frames, n_mels], and speakers, [batch, 1]."""
        chosen = torch.randint(len(self._feats), (size,), generator=draw).tolist()
        chunks = []
        for i in chosen:
            spare = len(self._feats[i]) - self.frames + 1
            start = int(torch.randint(spare, (1,), generator=draw))
            chunks.append(self._feats[i][start : start + self.frames])
        return torch.stack(chunks), torch.tensor([[self._labels[i]] for i in chosen])


def real_speech(n_mels: int, frames: int) -> Speech:
    """Read the speech of minivox, which nothing replaces here.

    Raises
    ------
    NotEqual
        If the environment names no folder with it.
    """
    folder = os.environ.get(FOLDER, "")
    require(
        bool(folder) and Path(folder, "minivox", "train_list.txt").exists(),
        f"{FOLDER} names no folder with minivox/train_list.txt (it is {folder!r}), and "
        "activations of synthetic voices say nothing about those of speech. Set it to a "
        "folder with minivox/ in VoxCeleb's layout.",
    )
    return Speech(n_mels, frames)


class Training:
    """The recipe's loss and optimizer, at the rate that its batch of 256 has.

    The rate rises from 0 over the first steps and then stays, or falls as ``let_fall``
    has it.

    Parameters
    ----------
    encoder : nn.Module
        What is trained.
    name : str
        Its row in the table of encoders.
    speech : Speech
        What it is trained on.
    precision : Precision
        Of the steps.
    rate : float
        Times the recipe's rate.
    batch : int
        Utterances of a step.
    seed : int
        Of the chunks of speech.
    """

    def __init__(
        self,
        encoder: nn.Module,
        name: str,
        speech: Speech,
        precision: Precision = PRECISIONS["float32"],
        *,
        rate: float,
        batch: int,
        seed: int = 0,
    ) -> None:
        self.device = next(encoder.parameters()).device
        self.encoder, self.speech, self.precision = encoder, speech, precision
        self.batch_size = batch
        self.classifier = CosineClassifier(256, speech.speakers).to(self.device)
        defaults = architecture(name).training
        self.lr = rate * defaults.lr * RECIPE_BATCH / 64
        self.parameters = [*encoder.parameters(), *self.classifier.parameters()]
        self.optimizer = build_optimizer(
            self.parameters,
            name=defaults.optimizer_name,
            bits=32,
            lr=self.lr,
            weight_decay=defaults.weight_decay,
        )
        self.loss = AAMSoftmax()
        self.steps_taken = 0
        self._fall: tuple[int, int] | None = None
        self._draw = torch.Generator().manual_seed(seed)

    def next_batch(self) -> Batch:
        """Features and speakers of the next step."""
        feats, speakers = self.speech.batch(self.batch_size, self._draw)
        return feats.to(self.device), speakers.to(self.device)

    def loss_of(self, batch: Batch, encoder: nn.Module | None = None) -> Tensor:
        """Compute the loss of a batch, by the own or another encoder."""
        feats, speakers = batch
        with self.precision.autocast(self.device):
            embeddings = (encoder or self.encoder)(feats)
            return self.loss(self.classifier(embeddings), speakers)

    def let_fall(self, steps: int) -> None:
        """Let the rate fall exponentially over the next steps, as the recipe's does."""
        self._fall = self.steps_taken, steps

    def step(self, batch: Batch | None = None) -> float:
        """Take one training step, on the next batch if none is given; return its loss."""
        batch = batch or self.next_batch()
        self.steps_taken += 1
        lr = self.lr * min(1.0, self.steps_taken / WARMUP_STEPS)
        if self._fall is not None:
            begin, steps = self._fall
            lr *= FINAL_RATE ** ((self.steps_taken - begin) / steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        return float(loss.detach())

    def run(self, steps: int, about: str) -> tuple[list[float], float]:
        """Take some steps; return their losses, and the median of their seconds."""
        losses, seconds = [], []
        for i in range(1, steps + 1):
            begin = time.perf_counter()
            losses.append(self.step())
            seconds.append(time.perf_counter() - begin)
            if i % 25 == 0:
                print(about, i, statistics.mean(losses[-25:]), flush=True)
        return losses, statistics.median(seconds)

    def state(self) -> dict[str, Any]:
        """Return all that a run resumes from."""
        return {
            "encoder": self.encoder.state_dict(),
            "classifier": self.classifier.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "draw": self._draw.get_state(),
            "steps": self.steps_taken,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Resume a run from what ``state`` returned."""
        self.encoder.load_state_dict(state["encoder"])
        self.classifier.load_state_dict(state["classifier"])
        # Torch would go on in the tensors that it is given.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._draw.set_state(state["draw"])
        self.steps_taken = state["steps"]
