"""Rows, which every format of speech gives, and the rows that a list of names means."""

from __future__ import annotations

import os
import posixpath
import re
import unicodedata
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Event
from typing import NamedTuple, TypeVar

from speechbrain_rev.audio.segments import Segment, audio_exists

from .manifest import LeftOut

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Endings of what corpora are converted to.
LOSSLESS = (".wav", ".wave", ".flac")
#: Endings of audio that is read, in small letters. libsndfile reads more, of which
#: other programs use the endings (.raw, .mat, .sd2) or which hold no speech.
AUDIO_SUFFIXES = (
    *LOSSLESS, ".ogg", ".oga", ".opus", ".mp3", ".m4a", ".aiff", ".aif", ".aifc", ".au",
    ".caf", ".w64", ".rf64", ".sph", ".nist",
)  # fmt: skip
#: Endings of audio that is not read.
OTHER_SUFFIXES = (
    ".aac", ".wma", ".amr", ".awb", ".3gp", ".webm", ".mka", ".ac3", ".ape", ".dss", ".gsm",
    ".mp2", ".ra", ".shn", ".spx", ".tta", ".voc", ".vox", ".wv",
)  # fmt: skip
ALL_SUFFIXES = AUDIO_SUFFIXES + OTHER_SUFFIXES
_ENDINGS = frozenset(ALL_SUFFIXES)
# //, ./ or ../ in a name.
_DETOUR = re.compile(r"(?:^|/)(?:/|\.|$)")
#: Threads that read files, and how many files they are ahead at most.
THREADS, AHEAD = 16, 1024

#: Speaker and session of a name; None for what it has not.
Whose = tuple[str | None, str | None]


class Row(NamedTuple):
    """An utterance, in whatever format it was given.

    Attributes
    ----------
    id : str
        Its unique name in manifests.
    path : str
        The audio file, or member of a tar.
    speaker : str or None
        Who speaks; None where nobody is named, as of noise.
    start : int
        First sample of the utterance in the file.
    samples : int or None
        Its length; None for all that follow.
    channel : int or None
        Of the file, from 0 on; None where the format does not say.
    session : str or None
        What it was recorded in.
    labels : tuple of pairs of str
        What else a list says of it, by name: columns of the manifest.
    ending : str
        What trial lists have behind the ID: the ending of the file, in a folder of audio.

    Example
    -------
    >>> row = Row("id1/s/a", "/data/id1/s/a.wav", "id1", 16000, 32000, ending=".wav")
    >>> row.name, row.wav
    ('id1/s/a.wav', '/data/id1/s/a.wav/16000+32000.wav')
    """

    id: str
    path: str
    speaker: str | None = None
    start: int = 0
    samples: int | None = None
    channel: int | None = None
    session: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    ending: str = ""

    @property
    def name(self) -> str:
        """The name in trial lists."""
        return self.id + self.ending

    @property
    def wav(self) -> str:
        """The path that readers of audio take: of the file, or of the segment of it."""
        if not self.start and self.samples is None and self.channel is None:
            return self.path
        part = Segment(Path(self.path), self.start, self.samples, self.channel)
        return str(part.path())


class Source(NamedTuple):
    """A folder or list, and how its rows are read.

    Attributes
    ----------
    path : Path
        The list, or the folder that names of files are relative to.
    format : str
        What it was recognised as.
    read : callable
        Gives the rows, lazily. It takes a list for what is left out; without one, audio
        outside the folder or beside the speakers is rows, too.
    whose : callable or None
        Gives speaker and session of a file's name; None of a list.
    within : Path or None
        Out of which no name may lead; None for anywhere.
    key : str
        What stands before names and speakers of one of several; "" of one alone.
    """

    path: Path
    format: str
    read: Callable[[list[LeftOut] | None], Iterator[Row]]
    whose: Callable[[str], Whose] | None = None
    within: Path | None = None
    key: str = ""

    @property
    def prefix(self) -> str:
        """What stands before names and speakers."""
        return f"{self.key}/" if self.key else ""

    @property
    def folder(self) -> Path:
        """What its files are relative to."""
        return self.path.parent if self.path.is_file() else self.path

    def rows(self, left_out: list[LeftOut] | None = None) -> Iterator[Row]:
        """Give the rows, with the key before names and speakers."""
        rows = self.read(left_out)
        return map(self._keyed, rows) if self.key else rows

    def _keyed(self, row: Row) -> Row:
        speaker = None if row.speaker is None else self.prefix + row.speaker
        return row._replace(id=self.prefix + row.id, speaker=speaker)

    def row_of(self, name: str) -> Row:
        """Make the row of a file's name."""
        assert self.whose is not None
        stem, ending = posixpath.splitext(name)
        speaker, session = self.whose(posixpath.normpath(name))
        row = Row(stem, str(self.path / name), speaker, session=session, ending=ending)
        return self._keyed(row) if self.key else row


def plain_name(name: str) -> str:
    r"""Give a name as it is looked up: in NFC, without detours and ending of audio.

    Example
    -------
    >>> plain_name("id1/./s//a.wav"), plain_name("Jose\u0301/1.m4a") == "Jos\u00e9/1"
    ('id1/s/a', True)
    """
    if not name.isascii():
        name = unicodedata.normalize("NFC", name)
    if _DETOUR.search(name):
        name = posixpath.normpath(name)
    stem, dot, ending = name.rpartition(".")
    return stem if dot and f".{ending.lower()}" in _ENDINGS else name


def speaker_of_name(name: str) -> str | None:
    """Give the speaker of a name that begins with one; None if it has no folder.

    Example
    -------
    >>> speaker_of_name("id2/../id1/s/a.wav"), speaker_of_name("a.wav")
    ('id1', None)
    """
    first, slash, _ = plain_name(name).partition("/")
    return first if slash else None


class Found(NamedTuple):
    """The rows that a list's names mean.

    Attributes
    ----------
    rows : dict of str to Row
        By the names of the list, of missing files too where a name has the speaker.
    missing : dict of str to str
        Which file or utterance is not there, by the names of the list.
    outside : dict of str to str
        How a name leads out of its folder, by the names of the list.
    """

    rows: dict[str, Row]
    missing: dict[str, str]
    outside: dict[str, str]

    def lacking(self, names: Collection[str]) -> str:
        """Say how many of some names are missing, and the first."""
        missing = [name for name in names if name in self.missing]
        if not missing:
            return ""
        return (
            f"{len(missing)} of {counted(len(names), 'file')} {are(len(missing))} missing, "
            f"such as {self.missing[missing[0]]}."
        )

    def refuse_outside(self, path: str | Path, names: Iterable[str]) -> None:
        """Refuse a list whose names lead out of the folder; the first is named."""
        out = [name for name in names if name in self.outside]
        if out:
            raise ValueError(
                f"{path}: {counted(len(out), 'name')} outside the folder, such as "
                f"{out[0]!r}, which {self.outside[out[0]]}. Correct the list; "
                "--outside_files reads them all the same (--outside_files=true of train.py)."
            )


def find_rows(sources: Sequence[Source], names: Iterable[str]) -> Found:
    """Look up the names of a list, of which the ending and the Unicode form may differ.

    Parameters
    ----------
    sources : sequence of Source
        Where the names are. Of several, a name may lack the key where one alone has it.
    names : iterable of str
        In the list.

    Returns
    -------
    Found

    Raises
    ------
    ValueError
        If several sources have a name that has no key.
    """
    wanted: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        wanted.setdefault(plain_name(name), []).append(name)
    hits: dict[str, dict[str, Row]] = {n: {} for same in wanted.values() for n in same}
    for source in sources:
        key, start = source.key, len(source.prefix)
        for row in source.rows():
            plain = plain_name(row.name)
            same = wanted.get(plain, ())
            if key:
                same = (*same, *wanted.get(plain[start:], ()))
            for name in same:
                # A file of the very name comes before those of other endings.
                if key not in hits[name] or row.name.endswith(name):
                    hits[name][key] = row
    for name, rows in hits.items():
        if len(rows) > 1:
            raise ValueError(
                f"{name!r} is in the corpora {', '.join(rows)}. Write {min(rows)}/{name} for "
                "one of them."
            )
    by_key = {source.key: source for source in sources}

    def look_up(name: str) -> tuple[Row | None, str, str]:
        """Give the row of a name, what of it is missing, and how it leads out."""
        row = next(iter(hits[name].values()), None)
        id_or_name = row.id if row else name
        source = by_key.get("" if "" in by_key else id_or_name.partition("/")[0])
        if source is None:
            others = (one._replace(key="") for one in sources if one.whose)
            named = (other.row_of(name) for other in others)
            row = next((row for row in named if row.speaker), None)
            return row, f"{name!r}, which none of {', '.join(by_key)} has", ""
        if row is None:
            rest = name.removeprefix(source.prefix)
            if source.whose is None:
                return None, f"{rest!r}, which {source.path} does not list", ""
            row = source.row_of(rest)
            if source.within and rest.startswith("/"):
                return row, "", "is absolute"
            if source.within and posixpath.normpath(rest).startswith("../"):
                return row, "", "has .."
        real = os.path.realpath(row.path) if source.within else ""
        if source.within and not is_below(real, source.within):
            return row, "", f"leads through a link to {real}"
        return row, "" if audio_exists(row.path) else row.wav, ""

    found = Found({}, {}, {})
    for name, looked in zip(hits, read_ahead(look_up, hits), strict=True):
        hit, missing, outside = looked
        if hit:
            found.rows[name] = hit
        if missing:
            found.missing[name] = missing
        if outside:
            found.outside[name] = outside
    return found


def is_below(path: str, folder: str | Path) -> bool:
    """Whether a real path is in a folder, behind its links."""
    real = os.path.realpath(folder)
    return path == real or path.startswith(real.rstrip("/") + "/")


def counted(number: int, thing: str) -> str:
    """Give a number and what it counts, in the singular or plural.

    Example
    -------
    >>> counted(1, "file"), counted(1200, "speaker")
    ('1 file', '1,200 speakers')
    """
    return f"{number:,} {thing}{'s' * (number != 1)}"


def are(number: int) -> str:
    """Give the verb of so many things."""
    return "is" if number == 1 else "are"


def read_ahead(
    read: Callable[[Item], Result],
    items: Collection[Item],
    *,
    ahead: int = AHEAD,
    together: int = 32,
) -> Iterator[Result]:
    """Read files by several threads, a bounded number ahead of the caller.

    Where the caller leaves before the end, only the files that are being read are waited
    for.

    Parameters
    ----------
    read : callable
        Takes one of the items.
    items : collection
        Of a million, tasks for all at once would take gigabytes.
    ahead : int
        How many are read or waiting at most, but for those of one task.
    together : int
        How many are one task of a thread at most: a task costs as much as a header from
        memory. Of few items, each thread has some.

    Yields
    ------
    object
        What ``read`` returns, in the order of the items.

    Example
    -------
    >>> list(read_ahead(str.upper, "abc", ahead=2))
    ['A', 'B', 'C']
    """
    stopped = Event()

    def task(some: Sequence[Item]) -> list[Result]:
        return [read(item) for item in some if not stopped.is_set()]

    waiting: deque[Future[list[Result]]] = deque()
    left = iter(items)
    together = min(together, -(-len(items) // THREADS))
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        try:
            while some := list(islice(left, together)):
                waiting.append(pool.submit(task, some))
                if len(waiting) * together >= ahead:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            stopped.set()
