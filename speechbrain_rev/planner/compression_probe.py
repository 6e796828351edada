"""What compression leaves of a step's activations, and what it does to the gradient.

Both follow from the numbers. So training steps run on a copy: one that stores, for the exact
gradient, and one for each block in which that block alone compresses.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.bars import LONG_SECONDS, progress_bar
from speechbrain_rev.devices import described, random_devices
from speechbrain_rev.modes import Mode
from speechbrain_rev.planner.memory import batch_that_fits, unless_memory_runs_out
from speechbrain_rev.planner.network import (
    Network,
    all_stored,
    compressible,
    keeping_modes,
)
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.step import Channels, NoStep, Step, Trial
from speechbrain_rev.planner.timing import REPEATS, measured_seconds
from speechbrain_rev.planner.trace import Run


class CompressionProbe:
    """What compression leaves of a step's activations, and does to its gradient.

    Steps run on a copy where the step runs, of as many samples as fit.

    Parameters
    ----------
    step : Step
        With numbers, within ``step.training()``.
    max_gradient_error : float
        What plans may have.

    Attributes
    ----------
    batch : int
        Samples that were tried.
    limit : float
        What plans may have.
    squared_errors : dict of str to float
        Of blocks that may compress, which are those in which that makes a tensor smaller:
        the square of the error of all weights' gradients, as a part of their norm, where
        that block alone compresses.
    trial : Trial
        The copy. Its step always begins with the same random numbers and buffers.
    network : Network
        Blocks of the copy, which may compress.

    Raises
    ------
    ValueError
        If the limit is no number above 0, the step has no numbers, or its gradient is
        zero or not finite.
    MemoryError
        If not even one sample fits, all stored, or memory ran out.

    Examples
    --------
    >>> from speechbrain_rev.planner.step import step_of
    >>> layer = lambda: nn.Sequential(nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
    >>> network = nn.Sequential(layer(), layer(), nn.Flatten())
    >>> probe = CompressionProbe(step_of(network, torch.randn(4, 8, 50), blocks="?"), 0.1)
    >>> sorted(probe.squared_errors)
    ['0', '1']
    >>> 0 < probe.gradient_error({"0": "compress", "1": "store", "2": "store"}) < 0.1
    True
    """

    def __init__(self, step: Step, max_gradient_error: float) -> None:
        self.limit = checked_limit(max_gradient_error)
        if not step.has_numbers:
            raise ValueError(
                "max_gradient_error needs numbers: what compression costs depends on "
                "weights and on data, and the module or its example batch is on the meta "
                "device. Give both with contents, or leave max_gradient_error out for a "
                "lossless plan."
            )
        self._device = step.device
        self.batch = _batch_that_stores(step)
        if unless_memory_runs_out(lambda: self._try(step)) is None:
            raise MemoryError(
                f"Memory ran out on {step.device} while it was tried what compression "
                f"does to the gradient of {self.batch} samples, all stored. End what else "
                "uses it, give a smaller batch, or leave max_gradient_error out."
            )

    def _try(self, step: Step) -> bool:
        trial = step.trial(self.batch)
        self._weights = [p for p in trial.module.parameters() if p.requires_grad]
        self._timed_run = without_optimizer()(trial.run)
        self.trial = trial._replace(run=_repeatable(trial.module, trial.run))
        self._stored = all_stored(trial.network)
        self._exact = [g.clone() for g in self._gradients({})]
        self._norm = _norm(self._exact)
        if not 0 < self._norm < math.inf:
            raise ValueError(
                f"The norm of the example batch's gradient is {self._norm}, of which no "
                "relative error can be measured. Give a batch and a loss that train the "
                "network."
            )
        self.squared_errors: dict[str, float] = {}
        records = trial.network.compression.records  # type: ignore[attr-defined]
        candidates = [n for n, m in self._stored.items() if m is Mode.STORE]
        for name in progress_bar(
            "gradient errors", candidates, unit="block", delay=LONG_SECONDS
        ):
            error = self.gradient_error({name: Mode.COMPRESS.value})
            smaller = any(r.kept_bytes < r.original_bytes for r in records.values())
            if smaller and math.isfinite(error):
                self.squared_errors[name] = error**2
        self.gradient_error(dict.fromkeys(self.squared_errors, Mode.COMPRESS.value))
        self._bits = {layer: record.bits for layer, record in records.items()}
        self.network: Network = compressible(trial.network, self.squared_errors)
        return True

    def gradient_error(self, modes: Mapping[str, str]) -> float:
        """Run a step and measure the relative error of its gradient.

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
        return _norm(own - exact for own, exact in pairs) / self._norm

    def seconds(
        self, batch: int, channels: Channels | None
    ) -> tuple[dict[tuple[str, str], float], str]:
        """Measure the times of the copy, scaled to a batch; and in words, how."""
        self.set_channels(channels)
        taken = measured_seconds(
            self.network, self._timed_run, self._device, repeats=REPEATS
        )
        how = f"measured on {described(self._device)}, at batch {self.batch}"
        return {key: s * batch / self.batch for key, s in taken.items()}, how

    def set_channels(self, channels: Channels | None) -> None:
        """Work on some channels at a time from now on."""
        if channels is not None:
            self.trial.module.set_channels(channels)  # type: ignore[operator]

    def compressible(self, bare: Trial) -> Trial:
        """Let the blocks of a trial without contents compress as the copy's did."""
        network: Any = bare.network
        network.compression.assumed_bits = dict(self._bits)
        return bare._replace(
            network=compressible(network, self.squared_errors),
            run=without_optimizer()(bare.run),
        )

    def with_errors(self, profile: Profile) -> Profile:
        """Give a profile what compression does to the gradient."""
        return profile.with_errors(self.squared_errors, self.limit)

    def _gradients(self, modes: Mapping[str, str]) -> list[Tensor]:
        with keeping_modes(self.trial.network):
            self.trial.network.set_mode({**self._stored, **modes})
            self.trial.run()
        return [p.grad for p in self._weights if p.grad is not None]


def _batch_that_stores(step: Step) -> int:
    """Give how many samples are tried: as many as fit, all stored."""
    wanted = step.tried_batch

    def needed_bytes(count: int) -> int:
        try:
            return step.copy_bytes + step.at(count).stored_bytes()
        except NoStep as error:
            if count == wanted:
                raise
            raise MemoryError(
                f"The example batch does not fit on {step.device}. {error}"
            ) from None
        except Exception:  # whatever a network does without its numbers
            return 0

    try:
        return batch_that_fits(needed_bytes, wanted, step.device)
    except MemoryError as error:
        raise MemoryError(
            f"{error} A step that stores everything is run for max_gradient_error, for "
            "the exact gradient; leave it out for a lossless plan."
        ) from None


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


def _repeatable(module: nn.Module, step: Run) -> Run:
    """Make a step begin with gradients of zero, and each time as if it were the first."""
    buffers = [(b, b.clone()) for b in module.buffers()]
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    gpus = random_devices(device)
    numbers = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in gpus]

    def run() -> None:
        for p in module.parameters():
            if p.grad is not None:
                p.grad.zero_()
        for buffer, begun in buffers:
            buffer.copy_(begun)
        with torch.random.fork_rng(gpus), without_optimizer():
            torch.set_rng_state(numbers[0])
            for gpu, state in zip(gpus, numbers[1], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            step()

    return run


def _norm(tensors: Iterable[Tensor]) -> float:
    """Norm of all together; NaN and infinity are not lost in it."""
    return math.sqrt(math.fsum(float(x.double().square().sum()) for x in tensors))
