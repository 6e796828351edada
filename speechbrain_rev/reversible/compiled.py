"""To compile the pure pieces of a network's arithmetic, and nothing around them.

Normalising, with ReLU, and adding a rounded residual to a stream are functions of
tensors that have no graph and keep nothing. Each is compiled once for each kind of
input and called in the first and in the second run of a residual function alike, so
that the same machine code makes the same bits in every memory mode. Convolutions and
the chain itself run as they do without a compiler.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.utils._python_dispatch import _get_current_dispatch_mode

from speechbrain_rev.kernels.fixed_point import is_dense
from speechbrain_rev.reversible import fixed_point as reference

#: What can compile: torch's own compiler, and its tracing without one, for tests.
BACKENDS = ("inductor", "aot_eager")

M = TypeVar("M", bound=nn.Module)

#: What is warned of where a chain trains in a network that was given to torch.compile.
NOT_COMPILED = (
    "torch.compile was given a network with a ReversibleChain. In training the chain runs "
    "as without torch.compile, and is no faster. Call compile_pieces(network) of "
    "speechbrain_rev.reversible (the recipe: compile: true), which compiles what can be."
)


class CompileWarning(UserWarning):
    """A chain trains in a network that was given to torch.compile, and is not compiled."""


def compile_pieces(module: M, backend: str | None = "inductor") -> M:
    """Compile normalisations and the adding of residuals, or cease to.

    Part of the arithmetic: with one backend gradients are equal to the bit in all
    modes, but normalised values may differ from uncompiled ones in their last bit.

    Parameters
    ----------
    module : nn.Module
        A network with chains or normalisations of this package. The choice is copied
        and pickled with it; its state dict and its parameters' names stay as they are.
        The recipe does it where a YAML has ``compile: true``.
    backend : {"inductor", "aot_eager"} or None
        Who compiles, at the first training steps; None for no compiler. Inductor needs
        a C++ compiler on the CPU, and Triton on a GPU.

    Returns
    -------
    nn.Module
        The module itself.

    Raises
    ------
    ValueError
        If there is no such backend, or nothing to compile.

    Notes
    -----
    On the CPU, where convolutions take nine tenths of a step, steps of whole encoders
    take about as long with inductor as without; on CUDA nothing was measured. Each piece is compiled once for all sizes, and again for other dtypes and where an axis has
    one element only, not from step to step. Tensors without values,
    layouts that are not dense, and whatever a dispatch mode is to see (a count of
    memory) are computed without a compiler; a count of memory that begins or ends
    between a forward pass and its backward pass may therefore cost that step its equal
    bits. Frame masks and gradients are computed without one, too. On CUDA a kernel of
    this package adds to the streams in any case, and one normalises where no compiler
    does.

    Examples
    --------
    >>> from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
    >>> halves = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> chain = ReversibleChain(AdditiveCoupling(halves(), halves()) for _ in range(3))
    >>> compile_pieces(chain, "aot_eager").compiled_with
    'aot_eager'
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}; it must be one of "
            f"{', '.join(map(repr, BACKENDS))}, or None for no compiler."
        )
    owners = [m for m in module.modules() if hasattr(type(m), "compiled_with")]
    if not owners:
        raise ValueError(
            f"{type(module).__name__} has no chain and no normalisation of this package, "
            "and no pieces to compile. Use torch.compile for it."
        )
    for owner in owners:
        owner.compiled_with = backend  # type: ignore[assignment]
    return module


def backend_of(module: nn.Module) -> str | None:
    """Name the compiler of a network's pieces; None if nobody compiles them.

    Examples
    --------
    >>> from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
    >>> chain = ReversibleChain([AdditiveCoupling(nn.Tanh(), nn.Tanh())])
    >>> backend_of(chain), backend_of(compile_pieces(chain, "aot_eager"))
    (None, 'aot_eager')
    """
    own = (getattr(m, "compiled_with", None) for m in module.modules())
    return next((backend for backend in own if backend is not None), None)


def compiling() -> tuple[int, float]:
    """Count what was compiled in this process so far.

    Returns
    -------
    pieces : int
        Compiled functions: for each, kinds of input count apart.
    seconds : float
        What compiling them took.

    Examples
    --------
    >>> pieces, seconds = compiling()
    >>> pieces >= 0 and seconds >= 0
    True
    """
    return len(_COMPILED), sum(_SECONDS)


def refuse_compiled(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse compiled modules in residual functions whose bits must be equal twice.

    With and without a graph the compiler makes two programs of one module; inductor's
    were seen to differ in the last bit of SiLU and GELU.

    Parameters
    ----------
    modules : iterable of tuple
        Names and modules that run twice.

    Raises
    ------
    ValueError
        If one is compiled.
    """
    for name, module in modules:
        if _is_compiled(module):
            raise ValueError(
                f"{name} ({type(module).__name__}) was given to torch.compile, which "
                "makes one program for a run without a graph and another for a run "
                "with one: exact streams cannot promise equal bits. Compile with "
                "speechbrain_rev.reversible.compile_pieces(network) instead, or use "
                "streams='float', or mode='store' for this block."
            )


def _is_compiled(module: nn.Module) -> bool:
    if module._compiled_call_impl is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # imported by torch.compile
    if dynamo is None:
        return False
    forward = module.forward
    wrapped = hasattr(forward, "_torchdynamo_orig_callable")
    disabled = getattr(forward, "_torchdynamo_disable", False)
    return isinstance(module, dynamo.OptimizedModule) or (wrapped and not disabled)


def can_be_compiled(x: Tensor) -> bool:
    """Whether a tensor has values that nobody but us is to see computed.

    Parameters
    ----------
    x : torch.Tensor
        Any tensor.

    Returns
    -------
    bool
        False for meta and fake tensors and other subclasses, and in dispatch modes.
    """
    return (
        type(x) in (Tensor, nn.Parameter)
        and not x.is_meta
        and x.numel() > 0
        and _get_current_dispatch_mode() is None
    )


def by_channel(x: Tensor) -> Tensor | None:
    """View a dense tensor so that both layouts are of one form.

    Parameters
    ----------
    x : torch.Tensor, [batch, channel, freq, time]
        Any.

    Returns
    -------
    torch.Tensor or None
        [batch, channel, freq * time, 1], or [batch * freq * time, channel, 1, 1] of
        channels last, both contiguous; None of other layouts.
    """
    batch, channels, freq, time = x.shape
    if x.is_contiguous():
        rows, columns = batch, freq * time
    elif x.is_contiguous(memory_format=torch.channels_last):
        rows, columns = batch * freq * time, 1
    else:
        return None
    # The strides of axes with one element are free, and guarded by the compiler.
    strides = (channels * columns, columns, 1, 1)
    return x.as_strided((rows, channels, columns, 1), strides)


def run(
    backend: str,
    function: Callable[..., Any],
    axes: Sequence[str],
    tensors: Sequence[Tensor],
    **options: Any,
) -> Any:
    """Call a pure function, compiled.

    Parameters
    ----------
    backend : str
        Who compiles.
    function : callable
        Takes the tensors and the options. It may write to tensors, and has no graph.
    axes : sequence of str
        The tensors' axes, one letter each out of "r", "c" and "t"; those of one letter
        have one size. A "1" is an axis that always has one element.
    tensors : sequence of torch.Tensor
        Contiguous, without a common storage.
    **options
        Constants, hashable.

    Returns
    -------
    object
        What the function returns.

    Raises
    ------
    RuntimeError
        If it cannot be compiled.
    """
    device = tensors[0].device
    ones = {
        a
        for x, of_x in zip(tensors, axes, strict=True)
        for a, size in zip(of_x, x.shape, strict=True)
        if size == 1
    }
    dtypes = tuple(x.dtype for x in tensors)
    key = (backend, function, device, dtypes, frozenset(ones), *options.items())
    compiled = _COMPILED.get(key)
    with torch.no_grad(), _one_autocast_state(device):
        if compiled is None:
            sizes = _EXAMPLE | dict.fromkeys(ones, 1)
            shapes = [[sizes[axis] for axis in of_x] for of_x in axes]
            pairs = zip(tensors, shapes, strict=True)
            examples = [x.new_zeros(shape) for x, shape in pairs]
            compiled = _COMPILED[key] = _compile(backend, function, options, examples)
        return compiled(*(x.detach() for x in tensors))


def _one_autocast_state(device: torch.device) -> torch.autocast:
    """Put autocast into one state, cache included: another one would recompile.

    It differs between the two runs of F and the arithmetic around them.
    """
    kind = device.type if is_autocast_available(device.type) else "cpu"
    return torch.autocast(kind, enabled=False, cache_enabled=False)


#: The sizes that are compiled for first. They differ, so that no size will stand for
#: another that happens to equal it, and are large enough to share out among threads.
_EXAMPLE = {"r": 3, "c": 24, "t": 8000, "1": 1}
#: The compiled functions by backend, function, device, kind of input and options.
_COMPILED: dict[Any, Callable[..., Any]] = {}
#: What each of them took to compile.
_SECONDS: list[float] = []


def _compile(
    backend: str,
    function: Callable[..., Any],
    options: dict[str, Any],
    examples: Sequence[Tensor],
) -> Callable[..., Any]:
    """Compile a function with a code object of its own, and note how long it takes.

    Torch counts recompilations by code object and from the eighth on runs what was to
    be compiled without a compiler, which would be other bits.
    """

    def call(*tensors: Tensor) -> Any:
        return function(*tensors, **options)

    name = f"{function.__name__}_{len(_COMPILED)}"
    own = types.FunctionType(
        call.__code__.replace(co_name=name),
        call.__globals__,
        name,
        closure=call.__closure__,
    )
    begun = time.monotonic()
    compiled = torch.compile(own, backend=backend, dynamic=True, fullgraph=True)
    try:
        compiled(*examples)
    except Exception as error:
        needed = "Triton" if examples[0].is_cuda else "a C++ compiler (g++)"
        raise RuntimeError(
            f"{backend} could not compile a piece of this network for "
            f"{examples[0].device.type}: {type(error).__name__}: {error}\nIt needs "
            f"{needed}. Install it, or train without compile."
        ) from error
    _SECONDS.append(time.monotonic() - begun)
    return compiled


class FixedPoint:
    """The functions of ``fixed_point``, of which those that add are compiled.

    Bits are those of the reference: each operation is exact or correctly rounded.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend

    encode = staticmethod(reference.encode)
    decode = staticmethod(reference.decode)

    def add(
        self,
        value: Tensor,
        residuals: Sequence[Tensor],
        steps: float,
        largest: Tensor | None,
        out: Tensor | None,
        floats: Tensor | None = None,
        reuse: bool = False,
    ) -> Tensor:
        """Add rounded residuals, one after the other."""
        for f in residuals:
            if _is_one_row(value, f, out):
                value = self._add(value, f, steps, largest, out, subtract=False)
            else:
                value = reference.add(value, [f], steps, largest, out, reuse=reuse)
            out = value
        if floats is not None:
            self.decode(value, steps, floats.dtype, floats)
        return value

    def subtract(
        self,
        value: Tensor,
        f: Tensor,
        steps: float,
        out: Tensor | None,
        reuse: bool = False,
    ) -> Tensor:
        """Subtract a rounded residual: the exact inverse of ``add``."""
        if not _is_one_row(value, f, out):
            return reference.subtract(value, f, steps, out, reuse)
        return self._add(value, f, steps, None, out, subtract=True)

    def _add(
        self,
        value: Tensor,
        f: Tensor,
        steps: float,
        largest: Tensor | None,
        out: Tensor | None,
        *,
        subtract: bool,
    ) -> Tensor:
        total = torch.empty_like(value) if out is None else out
        rows = [_row(x) for x in ((f, value, total) if out is None else (f, value))]
        noted = largest is not None
        options = {"steps": steps, "subtract": subtract, "noted": noted}
        magnitudes = run(self.backend, _add_rounded, "t" * len(rows), rows, **options)
        if largest is not None:
            torch.maximum(largest, magnitudes, out=largest)
        return total


def _add_rounded(
    f: Tensor,
    value: Tensor,
    out: Tensor | None = None,
    *,
    steps: float,
    subtract: bool,
    noted: bool,
) -> Tensor | None:
    """Write the value and a rounded residual's sum or difference; give magnitudes.

    The sum goes to ``out``, or to the value itself.
    """
    wide = torch.promote_types(f.dtype, torch.float32)
    scaled = (f.to(wide) * steps).round()
    rounded = scaled.to(torch.int32)
    total = value - rounded if subtract else value + rounded
    (value if out is None else out).copy_(total)
    if not noted:
        return None
    added, result = scaled.abs().amax().float(), total.float().abs().amax()
    return torch.stack([added, result]) / steps


def _is_one_row(value: Tensor, f: Tensor, out: Tensor | None) -> bool:
    return (
        can_be_compiled(f)
        and can_be_compiled(value)
        and is_dense(value)
        and f.stride() == value.stride()
        and (out is None or out is value)
    )


def _row(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))
