"""Statistics pooling over time."""

from __future__ import annotations

import torch
from torch import Tensor

from speechbrain_rev.lobes.precision import autocast_off

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
        x = x.to(torch.promote_types(x.dtype, torch.float32)).flatten(1, 2)
        if mask is None:
            variance, mean = torch.var_mean(x, dim=2, correction=correction)
        else:
            keep = mask.to(x.dtype).flatten(1, 2)
            frames = keep.sum(2)
            mean = (x * keep).sum(2) / frames
            squares = ((x - mean.unsqueeze(2)) * keep).square().sum(2)
            variance = squares / (frames - correction).clamp_min(1)
        return mean, (variance + VARIANCE_FLOOR).sqrt()
