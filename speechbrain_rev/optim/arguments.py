"""Arguments of optimizers: options by name, and parameters to train."""

import functools
import numbers
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

Params: TypeAlias = (
    Iterable[torch.Tensor] | Iterable[Mapping[str, Any]] | Mapping[str, Any]
)
Kept: TypeAlias = torch.nn.Module | torch.Tensor | Iterable["Kept"]
Reader: TypeAlias = Callable[[str, Any], Any]


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


def one_of(rule: str, *among: Any) -> Reader:
    """Read one of some values of one type: "false" is no truth value, 8.0 no 8."""

    def read(name: str, value: Any) -> Any:
        if type(value) is not type(among[0]) or value not in among:
            raise ValueError(f"{name} is {value!r}; {rule}.")
        return value

    return read


class _Option(NamedTuple):
    """How an option is read, whose it is, and at which bits."""

    read: Reader
    owners: tuple[str, ...] = ("sgd", "adam", "adamw")
    bits: tuple[int, ...] = (8, 32)


_ADAMS = ("adam", "adamw")
_SWITCH = one_of("it must be True or False (in YAML without quotes)", True, False)
_OPTIONS = {
    "lr": _Option(number),
    "weight_decay": _Option(number),
    "momentum": _Option(functools.partial(number, below=1.0), ("sgd",)),
    "dampening": _Option(number, ("sgd",), (32,)),
    "nesterov": _Option(_SWITCH, ("sgd",)),
    "decoupled_decay": _Option(_SWITCH, ("sgd",), (8,)),
    "betas": _Option(pair, _ADAMS),
    "eps": _Option(functools.partial(number, above_zero=True), _ADAMS),
    "amsgrad": _Option(_SWITCH, _ADAMS, (32,)),
}
#: What an optimizer without them ignores, so that one block of YAML serves all three.
_IGNORED = ("momentum", "betas", "eps")
#: How states are stored and who computes.
_FORM = {
    "bits": one_of("optimizer states can have 8 or 32 bits", 8, 32),
    "block": one_of("blocks have 256 or 2048 values", 256, 2048),
    "pack_small": _SWITCH,
    "backend": one_of(
        "it must be 'native' or 'bitsandbytes'", "native", "bitsandbytes"
    ),
}
_READERS = _FORM | {key: option.read for key, option in _OPTIONS.items()}


def honoured(name: str, bits: int) -> tuple[str, ...]:
    """List the options that an optimizer honours at such bits.

    Example
    -------
    >>> honoured("adam", 8)
    ('lr', 'weight_decay', 'betas', 'eps')
    """
    options = _OPTIONS.items()
    return tuple(key for key, o in options if name in o.owners and bits in o.bits)


def read_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read options by name; what the optimizer cannot do at ``bits`` is refused.

    Example
    -------
    >>> read_options("sgd", {"bits": 8, "lr": 1, "momentum": 0.9, "block": 256})
    {'bits': 8, 'lr': 1.0, 'momentum': 0.9, 'block': 256}
    """
    options = {k: _READERS[k](k, v) for k, v in given.items() if k in _READERS}
    refuse_what_is_not_honoured(name, options["bits"], options)
    return options


def refuse_what_is_not_honoured(
    name: str, bits: int, options: Mapping[str, Any]
) -> None:
    """Raise where an optimizer would ignore an option, or read it as another."""
    at_bits = f"{name} at {bits} bit"
    refused: list[tuple[str, str, str]] = []
    for key, option in _OPTIONS.items():
        if key in _IGNORED or not options.get(key):
            continue
        if name not in option.owners:
            owners = " and ".join(option.owners)
            raise ValueError(f"{key} belongs to {owners}, not to {name}. Leave it out.")
        if bits not in option.bits:
            states = " (with keep_32bit for states at 32 bit)" if bits == 32 else ""
            remedy = f"set bits to {option.bits[0]}{states}"
            refused.append((at_bits, f"{key}={options[key]}", remedy))
    if bits == 8 and name == "sgd" and not options["momentum"]:
        what = "momentum=0, which leaves no state to store"
        refused.append((at_bits, what, "set bits to 32"))
    if bits == 8 and options.get("backend") == "bitsandbytes":
        lacking = {
            "pack_small": options["pack_small"],
            "nesterov": options.get("nesterov"),
            "decoupled_decay": options.get("decoupled_decay"),
            f"block={options['block']}": options["block"] != 256,
            "an L2 weight_decay of adam": name == "adam" and options["weight_decay"],
        }
        backend, remedy = "backend 'bitsandbytes'", "take the backend 'native'"
        refused += [(backend, what, remedy) for what, asked in lacking.items() if asked]
    if refused:
        raise ValueError("{} cannot do {}. Leave it out, or {}.".format(*refused[0]))


def parameter_groups(params: Any) -> list[dict[str, Any]]:
    """Read the groups of parameters to train, in whichever form torch takes them.

    Example
    -------
    >>> [group] = parameter_groups(torch.nn.Linear(2, 3).parameters())
    >>> len(list(group["params"]))
    2
    """
    if isinstance(params, torch.nn.Module | torch.Tensor | str) or not isinstance(
        params, Iterable
    ):
        raise ValueError(
            f"params is a {type(params).__name__}; give an iterable of parameters, for "
            f"instance module.parameters()."
        )
    groups = [params] if isinstance(params, Mapping) else list(params)
    if not groups or not all(isinstance(group, Mapping) for group in groups):
        return [{"params": groups}]
    return [dict(group) for group in groups]


def read_parameters(
    group: Mapping[str, Any], others: Collection[torch.Tensor], bits: int
) -> list[Any]:
    """Read the parameters of a group, beside those that an optimizer has already.

    Pairs of name and parameter, as of ``named_parameters()``, are left for torch to take.
    """
    params = group.get("params", ())
    entries = [params] if isinstance(params, torch.Tensor) else list(params)
    params = [entry[1] if _is_named(entry) else entry for entry in entries]
    if not params:
        raise ValueError("params is empty; give the parameters of the network.")
    for index, param in enumerate(params):
        if not isinstance(param, torch.Tensor):
            raise ValueError(
                f"params[{index}] is a {type(param).__name__}; each must be a tensor."
            )
        if bits == 8 and hasattr(param, "device_mesh"):
            raise ValueError(
                f"params[{index}] is sharded by FSDP, whose parts have no 8-bit states here. "
                "Use DistributedDataParallel, or set bits to 32."
            )
        if bits == 8 and param.dtype != torch.float32:
            raise ValueError(
                f"params[{index}] is {param.dtype}, but with 8-bit states the update is "
                "computed and stored in float32. Keep weights in float32 (autocast lowers "
                "the precision of the network, not of its weights), or set bits to 32."
            )
    if len({*params, *others}) < len(params) + len(others):
        raise ValueError(
            "params holds a parameter twice, which would be updated twice. A module's "
            "own parameters() gives shared parameters once."
        )
    return entries


def _is_named(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


def parameters_to_keep(
    keep_32bit: Kept, params: Iterable[torch.Tensor]
) -> frozenset[torch.Tensor]:
    """Return the parameters whose states stay at 32 bits.

    Example
    -------
    >>> linear = torch.nn.Linear(2, 3)
    >>> kept = parameters_to_keep([linear.bias], list(linear.parameters()))
    >>> kept == {linear.bias}
    True
    """
    kept, trained = frozenset(_flat(keep_32bit)), set(params)
    for param in kept - trained:
        # A frozen one may be missing: many loops leave those out.
        if param.requires_grad:
            raise ValueError(
                f"keep_32bit holds a parameter of shape {list(param.shape)} that is "
                f"not among params. Give modules that this optimizer trains."
            )
    return kept & trained


def _flat(kept: Kept) -> list[torch.Tensor]:
    if isinstance(kept, torch.Tensor):
        return [kept]
    if isinstance(kept, torch.nn.Module):
        return list(kept.parameters())
    if isinstance(kept, str | Mapping) or not isinstance(kept, Iterable):
        raise ValueError(
            f"keep_32bit holds a {type(kept).__name__}; give modules or parameters, or "
            f"a list of them."
        )
    return [param for item in kept for param in _flat(item)]
