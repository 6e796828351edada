"""Finished runs of the recipe, rebuilt from their folders, which stay as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hyperpyyaml import load_hyperpyyaml
from loaders import train_loader
from memory_plan import PLAN
from speechbrain.utils.checkpoints import METAFNAME, Checkpoint
from torch import Tensor, nn

from speechbrain_rev.catalog.steps import TrainingStep
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.checkpointer import verify_checkpoint
from speechbrain_rev.lobes.checkpoints import KeptChannels, is_end_of_epoch
from speechbrain_rev.planner import Plan


class NotEqual(ValueError):
    """What must be equal to the bit is not: then there are no figures."""


class Batch(NamedTuple):
    """A batch as the encoder and the loss get it.

    Attributes
    ----------
    feats : torch.Tensor, [batch, time, n_mels]
    classes : torch.Tensor, [batch, 1]
    """

    feats: Tensor
    classes: Tensor


@dataclass(frozen=True)
class Rebuilt:
    """A run of the recipe with the weights that it began with.

    Attributes
    ----------
    folder : Path
        The run's output_folder.
    hparams : mapping of str to object
        Its settings, built.
    device : torch.device
        Where its modules are.
    """

    folder: Path
    hparams: Mapping[str, Any]
    device: torch.device

    @classmethod
    def of(
        cls, folder: str | Path, device: torch.device | str, **changed: object
    ) -> Rebuilt:
        """Rebuild a run, with its modes and channels at a time.

        Random numbers of whoever asks are as they were.

        Parameters
        ----------
        folder : str or Path
            The run's output_folder, wherever it is now.
        device : torch.device or str
            Where it shall compute.
        **changed : object
            Settings that differ from the run's.

        Raises
        ------
        ValueError
            If the folder holds no run with a checkpoint.
        """
        folder, device = Path(folder), torch.device(device)
        settings = folder / "hyperparams.yaml"
        if not settings.is_file() or not any(folder.glob(f"save/CKPT*/{METAFNAME}")):
            raise ValueError(
                f"{folder} is no run that was trained: it lacks hyperparams.yaml or "
                "checkpoints in save. Give the output_folder of train.py."
            )
        with _kept_random_state():
            hparams = load_hyperpyyaml(
                settings.read_text(encoding="utf-8"),
                # In the file all paths are where the run was trained.
                {
                    "output_folder": str(folder),
                    "save_folder": str(folder / "save"),
                    "train_log": str(folder / "train_log.txt"),
                    **changed,
                },
            )
        run = cls(folder, hparams, device)
        KeptChannels(run.encoder).restore(hparams["checkpointer"], chosen=True)
        if "mode" not in changed and (folder / PLAN).is_file():
            Plan.load(folder / PLAN).apply(run.encoder)
        run.modules.to(device).train()
        return run

    @property
    def modules(self) -> nn.ModuleDict:
        """All that is trained, in the recipe's order of parameters."""
        return nn.ModuleDict(self.hparams["modules"])

    @property
    def encoder(self) -> SpeakerEncoder:
        """The encoder."""
        return self.hparams["modules"]["embedding_model"]

    @property
    def step(self) -> TrainingStep:
        """A step of its training."""
        modules, precision = self.hparams["modules"], self.hparams["precision"]
        return TrainingStep.of(
            self.hparams, modules, precision=precision, device=self.device
        )

    def epochs(self) -> list[Checkpoint]:
        """List the checkpoints of finished epochs that are kept, in their order."""
        found = self.hparams["checkpointer"].list_checkpoints()
        return sorted(filter(is_end_of_epoch, found), key=lambda c: c.meta["epoch"])

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take the weights of an epoch's end, and the margin of the step behind it.

        Raises
        ------
        ValueError
            If a file of the checkpoint is not as it was written.
        """
        verify_checkpoint(checkpoint)
        for name in ("embedding_model", "classifier"):
            state = read_state(checkpoint, name)
            self.hparams["modules"][name].load_state_dict(state)
        schedule = self.hparams["lr_annealing"]
        schedule.step = checkpoint.meta["steps"]
        schedule.loss.margin = schedule.margin_at(schedule.step)

    def batches(self, count: int) -> list[Batch]:
        """Read training speech as the run did, always the same.

        Utterances, chunks and augmentation are those of an epoch behind the last one,
        so that no epoch was trained on these chunks. Features are computed in float32.

        Parameters
        ----------
        count : int
            How many batches, at most as many as an epoch has.

        Returns
        -------
        list of Batch
            On the device.

        Raises
        ------
        ValueError
            If an epoch has fewer.
        """
        run, modules = self.hparams, self.hparams["modules"]
        loader = train_loader({**run, "num_workers": 0})
        if not 1 <= count <= len(loader):
            raise ValueError(
                f"{count} batches were asked for, but an epoch of {self.folder} has "
                f"{len(loader)}: give 1 to {len(loader)}."
            )
        loader.batch_sampler.set_epoch(run["number_of_epochs"] + 1)
        augment = run["wav_augment"]
        augment.step = run["number_of_epochs"] * len(loader)
        batches = []
        for _, batch in zip(range(count), loader, strict=False):
            batch = batch.to(self.device)
            wavs, lens = augment(batch.wavs, batch.lens)
            with torch.no_grad():
                feats = modules["mean_var_norm"](
                    modules["compute_features"](wavs), lens
                )
            classes = augment.replicate_labels(batch.speakers).to(self.device)
            batches.append(Batch(feats, classes))
        return batches

    def loss(self, batch: Batch, *, precision: str) -> Tensor:
        """Compute the loss that the run is trained with, in fp32 or in bf16 autocast."""
        half = precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            cosines = self.hparams["classifier"](self.encoder(batch.feats))
            return self.hparams["compute_cost"](cosines, batch.classes)

    def gradient(self, batch: Batch, *, precision: str) -> Tensor:
        """Compute the gradient of the encoder's parameters: [values], float32."""
        self.modules.zero_grad(set_to_none=True)
        self.loss(batch, precision=precision).backward()
        return torch.cat([p.grad.flatten() for p in self.encoder.parameters()])


def read_state(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Read what a checkpoint holds of a module or the optimizer, nothing but tensors."""
    return torch.load(checkpoint.paramfiles[name], "cpu", weights_only=True)


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Keep the random numbers of torch, numpy and Python from a seed within."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002


def place_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Say after which epoch and step a checkpoint was saved."""
    return {"epoch": checkpoint.meta["epoch"], "step": checkpoint.meta["steps"]}
