"""Trainings of the study: what each is given, and processes that work side by side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from design.conditions import Condition
from design.sizes import Size
from results.runs import SCORED
from tqdm import tqdm

from running.determinism import instructions_of
from running.orphans import parent_told
from speechbrain_rev.hparams import OptimizerWarning, plain_settings, resolve
from speechbrain_rev.inference.run_folder import WEIGHTS

#: Of each training, on a CPU: the order of sums must not depend on how many are idle.
THREADS = 1
#: What train.py counts and writes into the settings of a run.
_COUNTED = ("out_n_neurons", "steps_per_epoch")


@dataclass(frozen=True)
class Work:
    """What a process does for a run.

    Attributes
    ----------
    script : pathlib.Path
        Takes a file of settings and ``--key=value``, as train.py does, and given again
        goes on where it was.
    result : pathlib.Path
        What it writes last, below the run's folder.
    options : tuple of str
        What the script takes besides settings.
    """

    script: Path
    result: Path
    options: tuple[str, ...] = ()


_ONE_RUN = Path(__file__).parents[1] / "one_run.py"
TRAIN = Work(_ONE_RUN, Path(WEIGHTS), ("--train_only",))
TRAIN_AND_SCORE = Work(_ONE_RUN, SCORED)


@dataclass(frozen=True)
class Run:
    """One condition trained with one seed.

    Attributes
    ----------
    condition : Condition
        What is trained.
    seed : int
        Of weights, order of the data and augmentation: the same for all conditions.
    folder : pathlib.Path
        The recipe's output_folder.
    work : Work
        What is done for it.
    keep_all : bool
        Whether the checkpoints of all epochs are kept.
    settings : mapping
        Of the recipe, that became known while the study ran.
    """

    condition: Condition
    seed: int
    folder: Path
    work: Work = TRAIN_AND_SCORE
    keep_all: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def is_done(self) -> bool:
        """Whether its result is there."""
        return (self.folder / self.work.result).is_file()

    @property
    def has_begun(self) -> bool:
        """Whether something of it would be taken up."""
        return self.is_done or any(self.folder.glob("save/CKPT*/CKPT.yaml"))

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder.with_suffix(".log")

    @property
    def name(self) -> str:
        """The condition and the seed, in words."""
        return f"{self.condition.name}, seed {self.seed}"


class TrainingsFailed(ChildProcessError):
    """Some trainings ended with an error.

    Attributes
    ----------
    failed : dict of Run to str
        What became of each, in a sentence.
    sentences : list of str
        These, and how many were not begun for that.
    """

    def __init__(self, failed: Mapping[Run, str], *, not_begun: int = 0) -> None:
        sentences = list(failed.values())
        if not_begun:
            sentences.append(f"{not_begun} were not begun for that.")
        super().__init__(
            f"{len(failed)} training(s) failed. {' '.join(sentences)} Given again, the "
            "command goes on where they were."
        )
        self.failed = dict(failed)
        self.sentences = sentences


def train_all(
    runs: Sequence[Run],
    settings: Mapping[str, Any],
    size: Size,
    hparams: Path,
    *,
    jobs: int,
    proven: bool = False,
    after: Callable[[Run, Sequence[str]], object] = lambda done, failed: None,
) -> None:
    """Do the work of runs that is not done yet, some at a time, each in its own process.

    One that fails does not stop the others, unless none was ever done: then what fails
    is the machine or the setting, and those that did not begin do not.

    Parameters
    ----------
    runs : sequence of Run
        In this order.
    settings : mapping
        Of the recipe, for all runs; those of the size and of a condition go before them.
    size : Size
        Widths and sizes of the encoders.
    hparams : pathlib.Path
        The file of settings that all begin with.
    jobs : int
        Processes at a time.
    proven : bool
        Whether others of the study were done, with this machine and setting.
    after : callable
        Called whenever one was done, while others go on, with that one and with what
        became of those that failed.

    Raises
    ------
    TrainingsFailed
        If some of them ended with an error.
    ValueError
        If a run was begun with other settings.
    """
    commands = {run: command(run, settings, size, hparams) for run in runs}
    for run in runs:
        if run.has_begun:
            check_settings(run, settings_of(run, settings, size), hparams)
    left = [run for run in runs if not run.is_done]
    children, failed, not_begun = _Children(), {}, 0
    bar = tqdm(total=len(runs), initial=len(runs) - len(left), unit="training")
    with bar, ThreadPoolExecutor(jobs) as pool:
        try:
            statuses = {
                pool.submit(
                    children.work,
                    run,
                    commands[run],
                    precision_of(settings_of(run, settings, size)),
                ): run
                for run in left
            }
            for ended in as_completed(statuses):
                run, status = statuses[ended], ended.result()
                if status is None:
                    not_begun += 1
                    continue
                if status == 0 and run.is_done:
                    bar.update()
                    after(run, list(failed.values()))
                    continue
                failed[run] = _what_became_of(run, status)
                bar.write(failed[run], file=sys.stderr)
                proven = proven or any(run.is_done for run in runs)
                if len(failed) >= jobs and not proven:
                    children.stop_beginning()
        except BaseException:
            children.end()
            raise
    if failed:
        raise TrainingsFailed(failed, not_begun=not_begun)


class _Children:
    """Processes that are begun until one says no more."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def work(self, run: Run, argv: Sequence[str], precision: str) -> int | None:
        """Do the work of a run, and give the status; None if it was not begun."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
        instructions = instructions_of(precision)
        environment = {**instructions, **os.environ, **threads, **parent_told()}
        with self._guard:
            if self._stopped:
                return None
            run.folder.mkdir(parents=True, exist_ok=True)
            with run.log.open("ab") as log:
                process = subprocess.Popen(
                    argv, stdout=log, stderr=log, env=environment
                )
            self._running.add(process)
        status = process.wait()
        with self._guard:
            self._running.discard(process)
        return status

    def stop_beginning(self) -> None:
        """Begin no more of them."""
        with self._guard:
            self._stopped = True

    def end(self) -> None:
        """Stop those that run, too; they go on where they were when they are begun again."""
        self.stop_beginning()
        with self._guard:
            for process in self._running:
                process.terminate()


def _what_became_of(run: Run, status: int) -> str:
    """Say how a training ended, and where its words are."""
    if status < 0:
        name = signal.Signals(-status).name
        how = f"was ended by {name}"
        if name == "SIGKILL":
            how += ", by hand or because the machine's memory was full"
    elif status:
        how = f"ended with status {status}"
    else:
        how = f"ended without {run.work.result}"
    last = run.log.read_text(errors="replace").strip().splitlines()[-1:]
    return f"{run.name}, {how}: {' '.join(last)} (all of it: {run.log})."


def settings_of(run: Run, settings: Mapping[str, Any], size: Size) -> dict[str, str]:
    """Give the settings of a training, as text."""
    given = {
        **settings,
        **size.settings_of(run.condition.arch),
        "arch": run.condition.arch,
        **run.condition.settings,
        **run.settings,
        "seed": run.seed,
        "output_folder": run.folder,
    }
    if run.condition.part_of_epochs != 1:
        epochs = run.condition.part_of_epochs * given["number_of_epochs"]
        given["number_of_epochs"] = max(1, round(epochs))
    if run.keep_all:
        given["keep_checkpoints"] = given["number_of_epochs"]
    return {key: _as_text(value) for key, value in given.items()}


def precision_of(given: Mapping[str, str]) -> str:
    """Say what a training of these settings computes in."""
    return given.get("precision", "fp32")


def command(
    run: Run, settings: Mapping[str, Any], size: Size, hparams: Path
) -> list[str]:
    """Give the command line of one training.

    Parameters
    ----------
    run : Run
        What is trained.
    settings : mapping
        Of the recipe and its run options; those of the size override them, and those of
        the condition both.
    size : Size
        Widths and sizes of the encoders.
    hparams : pathlib.Path
        The file of settings.

    Returns
    -------
    list of str
    """
    given = settings_of(run, settings, size)
    options = [f"--{key}={value}" for key, value in given.items()]
    options += [*run.work.options, "--noprogressbar"]
    return [sys.executable, str(run.work.script), str(hparams), *options]


def resolved(hparams: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Give all settings as plain values; what is unusual, each training says itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizerWarning)
        return plain_settings(resolve(hparams, given))


def check_settings(run: Run, given: Mapping[str, str], hparams: Path) -> None:
    """Refuse a run that was begun with other settings than it is given now.

    Parameters
    ----------
    run : Run
        Whose folder has hyperparams.yaml.
    given : mapping of str to str
        As ``settings_of`` gives them; run options are not looked at.
    hparams : pathlib.Path
        The file of settings.

    Raises
    ------
    ValueError
        If a setting differs, or is not known because the file is not there.
    """
    path = run.folder / "hyperparams.yaml"
    if not path.is_file():
        raise ValueError(
            f"{run.folder} has results and no {path.name} that says of what. Remove it, "
            "or give another --output."
        )
    kept = plain_settings(path.read_text(encoding="utf-8"))
    options = {key: value for key, value in given.items() if key in kept}
    wanted = resolved(hparams, options)
    differing = [
        f"{key} is {kept.get(key)} there and {wanted.get(key)} now"
        for key in kept | wanted
        if key not in _COUNTED and kept.get(key) != wanted.get(key)
    ]
    if differing:
        advice = "Give another --output, or remove that folder to train it again."
        if kept.get("output_folder") != wanted.get("output_folder"):
            advice = "If the study was moved, move it back; archive.py moves studies."
        raise ValueError(
            f"{run.folder} is a training of other settings: {'; '.join(differing)}. "
            f"{advice}"
        )


def _as_text(value: Any) -> str:
    """Write a setting for the command line, where texts stand as they are."""
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    return json.dumps(value, default=os.fspath)
