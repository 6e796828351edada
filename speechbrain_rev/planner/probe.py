"""What modes do to a network: tried before it is planned, for nothing else would show it.

A chain is reconstructed if its inverse gives back what went in, and a block is recomputed
if it runs twice. Exact streams come back to the bit, whatever residual functions do, if they
compute the same twice. Of float streams something is lost, and each further block loses
more: under autocast none is reconstructed.

How small activations become by compression, and what its errors do to a gradient, follows
from the numbers. So training steps run on a copy: one that stores, for the gradient that is
right, and one for each block in which that block alone compresses.
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
from speechbrain_rev.compression.activations import refuse_what_is_compressed
from speechbrain_rev.devices import described, random_devices
from speechbrain_rev.modes import Mode
from speechbrain_rev.planner.memory import (
    batch_that_fits,
    is_out_of_memory,
    live_bytes_peak,
    unless_memory_runs_out,
)
from speechbrain_rev.planner.network import (
    Compressible,
    Network,
    all_stored,
    as_network,
    device_of,
    keeping_modes,
    warn_caller,
)
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.step import (
    Channels,
    NoStep,
    Step,
    Trial,
    call,
    own_batch,
    tensors_of,
)
from speechbrain_rev.planner.timing import measured_seconds
from speechbrain_rev.planner.trace import Run
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
from speechbrain_rev.reversible.replay import Autocast

#: The largest difference, as a share of the largest number that goes in or comes out.
#: Reconstruction in float32 is exact to 1e-7 of that, and residual functions may make it
#: 10,000 times as much. What computes something else the second time differs by
#: parts of what it adds: other masks of dropout, for instance, by all of it.
TOLERANCE = 1e-3


def reproduced(
    module: nn.Module, example_batch: Any, blocks: str | Sequence[str] = ()
) -> dict[str, bool]:
    """Run a network in evaluation and reconstruct the input of each coupling.

    Parameters
    ----------
    module : nn.Module
        A network that has numbers. It is left as it is: a copy runs, under the autocast
        that is in force.
    example_batch : tensor, or tuple, list or dict of such
        What it is called with.
    blocks : sequence of str
        Names of blocks, as for ``plan``.

    Returns
    -------
    dict of str to bool
        For each coupling that ran, by its block's name, whether its inverse gave back
        what went in. NaN and infinity are never given back, nor is, under autocast to
        a half, a float stream.

    Examples
    --------
    >>> from speechbrain_rev.reversible import ReversibleChain
    >>> class Noise(nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.randn_like(x)
    >>> pairs = [(nn.Tanh(), nn.Tanh()), (nn.Tanh(), Noise())]
    >>> chain = ReversibleChain(AdditiveCoupling(f, g) for f, g in pairs)
    >>> reproduced(chain, (torch.ones(2, 3), torch.ones(2, 3)))
    {'blocks.0': True, 'blocks.1': False}
    """
    own = copy.deepcopy(module).eval()
    found: dict[str, bool] = {}
    chains = [m for m in own.modules() if isinstance(m, ReversibleChain)]
    exact = {id(b) for c in chains if c.format_name == "exact" for b in c.blocks}
    for name, block in as_network(own, blocks).named_blocks().items():
        if isinstance(block, AdditiveCoupling):
            note = _noting(found, name, is_exact=id(block) in exact)
            block.register_forward_hook(note)
    devices = {x.device for x in tensors_of(example_batch) if x.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad():
        call(own, own_batch(example_batch))
    return found


def warn_refused(found: Mapping[str, bool]) -> list[str]:
    """Name the blocks that do not come back, and warn of them, if there are any.

    Parameters
    ----------
    found : mapping of str to bool
        As ``reproduced`` gives it.

    Returns
    -------
    list of str
        Their names.
    """
    refused = [name for name, same in found.items() if not same]
    if refused:
        warn_caller(
            f"Not reconstructed, for their inverse does not give back what went in: "
            f"{', '.join(refused)}. Their residual functions must compute the same twice "
            "in evaluation, and no NaN, and streams must be exact under autocast; plans "
            "without it store or recompute them."
        )
    return refused


def run_once(network: Network, run: Run) -> list[str]:
    """Name blocks that cannot run a second time in a step, and warn of them.

    Parameters
    ----------
    network : Network
        Its blocks are recomputed for a while, all together; if that fails, one by one.
    run : callable
        A training step, which runs where all blocks store.

    Returns
    -------
    list of str
        Names of blocks that write into their input, use tensors with gradients that
        they were not given, or have a ``forward`` of their own, for instance.

    Warns
    -----
    UserWarning
        If there are any, with what each raises.
    """
    allowed = network.allowed_modes()
    stored = all_stored(network)
    able = [n for n, own in allowed.items() if {Mode.STORE, Mode.RECOMPUTE} <= {*own}]

    def failure(names: list[str]) -> Exception | None:
        try:
            network.set_mode(stored | dict.fromkeys(names, Mode.RECOMPUTE))
            run()
        except (RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            return error.with_traceback(None)
        return None

    with keeping_modes(network):
        together = failure(able)
        if together is None:
            return []
        alone = {name: error for name in able if (error := failure([name]))}
    if not alone:
        raise together
    warn_caller(
        "Not recomputed, for a second run fails: "
        + "; ".join(f"{name}: {error}" for name, error in alone.items())
    )
    return list(alone)


def _noting(
    found: dict[str, bool], name: str, *, is_exact: bool
) -> Callable[..., None]:
    def note(
        block: AdditiveCoupling,
        given: tuple[Tensor, Tensor, Tensor | None],
        outputs: tuple[Tensor, Tensor],
    ) -> None:
        if Autocast.now({outputs[0].device}).enabled:
            found[name] = is_exact and _same_twice(block, given, outputs)
            return
        x1, x2, mask = given
        again1, again2 = block.inverse(*outputs, mask)
        largest = _largest(x1, x2, *outputs)
        # Not so where one of these is NaN.
        found[name] = (
            _largest(again1 - x1, again2 - x2) <= TOLERANCE * largest < math.inf
        )

    return note


def _same_twice(
    block: AdditiveCoupling,
    given: tuple[Tensor, Tensor, Tensor | None],
    outputs: tuple[Tensor, Tensor],
) -> bool:
    again = block.forward(*given)
    return _largest(*outputs) < math.inf and all(
        torch.equal(new, old) for new, old in zip(again, outputs, strict=True)
    )


def _largest(*tensors: Tensor) -> float:
    """Give the largest magnitude; NaN if there is one."""
    return float(torch.stack([x.abs().max() for x in tensors]).max())


# Seconds before a bar shows how far a probe is.
_SHOWN_AFTER = 5

# Steps of each mode that are timed, after one that is not.
_REPEATS = 3


class CompressingNetwork(Network, Protocol):
    """A network whose blocks can compress."""

    #: How they do it.
    compression: ActivationCompression


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
    bits : mapping of str to float
        By layer, what a value of its input took.
    samples : str
        What was tried, in words.

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
        if not step.is_trusted:
            refuse_what_is_compressed(step.module)
        if not step.has_numbers:
            raise ValueError(
                "max_gradient_error needs numbers: what compression costs depends on "
                "weights and on data, and the module or its example batch is on the meta "
                "device. Give both with contents, or leave max_gradient_error out for a "
                "lossless plan."
            )
        as_network(step.module, step.blocks)  # whose errors are about names
        self._device, self.samples = step.device, step.samples
        self.batch = _batch_of(step)
        if unless_memory_runs_out(lambda: self._try(step)) is None:
            raise MemoryError(
                f"Memory ran out on {step.device} while it was tried what compression "
                f"does to the gradient of {self.batch} samples, all stored. End what else "
                "uses it, give a smaller batch, or leave max_gradient_error out."
            )

    def _try(self, step: Step) -> bool:
        trial = step.trial(self.batch)
        self._inner = cast(CompressingNetwork, trial.network)
        self._weights = [p for p in trial.module.parameters() if p.requires_grad]
        self._timed_run = without_optimizer()(trial.run)
        run = _repeatable(trial.module, trial.run)
        self._run = run
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
        candidates = [n for n, m in self._stored.items() if m is Mode.STORE]
        for name in tqdm(
            candidates, "gradient errors", unit="block", leave=False, delay=_SHOWN_AFTER
        ):
            error = self.gradient_error({name: Mode.COMPRESS.value})
            if self._smaller() and math.isfinite(error):
                self.squared_errors[name] = error**2
        self.gradient_error(dict.fromkeys(self.squared_errors, Mode.COMPRESS.value))
        records = self._inner.compression.records
        self.bits = {layer: record.bits for layer, record in records.items()}
        self.network: Network = Compressible(trial.network, self.squared_errors.keys())
        self.trial = Trial(trial.module, trial.network, run)
        return True

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

    def seconds(
        self, batch: int, channels: Channels | None
    ) -> tuple[dict[tuple[str, str], float], str]:
        """Measure the times of the copy, scaled to a batch, and say how."""
        self.set_channels(channels)
        taken = measured_seconds(
            self.network, self._timed_run, self._device, repeats=_REPEATS
        )
        how = f"measured on {described(self._device)}, at batch {self.batch}"
        return {key: s * batch / self.batch for key, s in taken.items()}, how

    def set_channels(self, channels: Channels | None) -> None:
        """Work on some channels at a time from now on."""
        if channels is not None:
            self.trial.module.set_channels(channels)  # type: ignore[operator]

    def compressible(self, bare: Trial) -> Trial:
        """Let the blocks of a trial without contents compress as the copy's did."""
        cast(CompressingNetwork, bare.network).compression.assumed_bits = dict(
            self.bits
        )
        network = Compressible(bare.network, self.squared_errors.keys())
        return bare._replace(network=network, run=without_optimizer()(bare.run))

    def with_errors(self, profile: Profile) -> Profile:
        """Give a profile what compression does to the gradient."""
        return profile.with_errors(self.squared_errors, self.limit)

    def _gradients(self, modes: Mapping[str, str]) -> list[Tensor]:
        kept = dict(self._inner.block_modes())
        try:
            self._inner.set_mode({**self._stored, **modes})
            self._run()
        finally:
            self._inner.set_mode(kept)
        return [p.grad for p in self._weights if p.grad is not None]

    def _smaller(self) -> bool:
        """Whether the last step made any tensor smaller."""
        records = self._inner.compression.records.values()
        return any(record.kept_bytes < record.original_bytes for record in records)


def _batch_of(step: Step) -> int:
    """Give how many samples are tried: as many as fit, all stored."""
    wanted = min(step.timed_batch or step.batch, step.batch)

    def stored_bytes(count: int) -> int:
        try:
            own = step.at(count)
            with own.without_contents() as device:
                trial = own.bare(device)
                trial.network.set_mode(all_stored(trial.network))
                peak = live_bytes_peak(trial.run, device=device_of(trial.network))
                return step.copy_bytes + peak
        except NoStep as error:
            if count == wanted:
                raise
            raise MemoryError(
                f"The example batch does not fit on {step.device}. {error}"
            ) from None
        except Exception:  # whatever a network does without its numbers
            return 0

    try:
        return batch_that_fits(stored_bytes, wanted, step.device)
    except MemoryError as error:
        raise MemoryError(
            f"{error} A step that stores everything is run for max_gradient_error, for "
            "the gradient that is right; leave it out for a lossless plan."
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
