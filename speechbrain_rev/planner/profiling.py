"""Measure what the blocks of a step cost: by steps without contents, or real ones.

Meta tensors show in a moment what a step keeps, of most networks to the byte. They do not
know what some kernels keep by themselves (recurrent ones), autocast, or what depends on
numbers. So where the module can run, one real step is held against them; if it differs,
real steps are counted instead.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from speechbrain_rev.compression.activations import refuse_what_is_compressed
from speechbrain_rev.devices import ASSUMED, Speed, Work, described
from speechbrain_rev.modes import ALONE, Mode, fallback
from speechbrain_rev.planner.compression_probe import CompressionProbe
from speechbrain_rev.planner.knapsack import Cost
from speechbrain_rev.planner.memory import (
    batch_that_fits,
    fits_device,
    unless_memory_runs_out,
)
from speechbrain_rev.planner.network import (
    Network,
    Restricted,
    all_stored,
    as_network,
    keeping_modes,
    warn_caller,
    without,
)
from speechbrain_rev.planner.profile import (
    BlockProfile,
    Pair,
    Profile,
    waiting_bytes,
)
from speechbrain_rev.planner.saved_profiles import saved_profile
from speechbrain_rev.planner.step import Channels, NoStep, Step, Trial
from speechbrain_rev.planner.timing import REPEATS, measured_seconds
from speechbrain_rev.planner.trace import Run, Trace, trace_bytes
from speechbrain_rev.planner.tried_modes import reproduced, tried_modes
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain

#: By how much of the peak a step without contents may differ from a real one.
_ALIKE = 0.01

# Samples in which blocks are reconstructed; what is wrong is wrong for any.
_VERIFIED = 2

# Samples of the smaller of two steps, from which a larger one is extrapolated: at least half.
_FEWEST = 2


def profile(
    step: Step,
    *,
    channels: Channels | None = None,
    max_gradient_error: float | None = None,
) -> Profile:
    """Measure what each block of a step costs in each mode.

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
    >>> blocks = profile(step_of(network, torch.randn(4, 8), blocks="?")).blocks
    >>> [block.name for block in blocks], blocks[0].modes
    (['0', '1', '2'], ['store', 'selective', 'recompute'])
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
    profiler = Profiler(step)
    if max_gradient_error is not None:
        profiler.probe = CompressionProbe(step, max_gradient_error)
    return profiler


class Profiler:
    """Measures what the blocks of a step cost, with some channels after others.

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
        self._about = {
            **step.about,
            "torch": torch.__version__,
            "reconstruction": verified,
        }
        self._known: dict[Channels | None, Counted] = {}

    def at(self, step: Step) -> Profiler:
        """Make one of the same step of another batch, and try nothing again."""
        other = copy.copy(self)
        other.step, other._known = step, {}
        other._about = {**self._about, **step.about}
        return other

    def counted(self, channels: Channels | None = None) -> Counted:
        """Count what each block holds in each mode."""
        if channels not in self._known:
            if self.probe is not None:
                counted = self._counted_compressing(self.probe, channels)
            elif self.step.is_trusted:
                counted = Counted(self._whole(self._shallow_counted(channels), "bytes"))
            else:
                counted = self._counted_and_checked()
            self._known[channels] = counted
        return self._known[channels]

    def timed(self, channels: Channels | None = None) -> Profile:
        """Count it, and measure times or estimate them."""
        counted, step = self.counted(channels), self.step
        profile, trial = counted.profile, counted.trial
        if step.speed is not None:
            return _estimated(profile, step.speed)
        if self.probe is not None:
            seconds, how = self.probe.seconds(step.batch, channels)
            return _about(profile.with_seconds(seconds), seconds=how)
        if counted.is_timed and trial is not None:
            seconds = measured_seconds(trial.network, trial.run, step.device)
            how = f"measured on {described(step.device)}"
            return _about(profile.with_seconds(seconds), seconds=how)
        if step.is_trusted and step.device.type != "meta":
            shallow = self._shallow_timed(channels)
            return self._whole(shallow, "seconds", "bytes", "timed batch")
        return _estimated(profile, ASSUMED)

    def stored(self, channels: Channels | None = None) -> Profile:
        """Count a trusted step that stores everything, and estimate its time.

        One traced step of a shallow network suffices. The profile has no other mode.
        """
        shallow = self._shallow_counted(channels, (Mode.STORE,))
        return _estimated(self._whole(shallow, "bytes"), self.step.speed or ASSUMED)

    @contextlib.contextmanager
    def bare(self, channels: Channels | None = None) -> Iterator[Trial]:
        """Make a trial without contents, whose blocks may compress if they are probed."""
        with self.step.without_contents() as device:
            trial = self.step.bare(device, channels=channels)
            if self.probe is not None:
                trial = self.probe.compressible(trial)
            yield trial

    def _shallow_counted(
        self, channels: Channels | None, modes: Sequence[Mode] = tuple(Mode)
    ) -> Profile:
        """Count the shallow network of a trusted step, or read what was counted."""

        def make() -> Profile:
            small = self._shallow("meta")  # Outside of fakes, which are not copied.
            with self.step.without_contents() as device:
                trial = self.step.bare(device, small, channels)
                kind = "meta" if self.step.counts_on_meta else "fake"
                about = {"bytes": f"counted on {kind} tensors"}
                return count(trial, about, with_work=True, modes=modes)

        few = {} if len(modes) == len(Mode) else {"modes": ", ".join(modes)}
        return self._saved(channels, {"seconds": "not taken", **few}, make)

    def _shallow_timed(self, channels: Channels | None) -> Profile:
        """Measure the times of the shallow network, or read them."""
        step = self.step

        def make() -> Profile:
            small = self._shallow(step.device)
            batch = batch_that_fits(
                lambda count: step.at(count).stored_bytes(small, channels),
                step.tried_batch,
                step.device,
            )
            trial = step.trial(batch, small, channels)
            taken = measured_seconds(
                trial.network, trial.run, step.device, repeats=REPEATS
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

    def _whole(self, shallow: Profile, *kept: str) -> Profile:
        """Stretch a shallow network's profile, and some of what it is about, to the step's."""
        names = list(as_network(self.step.module, self.step.blocks).named_blocks())
        how = {name: shallow.about[name] for name in kept}
        whole = shallow.stretched(names, {**self._about, **how})
        return whole.without_reconstruction(self._refused)

    def _counted_compressing(
        self, probe: CompressionProbe, channels: Channels | None
    ) -> Counted:
        """Count with the sizes that compression left when it was tried."""
        step = self.step
        error = f"measured at batch {probe.batch}, of {step.samples}"
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
        return Counted(probe.with_errors(counted.without_reconstruction(self._refused)))

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
            needed = 0 if stored is None else step.copy_bytes + stored.peak_bytes
            if fits_device(needed, step.device):
                counted = unless_memory_runs_out(
                    lambda: self._counted_where_it_is(bare, stored)
                )
                if counted is not None:
                    return counted
            what = f"A step that stores everything does not fit on {step.device}"
            if bare is None:
                return self._counted_from_fewer(what, cause)
            warn_caller(
                f"{what}: bytes are counted on meta tensors, and times estimated from "
                "counts of operations, as with measure=False. A smaller example batch "
                "would be measured."
            )
        if bare is None:
            raise ValueError(
                "A training step does not run on meta tensors, on which memory is counted "
                f"without computing ({type(cause).__name__}: {cause}). Put what "
                "the loss takes, as labels, into the batch of a module that returns the loss. "
                "Or give a batch with numbers and measure=True: real steps are counted."
            ) from cause
        _warn_of_kernels(step.module)
        counted = self._counted_on(bare, torch.device("meta"))
        return replace(counted, is_timed=False)

    def _counted_from_fewer(self, what: str, cause: Exception | None) -> Counted:
        """Count at two batches that fit, and go on from there to the step's own."""
        step, batch = self.step, self.step.batch // 2

        def count_at(batch: int) -> Profile:
            trial = step.trial(batch)
            trial = trial._replace(network=self._reconstructing(trial.network))
            trial.network.set_mode(all_stored(trial.network))
            trial.run()
            return self._counted_on(trial, step.device, with_work=True).profile

        large = None
        while batch >= _FEWEST and large is None:
            large = unless_memory_runs_out(functools.partial(count_at, batch))
            batch = batch if large is not None else batch // 2
        if large is None:
            raise MemoryError(
                f"{what}, nor does one of {_FEWEST} samples, and none can run without "
                f"numbers ({cause}). Give a smaller example batch."
            ) from cause
        small = count_at(batch // 2)
        reach = (step.batch - batch) / (batch - batch // 2)
        warn_caller(
            f"{what}: bytes are counted in steps of {batch // 2} and {batch} of its "
            f"{step.batch} samples, and times estimated from counts of operations."
        )
        how = f"counted in steps of {batch // 2} and {batch} samples"
        profile = _about(large.extrapolated(small, reach), bytes=how)
        trial = step.trial()
        trial = trial._replace(network=self._reconstructing(trial.network))
        return Counted(profile, trial, needs_numbers=True)

    def _reconstructing(self, network: Network) -> Network:
        return without(network, Mode.RECONSTRUCT, self._refused)

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
            allowed = tried_modes(network, trial.run)
            same = bare._replace(network=Restricted(bare.network, allowed))
            counted = count(same, self._about | _ON_META)
            own = trial._replace(network=Restricted(network, allowed))
            return Counted(counted, own, is_timed=True)
        real = self._counted_on(trial, self.step.device)
        return replace(real, needs_numbers=True)

    def _counted_on(
        self, trial: Trial, device: torch.device, *, with_work: bool = False
    ) -> Counted:
        """Count in steps of a trial as it is."""
        allowed = tried_modes(trial.network, trial.run)
        trial = trial._replace(network=Restricted(trial.network, allowed))
        on_meta = device.type == "meta"
        how = {"bytes": f"counted in steps on {described(device)}"}
        about = self._about | (_ON_META if on_meta else how)
        with_work = with_work or on_meta or self.step.speed is not None
        return Counted(count(trial, about, with_work=with_work), trial, is_timed=True)


_ON_META = {"bytes": "counted on meta tensors"}


def _estimated(profile: Profile, speed: Speed) -> Profile:
    how = f"estimated from counts of operations; {speed.device}"
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
        of_blocks = (
            (b.held_bytes, b.forward_peak_bytes, b.backward_peak_bytes or 0)
            for b in trace.blocks.values()
        )
        return [
            trace.between_peak_bytes,
            trace.peak_bytes,
            *itertools.chain(*of_blocks),
        ]

    pairs = zip(figures(one), figures(other), strict=False)
    allowed = _ALIKE * max(one.peak_bytes, other.peak_bytes)
    return list(one.blocks) == list(other.blocks) and all(
        abs(a - b) <= allowed for a, b in pairs
    )


def _warn_of_kernels(module: nn.Module) -> None:
    """Warn of layers whose kernels keep what meta tensors do not show."""
    layers = [name for name, m in module.named_modules() if isinstance(m, nn.RNNBase)]
    if layers:
        warn_caller(
            f"Kernels of recurrent layers ({', '.join(layers)}) keep other tensors than "
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
        same = reproduced(step.module, step.few(_VERIFIED), step.blocks)
    refused = [name for name, is_same in same.items() if not is_same]
    if refused:
        warn_caller(
            f"Not reconstructed, for their inverse does not give back what went in: "
            f"{', '.join(refused)}. Their residual functions must compute the same twice "
            "in evaluation, and no NaN, and streams must be exact under autocast; plans "
            "without it store or recompute them."
        )
    return refused, f"verified: {len(same) - len(refused)} of {len(same)} blocks"


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
    every other one. Blocks join all together in one step: after it a block that joins is
    as one that recomputes, and what runs of other lengths take follows.

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
    costs: dict[str, dict[Pair, Cost]] = {}
    after_bytes: dict[str, int] = {}
    work: dict[tuple[str, str], Work] = {}
    base_bytes = 0
    for chosen, trace in _traces(network, trial.run, modes, with_work):
        base_bytes = held = next(iter(trace.blocks.values())).before_bytes
        # When a block returns, its caller may still have what a block before it returned
        # by a name of its own. No block holds that: in other modes one may, or not.
        left = 0
        waits = waiting_bytes(list(trace.blocks), chosen, gradient_bytes)
        joined = Mode.JOIN in chosen.values()
        before: str | None = None
        for name, block in trace.blocks.items():
            own = chosen[name]
            joins = Mode(own).spec.joins
            backward = (block.backward_peak_bytes or 0) - waits[name]
            # The backward pass of blocks that join is that of a whole run.
            forward = block.forward_peak_bytes - left
            peak = max(forward, 0 if joins else backward)
            cost = Cost(
                block.held_bytes - held,
                max(0, peak - held),
                seconds=0.0,
                dropped_bytes=block.dropped_bytes,
                forward_bytes=max(0, forward - held),
                left_bytes=block.left_bytes,
            )
            if joins or not joined:
                after_again = Mode.RECOMPUTE.value if joins else before
                costs.setdefault(name, {}).setdefault((after_again, own), cost)
            before, held, left = own, block.held_bytes, left + block.left_bytes
        assert before is not None
        if not joined or Mode(before).spec.joins:
            between = trace.between_peak_bytes - held - left
            after_bytes[before] = max(after_bytes.get(before, 0), between)
        if joined:
            continue
        for name, done in trace.work.items():
            work.setdefault((name, chosen.get(name, "")), done)
    blocks = [
        BlockProfile(n, gradient_bytes[n], _after_joining(c)) for n, c in costs.items()
    ]
    return Profile(blocks, base_bytes, after_bytes, 0.0, about, work=work)


def _after_joining(costs: Mapping[Pair, Cost]) -> dict[Pair, Cost]:
    """Let a block cost after one that joins what it costs after one that recomputes."""
    again, joining = Mode.RECOMPUTE.value, Mode.JOIN.value
    after = {(joining, own): cost for (b, own), cost in costs.items() if b == again}
    return {**costs, **after}


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
    alone = [mode for mode in modes if mode in ALONE]
    patterns += [
        pair for a, b in itertools.combinations(alone, 2) for pair in ((a, b), (b, a))
    ]
    # When it is known which blocks are trained: the others store, and none joins them.
    patterns.sort(key=lambda pair: pair[0] not in ALONE)
    order: list[str] = []
    with keeping_modes(network):
        for pair in patterns:
            turn = {name: i % 2 for i, name in enumerate(order or allowed)}
            chosen: dict[str, Mode] = {}
            before = None
            for name, place in turn.items():
                mode = fallback(pair[place], allowed[name])
                before = mode if mode.can_follow(before) else mode.alone
                chosen[name] = before
            network.set_mode(chosen)
            uniform = pair[0] is pair[1]
            trace = trace_bytes(network, run, with_work=with_work and uniform)
            order = list(trace.blocks)
            # An input that other blocks read too is there whether this one keeps it or not.
            shared = [
                n for n, seen in trace.blocks.items()
                if chosen[n].spec.joins and seen.shares_input
            ]  # fmt: skip
            if shared:
                for name in shared:
                    allowed[name] = tuple(m for m in allowed[name] if m.alone is m)
                patterns.append(pair)
                continue
            for name, seen in trace.blocks.items():
                if seen.backward_peak_bytes is None and Mode.STORE in allowed[name]:
                    allowed[name] = (Mode.STORE,)
            yield {name: mode.value for name, mode in chosen.items()}, trace
