"""Find out what the blocks of a step cost: by steps without contents, or real ones.

Meta tensors show in a moment what a step keeps, of most networks to the byte. They do not
know what some kernels keep by themselves (recurrent ones), autocast, or what depends on
numbers. So where the module can run, one real step is held against them; if it differs,
real steps are counted instead.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from speechbrain_rev.compression.activations import refuse_what_is_compressed
from speechbrain_rev.devices import described
from speechbrain_rev.modes import Mode, fallback
from speechbrain_rev.planner.knapsack import Cost
from speechbrain_rev.planner.memory import (
    batch_that_fits,
    fits_device,
    live_bytes_peak,
    unless_memory_runs_out,
)
from speechbrain_rev.planner.network import (
    Network,
    Without,
    all_stored,
    as_network,
    device_of,
    keeping_modes,
    warn_caller,
)
from speechbrain_rev.planner.probe import (
    CompressionProbe,
    reproduced,
    run_once,
    warn_refused,
)
from speechbrain_rev.planner.profile import (
    BlockProfile,
    Pair,
    Profile,
    saved_profile,
    waiting_bytes,
)
from speechbrain_rev.planner.step import Channels, NoStep, Step, Trial
from speechbrain_rev.planner.timing import ASSUMED, Speed, measured_seconds
from speechbrain_rev.planner.trace import Run, Trace, Work, trace_bytes
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain

#: By how much of the peak a step without contents may differ from a real one.
_ALIKE = 0.01

# Steps of each mode that are timed, after one that is not, where profiles are kept.
_REPEATS = 3

# Samples in which blocks are reconstructed; what is wrong is wrong for any.
_VERIFIED = 2


def profile(
    step: Step,
    *,
    channels: Channels | None = None,
    max_gradient_error: float | None = None,
) -> Profile:
    """Find out what each block of a step costs in each mode.

    Parameters
    ----------
    step : Step
        The step.
    channels : Channels or None
        Channels at a time, at each level; None for those of the module.
    max_gradient_error : float or None
        As of :func:`~speechbrain_rev.planner.plan`; None for lossless modes only.

    Returns
    -------
    Profile
        Bytes counted, and times measured on the step's device, or estimated.

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
        If what is counted without contents may be off, a block cannot be reconstructed
        or recomputed, or a step that stores everything does not fit on the device.

    Examples
    --------
    >>> from speechbrain_rev.planner.step import step_of
    >>> network = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    >>> found = profile(step_of(network, torch.randn(4, 8), blocks="?"))
    >>> [block.name for block in found.blocks], found.blocks[0].modes
    (['0', '1', '2'], ['store', 'recompute'])
    """
    with step.training():
        return profiler_of(step, max_gradient_error).timed(channels)


@dataclass(frozen=True)
class Counted:
    """What the blocks of a step hold, before any time is taken.

    Attributes
    ----------
    profile : Profile
        Without times.
    trial : Trial or None
        On which plans are tried; None where that is :meth:`Profiler.bare`.
    is_timed : bool
        Whether times are measured on it.
    needs_numbers : bool
        Whether a step without contents takes other memory, or cannot run.
    """

    profile: Profile
    trial: Trial | None = None
    is_timed: bool = False
    needs_numbers: bool = False


def profiler_of(step: Step, max_gradient_error: float | None = None) -> Profiler:
    """Make what profiles a step, within ``step.training()``."""
    if max_gradient_error is None:
        return Profiler(step)
    return Profiler(step, CompressionProbe(step, max_gradient_error))


class Profiler:
    """Finds out what the blocks of a step cost, with some channels after others.

    Parameters
    ----------
    step : Step
        The step, within ``step.training()``.
    probe : CompressionProbe or None
        Of the step, if blocks may compress.
    """

    def __init__(self, step: Step, probe: CompressionProbe | None = None) -> None:
        self.step, self.probe = step, probe
        as_network(step.module, step.blocks)  # whose errors are about names
        if not step.is_trusted:
            refuse_what_is_compressed(step.module)
        self._refused, verified = _not_reconstructed(step)
        self._about = {**step.about, "torch": torch.__version__}
        if verified:
            self._about["reconstruction"] = verified
        self._known: dict[Channels | None, Counted] = {}

    def at(self, step: Step) -> Profiler:
        """Make one of the same step of another batch, and try nothing again."""
        own = copy.copy(self)
        own.step, own._known = step, {}
        own._about = {**self._about, **step.about}
        return own

    def counted(self, channels: Channels | None = None) -> Counted:
        """Count what each block holds in each mode."""
        if channels not in self._known:
            if self.probe is not None:
                found = self._counted_compressing(channels)
            elif self.step.is_trusted:
                found = Counted(self._counted_whole(channels))
            else:
                found = self._counted_and_checked()
            self._known[channels] = found
        return self._known[channels]

    def timed(self, channels: Channels | None = None) -> Profile:
        """Count it, and measure times or estimate them."""
        found, step = self.counted(channels), self.step
        if step.speed is not None:
            return _estimated(found.profile, step.speed)
        if self.probe is not None:
            seconds, how = self.probe.seconds(step.batch, channels)
            return _about(found.profile.with_seconds(seconds), seconds=how)
        if found.is_timed and found.trial is not None:
            taken = measured_seconds(found.trial.network, found.trial.run, step.device)
            how = f"measured on {described(step.device)}"
            return _about(found.profile.with_seconds(taken), seconds=how)
        if step.is_trusted and step.device.type != "meta":
            shallow = self._shallow_timed(channels)
            told = "seconds", "bytes", "timed batch"
            return self._whole(shallow, {name: shallow.about[name] for name in told})
        return _estimated(found.profile, ASSUMED)

    def stored(self, channels: Channels | None = None) -> Profile:
        """Count a trusted step that stores everything, and estimate its time.

        One traced step of a shallow network tells it. The profile knows no other mode.
        """
        found = self._counted_whole(channels, (Mode.STORE,))
        return _estimated(found, self.step.speed or ASSUMED)

    @contextlib.contextmanager
    def bare(self, channels: Channels | None = None) -> Iterator[Trial]:
        """Make a trial without contents, whose blocks may compress if they are probed."""
        with self.step.without_contents() as device:
            trial = self.step.bare(device, channels=channels)
            if self.probe is not None:
                trial = self.probe.compressible(trial)
            yield trial

    def _counted_whole(
        self, channels: Channels | None, modes: Sequence[Mode] = tuple(Mode)
    ) -> Profile:
        """Count the step by its shallow network."""
        shallow = self._shallow_counted(channels, modes)
        return self._whole(shallow, {"bytes": shallow.about["bytes"]})

    def _shallow_counted(
        self, channels: Channels | None, modes: Sequence[Mode] = tuple(Mode)
    ) -> Profile:
        """Count the shallow network of a trusted step, or read what was counted."""

        def make() -> Profile:
            small = self._shallow("meta")  # Outside of fakes, which are not copied.
            with self.step.without_contents() as device:
                trial = self.step.bare(device, small, channels)
                how = f"counted on {_NO_CONTENTS[self.step.precision == 'fp32']}"
                return count(trial, {"bytes": how}, with_work=True, modes=modes)

        few = {} if len(modes) == len(Mode) else {"modes": ", ".join(modes)}
        return self._saved(channels, {"seconds": "not taken", **few}, make)

    def _shallow_timed(self, channels: Channels | None) -> Profile:
        """Measure the times of the shallow network, or read them."""
        step = self.step

        def make() -> Profile:
            small = self._shallow(step.device)
            wanted = min(step.timed_batch or step.batch, step.batch)
            batch = batch_that_fits(
                lambda count: stored_bytes(step.at(count), small, channels),
                wanted,
                step.device,
            )
            trial = step.trial(batch, small, channels)
            taken = measured_seconds(
                trial.network, trial.run, step.device, repeats=_REPEATS
            )
            seconds = {k: s * step.batch / batch for k, s in taken.items()}
            how = f"measured on {described(step.device)}, at batch {batch}"
            counted = self._shallow_counted(channels).with_seconds(seconds)
            return _about(counted, seconds=how, **{"timed batch": str(batch)})

        hardware = {"device": described(step.device), "machine": platform.node()}
        return self._saved(channels, hardware, make)

    def _shallow(self, device: torch.device | str) -> nn.Module:
        if self.step.shallow is None:
            return self.step.module
        with torch.device(device):
            return self.step.shallow()

    def _saved(
        self,
        channels: Channels | None,
        more: Mapping[str, str],
        make: Callable[[], Profile],
    ) -> Profile:
        if self.step.key is None:
            return make()
        given = [None] if channels is None else list(channels)
        key = {**self.step.key, "channels": str(given), **more}
        return saved_profile(key, make)

    def _whole(self, shallow: Profile, about: Mapping[str, str]) -> Profile:
        """Stretch the profile of a shallow network to that of the step's."""
        names = list(as_network(self.step.module, self.step.blocks).named_blocks())
        whole = shallow.stretched(names, {**self._about, **about})
        return whole.without_reconstruction(self._refused)

    def _counted_compressing(self, channels: Channels | None) -> Counted:
        """Count with what compression was tried to leave."""
        probe, step = self.probe, self.step
        assert probe is not None
        error = f"measured at batch {probe.batch}, of {probe.samples}"
        about = {"gradient error": error}
        if not step.is_trusted and probe.batch == step.batch:
            trial = probe.trial._replace(network=self._reconstructing(probe.network))
            real = self._counted_on(trial, step.device)
            return replace(
                real, profile=_about(probe.with_errors(real.profile), **about)
            )
        with self.bare(channels) as trial:
            how = f"counted without contents, bits measured at batch {probe.batch}"
            about |= {**self._about, "bytes": how}
            counted = count(trial, about, with_work=step.speed is not None)
        lossy = probe.with_errors(counted.without_reconstruction(self._refused))
        return Counted(lossy)

    def _counted_and_checked(self) -> Counted:
        """Count without contents, and hold that against a real step where one can run."""
        step = self.step
        measures = step.speed is None and step.has_numbers
        bare: Trial | None = None
        cause: Exception | None = None
        try:
            bare = self._bare_after_a_step()
        except NoStep:
            raise
        except Exception as error:  # whatever a network does without its numbers
            cause = error
        if measures:
            stored = None if bare is None else trace_bytes(bare.network, bare.run)
            found = None
            if stored is None or fits_device(
                step.copy_bytes + stored.peak_bytes, step.device
            ):
                found = unless_memory_runs_out(
                    lambda: self._counted_where_it_is(bare, stored)
                )
            if found is not None:
                return found
            what = f"A step that stores everything does not fit on {step.device}"
            if bare is None:
                raise MemoryError(
                    f"{what}, and none can run without numbers ({cause}). Give a smaller "
                    "example batch."
                ) from cause
            warn_caller(
                f"{what}: bytes are counted on meta tensors, and times estimated from "
                "counts of operations, as with measure=False. A smaller example batch "
                "would be measured."
            )
        if bare is None:
            raise ValueError(
                "A training step does not run on meta tensors, on which memory is counted "
                f"without computing ({type(cause).__name__}: {cause}). Give a module and "
                "a batch with numbers, and measure=True, which counts in real steps."
            ) from cause
        _warn_of_kernels(step.module)
        found = self._counted_on(bare, torch.device("meta"))
        return replace(found, is_timed=False)

    def _reconstructing(self, network: Network) -> Network:
        return Without(network, Mode.RECONSTRUCT, self._refused)

    def _bare_after_a_step(self) -> Trial:
        """Make a trial on meta and run it once: what its first step makes is not counted."""
        trial = self.step.bare(torch.device("meta"))
        trial.network.set_mode(all_stored(trial.network))
        with contextlib.ExitStack() as hooks:
            for part in trial.module.modules():
                # Parts of couplings report, and scripted ones take no hooks.
                if isinstance(part, AdditiveCoupling | torch.jit.ScriptModule):
                    continue
                handle = part.register_forward_pre_hook(_refuse_autocast)
                hooks.callback(handle.remove)
            trial.run()
        return trial._replace(network=self._reconstructing(trial.network))

    def _counted_where_it_is(self, bare: Trial | None, stored: Trace | None) -> Counted:
        """Count on a copy: training steps change gradients and statistics."""
        trial = self.step.trial()
        network = self._reconstructing(trial.network)
        trial = trial._replace(network=network)
        network.set_mode(all_stored(network))
        trial.run()
        if bare and stored and _alike(stored, trace_bytes(network, trial.run)):
            once = run_once(network, trial.run)
            same = bare._replace(network=Without(bare.network, Mode.RECOMPUTE, once))
            counted = count(same, self._about | _ON_META)
            own = trial._replace(network=Without(network, Mode.RECOMPUTE, once))
            return Counted(counted, own, is_timed=True)
        real = self._counted_on(trial, self.step.device)
        return replace(real, needs_numbers=True)

    def _counted_on(self, trial: Trial, device: torch.device) -> Counted:
        """Count in steps of a trial as it is."""
        once = run_once(trial.network, trial.run)
        trial = trial._replace(network=Without(trial.network, Mode.RECOMPUTE, once))
        on_meta = device.type == "meta"
        how = {"bytes": f"counted in steps on {described(device)}"}
        about = self._about | (_ON_META if on_meta else how)
        with_work = on_meta or self.step.speed is not None
        return Counted(count(trial, about, with_work=with_work), trial, is_timed=True)


# Where bytes are counted: meta tensors know no autocast.
_NO_CONTENTS = {True: "meta tensors", False: "fake tensors"}
_ON_META = {"bytes": "counted on meta tensors"}


def _estimated(profile: Profile, speed: Speed) -> Profile:
    how = f"estimated from counts of operations; {speed.about['device']}"
    return _about(profile.with_speed(speed), seconds=how)


def _about(profile: Profile, **more: str) -> Profile:
    return replace(profile, about={**profile.about, **more})


def _refuse_autocast(*_: Any) -> None:
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            raise ValueError(
                "it runs under autocast, of which meta tensors know nothing"
            )


def _alike(one: Trace, other: Trace) -> bool:
    """Whether two traces of the same network are the same at each of its blocks."""

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
        warn_caller(
            f"Kernels of recurrent layers ({', '.join(found)}) keep other tensors than "
            "are counted without computing: peaks can be off by a factor of two. Give "
            "a module with numbers, and measure=True, which counts in real steps."
        )


def _not_reconstructed(step: Step) -> tuple[list[str], str]:
    """Name blocks that are not to be reconstructed, and how that was verified."""
    chained = any(isinstance(m, ReversibleChain) for m in step.module.modules())
    if not chained:
        return [], "no block reconstructs"
    if not step.has_numbers:
        return [], "not verified: no numbers on meta"
    with step.autocast(step.device):
        found = reproduced(step.module, step.few(_VERIFIED), step.blocks)
    refused = warn_refused(found)
    return refused, f"verified: {len(found) - len(refused)} of {len(found)} blocks"


def stored_bytes(
    step: Step, module: nn.Module | None = None, channels: Channels | None = None
) -> int:
    """Count the peak of a step that stores everything, without contents."""
    with step.without_contents() as device:
        trial = step.bare(device, module, channels)
        trial.network.set_mode(all_stored(trial.network))
        return live_bytes_peak(trial.run, device=device_of(trial.network))


def count(
    trial: Trial,
    about: Mapping[str, str],
    *,
    with_work: bool = False,
    modes: Sequence[Mode] = tuple(Mode),
) -> Profile:
    """Count what each block holds and works on, in each mode after each other.

    Training steps run on meta tensors, or wherever the trial is: one for each mode, and
    two for each pair of modes that take turns, so that every mode has been seen after
    every other one.

    Parameters
    ----------
    trial : Trial
        With gradients. Its blocks get modes in turn, and then those that they had.
    about : mapping of str to str
        What is profiled.
    with_work : bool
        Whether operations are counted too, from which times can be estimated.
    modes : sequence of Mode
        Those that are counted, of blocks that can have them.

    Returns
    -------
    Profile
        Without times. From it follows the peak of any plan.

    Raises
    ------
    ValueError
        If the blocks do not run one after the other.
    """
    network = trial.network
    gradient_bytes = {
        name: sum(
            p.numel() * p.element_size() for p in block.parameters() if p.requires_grad
        )
        for name, block in network.named_blocks().items()
    }
    found: dict[str, dict[Pair, Cost]] = {}
    after_bytes: dict[str, int] = {}
    work: dict[tuple[str, str], Work] = {}
    base_bytes = 0
    for chosen, trace in _traces(network, trial.run, modes, with_work):
        seen = list(trace.blocks.values())
        # When a block ends, its caller may still have what the block before it returned
        # by a name of its own, until it gives the name to something else.
        nexts = [*(block.before_bytes for block in seen[1:]), trace.backward_bytes]
        ends = [min(b.after_bytes, x) for b, x in zip(seen, nexts, strict=True)]
        base_bytes = held = seen[0].before_bytes
        waits = waiting_bytes(list(trace.blocks), chosen, gradient_bytes)
        before: str | None = None
        for (name, block), end in zip(trace.blocks.items(), ends, strict=True):
            own = chosen[name]
            backward = (block.backward_peak_bytes or 0) - waits[name]
            peak = max(block.forward_peak_bytes, backward)
            cost = Cost(end - held, max(0, peak - held), seconds=0.0)
            found.setdefault(name, {}).setdefault((before, own), cost)
            before, held = own, end
        assert before is not None
        after = trace.between_peak_bytes - held
        after_bytes[before] = max(after_bytes.get(before, 0), after)
        for name, done in trace.work.items():
            work.setdefault((name, chosen.get(name, "")), done)
    blocks = [BlockProfile(n, gradient_bytes[n], costs) for n, costs in found.items()]
    return Profile(blocks, base_bytes, after_bytes, 0.0, about, work=work)


def _traces(
    network: Network, run: Run, modes: Sequence[Mode], with_work: bool
) -> Iterator[tuple[dict[str, str], Trace]]:
    """Trace patterns in which each mode follows each, at every block that allows it.

    First blocks of which nothing is trained keep nothing whatever they do: they store.
    """
    allowed = {
        name: tuple(mode for mode in own if mode.spec.planned)
        for name, own in network.allowed_modes().items()
    }
    modes = [mode for mode in modes if any(mode in own for own in allowed.values())]
    patterns = [(mode, mode) for mode in modes]
    patterns += [
        pair for a, b in itertools.combinations(modes, 2) for pair in ((a, b), (b, a))
    ]
    order: list[str] = []
    with keeping_modes(network):
        for pair in patterns:
            turn = {name: i % 2 for i, name in enumerate(order or allowed)}
            chosen = {
                name: fallback(pair[turn[name]], own) for name, own in allowed.items()
            }
            network.set_mode(chosen)
            uniform = pair[0] is pair[1]
            trace = trace_bytes(network, run, with_work=with_work and uniform)
            order = list(trace.blocks)
            for name, seen in trace.blocks.items():
                if seen.backward_peak_bytes is None and Mode.STORE in allowed[name]:
                    allowed[name] = (Mode.STORE,)
            yield {name: mode.value for name, mode in chosen.items()}, trace
