"""The pretrained model of a run, and the directions of a new head."""

import shutil

import numpy as np
import pytest

from speechbrain_rev.inference.export import export_run
from speechbrain_rev.training.start_from import chosen_utterances, read_pretrained
from tests.run_folders import SETTINGS, SPEAKERS, write_finished_run, write_run


def test_a_model_has_the_head_of_its_weights_speakers_and_speeds(tmp_path):
    write_finished_run(tmp_path / "run")
    model = read_pretrained(str(tmp_path / "run"))
    assert model.head.speeds == SETTINGS["speeds"]
    assert tuple(model.head.speakers) == SPEAKERS
    assert len(model.head.weight) == 3 * len(SPEAKERS)
    assert model.settings()["embedding_dim"] == 16
    export_run(tmp_path / "run", tmp_path / "model")
    exported = read_pretrained(str(tmp_path / "model"))
    assert (exported.head.speeds, len(exported.head.weight)) == ([1.0], len(SPEAKERS))
    assert exported.weights.fingerprint == model.weights.fingerprint


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("save/label_encoder.txt", "it has no list of training speakers"),
        ("save/CKPT*", "its classifier is not there"),
        (None, "its head has 9 classes, which are not 3 speakers at 1 speed"),
    ],
)
def test_a_model_without_a_known_head_has_the_reason(tmp_path, missing, reason):
    speeds = SETTINGS["speeds"] if missing else [1.0]
    write_finished_run(tmp_path, speeds=speeds)
    for path in tmp_path.glob(missing) if missing else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    model = read_pretrained(str(tmp_path))
    assert (model.head, model.no_head_reason) == (None, reason)


def test_a_damaged_head_is_refused(tmp_path):
    write_finished_run(tmp_path)
    (path,) = tmp_path.glob("save/CKPT*/classifier.ckpt")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"pretrained: .*classifier\.ckpt"):
        read_pretrained(str(tmp_path))


def test_a_run_without_checkpoints_gives_its_encoder(tmp_path):
    write_run(tmp_path)
    assert read_pretrained(str(tmp_path)).head is None


def test_utterances_are_chosen_evenly_among_those_of_a_speaker():
    speakers = np.array([1, 0] * 50 + [2])
    chosen = chosen_utterances(speakers, 12)
    assert len(chosen) == 12 + 12 + 1
    rows = [row for row, _ in chosen]
    assert [speakers[row] for row in rows] == [0] * 12 + [1] * 12 + [2]
    assert [rank for _, rank in chosen] == [*range(12), *range(12), 0]
    assert np.diff(rows[:12]).min() >= 8
