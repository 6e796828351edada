"""The log of epochs: lines, curves, TensorBoard and Weights & Biases."""

import importlib
import json
import logging
import struct
import sys
import types

import pytest

from speechbrain_rev import plots
from speechbrain_rev.training import EpochLog, check_logger, epoch_log

STATS = {"epoch": 1, "train_loss": 4.5, "lr": 0.1, "margin": 0.2}


def rows(folder):
    return [json.loads(line) for line in (folder / epoch_log.LOG).open()]


def write(log, *epochs, **changed):
    for epoch in epochs:
        log.write({**STATS, "epoch": epoch, **changed})


def test_an_epoch_trained_again_replaces_its_line_and_those_after_it(tmp_path):
    log = EpochLog(tmp_path)
    write(log, 1, 2, 3)
    write(log, 2, lr=0.4)
    assert [(row["epoch"], row["lr"]) for row in rows(tmp_path)] == [(1, 0.1), (2, 0.4)]


def test_curves_of_all_epochs_are_drawn_and_log_nothing(
    tmp_path, monkeypatch, undrawn, caplog
):
    drawn = []

    def remember(rows, path):
        drawn.append([row["epoch"] for row in rows])
        undrawn(rows, path)

    monkeypatch.setattr(plots, "training_curves", remember)
    caplog.set_level(logging.DEBUG)
    write(EpochLog(tmp_path), 1, 2)
    assert drawn == [[1], [1, 2]]
    assert (tmp_path / epoch_log.CURVES).stat().st_size > 1000
    assert caplog.messages == []


@pytest.mark.parametrize("error", [ImportError, RuntimeError, OSError])
def test_curves_that_cannot_be_drawn_end_no_run_and_are_reported_once(
    tmp_path, monkeypatch, caplog, error
):
    def fail(rows, path):
        raise error("pip install matplotlib")

    monkeypatch.setattr(plots, "training_curves", fail)
    write(EpochLog(tmp_path), 1, 2)
    assert len(rows(tmp_path)) == 2
    (message,) = caplog.messages
    assert message.endswith("training_curves.png is not drawn: pip install matplotlib")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
@pytest.mark.parametrize("module", [None, "empty"])
def test_a_logger_needs_its_package(monkeypatch, name, module):
    """A folder of wandb's files is imported as an empty package."""
    for loaded in list(sys.modules):
        if loaded.startswith(("torch.utils.tensorboard", "wandb")):
            monkeypatch.delitem(sys.modules, loaded)
    empty = module and types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, empty)
    with pytest.raises(
        ImportError,
        match=rf"logger: {name} needs .* pip install speechbrain_rev\[{name}",
    ):
        check_logger(name)


@pytest.mark.parametrize(
    ("to", "project", "places"),
    [
        (None, "", "."),
        ("tensorboard", "", " and run/tensorboard for TensorBoard."),
        ("wandb", "", " and wandb in its default project, with files in run/wandb."),
        ("wandb", "mine", " and wandb in project mine, with files in run/wandb."),
    ],
)
def test_places_of_logs_are_a_sentence(monkeypatch, to, project, places):
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setenv("WANDB_PROJECT", project)
    sentence = epoch_log.log_places("run", to=to)
    assert sentence == f"Logs of each epoch: run/train_log.jsonl{places}"


def test_tensorboard_has_each_epoch_once_though_some_are_trained_again(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the package tensorboard is not installed",
    )
    write(EpochLog(tmp_path, to="tensorboard"), 1, 2, 3, largest_streams={"stage": 2.0})
    # Killed before the checkpoint of the second epoch, and resumed in a new process.
    with EpochLog(tmp_path, to="tensorboard") as log:
        write(log, 2, 3, 4, train_loss=2.5)
    events = accumulator.EventAccumulator(str(tmp_path / epoch_log.TENSORBOARD))
    events.Reload()
    scalars = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert scalars == {
        name: [(row["epoch"], pytest.approx(row[name])) for row in rows(tmp_path)]
        for name in ("train_loss", "lr", "margin")
    }
    assert [value for _, value in scalars["train_loss"]] == [4.5, 2.5, 2.5, 2.5]


class Wandb(types.ModuleType):
    """A package wandb that remembers calls."""

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


class TestWandb:
    def test_a_run_that_goes_on_is_one_run_of_wandb(self, fake_wandb, tmp_path):
        for epochs in ((1, 2), (3,)):
            config = {"number_of_epochs": epochs[-1]}
            with EpochLog(tmp_path, to="wandb", config=config) as log:
                write(log, *epochs, largest_streams={"a": 1.0})
        first, second = fake_wandb.begun
        assert first == {
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
        (tmp_path / "other").mkdir()
        EpochLog(tmp_path / "other", to="wandb")
        assert fake_wandb.begun[-1]["id"] != first["id"]

    @pytest.mark.parametrize(("is_main", "ended"), [(True, [1]), (False, [])])
    def test_training_that_fails_has_failed_there_in_the_main_process(
        self, fake_wandb, tmp_path, monkeypatch, is_main, ended
    ):
        monkeypatch.setattr(epoch_log, "if_main_process", lambda: is_main)
        with pytest.raises(KeyboardInterrupt), EpochLog(tmp_path, to="wandb"):
            raise KeyboardInterrupt
        assert (len(fake_wandb.begun), fake_wandb.ended) == (len(ended), ended)

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (
                Wandb.errors.Error("No API key\nconfigured."),
                r"begin a run \(No API key configured\.\)\. Log in by `wandb login`",
            ),
            (
                ValueError(
                    "1 error\nmode\n    For further information visit https://x"
                ),
                r"begin a run \(1 error mode\)\. Correct the variable WANDB_",
            ),
        ],
    )
    def test_what_wandb_refuses_is_one_line(
        self, fake_wandb, tmp_path, monkeypatch, error, line
    ):
        def refuse(**options):
            raise error

        monkeypatch.setattr(fake_wandb, "init", refuse)
        with pytest.raises(ValueError, match=line):
            EpochLog(tmp_path, to="wandb")

    def test_wandb_itself_refuses_a_mode_in_one_line(self, tmp_path, monkeypatch):
        pytest.importorskip("wandb", reason="wandb is not installed")
        monkeypatch.setenv("WANDB_MODE", "bogus")
        with pytest.raises(ValueError, match=r"^logger: wandb cannot begin .*bogus"):
            EpochLog(tmp_path, to="wandb")

    @pytest.mark.parametrize("content", [b"", b"a/b\n", b"\xff\n"])
    def test_a_damaged_name_of_its_run_is_refused_by_its_file(
        self, content, fake_wandb, tmp_path
    ):
        (tmp_path / epoch_log.WANDB_RUN).write_bytes(content)
        with pytest.raises(ValueError, match=r"wandb_run\.txt holds .*remove the file"):
            EpochLog(tmp_path, to="wandb")
        assert fake_wandb.begun == []


def records_of(path):
    """Yield the records of an offline file of wandb, a log as LevelDB writes it."""
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


@pytest.mark.slow
def test_wandb_itself_takes_a_run_and_its_continuation(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    wandbs = {"MODE": "offline", "SILENT": "true", "DIR": tmp_path, "PROJECT": "mine"}
    for name, value in wandbs.items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    wandb.teardown()  # It has read these variables once.
    for epochs in ((1, 2), (3,)):
        with EpochLog(tmp_path, to="wandb", config={}) as log:
            write(log, *epochs)
    wandb.teardown()  # Its process may still write; this waits for its end.
    runs, losses = set(), 0
    for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb"):
        for record in map(proto.Record.FromString, records_of(path)):
            if record.HasField("run"):
                runs.add((record.run.run_id, record.run.project))
            keys = [i.key or i.nested_key[0] for i in record.history.item]
            losses += "train_loss" in keys
    assert runs == {((tmp_path / epoch_log.WANDB_RUN).read_text().strip(), "mine")}
    assert losses == 3
