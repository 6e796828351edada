"""Arguments of optimizers: options by name, parameters to train, states to keep at 32 bit."""

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Params: TypeAlias = (
    Iterable[torch.Tensor] | Iterable[Mapping[str, Any]] | Mapping[str, Any]
)
Kept: TypeAlias = torch.nn.Module | torch.Tensor | Iterable["Kept"]


@dataclass(frozen=True)
class Honoured:
    """Which options an optimizer honours at 32 and at 8 bit, beside lr and weight_decay."""

    at_32bit: tuple[str, ...]
    at_8bit: tuple[str, ...]
    l2_decay_at_8bit: bool = True


_OF_ADAM = ("betas", "eps", "amsgrad"), ("betas", "eps")
OPTIONS = {
    "sgd": Honoured(("momentum", "dampening", "nesterov"), ("momentum",)),
    # bitsandbytes decouples Adam's decay.
    "adam": Honoured(*_OF_ADAM, l2_decay_at_8bit=False),
    "adamw": Honoured(*_OF_ADAM),
}


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
    honoured = OPTIONS[name]
    for key in ("nesterov", "dampening", "amsgrad"):
        if not options.get(key):
            continue
        if key not in honoured.at_32bit:
            owners = [n for n, other in OPTIONS.items() if key in other.at_32bit]
            raise ValueError(
                f"{key} belongs to {' and '.join(owners)}, not to {name}. Leave it out."
            )
        if bits == 8 and key not in honoured.at_8bit:
            raise ValueError(
                f"{name} at 8 bit cannot do {key}={options[key]}; bitsandbytes would "
                "ignore it or fail. Leave it out, or set bits to 32."
            )
    if bits == 8 and "momentum" in honoured.at_8bit and not options["momentum"]:
        raise ValueError(
            f"{name} at 8 bit cannot do momentum=0, which leaves no state to store. "
            "Give a momentum, or set bits to 32."
        )
    decay = options["weight_decay"]
    if bits == 8 and decay and not honoured.l2_decay_at_8bit:
        raise ValueError(
            f"{name} at 8 bit cannot do an L2 weight_decay ({decay}): bitsandbytes would "
            "decouple it, which is adamw. Take 'adamw' (the class AdamW), or set "
            "weight_decay to 0 or bits to 32."
        )


def parameters_of_one_group(params: Any) -> list[torch.Tensor]:
    """Read the parameters to train, in whichever form torch's optimizers take them.

    Example
    -------
    >>> len(parameters_of_one_group([{"params": torch.nn.Linear(2, 3).parameters()}]))
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
    if items and all(isinstance(item, Mapping) for item in items):
        keys = sorted({key for group in items for key in group} - {"params"})
        if len(items) > 1 or keys:
            raise ValueError(
                f"params has {len(items)} parameter groups"
                + (f" with options of their own ({', '.join(keys)})" if keys else "")
                + ". Give all parameters in one, as SpeechBrain clips the gradients of "
                "the first group alone (leave remove_vector_weight_decay off), and "
                "options to the optimizer itself."
            )
        return parameters_of_one_group(items[0]["params"])
    for index, item in enumerate(items):
        if not isinstance(item, torch.Tensor):
            raise ValueError(
                f"params[{index}] is a {type(item).__name__}; each must be a tensor."
            )
    if not items:
        raise ValueError("params is empty; give the parameters of the network.")
    if len({id(item) for item in items}) < len(items):
        raise ValueError(
            "params holds a parameter twice, which would be updated twice. A module's "
            "own parameters() gives shared parameters once."
        )
    return items


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
