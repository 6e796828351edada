"""Arithmetic in references, as HyperPyYAML does it, within the range of a number.

Integers have no largest one: ``9 ** 9 ** 9`` would be computed for hours.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.Mod: operator.mod,
}


def compute(formula: str) -> object:
    """Compute a formula; what is none is a text and stays as it is.

    Parameters
    ----------
    formula : str
        With all references filled in.

    Returns
    -------
    object
        What HyperPyYAML would make of it.

    Raises
    ------
    ArithmeticError
        If a step of it divides by zero, repeats a text or leaves the range of floats.

    Examples
    --------
    >>> compute("3 * 2 ** 4"), compute("results/3")
    (48, 'results/3')
    >>> compute("1986 ** 999999")
    Traceback (most recent call last):
    OverflowError: ...
    """
    try:
        return _value(ast.parse(formula, mode="eval").body)
    except (TypeError, SyntaxError, KeyError):
        return formula
    except (RecursionError, MemoryError) as error:
        raise ArithmeticError("the formula is nested too deep") from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if not isinstance(node, ast.BinOp):
        raise TypeError(node)
    operation = _OPERATIONS[type(node.op)]
    left, right = _value(node.left), _value(node.right)
    is_text = isinstance(left, str | bytes) or isinstance(right, str | bytes)
    if is_text and isinstance(node.op, ast.Mult | ast.Mod):
        raise ArithmeticError("a text would be repeated or filled")
    if (
        isinstance(node.op, ast.Pow)
        and isinstance(left, int)
        and isinstance(right, int)
    ):
        # Overflows at once where the integer would take hours.
        float(left) ** right
    result = operation(left, right)
    if isinstance(result, int):
        float(result)
    return result
