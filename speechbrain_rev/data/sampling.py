"""Which utterances make which batch, for every epoch, process and resumed run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from .seeding import generator


class EpochBatchSampler(Sampler[list[tuple[int, int]]]):
    """Shuffled batches of (epoch, utterance) that can start anywhere in an epoch.

    An epoch is `steps` batches. It runs through the utterances in a random order and,
    where it is longer than they are, through them again in another; where it is
    shorter, it uses some. The order depends on seed and epoch alone. With several
    processes each takes its share of every step, so that a step's utterances are the
    same for any number of processes at equal total batch size.

    Parameters
    ----------
    utterances : int
        Size of the training set.
    batch_size : int
        Utterances per step, over all processes.
    steps : int, optional
        Length of an epoch; by default, as many full batches as one pass gives.
    seed : int
        Seed of the order.
    rank, world_size : int
        This process and the number of processes.

    Raises
    ------
    ValueError
        If there are fewer utterances than one step takes, or the processes cannot
        share a step evenly.

    Example
    -------
    >>> sampler = EpochBatchSampler(utterances=10, batch_size=3)
    >>> sampler.set_epoch(1)
    >>> batches = list(sampler)
    >>> len(batches), len(batches[0])
    (3, 3)
    >>> sampler.start_at(2)
    >>> list(sampler) == batches[2:]
    True
    """

    def __init__(
        self,
        utterances: int,
        batch_size: int,
        *,
        steps: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size % world_size:
            raise ValueError(
                f"batch_size {batch_size} cannot be shared by {world_size} processes. "
                "Give a multiple of their number."
            )
        if utterances < batch_size:
            raise ValueError(
                f"There are {utterances} utterances, fewer than one step takes "
                f"(batch_size {batch_size}). Lower batch_size, or valid_speakers, who are "
                "held out."
            )
        self.utterances = utterances
        self.batch_size = batch_size
        self.share = batch_size // world_size
        self.steps = steps or utterances // batch_size
        self.seed = seed
        self.rank = rank
        self.epoch = 0
        self._start = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self.epoch = epoch

    def start_at(self, step: int) -> None:
        """Leave out the first steps of the next iteration, without reading them."""
        self._start = step

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        start, self._start = self._start, 0
        order = self._order()
        for step in range(start, self.steps):
            first, indices = self._share_of(order, step)
            yield [
                (self.epoch * self._passes() + place // self.utterances, index)
                for place, index in enumerate(indices, start=first)
            ]

    def indices_of(self, step: int) -> list[int]:
        """List the utterances that this process has in a step of the epoch.

        Parameters
        ----------
        step : int
            Counted from 0.

        Returns
        -------
        list of int

        Example
        -------
        >>> sampler = EpochBatchSampler(utterances=10, batch_size=3)
        >>> batches = [[index for _, index in batch] for batch in sampler]
        >>> sampler.indices_of(2) == batches[2]
        True
        """
        return self._share_of(self._order(), step)[1]

    def _share_of(self, order: torch.Tensor, step: int) -> tuple[int, list[int]]:
        first = step * self.batch_size + self.rank * self.share
        return first, order[first : first + self.share].tolist()

    def _passes(self) -> int:
        return -(-self.steps * self.batch_size // self.utterances)

    def _order(self) -> torch.Tensor:
        passes = [
            torch.randperm(
                self.utterances,
                generator=generator("order", self.seed, self.epoch, number),
            )
            for number in range(self._passes())
        ]
        return torch.cat(passes)
