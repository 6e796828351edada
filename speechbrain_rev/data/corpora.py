"""Which corpus `data_folder` is: a list, a folder, or several; which files lists name.

A layout of a corpus is a class that follows `Corpus`, and its row of `CORPORA`.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path, PurePosixPath
from typing import ClassVar, TypeAlias

from speechbrain_rev.audio.packed import SUFFIX, find_packed
from speechbrain_rev.audio.segments import audio_exists
from speechbrain_rev.lists import is_listable

from .corpus import (
    AUDIO_SUFFIXES,
    OTHER_SUFFIXES,
    Corpus,
    OutsideError,
    VoxCelebFolder,
    audio_below,
    audio_files,
    find_audio,
    located,
    read_ahead,
)
from .formats import CHANNELS, FORMATS, Row

#: A folder or list, or several.
Folders: TypeAlias = str | Path | Sequence[str | Path]


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
        "perhaps segments), WeSpeaker's raw.list or shard.list, or a cut set of lhotse "
        "(.jsonl, .jsonl.gz)."
    )

    @classmethod
    def find(cls, folder: str | Path, *, outside_files: bool) -> ListedCorpus | None:
        """Read the list that is given; its audio may be anywhere.

        Parameters
        ----------
        folder : str or Path
            The list, or its folder.
        outside_files : bool
            A list names its files wherever they are.

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
                with _uncollected():
                    return cls(path, name, cls._by_name(path, known.read(path)))
        return None

    @staticmethod
    def _by_name(path: Path, rows: Iterable[Row]) -> dict[str, Row]:
        by_name: dict[str, Row] = {}
        # By hashes, for rows are many.
        by_audio: dict[int, Row] = {}
        called, speakers = str(path), set[str]()
        for number, row in enumerate(rows, start=1):
            place = f"{called}, utterance {number} ({row.ID!r})"
            if not row.speaker:
                also = ", ".join(name for name, _ in row.labels)
                raise ValueError(
                    f"{place}: it has no speaker. Give one (spk_id of SpeechBrain, spk of "
                    "WeSpeaker, utt2spk of Kaldi, speaker of lhotse's supervision), or leave "
                    f"it out.{f' Its further columns are {also}.' if also else ''}"
                )
            other = by_name.setdefault(row.ID, row)
            if other is not row:
                whose = f"of {other.speaker!r} and of {row.speaker!r}"
                raise ValueError(
                    f"{place}: the utterance is listed twice, {whose}. Leave one."
                )
            if row.speaker not in speakers and not is_listable(row.speaker):
                raise ValueError(
                    f"{place}: the speaker {row.speaker!r} has a tab or a line break. "
                    "Rename it."
                )
            speakers.add(row.speaker)
            file = str(row.file)
            _refuse_unwritable(row, place)
            # A path takes long to hash.
            audio = hash((file, row.start, row.samples, row.channel))
            other = by_audio.setdefault(audio, row)
            if other.speaker != row.speaker and other.audio == row.audio:
                raise ValueError(
                    f"{place}: it is the same audio as {other.ID!r}, of {other.speaker!r} "
                    f"and of {row.speaker!r}. Leave one."
                )
        if not by_name:
            raise ValueError(f"{path} lists no utterance.")
        return by_name

    def _whose(self, name: str) -> str:
        whose = super()._whose(name)
        if row := self.rows.get(name):
            whose += f"\t{row.start}+{row.samples}"
            whose += "" if row.channel is None else f"@{row.channel}"
            whose += f"\t{row.labels}" if row.labels else ""
        return whose

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

    def entry(self, name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Give the ID, and what else the list says of it, by name."""
        row = self.rows.get(name)
        return name, () if row is None else row.labels

    def lacks(self, name: str) -> str:
        """Say which file is missing, or that the list has no such ID."""
        if name not in self.rows:
            return f"{name!r}, which {self.path} does not list"
        return super().lacks(name)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Delay garbage collection, which would go through millions of rows many times."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _refuse_unwritable(row: Row, place: str) -> None:
    """Refuse names that no list could hold."""
    for text in (row.ID, row.speaker or "", *(x for pair in row.labels for x in pair)):
        # Half of a pair, which JSON can write and UTF-8 cannot.
        if not text.isascii() and any("\ud800" <= x <= "\udfff" for x in text):
            raise ValueError(
                f"{place}: {text!r} is no text that UTF-8 can write. Rename it."
            )


def list_files(folders: Folders) -> list[Path]:
    """Give the files that say what is in a data folder, where it is a list.

    Parameters
    ----------
    folders : str, Path or sequence of them
        As of ``open_corpus``.

    Returns
    -------
    list of Path
        Of a folder of audio none.

    Example
    -------
    >>> list_files(getfixture("tmp_path"))
    []
    """
    if not isinstance(folders, str | Path):
        return [file for folder in folders for file in list_files(folder)]
    path = Path(os.path.abspath(folders))
    if path.is_file():
        return [path]
    kaldis = "wav.scp", "utt2spk", "segments", CHANNELS
    tables = [path / name for name in kaldis]
    return [file for file in tables if file.is_file()] if tables[0].is_file() else []


#: Layouts by name. A folder is of the first that recognises it: those that ask for more
#: come first.
CORPORA: dict[str, type[Corpus]] = {"Lists": ListedCorpus, "VoxCeleb": VoxCelebFolder}


@dataclass(frozen=True)
class JoinedCorpus(Corpus):
    """Several corpora, whose speakers are kept apart.

    Names and speakers begin with that of the corpus: ``vox1/id10001/s/1.wav`` is of
    ``vox1/id10001``. A name without it is taken where one corpus alone has that file.

    Parameters
    ----------
    members : mapping of str to Corpus
        By name.
    """

    members: Mapping[str, Corpus]

    @classmethod
    def of(cls, corpora: Mapping[str, Corpus], option: str) -> JoinedCorpus:
        """Join the corpora of folders, which were given as an option and must not overlap.

        Raises
        ------
        ValueError
            If one folder lies in another: its speakers would be two.
        """
        real = {folder: os.path.realpath(folder) for folder in corpora}
        for one, other in permutations(real, 2):
            if Path(real[one]).is_relative_to(real[other]):
                raise ValueError(
                    f"{option} has {other} and {one}, which is in it: its speakers would "
                    "be two each. Leave one."
                )
        names = dict(zip(corpora, _apart(list(corpora), option), strict=True))
        return cls({names[folder]: corpus for folder, corpus in corpora.items()})

    def parts(self) -> Mapping[str, Corpus]:
        """Return the corpora by name."""
        return self.members

    def part(self, name: str) -> str:
        """Return which corpus a name is of, the first if none has it."""
        return self._of(name)[0] or next(iter(self.members))

    @property
    def format(self) -> str:
        """Return the formats of all."""
        return ", ".join(corpus.format for corpus in self.members.values())

    def _of(self, name: str) -> tuple[str, Corpus, str]:
        """Find the key and corpus of a name, and the name in it; "" if none has it."""
        first, _, rest = name.partition("/")
        if rest and first in self.members:
            return first, self.members[first], rest
        having = []
        for key, corpus in self.members.items():
            path, error = located(corpus, name)
            if error is None and find_audio(path):
                having.append((key, corpus, name))
        if len(having) > 1:
            keys = [key for key, *_ in having]
            raise ValueError(
                f"{name!r} is in the corpora {', '.join(keys)}. Write {keys[0]}/{name} for "
                "one of them."
            )
        return having[0] if having else ("", next(iter(self.members.values())), name)

    def utterances(self) -> Iterator[str]:
        """List the names of one corpus after the other."""
        for key, corpus in self.members.items():
            yield from (f"{key}/{name}" for name in corpus.utterances())

    def locate(self, name: str) -> Path:
        """Give the file of a name, with or without its corpus."""
        _, corpus, rest = self._of(name)
        return corpus.locate(rest)

    def speaker(self, name: str) -> str | None:
        """Give the speaker of a name; without a corpus where no corpus has the file."""
        key, corpus, rest = self._of(name)
        if not key:
            speakers = (corpus.speaker(name) for corpus in self.members.values())
            return next(filter(None, speakers), None)
        speaker = corpus.speaker(rest)
        return None if speaker is None else f"{key}/{speaker}"

    def session(self, name: str) -> str | None:
        """Give the session in its corpus."""
        _, corpus, rest = self._of(name)
        return corpus.session(rest)

    def entry(self, name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Give the ID in its corpus, behind the name of that, and the labels."""
        key, corpus, rest = self._of(name)
        ID, labels = corpus.entry(rest)
        return f"{key}/{ID}", labels

    def _whose(self, name: str) -> str:
        key, corpus, rest = self._of(name)
        return corpus._whose(rest) if key else ""

    def also_known_as(self, speaker: str) -> str:
        """Give the speaker's name in the corpus."""
        return speaker.partition("/")[2] or speaker

    def folder_of(self, speaker: str) -> Path | None:
        """Give the speaker's folder in the corpus."""
        key, _, rest = speaker.partition("/")
        return self.members[key].folder_of(rest) if key in self.members else None

    def lacks(self, name: str) -> str:
        """Say which file of its corpus is missing, or that none has it."""
        key, corpus, rest = self._of(name)
        if not key:
            return f"{name!r}, which none of {', '.join(self.members)} has"
        return corpus.lacks(rest)


def _apart(folders: Sequence[str], option: str) -> list[str]:
    """Name folders and lists by their last parts, as many as distinguish them."""
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    # A folder that is packed, and a list, is called as without its ending.
    for called in (_stem, lambda path: path.name):
        parts = [(*path.parts[:-1], called(path)) for path in paths]
        for depth in range(1, max(map(len, parts)) + 1):
            names = ["-".join(one[-depth:]).replace("/", "") for one in parts]
            if len(set(names)) == len(names):
                return names
    raise ValueError(
        f"{option} has {', '.join(folders)}, which have the same name. Rename one."
    )


def _stem(path: Path) -> str:
    name = path.name.partition(".")[0] if path.is_file() else path.name
    return name.removesuffix(SUFFIX) or path.name


def absolute(folders: Folders) -> str | list[str]:
    """Give the absolute path of a folder, or those of several.

    Example
    -------
    >>> absolute(["/data/a", "/data/x/../b"])
    ['/data/a', '/data/b']
    """
    if isinstance(folders, str | Path):
        return os.path.abspath(folders)
    return [os.path.abspath(folder) for folder in folders]


def noise_files(folder: str | Path, *, aside: list[Path] | None = None) -> list[Path]:
    """List audio of noise or room impulse responses, which has no speakers.

    Parameters
    ----------
    folder : str or Path
        A folder of audio at any depth, packed or not, or a list of one of ``FORMATS``.
    aside : list of Path, optional
        Takes hidden files and originals of a folder, as of ``audio_files``.

    Returns
    -------
    list of Path
        Sorted.

    Raises
    ------
    ValueError
        If there is none, or a row of the list cannot be used.

    Example
    -------
    >>> path = getfixture("tmp_path") / "noise.list"
    >>> _ = path.write_text('{"key": "hum", "wav": "/noise/hum.wav"}')
    >>> noise_files(path)
    [PosixPath('/noise/hum.wav')]
    """
    path = Path(os.path.abspath(folder))
    for known in FORMATS.values():
        if known.recognises(path):
            rows = list(known.read(path))
            if not rows:
                raise ValueError(f"{path} lists no audio.")
            return sorted(row.path() for row in rows)
    return audio_files(folder, aside=aside)


def open_corpus(
    folder: Folders,
    option: str = "data_folder",
    *,
    outside_files: bool = False,
    speaker_from: int | str | None = None,
) -> Corpus:
    """Recognise the corpus in a folder, or those in several.

    Parameters
    ----------
    folder : str, Path or sequence of them
        As given by the user: of audio, of a list, or packed; or a list. Of several, names
        and speakers begin with the folder's name, or with as much of its path as
        distinguishes them.
    option : str
        What it is given as, for errors.
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
        If there is none, which names the layouts, or one of several lies in another.

    Example
    -------
    >>> path = getfixture("tmp_path") / "wav" / "id1" / "video" / "a.wav"
    >>> path.parent.mkdir(parents=True); path.touch()
    >>> corpus = open_corpus(getfixture("tmp_path"))
    >>> [(name, corpus.speaker(name)) for name in corpus.utterances()]
    [('id1/video/a.wav', 'id1')]
    """
    if not isinstance(folder, str | Path):
        several = {
            str(one): open_corpus(
                one,
                option,
                outside_files=outside_files,
                speaker_from=speaker_from,
            )
            for one in folder
        }
        if len(several) < len(folder) or not several:
            raise ValueError(
                f"{option} is {list(map(str, folder))}. Give each folder or list once."
            )
        one, *others = several.values()
        return JoinedCorpus.of(several, option) if others else one
    layouts = " ".join(corpus.layout for corpus in CORPORA.values())
    path = Path(os.path.abspath(folder))
    if find_packed(path) is None and not path.exists():
        raise ValueError(
            f"The data folder {folder} does not exist. Give the folder of "
            f"VoxCeleb, or of your speech, as {option}."
        )
    for corpus in CORPORA.values():
        opened = corpus.find(folder, outside_files=outside_files)
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
            f"{folder} holds {other.suffix} files, which cannot be read. "
            f"Convert each: ffmpeg -i IN{other.suffix} -ar 16000 -ac 1 OUT.flac. "
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
        If a layout recognises it in which names of files do not hold the speaker.
    """
    for name, layout in CORPORA.items():
        if not layout.speakers_in_names and layout.find(folder, outside_files=False):
            raise ValueError(
                f"{folder} is a corpus in {name}'s layout, whose lists name the speakers; "
                "only audio would be packed. Give it as it is, or pack its folder of audio."
            )


@dataclass(frozen=True)
class ListedFiles:
    """What there is of the files that a list names.

    Attributes
    ----------
    names : dict of str to str
        What files are called, by the names of the list; the extension may differ.
    paths : dict of str to Path
        The files, by the names of the list.
    missing : dict of str to Path
        Where there is no file, by the names of the list.
    outside : dict of str to OutsideError
        Why a name leads out of the corpus, by the names of the list.
    example : str
        Which of the missing is the first, in words.
    """

    names: Mapping[str, str]
    paths: Mapping[str, Path]
    missing: Mapping[str, Path]
    outside: Mapping[str, OutsideError]
    example: str = ""

    def lacking(self) -> str:
        """Say how many are missing, and the first."""
        if not self.missing:
            return ""
        return (
            f"{len(self.missing)} of {len(self.paths) + len(self.missing)} files are "
            f"missing, such as {self.example}."
        )

    def refuse_outside(self, path: str | Path, names: Iterable[str]) -> None:
        """Refuse a list whose names lead out of the corpus.

        Parameters
        ----------
        path : str or Path
            The list.
        names : iterable of str
            In it.

        Raises
        ------
        ValueError
            It counts them and names the first.
        """
        out = [name for name in names if name in self.outside]
        if out:
            error = self.outside[out[0]]
            raise ValueError(
                f"{path}: {len(out)} names lead out of {error.within}, such as "
                f"{out[0]!r}, which {error.why}. Correct the list; --outside_files reads "
                "them all the same (--outside_files=true of train.py)."
            )


def find_files(corpus: Corpus, names: Collection[str]) -> ListedFiles:
    """Find the files that a list names, or those of another extension if they alone are there.

    Parameters
    ----------
    corpus : Corpus
        Of the list.
    names : collection of str
        In the list.

    Returns
    -------
    ListedFiles
    """
    # Rows of a manifest name their files exactly.
    names_are_paths = any(part.speakers_in_names for part in corpus.parts().values())

    def look(name: str) -> tuple[Path, OutsideError | None, bool]:
        path, error = located(corpus, name)
        if error is None and names_are_paths:
            path = find_audio(path) or path
        return path, error, audio_exists(path)

    looked = dict(zip(names, read_ahead(look, names), strict=True))
    paths = {name: path for name, (path, _, there) in looked.items() if there}
    missing = {name: path for name, (path, _, there) in looked.items() if not there}
    return ListedFiles(
        {name: _as_there(name, path) for name, path in paths.items()},
        paths,
        missing,
        {name: error for name, (_, error, _) in looked.items() if error},
        corpus.lacks(next(iter(missing))) if missing else "",
    )


def _as_there(name: str, path: Path) -> str:
    """Give a name the extension of its file, if it has that of another kind of audio."""
    suffix = PurePosixPath(name).suffix
    if suffix.lower() not in AUDIO_SUFFIXES + OTHER_SUFFIXES or suffix == path.suffix:
        return name
    return name.removesuffix(suffix) + path.suffix
