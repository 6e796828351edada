"""Steps that survive bad data: gradients that are not finite, files that cannot be read."""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import speechbrain as sb
import torch
import yaml
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from speechbrain.utils.distributed import (
    if_main_process,
    is_distributed_initialized,
    run_on_main,
)
from torch import Tensor

from speechbrain_rev.compression import ActivationCompression
from speechbrain_rev.data import ChunkBatch, ChunkDataset, EpochBatchSampler
from speechbrain_rev.files import write_whole
from speechbrain_rev.processes import gathered
from speechbrain_rev.reversible.monitor import take_differences

SKIPPED = "skipped.jsonl"
UNREAD = "unread.jsonl"
#: SpeechBrain's run option, which checkpoints keep.
ACCUMULATION = "grad_accumulation_factor"
#: Below this scale, a loss scaler has halved so often that it is not the scale that overflows.
LEAST_SCALE = 2.0**-10

logger = logging.getLogger("train")


@dataclass
class Tally:
    """Counts of an epoch, which checkpoints within the epoch keep.

    Attributes
    ----------
    correct, skipped, unread, nonfinite : int
        Utterances classified correctly, skipped steps, files that could not be read, and
        skipped steps for which no loss scale is to blame.
    largest_streams : dict of str to float
        How large the values in exact streams have become, by stage.
    """

    correct: int = 0
    skipped: int = 0
    unread: int = 0
    nonfinite: int = 0
    largest_streams: dict[str, float] = field(default_factory=dict)

    def read(self, encoder: torch.nn.Module) -> dict[str, Any]:
        """Read from an encoder how large its streams are and what it compressed.

        Parameters
        ----------
        encoder : torch.nn.Module
            A speaker encoder, perhaps wrapped for several processes. Modules without exact
            streams and compression have no such figures.

        Returns
        -------
        dict
            ``largest_streams`` of the epoch and ``compression_figures``, where there are
            some.

        Example
        -------
        >>> Tally().read(torch.nn.Tanh())
        {}
        """
        encoder = getattr(encoder, "module", encoder)
        for stage, value in getattr(encoder, "largest_streams", dict)().items():
            before = self.largest_streams.get(stage, 0.0)
            # The NaN of an overflow is kept.
            if math.isnan(value) or value > before:
                self.largest_streams[stage] = value
        figures: dict[str, Any] = {}
        if self.largest_streams:
            figures["largest_streams"] = self.largest_streams
        compression = getattr(encoder, "compression", None)
        if compression is not None:
            figures |= compression_figures(compression)
        return figures


def compression_figures(compression: ActivationCompression) -> dict[str, Any]:
    """Return ratios and error bounds of what was compressed in the last step.

    Parameters
    ----------
    compression : ActivationCompression
        The encoder's.

    Returns
    -------
    dict
        ``compression_ratio`` of all layers' inputs and, by layer, ``error_bounds`` and
        ``compression_ratios``; nothing if no block compresses.
    """
    records = compression.records
    if not records:
        return {}
    original = sum(record.original_bytes for record in records.values())
    kept = sum(record.kept_bytes for record in records.values())
    return {
        "compression_ratio": original / kept,
        "error_bounds": {name: r.error_bound for name, r in records.items()},
        "compression_ratios": {name: r.ratio for name, r in records.items()},
    }


@register_checkpoint_hooks
class CheckedSteps(sb.Brain):
    """A Brain that skips a step whose gradient holds NaN or infinity, and logs why.

    Neither weights nor the running statistics of batch normalisations change by such a
    step. More of them in an epoch than ``nonfinite_patience`` end the training. Files that
    cannot be read are counted and listed; more than ``max_unread`` end the training, too.
    Gradients of all parameters are clipped together, those of every group of the
    optimizer. SpeechBrain's ``skip_nonfinite_grads`` and ``freeze_optimizers`` have no
    effect; ``compile`` is refused.

    Counts are summed over the processes with each batch, so that all of them skip, and
    end, together.

    A subclass sets ``measured`` in ``compute_objectives``. Its hparams have
    ``output_folder``, ``epoch_counter`` and ``max_unread``.
    """

    train_sampler: EpochBatchSampler
    train_dataset: ChunkDataset
    #: Counts of the epoch, over all processes.
    tally: Tally
    #: Loss of a batch and utterances classified correctly, of this process, [2].
    measured: Tensor
    #: Mean loss of a batch over the processes.
    mean_loss: float = math.nan
    #: Steps of the loader since the last one of the optimizer, from 1.
    pending: tuple[int, ...] = ()
    #: Names the run, in its checkpoints and its record.
    run: str
    #: Seconds of the epoch before this process resumed it, and when this one began.
    earlier_seconds: float = 0.0
    stage_start: float = 0.0
    #: Steps of the epoch that the checkpoint had seen.
    recovered_step: int = 0
    #: Losses of their batches.
    losses: tuple[Tensor, ...] = ()
    #: Buffers of modules and their copies of before these steps.
    saved_buffers: tuple[tuple[Tensor, Tensor], ...] = ()
    #: SpeechBrain's option: of hparams or of the command line.
    compile: bool

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.run = uuid.uuid4().hex
        if self.compile:
            raise ValueError(
                "compile would give whole modules to torch.compile, which trains chains and "
                "recomputed blocks no faster. Leave it out."
            )

    def on_fit_start(self) -> None:
        """Build, recover, and drop lines about steps that are taken again."""
        super().on_fit_start()
        if self.checkpointer is not None and not self.debug:
            # The checkpoint counted these steps in its own batches.
            position = self.hparams.epoch_counter.current + 1, self.recovered_step
            for name in (SKIPPED, UNREAD):
                path = Path(self.hparams.output_folder, name)
                run_on_main(drop_later_lines, args=[path, position])

    def fit_batch(self, batch: ChunkBatch) -> Tensor:
        """Compute the gradient of a batch, perhaps take a step; return the mean loss."""
        if not self.pending:
            self.save_buffers()
        self.pending = (*self.pending, self.step)
        super().fit_batch(batch)
        self.count(batch.unread)
        return torch.tensor(self.mean_loss, dtype=torch.float32)

    def count(self, unread: Sequence[tuple[str, str]]) -> None:
        """Sum the results of a batch; end the training if too many files are unread.

        Here the CPU waits for a GPU, which has the whole step to do by then.

        Parameters
        ----------
        unread : sequence of tuple of str and str
            Files that this process could not read, and why.

        Raises
        ------
        ValueError
            If more of the epoch's files are unread than ``max_unread``.
        """
        loss, correct = self.measured.tolist()
        differences = take_differences()
        loss, correct, files, differing, processes = self.sum_over_processes(
            loss, correct, len(unread), len(differences), 1
        )
        self.mean_loss = loss / processes
        self.tally.correct += int(correct)
        if differing:
            for rank, texts in enumerate(gathered(differences)):
                for text in texts:
                    logger.warning(f"In process {rank} of {int(processes)}: {text}")
        if files:
            self.tally.unread += int(files)
            self.report_unread(unread)

    def sum_over_processes(self, *values: float) -> Sequence[float]:
        """Sum numbers over the processes, all of which must come here."""
        if not is_distributed_initialized():
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        sums: list[float] = total.tolist()
        return sums

    def check_loss_isfinite(self, loss: Tensor) -> None:
        """Remember the loss: the gradient decides."""
        self.losses = (*self.losses, loss.detach())

    def _should_save_intra_epoch_ckpt(self, *args: Any) -> bool:
        # Gradients that are accumulated are in no checkpoint.
        return not self.pending and super()._should_save_intra_epoch_ckpt(*args)

    def end_of_steps(self) -> None:
        """Drop batches after the last step of an epoch, whose gradients are unused."""
        if self.pending:
            bad = not all(bool(b.isfinite().all()) for b, _ in self.saved_buffers)
            if self.sum_over_processes(bad)[0]:
                self._skip(torch.tensor(math.nan, dtype=torch.float32))
        self.pending, self.losses = (), ()

    def optimizers_step(self) -> None:
        """Clip and step, unless the gradient is not finite."""
        groups = self.optimizer.param_groups
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(
            [p for group in groups for p in group["params"]], self.max_grad_norm
        )
        scaled, scale = self.scaler.is_enabled(), self.scaler.get_scale()
        if scaled or norm.isfinite():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        now = self.scaler.get_scale()
        if now < scale or not (scaled or norm.isfinite()):
            # An overflow of scaled gradients is usual, unless the loss is not finite.
            bad = not all(bool(loss.isfinite()) for loss in self.losses)
            to_report = not scaled or self.sum_over_processes(bad)[0]
            self._skip(norm, report=bool(to_report or now < LEAST_SCALE))
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        self.pending, self.losses = (), ()

    def _skip(self, norm: Tensor, *, report: bool = True) -> None:
        for buffer, copy in self.saved_buffers:
            buffer.copy_(copy)
        self.tally.skipped += 1
        if report:
            self.report_skipped(norm)

    def save_buffers(self) -> None:
        """Copy what a forward pass changes."""
        if not self.saved_buffers:
            buffers = [b for b in self.modules.buffers() if b.is_floating_point()]
            self.saved_buffers = tuple((b, torch.empty_like(b)) for b in buffers)
        if self.saved_buffers:
            now, copies = zip(*self.saved_buffers, strict=True)
            torch._foreach_copy_(copies, now)

    def report_unread(self, unread: Sequence[tuple[str, str]]) -> None:
        """Log files that could not be read; end the training if there were too many."""
        path = Path(self.hparams.output_folder, UNREAD)
        for rank, files in enumerate(gathered(list(unread))):
            for name, why in files:
                self._append(path, rank, utterance=name, why=" ".join(why.split()))
        if unread:
            logger.warning(
                f"{len(unread)} of a batch's files could not be read and others are in "
                f"their place; the first: {unread[0][1]}. All are listed in {path}."
            )
        count, most = self.tally.unread, self.hparams.max_unread
        if count > most:
            raise ValueError(
                f"{count} files of epoch {self.hparams.epoch_counter.current} could not "
                f"be read, more than max_unread: {most}. They are listed in {path}. Bring "
                "them back or raise max_unread; the same command goes on from the last "
                "checkpoint."
            )

    def report_skipped(self, norm: Tensor) -> None:
        """Log a skipped step; end the training if there were too many."""
        names = [
            self.train_dataset.path_of(index)
            for step in self.pending
            for index in self.train_sampler.indices_of(step - 1)
        ]
        epoch = self.hparams.epoch_counter.current
        file = Path(self.hparams.output_folder, SKIPPED)
        for rank, own in enumerate(gathered(names)):
            self._append(file, rank, gradient_norm=str(float(norm)), utterances=own)
        logger.warning(
            f"epoch {epoch}, step {self.step}: the gradient's norm is {float(norm)}; the "
            f"step is skipped. The utterances that it was to read are in {file}."
        )
        self.tally.nonfinite += 1
        if self.tally.nonfinite > self.nonfinite_patience:
            raise ValueError(
                f"{self.tally.nonfinite} steps of epoch {epoch} had a gradient that is "
                f"not finite, more than --nonfinite_patience={self.nonfinite_patience}. "
                f"Look at the speech that {file} names, or lower lr; the same command "
                "goes on from the last checkpoint."
            )

    def _append(self, path: Path, rank: int, **line: Any) -> None:
        """Append a line, with its place, to a file of the run's folder."""
        if not if_main_process() or self.debug:
            # Two machines that write to one file lose lines.
            return
        epoch = self.hparams.epoch_counter.current
        place = {"epoch": epoch, "step": self.step, "rank": rank}
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(place | line)}\n")

    @mark_as_saver
    def _save(self, path: str | Path) -> None:
        super()._save(path)
        self.tally.read(self.modules.embedding_model)
        with open(path, "a", encoding="utf-8") as file:
            seconds = self.earlier_seconds + time.monotonic() - self.stage_start
            state = {
                "run": self.run,
                "seconds": seconds,
                "tally": vars(self.tally),
                "batch_size": self.train_sampler.batch_size,
                ACCUMULATION: self.grad_accumulation_factor,
            }
            yaml.safe_dump(state, file)

    @mark_as_loader
    def _recover(self, path: str | Path, end_of_epoch: bool) -> None:
        super()._recover(path, end_of_epoch)
        saved = yaml.safe_load(Path(path).read_text())
        self.tally = Tally(**saved["tally"])
        self.run, self.earlier_seconds = saved["run"], saved["seconds"]
        if end_of_epoch:
            self.step, self.avg_train_loss, self.earlier_seconds = 0, 0.0, 0.0
        self.recovered_step, now = self.step, self.train_sampler.batch_size
        # At another batch the epoch resumes after as many utterances.
        self.step = self.step * saved["batch_size"] // now


def drop_later_lines(path: Path, position: tuple[int, int]) -> None:
    """Drop lines about steps after a position, which are taken again.

    Parameters
    ----------
    path : Path
        ``skipped.jsonl`` or ``unread.jsonl`` of a run; it may not be there.
    position : tuple of int
        Epoch and step.
    """
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # Epoch 0 is that of a dry run.
        kept = [line for line in lines if (1, 0) <= _place(line) <= position]
        write_whole(path, "".join(kept))


def _place(line: str) -> tuple[float, int]:
    """Return epoch and step of a line; one that a full disk cut short is after all others."""
    try:
        record = json.loads(line)
        return record["epoch"], record["step"]
    except json.JSONDecodeError:
        return math.inf, 0
