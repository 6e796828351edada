"""Learning rate and margin as functions of the training step."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)

from speechbrain_rev.data.seeding import read_step, write_step
from speechbrain_rev.lobes.classifier import MarginSoftmax

# Where the exponential rise of the margin would end if it were not scaled to end
# at 1: the share of the margin that is missing at its last step (WeSpeaker's value).
_MARGIN_REMAINDER = 1e-3


@register_checkpoint_hooks
class SpeakerSchedule:
    """Learning rate and AAM margin of WeSpeaker's VoxCeleb recipe, per step.

    The rate rises linearly over `warmup_epochs` to `lr`, then falls exponentially to
    `final_lr` at the last step; both are for a batch of 64 and scale with the batch
    size. The margin is 0 until `margin_start_epoch` begins, and rises to `margin`,
    quickly first, until `margin_end_epoch` begins. Epochs count from 1; equal
    epochs fix the margin from the first step on.

    It is called as SpeechBrain's `lr_annealing`: `on_batch_end` at each step, the
    object itself at the end of each epoch; and it saves its position. A step that the
    loss scaler of fp16 skips counts like any other: its batch has been used, and the
    schedule ends with the last epoch.

    Parameters
    ----------
    lr, final_lr : float
        Learning rates after the warm-up and at the end, for a batch of 64.
    encoder_lr : float or None
        Learning rate of the first parameter group, the encoder's. At every step its rate
        is ``encoder_lr`` / ``lr`` of the others'. None: the same rate.
    number_of_epochs : int
        Length of the training.
    warmup_epochs : float
        Length of the warm-up; 0 for none.
    steps_per_epoch : int or None
        Batches per epoch. None is refused at the first step.
    batch_size : int
        Utterances per step, over all devices.
    loss : MarginSoftmax, optional
        The loss whose margin is scheduled; without it only the rate is. SpeechBrain's
        own compute with the margin that they were built with, and are refused.
    margin : float
        The margin in the end.
    margin_start_epoch, margin_end_epoch : int
        The epochs between which the margin rises.

    Example
    -------
    >>> from speechbrain_rev.lobes.classifier import AAMSoftmax
    >>> loss = AAMSoftmax()
    >>> schedule = SpeakerSchedule(
    ...     lr=0.1, final_lr=0.001, number_of_epochs=4, warmup_epochs=2,
    ...     steps_per_epoch=5, loss=loss, margin_start_epoch=2, margin_end_epoch=3,
    ... )
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> for step in range(10):
    ...     schedule.on_batch_end(optimizer)
    >>> print(f"{schedule.current_lr:.3f} {loss.margin:.3f}")
    0.100 0.200
    """

    def __init__(
        self,
        *,
        lr: float,
        final_lr: float,
        number_of_epochs: int,
        warmup_epochs: float = 6,
        steps_per_epoch: int | None = None,
        batch_size: int = 64,
        loss: MarginSoftmax | None = None,
        margin: float = 0.2,
        margin_start_epoch: int = 0,
        margin_end_epoch: int = 0,
        encoder_lr: float | None = None,
    ) -> None:
        if loss is not None and not isinstance(loss, MarginSoftmax):
            raise ValueError(
                f"The margin of {type(loss).__name__} cannot be scheduled. Give the "
                "speechbrain_rev.lobes.classifier.AAMSoftmax that computes the loss, or "
                "no loss, which leaves margins alone."
            )
        if lr <= 0 or final_lr <= 0:
            raise ValueError(
                f"lr ({lr}) and final_lr ({final_lr}) must be above 0: the rate falls "
                "exponentially from one to the other."
            )
        if not 0 <= warmup_epochs < number_of_epochs:
            raise ValueError(
                f"warmup_epochs ({warmup_epochs}) must be at least 0 and less than "
                f"number_of_epochs ({number_of_epochs}). For a short run give "
                "warmup_epochs: 0."
            )
        if margin_end_epoch < margin_start_epoch:
            raise ValueError(
                f"margin_end_epoch ({margin_end_epoch}) lies before "
                f"margin_start_epoch ({margin_start_epoch}). Give a later epoch, or "
                "equal ones for a fixed margin."
            )
        self.lr = lr
        self.final_lr = final_lr
        self.encoder_ratio = 1.0 if encoder_lr is None else encoder_lr / lr
        self.number_of_epochs = number_of_epochs
        self.warmup_epochs = warmup_epochs
        self.steps_per_epoch = steps_per_epoch
        self.batch_size = batch_size
        self.loss = loss
        self.margin = margin
        self.margin_start_epoch = margin_start_epoch
        self.margin_end_epoch = margin_end_epoch
        self.step = 0
        self._has_warned = False
        self._apply_margin()

    def learning_rate(self, step: int) -> float:
        """Rate of a step, counted from 0."""
        epochs = self._epochs(step)
        scale = self.batch_size / 64
        if epochs < self.warmup_epochs:
            # The first step would be lost at a rate of 0.
            return scale * self.lr * self._epochs(step + 1) / self.warmup_epochs
        decaying_epochs = self.number_of_epochs - self.warmup_epochs
        progress = min(1.0, (epochs - self.warmup_epochs) / decaying_epochs)
        return scale * self.lr * (self.final_lr / self.lr) ** progress

    def margin_at(self, step: int) -> float:
        """Margin of a step, counted from 0."""
        if self.margin_start_epoch == self.margin_end_epoch:
            return self.margin
        rising_epochs = self.margin_end_epoch - self.margin_start_epoch
        progress = (self._epochs(step) + 1 - self.margin_start_epoch) / rising_epochs
        if progress <= 0:
            return 0.0
        if progress >= 1:
            return self.margin
        return self.margin * (1.0 - math.exp(progress * math.log(_MARGIN_REMAINDER)))

    def in_words(self) -> str:
        """Say what the schedule does with the margin and the rate.

        Returns
        -------
        str
            Two sentences, or one where no margin is scheduled.

        Examples
        --------
        >>> from speechbrain_rev.lobes.classifier import AAMSoftmax
        >>> SpeakerSchedule(
        ...     lr=0.1, final_lr=0.001, number_of_epochs=14, warmup_epochs=1,
        ...     loss=AAMSoftmax(), margin_start_epoch=20, margin_end_epoch=40,
        ... ).in_words()
        'Learning rate: up to 0.1 in the first epoch, then down to 0.001 at the end of
        epoch 14. Margin: 0 throughout, since it would rise from epoch 20 on, and this run
        ends at 14.'
        """
        scale, last = self.batch_size / 64, self.number_of_epochs
        warm_up = (
            f"{self.warmup_epochs:g} epochs" if self.warmup_epochs != 1 else "epoch"
        )
        up = f"up to {scale * self.lr:.3g} in the first {warm_up}, then"
        rate = (
            f"Learning rate: {up if self.warmup_epochs else f'from {scale * self.lr:.3g}'} "
            f"down to {scale * self.final_lr:.3g} at the end of epoch {last}."
        )
        if self.encoder_ratio != 1:
            rate += f" The encoder's is {self.encoder_ratio:.3g} times that."
        if self.loss is None:
            return rate
        start, end = self.margin_start_epoch, self.margin_end_epoch
        rising = f"from {f'epoch {start}' if start > 1 else 'the first step'} on"
        # Epochs count from 1: a margin that is full at epoch 1 is full in all.
        if end == start or end <= 1:
            margin = f"{self.margin} from the first step on"
        elif start > last:
            margin = (
                f"0 throughout, since it would rise from epoch {start} on, and this run "
                f"ends at {last}"
            )
        elif end > last:
            margin = (
                f"rises {rising}, but this run ends at {last}, before it is "
                f"{self.margin} at epoch {end}"
            )
        else:
            margin = f"rises {rising}, {self.margin} from epoch {end} on"
        return f"{rate} Margin: {margin}."

    @property
    def current_lr(self) -> float:
        """Rate of the last step taken."""
        return self.learning_rate(max(0, self.step - 1))

    def on_batch_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the rate of the step about to be taken and the margin of the next loss.

        SpeechBrain calls this between the loss and the optimizer's step.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its groups of parameters get the rate.
        """
        lr = self.learning_rate(self.step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if len(optimizer.param_groups) > 1:
            optimizer.param_groups[0]["lr"] = lr * self.encoder_ratio
        self.step += 1
        self._apply_margin()

    def __call__(self, epoch: int) -> tuple[float, float]:
        """Rates before and after the end of an epoch, as SpeechBrain asks for them.

        Parameters
        ----------
        epoch : int
            The epoch that ends, from 1. The position is counted in steps all the same.

        Returns
        -------
        tuple of float
            The rate of the last step and of the next.

        Warns
        -----
        UserWarning
            Once, if so many epochs are not as many steps as were taken.
        """
        if self.steps_per_epoch and not self._has_warned:
            self._compare_with(epoch * self.steps_per_epoch)
        return self.current_lr, self.learning_rate(self.step)

    def _compare_with(self, expected: int) -> None:
        if self.step != expected:
            self._has_warned = True
            warnings.warn(
                f"The schedule has taken {self.step} steps, but with steps_per_epoch: "
                f"{self.steps_per_epoch} an epoch ends at step {expected}. Give the number "
                "of batches of an epoch; if this run was resumed, put lr_annealing among "
                "the checkpointer's recoverables, which keep its position.",
                stacklevel=3,
            )

    def _epochs(self, step: int) -> float:
        if not self.steps_per_epoch:
            raise ValueError(
                "SpeakerSchedule needs steps_per_epoch, which is not set. Give the "
                "number of batches that the training loader of one process makes in an "
                "epoch: utterances / batch_size, rounded up unless it drops the last."
            )
        return step / self.steps_per_epoch

    def _apply_margin(self) -> None:
        if self.loss is not None and self.steps_per_epoch:
            self.loss.margin = self.margin_at(self.step)

    @mark_as_saver
    def _save(self, path: str | Path) -> None:
        write_step(path, self.step, self.steps_per_epoch)

    @mark_as_loader
    def _load(self, path: str | Path, end_of_epoch: bool) -> None:
        del end_of_epoch
        kept = "position of a SpeakerSchedule"
        self.step = read_step(path, kept, "lr_annealing", self.steps_per_epoch)
        self._apply_margin()
