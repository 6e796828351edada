"""A step of an optimizer over all tensors, with 8-bit or 32-bit states, in one launch.

The plain reference is ``speechbrain_rev.optim.reference``: same names, same signatures,
same bits. A program takes a tile of values: it looks up whose they are, reads their
states back, updates the weights where they lie and stores the states again. Triton is
imported when a kernel is first launched.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl

#: Values of a program: one block of 2048, or 8 of 256.
TILE = 2048
_AXES = 4
#: Kinds of updates; rows of ``speechbrain_rev.optimizers`` name theirs.
KINDS = ("momentum", "adam", "lion")


@dataclass(frozen=True)
class UpdateRule:
    """What a step computes.

    Attributes
    ----------
    kind : str
        One of ``KINDS``.
    lr, weight_decay : float
        Learning rate, and how fast weights shrink.
    betas : (float, float)
        Parts that a step keeps; SGD's momentum is the first.
    eps : float
        Added to the root of the second moment.
    decoupled : bool
        Whether weights shrink before the update; else the decay is added to gradients.
    nesterov : bool
        Whether the momentum looks one step ahead.
    """

    kind: str
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float = 0.0
    decoupled: bool = False
    nesterov: bool = False


@dataclass(eq=False)
class TensorTable:
    """Tensors that are updated together, and where their states begin.

    Attributes
    ----------
    weights : list of Tensor
        What is trained, float32 of any dense layout.
    gradients : list of Tensor or None
        Those of this step; tensors without one are left alone.
    starts : list of int
        Before which value of all each tensor begins, in the order of its shape; one more
        ends the last.
    steps : Tensor
        [tensors + 1], float32: steps that each tensor has taken, and all that were.
    """

    weights: list[Tensor]
    gradients: list[Tensor | None]
    starts: list[int]
    steps: Tensor
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def kept(self, name: str, key: object, make: Callable[[], Any]) -> Any:
        """Make something for a key, or give what was made for it last."""
        if name not in self._kept or self._kept[name][0] != key:
            self._kept[name] = key, make()
        return self._kept[name][1]

    def sent(self, name: str, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Send numbers to where the tensors are, unless they are there."""
        there: Tensor = self.kept(
            name, values, lambda: on_device(values, self.steps, dtype)
        )
        return there

    @property
    def active(self) -> Tensor:
        """Which tensors have a gradient, and one, [tensors + 1], float32."""
        own = [*(float(g is not None) for g in self.gradients), 1.0]
        return self.sent("active", own, torch.float32)


@dataclass(frozen=True, eq=False)
class Packed:
    """States of consecutive tensors in one form, one tensor's behind the other's.

    Attributes
    ----------
    first, last : int
        Tensors ``first`` to before ``last`` of a table.
    block : int or None
        Values that share a scale; None for states in float32.
    shared : bool
        Whether a block has values of several tensors; else each begins one of its own.
    first_blocks : list of int
        The first block of each tensor, and the number of all.
    moments : list of Tensor
        [values], of each moment: codes, uint8, or float32.
    scales : list of Tensor
        [blocks], float32, of each moment: the largest magnitude of each block.
    """

    first: int
    last: int
    block: int | None
    shared: bool
    first_blocks: list[int]
    moments: list[Tensor]
    scales: list[Tensor]


class Map(NamedTuple):
    """A dynamic tree on a device, and its nearest codes.

    Floats with the same upper 16 bits lie so close together that at most one midpoint
    between codes is among them: one comparison decides.
    """

    values: Tensor  # [256], what the codes stand for
    midpoints: Tensor  # [255], above which the next code is nearer
    lower: Tensor  # [65536], the code below the midpoint, by the upper bits
    midpoint: Tensor  # [65536], likewise; infinite where there is none


def _found(sorted_starts, count, place):
    """Find the last of ascending starts that is not above a place."""
    low, high = place * 0, place * 0 + count
    while high - low > 1:
        middle = (low + high) // 2
        below = tl.load(sorted_starts + middle) <= place
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


def _offsets(element, layout):
    """Give where elements of a weight and of its gradient lie."""
    size1 = tl.load(layout).to(tl.int32)
    size2 = tl.load(layout + 1).to(tl.int32)
    size3 = tl.load(layout + 2).to(tl.int32)
    weight = element * tl.load(layout + 3)
    gradient = element * tl.load(layout + 7)
    if size1 * size2 * size3 > 1:
        index3 = element % size3
        rest = element // size3
        index2 = rest % size2
        rest = rest // size2
        index1 = rest % size1
        rest = rest // size1
        weight = rest * tl.load(layout + 3) + index1 * tl.load(layout + 4)
        weight += index2 * tl.load(layout + 5) + index3 * tl.load(layout + 6)
        gradient = rest * tl.load(layout + 7) + index1 * tl.load(layout + 8)
        gradient += index2 * tl.load(layout + 9) + index3 * tl.load(layout + 10)
    return weight, gradient


def _pointer(addresses, index):
    return tl.load(addresses + index).to(tl.pointer_type(tl.float32))


def _read(
    moment, scale, values, position, block, known, exists, QUANTISED: tl.constexpr
):  # fmt: skip
    """Read a moment back: each code's value times the scale of its block."""
    if QUANTISED:
        codes = tl.load(moment + position, mask=exists, other=0).to(tl.int32)
        scales = tl.load(scale + block, mask=known, other=0.0)
        # Code 0 stands for no zero.
        x = tl.where(exists, tl.load(values + codes) * scales, 0.0)
    else:
        x = tl.load(moment + position, mask=exists, other=0.0)
    return x


def _write(
    x, moment, scale, midpoints, position, block, known, exists, LEAST: tl.constexpr,
    QUANTISED: tl.constexpr,
):  # fmt: skip
    """Store a moment: the largest magnitude of each block, and the nearest codes."""
    if QUANTISED:
        absmax = tl.max(tl.abs(x), axis=1, keep_dims=True)  # [ROWS, 1]
        bad = tl.max((x - x != 0.0).to(tl.int32), axis=1, keep_dims=True)
        absmax = tl.where(bad > 0, float("nan"), absmax)
        scales = tl.where(absmax == 0.0, 1.0, absmax) + tl.zeros_like(x)
        quotient = tl.div_rn(x, scales)  # [ROWS, BLOCK]
        code = position.to(tl.int32) * 0
        for i in tl.static_range(8):
            upper = code + (128 >> i)
            code = tl.where(quotient > tl.load(midpoints + upper - 1), upper, code)
        code = tl.maximum(code, LEAST)
        tl.store(scale + block, absmax, mask=known)
        tl.store(moment + position, code.to(tl.uint8), mask=exists)
    else:
        tl.store(moment + position, x, mask=exists)


def _update_kernel(
    addresses, layouts, starts, first_tiles, first_blocks, tensors, corrections, stride,
    healthy, moment1, moment2, scale1, scale2, values1, values2, midpoints1, midpoints2,
    lr, decay, keep, beta1, beta2, less1, less2, eps, KIND: tl.constexpr,
    NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, DECAYS: tl.constexpr,
    QUANTISED: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the values of a tile, and their states."""
    program = tl.program_id(0).to(tl.int64)
    base = tl.load(starts)
    if SHARED:
        begin = base + program * ROWS * BLOCK
        end = tl.minimum(begin + ROWS * BLOCK, tl.load(starts + tensors))
        tensor = _found(starts, tensors, begin)
        first_block = program * ROWS
    else:
        tile = program + tl.load(first_tiles)
        tensor = _found(first_tiles, tensors, tile)
        tile -= tl.load(first_tiles + tensor)
        begin = tl.load(starts + tensor) + tile * ROWS * BLOCK
        end = tl.minimum(begin + ROWS * BLOCK, tl.load(starts + tensor + 1))
        first_block = tl.load(first_blocks + tensor) + tile * ROWS
    row = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    place = begin + row * BLOCK + tl.arange(0, BLOCK)[None, :]  # [ROWS, BLOCK]
    # A gradient that is not finite anywhere lets nothing be written.
    end = tl.where(tl.load(healthy) > 0.0, end, begin)
    inside = place < end
    weight = tl.zeros([ROWS, BLOCK], tl.float32)
    gradient = tl.zeros([ROWS, BLOCK], tl.float32)
    correction1 = tl.zeros([ROWS, BLOCK], tl.float32) + 1.0
    correction2 = tl.zeros([ROWS, BLOCK], tl.float32) + 1.0
    trained = place < 0
    current = tensor
    while tl.load(starts + current) < end:
        start = tl.load(starts + current)
        stop = tl.load(starts + current + 1)
        stop = tl.where(tl.load(addresses + 2 * current + 1) != 0, stop, start)
        own = inside & (place >= start) & (place < stop)
        offset, grad_offset = _offsets(
            (place - start).to(tl.int32), layouts + 11 * current
        )
        w = tl.load(_pointer(addresses, 2 * current) + offset, mask=own, other=0.0)
        g = tl.load(
            _pointer(addresses, 2 * current + 1) + grad_offset, mask=own, other=0.0
        )
        weight, gradient = tl.where(own, w, weight), tl.where(own, g, gradient)
        if KIND == "adam":
            c1 = tl.load(corrections + current).to(tl.float32)
            c2 = tl.load(corrections + stride + current).to(tl.float32)
            correction1 = tl.where(own, c1, correction1)
            correction2 = tl.where(own, c2, correction2)
        trained = trained | own
        current += 1
    # Blocks without a trained value keep their bits.
    any_trained = tl.max(trained.to(tl.int32), axis=1, keep_dims=True) > 0  # [ROWS, 1]
    written = inside & any_trained
    block, position = first_block + row, place - base
    old1 = _read(
        moment1, scale1, values1, position, block, any_trained, inside, QUANTISED
    )
    if DECAYS:
        if DECOUPLED:
            weight = weight * keep
        else:
            gradient = gradient + weight * decay
    if KIND == "adam":
        old2 = _read(
            moment2, scale2, values2, position, block, any_trained, inside, QUANTISED
        )
        new1 = old1 * beta1 + gradient * less1
        new2 = old2 * beta2 + gradient * gradient * less2
        root = tl.div_rn(tl.sqrt_rn(new2), tl.sqrt_rn(correction2)) + eps
        change = tl.div_rn(new1, root) * tl.div_rn(correction1 * 0.0 + lr, correction1)
        new2 = tl.where(trained, new2, old2)
        _write(
            new2, moment2, scale2, midpoints2, position, block, any_trained, written, 1,
            QUANTISED,
        )  # fmt: skip
    elif KIND == "lion":
        direction = old1 * beta1 + gradient * less1
        change = tl.where(direction > 0, lr, tl.where(direction < 0, -lr, 0.0))
        new1 = old1 * beta2 + gradient * less2
    else:
        new1 = old1 * beta1 + gradient
        change = (gradient + new1 * beta1) * lr if NESTEROV else new1 * lr
    new1 = tl.where(trained, new1, old1)
    _write(
        new1, moment1, scale1, midpoints1, position, block, any_trained, written, 0,
        QUANTISED,
    )  # fmt: skip
    weight = weight - change
    current = tensor
    while tl.load(starts + current) < end:
        start = tl.load(starts + current)
        own = trained & (place >= start) & (place < tl.load(starts + current + 1))
        offset, _ = _offsets((place - start).to(tl.int32), layouts + 11 * current)
        tl.store(_pointer(addresses, 2 * current) + offset, weight, mask=own)
        current += 1


def _finite_kernel(
    addresses, layouts, starts, first_tiles, tensors, healthy, TILE: tl.constexpr
):  # fmt: skip
    """Clear a flag where the square of a gradient is not finite."""
    tile = tl.program_id(0).to(tl.int64)
    tensor = _found(first_tiles, tensors, tile)
    start = tl.load(starts + tensor)
    begin = (tile - tl.load(first_tiles + tensor)) * TILE
    element = begin + tl.arange(0, TILE)
    stop = tl.load(starts + tensor + 1)
    own = (
        element
        < tl.where(tl.load(addresses + 2 * tensor + 1) != 0, stop, start) - start
    )
    _, offset = _offsets(element.to(tl.int32), layouts + 11 * tensor)
    g = tl.load(_pointer(addresses, 2 * tensor + 1) + offset, mask=own, other=0.0)
    square = g * g
    if tl.max((square - square != 0).to(tl.int32), axis=0) > 0:
        tl.store(healthy, 0.0)


def clear_unless_finite(healthy: Tensor, table: TensorTable) -> None:
    """Clear a flag, [1], unless the squares of all gradients are finite."""
    arrays = _arrays(table)
    tiles = arrays.first_tiles_list[-1]
    _launch(
        _finite_kernel, tiles, arrays.addresses, arrays.layouts, arrays.starts,
        arrays.first_tiles, len(table.weights), healthy, TILE=TILE,
    )  # fmt: skip


def update(
    table: TensorTable,
    packed: Packed,
    rule: UpdateRule,
    healthy: Tensor,
    corrections: Tensor | None,
    maps: Sequence[Map],
) -> None:
    """Take a step of some of the tensors, unless a flag is cleared."""
    arrays, first = _arrays(table), packed.first
    block = packed.block or TILE
    if packed.shared:
        values = table.starts[packed.last] - table.starts[first]
        programs = -(-values // TILE)
    else:
        tiles = arrays.first_tiles_list
        programs = tiles[packed.last] - tiles[first]
    blocks = table.sent(f"blocks {first}", packed.first_blocks, torch.int64)
    moments, scales = [(*each, *each)[:2] for each in (packed.moments, packed.scales)]
    scales = scales or moments
    tree1, tree2 = (*maps, *maps)[:2]
    given = arrays.addresses if corrections is None else corrections[:, first:]
    _launch(
        _update_kernel, programs, arrays.addresses[first:], arrays.layouts[first:],
        arrays.starts[first:], arrays.first_tiles[first:], blocks, packed.last - first,
        given, given.stride(0), healthy, *moments, *scales, tree1.values,
        tree2.values, tree1.midpoints, tree2.midpoints, *scalars(rule), KIND=rule.kind, NESTEROV=rule.nesterov,
        DECOUPLED=rule.decoupled, DECAYS=rule.weight_decay != 0,
        QUANTISED=packed.block is not None, SHARED=packed.shared, ROWS=TILE // block,
        BLOCK=block,
    )  # fmt: skip


def scalars(rule: UpdateRule) -> tuple[float, ...]:
    """Give the numbers of a step, which are rounded to float32 where they are used."""
    beta1, beta2 = rule.betas
    keep = 1 - rule.lr * rule.weight_decay
    return (
        rule.lr,
        rule.weight_decay,
        keep,
        beta1,
        beta2,
        1 - beta1,
        1 - beta2,
        rule.eps,
    )


@dataclass(frozen=True, eq=False)
class _DeviceTable:
    addresses: Tensor
    layouts: Tensor
    starts: Tensor
    first_tiles: Tensor
    first_tiles_list: list[int]


def _arrays(table: TensorTable) -> _DeviceTable:
    """Give a table as a device reads it; what has not changed is not sent again."""
    pairs = list(zip(table.weights, table.gradients, strict=True))
    addresses = [
        pointer
        for w, g in pairs
        for pointer in (w.data_ptr(), 0 if g is None else g.data_ptr())
    ]
    layouts = tuple(
        (w.shape, w.stride(), w.stride() if g is None else g.stride()) for w, g in pairs
    )

    def sent(values: list[int]) -> Tensor:
        return on_device(values, table.steps, torch.int64)

    def bounds() -> tuple[Tensor, Tensor, list[int]]:
        tiles = [0]
        for start, stop in zip(table.starts, table.starts[1:], strict=False):
            tiles.append(tiles[-1] - (start - stop) // TILE)
        return sent(table.starts), sent(tiles), tiles

    return _DeviceTable(
        table.kept("addresses", addresses, lambda: sent(addresses).view(-1, 2)),
        table.kept(
            "layouts",
            layouts,
            lambda: sent([v for each in layouts for v in _layout(*each)]).view(-1, 11),
        ),
        *table.kept("bounds", None, bounds),
    )


@functools.lru_cache(maxsize=4096)
def _layout(
    shape: tuple[int, ...], steps: tuple[int, ...], grad_steps: tuple[int, ...]
) -> list[int]:
    """Give the sizes of inner axes, and the steps of all, of two tensors of a shape."""
    axes: list[list[int]] = []
    for size, step, grad_step in zip(shape, steps, grad_steps, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1:] == [size * step, size * grad_step]:
            axes[-1] = [axes[-1][0] * size, step, grad_step]
        else:
            axes.append([size, step, grad_step])
    if len(axes) > _AXES:
        raise ValueError(
            f"A weight of shape {list(shape)} has the strides {steps}, its gradient "
            f"{grad_steps}. Make the weight contiguous: it is updated where it lies, "
            f"along at most {_AXES} axes."
        )
    # A weight of one axis is the outermost, which takes no division.
    inner = axes[1:] if axes else []
    outer = axes[0] if axes else [1, 1, 1]
    filled = [outer, *[[1, 0, 0]] * (_AXES - 1 - len(inner)), *inner]
    sizes, *both = zip(*filled, strict=True)
    return [*sizes[1:], *both[0], *both[1]]


def on_device(values: Sequence[float], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Send numbers to where a tensor is, without waiting for it."""
    host = torch.tensor(values, dtype=dtype, device="cpu")
    if like.device.type == "cuda":
        host = host.pin_memory()
    return host.to(like.device, non_blocking=True)


@functools.cache
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton can be imported and compiles for such weights; tried once."""
    weight = torch.ones(8, dtype=dtype, device=device)
    steps, healthy = (
        torch.ones(2, device=device, dtype=torch.float32),
        torch.ones(1, device=device, dtype=torch.float32),
    )
    table = TensorTable([weight], [torch.ones_like(weight)], [0, 8], steps)
    states = [torch.zeros(8, dtype=torch.uint8, device=device) for _ in range(2)]
    scales = [torch.zeros(1, device=device, dtype=torch.float32) for _ in range(2)]
    maps = [
        Map(*(torch.zeros(256, device=device, dtype=torch.float32) for _ in range(4)))
    ]
    try:
        clear_unless_finite(healthy, table)
        for kind in KINDS:
            update(
                table,
                Packed(0, 1, 256, False, [0, 1], states, scales),
                UpdateRule(
                    kind=kind, lr=0.1, weight_decay=0.0, betas=(0.9, 0.9), eps=1.0
                ),
                healthy,
                torch.ones(2, 2, dtype=torch.float64, device=device),
                maps,
            )
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(
            f"Triton's kernels do not run on {device} in {dtype} "
            f"({type(error).__name__}: {error}). Optimizers with 8-bit states step by "
            "plain torch operations there, in more time.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _launch(
    kernel: Callable[..., None], programs: int, *arguments: Any, **constants: Any
) -> None:
    if programs:
        with torch.cuda.device_of(arguments[0]):
            # Products are rounded as the reference rounds them.
            _compiled(kernel)[(programs,)](
                *arguments, enable_fp_fusion=False, **constants
            )


@functools.cache
def _compiled(kernel: Callable[..., None]) -> Any:
    import triton

    # Kernels look names up among their module's, which must not import Triton.
    names = globals()
    names["tl"] = triton.language
    for part in (_found, _offsets, _pointer, _read, _write):
        if not hasattr(part, "fn"):
            names[part.__name__] = triton.jit(part)
    return triton.jit(kernel, do_not_specialize=["tensors", "stride"])
