"""Epochs of a training run: progress, validation on trials, log line and checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import speechbrain as sb
import torch
from speechbrain.utils.distributed import if_main_process, run_on_main
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from speechbrain_rev.data import ChunkBatch
from speechbrain_rev.inference.running import RepeatedShapes
from speechbrain_rev.inference.runs import TrainingRecord, read_record
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.checkpointer import (
    is_end_of_epoch,
    kept_epochs,
    place_in_run,
)
from speechbrain_rev.scoring import Trials, cosine_trials, eer
from speechbrain_rev.training import progress
from speechbrain_rev.training.epoch_log import EpochLog, log_places
from speechbrain_rev.training.run_folder import RunFiles
from speechbrain_rev.training.steps import CheckedSteps, Tally

logger = logging.getLogger("train")

# Two steps of one schedule differ by less, but for the first ones of a warm-up.
_GOES_BACK = 1.1


class TimedBatches:
    """Batches of a loader, and how long whoever takes them waits for the next one.

    Parameters
    ----------
    batches : collection
        A loader.

    Example
    -------
    >>> batches = TimedBatches(["first", "second"])
    >>> list(batches), len(batches), 0 < batches.seconds < 1
    (['first', 'second'], 2, True)
    """

    def __init__(self, batches: Collection[Any]) -> None:
        self._batches = batches
        #: Waited so far, in all epochs.
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        start = time.monotonic()
        for batch in self._batches:
            self.seconds += time.monotonic() - start
            yield batch
            start = time.monotonic()


class ValidatedEpochs(CheckedSteps):
    """A Brain that trains on chunks of speech and validates on trials after each epoch.

    A subclass has ``compute_forward``, which returns embeddings [batch, 1, embedding_dim]
    in validation, as ``embed`` gives them, and ``compute_objectives``. Its hparams have ``lr_annealing`` (a
    ``SpeakerSchedule``), ``compute_cost`` with a ``margin``, ``train_logger`` and
    ``average_checkpoints``, beside those of ``CheckedSteps``; its modules have an
    ``embedding_model``.
    """

    epoch_log: EpochLog
    #: None for no validation.
    valid_trials: Trials | None = None
    #: Shapes of the batches of validation.
    shapes: RepeatedShapes
    bar: tqdm[Any]
    #: The run's record and files; None where nothing is recorded.
    record: TrainingRecord | None = None
    files: RunFiles | None = None
    #: Batches of the epoch that is trained.
    batches: TimedBatches
    #: The stage that runs; None before the first epoch.
    stage: sb.Stage | None = None
    #: Whether the encoder is frozen in this epoch.
    frozen: bool = False

    def fit(self, *arguments: Any, **keywords: Any) -> None:
        """Train; Ctrl-C is passed on with where the run stands and where it resumes."""
        try:
            super().fit(*arguments, **keywords)
        except KeyboardInterrupt as interrupt:
            if self.debug or self.checkpointer is None or not if_main_process():
                raise
            words = f"{self._standing()}. {self._going_on()}"
            raise KeyboardInterrupt(words) from interrupt

    def _standing(self) -> str:
        """Name the step or the stage that runs."""
        epoch = self.hparams.epoch_counter.current
        if self.stage is None:
            return "before its first step"
        if self.stage == sb.Stage.VALID:
            return f"in the validation of epoch {epoch}"
        return f"in epoch {epoch}, at step {self.step} of it"

    def _going_on(self) -> str:
        """Name the newest checkpoint, from which the same command resumes."""
        try:
            newest = self.checkpointer.find_checkpoint()
            if newest is None:
                return "No checkpoint yet: the same command begins anew."
            epoch, ended, step, _ = place_in_run(Path(newest.path))
        except (ValueError, OSError) as error:
            return str(error)
        return f"The same command goes on {_after(epoch, 0 if ended else step)}."

    def on_fit_start(self) -> None:
        """Recover, and log where a run resumes."""
        super().on_fit_start()
        done, step = self.hparams.epoch_counter.current, self.step
        if self.record is not None and self.files is not None:
            rows = self.epoch_log.rows()
            self.record = replace(self.record, run=self.run).after(
                [row for row in rows if row["epoch"] <= done]
            )
            before = read_record(self.hparams.output_folder)
            if before is not None:
                trained = done + self.step / len(self.train_sampler)
                self.record = self.record.following(before, trained)
            run_on_main(self.files.take_over, args=[self.record])
        if (done or step) and if_main_process():
            epoch = done + 1 if step else done
            logger.info(f"This run goes on {_after(epoch, step)}.{self._rate_after()}")

    def _rate_after(self) -> str:
        """Say to which learning rate a run goes back that is extended."""
        schedule = self.hparams.lr_annealing
        before = self.record.lr if self.record is not None else None
        if self.step or before is None:
            return ""
        now = schedule.learning_rate(schedule.step)
        if now < _GOES_BACK * before:
            return ""
        return (
            f" The learning rate goes back from {before:.3g} to {now:.3g}, as the schedule "
            f"of {schedule.number_of_epochs} epochs has it."
        )

    def embed(self, feats: Tensor) -> Tensor:
        """Embed whole utterances in validation, in shapes that repeat.

        Parameters
        ----------
        feats : torch.Tensor, [batch, time, n_mels]
            Filterbanks, of which none is padded.

        Returns
        -------
        torch.Tensor, [batch, 1, embedding_dim]
        """
        encoder = self.modules.embedding_model
        # Wrapped for several processes it would wait for them, and they may have fewer
        # utterances that can be read.
        encoder = getattr(encoder, "module", encoder)
        batch, frames = self.shapes.batch(list(feats))
        lengths = None if frames is None else frames / batch.shape[1]
        embeddings: Tensor = encoder(batch, lengths)[: len(feats)]
        return embeddings

    @property
    def freeze_epochs(self) -> int:
        """First epochs, in which the encoder is frozen; 0 if hparams have no such knob."""
        return int(getattr(self.hparams, "freeze_epochs", 0))

    def embed_training(self, feats: Tensor) -> Tensor:
        """Embed segments in training; while the encoder is frozen, without a graph.

        Parameters
        ----------
        feats : torch.Tensor, [batch, time, n_mels]
            Filterbanks.

        Returns
        -------
        torch.Tensor, [batch, 1, embedding_dim]
        """
        encoder = self.modules.embedding_model
        if self.frozen:
            # DistributedDataParallel's wrapper would wait for gradients.
            encoder = getattr(encoder, "module", encoder)
            if encoder.training:
                # Evaluation mode freezes the running statistics too.
                encoder.eval()
        with torch.set_grad_enabled(not self.frozen):
            embeddings: Tensor = encoder(feats)
        return embeddings

    def evaluate_batch(
        self, batch: tuple[str, ChunkBatch | str], stage: sb.Stage
    ) -> Tensor:
        """Embed one utterance; held-out speakers have no class, hence no loss."""
        name, utterance = batch
        if isinstance(utterance, str):
            logger.warning(f"Validation goes on without an utterance: {utterance}")
            return torch.zeros((), dtype=torch.float32)
        with self.evaluation_ctx:
            embedding = self.compute_forward(utterance, stage)
        self.embeddings[name] = embedding.flatten().float().cpu()
        self.bar.update()
        return torch.zeros((), dtype=torch.float32)

    def on_fit_batch_end(
        self, batch: ChunkBatch, outputs: Any, loss: Tensor, should_step: bool
    ) -> None:
        """Show the progress."""
        size = self.train_sampler.batch_size
        progress.show_step(self.bar, size, self.mean_loss, self.device)

    def _fit_train(self, train_set: Collection[Any], epoch: int, enable: bool) -> None:
        self.batches = TimedBatches(train_set)
        super()._fit_train(self.batches, epoch, enable)

    def on_stage_start(self, stage: sb.Stage, epoch: int | None = None) -> None:
        """Start the clock, the bar and, in the middle of an epoch, the sampler."""
        self.stage_start, self.first_step = time.monotonic(), self.step
        self.stage = stage
        if stage == sb.Stage.TRAIN:
            assert epoch is not None
            self.frozen = epoch <= self.freeze_epochs
            if not self.step:
                self.tally, self.earlier_seconds = Tally(), 0.0
            self.train_sampler.set_epoch(epoch)
            self.train_sampler.start_at(self.step)
            size = self.train_sampler.batch_size
            total, done = len(self.train_sampler) * size, self.step * size
            name = f"epoch {epoch}"
        else:
            assert self.valid_trials is not None
            self.embeddings: dict[str, Tensor] = {}
            self.shapes = RepeatedShapes(torch.device(self.device))
            name, total, done = "valid", len(self.valid_trials.utterances), 0
        self.bar = progress.epoch_bar(name, total, done, off=self.noprogressbar)

    def on_stage_end(
        self, stage: sb.Stage, stage_loss: float, epoch: int | None = None
    ) -> None:
        """Summarise the stage; the last one of the epoch writes log and checkpoint."""
        self.bar.close()
        seconds = time.monotonic() - self.stage_start
        if stage == sb.Stage.TRAIN:
            self.end_of_steps()
            self.epoch_stats = self._training_stats(stage_loss, epoch, seconds)
        else:
            if not self.debug:
                self.epoch_stats |= self._validation_stats()
            self.epoch_stats["minutes"] += seconds / 60
        if stage == sb.Stage.VALID or self.valid_trials is None:
            self._end_epoch()

    def _training_stats(
        self, loss: float, epoch: int | None, seconds: float
    ) -> dict[str, Any]:
        sampler, schedule = self.train_sampler, self.hparams.lr_annealing
        utterances = self.step * sampler.batch_size
        waited, total = self.sum_over_processes(self.batches.seconds, seconds)
        # Rates are those of the steps since.
        resumed = {"resumed_after_step": self.first_step} if self.first_step else {}
        return {
            "epoch": epoch,
            "steps": schedule.step,
            **resumed,
            "train_loss": loss,
            "train_accuracy_percent": 100 * self.tally.correct / utterances,
            "skipped_steps": self.tally.skipped,
            "unread_files": self.tally.unread,
            "lr": schedule.current_lr,
            "margin": self.hparams.compute_cost.margin,
            "minutes": (self.earlier_seconds + seconds) / 60,
            # The share of all processes: one that waits holds up the others.
            "data_wait_percent": 100 * waited / total,
            "utterances_per_second": (self.step - self.first_step)
            * sampler.batch_size
            / seconds,
            **self.tally.read(self.modules.embedding_model),
            **progress.peak_memory(self.device),
        }

    def _validation_stats(self) -> dict[str, Any]:
        """Score by cosine the validation trials whose speech could be read."""
        assert self.valid_trials is not None
        stats: dict[str, Any] = {}
        lost = len(self.valid_trials.utterances) - len(self.embeddings)
        if unread := self.sum_over_processes(lost)[0]:
            stats["unread_validation_files"] = int(unread)
        try:
            trials = self.valid_trials.among(self.embeddings)
        except ValueError as error:
            logger.warning(f"There is no validation EER: {error}")
            return stats
        enrol, test = trials.rows(list(self.embeddings))
        embeddings = torch.stack(list(self.embeddings.values())).numpy()
        scores = cosine_trials(embeddings, enrol, test)
        return stats | {"valid_eer_percent": 100 * float(eer(scores, trials.labels))}

    def _end_epoch(self) -> None:
        line = progress.log_line(self.epoch_stats)
        if self.debug:
            shown = ", ".join(f"{words}: {value}" for words, value in line.items())
            run_on_main(print, args=[f"--debug: no EER, no log. {shown}"])
        else:
            self.hparams.train_logger.log_stats(line)
            run_on_main(self.epoch_log.write, args=[self.epoch_stats])
        self.checkpointer.save_and_keep_only(
            meta=self.epoch_stats,
            num_to_keep=kept_epochs(self.hparams.average_checkpoints),
            ckpt_predicate=is_end_of_epoch,
        )
        if self.record is not None and not self.debug:
            self.record = self.record.after(self.epoch_log.rows())
            folder = Path(self.hparams.output_folder)
            run_on_main(self.record.write, args=[folder])


def _after(epoch: int, step: int) -> str:
    """Put a place in a run in words; step 0 is the end of the epoch."""
    return f"after step {step} of epoch {epoch}" if step else f"after epoch {epoch}"


def equal_bits_in_words(equal: Mapping[str, bool | None], *, differs: bool) -> str:
    """Report in a sentence whether what was computed twice had equal bits.

    Parameters
    ----------
    equal : mapping of str to bool or None
        As ``SpeakerEncoder.equal_bits`` gives it, after a step.
    differs : bool
        Whether a block differed in this process or in another one.

    Returns
    -------
    str
        The sentence.

    Examples
    --------
    >>> equal_bits_in_words({"stem": True, "stages.0.chain.0": None}, differs=False)
    'Blocks that are computed twice: 1 with equal bits, 1 not compared (verify: null or
    streams: float).'
    """
    if not equal:
        return "No block is computed twice with these modes."
    if differs:
        return (
            "Bits differ between the two runs of a block that is computed twice: a warning "
            "above names it."
        )
    compared = sum(map(bool, equal.values()))
    results = {
        "with equal bits": compared,
        "not compared (verify: null or streams: float)": len(equal) - compared,
    }
    parts = (f"{count} {result}" for result, count in results.items() if count)
    return f"Blocks that are computed twice: {', '.join(parts)}."


class TimedStart(Protocol):
    """Work before the first step, whose time a dry run estimates.

    Attributes
    ----------
    batches : int
        Batches that this process computes.
    """

    batches: int

    def measure_batch_seconds(self) -> float:
        """Measure the seconds of one batch."""


def dry_run(
    brain: ValidatedEpochs,
    loader: DataLoader[ChunkBatch],
    start: TimedStart | None = None,
) -> None:
    """Take two steps, and print how long training would take and where logs would go.

    If the encoder is frozen at first, two steps are taken with it frozen and two without.

    Of a ``SpeakerEncoder`` it also prints whether blocks that run twice had equal bits.
    A run that has checkpoints resumes from the newest one, and what is left of it is
    counted. Nothing is kept of the steps: the brain has no checkpointer afterwards.

    Parameters
    ----------
    brain : ValidatedEpochs
        Before its first step. Its hparams also have ``number_of_epochs`` and ``logger``.
    loader : DataLoader
        Of the training speech, with two batches or more.
    start : TimedStart, optional
        Work of the run before its first step.

    Raises
    ------
    ValueError
        If a run could not resume from its newest checkpoint, as with optimizer states of
        other bits.
    RuntimeError
        If a second run differed in the first step, as ``verify`` has it.
    """
    # Not its own, which drops lines about steps that a run takes again.
    sb.Brain.on_fit_start(brain)
    hparams = brain.hparams
    done_steps = hparams.epoch_counter.current * len(loader) + brain.step
    brain.checkpointer, hparams.epoch_counter.current = None, 0
    start_seconds = 0.0
    if start is not None:
        start_seconds = start.batches * start.measure_batch_seconds()
    frozen, epochs = brain.freeze_epochs, hparams.number_of_epochs
    first_epochs = {1: frozen, frozen + 1: epochs - frozen} if frozen else {1: epochs}
    phases = []
    for first_epoch, count in first_epochs.items():
        brain.step = 0
        brain.modules.train()
        brain.on_stage_start(sb.Stage.TRAIN, first_epoch)
        batches: Iterable[ChunkBatch] = iter(loader)
        for brain.step, batch in zip((1, 2), batches, strict=False):
            begin = time.monotonic()
            brain.fit_batch(batch)
            seconds = time.monotonic() - begin
        brain.bar.close()
        phases.append((count, seconds))
    lines = [
        progress.forecast(
            len(loader),
            phases,
            brain.device,
            done_steps=done_steps,
            start_seconds=start_seconds,
        )
    ]
    encoder = brain.modules.embedding_model
    figures = brain.tally.read(encoder)
    encoder = getattr(encoder, "module", encoder)
    if isinstance(encoder, SpeakerEncoder):
        equal = encoder.equal_bits()
        [differing] = brain.sum_over_processes(False in equal.values())
        lines.append(equal_bits_in_words(equal, differs=differing > 0))
    if "compression_ratio" in figures:
        ratio = figures["compression_ratio"]
        lines.append(f"Compressed activations: {ratio:.1f} times smaller.")
    lines.append(log_places(hparams.output_folder, to=hparams.logger))
    run_on_main(print, args=["\n".join(lines)])
