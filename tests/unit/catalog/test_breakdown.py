"""Where the memory of a step goes: exact parts, and stages that add up to the byte."""

import itertools

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog import Training, counted_peaks
from speechbrain_rev.catalog.breakdown import (
    before_and_after,
    encoder_breakdown,
    stage_memory,
)
from speechbrain_rev.catalog.steps import training_step
from speechbrain_rev.catalog.table import MODES
from speechbrain_rev.heads import HEAD
from speechbrain_rev.lobes.classifier import CosineClassifier
from speechbrain_rev.optim import build_optimizer, state_bytes
from speechbrain_rev.planner.memory import (
    make_gradients,
    storage_bytes,
)
from speechbrain_rev.planner.trace import trace_bytes
from tests.benchmarks.counts import training_step_peak

from .builders import turns_of

#: One encoder of each family.
OF_EACH_FAMILY = ("resnet34", "df_resnet56", "revnet57", "df_revnet66")
NAMES = [
    "input", "stem", "stage 1", "stage 2", "stage 3", "stage 4",
    "pooling, embedding", "classifier",
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        name if name in OF_EACH_FAMILY else pytest.param(name, marks=pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def test_parts_of_every_encoder_are_exact_where_they_can_be(name):
    row = ARCHITECTURES[name]
    case = encoder_breakdown(row.name, batch=128, frames=200)
    assert (case.mode, case.optimizer_name) == (row.default_mode, row.optimizer_name)
    report = case.report
    assert report.activations_bytes == counted_peaks()[name, case.mode, 200](128)
    parameters = row.parameters + HEAD.parameters
    assert report.gradients_bytes == 4 * parameters
    assert 4 * parameters < report.weights_bytes < 1.02 * 4 * parameters
    # The table of what fits has constants for these two, each of which is a bound.
    bound = Training(None, 128, 200).fixed_bytes(row, 128)
    assert 0.9 * bound["optimizer_states"] < report.optimizer_states_bytes
    assert report.optimizer_states_bytes <= bound["optimizer_states"]
    others = bound["classifier_step"] + bound["input"]
    assert 0.95 * others <= report.others_bytes <= others


@pytest.mark.slow
def test_before_is_stored_at_32_bit_and_after_is_as_asked():
    asked = {"batch": 70, "frames": 200, "optimizer_bits": 32}
    before, after = before_and_after("revnet57", mode="recompute", **asked)
    assert (before.mode, before.optimizer_bits) == ("store", 32)
    assert (after.mode, after.optimizer_bits) == ("recompute", 32)
    assert "the line through their counts at batches of 64 and 128" in after.how
    before, after = before_and_after("resnet34", **asked)
    assert before == after
    # Lengths that are not committed are counted.
    case = encoder_breakdown("resnet34", batch=3, frames=48)
    counted = training_step_peak("resnet34", frames=48, batch=3)
    assert case.report.activations_bytes == counted
    assert case.report.input_shape == (3, 48, 80)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "reconstruct"}, "resnet34 has no reversible blocks"),
        ({"mode": "recomput"}, "There is no memory mode 'recomput'"),
        ({"frames": 3}, "needs at least 9 frames"),
        ({"optimizer_bits": 4}, "bits is 4"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        encoder_breakdown("resnet34", **{"batch": 64, "frames": 200} | wrong)


def watched(name, mode, blocks=(1, 2, 3, 1), bits=32):
    """What was alive in a step of a narrow encoder, and what it is trained with."""
    sizes = {"frames": 24, "batch": 2, "widths": (8, 8, 16, 16), "blocks": blocks}
    uniform = None if mode == "mixed" else mode
    encoder, step = training_step(name, mode=uniform, **sizes)
    if mode == "mixed":
        encoder.set_mode(turns_of(encoder))
    trace = trace_bytes(encoder, step)
    with torch.device("meta"):
        classifier = CosineClassifier(256, 100)
    both = torch.nn.ModuleList([encoder, classifier])
    name = encoder.architecture.optimizer_name
    optimizer = build_optimizer(both.parameters(), name=name, bits=bits, lr=0.0)
    make_gradients(both)
    optimizer.step()
    return both, trace, optimizer


#: One of each way to make the next stage's input: the first block, an ordinary block,
#: a strided convolution, a rearrangement.
@pytest.mark.parametrize(
    ("name", "mode", "bits"),
    [
        ("resnet34", "store", 32),
        ("resnet34", "mixed", 32),
        ("revnet46", "mixed", 32),
        ("revnet46", "reconstruct", 32),
        ("df_revnet66", "mixed", 32),
        ("df_revnet66", "store", 8),
        ("revnet57", "mixed", 32),
        ("revnet57", "reconstruct", 32),
    ],
)
def test_what_stages_take_adds_up_and_their_largest_peak_is_the_step_s(
    name, mode, bits
):
    both, trace, optimizer = watched(name, mode, bits=bits)
    encoder, classifier = both
    stages = stage_memory(encoder, trace, optimizer, classifier)
    assert [stage.name for stage in stages] == NAMES

    def total(part):
        return sum(getattr(stage, f"{part}_bytes") for stage in stages)

    assert total("held") == list(trace.blocks.values())[-1].held_bytes
    assert max(stage.peak_bytes for stage in stages) == trace.peak_bytes
    all_held = itertools.accumulate(stage.held_bytes for stage in stages)
    for stage, held in zip(stages, all_held, strict=True):
        assert stage.peak_bytes == held + stage.working_bytes
        assert stage.working_bytes >= 0
        assert stage.weights_bytes >= stage.gradients_bytes
    pooling, last = stages[-2:]
    assert (pooling.held_bytes, pooling.peak_bytes) == (0, trace.between_peak_bytes)
    assert (last.held_bytes, last.working_bytes) == (0, 0)
    # The stem, then each stage's entry and couplings.
    if name == "revnet46":
        blocks = [sum(stage.blocks.values()) for stage in stages]
        assert blocks == [0, 1, 2, 3, 4, 2, 0, 0]
    for each in MODES:
        count = sum(m.value == each for m in encoder.block_modes().values())
        assert sum(stage.blocks.get(each, 0) for stage in stages) == count
    assert total("weights") == storage_bytes([*both.parameters(), *both.buffers()])
    assert total("gradients") == storage_bytes(p.grad for p in both.parameters())
    assert total("optimizer_states") == state_bytes(optimizer)
    # In proportion to weights, whatever buffers states share.
    largest = max(stages, key=lambda stage: stage.gradients_bytes)
    share = largest.optimizer_states_bytes / largest.gradients_bytes
    whole = total("optimizer_states") / total("gradients")
    assert 0.5 * whole < share < 1.5 * whole


def test_a_stage_without_blocks_holds_nothing():
    both, trace, optimizer = watched("df_revnet66", "reconstruct", (0, 1, 1, 1))
    stages = stage_memory(both[0], trace, optimizer)
    assert [stage.name for stage in stages] == NAMES[:-1]
    empty = stages[2]
    assert (empty.name, empty.blocks) == ("stage 1", {})
    assert (empty.held_bytes, empty.working_bytes, empty.weights_bytes) == (0, 0, 0)


def test_stages_of_a_breakdown_add_up_to_its_parts(staged):
    for case in staged:
        assert case.how == "counted just now"
        peaks = [stage.peak_bytes for stage in case.stages]
        assert case.report.activations_bytes == max(peaks)
        for part in ("weights", "gradients", "optimizer_states"):
            sizes = [getattr(stage, f"{part}_bytes") for stage in case.stages]
            assert sum(sizes) == case.report.parts[part]
    counted = encoder_breakdown(
        "resnet34", mode="store", batch=16, frames=200, optimizer_bits=32
    )
    assert counted.report == staged[0].report
