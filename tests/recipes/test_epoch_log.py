import json
import logging
import sys

import pytest

from speechbrain_rev.cli import run_script
from tests.corpus import write_corpus
from tests.recipes.runs import RECIPE, arguments, recipe

epoch_log = recipe("epoch_log")
#: Runs of this file draw nothing.
DRAW = epoch_log.plots.training_curves

STATS = {"epoch": 1, "train_loss": 4.5, "lr": 0.1, "margin": 0.2}


def rows(folder):
    lines = (folder / epoch_log.LOG).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.usefixtures("undrawn")
def test_an_epoch_trained_again_replaces_its_line_and_those_after_it(tmp_path):
    log = epoch_log.EpochLog(tmp_path)
    for epoch, lr in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4)):
        log.write({**STATS, "epoch": epoch, "lr": lr})
    assert [(row["epoch"], row["lr"]) for row in rows(tmp_path)] == [(1, 0.1), (2, 0.4)]


@pytest.mark.usefixtures("undrawn")
def test_lines_that_were_cut_off_are_missed_once(tmp_path, caplog):
    log = epoch_log.EpochLog(tmp_path)
    for epoch in (1, 2, 3):
        log.write({**STATS, "epoch": epoch})
    assert caplog.messages == []
    path = tmp_path / epoch_log.LOG
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    log = epoch_log.EpochLog(tmp_path)
    for epoch in (4, 5):
        log.write({**STATS, "epoch": epoch})
    (said,) = caplog.messages
    assert said.endswith(
        "1 epochs before epoch 4: the others were cut off or moved away."
    )


def test_curves_are_drawn_after_each_epoch_of_all_so_far(tmp_path, monkeypatch):
    drawn = []

    def remember(rows, path):
        drawn.append([row["epoch"] for row in rows])
        DRAW(rows, path)

    monkeypatch.setattr(epoch_log.plots, "training_curves", remember)
    log = epoch_log.EpochLog(tmp_path)
    log.write(STATS)
    assert (tmp_path / epoch_log.CURVES).stat().st_size > 1000
    log.write({**STATS, "epoch": 2})
    assert drawn == [[1], [1, 2]]


def test_drawing_writes_nothing_into_the_log_of_a_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(epoch_log.plots, "training_curves", DRAW)
    caplog.set_level(logging.DEBUG)
    epoch_log.EpochLog(tmp_path).write(STATS)
    assert caplog.messages == []
    assert (tmp_path / epoch_log.CURVES).is_file()


@pytest.mark.parametrize("error", [ImportError, RuntimeError, OSError])
def test_curves_that_cannot_be_drawn_end_no_training_and_are_told_of_once(
    tmp_path, monkeypatch, caplog, error
):
    def fail(rows, path):
        raise error("pip install matplotlib")

    monkeypatch.setattr(epoch_log.plots, "training_curves", fail)
    caplog.set_level(logging.WARNING, "train")
    log = epoch_log.EpochLog(tmp_path)
    log.write(STATS)
    log.write({**STATS, "epoch": 2})
    assert len(rows(tmp_path)) == 2
    (said,) = caplog.messages
    assert said.endswith("training_curves.png is not drawn: pip install matplotlib")


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(epoch_log.plots, "training_curves", lambda rows, path: None)


def test_without_the_package_a_run_for_tensorboard_ends_before_it_begins(
    train, tmp_path, monkeypatch
):
    for name in list(sys.modules):
        if name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(sys, "argv", [str(RECIPE / "train.py")])
    folder = tmp_path / "run"
    argv = arguments(tmp_path / "nowhere", folder, tensorboard=True)
    # In one line, without a traceback.
    with pytest.raises(SystemExit, match="pip install tensorboard, or set tensorboard"):
        run_script(lambda: train.main(argv))
    assert not folder.exists()


def scalars(folder):
    """The numbers of all event files, by name and epoch."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the package tensorboard is not installed",
    )
    events = accumulator.EventAccumulator(str(folder / epoch_log.TENSORBOARD))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def assert_is_the_log(folder):
    found = scalars(folder)
    log = rows(folder)
    expected = {
        name: [(row["epoch"], pytest.approx(row[name], rel=1e-6)) for row in log]
        for name, value in log[0].items()
        if isinstance(value, int | float) and name != "epoch"
    }
    assert found == expected
    return found


@pytest.mark.usefixtures("undrawn")
def test_tensorboard_has_each_epoch_once_though_some_are_trained_again(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    first = epoch_log.EpochLog(tmp_path, tensorboard=True)
    for epoch in (1, 2, 3):
        first.write({**STATS, "epoch": epoch, "largest_streams": {"stage": 2.0}})
    # Killed before the checkpoint of the second epoch, and resumed in a new process.
    second = epoch_log.EpochLog(tmp_path, tensorboard=True)
    for epoch in (2, 3, 4):
        second.write({**STATS, "epoch": epoch, "train_loss": 4.0 - 0.5 * epoch})
    found = assert_is_the_log(tmp_path)
    assert found["train_loss"] == [(1, 4.5), (2, 3.0), (3, 2.5), (4, 2.0)]


@pytest.mark.slow
def test_a_run_and_its_continuation_are_in_tensorboard_as_in_the_log(train, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    data = write_corpus(tmp_path / "corpus")
    folder = tmp_path / "run"
    short = {"tensorboard": True, "steps_per_epoch": 2, "warmup_epochs": "0.0"}
    train.main(arguments(data, folder, **short, number_of_epochs=1))
    assert len(assert_is_the_log(folder)["train_loss"]) == 1
    train.main(arguments(data, folder, **short, number_of_epochs=3))
    found = assert_is_the_log(folder)
    assert [epoch for epoch, _ in found["train_loss"]] == [1, 2, 3]
    assert {
        "train_accuracy_percent",
        "lr",
        "margin",
        "valid_eer_percent",
        "utterances_per_second",
        "process_resident_peak_bytes",
    } < set(found)
