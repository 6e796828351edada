"""Benchmarks at a small size: figures with a ratio, and none where a check fails."""

import dataclasses
import functools
import json
import math
import os
import sys
import types

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from speechbrain_rev import heads
from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import Training, counted_peaks
from speechbrain_rev.compression import GradientBound, encode
from speechbrain_rev.devices import parse_card
from speechbrain_rev.lobes import build_encoder, inference_form
from speechbrain_rev.sizes import GIB
from tests.benchmarks import (
    __main__,
    adaptation,
    budgets,
    capped,
    classes,
    compressed,
    compressed_bounds,
    compressed_targets,
    compressed_training,
    compressed_ways,
    converted,
    embedding,
    engine,
    formats,
    graphs,
    harness,
    inference,
    joined,
    launches,
    manifests,
    normalisation,
    optimizers,
    peers,
    planned,
    ranges,
    reading,
    readme,
    rounding,
    scoring_at_scale,
    selective,
    shares,
    speech,
    steps,
    users,
    waits,
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
from tests.benchmarks.harness import CPU, NotEqual, Result, Spread, recorded_peak
from tests.corpus import write_corpus

TINY = {"widths": (8, 8, 16, 16), "blocks": (1, 2, 1, 1)}
TINIEST = {"widths": (8,) * 4, "blocks": (1,) * 4}
INFERENCE = inference.Setting(
    vanilla=("df_resnet56",),
    row={"widths": (16,) * 4, "blocks": (1,) * 4},
    batch=1,
    frames=40,
    repeats=2,
)
EMBEDDING = embedding.Setting(
    encoder="revnet57",
    row=TINIEST,
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
NORMALISATION = normalisation.Setting(shapes=((2, 4, 5, 6),), repeats=2)
READING = reading.Setting(speakers=2, utterances=2, seconds=4, batch=4, repeats=2)
CHAIN = Chain("basic", 2)
BF16 = steps.PRECISIONS["bf16"]
SCENARIO_OF = {scenario.name.rstrip(": "): scenario for scenario in SCENARIOS}


def minivox(root):
    """Write voices where real speech is looked for, below a folder."""
    corpus = write_corpus(root / "minivox", speakers=3, seconds=1.2)
    files = sorted((corpus / "wav").glob("*/*/*"))
    lines = [f"{f.parts[-3]} {f.relative_to(corpus / 'wav')}" for f in files]
    (corpus / "train_list.txt").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Short runs of two seeds with compressed activations: setting and result."""
    root = minivox(tmp_path_factory.mktemp("speech"))
    setting = compressed_training.Setting(
        state=tmp_path_factory.mktemp("runs") / "stored_1.pt",
        batch=2,
        frames=48,
        steps=4,
        last=2,
        seeds=(1,),
        row=TINIEST,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(speech.FOLDER, str(root))
        yield setting, compressed_training.run(CPU, setting)


# No figures where a check fails. Each function makes one thing wrong and runs the check.


def wrong_embeddings(patch, folder):
    case = embedding.Case(EMBEDDING, CPU, folder)
    rows = case.anew()
    patch.setattr(case, "anew", lambda: rows + np.float32(1e-3) * abs(rows))
    embedding.check(case)


def wrong_inference_form(patch, folder):
    encoder = inference.encoder_of("df_resnet56", INFERENCE.row)
    form = inference_form(encoder)
    form.fc.bias.data += 1e-3
    inference.check("df_resnet56", encoder, form, torch.randn(1, 40, 80))


def wrong_graph(patch, folder):
    encoder = inference.encoder_of("df_resnet56", INFERENCE.row)
    plain = graphs.WaveformEncoder(encoder).eval()
    ways = {graphs.BASELINE: plain, "graph": lambda *waves: 1.001 * plain(*waves)}
    graphs.check("df_resnet56", ways, graphs.voices(2, 8000))


def wrong_scores(patch, folder):
    measured = scoring_at_scale.measure(dataclasses.asdict(SCORING))
    assert measured["off"] < 1e-6
    answer = measured | {"off": 2e-6}
    patch.setattr(scoring_at_scale, "in_a_process", lambda *_: answer)
    scoring_at_scale.run(CPU, SCORING)


def wrong_packed_samples(patch, folder):
    add = reading.Packing.add
    halved = lambda self, name, wav: add(self, name, 0.5 * wav)  # noqa: E731
    patch.setattr(reading.Packing, "add", halved)
    reading.run(CPU, READING)


def wrong_chunks_of_another_reader(patch, folder):
    def way(folder, setting):
        file = str(reading.audio_files(folder / "WAV")[0])
        return lambda: iter([reading.Named([file], torch.ones(1, reading.SAMPLES))])

    # Any package that is there.
    patch.setattr(reading, "PEERS", {"another": ("torch", way)})
    reading.run(CPU, READING)


def wrong_manifest_rows(patch, folder):
    few = [{"rows": [3]}] * 5
    answers = iter([*few, {"rows": [4]}, {"list": 1, "rows": 20}, {"rows": 20}])
    patch.setattr(manifests, "in_a_process", lambda *_: next(answers))
    manifests.run(CPU, manifests.Setting(rows=20, few=10))


def wrong_listed_rows(patch, folder):
    one = {"rows": 20, "digest": "a"}
    answers = iter([*[{"rows": [3]}] * 6, one, one | {"digest": "b"}])
    patch.setattr(manifests, "in_a_process", lambda *_: next(answers))
    manifests.run(CPU, manifests.Setting(rows=20, few=10))


def wrong_bits_within_a_cap(patch, folder):
    patch.setattr(capped, "gradients", lambda *_: [torch.randn(3)])
    encoder = build_encoder("resnet34", **TINIEST)
    modes = dict.fromkeys(encoder.named_blocks(), "store")
    capped.check_bits(encoder, capped.Plan(modes, None, 1, 1, 1, 1.0, {}), CPU)


def wrong_bits_of_a_plan(patch, folder):
    right = planned.Planned.encoder

    def wrong(self, name, **row):
        plan = dataclasses.replace(self.plan, channels=[None] * 4)
        return right(dataclasses.replace(self, plan=plan), name, **row)

    patch.setattr(planned.Planned, "encoder", wrong)
    planned.check_plans("revnet57")


def wrong_counterpart(patch, folder):
    patch.setattr(planned.PlainEncoder, "variance_floor", 1e-3)
    planned.check_vanilla("revnet57")


def wrong_plain_layers(patch, folder):
    patch.setattr(peers.PlainEncoder, "variance_floor", 1e-3)
    launches.run(CPU, launches.Setting(("resnet34",), (), batch=2))


def wrong_compiled_gradients(patch, folder):
    plain, feats = planned.vanilla("revnet57", **TINY), torch.randn(2, 40, 80)
    assert planned.check_compiled(plain, plain, feats) == 1.0

    class Rounded(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x.bfloat16().float())

    planned.check_compiled(Rounded(plain), plain, feats)


def wrong_user_gradients(patch, folder):
    patch.setattr(users, "FEW_BLOCKS", TINIEST)
    patch.setattr(users, "NAMES", ("resnet152",))
    wrong = dataclasses.replace(users.VANILLA[3], name="off", precision="float32")
    patch.setattr(users, "VANILLA", (users.STORE, wrong))
    right = users.small_step

    def step(way, name, device):
        gradients, updates = right(way, name, device)
        return gradients * (1 + 1e-8 * (way == wrong)), updates

    patch.setattr(users, "small_step", step)
    users.check_gradients(CPU)


def wrong_user_counts(patch, folder):
    peak = counted_peaks()["revnet197", "reconstruct", 200](users.BATCH)
    given = users.REVERSIBLE[2], "revnet197", 200
    users.check_committed(*given, peak)
    users.check_committed(*given, peak + 4)


def wrong_counts(patch, folder):
    patch.setattr(steps, "way_bytes", lambda *_, without_data, **__: 1 + without_data)
    steps.check_counts("revnet57", [users.STORE])


def wrong_statistics_of_ours(patch, folder):
    ours = peers.Way("ours", Twice, {"streams": "float"})
    wrongs([(CHAIN, PLAIN)], ours, FLOAT, CPU)


def beyond_its_bound(patch, folder):
    x = torch.randn(8, 32).relu()
    assert compressed_ways.checked_error("conv", x, encode(x, 0.1)) <= 1
    compressed_ways.checked_error("conv", x + 0.3 * (x > 0), encode(x, 0.1))


def other_zeros(patch, folder):
    x = torch.randn(8, 32).relu()
    compressed_ways.checked_error("conv", x * (x > 0.05), encode(x, 0.1))


def with_kernels(patch, backward):
    """Let plain operations stand for kernels on the CPU, and a function for one of them."""
    reference, kernels = normalisation.norm, normalisation.norm.kernels
    patch.setattr(reference, "_has_kernels", lambda x: x.dtype in kernels.DTYPES)
    patch.setattr(kernels, "normalise", reference.normalise)
    patch.setattr(kernels, "normalise_backward", backward)


def wrong_kernel(patch, folder):
    right = normalisation.norm.normalise_backward
    wrong = lambda g, *a, **s: right(g * (1 + 1e-5), *a, **s)  # noqa: E731
    with_kernels(patch, wrong)
    normalisation.run(CPU, NORMALISATION)


def without_kernels(patch, folder):
    normalisation.run(CPU, NORMALISATION)


def without_speech(patch, folder):
    patch.delenv(speech.FOLDER, raising=False)
    speech.real_speech(80, 48)


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
        pytest.param(
            wrong_chunks_of_another_reader,
            "another: its chunk is no piece of",
            marks=pytest.mark.slow,
        ),
        (wrong_manifest_rows, "the manifests are of other rows"),
        (wrong_listed_rows, "the listings are of other rows"),
        (wrong_bits_within_a_cap, "other bits"),
        pytest.param(
            wrong_bits_of_a_plan, "as planned are not the bits", marks=pytest.mark.slow
        ),
        (wrong_counterpart, "resnet34 of torch's layers are .* from those"),
        (wrong_plain_layers, "resnet34 in plain layers is .* from ours"),
        (wrong_compiled_gradients, "Compiled gradients are"),
        (wrong_user_gradients, "resnet152, off, are 1.0e-08 from stored"),
        (wrong_user_counts, "revnet197, .*, at 200 frames holds"),
        (wrong_counts, "holds 1 bytes, but 2 were counted"),
        (wrong_statistics_of_ours, "ours .* statistics updated 2 times"),
        (beyond_its_bound, "conv is off by"),
        (other_zeros, "conv has other zeros"),
        (wrong_kernel, "float32, contiguous: kernels are 8.9e-06 from"),
        (without_kernels, "float32, contiguous: no kernel is launched"),
        (without_speech, "names no folder with minivox"),
        (without_a_trained_state, "run --only compressed_training first"),
    ],
)
def test_a_failed_check_prints_no_figures(check, words, monkeypatch, tmp_path):
    with pytest.raises(NotEqual, match=words):
        check(monkeypatch, tmp_path)


# Figures of small runs.


def ratios(result):
    """Give the ratios of rows by their encoder, way or job."""
    keys = {"job", "encoder", "way", "input path", "manifest"}
    return {
        tuple(v for k, v in row.items() if k in keys): next(
            v for k, v in row.items() if k.startswith("times ")
        )
        for row in result.rows
        if any(k.startswith("times ") for k in row)
    }


def test_embedding_runs_beside_a_script_that_pads():
    shown = ratios(embedding.run(CPU, EMBEDDING))
    assert {job for job, _ in shown} == embedding.JOBS.keys()
    assert all(shown[job, embedding.BASELINE] == 1.0 for job in embedding.JOBS)
    # The second run reads what is there from a file.
    assert shown["both sides, run again", embedding.OURS] > 3


def test_launches_are_counted_and_timed_beside_plain_layers():
    names = "resnet34", "revnet57"
    setting = launches.Setting(names, names[:1], 2, repeats=2, row=TINIEST)
    rows = launches.run(CPU, setting).rows
    assert len(rows) == 2 * (1 + 3) + 1 + 4
    for row in rows:
        shares = {k: v for k, v in row.items() if k.startswith("times its")}
        timed = row["encoder"] == "resnet34" and row["precision"] == "float32"
        assert (shares.pop("times its host time") != "") == timed
        assert all(share >= 1 for share in shares.values())
        assert row["mode"] != launches.PLAIN or set(shares.values()) == {1.0}


def test_host_times_are_of_the_usual_chunks(monkeypatch):
    taken = []
    monkeypatch.setattr(
        launches, "interleaved_seconds", lambda s, *_, **__: taken.append(s)
    )
    kind = ("store", "float32", "auto")
    launches.host_seconds("revnet57", [kind], launches.Setting())
    encoder = taken[0][kind].args[0]
    assert encoder.n_mels < 80
    assert encoder.channels == build_encoder("revnet57").channels


@pytest.mark.slow(drawn=False)
@pytest.mark.skipif(
    adaptation.FOLDER not in os.environ, reason=f"{adaptation.FOLDER} is not set"
)
def test_every_way_to_adapt_takes_as_many_steps_as_training_anew():
    short = adaptation.Setting(seeds=(1,), epochs=7, steps=1, adapted_epochs=3)
    rows = adaptation.run(CPU, short).rows
    assert [row["way"] for row in rows] == list(adaptation.WAYS)
    assert {row["steps"] for row in rows} == {24}
    assert rows[0]["times its EER"] == 1.0


@pytest.mark.slow
def test_kernels_of_normalisation_are_timed_beside_plain_operations(monkeypatch):
    with_kernels(monkeypatch, normalisation.norm.normalise_backward)
    rows = normalisation.run(CPU, NORMALISATION).rows
    assert len(rows) == 2 * len(normalisation.LAYOUTS) * 3
    for row in rows:
        plain = row["baseline"].endswith(row["way"])
        assert (row["times the baseline"] == 1.0) == plain
        # Output and gradient of the input, and of plain ReLU's input.
        assert not plain or 3 <= row["maps at the peak"] < 3.2


#: Small runs, and the name of a row that is its own baseline.
SMALL = {
    inference: ([INFERENCE], ("df_resnet56", inference.FORM)),
    graphs: (
        [graphs.Setting(("df_revnet89",), INFERENCE.row, (1, 2), 0.5, repeats=2)],
        ("df_revnet89", graphs.BASELINE),
    ),
    reading: ([READING], ("SpeechBrain, FLAC",)),
    waits: (
        [
            waits.Setting(
                ("revnet197",),
                ("float32",),
                2,
                40,
                2,
                {"widths": (8, 16, 16, 24), "blocks": (1, 1, 1, 1)},
            )
        ],
        ("revnet197", waits.PLAIN.name),
    ),
    manifests: (
        [manifests.Setting(rows=3000, few=100, workers=2, batch=4, batches=10)],
        ("SpeechBrain",),
    ),
    budgets: (
        [(budgets.Setting("ResNet", "resnet", 4, 0.5),), 2],
        (budgets.STORED,),
    ),
    scoring_at_scale: ([SCORING], None),
    joined: ([joined.Setting(("resnet34",), batch=2)], None),
    converted: ([converted.Setting(("gemini_df_resnet60",), batch=2)], None),
    selective: (
        [steps.Setting({"resnet34": 2, "revnet57": 2}, 40, 2, TINIEST)],
        None,
    ),
    shares: ([steps.Setting({"df_resnet56": 2}, 40, 2, TINIEST), (0.7, 0.1)], None),
    classes: ([((300, 4),), 2], None),
    ranges: ([], None),
    rounding: ([], None),
    optimizers: (
        [
            optimizers.Setting(
                counted=("df_revnet89",),
                trained=("df_revnet89",),
                batch=2,
                frames=40,
                steps=6,
                repeats=2,
                row=TINIEST,
            )
        ],
        ("df_revnet89", optimizers.PLAIN),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", SMALL, ids=lambda m: m.__name__.split(".")[-1])
def test_a_small_run_has_a_ratio_to_its_baseline(module, monkeypatch, tmp_path):
    monkeypatch.setattr(ranges, "NAMES", ("revnet57",))
    monkeypatch.setattr(ranges, "RATES", {"the recipe's": 0.1})
    monkeypatch.setattr(ranges, "STEPS", 2)
    monkeypatch.setattr(rounding, "DEPTH", 2)
    few = dict(list(rounding.NETWORKS.items())[:1])
    monkeypatch.setattr(rounding, "NETWORKS", few)
    given, baseline = SMALL[module]
    if module is classes:
        monkeypatch.setattr(heads, "SCORES_BYTES", 0)
    if module is optimizers:
        monkeypatch.setenv(speech.FOLDER, str(minivox(tmp_path)))
    result = module.run(CPU, *given)
    assert all(row["baseline"] for row in result.rows)
    assert baseline is None or ratios(result)[baseline] == 1.0
    result.save(tmp_path, CPU)
    if hasattr(module, "draw"):
        module.draw(result, tmp_path / "picture.png")
    assert result.table().count("\n") == len(result.rows) + 1


@pytest.mark.slow
def test_a_plan_within_a_cap_peaks_where_it_was_planned():
    result = capped.run(CPU, ["resnet34"], card_bytes=3 * GIB, batch=2, repeats=2)
    (row,) = result.rows
    # Beside the step there is the loss, some scalars.
    assert row["peak / planned"] == pytest.approx(1, abs=1e-5)
    assert row["recompute / plan"] > 0
    assert row["reconstruct / plan"] == "-"


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
        wrong = mistakes(CHAIN, way, precision, CPU, each)
        reported = [f for f in wrong if f.startswith(words)]
        assert len(reported) == (each == SCENARIO_OF.get(scenario, PLAIN))


@pytest.mark.parametrize(
    ("way", "precision", "expected"),
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
def test_ways_that_are_right_get_nothing_else_wrong(way, precision, expected):
    subjects = [(CHAIN, scenario) for scenario in (PLAIN, *SCENARIOS)]
    assert wrongs(subjects, way, precision, CPU) == expected


def test_exact_streams_must_have_the_bits_of_stored_ones():
    settings = {"mode": "reconstruct", "streams": "exact"}
    rounded = functools.partial(peers.Ours, mode="reconstruct", streams="float")
    assert differing_bits(CHAIN, peers.our_way("ours", **settings), FLOAT, CPU) == []
    assert differing_bits(CHAIN, peers.Way("float", rounded, settings), FLOAT, CPU) == [
        "gradients have other bits than stored ones"
    ]


@pytest.mark.slow
def test_peers_that_are_missing_have_rows_that_say_so(monkeypatch):
    for module in ("memcnn", "revtorch.revtorch", "revlib"):
        monkeypatch.setitem(sys.modules, module, None)
    verdicts = {peers.PLAIN_TORCH: []}
    verdicts |= {way: wrongs([(CHAIN, PLAIN)], way, FLOAT, CPU) for way in peers.PEERS}
    sizes = engine.Sizes(2, 1, 8, 1, 2, (1,))
    subject = Chain("basic", 1)
    plain, *others = engine.rows_of(subject, verdicts, "float32", CPU, sizes)
    assert plain["times the baseline"] == plain["share of the baseline"] == 1
    assert [row["way"] for row in others] == ["MemCNN", "RevTorch", "revlib"]
    for row in others:
        assert row["wrong"].startswith("not installed: ")
        assert row["s per step"] == row["GB per utterance"] == ""


def test_storages_that_are_emptied_count_as_empty():
    with engine.ActualBytes() as meter:
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


@pytest.mark.slow(drawn=False)
def test_all_ways_are_measured_within_one_budget(tmp_path):
    result = planned.run(CPU, SETTING)
    rows = {(row["way"], row["batch"]): row for row in result.rows}
    for (way, batch), row in rows.items():
        fits = row["peak MB"] <= row["budget MB"]
        assert fits == (row["fits"] == "yes")
        timed = row["s per step"] != "does not fit"
        assert timed == (fits or way == planned.TORCH.name)
        assert fits or way not in ("reconstruct", "planned", "accumulation")
        assert row["baseline"] == f"revnet57 {planned.TORCH.name}, batch {batch}"
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


def planned_row(
    batch, ratio, way="planned", times=0.5, how="2 store, 1 recompute; whole"
):
    return {
        "encoder": "revnet57",
        "batch": batch,
        "way": way,
        "how": how,
        "budget MB": 197.2,
        "fits": "yes",
        "statistics of": batch // 2 if way == "accumulation" else batch,
        "times the baseline": times,
        "planned / best extreme": ratio,
    }


def test_verdicts_name_what_was_faster_than_a_plan():
    rows = [planned_row(2, 1.02), planned_row(2, "", "store"), planned_row(4, 0.9)]
    assert planned.verdict(rows).endswith("1.02 times the faster one, within 1.03")
    alike = [planned_row(16, 1.05, how="17 store; whole")]
    assert planned.verdict([*rows, *alike]) == planned.verdict(rows)
    assert planned.verdict(alike) == "Each plan is an extreme itself"
    for how in ("17 store; in chunks", "17 reconstruct; whole", "17 recompute; whole"):
        assert "NOT within" in planned.verdict([planned_row(16, 1.05, how=how)])
    slow = planned.verdict([*rows, planned_row(8, 1.05)])
    assert slow.endswith("NOT within 1.03: revnet57 at batch 8 1.05")
    rows += [planned_row(2, "", "checkpoint", 0.4)]
    assert readme.planned_verdicts(rows)[:2] == [
        "revnet57 at batch 2, faster than the plan (1.00): checkpoint 0.80",
        "revnet57 at batch 4, faster than the plan (1.00): nothing",
    ]


def test_a_committed_plan_is_never_slower_than_an_extreme_that_fits():
    points, alike = {}, set()
    for row in json.loads((readme.RESULTS / "planned_cpu.json").read_text())["rows"]:
        if row["way"] == "planned" and planned.is_an_extreme(row):
            alike.add((row["encoder"], row["batch"]))
        point = points.setdefault((row["encoder"], row["batch"]), {})
        if row["fits"] == "yes":
            assert row["peak MB"] <= row["budget MB"]
            point[row["way"]] = row["s per step"]
    assert len(points) == 6
    assert len(alike) == 2
    for where in points.keys() - alike:
        seconds = points[where]
        fitting = [seconds[way] for way in planned.EXTREMES if way in seconds]
        assert seconds["planned"] <= 1.03 * min(fitting)


def recorded(network, batch):
    feats = planned.features(batch, 24)
    step = functools.partial(steps.train_step, network, feats, planned.VANILLA)
    return recorded_peak(step)


def test_recorded_peaks_have_what_is_alive():
    alone = recorded_peak(lambda: torch.zeros(1000) + 1)
    assert 8000 <= alone < 9000
    vanilla = functools.partial(planned.vanilla, "revnet57", **TINIEST)
    depth = len(vanilla().blocks)
    # Of all blocks the first one's own second run is what takes the most.
    none, some, whole = (
        recorded(vanilla(checkpointed=count), 8) for count in (0, 2, depth)
    )
    assert none > some >= whole


@pytest.fixture
def benchmark():
    """A benchmark of small networks."""
    return planned.Benchmark("revnet57", SETTING)


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
    assert benchmark.planned(2).peak_bytes == 1000
    assert asked == [1000, 970]


def test_a_batch_is_stored_in_as_few_parts_as_fit(benchmark, monkeypatch):
    sizes = {1: 80, 2: 40, 3: 30, 4: 20, 8: 10}
    peak = lambda step: sizes[step.args[2].parts]  # noqa: E731
    monkeypatch.setattr(planned, "recorded_peak", peak)
    for budget, parts, size in [(30, 3, 3), (39, 3, 3), (29, 4, 2), (10, 8, 1)]:
        benchmark.budget_bytes = budget
        (case,) = benchmark.accumulated(8)
        assert case.note.startswith(f"{parts} parts")
        assert case.statistics_of == size
    for budget in (80, 9):
        benchmark.budget_bytes = budget
        assert benchmark.accumulated(8) == []


# What a user can do.


def test_torchs_checkpoint_of_a_user_updates_statistics_twice(monkeypatch):
    monkeypatch.setattr(users, "FEW_BLOCKS", TINIEST)
    (stored, once), *others = (
        users.small_step(way, "df_resnet233", CPU) for way in users.VANILLA[:3]
    )
    for gradients, _ in others:
        torch.testing.assert_close(gradients, stored, rtol=1e-9, atol=0)
    assert [once, *(updates for _, updates in others)] == [1, 2, 1]


@pytest.mark.slow
def test_bytes_of_a_user_s_step_are_those_that_the_package_counts():
    recompute = users.VANILLA[2]
    ours = steps.way_bytes(recompute, "resnet34", batch=2, frames=40)
    package = training_step_peak("resnet34", mode="recompute", frames=40, batch=2)
    assert ours == package
    ways = users.TORCH, users.VANILLA[1], users.VANILLA[3]
    steps.check_counts("df_resnet233", ways, batch=4, frames=40, **TINIEST)


@pytest.mark.parametrize("card", users.CARDS)
@pytest.mark.parametrize("frames", users.FRAMES)
def test_what_fits_is_what_the_package_says(frames, card):
    row = architecture("revnet197")
    training = Training(parse_card(card).memory_bytes, batch=users.BATCH, frames=frames)
    peak = counted_peaks()["revnet197", "reconstruct", frames](users.BATCH)
    needed = users.needed_bytes(users.STORE, "revnet197", frames, peak)
    fits = training.largest_batch(row, "reconstruct") >= users.BATCH
    assert users.fits(card, needed) == fits
    spare = training.card_bytes - training.reserve_bytes
    assert users.fits(card, spare)
    assert not users.fits(card, spare + 1)


def test_rows_of_users_compare_with_the_same_encoder_and_its_counterpart(
    tmp_path, monkeypatch
):
    exact, accumulation = users.REVERSIBLE[2], users.VANILLA[5]
    figures = {
        ("resnet152", users.TORCH): (50, 2.0),
        ("resnet152", accumulation): (12, 2.5),
        ("revnet197", users.TORCH): (19, 3.0),
        ("revnet197", exact): (2, 4.5),
    }
    rows = []
    for frames in users.FRAMES:
        measured = {
            case: users.Figures(
                gib * GIB * frames // 200,
                Spread(s, s, s) if frames == 200 else None,
            )
            for case, (gib, s) in figures.items()
        }
        rows += [users.row_of(case, measured, 1, frames, CPU) for case in measured]
    at_200 = next(r for r in rows if r["way"] == exact.name and r["frames"] == 200)
    assert at_200["times the baseline"] == 1.5
    assert at_200["counterpart"] == "resnet152 200 plain torch layers"
    assert at_200["times the counterpart"] == 2.25
    Result("users", "", "setting", rows, "").save(tmp_path, CPU)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    heads, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in readme.users().splitlines()
        if "|" in line
    )
    shown = {line[1]: dict(zip(heads, line, strict=True)) for line in lines}
    assert shown[exact.name]["GiB, 600 frames"] == "6.14"
    assert shown[exact.name]["fits 11 GiB"] == "200, 600"
    assert shown[accumulation.name]["statistics of"] == "32"


@pytest.mark.slow
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
    alone = [users.STORE, "resnet152", 16, CPU]
    for _ in range(2):
        assert users.alone(*alone, **TINY) == users.Figures(None)
    with pytest.raises(RuntimeError, match="shapes differ"):
        users.alone(*alone, **TINY)
    # A step that does not fit has neither figures nor a ratio.
    gpu = types.SimpleNamespace(total_memory=23 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    case = "resnet152", users.TORCH
    cuda = torch.device("cuda")
    row = users.row_of(case, {case: users.Figures(None)}, 1, 200, cuda)
    assert (row["peak by"], row["fits 24 GiB"]) == ("does not fit", "no")
    assert row["times the baseline"] == row["s per step"] == ""


# Compressed activations.


def test_compressed_runs_begin_as_stored_ones(runs):
    _, result = runs
    stored, ours, _ = result.rows
    assert ours["way"] == compressed_training.COMPRESSED
    assert stored["first loss"] == ours["first loss"]
    assert ours["times the baseline"] == ours["loss"] / stored["loss"]
    assert ours["ratio"] > ours["least ratio"] > 1


@pytest.mark.slow
def test_compressed_steps_are_compared_with_stored_ones(runs, tmp_path):
    setting, _ = runs
    state = setting.state
    network = compressed.Network("resnet34", ("revnet57",), 2, 1, state, row=TINIEST)
    result = compressed.run(CPU, compressed.Setting((network,), 64, repeats=2))
    rows = {row["way"]: row for row in result.rows}
    assert rows["stored"]["held fewer"] == 1
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
        state=setting.state,
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
    given = compressed_targets.Setting(batch=2, frames=48, steps=3, row=TINIEST)
    voices = speech.real_speech(compressed_ways.N_MELS, given.frames)
    state = compressed_ways.read_state(setting.state)
    compressed_targets.continued(None, voices, state, given)
    left, kept = (
        [x for x in tree_leaves(each) if isinstance(x, torch.Tensor)]
        for each in (state, compressed_ways.read_state(setting.state))
    )
    assert all(map(torch.equal, left, kept))
    trained = compressed_ways.trained(
        "resnet34", batch=2, frames=64, state=setting.state, row=TINIEST
    )
    encoder = trained.build(compressed_ways.compressed("resnet34", "")).encoder
    for name, weight in encoder.named_parameters():
        assert torch.equal(weight, trained.state["encoder"][name])
    bound = encoder.compression.rules["convolution"]
    assert isinstance(bound, GradientBound)
    assert bound.bounds


def test_an_audit_leaves_the_rules_and_the_compression():
    encoder = build_encoder("resnet34", mode="compress", **TINIEST)
    own = encoder.compression
    with compressed_ways.audited(encoder) as audit:
        encoder(torch.randn(2, 48, 80)).square().sum().backward()
    assert audit.tensors > 10
    assert 0 < audit.largest <= 1
    assert encoder.compression is own


def test_verdicts_of_compression_are_of_the_worst_case(tmp_path, monkeypatch):
    verdict, compared = compressed_training.verdict, compressed_training.compared
    runs = [
        {"seed": seed, "way": way, "loss": loss, "s per step": 1.0}
        for seed, way, loss in [
            (1, "stored", 2.0),
            (1, "compressed", 2.01),
            (2, "stored", 2.0),
            (2, "compressed", 1.95),
        ]
    ]
    rows = compared(runs[:2])
    assert "at most 0.50 % from stored ones (mean +0.50 %), which is within" in (
        verdict(rows)
    )
    worse = "2.50 % from stored ones (mean -1.00 %), which is NOT within"
    assert worse in verdict(compared(runs))
    Result("compressed_training", "", "setting", rows, "ok").save(tmp_path, CPU)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    lines = readme.compressed_training().splitlines()
    assert lines[2].split()[1::2] == ["1", "2.000", "2.010", "1.0050"]
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
        ([1.0], [0.0], "length 0.0 has no direction"),
        ([math.nan], [1.0], "length nan has no direction"),
        ([1.0], [math.inf], "length inf has no direction"),
    ],
)
def test_vectors_without_an_angle_are_refused(a, b, what):
    with pytest.raises(ValueError, match=what):
        angle_degrees(torch.tensor(a), torch.tensor(b))


def test_a_benchmark_runs_only_where_it_can(monkeypatch, capsys):
    given = ["", "--only=planned", "--device=cuda"]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit):
        __main__.main()
    assert "--only=planned cannot run with --device=cuda" in capsys.readouterr().err


def test_the_command_writes_figures_and_none_where_a_check_fails(
    monkeypatch, tmp_path, capsys
):
    rows = [{"way": "ours", "times the baseline": 0.5}]
    answers = [Result("graphs", "Why?", "a setting", rows, "checked"), NotEqual("off")]

    def run(device):
        answer = answers.pop(0)
        if isinstance(answer, NotEqual):
            raise answer
        return answer

    monkeypatch.setattr(graphs, "run", run)
    given = ["", "--only=graphs", f"--results={tmp_path}"]
    monkeypatch.setattr(sys, "argv", given)
    __main__.main()
    kept = Result(**json.loads((tmp_path / "graphs_cpu.json").read_text()))
    assert kept.rows == rows
    assert kept.table() in capsys.readouterr().out
    with pytest.raises(
        SystemExit, match="graphs: no figures, for the check failed: off"
    ):
        __main__.main()
    assert capsys.readouterr().out == ""


class TestFormats:
    """Memory formats and flags of cuDNN, each beside the default."""

    def test_a_gpu_times_all_of_them(self):
        ways = formats.ways_of("revnet57", "bf16", torch.device("cuda"))
        kinds = {(w.mode, w.memory_format, w.deterministic) for w in ways}
        assert len(kinds) == len(ways) == 2 * 2 * 2
        assert ways[0] == steps.Way(
            "store, contiguous", "store", "exact", "bf16", deterministic=True
        )

    def test_steps_have_the_flags_of_their_way(self, monkeypatch):
        seen, cudnn = [], torch.backends.cudnn
        monkeypatch.setattr(
            steps,
            "_loss",
            lambda *_: (
                seen.append((cudnn.benchmark, cudnn.deterministic))
                or torch.zeros((), requires_grad=True)
            ),
        )
        user = cudnn.benchmark, cudnn.deterministic
        for flags in (*formats.FLAGS, None):
            way = steps.Way("", deterministic=flags)
            encoder = steps.encoder_by(way, "resnet34", **TINIEST)
            steps.train_step(encoder, torch.zeros(1, 9, 80), way)
            assert encoder.deterministic == (flags is not False)
        assert seen == [(False, True), (True, False), user]
        assert user == (cudnn.benchmark, cudnn.deterministic)

    def test_ratios_are_printed_only_where_gradients_agree(self, monkeypatch):
        small = {"frames": 16, "widths": (8, 8, 16, 16)}
        monkeypatch.setattr(formats, "timed", functools.partial(steps.timed, **small))
        monkeypatch.setattr(formats, "FEW_BLOCKS", (1, 1, 1, 1))
        rows = formats.run(CPU, ("revnet57",)).rows
        assert [row["way"] for row in rows] == [
            f"{mode}, {layout}"
            for mode in ("store", "reconstruct")
            for layout in ("contiguous", "channels_last")
        ]
        assert [row["times the baseline"] == 1 for row in rows] == [True, False] * 2

        def wrong(encoder, feats, way):
            steps.train_step(encoder, feats, way)
            if way.memory_format == "channels_last":
                encoder.fc.weight.grad.mul_(1.01)

        monkeypatch.setattr(formats, "train_step", wrong)
        with pytest.raises(NotEqual, match="in both memory formats are"):
            formats.run(CPU, ("revnet57",))


def test_a_long_benchmark_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    measured = []

    def rows(name):
        def measure():
            if name == "second" and len(measured) == 1:
                raise KeyboardInterrupt
            measured.append(name)
            return [{"way": name, "s per step": 1.5}]

        return measure

    def run():
        piece = harness.Pieces(tmp_path / "some.pieces", CPU).rows
        return [row for name in ("first", "second") for row in piece(name, rows(name))]

    with pytest.raises(KeyboardInterrupt):
        run()
    measured.append("interrupted")
    assert [row["way"] for row in run()] == ["first", "second"]
    assert measured == ["first", "interrupted", "second"]
    monkeypatch.setattr(harness, "_code", lambda: "other code")
    run()
    assert measured[3:] == ["first", "second"]
