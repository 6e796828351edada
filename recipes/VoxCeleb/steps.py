"""Steps that outlive bad data: gradients that are not finite, files that cannot be read."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import speechbrain as sb
import torch
from speechbrain.utils.distributed import get_rank
from training_log import Tally

from speechbrain_rev.speech import ChunkDataset, EpochBatchSampler

SKIPPED = "skipped.jsonl"
UNREAD = "unread.txt"
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
    """

    train_sampler: EpochBatchSampler
    train_dataset: ChunkDataset
    #: What is counted in an epoch.
    tally: Tally
    #: Steps of the loader since the last one of the optimizer, from 1.
    pending: tuple[int, ...] = ()
    #: Whether the loss of one of them was not finite.
    bad_loss: bool = False
    #: Buffers of modules as they were before, and their copies.
    kept: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def fit_batch(self, batch):
        """Take the gradient of a batch, and perhaps a step."""
        if not self.pending:
            self.keep_buffers()
        self.pending = (*self.pending, self.step)
        if batch.unread:
            self.tell_of_unread(batch.unread)
        return super().fit_batch(batch)

    def check_loss_isfinite(self, loss):
        """Remember it: the gradient decides, which is that of all processes."""
        self.bad_loss |= not bool(loss.isfinite())

    def _should_save_intra_epoch_ckpt(self, *args):
        # Gradients that are added up are in no checkpoint.
        return not self.pending and super()._should_save_intra_epoch_ckpt(*args)

    def end_of_steps(self):
        """Forget batches behind the last step of an epoch, whose gradients are dropped."""
        if self.pending and not all(bool(b.isfinite().all()) for b, _ in self.kept):
            self.give_back_buffers()
            self.tally.skipped += 1
            self.tell_of_skipped(torch.tensor(math.nan))
        self.pending, self.bad_loss = (), False

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
            if not scaled or self.bad_loss or now < LEAST_SCALE:
                self.tell_of_skipped(norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        self.pending, self.bad_loss = (), False

    def utterances_of(self, step):
        """Name the utterances that this process was to read for a step of the loader."""
        indices = self.train_sampler.indices_of(step - 1)
        return [self.train_dataset.path_of(index) for index in indices]

    def tell_of_unread(self, unread):
        """Log files that could not be read; end the training if there were too many."""
        path = Path(self.hparams.output_folder, UNREAD)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(
                f"{name}\t{' '.join(why.split())}\n" for name, why in unread
            )
        logger.warning(
            f"{len(unread)} of a batch's files could not be read and others are in their "
            f"place; the first: {unread[0][1]}. All are listed in {path}."
        )
        self.tally.unread += len(unread)
        count, most = self.tally.unread, self.hparams.max_unread
        if count > most:
            raise ValueError(
                f"{count} files of epoch {self.hparams.epoch_counter.current} could not "
                f"be read, more than max_unread: {most}. They are listed in {path}. Bring "
                "them back or raise max_unread; the same command goes on from the last "
                "checkpoint."
            )

    def keep_buffers(self):
        """Copy what a forward pass changes."""
        if not self.kept:
            buffers = [b for b in self.modules.buffers() if b.is_floating_point()]
            self.kept = tuple((b, torch.empty_like(b)) for b in buffers)
        for buffer, copy in self.kept:
            copy.copy_(buffer)

    def give_back_buffers(self):
        """Undo what forward passes changed since ``keep_buffers``."""
        for buffer, copy in self.kept:
            buffer.copy_(copy)

    def tell_of_skipped(self, norm):
        """Log a skipped step; end the training if there were too many."""
        names = [name for step in self.pending for name in self.utterances_of(step)]
        epoch = self.hparams.epoch_counter.current
        file = Path(self.hparams.output_folder, SKIPPED)
        line = {"epoch": epoch, "step": self.step, "gradient_norm": str(float(norm))}
        with file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line | {"rank": get_rank() or 0, "utterances": names}))
            log.write("\n")
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
