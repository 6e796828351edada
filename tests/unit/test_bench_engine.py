"""The gate of the engine's benchmark: what is wrong is told, what is missing is shown."""

import functools
import sys
from importlib import metadata

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.benchmarks import bench_engine, peers
from tests.benchmarks.engine_gate import (
    FLOAT,
    PLAIN,
    SCENARIOS,
    Chain,
    differing_bits,
    mistakes,
    wrongs,
)
from tests.benchmarks.harness import NotEqual, Result
from tests.benchmarks.precisions import PRECISIONS

CPU = torch.device("cpu")
CHAIN = Chain("basic", 2)
BF16 = PRECISIONS["bf16"]
DROPOUT, NO_GRADIENT, WRITTEN_TO, HALF = SCENARIOS


class Right(peers.Plain):
    def forward(self, x):
        # What autograd saves is not what the caller may write to.
        return tuple(y * 1 for y in super().forward(x))


class Twice(Right):
    def forward(self, x):
        with torch.no_grad(), torch.random.fork_rng():
            super().forward(x)
        return super().forward(x)


class Doubled(Right):
    def forward(self, x):
        return tuple(2 * y - y.detach() for y in super().forward(x))


class RedrawsDropout(Right):
    def forward(self, x):
        run = super().forward
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


class NeedsGradient(Right):
    def forward(self, x):
        streams = super().forward(x)
        return streams if x.requires_grad else tuple(y.detach() for y in streams)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        ctx.kept, ctx.meant = y.detach(), x.clone()
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.kept / ctx.meant


class KeepsItsOutput(Right):
    def forward(self, x):
        return tuple(Keeps.apply(y) for y in super().forward(x))


class RefusesHalves(Right):
    def forward(self, x):
        if x.dtype is torch.bfloat16:
            raise RuntimeError("Input type and weight type should be the same")
        return super().forward(x)


@pytest.mark.parametrize(
    ("network", "scenario", "precision", "words"),
    [
        (Twice, PLAIN, FLOAT, "statistics updated 2 times"),
        (Doubled, PLAIN, FLOAT, "gradients 100 % off"),
        (Doubled, PLAIN, BF16, "gradients 100 % off, stored "),
        (RedrawsDropout, DROPOUT, FLOAT, "dropout: gradients "),
        (NeedsGradient, NO_GRADIENT, FLOAT, "input without gradient: nothing trains"),
        (KeepsItsOutput, WRITTEN_TO, FLOAT, "output written to: gradients 50 % off"),
        (RefusesHalves, HALF, BF16, "input in half: raises RuntimeError"),
    ],
)
def test_what_a_way_gets_wrong_is_told_of_its_scenario_alone(
    network, scenario, precision, words
):
    way = peers.Way("wrong", network)
    for each in (PLAIN, *SCENARIOS):
        found = mistakes(CHAIN, way, precision, CPU, each)
        told = [f for f in found if f.startswith(words)]
        assert len(told) == (each == scenario)


def test_a_way_that_is_right_gets_nothing_wrong():
    way = peers.Way("right", Right)
    subjects = [(CHAIN, scenario) for scenario in (PLAIN, *SCENARIOS)]
    assert wrongs(subjects, way, FLOAT, CPU) == []


@pytest.mark.parametrize("precision", [FLOAT, BF16])
@pytest.mark.parametrize("way", [w for w in peers.WAYS if w.ours], ids=lambda w: w.name)
def test_ways_of_ours_get_nothing_wrong(way, precision):
    subjects = [(CHAIN, scenario) for scenario in (PLAIN, *SCENARIOS)]
    assert wrongs(subjects, way, precision, CPU) == []


def test_torchs_checkpoint_updates_statistics_twice_and_else_is_right():
    way = peers.Way("torch checkpoint", peers.Checkpointed)
    subjects = [(CHAIN, scenario) for scenario in (PLAIN, *SCENARIOS)]
    assert wrongs(subjects, way, FLOAT, CPU) == ["statistics updated 2 times"]


def test_a_mistake_of_ours_ends_the_run():
    ours = peers.Way("ours", Twice, {"streams": "float"})
    with pytest.raises(NotEqual, match=r"ours .* statistics updated 2 times"):
        wrongs([(CHAIN, PLAIN)], ours, FLOAT, CPU)


def test_exact_streams_must_have_the_bits_of_stored_ones():
    float_streams = functools.partial(peers.Ours, mode="reconstruct", streams="float")
    settings = {"mode": "reconstruct", "streams": "exact"}
    right = peers.our_way("exact", **settings)
    wrong = peers.Way("float", float_streams, settings)
    assert differing_bits(CHAIN, right, FLOAT, CPU) == []
    assert differing_bits(CHAIN, wrong, FLOAT, CPU) == [
        "gradients have other bits than stored ones"
    ]


def test_peers_that_are_missing_have_rows_that_say_so(monkeypatch):
    for module in ("memcnn", "revtorch.revtorch", "revlib"):
        monkeypatch.setitem(sys.modules, module, None)
    subjects = [(CHAIN, PLAIN)]
    verdicts = {
        way: bench_engine.verdict(way, subjects, FLOAT, CPU)
        for way in (peers.STORE, *peers.PEERS)
    }
    sizes = bench_engine.Sizes(2, 1, 8, 1, 2, (1,))
    subject = bench_engine.chain("basic", 1)
    rows = bench_engine.rows_of(subject, verdicts, "float32", CPU, sizes)
    assert [row["way"] for row in rows] == ["store", "MemCNN", "RevTorch", "revlib"]
    assert rows[0]["wrong"] == "nothing"
    assert rows[0]["times the baseline"] == rows[0]["share of the baseline"] == 1
    for row in rows[1:]:
        assert row["wrong"].startswith("not installed: ")
        assert "pip install -e .[peers]" in row["wrong"]
        assert row["s per step"] is row["GB per utterance"] is None
    assert Result("", "", "", rows, "").table().count("not installed") == 3


def test_missing_versions_are_told(monkeypatch):
    def version(peer):
        raise metadata.PackageNotFoundError(peer)

    monkeypatch.setattr(metadata, "version", version)
    assert peers.versions(peers.WAYS) == (
        "memcnn not installed, RevTorch not installed, revlib not installed"
    )


def test_storages_that_are_emptied_count_as_empty():
    with bench_engine.ActualBytes() as meter:
        x = torch.zeros(1000)
        x.untyped_storage().resize_(0)
        y = torch.zeros(500)
        assert (meter.live, meter.peak) == (2000, 4000)
        x.untyped_storage().resize_(8000)
        y = y + 1
    assert meter.peak == 8000 + 2 * 2000


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_memcnn_if_installed_updates_statistics_three_times():
    pytest.importorskip("memcnn", reason="the extra 'peers' is not installed")
    assert mistakes(CHAIN, peers.PEERS[0], FLOAT, CPU) == ["statistics updated 3 times"]
