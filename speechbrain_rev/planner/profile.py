"""What each block of a network costs in each mode: the bytes that it holds, and its time.

What a plan needs at its peak follows from it to the byte.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from speechbrain_rev.planner.block_profile import BlockProfile, Pair, waiting_bytes
from speechbrain_rev.planner.capped import lightest_capped, solve_capped
from speechbrain_rev.planner.documents import (
    facts,
    finite,
    mapping,
    parsed,
    reading,
    whole,
)
from speechbrain_rev.planner.problem import Cost, Infeasible, Problem
from speechbrain_rev.reversible import Mode
from speechbrain_rev.reversible.modes import fallback

#: What follows the last block, as a block of a problem.
_END = "end"


@dataclass(frozen=True)
class Profile:
    """What the blocks of a network cost in a training step.

    Attributes
    ----------
    blocks : sequence of BlockProfile
        In the order of execution.
    base_bytes : int
        Alive before the first block.
    after_bytes : mapping of str to int
        What is worked on between the forward and the backward pass of the last block,
        above what all blocks hold, by its mode.
    after_seconds : float
        What all outside of the blocks takes.
    about : mapping of str to str
        What was profiled, where and how: a profile serves for nothing else.
    max_gradient_error : float or None
        What plans' relative error of the gradient may be; None for no limit, which counts
        only where blocks compress.
    """

    blocks: Sequence[BlockProfile]
    base_bytes: int
    after_bytes: Mapping[str, int]
    after_seconds: float
    about: Mapping[str, str]
    max_gradient_error: float | None = None

    def problem(self) -> Problem:
        """Put it as what ``knapsack.solve`` takes, with one block more for what follows.

        Weight gradients that wait in a run of blocks that reconstruct are counted as if
        every run went on to the end of its chain.
        """
        blocks: list[Mapping[Pair, Cost]] = []
        for i, block in enumerate(self.blocks):
            later = sum(
                b.gradient_bytes for b in self.blocks[i + 1 :] if b.chain == block.chain
            )
            blocks.append(
                {
                    pair: replace(cost, working_bytes=cost.working_bytes + later)
                    if pair[1] == Mode.RECONSTRUCT.value
                    else cost
                    for pair, cost in block.costs.items()
                }
            )
        blocks.append(
            {
                (mode, _END): Cost(0, size, self.after_seconds)
                for mode, size in self.after_bytes.items()
            }
        )
        return Problem(self.base_bytes, blocks, 0)

    def peak_bytes(self, modes: Mapping[str, str]) -> int:
        """Predict the peak of a training step.

        Parameters
        ----------
        modes : mapping of str to str
            A mode for each block.

        Returns
        -------
        int
            Bytes of live tensors that the step makes.

        Raises
        ------
        ValueError
            If a block has no mode, or one that it cannot have.
        """
        held, peak = self.base_bytes, 0
        names = [block.name for block in self.blocks]
        own_bytes = {block.name: block.gradient_bytes for block in self.blocks}
        waits = waiting_bytes(names, modes, own_bytes)
        before: str | None = None
        for block in self.blocks:
            own = self._mode(block, modes)
            cost = block.costs[before, own]
            peak = max(peak, held + cost.working_bytes + waits[block.name])
            held, before = held + cost.held_bytes, own
        assert before is not None
        return max(peak, held + self.after_bytes[before])

    def seconds(self, modes: Mapping[str, str]) -> float:
        """Predict the time of a training step.

        Parameters
        ----------
        modes : mapping of str to str
            A mode for each block.

        Returns
        -------
        float
            Seconds.

        Raises
        ------
        ValueError
            If a block has no mode, or one that it cannot have.
        """
        total, before = self.after_seconds, None
        for block in self.blocks:
            own = self._mode(block, modes)
            total += block.costs[before, own].seconds
            before = own
        return total

    def gradient_error(self, modes: Mapping[str, str]) -> float:
        """Predict by what part of its norm the gradient will be off.

        Parameters
        ----------
        modes : mapping of str to str
            A mode for each block.

        Returns
        -------
        float
            Root of the sum of squares over the blocks that compress; 0 if none does.

        Raises
        ------
        ValueError
            If a block has no mode, or one that it cannot have.
        """
        own = [(block, self._mode(block, modes)) for block in self.blocks]
        return math.sqrt(math.fsum(block.squared_error(mode) for block, mode in own))

    def with_errors(
        self, squared_errors: Mapping[str, float], max_gradient_error: float
    ) -> Profile:
        """Make a profile that knows what compression does to the gradient.

        Parameters
        ----------
        squared_errors : mapping of str to float
            By block that can compress.
        max_gradient_error : float
            What plans may have; 0 for lossless ones.

        Returns
        -------
        Profile
            Whose other costs are the same.
        """
        compress = Mode.COMPRESS.value

        def costs_of(block: BlockProfile) -> dict[Pair, Cost]:
            return {
                pair: replace(cost, squared_error=squared_errors[block.name])
                if pair[1] == compress
                else cost
                for pair, cost in block.costs.items()
            }

        blocks = [replace(block, costs=costs_of(block)) for block in self.blocks]
        return replace(self, blocks=blocks, max_gradient_error=max_gradient_error)

    def uniform(self, mode: Mode | str) -> dict[str, str]:
        """Give all blocks one mode; those that cannot have it recompute."""
        return {b.name: fallback(Mode(mode), b.modes).value for b in self.blocks}

    def fastest(self, budget_bytes: int) -> dict[str, str]:
        """Choose the fastest modes whose predicted peak is within a budget.

        Parameters
        ----------
        budget_bytes : int
            What a step may allocate.

        Returns
        -------
        dict of str to str
            A mode for each block.

        Raises
        ------
        Infeasible
            If even the lightest modes need more, by their exact peak.
        """
        try:
            found = solve_capped(self.problem(), budget_bytes, self._squared_limit())
            return self._named(found)
        except Infeasible:
            # The problem counts more than there is where runs end before their chains.
            modes = self.lightest()
        needed_bytes = self.peak_bytes(modes)
        if needed_bytes > budget_bytes:
            raise Infeasible(needed_bytes, budget_bytes)
        return modes

    def lightest(self) -> dict[str, str]:
        """Choose the modes of the lowest predicted peak that are known."""
        limit = self._squared_limit()
        modes = {mode for block in self.blocks for mode in block.modes}
        uniform = [self.uniform(mode) for mode in Mode if mode.value in modes]
        within = [m for m in uniform if self.gradient_error(m) ** 2 <= limit]
        known = [self._named(lightest_capped(self.problem(), limit)), *within]
        return min(known, key=self.peak_bytes)

    def fits(self, budget_bytes: int) -> bool:
        """Tell by bytes alone whether there is a plan for a budget."""
        return self.peak_bytes(self.lightest()) <= budget_bytes

    def is_held_up_by_limit(self) -> bool:
        """Tell whether the lightest modes would be lighter without a limit of the error."""
        free = replace(self, max_gradient_error=None)
        return free.peak_bytes(free.lightest()) < self.peak_bytes(self.lightest())

    def _squared_limit(self) -> float:
        limit = self.max_gradient_error
        return math.inf if limit is None else limit**2

    def _named(self, found: Sequence[str]) -> dict[str, str]:
        """Give modes of a problem to the blocks; the last is that of what follows."""
        return {b.name: m for b, m in zip(self.blocks, found[:-1], strict=True)}

    def without_reconstruction(self, names: Collection[str]) -> Profile:
        """Make a profile in which some blocks are not reconstructed.

        Parameters
        ----------
        names : collection of str
            Of those blocks.

        Returns
        -------
        Profile
            Where the others cost what they did.
        """
        refused, blocks, before = Mode.RECONSTRUCT.value, [], ""
        for block in self.blocks:
            costs = {
                (earlier, own): cost
                for (earlier, own), cost in block.costs.items()
                if not (own == refused and block.name in names)
                and not (earlier == refused and before in names)
            }
            blocks.append(replace(block, costs=costs))
            before = block.name
        return replace(self, blocks=blocks)

    def with_seconds(self, seconds: Mapping[tuple[str, str], float]) -> Profile:
        """Make a profile of the same bytes with other times.

        Parameters
        ----------
        seconds : mapping of (str, str) to float
            By block and mode; of the rest under ("", "").
        """
        blocks = [
            replace(
                block,
                costs={
                    pair: replace(cost, seconds=seconds[block.name, pair[1]])
                    for pair, cost in block.costs.items()
                },
            )
            for block in self.blocks
        ]
        return replace(self, blocks=blocks, after_seconds=seconds["", ""])

    def _mode(self, block: BlockProfile, modes: Mapping[str, str]) -> str:
        mode = modes.get(block.name)
        if mode not in block.modes:
            raise ValueError(
                f"Block {block.name!r} has {mode!r} where one of "
                f"{', '.join(block.modes)} is needed."
            )
        return Mode(mode).value

    def stretched(self, names: Sequence[str], about: Mapping[str, str]) -> Profile:
        """Make the profile of a deeper network whose further blocks are alike.

        Parameters
        ----------
        names : sequence of str
            Of the deeper network's blocks, in the order of execution. A block whose name
            ends in a number that was not profiled costs what the last one of its chain
            did.
        about : mapping of str to str
            What the deeper network is.

        Returns
        -------
        Profile
            As if the deeper network had been profiled.

        Raises
        ------
        ValueError
            If a block has no like in the profile.
        """
        own = {block.name: block for block in self.blocks}
        last = {block.chain: block for block in self.blocks}
        blocks = []
        for name in names:
            chain, _, place = name.rpartition(".")
            like = own.get(name) or (last.get(chain) if place.isdigit() else None)
            if like is None:
                raise ValueError(
                    f"Block {name!r} is like none of {', '.join(own)}. Profile this "
                    "network itself."
                )
            blocks.append(replace(like, name=name))
        return replace(self, blocks=blocks, about=about)

    def to_json(self) -> str:
        """Write it as a JSON document, which ``from_json`` reads."""
        document = asdict(self)
        for block, plain in zip(self.blocks, document["blocks"], strict=True):
            plain["costs"] = [
                [before, own, *asdict(cost).values()]
                for (before, own), cost in block.costs.items()
            ]
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what ``to_json`` wrote.

        Raises
        ------
        ValueError
            If the text is no profile.
        """
        with reading("profile", "Profile anew."):
            document = dict(parsed(text))
            blocks = [BlockProfile.read(**plain) for plain in document.pop("blocks")]
            found = cls(blocks=blocks, **document)
            whole("base_bytes", found.base_bytes)
            finite("after_seconds", found.after_seconds)
            facts(found.about)
            if found.max_gradient_error is not None:
                finite("max_gradient_error", found.max_gradient_error)
            after = {
                Mode(mode).value: whole("after_bytes", size)
                for mode, size in mapping("after_bytes", found.after_bytes).items()
            }
            _refuse_gaps(blocks, after)
            # Sizes and times that nothing has are refused there.
            found.problem()
            return found


def _refuse_gaps(blocks: Sequence[BlockProfile], after: Mapping[str, int]) -> None:
    """Refuse a profile that lacks what some plan takes."""
    before: list[str | None] = [None]
    for block in blocks:
        if not {*itertools.product(before, block.modes)} <= block.costs.keys():
            raise ValueError(f"{block.name!r} lacks costs of a mode after another")
        before = list(block.modes)
    if not blocks or not {*before} <= after.keys():
        raise ValueError("blocks or after_bytes are not complete")
