"""Statistics pooling over time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.reversible.autocast import autocast_off

#: Added to the variance, so that the root has a gradient where nothing varies.
VARIANCE_FLOOR = 1e-7

#: How many degrees of freedom the variance gives up for the mean.
CORRECTIONS = {"population": 0, "unbiased": 1}


def statistics_pooling(
    x: Tensor, mask: Tensor | None, *, correction: int
) -> tuple[Tensor, Tensor]:
    """Pool over time: the mean and the deviation of each channel and frequency.

    Parameters
    ----------
    x : torch.Tensor, [batch, channel, freq, time]
        Feature maps, zero where masked.
    mask : torch.Tensor, [batch, 1, 1, time], or None
        1 for the frames that count.
    correction : int
        0 for the population's variance, 1 for the unbiased estimate.

    Returns
    -------
    tuple of torch.Tensor, [batch, channel * freq]
        Means and sqrt(variance + 1e-7), in float32 at least.

    Examples
    --------
    >>> mean, std = statistics_pooling(torch.ones(2, 3, 4, 5), None, correction=0)
    >>> mean.shape, std.shape
    (torch.Size([2, 12]), torch.Size([2, 12]))
    """
    with autocast_off(x.device):
        return statistics_of(x, mask, correction=correction)


def statistics_of(
    x: Tensor, mask: Tensor | None, *, correction: int
) -> tuple[Tensor, Tensor]:
    """Pool as ``statistics_pooling`` does, where there is no autocast.

    Parameters
    ----------
    x : torch.Tensor, [batch, channel, freq, time]
        Feature maps, zero where masked.
    mask : torch.Tensor, [batch, 1, 1, time], or None
        1 for the frames that count.
    correction : int
        0 for the population's variance, 1 for the unbiased estimate.

    Returns
    -------
    tuple of torch.Tensor, [batch, channel * freq]
        Means and sqrt(variance + 1e-7), in float32 at least.

    Examples
    --------
    >>> mask = torch.tensor([1.0, 1.0, 0.0]).reshape(1, 1, 1, 3)
    >>> x = torch.tensor([1.0, 3.0, 0.0]).reshape(1, 1, 1, 3)
    >>> mean, std = statistics_of(x, mask, correction=0)
    >>> round(mean.item(), 3), round(std.item(), 3)
    (2.0, 1.0)
    """
    x = (x.float() if x.dtype.itemsize < 4 else x).flatten(1, 2)
    if mask is None:
        variance, mean = torch.var_mean(x, dim=2, correction=correction)
    else:
        keep = mask.to(x.dtype).flatten(1, 2)
        # Without a graph, and where one is exported, it is plain torch.
        masked = _MaskedVarMean.apply if x.requires_grad else _masked_var_mean
        variance, mean = masked(x, keep, correction)
    return mean, (variance + VARIANCE_FLOOR).sqrt()


def _masked_var_mean(x: Tensor, keep: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    frames, freedom = _frames_and_freedom(keep, correction)
    mean = (x * keep).sum(2) / frames
    centred = (x - mean.unsqueeze(2)).mul_(keep)
    return centred.square_().sum(2) / freedom, mean


def _frames_and_freedom(keep: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    frames = keep.sum(2)
    return frames, (frames - correction).clamp_min(1)


class _MaskedVarMean(torch.autograd.Function):
    """Variance and mean of the frames kept; saves its input alone, as torch's does."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, keep: Tensor, correction: int
    ) -> tuple[Tensor, Tensor]:
        variance, mean = _masked_var_mean(x, keep, correction)
        ctx.save_for_backward(x, keep, mean)
        ctx.correction = correction
        return variance, mean

    @staticmethod
    def backward(
        ctx: Any, grad_variance: Tensor, grad_mean: Tensor
    ) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Pooling with lengths cannot be differentiated twice. Give no lengths."
            )
        x, keep, mean = ctx.saved_tensors
        frames, freedom = _frames_and_freedom(keep, ctx.correction)
        slope = (2 * grad_variance / freedom).unsqueeze(2)
        grad = (x - mean.unsqueeze(2)).mul_(slope)
        grad.add_((grad_mean / frames).unsqueeze(2)).mul_(keep)
        return grad, None, None
