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

#: Columns of every manifest; any further column is a label.
RESERVED = "ID", "wav", "samples", "spk_id"
# Bytes of a block, whose fields numpy splits at once.
_BLOCK_BYTES = 2**18
# Characters after a field and after a row where fields were in quotes: no name has them.
_SEPARATOR, _END = "\x1f", "\x1e"


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
        Names and values of the further columns.
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
    """Utterances as the bytes of their rows, which processes share: no row is an object.

    Parameters
    ----------
    columns : sequence of str
        Names of a row's fields: ``RESERVED``, and labels.
    separator : str
        The character between two fields.
    rows : Texts
        Each utterance's fields, and one character after them.
    speakers : numpy.ndarray, [utterances], int32
        Each utterance's speaker, as an index of ``speaker_names``.
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
        separator: str,
        rows: Texts,
        speakers: NDArray[np.int32],
        speaker_names: Sequence[str],
    ) -> None:
        self.separator, self.rows = separator, rows
        self.speaker_names = tuple(speaker_names)
        self._speakers = Column(speakers)
        self._reserved = [columns.index(name) for name in RESERVED]
        self._labels = sorted(
            (name, index) for index, name in enumerate(columns) if name not in RESERVED
        )

    @property
    def speakers(self) -> NDArray[np.int32]:
        """Each utterance's speaker, [utterances]: indices of ``speaker_names``."""
        return self._speakers.array

    @classmethod
    def of(cls, utterances: Iterable[Utterance]) -> Manifest:
        """Make a manifest of utterances; a manifest is returned as it is."""
        if isinstance(utterances, cls):
            return utterances
        columns, rows = _tabulate(utterances)
        speakers = [row[3] for row in rows]
        numbers = {name: index for index, name in enumerate(dict.fromkeys(speakers))}
        return cls(
            columns,
            _SEPARATOR,
            Texts.of(_SEPARATOR.join(row) + _END for row in rows),
            np.array([numbers[name] for name in speakers], np.int32),
            tuple(numbers),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def _read_row(self, index: int) -> Utterance:
        fields = self.rows[index][:-1].split(self.separator)
        ID, wav, samples, speaker = (fields[column] for column in self._reserved)
        labels = tuple((name, fields[column]) for name, column in self._labels)
        return Utterance(ID, wav, int(samples), speaker, labels)


def _tabulate(utterances: Iterable[Utterance]) -> tuple[list[str], list[list[str]]]:
    """Return the columns of utterances, and the fields of each row."""
    utterances = list(utterances)
    names = sorted({name for utterance in utterances for name, _ in utterance.labels})
    rows = []
    for utterance in utterances:
        labels = dict(utterance.labels)
        rows.append(
            [
                utterance.ID,
                utterance.wav,
                str(utterance.samples),
                utterance.spk_id,
                *(labels.get(name, "") for name in names),
            ]
        )
    return [*RESERVED, *names], rows


def write_manifest(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Write a manifest as CSV, whole or not at all.

    Parameters
    ----------
    path : str or Path
        The file to write.
    utterances : iterable of Utterance
        A label that an utterance lacks is an empty field.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    columns, rows = _tabulate(utterances)
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
        If the file is missing, empty, of other columns or in another encoding; if a row has
        other fields; if the file differs from its checksum in a ``SHA256SUMS`` beside it.

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
    separator, end = ",", "\n"
    if b'"' in data or b"\r" in data:
        # Fields in quotes have commas, and may have any character but these two.
        lines = _read_quoted_lines(path, data[begin:])
        data = bytearray("".join(line + _END for line in lines).encode())
        begin, separator, end = 0, _SEPARATOR, _END
    elif data:
        while data.endswith(b"\n\n"):
            del data[-1]
        data += b"\n" * (not data.endswith(b"\n"))
    return _ManifestParser(path, data, begin, separator, end).manifest()


class _ManifestParser:
    """Splits the bytes of a list block by block, without an object for each row.

    Python's csv takes eight times as long, most of it for strings and lists.
    """

    def __init__(
        self, path: str | Path, data: bytearray, begin: int, separator: str, end: str
    ) -> None:
        self.path, self.separator, self.end = path, separator, end
        if len(data) == begin:
            raise ValueError(f"{path} lists no utterance.")
        self.data = np.frombuffer(data, np.uint8)
        self.ends, self.speakers = array("q"), array("i")
        self.numbers: dict[bytes, int] = {}
        stop = data.find(end.encode(), begin) + 1
        self.columns = self._decode(begin, stop - 1).split(separator)
        if not {*RESERVED} <= {*self.columns}:
            raise ValueError(
                f"{path} has the columns {self.columns}; it needs {list(RESERVED)}."
            )
        self.begin = stop
        while stop < len(data):
            begin = stop
            stop = data.find(end.encode(), begin + _BLOCK_BYTES) + 1 or len(data)
            self._parse_block(begin, stop)
        if not self.ends:
            raise ValueError(f"{path} lists no utterance.")

    def manifest(self) -> Manifest:
        """Return the manifest of all rows."""
        return Manifest(
            self.columns,
            self.separator,
            Texts(self.data[self.begin :], np.frombuffer(self.ends, np.int64)),
            np.frombuffer(self.speakers, np.int32),
            [name.decode() for name in self.numbers],
        )

    def _decode(self, begin: int, stop: int) -> str:
        try:
            return self.data[begin:stop].tobytes().decode()
        except UnicodeDecodeError:
            # read_lines raises an error that names the line.
            read_lines(self.path, ",".join(RESERVED))
            raise

    def _parse_block(self, begin: int, stop: int) -> None:
        """Add the rows of a block, or refuse the first that is wrong."""
        block = self.data[begin:stop]
        if block.max() > 127:
            self._decode(begin, stop)
        fields = self._split_fields(block)
        if fields is None:
            rows = self._decode(begin, stop).split(self.end)
            wrong, row = next(
                (index, row)
                for index, row in enumerate(rows)
                if self._split_fields(
                    np.frombuffer((row + self.end).encode(), np.uint8)
                )
                is None
            )
            raise ValueError(
                f"{self.path}, line {2 + len(self.ends) + wrong} is "
                f"{row.split(self.separator)}, and must be {self.columns}: "
                f"{', '.join(RESERVED)} are not empty, and samples is the length of the "
                "utterance, of at most 18 digits. Put names with commas in quotes."
            )
        begins, lengths = fields
        last = begins[:, -1] + lengths[:, -1]
        self.ends.frombytes((begin - self.begin + last + 1).tobytes())
        column = self.columns.index("spk_id")
        self.speakers.frombytes(
            self._number_speakers(
                block, begins[:, column], lengths[:, column]
            ).tobytes()
        )

    def _split_fields(
        self, block: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return begins and lengths of fields, [rows, columns]; None if a row is wrong."""
        separator, end, width = ord(self.separator), ord(self.end), len(self.columns)
        stops = np.flatnonzero((block == separator) | (block == end))
        # A row's end follows its last field, and no other.
        if len(stops) % width or not np.array_equal(
            block[stops].reshape(-1, width) == end,
            np.broadcast_to(
                np.arange(width) == width - 1, (len(stops) // width, width)
            ),
        ):
            return None
        begins = np.concatenate([[0], stops[:-1] + 1])
        lengths = (stops - begins).reshape(-1, width)
        begins = begins.reshape(-1, width)
        reserved = [self.columns.index(name) for name in RESERVED]
        samples = reserved[2]
        # int64 holds every number of 18 digits.
        if not lengths[:, reserved].all() or lengths[:, samples].max() > 18:
            return None
        digits = _stack_fields(block, begins[:, samples], lengths[:, samples], ord("0"))
        return (begins, lengths) if (digits - ord("0") <= 9).all() else None

    def _number_speakers(
        self,
        block: NDArray[np.uint8],
        begins: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Map each row's speaker to its number, once for each group of equal rows."""
        names = _stack_fields(block, begins, lengths, 0)
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


def _stack_fields(
    block: NDArray[np.uint8],
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    fill: int,
) -> NDArray[np.uint8]:
    """Stack the bytes of fields, [fields, longest]; ``fill`` pads the shorter ones."""
    columns = np.arange(lengths.max())
    offsets = begins[:, None] + columns
    stacked = block[np.minimum(offsets, len(block) - 1)]
    stacked[columns >= lengths[:, None]] = fill
    return stacked


def _read_quoted_lines(path: str | Path, data: bytearray) -> list[str]:
    """Read a CSV with quotes; ``_SEPARATOR`` stands between the fields of a line."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        read_lines(path, ",".join(RESERVED))
        raise
    lines: list[str] = []
    try:
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        lines += (_SEPARATOR.join(row) for row in rows if row)
    except csv.Error as error:
        raise ValueError(
            f"{path} is no CSV ({error} behind {lines[-1:]}). Lines must be "
            f"{','.join(RESERVED)}."
        ) from error
    return lines
