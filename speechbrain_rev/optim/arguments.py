"""Arguments of optimizers: options by name, parameters to train, how states are stored."""

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

Params: TypeAlias = (
    Iterable[torch.Tensor] | Iterable[Mapping[str, Any]] | Mapping[str, Any]
)
Kept: TypeAlias = torch.nn.Module | torch.Tensor | Iterable["Kept"]


#: Which options an optimizer honours at 32 and at 8 bit, beside lr and weight_decay.
_OPTIONS = {
    "sgd": (
        ("momentum", "dampening", "nesterov"),
        ("momentum", "nesterov", "decoupled_decay"),
    ),
    "adam": (("betas", "eps", "amsgrad"), ("betas", "eps")),
    "adamw": (("betas", "eps", "amsgrad"), ("betas", "eps")),
}
BLOCKS = (256, 2048)
BACKENDS = ("native", "bitsandbytes")


def honoured(name: str, bits: int) -> tuple[str, ...]:
    """List the options that an optimizer honours at such bits.

    Example
    -------
    >>> honoured("adam", 8)
    ('lr', 'weight_decay', 'betas', 'eps')
    """
    return ("lr", "weight_decay", *_OPTIONS[name][bits == 8])


@dataclass(frozen=True)
class Storage:
    """How 8-bit states are stored, and who computes.

    Attributes
    ----------
    block : {256, 2048}
        Values that share a scale.
    pack_small : bool
        Whether tensors of fewer than 4096 values share blocks, else they stay at 32 bit.
    backend : {"native", "bitsandbytes"}
        Who computes; both store the same.
    """

    block: int = 256
    pack_small: bool = False
    backend: str = field(default="native", compare=False)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "Storage":
        """Read it from an optimizer's first group."""
        group = optimizer.param_groups[0]
        return cls(group.get("block_size", 256), group.get("pack_small", False))

    def __str__(self) -> str:
        small = "packed" if self.pack_small else "at 32 bit"
        return f"blocks of {self.block} values with small tensors {small}"

    def check(self, name: str, bits: int, options: Mapping[str, Any]) -> None:
        """Refuse a form that does not exist, or what the library would not honour."""
        if type(self.block) is not int or self.block not in BLOCKS:
            raise ValueError(
                f"block is {self.block!r}; blocks have 256 or 2048 values."
            )
        switch("pack_small", self.pack_small)
        if self.backend not in BACKENDS:
            raise ValueError(
                f"backend is {self.backend!r}; it must be 'native' or 'bitsandbytes'."
            )
        if self.backend == "native" or bits == 32:
            return
        refused = {
            f"block={self.block}": self.block != 256,
            "pack_small": self.pack_small,
            "nesterov": options.get("nesterov"),
            "decoupled_decay": options.get("decoupled_decay"),
            "an L2 weight_decay of adam": name == "adam" and options["weight_decay"],
        }
        for what, given in refused.items():
            if given:
                raise ValueError(
                    f"backend 'bitsandbytes' cannot do {what}. Leave it out, or take the "
                    "backend 'native'."
                )


def number(
    name: str, value: Any, *, below: float = math.inf, above_zero: bool = False
) -> float:
    """Read a number from zero to ``below``; text is refused even where it spells one.

    Example
    -------
    >>> number("lr", 1)
    1.0
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        read = float(value) if is_number else math.nan
    except OverflowError:  # an int that no float can hold
        read = math.inf
    if not 0 <= read < below or (above_zero and read == 0):
        low = "above 0" if above_zero else "from 0"
        high = "" if math.isinf(below) else f" to below {below:g}"
        hint = " (YAML reads 1e-4 as text; write 1.0e-4.)"
        raise ValueError(
            f"{name} is {value!r}; it must be a number {low}{high}."
            + (hint if isinstance(value, str) else "")
        )
    return read


def switch(name: str, value: Any) -> bool:
    """Read a truth value; text is refused, as "false" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(
            f"{name} is {value!r}; it must be True or False (in YAML without quotes)."
        )
    return value


def pair(name: str, values: Any, *, below: float = math.inf) -> tuple[float, float]:
    """Read two numbers, each as :func:`number` reads one."""
    if not isinstance(values, list | tuple) or len(values) != 2:
        raise ValueError(f"{name} is {values!r}; give a list of two numbers.")
    first, second = (number(name, value, below=below) for value in values)
    return first, second


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "lr": number,
    "weight_decay": number,
    "momentum": functools.partial(number, below=1.0),
    "dampening": number,
    "nesterov": switch,
    "decoupled_decay": switch,
    "betas": functools.partial(pair, below=1.0),
    "eps": functools.partial(number, above_zero=True),
    "amsgrad": switch,
}


def read_options(name: str, bits: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read options by name; what the optimizer cannot do at such bits is refused.

    Example
    -------
    >>> read_options("sgd", 8, {"lr": 1, "momentum": 0.9, "weight_decay": 0})
    {'lr': 1.0, 'momentum': 0.9, 'weight_decay': 0.0}
    """
    if type(bits) is not int or bits not in (8, 32):
        raise ValueError(f"bits is {bits!r}; optimizer states can have 8 or 32 bits.")
    options = {key: _READERS[key](key, value) for key, value in given.items()}
    refuse_what_is_not_honoured(name, bits, options)
    return options


def refuse_what_is_not_honoured(
    name: str, bits: int, options: Mapping[str, Any]
) -> None:
    """Raise where an optimizer would ignore an option, or read it as another."""
    for key in ("nesterov", "dampening", "amsgrad", "decoupled_decay"):
        if not options.get(key) or key in honoured(name, bits):
            continue
        owners = [n for n, both in _OPTIONS.items() if any(key in own for own in both)]
        if name not in owners:
            raise ValueError(
                f"{key} belongs to {' and '.join(owners)}, not to {name}. Leave it out."
            )
        way = "set bits to 32"
        if bits == 32:
            way = "set bits to 8 (with keep_32bit for states at 32 bit)"
        raise ValueError(
            f"{name} at {bits} bit cannot do {key}={options[key]}. Leave it out, or {way}."
        )
    if name == "sgd" and bits == 8 and not options["momentum"]:
        raise ValueError(
            f"{name} at 8 bit cannot do momentum=0, which leaves no state to store. "
            "Give a momentum, or set bits to 32."
        )


def parameter_groups(params: Any) -> list[dict[str, Any]]:
    """Read the parameters to train, in whichever form torch's optimizers take them.

    Example
    -------
    >>> [group] = parameter_groups(torch.nn.Linear(2, 3).parameters())
    >>> len(group["params"])
    2
    """
    groups = [params] if isinstance(params, Mapping) else params
    if isinstance(groups, torch.nn.Module | torch.Tensor | str) or not isinstance(
        groups, Iterable
    ):
        raise ValueError(
            f"params is a {type(params).__name__}; give an iterable of parameters, for "
            f"instance module.parameters()."
        )
    items = list(groups)
    if not items or not all(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    read = []
    for group in items:
        own = group.get("params", ())
        own = [own] if isinstance(own, torch.Tensor) else list(own)
        read.append({**group, "params": own})
    trained = [param for group in read for param in group["params"]]
    for index, item in enumerate(trained):
        if not isinstance(item, torch.Tensor):
            raise ValueError(
                f"params[{index}] is a {type(item).__name__}; each must be a tensor."
            )
    if not all(group["params"] for group in read):
        raise ValueError("params is empty; give the parameters of the network.")
    if len({id(item) for item in trained}) < len(trained):
        raise ValueError(
            "params holds a parameter twice, which would be updated twice. A module's "
            "own parameters() gives shared parameters once."
        )
    return read


def refuse_other_than_float32(params: list[torch.Tensor]) -> None:
    """Refuse weights that 8-bit updates would round."""
    for index, param in enumerate(params):
        if param.dtype != torch.float32:
            raise ValueError(
                f"params[{index}] is {param.dtype}, but with 8-bit states the update is "
                "computed and stored in float32. Keep weights in float32 (autocast lowers "
                "the precision of the network, not of its weights), or set bits to 32."
            )


def parameters_to_keep(keep_32bit: Kept, params: list[torch.Tensor]) -> frozenset[int]:
    """Return the identities, ``id()``, of parameters whose states stay at 32 bit.

    Example
    -------
    >>> linear = torch.nn.Linear(2, 3)
    >>> kept = parameters_to_keep([linear.bias], list(linear.parameters()))
    >>> kept == {id(linear.bias)}
    True
    """
    ids = {id(param) for param in params}
    kept = list(_flat(keep_32bit))
    for param in kept:
        # A frozen one may be missing: many loops leave those out.
        if param.requires_grad and id(param) not in ids:
            raise ValueError(
                f"keep_32bit holds a parameter of shape {list(param.shape)} that is "
                f"not among params. Give modules that this optimizer trains."
            )
    return frozenset(ids & {id(param) for param in kept})


def _flat(kept: Kept) -> Iterator[torch.Tensor]:
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, torch.nn.Module):
        yield from kept.parameters()
    elif isinstance(kept, Iterable) and not isinstance(kept, str | Mapping):
        for item in kept:
            yield from _flat(item)
    else:
        raise ValueError(
            f"keep_32bit holds a {type(kept).__name__}; give modules or parameters, or "
            f"a list of them."
        )
