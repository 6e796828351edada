"""GPUs to plan for and how fast they are; devices by their names and what is free on them.

Torch is imported where it is asked, so that what needs none may import this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from speechbrain_rev.sizes import EXAMPLES, GIB, card_text, parse_size

if TYPE_CHECKING:
    import torch


# Shares of a GPU's peak figures in float32 that are assumed where nothing was measured.
_FLOPS_SHARE, _BYTES_SHARE = 0.5, 400 / 616


@dataclass(frozen=True)
class Work:
    """Operations of a block in a training step, forward and backward.

    Attributes
    ----------
    flops : int
        Of convolutions and matrix products, a multiplication and an addition being two.
    moved_bytes : int
        Read and written by all operations.
    operations : int
        How many there were, views not counted.
    host_bytes : int
        Copied from one device to another.
    """

    flops: int
    moved_bytes: int
    operations: int
    host_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.operations + other.operations,
            self.host_bytes + other.host_bytes,
        )


@dataclass(frozen=True)
class Speed:
    """Rates of a GPU that is not here, to estimate times from counts of operations.

    Attributes
    ----------
    device : str
        The GPU.
    flops_per_second : float
        Of convolutions and matrix products.
    bytes_per_second : float
        Read and written by all operations.
    operations_per_second : float
        Operations that the host starts; assumed to be one in 10 microseconds.
    host_bytes_per_second : float
        Copied between the GPU and the machine; assumed to be those of PCIe 3.0 x16.
    measured : tuple of str
        Names of the rates that were measured. All others are assumed.

    Examples
    --------
    >>> print(Speed("a GPU", 1e12, 2**38, measured=("bytes_per_second",)).rates)
    1 TFLOP/s, 256 GiB/s (measured), 100,000 operations/s
    """

    device: str
    flops_per_second: float
    bytes_per_second: float
    operations_per_second: float = 1e5
    host_bytes_per_second: float = 12e9
    measured: tuple[str, ...] = ()

    def seconds(self, work: Work) -> float:
        """Estimate the time of what a block does."""
        return (
            work.flops / self.flops_per_second
            + work.moved_bytes / self.bytes_per_second
            + work.operations / self.operations_per_second
            + work.host_bytes / self.host_bytes_per_second
        )

    @property
    def rates(self) -> str:
        """All but that of copies, in words: no mode of a plan copies to the host."""
        texts = {
            "flops_per_second": f"{_format_rate(self.flops_per_second / 1e12)} TFLOP/s",
            "bytes_per_second": f"{_format_rate(self.bytes_per_second / GIB)} GiB/s",
            "operations_per_second": f"{self.operations_per_second:,.0f} operations/s",
        }
        return ", ".join(
            f"{text} (measured)" if name in self.measured else text
            for name, text in texts.items()
        )

    def __str__(self) -> str:
        return (
            f"{self.device}, {self.rates}; rates are assumed from peak figures unless "
            "measured"
        )


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 999.5 else f"{rate:.3g}"


@dataclass(frozen=True)
class Gpu:
    """A GPU as it is sold, with the peak figures that its maker publishes.

    Attributes
    ----------
    name : str
        As makers write it, in words.
    memory_bytes : int
        What it is sold with, 2**30 bytes a GB.
    bytes_per_second : float
        Bandwidth of its memory.
    flops_per_second : float
        In float32, without tensor cores.
    is_named : bool
        Whether it was asked for by its name, not taken for its memory.
    measured : mapping of str to float
        Rates of ``Speed`` by name that somebody measured.

    Examples
    --------
    >>> print(parse_card("11GB").speed.rates)
    6.7 TFLOP/s, 373 GiB/s, 100,000 operations/s
    >>> print(parse_card("H100").speed.rates)
    33.5 TFLOP/s, 2,026 GiB/s, 28,000 operations/s (measured)
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float
    is_named: bool = True
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def speed(self) -> Speed:
        """Its rates: measured ones, and else shares of its peak figures."""
        rates = {
            "flops_per_second": _FLOPS_SHARE * self.flops_per_second,
            "bytes_per_second": _BYTES_SHARE * self.bytes_per_second,
            **self.measured,
        }
        return Speed(f"an assumed {self}", measured=tuple(self.measured), **rates)

    def __str__(self) -> str:
        if self.is_named:
            return self.name
        alike = [
            gpu.name
            for gpu in GPUS
            if gpu.memory_bytes == self.memory_bytes and gpu.name != self.name
        ]
        others = f" (or name {', '.join(alike)})" if alike else ""
        return f"{self.name}, listed nearest to {card_text(self.memory_bytes)}{others}"


#: GPUs that ``--card`` knows, by memory. The first of a size stands for that size, and the
#: nearest one for a size that is not listed. A row is all that another GPU takes.
GPUS = (
    Gpu("RTX 2060", 6 * GIB, 336e9, 6.5e12),
    Gpu("GTX 1060", 6 * GIB, 192e9, 4.4e12),
    Gpu("RTX 3070", 8 * GIB, 448e9, 20.3e12),
    Gpu("RTX 2080", 8 * GIB, 448e9, 10.1e12),
    Gpu("RTX 4060", 8 * GIB, 272e9, 15.1e12),
    Gpu("GTX 1080", 8 * GIB, 320e9, 8.9e12),
    Gpu("RTX 3080", 10 * GIB, 760e9, 29.8e12),
    Gpu("RTX 2080 Ti", 11 * GIB, 616e9, 13.4e12),
    Gpu("GTX 1080 Ti", 11 * GIB, 484e9, 11.3e12),
    Gpu("RTX 3060", 12 * GIB, 360e9, 12.7e12),
    Gpu("RTX 4070", 12 * GIB, 504e9, 29.1e12),
    Gpu("RTX 5070", 12 * GIB, 672e9, 30.9e12),
    Gpu("RTX 4080", 16 * GIB, 717e9, 48.7e12),
    Gpu("RTX 5080", 16 * GIB, 960e9, 56.3e12),
    Gpu("T4", 16 * GIB, 320e9, 8.1e12),
    Gpu("V100 16GB", 16 * GIB, 900e9, 15.7e12),
    Gpu("RTX 3090", 24 * GIB, 936e9, 35.6e12),
    Gpu("RTX 4090", 24 * GIB, 1008e9, 82.6e12),
    Gpu("A10", 24 * GIB, 600e9, 31.2e12),
    Gpu("L4", 24 * GIB, 300e9, 30.3e12),
    Gpu("V100 32GB", 32 * GIB, 900e9, 15.7e12),
    Gpu("RTX 5090", 32 * GIB, 1792e9, 104.8e12),
    Gpu("A100 40GB", 40 * GIB, 1555e9, 19.5e12),
    Gpu("RTX A6000", 48 * GIB, 768e9, 38.7e12),
    Gpu("L40S", 48 * GIB, 864e9, 91.6e12),
    Gpu("A100 80GB", 80 * GIB, 2039e9, 19.5e12),
    # Its host's operations: fitted once to times of blocks, with torch 2.11 in float32.
    Gpu("H100 80GB", 80 * GIB, 3350e9, 67e12, measured={"operations_per_second": 28e3}),
    Gpu("H200", 141 * GIB, 4800e9, 67e12),
)


def _words(name: str) -> set[str]:
    """List the words of a GPU's name that distinguish it."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    return words - {"nvidia", "geforce", "tesla"}


def _spelling(name: str) -> str:
    """Spell names in one way: NVIDIA GeForce RTX-2080 Ti and 2080ti are one."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia)?(geforce|tesla|quadro)?([rg]tx)?", "", letters)


def _spellings(gpu: Gpu) -> set[str]:
    """List the spellings of a listed GPU: with its memory and without."""
    model = re.sub(r" \d+GB$", "", gpu.name)
    return {_spelling(model), _spelling(f"{model} {gpu.memory_bytes // GIB}GB")}


def nearest_gpu(memory_bytes: int, gpus: Sequence[Gpu] = GPUS) -> Gpu:
    """Take the listed GPU whose memory is nearest to a size.

    Parameters
    ----------
    memory_bytes : int
        The size.
    gpus : sequence of Gpu
        Those to choose from.

    Returns
    -------
    Gpu
        With the memory that was asked for.

    Examples
    --------
    >>> print(nearest_gpu(10 * GIB))
    RTX 3080, listed nearest to 10 GiB
    """
    gpu = min(gpus, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
    return replace(gpu, memory_bytes=memory_bytes, is_named=False)


#: Rates where no GPU is named: those of an RTX 2080 Ti. A plan depends on the ratios.
ASSUMED = replace(nearest_gpu(11 * GIB).speed, device="an assumed 11 GB GPU")


def smallest_gpu(memory_bytes: int) -> str | None:
    """Name the listed GPU of the least memory that has a size, and its memory.

    Parameters
    ----------
    memory_bytes : int
        The size.

    Returns
    -------
    str or None
        None if no GPU has as much.

    Examples
    --------
    >>> smallest_gpu(11 * GIB + 1), smallest_gpu(1000 * GIB)
    ('RTX 3060 of 12 GiB', None)
    """
    enough = [gpu for gpu in GPUS if gpu.memory_bytes >= memory_bytes]
    gpu = min(enough, key=lambda gpu: gpu.memory_bytes, default=None)
    return None if gpu is None else f"{gpu.name} of {card_text(gpu.memory_bytes)}"


def parse_card(text: str) -> Gpu:
    """Read the GPU that ``--card`` names, by its name or by its memory.

    Parameters
    ----------
    text : str
        A name of ``GPUS``, or a size as ``parse_size`` takes it. Case, spaces, hyphens,
        NVIDIA, GeForce, RTX and GTX do not matter, nor does a memory that follows from
        the rest.

    Returns
    -------
    Gpu
        For a size, the nearest listed GPU with the memory that was given.

    Raises
    ------
    ValueError
        If it is neither.

    Examples
    --------
    >>> parse_card("11GB").memory_bytes == 11 * GIB
    True
    >>> print(parse_card("rtx-3090"), "|", parse_card("24GB"))
    RTX 3090 | RTX 3090, listed nearest to 24 GiB (or name RTX 4090, A10, L4)
    >>> print(parse_card("2080 Ti"), "|", parse_card("NVIDIA H100"))
    RTX 2080 Ti | H100 80GB
    """
    size = parse_size(text)
    if size is not None:
        return nearest_gpu(size)
    alike = [gpu for gpu in GPUS if _spelling(text) in _spellings(gpu)]
    if len(alike) == 1:
        return alike[0]
    which = f" Is it {' or '.join(gpu.name for gpu in alike)}?" if alike else ""
    raise ValueError(
        f"--card takes a GPU's memory as {EXAMPLES}, not {text}; or one of "
        f"{', '.join(gpu.name for gpu in GPUS)}.{which} For any other GPU give its memory."
    )


def usable_cpus() -> int:
    """Count the CPUs that this process may use."""
    # Not every system limits a process to some of them.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def named_device(name: str, *, cpu: bool, advice: str) -> torch.device:
    """Take a device by the name that ``--device`` was given.

    Parameters
    ----------
    name : str
        cuda, cuda:N for the GPU of number N, or cpu.
    cpu : bool
        Whether cpu is allowed.
    advice : str
        What to give instead, for the error message.

    Returns
    -------
    torch.device
        The device.

    Raises
    ------
    ValueError
        If it is called otherwise, or there is no such GPU.

    Examples
    --------
    >>> named_device("gpu", cpu=False, advice="Name a GPU's memory.")
    Traceback (most recent call last):
    ...
    ValueError: --device takes cuda, or cuda:N for the GPU of number N, not gpu. Name a
    GPU's memory.
    """
    import torch

    allowed = r"(cpu|cuda(:\d{1,3})?)" if cpu else r"cuda(:\d{1,3})?"
    if re.fullmatch(allowed, name, re.ASCII) is None:
        raise ValueError(
            f"--device takes {'cpu, ' if cpu else ''}cuda, or cuda:N for the GPU of "
            f"number N, not {name}. {advice}"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name != "cpu" and int(name.partition(":")[2] or 0) >= count:
        raise ValueError(
            f"--device={name} is not there: torch sees {count} GPU(s) with CUDA. "
            f"{advice}"
        )
    return torch.device(name)


def timed_device(name: str) -> torch.device:
    """Take a device by its name, or refuse one that nothing can be timed on.

    Parameters
    ----------
    name : str
        cpu, cuda, or cuda:N for the GPU of number N.

    Returns
    -------
    torch.device
        The device.

    Raises
    ------
    ValueError
        If it is called otherwise, or there is no such GPU.

    Examples
    --------
    >>> timed_device("cpu")
    device(type='cpu')
    """
    advice = "Give cpu, or the number of a GPU that is there."
    return named_device(name, cpu=True, advice=advice)


def device_name(device: torch.device) -> str:
    """Name a GPU, or the CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def described(device: torch.device) -> str:
    """Name a GPU, or the CPU with the threads that compute."""
    import torch

    if device.type == "cuda":
        return device_name(device)
    return f"{device.type}, {torch.get_num_threads()} thread(s)"


def random_devices(device: torch.device) -> list[torch.device]:
    """List the devices whose random state ``fork_rng`` must keep beside the CPU's."""
    return [device] if device.type == "cuda" else []


def free_bytes(device: torch.device) -> int | None:
    """Give what this process can still take of a GPU; None for another device.

    What torch holds and nothing uses is among it.
    """
    import torch

    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def free_and_held_bytes(device: torch.device) -> int | None:
    """Give what this process can have of a GPU in all; None for another device.

    Modules that are on the GPU already are among it.
    """
    import torch

    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


@dataclass(frozen=True)
class GpuAtHand:
    """A GPU of this machine that was asked for its memory.

    Attributes
    ----------
    name : str
        Its model.
    total_bytes, free_bytes : int
        Its memory, and what nobody had taken when it was asked.
    """

    name: str
    total_bytes: int
    free_bytes: int

    def listed(self) -> Gpu:
        """Take the listed GPU that it is, or else the nearest by its memory."""
        words = _words(self.name)
        alike = [gpu for gpu in GPUS if _words(gpu.name) <= words]
        # An RTX 2080 Ti has the words of an RTX 2080, too.
        most = max((len(_words(gpu.name)) for gpu in alike), default=0)
        alike = [gpu for gpu in alike if len(_words(gpu.name)) == most]
        # Those of laptops have the name of a faster one.
        if "laptop" in words:
            alike = []
        return nearest_gpu(self.total_bytes, alike or GPUS)


def gpu_at_hand(device: str) -> GpuAtHand:
    """Ask a GPU for its memory.

    Parameters
    ----------
    device : str
        cuda, or cuda:N for the GPU of number N.

    Returns
    -------
    GpuAtHand
        What this process takes to ask, a few hundred MiB, is not among the free bytes.

    Raises
    ------
    ValueError
        If it is no such device, or there is none.

    Examples
    --------
    >>> gpu_at_hand("cpu")
    Traceback (most recent call last):
    ...
    ValueError: --device takes cuda, or cuda:N for the GPU of number N, not cpu. Without
    a GPU give --card, for instance --card=11GB.
    """
    import torch

    advice = "Without a GPU give --card, for instance --card=11GB."
    number = named_device(device, cpu=False, advice=advice).index or 0
    free, total = torch.cuda.mem_get_info(number)
    return GpuAtHand(torch.cuda.get_device_name(number), total, free)
