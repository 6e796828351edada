"""The self-test of a training run: its first steps, in a folder that is deleted."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.utils.distributed import get_local_rank
from torch import Tensor
from torch.utils.data import DataLoader

from speechbrain_rev.data import ChunkBatch, generator
from speechbrain_rev.data.packed import find_packed
from speechbrain_rev.hparams import OptimizerWarning, placeholders, resolve
from speechbrain_rev.inference.run_folder import HYPERPARAMS
from speechbrain_rev.planner import Plan
from speechbrain_rev.training.kept_plans import PLAN
from speechbrain_rev.training.memory_plan import give_modes, in_words
from speechbrain_rev.training.recipe_step import TrainingStep, budget_bytes_of
from speechbrain_rev.training.run_settings import (
    ListedData,
    mark_finished,
    write_hyperparams,
)
from speechbrain_rev.training.step_comparison import (
    STEPS,
    FreshTraining,
    SelfTest,
    self_test,
    without_weights,
)
from speechbrain_rev.training.steps import CheckedSteps, Tally

_NOT_GIVEN = "not given"


class _Noise(NamedTuple):
    """The size of a training set that is replaced by noise."""

    speakers: int
    # Of VoxCeleb2 dev, whose classes out_n_neurons counts until there are data.
    utterances: int = 1_092_009


class WatchedSteps(CheckedSteps):
    """Steps with a callback before the optimizer's, which write and show nothing.

    It comes before a recipe's Brain in the bases of a class that ``run_self_test`` takes.
    """

    on_gradients: Callable[[], None]

    def take(
        self,
        batches: Sequence[ChunkBatch],
        number: int,
        size: int,
        on_gradients: Callable[[], None],
    ) -> None:
        """Take a step of the optimizer.

        Parameters
        ----------
        batches : sequence of ChunkBatch
            As many as several steps take.
        number : int
            Of the step, from 0.
        size : int
            Utterances that are taken of each batch, its first ones.
        on_gradients : callable
            Called when the gradients are complete.
        """
        self.on_gradients = on_gradients
        first = number * self.grad_accumulation_factor
        for i in range(first, first + self.grad_accumulation_factor):
            self.step = i + 1
            self.fit_batch(batches[i % len(batches)].first(size))

    def optimizers_step(self) -> None:
        """Call back before the gradients are clipped and dropped."""
        self.on_gradients()
        super().optimizers_step()

    def on_fit_batch_end(
        self, batch: ChunkBatch, outputs: Any, loss: Tensor, should_step: bool
    ) -> None:
        """Show no progress."""

    def report_skipped(self, norm: Tensor) -> None:
        """Leave it to the comparison of gradients."""


def without_data(argv: list[str]) -> list[str]:
    """Add a placeholder to a command line that gives no data_folder, nor does its file.

    Parameters
    ----------
    argv : list of str
        As of a training run.

    Returns
    -------
    list of str
        For ``run_self_test``, which then takes noise instead of speech.
    """
    if not argv or any(option.partition("=")[0] == "--data_folder" for option in argv):
        return argv
    with warnings.catch_warnings():
        # Composing the whole command line gives that warning.
        warnings.simplefilter("ignore", OptimizerWarning)
        missing = placeholders(resolve(argv[0]))
    return [*argv, f"--data_folder={_NOT_GIVEN}"] if "data_folder" in missing else argv


def run_self_test(
    text: str,
    settings: Mapping[str, Any],
    build: Callable[[dict[str, Any]], WatchedSteps],
    *,
    prepare: Callable[[Mapping[str, Any]], ListedData],
    train_loader: Callable[[dict[str, Any]], DataLoader[ChunkBatch]],
    report: Callable[[str], object] = print,
) -> SelfTest:
    """Compare three steps as configured with three that store all blocks.

    It writes nothing into ``output_folder``. Where there is no speech it takes noise.

    Parameters
    ----------
    text : str
        The composed settings.
    settings : mapping
        Their plain values.
    build : callable
        Makes the Brain from loaded settings, as a training run has it.
    prepare : callable
        Writes the lists of the training speech into save_folder of plain settings.
    train_loader : callable
        Makes the loader of training speech from loaded settings.
    report : callable
        Gets lines on the settings, the speech and the plan.

    Returns
    -------
    SelfTest

    Raises
    ------
    ValueError
        If several processes were started, or a training run would be refused.
    """
    if get_local_rank() is not None:
        raise ValueError(
            "--self_test takes one process: leave torchrun out, and give as --batch_size "
            "the share of one process."
        )
    with tempfile.TemporaryDirectory() as folder:
        own = _settings_in(Path(folder), settings, report)
        write_hyperparams(Path(folder), text, own, _listed(own, prepare, report))
        text = Path(folder, HYPERPARAMS).read_text(encoding="utf-8")
        step, batches, budget_bytes = _configured(
            text, build, Path(folder), train_loader, report
        )

        def begin() -> FreshTraining:
            hparams = load_hyperpyyaml(text)
            brain = build(hparams)
            brain.checkpointer, brain.tally = None, Tally()
            brain.on_fit_start()
            brain.modules.train()
            return FreshTraining(
                hparams["embedding_model"],
                brain.modules,
                brain.optimizer,
                partial(brain.take, batches),
            )

        return self_test(step, begin, budget_bytes=budget_bytes)


def _settings_in(
    folder: Path, settings: Mapping[str, Any], report: Callable[[str], object]
) -> dict[str, Any]:
    """Return the settings for a run in another folder, with the plan that it began with."""
    own = dict(settings)
    own["output_folder"], own["save_folder"] = str(folder), str(folder / "save")
    if "train_log" in own:
        own["train_log"] = str(folder / "train_log.txt")
    if own.get("zero_init_residual") and own["pretrained_run"] is None:
        own["zero_init_residual"] = False
        report(
            "Blocks begin with random weights: as zero_init_residual has them they add "
            "nothing in the first steps."
        )
    if own.get("verify") in ("first", "raise"):
        # A step that raises could not be compared.
        own["verify"] = "warn"
    plan, lists = (Path(settings[f"{name}_folder"]) for name in ("output", "save"))
    plan /= PLAN
    # A value that is no plain one is not among the settings, and is given.
    given = [own.get(name, name) for name in ("mode", "plan_file", "memory_budget")]
    begun = any(lists.glob("CKPT*/CKPT.yaml"))
    if begun and plan.is_file() and given == [None] * 3:
        own["plan_file"] = str(plan)
    (folder / "save").mkdir()
    for path in lists.glob("*") if _has_speech(settings) else ():
        # Checkpoints are folders.
        if path.is_file():
            shutil.copy(path, folder / "save")
    # Other data settings may be tried: nothing is trained there.
    mark_finished(own["save_folder"], None)
    return own


def _has_speech(settings: Mapping[str, Any]) -> bool:
    given = settings["data_folder"]
    folders = [given] if isinstance(given, str) else given
    try:
        return all(Path(f).exists() or find_packed(f) is not None for f in folders)
    except ValueError:
        # It should lead into a packed folder, which is not there.
        return False


def _listed(
    settings: Mapping[str, Any],
    prepare: Callable[[Mapping[str, Any]], ListedData],
    report: Callable[[str], object],
) -> ListedData:
    """List the speech, or return the size of what noise replaces."""
    folder = settings["data_folder"]
    if _has_speech(settings):
        return prepare(settings)
    if settings["pretrained_run"] is not None:
        raise ValueError(
            f"pretrained_run is {settings['pretrained_run']}, whose speakers must be those "
            f"of data_folder, and data_folder is {folder}. Give the folder of its speech, "
            "or leave pretrained_run out."
        )
    speakers = settings["out_n_neurons"] // len(settings["speeds"])
    why = folder if folder == _NOT_GIVEN else f"{folder}, which does not exist"
    report(f"data_folder is {why}: noise of {speakers} speakers is in its place.")
    return _Noise(speakers)


def _configured(
    text: str,
    build: Callable[[dict[str, Any]], WatchedSteps],
    folder: Path,
    train_loader: Callable[[dict[str, Any]], DataLoader[ChunkBatch]],
    report: Callable[[str], object],
) -> tuple[TrainingStep, list[ChunkBatch], int | None]:
    """Choose the modes; return the step, its batches, and its budget if that decided."""
    hparams = load_hyperpyyaml(text)
    brain = build(hparams)
    report(hparams["wav_augment"].in_words())
    give_modes(brain, folder)
    if (folder / PLAN).is_file():
        report(f"memory plan: {in_words(Plan.load(folder / PLAN))}")
    device = torch.device(brain.device)
    step = TrainingStep.of(
        hparams, brain.modules, precision=brain.precision, device=device
    )
    budgeted = hparams["mode"] is None and hparams["plan_file"] is None
    budget = hparams["memory_budget"] if budgeted else None
    budget_bytes = None if budget is None else budget_bytes_of(budget, device)
    count = STEPS * brain.grad_accumulation_factor
    if _has_speech(hparams):
        batches = _speech(train_loader(hparams | {"num_workers": 0}), count)
    else:
        batches = _noise(hparams, count)
    return without_weights(step), batches, budget_bytes


def _speech(loader: DataLoader[ChunkBatch], count: int) -> list[ChunkBatch]:
    """Read batches as the first epochs have them."""

    def batches() -> Iterator[ChunkBatch]:
        for epoch in itertools.count(1):
            loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
            yield from loader

    return list(itertools.islice(batches(), count))


def _noise(hparams: dict[str, Any], count: int) -> list[ChunkBatch]:
    """Draw noise of the size of speech, and speakers of it."""
    size, draws = hparams["batch_size"], generator("self-test", hparams["seed"])
    samples = round(hparams["sentence_len"] * hparams["sample_rate"])
    speakers = hparams["wav_augment"].n_speakers
    return [
        ChunkBatch(
            0.1 * torch.randn(size, samples, generator=draws, dtype=torch.float32),
            torch.ones(size, dtype=torch.float32),
            torch.randint(speakers, (size, 1), generator=draws),
        )
        for _ in range(count)
    ]
