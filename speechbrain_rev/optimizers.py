"""The optimizers: one row each, which settings, help and ``speechbrain_rev.optim`` read.

Importing this module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

#: Forms of the states, and whose arithmetic updates them.
AT_8_BIT, AT_32_BIT, BY_LIBRARY = "8 bit", "32 bit", "8 bit by bitsandbytes"
FORMS = (AT_8_BIT, AT_32_BIT, BY_LIBRARY)
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
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < below or (above_zero and value == 0):
        low = "above 0" if above_zero else "from 0"
        high = f" to below {below:g}" if below < sys.float_info.max else ""
        hint = " (YAML reads 1e-4 as text; write 1.0e-4.)"
        raise ValueError(
            f"{name} is {value!r}; it must be a number {low}{high}."
            + (hint if isinstance(value, str) else "")
        )
    return float(value)


def fraction(name: str, value: Any) -> float:
    """Read a number from 0 to below 1."""
    return number(name, value, below=1.0)


def positive(name: str, value: Any) -> float:
    """Read a number above 0."""
    return number(name, value, above_zero=True)


def pair(name: str, values: Any) -> tuple[float, float]:
    """Read two numbers, each from 0 to below 1."""
    if not isinstance(values, list | tuple) or len(values) != 2:
        raise ValueError(f"{name} is {values!r}; give a list of two numbers.")
    first, second = (fraction(name, value) for value in values)
    return first, second


def one_of(rule: str, *among: Any) -> Reader:
    """Read one of some values of one type: "false" is no truth value, 8.0 no 8."""

    def read(name: str, value: Any) -> Any:
        if type(value) is not type(among[0]) or value not in among:
            raise ValueError(f"{name} is {value!r}; {rule}.")
        return value

    return read


switch = one_of("it must be True or False (in YAML without quotes)", True, False)


@dataclass(frozen=True)
class Option:
    """An option of an optimizer.

    Attributes
    ----------
    default : object
        None if the option has to be given.
    type : str
        As documentation states it.
    meaning : str
        A sentence for documentation.
    read : callable
        Checks a value; takes the option's name and the value.
    forms : tuple of str
        The forms in which the option may differ from its default.
    """

    default: Any
    type: str
    meaning: str
    read: Reader
    forms: tuple[str, ...] = FORMS

    def is_honoured(self, value: Any, form: str) -> bool:
        """Return whether a form of states does what a value asks for."""
        return form in self.forms or value == self.default


def form_of(bits: int, backend: str) -> str:
    """Name the form of states.

    Example
    -------
    >>> form_of(8, "native"), form_of(8, "bitsandbytes"), form_of(32, "native")
    ('8 bit', '8 bit by bitsandbytes', '32 bit')
    """
    if bits == 32:
        return AT_32_BIT
    return BY_LIBRARY if backend == "bitsandbytes" else AT_8_BIT


def _betas(first: float, second: float, meaning: str) -> Option:
    return Option((first, second), "(float, float)", meaning, pair)


_LR = Option(None, "float", "Learning rate.", number)
_L2 = Option(
    0.0, "float", "An L2 penalty, added to gradients.", number, (AT_8_BIT, AT_32_BIT)
)
_DECOUPLED = Option(
    0.0, "float", "Weights shrink by ``lr`` times it before the update.", number
)
_ADAM_BETAS = _betas(
    0.9, 0.999, "Parts of the first and the second moment that a step keeps."
)
_EPS = Option(1e-8, "float", "Added to the root of the second moment.", positive)
_AMSGRAD = Option(
    False, "bool", "Whether second moments never fall.", switch, (AT_32_BIT,)
)


@dataclass(frozen=True)
class OptimizerRow:
    """All that the package knows of an optimizer, beside the arithmetic of its rule.

    Attributes
    ----------
    name : str
        As ``build_optimizer`` and the recipe's ``optimizer_name`` take it.
    class_name : str
        Of its class in ``speechbrain_rev.optim``.
    summary : str
        First line of the class's documentation.
    rule : str
        The kind of update that ``optim.reference`` and ``kernels.optimizer`` compute.
    moments : int
        How many moments a parameter has: 1 or 2. The first has a sign, the second none.
    momentum : tuple of (str, int or None)
        The option, and its place there, that says which part of the first moment a step
        keeps.
    options : mapping of str to Option
        By name.
    at_32_bit : str
        Class of torch that computes with 32-bit states, as "package.module:Class"; empty
        if torch has none, and this package's arithmetic does.
    by_library : str
        Class of bitsandbytes with 8-bit states, likewise.
    sums : bool
        Whether the first moment sums gradients; else it averages them.
    bias_corrected : bool
        Whether moments are divided by one minus their beta to the power of the steps.
    decoupled : bool
        Whether weight decay always shrinks weights; else gradients take it up.
    """

    name: str
    class_name: str
    summary: str
    rule: str
    moments: int
    momentum: tuple[str, int | None]
    options: Mapping[str, Option]
    at_32_bit: str
    by_library: str
    sums: bool = False
    bias_corrected: bool = False
    decoupled: bool = False


_ROWS = (
    OptimizerRow(
        "sgd", "SGD", "SGD with momentum.", "momentum", 1, ("momentum", None),
        {
            "lr": _LR,
            "momentum": Option(0.9, "float", "Part of the momentum that a step keeps.", fraction),
            "weight_decay": Option(0.0, "float", _L2.meaning, number),
            "nesterov": Option(
                False, "bool", "Whether the momentum looks one step ahead.", switch,
                (AT_8_BIT, AT_32_BIT),
            ),
            "dampening": Option(
                0.0, "float", "Part of a gradient that the momentum leaves out.", number,
                (AT_32_BIT,),
            ),
            "decoupled_decay": Option(
                False, "bool", "Whether weights shrink before the update, as in AdamW.", switch,
                (AT_8_BIT,),
            ),
        },
        "torch.optim:SGD", "bitsandbytes.optim:SGD8bit", sums=True,
    ),
    OptimizerRow(
        "adam", "Adam", "Adam.", "adam", 2, ("betas", 0),
        {
            "lr": _LR, "betas": _ADAM_BETAS, "eps": _EPS,
            # bitsandbytes decouples the decay of Adam, too.
            "weight_decay": _L2, "amsgrad": _AMSGRAD,
        },
        "torch.optim:Adam", "bitsandbytes.optim:Adam8bit", bias_corrected=True,
    ),
    OptimizerRow(
        "adamw", "AdamW", "Adam with decoupled weight decay.", "adam", 2, ("betas", 0),
        {
            "lr": _LR, "betas": _ADAM_BETAS, "eps": _EPS,
            "weight_decay": _DECOUPLED, "amsgrad": _AMSGRAD,
        },
        "torch.optim:AdamW", "bitsandbytes.optim:AdamW8bit", bias_corrected=True,
        decoupled=True,
    ),
    # Chen et al., "Symbolic discovery of optimization algorithms", 2023, Program 1.
    OptimizerRow(
        "lion", "Lion", "Lion: steps of one length, by the sign of a momentum.", "lion", 1,
        ("betas", 1),
        {
            "lr": _LR,
            "betas": _betas(
                0.9, 0.99, "Parts of the momentum in the step's direction, and in the momentum."
            ),
            "weight_decay": _DECOUPLED,
        },
        "", "bitsandbytes.optim:Lion8bit", decoupled=True,
    ),
)  # fmt: skip
#: All optimizers by name.
OPTIMIZERS = {row.name: row for row in _ROWS}


def read_options(
    row: OptimizerRow, form: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Read the options of an optimizer; those that are not given have their defaults.

    Parameters
    ----------
    row : OptimizerRow
        The optimizer.
    form : str
        One of ``FORMS``.
    given : mapping of str to object
        Options by name.

    Returns
    -------
    dict of str to object
        All options that exist in this form.

    Raises
    ------
    ValueError
        If an option does not exist, has no such value, or is not honoured in this form.

    Example
    -------
    >>> read_options(OPTIMIZERS["sgd"], AT_32_BIT, {"lr": 1})
    {'lr': 1.0, 'momentum': 0.9, 'weight_decay': 0.0, 'nesterov': False, 'dampening': 0.0}
    """
    for name in given:
        if name not in row.options:
            raise ValueError(
                f"{name} is no option of {row.name}, which has {', '.join(row.options)}."
            )
    values = {}
    for name, option in row.options.items():
        value = option.read(name, given.get(name, option.default))
        if not option.is_honoured(value, form):
            raise ValueError(
                f"{row.name} at {form} cannot do {name}={value}. Leave it out: it exists at "
                f"{' and at '.join(option.forms)}."
            )
        if form in option.forms:
            values[name] = value
    return values
