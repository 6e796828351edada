"""Trainings on two processes: what they count, how they end, and how they go on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.corpus import write_corpus
from tests.recipes.runs import RECIPE, arguments, log, weights

pytestmark = pytest.mark.slow

#: In the first process of two, or in the second, something goes wrong.
SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {recipe!r})
import loaders, train

RANK = int(os.environ["RANK"])
FOLDER = Path({folder!r})

class Watched(train.SpeakerBrain):
    def compute_forward(self, batch, stage):
        step = self.hparams.epoch_counter.current, self.step
        if stage == train.sb.Stage.TRAIN and RANK == 1 and step == (1, 2):
            batch.wavs[1] = float("nan")
        return super().compute_forward(batch, stage)

    def count(self, loss, correct):
        epoch = self.hparams.epoch_counter.current
        with (FOLDER / f"correct{{RANK}}").open("a") as file:
            print(epoch, self.step, correct, float(loss.detach()), file=file)
        try:
            super().count(loss, correct)
        except ValueError:
            (FOLDER / f"ended{{RANK}}").touch()
            raise

    def on_fit_batch_end(self, *args):
        super().on_fit_batch_end(*args)
        if RANK == 1 and self.hparams.lr_annealing.step == {killed_at_step}:
            (FOLDER / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

def read_or_not(self, epoch, index, _read=loaders.ChunkDataset._read):
    if index in {lost}:
        return f"{{self.path_of(index)}} is gone"
    return _read(self, epoch, index)

loaders.ChunkDataset._read = read_or_not
train.SpeakerBrain = Watched
train.run_script(train.main)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def started(data, folder, *, killed_at_step=0, lost=(3, 6), **changed):
    """Start a training in which rank 1 meets NaN, and perhaps is killed."""
    folder.mkdir(exist_ok=True)
    script = SCRIPT.format(
        recipe=str(RECIPE), folder=str(folder), killed_at_step=killed_at_step,
        lost=set(lost),
    )  # fmt: skip
    settings = {"optimizer_name": "adamw", "embedding_dim": 128, **changed}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node=2", "--no-python", sys.executable, "-c", script),
            *arguments(data, folder, **settings),
            *("--noprogressbar", "--distributed_backend=gloo"),
        ],
        # One thread: the order of sums must not depend on how many cores are idle.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def told(folder, name):
    """Lines of a file to which both processes write, without their order."""
    lines = [json.loads(line) for line in (folder / name).open()]
    return sorted(lines, key=json.dumps)


def counted(folder, epoch):
    """The utterances told right and the losses that each process saw in an epoch."""
    lines = (folder / f"correct{rank}" for rank in (0, 1))
    rows = [line.split() for path in lines for line in path.open()]
    chosen = [row for row in rows if int(row[0]) == epoch]
    return [int(row[2]) for row in chosen], [float(row[3]) for row in chosen]


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = started(data, folder)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return folder


def test_a_bad_gradient_of_one_process_skips_the_step_on_both(uninterrupted):
    assert [line["skipped_steps"] for line in log(uninterrupted)] == [1, 0]
    assert all(value.isfinite().all() for value in weights(uninterrupted).values())
    lines = told(uninterrupted, "skipped.jsonl")
    assert [(x["epoch"], x["step"], x["rank"]) for x in lines] == [(1, 2, 0), (1, 2, 1)]
    # Each names its share.
    assert [len(line["utterances"]) for line in lines] == [2, 2]


def test_the_log_counts_the_utterances_of_both_processes(uninterrupted):
    for line in log(uninterrupted):
        correct, losses = counted(uninterrupted, line["epoch"])
        assert len(correct) == 2 * 4
        assert line["train_accuracy_percent"] == 100 * sum(correct) / 16
        if line["epoch"] == 2:
            # float32 holds the mean of each step.
            mean = sum(losses) / len(losses)
            assert line["train_loss"] == pytest.approx(mean, rel=1e-6)


def test_the_log_counts_the_unread_files_of_both_processes(uninterrupted):
    lines = told(uninterrupted, "unread.jsonl")
    counts = [line["unread_files"] for line in log(uninterrupted)]
    for epoch, count in enumerate(counts, 1):
        assert count == sum(line["epoch"] == epoch for line in lines)
    assert {line["rank"] for line in lines} == {0, 1}


def test_too_many_unread_files_end_both_processes(data, tmp_path):
    # Neither alone has so many.
    process = started(data, tmp_path, lost=(3, 5, 6), max_unread=2)
    output, _ = process.communicate()
    assert process.returncode != 0
    assert "more than max_unread: 2" in output, output
    assert all((tmp_path / f"ended{rank}").exists() for rank in (0, 1))


def running(folder):
    """Processes that a run with this folder has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"--output_folder={folder}" in text.split("\0"):
            found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_a_killed_process_ends_the_job_which_then_goes_on(
    data, uninterrupted, tmp_path
):
    folder = tmp_path / "run"
    # A checkpoint is behind steps 2, 4 and 6; two epochs have 4 steps each.
    process = started(data, folder, killed_at_step=7, num_workers=1)
    while process.poll() is None and not (folder / "killed").exists():
        time.sleep(0.01)
    # What is required of the job, not of the machine: it has nothing to do but to end.
    end = time.monotonic() + 60
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "rank      : 1" in output, output
    assert "Signal 9 (SIGKILL) received" in output, output
    assert not (folder / "embedding_model.ckpt").exists()
    while running(folder) and time.monotonic() < end:
        time.sleep(0.1)
    assert running(folder) == []
    again = started(data, folder)
    output, _ = again.communicate()
    assert again.returncode == 0, output
    expected = weights(uninterrupted)
    for name, value in weights(folder).items():
        assert torch.equal(value, expected[name]), name
    assert log(folder) == log(uninterrupted)
    for name in ("skipped.jsonl", "unread.jsonl"):
        assert told(folder, name) == told(uninterrupted, name)
