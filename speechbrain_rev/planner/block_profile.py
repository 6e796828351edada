"""What one block costs in each mode, after each mode of the block before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speechbrain_rev.planner.documents import block_name, finite, whole
from speechbrain_rev.planner.problem import Cost
from speechbrain_rev.reversible import Mode

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

    def squared_error(self, mode: str) -> float:
        """Tell what the block puts into the gradient in a mode."""
        found = (c.squared_error for (_, own), c in self.costs.items() if own == mode)
        return max(found, default=0.0)

    @classmethod
    def read(
        cls, name: str, gradient_bytes: int, costs: Sequence[Sequence[Any]]
    ) -> BlockProfile:
        """Make it of what stands in a profile's document.

        Raises
        ------
        ValueError
            If that is damaged.
        """
        block_name(name)
        found = {
            (before and Mode(before).value, Mode(own).value): Cost(
                whole("held_bytes", held, least=None),
                whole("working_bytes", working),
                finite("seconds", taken),
                # Which documents of older versions have not.
                *(finite("squared_error", error) for error in errors),
            )
            for before, own, held, working, taken, *errors in costs
        }
        return cls(name, whole("gradient_bytes", gradient_bytes), found)


def waiting_bytes(
    order: Sequence[str], modes: Mapping[str, str], gradient_bytes: Mapping[str, int]
) -> dict[str, int]:
    """Bytes of weight gradients of later blocks that wait, at each block."""
    waits, waiting, run = {}, 0, ""
    for name in reversed(order):
        chain = name.rpartition(".")[0]
        reconstructs = modes.get(name) == Mode.RECONSTRUCT.value
        if not reconstructs or chain != run:
            waiting = 0
        run = chain if reconstructs else ""
        waits[name] = waiting
        waiting += gradient_bytes[name] if reconstructs else 0
    return waits
