"""Where in an encoder a training step's memory is: stem, stages, pooling and embedding.

A stage holds something between its forward and its backward pass, and works with more
while one of them runs. Both follow from a step that is watched block by block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.memory.report import storage_bytes
from speechbrain_rev.planner.trace import Trace
from speechbrain_rev.reversible import Mode


@dataclass(frozen=True)
class StageMemory:
    """What one part of an encoder takes in a training step.

    Attributes
    ----------
    name : str
        "input", "stem", "stage 1" to "stage 4", each with the transition into it,
        "pooling, embedding", or "classifier".
    blocks : mapping of str to int
        How many of its blocks have each mode; empty where there are no blocks.
    held_bytes : int
        What its forward pass adds to what is alive when it ends. Where a stage keeps its
        output only, this can be what the stage before no longer needs to keep.
    working_bytes : int
        The most in one of its passes, above what it and all before it hold.
    peak_bytes : int
        The same with what they hold: the most that is alive in its passes.
    weights_bytes, gradients_bytes, optimizer_states_bytes : int
        Of its parameters; buffers are among the weights. What several parts share is
        counted for the first of them.
    """

    name: str
    blocks: Mapping[str, int]
    held_bytes: int
    working_bytes: int
    peak_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_states_bytes: int


def stage_memory(
    encoder: SpeakerEncoder,
    trace: Trace,
    optimizer: torch.optim.Optimizer,
    classifier: nn.Module | None = None,
) -> list[StageMemory]:
    """Tell what each part of an encoder takes in a training step that was watched.

    Parameters
    ----------
    encoder : SpeakerEncoder
        With gradients.
    trace : Trace
        What was alive in a step of it, block by block.
    optimizer : torch.optim.Optimizer
        With states of all parameters.
    classifier : nn.Module or None
        Trained with the encoder; it has no part in the step.

    Returns
    -------
    list of StageMemory
        In the order of execution. What they hold adds up to what is alive when the last
        block's forward pass ends; the largest of their peaks is that of the step;
        weights, gradients and states add up to those of encoder and classifier.

    Examples
    --------
    >>> from speechbrain_rev.models.counting import training_step
    >>> from speechbrain_rev.optim import build_optimizer
    >>> from speechbrain_rev.planner.trace import trace_bytes
    >>> encoder, step = training_step("resnet34", frames=200, batch=64)
    >>> optimizer = build_optimizer(encoder.parameters(), name="sgd", bits=8, lr=0)
    >>> optimizer.step()
    >>> stages = stage_memory(encoder, trace_bytes(encoder, step), optimizer)
    >>> [stage.name for stage in stages][:3], max(stage.peak_bytes for stage in stages)
    (['input', 'stem', 'stage 1'], 4036560136)
    """
    counts = _mode_counts(encoder.block_modes())
    own: dict[str, nn.Module | None] = {"input": None, "stem": encoder.stem}
    own |= {f"stage {i + 1}": stage for i, stage in enumerate(encoder.stages)}
    own["pooling, embedding"] = encoder.fc
    if classifier is not None:
        own["classifier"] = classifier
    weights, gradients, states = _Growing(), _Growing(), _Growing()
    found, held = [], 0
    for name, (end, peak) in _activations(trace, list(own)).items():
        module = own[name] or nn.Module()
        parameters = list(module.parameters())
        values = tree_leaves([dict(optimizer.state[p]) for p in parameters])
        found.append(
            StageMemory(
                name,
                counts.get(name, {}),
                held_bytes=end - held,
                working_bytes=peak - end,
                peak_bytes=peak,
                weights_bytes=weights.add([*parameters, *module.buffers()]),
                gradients_bytes=gradients.add(p.grad for p in parameters),
                optimizer_states_bytes=states.add(values),
            )
        )
        held = end
    return found


class _Growing:
    """Tensors whose memory is counted once, part by part."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._bytes = 0

    def add(self, values: Iterable[Any]) -> int:
        """Add those that are tensors, and say what they add in memory."""
        before = self._bytes
        self._tensors += [x for x in values if isinstance(x, Tensor)]
        self._bytes = storage_bytes(self._tensors)
        return self._bytes - before


def _activations(trace: Trace, names: list[str]) -> dict[str, tuple[int, int]]:
    """Tell for each part what is alive after its forward pass, and the most in both."""
    blocks = list(trace.blocks.items())
    stage_of = {name: _stage_of(name) for name, _ in blocks}
    base = blocks[0][1].before_bytes
    last = blocks[-1][1].after_bytes
    # What lies between two blocks belongs to the second of them.
    ends = {stage_of[name]: seen.before_bytes for name, seen in blocks[::-1]}
    found = {"input": (base, base)}
    stages = list(dict.fromkeys(stage_of.values()))
    for stage, after in zip(stages, [*stages[1:], None], strict=True):
        end = last if after is None else ends[after]
        peaks = [
            max(seen.forward_peak_bytes, seen.backward_peak_bytes or 0)
            for name, seen in blocks
            if stage_of[name] == stage
        ]
        found[stage] = (end, max(peaks))
    found["pooling, embedding"] = (last, trace.between_peak_bytes)
    # A stage without blocks or a classifier holds nothing of the encoder's step.
    held = base
    for name in names:
        held, _ = found.setdefault(name, (held, held))
    return {name: found[name] for name in names}


def _mode_counts(modes: Mapping[str, Mode]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for name, mode in modes.items():
        stage = counts.setdefault(_stage_of(name), {})
        stage[mode.value] = stage.get(mode.value, 0) + 1
    return counts


def _stage_of(block: str) -> str:
    """Name the stage of a block: stem, or stages.0.chain.1, which is in stage 1."""
    place = block.split(".")
    return f"stage {int(place[1]) + 1}" if place[0] == "stages" else place[0]
