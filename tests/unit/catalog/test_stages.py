"""What stages hold and work with adds up to the step, to the byte."""

import itertools
import json

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog import Training, pictures
from speechbrain_rev.catalog.breakdown import (
    before_and_planned,
    encoder_breakdown,
    stage_memory,
)
from speechbrain_rev.catalog.plans import PlannedEncoder, plan_encoders
from speechbrain_rev.catalog.render import BreakdownReport
from speechbrain_rev.catalog.steps import training_step
from speechbrain_rev.catalog.table import MODES, ListedEncoder
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import CosineClassifier
from speechbrain_rev.optim import build_optimizer, state_bytes
from speechbrain_rev.planner.memory import make_gradients, storage_bytes
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.sizes import GIB, size_text

NAMES = [
    "input", "stem", "stage 1", "stage 2", "stage 3", "stage 4",
    "pooling, embedding", "classifier",
]  # fmt: skip


def watched(name, mode, blocks=(1, 2, 3, 1)):
    """A narrow encoder of the kind, and what was alive in a step of it.

    Modes of its blocks take turns if they are mixed.
    """
    uniform = None if mode == "mixed" else mode
    encoder, step = training_step(
        name, mode=uniform, frames=24, batch=2, widths=(8, 8, 16, 16), blocks=blocks
    )
    if mode == "mixed":
        turns = itertools.cycle([0, 2, 1, 1, 0])
        allowed = encoder.allowed_modes().items()
        encoder.set_mode({n: m[next(turns) % len(m)] for n, m in allowed})
    return encoder, trace_bytes(encoder, step)


def trained(encoder, bits=32):
    """A classifier, both together, and an optimizer after its first step."""
    with torch.device("meta"):
        classifier = CosineClassifier(256, 100)
    both = torch.nn.ModuleList([encoder, classifier])
    name = encoder.architecture.optimizer_name
    optimizer = build_optimizer(both.parameters(), name=name, bits=bits, lr=0.0)
    make_gradients(both)
    optimizer.step()
    return classifier, both, optimizer


#: One of each way to make the next stage's input: the first block, an ordinary block,
#: a strided convolution, a rearrangement.
KINDS = ("resnet34", "revnet46", "df_revnet66", "revnet57")
CASES = [
    (name, mode)
    for name in KINDS
    for mode in ("store", "mixed", "reconstruct")
    if mode != "reconstruct" or ARCHITECTURES[name].reversible
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_what_stages_hold_adds_up_and_their_largest_peak_is_the_steps(name, mode):
    encoder, trace = watched(name, mode)
    classifier, _, optimizer = trained(encoder)
    stages = stage_memory(encoder, trace, optimizer, classifier)
    assert [stage.name for stage in stages] == NAMES
    last = list(trace.blocks.values())[-1]
    assert sum(stage.held_bytes for stage in stages) == last.after_bytes
    assert max(stage.peak_bytes for stage in stages) == trace.peak_bytes
    held = 0
    for stage in stages:
        held += stage.held_bytes
        assert stage.peak_bytes == held + stage.working_bytes
        assert stage.working_bytes >= 0
    pooling, classifier = stages[-2:]
    assert pooling.held_bytes == 0
    assert pooling.peak_bytes == trace.between_peak_bytes
    assert (classifier.held_bytes, classifier.working_bytes) == (0, 0)


@pytest.mark.parametrize("name", ["resnet34", "df_revnet66"])  # sgd, adamw
@pytest.mark.parametrize("bits", [8, 32])
def test_weights_gradients_and_states_of_stages_add_up(name, bits):
    encoder, trace = watched(name, "store", blocks=(1, 1, 1, 1))
    classifier, both, optimizer = trained(encoder, bits)
    stages = stage_memory(encoder, trace, optimizer, classifier)
    held = [*both.parameters(), *both.buffers()]
    assert sum(stage.weights_bytes for stage in stages) == storage_bytes(held)
    gradients = storage_bytes(p.grad for p in both.parameters())
    assert sum(stage.gradients_bytes for stage in stages) == gradients
    states = sum(stage.optimizer_states_bytes for stage in stages)
    assert states == state_bytes(optimizer)
    assert all(stage.weights_bytes >= stage.gradients_bytes for stage in stages)


def test_blocks_of_a_stage_are_counted_by_their_modes():
    encoder, trace = watched("revnet46", "mixed")
    stages = stage_memory(encoder, trace, trained(encoder)[-1])
    assert [stage.name for stage in stages] == NAMES[:-1]
    # The stem, then each stage's entry and couplings.
    assert [sum(stage.blocks.values()) for stage in stages] == [0, 1, 2, 3, 4, 2, 0]
    for mode in MODES:
        count = sum(m.value == mode for m in encoder.block_modes().values())
        assert sum(stage.blocks.get(mode, 0) for stage in stages) == count


def test_a_stage_without_blocks_holds_nothing():
    encoder, trace = watched("df_revnet66", "reconstruct", blocks=(0, 1, 1, 1))
    empty = stage_memory(encoder, trace, trained(encoder)[-1])[2]
    assert (empty.name, empty.blocks) == ("stage 1", {})
    assert (empty.held_bytes, empty.working_bytes, empty.weights_bytes) == (0, 0, 0)


def test_what_a_reconstructing_stage_holds_does_not_grow_with_its_blocks():
    held = []
    for blocks in ((1, 1, 1, 1), (1, 1, 9, 1)):
        encoder, trace = watched("revnet57", "reconstruct", blocks)
        stages = stage_memory(encoder, trace, trained(encoder)[-1])
        held.append(stages[4].held_bytes)
    # But for two normalisations' means and deviations of 8 channels, and for flags.
    assert 0 < held[0] <= held[1] <= held[0] + 8 * (2 * 2 * 8 * 4 + 64)


def planned(name, training, step_bytes=10**9):
    """An encoder as if a plan had chosen modes that take turns."""
    with torch.device("meta"):
        allowed = build_encoder(name).allowed_modes().items()
    modes = {n: m[i % len(m)].value for i, (n, m) in enumerate(allowed)}
    model = ListedEncoder(ARCHITECTURES[name], training)
    return PlannedEncoder(
        model, None, (None,) * 4, modes, step_bytes, 1.0, 1.0, ASSUMED
    )


@pytest.fixture(scope="module")
def cases():
    encoder = planned("resnet34", Training(4 * GIB, batch=16, frames=200))
    return before_and_planned(encoder, stages=True)


def test_a_breakdown_and_its_stages_are_the_same_step(cases):
    for case in cases:
        assert case.how == "counted just now"
        largest = max(stage.peak_bytes for stage in case.stages)
        assert case.report.activations_bytes == largest
        for part in ("weights", "gradients", "optimizer_states"):
            parts = [getattr(stage, f"{part}_bytes") for stage in case.stages]
            assert sum(parts) == case.report.parts[part]
    counted = encoder_breakdown(
        "resnet34", mode="store", batch=16, frames=200, optimizer_bits=32
    )
    assert counted.report == cases[0].report


def test_every_figure_of_the_text_is_that_of_the_json(cases):
    report = BreakdownReport([cases])
    plain = json.loads(report.json())["breakdowns"]
    text = report.text()
    for case, document in zip(cases, plain, strict=True):
        title = f"{case.name}, {case.mode}, sgd {case.optimizer_bits} bit:"
        _, lines = text.split(f"{title}\n")
        _, heads, *rows, total = lines.partition("\n\n")[0].splitlines()
        assert heads.split()[1:4] == ["store", "reconstr.", "recomp."]
        for line, stage in zip(rows, document["stages"], strict=True):
            words = line.removeprefix(stage["name"]).split()
            counts = [str(stage["blocks"][m]) for m in MODES if stage["blocks"].get(m)]
            assert words[: len(counts)] == counts
            for part in ("held", "working", "weights", "gradients"):
                size = stage[f"{part}_bytes"]
                assert (size_text(size) if size else "-") in line
        assert size_text(case.report.activations_bytes) in total
        assert size_text(case.report.optimizer_states_bytes) in total
    assert "largest peak is that of the activations" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 130


def test_the_picture_has_a_bar_for_each_stage(cases, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        pictures,
        "memory_parts",
        lambda bars, path, **words: drawn.update(words, bars=bars),
    )
    pictures.draw_stages([cases], "stages.png", 4 * GIB)
    assert drawn["title"].endswith("200 frames, planned for 4 GiB")
    assert drawn["source"].startswith("Counted on meta tensors")
    bars = drawn["bars"]
    assert [bar.label for bar in bars] == NAMES * 2
    stages = [stage for case in cases for stage in case.stages]
    for bar, stage in zip(bars, stages, strict=True):
        assert bar.parts["working"] == stage.working_bytes
        assert bar.parts["held"] == max(0, stage.held_bytes)
        assert bar.parts["optimizer_states"] == stage.optimizer_states_bytes
    assert bars[0].group == "resnet34, store, sgd 32 bit"
    assert bars[-1].group == "resnet34, plan, sgd 8 bit"


@pytest.mark.slow
def test_a_plan_that_was_counted_is_what_its_stages_say():
    training = Training(5 * GIB // 2, batch=64, frames=200)
    (encoder,) = plan_encoders(training, names=["revnet57"])
    before, after = before_and_planned(encoder, stages=True)
    assert after.report.activations_bytes == encoder.counted_bytes
    assert after.report.activations_bytes < before.report.activations_bytes
    assert after.blocks == encoder.mode_counts
    alone = before_and_planned(encoder)[1]
    assert (alone.report, alone.stages) == (after.report, ())
