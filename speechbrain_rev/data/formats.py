"""Lists of utterances: one function a format reads its rows.

A format is a function `read_x(path)` that yields rows, one that recognises it, and a row of
`FORMATS`. Rows of noise need no speaker.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from speechbrain_rev.audio.reading import AudioInfo, audio_info
from speechbrain_rev.audio.shards import SUFFIX, open_tar
from speechbrain_rev.files import parse_json, refusing
from speechbrain_rev.lists import each_line

from .manifest import RESERVED
from .rows import ALL_SUFFIXES, Row, counted

Result = TypeVar("Result")

# The rate of a recording that cannot be read; the check of files reports it.
_ANY_RATE = 16000
# Seconds by which equal times of a cut and of its supervision may differ.
_ROUNDED = 0.01
# No recording is as many seconds long: 30 years.
_LONGEST = 1e9
# No speech has fewer samples per second.
_LOWEST_RATE = 1000
_LETTERS = tuple("ABCDEFGH")
# What lines of a list of tars end in.
_TARS = (b".tar", b".tar.gz", b".tgz", b".tar.bz2", b".tar.xz", b".tar.zst")
# Names of fields that say which part of a file is meant, where they are not read.
_TIMES = frozenset(("start", "stop", "begin", "end", "offset", "vad"))
_SPEECHBRAINS = frozenset(
    ("ID", "duration", "length", "wav", "wav_format", "wav_opts", "start", "stop", "spk_id",
     "session", "channel")
)  # fmt: skip


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


def _at(place: str, make: Callable[..., Result], *given: Any) -> Result:
    """Make rows of what stands at a place, which errors name."""
    try:
        return make(*given)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{place}: a field is missing or of another kind ({error!r}). Write it again."
        ) from error


def _each_line(
    path: Path, form: str, make: Callable[[Path, str], Result]
) -> Iterator[Result]:
    """Make rows of each line, and of the folder that files are relative to."""
    folder = path.parent
    for number, line in enumerate(each_line(path, form), start=1):
        yield _at(f"{path}, line {number}", make, folder, line)


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
    text = "\n".join(each_line(path, "ID,duration,wav,start,stop,spk_id"))
    folder = path.parent
    if path.suffix.lower() == ".json":
        for name, given in _at(str(path), _json, text).items():
            fields = given if isinstance(given, dict) else {}
            place = f"{path}, {name!r}"
            yield _at(place, _speechbrain_row, folder, {**fields, "ID": name})
        return
    # A dictionary of csv.DictReader takes three times as long.
    table = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = next(table, [])
        for row in filter(None, table):
            place = f"{path}, line {table.line_num}"
            if len(row) != len(columns):
                raise ValueError(
                    f"{place} has other fields than the header. Put names with commas in "
                    "quotes."
                )
            given = dict(zip(columns, row, strict=True))
            yield _at(place, _speechbrain_row, folder, given)
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {table.line_num}: it is no CSV ({error}). Write it again."
        ) from error


def _speechbrain_row(folder: Path, given: Mapping[str, Any]) -> Row:
    wav = _text(given, "wav")
    if "data_root" in wav:
        for root in ("$data_root", "{data_root}"):
            wav = wav.replace(root, str(folder))
    start, stop = _whole_number(given, "start") or 0, _whole_number(given, "stop")
    samples = None if stop is None else stop - start
    seconds = float(given.get("duration") or 0) if samples is not None else 0
    if samples is not None and samples < max(1, _LOWEST_RATE * seconds):
        raise ValueError(
            f"start is {start}, stop {stop} and duration {seconds:g} s. start and stop are "
            "in samples, with stop behind start; correct them, or leave both out."
        )
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
    recordings = _kaldi_table(path / "wav.scp", "'recording file'") or {}
    speakers = _kaldi_table(path / "utt2spk", "'utterance speaker'")
    form = "'utterance recording start end'"
    parts = _kaldi_table(path / "segments", form)
    form = "'recording file channel'"
    channels = _kaldi_table(path / "reco2file_and_channel", form) or {}
    utterances = dict(zip(recordings, recordings, strict=True))
    utterances = utterances if parts is None else parts
    # Noise has no speakers.
    if speakers is not None and (odd := utterances.keys() ^ speakers.keys()):
        listed = "wav.scp" if parts is None else "segments"
        raise ValueError(
            f"{path}: {min(odd)!r} is in one of utt2spk and {listed} alone. Add a line for "
            "it, or delete the line."
        )

    def row(name: str, fields: str) -> Row:
        recording, *times = fields.split()
        if recording not in recordings:
            raise ValueError(f"wav.scp has no {recording!r}. Add a line for it.")
        file = _path_of(path, _no_command(recordings[recording]))
        speaker = speakers[name] if speakers is not None else None
        channel = None
        if recording in channels:
            channel = _kaldi_channel(channels[recording])
            if (header := _header(file)) and header.channels == 1:
                # The file was made of that channel.
                channel = None
        if not times:
            return _listed_row(name, file, speaker, channel=channel)
        start, end = map(float, times)
        if not (0 <= start < _LONGEST and (end == -1 or start < end < _LONGEST)):
            raise ValueError(
                f"it goes from {start:g} s to {end:g} s. Correct segments."
            )
        rate = header.sample_rate if (header := _header(file)) else _ANY_RATE
        first = round(start * rate)
        samples = None if end == -1 else round(end * rate) - first
        return _listed_row(name, file, speaker, first, samples, channel=channel)

    for name, fields in utterances.items():
        yield _at(f"{path}, {name!r}", row, name, fields)


def _kaldi_table(path: Path, form: str) -> dict[str, str] | None:
    """Take the rest of each line by its first word; None where there is no table."""
    if not path.is_file():
        return None
    table: dict[str, str] = {}
    for number, line in enumerate(each_line(path, form), start=1):
        name, rest = (*line.split(maxsplit=1), "", "")[:2]
        if not rest or name in table:
            raise ValueError(
                f"{path}, line {number}: {line[:60]!r} is not {form}, or {name!r} is there "
                "twice. Correct or delete it."
            )
        table[name] = rest.strip()
    return table


def _no_command(wav: str) -> str:
    if wav.startswith("|") or wav.endswith("|"):
        raise ValueError(
            f"{wav[:60]!r} is a command, and is not run. Write its output into a file and "
            "list that (wav-copy scp:wav.scp 'ark,scp:...' of Kaldi)."
        )
    return wav


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
    return _each_line(path, form, _wespeaker_row)


def _wespeaker_row(folder: Path, line: str) -> Row:
    given = _json(line)
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
    return chain.from_iterable(_each_line(path, "'shard.tar'", _in_shard))


def _in_shard(folder: Path, line: str) -> list[Row]:
    """Pair the audio of a tar with the speakers beside it."""
    tar = folder / line.strip()
    if not tar.is_file() or tar.suffix.lower() != SUFFIX:
        raise ValueError(
            f"there is no file {tar}, or its name does not end in {SUFFIX}. Each line is a "
            "tar, absolute or relative to the list's folder (WeSpeaker's are relative to "
            "where it ran)."
        )
    audio: list[tuple[str, str]] = []
    speakers: dict[str, str] = {}
    with open(tar, "rb") as file:
        for member in open_tar(tar).index():
            key, dot, ending = member.name.rpartition(".")
            if f"{dot}{ending.lower()}" in ALL_SUFFIXES:
                audio.append((key, f"{tar}/{member.name}"))
            elif ending == "spk":
                file.seek(member.begin)
                # Bytes that are no UTF-8 are refused with the utterance.
                name = file.read(member.size).decode(errors="surrogateescape")
                speakers[key] = name.strip()
    if odd := {key for key, _ in audio} ^ speakers.keys():
        raise ValueError(
            f"{tar} has only one of {min(odd)}.spk and its audio; "
            f"{counted(len(odd), 'utterance')} without speaker or audio. Pack it again with "
            "both, or take the utterance out."
        )
    return [_listed_row(key, path, speakers[key]) for key, path in audio]


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
    return _each_line(path, form, _lhotse_row)


def _lhotse_row(folder: Path, line: str) -> Row:
    cut = _json(line)
    name, kind = _text(cut, "id"), cut.get("type", "recording or supervision")
    if kind != "MonoCut" or cut["recording"].get("transforms"):
        raise ValueError(
            f"{name!r} is a {kind}, or changed when it is read (transforms). Only a MonoCut "
            "is one utterance of one file: make cuts (CutSet.from_manifests), save them as "
            "audio (CutSet.save_audios), or leave it out."
        )
    recording, channel = cut["recording"], cut["channel"]
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
        raise ValueError(f"it has {samples} samples from {start} on. Leave it out.")
    speaker, labels = _supervised(cut, channel)
    within = channels.index(channel) if len(channels) > 1 else None
    return _listed_row(
        name, file, speaker, start, samples, channel=within, labels=labels
    )


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
    labels = {**(first.get("custom") or {})}
    labels |= {k: first[k] for k in ("language", "gender") if first.get(k)}
    return _who(first.get("speaker")), _labels(labels, (), refused=())


def _json(text: str) -> dict[str, Any]:
    with refusing("it is no JSON object", "Write it again."):
        return {**parse_json(text)}


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
    labels = {n: x for n, x in given.items() if n not in known and x is not None}
    for name in labels:
        if name.strip().lower() in refused:
            raise ValueError(
                f"{name!r} is not read, and the whole file would be used. Cut the audio, "
                "give start and stop in samples (SpeechBrain's CSV), or leave it out."
            )
        if name in RESERVED:
            raise ValueError(
                f"{name!r} is a column that the manifest has for itself "
                f"({', '.join(RESERVED)}). Rename it."
            )
    return tuple(
        (name, x if isinstance(x, str) else json.dumps(x)) for name, x in labels.items()
    )


def _whole_number(given: Mapping[str, Any], key: str) -> int | None:
    """Give a field that must be a whole number; None where there is none."""
    value = given.get(key)
    if value is None or value == "":
        return None
    if not str(value).isdecimal():
        raise ValueError(
            f"{key} is {value!r}. Give a whole number from 0 on; times are in samples."
        )
    return int(value)


def _ending(*endings: str) -> Callable[[Path], bool]:
    return lambda path: path.name.lower().endswith(endings) and path.is_file()


def _is_shards(path: Path) -> bool:
    """Return whether the first line of a .list is a tar."""
    if not _ending(".list")(path):
        return False
    with open(path, "rb") as file:
        return file.readline().strip().lower().endswith(_TARS)


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
    "SpeechBrain's manifest": Format(_ending(".csv", ".json"), read_speechbrain),
    "Kaldi directory": Format(lambda path: (path / "wav.scp").is_file(), read_kaldi),
    "WeSpeaker's shards": Format(_is_shards, read_shards),
    "WeSpeaker's list": Format(_ending(".list"), read_wespeaker),
    "lhotse's cuts": Format(_ending(".jsonl", ".jsonl.gz"), read_lhotse),
}
