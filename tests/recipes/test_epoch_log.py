import importlib
import json
import logging
import struct
import sys
import types

import pytest
import torch

from speechbrain_rev.cli import run_script
from tests.corpus import write_corpus
from tests.recipes.runs import RECIPE, SHORT, arguments, recipe, weights

epoch_log = recipe("epoch_log")
#: Runs of this file draw nothing.
DRAW = epoch_log.plots.training_curves

#: Some of what an epoch's line has.
FIGURES = {
    "train_accuracy_percent",
    "lr",
    "margin",
    "valid_eer_percent",
    "utterances_per_second",
    "process_resident_peak_bytes",
}
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


def begin(train, monkeypatch, folder, **settings):
    """Begin a run as the script does, whose errors are one line."""
    monkeypatch.setattr(sys, "argv", [str(RECIPE / "train.py")])
    argv = arguments(folder.parent / "nowhere", folder, **settings)
    run_script(lambda: train.main(argv))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_without_the_package_of_its_logger_a_run_ends_before_it_begins(
    train, tmp_path, monkeypatch, name
):
    for module in list(sys.modules):
        if module.startswith(("torch.utils.tensorboard", "wandb")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    said = rf"logger: {name} needs .* pip install speechbrain_rev\[{name}\], or set"
    with pytest.raises(SystemExit, match=said):
        begin(train, monkeypatch, tmp_path / "run", logger=name)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_called_wandb_is_not_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(ImportError, match=r"pip install speechbrain_rev\[wandb\]"):
        epoch_log.check_logger("wandb", None)


def test_a_project_without_wandb_is_refused(train, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"wandb_project: mine is for logger: wandb"):
        begin(train, monkeypatch, tmp_path / "run", wandb_project="mine")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"to": None}, "run/train_log.jsonl."),
        ({"to": "tensorboard"}, "run/train_log.jsonl and run/tensorboard for Tens"),
        (
            {"to": "wandb"},
            " and wandb in its default project, with files in run/wandb.",
        ),
        ({"to": "wandb", "project": "mine"}, " and wandb in project mine, with files"),
    ],
)
def test_where_epochs_are_logged_is_told_in_words(settings, expected, monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert expected in epoch_log.logs_in_words("run", **settings)


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
    first = epoch_log.EpochLog(tmp_path, to="tensorboard")
    for epoch in (1, 2, 3):
        first.write({**STATS, "epoch": epoch, "largest_streams": {"stage": 2.0}})
    # Killed before the checkpoint of the second epoch, and resumed in a new process.
    second = epoch_log.EpochLog(tmp_path, to="tensorboard")
    for epoch in (2, 3, 4):
        second.write({**STATS, "epoch": epoch, "train_loss": 4.0 - 0.5 * epoch})
    found = assert_is_the_log(tmp_path)
    assert found["train_loss"] == [(1, 4.5), (2, 3.0), (3, 2.5), (4, 2.0)]


@pytest.mark.slow
def test_a_run_and_its_continuation_are_in_tensorboard_as_in_the_log(train, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    data = write_corpus(tmp_path / "corpus")
    folder = tmp_path / "run"
    short = {"logger": "tensorboard", "steps_per_epoch": 2, "warmup_epochs": "0.0"}
    train.main(arguments(data, folder, **short, number_of_epochs=1))
    assert len(assert_is_the_log(folder)["train_loss"]) == 1
    train.main(arguments(data, folder, **short, number_of_epochs=3))
    found = assert_is_the_log(folder)
    assert [epoch for epoch, _ in found["train_loss"]] == [1, 2, 3]
    assert set(found) > FIGURES


class Wandb(types.ModuleType):
    """Stands for the package wandb, and remembers what it is asked for."""

    class errors:
        class Error(Exception):
            pass

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.logged, self.ended = [], [], []

    def init(self, **options):
        self.begun.append(options)
        return self

    def log(self, stats, step):
        self.logged.append((step, stats))

    def finish(self, exit_code):
        self.ended.append(exit_code)


@pytest.fixture
def fake_wandb(monkeypatch):
    for name in ("WANDB_DIR", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.mark.usefixtures("undrawn")
class TestWandb:
    def test_a_run_that_goes_on_is_one_run_of_wandb(self, fake_wandb, tmp_path):
        for epochs in ((1, 2), (3,)):
            settings = {"number_of_epochs": epochs[-1]}
            options = {"to": "wandb", "project": "mine", "config": settings}
            with epoch_log.EpochLog(tmp_path, **options) as log:
                for epoch in epochs:
                    log.write({**STATS, "epoch": epoch, "largest_streams": {"a": 1.0}})
        first, second = fake_wandb.begun
        assert first == {
            "project": "mine",
            "id": (tmp_path / epoch_log.WANDB_RUN).read_text().strip(),
            "resume": "allow",
            "name": str(tmp_path),
            "dir": str(tmp_path),
            "config": {"number_of_epochs": 2},
            "allow_val_change": True,
        }
        assert second == {**first, "config": {"number_of_epochs": 3}}
        assert fake_wandb.logged == [(n, {**STATS, "epoch": n}) for n in (1, 2, 3)]
        assert fake_wandb.ended == [0, 0]

    def test_other_runs_have_other_names(self, fake_wandb, tmp_path):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            epoch_log.EpochLog(tmp_path / name, to="wandb")
        assert len({options["id"] for options in fake_wandb.begun}) == 2

    def test_training_that_fails_has_failed_there(self, fake_wandb, tmp_path):
        with (
            pytest.raises(KeyboardInterrupt),
            epoch_log.EpochLog(tmp_path, to="wandb"),
        ):
            raise KeyboardInterrupt
        assert fake_wandb.ended == [1]

    def test_only_the_main_process_begins_one(self, fake_wandb, tmp_path, monkeypatch):
        monkeypatch.setattr(epoch_log, "if_main_process", lambda: False)
        with epoch_log.EpochLog(tmp_path, to="wandb"):
            pass
        assert fake_wandb.begun == fake_wandb.ended == []

    def test_what_wandb_refuses_is_one_line(self, fake_wandb, tmp_path, monkeypatch):
        def refuse(**options):
            raise fake_wandb.errors.Error("No API key\nconfigured.")

        monkeypatch.setattr(fake_wandb, "init", refuse)
        said = r"cannot begin a run \(No API key configured\.\)\. Log in by `wandb"
        with pytest.raises(ValueError, match=said):
            epoch_log.EpochLog(tmp_path, to="wandb")

    def test_a_variable_that_wandb_cannot_read_is_one_line(
        self, fake_wandb, tmp_path, monkeypatch
    ):
        def refuse(**options):
            raise ValueError(
                "1 validation error for Settings\nmode\n  Input should be 'online'\n"
                "    For further information visit https://somewhere"
            )

        monkeypatch.setattr(fake_wandb, "init", refuse)
        said = (
            r"begin a run \(1 validation .* mode Input should be 'online'\)\. Correct"
        )
        with pytest.raises(ValueError, match=said):
            epoch_log.EpochLog(tmp_path, to="wandb")

    def test_wandb_itself_refuses_a_mode_in_one_line(self, tmp_path, monkeypatch):
        pytest.importorskip("wandb", reason="wandb is not installed")
        monkeypatch.setenv("WANDB_MODE", "bogus")
        with pytest.raises(
            ValueError, match=r"^logger: wandb cannot begin a run \(.*bogus"
        ):
            epoch_log.EpochLog(tmp_path, to="wandb")

    @pytest.mark.parametrize("content", [b"", b"a/b\n", b"two words\n", b"\xff\n"])
    def test_a_damaged_name_of_its_run_is_refused_by_its_file(
        self, content, fake_wandb, tmp_path
    ):
        (tmp_path / epoch_log.WANDB_RUN).write_bytes(content)
        with pytest.raises(ValueError, match=r"wandb_run\.txt holds .*remove the file"):
            epoch_log.EpochLog(tmp_path, to="wandb")
        assert fake_wandb.begun == []

    @pytest.mark.parametrize("source", ["wandb_project", "WANDB_PROJECT"])
    def test_a_bad_project_is_refused_before_the_folder_is_made(
        self, source, train, fake_wandb, tmp_path, monkeypatch
    ):
        project = {source: "a/b"} if source == "wandb_project" else {}
        monkeypatch.setenv("WANDB_PROJECT", "good" if project else "a/b")
        with pytest.raises(SystemExit, match=rf"{source} is 'a/b', but the name of a"):
            begin(train, monkeypatch, tmp_path / "run", logger="wandb", **project)
        assert not (tmp_path / "run").exists()
        assert fake_wandb.begun == []

    @pytest.mark.parametrize("trial", ["--dry_run", "--debug"])
    def test_a_trial_begins_none(self, train, fake_wandb, tmp_path, capsys, trial):
        data = write_corpus(tmp_path / "corpus")
        argv = arguments(data, tmp_path / "run", **SHORT, logger="wandb")
        train.main([*argv, "--wandb_project=mine", trial])
        assert fake_wandb.begun == []
        names_it = "wandb in project mine, with files in" in capsys.readouterr().out
        assert names_it == (trial == "--dry_run")


def records_of(path):
    """The records of an offline file of wandb, which is a log as LevelDB writes it."""
    content, place, record = path.read_bytes(), 7, b""
    while place < len(content):
        if (left := -place % 2**15) < 7:
            place += left  # too short for a header
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def logged_by_wandb(folder):
    """What the offline files of wandb have: name of the run, project, epochs by step."""
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    runs, epochs = set(), {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for content in records_of(path):
            record = proto.Record.FromString(content)
            if record.HasField("run"):
                runs.add((record.run.run_id, record.run.project))
            if record.HasField("history"):
                items = record.history.item
                row = {
                    i.key or i.nested_key[0]: json.loads(i.value_json) for i in items
                }
                epochs[row.get("_step", record.history.step.num)] = row
    return runs, epochs


@pytest.mark.slow
def test_a_run_and_its_continuation_are_in_wandb_as_in_the_log(
    train, tmp_path, monkeypatch
):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "logs"))
    (tmp_path / "logs").mkdir()
    data = write_corpus(tmp_path / "corpus")
    folder = tmp_path / "run"
    loggers = {"plain": {}, "run": {"logger": "wandb", "wandb_project": "mine"}}
    for name, settings in loggers.items():
        for epochs in (1, 3):
            short = {"steps_per_epoch": 2, "warmup_epochs": "0.0", **settings}
            argv = arguments(data, tmp_path / name, number_of_epochs=epochs, **short)
            train.main(argv)
    runs, epochs = logged_by_wandb(tmp_path / "logs")
    name = (folder / epoch_log.WANDB_RUN).read_text().strip()
    assert runs == {(name, "mine")}
    log = {row["epoch"]: row for row in rows(folder)}
    assert list(epochs) == list(log) == [1, 2, 3]
    for epoch, row in log.items():
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        assert numbers.items() <= epochs[epoch].items()
    assert set(epochs[1]) > FIGURES
    # Nothing that is drawn depends on the logger.
    plain = weights(tmp_path / "plain")
    assert plain.keys() == weights(folder).keys()
    assert all(torch.equal(plain[key], w) for key, w in weights(folder).items())
