"""What each block of a network costs in each mode, after each mode of the block before it.

What a plan needs at its peak follows from it to the byte.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Any

from speechbrain_rev.devices import Speed, Work
from speechbrain_rev.files import made_of, parse_json, refusing
from speechbrain_rev.modes import ALONE, Mode, fallback
from speechbrain_rev.planner.knapsack import (
    Cost,
    Infeasible,
    InRun,
    Problem,
    lightest_capped,
    solve_capped,
    worst_bytes,
)

_SIZES = "dropped_bytes", "forward_bytes", "left_bytes"
#: Fields of a cost, as they stand in a profile's document.
_COST = "held_bytes", "working_bytes", "seconds", "squared_error", *_SIZES

#: A mode, and that of the block before; None before the first.
Pair = tuple["str | None", str]


@dataclass(frozen=True)
class BlockProfile:
    """What one block costs.

    Attributes
    ----------
    name : str
        The block's; up to the last dot it is that of its chain.
    gradient_bytes : int
        Of its weights. In a run of blocks of one chain that reconstruct, gradients wait
        until the backward pass has left the run.
    costs : mapping of pair to Cost
        By the mode of the block before and its own. Weight gradients of later blocks are
        not among ``working_bytes``.
    """

    name: str
    gradient_bytes: int
    costs: Mapping[Pair, Cost]

    @property
    def chain(self) -> str:
        """The name of the chain that the block is in."""
        return self.name.rpartition(".")[0]

    @property
    def modes(self) -> list[str]:
        """The modes that the block can have."""
        return list(dict.fromkeys(own for _, own in self.costs))

    def cost(self, before: str | None, own: str) -> Cost:
        """Give a cost, with that in the backward pass of a run of blocks.

        There blocks are as if they stored, the last one as if it recomputed beside.
        """
        cost, joins = self.costs[before, own], Mode(own).spec.joins
        store = Mode.STORE.value
        stored = self.costs.get((store if joins else before, store))
        if Mode(own).alone is not Mode.RECOMPUTE or stored is None:
            return cost
        # The first one's input is kept whatever operations save.
        kept = 0 if joins else stored.dropped_bytes - cost.dropped_bytes
        held = stored.held_bytes + max(0, kept)
        alone = self.costs[before, Mode.RECOMPUTE.value]
        last = max(alone.working_bytes, stored.working_bytes)
        run = InRun(held, stored.working_bytes, last)
        return replace(cost, in_run=run, joins=joins)

    @classmethod
    def read(
        cls, name: str, gradient_bytes: int, costs: Sequence[Sequence[Any]]
    ) -> BlockProfile:
        """Make it from its part of a profile's document.

        Raises
        ------
        ValueError
            If that is damaged.
        """
        by_pair = {
            (before and Mode(before).value, Mode(own).value): made_of(
                Cost, dict(zip(_COST, numbers, strict=True))
            )
            for before, own, *numbers in costs
        }
        values = {"name": name, "gradient_bytes": gradient_bytes, "costs": by_pair}
        return made_of(cls, values)


def waiting_bytes(
    order: Sequence[str], modes: Mapping[str, str], gradient_bytes: Mapping[str, int]
) -> dict[str, int]:
    """Bytes of weight gradients of later blocks that wait, at each block."""
    waits, waiting, run = {}, 0, ""
    for name in reversed(order):
        chain = name.rpartition(".")[0]
        reconstructs = name in modes and Mode(modes[name]).spec.needs_inverse
        if not reconstructs or chain != run:
            waiting = 0
        run = chain if reconstructs else ""
        waits[name] = waiting
        waiting += gradient_bytes[name] if reconstructs else 0
    return waits


#: The rest of a step after the last block, as a block of a problem.
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
    work : mapping of (str, str) to Work
        Operations by block and mode, under ("", "") outside of blocks; empty where they
        were not counted.
    """

    blocks: Sequence[BlockProfile]
    base_bytes: int
    after_bytes: Mapping[str, int]
    after_seconds: float
    about: Mapping[str, str]
    max_gradient_error: float | None = None
    work: Mapping[tuple[str, str], Work] = field(default_factory=dict)

    def problem(self) -> Problem:
        """Put it as what ``knapsack.solve`` takes, with one block more for what follows.

        Weight gradients that wait in a run of blocks that reconstruct are counted as if
        every run went on to the end of its chain.
        """
        own_bytes = {block.name: block.gradient_bytes for block in self.blocks}
        whole = dict.fromkeys(own_bytes, Mode.RECONSTRUCT.value)
        waits = waiting_bytes([*own_bytes], whole, own_bytes)

        def waiting(block: BlockProfile, before: str | None, own: str) -> Cost:
            cost = block.cost(before, own)
            later = waits[block.name] * Mode(own).spec.needs_inverse
            return replace(cost, working_bytes=cost.working_bytes + later)

        blocks = [{pair: waiting(b, *pair) for pair in b.costs} for b in self.blocks]
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
        own_bytes = {block.name: block.gradient_bytes for block in self.blocks}
        waits = waiting_bytes([*own_bytes], modes, own_bytes)
        costs = [cost for _, cost in self._chosen(modes)]
        worst = zip(own_bytes, worst_bytes(self.base_bytes, costs), strict=True)
        # A tensor that a name keeps is there in the forward pass, and gone in the backward pass.
        forward, there = [], self.base_bytes
        for cost in costs:
            forward.append(there + cost.forward_bytes)
            there += cost.held_bytes + cost.left_bytes
        forward.append(
            there + self.after_bytes[Mode(modes[self.blocks[-1].name]).value]
        )
        return max(*forward, *(most + waits[name] for name, most in worst))

    def _chosen(self, modes: Mapping[str, str]) -> Iterator[tuple[BlockProfile, Cost]]:
        """Give each block with what it costs after the one before."""
        before: str | None = None
        for block in self.blocks:
            mode = modes.get(block.name)
            if mode is None or (before, Mode(mode).value) not in block.costs:
                raise ValueError(
                    f"Block {block.name!r} has {mode!r} where one of "
                    f"{', '.join(block.modes)} is needed, after {before!r}."
                )
            own = Mode(mode).value
            yield block, block.cost(before, own)
            before = own

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
        total = self.after_seconds
        for _, cost in self._chosen(modes):
            total += cost.seconds
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
        errors = (cost.squared_error for _, cost in self._chosen(modes))
        return math.sqrt(math.fsum(errors))

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

        def known(block: BlockProfile, own: str, cost: Cost) -> Cost:
            if Mode(own).spec.lossless:
                return cost
            return replace(cost, squared_error=squared_errors[block.name])

        return replace(self._with_costs(known), max_gradient_error=max_gradient_error)

    def _with_costs(
        self, changed: Callable[[BlockProfile, str, Cost], Cost]
    ) -> Profile:
        """Change each cost, given its block and its mode."""
        blocks = [
            replace(
                block,
                costs={
                    pair: changed(block, pair[1], cost)
                    for pair, cost in block.costs.items()
                },
            )
            for block in self.blocks
        ]
        return replace(self, blocks=blocks)

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
            modes = solve_capped(self.problem(), budget_bytes, self._squared_limit())
            return self._named(modes)
        except Infeasible:
            # The problem counts more than there is where runs end before their chains.
            lightest = self.lightest()
        needed_bytes = self.peak_bytes(lightest)
        if needed_bytes > budget_bytes:
            raise Infeasible(needed_bytes, budget_bytes)
        return lightest

    def lightest(self) -> dict[str, str]:
        """Choose the modes of the lowest predicted peak that are known."""
        limit = self._squared_limit()
        modes = {mode for block in self.blocks for mode in block.modes}
        uniform = [self.uniform(mode) for mode in ALONE if mode.value in modes]
        within = [m for m in uniform if self.gradient_error(m) ** 2 <= limit]
        known = [self._named(lightest_capped(self.problem(), limit)), *within]
        return min(known, key=self.peak_bytes)

    def is_heavier_for_limit(self) -> bool:
        """Whether the lightest modes would be lighter without a limit of the error."""
        free = replace(self, max_gradient_error=None)
        return free.peak_bytes(free.lightest()) < self.peak_bytes(self.lightest())

    def _squared_limit(self) -> float:
        limit = self.max_gradient_error
        return math.inf if limit is None else limit**2

    def _named(self, modes: Sequence[str]) -> dict[str, str]:
        """Give modes of a problem to the blocks; the last is that of what follows."""
        return {b.name: m for b, m in zip(self.blocks, modes[:-1], strict=True)}

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
            By block and mode; of the rest under ("", ""). A block that joins takes what
            it takes if it recomputes.
        """

        def timed(block: BlockProfile, own: str, cost: Cost) -> Cost:
            taken = seconds[block.name, Mode(own).alone.value]
            return replace(cost, seconds=taken)

        return replace(self._with_costs(timed), after_seconds=seconds["", ""])

    def with_speed(self, speed: Speed) -> Profile:
        """Make a profile whose times are estimated from the work of its blocks.

        Raises
        ------
        ValueError
            If operations were not counted, as where blocks were timed.
        """
        if not self.work:
            raise ValueError(
                "The profile has no counts of operations, from which times are estimated. "
                "Profile anew, with a speed."
            )
        return self.with_seconds(
            {key: speed.seconds(work) for key, work in self.work.items()}
        )

    def extrapolated(self, smaller: Profile, reach: float) -> Profile:
        """Make the profile of a larger batch, whose bytes and work go on linearly.

        Parameters
        ----------
        smaller : Profile
            Of the same blocks at a smaller batch than this one's.
        reach : float
            How far to go on: 1 goes as far as from the smaller batch to this one.

        Returns
        -------
        Profile
            Bytes are rounded up. Times are left out.

        Examples
        --------
        >>> from speechbrain_rev.planner.knapsack import Cost
        >>> def at(batch):
        ...     costs = {(None, "store"): Cost(10 * batch, 12 * batch + 1, 0.0)}
        ...     block = BlockProfile("0", 4, costs)
        ...     return Profile([block], 2 * batch, {"store": batch}, 0.0, {})
        >>> at(4).extrapolated(at(2), reach=3).peak_bytes({"0": "store"}) == at(
        ...     10
        ... ).peak_bytes({"0": "store"})
        True
        """

        def on(here: float, there: float) -> int:
            return math.ceil(here + reach * (here - there))

        def larger(cost: Cost, small: Cost) -> Cost:
            held = on(cost.held_bytes, small.held_bytes)
            sizes: dict[str, Any] = {
                name: max(0, on(getattr(cost, name), getattr(small, name)))
                for name in ("working_bytes", *_SIZES)
            }
            return Cost(held, seconds=0.0, **sizes)

        blocks = [
            replace(
                b,
                costs={pair: larger(b.costs[pair], s.costs[pair]) for pair in b.costs},
            )
            for b, s in zip(self.blocks, smaller.blocks, strict=True)
        ]
        work = {
            key: Work(
                *(
                    max(0, on(a, b))
                    for a, b in zip(astuple(w), astuple(smaller.work[key]), strict=True)
                )
            )
            for key, w in self.work.items()
        }
        after = {
            m: on(size, smaller.after_bytes[m]) for m, size in self.after_bytes.items()
        }
        base = on(self.base_bytes, smaller.base_bytes)
        return replace(
            self, blocks=blocks, base_bytes=base, after_bytes=after, work=work
        )

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
        work = {("", mode): w for (name, mode), w in self.work.items() if not name}
        for name in names:
            chain, _, place = name.rpartition(".")
            like = own.get(name) or (last.get(chain) if place.isdigit() else None)
            if like is None:
                raise ValueError(
                    f"Block {name!r} is like none of {', '.join(own)}. Profile this "
                    "network itself."
                )
            blocks.append(replace(like, name=name))
            work |= {
                (name, mode): self.work[like.name, mode]
                for mode in like.modes
                if (like.name, mode) in self.work
            }
        return replace(self, blocks=blocks, about=about, work=work)

    def to_json(self) -> str:
        """Write it as a JSON document, which ``from_json`` reads."""
        document = asdict(replace(self, work={}))
        document["work"] = [[*key, *asdict(w).values()] for key, w in self.work.items()]
        for block, plain in zip(self.blocks, document["blocks"], strict=True):
            plain["costs"] = [
                [before, own, *(getattr(cost, name) for name in _COST)]
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
        with refusing("The text is no profile", "Profile anew."):
            document = dict(parse_json(text))
            blocks = [BlockProfile.read(**plain) for plain in document.pop("blocks")]
            names = [each.name for each in fields(Work)]
            work = {
                (name, mode): made_of(Work, dict(zip(names, numbers, strict=True)))
                for name, mode, *numbers in document.pop("work")
            }
            profile = made_of(cls, {**document, "blocks": blocks, "work": work})
            _refuse_gaps(blocks, profile.after_bytes)
            profile.problem()  # It refuses sizes and times that nothing has.
            return profile


def _refuse_gaps(blocks: Sequence[BlockProfile], after: Mapping[str, int]) -> None:
    """Refuse a profile that lacks what some plan takes."""
    before: list[str | None] = [None]
    for block in blocks:
        pairs = itertools.product(before, block.modes)
        wanted = {(b, m) for b, m in pairs if Mode(m).can_follow(b)}
        if not wanted <= block.costs.keys():
            raise ValueError(f"{block.name!r} lacks costs of a mode after another")
        before = list(block.modes)
    if not blocks or not {*before} <= after.keys():
        raise ValueError("blocks or after_bytes are not complete")
