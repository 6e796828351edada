"""The training manifest: a CSV file, and its rows in memory that processes share."""

from __future__ import annotations

import codecs
import csv
import io
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.audio.texts import Column, GrowingTexts, Rows, Texts
from speechbrain_rev.files import check_sum, opened_whole
from speechbrain_rev.lists import read_lines

#: Columns that each manifest has; those behind them are labels.
RESERVED = "ID", "wav", "samples", "spk_id"
# Bytes that are taken apart at a time.
_BLOCK_BYTES = 2**18


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
    """Utterances in columns that processes share: no row is an object.

    Parameters
    ----------
    names, paths : Texts
        Of each utterance.
    samples : numpy.ndarray, [utterances], int64
        Lengths in samples.
    speakers : numpy.ndarray, [utterances], int32
        Who speaks: a place in ``speaker_names``.
    speaker_names : Texts
        The speakers in the order in which they occur.
    labels : mapping of str to Texts
        Further columns by name, empty where an utterance has none.

    Example
    -------
    >>> manifest = Manifest.of([Utterance("id1/a", "wav/id1/a.wav", 16000, "id1")])
    >>> len(manifest), manifest[0].wav
    (1, 'wav/id1/a.wav')
    """

    def __init__(
        self,
        names: Texts,
        paths: Texts,
        samples: NDArray[np.int64],
        speakers: NDArray[np.int32],
        speaker_names: Texts,
        labels: Mapping[str, Texts],
    ) -> None:
        self.names, self.paths, self.speaker_names = names, paths, speaker_names
        self._samples, self._speakers = Column(samples), Column(speakers)
        self.labels = dict(sorted(labels.items()))

    @property
    def samples(self) -> NDArray[np.int64]:
        """Lengths in samples, [utterances]."""
        return self._samples.array

    @property
    def speakers(self) -> NDArray[np.int32]:
        """Who speaks, [utterances]: places in ``speaker_names``."""
        return self._speakers.array

    @classmethod
    def of(cls, utterances: Iterable[Utterance]) -> Manifest:
        """Put utterances into columns; those of a manifest are there already."""
        if isinstance(utterances, cls):
            return utterances
        rows = list(utterances)
        labels = [dict(row.labels) for row in rows]
        speakers = dict.fromkeys(row.spk_id for row in rows)
        numbers = {name: number for number, name in enumerate(speakers)}
        return cls(
            Texts.of(row.ID for row in rows),
            Texts.of(row.wav for row in rows),
            np.array([row.samples for row in rows], np.int64),
            np.array([numbers[row.spk_id] for row in rows], np.int32),
            Texts.of(numbers),
            {
                name: Texts.of(row.get(name, "") for row in labels)
                for name in set().union(*labels)
            },
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
    utterances = list(utterances)
    labels = sorted({label for one in utterances for label, _ in one.labels})
    with opened_whole(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow([*RESERVED, *labels])
        for one in utterances:
            known = dict(one.labels)
            further = [known.get(label, "") for label in labels]
            rows.writerow([one.ID, one.wav, one.samples, one.spk_id, *further])
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
    rows = _Rows(path)
    return Manifest(
        rows.texts["ID"].texts(),
        rows.texts["wav"].texts(),
        np.frombuffer(rows.samples, np.int64),
        np.frombuffer(rows.speakers, np.int32),
        Texts.of(name.decode() for name in rows.numbers),
        {name: rows.texts[name].texts() for name in rows.labels},
    )


class _Rows:
    """The columns of a CSV file, without an object for each row.

    Python's csv takes four times as long, most of it for strings and lists.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.line = path, 2
        self.columns: list[str] = []
        self.texts: dict[str, GrowingTexts] = {}
        self.samples, self.speakers = array("q"), array("i")
        self.numbers: dict[bytes, int] = {}
        with open(path, "rb") as file:
            for self.field, self.end, block in _separated(path, file):
                if not self.columns:
                    header, _, block = block.partition(self.end)
                    self._take_header(header.decode().split(self.field.decode()))
                if block:
                    self._add(block)
        if not self.samples:
            raise ValueError(f"{path} lists no utterance.")

    def _take_header(self, columns: list[str]) -> None:
        if not {*RESERVED} <= {*columns}:
            raise ValueError(
                f"{self.path} has the columns {columns}; it needs {list(RESERVED)}."
            )
        self.columns = columns
        self.labels = [name for name in columns if name not in RESERVED]
        self.texts = {name: GrowingTexts() for name in ("ID", "wav", *self.labels)}

    def _add(self, block: bytes) -> None:
        """Take some rows, or refuse the first that is wrong."""
        columns = self._columns_of(block)
        if columns is None:
            rows = enumerate(block.split(self.end), start=self.line)
            line, row = next(
                one for one in rows if self._columns_of(one[1] + self.end) is None
            )
            raise ValueError(
                f"{self.path}, line {line} is {row.decode().split(self.field.decode())}, "
                f"and must be {self.columns}: {', '.join(RESERVED)} are not empty, and "
                "samples is the length of the utterance, of at most 18 digits. Put names "
                "with commas in quotes."
            )
        for name, texts in self.texts.items():
            fields, lengths = columns[name]
            texts.extend(b"".join(fields), lengths)
        self.samples.extend(map(int, columns["samples"][0]))
        speakers, _ = columns["spk_id"]
        for speaker in dict.fromkeys(speakers):
            self.numbers.setdefault(speaker, len(self.numbers))
        self.speakers.extend(map(self.numbers.__getitem__, speakers))
        self.line += len(speakers)

    def _columns_of(
        self, block: bytes
    ) -> dict[str, tuple[list[bytes], NDArray[np.int64]]] | None:
        """Give the fields of each column with their lengths; None if a row is wrong."""
        data, width = np.frombuffer(block, np.uint8), len(self.columns)
        is_end = data == ord(self.end)
        behind = np.flatnonzero(is_end | (data == ord(self.field)))
        # The end of a row is behind its last field, and behind no other.
        is_last = np.arange(len(behind)) % width == width - 1
        if not np.array_equal(is_end[behind], is_last):
            return None
        fields = block.replace(self.end, self.field).split(self.field)[:-1]
        lengths = np.diff(behind, prepend=-1) - 1
        columns = {
            name: (fields[n::width], lengths[n::width])
            for n, name in enumerate(self.columns)
        }
        samples, digits = columns["samples"]
        is_full = all(columns[name][1].all() for name in RESERVED)
        # int64 holds every number of 18 digits.
        is_right = is_full and b"".join(samples).isdigit() and digits.max() <= 18
        return columns if is_right else None


def _separated(
    path: str | Path, file: BinaryIO
) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Read whole rows: what is behind their fields, what is behind them, and some of them."""
    file.seek(len(codecs.BOM_UTF8) * file.read(3).startswith(codecs.BOM_UTF8))
    try:
        while block := file.read(_BLOCK_BYTES) + file.readline():
            rows = block.replace(b"\r\n", b"\n") if b"\r" in block else block
            if not rows.isascii():
                rows.decode()
            if b'"' in rows or b"\r" in rows:
                break
            if rows := rows.rstrip(b"\n"):
                yield b",", b"\n", rows + b"\n"
        # Fields in quotes have commas, and may have any character but these two.
        text = (block + file.read()).decode()
    except UnicodeDecodeError:
        # It names the line; to be read once more is for files that are refused only.
        read_lines(path, ",".join(RESERVED))
        raise
    quoted = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines: list[str] = []
    try:
        lines += ("\x1f".join(row) for row in quoted if row)
    except csv.Error as error:
        raise ValueError(
            f"{path} is no CSV ({error} behind {lines[-1:]}). Lines must be "
            f"{','.join(RESERVED)}."
        ) from error
    if lines:
        yield b"\x1f", b"\x1e", "".join(f"{line}\x1e" for line in lines).encode()
