"""What needs no training: statistics of filterbanks, scored like a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import extract
import score
from results.runs import BASELINES, SCORED, baseline_folder

from speechbrain_rev.inference import FbankStatistics, SpeakerEmbedder
from speechbrain_rev.inference.run_folder import read_settings
from speechbrain_rev.speech import read_manifest


def score_baselines(
    folder: Path,
    data: Path,
    trial_lists: Sequence[Path],
    run: Path,
    *,
    utterances_per_speaker: int,
    cohort_top_n: int,
) -> dict[str, list[dict[str, Any]]]:
    """Score trial lists by statistics of each utterance's filterbanks, once.

    Parameters
    ----------
    folder : Path
        Of the study.
    data : Path
        Holds the speech of the trial lists.
    trial_lists : sequence of Path
        What is scored.
    run : Path
        A training, whose utterances make the cohort of AS-Norm. Filterbanks have as many
        bands as its encoder is given.
    utterances_per_speaker, cohort_top_n : int
        Of the cohort, as the runs have them.

    Returns
    -------
    dict
        By the name of the statistics, the rows of each list and method.
    """
    manifest = run / "save" / "train.csv"
    speakers = {item.ID: item.spk_id for item in read_manifest(manifest)}
    tested = extract.trial_files(trial_lists, extract.speech_root(data), within=data)
    cohort = extract.cohort_files(manifest, utterances_per_speaker)
    sizes = read_settings(run, ["n_mels", "sample_rate"])
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, with_mean in BASELINES.items():
        own = baseline_folder(folder, name)
        if not (own / SCORED).is_file():
            own.mkdir(parents=True, exist_ok=True)
            statistics = FbankStatistics(**sizes, mean=with_mean)
            embedder = SpeakerEmbedder(
                statistics, device="cpu", fingerprint=f"{name} {sizes}"
            )
            extract.extract(embedder, own, tested, cohort)
            score.score(
                own, trial_lists, speakers, cohort_top_n=cohort_top_n, replicates=0
            )
        rows[name] = json.loads((own / SCORED).read_text(encoding="utf-8"))["results"]
    return rows
