"""Encoders as a table: committed counts, what fits a GPU, selection and order."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speechbrain_rev.architectures import ARCHITECTURES, architecture
from speechbrain_rev.catalog import Training, counted_peaks, select
from speechbrain_rev.catalog.breakdown import encoder_breakdown
from speechbrain_rev.catalog.counts import (
    BATCHES,
    FRAMES,
    Peak,
    counted_work,
    peak_at,
    work_at,
)
from speechbrain_rev.catalog.plans import plan_encoders
from speechbrain_rev.catalog.steps import head_modules
from speechbrain_rev.catalog.table import (
    MODES,
    SORT_KEYS,
    other_encoder,
    shorter_frames,
)
from speechbrain_rev.devices import ASSUMED
from speechbrain_rev.heads import HEAD, HEAD_OF, Head
from speechbrain_rev.modes import LOSSLESS
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.sizes import GIB
from tests.benchmarks.counts import step_work, training_step_peak

PEAKS = counted_peaks()
ROW = architecture("resnet34")
CARD = Training(11 * GIB, batch=128, frames=200)
NO_CARD = Training(None, batch=128, frames=200)
ON_6_S = dataclasses.replace(CARD, frames=600)
STALE = (
    "The engine or an encoder stores something else than what is committed. If that is "
    "meant, count again: CONTRIBUTING.md has the commands."
)
#: One encoder of each block and transition, each mode and both lengths among them.
SAMPLE = [
    ("resnet34", "store", 200),
    ("df_resnet56", "recompute", 200),
    ("df_resnet56", "selective", 200),
    ("revnet46", "reconstruct", 200),
    ("revnet46", "selective", 200),
    ("revnet57", "recompute", 600),
    ("revnet155", "reconstruct", 200),
    ("df_revnet89", "store", 600),
]
slow = pytest.mark.slow


def test_every_encoder_is_counted_in_every_counted_mode_that_it_has():
    assert set(PEAKS) == {
        (row.name, mode, frames)
        for row in ARCHITECTURES.values()
        for mode, frames in itertools.product(MODES, FRAMES)
        if row.reversible or mode != "reconstruct"
    }
    # What is compressed takes bytes that depend on the speech.
    assert set(MODES) == {mode.value for mode in LOSSLESS}
    assert {peak.batches for peak in PEAKS.values()} == {BATCHES}


def recount(name, mode, frames, batch, **options):
    return training_step_peak(name, mode=mode, frames=frames, batch=batch, **options)


@pytest.mark.parametrize(
    ("case", "batch"),
    [
        *((case, 2) for case in SAMPLE),
        *(pytest.param(case, 64, marks=slow) for case in PEAKS),
    ],
    ids=str,
)
def test_a_recount_finds_the_committed_bytes(case, batch):
    assert recount(*case, batch) == PEAKS[case](batch), STALE


# Parameter gradients make the peak of revnet126, recomputed, at this batch.
@slow
@pytest.mark.parametrize(
    "case", [("revnet57", "reconstruct", 200), ("revnet126", "recompute", 200)], ids=str
)
def test_a_step_on_the_cpu_holds_the_committed_bytes(case):
    assert recount(*case, 2, device="cpu") == PEAKS[case](2)


@slow
@pytest.mark.parametrize(
    "case", [("resnet34", "store", 200), ("revnet126", "recompute", 200)], ids=str
)
def test_what_is_read_between_and_beyond_the_counts_is_never_below_a_count(case):
    for batch in (3, 96):
        assert recount(*case, batch) <= PEAKS[case](batch)
    assert recount(*case, 4096) == PEAKS[case](4096)


@pytest.mark.parametrize(
    "case",
    [*SAMPLE[:2], *(pytest.param(c, marks=slow) for c in PEAKS if c not in SAMPLE[:2])],
    ids=str,
)
def test_a_recount_finds_the_committed_work(case):
    name, mode, frames = case
    work, committed = step_work(name, mode=mode, frames=frames), counted_work()[case]
    # Versions of torch differ by some scalars that an operation reads.
    assert work.moved_bytes == pytest.approx(committed.moved_bytes, rel=1e-5), STALE
    same = dataclasses.replace(work, moved_bytes=committed.moved_bytes)
    assert same == committed, STALE


def test_days_are_those_of_a_plan_of_one_mode():
    training = CARD.at(96)
    (planned,) = plan_encoders(training, names=["resnet34"])
    (listed,) = select(training, names=["resnet34"])
    assert set(planned.modes.values()) == {"store"}
    assert listed.modes["store"].days == pytest.approx(planned.days, rel=1e-4)
    # A run of blocks that a plan recomputes at once takes less than each by itself.
    assert listed.modes["recompute"].days > 1.2 * listed.modes["store"].days


def test_days_follow_the_speed_and_are_of_batches_that_fit():
    half = dataclasses.replace(
        ASSUMED,
        flops_per_second=ASSUMED.flops_per_second / 2,
        bytes_per_second=ASSUMED.bytes_per_second / 2,
        operations_per_second=ASSUMED.operations_per_second / 2,
    )
    (assumed,) = select(CARD, names=["revnet57"])
    (slow_one,) = select(CARD, names=["revnet57"], speed=half)
    for mode in MODES:
        days = assumed.modes[mode].days
        assert slow_one.modes[mode].days == pytest.approx(2 * days)
    (deep,) = select(CARD, names=["revnet245"])
    for step in deep.modes.values():
        fits = sum(step.needed_bytes.values()) <= CARD.available_bytes
        assert ((step.days is not None), (step.largest_batch >= 128)) == (fits, fits)
        assert step.needed_bytes["encoder_step"] == step.step_peak_bytes
    assert deep.days == deep.modes["reconstruct"].days
    assert (deep.fastest_mode, assumed.fastest_mode) == ("reconstruct", "store")
    assert assumed.days == assumed.modes["store"].days
    assert assumed.days == min(step.days for step in assumed.modes.values())
    (nowhere,) = select(NO_CARD, names=["revnet57"])
    assert (nowhere.modes["store"].days, nowhere.days) == (None, None)
    assert nowhere.modes["store"].largest_batch is None


@pytest.mark.parametrize("case", PEAKS, ids=str)
def test_peaks_are_convex_in_the_batch_from_two_on(case):
    batches, peaks = BATCHES[1:], PEAKS[case].peak_bytes[1:]
    slopes = [
        (high - low) / (many - few)
        for (few, many), (low, high) in zip(
            itertools.pairwise(batches), itertools.pairwise(peaks), strict=True
        )
    ]
    assert slopes == sorted(slopes)
    # The last is reached, or what lies beyond would be read too low.
    assert slopes[-1] == pytest.approx(slopes[-2], rel=1e-3)


moments = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(1, 10**8)), min_size=1, max_size=5
)


@given(moments, st.integers(2, 256))
def test_a_peak_is_safe_between_the_counts_of_any_step(moments, batch):
    """A moment of a step holds a constant and so much for each utterance."""

    def held(batch):
        return max(constant + slope * batch for constant, slope in moments)

    peak = Peak(BATCHES, [held(batch) for batch in BATCHES])
    assert held(batch) <= peak(batch)
    if batch in BATCHES:
        assert held(batch) == peak(batch)
    if len(moments) == 1:
        assert (peak(batch), peak(9999)) == (held(batch), held(9999))
        assert peak.bytes_per_utterance == moments[0][1]


@pytest.mark.parametrize(
    ("batch", "frames"), [(2, 400), (16, 201), (64, 297), (8, 900)]
)
@pytest.mark.parametrize(
    ("name", "mode"),
    [("resnet34", "store"), ("df_resnet56", "recompute"), ("revnet46", "reconstruct"),
     ("resnet34", "selective"), ("revnet57", "selective"),
     ("revnet57", "reconstruct"), ("revnet57", "recompute"),
     ("df_revnet66", "reconstruct")],
)  # fmt: skip
def test_the_peak_of_another_length_is_just_above_its_count(name, mode, batch, frames):
    counted = recount(name, mode, frames, batch)
    assert counted <= peak_at(name, mode, frames)(batch) <= 1.35 * counted


def test_the_work_of_another_length_is_near_its_count():
    counted = step_work("revnet57", mode="store", frames=400)(64)
    work = work_at("revnet57", "store", 400)(64)
    assert work.flops == pytest.approx(counted.flops, rel=0.01)
    assert work.moved_bytes == pytest.approx(counted.moved_bytes, rel=0.01)
    assert work.operations == counted.operations


def test_shorter_utterances_than_counted_take_no_more_than_counted_ones():
    assert peak_at("resnet34", "store", 56) == peak_at("resnet34", "store", 200)
    assert peak_at("resnet34", "store", 200) == PEAKS["resnet34", "store", 200]


@pytest.mark.parametrize("gib", [0.5, 8, 24])
def test_the_largest_batch_leaves_the_reserve_free_and_one_more_does_not(gib):
    for name, mode, frames in PEAKS:
        row, training = ARCHITECTURES[name], Training(round(gib * GIB), 1, frames)
        largest = training.largest_batch(row, mode)
        assert (largest > 0) == (gib > 1)
        for batch in filter(None, (largest, largest + 1)):
            needed = sum(training.needed_bytes(row, mode, batch).values())
            assert (needed <= training.available_bytes) == (batch == largest)


@pytest.mark.parametrize(("bits", "within"), [(8, 0.1), (32, 0.2)])
def test_the_reserve_meets_the_published_batches_of_stored_encoders(bits, within):
    # Those were reached on 11 GiB, at 32 bit; so the reserve's text has it.
    training = dataclasses.replace(CARD, optimizer_bits=bits)
    for row in ARCHITECTURES.values():
        if not row.reversible:
            ours = training.largest_batch(row, "store")
            assert ours == pytest.approx(row.published_max_batch_11gb, rel=within)


# Of sgd and of adamw. The last two have the most of their families in small tensors,
# kept at 32 bit.
@pytest.mark.parametrize(
    ("name", "bits", "above"),
    [
        ("df_resnet56", 32, 1.1),
        pytest.param("resnet152", 8, 1.05, marks=slow),
        ("df_revnet377", 8, 1.05),
    ],
)
def test_optimizer_states_are_just_above_their_count(name, bits, above):
    training = dataclasses.replace(CARD, optimizer_bits=bits)
    part = training.fixed_bytes(architecture(name), 128)["optimizer_states"]
    case = encoder_breakdown(name, batch=128, frames=200, optimizer_bits=bits)
    counted = case.report.optimizer_states_bytes
    assert counted <= part <= above * counted


@pytest.mark.parametrize("batch", [1, 64, 256, 400, 2048])
@pytest.mark.parametrize("classes", [3633, HEAD.classes, 333_000])
@pytest.mark.parametrize("dim", [192, 256])
@pytest.mark.parametrize("loss", HEAD_OF)
def test_the_classifier_s_step_is_just_above_its_count(loss, dim, classes, batch):
    head = Head(classes, dim, loss)
    with torch.device("meta"):
        classifier, loss = head_modules(head)
        embeddings = torch.randn(batch, 1, dim, requires_grad=True)
        targets = torch.zeros(batch, 1, dtype=torch.long)
    assert sum(p.numel() for p in classifier.parameters()) == head.parameters
    for tensor in (embeddings, classifier.weight):
        tensor.grad = torch.zeros_like(tensor)
    counted = live_bytes_peak(lambda: loss(classifier(embeddings), targets).backward())
    assert counted <= head.step_bytes(batch) <= 1.05 * counted


def test_a_third_of_a_million_classes_take_little_beside_their_weight():
    head = Head(classes=333_000)
    # All scores at once take five times the weight: 1,629 MiB.
    assert head.step_bytes(256) < 1.4 * 4 * head.parameters
    few, many = (
        sum(dataclasses.replace(CARD, head=h).fixed_bytes(ROW, 128).values())
        for h in (HEAD, head)
    )
    assert many - few > 3 * 4 * (head.parameters - HEAD.parameters)


def test_parameters_of_an_encoder_without_figures_are_counted(monkeypatch):
    row = dataclasses.replace(ROW, name="mine", layers=None, parameters=None)
    monkeypatch.setitem(ARCHITECTURES, "mine", row)
    (model,) = select(CARD, names=["mine"])
    assert (model.parameters, model.row.layers) == (ROW.parameters, None)


def test_another_length_or_encoder_that_is_advised_fits():
    row = architecture("resnet152")
    training = Training(11 * GIB, 40, 600, optimizer_bits=32)
    assert not training.fits(row)
    shorter = dataclasses.replace(training, frames=shorter_frames(training, row))
    assert (shorter.frames, shorter.fits(row)) == (200, True)
    other = architecture(other_encoder(training, row))
    assert (other.counterpart, training.fits(other)) == ("resnet152", True)
    # Of two lengths there is none below the shorter one, and too many do not fit at it.
    assert shorter_frames(CARD, row) is None
    assert shorter_frames(Training(11 * GIB, 256, 600), row) is None
    assert other_encoder(Training(GIB // 2, 128, 200), row) is None


def names(models):
    return [model.row.name for model in models]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, list(ARCHITECTURES)),
        ({"reverse": True}, list(ARCHITECTURES)[::-1]),
        (
            {"families": ["revnet", "df_revnet"], "types": ["I"]},
            [n for n, row in ARCHITECTURES.items() if row.type == "I"],
        ),
        ({"names": ["revnet245", "resnet34", "revnet245"]}, ["revnet245", "resnet34"]),
        ({"names": ["revnet245", "resnet34"], "types": ["vanilla"]}, ["resnet34"]),
    ],
)
def test_encoders_are_chosen_in_the_order_of_tables_or_names(options, chosen):
    assert names(select(NO_CARD, **options)) == chosen


def test_only_what_fits_in_some_mode_is_left():
    fitting = names(select(CARD, fitting=True))
    assert 0 < len(fitting) < len(ARCHITECTURES)
    for model in select(CARD):
        needed = min(sum(step.needed_bytes.values()) for step in model.modes.values())
        assert (model.row.name in fitting) == (needed <= CARD.available_bytes)
        assert (model.fastest_mode is not None) == (model.row.name in fitting)


#: Whether an encoder has the figure of a key; it has those of the other keys.
HAS_FIGURE = {
    "reconstruct": lambda row: row.reversible,
    **dict.fromkeys(
        ("vox1-o", "vox1-e", "vox1-h"), lambda row: row.vox1_h_eer is not None
    ),
    "days": ON_6_S.fits,
}


@pytest.mark.parametrize("key", SORT_KEYS)
@pytest.mark.parametrize("reverse", [False, True])
def test_sorting_is_by_the_figure_and_encoders_without_it_come_last(key, reverse):
    models = select(ON_6_S, sort=key, reverse=reverse)
    figures = [SORT_KEYS[key](model) for model in models]
    has_figure = HAS_FIGURE.get(key, lambda row: True)
    known = sum(has_figure(row) for row in ARCHITECTURES.values())
    assert set(figures[known:]) <= {None}
    assert figures[:known] == sorted(figures[:known], reverse=reverse)
    assert set(names(models)) == set(ARCHITECTURES)
    if key == "memory":
        mode = models[0].row.default_mode
        assert figures[0] == models[0].modes[mode].bytes_per_utterance


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"names": ["revnet58"]}, "Did you mean revnet57"),
        ({"fitting": True}, "--fits needs a GPU: add, for instance, --card=11GB"),
        ({"sort": "batch"}, "--sort=batch needs a GPU"),
        ({"sort": "days"}, "--sort=days needs a GPU"),
        ({"families": ["resnet"], "types": ["I"]}, "No encoder is left. Leave out"),
        ({"training": CARD.at(9000), "fitting": True}, r"left.*--batch \(9000\)"),
    ],
)
def test_what_cannot_be_selected_is_refused_with_what_can(wrong, message):
    with pytest.raises(ValueError, match=message):
        select(**{"training": NO_CARD} | wrong)


def test_encoders_that_were_not_counted_come_last_and_do_not_fit(uncounted):
    training = Training(24 * GIB, 2, 200)
    for sort in ("memory", "batch", "days", "vox1-h"):
        assert select(training, sort=sort)[-1].row is uncounted
    assert uncounted not in [model.row for model in select(training, fitting=True)]
    (model,) = select(training, names=[uncounted.name])
    assert (model.modes, model.figure("largest_batch"), model.days) == ({}, None, None)
