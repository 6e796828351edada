"""The recipe on two processes: what they count, how they end, and how they go on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from speechbrain_rev.inference import EmbeddingArchive
from speechbrain_rev.scoring import read_scores
from tests.corpus import write_corpus
from tests.recipes.runs import RECIPE, SHORT, arguments, log, recipe, weights
from tests.run_folders import write_scorable_run

pytestmark = pytest.mark.slow

#: In the first process of two, or in the second, something goes wrong.
SCRIPT = """
import atexit, os, signal, sys
from pathlib import Path
sys.path.insert(0, {recipe!r})
import torch, train
from speechbrain_rev.data import ChunkDataset

RANK = int(os.environ["RANK"])
FOLDER = Path({folder!r})

class Watched(train.SpeakerBrain):
    def compute_forward(self, batch, stage):
        step = self.hparams.epoch_counter.current, self.step
        if stage == train.sb.Stage.TRAIN and RANK == 1 and step == (1, 2):
            batch.wavs[1] = float("nan")
        outputs = super().compute_forward(batch, stage)
        if stage == train.sb.Stage.TRAIN:
            # The encoders draw nothing; a network that does must resume as well.
            with (FOLDER / f"drawn{{RANK}}").open("a") as file:
                print(torch.rand(()).item(), file=file)
            outputs = torch.nn.functional.dropout(outputs, 0.1)
        return outputs

    def count(self, unread):
        epoch, (loss, correct) = self.hparams.epoch_counter.current, self.measured
        with (FOLDER / f"correct{{RANK}}").open("a") as file:
            print(epoch, self.step, int(correct), float(loss), file=file)
        try:
            super().count(unread)
        except ValueError:
            (FOLDER / f"ended{{RANK}}").touch()
            raise

    def on_fit_batch_end(self, *args):
        super().on_fit_batch_end(*args)
        if RANK == 1 and self.hparams.lr_annealing.step == {killed_at_step}:
            (FOLDER / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

def read_or_not(self, epoch, index, out, _read=ChunkDataset._read):
    if index in {lost}:
        return f"{{self.path_of(index)}} is gone"
    return _read(self, epoch, index, out)

class OfTheInterpreter:
    # Little is left of other modules by then.
    def __del__(self, open=os.open, path=f"{{FOLDER}}/taken_apart{{RANK}}", to=os.O_CREAT):
        open(path, to)

held = OfTheInterpreter()
atexit.register((FOLDER / f"left{{RANK}}").touch)
ChunkDataset._read = read_or_not
train.SpeakerBrain = Watched
train.run()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def torchrun(script, argv, *, processes=2):
    """Start processes of a script."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(
                f"--nproc_per_node={processes}",
                "--no-python",
                sys.executable,
                "-c",
                script,
            ),
            *map(str, argv),
        ],
        # One thread: the order of sums must not depend on how many cores are idle.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def started(data, folder, *, killed_at_step=0, lost=(3, 6), **changed):
    """Start a training in which rank 1 meets NaN, and perhaps is killed."""
    folder.mkdir(exist_ok=True)
    script = SCRIPT.format(
        recipe=str(RECIPE), folder=str(folder), killed_at_step=killed_at_step,
        lost=set(lost),
    )  # fmt: skip
    settings = {"optimizer_name": "adamw", "embedding_dim": 128, **changed}
    argv = arguments(data, folder, **settings)
    return torchrun(script, [*argv, "--noprogressbar", "--distributed_backend=gloo"])


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
    shares = [set(line["utterances"]) for line in lines]
    assert [len(share) for share in shares] == [2, 2]
    assert not shares[0] & shares[1]


def test_processes_leave_without_taking_the_interpreter_apart(uninterrupted):
    """A thread of the group that then lets go of a tensor would abort the process."""
    for rank in (0, 1):
        assert (uninterrupted / f"left{rank}").exists()
        assert not (uninterrupted / f"taken_apart{rank}").exists()


def test_processes_draw_each_their_own(uninterrupted):
    drawn = [(uninterrupted / f"drawn{rank}").read_text().split() for rank in (0, 1)]
    assert len(set(drawn[0]) | set(drawn[1])) == 2 * 8


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
    process = started(data, tmp_path, lost=(2, 3), max_unread=1)
    output, _ = process.communicate()
    assert process.returncode != 0
    assert "more than max_unread: 1" in output, output
    assert all((tmp_path / f"ended{rank}").exists() for rank in (0, 1))
    # Neither alone has too many.
    ranks = [line["rank"] for line in told(tmp_path, "unread.jsonl")]
    assert max(ranks.count(rank) for rank in (0, 1)) <= 1 < len(ranks)


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


#: Embeds or scores; the second process may be killed when it has embedded some files.
SHARED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {recipe!r})
import {script} as script
from speechbrain_rev.inference import SpeakerEmbedder, extraction

def embed_each(self, paths, _embed=SpeakerEmbedder.embed_each, **given):
    for count, (index, row) in enumerate(_embed(self, paths, **given), 1):
        with Path({folder!r}, f"embedded{{os.environ['RANK']}}").open("a") as file:
            print(paths[index], file=file)
        if {killed} and os.environ["RANK"] == "1" and count == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        yield index, row

SpeakerEmbedder.embed_each = embed_each
extraction._SAVE_SECONDS = 0.0
script.run_script(script.main)
"""


def shared(script, folder, *argv, killed=False):
    """Run a script on the run in a folder, with two processes."""
    text = SHARED.format(
        recipe=str(RECIPE), script=script, folder=str(folder), killed=killed
    )
    process = torchrun(text, [folder, *argv])
    output, _ = process.communicate()
    return process.returncode, output


def archives(folder):
    names = ("trials", "cohort")
    return [EmbeddingArchive.load(folder / f"embeddings/{n}.npz") for n in names]


def embedded(folder):
    """The files that each of the processes has embedded since it was asked last."""
    found = []
    for rank in (0, 1):
        path = folder / f"embedded{rank}"
        found.append(path.read_text().split() if path.exists() else [])
        path.unlink(missing_ok=True)
    return found


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Speech, and a run that one process has embedded and scored."""
    speech = write_corpus(tmp_path_factory.mktemp("speech"), speakers=14, seconds=0.5)
    folder = write_scorable_run(tmp_path_factory.mktemp("one") / "run", speech)
    recipe("extract").main([str(folder), "--device=cpu"])
    recipe("score").main([str(folder), "--bootstrap=20"])
    return speech, folder


def test_processes_share_extraction_and_scoring(scored, tmp_path):
    speech, one = scored
    two = write_scorable_run(tmp_path / "run", speech)
    status, output = shared("extract", two, "--device=cpu")
    assert status == 0, output
    # Only the first shows its progress.
    assert output.count("embedding:   0%") == 1
    assert output.count("embeddings of 16 dimensions") == 2
    first, second = embedded(two)
    assert not set(first) & set(second)
    assert len(first) == len(second) == 28
    for found, expected in zip(archives(two), archives(one), strict=True):
        assert (found.names, found.sources) == (expected.names, expected.sources)
        # Other neighbours in a batch: float32 rounding, as in test_evaluation.
        limit = 1e-5 * np.abs(expected.embeddings).max()
        assert np.abs(found.embeddings - expected.embeddings).max() <= limit
    assert {path.name for path in (two / "embeddings").iterdir()} == {
        "trials.npz",
        "cohort.npz",
    }
    # Of the very same embeddings.
    for name in ("trials", "cohort"):
        path = f"embeddings/{name}.npz"
        (two / path).write_bytes((one / path).read_bytes())
    status, output = shared("score", two, "--bootstrap=20")
    assert status == 0, output
    assert output.count("minDCF(0.01)") == 1
    for name in ("one.as_norm.txt", "other.cosine.txt"):
        sides = [read_scores(folder / "scores" / name)[1] for folder in (one, two)]
        assert np.abs(np.subtract(*sides)).max() <= 1e-6
    results = [json.loads((f / "scores/results.json").read_text()) for f in (one, two)]
    assert results[0] == results[1]


def test_an_extraction_goes_on_from_the_parts_of_a_killed_process(scored, tmp_path):
    speech, one = scored
    two = write_scorable_run(tmp_path / "run", speech)
    status, output = shared("extract", two, "--device=cpu", killed=True)
    assert status != 0
    assert "Signal 9 (SIGKILL) received" in output
    before = [name for names in embedded(two) for name in names]
    assert not (two / "embeddings/cohort.npz").exists()
    assert list((two / "embeddings").glob("cohort.part-*.npz"))
    status, output = shared("extract", two, "--device=cpu")
    assert status == 0, output
    again = [name for names in embedded(two) for name in names]
    # The one that was embedded when the process was killed, and was not saved yet; the
    # other process may have been ended in the same way.
    assert len(set(before) & set(again)) <= 2
    assert len(set(before) | set(again)) == 56
    # At least the utterances of the trials, and 19 of the second process, were saved.
    assert len(again) <= 56 - 8 - 19
    for found, expected in zip(archives(two), archives(one), strict=True):
        assert (found.names, found.sources) == (expected.names, expected.sources)


def finished(process):
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def test_a_plan_and_joined_statistics_go_with_4_processes_and_on_with_2(data, tmp_path):
    changed = {"sync_batchnorm": "true", "memory_budget": "300MB", "batch_size": 8}
    settings = SHORT | changed | {"steps_per_epoch": 2}
    first = arguments(data, tmp_path, **settings | {"number_of_epochs": 1})
    train = (
        f"import sys; sys.path.insert(0, {str(RECIPE)!r}); import train; train.run()"
    )
    gloo = "--distributed_backend=gloo"
    output = finished(torchrun(train, [*first, gloo], processes=4))
    assert "Plan" in output or "plan" in output
    assert (tmp_path / "plan.json").exists()
    more = [*arguments(data, tmp_path, **settings | {"number_of_epochs": 2}), gloo]
    output, _ = torchrun(train, more, processes=2).communicate()
    assert "was made for sync_batchnorm 4 processes, and this is 2" in output
    (tmp_path / "plan.json").unlink()
    finished(torchrun(train, more, processes=2))
    assert [line["epoch"] for line in log(tmp_path)] == [1, 2]
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


def test_a_file_of_validation_that_one_process_lacks_keeps_none_waiting(data, tmp_path):
    script = f"""
import os, sys
sys.path.insert(0, {str(RECIPE)!r})
import train
from speechbrain_rev.data import WholeUtterances
read, lost = WholeUtterances.__getitem__, dict()

class Watched(train.SpeakerBrain):
    def on_stage_start(self, stage, epoch=None):
        # One in the first epoch, and all in the second.
        lost["below"] = (1, 99)[epoch - 1]
        super().on_stage_start(stage, epoch)

def read_or_not(self, index):
    if os.environ["RANK"] == "1" and index < lost["below"]:
        return self.names[index], "it is gone"
    return read(self, index)

train.SpeakerBrain = Watched
WholeUtterances.__getitem__ = read_or_not
train.run()
"""
    argv = arguments(data, tmp_path, steps_per_epoch=2)
    finished(torchrun(script, [*argv, "--distributed_backend=gloo"]))
    assert [line["unread_validation_files"] for line in log(tmp_path)] == [1, 8]
    assert all(0 <= line["valid_eer_percent"] <= 100 for line in log(tmp_path))


def test_error_bounds_of_a_killed_run_are_those_of_each_process(data, tmp_path):
    settings = {"mode": "compress", "optimizer_bits": 32, "valid_speakers": 0}
    settings |= {"steps_per_epoch": 4}
    whole = started(data, tmp_path / "whole", **settings)
    finished(whole)
    killed = started(data, tmp_path / "killed", killed_at_step=6, **settings)
    killed.communicate()
    assert killed.returncode != 0
    finished(started(data, tmp_path / "killed", **settings))
    expected, found = (weights(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
