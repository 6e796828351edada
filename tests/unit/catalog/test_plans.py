"""Planned encoders: what is predicted is what is counted, and what is said is so."""

import dataclasses
import itertools
import json
import math
import re
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES, Architecture, architecture
from speechbrain_rev.catalog import Training, pictures, plans, select
from speechbrain_rev.catalog.plans import (
    PlannedEncoder,
    check_fits,
    plan_encoders,
    sweep_encoder,
)
from speechbrain_rev.catalog.render import PlansReport
from speechbrain_rev.catalog.steps import encoder_step, training_step
from speechbrain_rev.catalog.table import TABLE_SEVEN, ListedEncoder
from speechbrain_rev.cli import main
from speechbrain_rev.devices import CardAtHand, card_at_hand
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner import Infeasible, Plan, profile, profiling
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.planner.profile import VARIABLE
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.sizes import GIB, enough_text, size_text

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
    model = ListedEncoder(architecture(name), training)
    return PlannedEncoder(model, None, (None,) * 4, {}, step_bytes, 1.0, 1.0, ASSUMED)


@pytest.mark.parametrize("name", ["resnet101", "revnet57"])
@pytest.mark.parametrize("mode", ["store", "recompute", "reconstruct", "mixed"])
def test_a_shallow_encoder_tells_the_peak_of_a_deep_one(name, mode):
    row = dataclasses.replace(
        architecture(name), widths=(8, 12, 16, 24), blocks=(3, 1, 4, 2)
    )
    network, step = training_step(
        name, widths=row.widths, blocks=row.blocks, batch=8, frames=200
    )
    found = profile(encoder_step(row, Training(None, 8, 200)))
    if mode == "mixed":
        turns = itertools.cycle([0, 2, 1, 1, 0])
        modes = {b.name: b.modes[next(turns) % len(b.modes)] for b in found.blocks}
    else:
        modes = found.uniform(mode)
    network.set_mode(modes)
    counted = trace_bytes(network, step).peak_bytes
    assert found.peak_bytes(modes) == pytest.approx(counted, rel=1e-3)


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
        assert plan.about["device"] == "a GPU of 5 GiB"
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


def test_what_does_not_fit_is_refused_with_what_helps_and_that_does():
    training = Training(3 * GIB, BATCH, 200, optimizer_bits=32)
    (encoder,) = plan_encoders(training, names=["resnet34"])
    with pytest.raises(Infeasible, match="Even the lightest plan peaks at") as refused:
        check_fits(encoder)
    message, needed = str(refused.value), refused.value.needed_bytes
    assert refused.value.budget_bytes == 3 * GIB
    assert f"It lacks {size_text(needed - 3 * GIB)}." in message
    helps = message.partition("What helps: ")[2].removesuffix(".").split("; ")
    batch = int(re.fullmatch(r"a batch of (\d+)", helps[0])[1])
    for fewer, fits in ((batch, True), (batch + 1, False)):
        (found,) = plan_encoders(training.at(fewer), names=["resnet34"])
        assert (found.lacking_bytes == 0) == fits
    other = helps[-3].removeprefix("another encoder, for instance ")
    assert training.fits(architecture(other))
    assert helps[-2:] == ["--optimizer_bits=8", f"a GPU of {enough_text(needed)}"]
    larger = dataclasses.replace(training, card_bytes=needed)
    (found,) = plan_encoders(larger, names=["resnet34"])
    assert found.lacking_bytes == 0


def test_where_nothing_of_a_step_fits_no_batch_is_advised():
    training = Training(GIB // 2, BATCH, FRAMES)
    (encoder,) = plan_encoders(training, names=["resnet34"])
    with pytest.raises(Infeasible) as refused:
        check_fits(encoder)
    message = str(refused.value)
    assert "Weights, gradients, optimizer states, classifier and input take" in message
    assert re.search(r"What helps: a GPU of [\d.]+ GiB\.$", message)


def test_every_figure_of_the_text_is_that_of_the_json(tight):
    lines = PlansReport(tight).text().splitlines()
    rows = [line.split() for line in lines[2 : lines.index("")]]
    document = json.loads(PlansReport(tight).json())
    assert document["training"]["card_bytes"] == 5 * GIB
    for words, plain in zip(rows, document["encoders"], strict=True):
        published, computed = plain["published"], plain["computed"]
        modes = list(plain["plan"]["modes"].values())
        reversible = plain["type"] != "vanilla"
        assert plain["counted"]["step_peak_bytes"] is not None
        assert words == [
            plain["name"],
            f"{plain['parameters'] / 1e6:.2f}",
            f"{published['vox1_h_eer_percent']:.2f}",
            f"{computed['needed_bytes'] / GIB:.2f}",
            "-",
            "counted",
            str(modes.count("store")),
            str(modes.count("reconstruct")) if reversible else "-",
            str(modes.count("recompute")),
            str(plain["plan"]["channels"][0] or "-"),
            f"{plain['predicted']['times_stored']:.2f}",
            f"{plain['predicted']['times_resnet34_stored']:.2f}",
            f"{plain['predicted']['utterances_per_second']:.1f}",
            str(computed["largest_batch"]),
            str(computed["cards_for_256"]),
            str(computed["cards_for_256_stored"]),
        ]


def test_published_batches_and_cards_stand_beside_the_same_card_and_length_alone(tight):
    for card_bytes, frames in [(11 * GIB, 200), (24 * GIB, 200), (11 * GIB, 600)]:
        training = Training(card_bytes, BATCH, frames)
        encoder = dataclasses.replace(
            tight[0],
            model=ListedEncoder(tight[0].model.row, training),
            counted_bytes=GIB,
        )
        heads, words = PlansReport([encoder]).text().splitlines()[1:3]
        published = (card_bytes, frames) == (11 * GIB, 200)
        assert heads.split().count("GPUs") == (2 if published else 1)
        assert len(words.split()) == (18 if published else 16)


def test_utterances_per_second_are_those_of_a_sweep_at_that_batch(tight):
    row = tight[0].model.row
    (swept,) = sweep_encoder(row, TIGHT, [BATCH]).sweep.plans
    assert tight[0].utterances_per_second == pytest.approx(swept.samples_per_second)
    text = " ".join(PlansReport(tight).text().split())
    assert f"{swept.samples_per_second:.1f}" in text
    assert "Estimated: from counts of operations for an assumed 11 GB GPU" in text
    lacking = dataclasses.replace(tight[0], counted_bytes=100 * GIB)
    assert lacking.utterances_per_second is None


def test_the_notes_say_what_is_predicted_and_what_was_asked(tight):
    notes = " ".join(PlansReport(tight).text().split())
    assert "A GPU of 5 GiB was named; none was tried." in notes
    assert "an assumed 11 GB GPU, 6.7 TFLOP/s, 373 GiB/s, 1e+05 op" in notes
    assert "no clock was read" in notes
    assert "at least such a batch fits, in one mode at the default chunk" in notes
    asked = CardAtHand("NVIDIA X", 8 * GIB, 5 * GIB)
    notes = " ".join(PlansReport(tight, asked).text().split())
    assert "5 GiB were free of 8 GiB on NVIDIA X" in notes
    assert (
        json.loads(PlansReport(tight, asked).json())["training"]["card_name"]
        == "NVIDIA X"
    )


def test_the_bar_tells_what_takes_long(capsys):
    plan_encoders(TIGHT, names=["resnet34"], progress=True)
    told = capsys.readouterr().err
    assert "resnet34 is profiled" in told
    assert "resnet34, plan 1 is counted" in told


def test_an_encoder_that_does_not_fit_shows_what_it_lacks(tight):
    modes = dict.fromkeys(tight[0].modes, "store")
    large = dataclasses.replace(tight[0], modes=modes, counted_bytes=None)
    words = PlansReport([large]).text().splitlines()[2].split()
    assert words[4:7] == [f"{large.lacking_bytes / GIB:.3f}", "GiB", "predicted"]
    assert float(words[4]) > 1
    (plain,) = json.loads(PlansReport([large]).json())["encoders"]
    assert plain["plan"]["fits"] is False
    assert plain["counted"]["step_peak_bytes"] is None


def test_the_picture_shows_plan_and_modes_beside_what_was_published(tight, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        pictures,
        "by_parameters",
        lambda points, path, **words: drawn.update(words, points=points),
    )
    lacking = dataclasses.replace(tight[1], counted_bytes=10 * GIB)
    pictures.draw_plans([tight[0], lacking], "plan.png")
    fits, not_fits = drawn["points"]
    assert fits.planned_bytes == tight[0].counted_bytes / BATCH
    assert not_fits.planned_bytes is None
    assert fits.lightest_bytes < fits.planned_bytes < fits.stored_bytes
    # Batches were published for another card, memory for an utterance of this length.
    assert (fits.published_bytes, fits.published_batch) == (0.03e9, None)
    assert fits.largest_batch == tight[0].largest_batch
    assert "128 utterances of 2 s as planned for 5 GiB" in drawn["title"]
    assert "marks counted" in drawn["source"]
    on_11_gib = ListedEncoder(tight[0].model.row, Training(11 * GIB, BATCH, FRAMES))
    pictures.draw_plans([dataclasses.replace(tight[0], model=on_11_gib)], "a.png")
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
    text = PlansReport(encoders).text()
    assert max(map(len, text.splitlines())) <= 150
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

    monkeypatch.setattr(plans, "ProcessPoolExecutor", Ended)
    with pytest.raises(MemoryError, match=r"One of 2 processes .* Name the encoders"):
        plan_encoders(TIGHT, workers=2)


def test_where_everything_can_be_stored_one_traced_step_tells_it(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    counted, count = [], profiling.count

    def noted(trial, about, **options):
        counted.append(list(options["modes"]))
        return count(trial, about, **options)

    monkeypatch.setattr(profiling, "count", noted)
    (stored,) = plan_encoders(PLENTY, names=["revnet57"])
    assert set(stored.modes.values()) == {"store"}
    assert (stored.times_stored, stored.channels) == (1, (None,) * 4)
    assert counted[0] == ["store"]
    assert all(modes == ["store"] for modes in counted)
    assert stored.counted_bytes == pytest.approx(stored.predicted_bytes, rel=1e-4)
    # The same by the profile of all modes.
    with encoder_step(ARCHITECTURES["revnet57"], PLENTY).training():
        step = encoder_step(ARCHITECTURES["revnet57"], PLENTY)
        whole = profiling.profiler_of(step).timed(stored.channels)
    assert whole.seconds(stored.modes) == stored.seconds
    assert whole.peak_bytes(stored.modes) == stored.predicted_bytes


def test_a_stored_step_that_counts_more_than_predicted_is_planned(monkeypatch):
    counts = []

    def more_than_fits(profiler, found, channels, left, tell, counted=plans._counted):
        counts.append(set(found.blocks[0].modes))
        if len(counts) == 1:
            return found.uniform("store"), left + 1
        return counted(profiler, found, channels, left, tell)

    monkeypatch.setattr(plans, "_counted", more_than_fits)
    (found,) = plan_encoders(PLENTY, names=["resnet34"])
    assert counts == [{"store"}, {"store", "recompute"}]
    assert found.lacking_bytes == 0


BARE = Architecture(
    "revnet61", "revnet", "II", "basic", (48, 96, 192, 300), (2, 3, 6, 3), 61, 6_300_000
)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["models", "--card=11GB"], r"revnet61 +II +61 +6\.30 +- +- +- +- +- +- "),
        (["models"], r"revnet61 +II +61 +6\.30 +- +- +- +- +- +- "),
        (
            ["plan", "revnet61", "--card=4GB"],
            r"revnet61 +6\.30 +- +[23]\.\d+ +- +counted ",
        ),
        (["plan", "revnet61", "--card=11GB", "--batch=8"], r" 8 +32 +-$"),
        (
            ["memory", "revnet61", "--batch=2"],
            r"revnet61 after +reconstruct +sgd 8 bit",
        ),
        (
            ["memory", "revnet61", "--mode=plan", "--card=4GB", "--batch=16"],
            r"revnet61 after +plan \d+/\d+/\d+ +sgd 8 bit",
        ),
        (
            ["sweep", "revnet61", "--card=4GB", "--batches=16:32:16"],
            r"^ +32 +[\d.]+ +1\.000 .* best$",
        ),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else None,
)
def test_a_row_that_was_neither_counted_nor_published_is_listed_and_planned(
    arguments, shown, monkeypatch, capsys
):
    monkeypatch.setitem(ARCHITECTURES, BARE.name, BARE)
    assert main(arguments) == 0
    assert re.search(shown, capsys.readouterr().out, re.MULTILINE)
    assert main([*arguments, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    (own,) = [e for e in plain.get("encoders", []) if e["name"] == BARE.name] or [None]
    if own is not None:
        assert set(own["published"].values()) == {None}


def test_rows_that_were_not_counted_come_last_and_do_not_fit(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, BARE.name, BARE)
    training = Training(24 * GIB, 2, 200)
    for sort in ("memory", "batch", "vox1-h", "store"):
        assert select(training, sort=sort)[-1].row is BARE or sort == "store"
    assert BARE not in [model.row for model in select(training, fitting=True)]
    (model,) = select(training, names=[BARE.name])
    assert (model.fits("store"), model.needed_bytes("store")) == (None, None)


@dataclasses.dataclass(frozen=True)
class Pooled(Architecture):
    """A row with a field that no other has."""

    pooling: str = "statistics"


@pytest.mark.parametrize(
    "changed",
    [{"family": "df_revnet"}, {"type": "I"}, {"block": "bottleneck"},
     {"widths": (48, 96, 192, 304)}, {"strides": (1, 2, 2, 1)}, {"pooling": "attentive"}],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_an_encoder_of_another_kind_has_a_profile_of_its_own(changed, monkeypatch):
    known = dataclasses.asdict(ARCHITECTURES["revnet57"])
    like, other = Pooled(**known), Pooled(**{**known, **changed, "name": "revnet58"})
    deeper = dataclasses.replace(like, name="revnet77", blocks=(2, 3, 10, 3), layers=77)
    assert like.kind == deeper.kind != other.kind
    rows = {row.name: row for row in (like, deeper, other)}
    for name, row in rows.items():
        monkeypatch.setitem(ARCHITECTURES, name, row)
    models = [ListedEncoder(row, TIGHT) for row in rows.values()]
    groups = [[m.row.name for m in group] for group in plans._by_kind(models)]
    assert groups == [["revnet57", "revnet77"], ["revnet58"]]
    keys = [encoder_step(row, TIGHT).key for row in rows.values()]
    assert keys[0] == keys[1] != keys[2]
