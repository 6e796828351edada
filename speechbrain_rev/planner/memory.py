"""Memory, counted byte by byte on any device: what a step holds, what a machine has left."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from speechbrain_rev import devices
from speechbrain_rev.files import made_of, parse_json, refusing
from speechbrain_rev.sizes import size_text
from speechbrain_rev.torch_private import TorchDispatchMode, storage_key, tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the storages made inside this context.

    Parameters
    ----------
    device : torch.device or None
        Whose storages are counted; None for those of all devices.

    Attributes
    ----------
    live : int
        Bytes of storages made inside the context and still alive.
    peak : int
        The largest ``live`` so far.

    Examples
    --------
    >>> with LiveBytes() as meter:
    ...     x = torch.zeros(256)
    ...     y = x + 1
    ...     del x, y
    >>> meter.peak, meter.live
    (2048, 0)
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.device = device
        self._type = None if device is None else device.type
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count the storages that it returns."""
        return self._run(func, args, kwargs or {})[0]

    def _run(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Run an operation; give what it returns, the tensors it took and those in it."""
        taken = _tensors((*args, *kwargs.values()) if kwargs else args)
        if func is _TO_COPY or func is _COPY:
            outputs = _copied_from_meta(func, args, kwargs)
            if outputs is not None:
                if outputs is not args[0]:
                    self._add(outputs)
                return outputs, taken, [outputs]
        outputs, is_known = _result(func, args, kwargs, taken)
        made = [outputs] if isinstance(outputs, Tensor) else _tensors((outputs,))
        # A known operation makes new tensors alone, or gives its first argument.
        if is_known:
            if not (args and outputs is args[0]):
                for x in made:
                    self._add(x)
            return outputs, taken, made
        given = {_storage_key(x) for x in taken if x.layout is torch.strided}
        for x in made:
            if x.layout is torch.strided and _storage_key(x) not in given:
                self._add(x)
        return outputs, taken, made

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage_key(storage), storage.nbytes()
        if key in self._known:
            return
        # Fake tensors are of a device; their storages are on meta.
        if self._type is not None and x.device.type != self._type:
            return

        def freed(_: Any, key: int = key, size: int = size) -> None:
            self._free(key, size)

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size


def live_bytes_peak(
    step: Callable[[], Any], *, device: torch.device | None = None
) -> int:
    """Measure the largest number of bytes alive at once that a step allocates.

    Parameters
    ----------
    step : callable
        Runs what is to be measured, for instance forward and backward pass. Tensors
        that existed before it are not counted; gradients that it creates are.
    device : torch.device or None
        Whose tensors are counted; None for those of all devices.

    Returns
    -------
    int
        Bytes of live tensors at the peak.

    Examples
    --------
    >>> live_bytes_peak(lambda: torch.zeros(1000) + 1)
    8000
    """
    gc.collect()
    meter = LiveBytes(device)
    with meter:
        step()
    return meter.peak


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """List tensors among the arguments of an operation, or in lists of them."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors(value)
    return tensors


_TO_COPY = torch.ops.aten._to_copy.default
_COPY = torch.ops.aten.copy_.default


def _copied_from_meta(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Copy a meta tensor to another device, which torch refuses: contents are arbitrary.

    So a step on meta tensors can move what it keeps to the host, as one on a GPU does.
    """
    if func is _TO_COPY and args[0].is_meta:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "meta":
            return torch.empty_like(args[0], dtype=kwargs.get("dtype"), device=device)
    if func is _COPY and args[1].is_meta and not args[0].is_meta:
        copied: Tensor = args[0]
        return copied
    return None


# Results of operations on meta tensors, by all that they depend on. Most of their kernels
# are Python and slow, and training steps ask the same of them again and again.
_RESULTS: dict[Any, Any] = {}
_MOST_RESULTS = 50_000
_ITSELF, _OTHER = object(), object()
_PLAIN = (Tensor, nn.Parameter)


def _result(
    func: Any, args: Any, kwargs: Any, taken: Sequence[Tensor]
) -> tuple[Any, bool]:
    """Run an operation; on meta tensors give what it gave of such tensors before.

    What is known are new tensors alone, or the first argument.
    """
    for x in taken:
        if not x.is_meta or type(x) not in _PLAIN:
            return func(*args, **kwargs), False
    try:
        key = func, _key(args), _key(kwargs.items()) if kwargs else ()
        known = _RESULTS.get(key)
    except TypeError:  # an argument without a hash
        return func(*args, **kwargs), False
    if known is None:
        outputs = func(*args, **kwargs)
        if len(_RESULTS) >= _MOST_RESULTS:
            _RESULTS.clear()
        unchanged = bool(args) and outputs is args[0] and _key(args) == key[1]
        _RESULTS[key] = _ITSELF if unchanged else _shapes(func, outputs, taken)
        return outputs, False
    if known is _ITSELF:
        return args[0], True
    if known is _OTHER:
        return func(*args, **kwargs), False
    new = tuple(None if shape is None else _empty(*shape) for shape in known)
    return new if len(new) > 1 else new[0], True


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    """Make a key of arguments: of tensors what they look like; 1 is not 1.0."""
    return tuple(
        [
            (value.shape, value.stride(), value.dtype)
            if isinstance(value, Tensor)
            else _key(value)
            if isinstance(value, list | tuple)
            else (type(value), value)
            for value in values
        ]
    )


def _look(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


def _empty(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _shapes(func: Any, outputs: Any, taken: Sequence[Tensor]) -> Any:
    """Describe what an operation gave, if that was whole new tensors and nothing else."""
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    made = [x for x in results if type(x) is Tensor and x.is_meta]
    new = {_storage_key(x) for x in made} - {_storage_key(x) for x in taken}
    is_plain = (
        not func._schema.is_mutable
        and made
        and len(new) == len(made) == sum(x is not None for x in results)
        and all(
            x.untyped_storage().nbytes() == _empty(*_look(x)).untyped_storage().nbytes()
            for x in made
        )
    )
    return tuple(x if x is None else _look(x) for x in results) if is_plain else _OTHER


def _storage_key(x: Tensor) -> int:
    return storage_key(x)


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
        every step. All other parts are held from step to step.
    optimizer_states_bytes : int
        The optimizer's state, from the first update on.
    weights_bytes : int
        Parameters, trained or not, and buffers. Always.
    gradients_bytes : int
        One value for each trained parameter, as if held from one step to the next. A
        loop that sets them to None makes them while activations go away.
    others_bytes : int
        The batch, and whatever else the maker of the report counts here.
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
        with refusing("The text is no memory report", "Count anew."):
            return made_of(cls, parse_json(text))


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
    return sum({(s.device, storage_key(s)): s.nbytes() for s in storages}.values())


def _states_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = tree_leaves([dict(state) for state in optimizer.state.values()])
    return storage_bytes(x for x in states if isinstance(x, Tensor))


def _names(things: Iterable[torch.device | torch.dtype]) -> str:
    return ", ".join(sorted({str(thing).removeprefix("torch.") for thing in things}))


_MEMINFO = Path("/proc/meminfo")
# The limit of a container, and what it has, where it has a limit of its own.
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_TAKEN = Path("/sys/fs/cgroup/memory.current")
_TAKEN_BY = Path("/sys/fs/cgroup/memory.stat")


def available_ram_bytes() -> int | None:
    """Read what the machine has for a process before it starts to swap.

    Returns
    -------
    int or None
        What Linux calls available, or what is free where it is another system, but no
        more than a container's limit leaves. None where neither is known.

    Examples
    --------
    >>> size = available_ram_bytes()
    >>> size is None or size > 0
    True
    """
    known = [size for size in (_available(), _left_of_limit()) if size is not None]
    return min(known, default=None)


def _available() -> int | None:
    try:
        line = re.search(r"MemAvailable:\s*(\d+) kB", _MEMINFO.read_text())
    except OSError:
        line = None
    if line is not None:
        return int(line[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _left_of_limit() -> int | None:
    try:
        # The limit is "max" where there is none.
        limit, taken = (int(file.read_text()) for file in (_LIMIT, _TAKEN))
        # Files that were read, which are let go of where memory is asked for.
        files = re.search(r"^inactive_file (\d+)$", _TAKEN_BY.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return max(0, limit - taken + (int(files[1]) if files else 0))


_T = TypeVar("_T")

#: Share of what is free that live tensors may take; workspaces and gaps take of the rest.
SHARE = 0.8

#: Messages of torch, of a CPU, CUDA and its libraries, that have no error class.
_NO_MEMORY = (
    "not enough memory",
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def batch_that_fits(
    stored_bytes: Callable[[int], int], batch: int, device: torch.device
) -> int:
    """Halve a batch until a step of it, all stored, fits into what is free on a device.

    Parameters
    ----------
    stored_bytes : callable
        Counts the peak of a step of some samples that stores everything.
    batch : int
        Samples that are wanted.
    device : torch.device
        Where they will run: a GPU, or the CPU, on which too much ends the process.

    Returns
    -------
    int
        Samples, at least 1.

    Raises
    ------
    MemoryError
        If not even one sample fits.

    Examples
    --------
    >>> batch_that_fits(lambda batch: 1000 * batch, 64, torch.device("cpu"))
    64
    """
    free = _free_bytes(device)
    if free is None:
        return batch
    while (peak := stored_bytes(batch)) > SHARE * free:
        if batch == 1:
            raise MemoryError(
                f"A step of one sample on {device} takes {size_text(peak)}, and "
                f"{size_text(free)} are free, of which {SHARE:.0%} may be used. End "
                f"what else uses the {_in_words(device)}, or take shorter samples."
            )
        batch //= 2
    return batch


def fits_device(peak_bytes: int, device: torch.device) -> bool:
    """Whether a step fits into what is free, as far as that is known.

    Parameters
    ----------
    peak_bytes : int
        Of live tensors that it makes.
    device : torch.device
        A GPU, or the CPU, on which too much ends the process.

    Returns
    -------
    bool
        False only if it is known not to fit.

    Examples
    --------
    >>> fits_device(0, torch.device("cpu"))
    True
    """
    free = _free_bytes(device)
    return free is None or peak_bytes <= SHARE * free


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cpu":
        return available_ram_bytes()
    return devices.free_bytes(device)


def _in_words(device: torch.device) -> str:
    return "machine" if device.type == "cpu" else "GPU"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, of a GPU or of the machine.

    Examples
    --------
    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(RuntimeError("Expected 4 channels"))
    False
    """
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in _NO_MEMORY)
    )


def unless_memory_runs_out(make: Callable[[], _T]) -> _T | None:
    """Do something, or free what there is to be freed if memory runs out.

    Parameters
    ----------
    make : callable
        What is done.

    Returns
    -------
    object or None
        What it returned; None if memory ran out.

    Examples
    --------
    >>> unless_memory_runs_out(lambda: torch.empty(2**60)) is None
    True
    """
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    # The error is gone by now, and with it the frames that held tensors.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None
