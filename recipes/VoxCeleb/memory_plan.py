"""What the encoder's blocks keep in a training, as the settings have it."""

from __future__ import annotations

from pathlib import Path

import torch
from prepare import write_whole
from speechbrain.utils.distributed import run_on_main

from speechbrain_rev.models.training_plan import (
    TrainingStep,
    free_bytes,
    parse_budget,
    plan_training,
)
from speechbrain_rev.planner import Plan
from speechbrain_rev.sizes import card_text

PLAN = "plan.json"


def give_modes(brain):
    """Give the blocks the modes of ``plan_file`` or those that ``memory_budget`` allows.

    A plan is made once and kept in the run's folder. ``mode`` goes before both.

    Parameters
    ----------
    brain : speechbrain.Brain
        With the recipe's settings and modules, before the first step.

    Raises
    ------
    ValueError
        If nothing fits the budget, or the plan is for another training or card.
    """
    knobs = brain.hparams
    if knobs.mode is not None or (knobs.plan_file or knobs.memory_budget) is None:
        return
    step = training_step(brain)
    if knobs.plan_file is not None:
        plan = Plan.load(knobs.plan_file)
    else:
        path = Path(knobs.output_folder, PLAN)
        run_on_main(make_plan, args=[path, step, knobs.memory_budget])
        plan = Plan.load(path)
        refuse_other_training(plan, step, path)
    plan.apply(brain.modules.embedding_model)
    run_on_main(print, args=[f"memory plan: {plan}"])


def training_step(brain):
    """Describe a step of one process."""
    knobs = brain.hparams
    distributed = torch.distributed.is_initialized()
    world_size = torch.distributed.get_world_size() if distributed else 1
    return TrainingStep(
        brain.modules.embedding_model,
        brain.modules.classifier,
        knobs.compute_cost,
        brain.opt_class,
        batch=-(-knobs.batch_size // world_size),
        frames=1 + knobs.chunk_samples // (knobs.sample_rate // 100),
        precision=brain.precision,
        device=torch.device(brain.device),
        searches_chunk=knobs.chunk == "auto",
    )


def make_plan(path, step, budget):
    """Write a plan, unless there is one for this budget already."""
    if path.is_file() and Plan.load(path).about.get("memory_budget") == budget:
        return
    size = free_bytes(step.device) if budget == "auto" else parse_budget(budget)
    device = step.about()["device"]
    print(f"memory plan: for {card_text(size)}, times of blocks on {device}")
    plan = plan_training(step, size)
    write_whole(path, plan.with_about(memory_budget=budget).to_json())


def refuse_other_training(plan, step, path):
    """Refuse a plan that was made on another card or for another step."""
    for name, now in step.about().items():
        if plan.about.get(name) != now:
            raise ValueError(
                f"{path} was made for {name} {plan.about.get(name)}, and this is {now}. "
                f"Delete it to plan anew, or give the modes by plan_file: {path}."
            )
