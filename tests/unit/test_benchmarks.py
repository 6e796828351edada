"""Benchmarks at a small size: figures with a ratio, and none where a check fails."""

import dataclasses
import functools
import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import Training, counted_peaks
from speechbrain_rev.compression import GradientBound, encode
from speechbrain_rev.devices import parse_card
from speechbrain_rev.lobes import build_encoder, inference_form
from speechbrain_rev.sizes import GIB
from tests.benchmarks import (
    __main__,
    bench_engine,
    capped,
    compressed,
    compressed_bounds,
    compressed_checks,
    compressed_targets,
    compressed_training,
    compressed_ways,
    embedding,
    graphs,
    inference,
    manifests,
    peers,
    planned,
    planned_ways,
    reading,
    readme,
    scoring_at_scale,
    tables,
    user_ways,
    users,
)
from tests.benchmarks.angles import angle_degrees
from tests.benchmarks.counts import training_step_peak
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
from tests.corpus import write_corpus

CPU = torch.device("cpu")
TINY = {"widths": (8, 8, 16, 16), "blocks": (1, 2, 1, 1)}
TINIEST = {"widths": (8,) * 4, "blocks": (1,) * 4}
INFERENCE = inference.Setting(
    vanilla=("df_resnet56",),
    widths=(16,) * 4,
    blocks=(1,) * 4,
    batch=1,
    frames=40,
    repeats=2,
)
EMBEDDING = embedding.Setting(
    encoder="revnet57",
    **TINIEST,
    utterances=9,
    shortest_seconds=0.3,
    longest_seconds=1.0,
    repeats=2,
)
SCORING = scoring_at_scale.Setting(
    trials=100,
    utterances=60,
    speakers=10,
    cohort=100,
    dim=16,
    top_n=30,
    compared=5,
    replicates=5,
)
READING = reading.Setting(speakers=2, utterances=2, seconds=4, batch=4, repeats=2)
CHAIN = Chain("basic", 2)
BF16 = PRECISIONS["bf16"]
SCENARIO_OF = {scenario.name.rstrip(": "): scenario for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Short runs of two seeds with compressed activations: setting and result."""
    root = tmp_path_factory.mktemp("speech")
    minivox = write_corpus(root / "minivox", speakers=3, seconds=1.2)
    files = sorted((minivox / "wav").glob("*/*/*"))
    lines = [f"{f.parts[-3]} {f.relative_to(minivox / 'wav')}" for f in files]
    (minivox / "train_list.txt").write_text("\n".join(lines))
    setting = compressed_training.Setting(
        folder=tmp_path_factory.mktemp("runs"),
        batch=2,
        frames=48,
        steps=4,
        last=2,
        seeds=(1,),
        row=TINIEST,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compressed_checks.FOLDER, str(root))
        yield setting, compressed_training.run(CPU, setting)


# No figures where a check fails. Each function makes one thing wrong and runs the check.


def wrong_embeddings(patch, folder):
    case = embedding.Case(EMBEDDING, CPU, folder)
    rows = case.anew()
    patch.setattr(case, "anew", lambda: rows + np.float32(1e-3) * abs(rows))
    embedding.check(case)


def wrong_inference_form(patch, folder):
    encoder = inference.encoder_of("df_resnet56", INFERENCE)
    form = inference_form(encoder)
    form.fc.bias.data += 1e-3
    inference.check("df_resnet56", encoder, form, torch.randn(1, 40, 80))


def wrong_graph(patch, folder):
    plain = graphs.WaveformEncoder(inference.encoder_of("df_resnet56", INFERENCE))
    ways = {"graph": lambda waves, samples: 1.001 * plain.eval()(waves, samples)}
    graphs.check("df_resnet56", plain.eval(), ways, graphs.voices(2, 8000))


def wrong_scores(patch, folder):
    found = scoring_at_scale.measure(SCORING)
    assert found["off"] < 1e-6
    done = types.SimpleNamespace(stdout=json.dumps(found | {"off": 2e-6}))
    patch.setattr(scoring_at_scale.subprocess, "run", lambda *_, **__: done)
    scoring_at_scale.run(CPU, SCORING)


def wrong_packed_samples(patch, folder):
    add = reading.Packing.add
    halved = lambda self, name, wav: add(self, name, 0.5 * wav)  # noqa: E731
    patch.setattr(reading.Packing, "add", halved)
    reading.run(CPU, READING)


def wrong_manifest_rows(patch, folder):
    answers = iter([{"rows": [3]}, {"rows": [3]}, {"rows": [3]}, {"rows": [4]}])
    patch.setattr(manifests, "_in_a_process", lambda *_: next(answers))
    manifests.run(CPU, manifests.Setting(rows=20, few=10))


def wrong_bits_within_a_cap(patch, folder):
    patch.setattr(capped, "gradients", lambda *_: [torch.randn(3)])
    encoder = build_encoder("resnet34", **TINIEST)
    modes = dict.fromkeys(encoder.named_blocks(), "store")
    capped.check_bits(encoder, capped.Plan(modes, None, 1, 1, 1, 1.0, {}), CPU)


def wrong_bits_of_a_plan(patch, folder):
    right = planned_ways.Planned.encoder

    def wrong(self, name, **row):
        plan = dataclasses.replace(self.plan, channels=[None] * 4)
        return right(dataclasses.replace(self, plan=plan), name, **row)

    patch.setattr(planned_ways.Planned, "encoder", wrong)
    planned_ways.check_plans("revnet57")


def wrong_counterpart(patch, folder):
    patch.setattr(planned_ways.PlainEncoder, "variance_floor", 1e-3)
    planned_ways.check_vanilla("revnet57")


def wrong_compiled_gradients(patch, folder):
    plain, feats = planned_ways.vanilla("revnet57", **TINY), torch.randn(2, 40, 80)
    assert planned_ways.check_compiled(plain, plain, feats) == 1.0

    class Rounded(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x.bfloat16().float())

    planned_ways.check_compiled(Rounded(plain), plain, feats)


def wrong_user_gradients(patch, folder):
    patch.setattr(user_ways, "FEW_BLOCKS", TINY)
    patch.setattr(user_ways, "NAMES", ("resnet152",))
    wrong = dataclasses.replace(user_ways.PLAIN[3], name="off", precision="float32")
    patch.setattr(user_ways, "PLAIN", (user_ways.STORE, wrong))
    right = user_ways.small_step

    def step(way, name, device):
        left = right(way, name, device)
        share = 1 + 1e-8 * (way == wrong)
        return dataclasses.replace(left, gradients=share * left.gradients)

    patch.setattr(user_ways, "small_step", step)
    user_ways.check_gradients(CPU)


def wrong_user_counts(patch, folder):
    peak = counted_peaks()["revnet197", "reconstruct", 200](users.BATCH)
    given = user_ways.REVERSIBLE[2], "revnet197", 200
    user_ways.check_committed(*given, peak)
    user_ways.check_committed(*given, peak + 4)


def wrong_statistics_of_ours(patch, folder):
    ours = peers.Way("ours", Twice, {"streams": "float"})
    wrongs([(CHAIN, PLAIN)], ours, FLOAT, CPU)


def beyond_its_bound(patch, folder):
    x = torch.randn(8, 32).relu()
    assert compressed_checks.checked_error("conv", x, encode(x, 0.1)) <= 1
    compressed_checks.checked_error("conv", x + 0.3 * (x > 0), encode(x, 0.1))


def other_zeros(patch, folder):
    x = torch.randn(8, 32).relu()
    compressed_checks.checked_error("conv", x * (x > 0.05), encode(x, 0.1))


def without_speech(patch, folder):
    patch.delenv(compressed_checks.FOLDER, raising=False)
    compressed_checks.real_speech(80, 48)


def without_a_trained_state(patch, folder):
    compressed_ways.read_state(folder / "none.pt")


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (wrong_embeddings, "off by"),
        (wrong_inference_form, "df_resnet56's form for inference is off by"),
        (wrong_graph, "df_resnet56, graph: an embedding is off by"),
        (wrong_scores, "off by 2e-06"),
        pytest.param(
            wrong_packed_samples, "packed wavs are not", marks=pytest.mark.slow
        ),
        (wrong_manifest_rows, "other rows"),
        (wrong_bits_within_a_cap, "other bits"),
        pytest.param(
            wrong_bits_of_a_plan, "as planned are not the bits", marks=pytest.mark.slow
        ),
        (wrong_counterpart, "resnet34 of torch's layers are .* from those"),
        (wrong_compiled_gradients, "Compiled gradients are"),
        (wrong_user_gradients, "resnet152, off, are 1.0e-08 from stored"),
        (wrong_user_counts, "revnet197, .*, at 200 frames holds"),
        (wrong_statistics_of_ours, "ours .* statistics updated 2 times"),
        (beyond_its_bound, "conv is off by"),
        (other_zeros, "conv has other zeros"),
        (without_speech, "names no folder with minivox"),
        (without_a_trained_state, "run --only compressed_training first"),
    ],
)
def test_a_failed_check_prints_no_figures(check, words, monkeypatch, tmp_path):
    with pytest.raises(NotEqual, match=words):
        check(monkeypatch, tmp_path)


# Figures of small runs.


def ratios(result, folder):
    """Save a result and return its rows' ratios by way, job or input path."""
    result.save(folder, CPU)
    keys = {"job", "encoder", "way", "input path", "seed", "rows"}
    return {
        tuple(value for key, value in row.items() if key in keys): row[
            "times the baseline"
        ]
        for row in result.rows
        if "times the baseline" in row
    }


def test_embedding_runs_beside_a_script_that_pads(tmp_path):
    result = embedding.run(CPU, EMBEDDING)
    found = ratios(result, tmp_path)
    jobs = {job for job, _ in found}
    assert len(jobs) == 3
    assert all(found[job, embedding.BASELINE] == 1.0 for job in jobs)
    # The second run reads what is there from a file.
    assert found["both sides, run again", "embed_into"] > 3
    by_way = {row["way"]: row for row in result.rows[:3]}
    for row in by_way.values():
        parts = [row[f"{p}, %"] for p in ("encoder", "features", "reading and rest")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(100)
    assert by_way["one by one"]["batches"] == EMBEDDING.utterances
    assert by_way["one by one"]["padding, %"] == 0 < by_way["embed_into"]["batches"]


@pytest.mark.slow
def test_reversible_encoders_run_beside_their_counterpart(tmp_path):
    result = inference.run(CPU, INFERENCE)
    rows = {row["encoder"]: row for row in result.rows if row["way"] == inference.FORM}
    assert rows.keys() == {"df_resnet56", "df_revnet66", "df_revnet89"}
    assert rows["df_resnet56"]["times the baseline's MB"] == 1.0
    assert rows["df_revnet89"]["times the baseline's MB"] < 1.0


@pytest.mark.slow
def test_graphs_run_beside_pytorch(tmp_path):
    pytest.importorskip("onnxruntime")
    setting = graphs.Setting(("df_revnet89",), INFERENCE, (1, 2), 0.5, repeats=2)
    found = ratios(graphs.run(CPU, setting), tmp_path)
    assert {way for _, way in found} > {graphs.BASELINE}
    assert all(ratio > 0 for ratio in found.values())


@pytest.mark.slow
def test_scores_are_those_of_a_loop_over_trials(tmp_path):
    (row,) = scoring_at_scale.run(CPU, SCORING).rows
    assert row["trials"] == 100
    assert 0.01 < row["peak GB"] < 10


@pytest.mark.slow
def test_reading_and_manifests_run_beside_speechbrains(tmp_path):
    result = reading.run(CPU, READING)
    assert ratios(result, tmp_path)[("SpeechBrain, FLAC",)] == 1
    assert len(result.rows) == 10
    setting = manifests.Setting(rows=3000, few=100, workers=2, batch=4, batches=10)
    ours, theirs = manifests.run(CPU, setting).rows
    assert ours["rows"] == theirs["rows"] == 3000


@pytest.mark.slow
def test_a_plan_within_a_cap_peaks_where_it_was_planned():
    result = capped.run(CPU, ["resnet34"], card_bytes=3 * GIB, batch=2, repeats=2)
    (row,) = result.rows
    # Beside the step there is the loss, some scalars.
    assert row["peak / planned"] == pytest.approx(1, abs=1e-5)
    assert row["recompute / plan"] > 0
    assert row["reconstruct / plan"] == "-"


def test_a_check_of_bits_leaves_the_encoder_as_it_was():
    encoder = build_encoder("df_revnet66", **TINIEST)
    state = {key: value.clone() for key, value in encoder.state_dict().items()}
    modes = dict.fromkeys(encoder.named_blocks(), "store")
    capped.check_bits(encoder, capped.Plan(modes, None, 1, 1, 1, 1.0, {}), CPU)
    assert all(torch.equal(v, state[k]) for k, v in encoder.state_dict().items())


# The gate of the engine's benchmark, with networks that are wrong in one way.


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


class KeepsItsOutput(Right):
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.clone()
            ctx.kept, ctx.meant = y.detach(), x.clone()
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.kept / ctx.meant

    def forward(self, x):
        return tuple(self.Keeps.apply(y) for y in super().forward(x))


class RefusesHalves(Right):
    def forward(self, x):
        if x.dtype is torch.bfloat16:
            raise RuntimeError("Input type and weight type should be the same")
        return super().forward(x)


@pytest.mark.parametrize(
    ("network", "scenario", "precision", "words"),
    [
        (Twice, "", FLOAT, "statistics updated 2 times"),
        (Doubled, "", FLOAT, "gradients 100 % off"),
        (Doubled, "", BF16, "gradients 100 % off, stored "),
        (RedrawsDropout, "dropout", FLOAT, "dropout: gradients "),
        (NeedsGradient, "input without gradient", FLOAT, "input without gradient: n"),
        (KeepsItsOutput, "output written to", FLOAT, "output written to: gradients 50"),
        (RefusesHalves, "input in half", BF16, "input in half: raises RuntimeError"),
    ],
)
def test_a_mistake_is_reported_for_its_scenario_alone(
    network, scenario, precision, words
):
    way = peers.Way("wrong", network)
    for each in (PLAIN, *SCENARIOS):
        found = mistakes(CHAIN, way, precision, CPU, each)
        reported = [f for f in found if f.startswith(words)]
        assert len(reported) == (each == SCENARIO_OF.get(scenario, PLAIN))


@pytest.mark.parametrize(
    ("way", "precision", "found"),
    [
        (peers.Way("right", Right), FLOAT, []),
        (
            peers.Way("torch checkpoint", peers.Checkpointed),
            FLOAT,
            ["statistics updated 2 times"],
        ),
        *((w, p, []) for w in peers.WAYS if w.ours for p in (FLOAT, BF16)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_ways_that_are_right_get_nothing_else_wrong(way, precision, found):
    subjects = [(CHAIN, scenario) for scenario in (PLAIN, *SCENARIOS)]
    assert wrongs(subjects, way, precision, CPU) == found


def test_exact_streams_must_have_the_bits_of_stored_ones():
    settings = {"mode": "reconstruct", "streams": "exact"}
    rounded = functools.partial(peers.Ours, mode="reconstruct", streams="float")
    assert differing_bits(CHAIN, peers.our_way("ours", **settings), FLOAT, CPU) == []
    assert differing_bits(CHAIN, peers.Way("float", rounded, settings), FLOAT, CPU) == [
        "gradients have other bits than stored ones"
    ]


def test_peers_that_are_missing_have_rows_that_say_so(monkeypatch):
    for module in ("memcnn", "revtorch.revtorch", "revlib"):
        monkeypatch.setitem(sys.modules, module, None)
    verdicts = {
        way: bench_engine.verdict(way, [(CHAIN, PLAIN)], FLOAT, CPU)
        for way in (peers.STORE, *peers.PEERS)
    }
    sizes = bench_engine.Sizes(2, 1, 8, 1, 2, (1,))
    subject = bench_engine.chain("basic", 1)
    store, *others = bench_engine.rows_of(subject, verdicts, "float32", CPU, sizes)
    assert store["times the baseline"] == store["share of the baseline"] == 1
    assert [row["way"] for row in others] == ["MemCNN", "RevTorch", "revlib"]
    for row in others:
        assert row["wrong"].startswith("not installed: ")
        assert row["s per step"] is row["GB per utterance"] is None


def test_storages_that_are_emptied_count_as_empty():
    with bench_engine.ActualBytes() as meter:
        x = torch.zeros(1000)
        x.untyped_storage().resize_(0)
        y = torch.zeros(500)
        assert (meter.live, meter.peak) == (2000, 4000)
        x.untyped_storage().resize_(8000)
        y = y + 1
    assert meter.peak == 8000 + 2 * 2000


# Plans of one budget.


SETTING = planned.Setting(
    names=("revnet57",),
    batches=(2, 4),
    frames=40,
    repeats=2,
    memory_budgets=(0.5,),
    backend="aot_eager",
    row=TINY,
)


@pytest.mark.slow
def test_all_ways_are_measured_within_one_budget(tmp_path):
    result = planned.run(CPU, SETTING)
    rows = {(row["way"], row["batch"]): row for row in result.rows}
    for (way, batch), row in rows.items():
        fits = row["peak MB"] <= row["budget MB"]
        assert fits == (row["s per step"] != "does not fit")
        assert fits or way not in ("reconstruct", "planned", "accumulation")
        assert row["baseline"] == f"revnet57 reconstruct, batch {batch}"
        part, stored, checkpointed = (
            rows[f"counterpart {word}", batch]["peak MB"]
            for word in ("part checkpoint", "stored", "torch checkpoint")
        )
        assert part <= max(rows["planned", batch]["peak MB"], checkpointed)
        assert part <= stored
    assert rows["store", 4]["s per step"] == "does not fit"
    assert ("accumulation", 2) not in rows
    assert rows["accumulation", 4]["statistics of"] == 2
    result.save(tmp_path, CPU)
    planned.draw(result, tmp_path / "planned.png")
    assert (tmp_path / "planned.png").read_bytes().startswith(b"\x89PNG")


def planned_row(batch, ratio, way="planned", times=0.5):
    return {
        "encoder": "revnet57",
        "batch": batch,
        "way": way,
        "budget MB": 197.2,
        "statistics of": batch // 2 if way == "accumulation" else batch,
        "times the baseline": times,
        "planned / best extreme": ratio,
    }


def test_verdicts_name_what_was_faster_than_a_plan():
    rows = [planned_row(2, 1.02), planned_row(2, "", "store"), planned_row(4, 0.9)]
    assert planned.verdict(rows).endswith("1.02 times the faster extreme, within 1.03")
    slow = planned.verdict([*rows, planned_row(8, 1.05)])
    assert slow.endswith("NOT within 1.03: revnet57 at batch 8 1.05")
    rows += [planned_row(2, "", "checkpoint", 0.4)]
    assert readme.planned_verdict(rows).startswith(
        "Faster than the plan, in multiples of its time: revnet57 at batch 2 checkpoint "
        "0.80, at batch 4 nothing."
    )


def test_a_committed_plan_is_never_slower_than_an_extreme_that_fits():
    points = {}
    for row in json.loads((readme.RESULTS / "planned_cpu.json").read_text())["rows"]:
        point = points.setdefault((row["encoder"], row["batch"]), {})
        if row["s per step"] != "does not fit":
            assert row["peak MB"] <= row["budget MB"]
            point[row["way"]] = row["s per step"]
    assert len(points) == 6
    for seconds in points.values():
        fitting = [seconds[way] for way in planned.EXTREMES if way in seconds]
        assert seconds["planned"] <= 1.03 * min(fitting)


def recorded(network, batch):
    feats = planned_ways.features(batch, 40, 80)
    step = functools.partial(user_ways.train_step, network, feats, planned_ways.VANILLA)
    return planned_ways.recorded_peak(step)


def test_recorded_peaks_have_what_is_alive():
    alone = planned_ways.recorded_peak(lambda: torch.zeros(1000) + 1)
    assert 8000 <= alone < 9000
    encoder = user_ways.encoder_by(planned_ways.RECONSTRUCT, "revnet57", **TINY)
    assert 2 * recorded(encoder, 2) < recorded(encoder, 8) < 5 * recorded(encoder, 2)
    vanilla = functools.partial(planned_ways.vanilla, "revnet57", **TINY)
    depth = len(vanilla().blocks)
    # Of all blocks the first one's own second run is what takes the most.
    none, some, whole = (
        recorded(vanilla(checkpointed=count), 8) for count in (0, 2, depth)
    )
    assert none > some >= whole


@pytest.fixture
def benchmark():
    """A benchmark of small networks, without what takes long."""
    found = planned.Benchmark.__new__(planned.Benchmark)
    found.name, found.setting, found.counterpart = "revnet57", SETTING, "resnet34"
    found.depth = len(planned_ways.vanilla("revnet57", **TINY).blocks)
    found.updated = {"stored": 1, "checkpoint": 2}
    return found


@pytest.mark.slow
def test_as_few_blocks_are_checkpointed_as_keep_to_the_peak_of_the_plan(benchmark):
    peaks = [benchmark._vanilla("a", 4, i).peak_bytes for i in range(3)]
    few = benchmark._part_checkpointed(4, peaks[2])
    assert few.peak_bytes == peaks[2] < peaks[1] <= peaks[0]
    assert (few.note.split(":")[0], few.updated) == (
        f"the first 2 of {benchmark.depth}",
        2,
    )
    # Where none keeps to it, all are checkpointed.
    assert f"first {benchmark.depth} of" in benchmark._part_checkpointed(4, 0).note


def test_a_plan_is_for_less_where_the_record_is_above_the_budget(
    benchmark, monkeypatch
):
    asked = []

    def planned_within(name, batch, frames, budget_bytes, seconds, **row):
        asked.append(budget_bytes)
        return types.SimpleNamespace(words="", encoder=lambda *_, **__: asked[-1])

    # A record has 30 bytes beyond what is counted.
    monkeypatch.setattr(planned, "planned_within", planned_within)
    monkeypatch.setattr(planned, "recorded_peak", lambda step: step.args[0] + 30)
    benchmark.budget_bytes, benchmark.seconds = 1000, {}
    assert benchmark._planned(2).peak_bytes == 1000
    assert asked == [1000, 970]


def test_a_batch_is_stored_in_as_few_parts_as_fit(benchmark, monkeypatch):
    sizes = {1: 80, 2: 40, 3: 30, 4: 20, 8: 10}
    peak = lambda step: sizes[step.args[2].parts]  # noqa: E731
    monkeypatch.setattr(planned, "recorded_peak", peak)
    for budget, parts, size in [(30, 3, 3), (39, 3, 3), (29, 4, 2), (10, 8, 1)]:
        benchmark.budget_bytes = budget
        (case,) = benchmark._accumulated(8)
        assert (case.updated, case.statistics_of) == (parts, size)
    for budget in (80, 9):
        benchmark.budget_bytes = budget
        assert benchmark._accumulated(8) == []


# What a user can do.


def test_torchs_checkpoint_of_a_user_updates_statistics_twice(monkeypatch):
    monkeypatch.setattr(user_ways, "FEW_BLOCKS", TINY)
    store, checkpointed, recompute = (
        user_ways.small_step(way, "df_resnet233", CPU)
        for way in (user_ways.STORE, *user_ways.PLAIN[1:3])
    )
    for left in (checkpointed, recompute):
        torch.testing.assert_close(left.gradients, store.gradients, rtol=1e-9, atol=0)
    assert (store.updates, checkpointed.updates, recompute.updates) == (1, 2, 1)


@pytest.mark.slow
def test_bytes_of_a_user_s_step_are_counted_as_they_are_held():
    recompute = user_ways.PLAIN[2]
    ours = user_ways.step_bytes(recompute, "resnet34", batch=2, frames=40)
    package = training_step_peak("resnet34", mode="recompute", frames=40, batch=2)
    assert ours == package
    for way in (user_ways.PLAIN[1], user_ways.PLAIN[3]):
        sizes = {"batch": 4, "frames": 40, **TINY}
        counted = user_ways.step_bytes(way, "df_resnet233", **sizes)
        real = user_ways.step_bytes(way, "df_resnet233", without_data=False, **sizes)
        assert counted == real


@pytest.mark.parametrize("card", users.CARDS)
@pytest.mark.parametrize("frames", users.FRAMES)
def test_what_fits_is_what_the_package_says(frames, card):
    row = architecture("revnet197")
    training = Training(parse_card(card).memory_bytes, batch=users.BATCH, frames=frames)
    peak = counted_peaks()["revnet197", "reconstruct", frames](users.BATCH)
    needed = users.needed_bytes(user_ways.STORE, "revnet197", frames, peak)
    fits = training.largest_batch(row, "reconstruct") >= users.BATCH
    assert users.fits(card, needed) == fits
    spare = training.card_bytes - training.reserve_bytes
    assert users.fits(card, spare)
    assert not users.fits(card, spare + 1)


def test_rows_of_users_compare_with_the_same_encoder_and_its_counterpart(
    tmp_path, monkeypatch
):
    exact, accumulation = user_ways.REVERSIBLE[2], user_ways.PLAIN[5]
    figures = {
        ("resnet152", user_ways.STORE): (50, 2.0),
        ("resnet152", accumulation): (12, 2.5),
        ("revnet197", user_ways.STORE): (19, 3.0),
        ("revnet197", exact): (2, 4.5),
    }
    updates = dict.fromkeys(figures, 1) | {("resnet152", accumulation): 4}
    rows = []
    for frames in users.FRAMES:
        found = {
            case: users.Figures(
                gib * GIB * frames // 200,
                {"median": s, "p20": s, "p80": s} if frames == 200 else None,
            )
            for case, (gib, s) in figures.items()
        }
        rows += users.rows_of(found, updates, frames, CPU)
    at_200 = next(r for r in rows if r["way"] == exact.name and r["frames"] == 200)
    assert at_200["times the baseline"] == 1.5
    assert at_200["counterpart"] == "resnet152 200 store"
    assert at_200["times the counterpart"] == 2.25
    Result("users", "", "setting", rows, "").save(tmp_path, CPU)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    heads, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in readme.users().splitlines()
        if "|" in line
    )
    shown = {line[1]: dict(zip(heads, line, strict=True)) for line in lines}
    assert shown[exact.name]["GiB, 600 frames"] == "6.14"
    assert shown[exact.name]["fits 11 GiB"] == "200, 600"
    assert shown[accumulation.name]["statistics of"] == "32"


def test_running_out_of_memory_is_a_row_and_other_errors_are_errors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    errors = [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("shapes differ"),
    ]

    def step(*args):
        raise errors.pop(0)

    monkeypatch.setattr(users, "train_step", step)
    alone = [user_ways.STORE, "resnet152", 16, CPU]
    for _ in range(2):
        assert users._alone(*alone, **TINY) == users.Figures(None)
    with pytest.raises(RuntimeError, match="shapes differ"):
        users._alone(*alone, **TINY)
    # A step that does not fit has neither figures nor a ratio.
    gpu = types.SimpleNamespace(total_memory=23 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    found = {("resnet152", user_ways.STORE): users.Figures(None)}
    cuda = torch.device("cuda")
    (row,) = users.rows_of(found, dict.fromkeys(found, 1), 200, cuda)
    assert (row["peak by"], row["fits 24 GiB"]) == ("does not fit", "no")
    assert row["times the baseline"] == row["s per step"] == ""


# Compressed activations.


def test_compressed_runs_begin_as_plain_ones_and_are_kept(runs):
    setting, result = runs
    rows = {(row["seed"], row["way"]): row for row in result.rows}
    assert len(rows) == 3
    plain = rows[1, compressed_training.PLAIN]
    ours = rows[1, compressed_training.COMPRESSED]
    assert plain["first loss"] == ours["first loss"]
    assert ours["times the baseline"] == ours["loss"] / plain["loss"]
    assert min(ours["ratios"].values()) > 1
    file = setting.folder / "plain_1.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"losses": [7.0] * 4}))
    again = functools.partial(compressed_training.trained, compressed_training.PLAIN, 1)
    assert again(None, setting).losses == [7.0] * 4
    # Another setting is another run.
    file.write_text(json.dumps(kept | {"setting": {}}))
    voices = compressed_checks.real_speech(80, 48)
    assert again(voices, setting).losses == kept["losses"]


@pytest.mark.slow
def test_compressed_steps_are_compared_with_plain_ones(runs, tmp_path):
    setting, _ = runs
    state = setting.folder / "plain_1.pt"
    network = compressed.Network("resnet34", ("revnet57",), 2, 1, state, row=TINIEST)
    result = compressed.run(CPU, compressed.Setting((network,), 64, repeats=2))
    rows = {row["way"]: row for row in result.rows}
    assert rows["plain"]["held fewer"] == 1
    for lossless in ("torch checkpoint", "reconstruct, exact"):
        assert rows[lossless]["gradient error"] < 1e-4
    fine, coarse = (rows[f"compressed, {f} of range"] for f in ("1e-3", "1e-2"))
    assert fine["held GB"] > coarse["held GB"]
    assert fine["gradient error"] < coarse["gradient error"] < 1
    given = compressed_bounds.Setting(state=state, batch=2, frames=100, row=TINIEST)
    rules = {row["rule"]: row for row in compressed_bounds.run(CPU, given).rows}
    fine, coarse = rules["deviation 0.001"], rules["deviation 0.03"]
    assert fine["inputs smaller"] < coarse["inputs smaller"]
    assert 10 * fine["handed down"] < coarse["handed down"]


@pytest.mark.slow
def test_a_run_goes_on_with_each_target(runs, tmp_path):
    setting, _ = runs
    given = compressed_targets.Setting(
        state=setting.folder / "plain_1.pt",
        batch=2,
        frames=48,
        steps=26,
        last=2,
        targets=(0.01, 0.05),
        row=TINIEST,
    )
    result = compressed_targets.run(CPU, given)
    base, fine, coarse = result.rows
    assert base["times the baseline"] == 1
    assert fine["losses"]["of each step"][0] == base["losses"]["of each step"][0]
    assert fine["inputs smaller"] < coarse["inputs smaller"]
    result.save(tmp_path, CPU)
    compressed_targets.draw(result, tmp_path / "targets.png")


def test_a_state_that_others_go_on_from_does_not_change(runs):
    setting, _ = runs
    file = setting.folder / "plain_1.pt"
    given = compressed_targets.Setting(batch=2, frames=48, steps=2, row=TINIEST)
    speech = compressed_checks.real_speech(compressed_training.N_MELS, given.frames)
    state = compressed_ways.read_state(file)
    compressed_targets.continued(None, speech, state, given)
    found, kept = (
        [x for x in tree_leaves(each) if isinstance(x, torch.Tensor)]
        for each in (state, compressed_ways.read_state(file))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    trained = compressed_ways.trained(
        "resnet34", batch=2, frames=64, state=file, **TINIEST
    )
    way = compressed_ways.compressed("resnet34", "", "derived", None)
    encoder = trained.build(way).encoder
    for name, weight in encoder.named_parameters():
        assert torch.equal(weight, trained.state["encoder"][name])
    assert isinstance(encoder.compression.rules["convolution"], GradientBound)


def test_an_audit_leaves_the_rules_and_the_compression():
    encoder = build_encoder("resnet34", mode="compress", **TINIEST)
    own = encoder.compression
    with compressed_checks.audited(encoder) as audit:
        encoder(torch.randn(2, 48, 80)).square().sum().backward()
    assert audit.tensors > 10
    assert 0 < audit.largest <= 1
    assert encoder.compression is own


def run_of(way, seed, losses):
    return compressed_training.Run(way, seed, {}, losses, 1.0, {}, {})


def test_verdicts_of_compression_are_of_the_worst_case(tmp_path, monkeypatch):
    setting = compressed_training.Setting(last=2)
    plain, ours = compressed_training.PLAIN, compressed_training.COMPRESSED
    some = [run_of(plain, 1, [9.0, 2.0, 2.0]), run_of(ours, 1, [0.0, 2.0, 2.02])]
    rows = compressed_training.rows_of(some, setting)
    assert "at most 0.50 %" in compressed_training.verdict(rows)
    assert "NOT within" not in compressed_training.verdict(rows)
    Result("compressed_training", "", "setting", rows, "ok").save(tmp_path, CPU)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = tables.compressed_training().splitlines()
    assert lines[2].split()[1::2] == ["1", "2.000", "2.010", "1.0050"]
    worse = [run_of(plain, 2, [2.0, 2.0]), run_of(ours, 2, [2.0, 1.9])]
    rows = compressed_training.rows_of(some + worse, setting)
    assert "2.50 % from stored ones (mean -1.00 %), which is NOT within" in (
        compressed_training.verdict(rows)
    )
    row = {
        "encoder": "resnet34",
        "way": "compressed, 1e-3 of range",
        "peak lower": 4.0,
        "held fewer": 5.0,
    }
    assert "MISSED" not in compressed.verdict([row])
    assert "MISSED" in compressed.verdict([row | {"held fewer": 4.9}])


# Angles, and the command.


@pytest.mark.parametrize("degrees", [0.0, 1e-12, 1e-9, 1e-3, 14.0, 90.0, 179.0, 180.0])
def test_planted_angles_are_measured_to_the_last_digits(degrees):
    turn = math.radians(degrees)
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    y = torch.tensor([math.cos(turn), math.sin(turn)], dtype=torch.float64)
    assert abs(angle_degrees(x, 3 * y) - degrees) <= 1e-14 * max(1.0, degrees)


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        ([1.0], [1.0, 2.0], r"shapes \[1\] and \[2\]"),
        ([1.0], [0.0], "length 0.0 has no direction"),
        ([math.nan], [1.0], "length nan has no direction"),
        ([1.0], [math.inf], "length inf has no direction"),
    ],
)
def test_vectors_without_an_angle_are_refused(a, b, what):
    with pytest.raises(ValueError, match=what):
        angle_degrees(torch.tensor(a), torch.tensor(b))


@pytest.mark.parametrize("module", [planned, compressed, compressed_targets])
def test_what_is_measured_on_a_cpu_refuses_another_device(module):
    assert module.run in __main__.BY_NAME.values()
    with pytest.raises(ValueError, match="cuda was asked for"):
        module.run(torch.device("cuda"))
