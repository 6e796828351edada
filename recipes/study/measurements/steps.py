"""What a training step takes: memory and time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from measurements.rebuilt import Batch, NotEqual, Rebuilt, read_state
from speechbrain_rev.angles import angle_degrees
from speechbrain_rev.architectures import architecture
from speechbrain_rev.environment import environment
from speechbrain_rev.inference.encoder_settings import run_settings
from speechbrain_rev.optim import state_bytes
from speechbrain_rev.planner.memory import breakdown, live_bytes_peak, storage_bytes
from speechbrain_rev.planner.timing import interleaved_seconds
from speechbrain_rev.reversible import Mode

#: Precisions that a step is measured in; fp16 has a loss scaler, which is not here.
_PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Way:
    """A run, or another way to train its encoder.

    Attributes
    ----------
    folder : str or Path
        The run's output_folder, which stays as it was.
    changed : mapping
        Settings that differ from the run's; the optimizer then begins without states.
    """

    folder: str | Path
    changed: Mapping[str, Any] = field(default_factory=dict)


def ways_of(folder: str | Path) -> dict[str, Way]:
    """List the ways to train a run's encoder that compute the same, at 32 and 8 bit.

    Parameters
    ----------
    folder : str or Path
        The run's output_folder.

    Returns
    -------
    dict of str to Way
        By mode and bits, "store, 32 bit" first.
    """
    reversible = architecture(run_settings(Path(folder))["arch"]).reversible
    modes = ["store", "recompute", *(["reconstruct"] if reversible else [])]
    return {
        f"{mode}, {bits} bit": Way(folder, {"mode": mode, "optimizer_bits": bits})
        for bits in (32, 8)
        for mode in modes
    }


def measure(
    ways: Mapping[str, Way], device: torch.device | str, *, repeats: int = 5
) -> dict[str, dict[str, Any]]:
    """Measure a training step of runs, as it is at the end of the training.

    A step is what the recipe does with features: forward pass, loss, backward pass,
    clipping, the optimizer's step, gradients set to None. They are of a batch of the
    run's speech, on which depends what compression saves. Before any figure each
    way that claims to compute what stored activations compute has to, to the bit.

    Parameters
    ----------
    ways : mapping of str to Way
        By name. Batch, chunk, precision and modes are the run's, where no other are
        given.
    device : torch.device or str
        Where it is measured; on a CPU with the threads that torch has.
    repeats : int
        Steps that are timed, the ways taking turns.

    Returns
    -------
    dict of str to dict
        For each way ``peak_bytes`` of the second step, in which the optimizer has
        its states: all tensors, counted, or on CUDA what the allocator handed out. Its
        parts ``activations_bytes``, ``optimizer_state_bytes``, ``weight_bytes`` and
        ``gradient_bytes`` need not peak together. Encoder's ``parameters``.
        ``seconds_per_step``, the median, with ``fastest_seconds`` and
        ``slowest_seconds``; ``blocks``, how many have which mode; ``device``,
        ``processor``, ``threads`` and ``repeats``.

    Raises
    ------
    NotEqual
        If a mode that claims it does not give the gradient of stored activations.
    ValueError
        If a folder holds no run, or one in fp16.
    """
    device = torch.device(device)
    measured, steps = {}, {}
    for name, way in ways.items():
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        step = _Step.of(way, device)
        check_equal(step.run, step.batch)
        measured[name] = step.bytes(before)
        steps[name] = step
    taken = interleaved_seconds(steps, device, repeats=repeats)
    for name, seconds in taken.items():
        measured[name] |= {
            "seconds_per_step": statistics.median(seconds),
            "fastest_seconds": min(seconds),
            "slowest_seconds": max(seconds),
            "device": device.type,
            "processor": dict(environment())["processor"],
            "threads": torch.get_num_threads(),
            "repeats": repeats,
        }
    return measured


@dataclass(frozen=True)
class _Step:
    """A training step that can be called again and again."""

    run: Rebuilt
    batch: Batch
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, way: Way, device: torch.device) -> _Step:
        """Put a run's step together."""
        run = Rebuilt.of(way.folder, device, **way.changed)
        precision = run.hparams["precision"]
        if precision not in _PRECISIONS:
            raise ValueError(
                f"{way.folder} was trained in {precision}; steps are measured in "
                f"{' and '.join(_PRECISIONS)}. Leave it out."
            )
        optimizer = run.hparams["opt_class"](run.modules.parameters())
        compression = run.hparams["compression"]
        compression.follow(optimizer)
        last = run.epochs()[-1]
        run.restore(last)
        if not way.changed:
            optimizer.load_state_dict(read_state(last, "optimizer"))
            checkpointer = run.hparams["checkpointer"]
            checkpointer.add_state("compression", compression)
            checkpointer.restore_states("compression")
        (batch,) = run.batches(1)
        return cls(run, batch, optimizer)

    def __call__(self) -> None:
        """Take the step."""
        self.backward()
        most = self.run.hparams["max_grad_norm"]
        nn.utils.clip_grad_norm_(self.run.modules.parameters(), most)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self) -> None:
        """Compute loss and gradients, and set the learning rate, as in training."""
        precision = self.run.hparams["precision"]
        loss = self.run.loss(self.batch, precision=precision)
        self.run.hparams["lr_annealing"].on_batch_end(self.optimizer)
        loss.backward()

    def bytes(self, before: int) -> dict[str, Any]:
        """Count the second step, and say what is counted; `before` was there already."""
        self()
        peak_bytes = self._peak_bytes(before)
        report = breakdown(
            self.run.modules,
            self.backward,
            inputs=self.batch,
            optimizer=self.optimizer,
            precision=self.run.hparams["precision"],
        )
        self.optimizer.zero_grad(set_to_none=True)
        modes = [str(Mode(m).value) for m in self.run.encoder.block_modes().values()]
        return {
            "peak_bytes": peak_bytes,
            "activations_bytes": report.activations_bytes,
            "optimizer_state_bytes": state_bytes(self.optimizer),
            "weight_bytes": report.weights_bytes,
            "gradient_bytes": report.gradients_bytes,
            "parameters": sum(p.numel() for p in self.run.encoder.parameters()),
            "blocks": {mode: modes.count(mode) for mode in sorted(set(modes))},
        }

    def _peak_bytes(self, before: int) -> int:
        device = self.run.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self()
            return torch.cuda.max_memory_allocated(device) - before
        modules = self.run.modules
        held = storage_bytes([*modules.parameters(), *modules.buffers(), *self.batch])
        return held + state_bytes(self.optimizer) + live_bytes_peak(self)


def check_equal(run: Rebuilt, batch: Batch) -> None:
    """Compare the gradient of a run's modes with that of stored activations.

    Blocks that compress, and reconstruct float streams, do not claim to be equal.

    Parameters
    ----------
    run : Rebuilt
        Its modes stay what they are.
    batch : Batch
        What the gradient is of.

    Raises
    ------
    NotEqual
        If a bit differs.
    """
    encoder, precision = run.encoder, run.hparams["precision"]
    modes = encoder.block_modes()
    kinds = set(modes.values())
    inexact = Mode.RECONSTRUCT in kinds and encoder.streams != "exact"
    if Mode.COMPRESS in kinds or inexact:
        return
    own = run.gradient(batch, precision=precision)
    encoder.set_mode("store")
    stored = run.gradient(batch, precision=precision)
    encoder.set_mode(modes)
    run.modules.zero_grad(set_to_none=True)
    if not torch.equal(own, stored):
        raise NotEqual(
            f"The gradient of {run.folder} is {angle_degrees(own, stored)} degrees off "
            "that of stored activations, and claims to be the same. There are no figures."
        )
