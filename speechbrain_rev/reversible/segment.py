"""Couplings, and the reconstruction of their activations as an autograd function.

An additive coupling follows equations 7 and 8 of the memory-efficient speaker embedding
paper, after Gomez et al., "The Reversible Residual Network", 2017. In plain autograd it is
the definition that the engine must meet.

The outputs of a run of couplings are kept, and the backward pass walks back from them
(Algorithm 1 of the memory-efficient speaker embedding paper): the graph of the run
that yields F(x2) for the inverse also yields the gradients, so that each residual
function runs exactly twice in a training step.

Where they are narrow between these, as bottlenecks are, what they read of a stream and what
they add to one is most of the memory. Both are computed for a part of the batch at a time,
and so are the gradients that reach the streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from speechbrain_rev.kernels.fixed_point import AT_ONCE
from speechbrain_rev.reversible.convolution import (
    Geometry,
    WeightGradient,
    filled,
    in_parts,
    parts_of,
)
from speechbrain_rev.reversible.hooks import (
    Moment,
    Sources,
    builds_no_more,
    has_hooks,
    may_keep,
    notify,
    report_hooks,
)
from speechbrain_rev.reversible.monitor import StreamNotes, checksum
from speechbrain_rev.reversible.recompute import (
    Gradients,
    Parameters,
    Root,
    refuse_double_backward,
)
from speechbrain_rev.reversible.replay import (
    Autocast,
    RunRecord,
    first_run,
    recorded,
    repeated,
    second_run,
    without_graph,
)
from speechbrain_rev.reversible.state import modules_of, version_of
from speechbrain_rev.reversible.streams import Stream, StreamFormat, Streams, tangent_of
from speechbrain_rev.torch_private import graph_is_kept


class AdditiveCoupling(nn.Module):
    """Two residual functions that update two streams in turn.

    y1 = x1 + F(x2), y2 = x2 + G(y1).

    Parameters
    ----------
    f, g : nn.Module
        The residual functions: any modules that keep a tensor's shape. Where frames
        are masked, they are called with the mask as second argument.

    Examples
    --------
    >>> coupling = AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> x = torch.randn(2, 4), torch.randn(2, 4)
    >>> x1, x2 = coupling.inverse(*coupling(*x))
    >>> torch.allclose(x1, x[0], atol=1e-5), x2.shape
    (True, torch.Size([2, 4]))
    """

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(
        self, x1: Tensor, x2: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Couple the streams.

        Parameters
        ----------
        x1, x2 : torch.Tensor, [batch, channel, freq, time] or any one shape
            The streams.
        mask : torch.Tensor or None
            Handed on to F and G.

        Returns
        -------
        tuple of torch.Tensor
            y1 and y2, of the same shape.
        """
        y1 = x1 + residual(self.f, x2, mask)
        return y1, x2 + residual(self.g, y1, mask)

    @torch.no_grad()
    def inverse(
        self, y1: Tensor, y2: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reconstruct the inputs from the outputs, without a graph.

        Parameters
        ----------
        y1, y2 : torch.Tensor
            What ``forward`` returned.
        mask : torch.Tensor or None
            The mask given to ``forward``.

        Returns
        -------
        tuple of torch.Tensor
            x1 and x2.
        """
        x2 = y2 - residual(self.g, y1, mask)
        return y1 - residual(self.f, x2, mask), x2


def arguments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """List a residual function's arguments: a mask only where there is one."""
    return (x,) if mask is None else (x, mask)


def residual(f: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """Call a residual function and check that it is one.

    Raises
    ------
    RuntimeError
        If it wrote into its input.
    ValueError
        If it changed the shape.
    """
    version = version_of(x)
    y = f(*arguments(x, mask))
    check_residual(f, x, y, version)
    return y


def check_residual(f: nn.Module, x: Tensor, y: Tensor, version: int) -> None:
    """Check that a residual function kept its input's shape and left it alone."""
    if version_of(x) != version:
        raise RuntimeError(
            f"{type(f).__name__} wrote into its input, which is the other stream of "
            "the coupling, or the tensor given to the first one: do not use that again. "
            "Use inplace=False in its first layer."
        )
    check_shape(f, x, y)


def check_shape(f: nn.Module, x: Tensor, y: Tensor) -> None:
    """Check that a residual function kept its input's shape."""
    shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
    if shape != list(x.shape):
        raise ValueError(
            f"A residual function must keep the shape of its input, but "
            f"{type(f).__name__} turned {list(x.shape)} into {shape}."
        )


class BoundaryConvolutions(nn.Module):
    """A residual function whose convolutions work on a part of the batch at a time.

    Parameters
    ----------
    first : nn.Conv2d
        Without bias, as the last ones.
    middle : nn.Module
        Called with the first one's output, and with the mask or None.
    last : sequence of nn.Conv2d
        One after the other.
    parts : int
        Parts of the batch.
    """

    def __init__(
        self, first: nn.Conv2d, middle: nn.Module, last: Sequence[nn.Conv2d], parts: int
    ) -> None:
        super().__init__()
        self.first, self.middle, self.last = first, middle, nn.ModuleList(last)
        self.parts = parts

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the residual, [batch, channel, freq, time]."""
        x = self.middle(in_parts(self.first, x, self.parts), mask)
        *convs, end = self.last
        for conv in convs:
            x = in_parts(cast(nn.Conv2d, conv), x, self.parts)
        return in_parts(cast(nn.Conv2d, end), x, self.parts, mask)


def reconstruct_boundaries(
    f: BoundaryConvolutions,
    recording: RunRecord,
    gradients: Gradients,
    run: int,
    format: StreamFormat,
    mask: Tensor | None,
    kept: tuple[Tensor, Tensor],
    changed: tuple[Tensor, Tensor],
) -> None:
    """Run a residual function again, subtract it, and add its gradients, all in place.

    Parameters
    ----------
    f : BoundaryConvolutions
        The function.
    recording : RunRecord
        Of its first run.
    gradients : Gradients
        Where those of its parameters go.
    run : int
        Its place among the runs of the backward pass.
    format : StreamFormat
        Of the streams.
    mask : torch.Tensor or None
        As in the first run.
    kept, changed : tuple of torch.Tensor
        Value and gradient of the stream that it reads, and of that which it was added
        to.
    """
    leaves = gradients.leaves(run)
    places = {id(module): (i, "weight") for i, module in enumerate(f.modules())}
    with repeated(f, recording, leaves):
        x = _read(f, kept, format)
        hidden = f.middle(x, mask)
        of_hidden, of_weights = _subtract(f, hidden.detach(), changed, format, mask)
    for conv, of_weight in zip(f.last, of_weights, strict=True):
        gradients.keep(run, places[id(conv)], of_weight)
    root = Root(hidden, of_hidden)
    del hidden, of_hidden
    with recording.flags():
        (of_x,) = gradients.backward(run, [root], [x])
        del x, root
        assert of_x is not None
        first = places[id(f.first)]
        gradients.keep(run, first, _add(leaves[first], f, of_x, kept, format))


@torch.no_grad()
def _read(
    f: BoundaryConvolutions, kept: tuple[Tensor, Tensor], format: StreamFormat
) -> Tensor:
    """Run the first convolution; what it returns begins a graph."""
    value, grad = kept

    def convolve(part: slice) -> Tensor:
        return f.first(format.decode(value[part], grad.dtype))

    return filled(len(value), f.parts, convolve).requires_grad_()


@torch.no_grad()
def _subtract(
    f: BoundaryConvolutions,
    hidden: Tensor,
    changed: tuple[Tensor, Tensor],
    format: StreamFormat,
    mask: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Subtract what the last convolutions return; give their gradients."""
    value, grad = changed
    convs = [cast(nn.Conv2d, conv) for conv in f.last]
    totals = [WeightGradient(c.weight, c.weight.requires_grad) for c in convs]

    def gradient(part: slice) -> Tensor:
        given = [hidden[part]]
        for conv in convs:
            given.append(conv(given[-1]))
        y = given.pop()
        slope = grad[part].to(y.dtype)
        if mask is not None:
            y.mul_(mask[part].to(y.dtype))
            slope = slope * mask[part].to(y.dtype)
        format.subtract(value[part], y, out=value[part], reuse=True)
        del y
        for conv, total in zip(reversed(convs), reversed(totals), strict=True):
            of_x, of_weight = Geometry.of(conv).gradients(
                slope, given.pop(), conv.weight, True, total.wanted
            )
            total.add(of_weight)
            assert of_x is not None
            slope = of_x
        return slope

    of_hidden = filled(len(value), f.parts, gradient)
    return of_hidden, [total.value for total in totals]


@torch.no_grad()
def _add(
    weight: Tensor,
    f: BoundaryConvolutions,
    of_x: Tensor,
    kept: tuple[Tensor, Tensor],
    format: StreamFormat,
) -> Tensor | None:
    """Add the first convolution's gradient to the stream's; give its weight's."""
    value, grad = kept
    geometry = Geometry.of(f.first)
    total = WeightGradient(weight, weight.requires_grad)
    for part in parts_of(len(value), f.parts):
        x = format.decode(value[part], grad.dtype)
        of_part, of_weight = geometry.gradients(
            of_x[part], x, weight, True, total.wanted
        )
        del x
        total.add(of_weight)
        assert of_part is not None
        grad[part].add_(of_part)
        del of_part
    return total.value


def reconstruct(
    blocks: Sequence[AdditiveCoupling],
    held: list[Streams],
    mask: Tensor | None,
    notes: StreamNotes,
    start: int,
    chunk: int | None,
) -> Streams:
    """Run couplings and keep only what the last one returns.

    Parameters
    ----------
    blocks : sequence of AdditiveCoupling
        At least one.
    held : list of Streams
        What the first one takes; it is emptied, so that no caller keeps its values.
    mask : torch.Tensor or None
        Handed on to the residual functions.
    notes : StreamNotes
        Of this pass through the chain.
    start : int
        The first block's place in the chain.
    chunk : int or None
        Hidden channels at a time.

    Returns
    -------
    Streams
        What the last one returns.
    """
    first, second, format, validity = held.pop()
    # F and G in turn, each as its pieces.
    halves = [pieces_of(f, chunk) for block in blocks for f in (block.f, block.g)]
    parameters = Parameters([f for half in reversed(halves) for f in reversed(half)])
    values, tangents = [first.value, second.value], (first.tangent, second.tangent)
    del first, second  # each value is dropped once it was used
    outputs = _Reconstruct.apply(
        blocks, halves, parameters, format, notes, start, values,
        mask,  # saved, it has no gradient
        *tangents, *parameters.tensors,
    )  # fmt: skip
    y1, y2, tangent1, tangent2 = outputs
    return Streams(Stream(y1, tangent1), Stream(y2, tangent2), format, validity)


def pieces_of(f: nn.Module, chunk: int | None) -> Sequence[nn.Module]:
    """List functions that add up to a residual function, itself if it is not split.

    Parameters
    ----------
    f : nn.Module
        A residual function. Only what its own class says about pieces is asked for: a
        class derived from it may compute something else. A piece returns a tensor of its
        own, whose storage nobody needs, as a convolution does, and hands down a gradient
        of its own; or it has ``adds_to_stream`` set, takes the stream's tangent as third
        argument and returns it as well, as ``convolve_stream`` does.
    chunk : int or None
        Hidden channels of a piece.

    Returns
    -------
    sequence of nn.Module
        In the order in which they are added.
    """
    if chunk is None or "pieces" not in vars(type(f)):
        return [f]
    return f.pieces(chunk)  # type: ignore[operator]


class _Total:
    """A stream's own gradient, to which what residual functions hand down is added."""

    def __init__(self, given: Tensor | None, in_place: bool) -> None:
        #: None as long as nobody handed anything down.
        self.value, self._in_place = given, in_place

    def filled(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Give the value, zeros at first, to who adds to it in its place."""
        if self.value is None:
            self.value = torch.zeros_like(like, dtype=dtype)
        return self.value

    def add(self, slope: Tensor | None) -> None:
        """Add what a residual function hands down, if it hands down anything."""
        if slope is None:
            return
        if self.value is None:
            wide = torch.promote_types(slope.dtype, torch.float32)
            self.value = slope.to(wide, copy=True)
            return
        self.value = self.value.add_(slope) if self._in_place else self.value + slope

    def handed_to(self, tangent: Tensor) -> list[Root]:
        """Give the value to who adds to it in its place and hands it back."""
        value = self.value
        if value is None:
            return []
        return [Root(tangent, value if self._in_place else value.clone())]

    def replace(self, total: Tensor | None) -> None:
        """Take what is handed back."""
        self.value = self.value if total is None else total


class _Reconstruct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[AdditiveCoupling],
        halves: Sequence[Sequence[nn.Module]],
        parameters: Parameters,
        format: StreamFormat,
        notes: StreamNotes,
        start: int,
        values: list[Tensor],
        mask: Tensor | None,
        tangent1: Tensor,
        tangent2: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.blocks, ctx.halves = blocks, halves
        ctx.parameters, ctx.format = parameters, format
        ctx.recordings, ctx.dtype = [], tangent1.dtype
        # Who keeps what a function saw or made must not find it changed.
        ctx.in_place = True
        for i, half in enumerate(halves, 1 + 2 * start):
            for f in half:
                if _is_watched(f):
                    ctx.in_place = False
                    report_hooks(modules_of(f), f"{notes.place(i)} is reconstructed")
        ctx.notes, ctx.start = notes, start
        #: Checksums of what blocks take: of the first one, or of each in a first step.
        ctx.expected = {}
        if notes.mismatches is not None:
            ctx.expected[0] = checksum(values)
        kept, changed = values.pop().detach(), values.pop().detach()
        #: Whether what each function reads has a gradient.
        ctx.needed = []
        of_kept, of_changed = tangent2.requires_grad, tangent1.requires_grad
        # What a chain begins with is its own; values that earlier blocks saved are not.
        spared = 0 if ctx.in_place and start == 0 else 2
        floats: Tensor | None = None  # of what G reads
        for i, half in enumerate(halves, 1 + 2 * start):
            block, half_of_block = divmod(i - 1 - 2 * start, 2)
            if half_of_block == 0:
                notify(blocks[block], Moment.FORWARD_BEGINS)
                if notes.differs is not None and block > 0:
                    ctx.expected[block] = checksum([changed, kept])
            in_place = ctx.in_place and i > 2 * start + spared
            x = format.decode(kept, ctx.dtype) if floats is None else floats
            x, floats = _narrowed(x, half, Autocast.now({x.device})), None
            ctx.needed.append(of_kept)
            residuals = []
            for n, f in enumerate(half, 1):
                roots = tangent1, tangent2
                y, recording, has_graph, is_kept = _first_run(
                    f, x, mask, notes.place(i), roots if of_kept else ()
                )
                of_changed = of_changed or has_graph
                if is_kept:
                    ctx.in_place = in_place = False
                residuals.append(y)
                del y
                ctx.recordings.append(recording)
                if n == len(half):
                    del x
                    if half_of_block == 0:  # at a block's end nothing else is held
                        floats = format.place_of_floats(changed, ctx.dtype)
                elif len(residuals) < AT_ONCE:
                    continue
                changed = format.add(
                    changed, residuals, notes.row(i), out=changed if in_place else None,
                    floats=floats, reuse=len(half) > 1,
                )  # fmt: skip
                residuals.clear()
                in_place = ctx.in_place
            changed, kept, of_changed, of_kept = kept, changed, of_kept, of_changed
            if half_of_block == 1 and block < len(blocks) - 1:
                # That of the last one comes where nobody keeps the input any more.
                notify(blocks[block], Moment.FORWARD_ENDS)
        y1, y2 = changed, kept
        tangents = tangent_of(y1, ctx.dtype), tangent_of(y2, ctx.dtype)
        needed = of_changed, of_kept
        cut_off = [t for t, n in zip(tangents, needed, strict=True) if not n]
        ctx.mark_non_differentiable(y1, y2, *cut_off)
        ctx.save_for_backward(y1, y2, mask, *tensors)
        return y1, y2, *tangents

    @staticmethod
    def backward(
        ctx: Any, _1: Any, _2: Any, grad1: Tensor | None, grad2: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward(grad1, grad2)
        if grad1 is None and grad2 is None:
            return (None,) * len(ctx.needs_input_grad)
        y1, y2, mask, *tensors = ctx.saved_tensors
        if graph_is_kept():
            y1, y2 = y1.clone(), y2.clone()
        gradients = Gradients(ctx.parameters, tensors)
        kept, changed = y1, y2
        of_kept, of_changed = _Total(grad1, ctx.in_place), _Total(grad2, ctx.in_place)
        runs = enumerate(reversed(ctx.recordings))
        # Reconstructed in reverse order: G sees the y1 that it saw in the forward.
        for i, half in reversed(list(enumerate(ctx.halves))):
            if i % 2 == 1:
                _compare(ctx, i // 2 + 1, [kept, changed])
                notify(ctx.blocks[i // 2], Moment.BACKWARD_BEGINS)
            of_y = of_changed.value
            if of_y is None:
                # Nobody needs what was added: it is subtracted, and has no gradient.
                x = ctx.format.decode(kept, ctx.dtype)
                for f in reversed(half):
                    run, recording = next(runs)
                    leaves = gradients.leaves(run)
                    y = without_graph(f, recording, leaves, *arguments(x, mask))
                    changed = _subtracted(ctx, changed, y, half)
                    del y
                del x
                kept, changed, of_kept, of_changed = changed, kept, of_changed, of_kept
                continue
            if ctx.in_place and isinstance(half[0], BoundaryConvolutions):
                run, recording = next(runs)
                reconstruct_boundaries(
                    half[0], recording, gradients, run, ctx.format, mask,
                    (kept, of_kept.filled(kept, ctx.dtype)),
                    (changed, of_y),
                )  # fmt: skip
                kept, changed, of_kept, of_changed = changed, kept, of_changed, of_kept
                continue
            here = [next(runs) for _ in half]
            x = ctx.format.decode(kept, ctx.dtype)
            x = _narrowed(x, half, here[0][1].autocast)
            for f, (run, recording) in zip(reversed(half), here, strict=True):
                leaves, needed = gradients.leaves(run), ctx.needed[i]
                adds = adds_to_stream(f)
                leaf = x.detach().requires_grad_(needed and not adds)
                if not adds:
                    y = second_run(f, recording, leaves, *arguments(leaf, mask))
                    roots = []
                else:
                    read = tangent_of(x, ctx.dtype).requires_grad_(needed)
                    y, after = second_run(f, recording, leaves, leaf, mask, read)
                    roots, leaf = of_kept.handed_to(after), read
                    del read, after
                # Before y's storage is reused: a view that was written to has a longer way
                # back in the graph.
                roots.append(Root(y))
                changed = _subtracted(ctx, changed, y.detach(), half)
                del y  # what follows needs its graph only
                roots[-1].receive(of_y)
                with recording.flags():
                    wanted = [leaf] if needed else []
                    for slope in gradients.backward(run, roots, wanted):
                        of_kept.replace(slope) if adds else of_kept.add(slope)
                slope = None
                del leaf, leaves, roots, wanted
            del x
            kept, changed, of_kept, of_changed = changed, kept, of_changed, of_kept
        _compare(ctx, 0, [kept, changed])
        if ctx.notes.mismatches is not None:
            ctx.notes.checks.settle()
        return (None,) * 8 + (of_kept.value, of_changed.value, *gradients.values)


def _compare(ctx: Any, block: int, streams: list[Tensor]) -> None:
    """Compare what a block took with what was reconstructed, where that is due."""
    if (expected := ctx.expected.get(block)) is None:
        return
    differs = (checksum(streams) != expected).any()
    if ctx.notes.differs is None:
        ctx.notes.mismatches.add_(differs)
    elif differs:
        ctx.notes.differs(ctx.start + block)


def _first_run(
    f: nn.Module, x: Tensor, mask: Tensor | None, place: str, roots: tuple[Tensor, ...]
) -> tuple[Tensor, RunRecord, bool, bool]:
    """Run a function.

    Say as well whether plain autograd would give its output a graph, and whether somebody
    may keep what is made of its input.
    """
    version = version_of(x)
    keepable = may_keep(f)
    if not keepable or builds_no_more(f):
        y, recording = first_run(f, *arguments(x, mask))
        check_residual(f, x, y, version)
        has_graph = bool(roots) or any(p.requires_grad for p in f.parameters())
        return y, recording, has_graph, keepable
    sources = Sources(f, place)
    with recorded(modules_of(f), x) as recording, sources.in_place():
        y = f(*arguments(sources.of_input(x, *roots), mask))
    check_residual(f, x, y, version)
    y, has_graph = y.detach(), y.requires_grad
    return y, recording, has_graph, sources.is_input_kept()


def adds_to_stream(f: nn.Module) -> bool:
    """Whether a piece takes the tangent of what it reads, and returns it as well."""
    return getattr(f, "adds_to_stream", False) is True


def _narrowed(x: Tensor, half: Sequence[nn.Module], autocast: Autocast) -> Tensor:
    """Cast once for all pieces what each of them would cast first."""
    casts = len(half) > 1 and getattr(half[0], "casts_its_input", False)
    return x.to(autocast.dtype) if casts and autocast.enabled else x


def _subtracted(
    ctx: Any, value: Tensor, y: Tensor, half: Sequence[nn.Module]
) -> Tensor:
    """Subtract a residual, whose storage is free where it is one of several pieces."""
    out, format = value if ctx.in_place else None, cast(StreamFormat, ctx.format)
    return format.subtract(value, y, out=out, reuse=len(half) > 1)


def _is_watched(module: nn.Module) -> bool:
    return any(map(has_hooks, module.modules()))
