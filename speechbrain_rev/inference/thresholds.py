"""Thresholds of scores, measured on trials, which travel with a model.

A run has them in scores/results.json, an exported model in thresholds.json. Both may
come from somebody else: they are data of known names, types and ranges, or refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from speechbrain_rev.files import check_sum, made_of, parse_json, refusing
from speechbrain_rev.inference.untrusted import read_own, short
from speechbrain_rev.scoring import MEASURES

#: How a score is made: the cosine of two embeddings, or that normalised by a cohort.
Normalisation: TypeAlias = Literal["cosine", "as_norm"]

#: Thresholds of an exported model, and the results of a run.
THRESHOLDS, RESULTS = "thresholds.json", "scores/results.json"

_MAX_BYTES = 1_000_000

# The measure whose threshold is taken where none is named.
_USUAL = MEASURES["eer"]
_MAX_THRESHOLDS, _MAX_NAME, _MAX_TRIALS = 1_000, 200, 10**12
# AS-Norm counts deviations.
_LARGEST = {"cosine": 1.0, "as_norm": 1e6}


def read_results(folder: Path) -> dict[str, Any] | None:
    """Read a run's results.

    Parameters
    ----------
    folder : pathlib.Path
        The run's.

    Returns
    -------
    dict or None
        None if it was not scored. Else ``model``, the fingerprint, a text;
        ``subtract_mean``, a truth value; ``results``, mappings of texts ``trials`` and
        ``method`` to begin with, and of numbers by the keys of ``MEASURES``; ``cohort``,
        of integers ``speakers`` and ``top_n``.

    Raises
    ------
    ValueError
        If the file is anything else, or leads out of the folder.
    """
    if not (folder / RESULTS).exists():
        return None
    content = read_own(folder, RESULTS, _MAX_BYTES)
    with _refusing_results(folder / RESULTS):
        report: dict[str, Any] = parse_json(content)
        _check_report(report)
        return report


def _refusing_results(path: str | Path) -> AbstractContextManager[None]:
    return refusing(
        f"{path} is not what recipes/VoxCeleb/score.py writes",
        "Run it again, or remove the file.",
    )


def _check_report(report: object) -> None:
    """Refuse what users of the results would stumble over."""
    if not isinstance(report, dict) or type(report.get("model")) is not str:
        raise ValueError("it does not say of which model it is")
    if type(report.get("subtract_mean")) is not bool:
        raise ValueError(f"subtract_mean is {short(report.get('subtract_mean'))}")
    rows = report.get("results")
    if not isinstance(rows, list):
        raise ValueError(f"results are {short(rows)}")
    for row in rows:
        texts = isinstance(row, dict) and [row.get(n) for n in ("trials", "method")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a result is {short(row)}")
        _check_figures(row)
    cohort = report.get("cohort")
    names = ("speakers", "top_n")
    counts = [cohort.get(n) for n in names] if isinstance(cohort, dict) else [None]
    if not all(type(count) is int and count >= 1 for count in counts):
        raise ValueError(f"cohort is {short(cohort)}")


def _check_figures(row: Mapping[str, Any]) -> None:
    """Refuse measures that are no numbers, and intervals that are no two of them."""
    for measure in MEASURES.values():
        figure, bounds = measure.figure(row), measure.figure(row, "_95")
        if figure is not None and not _is_finite(figure):
            raise ValueError(f"{measure.name} is {short(figure)}")
        pair = isinstance(bounds, list) and len(bounds) == 2
        if bounds is not None and not (pair and all(map(_is_finite, bounds))):
            raise ValueError(f"{measure.name}_95 is {short(bounds)}")


def _is_range(bounds: Sequence[float]) -> bool:
    return len(bounds) == 2 and bounds[0] <= bounds[1]


def _is_finite(figure: object) -> bool:
    return type(figure) in (int, float) and -math.inf < figure < math.inf  # type: ignore[operator]


@dataclass(frozen=True)
class Threshold:
    """A score from which on two voices count as one speaker's.

    Attributes
    ----------
    trials : str
        The list of trials it was measured on.
    point : str
        Which point of the list's error curve it is: the heading of a measure, such as
        "EER", or "minDCF(P)", P the prior probability of a target trial.
    normalisation : {"cosine", "as_norm"}
        Of the scores.
    value : float
        The least score that is accepted.
    targets, impostors : int
        Trials of one speaker and of two.
    eer : float
        The list's equal error rate, as a fraction.
    enrolled : tuple of int
        How many utterances enrolled a speaker of the list, at least and at most.
    interval : tuple of float, or None
        The 95 % interval of the value, of speakers drawn with replacement; None where it
        was not computed.

    Example
    -------
    >>> threshold = Threshold("vox1_o", "EER", "cosine", 0.31, 18802, 18818, 0.0123, (1, 1), None)
    >>> threshold.name, threshold.fits(1), threshold.fits(4)
    ('vox1_o', True, False)
    """

    trials: str
    point: str
    normalisation: Normalisation
    value: float = field(metadata={"signed": True})
    targets: int
    impostors: int
    eer: float
    enrolled: tuple[int, ...]
    interval: tuple[float, ...] | None = field(metadata={"signed": True})

    def __post_init__(self) -> None:
        largest = _LARGEST[self.normalisation]
        ranges = {
            "trials": is_name(self.trials),
            "point": is_name(self.point),
            "enrolled": _is_range(self.enrolled),
            "interval": self.interval is None or _is_range(self.interval),
            "targets": 0 < self.targets <= _MAX_TRIALS,
            "impostors": 0 < self.impostors <= _MAX_TRIALS,
            "eer": self.eer <= 1,
            "value": -largest <= self.value <= largest,
        }
        for name, is_within in ranges.items():
            if not is_within:
                raise ValueError(f"{name} is {short(getattr(self, name))}")

    @property
    def name(self) -> str:
        """The list, and the point where it is not the equal error rate."""
        return (
            self.trials
            if self.point == _USUAL.heading
            else f"{self.trials} {self.point}"
        )

    @property
    def origin(self) -> str:
        """Where it is from, in words."""
        interval = ""
        if self.interval is not None:
            low, high = self.interval
            interval = f", 95 % interval {low:.4f} to {high:.4f}"
        return (
            f"{self.point} of the list {self.trials}: {self.targets:,} target and "
            f"{self.impostors:,} impostor trials of speakers enrolled with "
            f"{_count_utterances(*self.enrolled)}, {_USUAL.heading} {_USUAL.text(self.eer)} %"
            f"{interval}"
        )

    def fits(self, utterances: int) -> bool:
        """Return whether the list has speakers enrolled with so many utterances."""
        least, most = self.enrolled
        return least <= utterances <= most


@dataclass(frozen=True)
class Thresholds:
    """What a model knows about thresholds.

    Attributes
    ----------
    known : tuple of Threshold
        Each name once for each normalisation.
    missing : str
        Why there are none, or not all, in sentences; empty if nothing is missing.
    """

    known: tuple[Threshold, ...] = ()
    missing: str = "This embedder was made without thresholds."

    def __post_init__(self) -> None:
        names = [(t.name, t.normalisation) for t in self.known]
        if len(names) > _MAX_THRESHOLDS or len(set(names)) < len(names):
            raise ValueError("a threshold stands there twice, or there are too many")

    def choose(
        self,
        threshold: float | str | None,
        normalisation: Normalisation,
        utterances: int = 1,
    ) -> tuple[float | None, str, str]:
        """Find a threshold; none is invented.

        Parameters
        ----------
        threshold : float, str or None
            The threshold itself, or the name of one; None for the only list's at its
            equal error rate.
        normalisation : {"cosine", "as_norm"}
            Of the score that is to be judged.
        utterances : int
            By how many the speaker is known who is compared.

        Returns
        -------
        value : float or None
            None if nothing says which.
        origin : str
            Where it is from, or how to get one.
        remark : str
            Why it does not fit, and how to measure one that does; empty where it fits.

        Raises
        ------
        ValueError
            If there is none of that name, or it is no number.
        """
        if isinstance(threshold, str):
            return _judge(self._find_named(threshold, normalisation), utterances)
        if threshold is not None:
            number = isinstance(threshold, int | float | np.integer | np.floating)
            if (
                not number
                or isinstance(threshold, bool)
                or not math.isfinite(threshold)
            ):
                raise ValueError(
                    f"threshold takes a finite score or a name, not {threshold!r}."
                )
            return float(threshold), "given by the caller", ""
        fitting = [t for t in self.known if t.normalisation == normalisation]
        lists = [t for t in fitting if t.point == _USUAL.heading]
        if len(lists) == 1:
            return _judge(lists[0], utterances)
        if fitting:
            measured = [each for each in fitting if each.fits(utterances)]
            return (
                None,
                f"No threshold is chosen: {_list_names(measured or fitting)}",
                "",
            )
        why = (
            self.missing or f"The model's thresholds are not of {normalisation} scores."
        )
        return (
            None,
            (
                f"No threshold is known. {why} Give threshold=SCORE (--threshold=SCORE), "
                "chosen on trials of your own kind of speech (recipes/VoxCeleb/score.py finds it for a trial list)."
            ),
            "",
        )

    def _find_named(self, name: str, normalisation: Normalisation) -> Threshold:
        fitting = [t for t in self.known if t.normalisation == normalisation]
        for threshold in fitting:
            if threshold.name == name:
                return threshold
        raise ValueError(
            f"there is no threshold {name!r} of {normalisation} scores. "
            + " ".join(filter(None, [_list_names(fitting), self.missing]))
        )


def thresholds_of(
    report: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> Thresholds:
    """Take the thresholds from the recipe's results.

    Parameters
    ----------
    report : mapping
        What scores/results.json holds.
    names : mapping of str to str, optional
        Other names for the lists.

    Returns
    -------
    Thresholds
        Cosines of centred embeddings are left out: the cosine that is compared with
        them is of embeddings as they are. So are lists whose names cannot be shown,
        which ``missing`` names.

    Raises
    ------
    ValueError
        If it holds something else.
    """
    with _refusing_results(RESULTS):
        named = [
            {**row, "trials": row["trials"] if names is None else names[row["trials"]]}
            for row in report["results"]
        ]
        usable = [row for row in named if is_name(row["trials"])]
        thresholds = tuple(_thresholds_in(usable, centred=report["subtract_mean"]))
        missing = []
        if not thresholds:
            missing.append(f"{RESULTS} has none: run recipes/VoxCeleb/score.py again.")
        if len(usable) < len(named):
            nameless = next(row["trials"] for row in named if row not in usable)
            missing.append(
                f"A list of trials is left out for its name, {short(nameless)}: names are "
                f"of at most {_MAX_NAME} characters that can be printed. Rename it and "
                "run recipes/VoxCeleb/score.py again."
            )
        return Thresholds(thresholds, " ".join(missing))


def _count_utterances(least: int, most: int) -> str:
    count = f"{least}" if least == most else f"{least} to {most}"
    return f"{count} utterance{'s' * (most > 1)}"


def is_name(text: object) -> bool:
    r"""Return whether a text can name a list or a point, and be shown.

    Example
    -------
    >>> is_name("vox1_o"), is_name("a\x1b[2J"), is_name("")
    (True, False, False)
    """
    # Control characters would be obeyed by the terminal that shows them.
    return isinstance(text, str) and 0 < len(text) <= _MAX_NAME and text.isprintable()


# Entries that all points of a list's error curve share.
_SHARED = ("trials", "targets", "impostors", "eer", "enrolled")


def _thresholds_in(
    rows: Sequence[Mapping[str, Any]], *, centred: bool
) -> Iterator[Threshold]:
    for row in rows:
        if centred and row["method"] == "cosine":
            continue
        for point, value in row["thresholds"].items():
            # None: refusing every trial is cheapest.
            if value is not None:
                values = {name: row[name] for name in _SHARED}
                values |= {"point": point, "normalisation": row["method"]}
                interval = row.get("thresholds_95", {}).get(point)
                yield made_of(
                    Threshold, {**values, "value": value, "interval": interval}
                )


def as_json(thresholds: Sequence[Threshold]) -> str:
    """Write what ``read_thresholds`` reads.

    Parameters
    ----------
    thresholds : sequence of Threshold
        In the order of the file.

    Returns
    -------
    str
        JSON.

    Example
    -------
    >>> print(as_json([]), end="")
    {
      "thresholds": []
    }
    """
    listed = [asdict(threshold) for threshold in thresholds]
    return json.dumps({"thresholds": listed}, indent=2, allow_nan=False) + "\n"


def read_thresholds(folder: Path, fingerprint: str) -> Thresholds:
    """Read the thresholds of a model: those that travel with it, or a run's results.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.
    fingerprint : str
        Of its weights.

    Returns
    -------
    Thresholds
        None, and why, if it was not scored with these weights.

    Raises
    ------
    ValueError
        If a file is anything else than export or score.py write.
    """
    if (folder / THRESHOLDS).exists():
        return _read_thresholds(folder)
    report = read_results(folder)
    if report is None:
        return Thresholds(
            missing=f"The model has neither {THRESHOLDS} nor {RESULTS}: "
            "recipes/VoxCeleb/extract.py and score.py make these of runs of "
            "recipes/VoxCeleb/train.py, and export takes them along."
        )
    if report["model"] != fingerprint:
        return Thresholds(
            missing=f"{RESULTS} is of other weights than the run has now: run "
            "recipes/VoxCeleb/extract.py and score.py again."
        )
    return thresholds_of(report)


def _read_thresholds(folder: Path) -> Thresholds:
    """Read thresholds.json."""
    content = read_own(folder, THRESHOLDS, _MAX_BYTES)
    check_sum(folder / THRESHOLDS)
    with refusing(
        f"{folder / THRESHOLDS} holds no thresholds",
        "Download the folder again, or remove the file to use the model without them.",
    ):
        read = parse_json(content)
        if not isinstance(read, dict) or list(read) != ["thresholds"]:
            raise ValueError("it is not of one key, thresholds")
        listed = read["thresholds"]
        if not isinstance(listed, list) or len(listed) > _MAX_THRESHOLDS:
            raise ValueError("it has no list of them, or one too long")
        return Thresholds(tuple(made_of(Threshold, values) for values in listed), "")


def _judge(threshold: Threshold, utterances: int) -> tuple[float, str, str]:
    """Give a threshold, where it is from, and whether it is of such speakers."""
    if threshold.fits(utterances):
        return threshold.value, threshold.origin, ""
    return (
        threshold.value,
        threshold.origin,
        (
            f"This threshold is of speakers enrolled with {_count_utterances(*threshold.enrolled)}, and "
            f"here one is known by {utterances}: scores are higher or lower, and errors are not "
            "as measured. For one that fits give extract.py and score.py of recipes/VoxCeleb "
            "trials of such speakers: RUN_FOLDER --trial_lists LIST, with a file spk2utt beside "
            "the list that names the utterances of each."
        ),
    )


def _list_names(fitting: Sequence[Threshold]) -> str:
    names = ", ".join(repr(threshold.name) for threshold in fitting)
    return names and f"Give threshold=NAME (--threshold=NAME), one of {names}."
