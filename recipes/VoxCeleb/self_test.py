"""A self-test of a training run: its settings, its speech, and a folder that goes away."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hyperpyyaml import load_hyperpyyaml
from memory_plan import PLAN, give_modes
from run_settings import mark_finished, write_hyperparams
from speechbrain.utils.distributed import get_local_rank
from steps import CheckedSteps
from training_log import Tally

from speechbrain_rev.catalog.plans import in_words
from speechbrain_rev.catalog.self_test import (
    STEPS,
    FreshTraining,
    SelfTest,
    self_test,
    without_weights,
)
from speechbrain_rev.catalog.steps import TrainingStep, budget_bytes_of
from speechbrain_rev.data import ChunkBatch, EpochBatchSampler, generator
from speechbrain_rev.data.dataset import train_loader
from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.packed import find_packed
from speechbrain_rev.data.preparation import Prepared, prepare
from speechbrain_rev.hparams import OptimizerWarning, placeholders, resolve
from speechbrain_rev.inference.run_folder import HYPERPARAMS
from speechbrain_rev.planner import Plan

# Of VoxCeleb2 dev, whose classes out_n_neurons counts until there are data.
_UTTERANCES = 1_092_009
_NOT_GIVEN = "not given"


class WatchedSteps(CheckedSteps):
    """Steps whose gradients are seen, and of which nothing is written or shown."""

    seen: Callable[[], None]

    def take(
        self,
        batches: Sequence[ChunkBatch],
        number: int,
        size: int,
        seen: Callable[[], None],
    ) -> None:
        """Take a step of the optimizer with some utterances of each batch."""
        self.seen = seen
        first = number * self.grad_accumulation_factor
        for i in range(first, first + self.grad_accumulation_factor):
            self.step = i + 1
            self.fit_batch(batches[i % len(batches)].first(size))

    def optimizers_step(self):
        """Show the gradients, which are clipped and dropped here."""
        self.seen()
        super().optimizers_step()

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        """Show no progress."""

    def tell_of_skipped(self, norm):
        """Leave it to the comparison of gradients."""


def without_data(argv: list[str]) -> list[str]:
    """Let a command line do without a data_folder that it and the file do not give."""
    if not argv or any(option.partition("=")[0] == "--data_folder" for option in argv):
        return argv
    with warnings.catch_warnings():
        # Composing the whole command line warns of it.
        warnings.simplefilter("ignore", OptimizerWarning)
        missing = placeholders(resolve(argv[0]))
    return [*argv, f"--data_folder={_NOT_GIVEN}"] if "data_folder" in missing else argv


def run_self_test(
    text: str,
    settings: Mapping[str, Any],
    build: Callable[[dict[str, Any]], WatchedSteps],
) -> SelfTest:
    """Compare three steps as configured with three that store.

    Parameters
    ----------
    text : str
        The composed settings.
    settings : mapping
        Their plain values.
    build : callable
        Makes the Brain of settings that are built, as a training run has it.

    Returns
    -------
    SelfTest
        Nothing of it is in ``output_folder``.

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
        own = _settings_in(Path(folder), settings)
        _write_settings(Path(folder), text, own)
        text = Path(folder, HYPERPARAMS).read_text(encoding="utf-8")
        step, batches, budget_bytes = _configured(text, build, Path(folder))

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


def _settings_in(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Let a run write into another folder, and go by the plan that it began with."""
    own = dict(settings)
    own["output_folder"], own["save_folder"] = str(folder), str(folder / "save")
    if "train_log" in own:
        own["train_log"] = str(folder / "train_log.txt")
    if own.get("zero_init_residual") and own["pretrained_run"] is None:
        own["zero_init_residual"] = False
        print(
            "Blocks begin with random weights: as zero_init_residual has them they add "
            "nothing in the first steps."
        )
    if own.get("verify") == "raise":
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
    mark_finished(own, done=False)
    return own


def _has_speech(settings: Mapping[str, Any]) -> bool:
    folder = settings["data_folder"]
    try:
        return Path(folder).exists() or find_packed(folder) is not None
    except ValueError:
        # It should lead into a packed folder, which is not there.
        return False


def _write_settings(folder: Path, text: str, settings: Mapping[str, Any]) -> None:
    """Write the complete settings, with the numbers that follow from the data."""
    if _has_speech(settings):
        prepared = prepare(DataSettings.of(settings), settings["save_folder"])
        print(prepared.in_words())
    elif settings["pretrained_run"] is not None:
        raise ValueError(
            f"pretrained_run is {settings['pretrained_run']}, whose speakers must be those "
            f"of data_folder, and data_folder is {settings['data_folder']}. Give the "
            "folder of its speech, or leave pretrained_run out."
        )
    else:
        speakers = settings["out_n_neurons"] // len(settings["speeds"])
        prepared = Prepared(_UTTERANCES, speakers, 0, held_out=0, valid_trials=0)
        given = settings["data_folder"]
        why = given if given == _NOT_GIVEN else f"{given}, which does not exist"
        print(f"data_folder is {why}: noise of {speakers} speakers is in its place.")
    write_hyperparams(folder, text, settings, prepared)


def _configured(
    text: str, build: Callable[[dict[str, Any]], WatchedSteps], folder: Path
) -> tuple[TrainingStep, list[ChunkBatch], int | None]:
    """Choose the modes; give the step, its batches and its budget, if that counts."""
    hparams = load_hyperpyyaml(text)
    brain = build(hparams)
    print(hparams["wav_augment"].in_words())
    give_modes(brain, folder)
    if (folder / PLAN).is_file():
        print(f"memory plan: {in_words(Plan.load(folder / PLAN))}")
    device = torch.device(brain.device)
    step = TrainingStep.of(
        hparams, brain.modules, precision=brain.precision, device=device
    )
    budgeted = hparams["mode"] is None and hparams["plan_file"] is None
    budget = hparams["memory_budget"] if budgeted else None
    count = STEPS * brain.grad_accumulation_factor
    batches = (
        _speech(hparams, count) if _has_speech(hparams) else _noise(hparams, count)
    )
    budget_bytes = None if budget is None else budget_bytes_of(budget, device)
    return without_weights(step), batches, budget_bytes


def _speech(hparams: dict[str, Any], count: int) -> list[ChunkBatch]:
    """Read batches as the first epochs have them."""
    loader = train_loader(hparams | {"num_workers": 0})
    sampler = loader.batch_sampler
    assert isinstance(sampler, EpochBatchSampler)

    def batches() -> Iterator[ChunkBatch]:
        for epoch in itertools.count(1):
            sampler.set_epoch(epoch)
            yield from loader

    return list(itertools.islice(batches(), count))


def _noise(hparams: dict[str, Any], count: int) -> list[ChunkBatch]:
    """Draw noise of the size of speech, and who speaks."""
    size, draws = hparams["batch_size"], generator("self-test", hparams["seed"])
    samples = round(hparams["sentence_len"] * hparams["sample_rate"])
    speakers = hparams["wav_augment"].n_speakers
    return [
        ChunkBatch(
            0.1 * torch.randn(size, samples, generator=draws),
            torch.ones(size),
            torch.randint(speakers, (size, 1), generator=draws),
        )
        for _ in range(count)
    ]
