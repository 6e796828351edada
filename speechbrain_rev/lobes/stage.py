"""A stage of an encoder: its transition and its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from speechbrain_rev.lobes.layers import Masks
from speechbrain_rev.reversible.chain import ReversibleChain
from speechbrain_rev.reversible.hooks import has_hooks
from speechbrain_rev.reversible.recompute import trains
from speechbrain_rev.reversible.streams import Streams, join

#: Channels at a time before and after a stage's downsampling.
Sizes = tuple[int | None, int | None]
#: Runs a unit: its name in the stage, itself, masks, input and channels at a time.
RunUnit = Callable[[str, nn.Module, Masks, "Tensor | Streams", Sizes], Tensor]


class Stage(nn.Module):
    """A transition into a stage, if there is one, and the stage's blocks.

    Parameters
    ----------
    entry : nn.Module or None
        Called with masks and the previous stage's output.
    blocks : ReversibleChain or nn.ModuleList
        Couplings, or ordinary blocks.
    downsamples : bool
        Whether this stage has half the frequencies and frames of the one before.
    """

    entry: nn.Module | None
    chain: ReversibleChain | None
    blocks: nn.ModuleList | None

    def __init__(
        self,
        entry: nn.Module | None,
        blocks: ReversibleChain | nn.ModuleList,
        downsamples: bool,
    ) -> None:
        super().__init__()
        self.entry = entry
        self.chain = self.blocks = None
        if isinstance(blocks, ReversibleChain):
            self.chain = blocks
        else:
            self.blocks = blocks
        self.downsamples = downsamples

    def forward(
        self, given: Tensor, masks: Masks, sizes: Sizes, run: RunUnit
    ) -> Tensor:
        """Run the stage as a module: what goes in and comes out are tensors.

        Parameters
        ----------
        given : torch.Tensor, [batch, channel, freq, time]
            Output of the stem or of the stage before.
        masks : Masks
            Before and after the stage's downsampling.
        sizes : tuple of int or None
            Channels at a time, likewise.
        run : callable
            Runs a unit of the stage, by its name.

        Returns
        -------
        torch.Tensor, [batch, channel, freq, time]
            The last block's output.
        """
        y = self.run([given], masks, sizes, run)
        return join(y) if isinstance(y, Streams) else y

    def run(
        self, held: list[Tensor | Streams], masks: Masks, sizes: Sizes, run: RunUnit
    ) -> Tensor | Streams:
        """Run the stage; streams that leave it are read where they are needed.

        ``held`` has the input and is emptied, so that no name keeps it alive.
        """
        now = held.pop()
        after = Masks(masks.after, masks.after), (sizes[1], sizes[1])
        if self.entry is not None:
            now = run("entry", self.entry, masks, now, sizes)
            masks, sizes = after
        if self.chain is not None:
            held.append(now)
            del now  # the chain alone has it, and drops it
            return _run_chain(self.chain, held, masks.after)
        assert self.blocks is not None
        for j, block in enumerate(self.blocks):
            now = run(f"blocks.{j}", block, masks, now, sizes)
            masks, sizes = after
        return now

    def block_names(self) -> list[str]:
        """Name the entry and the blocks in the order of execution."""
        entry = [] if self.entry is None else ["entry"]
        if self.chain is not None:
            return entry + [f"chain.{j}" for j in range(len(self.chain.blocks))]
        assert self.blocks is not None
        return entry + [f"blocks.{j}" for j in range(len(self.blocks))]


def _run_chain(
    chain: ReversibleChain, held: list[Tensor | Streams], mask: Tensor | None
) -> Tensor | Streams:
    """Run couplings; no name here or at the caller keeps their input alive."""
    halves = list(cast(Tensor, held.pop()).chunk(2, dim=1))
    if trains(chain) and not has_hooks(chain):
        return chain.train_step(halves, mask)
    return torch.cat(chain(*halves, mask), dim=1)
