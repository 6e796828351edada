"""What a study is: written down once, and the same whenever it goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from design.sizes import COHORT_UTTERANCES, Size
from results.files import SETTING
from results.runs import Study

from running.origin import code_and_machine, with_another
from running.trainings import THREADS, resolved
from speechbrain_rev.speech.reading import audio_files
from speechbrain_rev.whole_files import digest_of, write_whole

#: What may be another when a study goes on: all of them are listed.
CODE = "code"
#: What data are, which is written down by its digests, and each run's own.
_OF_A_RUN = (
    *("seed", "arch", "widths", "data_folder", "trials_folder", "noise_folder"),
    *("train_list", "trial_lists", "output_folder", "save_folder", "train_log"),
    *("train_annotation", "valid_annotation", "out_n_neurons", "steps_per_epoch"),
)


def setting_of(
    study: Study,
    name: str,
    size: Size,
    hparams: Path,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Describe a study: two of the same description, on the same speech, are the same.

    Parameters
    ----------
    study : Study
        What is trained, and what is compared.
    name : str
        Of the size.
    size : Size
        Settings and widths.
    hparams : pathlib.Path
        The file of settings that all begin with.
    settings : mapping
        What all trainings are given of data and device.

    Returns
    -------
    dict
        Plain values. "common" are the settings that all conditions share.
    """
    plain = resolved(hparams, {"data_folder": "data", **size.settings})
    changed = {key for condition in study.conditions for key in condition.settings}
    lists = [settings["train_list"], *settings["trial_lists"]]
    noise = settings["noise_folder"]
    described = {
        "size": name,
        "seeds": list(study.seeds),
        "hparams": hparams.name,
        "common": {
            key: value
            for key, value in plain.items()
            if key not in changed and key not in _OF_A_RUN
        },
        "widths": {arch: list(widths) for arch, widths in size.widths.items()},
        "conditions": [asdict(condition) for condition in study.conditions],
        "comparisons": [asdict(comparison) for comparison in study.comparisons],
        "data": str(settings["data_folder"]),
        "lists": {path.name: digest_of(path, "sha256") for path in lists},
        "noise": noise and {"folder": str(noise), **_files_below(noise)},
        "cohort_utterances_per_speaker": COHORT_UTTERANCES,
        "device": settings["device"],
        "threads_of_a_training": THREADS,
    }
    plain_values: dict[str, Any] = json.loads(json.dumps(described))
    return plain_values


def keep_setting(output: Path, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Write down what a study is; a folder holds one.

    Parameters
    ----------
    output : pathlib.Path
        The study's folder.
    setting : mapping
        As ``setting_of`` gives it.

    Returns
    -------
    dict
        The setting, and under "code" by what code, and on what, the study was run.

    Raises
    ------
    ValueError
        If the folder holds a study of another setting.
    """
    code = with_another(
        check_setting(output, setting).get(CODE, []), code_and_machine()
    )
    output.mkdir(parents=True, exist_ok=True)
    whole = {**setting, CODE: code}
    write_whole(output / SETTING, json.dumps(whole, indent=1) + "\n")
    return whole


def check_setting(
    output: Path,
    setting: Mapping[str, Any],
    advice: str = "Give another --output, or remove that folder.",
) -> dict[str, Any]:
    """Read the setting of the study in a folder; empty if there is none.

    Raises
    ------
    ValueError
        If it is another one.
    """
    path = output / SETTING
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known = {key: value for key, value in kept.items() if key != CODE}
    differing = [key for key in known | setting if known.get(key) != setting.get(key)]
    if kept and differing:
        raise ValueError(
            f"{output} holds a study of other settings: {', '.join(differing)} (see "
            f"{SETTING} there). {advice}"
        )
    return dict(kept)


def _files_below(folder: Path) -> dict[str, Any]:
    """Count audio files, and hash their names."""
    files = sorted(audio_files(folder))
    names = "\n".join(map(str, files))
    digest = hashlib.sha256(names.replace(str(folder), "").encode()).hexdigest()
    return {"files": len(files), "names": digest}
