"""Checkpoints are whole or not there, compared before they are loaded, and averaged."""

import functools
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
from torch import nn

from speechbrain_rev.inference.trained import newest_checkpoint
from speechbrain_rev.lobes import checkpointer as own
from speechbrain_rev.lobes.checkpointer import (
    CHANNELS,
    KeptArithmetic,
    WholeCheckpointer,
    average_of_last_epochs,
    is_end_of_epoch,
    place_of,
    verify_checkpoint,
)
from tests.unit.lobes.encoders import NARROW, tiny


@pytest.fixture
def checkpointer(tmp_path):
    return WholeCheckpointer(tmp_path, {"model": nn.Linear(32, 32)})


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
        checkpointer = kind(tmp_path / kind.__name__, {"model": nn.Linear(1, 1)})
        for i, loss in enumerate((0.3, 0.1, 0.5, 0.2, 0.4)):
            meta = {"loss": loss, "unixtime": i}
            checkpointer.save_checkpoint(meta=meta, end_of_epoch=i % 2 == 0)
        checkpointer.delete_checkpoints(**which)
        left.append({c.meta["loss"] for c in checkpointer.list_checkpoints()})
    assert left[0] == left[1]
    assert len(left[0]) < 5


@pytest.mark.parametrize("size", [200, 3000, -1, -200])
def test_a_disk_that_is_full_costs_no_earlier_checkpoint(checkpointer, size):
    """A limit of a file's size stands for the disk's; below 0, from a file's end."""
    checkpointer.add_recoverable("other", nn.Linear(32, 32))
    first = checkpointer.save_checkpoint()
    if size < 0:
        # torch's writer raises "basic_ios::clear: iostream error" here.
        size += (first.path / "model.ckpt").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(OSError, match=r"newest is .*Free some space") as error:
            checkpointer.save_checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # Its frames hold no file open, whose space would not be free.
    links = [
        path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
    ]
    assert not any(str(checkpointer.checkpoints_dir) in str(link) for link in links)
    assert f"the newest is {first.path}." in str(error.value)
    assert list(checkpointer.checkpoints_dir.iterdir()) == [first.path]
    checkpointer.save_checkpoint()


def test_a_name_is_given_once_and_checksums_are_those_of_sha256sum(checkpointer):
    first = checkpointer.save_checkpoint(name="best")
    with pytest.raises(ValueError, match=r"There is a checkpoint .*best"):
        checkpointer.save_checkpoint(name="best")
    verify_checkpoint(first)
    lines = (first.path / "SHA256SUMS").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        digest, name = line.split("  ")
        assert digest == hashlib.sha256((first.path / name).read_bytes()).hexdigest()


def test_a_checkpoint_without_checksums_is_warned_of(checkpointer):
    folder, parts = checkpointer.checkpoints_dir, checkpointer.recoverables
    Checkpointer(folder, parts).save_checkpoint()
    with pytest.warns(UserWarning, match="no SHA256SUMS"):
        checkpointer.recover_if_possible()


@register_checkpoint_hooks
class Step:
    """What a Brain saves of itself."""

    step = 0

    @mark_as_saver
    def save(self, path):
        Path(path).write_text(yaml.dump({"step": self.step}))

    @mark_as_loader
    def load(self, path, end_of_epoch):
        self.step = yaml.safe_load(Path(path).read_text())["step"]


class Training:
    """A run whose weights show when they were saved."""

    def __init__(self, run):
        self.model, self.step = nn.BatchNorm1d(1), Step()
        self.counter = EpochCounter(9)
        parts = {"classifier": self.model, "counter": self.counter, "brain": self.step}
        self.checkpointer = WholeCheckpointer(run / "save", parts)

    def save(self, epoch, step, *, keep=9, **meta):
        self.counter.current, self.step.step = epoch, step
        self.model.weight.data.fill_(100 * epoch + step)
        self.model.num_batches_tracked.fill_(10 * epoch)
        ended = step == 0
        self.checkpointer.save_and_keep_only(
            meta={"epoch": epoch, **meta},
            end_of_epoch=ended,
            num_to_keep=keep,
            ckpt_predicate=lambda saved: is_end_of_epoch(saved) == ended,
        )


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


def flip(path, at=-10):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def keep_line_of_meta(path):
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if line.endswith("CKPT.yaml")))


def holding(content):
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("classifier.ckpt", flip, r"classifier\.ckpt is damaged"),
        ("classifier.ckpt", cut, r"classifier\.ckpt is damaged"),
        # Without CKPT.yaml a folder is no checkpoint at all.
        ("classifier.ckpt", Path.unlink, r"classifier\.ckpt is missing"),
        ("CKPT.yaml", flip, r"CKPT\.yaml is damaged"),
        *(
            ("CKPT.yaml", holding(content), r"CKPT\.yaml is damaged")
            for content in (b"", b"\0" * 40, b"epoch: [1\n", b"\xff\xfe:")
        ),
        ("counter.ckpt", functools.partial(flip, at=0), r"counter\.ckpt is damaged"),
        ("brain.ckpt", functools.partial(flip, at=6), r"brain\.ckpt is damaged"),
        ("SHA256SUMS", holding(b""), "is damaged"),
        ("SHA256SUMS", keep_line_of_meta, "is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_not_loaded(tmp_path, training, name, damage, message):
    training.save(1, 0)
    training.save(2, 4)
    newest = training.checkpointer.find_checkpoint()
    damage(newest.path / name)
    checkpointer, before = training.checkpointer, training.model.weight.clone()
    reads = [checkpointer.recover_if_possible]
    if name == "classifier.ckpt":
        reads.append(lambda: checkpointer.load_checkpoint(newest))
        reads.append(lambda: checkpointer.restore_states("classifier"))
    elif name != "SHA256SUMS":
        reads.append(lambda: newest_checkpoint(tmp_path, "classifier.ckpt"))
    for read in reads:
        with pytest.raises(ValueError, match=rf"CKPT\+.*trusted: .*{message}.*rm -r"):
            read()
    assert torch.equal(training.model.weight, before)


def test_the_average_is_over_the_last_epochs_and_not_over_what_lies_between(training):
    with pytest.raises(ValueError, match="no checkpoint of a finished epoch"):
        average_of_last_epochs(training.checkpointer, "classifier", 2)
    # Written in another order: a resumed run may have gone back.
    for epoch, step in ((4, 0), (1, 0), (2, 0), (3, 0), (9, 5)):
        training.save(epoch, step)
    average, epochs = average_of_last_epochs(training.checkpointer, "classifier", 3)
    assert epochs == [2, 3, 4]
    assert average["weight"].item() == 300.0
    assert average["num_batches_tracked"].dtype == torch.int64
    assert average["num_batches_tracked"].item() == 30
    training.model.load_state_dict(average)
    flip(training.checkpointer.find_checkpoints()[1].path / "classifier.ckpt")
    with pytest.raises(ValueError, match="cannot be trusted"):
        average_of_last_epochs(training.checkpointer, "classifier", 3)


def test_a_run_goes_on_with_the_channels_of_its_newest_checkpoint(tmp_path):
    def start(channels):
        encoder = tiny("revnet57", **NARROW)
        encoder.set_channels(channels)
        kept, checkpointer = KeptArithmetic(encoder), WholeCheckpointer(tmp_path)
        checkpointer.add_recoverable(CHANNELS, kept)
        return encoder, kept, checkpointer

    encoder, kept, checkpointer = start([2, None, 2, 2])
    checkpointer.save_checkpoint()
    encoder, kept, checkpointer = start([4, 4, 4, 4])
    # A chunk that is fixed must be the same.
    with pytest.raises(ValueError, match=r"began with \[2, None, 2, 2\] channels"):
        kept.restore(checkpointer, chosen=False)
    assert kept.restore(checkpointer, chosen=True)
    assert encoder.channels == [2, None, 2, 2]
    assert kept.restore(checkpointer, chosen=False)
    checkpointer.recover_if_possible()


def test_a_run_goes_on_in_the_memory_format_that_it_began_with(tmp_path):
    def start(memory_format):
        encoder = tiny("revnet57", memory_format=memory_format, **NARROW)
        kept, checkpointer = KeptArithmetic(encoder), WholeCheckpointer(tmp_path)
        checkpointer.add_recoverable(CHANNELS, kept)
        return encoder.channels, kept, checkpointer

    _, kept, checkpointer = start("channels_last")
    checkpointer.save_checkpoint(name="own")
    assert kept.restore(checkpointer, chosen=False)
    checkpointer.recover_if_possible()
    _, kept, checkpointer = start("contiguous")
    with pytest.raises(ValueError, match="began with memory_format: channels_last"):
        kept.restore(checkpointer, chosen=True)


def test_a_checkpoint_without_channels_is_not_gone_on_from(tmp_path):
    checkpointer = WholeCheckpointer(tmp_path)
    checkpointer.save_checkpoint()
    kept = KeptArithmetic(tiny("revnet57", **NARROW))
    with pytest.raises(ValueError, match=r"channels\.ckpt is missing.*Delete that"):
        kept.restore(checkpointer, chosen=True)


def test_before_the_first_checkpoint_channels_are_free(tmp_path):
    kept = KeptArithmetic(tiny("revnet57", **NARROW))
    assert not kept.restore(WholeCheckpointer(tmp_path), chosen=False)


def test_each_process_loads_its_own_state(checkpointer, monkeypatch):
    class State:
        value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    state = State()
    checkpointer.add_state("state", state)
    monkeypatch.setattr(own, "gathered", lambda saved: [saved, {"value": 7}])
    checkpointer.save_checkpoint()
    # A third one takes that of the first.
    for rank, value in ((0, 0), (1, 7), (2, 0)):
        monkeypatch.setattr(own, "process_rank", lambda rank=rank: rank)
        state.value = 99
        checkpointer.recover_if_possible()
        assert state.value == value
        state.value = 99
        checkpointer.restore_states("state")
        assert state.value == value


def test_the_newest_has_the_highest_epoch_and_step_whatever_time_was_written(
    tmp_path, training
):
    # Epoch and step; 0 is the epoch's end.
    places = [(1, 2), (1, 0), (2, 2), (2, 4), (2, 0), (10, 2), (10, 4)]
    for number, (epoch, step) in enumerate(places):
        training.save(epoch, step, keep=1, unixtime=1e9 - 3600 * number)
    kept = training.checkpointer.list_checkpoints()
    weights = (torch.load(c.paramfiles["classifier"])["weight"] for c in kept)
    assert {int(weight) for weight in weights} == {200, 1004}
    resumed = Training(tmp_path)
    resumed.checkpointer.recover_if_possible()
    assert (resumed.counter.current, resumed.step.step) == (9, 4)
    newest = tmp_path / newest_checkpoint(tmp_path, "classifier.ckpt")
    assert torch.load(newest / "classifier.ckpt")["weight"].item() == 1004


@pytest.mark.parametrize(
    ("counter", "brain"),
    [("x", {}), ("3", {"step": "x"}), ("", {})],
)
def test_a_place_that_is_no_number_is_refused(counter, brain):
    with pytest.raises(ValueError, match="invalid literal"):
        place_of({"unixtime": 1.0}, counter, brain)
