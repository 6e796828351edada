"""The benchmark of embedding, with an encoder that is small."""

import numpy as np
import pytest
import torch

from tests.benchmarks import embedding
from tests.benchmarks.harness import NotEqual

SMALL = embedding.Setting(
    encoder="revnet57",
    widths=(8,) * 4,
    blocks=(1,) * 4,
    utterances=9,
    shortest_seconds=0.3,
    longest_seconds=1.0,
    repeats=2,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def result():
    return embedding.run(CPU, SMALL)


@pytest.fixture
def case(tmp_path):
    return embedding.Case(SMALL, CPU, tmp_path)


def test_each_job_has_a_ratio_to_the_script(result, tmp_path):
    ratios = {
        (row["job"], row["way"]): row["times the baseline"] for row in result.rows
    }
    jobs = {job for job, _ in ratios}
    assert len(jobs) == 3
    for job in jobs:
        assert ratios[job, embedding.BASELINE] == 1.0
        assert ratios[job, "embed_into"] > 0
    # What is there is read from a file.
    assert ratios["both sides, run again", "embed_into"] > 3
    result.save(tmp_path, CPU)


def test_parts_make_up_the_time_and_only_batches_are_padded(result):
    by_way = {row["way"]: row for row in result.rows[:3]}
    for row in by_way.values():
        parts = [
            row[f"{part}, %"] for part in ("encoder", "features", "reading and rest")
        ]
        assert sum(parts) == pytest.approx(100)
        assert min(parts) > 0
    assert by_way["one by one"]["batches"] == SMALL.utterances
    assert by_way["one by one"]["padding, %"] == 0
    assert by_way[embedding.BASELINE]["batches"] == 2
    assert by_way[embedding.BASELINE]["padding, %"] > 0


def test_the_script_embeds_each_side_by_itself(case):
    assert len(case.sides["enrol"]) == SMALL.utterances
    assert set(case.sides["test"]) <= set(case.files)
    with embedding.watched(case.script.model, CPU) as parts:
        found = case.script.embed(["enrol", "test"])
    assert parts.calls == 4
    assert {side: set(found[side]) for side in found} == {
        side: set(names) for side, names in case.sides.items()
    }


def test_embeddings_that_depend_on_their_companions_print_nothing(case, monkeypatch):
    rows = case.anew()
    monkeypatch.setattr(case, "anew", lambda: rows + np.float32(1e-3) * abs(rows))
    with pytest.raises(NotEqual, match="off by"):
        embedding.check(case)
