"""Each format gives the same speakers and samples to all that asks, or is refused by row."""

import gzip
import io
import json
import shutil
import tarfile
import unicodedata

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio import read_audio
from speechbrain_rev.data import FORMATS, LAYOUTS, open_sources, read_manifest
from speechbrain_rev.data.corpora import noise_files
from speechbrain_rev.data.formats import read_lhotse
from speechbrain_rev.data.listing import DataSettings, list_speech
from speechbrain_rev.data.manifest import Cause
from speechbrain_rev.data.packing import pack
from speechbrain_rev.data.rows import find_rows
from tests.unit.data.conftest import left_out


def rows_of(corpus):
    """IDs as VoxCeleb's layout has them, files and speakers."""
    paths = sorted((corpus / "wav").rglob("*.wav"))
    return [(f"{p.parts[-3]}-{p.parts[-2]}-{p.stem}", p, p.parts[-3]) for p in paths]


def write_tables(folder, **tables):
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in tables.items():
        text = "".join(f"{line}\n" for line in lines)
        (folder / name.replace("wav_scp", "wav.scp")).write_text(text)
    return folder


def as_csv(rows, folder):
    lines = [
        f"{n},{soundfile.info(p).duration},{p},0,{soundfile.info(p).frames},{s}"
        for n, p, s in rows
    ]
    write_tables(folder, **{"a.csv": ["ID,duration,wav,start,stop,spk_id", *lines]})
    return folder / "a.csv"


def as_json(rows, folder):
    folder.mkdir()
    given = {n: {"wav": str(p), "length": 1.0, "spk_id": s} for n, p, s in rows}
    (folder / "a.json").write_text(json.dumps(given))
    return folder / "a.json"


def as_kaldi(rows, folder):
    return write_tables(
        folder,
        wav_scp=[f"{n} {p}" for n, p, _ in rows],
        utt2spk=[f"{n} {s}" for n, _, s in rows],
    )


def as_wespeaker(rows, folder):
    lines = [json.dumps({"key": n, "wav": str(p), "spk": s}) for n, p, s in rows]
    write_tables(folder, **{"raw.list": lines})
    return folder / "raw.list"


def write_tar(path, content, **options):
    """Write members of bytes or of what is in files."""
    with tarfile.open(path, "w", **options) as tar:
        for name, given in content.items():
            one = given if isinstance(given, bytes) else given.read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(one)
            tar.addfile(info, io.BytesIO(one))
    return path


def shard_of(rows):
    """Members of a shard, as WeSpeaker's make_shard_list.py names them."""
    return {
        name: given
        for key, path, speaker in rows
        for name, given in {
            f"{key}.spk": speaker.encode(),
            f"{key}{path.suffix}": path,
            f"{key}.txt": b"HELLO",
        }.items()
    }


def as_shards(rows, folder):
    folder.mkdir()
    names = [f"shards_{number:09}.tar" for number in range(3)]
    for number, name in enumerate(names):
        write_tar(folder / name, shard_of(rows[number::3]))
    return write_tables(folder, **{"shard.list": names}) / "shard.list"


def cut_of(name, path, speaker, start=0, samples=None):
    """A MonoCut as lhotse's to_file writes it."""
    info = soundfile.info(path)
    seconds = (samples or info.frames) / info.samplerate
    part = {"duration": seconds, "channel": 0}
    supervision = {"id": name, "recording_id": "r", "start": 0.0, **part}
    source = {"type": "file", "channels": [0], "source": str(path)}
    recording = {
        "id": "r",
        "sources": [source],
        "sampling_rate": info.samplerate,
        "num_samples": info.frames,
        "duration": info.duration,
        "channel_ids": [0],
    }
    return {
        "id": name,
        "start": start / info.samplerate,
        **part,
        "supervisions": [{**supervision, "speaker": speaker, "gender": "F"}],
        "recording": recording,
        "type": "MonoCut",
    }


def as_lhotse(rows, folder):
    folder.mkdir()
    text = "".join(json.dumps(cut_of(*row)) + "\n" for row in rows)
    (folder / "cuts.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder / "cuts.jsonl.gz"


def as_segments(rows, folder):
    """One recording a speaker, cut by Kaldi's segments."""
    folder.mkdir()
    parts, scp = [], []
    for speaker in sorted({s for *_, s in rows}):
        wavs = [(n, soundfile.read(p)[0]) for n, p, s in rows if s == speaker]
        at, joined = 0, torch.cat([torch.from_numpy(wav) for _, wav in wavs])
        soundfile.write(folder / f"{speaker}.wav", joined.numpy(), 16000)
        scp.append(f"{speaker} {speaker}.wav")
        for name, wav in wavs:
            end = at + len(wav)
            parts.append(f"{name} {speaker} {at / 16000:.7f} {end / 16000:.7f}")
            at = end
    return write_tables(
        folder, wav_scp=scp, segments=parts, utt2spk=[f"{n} {s}" for n, _, s in rows]
    )


def placed(name):
    """Copy the corpus into another layout of folders."""

    def write(rows, folder):
        for number, (_, path, speaker) in enumerate(rows):
            to = folder / name.format(speaker=speaker, number=number)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
        if name.startswith("data/"):
            dev = sorted({speaker for *_, speaker in rows})
            write_tables(folder / "dev", **{"dev.lst": dev})
        return folder

    return write


def packed(rows, folder):
    """The corpus of the rows, packed."""
    pack(rows[0][1].parents[3], folder.with_suffix(".packed"), sample_rate=16000)
    return folder.with_suffix(".packed")


#: What writes each format, by its name; a dot tells two ways apart.
WRITERS = {
    "SpeechBrain's manifest": as_csv,
    "SpeechBrain's manifest.": as_json,
    "Kaldi directory": as_kaldi,
    "Kaldi directory.": as_segments,
    "WeSpeaker's list": as_wespeaker,
    "WeSpeaker's shards": as_shards,
    "lhotse's cuts": as_lhotse,
    "LibriSpeech": placed("train-clean-100/{speaker}/7/{speaker}-7-{number:04}.wav"),
    "VCTK": placed("wav48_silence_trimmed/{speaker}/{speaker}_{number:03}_mic1.wav"),
    "CN-Celeb": placed("data/{speaker}/singing-01-{number:03}.wav"),
    "VoxCeleb": placed("dev/aac/{speaker}/s/{number:05}.wav"),
    "folders of speakers": placed("{speaker}/{number:03}.wav"),
    "VoxCeleb.": packed,
}


def heard(path):
    """Speakers and samples of a manifest."""
    return [
        (u.spk_id, u.samples, read_audio(u.wav, sample_rate=16000).tolist())
        for u in read_manifest(path)
    ]


@pytest.fixture(scope="session")
def expected(corpus):
    """Speakers and samples of the corpus."""
    return [
        (speaker, read_audio(path, sample_rate=16000).tolist())
        for _, path, speaker in rows_of(corpus)
    ]


@pytest.fixture(scope="session", params=WRITERS)
def written(request, corpus, tmp_path_factory):
    """The corpus in each format, and the name of that."""
    folder = tmp_path_factory.mktemp("written") / "data"
    return WRITERS[request.param](rows_of(corpus), folder), request.param.rstrip(".")


class TestEachFormat:
    def test_it_is_prepared_as_its_speakers_and_samples(
        self, written, expected, prepared, tmp_path, capsys
    ):
        data, name = written
        summary = prepared(data)
        said = capsys.readouterr().out
        assert f"Understood as {name}: 24 utterances of 6 speakers, such as" in said
        assert said.count(" of id0000") == 3
        listed = [
            (speaker, wav) for speaker, _, wav in heard(tmp_path / "save/train.csv")
        ]
        assert listed == expected
        assert (summary.seen(), summary.utterances, summary.speakers) == (24, 24, 6)
        assert prepared(data) == summary

    def test_its_trials_are_found_by_name(self, written, expected, prepared, tmp_path):
        data, _ = written
        prepared(data, valid_speakers=2)
        rows = list_speech(DataSettings(str(data))).rows
        names = [unicodedata.normalize("NFD", row.name) for row in rows]
        found = find_rows(open_sources(data), [f"{n}.flac" for n in names] + names)
        for row, name, (speaker, wav) in zip(rows, names, expected, strict=True):
            for hit in (found.rows[name], found.rows.get(f"{row.id}.flac", row)):
                assert (hit.id, hit.speaker) == (row.id, speaker)
                assert read_audio(hit.wav, sample_rate=16000).tolist() == wav

    def test_it_is_noise(self, written, expected):
        data, _ = written
        wavs = [
            read_audio(path, sample_rate=16000).tolist() for path in noise_files(data)
        ]
        assert sorted(wavs) == sorted(wav for _, wav in expected)


def test_every_format_and_layout_is_written():
    names = {name.rstrip(".") for name in WRITERS}
    assert names == {*FORMATS, *(layout.name for layout in LAYOUTS)}


@pytest.mark.parametrize("layout", ["LibriSpeech", "VCTK", "VoxCeleb", "CN-Celeb"])
def test_a_packed_folder_is_recognised_as_what_it_was(layout, corpus, tmp_path):
    data = WRITERS[layout](rows_of(corpus), tmp_path / "data")
    if layout == "CN-Celeb":
        # Another is of the evaluation.
        write_tables(data / "dev", **{"dev.lst": [f"id0000{n}" for n in range(1, 6)]})
    pack(data, tmp_path / "data.packed", sample_rate=16000)
    (one,), (other,) = open_sources(data), open_sources(tmp_path / "data.packed")
    assert one.format == other.format == layout
    asides = [], []
    rows = [
        source.rows(aside) for source, aside in zip((one, other), asides, strict=True)
    ]
    assert [row[2:] for row in rows[0]] == [row[2:] for row in rows[1]]
    assert [len(aside) for aside in asides] == [4 * (layout == "CN-Celeb")] * 2


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (2, "corpus/{speaker}/{number}.wav"),
        (r"/([^/]+)-\d+\.wav$", "x/{speaker}-{number}.wav"),
        (r"id\d+", "x/{number}/{speaker}.wav"),
    ],
)
def test_speaker_from_names_a_level_or_a_pattern(
    place, name, corpus, prepared, tmp_path
):
    data = placed(name)(rows_of(corpus), tmp_path / "data")
    assert prepared(data, speaker_from=place).speakers == 6
    with pytest.raises(
        ValueError, match=r"speaker_from is 2, and .* lists its speakers"
    ):
        prepared(as_kaldi(rows_of(corpus), tmp_path / "kaldi"), "k", speaker_from=2)
    with pytest.raises(
        ValueError, match=r"is .nobody., and finds no speaker in the names"
    ):
        prepared(data, "none", speaker_from="nobody")


def test_speakers_outside_cncelebs_development_set_are_passed_over(
    corpus, prepared, tmp_path
):
    data = WRITERS["CN-Celeb"](rows_of(corpus), tmp_path / "data")
    # Spaces behind a name are none of it.
    write_tables(data / "dev", **{"dev.lst": [f"id0000{n} " for n in range(4)]})
    summary = prepared(data)
    assert summary.left_out == {Cause.BESIDE.words: 8}
    assert (summary.speakers, summary.seen()) == (4, 24)
    # Names of trials are found among them, too.
    name = "id00005/singing-01-023.wav"
    (row,) = find_rows(open_sources(data), [name]).rows.values()
    assert (row.speaker, row.session) == ("id00005", "singing-01")


def test_what_is_seen_is_used_or_left_out_for_a_reason(corpus, prepared, tmp_path):
    rows = rows_of(corpus)
    lines = [f"{n},{p},0,{800 if k else 10**6},{s}" for k, (n, p, s) in enumerate(rows)]
    write_tables(tmp_path, **{"a.csv": ["ID,wav,start,stop,spk_id", *lines]})
    with pytest.raises(
        ValueError, match=r"1 of 24 files .* a segment of it begins at 0"
    ):
        prepared(tmp_path / "a.csv")
    assert [path.name for path in (tmp_path / "save").iterdir()] == ["left_out.csv"]
    trials = tmp_path / "trials.txt"
    names = rows[-1][0], rows[-2][0]
    trials.write_text(f"1 {names[0]} {names[1]}\n0 {names[0]} {rows[-5][0]}\n")
    settings = {"trial_lists": (str(trials),), "bad_files": "drop"}
    summary = prepared(tmp_path / "a.csv", valid_speakers=2, **settings)
    # All are shorter than a segment.
    assert summary.utterances == 7
    words = "shorter than a segment, repeated"
    assert summary.treated == {words: 7 + summary.held_out}
    assert summary.left_out == {Cause.TESTED.words: 8, Cause.UNREADABLE.words: 1}
    assert len(left_out(tmp_path / "save")) == 9
    assert summary.seen() == 7 + summary.held_out + 9 == 24


BAD_TABLES = [
    ({"utt2spk": ["u1 ann"], "wav_scp": ["u1 sox a.wav - |"]}, "'u1': .* a command"),
    ({"utt2spk": ["u1 ann"], "wav_scp": ["u1 | touch run"]}, "'u1': .* a command"),
    (
        {"utt2spk": ["u1 ann", "u1 bob"]},
        "line 2: 'u1 bob' is not .* or 'u1' is there twice",
    ),
    ({"utt2spk": ["u1"]}, "line 1: 'u1' is not 'utterance speaker'"),
    ({"utt2spk": ["", "u1 ann"]}, "utt2spk, line 1: '' is not"),
    ({"segments": ["u1 u1 0 1e305"]}, "'u1': it goes from 0 s to 1e\\+305 s"),
    ({"utt2spk": ["u2 ann"]}, "'u1' is in one of utt2spk and wav.scp alone"),
    (
        {"segments": ["u1 u1 2 1"]},
        "'u1': it goes from 2 s to 1 s. Correct segments",
    ),
    ({"segments": ["u1 u1 -1 1"]}, "'u1': it goes from -1 s"),
    ({"segments": ["u1 u1 nan 1"]}, "'u1': it goes from nan s"),
    ({"segments": ["u1 u1 a b"]}, "'u1': could not convert .*: 'a'"),
    ({"segments": ["u1 u2 0 1"]}, "'u1': wav.scp has no 'u2'"),
    ({"segments": ["u2 u1 0 1"]}, "'u1' is in one of utt2spk and segments alone"),
    ({"utt2spk": [""]}, "'u1' is in one of utt2spk"),
    ({"reco2file_and_channel": ["u1 u1 0"]}, "'u1': the channel is '0'"),
]
BAD_FILES = [
    ("a.csv", "ID,spk_id\nu,ann\n", "line 2: it has no wav"),
    ("a.csv", "ID,wav,who\nu,a.wav,ann\n", r"'u'\): .* no speaker.* columns: who"),
    ("a.csv", "ID,wav,spk_id\nu,a.wav,\n", r"utterance 1 \('u'\): it has no speaker"),
    (
        "a.csv",
        "ID,wav,samples,spk_id\nu,a.wav,3,ann\n",
        "line 2: 'samples' is a column",
    ),
    ("a.csv", "ID,wav,spk_id,channel\nu,a.wav,ann,x\n", "line 2: channel is 'x'"),
    ("a.csv", "ID,wav,spk_id\nu,a.wav\n", "line 2 has other fields"),
    (
        "a.csv",
        "ID,wav,start,stop,spk_id\nu,a.wav,9,3,ann\n",
        "line 2: start is 9, stop 3",
    ),
    ("a.csv", "ID,wav,start,stop,spk_id\nu,a.wav,-1,3,ann\n", "start is '-1'"),
    ("a.csv", "ID,wav,start,stop,spk_id\nu,a.wav,0,1.5,ann\n", "stop is '1.5'"),
    (
        "a.csv",
        "ID,wav,spk_id\nu,a.wav,ann\nu,a.wav,bob\n",
        r"2 \('u'\): .*listed twice",
    ),
    ("a.csv", "ID,wav,spk_id\n", "lists no utterance"),
    ("a.csv", f"ID,wav,{'x' * 140_000}\nu,a,b\n", "line 1: it is no CSV"),
    ("a.jsonl", '{"id": "r", "sources": []}\n', "line 1: 'r' is a recording or super"),
    ("a.csv", b"ID,wav,spk_id\nu,a.wav,\xff\n", "UTF-8"),
    ("a.json", '{"u": {"wav": "a.wav"}}', r"utterance 1 \('u'\): it has no speaker"),
    (
        "a.json",
        '{"u": {"wav": "a.wav", "spk_id": 3}}',
        "'u': a field is missing or of another kind",
    ),
    ("a.json", '{"u": 3}', "'u': it has no wav"),
    ("a.json", '{"u": {"wav": "a"}, "u": {"wav": "b"}}', "'u' is there twice"),
    ("a.json", "[" * 100_000, "no JSON object"),
    ("a.csv", "ID,wav,Start,spk_id\nu,a,3,ann\n", "'Start' is not read"),
    (
        "a.csv",
        "ID,duration,wav,start,stop,spk_id\nu,3.0,a,0,3,ann\n",
        "start is 0, stop 3 and duration 3 s. start and stop are in samples",
    ),
    (
        "a.csv",
        "ID,wav,start,stop,spk_id\nu,a,0,9,ann\nv,a,0,9,ann\nw,a,0,9,bob\n",
        r"'w' of 'bob' is the same audio as 'u' of 'ann'",
    ),
    (
        "raw.list",
        '{"key": "u", "wav": "a", "spk": "ann", "vad": [[0, 1]]}',
        "'vad' is not read",
    ),
    ("raw.list", '{"key": "u\\ud800", "wav": "a", "spk": "ann"}', "UTF-8 can write"),
    ("a.json", "[", "no JSON"),
    (
        "raw.list",
        '{"key": "u", "wav": "a.wav"}\n',
        r"utterance 1 .*no speaker.* spk of",
    ),
    ("shard.list", "gone.tar\n", "line 1: there is no file .*gone.tar"),
    ("shard.list", "shard.list.tar.gz\n", "line 1: there is no file"),
    ("a.jsonl", "[3]\n", "line 1: .*no JSON object"),
    ("a.jsonl", b"{}\n\xff\n", "UTF-8|it has no id"),
    ("a.jsonl.gz", b"\x1f\x8b\x08", "damaged or cut short"),
    ("a.jsonl.gz", b"{}", "damaged or cut short"),
    ("raw.list", "u a.wav ann\n", "line 1: it is no JSON"),
    ("notes.txt", "u a.wav ann\n", "no list that is known"),
]


def refused(data, prepared, match):
    with pytest.raises(ValueError, match=match):
        prepared(data)


@pytest.mark.parametrize(("tables", "match"), BAD_TABLES)
def test_bad_rows_of_kaldi_are_named_and_nothing_runs(
    tables, match, prepared, tmp_path
):
    good = {"wav_scp": ["u1 a.wav"], "utt2spk": ["u1 ann"]}
    refused(write_tables(tmp_path / "kaldi", **{**good, **tables}), prepared, match)
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(
        ["kaldi", *(n.replace("v_s", "v.s") for n in {**good, **tables})]
    )


@pytest.mark.parametrize(("name", "content", "match"), BAD_FILES)
def test_bad_rows_of_lists_are_named(name, content, match, prepared, tmp_path):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, prepared, match)
    assert not list((tmp_path / "save").glob("*"))


def spoilt(cut, **changed):
    """A cut with other fields, of which those of a recording have a dot."""
    for name, value in changed.items():
        inner = cut
        *path, last = name.split("__")
        for key in path:
            inner = inner[int(key) if isinstance(inner, list) else key]
        inner[last] = value
    return cut


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"type": "MultiCut"}, "'u' is a MultiCut.* Only a MonoCut"),
        ({"type": "MixedCut"}, "'u' is a MixedCut"),
        ({"supervisions": []}, r"utterance 2 \('u'\): it has no speaker"),
        ({"supervisions__0__speaker": None}, r"utterance 2 \('u'\): it has no speaker"),
        ({"supervisions": [{"speaker": s} for s in "ab"]}, "a, b of 2 superv"),
        ({"recording": None}, "a field is missing or of another kind"),
        ({"recording__transforms": [{"name": "Speed"}]}, "or changed when it is read"),
        (
            {"recording__sources__0__type": "command"},
            "no file with the channel 0; commands",
        ),
        ({"recording__sources__0__type": "url"}, "no file with the channel 0"),
        ({"recording__sources": []}, "no file with the channel 0"),
        ({"channel": 1}, "no file with the channel 1"),
        ({"channel": [0, 1]}, r"no file with the channel \[0, 1\]"),
        ({"recording__sampling_rate": "16k"}, "sampling_rate is 16k, and "),
        ({"start": -1}, "samples from -16000 on"),
        ({"start": float("nan")}, "NaN"),
        ({"duration": 0}, "it has 0 samples"),
        ({"supervisions__0__custom": {"wav": 3}}, "'wav' is a column"),
        ({"supervisions__0__custom": "F"}, "a field is missing or of another kind"),
        (
            {"supervisions__0__start": 0.2},
            "id00000 of 1 supervision speaks in a part of the cut",
        ),
        ({"supervisions__0__channel": 1}, "on another channel"),
        ({"recording__sampling_rate": 8000}, "sampling_rate is 8000, and .* 16000 Hz"),
        ({"recording__sampling_rate": True}, "sampling_rate is True"),
        ({"duration": 1e30}, r"of another kind .*InvalidOperation"),
    ],
)
def test_a_cut_that_is_no_utterance_of_one_file_is_named(
    changed, match, corpus, prepared, tmp_path
):
    cuts = [cut_of(*row) for row in rows_of(corpus)[:2]]
    cuts[1] = spoilt({**cuts[1], "id": "u"}, **changed)
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(cut)}\n" for cut in cuts))
    place = "" if "utterance" in match else "a.jsonl, line 2: .*"
    refused(tmp_path / "a.jsonl", prepared, place + match)
    assert not list((tmp_path / "save").glob("*"))


@pytest.mark.parametrize(
    ("seconds", "samples"),
    # Halves are rounded up, and a difference of floats below 1e-8 is none.
    [(0.00003125, 1), (0.00009375, 2), (0.1 + 0.2, 4800), (1.00003124, 16000)],
)
def test_times_of_lhotse_are_rounded_as_lhotse_does(seconds, samples, tmp_path):
    soundfile.write(tmp_path / "a.wav", [0.0] * 40000, 16000)
    cut = {
        **cut_of("u", tmp_path / "a.wav", "ann"),
        "start": seconds,
        "duration": seconds,
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(cut))
    (row,) = read_lhotse(tmp_path / "a.jsonl")
    assert (row.start, row.samples) == (samples, samples)


def test_cuts_of_one_recording_are_read_as_their_samples(corpus, prepared, tmp_path):
    prepared(save="reference")
    as_segments(rows_of(corpus), tmp_path / "kaldi")
    ends, cuts = {}, []
    for name, path, speaker in rows_of(corpus):
        start, samples = ends.get(speaker, 0), soundfile.info(path).frames
        recording = tmp_path / f"kaldi/{speaker}.wav"
        cuts.append(cut_of(name, recording, speaker, start, samples))
        ends[speaker] = start + samples
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(cut)}\n" for cut in cuts))
    prepared(tmp_path / "a.jsonl")
    assert heard(tmp_path / "save/train.csv") == heard(tmp_path / "reference/train.csv")


@pytest.mark.parametrize(
    "layout",
    [
        "SpeechBrain's manifest",
        "SpeechBrain's manifest.",
        "WeSpeaker's list",
        "lhotse's cuts",
    ],
)
def test_further_columns_are_columns_of_the_manifest(
    layout, corpus, prepared, tmp_path
):
    rows = rows_of(corpus)
    path = WRITERS[layout](rows, tmp_path / "data")
    wanted = {"language": [f"l{k % 3}, x" if k % 4 else "" for k in range(len(rows))]}
    if path.suffix == ".csv":
        lines = path.read_text().splitlines()
        lines = [
            f'{line},"{text}"'
            for line, text in zip(lines, ["language", *wanted["language"]], strict=True)
        ]
        path.write_text("\n".join(lines))
    elif path.suffix == ".json":
        given = json.loads(path.read_text())
        for one, text in zip(given.values(), wanted["language"], strict=True):
            one |= {"language": text} if text else {}
        path.write_text(json.dumps(given))
    elif path.suffix == ".list":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "\n".join(
                json.dumps({**one, "language": text})
                for one, text in zip(lines, wanted["language"], strict=True)
            )
        )
    else:
        wanted = {"gender": ["F"] * len(rows)}
    prepared(path)
    order = {name: place for place, (name, *_) in enumerate(rows)}
    manifest = read_manifest(tmp_path / "save/train.csv")
    for label, texts in wanted.items():
        places = [order[one.ID] for one in manifest]
        read = [dict(one.labels)[label] for one in manifest]
        assert read == [texts[place] for place in places]


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda m: m | {"u.spk": b"ann"}, "has only one of u.spk and its audio; 1 utt"),
        (lambda m: m | {"u.wav": b"RIFF"}, "has only one of u.spk and"),
        (
            lambda m: m | {"u.spk": b"\xff", "u.wav": b""},
            r"\('u'\): .*no text that UTF-8 can write",
        ),
        (lambda m: m | {"u.spk": b" ", "u.wav": b""}, r"\('u'\): it has no speaker"),
        (
            lambda m: m | {"u.spk": b"ann", "u.wav": b"", "u.flac": b""},
            r"\('u'\): the utterance is listed twice",
        ),
    ],
)
def test_a_shard_without_pairs_of_audio_and_speaker_is_named(
    spoil, match, corpus, prepared, tmp_path
):
    path = as_shards(rows_of(corpus), tmp_path / "data")
    write_tar(
        tmp_path / "data/shards_000000001.tar", spoil(shard_of(rows_of(corpus)[1::3]))
    )
    place = (
        ""
        if "('u" in match.replace("\\", "")
        else r"shard.list, line 2: .*shards_000000001.tar.*"
    )
    refused(path, prepared, place + match)
    assert not list((tmp_path / "save").glob("*"))


def test_a_shard_whose_members_no_path_could_name_is_named(corpus, prepared, tmp_path):
    path = as_shards(rows_of(corpus), tmp_path / "data")
    (tmp_path / "data/shards_000000002.tar").rename(tmp_path / "data/shard_2")
    path.write_text("shards_000000000.tar\nshards_000000001.tar\nshard_2\n")
    refused(path, prepared, r"line 3: .*shard_2, or its name does not end in \.tar")


def test_an_utterance_of_two_shards_is_named(corpus, prepared, tmp_path):
    path = as_shards(rows_of(corpus), tmp_path / "data")
    shutil.copy(
        tmp_path / "data/shards_000000000.tar", tmp_path / "data/shards_000000002.tar"
    )
    refused(path, prepared, "utterance 17 .* is listed twice")


def test_one_bad_row_of_many_is_named_and_nothing_is_written(
    corpus, prepared, tmp_path
):
    rows, count = rows_of(corpus), 50_000
    lines = [f"u{k},{rows[k % 24][1]},0,800,{rows[k % 24][2]}" for k in range(count)]
    lines[count - 7] = lines[count - 7].replace("0,800", "800,0")
    write_tables(tmp_path, **{"a.csv": ["ID,wav,start,stop,spk_id", *lines]})
    refused(tmp_path / "a.csv", prepared, f"line {count - 5}: start is 800, stop 0")
    assert not list((tmp_path / "save").glob("*"))


def as_stereo(rows, folder):
    """Each file with noise, by turns in the channel before and behind it."""
    folder.mkdir()
    made = []
    for number, (name, path, speaker) in enumerate(rows):
        wav = soundfile.read(path)[0]
        noise = np.random.default_rng(number).uniform(-0.1, 0.1, len(wav))
        pair = [noise, wav] if number % 2 else [wav, noise]
        soundfile.write(folder / f"{number}.wav", np.stack(pair, axis=1), 16000)
        made.append((name, folder / f"{number}.wav", speaker))
    return made


@pytest.mark.parametrize("channel", [None, 1, "mix"])
@pytest.mark.parametrize("layout", ["SpeechBrain's manifest", "lhotse's cuts"])
def test_the_channel_of_a_row_is_read_whatever_is_chosen_for_others(
    layout, channel, corpus, prepared, tmp_path
):
    prepared(save="reference")
    rows = as_stereo(rows_of(corpus), tmp_path / "stereo")
    if layout == "lhotse's cuts":
        cuts = [cut_of(*row) for row in rows]
        for number, cut in enumerate(cuts):
            channels = {"channel": number % 2, "supervisions__0__channel": number % 2}
            spoilt(cut, **channels, recording__sources__0__channels=[0, 1])
        data = tmp_path / "a.jsonl"
        data.write_text("".join(f"{json.dumps(cut)}\n" for cut in cuts))
    else:
        lines = [f"{n},{p},{s},{k % 2}" for k, (n, p, s) in enumerate(rows)]
        write_tables(tmp_path, **{"a.csv": ["ID,wav,spk_id,channel", *lines]})
        data = tmp_path / "a.csv"
    prepared(data, channel=channel)
    assert heard(tmp_path / "save/train.csv") == heard(tmp_path / "reference/train.csv")


@pytest.mark.parametrize(
    ("channels", "stereo", "cut"),
    [("AB", True, False), ("AB", True, True), ("12", True, False), ("BB", False, True)],
)
def test_the_channel_of_reco2file_and_channel_is_read(
    channels, stereo, cut, corpus, prepared, tmp_path
):
    """Of a file of one channel it says which one the file was made of."""
    prepared(save="reference")
    rows = rows_of(corpus)
    rows = as_stereo(rows, tmp_path / "stereo") if stereo else rows
    data = as_kaldi(rows, tmp_path / "kaldi")
    names = [name for name, *_ in rows]
    lines = [f"{n} {n} {channels[k % 2]}" for k, n in enumerate(names)]
    parts = {"segments": [f"{n} {n} 0 -1" for n in names]} if cut else {}
    write_tables(data, reco2file_and_channel=lines, **parts)
    prepared(data)
    assert heard(tmp_path / "save/train.csv") == heard(tmp_path / "reference/train.csv")
    before = list_speech(DataSettings(str(data))).digest()
    write_tables(data, reco2file_and_channel=lines[1:])
    assert (list_speech(DataSettings(str(data))).digest() != before) == stereo


def test_a_channel_that_a_file_has_not_is_named(corpus, prepared, tmp_path):
    lines = [f"{n},{p},{s},{k // 23}" for k, (n, p, s) in enumerate(rows_of(corpus))]
    write_tables(tmp_path, **{"a.csv": ["ID,wav,spk_id,channel", *lines]})
    refused(tmp_path / "a.csv", prepared, r"1 of 24 .* has no channel 1: it has 1")
