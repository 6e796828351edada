"""The recipe on two processes: what they count, how they end, and how they go on."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from speechbrain_rev.inference import EmbeddingArchive
from speechbrain_rev.scoring import read_scores
from tests.corpus import write_corpus
from tests.recipes.runs import (
    HPARAMS,
    RECIPE,
    SHORT,
    arguments,
    assert_same_weights,
    log,
    recipe,
    weights,
)
from tests.run_folders import write_scorable_run

pytestmark = pytest.mark.slow(drawn=False)

#: In the first process of two, or in the second, something goes wrong.
SCRIPT = """
import atexit, os, signal, sys
from pathlib import Path
sys.path.insert(0, {recipe!r})
import torch, train
from speechbrain_rev.data import ChunkDataset
from speechbrain_rev.reversible.monitor import warn_of_difference

RANK = int(os.environ["RANK"])
FOLDER = Path({folder!r})

class Watched(train.SpeakerBrain):
    def compute_forward(self, batch, stage):
        step = self.hparams.epoch_counter.current, self.step
        if stage == train.sb.Stage.TRAIN and RANK == 1 and step == (1, 2):
            batch.wavs[1] = float("nan")
            warn_of_difference("A block differs", UserWarning, 1)
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


def torchrun(script, argv, *, processes=2):
    """Run processes of a script; return whether all did well, and what they print."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc_per_node={processes}", "--no-python", sys.executable, "-c"]
    ended = subprocess.run(
        [*launcher, script, *map(str, argv)],
        # One thread: the order of sums must not depend on how many cores are idle.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.returncode == 0, ended.stdout


def trained(data, folder, *, killed_at_step=0, lost=(3, 6), **changed):
    """Train; rank 1 meets NaN, and perhaps is killed."""
    folder.mkdir(exist_ok=True)
    script = SCRIPT.format(
        recipe=str(RECIPE), folder=str(folder), killed_at_step=killed_at_step,
        lost=set(lost),
    )  # fmt: skip
    settings = {"optimizer_name": "adamw", "embedding_dim": 128, **changed}
    argv = arguments(data, folder, **settings)
    return torchrun(script, [*argv, "--noprogressbar", "--distributed_backend=gloo"])


def read_lines(folder, name):
    """Lines of a file to which both processes write, without their order."""
    lines = [json.loads(line) for line in (folder / name).open()]
    return sorted(lines, key=json.dumps)


def counted(folder, epoch):
    """The correct utterances and the losses that each process had in an epoch."""
    lines = (folder / f"correct{rank}" for rank in (0, 1))
    rows = [line.split() for path in lines for line in path.open()]
    chosen = [row for row in rows if int(row[0]) == epoch]
    return [int(row[2]) for row in chosen], [float(row[3]) for row in chosen]


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    done, output = trained(data, folder)
    assert done, output
    return folder


def test_two_processes_leave_one_result(uninterrupted):
    assert [line["steps"] for line in log(uninterrupted)] == [4, 8]
    assert (uninterrupted / "train.py").is_file()
    assert (uninterrupted / "train_log.txt").read_text().count("epoch:") == 2
    # Not "module.stem...", as the wrapper of several processes would name them.
    assert "fc.weight" in weights(uninterrupted)
    drawn = [(uninterrupted / f"drawn{rank}").read_text().split() for rank in (0, 1)]
    assert len(set(drawn[0]) | set(drawn[1])) == 2 * 8
    for rank in (0, 1):
        # A thread of the group that then lets go of a tensor would abort the process.
        assert (uninterrupted / f"left{rank}").exists()
        assert not (uninterrupted / f"taken_apart{rank}").exists()


def test_the_first_process_logs_what_differs_in_the_second(uninterrupted):
    lines = (uninterrupted / "log.txt").read_text()
    assert lines.count("In process 1 of 2: A block differs") == 1


def test_a_bad_gradient_of_one_process_skips_the_step_on_both(uninterrupted):
    assert [line["skipped_steps"] for line in log(uninterrupted)] == [1, 0]
    assert all(value.isfinite().all() for value in weights(uninterrupted).values())
    lines = read_lines(uninterrupted, "skipped.jsonl")
    assert [(x["epoch"], x["step"], x["rank"]) for x in lines] == [(1, 2, 0), (1, 2, 1)]
    # Each names its share.
    shares = [set(line["utterances"]) for line in lines]
    assert [len(share) for share in shares] == [2, 2]
    assert not shares[0] & shares[1]


def test_the_log_counts_utterances_and_unread_files_of_both_processes(uninterrupted):
    unread = read_lines(uninterrupted, "unread.jsonl")
    assert {line["rank"] for line in unread} == {0, 1}
    for line in log(uninterrupted):
        correct, losses = counted(uninterrupted, line["epoch"])
        assert len(correct) == 2 * 4
        assert line["train_accuracy_percent"] == 100 * sum(correct) / 16
        if line["epoch"] == 2:
            # float32 holds the mean of each step.
            mean = sum(losses) / len(losses)
            assert line["train_loss"] == pytest.approx(mean, rel=1e-6)
        of_epoch = [one for one in unread if one["epoch"] == line["epoch"]]
        assert line["unread_files"] == len(of_epoch)


def test_too_many_unread_files_end_both_processes(data, tmp_path):
    done, output = trained(data, tmp_path, lost=(2, 3), max_unread=1)
    assert not done
    assert "more than max_unread: 1" in output, output
    assert all((tmp_path / f"ended{rank}").exists() for rank in (0, 1))
    # Neither alone has too many.
    ranks = [line["rank"] for line in read_lines(tmp_path, "unread.jsonl")]
    assert max(ranks.count(rank) for rank in (0, 1)) <= 1 < len(ranks)


#: Whose error bounds are of each process.
COMPRESSED = {"mode": "compress", "optimizer_bits": 32, "valid_speakers": 0}


@pytest.mark.parametrize("changed", [{}, COMPRESSED | {"steps_per_epoch": 4}])
def test_a_killed_process_ends_the_job_which_then_goes_on(
    data, uninterrupted, tmp_path, changed
):
    whole, folder = uninterrupted, tmp_path / "run"
    if changed:
        whole = tmp_path / "whole"
        assert trained(data, whole, **changed)[0]
    # A checkpoint is behind steps 2, 4 and 6; two epochs have 4 steps each.
    done, output = trained(data, folder, killed_at_step=7, num_workers=1, **changed)
    assert not done
    assert "rank      : 1" in output, output
    assert "Signal 9 (SIGKILL) received" in output, output
    assert not (folder / "embedding_model.ckpt").exists()
    done, output = trained(data, folder, **changed)
    assert done, output
    assert_same_weights(folder, whole)
    assert log(folder) == log(whole)
    for name in ("skipped.jsonl", "unread.jsonl"):
        assert read_lines(folder, name) == read_lines(whole, name)


def test_processes_share_extraction_and_scoring(tmp_path):
    speech = write_corpus(tmp_path / "speech", speakers=14, seconds=0.5)
    one, two = (
        write_scorable_run(tmp_path / n / "run", speech) for n in ("one", "two")
    )
    recipe("extract").main([str(one), "--device=cpu"])
    recipe("score").main([str(one), "--bootstrap=20"])

    def shared(name, *argv):
        script = f"import sys; sys.path.insert(0, {str(RECIPE)!r}); import {name}"
        done, output = torchrun(f"{script}; {name}.main()", [two, *argv])
        assert done, output
        return output

    output = shared("extract", "--device=cpu")
    assert output.count("embeddings of 16 dimensions") == 2
    names = sorted(path.name for path in (two / "embeddings").iterdir())
    assert names == ["cohort.npz", "trials.npz"]
    for name in names:
        paths = [folder / "embeddings" / name for folder in (one, two)]
        expected, ours = map(EmbeddingArchive.load, paths)
        assert (ours.names, ours.sources) == (expected.names, expected.sources)
        # Other neighbours in a batch: float32 rounding, as in test_evaluation.
        limit = 1e-5 * np.abs(expected.embeddings).max()
        assert np.abs(ours.embeddings - expected.embeddings).max() <= limit
        # Of the very same embeddings.
        paths[1].write_bytes(paths[0].read_bytes())
    assert shared("score", "--bootstrap=20").count("minDCF(0.01)") == 1
    for name in ("one.as_norm.txt", "other.cosine.txt"):
        sides = [read_scores(folder / "scores" / name)[1] for folder in (one, two)]
        assert np.abs(np.subtract(*sides)).max() <= 1e-6
    results = [json.loads((f / "scores/results.json").read_text()) for f in (one, two)]
    assert results[0] == results[1]


def test_a_plan_and_joined_statistics_go_with_4_processes_and_on_with_2(data, tmp_path):
    changed = {"sync_batchnorm": "true", "memory_budget": "300MB", "batch_size": 8}
    settings = SHORT | changed | {"steps_per_epoch": 2}
    script = (
        f"import sys; sys.path.insert(0, {str(RECIPE)!r}); import train; train.run()"
    )

    def main(epochs, processes):
        argv = arguments(data, tmp_path, **settings | {"number_of_epochs": epochs})
        gloo = "--distributed_backend=gloo"
        return torchrun(script, [*argv, gloo], processes=processes)

    done, output = main(1, processes=4)
    assert done, output
    assert "memory plan: " in output
    assert (tmp_path / "plan.json").exists()
    done, output = main(2, processes=2)
    assert done, output
    assert "was made for sync_batchnorm 4 processes, and this is 2" in output
    assert "processes: was 4, is 2." in output
    assert [line["epoch"] for line in log(tmp_path)] == [1, 2]
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


#: One process lacks an utterance of validation in the first epoch, and all in the second.
LACKS = """
import os, sys
sys.path.insert(0, {recipe!r})
import train
from speechbrain_rev.data import WholeUtterances
read, lost = WholeUtterances.__getitem__, dict()

class Watched(train.SpeakerBrain):
    def on_stage_start(self, stage, epoch=None):
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


def test_a_file_of_validation_that_one_process_lacks_keeps_none_waiting(data, tmp_path):
    argv = [*arguments(data, tmp_path, steps_per_epoch=2), "--distributed_backend=gloo"]
    done, output = torchrun(LACKS.format(recipe=str(RECIPE)), argv)
    assert done, output
    assert [line["unread_validation_files"] for line in log(tmp_path)] == [1, 8]
    assert all(0 <= line["valid_eer_percent"] <= 100 for line in log(tmp_path))


ADAPTING = """
import sys
sys.path.insert(0, {recipe!r})
import train
train.run()
"""


def test_two_processes_adapt_an_encoder_frozen_at_first_as_one_does(finished, tmp_path):
    """Each embeds its share for the new head, and gradients of the head alone are averaged."""
    others = write_corpus(tmp_path / "corpus", speakers=4, seed=7)
    ended = {}
    for processes in (1, 2):
        folder = tmp_path / f"run{processes}"
        given = {"pretrained": finished, "output_folder": folder, "data_folder": others}
        given |= SHORT | {"number_of_epochs": 2, "steps_per_epoch": 2, "chunk": "null"}
        given |= {"freeze_epochs": 1, "batch_size": 4, "chunk_samples": 4640}
        given |= {"num_workers": 0, "optimizer_bits": 32, "speeds": "[1.0]"}
        argv = [str(HPARAMS / "train.yaml"), "--device=cpu", "--noprogressbar"]
        argv += [f"--{name}={value}" for name, value in given.items()]
        argv += ["--distributed_backend=gloo"]
        script = ADAPTING.format(recipe=str(RECIPE))
        good, printed = torchrun(script, argv, processes=processes)
        assert good, printed
        assert "Head: new" in printed
        (first, *_) = sorted(folder.glob("save/CKPT*/classifier.ckpt"))
        ended[processes] = torch.load(first, weights_only=True)["weight"]
        frozen = torch.load(first.with_name("embedding_model.ckpt"), weights_only=True)
        before = weights(finished)
        assert all(torch.equal(frozen[name], before[name]) for name in before)
    # Segments and steps are other ones; the directions are those of the same speakers.
    assert torch.cosine_similarity(ended[1], ended[2]).min() > 0.9
