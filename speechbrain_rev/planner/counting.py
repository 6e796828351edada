"""Count what each block holds and works on, in each mode after each other.

Training steps run on meta tensors, or wherever the network is: one for each mode, and
two for each pair of modes that take turns, so that every mode has been seen after every
other one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from speechbrain_rev.planner.block_profile import BlockProfile, Pair, waiting_bytes
from speechbrain_rev.planner.network import Network, keeping_modes
from speechbrain_rev.planner.problem import Cost
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.trace import Step, Trace, trace_bytes
from speechbrain_rev.reversible import Mode
from speechbrain_rev.reversible.modes import fallback


def profile_bytes(
    network: Network,
    step: Step,
    seconds: Mapping[tuple[str, str], float],
    about: Mapping[str, str],
) -> Profile:
    """Count what each block holds and works on, in each mode after each other.

    Parameters
    ----------
    network : Network
        Its blocks get modes in turn, and then those that they had.
    step : callable
        Runs forward and backward pass, with gradients of weights there already.
    seconds : mapping of (str, str) to float
        Time by block and mode; of the rest under ("", "").
    about : mapping of str to str
        What is profiled.

    Returns
    -------
    Profile
        From it follows the peak of any plan.

    Raises
    ------
    ValueError
        If the blocks do not run one after the other.
    """
    gradient_bytes = {
        name: sum(
            p.numel() * p.element_size() for p in block.parameters() if p.requires_grad
        )
        for name, block in network.named_blocks().items()
    }
    found: dict[str, dict[Pair, Cost]] = {}
    after_bytes: dict[str, int] = {}
    base_bytes = 0
    for modes, trace in _traces(network, step):
        seen = list(trace.blocks.values())
        # When a block ends, its caller may still have what the block before it returned
        # by a name of its own, until it gives the name to something else.
        nexts = [*(block.before_bytes for block in seen[1:]), trace.backward_bytes]
        ends = [min(b.after_bytes, x) for b, x in zip(seen, nexts, strict=True)]
        base_bytes = held = seen[0].before_bytes
        waits = waiting_bytes(list(trace.blocks), modes, gradient_bytes)
        before: str | None = None
        for (name, block), end in zip(trace.blocks.items(), ends, strict=True):
            own = modes[name]
            backward = (block.backward_peak_bytes or 0) - waits[name]
            peak = max(block.forward_peak_bytes, backward)
            cost = Cost(
                held_bytes=end - held,
                working_bytes=max(0, peak - held),
                seconds=seconds[name, own],
            )
            found.setdefault(name, {}).setdefault((before, own), cost)
            before, held = own, end
        assert before is not None
        after = trace.between_peak_bytes - held
        after_bytes[before] = max(after_bytes.get(before, 0), after)
    return Profile(
        [BlockProfile(n, gradient_bytes[n], costs) for n, costs in found.items()],
        base_bytes,
        after_bytes,
        seconds["", ""],
        about,
    )


def _traces(network: Network, step: Step) -> Iterator[tuple[dict[str, str], Trace]]:
    """Trace patterns in which each mode follows each, at every block that allows it.

    First blocks of which nothing is trained keep nothing whatever they do: they store.
    """
    allowed = dict(network.allowed_modes())
    modes = [mode for mode in Mode if any(mode in own for own in allowed.values())]
    patterns = [(mode, mode) for mode in modes]
    patterns += [
        pair for a, b in itertools.combinations(modes, 2) for pair in ((a, b), (b, a))
    ]
    order: list[str] = []
    with keeping_modes(network):
        for pair in patterns:
            turn = {name: i % 2 for i, name in enumerate(order or allowed)}
            chosen = {
                name: fallback(pair[turn[name]], own) for name, own in allowed.items()
            }
            network.set_mode(chosen)
            trace = trace_bytes(network, step)
            order = list(trace.blocks)
            for name, seen in trace.blocks.items():
                if seen.backward_peak_bytes is None and Mode.STORE in allowed[name]:
                    allowed[name] = (Mode.STORE,)
            yield {name: mode.value for name, mode in chosen.items()}, trace
