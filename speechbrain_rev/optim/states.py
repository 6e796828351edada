"""Where the states of an optimizer lie: one tensor's behind the other's, in few buffers.

What is updated together lies together, so that a step takes a few operations however many
tensors there are. A tensor's own states are views.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.kernels.optimizer import Packed, TensorTable
from speechbrain_rev.optim.reference import dequantise, quantise

# Smaller tensors, biases and normalisations mostly, would save next to nothing alone.
MIN_8BIT_ELEMENTS = 4096
#: Entries of the state of a parameter, at 8 bits.
STATE_KEYS = frozenset(
    ["step", "state1", "state2", "absmax1", "absmax2", "offset", "arena"]
)
# Names of a parameter's moments: this package's, and torch's.
_MOMENTS = ("state1", "state2", "momentum_buffer", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Storage:
    """How states are stored.

    Attributes
    ----------
    block : int
        Values that share a scale.
    pack_small : bool
        Whether tensors under ``MIN_8BIT_ELEMENTS`` share blocks, else they are float32.
    kept : frozenset of Tensor
        Parameters whose states are float32.
    bits : int
        8, or 32 if all states are float32.
    """

    block: int
    pack_small: bool
    kept: frozenset[Tensor]
    bits: int = 8

    def form(self, param: Tensor) -> tuple[int | None, bool]:
        """Give the block of a parameter's states, None in float32, and if it is shared."""
        small = param.numel() < MIN_8BIT_ELEMENTS
        if self.bits == 32 or param in self.kept or (small and not self.pack_small):
            return None, False
        return self.block, small


@dataclass(eq=False)
class Arena:
    """States that came into being together.

    Attributes
    ----------
    group : int
        Number of the parameter group.
    states : dict of Tensor to dict
        Of each parameter, in the order of the buffers: views of these.
    table : TensorTable
        The parameters, with the gradients of a step.
    packs : list of Packed
        The buffers.
    tried : int
        Steps since they came into being, those that changed nothing among them.
    """

    group: int
    states: dict[Tensor, dict[str, Any]]
    table: TensorTable
    packs: list[Packed]
    tried: int = 0

    def set_gradients(self) -> bool:
        """Take up the gradients of a step; return whether there is one."""
        self.table.weights = [param.detach() for param in self.states]
        self.table.gradients = [param.grad for param in self.states]
        return any(param.grad is not None for param in self.states)

    def fill(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Copy states; those of blocks that had other neighbours are stored anew."""
        for param, own in self.states.items():
            own["step"].copy_(
                torch.as_tensor(states[param]["step"], dtype=torch.float32)
            )
        params = list(self.states)
        for pack in self.packs:
            sources = {param: states[param] for param in params[pack.first : pack.last]}
            if not self._copied(sources):
                assert pack.block is not None
                moments = [
                    moments_of(source, pack.block) for source in sources.values()
                ]
                for i, parts in enumerate(zip(*moments, strict=True)):
                    codes, scales = quantise(
                        torch.cat([part.reshape(-1) for part in parts]),
                        block_size=pack.block,
                        signed=i == 0,
                    )
                    # As after a step, no second moment is lost.
                    pack.moments[i].copy_(codes.clamp_(min=i))
                    pack.scales[i].copy_(scales)

    def _copied(self, sources: Mapping[Tensor, Mapping[str, Any]]) -> bool:
        """Copy states if they fit; return whether neighbours agree about shared scales."""
        pairs = [(self.states[param], source) for param, source in sources.items()]
        keys = pairs[0][0].keys() - {"step", "offset", "arena"}
        for own, source in pairs:
            if own.get("offset") != source.get("offset"):
                return False
            if any(own[key].shape != source[key].shape for key in keys):
                return False
            for key in keys:
                own[key].copy_(source[key])
        return all(
            torch.equal(own[key], source[key].to(own[key]))
            for own, source in pairs
            if "offset" in own
            for key in keys
        )


def make_arena(
    group: int, number: int, params: Sequence[Tensor], storage: Storage, moments: int
) -> Arena:
    """Make states of zeros for tensors of one device.

    Parameters
    ----------
    group : int
        Number of their parameter group.
    number : int
        How many arenas the group has before it; checkpoints keep it.
    params : sequence of Tensor
        Whose states they are.
    storage : Storage
        In which form.
    moments : int
        How many a tensor has.
    """

    def order(param: Tensor) -> tuple[bool, bool, bool]:
        # Tensors of whole blocks lie first: they are read as one tensor.
        block, shared = storage.form(param)
        return block is None, shared, param.numel() % storage.block != 0

    ordered = sorted(params, key=order)
    zeros = functools.partial(
        torch.zeros, dtype=torch.float32, device=ordered[0].device
    )
    starts = list(accumulate((param.numel() for param in ordered), initial=0))
    steps = zeros(len(ordered) + 1)
    states: dict[Tensor, dict[str, Any]] = {}
    packs: list[Packed] = []
    for (block, shared), own in groupby(ordered, storage.form):
        sizes = {param: param.numel() for param in own}
        # Each tensor begins a block of its own, or continues its neighbour's.
        filled = (n if shared else n + -n % storage.block for n in sizes.values())
        places = list(accumulate(filled, initial=0))
        blocks = -(-places[-1] // storage.block)
        dtype = torch.uint8 if block else torch.float32
        values = [zeros(sum(sizes.values()), dtype=dtype) for _ in range(moments)]
        scales = [zeros(blocks) for _ in range(moments if block else 0)]
        first, low = len(states), 0
        for place, (param, size) in zip(places, sizes.items(), strict=False):
            state: dict[str, Any] = {"step": steps[len(states)]}
            for i, moment in enumerate(values, 1):
                state[f"state{i}"] = moment[low : low + size].view(param.shape)
            for i, scale in enumerate(scales, 1):
                last = -(-(place + size) // storage.block)
                state[f"absmax{i}"] = scale[place // storage.block : last]
            if shared:
                state["offset"] = place % storage.block
            if number:
                state["arena"] = number
            states[param], low = state, low + size
        first_blocks = [place // storage.block for place in places]
        packs.append(
            Packed(first, len(states), block, shared, first_blocks, values, scales)
        )
    return Arena(group, states, TensorTable([], [], starts, steps), packs)


def stored_moments(state: Mapping[str, Any]) -> list[Tensor]:
    """List the moments of a parameter's state as they are stored; none for plain SGD.

    Example
    -------
    >>> stored_moments({"step": 1, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)})
    [tensor([1., 1.]), tensor([1., 1.])]
    """
    return [state[key] for key in _MOMENTS if isinstance(state.get(key), Tensor)]


def moments_of(state: Mapping[str, Any], block: int) -> list[Tensor]:
    """Read the moments of a parameter's state, [...] in its shape, in float32.

    Parameters
    ----------
    state : mapping
        Of one parameter, in an optimizer that computes by this package's arithmetic.
    block : int
        Values that share a scale.

    Example
    -------
    >>> codes, absmax = quantise(torch.ones(3), block_size=256, signed=True)
    >>> moments_of({"state1": codes, "absmax1": absmax}, 256)
    [tensor([1., 1., 1.])]
    """
    moments, offset = [], state.get("offset", 0)
    for number, stored in enumerate(stored_moments(state), 1):
        if f"absmax{number}" not in state:
            moments.append(stored.float())
            continue
        # Values before the offset in a shared block belong to other parameters.
        codes = stored.reshape(-1).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (offset, 0))
        absmax = state[f"absmax{number}"]
        read = dequantise(codes, absmax, block_size=block, signed=number == 1)
        moments.append(read[offset:].view(stored.shape))
    return moments
