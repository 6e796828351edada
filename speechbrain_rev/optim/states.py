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
# What optimizers call the moments of a parameter: this package, and torch's.
_MOMENTS = ("state1", "state2", "momentum_buffer", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Storage:
    """How 8-bit states are stored.

    Attributes
    ----------
    block : int
        Values that share a scale.
    pack_small : bool
        Whether tensors under ``MIN_8BIT_ELEMENTS`` share blocks, else they are float32.
    kept : frozenset of Tensor
        Parameters whose states are float32.
    """

    block: int
    pack_small: bool
    kept: frozenset[Tensor]

    def form(self, param: Tensor) -> tuple[int | None, bool]:
        """Give the block of a parameter's states, None in float32, and if it is shared."""
        small = param.numel() < MIN_8BIT_ELEMENTS
        if param in self.kept or (small and not self.pack_small):
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

    def fill(
        self,
        saved: Mapping[Tensor, Mapping[str, Any]],
        saved_block: int,
        *,
        requantise: bool = False,
    ) -> None:
        """Copy saved states; those of another form are read and stored anew.

        With ``requantise`` so are those of shared blocks: they had other neighbours.
        """
        params = list(self.states)
        for param, own in self.states.items():
            steps = saved[param].get("step", 1)
            own["step"].copy_(torch.as_tensor(steps, dtype=torch.float32))
        sharing = sum("offset" in saved[param] for param in params)
        for pack in self.packs:
            tensors = range(pack.first, pack.last)
            for run in [tensors] if pack.shared else [[t] for t in tensors]:
                given = [saved[params[t]] for t in run]
                forms = {("absmax1" in state, "offset" in state) for state in given}
                alike = pack.block == saved_block and forms == {(True, pack.shared)}
                has_its_blocks = not pack.shared or (
                    len(run) == sharing and not requantise
                )
                if alike and has_its_blocks:
                    for t, state in zip(run, given, strict=True):
                        own = self.states[params[t]]
                        for key in own.keys() - {"step", "offset", "arena"}:
                            own[key].copy_(state[key])
                    continue
                low = self.table.starts[run[0]] - self.table.starts[pack.first]
                block = pack.first_blocks[run[0] - pack.first]
                read = (moments_of(state, saved_block) for state in given)
                for i, parts in enumerate(zip(*read, strict=True)):
                    values = torch.cat([part.reshape(-1) for part in parts])
                    if pack.block is not None:
                        values, absmax = quantise(
                            values,
                            block_size=pack.block,
                            signed=i == 0,
                            keep_lowest=True,
                        )
                        # As after a step, no second moment is lost.
                        values.clamp_(min=i)
                        pack.scales[i][block:][: len(absmax)] = absmax
                    pack.moments[i][low:][: len(values)] = values


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
        1 of SGD, 2 of Adam.
    """

    def order(param: Tensor) -> tuple[bool, bool, bool]:
        # Whole blocks first: they are read as one tensor.
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
        # Where each begins among whole blocks: one of its own, or that of its neighbours.
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
        Of one parameter, in an optimizer of this package or of torch.
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
        if stored.dtype != torch.uint8:
            moments.append(stored.float())
            continue
        # Of shared blocks what lies before the parameter is left out.
        codes = torch.nn.functional.pad(stored.reshape(-1), (offset, 0))
        absmax = state[f"absmax{number}"]
        read = dequantise(codes, absmax, block_size=block, signed=number == 1)
        moments.append(read[offset:].view(stored.shape))
    return moments
