"""Layers of an encoder, their parts, and the units that are made of them.

All work on [batch, channel, freq, time] and none of the convolutions has a bias.
Where frames are masked (padding of shorter utterances), invalid frames are zero before
every convolution, so that an utterance sees the same neighbours alone and in a batch:
the mask goes into each normalisation and multiplies each output.

Layers are split by channels. A sum over hidden channels is a sum of narrower functions of
the same kind: with h the hidden channels of a residual function, F(z) is the sum over
groups g of them of W2[:, g] * relu(BN_g(W1[g] * z)), for batch statistics are taken by
channel. A part is the module itself with slices in the place of its parameters and
buffers, so that it computes, and updates running statistics, by the code of the whole.

Units stand between runs of reversible blocks: stems, transitions and ordinary blocks.
They are called with the masks first and then with their input: a tensor, or a reading of
the streams that leave a stage.
"""

from __future__ import annotations

import abc
import copy
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from speechbrain_rev.architectures import Stride
from speechbrain_rev.kernels.fixed_point import format_of
from speechbrain_rev.reversible.convolution import (
    Geometry,
    Reading,
    in_parts,
    parts_for,
    split_for_reuse,
)
from speechbrain_rev.reversible.flags import Flags
from speechbrain_rev.reversible.hooks import has_hooks
from speechbrain_rev.reversible.monitor import Checks
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.recompute import (
    named,
    recompute_call,
    trains,
)
from speechbrain_rev.reversible.recompute_each import recompute_each
from speechbrain_rev.reversible.streams import Streams, join
from speechbrain_rev.torch_private import is_compiled, tree_flatten, tree_unflatten


def can_be_split(module: nn.Module) -> bool:
    """Whether a module's layers are of the kinds that are split here, and unwatched.

    Parameters
    ----------
    module : nn.Module
        Of convolutions and normalisations, in lists or not.

    Returns
    -------
    bool
        False where a layer was exchanged, parametrised or compiled, has a forward of
        its own or hooks.
    """
    layers = [m for m in module.modules() if type(m) is not nn.ModuleList]
    return all(map(_is_known, layers)) and not any(map(has_hooks, layers))


def _is_known(layer: nn.Module) -> bool:
    if "forward" in vars(layer) or is_compiled(layer):
        return False
    kind = type(layer)
    # The class itself, not one that was made from it and kept its name.
    own = kind.__module__.startswith("speechbrain_rev.lobes.") and (
        vars(sys.modules[kind.__module__]).get(kind.__name__) is kind
    )
    if isinstance(layer, nn.Conv2d):
        depthwise = layer.groups == layer.in_channels == layer.out_channels
        return (
            (own or kind is nn.Conv2d)
            and layer.bias is None
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
            and (layer.groups == 1 or depthwise)
        )
    return own or kind is BatchNorm


def convs_by_outputs(conv: nn.Conv2d, channels: int) -> list[nn.Conv2d]:
    """Split a convolution into ones of some output channels each.

    Parameters
    ----------
    conv : nn.Conv2d
        Without bias; depthwise, or of one group.
    channels : int
        Output channels of a part; the last may have fewer.

    Returns
    -------
    list of nn.Conv2d
        A depthwise one takes its own channels of the input, others take all.
    """
    parts = []
    for weight in conv.weight.split(channels):
        part = _with(conv, {"weight": weight})
        part.out_channels = len(weight)
        if conv.groups > 1:
            part.groups = part.in_channels = len(weight)
        parts.append(part)
    return parts


def convs_by_inputs(conv: nn.Conv2d, channels: int) -> list[nn.Conv2d]:
    """Split a convolution into ones of some input channels each, which add up to it.

    Parameters
    ----------
    conv : nn.Conv2d
        Without bias and of one group.
    channels : int
        Input channels of a part; the last may have fewer.

    Returns
    -------
    list of nn.Conv2d
        Each with all output channels.
    """
    parts = []
    for weight in conv.weight.split(channels, dim=1):
        part = _with(conv, {"weight": weight})
        part.in_channels = weight.shape[1]
        parts.append(part)
    return parts


def norm_parts(norm: BatchNorm, channels: int) -> list[BatchNorm]:
    """Split a normalisation by its channels.

    Parameters
    ----------
    norm : BatchNorm
        The normalisation, whose running statistics its parts update.
    channels : int
        Channels of a part; the last may have fewer.

    Returns
    -------
    list of BatchNorm
        The first counts the batches.
    """
    parts = []
    weights, biases = norm.weight.split(channels), norm.bias.split(channels)
    means = norm.running_mean.split(channels)
    variances = norm.running_var.split(channels)
    count = norm.num_batches_tracked
    for i, weight in enumerate(weights):
        part = _with(
            norm,
            {"weight": weight, "bias": biases[i]},
            {
                "running_mean": means[i],
                "running_var": variances[i],
                "num_batches_tracked": None if i else count,
            },
        )
        part.channels = len(weight)
        parts.append(part)
    return parts


def with_modules(module: nn.Module, **modules: nn.Module) -> Any:
    """Make a copy of a module that has other modules in some places."""
    part = _with(module, {})
    part.__dict__["_modules"] = module._modules | modules
    return part


def _with(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor | None] | None = None,
) -> Any:
    part = copy.copy(module)
    part.__dict__["_parameters"] = {**module._parameters, **parameters}
    part.__dict__["_buffers"] = {**module._buffers, **(buffers or {})}
    return part


class Masks(NamedTuple):
    """Frame masks, [batch, 1, 1, time], at a unit's input and at its output."""

    before: Tensor | None = None
    after: Tensor | None = None


def conv3x3(
    channels: int, out_channels: int, *, stride: Stride = 1, groups: int = 1
) -> nn.Conv2d:
    """Make a 3x3 convolution without bias that keeps the shape at stride 1."""
    return nn.Conv2d(
        channels, out_channels, 3, stride, padding=1, groups=groups, bias=False
    )


class PointwiseConv(nn.Conv2d):
    """1x1 convolution without bias, where that is faster a product of matrices."""

    def __init__(self, channels: int, out_channels: int, stride: Stride) -> None:
        super().__init__(channels, out_channels, 1, stride, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve [batch, channel, freq, time]."""
        return Geometry.of(self).convolve(input, self.weight)


def conv1x1(channels: int, out_channels: int, *, stride: Stride = 1) -> nn.Conv2d:
    """Make a 1x1 convolution without bias."""
    return PointwiseConv(channels, out_channels, stride)


def masked_(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set invalid frames to zero in place: a convolution does not need its output."""
    return x if mask is None else x.mul_(mask.to(x.dtype))


def convolved_and_masked(conv: nn.Conv2d, x: Tensor, mask: Tensor | None) -> Tensor:
    """Convolve, and set invalid frames to zero: in place where nobody sees the output."""
    y: Tensor = conv(x)
    if mask is None or (isinstance(conv, nn.Conv2d) and not has_hooks(conv)):
        return masked_(y, mask)
    return y * mask.to(y.dtype)


def convolved(conv: nn.Conv2d, given: Tensor | Reading) -> Tensor:
    """Convolve a tensor, or what the first convolution of a reading reads."""
    return conv(given) if isinstance(given, Tensor) else given.convolved(conv, 0)


class ConvNorm(nn.Module):
    """A convolution and its normalisation, with ReLU if the normalisation has one."""

    def __init__(self, conv: nn.Conv2d, norm: BatchNorm) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Compute [batch, channel, freq, time] of the convolution's channels."""
        return self.norm(self.conv(x), mask)


def split_layers(
    conv: nn.Conv2d, norm: BatchNorm, channels: int
) -> Iterator[tuple[nn.Conv2d, BatchNorm]]:
    """Split a convolution and its normalisation by their channels."""
    return zip(
        convs_by_outputs(conv, channels), norm_parts(norm, channels), strict=True
    )


class Channels(NamedTuple):
    """Channels at a time of maps of a unit's input size, and of its output size."""

    before: int
    after: int


#: Calls several modules: ``recompute_each`` or ``stored_each``.
CallEach = Callable[..., Tensor]


class Pieces(NamedTuple):
    """Modules whose outputs are parts of one tensor, with the arguments of each.

    ``channels`` are those of the whole. ``reuse`` has the positions of arguments that the
    module alone reads: their storage is used again.
    """

    modules: list[nn.Module]
    inputs: list[tuple[Any, ...]]
    channels: int
    reuse: tuple[int, ...] = ()

    def called(self, call: CallEach, *, last: bool = False) -> Tensor:
        """Call them; ``last`` if the unit returns the result as it is."""
        return call(
            self.modules,
            self.inputs,
            channels=self.channels,
            reuse=self.reuse,
            last=last,
        )


class Unit(nn.Module, abc.ABC):
    """What stands before reversible blocks, and can work on some channels at a time."""

    @abc.abstractmethod
    def forward(self, masks: Masks, given: Tensor | Reading) -> Tensor:
        """Work on all channels at once."""

    def in_pieces(
        self, call: CallEach, channels: Channels, masks: Masks, given: Tensor | Reading
    ) -> Tensor:
        """Work on some channels at a time, in pieces that are called by ``call``.

        A unit of which no reversible encoder has any works on all at once.
        """
        result: Tensor = self(masks, given)
        return result

    def readers(self) -> list[nn.Conv2d]:
        """List the convolutions that alone read the input, if it may come as streams."""
        return []

    def is_one_layer(self) -> bool:
        """Whether nothing is made on the way that would have to be recomputed first."""
        return False


def stored_each(
    modules: Sequence[nn.Module],
    arguments: Sequence[tuple[Any, ...]],
    *,
    channels: int,
    reuse: Collection[int] = (),
    last: bool = False,
) -> Tensor:
    """Call modules, as ``recompute_each`` does, and let autograd store.

    Gradients of a shared input are added up among these modules first, as there;
    no stored storage can be used again, and nothing runs a second time.
    """
    leaves, spec = tree_flatten(list(arguments))
    aliases: dict[int, Tensor] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.requires_grad:
            leaves[i] = aliases.setdefault(id(x), x.view_as(x))
    given = tree_unflatten(leaves, spec)
    outputs = [m(*inputs) for m, inputs in zip(modules, given, strict=True)]
    if len(outputs) == 1:
        return outputs[0]
    # Of one channel a piece is of two layouts, of which torch chooses either.
    layout = format_of(outputs[0])
    return torch.cat(outputs, dim=1).contiguous(memory_format=layout)


def first_layer(
    layer: ConvNorm, given: Tensor | Reading, mask: Tensor | None, channels: int
) -> Pieces:
    """Split the convolution that reads a unit's input, and its normalisation.

    Streams are read as a whole, in parts of the batch; a tensor in pieces, so that what
    is convolved exists for some channels only.
    """
    if isinstance(given, Reading):
        return _normalised(layer.norm, given.convolved(layer.conv, 0), mask, channels)
    layers = split_layers(layer.conv, layer.norm, channels)
    modules: list[nn.Module] = [ConvNorm(*split) for split in layers]
    inputs = [(given, mask)] * len(modules)
    return Pieces(modules, inputs, layer.norm.channels)


def later_layer(
    layer: ConvNorm, x: Tensor, mask: Tensor | None, channels: int
) -> Pieces:
    """Split a convolution inside a unit, by the batch, and its normalisation."""
    conv = layer.conv
    y = in_parts(conv, x, parts_for(conv.in_channels, channels))
    return _normalised(layer.norm, y, mask, channels)


def _normalised(
    norm: BatchNorm, x: Tensor, mask: Tensor | None, channels: int
) -> Pieces:
    inputs = [(part, mask) for part in split_for_reuse(x, channels)]
    return Pieces([*norm_parts(norm, channels)], inputs, norm.channels, reuse=(0,))


def run_unit(
    unit: nn.Module,
    masks: Masks,
    given: Tensor | Streams,
    sizes: Sequence[int | None],
    *,
    recomputes: bool,
    joins: bool = False,
    checks: Checks | None = None,
    name: str | None = None,
) -> Tensor:
    """Run a unit, in training on some channels at a time.

    Parameters
    ----------
    unit : nn.Module
        A unit; another module, which someone put in its place, is run as it is.
    masks : Masks
        At its input and output.
    given : torch.Tensor or Streams
        Its input.
    sizes : sequence of int or None
        Channels at a time of maps before and after; None in one of them for all.
    recomputes : bool
        Whether it is computed again in the backward pass, not stored.
    joins : bool
        Whether it is so together with the unit before it, where it works on all channels
        at once.
    checks : Checks or None
        Of the encoder's step, by which it is compared what it computes then.
    name : str or None
        The unit's in its encoder.

    Returns
    -------
    torch.Tensor
        Its output.
    """
    splits = isinstance(unit, Unit) and can_be_split(unit)
    recomputes = recomputes and trains(unit)
    x: Tensor | Reading
    if not isinstance(given, Streams):
        x = given
    else:
        reads = splits and cast(Unit, unit).readers()
        x = _reading(unit, given, sizes[0]) if reads else join(given)
    if not splits or not trains(unit) or None in sizes:
        if recomputes:
            again = recompute_call(
                unit, unit, (masks, x), {},
                joins=joins, shares_casts=False, checks=checks, name=name,
            )  # fmt: skip
            return cast(Tensor, again)
        return cast(Tensor, unit(masks, x))
    unit, channels = cast(Unit, unit), Channels(*cast(list[int], sizes))
    if not recomputes and torch.compiler.is_compiling():
        # Pieces are modules made on the spot, which the compiler cannot follow.
        stored = torch.compiler.disable(unit.in_pieces)
        return cast(Tensor, stored(stored_each, channels, masks, x))
    if not recomputes:
        # By the kernels that computing again would take, as chains store.
        with Flags.now({x.device})():
            return unit.in_pieces(stored_each, channels, masks, x)
    each: CallEach = functools.partial(
        recompute_each, checks=checks, name=named(unit, name)
    )
    if unit.is_one_layer() and isinstance(x, Tensor):
        alone = functools.partial(_recomputed_alone, each)
        return unit.in_pieces(alone, channels, masks, x)
    pieces = functools.partial(unit.in_pieces, each, channels)
    again = recompute_call(
        pieces, unit, (masks, x), {}, shares_casts=False, checks=checks, name=name
    )
    return cast(Tensor, again)


def _recomputed_alone(
    each: CallEach,
    modules: Sequence[nn.Module],
    arguments: Sequence[tuple[Any, ...]],
    *,
    last: bool,
    **options: Any,
) -> Tensor:
    """Recompute modules of a unit that is not recomputed itself."""
    return each(modules, arguments, **options)


def _reading(unit: nn.Module, streams: Streams, channels: int | None) -> Reading:
    width = 2 * streams.first.value.shape[1]
    return Reading.of(streams, cast(Unit, unit).readers(), parts_for(width, channels))
