"""A stage of an encoder: its transition and its blocks."""

from __future__ import annotations

from torch import nn

from speechbrain_rev.reversible.chain import ReversibleChain


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

    def block_names(self) -> list[str]:
        """Name the entry and the blocks in the order of execution."""
        entry = [] if self.entry is None else ["entry"]
        if self.chain is not None:
            return entry + [f"chain.{j}" for j in range(len(self.chain.blocks))]
        assert self.blocks is not None
        return entry + [f"blocks.{j}" for j in range(len(self.blocks))]
