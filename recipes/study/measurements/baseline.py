"""What needs no training: mean and deviation of filterbanks, scored like a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import extract
import score

from speechbrain_rev.inference import FbankStatistics, SpeakerEmbedder
from speechbrain_rev.speech import read_manifest

FOLDER = "baseline"


def score_baseline(
    folder: Path, data: Path, trial_lists: Sequence[Path], manifest: Path, **cohort: int
) -> dict[str, Any]:
    """Score trial lists by mean and deviation of each utterance's filterbanks.

    Parameters
    ----------
    folder : Path
        Of the study.
    data : Path
        Holds the speech of the trial lists.
    trial_lists : sequence of Path
        What is scored.
    manifest : Path
        A run's list of training utterances, which make the cohort of AS-Norm.
    **cohort : int
        ``utterances_per_speaker`` and ``cohort_top_n`` as the runs have them.

    Returns
    -------
    dict
        By list and method "eer" and "min_dcf", as fractions.
    """
    own = folder / FOLDER
    own.mkdir(exist_ok=True)
    embedder = SpeakerEmbedder(
        FbankStatistics(), device="cpu", fingerprint="mean and deviation"
    )
    extract.extract(
        embedder,
        own,
        extract.trial_files(trial_lists, extract.speech_root(data)),
        extract.cohort_files(manifest, cohort["utterances_per_speaker"]),
    )
    speakers = {item.ID: item.spk_id for item in read_manifest(manifest)}
    scored = score.score(
        own,
        trial_lists,
        speakers,
        cohort_top_n=cohort["cohort_top_n"],
        replicates=0,
    )
    rates: dict[str, Any] = {}
    assert scored is not None, "no other process shares the work"
    for row in scored["results"]:
        found = {"eer": row["eer"], "min_dcf": row["min_dcf"]}
        rates.setdefault(row["trials"], {})[row["method"]] = found
    return rates
