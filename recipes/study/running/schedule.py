"""In which order a study is trained, and what is left of it where something fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from design.conditions import IN_ALL_MODES, PAIRS
from design.sizes import Size
from measurements.of_study import (
    is_probed,
    memory_budget,
    score_without_training,
)
from results.figures import state_margins
from results.files import MARGINS
from results.runs import Study

from running.trainings import (
    Run,
    TrainingsFailed,
    train_all,
)


def runs_of(study: Study) -> list[Run]:
    """List the trainings of a study, all conditions of a seed before the next seed."""
    return [
        Run(
            condition,
            seed,
            study.run_folder(condition.name, seed),
            keep_all=is_probed(study, condition.name, seed),
        )
        for seed in study.seeds
        for condition in study.conditions
    ]


def first_of(study: Study, runs: Sequence[Run]) -> list[Run]:
    """List the references, of which margins are made, and all else of the first seed."""
    first = study.seeds[0]
    return [r for r in runs if r.condition.name in PAIRS or r.seed == first]


def train(
    study: Study,
    runs: Sequence[Run],
    settings: Mapping[str, Any],
    size: Size,
    hparams: Path,
    *,
    jobs: int,
    after: Callable[[Sequence[str]], object] = lambda failed: None,
) -> list[str]:
    """Train the references, state the margins, then train the others.

    Parameters
    ----------
    study : Study
        What is compared.
    runs : sequence of Run
        Its trainings, in the order that is wished.
    settings : mapping
        Of data and device, for all.
    size : Size
        Settings and widths.
    hparams : pathlib.Path
        The file of settings that all begin with.
    jobs : int
        Trainings at a time.
    after : callable
        Called whenever a candidate was trained, while others are, with what became of
        those that failed.

    Returns
    -------
    list of str
        What became of those that failed.

    Raises
    ------
    TrainingsFailed
        If a reference failed: there is nothing to compare with.
    """
    failed: dict[Run, str] = {}

    def train_some(wanted: Sequence[Run]) -> None:
        left = [run for run in wanted if run not in failed]

        def after_one(_: Run, lost: Sequence[str]) -> None:
            after([*failed.values(), *lost])

        try:
            train_all(
                left, settings, size, hparams, jobs=jobs, proven=True, after=after_one
            )
        except TrainingsFailed as error:
            failed.update(error.failed)

    def plan_them() -> None:
        budget = {"memory_budget": memory_budget(study, settings["device"])}
        planned.update({run: replace(run, settings=budget) for run in planned})

    vanilla = [c.name for c in study.conditions if c.name in PAIRS]
    references = [run for run in runs if run.condition.name in vanilla]
    train_all(references, settings, size, hparams, jobs=jobs)
    score_without_training(study, settings, size)
    state_margins(study, vanilla)
    print(f"The margins are stated: {study.folder / MARGINS}")
    lost: list[str] = []
    planned = {run: run for run in runs if run.condition.half_memory}
    if planned:
        # Half of what this one takes.
        halved = IN_ALL_MODES, study.seeds[0]
        train_some([run for run in runs if (run.condition.name, run.seed) == halved])
        lost = attempt("Half the memory", plan_them)
    left = [planned.get(run, run) for run in runs if not (lost and run in planned)]
    train_some(left)
    return [*failed.values(), *lost]


def finished(study: Study) -> Study:
    """Leave out the conditions that lack a training, and what is compared with them."""
    lacking = {run.condition.name for run in runs_of(study) if not run.is_done}
    return replace(
        study,
        conditions=[c for c in study.conditions if c.name not in lacking],
        comparisons=[
            c for c in study.comparisons if not {c.candidate, c.reference} & lacking
        ],
    )


def so_far(study: Study) -> Study:
    """Leave out the seeds of which a training is not scored yet."""
    lacking = {run.seed for run in runs_of(study) if not run.is_done}
    return replace(study, seeds=[s for s in study.seeds if s not in lacking])


def attempt(what: str, work: Callable[[], object]) -> list[str]:
    """Do what must not cost the rest if it fails; say in a sentence if it did."""
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        return [
            f"{what} failed: {type(error).__name__}: {' '.join(str(error).split())}"
        ]
    return []
