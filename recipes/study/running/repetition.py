"""Trainings of a study that are done again, and compared with what it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from design.sizes import Size
from measurements.of_study import distance_over_way, memory_budget
from results.files import AGAIN
from results.origins import read_origin
from results.runs import SCORED, Study

from running.origin import differing, origin_of
from running.trainings import (
    Run,
    TrainingsFailed,
    precision_of,
    settings_of,
    train_all,
)


def repeat(
    study: Study,
    runs: Sequence[Run],
    settings: Mapping[str, Any],
    size: Size,
    hparams: Path,
    *,
    jobs: int,
    twice: bool = False,
    after: Callable[[Mapping[str, Any]], object] = lambda found: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Do trainings of a study again, in a folder of their own, and compare them.

    Parameters
    ----------
    study : Study
        In which they were scored.
    runs : sequence of Run
        Of the study.
    settings, size, hparams, jobs
        As for ``schedule.train``.
    twice : bool
        Whether what came out otherwise is trained once more on this machine, and compared
        with itself: that tells another machine from chance.
    after : callable
        Called with what was found of one, as soon as it is known.

    Returns
    -------
    found : list of dict
        Of each that was done the "name"; "differing", what differs, empty where nothing
        does; "distance_over_way", how far the weights are apart over how far the first
        training's have come, None where it has no checkpoints any more;
        "score_difference", the largest of a trial; "eer" and "eer_again" by list; the
        digests of the "weights" that the study had and of "weights_again"; the "origin"
        and "origin_again" of both trainings, as ``read_origin`` gives it;
        "differing_once_more", what differs of the second training and of one more on the
        same machine by the same code, None where there is none.
    failed : list of str
        What became of those that failed.

    Raises
    ------
    ValueError
        If one was begun with other code, or on another machine, and is not done; or what
        would be compared with itself is of two codes or machines.
    """
    again = replace(study, folder=study.folder / AGAIN)
    once_more = replace(study, folder=again.folder / AGAIN)
    found: dict[str, dict[str, Any]] = {}

    def tell(copy: Run, _: Sequence[str] = ()) -> None:
        found[copy.name] = _compared(study, again, once_more, copy)
        after(found[copy.name])

    def copied(place: Study, chosen: Sequence[Run]) -> list[Run]:
        return [_copied(run, study, place, settings["device"]) for run in chosen]

    def train_all_of(copies: Sequence[Run], proven: bool) -> list[str]:
        for copy in copies:
            _check_origin(copy, settings_of(copy, settings, size))
        for copy in [copy for copy in copies if copy.is_done]:
            tell(copy)
        try:
            train_all(
                copies, settings, size, hparams, jobs=jobs, proven=proven, after=tell
            )
        except TrainingsFailed as error:
            return error.sentences
        return []

    failed = train_all_of(copied(again, runs), proven=False)
    otherwise = [run for run in runs if found.get(run.name, {}).get("differing")]
    if twice and otherwise:
        copies = copied(once_more, otherwise)
        for second, third in zip(copied(again, otherwise), copies, strict=True):
            _check_pair(second, third, settings_of(second, settings, size))
        failed += train_all_of(copies, proven=True)
    return list(found.values()), failed


def _copied(run: Run, study: Study, place: Study, device: str) -> Run:
    """Give what the training of a study is when it is done in another place."""
    settings = dict(run.settings)
    if run.condition.half_memory:
        settings["memory_budget"] = memory_budget(study, device)
    folder = place.run_folder(run.condition.name, run.seed)
    return replace(run, folder=folder, keep_all=False, settings=settings)


def _compared(study: Study, again: Study, once_more: Study, run: Run) -> dict[str, Any]:
    """Compare a training with the study's, and with itself if it was done once more."""
    condition, seed = run.condition.name, run.seed
    first, second, third = (
        each.run_folder(condition, seed) for each in (study, again, once_more)
    )
    differing = study.differing(again, condition, seed)
    has_third = (third / SCORED).is_file() and _is_alike(second, third)
    differing_then = again.differing(once_more, condition, seed) if has_third else None
    return {
        "name": run.name,
        "differing": differing,
        "distance_over_way": distance_over_way(first, second) if differing else 0.0,
        "score_difference": study.score_difference(again, condition, seed),
        "eer": study.eers(condition, seed),
        "eer_again": again.eers(condition, seed),
        "weights": study.digest(condition, seed),
        "weights_again": again.digest(condition, seed),
        "origin": read_origin(first),
        "origin_again": read_origin(second),
        "differing_once_more": differing_then,
    }


def _check_origin(copy: Run, given: Mapping[str, str]) -> None:
    """Refuse to go on with what was begun by other code, or on another machine."""
    if copy.is_done or not copy.has_begun:
        return
    if told := _otherwise_here(copy, given):
        raise ValueError(
            f"{copy.folder} was begun by other code or elsewhere: {'; '.join(told)}. "
            "Remove that folder to train it again here."
        )


def _check_pair(second: Run, third: Run, given: Mapping[str, str]) -> None:
    """Refuse to compare two trainings unless they are of one code and machine."""
    if third.is_done and not _is_alike(second.folder, third.folder):
        raise ValueError(
            f"{third.folder} was trained by other code or elsewhere than {second.folder}. "
            "Remove the former to train it once more."
        )
    if not third.is_done and (told := _otherwise_here(second, given)):
        raise ValueError(
            f"{second.folder} was trained by other code or elsewhere: {'; '.join(told)}. "
            "What is trained once more has to be compared with a training by this code "
            "here. Remove that folder to train both."
        )


def _is_alike(one: Path, other: Path) -> bool:
    """Say whether two trainings are of one code and machine, as they wrote it down."""
    origins = read_origin(one), read_origin(other)
    return len(origins[0]) == len(origins[1]) and not any(
        differing(*pair) for pair in zip(*origins, strict=True)
    )


def _otherwise_here(copy: Run, given: Mapping[str, str]) -> list[str]:
    """Say in what the origins of a training differ from what one here would have."""
    here = origin_of(given["device"], precision_of(given))
    told = []
    for entry in read_origin(copy.folder) or [{}]:
        known = {key: entry.get(key) for key in here}
        told += [
            f"{key} was {known[key]} and is {here[key]}"
            for key in differing(known, here)
        ]
    return list(dict.fromkeys(told))
