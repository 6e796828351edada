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
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from threading import Event
from typing import NamedTuple, TypeVar

from speechbrain_rev.audio.segments import Segment, audio_exists

from .manifest import Cause, LeftOut

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Endings of what corpora are converted to.
LOSSLESS = (".wav", ".wave", ".flac")
#: What names of audio that is read end in, in small letters. libsndfile reads more, of which
#: other programs use the endings (.raw, .mat, .sd2) or which hold no speech.
AUDIO_SUFFIXES = (
    *LOSSLESS, ".ogg", ".oga", ".opus", ".mp3", ".m4a", ".aiff", ".aif", ".aifc", ".au",
    ".caf", ".w64", ".rf64", ".sph", ".nist",
)  # fmt: skip
#: What speech may come as, and is not read.
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
        Who speaks; None where nothing says it, as of noise.
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
        Gives the rows, lazily; puts what is left out into the list that it takes.
    whose : callable or None
        Gives speaker and session of a file's name; None where a list says it.
    outside_files : bool
        Whether names may lead out of the folder.
    key : str
        What stands before names and speakers of one of several; "" of one alone.
    given : str
        The path as the user gave it.
    """

    path: Path
    format: str
    read: Callable[[list[LeftOut]], Iterator[Row]]
    whose: Callable[[str], Whose] | None = None
    outside_files: bool = False
    key: str = ""
    given: str = ""

    @property
    def prefix(self) -> str:
        """What stands before names and speakers."""
        return f"{self.key}/" if self.key else ""

    def rows(self, left_out: list[LeftOut]) -> Iterator[Row]:
        """Give the rows, with the key before names and speakers."""
        prefix = self.prefix
        if not prefix:
            return self.read(left_out)
        return (
            row._replace(
                id=prefix + row.id,
                speaker=None if row.speaker is None else prefix + row.speaker,
            )
            for row in self.read(left_out)
        )


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
        By the names of the list; the file that another list names may be missing.
    missing : dict of str to str
        Which file or utterance is not there, by the names of the list.
    outside : dict of str to str
        How a name leads out of its folder, by the names of the list.
    folder : str
        Out of which names lead.
    """

    rows: dict[str, Row]
    missing: dict[str, str]
    outside: dict[str, str]
    folder: str

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
            leads = "name leads" if len(out) == 1 else "names lead"
            raise ValueError(
                f"{path}: {len(out)} {leads} out of {self.folder}, such as "
                f"{out[0]!r}, which {self.outside[out[0]]}. Correct the list; "
                "--outside_files reads them all the same (--outside_files=true of train.py)."
            )


def find_rows(
    sources: Sequence[Source],
    names: Iterable[str],
    rows: Iterable[Row] | None = None,
    left_out: Iterable[LeftOut] = (),
) -> Found:
    """Look up the names of a list, of which the ending and the Unicode form may differ.

    Parameters
    ----------
    sources : sequence of Source
        Where the names are. Of several, a name may lack the key where one alone has it.
    names : iterable of str
        In the list.
    rows, left_out : iterable of Row and of LeftOut, optional
        All of the sources, where they have been read.

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
        wanted.setdefault(_relative(sources, name), []).append(name)
    exact: dict[str, Row] = {}
    # By name and key, of names without a key.
    short: dict[str, dict[str, Row]] = {}
    if rows is None:
        read: list[LeftOut] = []
        rows, left_out = chain.from_iterable(s.rows(read) for s in sources), read
    several = len(sources) > 1
    for row in rows:
        plain = plain_name(row.name)
        for name in wanted.get(plain, ()):
            _keep(exact, name, row)
        if several:
            key, _, plain = plain.partition("/")
            for name in wanted.get(plain, ()):
                _keep(short.setdefault(name, {}), name, row, key)
    found = Found({}, {}, {}, ", ".join(source.given for source in sources))
    aside = _left_out(sources, left_out, wanted)
    for name in (name for same in wanted.values() for name in same):
        by_key = short.get(name, {})
        if name not in exact and len(by_key) > 1:
            keys = sorted(by_key)
            raise ValueError(
                f"{name!r} is in the corpora {', '.join(keys)}. Write {keys[0]}/{name} for "
                "one of them."
            )
        hit = exact.get(name) or next(iter(by_key.values()), None) or aside.get(name)
        if isinstance(hit, str):
            found.outside[name] = hit
        elif hit is not None:
            found.rows[name] = hit
        else:
            _take_other(sources, name, found)
    _check_listed(sources, found)
    return found


def _keep(rows: dict[str, Row], name: str, row: Row, key: str | None = None) -> None:
    """Keep the row of a name: the one of this very name, or the first."""
    key = name if key is None else key
    if key not in rows or row.name.endswith(name):
        rows[key] = row


def _relative(sources: Sequence[Source], name: str) -> str:
    """Give a name as it is looked up, also where it leads into the folder from outside."""
    plain = plain_name(name)
    if len(sources) == 1 and plain.startswith(("/", "../")):
        below = os.path.relpath(sources[0].path / plain, sources[0].path)
        return plain if below.startswith("../") else below
    return plain


def _left_out(
    sources: Sequence[Source],
    left_out: Iterable[LeftOut],
    wanted: Mapping[str, list[str]],
) -> dict[str, Row | str]:
    """Find names of what is no row: beside the speakers, or outside by a link."""
    found: dict[str, Row | str] = {}
    for one in left_out:
        if one.cause not in (Cause.OUTSIDE, Cause.BESIDE):
            continue
        for source in sources:
            if source.whose and Path(one.path).is_relative_to(source.path):
                inside = Path(one.path).relative_to(source.path).as_posix()
                for name in wanted.get(plain_name(source.prefix + inside), ()):
                    beside = one.cause is Cause.BESIDE
                    how = one.detail.removeprefix(f"{one.path} ")
                    found[name] = _row_of(source, inside) if beside else how
    return found


def _take_other(sources: Sequence[Source], name: str, found: Found) -> None:
    """Take a name that is no row: a file outside the folder, or one that is missing."""
    source, rest = _source_of(sources, name)
    if source is None:
        keys = ", ".join(one.key for one in sources)
        found.missing[name] = f"{name!r}, which none of {keys} has"
    elif source.whose is None:
        found.missing[name] = f"{rest!r}, which {source.path} does not list"
    elif (why := _leads_out(source, rest)) and not source.outside_files:
        found.outside[name] = why
    elif why and audio_exists(source.path / rest):
        found.rows[name] = _row_of(source, rest)
    else:
        found.missing[name] = str(source.path / rest)


def _source_of(sources: Sequence[Source], name: str) -> tuple[Source | None, str]:
    """Give the source that a name begins with, and the name in it."""
    if len(sources) == 1:
        return sources[0], name
    for source in sources:
        if name.startswith(source.prefix):
            return source, name.removeprefix(source.prefix)
    return None, name


def _leads_out(source: Source, name: str) -> str:
    """Say how a name leads out of its folder; nothing where it stays in."""
    if name.startswith("/"):
        return "is absolute"
    if posixpath.normpath(name).startswith("../"):
        return "has .."
    return ""


def _row_of(source: Source, name: str) -> Row:
    """Make the row of a file's name."""
    assert source.whose is not None
    stem, ending = posixpath.splitext(posixpath.normpath(name))
    speaker, session = source.whose(stem + ending)
    return Row(
        source.prefix + stem,
        str(source.path / name),
        None if speaker is None else source.prefix + speaker,
        session=session,
        ending=ending,
    )


def _check_listed(sources: Sequence[Source], found: Found) -> None:
    """Note which rows of lists have no file."""
    keys = {source.key for source in sources if source.whose is None}
    if not keys:
        return
    names = [n for n, r in found.rows.items() if _key_of(sources, r) in keys]
    there = read_ahead(lambda name: audio_exists(found.rows[name].path), names)
    for name, exists in zip(names, there, strict=True):
        if not exists:
            found.missing[name] = found.rows[name].wav


def _key_of(sources: Sequence[Source], row: Row) -> str:
    return "" if len(sources) == 1 else row.id.partition("/")[0]


def speaker_by_name(sources: Sequence[Source], name: str) -> str | None:
    """Give the speaker that a file's name says, where no such file need be there.

    Parameters
    ----------
    sources : sequence of Source
        Those whose names of files say it are asked.
    name : str
        Of a list.

    Returns
    -------
    str or None
        Without a key where the name has none.
    """
    plain = _relative(sources, name) + posixpath.splitext(name)[1]
    source, rest = _source_of(sources, plain)
    if source is not None:
        speaker = source.whose(rest)[0] if source.whose else None
        return None if speaker is None else source.prefix + speaker
    speakers = (source.whose(plain)[0] for source in sources if source.whose)
    return next(filter(None, speakers), None)


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
