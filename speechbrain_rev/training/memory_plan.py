"""The memory plan of a run: modes of the encoder's blocks, as its settings want them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import speechbrain as sb
import torch
from speechbrain.utils.distributed import run_on_main

from speechbrain_rev.catalog.plans import PLANNED_CARD
from speechbrain_rev.devices import device_name, free_and_held_bytes
from speechbrain_rev.files import write_whole
from speechbrain_rev.lobes.checkpointer import CHANNELS
from speechbrain_rev.planner import Plan, plan_step
from speechbrain_rev.planner.plan import load_plans, plans_to_json
from speechbrain_rev.sizes import card_text, size_text
from speechbrain_rev.training.recipe_step import TrainingStep, budget_bytes_of

#: The file of plans in a run's folder.
PLAN = "plan.json"

# Entries of a plan that have to be what is asked for, so that it is not made anew.
_ASKED = ("memory_budget", "max_gradient_error", "bounds")
# The rest of what a run's step has beside weights and gradients, whatever the modes.
_STAYING = "optimizer states and classifier, and a batch's speech"
# GPUs have less than they are called by, and CUDA takes some: of 11 GB 10.4 GiB are left.
_OF_NAMED = 0.9

logger = logging.getLogger("train")


def read_plans(path: Path) -> list[Plan]:
    """Read the plans of a run, the newest last; none where there is no file.

    Raises
    ------
    ValueError
        If the file is no file of plans; the message says how to resume.
    """
    if not path.is_file():
        return []
    try:
        return load_plans(path)
    except ValueError as error:
        raise ValueError(
            f"{error} To do so, delete that file: memory_budget then plans."
        ) from error


def write_plans(path: Path, plans: Sequence[Plan]) -> None:
    """Write the plans of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, plans_to_json(plans))


def give_modes(brain: sb.Brain, folder: Path) -> None:
    """Give the blocks the modes of ``plan_file`` or those that ``memory_budget`` allows.

    The plan is kept in the run's folder. A run that resumes without either setting takes
    it again. ``mode`` overrides both. A run resumes with the channels at a
    time and the memory format that it began with, whatever gives the modes.

    Parameters
    ----------
    brain : speechbrain.Brain
        Before its first step, with a checkpointer of ``KeptArithmetic``. Its hparams have
        ``mode``, ``plan_file``, ``memory_budget``, ``max_gradient_error``, ``chunk``,
        ``output_folder`` and what ``TrainingStep.of`` reads.
    folder : pathlib.Path
        Gets plan.json: the run's folder, or that of a trial.

    Raises
    ------
    ValueError
        If nothing fits the budget, the plan is for another step, GPU or chunk, an error is
        limited and there is no budget, or the run began with another chunk or memory format.
    """
    knobs = brain.hparams
    if knobs.max_gradient_error is not None and knobs.memory_budget is None:
        raise ValueError(
            f"max_gradient_error is {knobs.max_gradient_error}, which limits what plans of "
            "memory_budget compress, and memory_budget is null. Give it a size, as 11GB, "
            "or leave max_gradient_error out."
        )
    channels = brain.checkpointer.recoverables[CHANNELS]
    begun = channels.restore(brain.checkpointer, chosen=knobs.chunk == "auto")
    kept, path = Path(knobs.output_folder, PLAN), folder / PLAN
    asked = (knobs.plan_file or knobs.memory_budget) is not None
    if knobs.mode is not None and asked:
        line = (
            f"mode: {knobs.mode} overrides plan_file and memory_budget: no plan is made"
        )
        run_on_main(logger.info, args=[line])
    plans = knobs.mode is None and asked
    if not begun and not plans:
        run_on_main(_put_aside, args=[kept])
    if knobs.mode is not None or not (plans or (begun and kept.is_file())):
        return
    run_on_main(_write_plan, args=[brain, kept, path, begun])
    plan = Plan.load(path)
    plan.apply(brain.modules.embedding_model)
    run_on_main(logger.info, args=[f"memory plan: {in_words(plan)}"])


def _put_aside(kept: Path) -> None:
    """Rename the plan of a trial or of a run without a step, which this run does not have."""
    if kept.is_file():
        unused = kept.with_name(f"unused_{PLAN}")
        kept.replace(unused)
        logger.info(f"{kept} is of no step that was taken here: it is {unused} now")


def _write_plan(brain: sb.Brain, kept: Path, path: Path, begun: bool) -> None:
    """Write the run's plan, or a trial's, which is the kept one if that still holds."""
    knobs = brain.hparams
    if knobs.max_gradient_error is not None:
        # Errors of compression depend on the weights and bounds that are resumed.
        brain.checkpointer.restore_states(
            "embedding_model", "classifier", "compression"
        )
    distributed = torch.distributed.is_initialized()
    step = TrainingStep.of(
        vars(knobs),
        brain.modules,
        precision=brain.precision,
        device=torch.device(brain.device),
        processes=torch.distributed.get_world_size() if distributed else 1,
        begun=begun,
    )
    plan = plan_for_run(
        step,
        kept=kept,
        plan_file=knobs.plan_file,
        memory_budget=knobs.memory_budget,
        max_gradient_error=knobs.max_gradient_error,
    )
    write_plans(path, [plan])


def plan_for_run(
    step: TrainingStep,
    *,
    kept: Path,
    plan_file: str | None,
    memory_budget: str | None,
    max_gradient_error: float | None = None,
) -> Plan:
    """Give the plan of a run: that of a file, the one that is kept, or a new one.

    Parameters
    ----------
    step : TrainingStep
        A step of the run.
    kept : Path
        Where the run keeps its plan; read if it was made for the same budget.
    plan_file : str or None
        A plan's file, which overrides a budget.
    memory_budget : str or None
        As ``budget_bytes_of`` takes it. A plan that was kept for another batch, device or
        code is made anew. If neither is given, the plan that is kept
        is the run's.
    max_gradient_error : float or None
        As ``plan_step`` takes it: a plan that was kept for another one is made anew.

    Returns
    -------
    Plan
        It names its file or its budget.

    Raises
    ------
    ValueError
        If nothing fits the budget, or the plan is for another run, GPU or chunk.
    FileNotFoundError
        If the file of a plan is not there.
    """
    if plan_file is not None:
        plan = _load(plan_file, kept)
        _warn_of_other_training(plan, step, f"plan_file {plan_file}")
        _refuse_other_channels(plan, step, plan_file)
        return plan.with_about(plan_file=str(plan_file))
    if memory_budget is None:
        plan = read_plans(kept)[-1]
        if "plan_file" in plan.about:
            _warn_of_other_training(plan, step, str(kept))
        else:
            _refuse_other_training(plan, step, kept)
        _refuse_other_channels(plan, step, kept)
        logger.info(
            f"memory plan: of this run, {kept}, since neither mode, plan_file nor "
            "memory_budget is given; each of them overrides it"
        )
        return plan
    limit = _limit(step, max_gradient_error)
    for plan in read_plans(kept):
        given = plan.about.get("plan_file")
        asked = {"memory_budget": memory_budget, **limit}
        same = all(plan.about.get(name) == asked.get(name) for name in _ASKED)
        others = _differences(plan, step)
        if given is None and same and not others:
            _refuse_other_channels(plan, step, kept)
            return plan
        if given is None and same:
            changed = (_for_another(name, *pair) for name, pair in others.items())
            logger.info(
                f"memory plan: {kept} was made {'; '.join(changed)}: planned anew"
            )
    size = budget_bytes_of(memory_budget, step.device)
    logger.info(
        f"memory plan: {memory_budget} is {card_text(size)}; blocks are timed on "
        f"{device_name(step.device)}"
    )
    made = plan_step(step.step(), size, max_gradient_error=max_gradient_error)
    return made.with_about(
        memory_budget=memory_budget, memory_budget_bytes=str(size), **limit
    )


def in_words(plan: Plan) -> str:
    """Describe what a run's plan does, and how its budget is shared out.

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
        made = ""  # A plan of another network has no batch of utterances.
        if "batch" in about and "frames" in about:
            made = f", for its batch of {about['batch']}, {about['frames']} frames each"
        budget = plan.budget_text(_STAYING)
        whole = f"; {budget}" if budget else ""
        return f"{plan}{made}; of plan_file {about['plan_file']}{whole}"
    budget = plan.budget_text(_STAYING)
    if not budget:
        return str(plan)
    return (
        f"{plan.counts()}; {budget}; the step peaks at {size_text(plan.measured_bytes)} counted "
        f"({size_text(plan.predicted_bytes)} predicted) of the remaining "
        f"{size_text(plan.budget_bytes)}{plan.error_text()}"
    )


def _limit(step: TrainingStep, max_gradient_error: float | None) -> dict[str, str]:
    """Record in a plan which error it may have, if any, and of which bounds it is."""
    if max_gradient_error is None:
        return {}
    return {
        "max_gradient_error": str(float(max_gradient_error)),
        "bounds": _bounds(step),
    }


def _bounds(step: TrainingStep) -> str:
    return ", ".join(map(str, step.encoder.compression.rules.values()))


def _load(plan_file: str, kept: Path) -> Plan:
    if Path(plan_file).is_file():
        return Plan.load(plan_file)
    own = f", or leave plan_file out and go on with {kept}" if kept.is_file() else ""
    raise FileNotFoundError(
        f"plan_file: {plan_file} is no file. Give the plan that `speechbrain-rev plan "
        f"ENCODER --card SIZE --save FILE` or another run wrote (its plan.json){own}, or "
        "give memory_budget, which plans."
    )


#: Settings of `speechbrain-rev plan` that its plans do not name.
_UNNAMED = {"pooling": "statistics", "memory_format": "contiguous"}


def _differences(plan: Plan, step: TrainingStep) -> dict[str, tuple[str | None, str]]:
    """Collect what a plan has of its step and this step has otherwise."""
    now = step.about()
    if "bounds" in plan.about:
        now["bounds"] = _bounds(step)
    return plan.with_about(**{**_UNNAMED, **plan.about}).differences(now)


def _refuse_other_training(plan: Plan, step: TrainingStep, path: Path) -> None:
    for name, (then, now) in _differences(plan, step).items():
        raise ValueError(
            f"{path} was made {_for_another(name, then, now)}. Give memory_budget to plan "
            f"anew, or plan_file: {path}, to take its modes as they are."
        )


def _for_another(name: str, then: str | None, now: str) -> str:
    """Name what a plan was made for and what there is."""
    if name != "chunk":
        return f"for {name} {then}, and this is {now}"
    was, is_ = (
        "chosen by chunk: auto" if x == "chosen" else f"set, which makes {x} channels"
        for x in (then, now)
    )
    return f"where the chunk was {was}, and here it is {is_}"


def _warn_of_other_training(plan: Plan, step: TrainingStep, source: str) -> None:
    """Warn of what decides whether the plan fits; what it does not name is let pass."""
    others = [
        _for_another(name, then, now)
        for name, (then, now) in _differences(plan, step).items()
        # Blocks and channels are compared by themselves.
        if then is not None
        and name not in ("blocks", "chunk")
        and not (name == "device" and _holds_named_card(step.device, plan.about))
    ]
    if others:
        logger.warning(
            f"memory plan: {source} was made {'; '.join(others)}: it may take more memory "
            "than it says, or be slower than another plan. Plan anew for this run, give the "
            "settings that the plan was made for, or memory_budget, which plans."
        )


def _holds_named_card(device: torch.device, about: Mapping[str, str]) -> bool:
    """Check whether a device has the memory that a plan was made for by its size alone."""
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
            f"{channels}, but this run began with {own}, which never change. Give "
            "the plan that it began with, or a memory_budget, which plans for these."
        )
    if not step.searches_chunk:
        raise ValueError(
            f"{channels}, but the chunk that is set makes {own}. Give chunk: auto, "
            "which takes the plan's, or a plan for this chunk."
        )
