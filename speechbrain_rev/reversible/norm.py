"""Batch normalisation, with or without ReLU, that can be run twice.

One layer serves every memory mode, so that all modes do the same arithmetic: the
statistics of a batch are measured once, kept (two numbers per channel), and the same
normalisation is applied with them in every run. It is no subclass of torch's
``_BatchNorm``, so that a conversion to ``SyncBatchNorm`` leaves it alone;
``sync=True`` makes it share the statistics between processes by itself, on any
backend: gathered once, in the first run, and their gradients summed in the backward.

Running statistics are updated at the end of a network's forward pass, those of all its
layers in few operations, and only if each value is finite: a batch that overflowed, in fp16
most likely, costs the step that the loss scaler skips, and must not stay in them for good.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from speechbrain_rev.compression.activations import is_compressing
from speechbrain_rev.compression.layers import Kind, layer_function
from speechbrain_rev.kernels import norm as kernels
from speechbrain_rev.kernels.fixed_point import format_of
from speechbrain_rev.reversible.replay import (
    autocast_off,
    batch_statistics,
    refuse_transforms,
)
from speechbrain_rev.torch_private import is_fake, storage_key

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
        fused = self._is_fused(x, mask)
        if not fused and format_of(x) is torch.channels_last:
            # Of some channels of a map torch's kernels are slow.
            x = x.contiguous(memory_format=torch.channels_last)
        statistics = batch_statistics(lambda: self._measure(x.detach(), mask))
        y = normalised(x, self.weight, self.bias, statistics, mask, self, fused)
        # In a kernel both are one pass over memory; else ReLU is autograd's own, which frees
        # the gradient that it is given before that of the normalisation begins.
        apart = self.relu and not fused
        return F.relu_(y) if apart else y

    def _is_fused(self, x: Tensor, mask: Tensor | None) -> bool:
        """Whether a kernel normalises: in all runs of one input or in none."""
        return (
            mask is None
            and self._processes() == 1
            and _has_kernels(x)
            and self.weight.dtype is self.bias.dtype is torch.float32
            and kernels.step_of(x) is not None
        )

    @torch.no_grad()
    def _measure(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Measure mean and 1 / deviation, for the running statistics too.

        Where frames are masked or processes share the statistics, the number of
        values per channel comes third.
        """
        values = x.numel() // self.channels
        if values <= 1:
            raise ValueError(
                f"Batch statistics need more than one value per channel, but the input "
                f"has shape {list(x.shape)}. Use a larger batch or longer segments."
            )
        if mask is None and self._processes() == 1:
            mean, variance = _moments_of_all(x)
            _update(_Update(self, mean, variance, values / (values - 1)))
            return mean, (variance + self.eps).rsqrt_()
        mean, variance, count = _moments(x, mask)
        if self._processes() > 1:
            mean, variance, count = self._merge(mean, variance, count)
        unbiased = variance * count / (count - 1).clamp_min(1)
        _update(_Update(self, mean, unbiased, 1.0, count))
        dtype = torch.promote_types(x.dtype, torch.float32)
        inverse_std = (variance + self.eps).rsqrt_()
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


@dataclass(frozen=True)
class _Update:
    """What a batch adds to the running statistics of a layer.

    Attributes
    ----------
    norm : BatchNorm
        The layer.
    mean, variance : torch.Tensor, [channel]
        Of the batch.
    factor : float
        What the variance is multiplied by to be unbiased.
    count : torch.Tensor, [1], or None
        Values per channel: a batch in which no frame counts adds nothing.
    """

    norm: BatchNorm
    mean: Tensor
    variance: Tensor
    factor: float
    count: Tensor | None = None


class RunningStatistics:
    """Updates of running statistics that wait for the end of a forward pass."""

    def __init__(self) -> None:
        #: A layer that is called again has its next update in the next round.
        self._rounds: list[dict[tuple[Any, ...], _Update]] = []
        self._validities: list[Tensor] = []

    def add(self, update: _Update) -> None:
        """Let an update wait; those of one layer are made in the order of its calls."""
        buffer = update.norm.running_mean
        place = storage_key(buffer), buffer.storage_offset()
        for waiting in self._rounds:
            if place not in waiting:
                waiting[place] = update
                return
        self._rounds.append({place: update})

    def require(self, validity: Tensor | None) -> None:
        """Make no update if this, [], is NaN at the end."""
        if validity is not None:
            self._validities.append(validity)

    @torch.no_grad()
    def apply(self) -> None:
        """Make all updates if everything is finite, else none, without waiting for it."""
        for waiting in self._rounds:
            groups: dict[tuple[Any, ...], list[_Update]] = defaultdict(list)
            for update in waiting.values():
                buffer = update.norm.running_mean
                key = buffer.device, buffer.dtype, update.norm.momentum
                groups[key].append(update)
            batches = [(key, _flat(updates)) for key, updates in groups.items()]
            checked = [*(values for _, values in batches), *self._validities]
            devices = {values.device for values in checked}
            if len(devices) == 1:
                checked = [torch.cat([x.flatten() for x in checked])]
            flags = [x.isfinite().all() for x in checked]
            for (key, values), updates in zip(batches, groups.values(), strict=True):
                here = [flag.to(values.device) for flag in flags]
                fine = here[0] if len(here) == 1 else torch.stack(here).all()
                _apply(updates, values, fine, momentum=key[2])


def _flat(updates: Sequence[_Update]) -> Tensor:
    """Put means, then unbiased variances, of layers of one kind into one tensor."""
    factors = [u.factor for u in updates]
    variances = torch._foreach_mul([u.variance for u in updates], factors)
    values = torch.cat([*(u.mean for u in updates), *variances])
    return values.to(updates[0].norm.running_mean.dtype)


def _apply(
    updates: Sequence[_Update], values: Tensor, fine: Tensor, *, momentum: float
) -> None:
    means = [u.norm.running_mean for u in updates]
    running = [*means, *(u.norm.running_var for u in updates)]
    sizes = [len(buffer) for buffer in running]
    before = torch.cat(running)
    weight: float | Tensor = momentum
    if any(u.count is not None for u in updates):
        # A batch in which no frame counts says nothing; it must not spoil the rest.
        one = values.new_ones(1)
        some = [
            one if u.count is None else (u.count > 0).to(one.dtype) for u in updates
        ]
        each = [w.expand(n) for w, n in zip(some * 2, sizes, strict=True)]
        weight = torch.cat(each).mul_(momentum)
    after = torch.where(fine, before.lerp(values, weight), before)
    torch._foreach_copy_(running, after.split(sizes))
    # Of a layer in parts the first one counts.
    tracked = [u.norm.num_batches_tracked for u in updates]
    counters = [count for count in tracked if count is not None]
    if counters:
        torch._foreach_add_(counters, 1)


class _Scope(threading.local):
    """The forward pass under way in this thread."""

    statistics: RunningStatistics | None = None


_scope = _Scope()


@contextlib.contextmanager
def updated_together() -> Iterator[RunningStatistics]:
    """Let updates of running statistics wait for the end of a network's forward pass.

    Yields
    ------
    RunningStatistics
        That of the outermost forward pass. If that raises, no update is made.

    Examples
    --------
    >>> norm = BatchNorm(4)
    >>> with updated_together():
    ...     y = norm(torch.randn(2, 4, 8, 10))
    ...     int(norm.num_batches_tracked)
    0
    >>> int(norm.num_batches_tracked)
    1
    """
    if _scope.statistics is not None:
        yield _scope.statistics
        return
    _scope.statistics = statistics = RunningStatistics()
    try:
        yield statistics
    finally:
        _scope.statistics = None
    statistics.apply()


def _update(update: _Update) -> None:
    with updated_together() as statistics:
        statistics.add(update)


@layer_function(Kind.NORMALISATION)
def normalised(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """Normalise with statistics that were measured before."""
    y: Tensor = _Normalise.apply(x, weight, *others)
    return y


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation * weight + bias, perhaps ReLU, mask; saves its input.

    With ReLU in it the output is saved, too. It is the next convolution's input, which saves the
    same storage: what is held is what batch normalisation and ReLU hold in plain torch. A
    kernel computes the output's sign again; only where its input will come back rounded
    it saves the output, whose zeros are kept.
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
        fused: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        y = torch.empty_like(x)
        relu = norm.relu and fused
        vectors = [weight, bias, *statistics[:2]]
        if fused:
            kernels.normalise(y, x, *vectors, relu=relu)
        else:
            normalise(y, x, *vectors, relu=relu)
        if mask is not None:
            y.mul_(mask.to(y.dtype))
        ctx.statistics, ctx.mask, ctx.eps = statistics, mask, norm.eps
        ctx.processes, ctx.fused, ctx.relu = norm._processes(), fused, relu
        saves_output = relu and (not fused or is_compressing())
        ctx.save_for_backward(
            x, weight, bias if fused else None, y if saves_output else None
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        x, weight, bias, y = ctx.saved_tensors
        mean, inverse_std, *count = ctx.statistics
        if count:
            if y is not None:
                # The output is zero wherever ReLU or the mask cut it off.
                grad = torch.ops.aten.threshold_backward(grad, y, 0)
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
            # What a kernel computes has no graph to differentiate again.
            fused = ctx.fused and not torch.is_grad_enabled()
            backward = kernels.normalise_backward if fused else normalise_backward
            grads = backward(grad, x, y, weight, bias, mean, inverse_std, relu=ctx.relu)
        return *grads, None, None, None, None


def _has_kernels(x: Tensor) -> bool:
    """Whether there are kernels for a tensor's device and type."""
    return (
        x.is_cuda
        and not is_fake(x)
        and x.dtype in kernels.DTYPES
        and kernels.usable(x.device, x.dtype)
    )


def normalise(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
    *,
    relu: bool,
) -> None:
    """Normalise into a dense tensor.

    Parameters
    ----------
    y : torch.Tensor, [batch, channel, freq, time]
        Where the output goes, of the input's dtype, in memory of its own.
    x : torch.Tensor, [batch, channel, freq, time]
        Input.
    weight, bias, mean, inverse_std : torch.Tensor, [channel]
        What is multiplied and added, and the statistics.
    relu : bool
        Whether ReLU follows.
    """
    scale = weight * inverse_std
    shift = bias - mean * scale
    torch.ops.speechbrain_rev.scaled.out(x, scale, shift, out=y)
    if relu:
        y.relu_()


def normalise_backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
    *,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of the input, the weight and the bias.

    Parameters
    ----------
    grad : torch.Tensor, [batch, channel, freq, time]
        Gradient of the output.
    x : torch.Tensor, [batch, channel, freq, time]
        Input.
    y : torch.Tensor, [batch, channel, freq, time], or None
        Output of ReLU; None to find its zeros from the input again.
    weight, bias, mean, inverse_std : torch.Tensor, [channel]
        As for ``normalise``. The bias counts only where there is no output.
    relu : bool
        Whether ReLU followed.

    Returns
    -------
    tuple of torch.Tensor
        [batch, channel, freq, time], [channel] and [channel].
    """
    if relu:
        if y is None:
            y = torch.empty_like(x)
            with torch.no_grad():
                normalise(y, x, weight, bias, mean, inverse_std, relu=True)
        grad = torch.ops.aten.threshold_backward(grad, y, 0)
    if grad.is_cuda and grad.stride() != (dense := torch.empty_like(x)).stride():
        # Torch sums in another order where layouts differ, and a gradient has that of
        # what handed it down.
        grad = dense.copy_(grad)
    # There is no eps in it: what it would be added to is in the last vector.
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, inverse_std, True, 0.0, [True, True, True]
    )
    return grads


_library = torch.library.Library("speechbrain_rev", "DEF")
_library.define("moments(Tensor x) -> (Tensor, Tensor)")


def _moments_with_data(x: Tensor) -> tuple[Tensor, Tensor]:
    # Where it would write running statistics: it takes its precision from them.
    kept = x.new_empty(
        (2, x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32)
    )
    mean, variance = torch.ops.aten.batch_norm_update_stats.default(x, *kept, 0.0)
    return mean, variance


def _moments_without(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    return mean, torch.empty_like(mean)


_library.impl("moments", _moments_with_data, "CompositeExplicitAutograd")
_library.impl("moments", _moments_without, "Meta")
_library.define(
    "scaled.out(Tensor x, Tensor scale, Tensor shift, *, Tensor(a!) out) -> Tensor(a!)"
)


def _scaled(x: Tensor, scale: Tensor, shift: Tensor, *, out: Tensor) -> Tensor:
    return torch.addcmul(_per_channel(shift), x, _per_channel(scale), out=out)


def _scaled_on_cpu(x: Tensor, scale: Tensor, shift: Tensor, *, out: Tensor) -> Tensor:
    if not (x.is_contiguous() and out.is_contiguous()):
        return _scaled(x, scale, shift, out=out)
    # Batch normalisation of mean 0 and variance 1 has the bits of addcmul, and takes less
    # time: addcmul is not vectorised where operands are broadcast.
    mean, none = torch.zeros_like(scale), scale.new_empty(0)
    outputs = out, none, none
    torch.native_batch_norm(
        x, scale, shift, mean, torch.ones_like(mean), False, 0.0, 0.0, out=outputs
    )
    return out


_library.impl("scaled.out", _scaled, "CompositeExplicitAutograd")
_library.impl("scaled.out", _scaled_on_cpu, "CPU")
_library.impl("scaled.out", lambda *_, out: out, "Meta")


def _moments_of_all(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [channel]; torch's own operation has no form without data."""
    mean, variance = torch.ops.speechbrain_rev.moments.default(x)
    return mean, variance


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
        kept = mask.to(grad.dtype).expand(len(grad), 1, 1, -1)
        last = format_of(grad) is torch.channels_last
        # A backward pass under autocast would round this product to half.
        with autocast_off(grad.device):
            if last:  # flattened, it would be copied
                total = (kept @ grad.permute(0, 2, 3, 1)).sum((0, 1, 2))
            else:
                total = grad.flatten(1, 2) @ kept.flatten(1).unsqueeze(2)
                total = total.view(grad.shape[:3]).sum((0, 2))
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
