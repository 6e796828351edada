"""What `speechbrain-rev data` shows is what a preparation lists."""

import json
from collections import Counter

import pytest
import soundfile

from speechbrain_rev.data import read_manifest
from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.overview import histogram, look_at

from .conftest import left_out, snapshot


@pytest.mark.parametrize("short", ["repeat", "drop"])
def test_it_shows_what_a_preparation_lists_and_writes_nothing(
    prepared, corpus, tmp_path, short
):
    settings = {"short": short, "sentence_len": 0.1}
    before = snapshot(corpus)
    overview = look_at(DataSettings(str(corpus), **settings))
    assert snapshot(corpus) == before
    assert list(tmp_path.iterdir()) == []
    summary = prepared(corpus, **settings)
    rows = list(read_manifest(tmp_path / "save/train.csv"))
    plain = json.loads(json.dumps(overview.plain()))
    assert plain["seconds"] == pytest.approx(sum(row.samples for row in rows) / 16000)
    assert plain["utterances"] == len(rows)
    assert [row["ID"] for row in plain["rows"]] == [row.ID for row in rows[:3]]
    assert [row["samples"] for row in plain["rows"]] == [r.samples for r in rows[:3]]
    assert plain["left_out"] == Counter(left_out(tmp_path / "save").values())
    assert bool(plain["left_out"]) == (short == "drop")
    assert plain["treated"] == summary.treated
    assert bool(summary.treated) == (short != "drop")
    bars = plain["utterance_seconds"]["histogram"]
    assert sum(bar["utterances"] for bar in bars) == len(rows)
    assert plain["headers"] == [{"sample_rate": 16000, "channels": 1, "files": 24}]
    assert overview.refused == ""


def test_lengths_are_in_the_bar_that_begins_with_them():
    bars = histogram([0.5, 1.999, 2.0, 8000.0])
    counted = [tuple(bar.values()) for bar in bars if bar["utterances"]]
    assert counted == [(0.5, 1, 1), (1, 2, 1), (2, 3, 1), (3600, None, 1)]
    assert [bar["to"] for bar in bars[:-1]] == [bar["from"] for bar in bars[1:]]
    assert histogram([]) == []


def test_what_a_training_would_refuse_is_refused_with_all_figures(tmp_path):
    for name, rate in (("id1/s/a.wav", 16000), ("id2/s/b.wav", 8000)):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True)
        soundfile.write(path, [0.0, 0.5], rate)
    overview = look_at(DataSettings(str(tmp_path / "data")))
    assert overview.refused.startswith("1 of 2 files cannot be used: 1 other")
    assert (
        "1 file of 8000 Hz, 1 channel; 1 file of 16000 Hz, 1 channel\n"
        in overview.text()
    )
    overview = look_at(DataSettings(str(tmp_path / "data"), bad_files="drop"))
    assert overview.refused.startswith("Only 1 speaker left for training: 2 f")
    overview = look_at(
        DataSettings(str(tmp_path / "data"), sample_rate=4000, bad_files="drop")
    )
    assert overview.plain()["utterances_of_a_speaker"]["max"] is None
    assert "utterances of a speaker      -\n" in overview.text()
