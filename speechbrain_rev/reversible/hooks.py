"""What watches a step: moments of blocks, hooks, and whoever keeps a tensor.

A network runs its blocks in order, and back in the backward pass. What is alive or what
time it is at these moments is what a planner wants to know of each block; hooks do not
show it, for chains call parts of their blocks by themselves.

Hooks fire in both runs, which is reported once. A tensor that is made within the first run
of a reconstructed function, and that somebody keeps, has no gradient: a loss on it is
refused, with the block and what to do.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from speechbrain_rev.reversible.replay import (
    naming_transforms,
    own_lists_of_weights,
    places_of,
)
from speechbrain_rev.reversible.state import may_have_state, modules_of, version_of
from speechbrain_rev.torch_private import hooks_of_all_modules, pose_as


class Moment(enum.Enum):
    """What happens to a block in a training step, in this order."""

    FORWARD_BEGINS = "forward begins"
    FORWARD_ENDS = "forward ends"
    BACKWARD_BEGINS = "backward begins"


#: Called with each block and moment; at a time there are none, or very few. One list for
#: all threads, for autograd runs the backward pass of a GPU in a thread of its own.
_observers: list[Callable[[nn.Module, Moment], None]] = []


@contextlib.contextmanager
def observed(observer: Callable[[nn.Module, Moment], None]) -> Iterator[None]:
    """Call an observer at the moments of blocks for a while.

    Parameters
    ----------
    observer : callable
        Called with a block, which is a coupling of a chain, or a stem, transition or
        ordinary block of an encoder, and a moment.

    Examples
    --------
    >>> import torch
    >>> from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
    >>> chain = ReversibleChain([AdditiveCoupling(nn.Tanh(), nn.Tanh())])
    >>> x = torch.randn(2, 4, requires_grad=True)
    >>> with observed(lambda block, moment: print(moment.value)):
    ...     torch.add(*chain(x, x)).sum().backward()
    forward begins
    forward ends
    backward begins
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def notify(block: nn.Module, moment: Moment) -> None:
    """Call all observers."""
    for observer in _observers:
        observer(block, moment)


def notify_end(block: nn.Module, *outputs: Tensor) -> None:
    """Notify that a block's forward pass ends, and when the first gradient is there."""
    if not _observers:
        return
    notify(block, Moment.FORWARD_ENDS)
    notified = False

    def begins(_: Tensor) -> None:
        nonlocal notified
        if not notified:
            notified = True
            notify(block, Moment.BACKWARD_BEGINS)

    for output in outputs:
        if output.requires_grad:
            output.register_hook(begins)


#: How many names a message lists.
_SHOWN = 5


class WatchingWarning(UserWarning):
    """Hooks that fire in both runs of a function."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a module's call has hooks that look at what goes in or comes out."""
    return bool(
        any(hooks_of_all_modules())
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


#: Graphs of a function's first runs that are alive after it. A graph that holds itself, as
#: hooks of saved tensors can make it that return what they are given, is so for ever.
_alive: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Node]]]
_alive = weakref.WeakKeyDictionary()
#: With so many alive, a function's first runs build no more.
_MOST_ALIVE = 8
#: Modules whose hooks were reported, and how many there were.
_reported: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def report_hooks(
    modules: Sequence[nn.Module], what: str, *, within: bool = False
) -> None:
    """Warn of forward hooks that fire in both runs of a module.

    Parameters
    ----------
    modules : sequence of nn.Module
        What runs twice, and the modules within it.
    what : str
        What it is and what is done to it.
    within : bool
        Whether hooks on the module itself are around both runs and fire once.
    """
    module = modules[0]
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    named = [
        name or "the module itself"
        for name, m in (module.named_modules() if hooked else ())
        if (name or not within)
        and type(m).forward is not nn.Module.forward
        and any(
            map(_watches, (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
        )
    ]
    if hooks_of_all_modules()[0]:
        named.append("all modules (global hooks)")
    if len(named) > _reported.get(module, 0):
        _reported[module] = len(named)
        more = ", ..." if len(named) > _SHOWN else ""
        warnings.warn(
            f"{what} ({type(module).__name__}): forward hooks on "
            f"{', '.join(named[:_SHOWN])}{more} fire in both of its runs, twice in a "
            "training step. Use mode='store' for this block, or leave it out of "
            "recompute_blocks, if they must fire once.",
            WatchingWarning,
            stacklevel=2,
        )


def _watches(hook: Any) -> bool:
    """Whether a hook is not one of torch's own, which make weights."""
    kind = hook if hasattr(hook, "__module__") else type(hook)
    return not str(kind.__module__).startswith(("torch.nn.utils.", "torch.nn.modules."))


class Held:
    """A tensor that an operation saved, as it was then."""

    __slots__ = ("__weakref__", "_name", "_value", "_version")

    def __init__(self, name: str, x: Tensor) -> None:
        self._name = name
        self._value: Tensor | None = x
        self._version = version_of(x)

    def put(self, x: Tensor | None) -> None:
        """Hold a value, or drop it."""
        self._value, self._version = x, 0 if x is None else version_of(x)

    @property
    def is_dropped(self) -> bool:
        """Whether there is no value."""
        return self._value is None

    def get(self) -> Tensor:
        """Give the value."""
        x = self._value
        assert x is not None
        if version_of(x) != self._version:
            raise RuntimeError(
                f"A tensor that {self._name} needs for its gradient was modified by an "
                "inplace operation after it was used. Use one that is not in place."
            )
        return x


class _Source(torch.autograd.Function):
    """A tensor as what everything that is made of it leads back to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Sources, *roots: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sources = sources
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        if grad is not None:
            ctx.sources.refuse()
        return (None,) * len(ctx.needs_input_grad)


class Sources:
    """What a first run reads, as the sources of a graph that nobody needs.

    The graph is without what it saved once the run is over. Whoever has a tensor of it
    then has kept that.
    """

    def __init__(self, module: nn.Module, place: str) -> None:
        self._module: nn.Module | None = module
        self._name = f"{place} ({type(module).__name__})"
        self._nodes: list[weakref.ref[Node]] = []
        self._input: weakref.ref[Node] | None = None

    def of(self, x: Tensor, *roots: Tensor) -> Tensor:
        """Give a tensor that leads back to a source, if it can have a gradient.

        Whoever asks for gradients of what it is made of, the roots, meets the source.
        """
        if not (x.is_floating_point() or x.is_complex()):
            return x
        with torch.enable_grad():
            y: Tensor = _Source.apply(x.detach().requires_grad_(), self, *roots)
        assert y.grad_fn is not None
        self._nodes.append(weakref.ref(y.grad_fn))
        return y

    def of_input(self, x: Tensor, *roots: Tensor) -> Tensor:
        """Give the function's input, as a source if one of the roots has a gradient."""
        if not roots:
            return x.detach()
        y = self.of(x, *roots)
        self._input = self._nodes[-1] if self._nodes else None
        return y

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the module's parameters be sources, and build a graph that saves nothing."""
        own: dict[int, Tensor] = {}
        held: list[Held] = []

        def save(x: Tensor) -> Held:
            held.append(Held(self._name, x.detach()))
            return held[-1]

        assert self._module is not None
        modules = modules_of(self._module)
        places = [(modules[i], n, p) for (i, n), p in places_of(self._module)]
        try:
            for owner, name, p in places:
                if p.requires_grad and id(p) not in own:
                    own[id(p)] = self.of(p, p)
                    pose_as(own[id(p)], p)
                stand_in = own.get(id(p), p)
                owner._parameters[name] = stand_in  # type: ignore[assignment]
            own.clear()
            with (
                own_lists_of_weights(modules),
                torch.enable_grad(),
                naming_transforms(self._name),
                saved_tensors_hooks(save, self._get),
            ):
                yield
        finally:
            for each in held:
                each.put(None)
            held.clear()
            for owner, name, p in places:
                owner._parameters[name] = p  # type: ignore[assignment]

    def refuse(self) -> None:
        """Refuse gradients of what the first run made."""
        raise RuntimeError(
            f"{self._name} is reconstructed: tensors that were made inside it have no "
            "gradient. Use mode='store' or 'recompute' for this block."
        )

    def _get(self, held: Held) -> Tensor:
        if held.is_dropped:
            self.refuse()
        return held.get()

    def is_input_kept(self) -> bool:
        """Whether somebody keeps what is made of the input, once the run is over."""
        alive = [node for node in self._nodes if node() is not None]
        module, self._module = self._module, None  # which may keep the graph
        if alive and module is not None:
            earlier = [n for n in _alive.get(module, ()) if n() is not None]
            _alive[module] = [*earlier, alive[0]]
        return self._input is not None and self._input() is not None


def may_keep(f: nn.Module) -> bool:
    """Whether somebody may keep a tensor that is made within a function."""
    return any(has_hooks(m) or may_have_state(m) for m in f.modules())


def builds_no_more(f: nn.Module) -> bool:
    """Whether so many graphs of a function's first runs are alive that it builds no more."""
    return sum(node() is not None for node in _alive.get(f, ())) >= _MOST_ALIVE
