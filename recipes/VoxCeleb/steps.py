"""Steps that outlive bad data: gradients that are not finite, files that cannot be read."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import speechbrain as sb
import torch
from speechbrain.utils.distributed import (
    if_main_process,
    is_distributed_initialized,
    run_on_main,
)
from training_log import Tally

from speechbrain_rev.data import ChunkDataset, EpochBatchSampler
from speechbrain_rev.processes import gathered
from speechbrain_rev.whole_files import write_whole

SKIPPED = "skipped.jsonl"
UNREAD = "unread.jsonl"
#: Below, a loss scaler has halved so often that it is not the scale that overflows.
LEAST_SCALE = 2.0**-10

logger = logging.getLogger("train")


class CheckedSteps(sb.Brain):
    """Skips a step whose gradient holds NaN or infinity, and says of which utterances.

    Files that cannot be read are counted and named, as long as there are not too many.

    Neither weights nor the running statistics of batch normalisations change by it. More
    such steps in an epoch than ``nonfinite_patience`` end the training. Gradients of all
    parameters are clipped together, those of every group of the optimizer. SpeechBrain's
    ``skip_nonfinite_grads`` and ``freeze_optimizers`` have no effect.

    What is counted is added up over the processes with each batch, so that all of them
    skip, and end, together.
    """

    train_sampler: EpochBatchSampler
    train_dataset: ChunkDataset
    #: What all processes have counted in an epoch.
    tally: Tally
    #: Loss of a batch and utterances that were told right, of this process.
    measured: torch.Tensor
    #: Mean loss of a batch over the processes.
    mean_loss: float = math.nan
    #: Steps of the loader since the last one of the optimizer, from 1.
    pending: tuple[int, ...] = ()
    #: Losses of their batches.
    losses: tuple[torch.Tensor, ...] = ()
    #: Buffers of modules as they were before, and their copies.
    kept: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def on_fit_start(self):
        """Build, recover, and forget what was told of steps that are taken again."""
        super().on_fit_start()
        if self.checkpointer is not None and not self.debug:
            position = self.hparams.epoch_counter.current + 1, self.step
            for name in (SKIPPED, UNREAD):
                path = Path(self.hparams.output_folder, name)
                run_on_main(forget_after, args=[path, position])

    def fit_batch(self, batch):
        """Take the gradient of a batch, and perhaps a step; return the mean loss."""
        if not self.pending:
            self.keep_buffers()
        self.pending = (*self.pending, self.step)
        super().fit_batch(batch)
        self.count(batch.unread)
        return torch.tensor(self.mean_loss)

    def count(self, unread):
        """Add up how a batch went; end the training if too many files are unread.

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
        loss, correct, files, processes = self.sum_over_processes(
            loss, correct, len(unread), 1
        )
        self.mean_loss = loss / processes
        self.tally.correct += int(correct)
        if files:
            self.tally.unread += int(files)
            self.tell_of_unread(unread)

    def sum_over_processes(self, *values):
        """Add up numbers of the processes, all of which must come here."""
        if not is_distributed_initialized():
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def check_loss_isfinite(self, loss):
        """Remember it: the gradient decides."""
        self.losses = (*self.losses, loss.detach())

    def _should_save_intra_epoch_ckpt(self, *args):
        # Gradients that are added up are in no checkpoint.
        return not self.pending and super()._should_save_intra_epoch_ckpt(*args)

    def end_of_steps(self):
        """Forget batches behind the last step of an epoch, whose gradients are dropped."""
        if self.pending:
            bad = not all(bool(b.isfinite().all()) for b, _ in self.kept)
            if sum(self.sum_over_processes(bad)):
                self.give_back_buffers()
                self.tally.skipped += 1
                self.tell_of_skipped(torch.tensor(math.nan))
        self.pending, self.losses = (), ()

    def optimizers_step(self):
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
            self.give_back_buffers()
            self.tally.skipped += 1
            # Of scaled gradients an overflow is no news, unless the loss is none either.
            bad = not all(bool(loss.isfinite()) for loss in self.losses)
            if not scaled or sum(self.sum_over_processes(bad)) or now < LEAST_SCALE:
                self.tell_of_skipped(norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        self.pending, self.losses = (), ()

    def utterances_of(self, step):
        """Name the utterances that this process was to read for a step of the loader."""
        indices = self.train_sampler.indices_of(step - 1)
        return [self.train_dataset.path_of(index) for index in indices]

    def tell_of_unread(self, unread):
        """Log files that could not be read; end the training if there were too many."""
        path = Path(self.hparams.output_folder, UNREAD)
        for rank, files in enumerate(gathered(list(unread))):
            for name, why in files:
                self.append(path, rank, utterance=name, why=" ".join(why.split()))
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

    def append(self, path, rank, **told):
        """Add a line to a file of the run's folder, and where it belongs."""
        if not if_main_process() or self.debug:
            # Two machines that write to one file lose lines.
            return
        epoch = self.hparams.epoch_counter.current
        place = {"epoch": epoch, "step": self.step, "rank": rank}
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(place | told)}\n")

    def keep_buffers(self):
        """Copy what a forward pass changes."""
        if not self.kept:
            buffers = [b for b in self.modules.buffers() if b.is_floating_point()]
            self.kept = tuple((b, torch.empty_like(b)) for b in buffers)
        if self.kept:
            now, copies = zip(*self.kept, strict=True)
            torch._foreach_copy_(copies, now)

    def give_back_buffers(self):
        """Undo what forward passes changed since ``keep_buffers``."""
        for buffer, copy in self.kept:
            buffer.copy_(copy)

    def tell_of_skipped(self, norm):
        """Log a skipped step; end the training if there were too many."""
        names = [name for step in self.pending for name in self.utterances_of(step)]
        epoch = self.hparams.epoch_counter.current
        file = Path(self.hparams.output_folder, SKIPPED)
        for rank, own in enumerate(gathered(names)):
            self.append(file, rank, gradient_norm=str(float(norm)), utterances=own)
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


def forget_after(path, position):
    """Drop lines of steps behind a position, which are taken again.

    Parameters
    ----------
    path : Path
        A file of lines that ``append`` wrote; it may not be there.
    position : tuple of int
        Epoch and step.
    """
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # Of epoch 0 is what a dry run told.
        kept = [line for line in lines if (1, 0) <= _place(line) <= position]
        write_whole(path, "".join(kept))


def _place(line):
    """Tell where a line belongs; one that a full disk cut short is behind all others."""
    try:
        told = json.loads(line)
        return told["epoch"], told["step"]
    except json.JSONDecodeError:
        return math.inf, 0
