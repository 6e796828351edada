"""The benchmark of scoring at scale, on a list that is small."""

import dataclasses

import pytest
import torch

from tests.benchmarks import scoring_at_scale
from tests.benchmarks.harness import NotEqual

SMALL = scoring_at_scale.Setting(
    trials=100,
    utterances=60,
    speakers=10,
    cohort=100,
    dim=16,
    top_n=30,
    compared=20,
    replicates=5,
)
CPU = torch.device("cpu")


def test_scores_are_those_of_a_loop_over_trials(tmp_path):
    result = scoring_at_scale.run(CPU, SMALL)
    (row,) = result.rows
    assert row["trials"] == 100
    assert 0.01 < row["peak GB"] < 10
    result.save(tmp_path, CPU)


def test_scores_that_are_not_print_nothing(monkeypatch):
    found = scoring_at_scale.measure(dataclasses.replace(SMALL, compared=5))
    assert found["off"] < 1e-6
    done = type(
        "Done", (), {"stdout": scoring_at_scale.json.dumps(found | {"off": 2e-6})}
    )
    monkeypatch.setattr(scoring_at_scale.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(NotEqual, match="off by 2e-06"):
        scoring_at_scale.run(CPU, SMALL)
