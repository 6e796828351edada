"""Arguments of optimizers: options by name, and parameters to train."""

import functools
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

Params: TypeAlias = (
    Iterable[torch.Tensor] | Iterable[Mapping[str, Any]] | Mapping[str, Any]
)
Kept: TypeAlias = torch.nn.Module | torch.Tensor | Iterable["Kept"]

_ADAMS = ("adam", "adamw")
#: Options beside lr and weight_decay: whose they are, and at which bits.
_OPTIONS = {
    "momentum": (("sgd",), (8, 32)),
    "dampening": (("sgd",), (32,)),
    "nesterov": (("sgd",), (8, 32)),
    "decoupled_decay": (("sgd",), (8,)),
    "betas": (_ADAMS, (8, 32)),
    "eps": (_ADAMS, (8, 32)),
    "amsgrad": (_ADAMS, (32,)),
}
#: What an optimizer without them ignores, so that one block of YAML serves all three.
_IGNORED = ("momentum", "betas", "eps")


def honoured(name: str, bits: int) -> tuple[str, ...]:
    """List the options that an optimizer honours at such bits.

    Example
    -------
    >>> honoured("adam", 8)
    ('lr', 'weight_decay', 'betas', 'eps')
    """
    own = [key for key, (names, at) in _OPTIONS.items() if name in names and bits in at]
    return ("lr", "weight_decay", *own)


def number(
    name: str,
    value: Any,
    *,
    below: float = sys.float_info.max,
    above_zero: bool = False,
) -> float:
    """Read a number from zero to ``below``; text is refused even where it spells one.

    Example
    -------
    >>> number("lr", 1)
    1.0
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < below or (above_zero and value == 0):
        low = "above 0" if above_zero else "from 0"
        high = f" to below {below:g}" if below < sys.float_info.max else ""
        hint = " (YAML reads 1e-4 as text; write 1.0e-4.)"
        raise ValueError(
            f"{name} is {value!r}; it must be a number {low}{high}."
            + (hint if isinstance(value, str) else "")
        )
    return float(value)


def pair(name: str, values: Any) -> tuple[float, float]:
    """Read two numbers below 1, each as :func:`number` reads one."""
    if not isinstance(values, list | tuple) or len(values) != 2:
        raise ValueError(f"{name} is {values!r}; give a list of two numbers.")
    first, second = (number(name, value, below=1.0) for value in values)
    return first, second


#: Options that take one of some values, and how a message puts it.
_SWITCH = (True, False), "it must be True or False (in YAML without quotes)"
_CHOICES: dict[str, tuple[tuple[Any, ...], str]] = {
    "bits": ((8, 32), "optimizer states can have 8 or 32 bits"),
    "nesterov": _SWITCH,
    "decoupled_decay": _SWITCH,
    "amsgrad": _SWITCH,
    "block": ((256, 2048), "blocks have 256 or 2048 values"),
    "pack_small": _SWITCH,
    "backend": (("native", "bitsandbytes"), "it must be 'native' or 'bitsandbytes'"),
}


def choice(name: str, value: Any) -> Any:
    """Read one of some values of one type: "false" is no truth value, 8.0 no 8."""
    among, rule = _CHOICES[name]
    if type(value) is not type(among[0]) or value not in among:
        raise ValueError(f"{name} is {value!r}; {rule}.")
    return value


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "lr": number,
    "weight_decay": number,
    "momentum": functools.partial(number, below=1.0),
    "dampening": number,
    "betas": pair,
    "eps": functools.partial(number, above_zero=True),
    **dict.fromkeys(_CHOICES, choice),
}


def read_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read options by name; what the optimizer cannot do at ``bits`` is refused.

    Example
    -------
    >>> read_options("sgd", {"bits": 8, "lr": 1, "momentum": 0.9, "weight_decay": 0})
    {'bits': 8, 'lr': 1.0, 'momentum': 0.9, 'weight_decay': 0.0}
    """
    options = {k: _READERS[k](k, v) for k, v in given.items() if k in _READERS}
    refuse_what_is_not_honoured(name, options["bits"], options)
    return options


def refuse_what_is_not_honoured(
    name: str, bits: int, options: Mapping[str, Any]
) -> None:
    """Raise where an optimizer would ignore an option, or read it as another."""
    for key, (owners, at) in _OPTIONS.items():
        if key in _IGNORED or not options.get(key):
            continue
        if name not in owners:
            raise ValueError(
                f"{key} belongs to {' and '.join(owners)}, not to {name}. Leave it out."
            )
        if bits not in at:
            states = " (with keep_32bit for states at 32 bit)" if bits == 32 else ""
            raise ValueError(
                f"{name} at {bits} bit cannot do {key}={options[key]}. Leave it out, or "
                f"set bits to {at[0]}{states}."
            )
    if bits == 32:
        return
    if name == "sgd" and not options["momentum"]:
        raise ValueError(
            f"{name} at 8 bit cannot do momentum=0, which leaves no state to store. "
            "Give a momentum, or set bits to 32."
        )
    if options.get("backend") == "bitsandbytes":
        refused = {
            **{
                k: options.get(k) for k in ("pack_small", "nesterov", "decoupled_decay")
            },
            f"block={options['block']}": options["block"] != 256,
            "an L2 weight_decay of adam": name == "adam" and options["weight_decay"],
        }
        for what, given in refused.items():
            if given:
                raise ValueError(
                    f"backend 'bitsandbytes' cannot do {what}. Leave it out, or take the "
                    "backend 'native'."
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
    if len(set(trained)) < len(trained):
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


def parameters_to_keep(
    keep_32bit: Kept, params: list[torch.Tensor]
) -> frozenset[torch.Tensor]:
    """Return the parameters whose states stay at 32 bit.

    Example
    -------
    >>> linear = torch.nn.Linear(2, 3)
    >>> kept = parameters_to_keep([linear.bias], list(linear.parameters()))
    >>> kept == {linear.bias}
    True
    """
    kept, trained = list(_flat(keep_32bit)), set(params)
    for param in kept:
        # A frozen one may be missing: many loops leave those out.
        if param.requires_grad and param not in trained:
            raise ValueError(
                f"keep_32bit holds a parameter of shape {list(param.shape)} that is "
                f"not among params. Give modules that this optimizer trains."
            )
    return frozenset(trained.intersection(kept))


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
