"""Formats in which a corpus is given: one function each reads its rows, and one table.

A format that lists its utterances is a function `read_x(path)` that yields rows, one that
recognises it, and a row of `FORMATS`. Folders of audio are `VoxCelebFolder`'s.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

from speechbrain_rev.lists import check_length, is_listable, read_lines, read_text

from .corpus import OTHER_SUFFIXES, Corpus, VoxCelebFolder, audio_below
from .packed import find_packed
from .reading import audio_info
from .segments import Segment

# Of a recording that cannot be read, and is reported as such when it is checked.
_ANY_RATE = 16000


class Row(NamedTuple):
    """An utterance of a list.

    Attributes
    ----------
    ID : str
        Its unique name.
    file : Path
        The audio file.
    speaker : str
        Who speaks.
    start : int
        First sample of the utterance in the file.
    samples : int or None
        Its length; None for all that follow.
    session : str or None
        What it was recorded in; None for the file.
    """

    ID: str
    file: Path
    speaker: str
    start: int = 0
    samples: int | None = None
    session: str | None = None

    def path(self) -> Path:
        """Give the path of the file, or of the segment of it."""
        if not self.start and self.samples is None:
            return self.file
        return Segment(self.file, self.start, self.samples).path()


def read_speechbrain(path: Path) -> Iterator[Row]:
    r"""Read a manifest of SpeechBrain: ID, wav, spk_id, and perhaps start and stop.

    Parameters
    ----------
    path : Path
        A CSV file with these columns, or a JSON file of an object for each ID. Start and
        stop are in samples, as SpeechBrain's recipes write them. ``$data_root``,
        ``{data_root}`` and what is relative are in the manifest's folder.

    Yields
    ------
    Row

    Raises
    ------
    ValueError
        At the first row that cannot be used, which it names.

    Example
    -------
    >>> path = getfixture("tmp_path") / "train.csv"
    >>> _ = path.write_text("ID,duration,wav,start,stop,spk_id\nu1,2,/a.wav,0,32000,ann\n")
    >>> [row.samples for row in read_speechbrain(path)]
    [32000]
    """
    for place, given in _speechbrain_rows(path):
        name, wav, speaker = (_text(given, k, place) for k in ("ID", "wav", "spk_id"))
        for root in ("$data_root", "{data_root}"):
            wav = wav.replace(root, str(path.parent))
        start = _sample(given, "start", place) or 0
        stop = _sample(given, "stop", place)
        if stop is not None and stop <= start:
            raise ValueError(
                f"{place}: start is {start} and stop {stop}. An utterance ends behind its "
                "start; correct them."
            )
        samples = None if stop is None else stop - start
        yield Row(name, path.parent / wav, speaker, start, samples)


def _speechbrain_rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Give the fields of each row, and where it stands."""
    text = read_text(path, "ID,duration,wav,start,stop,spk_id")
    if path.suffix.lower() == ".json":
        rows = _json(text, str(path))
        for name, given in rows.items():
            place = f"{path}, {name!r}"
            if not isinstance(given, dict):
                raise ValueError(f"{place} is no object with wav and spk_id.")
            yield place, {"ID": name, **given}
        return
    table = csv.DictReader(text.splitlines(keepends=True), strict=True)
    if lacking := {"ID", "wav", "spk_id"} - set(table.fieldnames or ()):
        raise ValueError(
            f"{path} has the columns {table.fieldnames}, without {sorted(lacking)}. A "
            "manifest of SpeechBrain has ID, duration, wav, start, stop and spk_id."
        )
    try:
        for row in table:
            place = f"{path}, line {table.line_num}"
            if None in row or None in row.values():
                raise ValueError(
                    f"{place} has other fields than the header. Put names with commas in "
                    "quotes."
                )
            yield place, row
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {table.line_num}: it is no CSV ({error}). Write it again."
        ) from error


def read_kaldi(path: Path) -> Iterator[Row]:
    r"""Read a directory of Kaldi: wav.scp, utt2spk, and perhaps segments.

    Parameters
    ----------
    path : Path
        The directory. Paths of wav.scp that are relative are in it. Times of segments are
        seconds, rounded to samples of the recording; an end of -1 is the recording's.

    Yields
    ------
    Row

    Raises
    ------
    ValueError
        At the first row that cannot be used, which it names. Commands, which end or begin
        in ``|``, are never run.

    Example
    -------
    >>> folder = getfixture("tmp_path")
    >>> _ = (folder / "wav.scp").write_text("u1 /data/a.wav\n")
    >>> _ = (folder / "utt2spk").write_text("u1 ann\n")
    >>> [(row.ID, row.speaker) for row in read_kaldi(folder)]
    [('u1', 'ann')]
    """
    recordings = {}
    for name, (wav, place) in _kaldi_table(
        path / "wav.scp", "'recording file'"
    ).items():
        if wav.startswith("|") or wav.endswith("|"):
            raise ValueError(
                f"{place}: {wav[:60]!r} is a command, and is not run. Write its output "
                "into a file and list that: wav-copy scp:wav.scp 'ark,scp:...' of Kaldi, "
                "or the command itself with > FILE.wav."
            )
        recordings[name] = path / wav
    speakers = _kaldi_table(path / "utt2spk", "'utterance speaker'")
    whole = {name: (name, place) for name, (_, place) in speakers.items()}
    parts = whole
    if (path / "segments").is_file():
        parts = _kaldi_table(path / "segments", "'utterance recording start end'")
    elif silent := recordings.keys() - speakers.keys():
        raise ValueError(
            f"{path / 'utt2spk'} has no speaker of {min(silent)!r} of wav.scp. Add a line "
            "for it, or take it out of wav.scp."
        )
    if lacking := speakers.keys() - parts.keys():
        raise ValueError(
            f"{path / 'segments'} has no line of {min(lacking)!r} of utt2spk. Add one."
        )
    for name, (part, place) in parts.items():
        recording, *times = part.split() if parts is not whole else [part]
        if recording not in recordings:
            raise ValueError(
                f"{place}: wav.scp has no {recording!r}. Add a line for it."
            )
        if name not in speakers:
            raise ValueError(
                f"{place}: utt2spk has no speaker of {name!r}. Add a line."
            )
        file, speaker = recordings[recording], speakers[name][0]
        if parts is whole:
            yield Row(name, file, speaker)
            continue
        start, end = _times(times, place)
        rate = _rate(file)
        first = round(start * rate)
        samples = None if end is None else round(end * rate) - first
        yield Row(name, file, speaker, first, samples)


def _kaldi_table(path: Path, form: str) -> dict[str, tuple[str, str]]:
    """Give the rest of each line, and where it stands, by its first word."""
    if not path.is_file():
        raise ValueError(
            f"There is no {path}. A Kaldi directory has wav.scp and utt2spk."
        )
    table: dict[str, tuple[str, str]] = {}
    for number, line in enumerate(read_lines(path, form), start=1):
        place = f"{path}, line {number}"
        name, *rest = line.split(maxsplit=1)
        if not rest:
            raise ValueError(f"{place}: {line[:60]!r} has one field. Lines are {form}.")
        if name in table:
            raise ValueError(
                f"{place}: {name!r} is {rest[0].strip()[:60]!r} and was "
                f"{table[name][0][:60]!r} before. Leave the right line."
            )
        table[name] = rest[0].strip(), place
    if not table:
        raise ValueError(f"{path} is empty. Lines are {form}.")
    return table


def _times(given: list[str], place: str) -> tuple[float, float | None]:
    """Give start and end of a segment in seconds; an end of None is the recording's."""
    try:
        start, end = map(float, given)
    except ValueError as error:
        raise ValueError(
            f"{place}: {' '.join(given)[:60]!r} are no start and end in seconds. Lines are "
            "'utterance recording start end'."
        ) from error
    if not (math.isfinite(start) and math.isfinite(end)) or start < 0:
        raise ValueError(
            f"{place}: it begins at {start:g} s, ends at {end:g} s. Correct it."
        )
    if end != -1 and end <= start:
        raise ValueError(
            f"{place}: it ends at {end:g} s, not behind its start at {start:g} s. Correct it."
        )
    return start, None if end == -1 else end


@lru_cache(maxsize=4096)
def _rate(file: Path) -> int:
    try:
        return audio_info(file).sample_rate
    except (ValueError, OSError):
        return _ANY_RATE


def read_wespeaker(path: Path) -> Iterator[Row]:
    r"""Read WeSpeaker's raw.list: a line of JSON with key, wav and spk an utterance.

    Parameters
    ----------
    path : Path
        The list. What is relative is in its folder.

    Yields
    ------
    Row

    Raises
    ------
    ValueError
        At the first line that cannot be used, which it names.

    Example
    -------
    >>> path = getfixture("tmp_path") / "raw.list"
    >>> _ = path.write_text('{"key": "u1", "wav": "/data/a.wav", "spk": "ann"}\n')
    >>> [(row.ID, row.speaker) for row in read_wespeaker(path)]
    [('u1', 'ann')]
    """
    form = '{"key": ..., "wav": ..., "spk": ...}'
    for number, line in enumerate(read_lines(path, form), start=1):
        place = f"{path}, line {number}"
        given = _json(line, place)
        name, wav, speaker = (_text(given, key, place) for key in ("key", "wav", "spk"))
        yield Row(name, path.parent / wav, speaker)


def _json(text: str, place: str) -> dict[str, object]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{place}: it is no JSON ({error}). Write it again."
        ) from error
    if not isinstance(given, dict):
        raise ValueError(f"{place}: {text[:60]!r} is no JSON object. Write it again.")
    return given


def _text(given: Mapping[str, object], key: str, place: str) -> str:
    """Give a field that must be a text."""
    value = given.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"{place}: {key} is {value!r}. Give one, or delete the utterance."
        )
    return value.strip()


def _sample(given: Mapping[str, object], key: str, place: str) -> int | None:
    """Give a field that must be a count of samples; None where there is none."""
    value = given.get(key)
    if value is None or value == "":
        return None
    try:
        sample = int(str(value))
    except ValueError:
        sample = -1
    if sample < 0:
        raise ValueError(
            f"{place}: {key} is {value!r}. It is a number of samples from 0 on."
        )
    return sample


def _is_speechbrain(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in (".csv", ".json")


def _is_kaldi(path: Path) -> bool:
    return (path / "wav.scp").is_file()


def _is_wespeaker(path: Path) -> bool:
    return path.is_file() and path.suffix == ".list"


class Format(NamedTuple):
    """How a format is recognised and read.

    Attributes
    ----------
    recognises : callable
        Returns whether a path is of the format.
    read : callable
        Gives the rows of a path.
    """

    recognises: Callable[[Path], bool]
    read: Callable[[Path], Iterable[Row]]


#: Formats by name. A path is of the first that recognises it.
FORMATS: dict[str, Format] = {
    "SpeechBrain's manifest": Format(_is_speechbrain, read_speechbrain),
    "Kaldi directory": Format(_is_kaldi, read_kaldi),
    "WeSpeaker's list": Format(_is_wespeaker, read_wespeaker),
}


@dataclass(frozen=True)
class ListedCorpus(Corpus):
    """The utterances that a list names, wherever their audio is.

    Parameters
    ----------
    path : Path
        The list.
    name : str
        Of its format, a key of ``FORMATS``.
    rows : mapping of str to Row
        By ID.
    """

    path: Path
    name: str
    rows: Mapping[str, Row] = field(repr=False)

    layout: ClassVar[str] = (
        "Or a manifest of SpeechBrain (.csv, .json), a Kaldi directory (wav.scp, utt2spk, "
        "perhaps segments) or WeSpeaker's raw.list."
    )

    @classmethod
    def find(
        cls, folder: str | Path, *, any_extension: bool, outside_files: bool
    ) -> ListedCorpus | None:
        """Read the list that is given; its audio may be anywhere.

        Parameters
        ----------
        folder : str or Path
            The list, or its folder.
        any_extension, outside_files : bool
            A list names its files exactly, and wherever they are.

        Returns
        -------
        ListedCorpus or None

        Raises
        ------
        ValueError
            If a row cannot be used, or two have one ID.
        """
        path = Path(os.path.abspath(folder))
        for name, known in FORMATS.items():
            if known.recognises(path):
                return cls(path, name, cls._by_name(path, known.read(path)))
        return None

    @staticmethod
    def _by_name(path: Path, rows: Iterable[Row]) -> dict[str, Row]:
        by_name: dict[str, Row] = {}
        for row in rows:
            other = by_name.setdefault(row.ID, row)
            if other is not row:
                whose = f"of {other.speaker!r} and of {row.speaker!r}"
                raise ValueError(
                    f"{path}: the utterance {row.ID!r} is listed twice, {whose}. Leave one."
                )
            if not is_listable(row.speaker):
                raise ValueError(
                    f"{path}: the speaker {row.speaker!r} of {row.ID!r} has a tab or a line "
                    "break. Rename it."
                )
            check_length(str(row.file), f"{path}, {row.ID!r}")
        if not by_name:
            raise ValueError(f"{path} lists no utterance.")
        return by_name

    def _whose(self, name: str) -> str:
        row = self.rows.get(name)
        part = "" if row is None else f"\t{row.start}+{row.samples}"
        return f"{super()._whose(name)}{part}"

    @property
    def format(self) -> str:
        """Return the name of the format."""
        return self.name

    def utterances(self) -> Iterator[str]:
        """List the IDs in the list's order."""
        yield from self.rows

    def locate(self, name: str) -> Path:
        """Give the file or segment of an ID; one that is not listed has none."""
        row = self.rows.get(name)
        return self.path.parent / name if row is None else row.path()

    def speaker(self, name: str) -> str | None:
        """Give the speaker of an ID; None if it is not listed."""
        row = self.rows.get(name)
        return None if row is None else row.speaker

    def session(self, name: str) -> str | None:
        """Give the session of an ID; its file where the list has none."""
        row = self.rows.get(name)
        return None if row is None else row.session or str(row.file)


#: Layouts by name. A folder is of the first that recognises it: those that ask for more
#: come first.
CORPORA: dict[str, type[Corpus]] = {"Lists": ListedCorpus, "VoxCeleb": VoxCelebFolder}


def open_corpus(
    folder: str | Path,
    option: str = "data_folder",
    *,
    any_extension: bool = False,
    outside_files: bool = False,
    speaker_from: int | str | None = None,
) -> Corpus:
    """Recognise the corpus in a folder.

    Parameters
    ----------
    folder : str or Path
        As given by the user: of audio, of a list, or packed; or a list.
    option : str
        What it is given as.
    any_extension : bool
        Whether a .flac is taken where a list says .wav, or the reverse.
    outside_files : bool
        Whether names and links may lead out of the folder.
    speaker_from : int, str or None
        Where a folder's files name their speaker, as of ``VoxCelebFolder``; None for what
        the layout says.

    Returns
    -------
    Corpus

    Raises
    ------
    ValueError
        If there is none; it names the layouts.

    Example
    -------
    >>> path = getfixture("tmp_path") / "wav" / "id1" / "video" / "a.wav"
    >>> path.parent.mkdir(parents=True); path.touch()
    >>> corpus = open_corpus(getfixture("tmp_path"))
    >>> [(name, corpus.speaker(name)) for name in corpus.utterances()]
    [('id1/video/a.wav', 'id1')]
    """
    layouts = " ".join(corpus.layout for corpus in CORPORA.values())
    path = Path(os.path.abspath(folder))
    if find_packed(path) is None and not path.exists():
        raise ValueError(
            f"The data folder {folder} does not exist. Give the folder of "
            f"VoxCeleb (or of your speech) with --{option}=... {layouts}"
        )
    for corpus in CORPORA.values():
        opened = corpus.find(
            folder, any_extension=any_extension, outside_files=outside_files
        )
        if opened is None:
            continue
        if speaker_from is None:
            return opened
        if not isinstance(opened, VoxCelebFolder):
            raise ValueError(
                f"speaker_from is {speaker_from!r}, and {folder} lists its speakers "
                f"({opened.format}). Leave speaker_from out."
            )
        return replace(opened, speaker_from=speaker_from)
    if path.is_file():
        raise ValueError(f"{folder} is no list that is known. {layouts}")
    other = next(audio_below(path, OTHER_SUFFIXES), None)
    if other is not None:
        raise ValueError(
            f"{folder} holds {other.suffix} files, which cannot be read by frame "
            f"range. Convert each: ffmpeg -i IN{other.suffix} -ar 16000 -ac 1 OUT.flac. "
            + layouts
        )
    raise ValueError(f"There is no speech in {folder}. {layouts}")


def refuse_lists(folder: str | Path) -> None:
    """Refuse a folder whose lists name the speakers, where only audio is taken.

    Parameters
    ----------
    folder : str or Path

    Raises
    ------
    ValueError
        If a layout recognises it in which names of files do not tell the speaker.
    """
    for name, layout in CORPORA.items():
        if not layout.speakers_in_names and layout.find(
            folder, any_extension=False, outside_files=False
        ):
            raise ValueError(
                f"{folder} is a corpus in {name}'s layout, whose lists name the speakers; "
                "only audio would be packed. Give it as it is, or pack its folder of audio."
            )
