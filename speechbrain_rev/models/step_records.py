"""What is left of a training step, tensor by tensor, and where two steps differ in a bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: Tensors after a step, on the CPU, by what they are; None after a step that was skipped.
Record = dict[str, Tensor] | None

_GRADIENT = "gradient"


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor whose bits differ between two runs.

    Attributes
    ----------
    step : int
        From 1; 0 is before the first step.
    name : str
        The tensor.
    how_far : str
        In words.
    tensors, all_tensors : int
        How many tensors of the step differ, and how many there are.
    """

    step: int
    name: str
    how_far: str
    tensors: int
    all_tensors: int

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step else "before the first step"
        return (
            f"{when}, {self.name}: {self.how_far}; {self.tensors} of "
            f"{self.all_tensors} tensors of the step differ"
        )


def gradients_of(modules: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients that there are, for a record.

    Parameters
    ----------
    modules : nn.Module
        What is trained.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU.
    """
    named = modules.named_parameters()
    return _copies(_GRADIENT, ((n, p.grad) for n, p in named if p.grad is not None))


def state_of(modules: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copy buffers, weights and optimizer state, for a record.

    Parameters
    ----------
    modules : nn.Module
        What is trained.
    optimizer : torch.optim.Optimizer
        Of its parameters.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU.
    """
    state = optimizer.state
    parameters = dict(modules.named_parameters())
    return {
        **_copies("buffer", modules.named_buffers()),
        **_copies("weight", parameters.items()),
        **_copies(
            "optimizer state",
            (
                (f"{key} of {name}", value)
                for name, parameter in parameters.items()
                for key, value in state.get(parameter, {}).items()
                if isinstance(value, Tensor)
            ),
        ),
    }


def first_difference(
    expected: Sequence[Record], found: Sequence[Record]
) -> FirstDifference | None:
    """Compare bits, step by step and tensor by tensor.

    Parameters
    ----------
    expected, found : sequence of Record
        Of two runs.

    Returns
    -------
    FirstDifference or None
        None if there is none.

    Examples
    --------
    >>> zeros = {"gradient of w": torch.zeros(3)}
    >>> str(first_difference([{}, zeros], [{}, {"gradient of w": torch.tensor([0, 0.5, 0])}]))
    'step 1, gradient of w: 1 of 3 values, by up to 0.5; 1 of 1 tensors of the step differ'
    """
    for number in range(max(len(expected), len(found))):
        a, b = (
            runs[number] if number < len(runs) else None for runs in (expected, found)
        )
        if a is None and b is None:
            continue
        if a is None or b is None:
            which = "as configured" if b is None else "all stored"
            far = f"not finite {which}, where the step is skipped"
            return FirstDifference(number, _GRADIENT, far, 1, 1)
        names = list(dict.fromkeys([*a, *b]))
        unequal = [name for name in names if not _same_bits(a.get(name), b.get(name))]
        if unequal:
            name = unequal[0]
            far = _how_far(a.get(name), b.get(name))
            return FirstDifference(number, name, far, len(unequal), len(names))
    return None


def gradient_errors(
    expected: Sequence[Record], found: Sequence[Record]
) -> list[tuple[float, str]]:
    """Measure the error of each step's gradient.

    Parameters
    ----------
    expected, found : sequence of Record
        Of two runs.

    Returns
    -------
    list of tuple of float and str
        For each step that both took, the norm of the error of all gradients by the norm of
        what was expected, and the tensor that has most of it.

    Examples
    --------
    >>> one, other = ({"gradient of w": torch.tensor([x, 4.0])} for x in (3.0, 3.5))
    >>> gradient_errors([{}, one], [{}, other])
    [(0.1, 'gradient of w')]
    """
    errors = []
    for a, b in zip(expected[1:], found[1:], strict=False):
        if a is None or b is None:
            continue
        names = [name for name in a if name.startswith(_GRADIENT) and name in b]
        squares = {n: _square(b[n].double() - a[n].double()) for n in names}
        whole = sum(_square(a[n].double()) for n in names)
        error = (sum(squares.values()) / whole) ** 0.5 if whole else float("nan")
        errors.append((error, max(squares, key=lambda name: squares[name])))
    return errors


def _copies(kind: str, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    joint = "" if kind.endswith("state") else "of "
    return {f"{kind} {joint}{n}": x.detach().to("cpu", copy=True) for n, x in named}


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def _how_far(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None:
        return f"only {'as configured' if a is None else 'with all blocks stored'}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return (
            f"{list(a.shape)} {a.dtype} stored, {list(b.shape)} {b.dtype} as configured"
        )
    a, b = a.double(), b.double()
    far = (a - b).abs()
    unequal = int((far != 0).sum())
    if not unequal:
        return "equal but for the signs of zeros"
    return f"{unequal} of {a.numel()} values, by up to {float(far.max()):.2g}"


def _square(x: Tensor) -> float:
    return float(x.square().sum())
