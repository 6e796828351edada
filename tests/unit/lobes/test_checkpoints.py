import hashlib
import resource
from pathlib import Path

import pytest
import torch
import yaml
from speechbrain.utils.checkpoints import (
    Checkpointer,
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from speechbrain.utils.epoch_loop import EpochCounter

from speechbrain_rev.inference.run_folder import read_classifier
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes import checkpointer as own
from speechbrain_rev.lobes.checkpointer import (
    WholeCheckpointer,
    place_of,
    verify_checkpoint,
)
from speechbrain_rev.lobes.checkpoints import (
    CHANNELS,
    KeptChannels,
    average_of_last_epochs,
    is_end_of_epoch,
    load_finished_run,
)
from speechbrain_rev.lobes.classifier import CosineClassifier


class Killed(Exception):
    pass


class KilledWhileSaving(torch.nn.Linear):
    killed = False

    def state_dict(self, *args, **kwargs):
        if self.killed:
            raise Killed
        return super().state_dict(*args, **kwargs)


def test_a_checkpoint_whose_writing_was_cut_off_is_passed_over(tmp_path):
    model = KilledWhileSaving(2, 2)
    checkpointer = WholeCheckpointer(tmp_path, {"model": model})
    first = checkpointer.save_checkpoint()
    saved = model.weight.detach().clone()
    model.killed = True
    with pytest.raises(Killed):
        checkpointer.save_checkpoint()
    model.killed = False
    torch.nn.init.zeros_(model.weight)
    assert checkpointer.recover_if_possible().path == first.path
    assert torch.equal(model.weight, saved)


@pytest.mark.parametrize(
    "which",
    [
        {"num_to_keep": 0},
        {"num_to_keep": 2, "min_keys": ["loss"]},
        {"num_to_keep": 1, "max_keys": ["loss"], "importance_keys": []},
        {"num_to_keep": 1, "ckpt_predicate": is_end_of_epoch},
    ],
)
def test_checkpoints_are_chosen_for_deletion_as_by_speechbrain(tmp_path, which):
    left = []
    for kind in (Checkpointer, WholeCheckpointer):
        folder = tmp_path / kind.__name__
        checkpointer = kind(folder, {"model": torch.nn.Linear(1, 1)})
        for i, loss in enumerate((0.3, 0.1, 0.5, 0.2, 0.4)):
            meta = {"loss": loss, "unixtime": i}
            checkpointer.save_checkpoint(meta=meta, end_of_epoch=i % 2 == 0)
        checkpointer.delete_checkpoints(**which)
        left.append({c.meta["loss"] for c in checkpointer.list_checkpoints()})
    assert left[0] == left[1]
    assert len(left[0]) < 5


def test_old_checkpoints_are_deleted_as_by_speechbrain(tmp_path):
    checkpointer = WholeCheckpointer(tmp_path, {"model": torch.nn.Linear(1, 1)})
    for epoch in range(4):
        checkpointer.save_and_keep_only(meta={"epoch": epoch}, num_to_keep=2)
    kept = {c.meta["epoch"] for c in checkpointer.list_checkpoints()}
    assert kept == {2, 3}


def test_what_was_cut_off_is_deleted_before_the_next_is_written(tmp_path):
    model = KilledWhileSaving(2, 2)
    checkpointer = WholeCheckpointer(tmp_path, {"model": model})
    checkpointer.save_checkpoint()
    model.killed = True
    with pytest.raises(Killed):
        checkpointer.save_checkpoint()
    assert len(list(tmp_path.iterdir())) == 2
    model.killed = False
    checkpointer.save_checkpoint()
    assert len(list(tmp_path.iterdir())) == 2
    assert len(checkpointer.list_checkpoints()) == 2


def test_a_deletion_that_is_cut_off_leaves_no_checkpoint(tmp_path, monkeypatch):
    checkpointer = WholeCheckpointer(tmp_path, {"model": torch.nn.Linear(1, 1)})
    checkpointer.save_checkpoint()

    def killed(path):
        (Path(path) / "model.ckpt").unlink()
        raise Killed

    monkeypatch.setattr(own.shutil, "rmtree", killed)
    with pytest.raises(Killed):
        checkpointer.save_and_keep_only(num_to_keep=1)
    monkeypatch.undo()
    (left,) = checkpointer.list_checkpoints()
    verify_checkpoint(left)


@pytest.mark.parametrize("size", [200, 3000, -1, -200])
def test_a_disk_that_is_full_costs_no_earlier_checkpoint(tmp_path, size):
    """A limit of a file's size stands for the disk's; below 0, from a file's end."""
    model = torch.nn.Linear(32, 32)
    checkpointer = WholeCheckpointer(tmp_path, {"model": model, "other": model})
    first = checkpointer.save_checkpoint()
    if size < 0:
        # torch's writer says "basic_ios::clear: iostream error" here.
        size += (first.path / "model.ckpt").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(OSError, match=r"newest is .*Make room") as error:
            checkpointer.save_checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"the newest is {first.path}." in str(error.value)
    assert [c.path for c in checkpointer.list_checkpoints()] == [first.path]
    assert len(list(tmp_path.iterdir())) == 1
    checkpointer.save_checkpoint()


@pytest.mark.parametrize(
    ("name", "change"),
    # Without CKPT.yaml a folder is no checkpoint at all.
    [
        ("model.ckpt", "flip"),
        ("model.ckpt", "cut"),
        ("model.ckpt", "remove"),
        ("CKPT.yaml", "flip"),
    ],
)
def test_a_damaged_checkpoint_is_not_loaded(tmp_path, name, change):
    model = torch.nn.Linear(4, 4)
    checkpointer = WholeCheckpointer(tmp_path, {"model": model})
    checkpointer.save_checkpoint(meta={"epoch": 1})
    newest = checkpointer.save_checkpoint(meta={"epoch": 2})
    path = newest.path / name
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    if change == "flip":
        path.write_bytes(content)
    elif change == "cut":
        path.write_bytes(content[:-7])
    else:
        path.unlink()
    before = model.weight.detach().clone()
    what = "missing" if change == "remove" else "damaged"
    with pytest.raises(ValueError, match=rf"{name} is {what}.*rm -r"):
        checkpointer.load_checkpoint(newest)
    if name == "model.ckpt":
        with pytest.raises(ValueError, match="cannot be trusted"):
            average_of_last_epochs(checkpointer, "model", 2)
        with pytest.raises(ValueError, match="cannot be trusted"):
            checkpointer.restore_states("model")
    assert torch.equal(model.weight, before)


def test_a_name_is_given_once(tmp_path):
    checkpointer = WholeCheckpointer(tmp_path, {"model": torch.nn.Linear(4, 4)})
    first = checkpointer.save_checkpoint(name="best")
    with pytest.raises(ValueError, match=r"There is a checkpoint .*best"):
        checkpointer.save_checkpoint(name="best")
    verify_checkpoint(first)


@pytest.mark.parametrize("left", ["", "CKPT.yaml"])
def test_checksums_must_name_every_file(tmp_path, left):
    checkpointer = WholeCheckpointer(tmp_path, {"model": torch.nn.Linear(4, 4)})
    newest = checkpointer.save_checkpoint()
    sums = newest.path / "SHA256SUMS"
    lines = [x for x in sums.read_text().splitlines() if left and x.endswith(left)]
    sums.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="cannot be trusted"):
        checkpointer.load_checkpoint(newest)


def test_checksums_are_those_of_sha256sum(tmp_path):
    checkpointer = WholeCheckpointer(tmp_path, {"model": torch.nn.Linear(4, 4)})
    newest = checkpointer.save_checkpoint()
    lines = (newest.path / "SHA256SUMS").read_text().splitlines()
    found = dict(reversed(line.split("  ")) for line in lines)
    expected = {
        name: hashlib.sha256((newest.path / name).read_bytes()).hexdigest()
        for name in ("CKPT.yaml", "model.ckpt")
    }
    assert found == expected


def test_a_checkpoint_without_checksums_is_told_of(tmp_path):
    model = torch.nn.Linear(4, 4)
    Checkpointer(tmp_path, {"model": model}).save_checkpoint()
    with pytest.warns(UserWarning, match="no SHA256SUMS"):
        WholeCheckpointer(tmp_path, {"model": model}).recover_if_possible()


def write_epochs(folder, epochs):
    model = torch.nn.BatchNorm1d(1)
    checkpointer = WholeCheckpointer(folder, {"model": model})
    for epoch in epochs:
        model.weight.data.fill_(epoch)
        model.num_batches_tracked.fill_(10 * epoch)
        checkpointer.save_checkpoint(meta={"epoch": epoch})
    return checkpointer, model


def test_the_average_is_over_the_last_epochs_and_not_over_what_lies_between(tmp_path):
    # Written in another order: a resumed run may have gone back.
    checkpointer, model = write_epochs(tmp_path, (4, 1, 2, 3))
    model.weight.data.fill_(1000)
    between = checkpointer.save_checkpoint(end_of_epoch=False)
    assert not is_end_of_epoch(between)
    average = average_of_last_epochs(checkpointer, "model", 3)
    assert average["weight"].item() == 3.0
    model.load_state_dict(average)


def test_counters_stay_whole_numbers(tmp_path):
    checkpointer, _ = write_epochs(tmp_path, (1, 2))
    average = average_of_last_epochs(checkpointer, "model", 2)
    assert average["num_batches_tracked"].dtype == torch.int64
    assert average["num_batches_tracked"].item() == 15


def test_without_a_finished_epoch_there_is_no_average(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"model": torch.nn.Linear(1, 1)})
    checkpointer.save_checkpoint(end_of_epoch=False)
    with pytest.raises(ValueError, match="no checkpoint of a finished epoch"):
        average_of_last_epochs(checkpointer, "model", 2)


def test_an_unfinished_run_and_another_network_are_refused(tmp_path):
    modules = {"embedding_model": torch.nn.Linear(2, 2), "classifier": torch.nn.ReLU()}
    with pytest.raises(ValueError, match="of a finished run"):
        load_finished_run(modules, tmp_path)
    WholeCheckpointer(tmp_path / "save", modules).save_checkpoint()
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "embedding_model.ckpt")
    with pytest.raises(ValueError, match=r"(?s)do not fit: set arch.*size mismatch"):
        load_finished_run(modules, tmp_path)


def test_a_finished_run_gives_its_average_and_its_newest_classifier(tmp_path):
    start = {name: torch.nn.Linear(2, 2) for name in ("embedding_model", "classifier")}
    checkpointer = WholeCheckpointer(tmp_path / "save", start)
    checkpointer.save_checkpoint(name="1")
    torch.nn.init.ones_(start["classifier"].weight)
    checkpointer.save_checkpoint(name="2")
    average = torch.nn.Linear(2, 2).state_dict()
    torch.save(average, tmp_path / "embedding_model.ckpt")
    modules = {name: torch.nn.Linear(2, 2) for name in start}
    load_finished_run(modules, tmp_path)
    assert torch.equal(modules["embedding_model"].weight, average["weight"])
    assert torch.equal(modules["classifier"].weight, torch.ones(2, 2))


class TestKeptChannels:
    @pytest.fixture
    def run(self, tmp_path):
        """A run with a checkpoint, and what a second process makes of it."""

        def start(channels):
            encoder = build_encoder(
                "revnet57", widths=(4, 4, 4, 4), blocks=(1, 0, 0, 0)
            )
            encoder.set_channels(channels)
            kept = KeptChannels(encoder)
            checkpointer = WholeCheckpointer(tmp_path)
            checkpointer.add_recoverable(CHANNELS, kept, optional_load=True)
            return encoder, kept, checkpointer

        return start

    def test_a_run_without_checkpoints_has_not_begun(self, run):
        encoder, kept, checkpointer = run([4, 4, 4, 4])
        assert not kept.restore(checkpointer, chosen=False)
        assert encoder.channels == [4, 4, 4, 4]

    def test_a_run_goes_on_with_the_channels_of_its_newest_checkpoint(self, run):
        *_, checkpointer = run([2, None, 2, 2])
        checkpointer.save_checkpoint()
        encoder, kept, checkpointer = run([4, 4, 4, 4])
        assert kept.restore(checkpointer, chosen=True)
        assert encoder.channels == [2, None, 2, 2]
        checkpointer.recover_if_possible()

    def test_a_chunk_that_is_fixed_must_be_the_same(self, run):
        *_, checkpointer = run([2, 2, 2, 2])
        checkpointer.save_checkpoint()
        _, kept, checkpointer = run([4, 4, 4, 4])
        with pytest.raises(ValueError, match=r"began with \[2, 2, 2, 2\] channels"):
            kept.restore(checkpointer, chosen=False)
        _, kept, checkpointer = run([2, 2, 2, 2])
        assert kept.restore(checkpointer, chosen=False)

    def test_checkpoints_of_a_time_without_channels_are_taken_as_they_are(self, run):
        encoder, kept, checkpointer = run([4, 4, 4, 4])
        del checkpointer.recoverables[CHANNELS]
        checkpointer.save_checkpoint()
        assert kept.restore(checkpointer, chosen=False)
        assert encoder.channels == [4, 4, 4, 4]


def test_a_classifier_is_narrowed_to_the_first_speed_and_to_nothing_else(tmp_path):
    finished = {
        "embedding_model": torch.nn.Linear(2, 2),
        "classifier": CosineClassifier(4, 6),
    }
    WholeCheckpointer(tmp_path / "save", finished).save_checkpoint()
    torch.save(
        finished["embedding_model"].state_dict(), tmp_path / "embedding_model.ckpt"
    )
    modules = finished | {"classifier": CosineClassifier(4, 2)}
    load_finished_run(modules, tmp_path, narrowed_from=3)
    rows = finished["classifier"].weight[:2]
    assert torch.equal(modules["classifier"].weight, rows)
    with pytest.raises(ValueError, match=r"6 classes, no multiple of its 4 speeds"):
        load_finished_run(modules, tmp_path, narrowed_from=4)
    for narrowed_from in (None, 2):
        with pytest.raises(ValueError, match="do not fit"):
            load_finished_run(modules, tmp_path, narrowed_from=narrowed_from)


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"epoch: [1\n", b"\xff\xfe:"])
def test_a_folder_whose_own_file_is_damaged_is_named(tmp_path, content):
    checkpointer = WholeCheckpointer(tmp_path, {"model": torch.nn.Linear(4, 4)})
    newest = checkpointer.save_checkpoint(meta={"epoch": 1})
    (newest.path / "CKPT.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"CKPT\+.*CKPT\.yaml is damaged.*rm -r"):
        checkpointer.recover_if_possible()


def test_each_process_loads_its_own_state(tmp_path, monkeypatch):
    class State:
        value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    checkpointer, state = WholeCheckpointer(tmp_path), State()
    checkpointer.add_state("state", state)
    module = "speechbrain_rev.lobes.checkpointer"
    monkeypatch.setattr(f"{module}.gathered", lambda told: [told, {"value": 7}])
    checkpointer.save_checkpoint()
    # A third one takes that of the first.
    for rank, value in ((0, 0), (1, 7), (2, 0)):
        monkeypatch.setattr(f"{module}.process_rank", lambda rank=rank: rank)
        state.value = 99
        checkpointer.recover_if_possible()
        assert state.value == value
        state.value = 99
        checkpointer.restore_states("state")
        assert state.value == value


@register_checkpoint_hooks
class Step:
    """What a Brain says of itself."""

    step = 0

    @mark_as_saver
    def save(self, path):
        Path(path).write_text(yaml.dump({"step": self.step}))

    @mark_as_loader
    def load(self, path, end_of_epoch):
        self.step = yaml.safe_load(Path(path).read_text())["step"]


class Training:
    """A run whose weights tell when they were saved."""

    def __init__(self, run):
        self.model, self.step = torch.nn.Linear(1, 1), Step()
        self.counter = EpochCounter(9)
        parts = {"classifier": self.model, "counter": self.counter, "brain": self.step}
        self.checkpointer = WholeCheckpointer(run / "save", parts)

    def save(self, epoch, step, *, keep=9, **meta):
        self.counter.current, self.step.step = epoch, step
        self.model.weight.data.fill_(100 * epoch + step)
        ended = step == 0
        self.checkpointer.save_and_keep_only(
            meta={"epoch": epoch, **meta},
            end_of_epoch=ended,
            num_to_keep=keep,
            ckpt_predicate=lambda found: is_end_of_epoch(found) == ended,
        )

    def kept(self):
        found = self.checkpointer.list_checkpoints()
        weights = (torch.load(c.paramfiles["classifier"])["weight"] for c in found)
        return {int(weight) for weight in weights}


#: Epoch and step; 0 is the epoch's end.
SAVED = [(1, 2), (1, 0), (2, 2), (2, 4), (2, 0), (10, 2), (10, 4)]


@pytest.mark.parametrize("back", ["the clock", "what was written"])
def test_a_clock_set_back_neither_deletes_nor_hides_the_newest(
    tmp_path, monkeypatch, back
):
    training, now = Training(tmp_path), 1e9
    for epoch, step in SAVED:
        now -= 3600
        # Of an earlier version all times are what the clock said.
        meta = {} if back == "the clock" else {"unixtime": now}
        with monkeypatch.context() as patch:
            if back == "the clock":
                patch.setattr("time.time", lambda now=now: now)
            training.save(epoch, step, keep=1, **meta)
    assert training.kept() == {200, 1004}
    resumed = Training(tmp_path)
    resumed.checkpointer.recover_if_possible()
    assert (resumed.counter.current, resumed.step.step) == (9, 4)
    assert read_classifier(tmp_path).state_dict["weight"].item() == 1004
    modules = {"embedding_model": torch.nn.ReLU(), "classifier": resumed.model}
    torch.nn.init.zeros_(resumed.model.weight)
    torch.save({}, tmp_path / "embedding_model.ckpt")
    load_finished_run(modules, tmp_path)
    assert resumed.model.weight.item() == 1004


def test_without_epochs_the_order_of_saving_counts_and_no_clock(tmp_path, monkeypatch):
    model = torch.nn.Linear(1, 1)
    checkpointer = WholeCheckpointer(tmp_path, {"model": model})
    for number in range(4):
        monkeypatch.setattr("time.time", lambda number=number: 1e9 - 3600 * number)
        model.weight.data.fill_(number)
        checkpointer.save_and_keep_only(num_to_keep=2)
    assert len(checkpointer.list_checkpoints()) == 2
    # SpeechBrain's own reader, too.
    for reader in (checkpointer, Checkpointer(tmp_path, {"model": model})):
        torch.nn.init.zeros_(model.weight)
        reader.recover_if_possible()
        assert model.weight.item() == 3


@pytest.mark.parametrize("name", ["counter.ckpt", "brain.ckpt", "CKPT.yaml"])
def test_an_epoch_or_step_that_is_damaged_does_not_hide_the_newest(tmp_path, name):
    training = Training(tmp_path)
    for epoch, step in ((1, 0), (2, 4)):
        training.save(epoch, step)
    path = training.checkpointer.find_checkpoint().path / name
    content = path.read_bytes()
    path.write_bytes(content.replace(b"2", b"0").replace(b"4", b"0"))
    assert path.read_bytes() != content
    with pytest.raises(ValueError, match=rf"{name} is damaged.*rm -r"):
        training.checkpointer.recover_if_possible()
    with pytest.raises(ValueError, match=rf"{name} is damaged.*rm -r"):
        read_classifier(tmp_path)


@pytest.mark.parametrize(
    ("counter", "brain"),
    [("x", {}), ("3", {"step": "x"}), ("", {}), ("3", {"step": 1.5})],
)
def test_a_place_that_is_no_number_is_refused(counter, brain):
    with pytest.raises(ValueError, match=r"no number|invalid literal"):
        place_of({"unixtime": 1.0}, counter, brain)
