"""Trial lists: who is compared with whom, and whether they are one speaker.

The format is VoxCeleb's, a trial per line: ``label path path`` with label 1 for the
same speaker and 0 for different ones, and paths relative to the folder of audio. Where
paths have spaces, tabs separate the three.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechbrain_rev.lists import check_length, joined_line, read_lines, split_line
from speechbrain_rev.scoring.arrays import as_labels, as_values, same_length
from speechbrain_rev.whole_files import (
    check_path,
    check_regular,
    check_sum,
    write_whole,
)

_FORMAT = "'label path path', label 1 for the same speaker and 0 for different ones"
_SCORED = (
    "'enrol test label score', label 1 for the same speaker and 0 for different ones"
)


@dataclass(frozen=True, eq=False)
class Trials:
    """A list of trials.

    Parameters
    ----------
    labels : array-like, [trials]
        1 where both sides are one speaker, 0 where not; kept as int8, read-only.
    enrol, test : sequence of str, [trials]
        The names of the utterances on either side; kept as tuples.

    Raises
    ------
    ValueError
        If the lengths differ, a label is neither 0 nor 1, or only one kind is present.

    Example
    -------
    >>> trials = Trials([1, 0], enrol=["a", "a"], test=["b", "c"])
    >>> len(trials), trials.utterances
    (2, ('a', 'b', 'c'))
    """

    labels: NDArray[np.int8]
    enrol: tuple[str, ...]
    test: tuple[str, ...]

    def __post_init__(self) -> None:
        labels = as_labels("labels", self.labels)
        labels.flags.writeable = False
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "enrol", tuple(self.enrol))
        object.__setattr__(self, "test", tuple(self.test))
        if not len(self.labels) == len(self.enrol) == len(self.test):
            raise ValueError(
                f"There are {len(self.labels)} labels for {len(self.enrol)} enrolment "
                f"and {len(self.test)} test names; each trial has one of each."
            )

    def __len__(self) -> int:
        return len(self.enrol)

    @cached_property
    def utterances(self) -> tuple[str, ...]:
        """Every utterance once, in order of first appearance: what must be embedded.

        Example
        -------
        >>> Trials([1, 0], enrol=["b", "a"], test=["a", "c"]).utterances
        ('b', 'a', 'c')
        """
        pairs = zip(self.enrol, self.test, strict=True)
        return tuple(dict.fromkeys(name for pair in pairs for name in pair))

    def rows(
        self, utterances: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find both sides of each trial in a list of utterances.

        Parameters
        ----------
        utterances : sequence of str
            The name of each row of a matrix of embeddings; may hold more than this
            list's, so that several trial lists share one matrix.

        Returns
        -------
        enrol_rows, test_rows : numpy.ndarray, [trials], int64
            Row numbers, as :func:`cosine_trials` takes them.

        Raises
        ------
        ValueError
            If an utterance of a trial is not among them, or a name is there twice.

        Example
        -------
        >>> trials = Trials([1, 0], enrol=["a", "a"], test=["b", "c"])
        >>> [rows.tolist() for rows in trials.rows(["c", "b", "a"])]
        [[2, 2], [1, 0]]
        """
        row_of = {name: row for row, name in enumerate(utterances)}
        if len(row_of) < len(utterances):
            raise ValueError(
                f"utterances has {len(utterances)} names of which only {len(row_of)} "
                f"are different; each row needs a name of its own."
            )
        missing = [name for name in self.utterances if name not in row_of]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(self.utterances)} utterances of the trials "
                f"have no embedding, the first of them {missing[0]!r}. Embed them too, "
                f"with the names that the trial list uses."
            )
        count = len(self)
        enrol = np.fromiter((row_of[name] for name in self.enrol), np.int64, count)
        test = np.fromiter((row_of[name] for name in self.test), np.int64, count)
        return enrol, test

    def among(self, utterances: Container[str]) -> Trials:
        """Choose the trials both sides of which are among some utterances.

        Parameters
        ----------
        utterances : container of str
            Names.

        Returns
        -------
        Trials
            In their order.

        Raises
        ------
        ValueError
            If none is left, or none of one kind.

        Example
        -------
        >>> trials = Trials([1, 0, 0], enrol=["a", "a", "b"], test=["b", "c", "c"])
        >>> trials.among({"a", "b", "c"}).labels.tolist()
        [1, 0, 0]
        """
        kept = [
            row
            for row, sides in enumerate(zip(self.enrol, self.test, strict=True))
            if all(name in utterances for name in sides)
        ]
        return Trials(
            self.labels[kept],
            tuple(self.enrol[row] for row in kept),
            tuple(self.test[row] for row in kept),
        )


def read_trials(path: str | Path) -> Trials:
    r"""Read a trial list in VoxCeleb's format.

    Parameters
    ----------
    path : str or pathlib.Path
        A UTF-8 text file with a line ``label path path`` per trial, separated by spaces,
        or by tabs where paths have spaces. Blank lines at the end are allowed.

    Returns
    -------
    Trials
        The trials in the file's order.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is empty, no regular one, no text, has a malformed line, a path that is
        too long or one pair with two labels (the message names file and lines), trials of
        one kind only, or not the checksum of a ``SHA256SUMS`` beside it.

    Example
    -------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "trials.txt"
    ...     _ = path.write_text("1 a/1.wav a/2.wav\n0 a/1.wav b/1.wav\n")
    ...     trials = read_trials(path)
    >>> trials.labels.tolist(), trials.test
    ([1, 0], ('a/2.wav', 'b/1.wav'))
    """
    trials, _ = _read(path, "trial list", ("label", "enrol", "test"), _FORMAT)
    return trials


def read_scores(path: str | Path) -> tuple[Trials, NDArray[np.float64]]:
    r"""Read what :func:`write_scores` or SpeechBrain's recipe wrote.

    Parameters
    ----------
    path : str or pathlib.Path
        A UTF-8 text file with a line ``enrol test label score`` per trial, separated as
        of :func:`read_trials`.

    Returns
    -------
    trials : Trials
        The trials in the file's order.
    scores : numpy.ndarray, [trials], float64
        Their scores.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        As :func:`read_trials`, or if a score is no finite number.

    Example
    -------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "scores.txt"
    ...     _ = path.write_text("a b 1 0.75\na c 0 -0.5\n")
    ...     trials, scores = read_scores(path)
    >>> trials.test, scores.tolist()
    (('b', 'c'), [0.75, -0.5])
    """
    return _read(path, "score file", ("enrol", "test", "label", "score"), _SCORED)


def _read(
    path: str | Path, what: str, fields: tuple[str, ...], form: str
) -> tuple[Trials, NDArray[np.float64]]:
    """Read a line per trial; scores are 0 where there are none."""
    check_path(path, f"a {what}")
    check_regular(path)
    path = Path(path)
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"The {what} {path} {wrong}. Give a text file with lines {form}."
        )
    check_sum(path)
    lines = read_lines(path, form)
    if not lines:
        raise ValueError(f"The {what} {path} is empty; lines must be {form}.")
    labels, scores = np.empty(len(lines), dtype=np.int8), np.zeros(len(lines))
    sides = {name: np.empty(len(lines), dtype=np.int64) for name in ("enrol", "test")}
    # One string object per utterance, however many trials meet it.
    numbers: dict[str, int] = {}
    for row, line in enumerate(lines):
        values = split_line(line, len(fields))
        if len(values) != len(fields):
            raise ValueError(
                f"{path}, line {row + 1}: {_shown(line)} has {len(values)} fields "
                f"instead of {len(fields)}. Lines must be {form}; where a path has "
                "spaces, separate them with tabs."
            )
        field = dict(zip(fields, values, strict=True))
        if field["label"] not in ("0", "1"):
            raise ValueError(
                f"{path}, line {row + 1}: the label is {_shown(field['label'])}, neither "
                f"0 nor 1. Lines must be {form}."
            )
        labels[row] = field["label"] == "1"
        for side, rows in sides.items():
            # What is scored need not be named by files.
            if "score" not in field and field[side] not in numbers:
                check_length(field[side], f"{path}, line {row + 1}")
            rows[row] = numbers.setdefault(field[side], len(numbers))
        if "score" in field:
            scores[row] = _number(field["score"], f"{path}, line {row + 1}", form)
    spelt: dict[str, int] = {}
    one = [spelt.setdefault(posixpath.normpath(n), i) for n, i in numbers.items()]
    enrol_of, test_of = (np.array(one)[sides[side]] for side in ("enrol", "test"))
    _refuse_two_labels(path, enrol_of, test_of, labels, lines)
    if labels.min() == labels.max():
        raise ValueError(
            f"All {len(lines)} trials of {path} have the label {labels[0]}. Error "
            f"rates need trials of the same speaker (1) and of different speakers (0)."
        )
    names = list(numbers)
    enrol, test = (tuple(names[i] for i in rows.tolist()) for rows in sides.values())
    return Trials(labels, enrol, test), scores


def _refuse_two_labels(
    path: Path,
    enrol: NDArray[np.int64],
    test: NDArray[np.int64],
    labels: NDArray[np.int8],
    lines: list[str],
) -> None:
    """Refuse one pair with two labels, its sides swapped or not."""
    first, second = np.minimum(enrol, test), np.maximum(enrol, test)
    order = np.lexsort((np.arange(len(labels)), second, first))
    same = (np.diff(first[order]) == 0) & (np.diff(second[order]) == 0)
    wrong = np.flatnonzero(same & (np.diff(labels[order]) != 0))
    if not len(wrong):
        return
    # The conflict that a reader of the file meets first.
    at = wrong[order[wrong + 1].argmin()]
    a, b = (int(row) for row in order[at : at + 2])
    raise ValueError(
        f"{path}, lines {a + 1} and {b + 1}: one pair with two labels, "
        f"{_shown(lines[a], 120)} and {_shown(lines[b], 120)}. Leave the right one."
    )


def _number(text: str, place: str, form: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"{place}: the score is {_shown(text)}, no finite number. Lines must be "
            f"{form}."
        )
    return number


def write_scores(path: str | Path, trials: Trials, scores: ArrayLike) -> None:
    """Write a line ``enrol test label score`` per trial, as SpeechBrain's recipes do.

    The file is written whole or not at all.

    Parameters
    ----------
    path : str or pathlib.Path
        The file to write; its folder must exist.
    trials : Trials
        The trials.
    scores : array-like, [trials]
        Their scores, written with six decimals.

    Raises
    ------
    ValueError
        If there are not as many scores as trials, a score is not finite, or no line can
        hold a name.

    Example
    -------
    >>> import pathlib, tempfile
    >>> trials = Trials([1, 0], enrol=["a", "a"], test=["b", "c"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "scores.txt"
    ...     write_scores(path, trials, [0.75, -0.5])
    ...     path.read_text().splitlines()
    ['a b 1 0.750000', 'a c 0 -0.500000']
    """
    score = as_values("scores", scores)
    same_length(trials=trials.labels, scores=score)
    rows = zip(
        trials.enrol, trials.test, trials.labels.tolist(), score.tolist(), strict=True
    )
    lines = (
        joined_line(enrol, test, str(label), f"{value:.6f}")
        for enrol, test, label, value in rows
    )
    write_whole(path, "".join(lines))


def _shown(text: str, longest: int = 60) -> str:
    text = text.strip()
    return repr(text if len(text) <= longest else text[:longest] + "...")
