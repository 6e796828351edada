"""Pooling over time, and the embedding that is made of it."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.heads import CORRECTIONS, POOLINGS
from speechbrain_rev.kernels.fixed_point import format_of
from speechbrain_rev.reversible.replay import autocast_off

#: Added to the variance, so that the root has a gradient where nothing varies.
VARIANCE_FLOOR = 1e-7
# Values between the two layers of an attention.
_HIDDEN = 128


class Pooling(nn.Module, abc.ABC):
    """What makes one vector of an utterance's feature maps.

    It is made with ``rows``, the channels of all maps times their frequencies, and the
    variance that was asked for. To add one, write its ``pool`` and give it a row of
    ``speechbrain_rev.heads.POOLINGS``.
    """

    def __init__(self, rows: int, *, variance: str) -> None:
        super().__init__()
        self.variance = variance

    def forward(self, mask: Tensor | None, *parts: Tensor) -> Tensor:
        """Pool in float32, whatever autocast says.

        Parameters
        ----------
        mask : torch.Tensor, [batch, 1, 1, time], or None
            1 for the frames that count.
        *parts : torch.Tensor, [batch, channel, freq, time]
            Feature maps of some channels each, zero where masked: streams, or all of them.

        Returns
        -------
        torch.Tensor, [batch, statistics * rows]
            Statistics, in float32 at least.
        """
        with autocast_off(parts[0].device):
            return self.pool(mask, *parts)

    @abc.abstractmethod
    def pool(self, mask: Tensor | None, *parts: Tensor) -> Tensor:
        """Pool where there is no autocast, in operations that can be exported."""


class StatisticsPooling(Pooling):
    """Mean and deviation over time of each channel and frequency.

    Parameters
    ----------
    rows : int
        Channels times frequencies.
    variance : {"population", "unbiased"}
        Which variance the deviation is the root of.

    Examples
    --------
    >>> pooling = StatisticsPooling(12, variance="population")
    >>> pooling(None, torch.ones(2, 3, 4, 5)).shape
    torch.Size([2, 24])
    """

    def pool(self, mask: Tensor | None, *parts: Tensor) -> Tensor:
        """Give the means of all parts, then their deviations."""
        correction = CORRECTIONS[self.variance]
        pooled = [mean_and_deviation(x, mask, correction=correction) for x in parts]
        return torch.cat([p for kind in zip(*pooled, strict=True) for p in kind], 1)


class AttentiveStatisticsPooling(Pooling):
    """Mean and deviation over time, weighted by an attention for each channel and frequency.

    Okabe et al. 2018, "Attentive Statistics Pooling for Deep Speaker Embedding", equations 5
    to 7, with an attention of its own for each row as in ECAPA-TDNN and WeSpeaker's ASTP:
    two layers of 128 hidden values, tanh between them, and a softmax over time.

    Parameters
    ----------
    rows : int
        Channels times frequencies.
    variance : {"population"}
        The weighted variance has no other estimate.

    Examples
    --------
    >>> pooling = AttentiveStatisticsPooling(12, variance="population")
    >>> pooling(None, torch.ones(2, 3, 4, 5)).shape
    torch.Size([2, 24])
    """

    def __init__(self, rows: int, *, variance: str) -> None:
        super().__init__(rows, variance=variance)
        self.hidden = nn.Conv1d(rows, _HIDDEN, 1)
        self.attention = nn.Conv1d(_HIDDEN, rows, 1)

    def pool(self, mask: Tensor | None, *parts: Tensor) -> Tensor:
        """Give the weighted means of all parts, then their deviations."""
        x = torch.cat([part.flatten(1, 2) for part in parts], 1)  # [batch, rows, time]
        x = x.to(self.hidden.weight.dtype)
        scores = self.attention(torch.tanh(self.hidden(x)))
        if mask is not None:
            scores = scores.masked_fill(mask.flatten(1, 2) == 0, -torch.inf)
        weight = scores.softmax(dim=2)
        mean = (weight * x).sum(2)
        variance = (weight * (x - mean.unsqueeze(2)).square()).sum(2)
        return torch.cat([mean, (variance + VARIANCE_FLOOR).sqrt()], 1)


def build_pooling(name: str, rows: int, *, variance: str) -> Pooling:
    """Make a pooling by its name.

    Parameters
    ----------
    name : str
        A row of ``speechbrain_rev.heads.POOLINGS``.
    rows : int
        Channels times frequencies.
    variance : {"population", "unbiased"}
        Which variance the deviation is the root of.

    Raises
    ------
    ValueError
        If there is no such pooling, or it has no such variance.

    Examples
    --------
    >>> build_pooling("statistics", 12, variance="unbiased")
    StatisticsPooling()
    """
    if name not in POOLINGS:
        raise ValueError(
            f"pooling must be one of {', '.join(POOLINGS)}, but is {name!r}."
        )
    row = POOLINGS[name]
    if variance not in row.variances:
        raise ValueError(
            f"pooling_variance must be one of {', '.join(row.variances)} with pooling "
            f"{name}, but is {variance!r}."
        )
    pooling: Pooling = row.made(rows, variance=variance)
    return pooling


def mean_and_deviation(
    x: Tensor, mask: Tensor | None, *, correction: int
) -> tuple[Tensor, Tensor]:
    """Take the mean over time and the deviation of each channel and frequency.

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
    >>> mean, std = mean_and_deviation(x, mask, correction=0)
    >>> round(mean.item(), 3), round(std.item(), 3)
    (2.0, 1.0)
    """
    x = x.float() if x.dtype.itemsize < 4 else x
    # Flattened they would be copied, and so would the gradient, into another layout.
    last = x.requires_grad and format_of(x) is torch.channels_last
    x = x.permute(0, 2, 3, 1) if last else x.flatten(1, 2)
    if mask is None:
        variance, mean = torch.var_mean(x, dim=2, correction=correction)
    else:
        keep = mask.to(x.dtype)
        keep = keep.permute(0, 2, 3, 1) if last else keep.flatten(1, 2)
        # Without a graph, and where one is exported, it is plain torch.
        masked = _MaskedVarMean.apply if x.requires_grad else _masked_var_mean
        variance, mean = masked(x, keep, correction)
    if last:
        mean, variance = (y.transpose(1, 2).flatten(1) for y in (mean, variance))
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

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, keep: Tensor, correction: int) -> tuple[Tensor, Tensor]:
        return _masked_var_mean(x, keep, correction)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        x, keep, ctx.correction = inputs
        ctx.save_for_backward(x, keep, output[1])

    @staticmethod
    def backward(
        ctx: Any, grad_variance: Tensor | None, grad_mean: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        if grad_variance is None and grad_mean is None:
            return None, None, None
        x, keep, mean = ctx.saved_tensors
        frames, freedom = _frames_and_freedom(keep, ctx.correction)
        if grad_variance is None:
            grad_variance = torch.zeros_like(mean)
        if grad_mean is None:
            grad_mean = torch.zeros_like(mean)
        slope = (2 * grad_variance / freedom).unsqueeze(2)
        shift = (grad_mean / frames).unsqueeze(2)
        grad = x - mean.unsqueeze(2)
        if torch.is_grad_enabled():  # to differentiate twice
            return (grad * slope + shift) * keep, None, None
        return grad.mul_(slope).add_(shift).mul_(keep), None, None


def embedded(
    fc: nn.Module, pooled: Tensor, dtype: torch.dtype, *, training: bool = False
) -> Tensor:
    """Map pooled statistics to embeddings, by a linear layer or what stands in its place.

    Parameters
    ----------
    fc : nn.Module
        The last layer: linear, quantized, wrapped by adapters, or another one.
    pooled : torch.Tensor, [batch, statistics]
        Means and deviations.
    dtype : torch.dtype
        Of the network's input, which a layer without floating-point parameters takes.
    training : bool
        Whether the network is in training.

    Returns
    -------
    torch.Tensor, [batch, 1, embedding_dim]
        Embeddings.

    Raises
    ------
    ValueError
        If the layer does not give one vector for each utterance.
    RuntimeError
        If it is quantized and trains.

    Examples
    --------
    >>> embedded(nn.Identity(), torch.ones(2, 6), torch.float32).shape
    torch.Size([2, 1, 6])
    """
    if is_quantized(fc):
        if training and pooled.requires_grad:
            raise RuntimeError(
                "The last layer, fc, is quantized and has no gradient. Call eval(), or "
                "train the network as it was and quantize afterwards."
            )
        # Autograd would take whatever is in memory for its gradient.
        pooled = pooled.detach()
    floating = (p.dtype for p in fc.parameters() if p.is_floating_point())
    y = fc(pooled.to(next(floating, dtype)))
    if not isinstance(y, Tensor) or y.dim() != 2 or y.shape[0] != pooled.shape[0]:
        given = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"The last layer, fc ({type(fc).__name__}), turned statistics of shape "
            f"{list(pooled.shape)} into {given}. It must give one vector for each "
            "utterance, [batch, embedding_dim]."
        )
    return y.unsqueeze(1)


def is_quantized(module: nn.Module) -> bool:
    """Whether a module has layers of torch that work on whole numbers.

    Examples
    --------
    >>> is_quantized(nn.Linear(2, 2))
    False
    """
    return any(
        type(m).__module__.startswith("torch.ao.nn.")
        and "quantized" in type(m).__module__
        for m in module.modules()
    )
