"""The benchmarks of reading, on a corpus and a manifest that are small."""

import pytest
import torch

from tests.benchmarks import manifests, reading
from tests.benchmarks.harness import NotEqual

CPU = torch.device("cpu")
pytestmark = pytest.mark.slow


@pytest.fixture
def setting():
    return reading.Setting(speakers=2, utterances=2, seconds=4, batch=4, repeats=2)


def test_ways_of_reading_stand_beside_speechbrains(setting, tmp_path):
    result = reading.run(CPU, setting)
    by_name = {row["input path"]: row for row in result.rows}
    assert by_name["speechbrain_rev, packed"]["baseline"] == "SpeechBrain, WAV"
    assert by_name["SpeechBrain, FLAC"]["times the baseline"] == 1
    assert all(row["utterances per second"] > 0 for row in result.rows)
    assert len(result.rows) == 10
    result.save(tmp_path, CPU)


def test_chunks_that_differ_print_nothing(setting, monkeypatch):
    written = reading.Packing.add
    monkeypatch.setattr(
        reading.Packing, "add", lambda self, name, wav: written(self, name, 0.5 * wav)
    )
    with pytest.raises(NotEqual, match="packed wavs are not"):
        reading.run(CPU, setting)


def test_stock_chunks_that_are_no_pieces_print_nothing(setting, monkeypatch):
    load = reading.audio_io.load
    monkeypatch.setattr(
        reading.audio_io,
        "load",
        lambda *path, **part: (0.5 * load(*path, **part)[0], 16000),
    )
    with pytest.raises(NotEqual, match="no piece of"):
        reading.run(CPU, setting)


def test_a_manifest_stands_beside_speechbrains(tmp_path):
    setting = manifests.Setting(rows=3000, few=100, workers=2, batch=4, batches=10)
    result = manifests.run(CPU, setting)
    ours, theirs = result.rows
    assert ours["rows"] == theirs["rows"] == 3000
    assert ours["s to the first batch"] > 0
    result.save(tmp_path, CPU)


def test_manifests_of_other_rows_print_nothing(monkeypatch):
    answers = iter([{"rows": [3]}, {"rows": [3]}, {"rows": [3]}, {"rows": [4]}])
    monkeypatch.setattr(manifests, "_in_a_process", lambda *_: next(answers))
    with pytest.raises(NotEqual, match="other rows"):
        manifests.run(CPU, manifests.Setting(rows=20, few=10))
