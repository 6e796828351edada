"""Corpora: the audio of a folder, and whose it is.

A layout of a corpus is one class that follows `Corpus`, and its row of `CORPORA` in
`corpora`. All else (listing, preparation, validation trials, extraction) asks the corpus.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from heapq import nsmallest
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from threading import Event
from typing import ClassVar, Protocol, TypeVar

from speechbrain_rev.audio.packed import find_packed
from speechbrain_rev.audio.segments import audio_exists, bytes_of
from speechbrain_rev.lists import read_lines

from .manifest import Cause

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Files by which a folder is recognised, and which are packed with it.
LAYOUT_FILES = ("SPEAKERS.TXT", "dev/dev.lst")
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
# Names that may be of a folder that they do not begin with: with //, ./ or ../ in them.
_ODD = re.compile(r"(?:^|/)(?:/|\.|$)")
#: Threads that look for files or read them, and how many files they are ahead at most.
THREADS, AHEAD = 16, 1024
# A file of LibriSpeech without SPEAKERS.TXT, as in a packed folder.
_SUBSET = re.compile(r"(?:train|dev|test)-(?:clean|other)[^/]*/[^/]+/[^/]+/[^/]+$")
# The speaker of speaker_utterance.wav.
_FLAT = r"^([^/_]+)_[^/]+$"
_FLAT_WORDS = "speaker_utterance files in one folder"


def audio_files(
    folder: str | Path,
    suffixes: tuple[str, ...] = AUDIO_SUFFIXES,
    *,
    aside: list[Path] | None = None,
) -> list[Path]:
    """All files of audio below a folder, in sorted order.

    Without hidden ones, and without originals beside the WAV or FLAC that was made of them.

    Parameters
    ----------
    folder : str or Path
        Searched at any depth, links followed; or a packed folder.
    suffixes : tuple of str
        What their names end in, in small letters.
    aside : list of Path, optional
        Takes the files that are left out.

    Returns
    -------
    list of Path

    Raises
    ------
    ValueError
        If the folder does not exist, is no path or holds no such file.
    """
    folder = Path(folder)
    if files_below(folder) is None:
        raise ValueError(f"There is no folder {folder}. Give one with files of audio.")
    found = list(sorted_out(folder, suffixes))
    paths = [path for path, cause in found if cause is None]
    if aside is not None:
        aside += [path for path, cause in found if cause]
    if not paths:
        raise ValueError(
            f"There is no audio below {folder}: no name ends in "
            f"{', '.join(suffixes)}. Other formats must be converted first."
        )
    return sorted(paths)


def files_below(folder: str | Path) -> Iterable[Path] | None:
    """Find all files of a folder or a packed folder; None if it is neither.

    Parameters
    ----------
    folder : str or Path
        Searched at any depth, links followed.

    Returns
    -------
    iterable of Path, or None
        In a fixed order, files of one folder one after another. None if there is no
        such folder.
    """
    if inside := find_packed(folder):
        packed, name = inside
        if name in packed:
            return None
        return [Path(packed.folder, inside) for inside in packed.below(name)]
    return _below(Path(folder)) if Path(folder).is_dir() else None


def _below(folder: Path) -> Iterator[Path]:
    """Find files at any depth, through links as well."""
    # By folder, where the links are that led to it.
    links: dict[str, tuple[Path, ...]] = {}
    for inside, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        for name in sorted(files):
            path = Path(inside, name)
            # Files have an ending; folders of a disk that is not there have none.
            if not path.suffix and path.is_symlink() and not path.exists():
                raise FileNotFoundError(
                    f"{path} leads to {os.readlink(path)}, which is not there. Mount or "
                    "copy it, or delete the link."
                )
            yield path
        before = links.pop(inside, ())
        folders.sort()
        for path in [Path(inside, name) for name in folders]:
            way = before
            if path.is_symlink():
                here, there = Path(inside).resolve(), path.resolve()
                if here.is_relative_to(there):
                    # A link to a folder that it is in would lead round and round.
                    folders.remove(path.name)
                    continue
                if any(one.is_relative_to(there) for one in before):
                    raise ValueError(
                        f"{path} is a link to {there}, and a link in that leads back: the "
                        "same audio would be listed again and again. Delete one of them."
                    )
                way = (*before, here)
            if way:
                links[str(path)] = way


def _refuse(error: OSError) -> None:
    """Raise what os.walk would pass over: a folder that cannot be listed."""
    raise error


def originals(paths: Collection[Path]) -> set[Path]:
    """Find files of other kinds that were converted where they are.

    Parameters
    ----------
    paths : collection of Path
        Files of all kinds of audio.

    Returns
    -------
    set of Path
        Those that are neither WAV nor FLAC, beside which a WAV or FLAC has the same name.

    Example
    -------
    >>> originals([Path("a.m4a"), Path("a.wav"), Path("b.m4a")])
    {PosixPath('a.m4a')}
    """
    others = {path for path in paths if path.suffix.lower() not in LOSSLESS}
    if not others:
        return others
    converted = {path.with_suffix("") for path in paths if path not in others}
    return {path for path in others if path.with_suffix("") in converted}


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


class OutsideError(ValueError):
    """A name leads out of its corpus.

    Parameters
    ----------
    name : str
        Of a file.
    why : str
        How it leads out, in a few words.
    within : str or Path
        Where files may be.
    path : Path
        What it leads to.
    """

    def __init__(self, name: str, why: str, within: str | Path, path: Path) -> None:
        super().__init__(f"{name!r} {why}, out of {within}")
        self.why, self.within, self.path = why, within, path


def inside(root: Path, name: str, *, within: str | Path | None) -> Path:
    """Give the path of a name that does not lead out.

    Parameters
    ----------
    root : Path
        What the name is relative to.
    name : str
        Of a file, which need not exist.
    within : str, Path or None
        Where it must be, behind all links; None for anywhere.

    Returns
    -------
    Path

    Raises
    ------
    OutsideError
        If it leads out.

    Example
    -------
    >>> inside(Path("wav"), "id1/a.wav", within="wav").as_posix()
    'wav/id1/a.wav'
    """
    if within is not None and (why := _way_out(root, name, within)):
        raise OutsideError(name, why, within, root / name)
    return root / name


def _way_out(root: Path, name: str, within: str | Path) -> str:
    """Say how a name leads out; nothing where it stays in."""
    pure = PurePosixPath(name)
    if pure.is_absolute():
        return "is absolute"
    if ".." in pure.parts:
        return "has .."
    real, allowed = os.path.realpath(root / name), os.path.realpath(within)
    if os.path.commonpath([real, allowed]) != allowed:
        return f"leads through a link to {real}"
    return ""


class Corpus(Protocol):
    """A layout of a corpus: which audio there is, where, and whose.

    A class of a layout inherits from this one. It must have `layout`, `find`,
    `utterances`, `locate`, `speaker` and `session`; the other methods have defaults.

    Attributes
    ----------
    layout : str
        Where audio must lie, in a sentence for errors.
    speakers_in_names : bool
        Whether speaker and session follow from a file's name alone. Where a list has them,
        they belong to the digest: a changed list is another corpus.
    """

    layout: ClassVar[str] = ""
    speakers_in_names: ClassVar[bool] = False

    @classmethod
    def find(cls, folder: str | Path, *, outside_files: bool) -> Corpus | None:
        """Recognise the layout in a folder.

        Parameters
        ----------
        folder : str or Path
            As the user gave it; it is there.
        outside_files : bool
            Whether `locate` takes names and links that lead out of the folder.

        Returns
        -------
        Corpus or None
            None if the folder has another layout.
        """

    @property
    def format(self) -> str:
        """Return what the corpus was recognised as, in words."""
        return type(self).__name__

    @abstractmethod
    def utterances(self) -> Iterator[str]:
        """List the names of all files of audio, lazily, in a fixed order.

        Yields
        ------
        str
            A name. Audio of kinds that cannot be read is named too, so that nothing is
            dropped without being counted.
        """

    def audio(self) -> Iterator[tuple[str, Cause | None]]:
        """List all audio of the corpus, with the cause where it is no utterance.

        Yields
        ------
        name : str
        cause : Cause or None
            None for `utterances`.
        """
        yield from ((name, None) for name in self.utterances())

    @abstractmethod
    def locate(self, name: str) -> Path:
        """Give the file of a name.

        Parameters
        ----------
        name : str
            As `utterances` or a list has it.

        Returns
        -------
        Path
            It need not exist.

        Raises
        ------
        OutsideError
            If it leads out of the corpus.
        """

    @abstractmethod
    def speaker(self, name: str) -> str | None:
        """Give the speaker of a file, which need not exist; None if it has none."""

    @abstractmethod
    def session(self, name: str) -> str | None:
        """Give the session of a file, one of its speaker's; None if the layout has none."""

    def parts(self) -> Mapping[str, Corpus]:
        """Return the corpora that this one joins, by name; itself by "" if it is one."""
        return {"": self}

    def part(self, name: str) -> str:
        """Return which of the joined corpora a name is of."""
        return ""

    def also_known_as(self, speaker: str) -> str:
        """Give what a list of another corpus may call a speaker."""
        return speaker

    def entry(self, name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Give the ID of a file in the manifest, and further columns by name."""
        # An ID of a list may have a dot, and no ending.
        return (name.rsplit(".", 1)[0] if self.speakers_in_names else name), ()

    def digest(self, names: Iterable[str] | None = None) -> str:
        """Digest names, sizes and speakers: equal where a corpus has not changed.

        Parameters
        ----------
        names : iterable of str, optional
            In any order; all `utterances` by default.

        Returns
        -------
        str
            32 hexadecimal digits.
        """
        made = blake2b(digest_size=16)
        ordered = sorted(self.utterances() if names is None else names)
        sizes = read_ahead(lambda name: bytes_of(located(self, name)[0]), ordered)
        for name, size in zip(ordered, sizes, strict=True):
            made.update(os.fsencode(f"{name}\t{size}{self._whose(name)}\n"))
        return made.hexdigest()

    def _whose(self, name: str) -> str:
        """Name speaker and session of a file, unless its name does."""
        if self.speakers_in_names:
            return ""
        return f"\t{self.speaker(name)}\t{self.session(name)}"

    def folder_of(self, speaker: str) -> Path | None:
        """Give the folder that is a speaker's alone; None if the layout has none."""
        return None

    def lacks(self, name: str) -> str:
        """Say of a name that has no file which file that would be."""
        return str(located(self, name)[0])

    def remarks(self, names: Collection[str]) -> tuple[list[str], list[Path]]:
        """Look for what is unusual about how files lie.

        Parameters
        ----------
        names : collection of str
            All `utterances`.

        Returns
        -------
        warnings : list of str
            Sentences.
        beside : list of Path
            Files of audio in the folder that are beside the corpus.
        """
        return [], []


def located(corpus: Corpus, name: str) -> tuple[Path, OutsideError | None]:
    """Give the file of a name even if it leads out of the corpus.

    Parameters
    ----------
    corpus : Corpus
    name : str
        As of ``locate``.

    Returns
    -------
    path : Path
    error : OutsideError or None
        What ``locate`` raises.
    """
    try:
        return corpus.locate(name), None
    except OutsideError as error:
        return error.path, error


@dataclass(frozen=True)
class VoxCelebFolder(Corpus):
    """A folder of speakers' folders, with any number of folders down to the audio.

    Parameters
    ----------
    root : Path
        The folder of the speakers' folders; it may be in a packed folder.
    folder : str, Path or None
        The whole, out of which no name may lead; ``root`` by default.
    outside_files : bool
        Whether names and links may lead anywhere.
    speaker_from : int or str
        Which folder below the root is the speaker's, 1 for the first; or a regular
        expression that is searched in names, whose group (or whole match) is the speaker;
        of two groups they are called speaker and session.
    known_as : str
        What the layout was recognised as.
    speakers : frozenset of str or None
        Who belongs to the corpus; None for all.

    Example
    -------
    >>> corpus = VoxCelebFolder(Path("/data/wav"))
    >>> corpus.speaker("id1/video/a.wav"), corpus.session("id1/video/a.wav")
    ('id1', 'video')
    """

    root: Path
    folder: str | Path | None = None
    outside_files: bool = field(default=False, kw_only=True)
    speaker_from: int | str = field(default=1, kw_only=True)
    known_as: str = field(default="folders of speakers", kw_only=True)
    speakers: frozenset[str] | None = field(default=None, kw_only=True, repr=False)

    layout: ClassVar[str] = (
        "Accepted are DATA/wav/<speaker>/<session>/<utterance>.wav (.flac, .m4a, ...), and the same "
        "below dev/wav, dev/aac or aac, or with the speakers directly in DATA. Between "
        "speaker and utterance there may be any number of folders."
    )
    speakers_in_names: ClassVar[bool] = True
    _PLACES: ClassVar[tuple[str, ...]] = ("wav", "dev/wav", "dev/aac", "aac")
    # Folders from the speaker's to the file: VoxCeleb's.
    _USUAL_DEPTH: ClassVar[int] = 3

    @classmethod
    def find(cls, folder: str | Path, *, outside_files: bool) -> VoxCelebFolder | None:
        """Find the folder of the speakers' folders.

        Parameters
        ----------
        folder : str or Path
            As the user gave it.
        outside_files : bool
            As of the class.

        Returns
        -------
        VoxCelebFolder or None
            Its root is absolute: a run may go on, and be scored, in another working
            folder. None if there is no audio.

        Raises
        ------
        ValueError
            If there are several such folders, each of which would be taken for a speaker.
        """
        whole = Path(os.path.abspath(folder))
        made = partial(
            cls,
            folder=folder,
            outside_files=outside_files,
        )
        if (whole / "SPEAKERS.TXT").is_file() and cls._is_listed(whole):
            return made(whole, known_as="LibriSpeech", speaker_from=2)
        for place in ("wav48_silence_trimmed", "wav48"):
            if next(_seen_below(whole / place), None):
                return made(whole / place, known_as="VCTK")
        if (whole / "dev/dev.lst").is_file() and next(
            _seen_below(whole / "data"), None
        ):
            # data/ has the speakers of eval/ too.
            lines = read_lines(whole / "dev/dev.lst", "'speaker'")
            known = frozenset(line.strip() for line in lines)
            return made(whole / "data", known_as="CN-Celeb", speakers=known)
        for place in (*cls._PLACES, "."):
            root = whole / place
            first = next(_seen_below(root), None)
            if first is None:
                continue
            cls._refuse_corpora(folder, root)
            if place != ".":
                return made(root, known_as="VoxCeleb")
            if _SUBSET.match(first):
                return made(root, known_as="LibriSpeech", speaker_from=2)
            kinds = AUDIO_SUFFIXES + OTHER_SUFFIXES
            if "/" not in first and all(
                re.match(_FLAT, n) for n in _seen_below(root, kinds)
            ):
                return made(root, known_as=_FLAT_WORDS, speaker_from=_FLAT)
            return made(root)
        return None

    @staticmethod
    def _is_listed(whole: Path) -> bool:
        """Return whether LibriSpeech's list of speakers is of the folders beside it."""
        first = next(_seen_below(whole), "")
        text = (whole / "SPEAKERS.TXT").read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        listed = {line.partition("|")[0].strip() for line in lines}
        folders = first.split("/")[:-1]
        return bool(_SUBSET.match(first)) or bool(listed.intersection(folders[1:2]))

    @classmethod
    def _refuse_corpora(cls, given: str | Path, root: Path) -> None:
        """Refuse a folder of corpora, each of which would be taken for one speaker."""
        if not root.is_dir():
            return  # it is packed
        # A speaker's audio may lie in such a folder, too, without others in it.
        corpora = [
            below
            for path in sorted(root.iterdir())
            if not is_hidden(path.name)
            for below in (path / place for place in cls._PLACES)
            if below.is_dir() and any(inner.is_dir() for inner in below.iterdir())
        ]
        if corpora:
            raise ValueError(
                f"{given} holds folders of speakers' folders, such as "
                f"{', '.join(str(path.relative_to(root)) for path in corpora[:3])}: each "
                f"would be taken for one speaker. Give one of them. {cls.layout}"
            )

    def utterances(self) -> Iterator[str]:
        """List audio that is not hidden, without what was converted where it is.

        Yields
        ------
        str
            Relative to the root, with ``/`` between folders.
        """
        return (name for name, cause in self.audio() if cause is None)

    def audio(self) -> Iterator[tuple[str, Cause | None]]:
        """List all audio of the speakers, with the cause where it is no utterance.

        Yields
        ------
        name : str
        cause : Cause or None
            As of ``Corpus``.
        """
        for path, cause in sorted_out(self.root, AUDIO_SUFFIXES + OTHER_SUFFIXES):
            name = path.relative_to(self.root).as_posix()
            # What does not belong is beside the corpus.
            if self._belongs(name):
                yield name, cause

    def _belongs(self, name: str) -> bool:
        return self.speakers is None or self.speaker(name) in self.speakers

    @property
    def format(self) -> str:
        """Return what the layout was recognised as."""
        return self.known_as

    def locate(self, name: str) -> Path:
        """Give the file of a name.

        Parameters
        ----------
        name : str
            Relative to the root.

        Returns
        -------
        Path

        Raises
        ------
        OutsideError
            If it leads out of the folder, and ``outside_files`` is off.
        """
        whole = self.root if self.folder is None else self.folder
        return inside(self.root, name, within=None if self.outside_files else whole)

    def speaker(self, name: str) -> str | None:
        """Give the speaker of a name, the first folder unless `speaker_from` differs.

        Parameters
        ----------
        name : str
            Relative to the root, however it is spelt: ``./id1/a.wav`` and
            ``../wav/id1/a.wav`` are of id1.

        Returns
        -------
        str or None
            None if the file lies in no speaker's folder, or the pattern is not in it.
        """
        parts = self._parts(name)
        if isinstance(self.speaker_from, int):
            level = self.speaker_from
            return parts[level - 1] if len(parts) > level else None
        found = re.search(self.speaker_from, "/".join(parts))
        return found[_group(found)] or None if found else None

    def session(self, name: str) -> str | None:
        """Give the folders between the speaker's and the file.

        Where the speaker is searched in names, the group ``session`` of the expression, or
        the folders behind the one that names the speaker; all folders if the file does.

        Parameters
        ----------
        name : str
            Relative to the root.

        Returns
        -------
        str or None
            None if there are none.
        """
        parts = self._parts(name)
        if self.known_as == "CN-Celeb":
            # <speaker>/<genre>-<session>-<utterance>
            return parts[-1].rpartition("-")[0] or None
        level = self.speaker_from
        if isinstance(level, str):
            path = "/".join(parts)
            found = re.search(level, path)
            if found and "session" in found.re.groupindex:
                return found["session"] or None
            level = 1 + path.count("/", 0, found.start(_group(found))) if found else 0
            level = level if level < len(parts) else 0
        return "/".join(parts[level:-1]) or None

    def _parts(self, name: str) -> tuple[str, ...]:
        if not _ODD.search(name):
            return tuple(name.split("/"))  # 20 times as fast, and almost always so
        path = Path(os.path.normpath(self.root / name))
        if path.is_relative_to(self.root):
            return path.relative_to(self.root).parts
        return tuple(name.split("/"))

    def folder_of(self, speaker: str) -> Path | None:
        """Give the folder of a speaker; None where it is not the first of names."""
        return self.root / speaker if self.speaker_from == 1 else None

    def remarks(self, names: Collection[str]) -> tuple[list[str], list[Path]]:
        """Warn of unusual depths, and of audio beside the speakers' folders.

        Parameters
        ----------
        names : collection of str
            All utterances.

        Returns
        -------
        warnings : list of str
        beside : list of Path
        """
        usual = self.known_as in ("VoxCeleb", "folders of speakers")
        usual = usual and self.speaker_from == 1
        warnings = [self._unusual_depths(names), _nearly_flat(names)] if usual else []
        others = self._beside(names)
        if others:
            warnings.append(
                f"{len(others)} files of audio in {self.folder} are passed over: the "
                f"speakers' folders are in {self.root}, and they are not"
                f"{'' if self.speakers is None else ', or not in dev/dev.lst'}, such as "
                f"{', '.join(map(str, others[:3]))}."
            )
        return [*filter(None, warnings)], others

    def _unusual_depths(self, names: Iterable[str]) -> str:
        """Say at which depths speech lies, if that is not VoxCeleb's everywhere."""
        by_depth = defaultdict(list)
        for name in names:
            # What has no speaker is a problem of its own.
            if "/" in name:
                by_depth[name.count("/") + 1].append(name)
        if set(by_depth) <= {self._USUAL_DEPTH}:
            return ""
        depths = "; ".join(
            f"{len(names)} files at depth {depth}, such as "
            f"{', '.join(nsmallest(3, names))}"
            for depth, names in sorted(by_depth.items())
        )
        return (
            f"Speech below {self.root} does not lie in <speaker>/<session>/ alone. The "
            f"first folder is taken for the speaker: {depths}."
        )

    def _is_here(self, path: Path) -> bool:
        if not path.is_relative_to(self.root):
            return False
        return self._belongs(path.relative_to(self.root).as_posix())

    def _beside(self, names: Iterable[str]) -> list[Path]:
        """Find audio of the whole folder that is not below the root, nor linked there."""
        whole = self.root if self.folder is None else Path(os.path.abspath(self.folder))
        if whole == self.root:
            return []
        audio = audio_below(whole, AUDIO_SUFFIXES + OTHER_SUFFIXES)
        others = [path for path in audio if not self._is_here(path)]
        if others:
            used = {(self.root / name).parent for name in names}
            real = {os.path.realpath(folder) for folder in used}
            others = [p for p in others if os.path.realpath(p.parent) not in real]
        return sorted(others)


def _group(found: re.Match[str]) -> int | str:
    """Give the group of a match that is the speaker: of that name, the one, or all."""
    if "speaker" in found.re.groupindex:
        return "speaker"
    return min(found.re.groups, 1)


def is_hidden(name: str) -> bool:
    """Return whether a relative name is of a hidden file, or of one in a hidden folder."""
    return name.startswith(".") or "/." in name


def _seen_below(
    root: Path, suffixes: tuple[str, ...] = AUDIO_SUFFIXES
) -> Iterator[str]:
    """Find audio that is not hidden: its names below the root."""
    names = (p.relative_to(root).as_posix() for p in audio_below(root, suffixes))
    return (name for name in names if not is_hidden(name))


def _nearly_flat(names: Collection[str]) -> str:
    """Name what keeps a folder from being one of speaker_utterance files."""
    flat = {name for name in names if "/" not in name and re.match(_FLAT, name)}
    others = [name for name in names if name not in flat] if flat else []
    if not others or len(flat) < len(others):
        return ""
    return (
        f"{len(flat)} of {len(names)} files are {_FLAT_WORDS}, but {min(others)} is not one: "
        "no speaker is read from names. Move such files away, or set speaker_from."
    )


def audio_below(
    root: Path, suffixes: tuple[str, ...] = AUDIO_SUFFIXES
) -> Iterator[Path]:
    """Find audio at any depth, in packed folders too."""
    paths = files_below(root) or ()
    return (path for path in paths if path.suffix.lower() in suffixes)


def sorted_out(
    root: Path, suffixes: tuple[str, ...]
) -> Iterator[tuple[Path, Cause | None]]:
    """Find audio at any depth, with the cause where it is not used."""
    if find_packed(root):
        root = Path(os.path.abspath(root))
    audio = audio_below(root, suffixes)
    for _, group in groupby(audio, key=lambda path: path.parent):
        paths = list(group)
        converted = originals(paths)
        for path in paths:
            cause = Cause.ORIGINAL if path in converted else None
            hidden = is_hidden(path.relative_to(root).as_posix())
            yield path, Cause.HIDDEN if hidden else cause


def find_audio(path: Path) -> Path | None:
    """Find the file of a path, or one of another extension of audio; None if none is."""
    if audio_exists(path):
        return path
    if path.suffix.lower() not in AUDIO_SUFFIXES + OTHER_SUFFIXES:
        return None
    for suffix in (*AUDIO_SUFFIXES, *(s.upper() for s in AUDIO_SUFFIXES)):
        if audio_exists(path.with_suffix(suffix)):
            return path.with_suffix(suffix)
    return None
