"""Lists of utterances: one function a format reads its rows.

A format is a function `read_x(path)` that yields rows, one that recognises it, and a row of
`FORMATS`. Rows of noise need no speaker.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar

from speechbrain_rev.audio.reading import AudioInfo, audio_info
from speechbrain_rev.audio.shards import SUFFIX, Member, open_tar
from speechbrain_rev.files import parse_json, refusing
from speechbrain_rev.lists import each_line, read_lines

from .manifest import RESERVED
from .rows import ALL_SUFFIXES, Row, counted

Item = TypeVar("Item")

# The rate of a recording that cannot be read; the check of files reports it.
_ANY_RATE = 16000
# Seconds by which equal times of a cut and of its supervision may differ.
_ROUNDED = 0.01
# No recording is as many seconds long: 30 years.
_LONGEST = 1e9
# No speech has fewer samples per second.
_LOWEST_RATE = 1000
#: The table of a Kaldi directory that names channels of recordings.
CHANNELS = "reco2file_and_channel"
_LETTERS = tuple("ABCDEFGH")
# Bytes of a name that are read, and what lines of a list of tars end in.
_MOST_OF_NAME = 4096
_TARS = (b".tar", b".tar.gz", b".tgz", b".tar.bz2", b".tar.xz", b".tar.zst")


def _path_of(folder: Path, wav: str) -> str:
    """Give the path of a file that is relative to a list's folder, or absolute."""
    path = wav if wav.startswith("/") else f"{folder}/{wav}"
    # A Path of each of a million takes seconds.
    return str(Path(path)) if "//" in path or "/." in path else path


def _listed_row(
    name: str,
    path: str,
    speaker: str | None,
    start: int = 0,
    samples: int | None = None,
    *,
    session: str | None = None,
    channel: int | None = None,
    labels: tuple[tuple[str, str], ...] = (),
) -> Row:
    """Make the row of an utterance; its file is its session where the list has none."""
    return Row(name, path, speaker, start, samples, channel, session or path, labels)


def _made(
    rows: Iterable[tuple[str, Item]], make: Callable[[Item], Row]
) -> Iterator[Row]:
    """Make rows of what stands at places; an error names its place."""
    for place, given in rows:
        try:
            row = make(given)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"{place}: a field is missing or of another kind ({error!r}). Write it again."
            ) from error
        yield row


def read_speechbrain(path: Path) -> Iterator[Row]:
    r"""Read a manifest of SpeechBrain: ID, wav, spk_id, and perhaps start and stop.

    Parameters
    ----------
    path : Path
        A CSV file with these columns, or a JSON file of an object for each ID. Start and
        stop are in samples, as SpeechBrain's recipes write them. ``$data_root``,
        ``{data_root}`` and what is relative are in the manifest's folder. ``session`` and
        ``channel`` may be there too; further columns are labels.

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
    return _made(_speechbrain_rows(path), partial(_speechbrain_row, path.parent))


def _speechbrain_row(folder: Path, given: Mapping[str, Any]) -> Row:
    wav = _text(given, "wav")
    if "data_root" in wav:
        for root in ("$data_root", "{data_root}"):
            wav = wav.replace(root, str(folder))
    start, stop = _whole_number(given, "start") or 0, _whole_number(given, "stop")
    samples = None if stop is None else stop - start
    if samples is not None:
        if samples <= 0:
            raise ValueError(
                f"start is {start} and stop {stop}. An utterance ends behind its start; "
                "correct them."
            )
        _refuse_seconds(given.get("duration"), samples)
    return _listed_row(
        _text(given, "ID"),
        _path_of(folder, wav),
        _who(given.get("spk_id")),
        start,
        samples,
        session=_who(given.get("session")),
        channel=_whole_number(given, "channel"),
        labels=_labels(given, _SPEECHBRAINS),
    )


def _refuse_seconds(duration: object, samples: int) -> None:
    """Refuse start and stop that would be samples of a rate that no speech has."""
    try:
        seconds = float(str(duration))
    except ValueError:
        return
    if 0 < seconds < math.inf and samples < _LOWEST_RATE * seconds:
        raise ValueError(
            f"stop - start is {samples} and duration {seconds:g} s. start and stop are in "
            "samples; correct them, or leave both out."
        )


def _speechbrain_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Give the fields of each row, and where it stands."""
    text = "\n".join(each_line(path, "ID,duration,wav,start,stop,spk_id"))
    if path.suffix.lower() == ".json":
        for name, given in _json(text, str(path)).items():
            fields = given if isinstance(given, dict) else {}
            yield f"{path}, {name!r}", {**fields, "ID": name}
        return
    # A dictionary of csv.DictReader takes three times as long.
    table = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = next(table, [])
        if lacking := {"ID", "wav"} - set(columns):
            raise ValueError(
                f"{path} has the columns {columns}, without {sorted(lacking)}. A "
                "manifest of SpeechBrain has ID, duration, wav, start, stop and spk_id."
            )
        if twice := sorted({name for name in columns if columns.count(name) > 1}):
            raise ValueError(f"{path} has the column {twice[0]!r} twice. Rename one.")
        for row in filter(None, table):
            place = f"{path}, line {table.line_num}"
            if len(row) != len(columns):
                raise ValueError(
                    f"{place} has other fields than the header. Put names with commas in "
                    "quotes."
                )
            yield place, dict(zip(columns, row, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {table.line_num}: it is no CSV ({error}). Write it again."
        ) from error


# Names of fields that say which part of a file is meant, where they are not read.
_TIMES = frozenset(("start", "stop", "begin", "end", "offset", "vad"))
_SPEECHBRAINS = frozenset(
    ("ID", "duration", "length", "wav", "wav_format", "wav_opts", "start", "stop", "spk_id",
     "session", "channel")
)  # fmt: skip


def read_kaldi(path: Path) -> Iterator[Row]:
    r"""Read a directory of Kaldi: wav.scp, utt2spk, perhaps segments and channels.

    Parameters
    ----------
    path : Path
        The directory. Paths of wav.scp that are relative are in it. Times of segments are
        seconds, rounded to samples of the recording; an end of -1 is the recording's. Of
        files of several channels, that of ``reco2file_and_channel`` is read.

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
    >>> [(row.id, row.speaker) for row in read_kaldi(folder)]
    [('u1', 'ann')]
    """
    table = _kaldi_table(path / "wav.scp", "'recording file'", _no_command)
    recordings = {name: _path_of(path, wav) for name, (wav, _) in table.items()}
    # Noise has none.
    speakers, named = {}, (path / "utt2spk").exists()
    if named:
        speakers = _kaldi_table(path / "utt2spk", "'utterance speaker'", _one_field)
    of_whom = speakers if named else dict.fromkeys(recordings, ("", str(path)))
    parts: dict[str, tuple[_KaldiPart, str]] = {
        name: ((name, None, None), place) for name, (_, place) in of_whom.items()
    }
    if (path / "segments").is_file():
        form = "'utterance recording start end'"
        parts = _kaldi_table(path / "segments", form, _kaldi_part)
    elif silent := recordings.keys() - of_whom.keys():
        raise ValueError(
            f"{path / 'utt2spk'} has no speaker of {min(silent)!r} of wav.scp. Add a line "
            "for it, or take it out of wav.scp."
        )
    if lacking := speakers.keys() - parts.keys():
        raise ValueError(
            f"{path / 'segments'} has no line of {min(lacking)!r} of utt2spk. Add one."
        )
    channels: dict[str, tuple[int, str]] = {}
    if (path / CHANNELS).is_file():
        form = "'recording file channel'"
        channels = _kaldi_table(path / CHANNELS, form, _kaldi_channel)

    def row(given: tuple[str, _KaldiPart]) -> Row:
        name, (recording, start, end) = given
        if recording not in recordings:
            raise ValueError(f"wav.scp has no {recording!r}. Add a line for it.")
        if named and name not in speakers:
            raise ValueError(f"utt2spk has no speaker of {name!r}. Add a line.")
        file, speaker = recordings[recording], speakers[name][0] if named else None
        channel = channels[recording][0] if recording in channels else None
        if channel is not None and (header := _header(file)) and header.channels == 1:
            # The file was made of that channel.
            channel = None
        if start is None:
            return _listed_row(name, file, speaker, channel=channel)
        rate = header.sample_rate if (header := _header(file)) else _ANY_RATE
        first = round(start * rate)
        samples = None if end is None else round(end * rate) - first
        return _listed_row(name, file, speaker, first, samples, channel=channel)

    yield from _made(((place, (name, x)) for name, (x, place) in parts.items()), row)


# A recording, with start and end in seconds: None for all of it, and for its end.
_KaldiPart: TypeAlias = tuple[str, float | None, float | None]


def _kaldi_table(
    path: Path, form: str, take: Callable[[str], Item]
) -> dict[str, tuple[Item, str]]:
    """Take the rest of each line, and where it stands, by its first word."""
    if not path.is_file():
        raise ValueError(
            f"There is no {path}. A Kaldi directory has wav.scp and utt2spk."
        )
    table: dict[str, tuple[Item, str]] = {}
    lines = read_lines(path, form)
    for number, line in enumerate(lines, start=1):
        place = f"{path}, line {number}"
        if not line.strip():
            raise ValueError(f"{place} is blank. Lines are {form}; delete it.")
        name, *rest = line.split(maxsplit=1)
        if not rest:
            raise ValueError(f"{place}: {line[:60]!r} has one field. Lines are {form}.")
        text = rest[0].strip()
        if name in table:
            raise ValueError(f"{place}: {name!r} is there twice. Leave the right line.")
        try:
            table[name] = take(text), place
        except ValueError as error:
            raise ValueError(f"{place}: {error}. Lines are {form}.") from error
    if not table:
        raise ValueError(f"{path} is empty. Lines are {form}.")
    return table


def _no_command(wav: str) -> str:
    if wav.startswith("|") or wav.endswith("|"):
        raise ValueError(
            f"{wav[:60]!r} is a command, and is not run. Write its output into a file and "
            "list that (wav-copy scp:wav.scp 'ark,scp:...' of Kaldi)"
        )
    return wav


def _one_field(speaker: str) -> str:
    if len(speaker.split()) > 1:
        raise ValueError(f"{speaker[:60]!r} is more than one field")
    return speaker


def _kaldi_channel(text: str) -> int:
    """Give the channel that is the last field, from 0 on."""
    channel = text.split()[-1]
    if channel in _LETTERS:
        return _LETTERS.index(channel)
    if channel.isdecimal() and int(channel):
        return int(channel) - 1
    raise ValueError(
        f"the channel is {channel[:60]!r}. Channels are A, B, ... or 1, 2, ..."
    )


def _kaldi_part(text: str) -> _KaldiPart:
    """Give a segment of a recording."""
    recording, *times = text.split()
    start, end = map(float, times)
    if not (0 <= start < _LONGEST and (end == -1 or start < end < _LONGEST)):
        raise ValueError(f"it goes from {start:g} s to {end:g} s")
    return recording, start, None if end == -1 else end


@lru_cache(maxsize=4096)
def _header(file: str) -> AudioInfo | None:
    """Read a header; None of a file whose problem is reported when it is checked."""
    try:
        return audio_info(file, estimate=True)
    except (ValueError, OSError, ImportError):
        return None


def read_wespeaker(path: Path) -> Iterator[Row]:
    r"""Read WeSpeaker's raw.list: a line of JSON with key, wav and spk an utterance.

    Parameters
    ----------
    path : Path
        The list. What is relative is in its folder. Further keys are labels.

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
    >>> [(row.id, row.speaker) for row in read_wespeaker(path)]
    [('u1', 'ann')]
    """
    form = '{"key": ..., "wav": ..., "spk": ...}'
    return _made(
        _objects(path, read_lines(path, form)), partial(_wespeaker_row, path.parent)
    )


def _wespeaker_row(folder: Path, given: Mapping[str, Any]) -> Row:
    return _listed_row(
        _text(given, "key"),
        _path_of(folder, _text(given, "wav")),
        _who(given.get("spk")),
        labels=_labels(given, {"key", "wav", "spk"}),
    )


def read_shards(path: Path) -> Iterator[Row]:
    r"""Read WeSpeaker's shard.list: a line a tar, of KEY.wav and KEY.spk an utterance.

    Parameters
    ----------
    path : Path
        The list. What is relative is in its folder. Audio is read where it is in the tar,
        which is not compressed; members that are neither audio nor .spk are passed over.

    Yields
    ------
    Row

    Raises
    ------
    ValueError
        At the first tar that cannot be read, and at an utterance that has no speaker or is
        there twice. The line and the tar are named.

    Example
    -------
    >>> import io, tarfile
    >>> path = getfixture("tmp_path") / "shard.list"
    >>> with tarfile.open(path.with_name("a.tar"), "w") as tar:
    ...     for name, content in {"u1.spk": b"ann", "u1.wav": b"RIFF"}.items():
    ...         info = tarfile.TarInfo(name)
    ...         info.size = len(content)
    ...         tar.addfile(info, io.BytesIO(content))
    >>> _ = path.write_text("a.tar\n")
    >>> [(row.id, row.speaker, row.path[-6:]) for row in read_shards(path)]
    [('u1', 'ann', 'u1.wav')]
    """
    for number, line in enumerate(read_lines(path, "'shard.tar'"), start=1):
        tar, place = path.parent / line.strip(), f"{path}, line {number}"
        if not line.strip() or not tar.is_file():
            raise ValueError(
                f"{place}: there is no file {tar}. Each line is a tar, absolute or relative "
                "to the list's folder (WeSpeaker's are relative to where it ran)."
            )
        yield from _in_shard(tar, place)


def _in_shard(tar: Path, place: str) -> Iterator[Row]:
    """Pair the audio of a tar with the speakers beside it."""
    audio: dict[str, str] = {}
    speakers: dict[str, str] = {}
    with open(tar, "rb") as file:
        try:
            found = open_tar(tar).index()
            if tar.suffix.lower() != SUFFIX:
                raise ValueError(
                    f"{tar} does not end in {SUFFIX}, by which a tar is known. Rename it, "
                    "and correct the list."
                )
            for member in found:
                key, dot, ending = member.name.rpartition(".")
                kind = f".{ending.lower()}" if dot else ""
                of = speakers if kind == ".spk" else audio
                if of is audio and kind not in ALL_SUFFIXES:
                    continue
                if key in of:
                    raise ValueError(
                        f"{tar}: the utterance {key!r} is there twice, {member.name!r} is "
                        "the second. Pack it again with one."
                    )
                of[key] = _spk(file, member) if of is speakers else member.name
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    if odd := audio.keys() ^ speakers.keys():
        key = min(odd)
        lacks = f"has no {key}.spk" if key in audio else f"has {key}.spk and no audio"
        raise ValueError(
            f"{place}: {tar} {lacks}; {counted(len(odd), 'utterance')} without speaker or "
            "audio. Pack it again with both, or take the utterance out."
        )
    for key, name in audio.items():
        yield _listed_row(key, f"{tar}/{name}", speakers[key])


def _spk(file: BinaryIO, member: Member) -> str:
    """Read a member that names a speaker."""
    file.seek(member.begin)
    content = file.read(min(member.size, _MOST_OF_NAME))
    # Bytes that are no UTF-8 are refused with the utterance.
    return content.decode(errors="surrogateescape").strip()


def read_lhotse(path: Path) -> Iterator[Row]:
    r"""Read a cut set of lhotse: a line of JSON a cut, of one speaker.

    Parameters
    ----------
    path : Path
        A .jsonl or .jsonl.gz file of MonoCut, whose recordings are files. Those that are
        relative are in its folder. Times become samples of the recording as lhotse rounds
        them. Language, gender and custom fields of the supervision are labels.

    Yields
    ------
    Row

    Raises
    ------
    ValueError
        At the first cut that is mixed, of several channels or two speakers, or whose
        recording is no file or is to be changed when it is read.

    Example
    -------
    >>> path = getfixture("tmp_path") / "cuts.jsonl"
    >>> recording = {"sources": [{"type": "file", "channels": [0], "source": "/a.wav"}]}
    >>> cut = {"id": "c1", "start": 0.5, "duration": 1, "channel": 0, "type": "MonoCut"}
    >>> cut["recording"] = {**recording, "sampling_rate": 16000}
    >>> cut["supervisions"] = [{"speaker": "ann"}]
    >>> _ = path.write_text(json.dumps(cut))
    >>> [(row.id, row.speaker, row.start, row.samples) for row in read_lhotse(path)]
    [('c1', 'ann', 8000, 16000)]
    """
    form = '{"id": ..., "type": "MonoCut", ...}'
    return _made(
        _objects(path, each_line(path, form)), partial(_lhotse_row, path.parent)
    )


def _lhotse_row(folder: Path, cut: Mapping[str, Any]) -> Row:
    if other := next((key for key in _NO_CUTS if key in cut), ""):
        raise ValueError(
            f"it is no cut, but one of the {_NO_CUTS[other]} of lhotse. Give a cut set: "
            "CutSet.from_manifests(recordings, supervisions).to_file(...)."
        )
    name, recording, channel = _text(cut, "id"), cut["recording"], cut["channel"]
    if cut["type"] != "MonoCut" or recording.get("transforms"):
        raise ValueError(
            f"{name!r} is a {cut['type']}, or changed when it is read (transforms). Only a "
            "MonoCut is one utterance of one file: save it as audio (CutSet.save_audios), or "
            "leave it out."
        )
    sources = [s for s in recording["sources"] if channel in s["channels"]]
    if not sources or sources[0]["type"] != "file":
        raise ValueError(
            f"the recording of {name!r} has no file with the channel {channel}; commands are "
            "not run. Save it as audio (CutSet.save_audios)."
        )
    channels, file = sources[0]["channels"], _path_of(folder, sources[0]["source"])
    rate = recording["sampling_rate"]
    if (header := _header(file)) and header.sample_rate != rate:
        raise ValueError(
            f"sampling_rate is {rate}, and {file} has {header.sample_rate} Hz. Save the "
            "cuts again, from the recordings that are there."
        )
    start, samples = (_rounded(cut[key], rate) for key in ("start", "duration"))
    if start < 0 or samples < 1:
        raise ValueError(
            f"{name!r} has {samples} samples from {start} on. Leave it out."
        )
    speaker, labels = _supervised(cut, channel)
    within = channels.index(channel) if len(channels) > 1 else None
    return _listed_row(
        name, file, speaker, start, samples, channel=within, labels=labels
    )


# Fields that lines of other manifests of lhotse have, and cuts have not.
_NO_CUTS = {"sources": "recordings", "recording_id": "supervisions"}


def _rounded(seconds: float, rate: int) -> int:
    """Give the samples of a time, rounded as lhotse's compute_num_samples."""
    exact = Decimal(round(seconds * rate, ndigits=8))
    return int(exact.quantize(Decimal(0), rounding=ROUND_HALF_UP))


def _supervised(
    cut: Mapping[str, Any], channel: int
) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """Give the one speaker of a cut, and what else is known of it."""
    supervisions = cut.get("supervisions")
    if not supervisions:
        return None, ()
    first, duration = supervisions[0], cut["duration"]
    start = first.get("start", 0)
    end = start + first.get("duration", duration)
    if (
        len(supervisions) > 1
        or start > _ROUNDED
        or end < duration - _ROUNDED
        or first.get("channel", channel) not in (channel, [channel])
    ):
        who = sorted({str(one.get("speaker")) for one in supervisions})
        raise ValueError(
            f"{', '.join(who)} of {counted(len(supervisions), 'supervision')} speaks in a "
            "part of the cut, or on another channel. Cut it by speaker "
            "(CutSet.trim_to_supervisions), or leave it out."
        )
    known = {**(first.get("custom") or {})}
    known |= {k: first[k] for k in ("language", "gender") if first.get(k)}
    return _who(first.get("speaker")), _labels(known, (), refused=())


def _json(text: str, place: str) -> dict[str, Any]:
    with refusing(f"{place}: it is no JSON object", "Write it again."):
        return {**parse_json(text)}


def _objects(
    path: Path, lines: Iterable[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Give the object of each line of JSON, and where it stands."""
    for number, line in enumerate(lines, start=1):
        place = f"{path}, line {number}"
        yield place, _json(line, place)


def _text(given: Mapping[str, Any], key: str) -> str:
    """Give a field that must be there."""
    if (text := _who(given.get(key))) is None:
        raise ValueError(f"it has no {key}. Give one, or delete the utterance.")
    return text


def _who(value: Any) -> str | None:
    """Give a text that need not be there."""
    return value.strip() or None if value is not None else None


def _labels(
    given: Mapping[str, Any],
    known: Collection[str],
    refused: Collection[str] = _TIMES,
) -> tuple[tuple[str, str], ...]:
    """Give what a row says beside the known fields, as texts."""
    further = [name for name in given if name not in known]
    if not further:
        return ()
    if times := [name for name in further if name.strip().lower() in refused]:
        raise ValueError(
            f"{times[0]!r} is not read, and the whole file would be used. Cut the "
            "audio, give start and stop in samples (SpeechBrain's CSV), or leave it out."
        )
    if reserved := [name for name in further if name in RESERVED]:
        raise ValueError(
            f"{reserved[0]!r} is a column that the manifest has for itself "
            f"({', '.join(RESERVED)}). Rename it."
        )
    values = ((name, given[name]) for name in further)
    return tuple(
        (name, value if isinstance(value, str) else json.dumps(value))
        for name, value in values
        if value is not None
    )


def _whole_number(given: Mapping[str, Any], key: str) -> int | None:
    """Give a field that must be a whole number; None where there is none."""
    value = given.get(key)
    if value is None or value == "":
        return None
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(
            f"{key} is {value!r}. Give a whole number from 0 on; times are in samples."
        )
    return number


def _is_speechbrain(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in (".csv", ".json")


def _is_kaldi(path: Path) -> bool:
    return (path / "wav.scp").is_file()


def _is_wespeaker(path: Path) -> bool:
    return path.suffix == ".list" and path.is_file() and not _is_shards(path)


def _is_shards(path: Path) -> bool:
    """Return whether the first line of a .list is a tar."""
    if path.suffix != ".list" or not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.readline(_MOST_OF_NAME).strip().lower().endswith(_TARS)


def _is_lhotse(path: Path) -> bool:
    return path.name.lower().endswith((".jsonl", ".jsonl.gz")) and path.is_file()


class Format(NamedTuple):
    """How a format is recognised and read.

    Attributes
    ----------
    recognise : callable
        Returns whether a path is of the format.
    read : callable
        Gives the rows of a path.
    """

    recognise: Callable[[Path], bool]
    read: Callable[[Path], Iterator[Row]]


#: Formats by name. A path is of the first that recognises it; a folder that none recognises
#: is read by `read_folder`.
FORMATS: dict[str, Format] = {
    "SpeechBrain's manifest": Format(_is_speechbrain, read_speechbrain),
    "Kaldi directory": Format(_is_kaldi, read_kaldi),
    "WeSpeaker's list": Format(_is_wespeaker, read_wespeaker),
    "WeSpeaker's shards": Format(_is_shards, read_shards),
    "lhotse's cuts": Format(_is_lhotse, read_lhotse),
}
