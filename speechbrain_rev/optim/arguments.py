"""Reading what optimizers are made with: numbers, parameters, what to keep."""

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeAlias

import torch

Kept: TypeAlias = torch.nn.Module | torch.Tensor | Iterable["Kept"]


def number(
    name: str, value: Any, *, below: float = math.inf, above_zero: bool = False
) -> float:
    """Read a number that is at least zero.

    Parameters
    ----------
    name : str
        The argument's name, for the message.
    value : object
        What was given; text is refused even where it spells a number.
    below : float
        The number must be smaller than this.
    above_zero : bool
        Refuse zero too.

    Returns
    -------
    float
        The number.

    Raises
    ------
    ValueError
        If it is no number, or out of range.

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
    """Read what is on or off.

    Parameters
    ----------
    name : str
        The argument's name, for the message.
    value : object
        What was given; text is refused, as "false" would count as true.

    Returns
    -------
    bool
        The value.

    Raises
    ------
    ValueError
        If it is not a bool.

    Example
    -------
    >>> switch("nesterov", False)
    False
    """
    if not isinstance(value, bool):
        raise ValueError(
            f"{name} is {value!r}; it must be True or False (in YAML without quotes)."
        )
    return value


def pair(name: str, values: Any, *, below: float = math.inf) -> tuple[float, float]:
    """Read two numbers, each as :func:`number` reads one.

    Parameters
    ----------
    name : str
        The argument's name, for the message.
    values : sequence of two numbers
        What was given.
    below : float
        Both must be smaller than this.

    Returns
    -------
    (float, float)
        The numbers.

    Raises
    ------
    ValueError
        If there are not two, or one is no number or out of range.

    Example
    -------
    >>> pair("betas", [0.9, 0.999], below=1.0)
    (0.9, 0.999)
    """
    if not isinstance(values, list | tuple) or len(values) != 2:
        raise ValueError(f"{name} is {values!r}; give a list of two numbers.")
    first, second = (number(name, value, below=below) for value in values)
    return first, second


def parameters_of_one_group(params: Any) -> list[torch.Tensor]:
    """Read the parameters to train, in whichever form torch's optimizers take them.

    Parameters
    ----------
    params : iterable of torch.Tensor, or a parameter group, or an iterable of one
        Parameters, or mappings that hold them under ``params``.

    Returns
    -------
    list of torch.Tensor
        The parameters in their order.

    Raises
    ------
    ValueError
        If there are none, several groups, options in a group, a parameter that is
        there twice, or anything that is no tensor.

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


def refuse_another_group(param_group: Any) -> NoReturn:
    """Take the place of ``add_param_group``: optimizers have the group they came with.

    Parameters
    ----------
    param_group : object
        Of no account.

    Raises
    ------
    ValueError
        Always.

    Example
    -------
    >>> refuse_another_group({"params": [torch.zeros(2)]})
    Traceback (most recent call last):
        ...
    ValueError: An optimizer of speechbrain_rev.optim has one parameter group...
    """
    raise ValueError(
        "An optimizer of speechbrain_rev.optim has one parameter group, as SpeechBrain "
        "clips the gradients of the first alone; add_param_group cannot add another. "
        "Give all parameters when it is made; those without a gradient are left alone."
    )


def parameters_to_keep(keep_32bit: Kept, params: list[torch.Tensor]) -> frozenset[int]:
    """Find the parameters whose states stay at 32 bit.

    Parameters
    ----------
    keep_32bit : torch.nn.Module, torch.Tensor, or iterable of these, nested or not
        What is to be kept.
    params : list of torch.Tensor
        All that the optimizer trains.

    Returns
    -------
    frozenset of int
        The identities, ``id()``, of those among ``params`` that are to be kept.

    Raises
    ------
    ValueError
        If a parameter to be kept needs a gradient and is not among ``params``, or
        something is neither module nor parameter.

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
