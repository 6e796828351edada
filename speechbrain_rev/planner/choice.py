"""Channels and modes for a step, chosen by what its profile predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speechbrain_rev.modes import Mode
from speechbrain_rev.planner.knapsack import Infeasible
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.profiling import Profiler
from speechbrain_rev.planner.step import Channels


@dataclass(frozen=True)
class Choice:
    """Channels and modes for a step, before they are run.

    Attributes
    ----------
    channels : Channels or None
        Channels at a time, at each level; None for those of the module.
    profile : Profile
        What blocks cost with these.
    modes : mapping of str to str
        The fastest modes that fit, or else the lightest.
    peak_bytes : int
        What the profile predicts of them.
    fits : bool
        Whether that is within what the budget leaves.
    """

    channels: Channels | None
    profile: Profile
    modes: Mapping[str, str]
    peak_bytes: int
    fits: bool

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.profile.seconds(self.modes)


def choose(profiler: Profiler, left_bytes: int, *, is_timed: bool = True) -> Choice:
    """Choose channels at a time and modes, so that a step is as fast as fits.

    Fewer channels take less memory and more time. The usual ones are tried from the
    largest on, until some are no faster than those before, or all blocks can store; if
    none fits, smaller ones until some do.

    Parameters
    ----------
    profiler : Profiler
        Of the step.
    left_bytes : int
        What the budget leaves for what modes change.
    is_timed : bool
        Whether times count; else the first that fit are taken.

    Returns
    -------
    Choice
        What is fastest, or, if nothing fits, lightest.
    """
    best: Choice | None = None
    lightest: Choice | None = None
    usual, small = profiler.step.channels or ((None,), ())
    for channels in (*usual, *small):
        if best is not None and channels in small:
            break
        profile = (
            profiler.timed(channels) if is_timed else profiler.counted(channels).profile
        )
        try:
            modes, fits = profile.fastest(left_bytes), True
        except Infeasible:
            modes, fits = profile.lightest(), False
        choice = Choice(channels, profile, modes, profile.peak_bytes(modes), fits)
        if not fits:
            if lightest is None or choice.peak_bytes < lightest.peak_bytes:
                lightest = choice
            continue
        if best is not None and choice.seconds >= best.seconds:
            break
        best = choice
        if set(modes.values()) == {Mode.STORE.value}:
            break
    chosen = best or lightest
    assert chosen is not None
    return chosen
