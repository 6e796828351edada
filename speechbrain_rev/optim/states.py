"""Where the states of an optimizer lie: one tensor's behind the other's, in few buffers.

What is updated together lies together, so that a step takes a few operations however many
tensors there are. A tensor's own states are views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.kernels.optimizer import Packed, TensorTable

# Smaller tensors, biases and normalisations mostly, would save next to nothing alone.
MIN_8BIT_ELEMENTS = 4096


@dataclass(frozen=True)
class Layout:
    """In which form states are stored.

    Attributes
    ----------
    moments : int
        1 of SGD, 2 of Adam.
    block : int
        Values that share a scale, at 8 bit.
    pack_small : bool
        Whether tensors under ``MIN_8BIT_ELEMENTS`` share blocks, else they are float32.
    """

    moments: int
    block: int
    pack_small: bool

    def kind(self, param: Tensor, kept: frozenset[int]) -> int:
        """Tell 8-bit tensors (0) from small ones in shared blocks (1) and float32 (2)."""
        if id(param) in kept:
            return 2
        if param.numel() >= MIN_8BIT_ELEMENTS:
            return 0
        return 1 if self.pack_small else 2


@dataclass(eq=False)
class Arena:
    """States that came into being together.

    Attributes
    ----------
    params : list of Tensor
        Whose states they are, in the order of the buffers.
    table : TensorTable
        The same, with the gradients of a step.
    packs : list of Packed
        The buffers.
    tried : int
        Steps since they came into being, those that changed nothing among them.
    """

    params: list[Tensor]
    table: TensorTable
    packs: list[Packed]
    tried: int = 0

    def set_gradients(self) -> bool:
        """Take up the gradients of a step; return whether there is one."""
        self.table.weights = [p.detach() for p in self.params]
        self.table.gradients = [p.grad for p in self.params]
        return any(p.grad is not None for p in self.params)

    def states(self, number: int) -> dict[Tensor, dict[str, Any]]:
        """Give each parameter its views; ``number`` tells arenas of a group apart."""
        states: dict[Tensor, dict[str, Any]] = {}
        for pack in self.packs:
            base = self.table.starts[pack.first]
            for t in range(pack.first, pack.last):
                param = self.params[t]
                places = slice(
                    self.table.starts[t] - base, self.table.starts[t + 1] - base
                )
                state: dict[str, Any] = {"step": self.table.steps[t]}
                for i, moment in enumerate(pack.moments, 1):
                    state[f"state{i}"] = moment[places].view(param.shape)
                if pack.block is not None:
                    blocks = _blocks_of(pack, t, places)
                    for i, scale in enumerate(pack.scales, 1):
                        state[f"absmax{i}"] = scale[blocks]
                if pack.shared:
                    state["offset"] = places.start % (pack.block or 1)
                if number:
                    state["arena"] = number
                states[param] = state
        return states


def _blocks_of(pack: Packed, tensor: int, places: slice) -> slice:
    if pack.shared:
        block = pack.block or 1
        return slice(places.start // block, -(-places.stop // block))
    first, last = pack.first_blocks[tensor - pack.first :][:2]
    return slice(first, last)


def make_arena(params: Sequence[Tensor], layout: Layout, kept: frozenset[int]) -> Arena:
    """Make states of zeros for tensors of one device.

    Parameters
    ----------
    params : sequence of Tensor
        Whose states they are.
    layout : Layout
        In which form.
    kept : frozenset of int
        Identities of those in float32.
    """

    def key(param: Tensor) -> tuple[int, bool]:
        # Whole blocks first: they are read as one tensor.
        return layout.kind(param, kept), param.numel() % layout.block != 0

    ordered = sorted(params, key=key)
    device = ordered[0].device
    starts = [0]
    for param in ordered:
        starts.append(starts[-1] + param.numel())
    # Of the device, not of a user's default.
    steps = torch.zeros(len(ordered) + 1, device=device)
    table = TensorTable([], [], starts, steps)
    kinds = [layout.kind(p, kept) for p in ordered]
    packs = []
    for kind in sorted(set(kinds)):
        first = kinds.index(kind)
        last = first + kinds.count(kind)
        block = None if kind == 2 else layout.block
        first_blocks, values = [0], starts[last] - starts[first]
        for param in ordered[first:last]:
            first_blocks.append(first_blocks[-1] - (-param.numel() // layout.block))
        blocks = -(-values // layout.block) if kind == 1 else first_blocks[-1]
        dtype = torch.float32 if block is None else torch.uint8
        packs.append(
            Packed(
                first,
                last,
                block,
                kind == 1,
                first_blocks,
                _zeros(layout.moments, values, dtype, device),
                [] if block is None else _zeros(layout.moments, blocks, None, device),
            )
        )
    return Arena(ordered, table, packs)


def _zeros(
    count: int, size: int, dtype: torch.dtype | None, device: torch.device
) -> list[Tensor]:
    return [
        torch.zeros(size, dtype=dtype or torch.float32, device=device)
        for _ in range(count)
    ]
