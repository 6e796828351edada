"""A training run of noise, some steps of which meet NaN or files that are lost."""

import functools
import json
from types import SimpleNamespace

import pytest
import speechbrain as sb
import torch
from speechbrain.utils.epoch_loop import EpochCounter
from torch.utils.data import DataLoader

from speechbrain_rev import plots
from speechbrain_rev.data import ChunkBatch, EpochBatchSampler
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer
from speechbrain_rev.training import EpochLog, ValidatedEpochs

UTTERANCES, BATCH = 16, 4


class Noise:
    """Sixteen utterances, some of which are lost."""

    def __init__(self):
        self.lost = set()

    def path_of(self, index):
        return f"speaker/{index}.wav"

    def __getitem__(self, place):
        return place

    def batch(self, places):
        indices = [index for _, index in places]
        draws = (torch.Generator().manual_seed(i) for i in indices)
        unread = [(self.path_of(i), "it is\ngone") for i in indices if i in self.lost]
        wavs = torch.stack([torch.randn(6, generator=one) for one in draws])
        return ChunkBatch(wavs, torch.ones(len(indices)), torch.zeros(1), unread)


class NoiseBrain(ValidatedEpochs):
    """Trains a linear layer and a batch normalisation, whose statistics NaN would stay in."""

    def compute_forward(self, batch, stage):
        wavs = batch.wavs.clone()
        place = self.hparams.epoch_counter.current, self.step
        if stage == sb.Stage.TRAIN and place in self.bad:
            wavs[1] = float("nan")
        return self.modules.embedding_model(wavs)

    def compute_objectives(self, outputs, batch, stage):
        loss = outputs.square().mean()
        self.measured = torch.stack([loss.detach(), torch.tensor(1.0)])
        return loss


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """No curves, which take longer than these runs; returns the function that draws."""
    draw = plots.training_curves
    monkeypatch.setattr(plots, "training_curves", lambda rows, path: None)
    return draw


@pytest.fixture
def noise_run(tmp_path):
    """Make the Brain of a run of two epochs with four batches each."""

    def make(kind=NoiseBrain, *, bad=(), batch_size=BATCH, **run_opts):
        torch.manual_seed(0)
        layers = torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3)
        modules = {"embedding_model": torch.nn.Sequential(*layers)}
        counter = EpochCounter(2)
        dataset = Noise()
        brain = kind(
            modules=modules,
            opt_class=functools.partial(torch.optim.SGD, lr=0.1),
            hparams={
                "output_folder": str(tmp_path),
                "epoch_counter": counter,
                "number_of_epochs": 2,
                "max_unread": 2,
                "lr_annealing": SimpleNamespace(step=0, current_lr=0.1),
                "compute_cost": SimpleNamespace(margin=0.2),
                "train_logger": SimpleNamespace(log_stats=lambda line: None),
                "average_checkpoints": 2,
                "logger": None,
            },
            run_opts={"device": "cpu", "noprogressbar": True, **run_opts},
            checkpointer=WholeCheckpointer(
                tmp_path / "save", recoverables={"counter": counter, **modules}
            ),
        )
        sampler = EpochBatchSampler(UTTERANCES, batch_size, seed=0)
        brain.train_set = DataLoader(
            dataset, batch_sampler=sampler, collate_fn=dataset.batch
        )
        brain.train_sampler, brain.train_dataset = sampler, dataset
        brain.bad, brain.epoch_log = set(bad), EpochLog(tmp_path)
        brain.rows = lambda name: [json.loads(x) for x in (tmp_path / name).open()]
        return brain

    return make


@pytest.fixture
def train(noise_run):
    """Train such a run, and return its Brain."""

    def trained(*args, lost=(), **given):
        brain = noise_run(*args, **given)
        brain.train_dataset.lost.update(lost)
        brain.fit(brain.hparams.epoch_counter, brain.train_set, progressbar=False)
        return brain

    return trained
