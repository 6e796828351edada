"""What the study computes of finished runs beside their scores, each thing once."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from design.conditions import IN_ALL_MODES
from design.sizes import COHORT_UTTERANCES, Size
from results.files import AGAIN, BUDGET, MEASURES, PROBES, WAYS
from results.runs import Study

from measurements.angles import gradient_angles
from measurements.baseline import score_baselines
from measurements.budget import half_of_the_memory
from measurements.cached import computed_once, is_made_of
from measurements.drift import drift
from measurements.rebuilt import Rebuilt
from measurements.state_errors import quantisation_errors
from measurements.steps import Way, measure, ways_of
from speechbrain_rev.devices import device_name
from speechbrain_rev.hparams import plain_settings
from speechbrain_rev.inference.run_folder import HYPERPARAMS

#: Conditions whose weights are compared with those of the encoder in all modes.
DRIFTING = tuple(
    f"{IN_ALL_MODES}, {words}"
    for words in ("8 bit", "float streams", "bf16", "compressed")
)


def is_probed(study: Study, name: str, seed: int) -> bool:
    """Whether the checkpoints of all epochs of a run are looked at."""
    return seed == study.seeds[0] and name in (IN_ALL_MODES, *DRIFTING)


def memory_budget(study: Study, device: str) -> str:
    """Give the budget of half the memory that storing takes, as the recipe takes it.

    It is that of the first run of the encoder that is trained in all modes.

    Raises
    ------
    Infeasible
        If blocks cannot take half of it.
    """
    folder = study.run_folder(IN_ALL_MODES, study.seeds[0])
    made_of = {
        "settings": _without_places(folder / HYPERPARAMS),
        "device": device_name(torch.device(device)),
    }
    path = study.folder / BUDGET
    half = (
        _read(path)
        if path.is_file() and not _has_checkpoints(folder)
        else computed_once(
            path,
            made_of,
            lambda: vars(half_of_the_memory(Rebuilt.of(folder, device).step)),
        )
    )
    budget: str = half["memory_budget"]
    return budget


def _without_places(file: Path) -> dict[str, Any]:
    """Read settings but for paths: a study may have been moved."""
    plain = plain_settings(file.read_text(encoding="utf-8"))
    return {
        key: value
        for key, value in plain.items()
        if not any(
            isinstance(one, str) and Path(one).is_absolute()
            for one in (value if isinstance(value, list) else [value])
        )
    }


def score_without_training(
    study: Study, settings: Mapping[str, Any], size: Size
) -> None:
    """Score what needs no training, with the cohort that the runs have."""
    score_baselines(
        study.folder,
        settings["data_folder"],
        settings["trial_lists"],
        study.run_folder(study.conditions[0].name, study.seeds[0]),
        utterances_per_speaker=COHORT_UTTERANCES,
        cohort_top_n=size.settings["cohort_top_n"],
    )


def measure_steps(study: Study, device: str) -> None:
    """Measure memory and time of a step of each condition, of its first seed."""
    first = study.seeds[0]
    folders = {c.name: study.run_folder(c.name, first) for c in study.conditions}
    path = study.folder / MEASURES
    if _stays(study, path, folders):
        return
    made_of = {
        "device": device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
    }
    computed_once(
        path,
        made_of | _weights(study, folders),
        lambda: measure({n: Way(folder) for n, folder in folders.items()}, device),
    )


def measure_encoders(study: Study, device: str) -> None:
    """Measure a step of each encoder in all ways that compute the same.

    Of each a run is taken whose checkpoints are there, of whatever seed, or one that was
    trained again.

    Raises
    ------
    ValueError
        If an encoder has no such run, and nothing was measured before.
    """
    path = study.folder / WAYS
    studies = study, replace(study, folder=study.folder / AGAIN)
    there = {
        condition.arch: [
            folder
            for one in studies
            for seed in study.seeds
            if _has_checkpoints(folder := one.run_folder(condition.name, seed))
        ]
        for condition in study.conditions
        if condition.name == condition.arch
    }
    if missing := [arch for arch, folders in there.items() if not folders]:
        if path.is_file():
            return
        raise ValueError(
            f"{path.name} cannot be computed: no training of {', '.join(missing)} has "
            "checkpoints. An archive holds none; it has to be computed where a seed was "
            "trained, before the study is packed."
        )
    made_of = {
        "device": device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
        "settings": {
            arch: _without_places(folders[0] / HYPERPARAMS)
            for arch, folders in there.items()
        },
    }
    ways = {
        f"{arch}, {name}": way
        for arch, folders in there.items()
        for name, way in ways_of(folders[0]).items()
    }
    computed_once(path, made_of, lambda: measure(ways, device))


def probe(study: Study, device: str) -> None:
    """Look at what trainings do to gradients, states of 8 bits and weights.

    Of conditions that the study lacks nothing is told, and nothing at all where the one
    that is trained in all modes is among them.
    """
    first = study.seeds[0]
    there = [c.name for c in study.conditions]
    if IN_ALL_MODES not in there:
        return
    run = study.run_folder(IN_ALL_MODES, first)
    others = {n: study.run_folder(n, first) for n in DRIFTING if n in there}
    path = study.folder / PROBES
    if _stays(study, path, [IN_ALL_MODES, *others]):
        return
    computed_once(
        path,
        {"device": device_name(torch.device(device))}
        | _weights(study, [IN_ALL_MODES, *others]),
        lambda: {
            "run": f"{IN_ALL_MODES}, seed {first}",
            "angles": gradient_angles(run, device=device),
            "errors": quantisation_errors(run, device=device),
            "drift": {
                name: drift(run, folder, device=device)
                for name, folder in others.items()
            },
        },
    )


def distance_over_way(folder: Path, other: Path) -> float | None:
    """Say how far two trainings of one seed are apart at their end.

    Parameters
    ----------
    folder, other : Path
        The runs.

    Returns
    -------
    float or None
        Over how far the first has come; None where one has no checkpoints any more.
    """
    if not all(map(_has_checkpoints, (folder, other))):
        return None
    apart: float = drift(folder, other)[-1]["distance_over_way"]
    return apart


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _stays(study: Study, path: Path, names: Collection[str]) -> bool:
    """Whether figures are kept because a study was moved without its checkpoints.

    Raises
    ------
    ValueError
        If there are no checkpoints, and no figures of these weights.
    """
    folders = [study.run_folder(name, study.seeds[0]) for name in names]
    missing = [folder for folder in folders if not _has_checkpoints(folder)]
    if not missing:
        return False
    if not (path.is_file() and is_made_of(path, _weights(study, names))):
        raise ValueError(
            f"{path.name} cannot be computed: {missing[0]} has no checkpoints. An archive "
            "holds none; it has to be computed where the first seed was trained, before "
            "the study is packed."
        )
    return True


def _has_checkpoints(folder: Path) -> bool:
    return any(folder.glob("save/CKPT*"))


def _weights(study: Study, names: Iterable[str]) -> dict[str, str]:
    """Give the digests of the weights that first runs ended with."""
    return {name: study.digest(name, study.seeds[0]) for name in names}
