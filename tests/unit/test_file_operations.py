"""What writes is stopped after each file operation, or has a full disk from there on."""

import sys
import time

import numpy as np
import pytest
import torch

from speechbrain_rev import cli
from speechbrain_rev.inference import EmbeddingArchive, SpeakerEmbedder, extraction
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer, verify_checkpoint
from tests.reliability.operations import (
    FAILURES,
    SOME_OR_ALL,
    Case,
    check_failures,
    check_stops,
)
from tests.run_folders import speech_like, write_audio, write_finished_run
from tests.unit.inference.test_export import scored


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    write_finished_run(folder)
    scored(folder)
    return folder


def command(*arguments):
    """The console command with these arguments."""
    return lambda: sys.exit(cli.main([str(one) for one in arguments]))


@pytest.fixture(params=["rows.npz", "rows.parquet"])
def an_embedding(request, run, tmp_path, monkeypatch):
    # Saved after each file.
    monkeypatch.setattr(extraction, "_SAVE_SECONDS", -1)
    audio, out = tmp_path / "audio", tmp_path / "out" / request.param
    files = [audio / f"{n}.wav" for n in range(3)]
    for seed, file in enumerate(files):
        write_audio(file, speech_like(seconds=0.3 + 0.2 * seed, seed=seed))
    embedder = SpeakerEmbedder.from_run(run, device="cpu")
    expected = {file.name: embedder.embed(file) for file in files}

    def accept():
        """What is there has the right numbers."""
        if out.exists():
            found = EmbeddingArchive.load(out)
            for name, row in zip(found.names, found.embeddings, strict=True):
                assert np.allclose(row, expected[name], atol=1e-5)

    return Case(
        work=command("embed", run, audio, "--out", out, "--device=cpu"),
        folder=out.parent,
        accept=accept,
    )


@SOME_OR_ALL
def test_an_embedding_that_is_stopped_anywhere_goes_on(an_embedding, most):
    check_stops(an_embedding, most)


@SOME_OR_ALL
@FAILURES
def test_an_embedding_without_space_says_so_and_goes_on(an_embedding, kind, most):
    check_failures(an_embedding, kind, most)


@pytest.fixture
def an_export(run, tmp_path):
    out = tmp_path / "out" / "model"
    wave = torch.from_numpy(speech_like())
    expected = SpeakerEmbedder.from_run(run, device="cpu").embed(wave, 16000)

    def accept():
        """There is no folder but one that is complete."""
        if out.exists():
            embedder = SpeakerEmbedder.from_hparams(out, device="cpu")
            assert np.array_equal(embedder.embed(wave, 16000), expected)
            assert len(list(out.iterdir())) == 9

    return Case(work=command("export", run, out), folder=out.parent, accept=accept)


@SOME_OR_ALL
def test_an_export_that_is_stopped_anywhere_is_done_the_next_time(an_export, most):
    check_stops(an_export, most)


@SOME_OR_ALL
@FAILURES
def test_an_export_without_space_says_so_and_leaves_nothing(an_export, kind, most):
    check_failures(an_export, kind, most)


class Steps:
    """Counts epochs, and is saved."""

    epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def train_and_save(folder, epochs):
    """Go on from the newest checkpoint, with one after each epoch, of which two stay."""
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = Steps()
    checkpointer = WholeCheckpointer(folder, {"model": model, "optimizer": optimizer})
    checkpointer.add_state("steps", steps)
    checkpointer.recover_if_possible()
    # Names and times of checkpoints are those of their epochs.
    time.time = lambda: float(steps.epoch)
    while steps.epoch < epochs:
        steps.epoch += 1
        optimizer.zero_grad()
        model(torch.full((1, 30), float(steps.epoch))).sum().backward()
        optimizer.step()
        checkpointer.save_and_keep_only(meta={"epoch": steps.epoch}, num_to_keep=2)
    checkpointer.delete_checkpoints(num_to_keep=2)


@pytest.fixture
def a_training(tmp_path, monkeypatch):
    save = tmp_path / "save"
    monkeypatch.setattr(time, "time", time.time)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def accept():
        """Each checkpoint is as it was written, and there is always one."""
        found = WholeCheckpointer(save).list_checkpoints()
        assert found
        for checkpoint in found:
            verify_checkpoint(checkpoint)
            torch.load(checkpoint.path / "model.ckpt", weights_only=True)

    return Case(
        work=lambda: cli.run_script(lambda: train_and_save(save, 3)),
        folder=save,
        begin=lambda: train_and_save(save, 2),
        accept=accept,
    )


@SOME_OR_ALL
def test_checkpoints_that_are_stopped_anywhere_go_on(a_training, most):
    check_stops(a_training, most)


@SOME_OR_ALL
@FAILURES
def test_checkpoints_without_space_say_so_and_leave_nothing(a_training, kind, most):
    check_failures(a_training, kind, most)
