"""A few kills at random moments; python -m tests.reliability.kills has many."""

import pytest
import torch

from tests.reliability import kills


@pytest.mark.slow(drawn=False)
def test_runs_killed_at_random_moments_end_as_if_nobody_had(
    tmp_path, fuzz_seed, pytestconfig
):
    count = 2 if pytestconfig.getoption("--sample") else 6
    outcome = kills.kill_again_and_again(count, tmp_path, fuzz_seed)
    assert outcome.kills == count
    assert outcome.finished >= 1


def test_weights_or_logs_that_differ_are_reported(tmp_path):
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        torch.save({"w": torch.tensor(value)}, folder / "embedding_model.ckpt")
        (folder / "train_log.jsonl").write_text('{"loss": 1}\n')
    kills.compare(tmp_path / "a", tmp_path / "b")
    with pytest.raises(kills.NotTheSame, match="w of"):
        kills.compare(tmp_path / "c", tmp_path / "a")
    (tmp_path / "b" / "train_log.jsonl").write_text('{"loss": 2}\n')
    with pytest.raises(kills.NotTheSame, match="log of"):
        kills.compare(tmp_path / "a", tmp_path / "b")
