"""Evaluation of a run: embeddings of trial lists and of a cohort, scores, error rates.

`extract` writes into a run's folder embeddings/trials.npz and embeddings/cohort.npz.
`score` reads them and writes scores/results.json (error rates, thresholds, and how they
were made), scores/<trial list>.<cosine|as_norm>.txt ("enrol test label score") and
scores/det.png.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev import plots, scoring
from speechbrain_rev.audio import audio_exists
from speechbrain_rev.audio.checks import MIX, Channel
from speechbrain_rev.data import Source, open_sources, read_manifest
from speechbrain_rev.data.rows import (
    Found,
    Row,
    are,
    counted,
    find_rows,
    speaker_of_name,
)
from speechbrain_rev.files import read_json, write_whole
from speechbrain_rev.inference import (
    Cohort,
    EmbeddingArchive,
    SpeakerEmbedder,
    embed_into,
    embed_share,
)
from speechbrain_rev.processes import gathered, process_count, process_rank, shared_rows

from .runs import record_of
from .thresholds import RESULTS, read_results
from .trained import read_weights
from .verification import EMBEDDINGS as COHORT
from .verification import check_fresh

TRIALS = "embeddings/trials.npz"
#: The speaker of each utterance of the trials, by name; null where none is known.
SPEAKERS = "embeddings/speakers.json"
MANIFEST = "save/train.csv"
#: Draws of speakers for intervals.
REPLICATES = 1000


def moved(path: str, settings: Mapping[str, Any], data_folder: str | None) -> Path:
    """Follow a path of a run's settings to where its data folder is now.

    Parameters
    ----------
    path : str
        In the run's data folder, or elsewhere.
    settings : mapping
        The run's.
    data_folder : str or None
        Where the data are now; None where they were.

    Returns
    -------
    Path

    Example
    -------
    >>> moved("/old/lists/one.txt", {"data_folder": "/old"}, "/new").as_posix()
    '/new/lists/one.txt'
    """
    earlier = settings["data_folder"]
    for folder in [earlier] if isinstance(earlier, str) else earlier:
        below = os.path.relpath(path, folder)
        if data_folder is not None and Path(below).parts[:1] != ("..",):
            return Path(data_folder, below)
    return Path(path)


def lists_of(
    given: Sequence[str] | None,
    settings: Mapping[str, Any],
    data_folder: str | None = None,
) -> list[Path]:
    """Choose the trial lists: those given, else those of the run.

    Parameters
    ----------
    given : sequence of str or None
        By the user.
    settings : mapping
        The run's.
    data_folder : str or None
        Where the data are now; None where they were.

    Returns
    -------
    list of Path

    Raises
    ------
    ValueError
        If there are none.
    FileNotFoundError
        If one does not exist.

    Example
    -------
    >>> lists_of(None, {"trial_lists": []})
    Traceback (most recent call last):
    ValueError: this run has no trial_lists. Give some: --trial_lists LIST ...
    """
    own = [moved(path, settings, data_folder) for path in settings["trial_lists"]]
    paths = [*map(Path, given or own)]
    if not paths:
        raise ValueError(
            "this run has no trial_lists. Give some: --trial_lists LIST [LIST ...], for "
            "example the RUN_FOLDER/save/valid_trials.txt that training made."
        )
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"The trial list {path} does not exist. If the data have moved, say where "
                "they are now with --data_folder; or give other lists: --trial_lists LIST."
            )
    return paths


def trial_files(
    trial_lists: Sequence[Path], sources: Sequence[Source]
) -> dict[str, Row]:
    """Find the audio and the speaker of every utterance of the trial lists.

    Parameters
    ----------
    trial_lists : sequence of Path
        Lists of names.
    sources : sequence of Source
        Where the audio is, as of ``open_sources``.

    Returns
    -------
    dict of str to Row
        By the names of the lists.

    Raises
    ------
    ValueError
        If files are missing, or names lead out of the folder.
    """
    lists = {path: scoring.read_trials(path) for path in trial_lists}
    names = dict.fromkeys(chain.from_iterable(t.utterances for t in lists.values()))
    found = find_rows(sources, names)
    for path, trials in lists.items():
        found.refuse_outside(path, trials.utterances)
    if missing := found.lacking(names):
        raise ValueError(
            f"Of the utterances of the trial lists {missing} Give their folder "
            "with --trials_folder; names in trial lists begin with the speaker, as in "
            "id10270/... The utterances of a speaker who is enrolled with several stand in "
            "TRIALS.spk2utt or spk2utt beside the list, in lines 'speaker utterance ...'."
        )
    return {name: found.rows[name] for name in names}


def cohort_files(
    manifest: str | Path,
    utterances_per_speaker: int | None = None,
    *,
    data_folder: str | Path | None = None,
    outside_files: bool = False,
) -> dict[str, Path]:
    """Find the audio of the training utterances, or of the first of each speaker.

    A speaker is one at the speed recorded; the classes that training makes of other
    speeds are not in the manifest.

    Parameters
    ----------
    manifest : str or Path
        The run's.
    utterances_per_speaker : int or None
        None for all.
    data_folder : str, Path or None
        Where the data are now; None where the manifest says.
    outside_files : bool
        Whether files may lie outside the data folder that is given.

    Returns
    -------
    dict of str to Path
        By the names of the manifest.

    Raises
    ------
    ValueError
        If files are missing, or lie outside the data folder.
    """
    chosen: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for utterance in read_manifest(manifest):
        counts[utterance.spk_id] += 1
        if counts[utterance.spk_id] <= (utterances_per_speaker or math.inf):
            chosen[utterance.ID] = utterance.wav
    if data_folder is None:
        lost = {name: wav for name, wav in chosen.items() if not audio_exists(wav)}
        found = Found({name: Row(name, wav) for name, wav in chosen.items()}, lost, {})
    else:
        sources = open_sources(data_folder, outside_files=outside_files)
        found = find_rows(sources, chosen)
    found.refuse_outside(manifest, chosen)
    if missing := found.lacking(chosen):
        raise ValueError(
            f"Of the training utterances {missing} Give the folder where they are now with "
            "--data_folder."
        )
    return {name: Path(found.rows[name].wav) for name in chosen}


def files_of_run(
    run: Path,
    *,
    trials: Sequence[str] | None = None,
    trials_folder: str | None = None,
    data_folder: str | None = None,
    outside_files: bool = False,
    utterances_per_speaker: int | None = None,
) -> tuple[dict[str, Row], dict[str, Path]]:
    """Find the audio of a run's trial lists and of its cohort.

    Parameters
    ----------
    run : Path
        The run's folder.
    trials : sequence of str, optional
        Trial lists, instead of the run's.
    trials_folder : str, optional
        Folder of their audio, instead of the run's.
    data_folder : str, optional
        Where the training data are now, if they have moved. Lists and folders of the run
        in the old folder are looked for there too.
    outside_files : bool
        As of ``open_sources``; also where the run's settings have it on.
    utterances_per_speaker : int, optional
        Of the cohort; all by default.

    Returns
    -------
    trials : dict of str to Row
        Utterances by name.
    cohort : dict of str to Path
        Files by name.

    Raises
    ------
    ValueError
        If there are no lists, or files are missing or outside their folder.
    FileNotFoundError
        If a list does not exist.
    """
    settings = record_of(run).settings
    outside_files = outside_files or settings["outside_files"]
    folder = trials_folder or settings["trials_folder"]
    if not trials_folder and data_folder:
        given = [folder] if isinstance(folder, str) else folder
        folder = [moved(one, settings, data_folder) for one in given]
    sources = open_sources(
        folder, "trials_folder or data_folder", outside_files=outside_files
    )
    return (
        trial_files(lists_of(trials, settings, data_folder), sources),
        cohort_files(
            run / MANIFEST,
            utterances_per_speaker,
            data_folder=data_folder,
            outside_files=outside_files,
        ),
    )


def channel_of_run(run: Path) -> Channel:
    """Give the channel that a run was trained on; the mean where it names none.

    Parameters
    ----------
    run : Path
        The run's folder.

    Returns
    -------
    int or "mix"
    """
    channel = record_of(run).settings["channel"]
    return channel if isinstance(channel, int) else MIX


def extract(
    embedder: SpeakerEmbedder,
    folder: str | Path,
    trials: Mapping[str, Row],
    cohort: Mapping[str, str | Path],
    *,
    channel: Channel = MIX,
) -> dict[Path, EmbeddingArchive]:
    """Embed both sets into a folder; files of other rates are resampled.

    Parameters
    ----------
    embedder : SpeakerEmbedder
        With a fingerprint.
    folder : str or Path
        The run's.
    trials : mapping of str to Row
        Utterances by name.
    cohort : mapping of str to path
        Files by name.
    channel : int, "mix" or None
        What to do with files of several channels, as ``channel_of_run`` says.

    Returns
    -------
    dict of Path to EmbeddingArchive
        What was written; empty on other processes than the main one. All embeddings in the
        cohort's file count in AS-Norm: an earlier one of more is kept beside it, as
        cohort_336.npz if it has 336.
    """
    archives = {}
    tested = {name: row.wav for name, row in trials.items()}
    for name, files in ((TRIALS, tested), (COHORT, cohort)):
        path = Path(folder, name)
        if process_count() > 1:
            embed_share(
                path,
                embedder,
                files,
                channel=channel,
                rank=process_rank(),
                processes=process_count(),
            )
            gathered(None)  # all shares are written
        if process_rank() == 0:
            archives[path] = embed_into(path, embedder, files, channel=channel)
    if process_rank() == 0:
        # AS-Norm counts all embeddings in the cohort's file: others are kept beside it.
        written, embedded = EmbeddingArchive.load(path), archives[path]
        if len(written.names) > len(embedded.names):
            aside = path.with_stem(f"{path.stem}_{len(written.names)}")
            written.save(aside)
            embedded.save(path)
            archives[aside] = written
    if process_rank() == 0:
        speakers = {name: row.speaker for name, row in trials.items()}
        # The archive keeps the utterances of other lists, too.
        speakers = _read_speakers(Path(folder)) | speakers
        write_whole(Path(folder, SPEAKERS), json.dumps(speakers) + "\n")
    return archives


def _read_speakers(folder: Path) -> dict[str, str | None]:
    """Read the speakers of utterances that were embedded; none where there is no file."""
    path = folder / SPEAKERS
    return dict(read_json(path)) if path.is_file() else {}


@dataclass(frozen=True)
class ScoreReport:
    """Error rates of trial lists, and remarks on how they were made.

    Attributes
    ----------
    content : dict
        What results.json holds: ``results``, one mapping for each list and method, and for
        a run ``model``, ``cohort`` and ``subtract_mean``.
    remarks : tuple of str
        Sentences for the user: a smaller cohort, missing intervals, a missing picture.

    Example
    -------
    >>> row = {"trials": "one", "method": "cosine", "eer": 0.125, "min_dcf": {}}
    >>> print(ScoreReport({"results": [row]}).table())
    trials                  score                        EER %
    one                     cosine                       12.50
    """

    content: dict[str, Any]
    remarks: tuple[str, ...] = ()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The results of each list and method."""
        rows: list[dict[str, Any]] = self.content["results"]
        return rows

    def table(self) -> str:
        """Lay the results out for reading."""
        shown = scoring.measures_in(self.rows)
        brackets = "In brackets: 95 % intervals, of speakers drawn with replacement."
        has_intervals = any(key.endswith("_95") for row in self.rows for key in row)
        cells = [["trials", "score", *(measure.column for measure in shown)]]
        for row in self.rows:
            figures = [measure.shown(row) for measure in shown]
            cells.append([row["trials"], row["method"], *figures])
        return (
            "\n".join(
                f"{trials:<24}{method:<10}"
                + "".join(f"{figure:>24}" for figure in figures)
                for trials, method, *figures in cells
            )
            + f"\n{brackets}" * has_intervals
        )


def score(
    folder: Path,
    trial_lists: Sequence[Path],
    speakers: Mapping[str, str],
    *,
    cohort_top_n: int = 600,
    subtract_mean: bool = False,
    replicates: int = REPLICATES,
) -> ScoreReport | None:
    """Score trial lists with the embeddings in a folder, by cosine and AS-Norm.

    Parameters
    ----------
    folder : pathlib.Path
        Holds embeddings/; scores/ is written.
    trial_lists : sequence of pathlib.Path
        As of ``scoring.read_trials``. A speaker who is enrolled with several utterances is
        the mean of their embeddings, each at length one.
    speakers : mapping of str to str
        The speaker of each utterance of the cohort.
    cohort_top_n : int
        Nearest cohort speakers that AS-Norm looks at; at most all there are.
    subtract_mean : bool
        Whether embeddings are centred on the mean of the training set's.
    replicates : int
        Draws of speakers for intervals; 0 for none.

    Returns
    -------
    ScoreReport or None
        None on other processes than the main one.

    Raises
    ------
    ValueError
        If an utterance has no embedding, or the cohort lacks speakers.
    """
    trials, trained = (EmbeddingArchive.load(folder / n) for n in (TRIALS, COHORT))
    cohort = Cohort.of(
        trained, speakers, top_n=cohort_top_n, subtract_mean=subtract_mean
    )
    tested, top_n = trials.embeddings, cohort.top_n
    if cohort.centre is not None:
        tested = scoring.subtract_mean(tested, cohort.centre)
    lists = {name: scoring.read_trials(p) for name, p in _named(trial_lists).items()}
    # Speakers who are enrolled with several utterances stand behind all utterances.
    models = [
        one.model_means(tested, trials.names) for one in lists.values() if one.models
    ]
    if models:
        tested = np.concatenate([tested, *models])
    statistics = partial(scoring.cohort_statistics, cohort=cohort.means, top_n=top_n)
    mean_and_std = shared_rows(statistics, tested)
    if process_rank():
        return None
    by_name = {name: speaker_of_name(name) for name in trials.names}
    by_name |= _read_speakers(folder)
    remarks = []
    if top_n < cohort_top_n:
        remarks.append(
            f"AS-Norm uses all {top_n} training speakers: cohort_top_n is {cohort_top_n}."
        )
    results, curves = [], {}
    (folder / "scores").mkdir(exist_ok=True)
    first_model = len(trials.names)
    for name, listed in lists.items():
        remarks += _trained_on(name, listed, speakers, by_name)
        enrol, test = listed.rows(trials.names, first_model=first_model)
        first_model += len(listed.models)
        cosines = scoring.cosine_trials(tested, enrol, test)
        sides = [values[rows] for rows in (enrol, test) for values in mean_and_std]
        scored = {"cosine": cosines, "as_norm": scoring.as_norm(cosines, *sides)}
        for method, scores in scored.items():
            file = folder / "scores" / f"{name}.{method}.txt"
            scoring.write_scores(file, listed, scores)
            curve, rates, missing = _rates(scores, listed, replicates, by_name)
            results.append({"trials": name, "method": method, **rates})
            curves[f"{name}, {method}"] = curve
            remarks += missing
    about = {
        "model": trials.fingerprint,
        "cohort": {
            "speakers": len(cohort.means),
            "utterances": len(trained.names),
            "top_n": top_n,
        },
        "subtract_mean": subtract_mean,
    }
    earlier, replaced = _earlier_rows(folder, about, lists)
    if replaced:
        remarks.append(
            f"results.json has no rates of {replaced} any more, which had another model or "
            "cohort. Score all lists in one command."
        )
    write_whole(
        folder / RESULTS,
        json.dumps(about | {"results": [*earlier, *results]}, indent=2) + "\n",
    )
    remarks += _drawn(curves, folder / "scores/det.png")
    return ScoreReport(about | {"results": results}, tuple(dict.fromkeys(remarks)))


def _trained_on(
    name: str,
    listed: scoring.Trials,
    trained: Mapping[str, str],
    by_name: Mapping[str, str | None],
) -> list[str]:
    """Warn of a list whose speakers are in training."""
    tested = {by_name.get(n) or trained.get(n) for n in listed.utterances} - {None}
    # Speakers of several corpora have the corpus before their name.
    known = set(trained.values())
    known |= {speaker.rpartition("/")[2] for speaker in known}
    shared = tested & known
    if not shared:
        return []
    return [
        f"{len(shared)} of {counted(len(tested), 'speaker')} of {name} "
        f"{are(len(shared))} in training, such as "
        f"{min(filter(None, shared))}: its error rates are too low. To leave them out, name "
        "the list in --trial_lists of train.py."
    ]


def _earlier_rows(
    folder: Path, about: Mapping[str, Any], lists: Iterable[str]
) -> tuple[list[dict[str, Any]], str]:
    """Give the results of other lists that were scored alike, and name the others."""
    try:
        report = read_results(folder)
    except ValueError:  # It advises to score again.
        return [], ""
    if report is None:
        return [], ""
    rows = [row for row in report.pop("results") if row["trials"] not in lists]
    if report == about:
        return rows, ""
    return [], " and ".join(dict.fromkeys(row["trials"] for row in rows))


def score_run(
    run: Path,
    *,
    trials: Sequence[str] | None = None,
    data_folder: str | None = None,
    cohort_top_n: int | None = None,
    subtract_mean: bool = False,
    replicates: int = REPLICATES,
) -> ScoreReport | None:
    """Score a run's trial lists with its embeddings.

    Parameters
    ----------
    run : Path
        The run's folder.
    trials : sequence of str, optional
        Trial lists, instead of the run's.
    data_folder : str, optional
        Where the training data are now, if the run's lists moved with them.
    cohort_top_n : int, optional
        Instead of the run's.
    subtract_mean, replicates
        As of ``score``.

    Returns
    -------
    ScoreReport or None
        As of ``score``.

    Raises
    ------
    ValueError
        If embeddings are of other weights than the run's, and as of ``score``.
    FileNotFoundError
        If there are no embeddings, or a list does not exist.
    """
    settings, weights = record_of(run).settings, read_weights(run)
    for name in (TRIALS, COHORT):
        check_fresh(
            run / name,
            EmbeddingArchive.load(run / name).fingerprint,
            weights.fingerprint,
        )
    report = score(
        run,
        lists_of(trials, settings, data_folder),
        {utterance.ID: utterance.spk_id for utterance in read_manifest(run / MANIFEST)},
        cohort_top_n=settings["cohort_top_n"] if cohort_top_n is None else cohort_top_n,
        subtract_mean=subtract_mean,
        replicates=replicates,
    )
    if report is None or not weights.standing:
        return report
    return replace(report, remarks=(weights.standing, *report.remarks))


def score_file(path: Path, replicates: int = REPLICATES) -> ScoreReport:
    r"""Compute the error rates of a file of scores; they and a plot are written beside it.

    Parameters
    ----------
    path : pathlib.Path
        Lines "enrol test label score".
    replicates : int
        Draws of speakers for intervals; 0 for none.

    Returns
    -------
    ScoreReport

    Example
    -------
    >>> path = getfixture("tmp_path") / "scores.txt"
    >>> _ = path.write_text("a/1 a/2 1 0.5\na/1 b/1 0 0.25\n")
    >>> score_file(path, replicates=0).rows[0]["eer"]
    0.0
    """
    trials, scores = scoring.read_scores(path)
    by_name = {name: speaker_of_name(name) for name in trials.utterances}
    curve, rates, missing = _rates(scores, trials, replicates, by_name)
    report = {"results": [{"trials": path.stem, "method": "as given", **rates}]}
    write_whole(Path(f"{path}.json"), json.dumps(report, indent=2) + "\n")
    missing += _drawn({path.stem: curve}, Path(f"{path}.png"))
    return ScoreReport(report, tuple(missing))


def _rates(
    scores: NDArray[Any],
    trials: scoring.Trials,
    replicates: int,
    by_name: Mapping[str, str | None],
) -> tuple[scoring.DetCurve, dict[str, Any], list[str]]:
    """Compute the curve, counts, rates and intervals of a list, and what is missing."""
    curve = scoring.det_curve(scores, trials.labels)
    rates = {
        "targets": int(np.sum(trials.labels)),
        "impostors": int(np.sum(1 - trials.labels)),
        "enrolled": list(trials.enrolled),
        **scoring.measured(curve),
    }
    if not replicates:
        return curve, rates, []
    speakers = {n: s for n in trials.utterances if (s := by_name.get(n))}
    if len(speakers) < len(trials.utterances):
        missing = "No intervals: names of utterances do not begin with 'speaker/'."
        return curve, rates, [missing]
    enrolled = [trials.files(name)[0] for name in trials.enrol]
    sides = ([speakers[name] for name in side] for side in (enrolled, trials.test))
    try:
        drawn = scoring.bootstrap(scores, trials.labels, *sides, replicates=replicates)
    except ValueError as error:
        return curve, rates, [f"No intervals: {error} (--bootstrap 0)"]
    return curve, rates | drawn.intervals(), []


def _drawn(curves: Mapping[str, scoring.DetCurve], picture: Path) -> list[str]:
    """Draw curves; without matplotlib a remark replaces the picture."""
    try:
        plots.det_plot(curves, picture)
    except ImportError as error:
        return [f"{picture} is not drawn: {error}"]
    return []


def _named(trial_lists: Sequence[Path]) -> dict[str, Path]:
    """Name lists by their file; those of one file name by their whole path."""
    stems = Counter(path.stem for path in trial_lists)
    return {
        path.stem if stems[path.stem] == 1 else "_".join(path.parts).strip("/_"): path
        for path in trial_lists
    }
