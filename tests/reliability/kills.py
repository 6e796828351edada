"""Kill a training run at random moments and resume it: python -m tests.reliability.kills.

A small run of the recipe is killed with SIGKILL, most often while it trains and writes
checkpoints, which it does after each step; then the same command is given again. After
each kill every checkpoint must be readable and as it was written, and ``run.json`` must tell
of nothing else; whenever a run comes to its end, its weights must be those of a run that
nobody killed, to the bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from speechbrain.utils.checkpoints import Checkpoint
from tqdm import tqdm

from speechbrain_rev.inference.runs import read_record
from speechbrain_rev.inference.trained import WEIGHTS
from speechbrain_rev.lobes.checkpointer import (
    WholeCheckpointer,
    is_end_of_epoch,
    verify_checkpoint,
)
from tests.corpus import write_corpus, write_noise
from tests.recipes.runs import RECIPE, arguments, log, weights

#: Of kills, the part that comes before the first checkpoint.
EARLY = 0.15
#: The others come when checkpoints were written or deleted up to so often, and up to so many
#: seconds later: a step with its checkpoint takes about as long.
MOST_CHANGES, AFTER = 12, 0.1


class NotTheSame(AssertionError):
    """A run that was killed and resumed is not as the one that was not."""


@dataclass
class Outcome:
    """What came of all kills.

    Attributes
    ----------
    kills : int
        Processes that were killed.
    while_writing : int
        Of these, how many left a checkpoint that was being written or deleted.
    checkpoints : int
        Checkpoints that were verified after kills.
    finished : int
        Runs that came to their end and were compared.
    """

    kills: int = 0
    while_writing: int = 0
    checkpoints: int = 0
    finished: int = 0

    def in_words(self) -> str:
        """Say it."""
        return (
            f"{self.kills} kills, {self.while_writing} of them while a checkpoint was "
            f"written or deleted; {self.checkpoints} checkpoints verified; "
            f"{self.finished} runs ended with the weights and the log of one that was "
            "not killed"
        )


def command(data: Path, folder: Path) -> list[str]:
    """Train with 8-bit states and noise, a checkpoint after each step."""
    argv = arguments(
        data,
        folder,
        noise_folder=data.parent / "noise",
        optimizer_name="adamw",
        embedding_dim=128,
        ckpt_interval_steps=1,
        number_of_epochs=3,
        valid_speakers=0,
    )
    return [sys.executable, str(RECIPE / "train.py"), *argv, "--noprogressbar"]


def started(argv: list[str], log_file: Path) -> subprocess.Popen[bytes]:
    """Start a training run in a group of its own."""
    with log_file.open("wb") as output:
        return subprocess.Popen(
            argv,
            # One thread: the order of sums must not depend on how many cores are idle.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def uninterrupted(data: Path, folder: Path) -> float:
    """Train to the end; return the seconds to the first checkpoint."""
    begin = time.monotonic()
    process = started(command(data, folder), folder.with_suffix(".log"))
    while process.poll() is None and not any(folder.glob("save/CKPT*")):
        time.sleep(0.01)
    first = time.monotonic() - begin
    process.wait()
    _check_end(process, folder)
    return first


def killed(
    process: subprocess.Popen[bytes], save: Path, changes: int, after: float
) -> bool:
    """Kill a process and its workers, unless it ends before.

    Parameters
    ----------
    process : subprocess.Popen
        In a group of its own.
    save : Path
        Where it writes and deletes checkpoints.
    changes : int
        How often names there have to come or go before.
    after : float
        Seconds from then on.

    Returns
    -------
    bool
        Whether it was killed.
    """
    names, seen = set(save.glob("CKPT*")), 0
    while seen < changes and process.poll() is None:
        time.sleep(0.002)
        now = set(save.glob("CKPT*"))
        seen, names = seen + (now != names), now
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def verify(folder: Path) -> tuple[int, bool]:
    """Count the checkpoints of a run, all of them readable; was one in the writing?"""
    save = folder / "save"
    if not save.is_dir():
        return 0, False
    whole = WholeCheckpointer(save).list_checkpoints()
    for checkpoint in whole:
        verify_checkpoint(checkpoint)
        for path in checkpoint.paramfiles.values():
            if path.name in ("embedding_model.ckpt", "classifier.ckpt"):
                torch.load(path, weights_only=True)
    _check_record(folder, whole)
    return len(whole), len(whole) < len(list(save.glob("CKPT*")))


def _check_record(folder: Path, checkpoints: list[Checkpoint]) -> None:
    """See that ``run.json`` tells of no epoch that is not there to go on from."""
    record = read_record(folder)
    if record is None:
        return
    ended = [one.meta for one in checkpoints if is_end_of_epoch(one)]
    last = {meta["epoch"]: meta for meta in ended}.get(record.epochs)
    if record.epochs and (
        last is None or (record.lr, record.margin) != (last["lr"], last["margin"])
    ):
        raise NotTheSame(f"run.json of {folder} tells of epoch {record.epochs}: {last}")
    if record.weights and not (folder / WEIGHTS).is_file():
        raise NotTheSame(f"run.json of {folder} tells of weights that are not there.")


def compare(folder: Path, reference: Path) -> None:
    """Compare what two runs left.

    Raises
    ------
    NotTheSame
        If a weight or a line of the log differs.
    """
    expected = weights(reference)
    for name, value in weights(folder).items():
        if not torch.equal(value, expected[name]):
            raise NotTheSame(f"{name} of {folder} is not that of {reference}.")
    if log(folder) != log(reference):
        raise NotTheSame(f"The log of {folder} is not that of {reference}.")


def kill_again_and_again(kills: int, folder: Path, seed: int = 0) -> Outcome:
    """Kill and resume runs in a folder; compare those that end.

    Raises
    ------
    NotTheSame
        If a run does not end as one that was not killed.
    ValueError
        If a checkpoint is not as it was written.
    """
    write_noise(folder / "noise")
    data = write_corpus(folder / "corpus")
    reference = folder / "reference"
    first = uninterrupted(data, reference)
    draws, outcome, run = random.Random(seed), Outcome(), folder / "run0"
    with tqdm(total=kills, desc="kills", unit="kill") as bar:
        while outcome.kills < kills or not outcome.finished:
            early = draws.random() < EARLY
            changes = 0 if early else draws.randint(1, MOST_CHANGES)
            after = draws.uniform(0, first if early else AFTER)
            process = started(command(data, run), run.with_suffix(".log"))
            if outcome.kills == kills:
                # All are done: the last run comes to its end.
                process.wait()
            if killed(process, run / "save", changes, after):
                outcome.kills += 1
                bar.update()
                count, writing = verify(run)
                outcome.checkpoints += count
                outcome.while_writing += writing
            else:
                _check_end(process, run)
                compare(run, reference)
                outcome.finished += 1
                run = folder / f"run{outcome.finished}"
    return outcome


def _check_end(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.returncode:
        output = folder.with_suffix(".log").read_text(errors="replace")
        raise NotTheSame(f"{folder} ended with {process.returncode}: {output[-3000:]}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_again_and_again(options.kills, Path(folder), options.seed)
    print(outcome.in_words())


if __name__ == "__main__":
    main()
