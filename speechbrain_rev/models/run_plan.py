"""The plan of a run: made for its budget or given as a file, kept, and held to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from speechbrain_rev.devices import device_name, free_and_held_bytes
from speechbrain_rev.models.card import PLANNED_CARD
from speechbrain_rev.models.training_plan import budget_bytes_of, plan_training
from speechbrain_rev.models.training_step import TrainingStep
from speechbrain_rev.planner import Plan
from speechbrain_rev.sizes import card_text, size_text
from speechbrain_rev.whole_files import check_regular

# What of a plan has to be what is asked for, so that it is not made anew.
_ASKED = ("memory_budget", "max_gradient_error", "bounds")
# The budget, and what of it a step does not have.
_SHARES = "memory_budget_bytes", "staying_bytes", "reserved_bytes"
# Cards have less than they are called by, and CUDA takes some: of 11 GB 10.4 GiB are left.
_OF_NAMED = 0.9


def plan_for_run(
    step: TrainingStep,
    *,
    kept: Path,
    plan_file: str | None,
    memory_budget: str | None,
    max_gradient_error: float | None = None,
    say: Callable[[str], object],
) -> Plan:
    """Give the plan of a run: that of a file, the one that is kept, or a new one.

    Parameters
    ----------
    step : TrainingStep
        A step of the training.
    kept : Path
        Where the run keeps its plan; read if it was made for the same budget.
    plan_file : str or None
        A plan's file, which goes before a budget.
    memory_budget : str or None
        As ``budget_bytes_of`` takes it. If neither is given, the plan that is kept
        is the run's.
    max_gradient_error : float or None
        As ``plan_training`` takes it: a plan that was kept for another one is made anew.
    say : callable
        Is told what a new plan is made for, and if one is taken that nobody named.

    Returns
    -------
    Plan
        It says which file or which budget it is of.

    Raises
    ------
    ValueError
        If nothing fits the budget, or the plan is for another training, card or chunk.
    FileNotFoundError
        If the file of a plan is not there.

    Warns
    -----
    UserWarning
        If the plan of a file was made for something else in part.
    """
    if plan_file is not None:
        plan = _load(plan_file, kept)
        _warn_of_other_training(plan, step, f"plan_file {plan_file}")
        _refuse_other_channels(plan, step, plan_file)
        return plan.with_about(plan_file=str(plan_file))
    if memory_budget is None:
        plan = _read(kept)
        if "plan_file" in plan.about:
            _warn_of_other_training(plan, step, str(kept))
        else:
            _refuse_other_training(plan, step, kept)
        _refuse_other_channels(plan, step, kept)
        say(
            f"memory plan: of this run, {kept}, since neither mode, plan_file nor "
            "memory_budget is given; each of them goes before it"
        )
        return plan
    if kept.is_file():
        plan = _read(kept)
        given = plan.about.get("plan_file")
        asked = {"memory_budget": memory_budget, **_limit(step, max_gradient_error)}
        same = all(plan.about.get(name) == asked.get(name) for name in _ASKED)
        if given is None and same:
            _refuse_other_training(plan, step, kept)
            _refuse_other_channels(plan, step, kept)
            return plan
    size = budget_bytes_of(memory_budget, step.device)
    say(
        f"memory plan: {memory_budget} is {card_text(size)}; times of blocks on "
        f"{device_name(step.device)}"
    )
    return plan_training(step, size, max_gradient_error).with_about(
        memory_budget=memory_budget,
        memory_budget_bytes=str(size),
        **_limit(step, max_gradient_error),
    )


def in_words(plan: Plan) -> str:
    """Say what a run's plan does, and how its budget is shared out.

    Parameters
    ----------
    plan : Plan
        As ``plan_for_run`` gives it.

    Returns
    -------
    str
        One line.
    """
    about = plan.about
    if "plan_file" in about:
        return f"{plan}; of plan_file {about['plan_file']}"
    budget, staying, reserved = (int(about.get(name, 0)) for name in _SHARES)
    if not staying:
        return str(plan)
    aside = f", {size_text(reserved)} for what is not counted" if reserved else ""
    return (
        f"{plan.counts()}; budget {size_text(budget)}, {size_text(staying)} of it for "
        "weights, gradients, optimizer states and classifier, and a batch's speech"
        f"{aside}; the step peaks at {size_text(plan.measured_bytes)} counted "
        f"({size_text(plan.predicted_bytes)} predicted) of the remaining "
        f"{size_text(plan.budget_bytes)}{plan.error_text()}"
    )


def _limit(step: TrainingStep, max_gradient_error: float | None) -> dict[str, str]:
    """Say in a plan which error it may have, if any, and of which bounds it is."""
    if max_gradient_error is None:
        return {}
    return {
        "max_gradient_error": str(float(max_gradient_error)),
        "bounds": _bounds(step),
    }


def _bounds(step: TrainingStep) -> str:
    return ", ".join(map(str, step.encoder.compression.rules.values()))


def _read(path: str | Path) -> Plan:
    """Read a plan, whose shares of its budget have to make it up."""
    plan = Plan.load(path)
    shares = [int(plan.about[name]) for name in _SHARES if name in plan.about]
    if len(shares) == len(_SHARES) and shares[0] - sum(shares[1:]) != plan.budget_bytes:
        whole, staying, reserved = _SHARES
        raise ValueError(
            f"{path}: This is no plan (budget_bytes is {plan.budget_bytes}, but {whole} less "
            f"{staying} and {reserved} is {shares[0] - sum(shares[1:])}). Plan anew."
        )
    return plan


def _load(plan_file: str, kept: Path) -> Plan:
    check_regular(plan_file)
    if Path(plan_file).is_file():
        return _read(plan_file)
    own = f", or leave plan_file out and go on with {kept}" if kept.is_file() else ""
    raise FileNotFoundError(
        f"plan_file: {plan_file} is no file. Give the plan that `speechbrain-rev plan "
        f"ENCODER --card SIZE --save FILE` or another run wrote (its plan.json){own}, or "
        "give memory_budget, which plans."
    )


def _differences(plan: Plan, step: TrainingStep) -> dict[str, tuple[str | None, str]]:
    """Collect what a plan says of itself and the step says otherwise."""
    now = step.about()
    if "bounds" in plan.about:
        now["bounds"] = _bounds(step)
    return {
        name: (plan.about.get(name), now[name])
        for name in now
        if plan.about.get(name) != now[name]
    }


def _refuse_other_training(plan: Plan, step: TrainingStep, path: Path) -> None:
    for name, (then, now) in _differences(plan, step).items():
        raise ValueError(
            f"{path} was made {_for_another(name, then, now)}. Delete it to plan anew by "
            f"memory_budget, or give the modes by plan_file: {path}."
        )


def _for_another(name: str, then: str | None, now: str) -> str:
    """Say what a plan was made for and what there is."""
    if name != "chunk":
        return f"for {name} {then}, and this is {now}"
    was, is_ = (
        "chosen by chunk: auto" if x == "chosen" else f"set, which makes {x} channels"
        for x in (then, now)
    )
    return f"where the chunk was {was}, and here it is {is_}"


def _warn_of_other_training(plan: Plan, step: TrainingStep, source: str) -> None:
    """Warn of what decides whether the plan fits; what it does not tell is let pass."""
    for name, (then, now) in _differences(plan, step).items():
        if name == "device" and _holds_named_card(step.device, plan.about):
            continue
        # Blocks and channels are compared by themselves.
        if then is not None and name not in ("blocks", "chunk"):
            warnings.warn(
                f"{source} was made {_for_another(name, then, now)}: it may take more "
                "memory than it says, or be slower than another plan.",
                stacklevel=3,
            )


def _holds_named_card(device: torch.device, about: Mapping[str, str]) -> bool:
    """Say whether a device has the memory that a plan was made for by its size alone."""
    if PLANNED_CARD not in about:
        return False
    there = free_and_held_bytes(device)
    return there is None or there >= _OF_NAMED * int(about[PLANNED_CARD])


def _refuse_other_channels(plan: Plan, step: TrainingStep, path: str | Path) -> None:
    """Refuse a plan that would change a chunk that is fixed, or was trained with."""
    own = list(step.encoder.channels)
    if plan.channels is None or list(plan.channels) == own:
        return
    channels = f"{path} works on {list(plan.channels)} channels at a time"
    if step.begun:
        raise ValueError(
            f"{channels}, but this training began with {own}, which never change. Give "
            "the plan that it began with, or a memory_budget, which plans for these."
        )
    if not step.searches_chunk:
        raise ValueError(
            f"{channels}, but the chunk that is set makes {own}. Give chunk: auto, "
            "which takes the plan's, or a plan for this chunk."
        )
