"""How fast a device is: times of what a training step does, without a clock.

Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from speechbrain_rev.devices import GPUS, Gpu
from speechbrain_rev.documents import load_document, made_of, parsed, reading, texts
from speechbrain_rev.sizes import GIB


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


_DOCUMENT = "speed of a device", "Write one with speechbrain-rev calibrate."


def _shown(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 999.5 else f"{rate:.3g}"


@dataclass(frozen=True)
class Speed:
    """How fast a device is, to estimate times from counts of operations.

    Attributes
    ----------
    flops_per_second : float
        Of convolutions and matrix products.
    bytes_per_second : float
        Read and written by all operations.
    operations_per_second : float
        Of operations that do nothing.
    host_bytes_per_second : float
        Copied between the device and the machine; infinite on a CPU.
    about : mapping of str to str
        Under "device" which one, then how this was measured.

    Raises
    ------
    ValueError
        If a speed is not above zero, all are infinite, or no device is named.

    Examples
    --------
    >>> Speed.from_json(ASSUMED.to_json()) == ASSUMED
    True
    >>> print(Speed(1e12, 2**38, 1e5, {"device": "a GPU", "torch": "2"}))
    a GPU, 1 TFLOP/s, 256 GiB/s, 100,000 operations/s (torch: 2)
    """

    flops_per_second: float
    bytes_per_second: float
    operations_per_second: float
    about: Mapping[str, str]
    host_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        speeds = (
            self.flops_per_second,
            self.bytes_per_second,
            self.operations_per_second,
        )
        every = (*speeds, self.host_bytes_per_second)
        if any(
            isinstance(s, bool) or not isinstance(s, int | float) or not s > 0
            for s in every
        ):
            raise ValueError(f"Speeds are {every}; each must be above zero.")
        if min(speeds) == math.inf:
            raise ValueError(
                "No speed is finite, so that nothing would take any time; one must be."
            )
        if "device" not in texts("about", self.about):
            raise ValueError(
                f"about is {self.about}; it must name the device, under 'device'."
            )

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
        """All but the last of them, in words: no mode of a plan copies to the host."""
        return (
            f"{_shown(self.flops_per_second / 1e12)} TFLOP/s, "
            f"{_shown(self.bytes_per_second / GIB)} GiB/s, "
            f"{self.operations_per_second:,.0f} operations/s"
        )

    def __str__(self) -> str:
        measured = "; ".join(
            f"{n}: {v}" for n, v in self.about.items() if n != "device"
        )
        how = f" ({measured})" if measured else "; no clock was read"
        return f"{self.about['device']}, {self.rates}{how}"

    def to_json(self) -> str:
        """Write it as a JSON document, which ``from_json`` reads."""
        # JSON has no infinity, which a device that is measured can have.
        plain = {
            name: value if value != math.inf else None
            for name, value in asdict(self).items()
        }
        return json.dumps(plain, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Speed:
        """Read what ``to_json`` wrote.

        Raises
        ------
        ValueError
            If the text is no speed.
        """
        with reading(*_DOCUMENT):
            plain: dict[str, Any] = {
                name: math.inf if value is None else value
                for name, value in parsed(text).items()
            }
            return made_of(cls, plain)

    @classmethod
    def load(cls, path: str | Path) -> Speed:
        """Read it from a file.

        Raises
        ------
        ValueError
            If the file is no speed, or no regular file; the message names it.
        OSError
            If it cannot be read.
        """
        return load_document(path, cls.from_json, *_DOCUMENT)


# The GPU whose shares are assumed of others.
_ASSUMED_NAME = "RTX 2080 Ti"
#: Where no device was measured: an 11 GB GPU at about half of its peak figures in
#: float32 (an RTX 2080 Ti has 13.4 TFLOP/s and 616 GB/s), which starts an operation in
#: 10 microseconds and copies over PCIe 3.0 x16. A plan depends on the ratios.
ASSUMED = Speed(
    flops_per_second=6.7e12,
    bytes_per_second=0.4e12,
    operations_per_second=1e5,
    host_bytes_per_second=12e9,
    about={"device": "an assumed 11 GB GPU"},
)


def assumed_speed(gpu: Gpu) -> Speed:
    """Assume a GPU's speed: shares of its peak figures as ``ASSUMED`` has of an 11 GB GPU's.

    Parameters
    ----------
    gpu : Gpu
        As ``parse_card`` gives it.

    Returns
    -------
    Speed
        About half of the peak figures in float32; it names the GPU.

    Examples
    --------
    >>> from speechbrain_rev.devices import parse_card
    >>> print(assumed_speed(parse_card("11GB")).rates)
    6.7 TFLOP/s, 373 GiB/s, 100,000 operations/s
    """
    (base,) = (known for known in GPUS if known.name == _ASSUMED_NAME)
    flops = gpu.flops_per_second / base.flops_per_second
    moved = gpu.bytes_per_second / base.bytes_per_second
    return replace(
        ASSUMED,
        flops_per_second=flops * ASSUMED.flops_per_second,
        bytes_per_second=moved * ASSUMED.bytes_per_second,
        about={"device": f"an assumed {gpu}"},
    )
