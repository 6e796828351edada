"""Batch normalisation with ReLU in one pass over memory, and its gradient in two.

The plain reference is ``speechbrain_rev.reversible.norm``: same names, same signatures.
Normalised values have its bits; sums of gradients are added up in an order of their own,
which the shape decides. Triton is imported when a kernel is first launched.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl

#: What is normalised; the vectors are float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Elements of a tile: 16 for each thread of Triton's four warps, so that a thread waits
#: for 64 bytes of float32 at a time, and two sums of each element stay in registers.
TILE = 2048
#: Channels of a tile where channels lie side by side: one line of the cache of float32.
#: It is the same for few channels, of which pieces then have the bits of the whole.
LANES = 32
#: Samples of a tile at least, where there are so many: their maps end within a tile, and
#: of wide tiles more would be empty.
SAMPLES = 4
#: Tiles of a program at least, for each program ends by adding up its tile.
TILES = 4
#: Programs that share a channel at most: 64 of 32 channels fill a GPU of 132
#: multiprocessors with 16 each, and each program reads all their sums.
SPLITS = 64


def _tile(
    tile, first, rows, columns, channels,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Give a tile's rows, where its elements lie in a row, and which elements exist."""
    across = (columns + COLUMNS - 1) // COLUMNS
    row = (tile // across) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    # Of channels and columns one is 1, and both together are a tile's width W.
    channel = first + tl.arange(0, CHANNELS)[None, :]  # [1, CHANNELS]
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS]
    inside = (row < rows) & (channel < channels) & (column < columns)  # [ROWS, W]
    return row, channel * columns + column, inside


def _scale_and_shift(weight, bias, mean, inverse_std, channel, exists):
    scale = tl.load(weight + channel, mask=exists, other=0.0)
    scale = scale * tl.load(inverse_std + channel, mask=exists, other=0.0)
    shift = tl.load(mean + channel, mask=exists, other=0.0) * scale
    return scale, tl.load(bias + channel, mask=exists, other=0.0) - shift


def _gradient(
    grad, x, y, g_places, x_places, places, inside, mean, scale, shift,
    RELU: tl.constexpr,
):  # fmt: skip
    """Load the gradient of what ReLU cut nothing off, and the distance to the mean."""
    g = tl.load(grad + g_places, mask=inside, other=0.0).to(tl.float32)  # [ROWS, W]
    values = tl.load(x + x_places, mask=inside, other=0.0)  # [ROWS, W]
    if RELU:
        if y is None:
            output = tl.fma(values.to(tl.float32), scale, shift).to(values.dtype)
        else:
            output = tl.load(y + places, mask=inside, other=0.0)
        # As torch's: a NaN passes gradients.
        g = tl.where(output.to(tl.float32) <= 0, 0.0, g)
    return g, values.to(tl.float32) - mean


def _summed(x, SIZE: tl.constexpr, WIDTH: tl.constexpr, HALVINGS: tl.constexpr):
    """Add up SIZE times WIDTH numbers to WIDTH, in pairs, pairs of pairs, and so on.

    The compiler orders the summands of a longer sum by how they lie in registers, which
    depends on the alignment of what was loaded: on addresses.
    """
    x = tl.reshape(x, [SIZE, WIDTH])
    for i in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, [SIZE >> (i + 1), 2, WIDTH]), axis=1)
    return tl.reshape(x, [WIDTH])


def _normalise_kernel(
    y, x, weight, bias, mean, inverse_std, x_step, rows, columns, channels, groups,
    splits, tiles, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scale and shift some channels' tiles, and cut off what is negative."""
    # An int32 would wrap around at 2**31 elements.
    program = tl.program_id(0).to(tl.int64)
    first = (program % groups) * CHANNELS
    channel = first + tl.arange(0, CHANNELS)[None, :]  # [1, CHANNELS]
    scale, shift = _scale_and_shift(
        weight, bias, mean, inverse_std, channel, channel < channels
    )  # [1, CHANNELS]
    tile = program // groups
    while tile < tiles:
        row, lane, inside = _tile(
            tile, first, rows, columns, channels, ROWS, CHANNELS, COLUMNS
        )
        values = tl.load(x + row * x_step + lane, mask=inside, other=0.0)  # [ROWS, W]
        output = tl.fma(values.to(tl.float32), scale, shift).to(values.dtype)
        if RELU:
            output = tl.where(output.to(tl.float32) < 0, 0.0, output)
        tl.store(y + row * channels * columns + lane, output, mask=inside)
        tile += splits


def _sums_kernel(
    grad, x, y, weight, bias, mean, inverse_std, sums, g_step, x_step, rows, columns,
    channels, groups, splits, tiles, RELU: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Add up gradients, and gradients times distances to the mean, of some tiles."""
    program = tl.program_id(0).to(tl.int64)
    first = (program % groups) * CHANNELS
    channel = first + tl.arange(0, CHANNELS)[None, :]  # [1, CHANNELS]
    scale, shift = _scale_and_shift(
        weight, bias, mean, inverse_std, channel, channel < channels
    )  # [1, CHANNELS]
    centre = tl.load(mean + channel, mask=channel < channels, other=0.0)
    total = tl.zeros([ROWS, CHANNELS * COLUMNS], tl.float32)
    product = tl.zeros([ROWS, CHANNELS * COLUMNS], tl.float32)
    split = program // groups
    tile = split
    while tile < tiles:
        row, lane, inside = _tile(
            tile, first, rows, columns, channels, ROWS, CHANNELS, COLUMNS
        )
        g, centred = _gradient(
            grad, x, y, row * g_step + lane, row * x_step + lane,
            row * channels * columns + lane, inside, centre, scale, shift, RELU,
        )  # fmt: skip
        total += g
        product = tl.fma(g, centred, product)
        tile += splits
    both = _summed(
        tl.join(total, product), ROWS * COLUMNS, 2 * CHANNELS, HALVINGS
    )  # [2 * CHANNELS]
    place = 2 * first + tl.arange(0, 2 * CHANNELS)  # [2 * CHANNELS]
    tl.store(sums + split * 2 * channels + place, both, mask=place < 2 * channels)


def _gradient_kernel(
    grad, x, y, weight, bias, mean, inverse_std, sums, grad_x, grad_weight, grad_bias,
    inverse_count, g_step, x_step, rows, columns, channels, groups, splits, tiles,
    RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Add up the sums of all splits, and find the gradient of some tiles."""
    program = tl.program_id(0).to(tl.int64)
    first = (program % groups) * CHANNELS
    place = 2 * first + tl.arange(0, 2 * CHANNELS)[None, :]  # [1, 2 * CHANNELS]
    split = tl.arange(0, SPLITS)[:, None]  # [SPLITS, 1]
    both = tl.load(
        sums + split * 2 * channels + place,
        mask=(split < splits) & (place < 2 * channels),
        other=0.0,
    )  # [SPLITS, 2 * CHANNELS]
    both = _summed(both, SPLITS, 2 * CHANNELS, HALVINGS)
    total, product = tl.split(tl.reshape(both, [1, CHANNELS, 2]))  # [1, CHANNELS]
    channel = first + tl.arange(0, CHANNELS)[None, :]  # [1, CHANNELS]
    exists = channel < channels
    scale, shift = _scale_and_shift(weight, bias, mean, inverse_std, channel, exists)
    centre = tl.load(mean + channel, mask=exists, other=0.0)
    inverse = tl.load(inverse_std + channel, mask=exists, other=0.0)
    if program < groups:
        tl.store(grad_weight + channel, product * inverse, mask=exists)
        tl.store(grad_bias + channel, total, mask=exists)
    average = total * inverse_count
    slope = product * inverse_count * inverse * inverse
    tile = program // groups
    while tile < tiles:
        row, lane, inside = _tile(
            tile, first, rows, columns, channels, ROWS, CHANNELS, COLUMNS
        )
        places = row * channels * columns + lane
        g, centred = _gradient(
            grad, x, y, row * g_step + lane, row * x_step + lane, places, inside, centre,
            scale, shift, RELU,
        )  # fmt: skip
        result = (tl.fma(-centred, slope, g) - average) * scale  # [ROWS, W]
        tl.store(grad_x + places, result.to(grad_x.dtype.element_ty), mask=inside)
        tile += splits


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
    """Normalise into a dense tensor."""
    tiling = _tiling(x)
    vectors = [v.contiguous() for v in (weight, bias, mean, inverse_std)]
    _launch(
        _normalise_kernel, tiling.programs, y, x.detach(), *vectors, *tiling.sizes,
        RELU=relu, **tiling.constants,
    )  # fmt: skip


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
    """Give the gradients of the input, the weight and the bias."""
    tiling = _tiling(x)
    # Autograd may have given this gradient to others, too: its storage is not ours.
    grad_x = torch.empty_like(x)
    if y is not None:
        y = _laid_out_as(grad_x, y)
    # Some channels of a map, as where pieces were joined, are read where they are.
    step = step_of(grad) if _is_contiguous(grad) is _is_contiguous(x) else None
    if step is None:
        grad, step = _laid_out_as(grad_x, grad), tiling.dense_step
    vectors = [v.contiguous() for v in (weight, bias, mean, inverse_std)]
    given = grad, x, y, *vectors
    sums = mean.new_empty(tiling.splits, x.shape[1], 2)
    grad_weight, grad_bias = torch.empty_like(mean), torch.empty_like(mean)
    summands = tiling.constants["ROWS"] * tiling.constants["COLUMNS"]
    _launch(
        _sums_kernel, tiling.programs, *given, sums, step, *tiling.sizes, RELU=relu,
        HALVINGS=_log2(summands), **tiling.constants,
    )  # fmt: skip
    splits = _power_of_two(tiling.splits)
    _launch(
        _gradient_kernel, tiling.programs, *given, sums, grad_x, grad_weight, grad_bias,
        x.shape[1] / x.numel(), step, *tiling.sizes, RELU=relu, SPLITS=splits,
        HALVINGS=_log2(splits), **tiling.constants,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias


def _laid_out_as(dense: Tensor, x: Tensor) -> Tensor:
    return x if x.stride() == dense.stride() else torch.empty_like(dense).copy_(x)


def step_of(x: Tensor) -> int | None:
    """Give the step between rows that hold all channels; None if there are none such.

    A row is a sample or, where channels lie side by side, a position in it.
    """
    axes: tuple[int, ...]
    if _is_contiguous(x):
        size, axes = x.shape[1:].numel(), (0,)
    elif x.shape[1] == 1 or x.stride(1) == 1:
        size, axes = x.shape[1], (3, 2, 0)
    else:
        return None
    if all(x.shape[axis] == 1 for axis in axes):
        return size
    step = _step(x, *axes)
    # Where rows overlap, as in an expanded tensor, outputs have a layout of their own.
    return step if step is not None and step >= size else None


@functools.cache
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton can be imported and compiles for these floats; tried once."""
    x = torch.zeros(1, 1, 1, 2, dtype=dtype, device=device)
    vectors = [torch.ones(1, device=device, dtype=torch.float32)] * 4
    try:
        normalise(torch.empty_like(x), x, *vectors, relu=True)
        normalise_backward(x, x, None, *vectors, relu=True)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(
            f"Triton's kernels do not run on {device} in {dtype} "
            f"({type(error).__name__}: {error}). Batches are normalised by plain torch "
            "operations there, in more time.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


@dataclass(frozen=True)
class _Tiling:
    """How programs share a tensor, by its shape and layout only."""

    programs: int
    splits: int
    sizes: tuple[int, ...]
    #: From one row to the next of a tensor without gaps.
    dense_step: int
    constants: dict[str, int]


def _tiling(x: Tensor) -> _Tiling:
    step, (batch, channels, freq, time) = step_of(x), x.shape
    assert step is not None
    if _is_contiguous(x):
        rows, columns, lanes = batch, freq * time, 1
        samples = min(SAMPLES, _power_of_two(rows))
        width = min(_power_of_two(columns), TILE // samples)
    else:
        rows, columns, lanes, width = batch * freq * time, 1, LANES, 1
    height = TILE // (lanes * width)
    tiles = -(-rows // height) * -(-columns // width)
    groups = -(-channels // lanes)
    # The number of channels is left out: pieces have the bits of the whole.
    splits = min(SPLITS, -(-tiles // TILES))
    sizes = step, rows, columns, channels, groups, splits, tiles
    constants = {"ROWS": height, "CHANNELS": lanes, "COLUMNS": width}
    return _Tiling(groups * splits, splits, sizes, channels * columns, constants)


def _is_contiguous(x: Tensor) -> bool:
    """Whether each sample is."""
    return _step(x, 3, 2, 1) == 1


def _step(x: Tensor, *axes: int) -> int | None:
    """Give the step along axes, the inner one first, that are one; None if it varies."""
    longer = [axis for axis in axes if x.shape[axis] > 1]
    for inner, outer in itertools.pairwise(longer):
        if x.stride(outer) != x.shape[inner] * x.stride(inner):
            return None
    return x.stride(longer[0]) if longer else 1


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _log2(size: int) -> int:
    return size.bit_length() - 1


def _launch(
    kernel: Callable[..., None], programs: int, *arguments: Any, **constants: Any
) -> None:
    with torch.cuda.device_of(arguments[0]):
        # Products are rounded as the reference rounds them, but for those in tl.fma.
        _compiled(kernel)[(programs,)](*arguments, enable_fp_fusion=False, **constants)


@functools.cache
def _compiled(kernel: Callable[..., None]) -> Any:
    import triton

    # Kernels look names up among their module's, which must not import Triton.
    names = globals()
    names["tl"] = triton.language
    for part in (_tile, _scale_and_shift, _gradient, _summed):
        if not hasattr(part, "fn"):
            names[part.__name__] = triton.jit(part)
    # Vectors of pieces begin anywhere, and batches have any number of tiles.
    others = [
        "weight",
        "bias",
        "mean",
        "inverse_std",
        "rows",
        "groups",
        "splits",
        "tiles",
    ]
    return triton.jit(kernel, do_not_specialize=others)
