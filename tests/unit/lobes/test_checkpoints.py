import pytest
import torch
from speechbrain.utils.checkpoints import Checkpointer

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.checkpoints import (
    CHANNELS,
    KeptChannels,
    WholeCheckpointer,
    average_of_last_epochs,
    is_end_of_epoch,
    load_finished_run,
)


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


def test_old_checkpoints_are_deleted_as_by_speechbrain(tmp_path):
    checkpointer = WholeCheckpointer(tmp_path, {"model": torch.nn.Linear(1, 1)})
    for epoch in range(4):
        checkpointer.save_and_keep_only(meta={"epoch": epoch}, num_to_keep=2)
    kept = {c.meta["epoch"] for c in checkpointer.list_checkpoints()}
    assert kept == {2, 3}


def write_epochs(folder, epochs):
    model = torch.nn.BatchNorm1d(1)
    checkpointer = Checkpointer(folder, {"model": model})
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
