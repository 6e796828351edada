"""Each file that was seen is used or left out for a reason, and both are written down."""

import re
from collections import Counter

import numpy as np
import pytest
import soundfile

from speechbrain_rev.data import read_manifest
from speechbrain_rev.data.dataset import ChunkDataset
from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.manifest import Cause
from speechbrain_rev.data.overview import look_at
from tests.corpus import RATE, write_corpus

from .conftest import left_out

#: Where each file that is left out lies below the data folder, and why it is.
LEFT = {
    "wav/id9/s/other.wma": Cause.SUFFIX.words,
    "wav/id9/s/rate.wav": Cause.RATE.words,
    "wav/id9/s/stereo.wav": Cause.CHANNELS.words,
    "wav/id9/s/empty.wav": Cause.EMPTY.words,
    "wav/id9/s/silent.wav": Cause.SILENT.words,
    "wav/id9/s/short.wav": Cause.SHORT.words,
    "wav/id9/s/call.amr": Cause.SUFFIX.words,
    "wav/id9/s/good.ogg": Cause.ORIGINAL.words,
    "wav/id8/s/none.wav": Cause.EMPTY.words,
    "wav/nobody.wav": Cause.NO_SPEAKER.words,
    "wav/.cache/s/old.wav": Cause.HIDDEN.words,
    "beside.wav": Cause.BESIDE.words,
    ".trash/beside.wav": Cause.HIDDEN.words,
    **{
        f"wav/{speaker}/s00/00000.wav": Cause.TESTED.words
        for speaker in ("id00000", "id00001")
    },
}


@pytest.fixture
def one_of_each(tmp_path):
    """Four speakers of three utterances of 1 s or more, and one file for each reason."""
    folder = write_corpus(
        tmp_path / "data", speakers=4, sessions=1, utterances=1, seconds=1.5
    )
    noise = 0.1 * np.random.default_rng(0).standard_normal(2 * RATE)
    files = {
        "rate.wav": (noise, 8000),
        "stereo.wav": (np.stack([noise, noise], 1), RATE),
        "empty.wav": (noise[:0], RATE),
        "silent.wav": (0 * noise, RATE),
        "short.wav": (noise[: RATE // 2], RATE),
        "good.wav": (noise, RATE),
        "more.wave": (noise, RATE),
        "../../id8/s/none.wav": (noise[:0], RATE),
        "../../.cache/s/old.wav": (noise, RATE),
        "../../nobody.wav": (noise, RATE),
        "../../../beside.wav": (noise, RATE),
        "../../../.trash/beside.wav": (noise, RATE),
    }
    bad = folder / "wav/id9/s"
    bad.mkdir(parents=True)
    for name in ("other.wma", "call.amr", "good.ogg"):
        (bad / name).write_bytes(b"\0")
    for name, (wav, rate) in files.items():
        (bad / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(bad / name, wav, rate, format="WAV")
    a, b = (f"id0000{s}/s00/00000.wav" for s in range(2))
    (tmp_path / "trials.txt").write_text(f"1 {a} {a}\n0 {a} {b}\n")
    return {
        "data": folder,
        "trial_lists": (str(tmp_path / "trials.txt"),),
        "bad_files": "drop",
        "check_audio": True,
        "sentence_len": 1.0,
    }


@pytest.mark.parametrize("short", ["repeat", "pad", "drop"])
def test_seen_are_used_and_left_out_by_file_and_by_reason(
    prepared, one_of_each, tmp_path, short
):
    summary = prepared(**one_of_each, short=short)
    save, data = tmp_path / "save", one_of_each["data"]
    left = {
        path.removeprefix(f"{data}/"): reason for path, reason in left_out(save).items()
    }
    expected = dict(LEFT)
    if short != "drop":
        del expected["wav/id9/s/short.wav"]
    assert left == expected
    used = {
        row.wav.removeprefix(f"{data}/") for row in read_manifest(save / "train.csv")
    }
    audio = {
        path.relative_to(data).as_posix()
        for path in data.rglob("*")
        if path.suffix in (".wav", ".wave", ".wma", ".amr", ".ogg")
    }
    assert used | left.keys() == audio
    assert not used & left.keys()
    assert summary.left_out == Counter(expected.values())
    assert summary.seen() == len(audio)
    how = {"repeat": "repeated", "pad": "padded with zeros"}.get(short)
    words = f"Of those used: 1 shorter than a segment, {how}."
    assert (words in summary.in_words()) == (short != "drop")
    assert summary.lost == ["id8"]
    assert "without a usable utterance: 1, such as id8." in summary.in_words()
    settings = {k: v for k, v in one_of_each.items() if k != "data"}
    overview = look_at(DataSettings(str(data), **settings))
    assert overview.plain()["lost_speakers"] == ["id8"]
    assert re.search("speakers without utterances +1, such as id8\n", overview.text())
    assert overview.plain()["single_speakers"] == ["id00002", "id00003"]
    assert summary.single == 2


@pytest.mark.parametrize("short", ["repeat", "pad"])
def test_a_short_clip_comes_to_a_segment_as_asked(
    prepared, one_of_each, tmp_path, short
):
    prepared(**one_of_each, short=short)
    rows = read_manifest(tmp_path / "save/train.csv")
    numbers = {name: n for n, name in enumerate(rows.speaker_names)}
    data = ChunkDataset(rows, numbers, samples=RATE, short=short)
    place = [row.ID for row in rows].index("id9/s/short")
    wav = data[1, place].wav
    clip = soundfile.read(rows[place].wav, dtype="float32")[0]
    behind = clip if short == "repeat" else 0 * clip
    assert wav.tolist() == [*clip, *behind]


def test_a_segment_s_length_is_part_of_lists_that_drop_the_short_ones_alone(
    prepared, one_of_each, tmp_path
):
    """Until a run has checkpoints its lists follow; then those that would change are refused."""
    words = "shorter than a segment, repeated"
    assert prepared(**one_of_each).treated == {words: 1}
    assert prepared(**one_of_each | {"sentence_len": 0.4}).treated == {}
    assert prepared(**one_of_each, short="drop").left_out[Cause.SHORT.words] == 1
    (tmp_path / "save/CKPT+1").mkdir()
    (tmp_path / "save/CKPT+1/CKPT.yaml").touch()
    for changed in ({"sentence_len": 0.4, "short": "drop"}, {"short": "repeat"}):
        with pytest.raises(ValueError, match="a run on other data"):
            prepared(**one_of_each | changed)
