"""The training manifest: a CSV file, and its rows in memory that processes share."""

from __future__ import annotations

import codecs
import csv
import io
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.audio.texts import Column, Rows, Texts
from speechbrain_rev.files import check_sum, opened_whole
from speechbrain_rev.lists import read_lines

#: Columns that each manifest has; those behind them are labels.
RESERVED = "ID", "wav", "samples", "spk_id"
# Bytes that are looked at in one go.
_BLOCK_BYTES = 2**18
# What is behind a field and a row that were in quotes: neither is in a name.
_FIELD, _END = "\x1f", "\x1e"


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
    RATE_AND_CHANNELS = (
        "other rate, several channels",
        "give --resample=true, and --channel=NUMBER or --channel=mix",
    )
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
    """Utterances as the lines of their list, which processes share: no row is an object.

    Parameters
    ----------
    columns : sequence of str
        What the fields of a row are: ``RESERVED``, and labels.
    field : str
        What stands between two fields; behind a row is a character more.
    rows : Texts
        Of each utterance, its fields.
    speakers : numpy.ndarray, [utterances], int32
        Who speaks: a place in ``speaker_names``.
    speaker_names : sequence of str
        The speakers in the order in which they occur.

    Example
    -------
    >>> manifest = Manifest.of([Utterance("id1/a", "wav/id1/a.wav", 16000, "id1")])
    >>> len(manifest), manifest[0].wav
    (1, 'wav/id1/a.wav')
    """

    def __init__(
        self,
        columns: Sequence[str],
        field: str,
        rows: Texts,
        speakers: NDArray[np.int32],
        speaker_names: Sequence[str],
    ) -> None:
        self.field, self.rows, self.speaker_names = field, rows, tuple(speaker_names)
        self._speakers = Column(speakers)
        self._reserved = [columns.index(name) for name in RESERVED]
        self._labels = sorted(
            (name, place) for place, name in enumerate(columns) if name not in RESERVED
        )

    @property
    def speakers(self) -> NDArray[np.int32]:
        """Who speaks, [utterances]: places in ``speaker_names``."""
        return self._speakers.array

    @classmethod
    def of(cls, utterances: Iterable[Utterance]) -> Manifest:
        """Put utterances into one list; those of a manifest are there already."""
        if isinstance(utterances, cls):
            return utterances
        columns, rows = _fields_of(utterances)
        speakers = [row[3] for row in rows]
        numbers = {name: place for place, name in enumerate(dict.fromkeys(speakers))}
        return cls(
            columns,
            _FIELD,
            Texts.of(_FIELD.join(row) + _END for row in rows),
            np.array([numbers[name] for name in speakers], np.int32),
            tuple(numbers),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def _row(self, place: int) -> Utterance:
        fields = self.rows[place][:-1].split(self.field)
        ID, wav, samples, speaker = (fields[column] for column in self._reserved)
        labels = tuple((name, fields[column]) for name, column in self._labels)
        return Utterance(ID, wav, int(samples), speaker, labels)


def _fields_of(utterances: Iterable[Utterance]) -> tuple[list[str], list[list[str]]]:
    """Give the columns of a list of utterances, and the fields of its rows."""
    utterances = list(utterances)
    labels = sorted({label for one in utterances for label, _ in one.labels})
    rows = []
    for one in utterances:
        known = dict(one.labels)
        further = [known.get(label, "") for label in labels]
        rows.append([one.ID, one.wav, str(one.samples), one.spk_id, *further])
    return [*RESERVED, *labels], rows


def write_manifest(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Write a manifest as CSV, whole or not at all.

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
    columns, rows = _fields_of(utterances)
    with opened_whole(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        csv.writer(text, lineterminator="\n").writerows([columns, *rows])
        text.detach()


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest.

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
    data = bytearray(Path(path).stat().st_size)
    with open(path, "rb") as file:
        del data[file.readinto(data) :]
    begin = len(codecs.BOM_UTF8) * data.startswith(codecs.BOM_UTF8)
    field, end = ",", "\n"
    if b'"' in data or b"\r" in data:
        # Fields in quotes have commas, and may have any character but these two.
        lines = _unquoted(path, data[begin:])
        data = bytearray("".join(line + _END for line in lines).encode())
        begin, field, end = 0, _FIELD, _END
    elif data:
        while data.endswith(b"\n\n"):
            del data[-1]
        data += b"\n" * (not data.endswith(b"\n"))
    return _ManifestBytes(path, data, begin, field, end).manifest()


class _ManifestBytes:
    """The lines of a list, looked at in blocks without an object for each.

    Python's csv takes eight times as long, most of it for strings and lists.
    """

    def __init__(
        self, path: str | Path, data: bytearray, begin: int, field: str, end: str
    ) -> None:
        self.path, self.field, self.end = path, field, end
        if len(data) == begin:
            raise ValueError(f"{path} lists no utterance.")
        self.data = np.frombuffer(data, np.uint8)
        self.ends, self.speakers = array("q"), array("i")
        self.numbers: dict[bytes, int] = {}
        behind = data.find(end.encode(), begin) + 1
        self.columns = self._text(begin, behind - 1).split(field)
        if not {*RESERVED} <= {*self.columns}:
            raise ValueError(
                f"{path} has the columns {self.columns}; it needs {list(RESERVED)}."
            )
        self.begin = behind
        while behind < len(data):
            begin = behind
            behind = data.find(end.encode(), begin + _BLOCK_BYTES) + 1 or len(data)
            self._add(begin, behind)
        if not self.ends:
            raise ValueError(f"{path} lists no utterance.")

    def manifest(self) -> Manifest:
        """Give the rows."""
        return Manifest(
            self.columns,
            self.field,
            Texts(self.data[self.begin :], np.frombuffer(self.ends, np.int64)),
            np.frombuffer(self.speakers, np.int32),
            [name.decode() for name in self.numbers],
        )

    def _text(self, begin: int, end: int) -> str:
        try:
            return self.data[begin:end].tobytes().decode()
        except UnicodeDecodeError:
            # It names the line; to be read once more is for files that are refused only.
            read_lines(self.path, ",".join(RESERVED))
            raise

    def _add(self, begin: int, end: int) -> None:
        """Take the rows of a block, or refuse the first that is wrong."""
        block = self.data[begin:end]
        if block.max() > 127:
            self._text(begin, end)
        fields = self._fields_of(block)
        if fields is None:
            rows = self._text(begin, end).split(self.end)
            wrong, row = next(
                (place, row)
                for place, row in enumerate(rows)
                if self._fields_of(np.frombuffer((row + self.end).encode(), np.uint8))
                is None
            )
            raise ValueError(
                f"{self.path}, line {2 + len(self.ends) + wrong} is "
                f"{row.split(self.field)}, and must be {self.columns}: "
                f"{', '.join(RESERVED)} are not empty, and samples is the length of the "
                "utterance, of at most 18 digits. Put names with commas in quotes."
            )
        begins, lengths = fields
        last = begins[:, -1] + lengths[:, -1]
        self.ends.frombytes((begin - self.begin + last + 1).tobytes())
        place = self.columns.index("spk_id")
        self.speakers.frombytes(
            self._numbers_of(block, begins[:, place], lengths[:, place]).tobytes()
        )

    def _fields_of(
        self, block: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Give where fields begin and how long they are, [rows, columns]; None if wrong."""
        field, end, width = ord(self.field), ord(self.end), len(self.columns)
        behind = np.flatnonzero((block == field) | (block == end))
        # The end of a row is behind its last field, and behind no other.
        if len(behind) % width or not np.array_equal(
            block[behind].reshape(-1, width) == end,
            np.broadcast_to(
                np.arange(width) == width - 1, (len(behind) // width, width)
            ),
        ):
            return None
        begins = np.concatenate([[0], behind[:-1] + 1])
        lengths = (behind - begins).reshape(-1, width)
        begins = begins.reshape(-1, width)
        places = [self.columns.index(name) for name in RESERVED]
        samples = places[2]
        # int64 holds every number of 18 digits.
        if not lengths[:, places].all() or lengths[:, samples].max() > 18:
            return None
        digits = _letters(block, begins[:, samples], lengths[:, samples], ord("0"))
        return (begins, lengths) if (digits - ord("0") <= 9).all() else None

    def _numbers_of(
        self,
        block: NDArray[np.uint8],
        begins: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Give the numbers of the speakers, looked up where one follows another."""
        names = _letters(block, begins, lengths, 0)
        is_other = (names[1:] != names[:-1]).any(1) | (lengths[1:] != lengths[:-1])
        first = np.concatenate([[0], np.flatnonzero(is_other) + 1])
        numbers = [
            self.numbers.setdefault(
                block[begins[row] : begins[row] + lengths[row]].tobytes(),
                len(self.numbers),
            )
            for row in first.tolist()
        ]
        return np.repeat(
            np.array(numbers, np.int32), np.diff(first, append=len(begins))
        )


def _letters(
    block: NDArray[np.uint8],
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    fill: int,
) -> NDArray[np.uint8]:
    """Put the bytes of fields one below another, [fields, the longest]."""
    columns = np.arange(lengths.max())
    places = begins[:, None] + columns
    letters = block[np.minimum(places, len(block) - 1)]
    letters[columns >= lengths[:, None]] = fill
    return letters


def _unquoted(path: str | Path, data: bytearray) -> list[str]:
    """Take fields out of their quotes."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        read_lines(path, ",".join(RESERVED))
        raise
    lines: list[str] = []
    try:
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        lines += (_FIELD.join(row) for row in rows if row)
    except csv.Error as error:
        raise ValueError(
            f"{path} is no CSV ({error} behind {lines[-1:]}). Lines must be "
            f"{','.join(RESERVED)}."
        ) from error
    return lines
