"""Encoders for inference alone: normalisations folded, streams updated in place.

What a trained encoder is made of serves here once more, without the engine around it:
no graph is kept, no custom autograd function is called, and torch.export and ONNX know
all operations.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from speechbrain_rev.heads import POOLINGS
from speechbrain_rev.lobes.encoder import SpeakerEncoder
from speechbrain_rev.lobes.geometry import check_input, maps_and_masks
from speechbrain_rev.lobes.layers import PointwiseConv, masked_
from speechbrain_rev.lobes.pooling import Pooling, embedded
from speechbrain_rev.lobes.stages import Levels, Runner, Stage, walk
from speechbrain_rev.reversible.chain import ReversibleChain
from speechbrain_rev.reversible.convolution import Geometry
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.segment import AdditiveCoupling, arguments
from speechbrain_rev.reversible.streams import Streams

#: Of maps and weights: on CPUs the fastest for all families, for depthwise convolutions
#: by far.
_LAYOUT = torch.channels_last

#: Classes whose modules the form reads and does not call: it does what the class does.
_READ: tuple[type[nn.Module], ...] = (
    SpeakerEncoder, Stage, ReversibleChain, AdditiveCoupling, nn.Conv2d, PointwiseConv,
    BatchNorm, *(row.made for row in POOLINGS.values()),
)  # fmt: skip


class InferenceEncoder(nn.Module):
    """Map filterbanks to embeddings as an encoder does that is in evaluation mode.

    Build it with ``inference_form``. Reversible stages hold two streams, which are
    updated in place, however deep they are.

    Parameters
    ----------
    encoder : SpeakerEncoder
        Whose modules are taken over, normalisations folded already.

    Examples
    --------
    >>> from speechbrain_rev.lobes import SpeakerEncoder
    >>> encoder = SpeakerEncoder("revnet46", widths=(8,) * 4, blocks=(1,) * 4)
    >>> inference_form(encoder)(torch.randn(2, 30, 80), torch.tensor([1.0, 0.5])).shape
    torch.Size([2, 1, 256])
    """

    def __init__(self, encoder: SpeakerEncoder) -> None:
        super().__init__()
        self.architecture, self.geometry = encoder.architecture, encoder.geometry
        self.stem, self.stages = encoder.stem, encoder.stages
        self.pooling, self.fc = encoder.pooling, encoder.fc

    def forward(self, feats: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Embed utterances.

        Parameters
        ----------
        feats : torch.Tensor, [batch, time, n_mels]
            Filterbanks; what they hold beyond an utterance's length does not matter.
        lengths : torch.Tensor, [batch], or None
            Relative lengths, 1.0 for an utterance of all frames. None if no utterance
            is padded.

        Returns
        -------
        torch.Tensor, [batch, 1, embedding_dim]
            Embeddings.

        Raises
        ------
        ValueError
            As ``SpeakerEncoder`` does.
        """
        lengths = check_input(self.architecture.name, self.geometry, feats, lengths)
        return self.embed(feats, lengths)

    def embed(self, feats: Tensor, lengths: Tensor | None) -> Tensor:
        """Embed utterances that were checked before: a graph cannot check them."""
        x, masks = maps_and_masks(feats, lengths, self.geometry)
        pooled = walk(self, x, _PlainRunner(masks))
        return embedded(self.fc, pooled, feats.dtype)


class _PlainRunner(Runner):
    """Call the parts; couplings are run in two streams of their own."""

    def unit(
        self, name: str, unit: nn.Module, levels: Levels, given: Tensor | Streams
    ) -> Tensor:
        y: Tensor = unit(self.around(levels), given)
        return y

    def chain(
        self, chain: ReversibleChain, held: list[Tensor | Streams], level: int
    ) -> Tensor:
        """Run equations 7 and 8 in place."""
        halves = cast(Tensor, held.pop()).chunk(2, dim=1)
        x1, x2 = (half.contiguous(memory_format=_LAYOUT) for half in halves)
        del halves
        mask = self.masks[level]
        for module in chain.blocks:
            block = cast(AdditiveCoupling, module)
            x1.add_(block.f(*arguments(x2, mask)))
            x2.add_(block.g(*arguments(x1, mask)))
        return torch.cat([x1, x2], dim=1)

    def pooled(self, pooling: Pooling, parts: Sequence[Tensor]) -> Tensor:
        return pooling.pool(self.masks[-1], *parts)


class _Folded(nn.Module):
    """What is left of a normalisation that went into its convolution."""

    def __init__(self, relu: bool) -> None:
        super().__init__()
        self.relu = relu

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply ReLU and mask to what the convolution alone has made, in place."""
        return masked_(F.relu_(x) if self.relu else x, mask)


def inference_form(encoder: SpeakerEncoder) -> InferenceEncoder:
    """Make an encoder's form for inference, which has weights of its own.

    Each batch normalisation follows a convolution directly, and is folded into it: exact
    but for rounding.

    Parameters
    ----------
    encoder : SpeakerEncoder
        As ``build_encoder`` makes them; it stays as it is.

    Returns
    -------
    InferenceEncoder
        Without gradients and in evaluation mode, on the encoder's device.

    Raises
    ------
    ValueError
        If a normalisation does not follow a convolution, because a module was exchanged,
        or if a module has a bias, padding, hooks or a ``forward`` that ``build_encoder``
        does not give it.

    Examples
    --------
    >>> from speechbrain_rev.lobes import SpeakerEncoder
    >>> encoder = SpeakerEncoder("revnet46", widths=(8,) * 4, blocks=(1,) * 4).eval()
    >>> feats = torch.randn(2, 30, 80)
    >>> torch.allclose(inference_form(encoder)(feats), encoder(feats), atol=1e-4)
    True
    """
    _refuse_additions(encoder)
    folded = copy.deepcopy(encoder).eval().requires_grad_(False)
    pairs = dict(_pairs(folded))
    for name, module in list(folded.named_modules()):
        if isinstance(module, nn.Conv2d):
            norm_name = pairs.get(name)
            norm = None if norm_name is None else folded.get_submodule(norm_name)
            folded.set_submodule(name, _plain(module, cast("BatchNorm | None", norm)))
    for norm_name in pairs.values():
        norm = cast(BatchNorm, folded.get_submodule(norm_name))
        folded.set_submodule(norm_name, _Folded(norm.relu))
    return InferenceEncoder(folded).eval()


def _refuse_additions(encoder: SpeakerEncoder) -> None:
    """Refuse modules that do more than the form would do in their place."""
    for name, module in encoder.named_modules():
        if not isinstance(module, _READ):
            continue
        added = _addition(module)
        if added is not None:
            raise ValueError(
                f"{name or 'The encoder'} of {encoder.architecture.name} has {added}, "
                "which its form for inference would leave out. Merge adapters and remove "
                "hooks and parametrizations first, or use the encoder itself."
            )


def _addition(module: nn.Module) -> str | None:
    """Name what a module has beyond what ``build_encoder`` gives it."""
    if type(module) not in _READ:
        return f"a class of its own, {type(module).__name__}"
    if "forward" in vars(module):
        return "a forward of its own"
    if module._forward_hooks or module._forward_pre_hooks:
        return "forward hooks"
    if isinstance(module, nn.Conv2d):
        if module.bias is not None:
            return "a bias"
        if module.padding_mode != "zeros":
            return f"padding_mode {module.padding_mode!r}"
    return None


def _pairs(encoder: SpeakerEncoder) -> Iterator[tuple[str, str]]:
    """Name convolutions, and the normalisations that follow them directly.

    ``norm`` follows ``conv`` or, where there are several, ``conv1``; ``norm2`` follows
    ``conv2``; ``norms.0`` follows ``convs.0``.
    """
    modules = dict(encoder.named_modules())
    for name, module in modules.items():
        if not isinstance(module, BatchNorm):
            continue
        same = name.replace("norm", "conv")
        conv_name = same if same in modules else f"{same}1"
        conv = modules.get(conv_name)
        if not isinstance(conv, nn.Conv2d) or conv.out_channels != module.channels:
            raise ValueError(
                f"{name} of {encoder.architecture.name} cannot be folded into "
                f"{conv_name}, which is {type(conv).__name__} here and should be the "
                "convolution before it. Give an encoder as build_encoder makes it."
            )
        yield conv_name, name


def _plain(conv: nn.Conv2d, norm: BatchNorm | None) -> nn.Conv2d:
    """Give torch's own convolution that does what both do, rounded once, from float64.

    Those of encoders may choose by the shapes they are given, which a graph cannot.
    """
    weight, bias = conv.weight.detach(), None
    if norm is not None:
        moments = norm.running_mean.double(), norm.running_var.double()
        affine = norm.weight.detach().double(), norm.bias.detach().double()
        weight, bias = fuse_conv_bn_weights(
            weight.double(), None, *moments, norm.eps, *affine
        )
        bias = nn.Parameter(bias.to(conv.weight), requires_grad=False)
    stride, padding, dilation, groups = Geometry.of(conv)
    plain = nn.Conv2d(
        conv.in_channels, conv.out_channels, cast(tuple[int, int], conv.kernel_size),
        cast(tuple[int, int], stride), cast(tuple[int, int], padding),
        cast(tuple[int, int], dilation), groups, bias=False, device="meta",
    )  # fmt: skip
    laid_out = weight.to(conv.weight).contiguous(memory_format=_LAYOUT)
    plain.weight = nn.Parameter(laid_out, requires_grad=False)
    plain.bias = bias
    return plain
