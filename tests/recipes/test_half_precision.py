"""The recipe under bf16, and under fp16 with a scaled loss.

SpeechBrain refuses fp16 on a CPU, though torch has its arithmetic and a scaler there:
these tests put in place what SpeechBrain builds for a GPU.
"""

from contextlib import contextmanager

import pytest
import torch

from tests.recipes.runs import arguments, assert_same_weights, log, weights


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    # The order of sums must not depend on how many cores are idle.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Killed(BaseException):
    """What no handler of errors sees."""


@contextmanager
def in_fp16(train):
    """Make the script train in fp16; yields the scaler's settings and what happened."""
    control = {"scaler": {}, "killed_at_step": 0, "taken": 0, "scales": []}

    class HalfPrecisionBrain(train.SpeakerBrain):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.training_ctx = torch.autocast("cpu", torch.float16)
            self.scaler = torch.GradScaler("cpu", **control["scaler"])
            self.checkpointer.add_recoverable("scaler", self.scaler, optional_load=True)

        def init_optimizers(self):
            super().init_optimizers()
            tried = [0]

            def note(optimizer, *_):
                tried[0] += 1
                # Where states have 8 bits the optimizer itself skips a step.
                skipped = getattr(optimizer, "skipped_steps", 0)
                control["taken"] = tried[0] - skipped

            self.optimizer.register_step_post_hook(note)

        def on_fit_batch_end(self, *args):
            super().on_fit_batch_end(*args)
            control["scales"].append(self.scaler.get_scale())
            if self.hparams.lr_annealing.step == control["killed_at_step"]:
                raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "SpeakerBrain", HalfPrecisionBrain)
        yield control


#: AdamW, whose linear layer has 8-bit states, at a margin of 0, so that the
#: losses of epochs can be compared.
SOME_HUNDRED_STEPS = {
    "steps_per_epoch": 100,
    "number_of_epochs": 3,
    "warmup_epochs": 0.5,
    "speeds": "[1.0]",
    "margin": 0.0,
    "arch": "df_revnet66",
    "embedding_dim": 128,
    "lr": 0.04,
    "final_lr": 0.004,
    "batch_size": 8,
    "valid_speakers": 0,
    "ckpt_interval_steps": 0,
}


@pytest.mark.slow(drawn=False)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_in_half_precision_learns_and_counts_skipped_steps(
    train, data, tmp_path, precision
):
    argv = arguments(data, tmp_path, **SOME_HUNDRED_STEPS)
    if precision == "bf16":
        train.main([*argv, "--precision=bf16"])
    else:
        with in_fp16(train) as control:
            # A scale that is raised this soon is too large again and again.
            control["scaler"] = {"growth_interval": 20}
            train.main(argv)
    lines = log(tmp_path)
    losses = [line["train_loss"] for line in lines]
    assert lines[-1]["steps"] == 300
    # Six speakers: chance is 17 %.
    assert losses == sorted(losses, reverse=True)
    assert lines[-1]["train_accuracy_percent"] > 80
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
    skipped = [line["skipped_steps"] for line in lines]
    shown = (tmp_path / "train_log.txt").read_text()
    if precision == "bf16":
        assert skipped == [0, 0, 0]
        assert "skipped" not in shown
    else:
        # Each epoch's own; the optimizer counts those that it took.
        assert all(skipped)
        assert sum(skipped) == 300 - control["taken"]
        assert f"skipped steps: {skipped[-1]}" in shown


#: The first steps overflow, and later ones whenever two in a row did not.
OVERFLOWS = {"init_scale": 2.0**16, "growth_interval": 2}


def resumable(data, folder):
    """Twelve steps with noise and with 8-bit states, a checkpoint after each two."""
    noise = data.parent / "noise"
    adamw = {"arch": "df_revnet66", "embedding_dim": 128, "valid_speakers": 0}
    return arguments(data, folder, noise_folder=noise, **adamw)


def newest(folder, name):
    path = max((folder / "save").glob(f"CKPT*/{name}"))
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def overflown(train, data, tmp_path_factory):
    """A run that skips steps in each epoch, and how many it took."""
    folder = tmp_path_factory.mktemp("overflown")
    with in_fp16(train) as control:
        control["scaler"] = OVERFLOWS
        train.main(resumable(data, folder))
    return folder, control["taken"]


# After a checkpoint whose optimizer has taken no step yet, and in the second epoch.
@pytest.mark.slow
@pytest.mark.parametrize("killed_at_step", [3, 9])
def test_a_run_in_fp16_that_was_killed_resumes_to_the_same_weights(
    train, data, overflown, tmp_path, killed_at_step
):
    whole, _ = overflown
    with in_fp16(train) as control:
        control.update(scaler=OVERFLOWS, killed_at_step=killed_at_step)
        with pytest.raises(Killed):
            train.main(resumable(data, tmp_path))
        if killed_at_step == 3:
            states = newest(tmp_path, "optimizer.ckpt")["state"].values()
            assert not any(state["step"] for state in states)
        scale = control["scales"][-2]  # of the checkpoint, one step before
        kept = newest(tmp_path, "scaler.ckpt")["scale"]
        assert kept == scale != OVERFLOWS["init_scale"]
        control["killed_at_step"] = 0
        train.main(resumable(data, tmp_path))
    assert_same_weights(tmp_path, whole)
    assert newest(tmp_path, "scaler.ckpt") == newest(whole, "scaler.ckpt")
    assert log(tmp_path) == log(whole)


def test_a_skipped_step_is_counted_and_a_step_of_the_schedule(overflown):
    folder, taken = overflown
    lines = log(folder)
    skipped = [line["skipped_steps"] for line in lines]
    assert all(skipped)
    assert sum(skipped) == 12 - taken
    assert [line["steps"] for line in lines] == [6, 12]
