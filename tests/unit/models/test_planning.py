"""Planned encoders: what is predicted is what is counted, and what is said is so."""

import dataclasses
import itertools
import json
import math
import re
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES, architecture
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.memory import live_bytes_peak
from speechbrain_rev.models import Training, planning, planning_picture
from speechbrain_rev.models.advice import remedies
from speechbrain_rev.models.card_at_hand import CardAtHand, card_at_hand
from speechbrain_rev.models.counting import training_step
from speechbrain_rev.models.planning import (
    PlannedEncoder,
    check_fits,
    plan_encoders,
)
from speechbrain_rev.models.planning_render import as_json, as_text
from speechbrain_rev.models.profiling import encoder_profile
from speechbrain_rev.models.published import TABLE_SEVEN
from speechbrain_rev.models.sweeping import sweep_encoder
from speechbrain_rev.models.table import Model
from speechbrain_rev.planner import Infeasible, Plan
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.sizes import GIB, card_text, size_text

BATCH, FRAMES = 128, 200
#: Too small to store all of either encoder, large enough for some of it.
TIGHT = Training(5 * GIB, BATCH, FRAMES)
PLENTY = Training(24 * GIB, BATCH, FRAMES)
NAMES = ("resnet34", "revnet57")


@pytest.fixture(scope="module")
def tight():
    return plan_encoders(TIGHT, names=NAMES)


def with_step(name, training, step_bytes):
    """An encoder whose plan takes so much, if any."""
    model = Model(architecture(name), training)
    return PlannedEncoder(model, None, (None,) * 4, {}, step_bytes, 1.0, 1.0, ASSUMED)


@pytest.mark.parametrize("name", ["resnet101", "revnet57"])
@pytest.mark.parametrize("mode", ["store", "recompute", "reconstruct", "mixed"])
def test_a_shallow_encoder_tells_the_peak_of_a_deep_one(name, mode):
    row = dataclasses.replace(
        architecture(name), widths=(8, 12, 16, 24), blocks=(3, 1, 4, 2)
    )
    network, step = training_step(
        name, widths=row.widths, blocks=row.blocks, batch=16, frames=100
    )
    profile = encoder_profile(row, 16, 100)
    if mode == "mixed":
        turns = itertools.cycle([0, 2, 1, 1, 0])
        modes = {b.name: b.modes[next(turns) % len(b.modes)] for b in profile.blocks}
    else:
        modes = profile.uniform(mode)
    network.set_mode(modes)
    counted = trace_bytes(network, step).peak_bytes
    assert profile.peak_bytes(modes) == pytest.approx(counted, rel=1e-3)


def test_named_encoders_keep_within_the_budget_when_they_run(tight):
    for encoder in tight:
        budget_bytes = TIGHT.step_budget_bytes(encoder.model.row)
        assert encoder.step_bytes == encoder.counted_bytes
        assert 0.9 * budget_bytes < encoder.counted_bytes <= budget_bytes
        assert encoder.predicted_bytes == pytest.approx(encoder.counted_bytes, rel=1e-4)
        assert encoder.lacking_bytes == 0
        check_fits(encoder)
        assert 0 < encoder.mode_counts["store"] < len(encoder.modes)


def test_the_budget_is_what_the_bound_of_the_models_command_leaves(tight):
    for encoder in tight:
        row = encoder.model.row
        needed = TIGHT.needed_bytes(row, "store", BATCH)
        needed["encoder_step"] = encoder.step_bytes
        assert encoder.needed_bytes == sum(needed.values())
        assert encoder.needed_bytes <= TIGHT.card_bytes - TIGHT.reserve_bytes


def test_plans_come_by_published_error_rate_and_more_memory_is_no_slower(tight):
    plenty = plan_encoders(PLENTY, names=NAMES)
    assert [encoder.model.row.name for encoder in tight] == ["revnet57", "resnet34"]
    for more, less in zip(plenty, tight, strict=True):
        assert more.times_stored == 1 < less.times_stored < 1.5
        assert set(more.modes.values()) == {"store"}
        assert more.times_baseline < less.times_baseline
    assert plenty[1].times_baseline == 1


def test_a_plan_that_was_saved_gives_the_encoder_its_modes(tight, tmp_path):
    for encoder in tight:
        encoder.as_plan().save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
        assert plan == encoder.as_plan()
        assert plan.measured_bytes <= plan.budget_bytes
        assert plan.about["device"] == "a card of 5 GiB"
        with torch.device("meta"):
            network = build_encoder(plan.about["encoder"])
        plan.apply(network)
        modes = {name: mode.value for name, mode in network.block_modes().items()}
        assert modes == plan.modes


def test_cards_for_256_are_those_of_the_largest_batch(tight):
    for encoder in tight:
        model = encoder.model
        largest = max(model.largest_batch(mode) for mode in model.modes)
        assert encoder.largest_batch == max(largest, BATCH)
        assert encoder.cards == math.ceil(256 / encoder.largest_batch)
    assert with_step("resnet152", Training(GIB, 1, FRAMES), GIB).cards is None


def test_a_plan_that_fits_counts_as_a_batch_that_fits():
    # Modes that are mixed can fit where none of those that all blocks share does.
    largest = with_step("resnet152", TIGHT, 100 * GIB).largest_batch
    assert 0 < largest < BATCH
    assert with_step("resnet152", TIGHT, GIB).largest_batch == BATCH


@pytest.mark.parametrize("name", TABLE_SEVEN)
def test_stored_encoders_need_about_the_cards_published_and_ours_no_more(name):
    encoder = with_step(name, Training(11 * GIB, BATCH, FRAMES), 100 * GIB)
    published = TABLE_SEVEN[name].cards
    if not encoder.model.row.reversible:
        assert encoder.cards_stored == pytest.approx(published, rel=0.1)
    assert encoder.cards <= published


def test_what_does_not_fit_says_by_how_much_and_what_to_change():
    training = Training(2 * GIB, BATCH, FRAMES, optimizer_bits=32)
    (encoder,) = plan_encoders(training, names=["resnet34"])
    with pytest.raises(Infeasible, match="resnet34 lacks") as refused:
        check_fits(encoder)
    message = str(refused.value)
    lacking = refused.value.needed_bytes - refused.value.budget_bytes
    assert encoder.lacking_bytes > 0
    assert f"resnet34 lacks {size_text(lacking)} for 128 utterances of 200" in message
    assert f"of {card_text(2 * GIB)} 1.16 GiB stay free" in message
    assert refused.value.budget_bytes == training.available_bytes
    for remedy in remedies(training, encoder.model.row, encoder.needed_bytes):
        assert remedy in message


def test_every_remedy_helps():
    row = architecture("resnet152")
    training = Training(11 * GIB, 40, 600, optimizer_bits=32)
    needed_bytes = 17 * GIB
    batch, frames, other, bits, card = remedies(training, row, needed_bytes)
    number = re.fullmatch(r"a batch of (\d+) \(perhaps more: .*\)", batch)
    fewer = dataclasses.replace(training, batch=int(number[1]))
    assert max(Model(row, fewer).largest_batch(m) for m in ("store", "recompute")) == (
        fewer.batch
    )
    assert frames == "--frames=200"
    shorter = dataclasses.replace(training, frames=200)
    assert Model(row, shorter).largest_batch("recompute") >= training.batch
    name = other.rpartition(" ")[2]
    counterpart = Model(architecture(name), training)
    assert counterpart.row.counterpart == "resnet152"
    assert counterpart.largest_batch("reconstruct") >= training.batch
    assert bits == "--optimizer_bits=8, which saves 69.2 MiB"
    size = float(re.findall(r"[\d.]+", card)[0])
    larger = dataclasses.replace(training, card_bytes=int(size * GIB))
    assert larger.available_bytes >= needed_bytes


def test_what_helps_nothing_is_not_named():
    tiny = Training(GIB // 2, 128, FRAMES)
    (card,) = remedies(tiny, architecture("resnet152"), 17 * GIB)
    assert card.startswith("a card of")
    # Of two lengths there is none below the shorter one, and too many do not fit at it.
    for training in (Training(11 * GIB, 128, 200), Training(11 * GIB, 256, 600)):
        helps = remedies(training, architecture("resnet152"), 17 * GIB)
        assert not [remedy for remedy in helps if "frames" in remedy]


def test_every_figure_of_the_text_is_that_of_the_json(tight):
    lines = as_text(tight).splitlines()
    rows = [line.split() for line in lines[2 : lines.index("")]]
    document = json.loads(as_json(tight))
    assert document["training"]["card_bytes"] == 5 * GIB
    for words, plain in zip(rows, document["encoders"], strict=True):
        published, computed = plain["published"], plain["computed"]
        modes = list(plain["plan"]["modes"].values())
        reversible = plain["type"] != "vanilla"
        assert plain["counted"]["step_peak_bytes"] is not None
        assert words == [
            plain["name"],
            f"{published['vox1_h_eer_percent']:.2f}",
            f"{plain['parameters'] / 1e6:.1f}",
            f"{computed['needed_bytes'] / GIB:.2f}",
            "-",
            "counted",
            str(modes.count("store")),
            str(modes.count("recompute")),
            str(modes.count("reconstruct")) if reversible else "-",
            str(plain["plan"]["channels"][0] or "-"),
            f"{plain['predicted']['times_stored']:.2f}",
            f"{plain['predicted']['times_resnet34_stored']:.2f}",
            f"{plain['predicted']['utterances_per_second']:.1f}",
            str(computed["largest_batch"]),
            str(computed["cards_for_256_stored"]),
            str(computed["cards_for_256"]),
        ]


def test_published_batches_and_cards_stand_beside_the_same_card_and_length_alone(tight):
    for card_bytes, frames in [(11 * GIB, 200), (24 * GIB, 200), (11 * GIB, 600)]:
        training = Training(card_bytes, BATCH, frames)
        encoder = dataclasses.replace(
            tight[0], model=Model(tight[0].model.row, training), counted_bytes=GIB
        )
        heads, words = as_text([encoder]).splitlines()[1:3]
        published = (card_bytes, frames) == (11 * GIB, 200)
        assert heads.split().count("publ.") == (2 if published else 0)
        assert len(words.split()) == (18 if published else 16)


def test_utterances_per_second_are_those_of_a_sweep_at_that_batch(tight):
    row = tight[0].model.row
    (swept,) = sweep_encoder(row, TIGHT, [BATCH]).sweep.plans
    assert tight[0].utterances_per_second == pytest.approx(swept.samples_per_second)
    text = " ".join(as_text(tight).split())
    assert f"{swept.samples_per_second:.1f}" in text
    assert "utt./s: estimated likewise for 128 utterances with this" in text
    lacking = dataclasses.replace(tight[0], counted_bytes=100 * GIB)
    assert lacking.utterances_per_second is None


def test_the_notes_say_what_is_predicted_and_what_was_asked(tight):
    notes = " ".join(as_text(tight).splitlines())
    # In both units, as a training's memory_budget takes GB for 1e9 bytes.
    assert "A card of 5 GiB (5.369 GB) was named; none was tried." in notes
    assert "an assumed card of 11 GB, 6.7 TFLOP/s, 400 GB/s, 1e+05 op" in notes
    assert "no clock was read" in notes
    assert "at the default chunk (that of the plan is chosen for its batch" in notes
    assert "Plans whose chunk is chosen for it may fit a larger one" in notes
    asked = CardAtHand("NVIDIA X", 8 * GIB, 5 * GIB)
    notes = " ".join(as_text(tight, asked).splitlines())
    assert "5 GiB (5.369 GB) were free of 8 GiB (8.59 GB) on NVIDIA X" in notes
    assert json.loads(as_json(tight, asked))["training"]["card_name"] == "NVIDIA X"


def test_the_bar_tells_what_takes_long(capsys):
    plan_encoders(TIGHT, names=["resnet34"], progress=True)
    told = capsys.readouterr().err
    assert "resnet34, all channels at a time" in told
    assert "resnet34, plan 1 is counted" in told


def test_an_encoder_that_does_not_fit_shows_what_it_lacks(tight):
    modes = dict.fromkeys(tight[0].modes, "store")
    large = dataclasses.replace(tight[0], modes=modes, counted_bytes=None)
    words = as_text([large]).splitlines()[2].split()
    assert words[4:7] == [f"{large.lacking_bytes / GIB:.3f}", "GiB", "predicted"]
    assert float(words[4]) > 1
    (plain,) = json.loads(as_json([large]))["encoders"]
    assert plain["plan"]["fits"] is False
    assert plain["counted"]["step_peak_bytes"] is None


def test_the_picture_shows_plan_and_modes_beside_what_was_published(tight, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        planning_picture,
        "by_parameters",
        lambda points, path, **words: drawn.update(words, points=points),
    )
    lacking = dataclasses.replace(tight[1], counted_bytes=10 * GIB)
    planning_picture.draw_plans([tight[0], lacking], "plan.png")
    fits, not_fits = drawn["points"]
    assert fits.planned_bytes == tight[0].counted_bytes / BATCH
    assert not_fits.planned_bytes is None
    assert fits.lightest_bytes < fits.planned_bytes < fits.stored_bytes
    # Batches were published for another card, memory for an utterance of this length.
    assert (fits.published_bytes, fits.published_batch) == (0.03e9, None)
    assert fits.largest_batch == tight[0].largest_batch
    assert "128 utterances of 2 s as planned for 5 GiB (5.369 GB)" in drawn["title"]
    assert "marks counted" in drawn["source"]
    with pytest.raises(ValueError, match=r"ends in \.png, not plan\.pdf"):
        planning_picture.draw_plans(tight, "plan.pdf")
    on_11_gib = Model(tight[0].model.row, Training(11 * GIB, BATCH, FRAMES))
    planning_picture.draw_plans(
        [dataclasses.replace(tight[0], model=on_11_gib)], "a.png"
    )
    assert drawn["points"][0].published_batch == 300


class TestCardAtHand:
    @pytest.fixture
    def two_cards(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda n: f"Fake {n}")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (n + 5, n + 9))

    @pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda:1", 1)])
    def test_it_tells_what_is_free(self, device, number, two_cards):
        expected = CardAtHand(f"Fake {number}", number + 9, number + 5)
        assert card_at_hand(device) == expected

    @pytest.mark.parametrize("device", ["cpu", "gpu", "cuda:", "cuda:-1", "meta", ""])
    def test_what_is_no_card_is_refused(self, device, two_cards):
        with pytest.raises(
            ValueError, match=f"not {device}. Without a GPU name a card"
        ):
            card_at_hand(device)

    def test_a_card_that_is_not_there_is_refused(self, two_cards, monkeypatch):
        with pytest.raises(ValueError, match="cuda:2 is not there: torch sees 2 card"):
            card_at_hand("cuda:2")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ValueError, match=r"sees 0 card.* --card=11GB"):
            card_at_hand("cuda")


@pytest.mark.slow
def test_all_25_are_planned_and_predicted_within_the_budget():
    training = Training(11 * GIB, BATCH, FRAMES)
    encoders = plan_encoders(training, workers=2)
    rates = [encoder.model.row.vox1_h_eer for encoder in encoders]
    assert rates == sorted(rates)
    assert {encoder.model.row.name for encoder in encoders} == set(ARCHITECTURES)
    lacking = {e.model.row.name for e in encoders if e.lacking_bytes}
    assert lacking == {"resnet101", "resnet152"}
    for encoder in encoders:
        assert encoder.counted_bytes is None
        largest = max(encoder.model.largest_batch(m) for m in encoder.model.modes)
        assert (largest >= BATCH) == (encoder.lacking_bytes == 0)
        assert 1 <= encoder.times_stored < 1.6
    for name, mode in [("resnet152", "store"), ("revnet230", "recompute")]:
        (found,) = [e for e in encoders if e.model.row.name == name]
        network, step = training_step(name, mode=mode, batch=BATCH, frames=FRAMES)
        network.set_channels(found.channels)
        predicted = found.profile.peak_bytes(found.profile.uniform(mode))
        assert predicted == pytest.approx(live_bytes_peak(step), rel=1e-4)
    text = as_text(encoders)
    assert max(map(len, text.splitlines())) <= 130
    assert len(text.splitlines()) > 27


def test_a_process_that_was_ended_is_told_with_what_to_do(monkeypatch):
    class Ended:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, *_):
            raise BrokenProcessPool

    monkeypatch.setattr(planning, "ProcessPoolExecutor", Ended)
    with pytest.raises(MemoryError, match=r"One of 2 processes .* Name the encoders"):
        plan_encoders(TIGHT, workers=2)
