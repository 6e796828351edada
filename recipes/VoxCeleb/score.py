"""Score trial lists with the embeddings that extract.py made.

``python recipes/VoxCeleb/score.py RUN_FOLDER`` prints a table and writes into the run's
folder

- scores/results.json: equal error rates and detection costs, the thresholds that have
  them, and how they were made
- scores/<trial list>.<cosine|as_norm>.txt: "enrol test label score"
- scores/det.png: false alarms against misses

AS-Norm's cohort are the mean embeddings of the training speakers. Intervals are of 95 %,
of speakers drawn with replacement, where names of utterances begin with the speaker.
``--from-scores FILE`` computes metrics and plot of a file of scores, whoever wrote it.
Processes of torchrun share the search of the cohort; the first does the rest.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from extract import COHORT, TRIALS, lists_of
from processes import ALONE, Place, cohort_statistics, joined

from speechbrain_rev import plots, scoring
from speechbrain_rev.cli import ArgumentParser, run_script
from speechbrain_rev.data import VoxCelebFolder, read_manifest
from speechbrain_rev.inference import Cohort, EmbeddingArchive
from speechbrain_rev.inference.run_folder import read_settings, read_weights
from speechbrain_rev.whole_files import check_regular, write_whole

#: Priors of detection costs, of which the study asks too.
P_TARGETS = tuple(
    m.p_target for m in scoring.MEASURES.values() if m.key == "min_dcf" and m.p_target
)
#: Draws of speakers for intervals.
REPLICATES = 1000


def score(
    folder: Path,
    trial_lists: Sequence[Path],
    speakers: Mapping[str, str],
    *,
    cohort_top_n: int = 600,
    subtract_mean: bool = False,
    replicates: int = REPLICATES,
    place: Place = ALONE,
) -> dict[str, Any] | None:
    """Score trial lists with the embeddings in a folder, by cosine and AS-Norm.

    Parameters
    ----------
    folder : pathlib.Path
        Holds embeddings/; scores/ is written.
    trial_lists : sequence of pathlib.Path
        Files of lines "label path path".
    speakers : mapping of str to str
        The speaker of each utterance of the cohort.
    cohort_top_n : int
        Nearest cohort speakers that AS-Norm looks at; at most all there are.
    subtract_mean : bool
        Whether embeddings are centred on the mean of the training set's.
    replicates : int
        Draws of speakers for intervals; 0 for none.
    place : Place
        Of this process among those that share the work.

    Returns
    -------
    dict or None
        What results.json holds; None on other processes than the main one.
    """
    trials, trained = (EmbeddingArchive.load(folder / n) for n in (TRIALS, COHORT))
    cohort = Cohort.of(
        trained, speakers, top_n=cohort_top_n, subtract_mean=subtract_mean
    )
    tested, top_n = trials.embeddings, cohort.top_n
    if cohort.centre is not None:
        tested = scoring.subtract_mean(tested, cohort.centre)
    if top_n < cohort_top_n and place.is_main:
        print(f"cohort_top_n is {top_n} instead of {cohort_top_n}: all speakers.")
    mean_and_std = cohort_statistics(place, tested, cohort.means, top_n=top_n)
    if mean_and_std is None:
        return None
    results, curves = [], {}
    (folder / "scores").mkdir(exist_ok=True)
    for name, path in named(trial_lists).items():
        listed = scoring.read_trials(path)
        enrol, test = listed.rows(trials.names)
        cosines = scoring.cosine_trials(tested, enrol, test)
        sides = [values[rows] for rows in (enrol, test) for values in mean_and_std]
        scored = {"cosine": cosines, "as_norm": scoring.as_norm(cosines, *sides)}
        for method, scores in scored.items():
            file = folder / "scores" / f"{name}.{method}.txt"
            scoring.write_scores(file, listed, scores)
            curve = scoring.det_curve(scores, listed.labels)
            rates = error_rates(curve, listed) | intervals(scores, listed, replicates)
            results.append({"trials": name, "method": method, **rates})
            curves[f"{name}, {method}"] = curve
    report = {
        "model": trials.fingerprint,
        "cohort": {"speakers": len(cohort.means), "top_n": top_n},
        "subtract_mean": subtract_mean,
        "results": results,
    }
    write_whole(folder / "scores/results.json", json.dumps(report, indent=2) + "\n")
    draw(curves, folder / "scores" / "det.png")
    return report


def _there(trial_lists: list[Path]) -> list[Path]:
    """Refuse lists that are not there; data that moved may have taken them along."""
    for path in trial_lists:
        check_regular(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"The trial list {path} does not exist. If the data have moved, say where "
                "they are now with --data_folder; or give other lists: --trials LIST."
            )
    return trial_lists


def draw(curves: Mapping[str, scoring.DetCurve], path: Path) -> None:
    """Draw the DET curves, or say why not: no figure is lost for a picture."""
    try:
        plots.det_plot(curves, path)
    except ImportError as error:
        print(f"{path} is not drawn: {error}")


def error_rates(curve: scoring.DetCurve, trials: scoring.Trials) -> dict[str, Any]:
    """Sum up one list's scores: counts, measures, and thresholds."""
    return {
        "targets": int(np.sum(trials.labels)),
        "impostors": int(np.sum(1 - trials.labels)),
        **scoring.measured(curve),
    }


def intervals(
    scores: np.ndarray, trials: scoring.Trials, replicates: int
) -> dict[str, Any]:
    """Say how far rates would be elsewhere for other speakers, if names tell them."""
    if not replicates:
        return {}
    by_name = VoxCelebFolder(Path())  # a file of scores has no corpus
    speakers = {n: s for n in trials.utterances if (s := by_name.speaker(n))}
    if len(speakers) < len(trials.utterances):
        print("No intervals: names of utterances do not begin with 'speaker/'.")
        return {}
    sides = ([speakers[name] for name in side] for side in (trials.enrol, trials.test))
    try:
        rates = scoring.bootstrap(scores, trials.labels, *sides, replicates=replicates)
    except ValueError as error:
        print(f"No intervals: {error} (--bootstrap 0)")
        return {}
    return rates.intervals()


def score_file(path: Path, replicates: int = REPLICATES) -> dict[str, Any]:
    """Compute the metrics of a file of scores; the plot is drawn beside it.

    Parameters
    ----------
    path : pathlib.Path
        Lines "enrol test label score".
    replicates : int
        Draws of speakers for intervals; 0 for none.

    Returns
    -------
    dict
        As of ``score``, also written to a file beside it.
    """
    trials, scores = scoring.read_scores(path)
    curve = scoring.det_curve(scores, trials.labels)
    rates = error_rates(curve, trials) | intervals(scores, trials, replicates)
    report = {"results": [{"trials": path.stem, "method": "as given", **rates}]}
    write_whole(f"{path}.json", json.dumps(report, indent=2) + "\n")
    draw({path.stem: curve}, Path(f"{path}.png"))
    return report


def named(trial_lists: Sequence[Path]) -> dict[str, Path]:
    """Name lists by their file; those of one file name by their whole path."""
    stems = Counter(path.stem for path in trial_lists)
    return {
        path.stem if stems[path.stem] == 1 else "_".join(path.parts).strip("/_"): path
        for path in trial_lists
    }


def table(report: Mapping[str, Any]) -> str:
    """Lay the results out for reading."""
    rows = report["results"]
    shown = scoring.measures_in(rows)
    cells = [["trials", "score", *(measure.column for measure in shown)]]
    for row in rows:
        figures = [measure.shown(row) for measure in shown]
        cells.append([row["trials"], row["method"], *figures])
    return "\n".join(
        f"{trials:<24}{method:<10}" + "".join(f"{figure:>24}" for figure in figures)
        for trials, method, *figures in cells
    )


def check_fresh(folder: Path) -> None:
    """Refuse embeddings of other weights than the run's."""
    current = read_weights(folder).fingerprint
    for name in (TRIALS, COHORT):
        if EmbeddingArchive.load(folder / name).fingerprint != current:
            raise ValueError(
                f"{folder / name} is of other weights than the run has now. Run "
                "recipes/VoxCeleb/extract.py again."
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "run_folder", nargs="?", type=Path, help="output_folder of train.py"
    )
    given.add_argument(
        "--from-scores",
        metavar="FILE",
        type=Path,
        help="lines 'enrol test label score', whose metrics are computed",
    )
    parser.add_argument("--trials", nargs="+", help="instead of the run's trial_lists")
    parser.add_argument(
        "--data_folder",
        help="where the training data are now, if the run's trial_lists moved with them",
    )
    parser.add_argument("--cohort_top_n", type=int, help="instead of the run's")
    parser.add_argument(
        "--subtract_mean",
        action="store_true",
        help="centre embeddings on the mean of the training set's",
    )
    parser.add_argument(
        "--bootstrap",
        metavar="N",
        type=int,
        default=REPLICATES,
        help=f"draws of speakers for intervals; 0: none; default: {REPLICATES}",
    )
    options = parser.parse_args(argv)
    with joined() as place:
        if options.run_folder:
            score_run(options, place)
        elif place.is_main:
            file = options.from_scores
            print(table(score_file(file, options.bootstrap)))
            print(f"{file}.json, {file}.png")


def score_run(options: argparse.Namespace, place: Place) -> None:
    """Score a run's trial lists, and print what came of it."""
    folder = options.run_folder
    settings = read_settings(
        folder, ("trial_lists", "cohort_top_n"), optional=("data_folder",)
    )
    check_fresh(folder)
    top_n = options.cohort_top_n
    manifest = read_manifest(folder / "save" / "train.csv")
    report = score(
        folder,
        _there(lists_of(options.trials, settings, options.data_folder)),
        {utterance.ID: utterance.spk_id for utterance in manifest},
        cohort_top_n=settings["cohort_top_n"] if top_n is None else top_n,
        subtract_mean=options.subtract_mean,
        replicates=options.bootstrap,
        place=place,
    )
    if report is not None:
        print(table(report))
        print(f"{folder / 'scores'}: results.json, det.png and the scores of each list")


if __name__ == "__main__":
    run_script(main)
