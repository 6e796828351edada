"""The table of what a user can do: what it compares, what it counts, what it shows."""

import dataclasses

import pytest
import torch

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import Training, counted_peaks
from speechbrain_rev.sizes import parse_card
from tests.benchmarks import __main__ as command
from tests.benchmarks import readme, tables, user_ways, users
from tests.benchmarks.counts import training_step_peak
from tests.benchmarks.harness import NotEqual, Result
from tests.benchmarks.user_ways import PLAIN, REVERSIBLE, STORE, step_bytes

CPU = torch.device("cpu")
CHECKPOINT, RECOMPUTE, BF16, ACCUMULATION = PLAIN[1], PLAIN[2], PLAIN[3], PLAIN[5]
EXACT, EXACT_BF16 = REVERSIBLE[2:]
FEW = {"blocks": (1, 1, 1, 1), "widths": (8, 16, 16, 24)}


@pytest.fixture
def few_channels(monkeypatch):
    few = {"widths": (8, 8, 8, 12), "blocks": (1, 2, 1, 1)}
    monkeypatch.setattr(user_ways, "FEW_BLOCKS", few)


@pytest.mark.usefixtures("few_channels")
def test_torchs_checkpoint_has_equal_gradients_and_updates_statistics_twice():
    left = {
        way: user_ways.small_step(way, "df_resnet233", CPU)
        for way in (STORE, CHECKPOINT, RECOMPUTE)
    }
    for way in (CHECKPOINT, RECOMPUTE):
        torch.testing.assert_close(
            left[way].gradients, left[STORE].gradients, rtol=1e-9, atol=0
        )
    assert [each.updates for each in left.values()] == [1, 2, 1]


def test_torchs_checkpoint_is_around_the_stem_each_transition_and_each_block():
    encoder = user_ways.encoder_by(CHECKPOINT, "df_resnet233", **FEW)
    wrapped = [m for m in encoder.modules() if isinstance(m, user_ways.Checkpointed)]
    assert len(wrapped) == len(encoder.block_modes()) == 1 + 3 + 4


@pytest.mark.usefixtures("few_channels")
def test_gradients_that_are_off_end_the_run(monkeypatch):
    monkeypatch.setattr(user_ways, "NAMES", ("resnet152",))
    wrong = dataclasses.replace(BF16, name="wrong", precision="float32")
    monkeypatch.setattr(user_ways, "PLAIN", (STORE, wrong))
    right = user_ways.small_step

    def step(way, name, device):
        left = right(way, name, device)
        share = 1 + 1e-8 * (way == wrong)
        return dataclasses.replace(left, gradients=share * left.gradients)

    monkeypatch.setattr(user_ways, "small_step", step)
    with pytest.raises(NotEqual, match=r"resnet152, wrong, are 1.0e-08 from stored"):
        user_ways.check_gradients(CPU)


@pytest.mark.parametrize("way", [CHECKPOINT, BF16], ids=lambda way: way.name)
def test_bytes_counted_without_data_are_those_of_a_step_that_runs(way):
    sizes = {"batch": 4, "frames": 40, **FEW}
    counted = step_bytes(way, "df_resnet233", **sizes)
    real = step_bytes(way, "df_resnet233", without_data=False, **sizes)
    assert counted == real < step_bytes(STORE, "df_resnet233", **sizes)


def test_steps_are_those_that_the_package_counts():
    ours = step_bytes(RECOMPUTE, "resnet34", batch=2, frames=40)
    counted = training_step_peak("resnet34", mode="recompute", frames=40, batch=2)
    assert ours == counted


@pytest.mark.parametrize("way", [STORE, RECOMPUTE, EXACT], ids=lambda way: way.name)
def test_counts_other_than_those_of_the_package_end_the_run(way):
    name = "revnet197" if way == EXACT else "resnet152"
    committed = counted_peaks()[name, way.mode, 200](users.BATCH)
    user_ways.check_committed(way, name, 200, committed)
    with pytest.raises(NotEqual, match=f"{name}, {way.name}, at 200 frames holds"):
        user_ways.check_committed(way, name, 200, committed + 4)


@pytest.mark.parametrize("card", users.CARDS)
@pytest.mark.parametrize("frames", users.FRAMES)
@pytest.mark.parametrize(
    ("name", "mode"), [("df_resnet233", "recompute"), ("revnet197", "reconstruct")]
)
def test_what_fits_is_what_the_package_says(name, mode, frames, card):
    row = architecture(name)
    training = Training(parse_card(card), batch=users.BATCH, frames=frames)
    peak = counted_peaks()[name, mode, frames]
    needed = users.needed_bytes(STORE, name, frames, peak(users.BATCH))
    fits = training.largest_batch(row, mode) >= users.BATCH
    assert users.fits(card, needed) == fits
    spare = training.card_bytes - training.reserve_bytes
    assert users.fits(card, spare)
    assert not users.fits(card, spare + 1)


def test_accumulation_needs_input_and_classifier_of_a_part():
    whole, parts = (
        users.needed_bytes(way, "resnet152", 200, 0) for way in (STORE, ACCUMULATION)
    )
    inputs = 96 * 200 * 4 * (80 + 160 + 176)
    assert 0 <= whole - parts - inputs < 96 * 18_000 * 4 * 5


@pytest.fixture
def result(monkeypatch):
    figures = {
        ("resnet152", STORE): (50, 2.0),
        ("resnet152", CHECKPOINT): (16, 3.0),
        ("resnet152", ACCUMULATION): (12, 2.5),
        ("revnet197", STORE): (19, 3.0),
        ("revnet197", EXACT): (2, 4.5),
    }
    updates = {
        ("resnet152", STORE): 1,
        ("resnet152", CHECKPOINT): 2,
        ("resnet152", ACCUMULATION): 4,
        ("revnet197", STORE): 1,
        ("revnet197", EXACT): 1,
    }
    rows = []
    for frames in users.FRAMES:
        found = {
            case: users.Figures(
                gib * users.GIB * frames // 200,
                {"median": s, "p20": s, "p80": s} if frames == 200 else None,
            )
            for case, (gib, s) in figures.items()
        }
        rows += users.rows_of(found, updates, frames, CPU)
    return Result("users", "", "setting", rows, "")


def test_rows_compare_with_the_same_encoder_and_with_its_counterpart(result):
    rows = {(r["encoder"], r["way"], r["frames"]): r for r in result.rows}
    checkpoint = rows["resnet152", CHECKPOINT.name, 200]
    assert checkpoint["times the baseline"] == 1.5
    assert checkpoint["times the counterpart"] == ""
    exact = rows["revnet197", EXACT.name, 200]
    assert exact["times the baseline"] == 1.5
    assert exact["counterpart"] == "resnet152 200 store"
    assert exact["times the counterpart"] == 2.25
    kept = 8 * architecture("revnet197").parameters / users.GIB
    assert exact["peak GiB"] == pytest.approx(2 + kept)
    assert exact["training GiB"] > exact["peak GiB"]
    assert rows["revnet197", EXACT.name, 600]["s per step"] == ""
    parts = rows["resnet152", ACCUMULATION.name, 200]
    assert parts["statistics of"] == users.BATCH // 4


def test_the_readme_shows_both_lengths_in_a_row(result, tmp_path, monkeypatch):
    result.save(tmp_path, CPU)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = readme.users().splitlines()
    heads, _, *rows = (
        [c.strip() for c in s.split("|")[1:-1]] for s in lines if "|" in s
    )
    cells = {tuple(row[:2]): dict(zip(heads, row, strict=True)) for row in rows}
    assert list(cells) == [(r["encoder"], r["way"]) for r in result.rows[:5]]
    exact = cells["revnet197", EXACT.name]
    assert (exact["GiB, 200 frames"], exact["GiB, 600 frames"]) == ("2.14", "6.14")
    assert (exact["fits 11 GiB"], exact["fits 24 GiB"]) == ("200, 600", "200, 600")
    assert (exact["times storing"], exact["times counterpart"]) == ("1.50", "2.25")
    checkpoint = cells["resnet152", CHECKPOINT.name]
    assert (checkpoint["fits 11 GiB"], checkpoint["fits 24 GiB"]) == ("", "200")
    assert checkpoint["times counterpart"] == ""
    assert cells["resnet152", ACCUMULATION.name]["statistics of"] == "32"
    assert f"more than once by a batch: {CHECKPOINT.name}. " in lines[-1]


class Gpu:
    total_memory = 23 * users.GIB


def test_a_gpu_tells_speed_and_what_has_no_room(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Gpu)
    found = {
        ("resnet152", STORE): users.Figures(None),
        ("resnet152", CHECKPOINT): users.Figures(
            9 * users.GIB, {"median": 0.64, "p20": 0.6, "p80": 0.7}
        ),
    }
    cuda = torch.device("cuda")
    store, checkpoint = users.rows_of(found, dict.fromkeys(found, 1), 200, cuda)
    assert (store["peak GiB"], store["peak by"]) == ("", "does not fit")
    assert (store["fits 11 GiB"], store["fits 24 GiB"]) == ("no", "no")
    assert store["s per step"] == store["days for 150 epochs"] == ""
    # Without the stored step there is nothing to compare with.
    assert checkpoint["times the baseline"] == ""
    assert checkpoint["utterances per second"] == 200
    steps = 150 * (1_092_009 // 128)
    assert checkpoint["days for 150 epochs"] == pytest.approx(steps * 0.64 / 86400)


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
    alone = [STORE, "resnet152", 16, CPU]
    for _ in range(2):
        assert users._alone(*alone, **FEW) == users.Figures(None)
    with pytest.raises(RuntimeError, match="shapes differ"):
        users._alone(*alone, **FEW)


def test_it_runs_by_name_only():
    assert command.BY_NAME["users"] is users.run
    assert "users" not in command.BENCHMARKS
