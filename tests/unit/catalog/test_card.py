"""What training takes of a GPU: an upper bound of what a real run holds."""

import dataclasses
import gc

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES, HEAD, architecture
from speechbrain_rev.catalog import Training
from speechbrain_rev.catalog.breakdown import encoder_breakdown
from speechbrain_rev.catalog.steps import head_modules
from speechbrain_rev.catalog.table import other_encoder, shorter_frames
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import build_optimizer, state_bytes
from speechbrain_rev.planner.memory import LiveBytes, live_bytes_peak
from speechbrain_rev.sizes import GIB

CARD = 11 * GIB
TRAINING = Training(CARD, batch=128, frames=200)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, "from 1 to 1000000 utterances, not 0"),
        ({"batch": 10**400}, "from 1 to 1000000 utterances"),
        ({"frames": 300}, "200 and 600 frames, not of 300"),
        ({"optimizer_bits": 16}, "8 or 32 bit, not 16"),
    ],
)
def test_a_training_that_was_not_counted_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Training(**{"card_bytes": CARD, "batch": 128, "frames": 200} | wrong)


def needed(row, mode, batch, training=TRAINING):
    return sum(training.needed_bytes(row, mode, batch).values())


@pytest.mark.parametrize("row", ARCHITECTURES.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("card_bytes", [8 * GIB, 24 * GIB])
def test_the_largest_batch_leaves_the_reserve_free_and_one_more_does_not(
    row, card_bytes
):
    for frames in (200, 600):
        training = Training(card_bytes, batch=1, frames=frames)
        free = card_bytes - training.reserve_bytes
        for mode in ["store", "recompute"] + ["reconstruct"] * row.reversible:
            largest = training.largest_batch(row, mode)
            assert largest >= 1
            assert needed(row, mode, largest, training) <= free
            assert needed(row, mode, largest + 1, training) > free


@pytest.mark.parametrize("size", [0.5, 1.0, 1.4])
def test_a_card_that_holds_no_batch_has_a_largest_one_of_zero(size):
    training = Training(round(size * GIB), batch=128, frames=600)
    assert training.largest_batch(architecture("resnet152"), "store") == 0


@pytest.mark.parametrize(
    "row", [r for r in ARCHITECTURES.values() if not r.reversible], ids=lambda r: r.name
)
@pytest.mark.parametrize(("bits", "within"), [(8, 0.1), (32, 0.2)])
def test_the_reserve_meets_the_published_batches_of_stored_encoders(row, bits, within):
    # Those were found on a card of 11 GiB, at 32 bit; this is what the reserve's text says.
    training = dataclasses.replace(TRAINING, optimizer_bits=bits)
    ours = training.largest_batch(row, "store")
    assert ours == pytest.approx(row.published_max_batch_11gb, rel=within)


# Of sgd, and of adamw. The last two have the most of their families in small tensors,
# kept at 32 bit.
@pytest.mark.parametrize(
    ("name", "bits", "above"),
    [
        ("resnet34", 32, 1.1),
        ("df_resnet56", 32, 1.1),
        ("resnet152", 8, 1.05),
        ("df_revnet377", 8, 1.05),
    ],
)
def test_the_optimizers_part_is_just_above_its_count(name, bits, above):
    training = Training(None, batch=128, frames=200, optimizer_bits=bits)
    part = training.needed_bytes(architecture(name), "store", 128)["optimizer_states"]
    case = encoder_breakdown(name, batch=128, frames=200, optimizer_bits=bits)
    counted = case.report.optimizer_states_bytes
    assert counted <= part <= above * counted


@pytest.mark.parametrize("name", ["resnet34", "revnet57"])
def test_the_steps_budget_is_what_all_else_leaves(name):
    row = architecture(name)
    fixed = TRAINING.fixed_bytes(row, 128)
    needed = TRAINING.needed_bytes(row, row.default_mode, 128)
    assert needed == {"encoder_step": needed["encoder_step"], **fixed}
    budget = TRAINING.step_budget_bytes(row)
    assert budget + sum(fixed.values()) == CARD - TRAINING.reserve_bytes


@pytest.mark.parametrize("batch", [1, 256, 400, 2048])
def test_the_heads_step_is_just_above_its_count(batch):
    with torch.device("meta"):
        classifier, loss = head_modules(HEAD)
        embeddings = torch.randn(batch, 1, HEAD.embedding_dim, requires_grad=True)
        targets = torch.zeros(batch, 1, dtype=torch.long)
    assert sum(p.numel() for p in classifier.parameters()) == HEAD.parameters
    for tensor in (embeddings, classifier.weight):
        tensor.grad = torch.zeros_like(tensor)
    counted = live_bytes_peak(lambda: loss(classifier(embeddings), targets).backward())
    assert counted <= HEAD.step_bytes(batch) <= 1.05 * counted


def test_another_length_or_encoder_that_is_advised_fits():
    row = architecture("resnet152")
    training = Training(CARD, 40, 600, optimizer_bits=32)
    shorter = dataclasses.replace(training, frames=shorter_frames(training, row))
    assert shorter.frames == 200
    assert shorter.largest_batch(row, "recompute") >= 40
    other = architecture(other_encoder(training, row))
    assert other.counterpart == "resnet152"
    assert training.largest_batch(other, "reconstruct") >= 40
    assert training.fits(other)
    assert not training.fits(row)


def test_where_no_other_length_or_encoder_fits_none_is_advised():
    row = architecture("resnet152")
    # Of two lengths there is none below the shorter one, and too many do not fit at it.
    assert shorter_frames(Training(CARD, 128, 200), row) is None
    assert shorter_frames(Training(CARD, 256, 600), row) is None
    assert other_encoder(Training(GIB // 2, 128, 200), row) is None


def test_a_whole_training_on_the_cpu_holds_no_more_than_what_is_computed():
    row, batch = architecture("revnet57"), 4
    gc.collect()
    with LiveBytes() as meter:
        encoder = build_encoder(row.name)
        classifier, loss = head_modules(HEAD)
        parameters = [*encoder.parameters(), *classifier.parameters()]
        optimizer = build_optimizer(parameters, name="sgd", bits=8, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        # What building and the optimizer's CPU path copy is no part of a step.
        meter.peak = meter.live
        targets = torch.zeros(batch, 1, dtype=torch.long)
        wavs, feats = torch.randn(batch, 31840), torch.randn(batch, 200, 80)
        loss(classifier(encoder(feats)), targets).backward()
        del wavs
    computed = TRAINING.needed_bytes(row, "reconstruct", batch)
    states = state_bytes(optimizer)
    assert states <= computed["optimizer_states"] <= 1.05 * states
    # The classifier's step and the encoder's do not peak at once, so it is a bound.
    total = sum(computed.values())
    assert 0.7 * total <= meter.peak <= total
