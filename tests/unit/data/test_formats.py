"""The formats of a corpus are read as the same speakers and samples, or refused by row."""

import json
import shutil

import pytest
import soundfile
import torch

from speechbrain_rev.data import FORMATS, open_corpus, read_audio, read_manifest
from speechbrain_rev.data.packing import pack


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
        if "train-clean" in name:
            (folder / "SPEAKERS.TXT").touch()
        if name.startswith("data/"):
            dev = sorted({speaker for *_, speaker in rows})
            write_tables(folder / "dev", **{"dev.lst": dev})
        return folder

    return write


LAYOUTS = {
    "SpeechBrain's manifest": as_csv,
    "SpeechBrain's manifest.": as_json,
    "Kaldi directory": as_kaldi,
    "Kaldi directory.": as_segments,
    "WeSpeaker's list": as_wespeaker,
    "LibriSpeech": placed("train-clean-100/{speaker}/7/{speaker}-7-{number:04}.wav"),
    "VCTK": placed("wav48_silence_trimmed/{speaker}/{speaker}_{number:03}_mic1.wav"),
    "CN-Celeb": placed("data/{speaker}/singing-01-{number:03}.wav"),
    "VoxCeleb": placed("dev/aac/{speaker}/s/{number:05}.wav"),
    "folders of speakers": placed("{speaker}/{number:03}.wav"),
    "speaker_utterance files in one folder": placed("{speaker}_{number:03}.wav"),
}


def heard(path):
    """Speakers and samples of a manifest."""
    return [
        (u.spk_id, u.samples, read_audio(u.wav, sample_rate=16000).tolist())
        for u in read_manifest(path)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_format_gives_the_speakers_and_samples_of_voxcelebs(
    layout, corpus, prepared, tmp_path, capsys
):
    prepared(save="reference")
    capsys.readouterr()
    data = LAYOUTS[layout](rows_of(corpus), tmp_path / "data")
    assert open_corpus(data).format == layout.rstrip(".")
    summary = prepared(data)
    said = capsys.readouterr().out
    assert f"Understood as {layout.rstrip('.')}: 24 utterances of 6 speakers" in said
    assert said.count(" of id0000") == 3
    assert heard(tmp_path / "save/train.csv") == heard(tmp_path / "reference/train.csv")
    assert (summary.seen, summary.utterances, summary.speakers) == (24, 24, 6)
    prepared(data, "valid", valid_speakers=2)
    prepared(data, "valid", valid_speakers=2)


@pytest.mark.parametrize("layout", ["LibriSpeech", "VCTK", "VoxCeleb"])
def test_a_packed_folder_is_recognised_as_what_it_was(layout, corpus, tmp_path):
    data = LAYOUTS[layout](rows_of(corpus), tmp_path / "data")
    pack(data, tmp_path / "data.packed", sample_rate=16000)
    one, other = open_corpus(data), open_corpus(tmp_path / "data.packed")
    assert one.format == other.format == layout
    names = list(one.utterances())
    assert sorted(other.utterances()) == sorted(names)
    assert [other.speaker(n) for n in names] == [one.speaker(n) for n in names]


def test_every_list_format_is_tried():
    assert set(FORMATS) <= set(LAYOUTS)


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
        ValueError, match=r"24 no speaker's folder .*finds no speaker in"
    ):
        prepared(data, "none", speaker_from="nobody")


def test_speakers_outside_cncelebs_development_set_are_passed_over(
    corpus, prepared, tmp_path
):
    data = LAYOUTS["CN-Celeb"](rows_of(corpus), tmp_path / "data")
    write_tables(data / "dev", **{"dev.lst": [f"id0000{n}" for n in range(4)]})
    summary = prepared(data)
    assert (summary.speakers, summary.passed_over, summary.seen) == (4, 8, 24)
    assert open_corpus(data).session("id00000/singing-01-000.wav") == "singing-01"


def test_what_is_seen_is_used_or_left_out_for_a_reason(corpus, prepared, tmp_path):
    rows = rows_of(corpus)
    lines = [f"{n},{p},0,{800 if k else 10**6},{s}" for k, (n, p, s) in enumerate(rows)]
    write_tables(tmp_path, **{"a.csv": ["ID,wav,start,stop,spk_id", *lines]})
    with pytest.raises(
        ValueError, match=r"1 of 24 files .* a segment of it begins at 0"
    ):
        prepared(tmp_path / "a.csv")
    assert not list((tmp_path / "save").glob("*.csv"))
    trials = tmp_path / "trials.txt"
    names = rows[-1][0], rows[-2][0]
    trials.write_text(f"1 {names[0]} {names[1]}\n0 {names[0]} {rows[-5][0]}\n")
    settings = {"trial_lists": (str(trials),), "bad_files": "drop"}
    prepared(tmp_path / "a.csv", valid_speakers=2, **settings)
    table = (tmp_path / "save/accounting.csv").read_text().splitlines()
    counts = {name: int(count) for name, count in (row.split(",") for row in table[1:])}
    assert counts.pop("seen") == sum(counts.values()) == 24
    assert counts["left out: speaker in a trial list"] == 8
    assert counts["left out: cannot be read"] == 1


BAD_TABLES = [
    ({"utt2spk": ["u1 ann"], "wav_scp": ["u1 sox a.wav - |"]}, "line 1: .* a command"),
    ({"utt2spk": ["u1 ann"], "wav_scp": ["u1 | touch run"]}, "line 1: .* a command"),
    ({"utt2spk": ["u1 ann", "u1 bob"]}, "line 2: 'u1' is 'bob' and was 'ann' before"),
    ({"utt2spk": ["u1"]}, "line 1: 'u1' has one field"),
    ({"utt2spk": ["u2 ann"]}, "no speaker of 'u1' of wav.scp"),
    (
        {"segments": ["u1 u1 2 1"]},
        "line 1: it ends at 1 s, not behind its start at 2 s",
    ),
    ({"segments": ["u1 u1 -1 1"]}, "line 1: it begins at -1 s"),
    ({"segments": ["u1 u1 nan 1"]}, "line 1: it begins at nan s"),
    ({"segments": ["u1 u1 a b"]}, "line 1: 'a b' are no start and end"),
    ({"segments": ["u1 u2 0 1"]}, "line 1: wav.scp has no 'u2'"),
    ({"segments": ["u2 u1 0 1"]}, "no line of 'u1' of utt2spk"),
    ({"utt2spk": [""]}, "utt2spk"),
]
BAD_FILES = [
    ("a.csv", "ID,wav\nu,a.wav\n", r"without \['spk_id'\]"),
    ("a.csv", "ID,wav,spk_id\nu,a.wav,\n", "line 2: spk_id is ''"),
    ("a.csv", "ID,wav,spk_id\nu,a.wav\n", "line 2 has other fields"),
    ("a.csv", "ID,wav,start,stop,spk_id\nu,a.wav,9,3,ann\n", "start is 9 and stop 3"),
    ("a.csv", "ID,wav,start,stop,spk_id\nu,a.wav,-1,3,ann\n", "start is '-1'"),
    ("a.csv", "ID,wav,start,stop,spk_id\nu,a.wav,0,1.5,ann\n", "stop is '1.5'"),
    (
        "a.csv",
        "ID,wav,spk_id\nu,a.wav,ann\nu,a.wav,bob\n",
        "twice, of 'ann' and of 'bob'",
    ),
    ("a.csv", "ID,wav,spk_id\n", "lists no utterance"),
    ("a.csv", b"ID,wav,spk_id\nu,a.wav,\xff\n", "UTF-8"),
    ("a.json", '{"u": {"wav": "a.wav"}}', "'u': spk_id is None"),
    ("a.json", '{"u": 3}', "'u' is no object"),
    ("a.json", "[", "no JSON"),
    ("raw.list", '{"key": "u", "wav": "a.wav"}\n', "line 1: spk is None"),
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
        ["kaldi", "save", *(n.replace("_", ".") for n in {**good, **tables})]
    )


@pytest.mark.parametrize(("name", "content", "match"), BAD_FILES)
def test_bad_rows_of_lists_are_named(name, content, match, prepared, tmp_path):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, prepared, match)
    assert not list((tmp_path / "save").glob("*"))
