"""Chains of couplings, each in a memory mode of its own."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from speechbrain_rev.compression.activations import ActivationCompression
from speechbrain_rev.modes import Mode, as_mode, is_lossless
from speechbrain_rev.reversible.flags import Flags
from speechbrain_rev.reversible.hooks import Moment, has_hooks, notify, notify_end
from speechbrain_rev.reversible.monitor import Checks, Monitor, StreamNotes, Verify
from speechbrain_rev.reversible.norm import updated_together
from speechbrain_rev.reversible.recompute import (
    recompute_call,
    refuse_what_cannot_run_again,
    trains,
)
from speechbrain_rev.reversible.replay import (
    Autocast,
    KeptBuffers,
    refuse_transforms,
    shared_by,
    stored_run,
)
from speechbrain_rev.reversible.segment import (
    AdditiveCoupling,
    adds_to_stream,
    arguments,
    check_shape,
    pieces_of,
    reconstruct,
    residual,
)
from speechbrain_rev.reversible.state import modules_of
from speechbrain_rev.reversible.streams import (
    Stream,
    StreamFormat,
    Streams,
    add,
    as_format,
    enter,
    leave,
    read,
)
from speechbrain_rev.torch_private import is_compiled

_HALVES = (torch.float16, torch.bfloat16)


class ReversibleChain(nn.Module):
    """Couplings in a row whose activations need not be stored.

    Parameters
    ----------
    blocks : iterable of AdditiveCoupling
        The couplings. Residual functions may be any modules that keep the shape.
    mode : Mode or str, or sequence of these
        What to keep for the backward pass, for all blocks or for each.
    streams : {"exact", "float"}
        Number format of the streams: fixed-point numbers below 16,384, from which every
        mode makes the same gradients to the bit, or floats, which are reconstructed up
        to an error that grows with depth.
    verify : {"first", "raise", "warn"} or None
        What happens if exact streams are not reconstructed to the bit, because
        something does not compute the same twice. "first" raises in the first step, after
        each block, and warns later; None looks at nothing.
    verify_every : int
        Forward passes in training from one look to the next.
    chunk : int or None
        Hidden channels that residual functions which can be split work on at a time;
        None runs them whole. Part of the arithmetic: gradients are equal to the bit in
        all modes at one chunk. Residual functions that can be split have a method
        ``pieces(channels)`` that lists functions which add up to them; each ends with an
        operation as a convolution is, whose output and gradients are new tensors.

    Raises
    ------
    ValueError
        If there is no such mode or format, or not one mode for each block.

    Notes
    -----
    In evaluation and without gradients the couplings run as plain torch. Gradients
    equal those of the couplings in plain autograd up to rounding; the running
    statistics of batch normalisation and plain attributes are updated once. Reconstructed
    blocks refuse to be differentiated twice, tensors that are neither inputs nor
    registered parameters, and losses on tensors that were made within them; FSDP is
    refused. One chain must not be trained by two threads at once. Gradients of some inputs
    alone, by ``torch.autograd.grad``, run the backward hooks of a whole reconstructed
    function.

    Examples
    --------
    >>> halves = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> chain = ReversibleChain(AdditiveCoupling(halves(), halves()) for _ in range(3))
    >>> y1, y2 = chain(torch.randn(2, 4), torch.randn(2, 4))
    >>> (y1.sum() + y2.sum()).backward()
    >>> chain.blocks[0].f[0].weight.grad.shape
    torch.Size([4, 4])
    """

    def __init__(
        self,
        blocks: Iterable[AdditiveCoupling],
        *,
        mode: Mode | str | Sequence[Mode | str] = Mode.RECONSTRUCT,
        streams: str = "exact",
        verify: Verify | None = "first",
        verify_every: int = 100,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        for block in self.blocks:
            if type(block).forward is not AdditiveCoupling.forward:
                raise ValueError(
                    f"A chain runs couplings by itself and would not call "
                    f"{type(block).__name__}.forward. Give AdditiveCoupling(f, g)."
                )
        as_format(streams)  # refuses other names
        self.format_name = streams
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise ValueError(f"chunk is {chunk!r}; it must be None or at least 1.")
        self.chunk = chunk
        self.compression = ActivationCompression()
        self.monitor = Monitor(verify, verify_every)
        self.set_mode(mode)

    def set_mode(self, mode: Mode | str | Sequence[Mode | str]) -> None:
        """Choose what to keep, for all blocks or for each.

        Parameters
        ----------
        mode : Mode or str, or sequence of these
            As for the constructor.
        """
        modes = [mode] * len(self.blocks) if isinstance(mode, str) else list(mode)
        if len(modes) != len(self.blocks):
            raise ValueError(
                f"{len(modes)} modes were given for {len(self.blocks)} blocks; "
                "give one mode, or one for each block."
            )
        chosen = [as_mode(m) for m in modes]
        if chosen != getattr(self, "modes", chosen):
            self.monitor.restart()
        self.modes = chosen

    def check_streams(self) -> None:
        """Wait for the device and report what was noted about the streams up to now.

        Without this call a later training step reports it, without waiting.

        Raises
        ------
        StreamError
            If streams were not reconstructed to the bit and ``verify="raise"``.
        """
        self.monitor.report(as_format(self.format_name).limit, wait=True)

    def largest_stream(self) -> float:
        """Wait for the device and return how large values in exact streams have become.

        Returns
        -------
        float
            The largest magnitude since the last call.

        Raises
        ------
        ValueError
            If the streams have no limit, for nothing is measured then.
        """
        if math.isinf(as_format(self.format_name).limit):
            raise ValueError(
                f"Values of {self.format_name} streams have no limit and are not "
                "measured. Build the chain with streams='exact'."
            )
        self.check_streams()
        return self.monitor.pop_largest()

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse ``torch.jit.script``, which knows no autograd functions."""
        raise RuntimeError(
            "A ReversibleChain cannot be given to torch.jit.script. Use torch.export in "
            "evaluation."
        )

    def extra_repr(self) -> str:
        """Show the modes of the blocks, run by run."""
        runs = [(m.value, len(list(g))) for m, g in itertools.groupby(self.modes)]
        return f"modes={', '.join(f'{n} x {m}' for m, n in runs)}"

    def forward(
        self, x1: Tensor, x2: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the chain.

        Parameters
        ----------
        x1, x2 : torch.Tensor
            The streams, of one shape, dtype and device.
        mask : torch.Tensor or None
            Handed on to the residual functions as second argument.

        Returns
        -------
        tuple of torch.Tensor
            y1 and y2, of the same shape, in float32 at least under autocast; the caller
            may write to them.

        Raises
        ------
        ValueError
            If the streams do not match.
        RuntimeError
            If parameters are sharded by FSDP.
        """
        if x1.shape != x2.shape or x1.device != x2.device or x1.dtype != x2.dtype:
            raise ValueError(
                "The two streams must have one shape, dtype and device; given were "
                f"{list(x1.shape)} {x1.dtype} {x1.device} and "
                f"{list(x2.shape)} {x2.dtype} {x2.device}."
            )
        if not trains(self):
            if _half_under_autocast(x1):
                # A half has too few bits to add to, here as in training.
                x1, x2 = x1.float(), x2.float()
            for block in self.blocks:
                x1, x2 = block(x1, x2, mask)
            return x1, x2
        flags = Flags.now({x1.device})
        y1, y2 = leave(self.train_step([x1, x2], mask))
        y1, y2 = flags.carry(y1, y2)
        return y1, y2

    def train_step(self, halves: list[Tensor], mask: Tensor | None) -> Streams:
        """Run the chain in eager mode, for networks that read its streams themselves.

        Parameters
        ----------
        halves : list of torch.Tensor
            Both streams; it is emptied, so that no caller keeps them.
        mask : torch.Tensor or None
            Handed on to the residual functions.

        Returns
        -------
        Streams
            After the last block.
        """
        if torch.compiler.is_compiling():
            # The compiler takes values for constants of the graph: wrong gradients.
            eager = torch.compiler.disable(self._uncompiled_step)
            return cast(Streams, eager(halves, mask))
        refuse_transforms()
        x2, x1 = halves.pop(), halves.pop()
        self._check_run(x1, mask)
        format = as_format(self.format_name)
        notes = self.monitor.begin(1 + 2 * len(self.blocks), format.limit, x1.device)
        before = None if notes.largest is None else KeptBuffers(self.blocks)
        # Reconstruction writes to the values that it is given.
        own = bool(self.modes) and self.modes[0].spec.needs_inverse
        entered = [enter(x1, x2, format, notes.row(0), own)]
        del x1, x2  # values of their own from here on
        wanted = not is_lossless(self.modes)
        with (
            updated_together() as statistics,
            self.compression.during(self, everywhere=False, wanted=wanted),
        ):
            streams = self._advance(entered, mask, notes)
            validity = self.monitor.close(notes, format.limit)
            statistics.require(validity)
        if before is not None and validity is not None:
            before.restore_where(validity)
        return streams._replace(validity=validity)

    def _uncompiled_step(self, halves: list[Tensor], mask: Tensor | None) -> Streams:
        """Run the chain where a compiler was to, and warn that nothing is compiled."""
        # Python shows the same words once.
        warnings.warn(_NOT_COMPILED, CompileWarning, stacklevel=1)
        return self.train_step(halves, mask)

    def _advance(
        self, entered: list[Streams], mask: Tensor | None, notes: StreamNotes
    ) -> Streams:
        """Run the blocks; ``entered`` is emptied, so that no caller keeps its values."""
        streams = entered.pop()
        shared: set[int] = set()
        if not all(mode.spec.needs_inverse for mode in self.modes):
            couplings = cast(Iterable[AdditiveCoupling], self.blocks)
            shared = shared_by(f for b in couplings for f in (b.f, b.g))
        modes = self.modes
        if not _differentiated(streams, self.blocks):
            # Nothing is stored either; a tensor that is neither registered nor given
            # gets the gradient that no function of ours could hand to it.
            modes = [Mode.STORE] * len(self.blocks)
        places = enumerate(zip(modes, self.blocks, strict=True))
        for mode, run in itertools.groupby(places, _mode_of):
            here = list(run)
            blocks = [cast(AdditiveCoupling, block) for _, (_, block) in here]
            if mode.spec.needs_inverse:
                held = [streams]
                del streams  # the run alone has it, and drops it
                streams = reconstruct(blocks, held, mask, notes, here[0][0], self.chunk)
                notify(blocks[-1], Moment.FORWARD_ENDS)
            else:
                call: _Call = _stored
                if mode.spec.runs_twice:
                    call = functools.partial(_recomputed, checks=self.monitor.checks)
                for i, block in enumerate(blocks, here[0][0]):
                    halves = 1 + 2 * i, 2 + 2 * i
                    notify(block, Moment.FORWARD_BEGINS)
                    with mode.spec.around():
                        streams = _couple(
                            block,
                            streams,
                            mask,
                            call,
                            shared,
                            self.chunk,
                            notes,
                            halves,
                        )
                    notify_end(block, streams.second.tangent)
        return streams

    def _check_run(self, x1: Tensor, mask: Tensor | None) -> None:
        if x1.dtype in _HALVES and not _half_under_autocast(x1):
            raise ValueError(
                f"The streams are {x1.dtype} outside autocast, and are kept in float32. "
                "Keep inputs and weights in float32 and train under torch.autocast."
            )
        if any(mode.spec.runs_twice for mode in self.modes):
            refuse_what_cannot_run_again(modules_of(self))
        if len(self.modes) != len(self.blocks):
            raise RuntimeError(
                f"The chain has {len(self.blocks)} blocks but modes for "
                f"{len(self.modes)}. Call set_mode after adding or removing blocks."
            )
        if math.isfinite(as_format(self.format_name).limit):
            _refuse_compiled(
                (f"blocks.{name}", module)
                for name, module in self.blocks.named_modules()
                if name.count(".")
                and self.modes[int(name.split(".")[0])].spec.runs_twice
            )
        if mask is not None and mask.requires_grad:
            raise ValueError("A mask cannot need a gradient: pass mask.detach().")
        if any(has_hooks(block) for block in self.blocks):
            warnings.warn(
                "Hooks on a coupling do not fire in training, where the chain calls F "
                "and G by itself. Put them on the coupling's f and g.",
                stacklevel=3,
            )


_NOT_COMPILED = (
    "torch.compile was given a network with a ReversibleChain. In training the chain runs "
    "as without torch.compile, and is no faster; in evaluation it is compiled."
)


class CompileWarning(UserWarning):
    """A chain trains in a network that was given to torch.compile, and is not compiled."""


def _refuse_compiled(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse compiled modules in residual functions whose bits must be equal twice.

    With and without a graph the compiler makes two programs of one module; inductor's
    were seen to differ in the last bit of SiLU and GELU.
    """
    for name, module in modules:
        if is_compiled(module):
            raise ValueError(
                f"{name} ({type(module).__name__}) was given to torch.compile, which "
                "makes one program for a run without a graph and another for a run "
                "with one: exact streams cannot promise equal bits. Leave it uncompiled, "
                "or use streams='float', or mode='store' for this block."
            )


def _half_under_autocast(x: Tensor) -> bool:
    return x.dtype in _HALVES and Autocast.now({x.device}).enabled


def _differentiated(streams: Streams, blocks: nn.Module) -> bool:
    tangents = streams.first.tangent, streams.second.tangent
    return any(t.requires_grad for t in (*tangents, *blocks.parameters()))


def _mode_of(place: tuple[int, tuple[Mode, nn.Module]]) -> Mode:
    return place[1][0]


#: Runs a residual function on its inputs.
_Call = Callable[..., Any]


def _stored(f: nn.Module, *inputs: Any, name: str) -> Any:
    return f(*inputs)


def _recomputed(f: nn.Module, *inputs: Any, checks: Checks, name: str) -> Any:
    return recompute_call(
        f, f, inputs, {}, shares_casts=False, checks=checks, name=name
    )


def _couple(
    block: AdditiveCoupling,
    streams: Streams,
    mask: Tensor | None,
    call: _Call,
    shared: set[int],
    chunk: int | None,
    notes: StreamNotes,
    halves: tuple[int, int],
) -> Streams:
    """Run one coupling with autograd's storage, or keeping F's and G's inputs only."""
    first, second, format, validity = streams
    of_f, of_g = (functools.partial(call, name=notes.place(i)) for i in halves)
    pieces = pieces_of(block.f, chunk)
    for piece, x in zip(pieces, _read_for(pieces, second, format), strict=True):
        f, second = _residual(piece, x, second, mask, of_f, shared)
        first = add(first, f, format, notes.row(halves[0]))
    pieces = pieces_of(block.g, chunk)
    for piece, x in zip(pieces, _read_for(pieces, first, format), strict=True):
        g, first = _residual(piece, x, first, mask, of_g, shared)
        second = add(second, g, format, notes.row(halves[1]))
    return Streams(first, second, format, validity)


def _read_for(
    pieces: Sequence[nn.Module], stream: Stream, format: StreamFormat
) -> Iterator[Tensor]:
    """Read a stream once, connected for each piece by itself, just before it runs.

    Gradients of the pieces are then added to the stream's one by one, as where it is
    reconstructed: autograd works on what was made last first.
    """
    floats = format.decode(stream.value, stream.tangent.dtype)
    for _ in pieces:
        yield read(stream, floats, alone=len(pieces) > 1)


def _residual(
    f: nn.Module,
    x: Tensor,
    stream: Stream,
    mask: Tensor | None,
    call: functools.partial[Any],
    shared: set[int],
) -> tuple[Tensor, Stream]:
    """Compute a residual of what was read of a stream; give the stream as it goes on."""
    with stored_run(f, x, shared):
        if adds_to_stream(f):
            y, tangent = call(f, x, mask, stream.tangent)
            stream = stream._replace(tangent=tangent)
        elif call.func is not _stored:
            y = call(f, *arguments(x, mask))
        else:
            return residual(f, x, mask), stream
    check_shape(f, x, y)
    return y, stream
