"""Batch normalisation, with or without ReLU, that can be run twice.

One layer serves every memory mode, so that all modes do the same arithmetic: the
statistics of a batch are measured once, kept (two numbers per channel), and the same
normalisation is applied with them in every run. It is no subclass of torch's
``_BatchNorm``, so that a conversion to ``SyncBatchNorm`` leaves it alone;
``sync=True`` makes it share the statistics between processes by itself, on any
backend: gathered once, in the first run, and their gradients summed in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from speechbrain_rev.compression.layers import Kind, layer_function
from speechbrain_rev.reversible import compiled
from speechbrain_rev.reversible.replay import (
    autocast_off,
    batch_statistics,
    refuse_transforms,
)

_REDUCED = (0, 2, 3)


class BatchNorm(nn.Module):
    """Batch normalisation over [batch, freq, time], then ReLU if asked for.

    Parameters
    ----------
    channels : int
        Number of channels.
    relu : bool
        Whether a ReLU follows; the two then share one output.
    sync : bool
        Whether statistics are taken over the batches of all processes.
    eps : float
        Added to the variance.
    momentum : float
        Weight of a new batch in the running statistics.

    Examples
    --------
    >>> norm = BatchNorm(4, relu=True)
    >>> norm(torch.randn(2, 4, 8, 10)).shape
    torch.Size([2, 4, 8, 10])
    """

    #: A first run writes to the buffers and does not read them, a second one does neither
    #: (see ``replay``); said of this very class, for a subclass may do otherwise.
    only_writes_once = True
    #: The compiler of the normalisation, as ``compile_pieces`` chose it.
    compiled_with: str | None = None

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    #: None in parts of a layer, of which the first counts.
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        relu: bool = False,
        sync: bool = False,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__()
        self.channels, self.relu, self.sync = channels, relu, sync
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def extra_repr(self) -> str:
        """Show what distinguishes this layer."""
        return f"{self.channels}, relu={self.relu}, sync={self.sync}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise.

        Parameters
        ----------
        x : torch.Tensor, [batch, channel, freq, time]
            Input.
        mask : torch.Tensor, [batch, 1, 1, time], or None
            1 for frames to keep, 0 for frames to set to zero and to leave out of the
            statistics.

        Returns
        -------
        torch.Tensor, [batch, channel, freq, time]
            Output, of the input's dtype.
        """
        if x.dim() != 4:
            raise ValueError(
                f"The input must be [batch, channel, freq, time], but is {list(x.shape)}."
            )
        if not self.training:
            y = F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias,
                eps=self.eps,
            )  # fmt: skip
            y = F.relu(y) if self.relu else y
            return y if mask is None else y * mask.to(y.dtype)
        refuse_transforms()
        if torch.compiler.is_compiling():
            # The compiler cannot know that the statistics' operation writes buffers.
            return torch.compiler.disable(self._normalise)(x, mask)
        return self._normalise(x, mask)

    def _normalise(self, x: Tensor, mask: Tensor | None) -> Tensor:
        statistics = batch_statistics(lambda: self._measure(x.detach(), mask))
        y = _normalised(x, self.weight, self.bias, statistics, mask, self)
        # Compiled, both are one pass over memory; else ReLU is autograd's own, which
        # frees the gradient that it is given before that of the normalisation begins.
        apart = self.relu and self.compiled_with is None
        return F.relu_(y) if apart else y

    @torch.no_grad()
    def _measure(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Measure mean and 1 / deviation, and update the running statistics.

        Where frames are masked or processes share the statistics, the number of
        values per channel comes third.
        """
        if x.numel() <= self.channels:
            raise ValueError(
                f"Batch statistics need more than one value per channel, but the input "
                f"has shape {list(x.shape)}. Use a larger batch or longer segments."
            )
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        before = self.running_mean.clone(), self.running_var.clone()
        statistics = self._measure_and_update(x, mask)
        # A batch that overflowed, in fp16 most likely, costs the step that the loss
        # scaler skips, and must not stay in the running statistics for good.
        finite = self.running_mean.isfinite() & self.running_var.isfinite()
        self.running_mean.copy_(self.running_mean.where(finite, before[0]))
        self.running_var.copy_(self.running_var.where(finite, before[1]))
        return statistics

    def _measure_and_update(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        if mask is None and self._processes() == 1:
            mean, variance = _update_statistics(
                x, self.running_mean, self.running_var, self.momentum
            )
            return mean, (variance + self.eps).sqrt().reciprocal()
        mean, variance, count = _moments(x, mask)
        if self._processes() > 1:
            mean, variance, count = self._merge(mean, variance, count)
        unbiased = variance * count / (count - 1).clamp_min(1)
        # A batch in which no frame counts says nothing; it must not spoil the rest.
        weight = self.momentum * (count > 0).to(self.running_mean.dtype)
        self.running_mean.lerp_(mean.to(weight.dtype), weight)
        self.running_var.lerp_(unbiased.to(weight.dtype), weight)
        dtype = torch.promote_types(x.dtype, torch.float32)
        inverse_std = (variance + self.eps).sqrt().reciprocal()
        return mean.to(dtype), inverse_std.to(dtype), count

    def _merge(
        self, mean: Tensor, variance: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Merge mean, variance and count of all processes."""
        local = torch.cat([mean, variance, count])
        gathered = [torch.empty_like(local) for _ in range(self._processes())]
        dist.all_gather(gathered, local)
        means, variances, counts = torch.stack(gathered).split(
            [self.channels, self.channels, 1], dim=1
        )
        count = counts.sum(0)
        some = count.clamp_min(1)
        mean = (means * counts).sum(0) / some
        spread = variances + (means - mean).square()
        return mean, (spread * counts).sum(0) / some, count

    def _processes(self) -> int:
        ready = self.sync and dist.is_available() and dist.is_initialized()
        return dist.get_world_size() if ready else 1


@layer_function(Kind.NORMALISATION)
def _normalised(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    y: Tensor = _Normalise.apply(x, weight, *others)
    return y


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation * weight + bias, ReLU if compiled, mask; saves its input.

    With ReLU in it the output is saved, too. It is the next convolution's input, which saves the
    same storage: what is held is what batch normalisation and ReLU hold in plain torch.
    """

    #: What is saved may be compressed.
    saves_layer_input = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        statistics: tuple[Tensor, ...],
        mask: Tensor | None,
        norm: BatchNorm,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        y = torch.empty_like(x)
        relu = norm.relu and norm.compiled_with is not None
        _run(norm.compiled_with, y, x, [weight, bias, *statistics[:2]], relu)
        if mask is not None:
            y.mul_(mask.to(y.dtype))
        ctx.statistics, ctx.mask, ctx.eps = statistics, mask, norm.eps
        ctx.processes = norm._processes()
        ctx.save_for_backward(x, weight, *([y] if relu else []))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        x, weight, *outputs = ctx.saved_tensors
        mean, inverse_std, *count = ctx.statistics
        if outputs:
            # The output is zero wherever ReLU or the mask cut it off.
            grad = torch.ops.aten.threshold_backward(grad, outputs[0], 0)
        if count:
            if torch.is_grad_enabled():
                if ctx.processes > 1:
                    raise RuntimeError(
                        "Statistics of several processes cannot be differentiated twice. "
                        "Use sync_batchnorm=False."
                    )
                grads = _differentiable(grad, x, weight, count[0], ctx.mask, ctx.eps)
            else:
                grads = _backward(
                    grad, x, weight, mean, inverse_std, count[0], ctx.mask,
                    ctx.processes,
                )  # fmt: skip
        else:
            grads = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, None, None, mean, inverse_std, True, ctx.eps,
                [True, True, True],
            )  # fmt: skip
        return *grads, None, None, None


#: Of what is normalised, and of the vectors: see ``compiled.by_channel``.
_AXES = ("rct1", "rct1", "c", "c", "c", "c")


def _run(
    backend: str | None, y: Tensor, x: Tensor, vectors: list[Tensor], relu: bool
) -> None:
    """Normalise, compiled if that was chosen and can be."""
    if backend is not None and compiled.can_be_compiled(x):
        rows, of_x = compiled.by_channel(y), compiled.by_channel(x)
        if rows is not None and of_x is not None and y.stride() == x.stride():
            given = [rows, of_x, *vectors]
            compiled.run(backend, _normalise, _AXES, given, relu=relu)
            return
    _normalise(y, x, *vectors, relu=relu)


def _normalise(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
    *,
    relu: bool,
) -> None:
    scale = weight * inverse_std
    shift = bias - mean * scale
    torch.addcmul(_per_channel(shift), x, _per_channel(scale), out=y)
    if relu:
        y.relu_()


@torch.library.custom_op(
    "speechbrain_rev::update_statistics",
    mutates_args=("running_mean", "running_var"),
)
def _update_statistics(
    x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and variance of a batch; torch's own operation has no form without data."""
    mean, variance = torch.ops.aten.batch_norm_update_stats(
        x, running_mean, running_var, momentum
    )
    return mean, variance


@_update_statistics.register_fake
def _(
    x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_var)


def _moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance [channel] and count [1] of the frames kept, in float64.

    One copy of the input lives at a time, as there will be of the output.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.shape[0] * x.shape[2] * x.shape[3]
    if mask is None:
        variance, mean = torch.var_mean(x.to(wide), _REDUCED, correction=0)
        count = torch.full((1,), values, dtype=torch.float64, device=x.device)
        return mean.double(), variance.double(), count
    count = mask.sum(dtype=torch.float64).view(1) * (values / mask.numel())
    some = count.clamp_min(1)
    kept = mask.to(x.dtype)
    mean = (x * kept).sum(_REDUCED, dtype=wide) / some
    centred = (x - _per_channel(mean.to(wide))).mul_(kept)
    return mean, centred.square_().sum(_REDUCED) / some, count


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
    count: Tensor,
    mask: Tensor | None,
    processes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients where statistics leave frames out or came from all processes.

    The difference to the mean is computed twice and the gradient is never masked, so
    that one copy of the input is all the place this takes.
    """
    grad, centre = grad.to(mean.dtype), _per_channel(mean)
    product = (x - centre).mul_(grad)
    if mask is None:
        total = grad.sum(_REDUCED)
    else:
        kept = mask.to(grad.dtype).expand(len(grad), 1, 1, -1).flatten(1)
        # A backward pass under autocast would round this product to half.
        with autocast_off(grad.device):
            total = (grad.flatten(1, 2) @ kept.unsqueeze(2)).view(grad.shape[:3])
        total = total.sum((0, 2))
        product.mul_(mask)
    sums = torch.stack([total, product.sum(_REDUCED)])
    del product
    grad_bias, grad_weight = sums[0], sums[1] * inverse_std
    if processes > 1:
        sums = sums.clone()
        dist.all_reduce(sums)
    mean_grad, mean_product = (sums / count.clamp_min(1)).to(mean.dtype)
    slope = _per_channel(mean_product * inverse_std.square())
    grad_x = (x - centre).mul_(slope).neg_().add_(grad).sub_(_per_channel(mean_grad))
    grad_x.mul_(_per_channel(weight * inverse_std))
    if mask is not None:
        grad_x.mul_(mask)
    return grad_x.to(x.dtype), grad_weight, grad_bias


def _differentiable(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    count: Tensor,
    mask: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as a function of the input, to differentiate twice."""
    wide = torch.promote_types(x.dtype, torch.float32)
    kept = (
        torch.ones((), dtype=wide, device=x.device) if mask is None else mask.to(wide)
    )
    grad, values, some = grad.to(wide), x.to(wide), count.clamp_min(1).to(wide)
    mean = (values * kept).sum(_REDUCED) / some
    centred = (values - _per_channel(mean)) * kept
    inverse_std = (centred.square().sum(_REDUCED) / some + eps).rsqrt()
    total, product = (grad * kept).sum(_REDUCED), (grad * centred).sum(_REDUCED)
    slope = _per_channel(product * inverse_std.square() / some)
    grad_x = (grad - _per_channel(total / some) - centred * slope) * kept
    grad_x = grad_x * _per_channel(weight * inverse_std)
    return grad_x.to(x.dtype), product * inverse_std, total


def _per_channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)
