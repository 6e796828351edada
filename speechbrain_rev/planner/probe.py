"""What compression costs a network: tried on a batch, for nothing else would tell.

How small activations become, and what their errors do to a gradient, follows from the
numbers. So training steps run on a copy, where the network is: one that stores, for the
gradient that is right, and one for each block in which that block alone compresses.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from speechbrain_rev.compression import ActivationCompression
from speechbrain_rev.devices import random_devices
from speechbrain_rev.planner.calling import have_numbers, own_batch, step_of, trainable
from speechbrain_rev.planner.network import Network, all_stored, as_network
from speechbrain_rev.planner.room import unless_memory_runs_out
from speechbrain_rev.planner.trace import Step
from speechbrain_rev.planner.views import Compressible
from speechbrain_rev.reversible import Mode

# Seconds before a bar shows how far a probe is.
_SHOWN_AFTER = 5


class CompressingNetwork(Network, Protocol):
    """A network whose blocks can compress."""

    #: How they do it.
    compression: ActivationCompression


class CompressionProbe:
    """Errors that compression puts into the gradient of a training step.

    Parameters
    ----------
    module : nn.Module
        A copy, in training and with gradients, which steps change.
    network : Network
        Its blocks.
    step : callable
        Runs forward and backward pass on it.

    Attributes
    ----------
    network : Network
        Those blocks may compress in which that makes a tensor smaller.
    step : callable
        The step, which always begins with the same random numbers and buffers.
    timed_step : callable
        The step without what makes it begin so.
    squared_errors : dict of str to float
        Of blocks that may compress: the square of the error of all weights' gradients, as
        a part of their norm, where that block alone compresses.

    Raises
    ------
    ValueError
        If the step has no gradient, or one that is not finite.

    Examples
    --------
    >>> layer = lambda: nn.Sequential(nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
    >>> network = nn.Sequential(layer(), layer(), nn.Flatten())
    >>> probe = probe_compression(network, torch.randn(4, 8, 50), ["?"])
    >>> sorted(probe.squared_errors)
    ['0', '1']
    >>> 0 < probe.gradient_error({"0": "compress", "1": "store", "2": "store"}) < 0.1
    True
    """

    def __init__(self, module: nn.Module, network: Network, step: Step) -> None:
        self._inner = cast(CompressingNetwork, network)
        self._weights = [p for p in module.parameters() if p.requires_grad]
        self.step = _repeatable(module, step)
        self.timed_step = without_optimizer()(step)
        self._stored = all_stored(network)
        self._exact = [g.clone() for g in self._gradients({})]
        self._norm = _norm(self._exact)
        if not 0 < self._norm < math.inf:
            raise ValueError(
                f"The norm of the example batch's gradient is {self._norm}: what part of "
                "it compression changes cannot be told. Give a batch and a loss that "
                "train the network."
            )
        self.squared_errors: dict[str, float] = {}
        candidates = [n for n, m in self._stored.items() if m is Mode.STORE]
        for name in tqdm(
            candidates, "gradient errors", unit="block", leave=False, delay=_SHOWN_AFTER
        ):
            error = self.gradient_error({name: Mode.COMPRESS.value})
            if self._smaller() and math.isfinite(error):
                self.squared_errors[name] = error**2
        self.network: Network = Compressible(network, self.squared_errors.keys())

    def gradient_error(self, modes: Mapping[str, str]) -> float:
        """Run a step and measure by what part of its norm the gradient is off.

        Parameters
        ----------
        modes : mapping of str to str
            Of blocks; the others store.

        Returns
        -------
        float
            Norm of the difference from the gradient of the step that stores, of all
            weights together, divided by that one's norm; 0.01 is one percent. What
            float streams lose is among it.
        """
        pairs = zip(self._gradients(modes), self._exact, strict=True)
        return _norm(found - exact for found, exact in pairs) / self._norm

    def _gradients(self, modes: Mapping[str, str]) -> list[Tensor]:
        kept = dict(self._inner.block_modes())
        try:
            self._inner.set_mode({**self._stored, **modes})
            self.step()
        finally:
            self._inner.set_mode(kept)
        return [p.grad for p in self._weights if p.grad is not None]

    def _smaller(self) -> bool:
        """Whether the last step made any tensor smaller."""
        records = self._inner.compression.records.values()
        return any(record.kept_bytes < record.original_bytes for record in records)


def probe_compression(
    module: nn.Module,
    example_batch: Any,
    blocks: str | Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
) -> CompressionProbe:
    """Try what compression costs a module, on a copy where it is.

    Parameters
    ----------
    module, example_batch, blocks, loss
        As for ``plan``.

    Returns
    -------
    CompressionProbe
        Of the copy.

    Raises
    ------
    ValueError
        If the gradient tells nothing.
    MemoryError
        If memory runs out.
    """

    def probe() -> CompressionProbe:
        own = trainable(copy.deepcopy(module))
        step = step_of(own, own_batch(example_batch), loss)
        return CompressionProbe(own, as_network(own, blocks), step)

    found = unless_memory_runs_out(probe)
    if found is None:
        raise MemoryError(
            "Memory ran out while it was tried what compression does to the gradient, "
            "for which every block stores for once. Give a smaller example batch, or "
            "leave max_gradient_error out."
        )
    return found


def refuse_without_numbers(module: nn.Module, example_batch: Any) -> None:
    """Refuse to try what compression costs where nothing is computed.

    Raises
    ------
    ValueError
        If the module or its batch is on the meta device.
    """
    if not have_numbers(module, example_batch):
        raise ValueError(
            "max_gradient_error needs numbers: what compression costs depends on weights "
            "and on data, and the module or its example batch is on the meta device. Give "
            "both with contents, or leave max_gradient_error out for a lossless plan."
        )


def checked_limit(max_gradient_error: float) -> float:
    """Take a limit of the gradient's error.

    Raises
    ------
    ValueError
        If it is no finite number above 0.

    Examples
    --------
    >>> checked_limit(0.01)
    0.01
    """
    given = max_gradient_error
    if not (type(given) in (int, float) and 0 < given < math.inf):
        raise ValueError(
            f"max_gradient_error is {given!r}; it must be a number above 0 and finite, as "
            "0.01 for one percent of the gradient's norm. Leave it out for a lossless "
            "plan."
        )
    return float(given)


@contextlib.contextmanager
def without_optimizer() -> Iterator[None]:
    """Let bounds that follow an optimizer be as they are: a copy has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error bounds are to follow momentum")
        yield


def _repeatable(module: nn.Module, step: Step) -> Step:
    """Make a step begin with gradients of zero, and each time as if it were the first."""
    buffers = [(b, b.clone()) for b in module.buffers()]
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    cards = random_devices(device)
    numbers = torch.get_rng_state(), [torch.cuda.get_rng_state(card) for card in cards]

    def run() -> None:
        for p in module.parameters():
            if p.grad is not None:
                p.grad.zero_()
        for buffer, begun in buffers:
            buffer.copy_(begun)
        with torch.random.fork_rng(cards), without_optimizer():
            torch.set_rng_state(numbers[0])
            for card, state in zip(cards, numbers[1], strict=True):
                torch.cuda.set_rng_state(state, card)
            step()

    return run


def _norm(tensors: Iterable[Tensor]) -> float:
    """Norm of all together; NaN and infinity are not lost in it."""
    return math.sqrt(math.fsum(float(x.double().square().sum()) for x in tensors))
