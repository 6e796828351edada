"""The memory plan of a run: modes of the encoder's blocks, as its settings want them."""

from __future__ import annotations

import logging
from pathlib import Path

import speechbrain as sb
import torch
from speechbrain.utils.distributed import run_on_main

from speechbrain_rev.catalog.plans import in_words, plan_for_run
from speechbrain_rev.catalog.steps import TrainingStep
from speechbrain_rev.lobes.checkpointer import CHANNELS
from speechbrain_rev.planner import Plan
from speechbrain_rev.whole_files import write_whole

PLAN = "plan.json"

logger = logging.getLogger("train")


def give_modes(brain: sb.Brain, folder: Path) -> None:
    """Give the blocks the modes of ``plan_file`` or those that ``memory_budget`` allows.

    The plan is kept in the run's folder. A run that goes on without either setting takes
    it again. ``mode`` overrides both. A run that goes on does so with the channels at a
    time and the compiler that it began with, whatever gives the modes.

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
        limited and there is no budget, or the run began with another chunk or compiler.
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
        # Errors of compression are those of the weights and bounds that go on.
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
        say=logger.info,
        warn=logger.warning,
    )
    write_whole(path, plan.to_json())
