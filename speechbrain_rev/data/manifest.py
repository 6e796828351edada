"""The training manifest: a CSV file for people, and its rows mapped into memory."""

from __future__ import annotations

import csv
import io
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.audio.columns import (
    GrowingTexts,
    Rows,
    TextColumn,
    map_columns,
    save_columns,
)
from speechbrain_rev.files import (
    check_sum,
    digest_of,
    opened_whole,
)
from speechbrain_rev.lists import read_lines

logger = logging.getLogger(__name__)

#: What is behind the name of a manifest in that of its mapped form.
MAPPED = ".columns"

#: Columns that each manifest has; those behind them are labels.
RESERVED = "ID", "wav", "samples", "spk_id"
# Before the name of a label in the mapped form.
_LABEL = "label "
# What a column of lengths holds.
_MOST_SAMPLES = 2**63 - 1


# A million of them are in memory while data are prepared: no dictionary each.
@dataclass(frozen=True, slots=True)
class Utterance:
    """A row of a manifest.

    Attributes
    ----------
    ID : str
        Unique name.
    wav : str
        Path of the audio file.
    samples : int
        Length in samples.
    spk_id : str
        The speaker's name.
    labels : tuple of pairs of str
        What else is known of it, by name.
    """

    ID: str
    wav: str
    samples: int
    spk_id: str
    labels: tuple[tuple[str, str], ...] = ()


class Cause(Enum):
    """Why a file is left out.

    Attributes
    ----------
    words : str
        By which such files are counted.
    advice : str
        What to do about it; empty where the file could be used, or is no utterance.
    detail : str
        Words for each such file, where they are the same for all.

    Example
    -------
    >>> Cause.SILENT.words, Cause.SILENT.advice
    ('silent', 'delete it')
    """

    UNREADABLE = "cannot be read", "copy or convert it again"
    SUFFIX = "kind not read", "convert it: ffmpeg -i IN -ar 16000 -ac 1 OUT.flac"
    NAMED = "lossy, named as lossless", "rename it, or copy the original again"
    RATE = "other sample rate", "give --resample=true, or set sample_rate"
    CHANNELS = "several channels", "give --channel=NUMBER or --channel=mix"
    NO_CHANNEL = "no such channel", "give --channel=mix, or a channel that all have"
    EMPTY = "no samples", "delete it"
    TWICE = "same name twice", "keep one of them"
    OUTSIDE = (
        "outside the folder",
        "correct the name or the link, or read it all the same by --outside_files "
        "(--outside_files=true of train.py)",
    )
    NAME = "name for no list", "rename it"
    NO_SPEAKER = "no speaker's folder", "put it into a folder of its speaker"
    NOT_FINITE = "NaN or infinity", "convert it again"
    SILENT = "silent", "delete it"
    TESTED = "speaker in a trial list", ""
    BESIDE = (
        "beside the speakers' folders",
        "",
        "it is not below the folder of the speakers' folders",
    )
    HIDDEN = "hidden", "", "its name, or that of a folder of it, begins with a dot"
    ORIGINAL = (
        "converted to WAV or FLAC",
        "",
        "a WAV or FLAC of this name is in its folder",
    )
    SHORT = "shorter than a segment", ""

    def __init__(self, words: str, advice: str, detail: str = "") -> None:
        self.words, self.advice, self.detail = words, advice, detail


class LeftOut(NamedTuple):
    """A file that is not used.

    Attributes
    ----------
    path : str
        The file.
    cause : Cause
        Why.
    detail : str
        The cause for this file, in words.
    """

    path: str
    cause: Cause
    detail: str


class Manifest(Rows[Utterance]):
    """Utterances in columns; a million of them cost a process what it touches of them.

    Parameters
    ----------
    names, paths : TextColumn
        Of each utterance.
    samples : numpy.ndarray, [utterances], int64
        Lengths in samples.
    speakers : numpy.ndarray, [utterances], int32
        Who speaks: a place in ``speaker_names``.
    speaker_names : TextColumn
        The speakers in the order in which they occur.
    labels : mapping of str to TextColumn, optional
        Further columns by name, empty where an utterance has none.

    Example
    -------
    >>> manifest = Manifest.of([Utterance("id1/a", "wav/id1/a.wav", 16000, "id1")])
    >>> len(manifest), manifest[0].wav
    (1, 'wav/id1/a.wav')
    """

    def __init__(
        self,
        names: TextColumn,
        paths: TextColumn,
        samples: NDArray[np.int64],
        speakers: NDArray[np.int32],
        speaker_names: TextColumn,
        labels: Mapping[str, TextColumn] | None = None,
    ) -> None:
        self.names, self.paths, self.samples = names, paths, samples
        self.speakers, self.speaker_names = speakers, speaker_names
        self.labels = dict(sorted((labels or {}).items()))
        self._mapped_from: tuple[Path, dict[str, str]] | None = None

    @classmethod
    def of(cls, utterances: Iterable[Utterance]) -> Manifest:
        """Put utterances into columns; those of a manifest are there already."""
        if isinstance(utterances, cls):
            return utterances
        names, paths, speaker_names = GrowingTexts(), GrowingTexts(), GrowingTexts()
        samples, speakers = array("q"), array("i")
        numbers: dict[str, int] = {}
        labels: dict[str, GrowingTexts] = {}
        for row, utterance in enumerate(utterances):
            names.append(utterance.ID)
            paths.append(utterance.wav)
            samples.append(utterance.samples)
            if utterance.spk_id not in numbers:
                numbers[utterance.spk_id] = len(numbers)
                speaker_names.append(utterance.spk_id)
            speakers.append(numbers[utterance.spk_id])
            for label, text in utterance.labels:
                column = labels.setdefault(label, GrowingTexts())
                column.fill(row)
                column.append(text)
        for column in labels.values():
            column.fill(len(samples))
        return cls(
            names.column(),
            paths.column(),
            np.frombuffer(samples, np.int64),
            np.frombuffer(speakers, np.int32),
            speaker_names.column(),
            {label: column.column() for label, column in labels.items()},
        )

    def __len__(self) -> int:
        return len(self.names)

    def _row(self, place: int) -> Utterance:
        return Utterance(
            self.names[place],
            self.paths[place],
            int(self.samples[place]),
            self.speaker_names[int(self.speakers[place])],
            tuple((label, column[place]) for label, column in self.labels.items()),
        )

    def save(self, path: str | Path, about: dict[str, str]) -> None:
        """Write the columns into a file that can be mapped.

        Parameters
        ----------
        path : str or Path
            The file.
        about : dict of str to str
            What else is known of them.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        columns = {name: getattr(self, name) for name in _COLUMNS}
        columns |= {f"{_LABEL}{name}": column for name, column in self.labels.items()}
        save_columns(path, columns, about)

    @classmethod
    def mapped(cls, path: str | Path) -> tuple[Manifest, dict[str, str]]:
        """Map what ``save`` wrote into memory.

        Parameters
        ----------
        path : str or Path
            The file.

        Returns
        -------
        manifest : Manifest
            Whose rows are read where they are touched.
        about : dict of str to str
            What else is known of them.

        Raises
        ------
        ValueError
            If the file is damaged or has other columns.
        """
        columns, about = map_columns(path)
        labels = {
            name.removeprefix(_LABEL): cast(TextColumn, column)
            for name, column in columns.items()
            if name.startswith(_LABEL)
        }
        if {n for n in columns if not n.startswith(_LABEL)} != set(_COLUMNS):
            raise ValueError(
                f"{path} has the columns {sorted(columns)}, not {sorted(_COLUMNS)}. "
                "Delete it."
            )
        manifest = cls(*(cast(Any, columns[name]) for name in _COLUMNS))
        manifest.labels |= sorted(labels.items())
        manifest._mapped_from = Path(path).absolute(), about
        return manifest, about

    def __reduce__(self) -> str | tuple[Any, ...]:
        # A worker that is not forked maps the same file, and is sent no copy of it.
        if self._mapped_from is not None:
            return _mapped, self._mapped_from
        return Manifest, tuple(getattr(self, n) for n in (*_COLUMNS, "labels"))


_COLUMNS = "names", "paths", "samples", "speakers", "speaker_names"


def _mapped(path: Path, about: dict[str, str]) -> Manifest:
    manifest, now = Manifest.mapped(path)
    if now != about:
        raise ValueError(
            f"{path} was written anew while processes read it: start train.py again."
        )
    return manifest


def write_manifest(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Write a manifest as CSV, whole or not at all, and its mapped form beside it.

    Parameters
    ----------
    path : str or Path
        The file to write.
    utterances : iterable of Utterance
        Of labels that some have and others not, those have empty fields.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    utterances = list(utterances)
    labels = sorted({label for one in utterances for label, _ in one.labels})
    with opened_whole(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        rows = csv.writer(text)
        rows.writerow([*RESERVED, *labels])
        for one in utterances:
            known = dict(one.labels)
            further = [known.get(label, "") for label in labels]
            rows.writerow([one.ID, one.wav, one.samples, one.spk_id, *further])
        text.detach()
    manifest = Manifest.of(_rows(path))
    manifest.save(f"{path}{MAPPED}", {"manifest": digest_of(path)})


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest: map its rows into memory.

    They are in a file beside it, which is made anew when the manifest has changed. Where it
    cannot be written, a warning says that each process has all rows in its memory.

    Parameters
    ----------
    path : str or Path
        A CSV file in UTF-8 with the columns ID, wav, samples, spk_id; further columns are
        labels.

    Returns
    -------
    Manifest

    Raises
    ------
    ValueError
        If it is missing, empty, has other columns or is in another encoding, a row has
        other fields, or it has not the checksum of a ``SHA256SUMS`` beside it.

    Example
    -------
    >>> path = getfixture("tmp_path") / "train.csv"
    >>> write_manifest(path, [Utterance("id1/a/1", "wav/id1/a/1.wav", 16000, "id1")])
    >>> read_manifest(path)[0].samples
    16000
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no manifest {path}. Prepare the data first.")
    check_sum(path)
    mapped, digest = Path(f"{path}{MAPPED}"), digest_of(path)
    if mapped.is_file():
        try:
            check_sum(mapped)
            manifest, about = Manifest.mapped(mapped)
            if about.get("manifest") == digest:
                return manifest
        except ValueError as error:
            logger.warning(f"{error} It is made anew.")
    rows = Manifest.of(_rows(path))
    try:
        rows.save(mapped, {"manifest": digest})
    except OSError as error:
        logger.warning(
            f"{mapped} cannot be written ({error.strerror or error}): each process has all rows of "
            f"{path} in its memory."
        )
        return rows
    return Manifest.mapped(mapped)[0]


def _rows(path: str | Path) -> Iterator[Utterance]:
    wanted = list(RESERVED)
    # A byte order mark is no part of the first column's name.
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, strict=True)
        try:
            columns = next(rows, None)
            if columns is None or not set(wanted) <= set(columns):
                raise ValueError(
                    f"{path} has the columns {columns}; it needs {wanted}."
                )
            labels = [name for name in columns if name not in wanted]
            row, line = None, rows.line_num
            for row in filter(None, rows):
                line = rows.line_num
                place = f"{path}, line {line}"
                if len(row) > len(columns):
                    raise ValueError(
                        f"{place} has more fields than the header. Put names with commas in "
                        "quotes."
                    )
                given = dict(zip(columns, row, strict=False))
                yield _utterance(given, labels, place)
        except UnicodeDecodeError:
            # It names the line; to be read once more is for files that are refused only.
            read_lines(path, ",".join(wanted))
            raise
        except csv.Error as error:
            raise ValueError(
                f"{path}, from line {line + 1} on: it is no CSV ({error}). Lines must be "
                f"{','.join(wanted)}."
            ) from error
        if row is None:
            raise ValueError(f"{path} lists no utterance.")


def _utterance(row: Mapping[str, str], labels: list[str], place: str) -> Utterance:
    """Check a row, of which any field may be missing."""
    name, wav, given, speaker = map(row.get, RESERVED)
    try:
        samples = int(given or "")
    except ValueError:
        samples = -1
    if not 0 <= samples <= _MOST_SAMPLES:
        shown = None if given is None else given[:40]
        raise ValueError(
            f"{place}: samples is {shown!r}; it must be the length of the utterance in "
            f"samples, from 0 to {_MOST_SAMPLES}."
        )
    if not name or not wav or not speaker:
        raise ValueError(
            f"{place} has fewer fields than {list(RESERVED)}, or empty ones."
        )
    further = tuple((label, row.get(label, "")) for label in labels)
    return Utterance(name, wav, samples, speaker, further)
