"""Reports of commands: tables at any width, JSON of the same rows, and notes."""

import dataclasses
import json

import pytest

from speechbrain_rev.catalog import ModelsReport, Training, select
from speechbrain_rev.catalog.columns import NOTE_WIDTH
from speechbrain_rev.catalog.plans import plan_encoders
from speechbrain_rev.catalog.render import (
    BreakdownReport,
    PlansReport,
    SweepReport,
    saved,
)
from speechbrain_rev.catalog.table import ListedEncoder
from speechbrain_rev.devices import GpuAtHand
from speechbrain_rev.lobes.geometry import AUTO, channels_at_the_peak
from speechbrain_rev.sizes import GIB

ON_11_GIB = Training(11 * GIB, batch=64, frames=200)
LONG = Training(24 * GIB, batch=64, frames=600)
MODES = "store", "sel.", "recomp.", "reconstr."
#: Each report, and the columns of its first table that are never hidden.
REPORTS = {
    "models": ["encoder", *MODES],
    "models of a GPU": ["encoder", "fastest mode", *MODES],
    "models of long utterances": ["encoder", "fastest mode", *MODES],
    "plans": ["encoder", "GiB", *MODES],
    "plan that lacks": ["encoder", "GiB", "missing"],
    "sweep": ["batch", "number"],
    "breakdowns": ["encoder", "", "mode", "GiB", ""],
    "stages": ["encoder", "", "mode", "GiB"],
}


@pytest.fixture(scope="module")
def reports(tight, swept, pairs, staged):
    lacking = dataclasses.replace(
        tight[0], modes=dict.fromkeys(tight[0].modes, "store"), counted_bytes=None
    )
    made = [
        ModelsReport(select(Training(None, batch=64, frames=200))),
        ModelsReport(select(ON_11_GIB)),
        ModelsReport(select(LONG)),
        PlansReport(tight),
        PlansReport([lacking]),
        SweepReport(swept),
        BreakdownReport(pairs, 11 * GIB),
        BreakdownReport([staged]),
    ]
    return dict(zip(REPORTS, made, strict=True))


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [60, 100, 200, None])
def test_tables_fit_a_terminal_and_cells_are_whole(name, width, reports):
    report = reports[name]
    lines = report.text(width).splitlines()
    assert max(map(len, lines)) <= (width or 155)
    assert all(line == line.rstrip() for line in lines)
    notes = lines[lines.index("") :]
    assert max(len(note) for note in notes if ": " in note) <= NOTE_WIDTH
    words = " ".join(" ".join(lines).split())
    for number, table in enumerate(report._tables()):
        lines, hidden = table.lines(width)
        shown = [c for c in table.columns if c.head is not None and c not in hidden]
        most = max((c.importance for c in hidden), default=0)
        assert all(c.importance > most for c in shown)
        assert number or set(REPORTS[name]) <= {c.head for c in shown}
        for row, line in zip(table.rows, lines[-len(table.rows) :], strict=True):
            assert line.split() == " ".join(c.cell(row) for c in shown).split()
        assert not hidden or width in (60, 100)
        assert ("A wider terminal or --json shows them." in words) == bool(hidden)
        named = words.partition("Hidden at ")[2]
        assert all(c.head in named and c.group.strip() in named for c in hidden)


def values_in(plain):
    """All values of a JSON object, however deep."""
    if isinstance(plain, dict):
        return [value for each in plain.values() for value in values_in(each)]
    return [plain]


@pytest.mark.parametrize("name", REPORTS)
def test_every_value_of_the_table_is_in_json_under_a_key_of_its_own(name, reports):
    table, *_ = reports[name]._tables()
    document = json.loads(reports[name].json())
    (rows,) = (
        document[k] for k in ("encoders", "batches", "breakdowns") if k in document
    )
    assert rows == json.loads(json.dumps(table.plain()))
    assert document["sources"]
    exact = [c.key for c in table.columns if not isinstance(c.of(table.rows[0]), dict)]
    assert None not in exact
    assert len(set(exact)) == len(exact)
    for row, plain in zip(table.rows, rows, strict=True):
        there = values_in(plain)
        for column in table.columns:
            value = json.loads(json.dumps(column.of(row)))
            assert all(one in there for one in values_in(value))


def test_json_has_what_was_asked_and_its_parts_make_the_need(reports):
    document = json.loads(reports["models of long utterances"].json())
    assert document["training"] == {
        "batch": 64, "frames": 600, "precision": "float32", "card_bytes": 24 * GIB,
        "reserve_bytes": LONG.reserve_bytes, "optimizer_state_bits": 8, "classes": 17982,
    }  # fmt: skip
    assert set(document["counted_with"]) == {"date", "torch"}
    for plain in document["encoders"]:
        for mode, computed in plain["computed"].items():
            if (parts := computed["needed_bytes"]) is None:
                assert mode == "selective" or plain["type"] == "vanilla"
                continue
            assert parts["encoder_step"] == plain["counted"]["step_peak_bytes"][mode]
            fits = sum(parts.values()) <= LONG.available_bytes
            assert (computed["fits"], computed["largest_batch"] >= 64) == (fits, fits)
        days = plain["estimated"]["training_days_by_mode"]
        for mode, computed in plain["computed"].items():
            assert (days[mode] is not None) == (computed["fits"] is True)
        fastest = plain["estimated"]["fastest_mode"]
        known = [each for each in days.values() if each is not None]
        assert (fastest is None) == (not known)
        if known:
            assert days[fastest] == plain["estimated"]["training_days"] == min(known)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("models", ["Not reproduced here", "on meta tensors"]),
        ("models of a GPU", ["No such GPU was tried", "1.88 GiB reserved for CUDA"]),
        ("models of long utterances", ["utterances of 600 frames", "of 17982"]),
        ("plans", ["GPU: 5 GiB, 1.4 GiB reserved for CUDA and fragmentation, 3.6 GiB left; none",
                   "from peak figures unless measured", "utterances of 200 frames, 8-bit states, classifier",
                   "an assumed RTX 2060, listed nearest to 5 GiB, 3.25 TFLOP/s, 203",
                   "plan for batch 128, float32", "not reproduced here",
                   "recomputed in one go with the block before"]),
        ("plan that lacks", [" predicted ", "missing: beyond what is left"]),
        ("sweep", ["best batch 48: ", "recomputed in one go with the block before", "2.68 GiB left",
                   "batch 1000 does not fit with any plan", "from peak figures unless measured"]),
        ("breakdowns", ["resnet34: 8 bit saves 75 % of the optimizer states, 0.8 % of the",
                        "upper bound", "No GPU was tried", "classifier of 17982",
                        "revnet57: reconstruct saves "]),
        ("stages", ["resnet34: plan saves", "how many blocks store / selective / reconstruct / rec",
                    "largest peak is that of the activations"]),
    ],
)  # fmt: skip
def test_notes_name_where_figures_are_from(name, words, reports):
    text = " ".join(reports[name].text().split())
    assert all(each in text for each in words)
    computed = (
        "models of a GPU",
        "models of long utterances",
        "plans",
        "plan that lacks",
    )
    assert ("Computed" in text) == (name in computed)


def test_published_batches_stand_beside_the_same_gpu_and_length_alone(tight):
    for card_bytes, frames in [(11 * GIB, 200), (24 * GIB, 200), (11 * GIB, 600)]:
        training = Training(card_bytes, 128, frames)
        model = ListedEncoder(tight[0].model.row, training)
        encoder = dataclasses.replace(tight[0], model=model, counted_bytes=GIB)
        heads = PlansReport([encoder]).text().splitlines()[1]
        published = (card_bytes, frames) == (11 * GIB, 200)
        assert heads.split().count("GPUs") == (2 if published else 1)


def test_gb_stands_under_the_heading_published_alone(reports):
    groups, heads, *_ = reports["models of a GPU"].text().splitlines()
    assert heads.split().count("GB") == 1
    # The heading is above the middle of its columns, whose last is this one.
    begin = groups.index("published")
    assert begin < heads.index(" GB ") < begin + len("published") + 20


def test_a_gpu_that_was_asked_is_named(tight):
    report = PlansReport(tight, GpuAtHand("NVIDIA X", 8 * GIB, 5 * GIB))
    assert "Free of 8 GiB on NVIDIA X: 5 GiB, 1.4 GiB res" in " ".join(
        report.text().split()
    )
    assert json.loads(report.json())["training"]["card_name"] == "NVIDIA X"


def test_channels_of_a_plan_are_those_of_the_first_level_and_not_the_chunk(tight):
    row = tight[0].model.row
    channels = tuple(channels_at_the_peak(AUTO, row, row.geometry()))
    chunked = dataclasses.replace(tight[0], channels=channels)
    report = PlansReport([chunked])
    (plain,) = json.loads(report.json())["encoders"]
    assert tuple(plain["plan"]["channels"]) == channels
    assert plain["plan"]["chunk_bytes"] == AUTO
    _, heads, row, *_ = report.text().splitlines()
    assert "channels" in heads.split()
    assert f" {channels[0]} " in row
    pieces = f"{channels[0]} channels at a time in the first stage (chunk {AUTO}: bytes"
    assert pieces in " ".join(report.text().split())


def test_what_each_block_does_is_listed_for_one_encoder_alone(tight):
    one, both = PlansReport(tight[:1]), PlansReport(tight)
    stages = tight[0].stages
    assert "\n".join(stages) in one.text()
    assert "blocks work on all channels at once (chunk null)" in one.text()
    assert not set(stages) & set(both.text().splitlines())
    plain = [
        encoder["plan"]["stages"] for encoder in json.loads(both.json())["encoders"]
    ]
    assert plain == [encoder.stages for encoder in tight]


def test_a_mode_that_no_block_was_given_is_a_zero_and_one_that_none_can_have_is_none():
    training = Training(11 * GIB, batch=16, frames=200)
    planned = plan_encoders(training, names=["resnet34", "revnet57"])
    reversible, vanilla = json.loads(PlansReport(planned).json())["encoders"]
    counts = dict.fromkeys(["selective", "recompute", "join"], 0)
    counts |= {"store": 17, "reconstruct": None}
    assert vanilla["plan"]["blocks"] == counts
    assert reversible["plan"]["blocks"] == {**counts, "reconstruct": 0, "join": None}


def test_a_best_batch_at_the_edge_of_a_sweep_names_the_option_that_widens_it(swept):
    words = "larger batches were not tried and may be better: widen --batches\n"
    assert words not in SweepReport(swept).text()
    few = dataclasses.replace(
        swept.sweep, plans=swept.sweep.plans[:2], infeasible_batch=None
    )
    assert words in SweepReport(dataclasses.replace(swept, sweep=few)).text()


def test_rows_of_a_sweep_that_was_timed_name_what_could_not_be(swept):
    """Memory ran out at one batch, and fewer utterances than another has were timed."""
    ran_out, best, other = swept.sweep.plans
    rows = [dataclasses.replace(ran_out, modes={}), best]
    rows.append(dataclasses.replace(other, timed_batch=48))
    sweep = dataclasses.replace(swept.sweep, plans=rows)
    report = SweepReport(dataclasses.replace(swept, sweep=sweep))
    remarks = "-  memory ran out while it was timed", "best", "timed at batch 48"
    for line, remark in zip(report.text().splitlines()[2:], remarks, strict=False):
        assert line.endswith(remark)
    assert json.loads(report.json())["out_of_memory"] == [16]


def test_bits_that_stay_save_nothing(pairs):
    same_bits = dataclasses.replace(pairs[1][1], optimizer_bits=32)
    assert "8 bit" not in saved(pairs[1][0], same_bits)
