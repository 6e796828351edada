"""Memory modes for blocks of a network that somebody else wrote, without changing it.

A block that is put behind another module gets another name and another type: its
checkpoints no longer fit and ``isinstance`` fails in its owner's ``forward``. So it stays
the object that it is. Only its class becomes a subclass of its class whose ``forward``
recomputes. A block that runs once only has its ``forward`` called within a context.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from speechbrain_rev.modes import Mode
from speechbrain_rev.reversible.comparison import checks_of, forget_checks
from speechbrain_rev.reversible.monitor import Checks, Verify
from speechbrain_rev.reversible.recompute import (
    Recompute,
    recompute_call,
    trains,
)

Network = TypeVar("Network", bound=nn.Module)

#: How many names a message lists.
_SHOWN = 20


#: Names of blocks that were chosen, for messages.
_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def recompute_blocks(
    network: Network,
    *names: str,
    verify: Verify | None = "first",
    verify_every: int = 100,
) -> Network:
    """Make submodules compute their activations again instead of storing them.

    In training they behave as if each were behind ``Recompute``: they keep their inputs
    and run again in the backward pass. Gradients equal those of plain torch, for outputs
    of any kind and for tensors that hooks kept. Dropout draws the same masks, and
    running statistics and plain attributes are updated once.

    Parameters
    ----------
    network : nn.Module
        Any network. It is changed in place.
    *names : str
        Names of submodules as in ``network.named_modules()``, or patterns of them, in
        which ``*`` stands for any characters, dots included: ``"blocks.*"``. Of matches
        within one another the outermost is taken. Containers that are never called
        (``nn.ModuleList``) do not match.
    verify : {"first", "raise", "warn"} or None
        What follows where the second run of a block saves other values for its gradients
        than the first. "first" raises in the block's first step, for all calls that begin
        before its first backward pass, and warns in later ones; "raise" and "warn" hold
        for all; None compares nothing.
    verify_every : int
        Calls from one comparison to the next, after the first step.

    Returns
    -------
    nn.Module
        The network that was given.

    Raises
    ------
    ValueError
        If no name is given, if a name matches nothing, if a match is scripted or has
        a ``forward`` of its own beside its class's, or verify is something else. Then
        nothing was changed.
    TypeError
        If a name is no string.

    Notes
    -----
    Submodules, parameters and buffers keep their names, identity and attributes, and
    ``isinstance`` answers as before, so that checkpoints load both ways and optimizers,
    DistributedDataParallel and hooks may come before or after. Hooks on a chosen module
    itself fire once, around both of its runs. Forward hooks within it fire in both, which
    one warning reports; backward and tensor hooks fire once. Copies and pickles recompute
    as well; what ``torch.jit.script`` makes of the network does not. In
    evaluation and without gradients nothing changes.

    A second call with the same names changes nothing. One with names within a block that
    is already recomputed nests them: such a module runs three times, and the block's own
    second run keeps less.

    A block may not write into its input or its parameters. Its second run sees the random
    states of torch, Python and numpy, the buffers and the attributes of the first, and the
    contents of lists, dictionaries, sets and queues among these. What is nested deeper, as
    a generator of its own, is changed by both runs: ``verify`` notices if it enters a
    gradient. One whose ``training`` is off stores its activations,
    even where gradients are taken.

    Examples
    --------
    >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    >>> network = recompute_blocks(nn.Sequential(*layers), "0", "1")
    >>> list(network.state_dict())[:2]
    ['0.0.weight', '0.0.bias']
    >>> isinstance(network[0], nn.Sequential), network(torch.randn(2, 4)).shape
    (True, torch.Size([2, 4]))
    """
    give_mode(network, Mode.RECOMPUTE, *names, verify=verify, verify_every=verify_every)
    return network


def store_blocks(network: Network, *names: str) -> Network:
    """Make submodules store their activations again, as before ``recompute_blocks``.

    Parameters
    ----------
    network : nn.Module
        Any network. It is changed in place.
    *names : str
        Names or patterns, as for ``recompute_blocks``. Blocks that store change nothing.

    Returns
    -------
    nn.Module
        The network that was given.

    Raises
    ------
    ValueError
        If no name is given, or if a name matches nothing.

    Examples
    --------
    >>> network = nn.Sequential(nn.Tanh(), nn.Tanh())
    >>> store_blocks(recompute_blocks(network, "*"), "0")
    Sequential(
      (0): Tanh()
      (1): Recompute[Tanh]()
    )
    """
    give_mode(network, Mode.STORE, *names)
    return network


def give_mode(
    network: nn.Module,
    mode: Mode,
    *names: str,
    verify: Verify | None = "first",
    verify_every: int = 100,
) -> None:
    """Give submodules a mode that needs no inverse.

    Parameters
    ----------
    network : nn.Module
        Any network. It is changed in place.
    mode : Mode
        For all of them, instead of the mode that each has.
    *names : str
        Names or patterns, as for ``recompute_blocks``.
    verify, verify_every
        Of blocks that run twice, as for ``recompute_blocks``.

    Raises
    ------
    ValueError
        As ``recompute_blocks``. Then nothing was changed.

    Examples
    --------
    >>> network = nn.Sequential(nn.Tanh(), nn.Tanh())
    >>> give_mode(network, Mode.RECOMPUTE, "1")
    >>> [mode_of(block).value for block in network]
    ['store', 'recompute']
    """
    checked = Checks(verify, verify_every)  # refuses others
    chosen = chosen_blocks(network, names)
    if mode.spec.runs_twice:
        for name, module in chosen.items():
            refusal = mode_refusal(name, module)
            if refusal is not None:
                raise ValueError(refusal)
    how = mode, checked.verify, checked.every
    for name, module in chosen.items():
        # One that is in two places, or was chosen before, has its mode by now.
        if mode_of(module) is not mode or getattr(module, "_how", how) != how:
            _store(module)
            forget_checks(module)
            _names[module] = name
            if mode.spec.runs_twice:
                module.__class__ = _recomputed(type(module), *how)
            elif mode is not Mode.STORE:
                module.forward = _Around(module, mode)


def mode_of(module: nn.Module) -> Mode:
    """Give the mode of a submodule."""
    own = vars(module).get("forward")
    if isinstance(own, _Around):
        return own.mode
    if isinstance(module, _Recomputed):
        return module._how[0]
    return Mode.RECOMPUTE if recomputes(module) else Mode.STORE


def _store(module: nn.Module) -> None:
    own = vars(module).get("forward")
    if isinstance(own, _Around):
        del module.forward
        if own.own is not None:
            module.forward = own.own
    if isinstance(module, _Recomputed):
        stored: type[nn.Module] = module._stored
        module.__class__ = stored  # type: ignore[assignment]


class _Around:
    """Runs a block that runs once within the context of its mode."""

    def __init__(self, block: nn.Module, mode: Mode) -> None:
        self.block, self.mode = block, mode
        self.own = vars(block).get("forward")

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        with self.mode.spec.around():
            if self.own is not None:
                return self.own(*inputs, **keywords)
            return type(self.block).forward(self.block, *inputs, **keywords)


def recomputes(module: nn.Module) -> bool:
    """Whether a module computes its activations again instead of storing them."""
    return isinstance(module, (Recompute, _Recomputed))


def chosen_blocks(network: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Give the outermost submodules that match names or patterns, by name."""
    named = {
        name: module
        for name, module in network.named_modules(remove_duplicate=False)
        if name and getattr(type(module), "forward", None) is not nn.Module.forward
    }
    if not names:
        raise ValueError(f"No name was given. {_what_there_is(network, named)}")
    matched: set[str] = set()
    for pattern in names:
        if not isinstance(pattern, str):
            raise TypeError(f"{pattern!r} is no name. {_what_there_is(network, named)}")
        matches = [name for name in named if fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(
                f"No submodule that is called has a name like {pattern!r}. "
                f"{_what_there_is(network, named)}"
            )
        matched.update(matches)
    return {name: named[name] for name in named if _is_outermost(name, matched)}


def _is_outermost(name: str, names: Collection[str]) -> bool:
    """Whether a name is among names and within no other one."""
    parts = name.split(".")
    outer = (".".join(parts[:end]) for end in range(1, len(parts)))
    return name in names and not any(other in names for other in outer)


def _what_there_is(network: nn.Module, named: Mapping[str, nn.Module]) -> str:
    """Say which names can be given."""
    kind = type(network).__name__
    outermost = [name for name in named if _is_outermost(name, named)]
    if not outermost:
        return f"{kind} has no submodules that are called: use Recompute({kind}(...))."
    shown = [f"{name} ({type(named[name]).__name__})" for name in outermost[:_SHOWN]]
    more = ", ..." if len(outermost) > _SHOWN else ""
    places = [name.rpartition(".") for name in named]
    rows = [f"{row}.*".lstrip(".") for row, _, last in places if last.isdigit()]
    example = rows[0] if rows else outermost[0]
    return (
        f"{kind} has {', '.join(shown)}{more}, and what named_modules() lists within "
        f"these. A name or pattern is, for instance, {example!r}."
    )


def mode_refusal(name: str, module: nn.Module) -> str | None:
    """Return why a submodule cannot run twice; None if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return (
            f"{name} is scripted and cannot run a second time on other leaves. Choose "
            "blocks before torch.jit.script, or leave it out."
        )
    own = vars(module).get("forward")
    if (own.own if isinstance(own, _Around) else own) is not None:
        return (
            f"{name} ({type(module).__name__}) has a forward of its own, which hides that "
            "of its class and with it any recomputation. Remove it, put the module behind "
            "Recompute, or leave it out."
        )
    return None


class _Recomputed(nn.Module):
    """The base of all classes that recompute."""

    #: The class that a module had before.
    _stored: type[nn.Module]
    #: Its mode, ``verify`` and ``verify_every``.
    _how: tuple[Mode, Verify | None, int]

    def _get_name(self) -> str:
        """Show in the printed network what is recomputed."""
        return f"{self._how[0].value.capitalize()}[{type(self).__name__}]"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the class that can be imported, for copies and pickles."""
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        if reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # the class has its own way
        _, (_, *arguments), *state = reduced
        make = functools.partial(_new, how=self._how)
        return (make, (self._stored, *arguments), *state)


def _recomputed(
    stored: type[nn.Module], mode: Mode, verify: Verify | None, every: int
) -> type[nn.Module]:
    """Give the subclass of a class that recomputes; it has the same name."""
    for cls in stored.__subclasses__():
        own = vars(cls)
        if own.get("_stored") is stored and own["_how"] == (mode, verify, every):
            return cls

    @functools.wraps(stored.forward)
    def forward(self: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        if trains(self):
            # Without the hooks on the block, which are around both runs.
            own = functools.partial(stored.forward, self)
            checks = checks_of(self, verify, every).begin()
            return recompute_call(
                own, self, inputs, keywords,
                joins=mode.spec.joins, checks=checks, name=_names.get(self),
            )  # fmt: skip
        return stored.forward(self, *inputs, **keywords)

    return type(
        stored.__name__,
        (_Recomputed, stored),
        {
            "forward": forward,
            "_stored": stored,
            "_how": (mode, verify, every),
            "__doc__": stored.__doc__,
            "__module__": stored.__module__,
            "__qualname__": stored.__qualname__,
        },
    )


def _new(
    stored: type[nn.Module],
    *arguments: Any,
    how: tuple[Mode, Verify | None, int],
) -> nn.Module:
    """Make an empty module that recomputes, which a copy or a pickle then fills."""
    cls = _recomputed(stored, *how)
    module: nn.Module = cls.__new__(cls, *arguments)
    return module
