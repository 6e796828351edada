"""What one training step holds in memory, by what holds it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from speechbrain_rev.memory.meter import live_bytes_peak

#: The parts of a report, in the order in which they are shown.
PARTS = ("activations", "optimizer_states", "weights", "gradients", "others")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that one training step holds, and what was measured.

    Attributes
    ----------
    activations_bytes : int
        Peak of what forward and backward pass make and drop again: what is saved for
        the backward pass, and what is computed with meanwhile. It comes and goes with
        every step; all other parts stay.
    optimizer_states_bytes : int
        What the optimizer remembers of earlier steps. From the first update on.
    weights_bytes : int
        Parameters, trained or not, and buffers. Always.
    gradients_bytes : int
        One value for each trained parameter, as if held from one step to the next. A
        loop that sets them to None makes them while activations go away.
    others_bytes : int
        The batch, and what else whoever made the report says.
    device : str
        Where the step ran: "cpu", "cuda:0", or "meta", which has shapes alone.
    input_shape : tuple of int
        Of the batch, of speech [batch, frames, n_mels].
    precision : str
        What was computed in, as "float32".

    Raises
    ------
    ValueError
        If a part is below zero.

    Examples
    --------
    >>> report = MemoryReport(900, 20, 30, 30, 20, "cpu", (8, 200, 80), "float32")
    >>> report.total_bytes, report.share("activations")
    (1000, 0.9)
    >>> MemoryReport.from_json(report.to_json()) == report
    True
    """

    activations_bytes: int
    optimizer_states_bytes: int
    weights_bytes: int
    gradients_bytes: int
    others_bytes: int
    device: str
    input_shape: tuple[int, ...]
    precision: str

    def __post_init__(self) -> None:
        """Refuse parts of less than nothing."""
        for part, size in self.parts.items():
            if size < 0:
                raise ValueError(f"{part}_bytes is {size}; a part has at least 0.")

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, in the order of ``PARTS``."""
        return {part: getattr(self, f"{part}_bytes") for part in PARTS}

    @property
    def total_bytes(self) -> int:
        """The sum of the parts.

        An upper bound of what is held at once, as parts need not peak together. It is
        the peak itself where :func:`breakdown` counted and gradients are held.
        """
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        """Fraction of the total that a part takes; 0 of nothing."""
        return self.parts[part] / max(1, self.total_bytes)

    def to_json(self) -> str:
        """Write the report as one JSON object, sizes in bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> MemoryReport:
        """Read what :meth:`to_json` wrote.

        Parameters
        ----------
        text : str
            One JSON object with every field of a report and no other.

        Returns
        -------
        MemoryReport
            The report.

        Raises
        ------
        ValueError
            If it is no such object; the message names the keys.
        """
        plain = json.loads(text)
        if not isinstance(plain, dict):
            raise ValueError(
                f"A memory report is a JSON object, not a {type(plain).__name__}."
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for keys, fault in (
            (plain.keys() - set(names), "has unknown"),
            (set(names) - plain.keys(), "lacks"),
        ):
            if keys:
                raise ValueError(
                    f"The memory report {fault} keys: {', '.join(sorted(keys))}. It has "
                    f"{', '.join(names)}."
                )
        for name, value in plain.items():
            _check_type(name, value)
        return cls(**plain | {"input_shape": tuple(plain["input_shape"])})


def breakdown(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    inputs: Iterable[Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    precision: str | None = None,
) -> MemoryReport:
    """Run one training step of any network and count what it holds.

    It is a step as any other: gradients are added to those that are there, and an
    optimizer without states is stepped once to have them, which changes the weights.
    From the second step on all other parts are there when activations peak, so that the
    total is the step's peak. What the optimizer itself computes with comes after the
    activations are gone and is not counted.

    Parameters
    ----------
    model : torch.nn.Module
        What is trained, the loss's parameters with it, on any device. On "meta" nothing
        is computed and the count is the same as on a CPU.
    step : callable
        Forward pass, loss and backward pass; it neither clears gradients nor steps the
        optimizer.
    inputs : iterable of torch.Tensor
        The batch, which exists before the step: others. The first gives the shape.
    optimizer : torch.optim.Optimizer or None
        Whose states are counted, tensor by tensor; torch's, or another's.
    precision : str or None
        What the step computes in where it is not what the parameters are, as "bf16
        autocast".

    Returns
    -------
    MemoryReport
        The parts.

    Raises
    ------
    ValueError
        If there is no input, or the step cleared gradients.

    Examples
    --------
    >>> model, x = torch.nn.Linear(100, 10, bias=False), torch.randn(4, 100)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> report = breakdown(
    ...     model, lambda: model(x).sum().backward(), inputs=[x], optimizer=sgd
    ... )
    >>> report.weights_bytes, report.gradients_bytes, report.optimizer_states_bytes
    (4000, 4000, 4000)
    >>> report.others_bytes, report.input_shape
    (1600, (4, 100))
    """
    inputs = list(inputs)
    if not inputs:
        raise ValueError("inputs is empty; give the tensors of the batch.")
    gradients = make_gradients(model)
    activations = live_bytes_peak(step)
    now = [p.grad for p in model.parameters() if p.requires_grad]
    if any(a is not b for a, b in zip(now, gradients, strict=True)):
        raise ValueError(
            "step cleared or replaced gradients, which would count as activations too. "
            "Leave zero_grad out of it."
        )
    if optimizer is not None and not optimizer.state:
        optimizer.step()
    held = [*model.parameters(), *model.buffers()]
    return MemoryReport(
        activations_bytes=activations,
        optimizer_states_bytes=0 if optimizer is None else _states_bytes(optimizer),
        weights_bytes=storage_bytes(held),
        gradients_bytes=storage_bytes(gradients),
        others_bytes=storage_bytes(inputs),
        device=_names(tensor.device for tensor in held or inputs),
        input_shape=tuple(inputs[0].shape),
        precision=precision or _names(p.dtype for p in model.parameters()),
    )


def make_gradients(model: nn.Module) -> list[Tensor]:
    """Give every trained parameter a gradient, zero where it has none yet.

    Parameters
    ----------
    model : torch.nn.Module
        What is trained.

    Returns
    -------
    list of torch.Tensor
        The gradients, one for each parameter that requires one.

    Examples
    --------
    >>> [list(gradient.shape) for gradient in make_gradients(torch.nn.Linear(2, 3))]
    [[3, 2], [3]]
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [p.grad for p in trained if p.grad is not None]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the memory behind tensors, once where several share it.

    Parameters
    ----------
    tensors : iterable of torch.Tensor
        On any devices.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> x = torch.zeros(100)
    >>> storage_bytes([x, x.view(10, 10), x[:5]])
    400
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({(s.device, s._cdata): s.nbytes() for s in storages}.values())


def _states_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = tree_leaves([dict(state) for state in optimizer.state.values()])
    return storage_bytes(x for x in states if isinstance(x, Tensor))


def _names(things: Iterable[torch.device | torch.dtype]) -> str:
    return ", ".join(sorted({str(thing).removeprefix("torch.") for thing in things}))


def _check_type(name: str, value: Any) -> None:
    def whole(number: Any) -> bool:
        return type(number) is int

    if name == "input_shape":
        right, wanted = isinstance(value, list) and all(map(whole, value)), "integers"
    elif name.endswith("_bytes"):
        right, wanted = whole(value), "an integer"
    else:
        right, wanted = isinstance(value, str), "text"
    if not right:
        raise ValueError(f"The memory report's {name} is {value!r}; it is {wanted}.")
