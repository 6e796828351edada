"""Find out what the blocks of any module cost: by steps without contents, or real ones.

Meta tensors tell in a moment what a step keeps, of most networks to the byte. They do not
know what some kernels keep by themselves (recurrent ones), autocast, or what depends on
numbers. So where the module can run, one real step is held against them; if it differs,
real steps are counted instead.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.compression.selected import refuse_what_is_compressed
from speechbrain_rev.devices import described, random_devices
from speechbrain_rev.planner.calling import (
    NoStep,
    copied_to_meta,
    have_numbers,
    own_batch,
    step_of,
    tensors_of,
    trainable,
)
from speechbrain_rev.planner.counting import profile_bytes
from speechbrain_rev.planner.network import Network, all_stored, as_network
from speechbrain_rev.planner.probe import CompressionProbe
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.room import has_room, unless_memory_runs_out
from speechbrain_rev.planner.timing import estimated_seconds, measured_seconds
from speechbrain_rev.planner.trace import Step, Trace, trace_bytes
from speechbrain_rev.planner.verify import reproduced, run_once, warn_refused
from speechbrain_rev.planner.views import Without
from speechbrain_rev.reversible import AdditiveCoupling, Mode, ReversibleChain

#: By how much of the peak a step without contents may differ from a real one.
_ALIKE = 0.01


@dataclass(frozen=True)
class Counted:
    """What the blocks of a module hold, before any time is taken.

    Attributes
    ----------
    profile : Profile
        Without times.
    network : Network
        A copy, on which plans can be tried.
    step : callable
        A training step of it.
    device : torch.device
        Where it runs; "meta" if without contents.
    """

    profile: Profile
    network: Network
    step: Step
    device: torch.device


@contextlib.contextmanager
def in_training(module: nn.Module, example_batch: Any) -> Iterator[None]:
    """Let steps take gradients, whatever the caller does, and leave random numbers alone.

    Parameters
    ----------
    module, example_batch
        As for ``plan``.
    """
    devices = random_devices(_device_of(module, example_batch))
    # To leave inference mode is to take gradients, under no_grad too.
    with torch.inference_mode(False), torch.random.fork_rng(devices):
        yield


def counted(
    module: nn.Module,
    example_batch: Any,
    blocks: str | Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    *,
    measure: bool = True,
    probe: CompressionProbe | None = None,
) -> Counted:
    """Count what each block holds in each mode, within ``in_training``.

    Parameters
    ----------
    module, example_batch, blocks, loss, measure
        As for ``plan``.
    probe : CompressionProbe or None
        Of the module, if blocks may compress: steps of its copy are counted.

    Returns
    -------
    Counted
        On a copy where the module is, or without contents.

    Raises
    ------
    ValueError
        If blocks do not run one after the other, nothing is trained, or a step needs
        numbers that are not to be computed.
    MemoryError
        If a real step does not fit, and none can run without contents.

    Warns
    -----
    UserWarning
        As ``plan``.
    """
    refused, verified = _unreconstructed(module, example_batch, blocks)
    about = {
        "network": type(module).__name__,
        "inputs": str([list(x.shape) for x in tensors_of(example_batch)]),
        "reconstruction": verified,
        "torch": torch.__version__,
    }
    as_network(module, blocks)  # whose errors are about names
    refuse_what_is_compressed(module)
    device = _device_of(module, example_batch)
    if probe is not None:
        chosen = Without(probe.network, Mode.RECONSTRUCT, refused)
        return _counted_on(chosen, probe.step, device, about)
    bare: tuple[Network, Step] | None = None
    cause: Exception | None = None
    try:
        bare = _without_contents(module, example_batch, blocks, loss, refused)
    except NoStep:
        raise
    except Exception as error:  # whatever a network does without its numbers
        cause = error
    if measure and device.type != "meta":
        stored = None if bare is None else trace_bytes(*bare)
        found = None
        if _has_room(module, stored, device):
            found = unless_memory_runs_out(
                lambda: _counted_where_it_is(
                    module, example_batch, blocks, loss, refused, about, bare, stored
                )
            )
        if found is not None:
            return found
        what = f"A step that stores everything does not fit on {device}"
        if bare is None:
            raise MemoryError(
                f"{what}, and none can run without numbers ({cause}). Give a smaller "
                "example batch."
            ) from cause
        warnings.warn(
            f"{what}: bytes are counted on meta tensors, and times estimated from "
            "counts of operations, as with measure=False. A smaller example batch would "
            "be measured.",
            stacklevel=3,
        )
    if bare is None:
        raise ValueError(
            "A training step does not run on meta tensors, on which memory is counted "
            f"without computing ({type(cause).__name__}: {cause}). Give a module and a "
            "batch with numbers, and measure=True, which counts in real steps."
        ) from cause
    _warn_of_kernels(module)
    return _counted_on(*bare, torch.device("meta"), about)


def refuse_without_room(
    module: nn.Module,
    example_batch: Any,
    blocks: str | Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
) -> None:
    """Refuse what must run all stored where it is, and is known not to fit there.

    Parameters
    ----------
    module, example_batch, blocks, loss
        As for ``plan``.

    Raises
    ------
    MemoryError
        If a copy and a step of it do not fit.
    """
    as_network(module, blocks)  # whose errors are about names
    device = _device_of(module, example_batch)
    try:
        bare = _without_contents(module, example_batch, blocks, loss, ())
        stored = trace_bytes(*bare)
    except NoStep:
        raise
    except Exception:  # whatever a network does without its numbers
        return
    if not _has_room(module, stored, device):
        raise MemoryError(
            f"A step that stores everything does not fit on {device}, and for "
            "max_gradient_error one is run, for the gradient that is right. Give a "
            "smaller example batch, or leave max_gradient_error out."
        )


def timed(found: Counted, *, measure: bool = True) -> Profile:
    """Take the times of what was counted, within ``in_training``.

    Parameters
    ----------
    found : Counted
        By ``counted``.
    measure : bool
        As for ``plan``.

    Returns
    -------
    Profile
        With times by the clock, or estimated where nothing is computed.
    """
    if not measure or found.device.type == "meta":
        seconds = estimated_seconds(found.network, found.step)
        how = "estimated from counts of operations"
    else:
        seconds = measured_seconds(found.network, found.step, found.device)
        how = f"measured on {described(found.device)}"
    profile = found.profile.with_seconds(seconds)
    return replace(profile, about={**profile.about, "seconds": how})


def profile_module(
    module: nn.Module,
    example_batch: Any,
    *,
    blocks: str | Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    measure: bool = True,
    probe: CompressionProbe | None = None,
) -> Profile:
    """Find out what each block costs in each mode.

    Parameters
    ----------
    module, example_batch, blocks, loss, measure
        As for ``plan``.
    probe : CompressionProbe or None
        As for ``counted``.

    Returns
    -------
    Profile
        Bytes counted, and times measured where the module is, or estimated.

    Raises
    ------
    ValueError, MemoryError
        As ``plan``.
    """
    with in_training(module, example_batch):
        given = module, example_batch, blocks, loss
        found = counted(*given, measure=measure, probe=probe)
        return timed(found, measure=measure)


_ON_META = {"bytes": "counted on meta tensors"}


def _without_contents(
    module: nn.Module,
    example_batch: Any,
    blocks: str | Sequence[str],
    loss: Callable[[Any], Tensor] | None,
    refused: Sequence[str],
) -> tuple[Network, Step]:
    """Copy a module to meta and run it once: what its first step makes is not counted."""
    own, network, step = copied_to_meta(module, example_batch, blocks, loss)
    network.set_mode(all_stored(network))
    with contextlib.ExitStack() as hooks:
        for part in own.modules():
            # Parts of couplings tell, and scripted ones take no hooks.
            if isinstance(part, AdditiveCoupling | torch.jit.ScriptModule):
                continue
            handle = part.register_forward_pre_hook(_refuse_autocast)
            hooks.callback(handle.remove)
        step()
    return Without(network, Mode.RECONSTRUCT, refused), step


def _refuse_autocast(*_: Any) -> None:
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            raise ValueError(
                "it runs under autocast, of which meta tensors know nothing"
            )


def _counted_where_it_is(
    module: nn.Module,
    example_batch: Any,
    blocks: str | Sequence[str],
    loss: Callable[[Any], Tensor] | None,
    refused: Sequence[str],
    about: dict[str, str],
    bare: tuple[Network, Step] | None,
    stored: Trace | None,
) -> Counted:
    """Count on a copy: training steps change gradients and statistics."""
    own = trainable(copy.deepcopy(module))
    step = step_of(own, own_batch(example_batch), loss)
    chosen = Without(as_network(own, blocks), Mode.RECONSTRUCT, refused)
    device = _device_of(module, example_batch)
    chosen.set_mode(all_stored(chosen))
    step()
    if bare and stored and _alike(stored, trace_bytes(chosen, step)):
        once = run_once(chosen, step)
        same = Without(bare[0], Mode.RECOMPUTE, once)
        profile = profile_bytes(same, bare[1], defaultdict(float), about | _ON_META)
        return Counted(profile, Without(chosen, Mode.RECOMPUTE, once), step, device)
    return _counted_on(chosen, step, device, about)


def _counted_on(
    network: Network, step: Step, device: torch.device, about: dict[str, str]
) -> Counted:
    """Count in steps of a network as it is."""
    where = {"bytes": f"counted in steps on {described(device)}"}
    network = Without(network, Mode.RECOMPUTE, run_once(network, step))
    how = _ON_META if device.type == "meta" else where
    profile = profile_bytes(network, step, defaultdict(float), about | how)
    return Counted(profile, network, step, device)


def _alike(one: Trace, other: Trace) -> bool:
    """Whether two traces of the same network tell the same at each of its blocks."""

    def figures(trace: Trace) -> list[int]:
        found = [trace.between_peak_bytes, trace.peak_bytes]
        for block in trace.blocks.values():
            found += [block.after_bytes, block.forward_peak_bytes]
            found += [block.backward_peak_bytes or 0]
        return found

    pairs = zip(figures(one), figures(other), strict=True)
    allowed = _ALIKE * max(one.peak_bytes, other.peak_bytes)
    return list(one.blocks) == list(other.blocks) and all(
        abs(a - b) <= allowed for a, b in pairs
    )


def _warn_of_kernels(module: nn.Module) -> None:
    """Warn of layers whose kernels keep what meta tensors do not show."""
    found = [name for name, m in module.named_modules() if isinstance(m, nn.RNNBase)]
    if found:
        warnings.warn(
            f"Kernels of recurrent layers ({', '.join(found)}) keep other tensors than "
            "are counted without computing: peaks can be off by a factor of two. Give "
            "a module with numbers, and measure=True, which counts in real steps.",
            stacklevel=4,
        )


def _has_room(module: nn.Module, stored: Trace | None, device: torch.device) -> bool:
    """Whether a copy with gradients and its step fit where the module is, as far as known."""
    weights = list(module.parameters())
    copied = sum(x.nbytes for x in (*weights, *weights, *module.buffers()))
    return stored is None or has_room(copied + stored.peak_bytes, device)


def _device_of(module: nn.Module, example_batch: Any) -> torch.device:
    """Tell where a module runs; without parameters it does where its batch is."""
    tensors = [*module.parameters(), *tensors_of(example_batch)]
    return tensors[0].device if tensors else torch.device("cpu")


def _unreconstructed(
    module: nn.Module, example_batch: Any, blocks: str | Sequence[str]
) -> tuple[list[str], str]:
    """Name blocks that are not to be reconstructed, and say how that was found."""
    chained = [m for m in module.modules() if isinstance(m, ReversibleChain)]
    if not chained:
        return [], "no block reconstructs"
    if not have_numbers(module, example_batch):
        return [], "not verified: no numbers on meta"
    found = reproduced(module, example_batch, blocks)
    refused = warn_refused(found, stacklevel=4)
    return refused, f"verified: {len(found) - len(refused)} of {len(found)} blocks"
