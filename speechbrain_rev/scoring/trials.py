"""Trial lists: who is compared with whom, and whether they are one speaker.

Three formats are read, a trial per line: VoxCeleb's ``label path path``, Kaldi's ``speaker
utterance target`` and CSV with a header. Where names have spaces, tabs separate them. In
the last two a speaker may be enrolled with several utterances, which a spk2utt file names.
"""

from __future__ import annotations

import csv
import math
import posixpath
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechbrain_rev.files import (
    check_sum,
    write_whole,
)
from speechbrain_rev.lists import joined_line, read_lines, split_line
from speechbrain_rev.scoring.arrays import (
    as_labels,
    as_values,
    as_vectors,
    same_length,
)


class _Form(NamedTuple):
    """What lines of a list are: their fields, their labels, and both in words."""

    fields: tuple[str, ...]
    labels: Mapping[str, int]
    words: str


_DIGITS, _WORDS = {"0": 0, "1": 1}, {"nontarget": 0, "target": 1}
_MEANING = "1 for the same speaker and 0 for different ones"
_VOXCELEB = _Form(
    ("label", "enrol", "test"), _DIGITS, f"'label path path', label {_MEANING}"
)
_KALDI = _Form(
    ("enrol", "test", "label"),
    _WORDS,
    "'speaker utterance target' or 'speaker utterance nontarget'",
)
_SCORED = _Form(
    ("enrol", "test", "label", "score"),
    _DIGITS,
    f"'enrol test label score', label {_MEANING}",
)
# What a header of CSV calls the first side.
_ENROLS = ("enrol", "enroll", "enrolment", "enrollment")
_SPK2UTT = "spk2utt"
_MOST_OF_LINE = 2**16


@dataclass(frozen=True, eq=False)
class Trials:
    """A list of trials.

    Parameters
    ----------
    labels : array-like, [trials]
        1 where both sides are one speaker, 0 where not; kept as int8, read-only.
    enrol, test : sequence of str, [trials]
        The names of the utterances on either side; kept as tuples. An enrolment may be a
        model.
    models : mapping of str to sequence of str, optional
        Speakers who are enrolled with several utterances, and these.

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
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        labels = as_labels("labels", self.labels)
        labels.flags.writeable = False
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "enrol", tuple(self.enrol))
        object.__setattr__(self, "test", tuple(self.test))
        models = {name: tuple(files) for name, files in self.models.items()}
        object.__setattr__(self, "models", models)
        if empty := [name for name, files in models.items() if not files]:
            raise ValueError(f"The model {empty[0]!r} has no utterance. Give one.")
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
        found: dict[str, None] = {}
        for enrol, test in zip(self.enrol, self.test, strict=True):
            found.update(dict.fromkeys(self.files(enrol)))
            found[test] = None
        return tuple(found)

    @cached_property
    def enrolled(self) -> tuple[int, int]:
        """How many utterances enrol a speaker, at least and at most.

        Example
        -------
        >>> Trials([1, 0], ["ann", "b"], ["a3", "c"], {"ann": ("a1", "a2")}).enrolled
        (1, 2)
        """
        counts = {len(self.files(name)) for name in self.enrol}
        return min(counts), max(counts)

    def files(self, enrol: str) -> tuple[str, ...]:
        """Give the utterances of a name on the enrolment side: a model's, or itself."""
        return self.models.get(enrol, (enrol,))

    def model_means(
        self, embeddings: ArrayLike, utterances: Sequence[str]
    ) -> NDArray[np.float32]:
        """Average the embeddings of each model, each at length one.

        Parameters
        ----------
        embeddings : array-like, [utterances, dim]
            Of utterances, those of the models among them.
        utterances : sequence of str
            Their names.

        Returns
        -------
        numpy.ndarray, [models, dim], float32
            In the order of ``models``.

        Raises
        ------
        ValueError
            If an utterance of a model is not among them, or an embedding is zero.

        Example
        -------
        >>> trials = Trials([1, 0], ["ann"] * 2, ["a", "b"], models={"ann": ("c", "d")})
        >>> trials.model_means([[2, 0], [0, 4], [1, 1], [1, 1]], ["c", "d", "a", "b"])
        array([[0.5, 0.5]], dtype=float32)
        """
        vectors, norms = as_vectors("embeddings", embeddings)
        row_of = self._row_of(utterances)
        means = np.empty((len(self.models), vectors.shape[1]), np.float32)
        for mean, files in zip(means, self.models.values(), strict=True):
            rows = [row_of[name] for name in files]
            mean[:] = (vectors[rows] / norms[rows, None].astype(float)).mean(axis=0)
        return means

    def rows(
        self, utterances: Sequence[str], *, first_model: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find both sides of each trial in a list of utterances.

        Parameters
        ----------
        utterances : sequence of str
            The name of each row of a matrix of embeddings; may hold more than this
            list's, so that several trial lists share one matrix.
        first_model : int, optional
            The row of the first of ``model_means`` in that matrix, behind the utterances;
            by default it follows them.

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
        row_of = self._row_of(utterances)
        begin = len(utterances) if first_model is None else first_model
        models = {name: begin + row for row, name in enumerate(self.models)}
        count = len(self)
        enrol = np.fromiter(
            (models[n] if n in models else row_of[n] for n in self.enrol),
            np.int64,
            count,
        )
        test = np.fromiter((row_of[name] for name in self.test), np.int64, count)
        return enrol, test

    def _row_of(self, utterances: Sequence[str]) -> dict[str, int]:
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
        return row_of

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
            for row, (enrol, test) in enumerate(zip(self.enrol, self.test, strict=True))
            if all(name in utterances for name in (*self.files(enrol), test))
        ]
        enrol = tuple(self.enrol[row] for row in kept)
        return Trials(
            self.labels[kept],
            enrol,
            tuple(self.test[row] for row in kept),
            {name: files for name, files in self.models.items() if name in {*enrol}},
        )


def read_trials(path: str | Path, *, models: str | Path | None = None) -> Trials:
    r"""Read a trial list of VoxCeleb's format, of Kaldi's, or of CSV.

    Parameters
    ----------
    path : str or pathlib.Path
        A UTF-8 text file, whose first line shows the format: ``label path path`` per trial;
        ``speaker utterance target`` (or ``nontarget``); or a header of the columns enrol
        (or enroll), test and label. Spaces separate the fields of the first two, or tabs
        where names have spaces. Blank lines at the end are allowed.
    models : str or pathlib.Path, optional
        A file of lines ``speaker utterance ...``: who is enrolled with several utterances.
        By default, of Kaldi's format and CSV, LIST.spk2utt or spk2utt beside the list; a
        name that is not in it is that of an utterance.

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
        one kind only, a speaker who is enrolled with the utterance of the test, or not the
        checksum of a ``SHA256SUMS`` beside it.

    Examples
    --------
    >>> folder = getfixture("tmp_path")
    >>> _ = (folder / "trials.txt").write_text("1 a/1.wav a/2.wav\n0 a/1.wav b/1.wav\n")
    >>> trials = read_trials(folder / "trials.txt")
    >>> trials.labels.tolist(), trials.test
    ([1, 0], ('a/2.wav', 'b/1.wav'))
    >>> _ = (folder / "spk2utt").write_text("ann a1 a2\n")
    >>> _ = (folder / "trials").write_text("ann a3 target\nann b1 nontarget\n")
    >>> read_trials(folder / "trials").models
    {'ann': ('a1', 'a2')}
    """
    trials, _ = _read(path, "trial list", None, models)
    return trials


def models_file(path: str | Path) -> Path | None:
    """Find the spk2utt file beside a trial list, which names utterances of its models.

    Parameters
    ----------
    path : str or pathlib.Path
        The list.

    Returns
    -------
    pathlib.Path or None
        None if there is none, or the list is of VoxCeleb's format.
    """
    path = Path(path)
    with open(path, "rb") as file:
        first = file.readline(_MOST_OF_LINE).decode(errors="replace")
    if _form_of(path, first.removeprefix("\ufeff").strip()) is _VOXCELEB:
        return None
    beside = (
        Path(f"{path}.{_SPK2UTT}"), path.with_suffix(f".{_SPK2UTT}"), path.parent / _SPK2UTT
    )  # fmt: skip
    return next((file for file in beside if file.is_file() and file != path), None)


def _form_of(path: Path, first: str) -> _Form:
    """Recognise the format of a list by its first line."""
    columns = [column.strip().lower() for column in first.split(",")]
    if path.suffix.lower() == ".csv" or {"test", "label"} <= set(columns):
        named = ["enrol" if column in _ENROLS else column for column in columns]
        words = "CSV with a header of the columns enrol (or enroll), test and label"
        if len({"enrol", "test", "label"} & set(named)) < 3 or len(set(named)) < len(
            named
        ):
            raise ValueError(
                f"{path}: the columns are {columns}. Trial lists are {words}."
            )
        return _Form(tuple(named), _DIGITS | _WORDS, words)
    last = first.split()[-1:]
    return _KALDI if last and last[0] in _WORDS else _VOXCELEB


def _read_models(path: Path) -> dict[str, tuple[str, ...]]:
    """Read lines of a speaker and all of its utterances."""
    check_sum(path)
    form = "'speaker utterance ...'"
    models: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(read_lines(path, form), start=1):
        name, *files = line.split()
        if not files or name in models:
            wrong = (
                f"{name!r} is there twice" if files else f"{name!r} has no utterance"
            )
            raise ValueError(f"{path}, line {number}: {wrong}. Lines must be {form}.")
        if len(set(files)) < len(files):
            twice = next(file for file in files if files.count(file) > 1)
            raise ValueError(
                f"{path}, line {number}: {name!r} has {twice!r} twice. Leave it once."
            )
        models[name] = tuple(files)
    return models


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
    return _read(path, "score file", _SCORED)


def _read(
    path: str | Path, what: str, form: _Form | None, models: str | Path | None = None
) -> tuple[Trials, NDArray[np.float64]]:
    """Read a line per trial; scores are 0 where there are none."""
    path, words = Path(path), (form or _VOXCELEB).words
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"The {what} {path} {wrong}. Give a text file with lines {words}."
        )
    check_sum(path)
    lines = read_lines(path, words)
    if not lines:
        raise ValueError(f"The {what} {path} is empty; lines must be {words}.")
    known: Mapping[str, tuple[str, ...]] = {}
    if form is None:
        form = _form_of(path, lines[0])
        given = models_file(path) if models is None else Path(models)
        known = {} if given is None else _read_models(given)
    has_header = form not in (_VOXCELEB, _KALDI, _SCORED)
    # Lines are counted from 1.
    first = 1 + has_header
    lines = lines[has_header:]
    if not lines:
        raise ValueError(f"The {what} {path} is empty behind its header.")
    labels, scores = np.empty(len(lines), dtype=np.int8), np.zeros(len(lines))
    sides = {name: np.empty(len(lines), dtype=np.int64) for name in ("enrol", "test")}
    # One string object per utterance, however many trials meet it.
    numbers: dict[str, int] = {}
    for row, values in enumerate(_fields(path, lines, form, first, has_header)):
        place = f"{path}, line {row + first}"
        one = dict(zip(form.fields, values, strict=True))
        if one["label"] not in form.labels:
            raise ValueError(
                f"{place}: the label is {_shown(one['label'])}, neither "
                f"{' nor '.join(form.labels)}. Lines must be {form.words}."
            )
        labels[row] = form.labels[one["label"]]
        if not (one["enrol"] and one["test"]):
            raise ValueError(f"{place}: a name is empty. Lines must be {form.words}.")
        if one["test"] in known.get(one["enrol"], ()):
            raise ValueError(
                f"{place}: {_shown(one['enrol'])} is enrolled with {_shown(one['test'])}, "
                "the utterance of the test. Leave one of them out."
            )
        for side, rows in sides.items():
            name = one[side]
            # A model may have the name of an utterance.
            name = f"{_MODEL}{name}" if side == "enrol" and name in known else name
            rows[row] = numbers.setdefault(name, len(numbers))
        if "score" in one:
            scores[row] = _number(one["score"], place, form.words)
    spelt: dict[str, int] = {}
    alike = [spelt.setdefault(posixpath.normpath(n), i) for n, i in numbers.items()]
    enrol_of, test_of = (np.array(alike)[sides[side]] for side in ("enrol", "test"))
    _refuse_two_labels(path, enrol_of, test_of, labels, lines, first)
    if labels.min() == labels.max():
        raise ValueError(
            f"All {len(lines)} trials of {path} have the label {labels[0]}. Error "
            f"rates need trials of the same speaker (1) and of different speakers (0)."
        )
    names = [name.removeprefix(_MODEL) for name in numbers]
    enrol, test = (tuple(names[i] for i in rows.tolist()) for rows in sides.values())
    used = (n.removeprefix(_MODEL) for n in numbers if n.startswith(_MODEL))
    return Trials(labels, enrol, test, {name: known[name] for name in used}), scores


# No name of a list has this.
_MODEL = "\0"


def _fields(
    path: Path, lines: list[str], form: _Form, first: int, is_csv: bool
) -> Iterator[list[str]]:
    """Split lines into as many fields as they must have."""
    for row, line in enumerate(lines):
        if is_csv:
            try:
                values = [value.strip() for value in next(csv.reader([line]), [])]
            except csv.Error as error:
                raise ValueError(
                    f"{path}, line {row + first}: it is no CSV ({error}). Lines must be "
                    f"{form.words}."
                ) from error
        else:
            values = split_line(line, len(form.fields))
        if len(values) != len(form.fields):
            raise ValueError(
                f"{path}, line {row + first}: {_shown(line)} has {len(values)} fields "
                f"instead of {len(form.fields)}. Lines must be {form.words}; where a path "
                "has spaces, separate them with tabs."
            )
        yield values


def _refuse_two_labels(
    path: Path,
    enrol: NDArray[np.int64],
    test: NDArray[np.int64],
    labels: NDArray[np.int8],
    lines: list[str],
    first_line: int,
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
        f"{path}, lines {a + first_line} and {b + first_line}: one pair with two labels, "
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
