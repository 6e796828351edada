"""How fast a device is: measured on blocks of encoders, for estimates of all others."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from speechbrain_rev.devices import described, random_devices
from speechbrain_rev.memory import live_bytes_peak
from speechbrain_rev.models.counting import training_step
from speechbrain_rev.planner.room import batch_that_fits
from speechbrain_rev.planner.timing import (
    Speed,
    fitted_speed,
    measured_seconds,
    uniform_modes,
)
from speechbrain_rev.planner.trace import Work, trace_work
from speechbrain_rev.sizes import GB

#: One of each kind of block; two blocks a stage.
ENCODERS = (
    "resnet34",
    "resnet101",
    "df_resnet56",
    "revnet57",
    "revnet155",
    "df_revnet89",
)

#: Utterances of the steps, or as many as fit: enough to keep the device busy.
BATCH = {"cpu": 4, "cuda": 64}


def calibrate(
    device: torch.device,
    *,
    names: tuple[str, ...] = ENCODERS,
    frames: int = 200,
    repeats: int = 3,
    progress: bool = False,
) -> Speed:
    """Measure blocks of all kinds in all modes and fit the device's speed to them.

    Parameters
    ----------
    device : torch.device
        A CPU or a card with CUDA.
    names : tuple of str
        Encoders, of which two blocks a stage run.
    frames : int
        Of an utterance.
    repeats : int
        Steps of each mode, after one that is not counted.
    progress : bool
        Whether a bar on stderr tells how far it is.

    Returns
    -------
    Speed
        For float32. It says how far the times of blocks are from what it explains.

    Raises
    ------
    ValueError
        If the device is neither a CPU nor a card with CUDA.

    Examples
    --------
    >>> speed = calibrate(torch.device("cpu"), names=("resnet34",), frames=9, repeats=1)
    >>> speed.flops_per_second > 0
    True
    """
    if device.type not in BATCH:
        raise ValueError(
            f"The device is {device}; it must be a CPU or a card with CUDA."
        )
    works: list[Work] = []
    seconds: list[float] = []
    batches: list[int] = []
    bar = tqdm(
        names, desc="measuring", unit="encoder", leave=False, disable=not progress
    )
    for name in bar:
        step_of_some = functools.partial(
            training_step, name, blocks=(2, 2, 2, 2), frames=frames
        )

        def stored_bytes(count: int, step_of_some: Any = step_of_some) -> int:
            return live_bytes_peak(step_of_some(batch=count, mode="store")[1])

        batch = batch_that_fits(stored_bytes, BATCH[device.type], device)
        batches.append(batch)
        with torch.random.fork_rng(random_devices(device)):
            encoder, run = step_of_some(batch=batch, device=device)
            step = _shown(run, bar, name)
            taken = measured_seconds(encoder, step, device, repeats=repeats)
            for chosen in uniform_modes(encoder):
                for block, work in trace_work(encoder, step).items():
                    works.append(work)
                    seconds.append(taken[block, chosen.get(block, "")])
    sizes = " and ".join(map(str, sorted(set(batches))))
    about = {
        "device": described(device),
        "torch": torch.__version__,
        "measured": f"{', '.join(names)}: 2 blocks a stage, batch {sizes}, {frames} "
        "frames, float32",
    }
    return fitted_speed(works, seconds, about)


def _shown(run: Callable[[], Any], bar: tqdm[str], name: str) -> Callable[[], None]:
    """Tell on the bar how many steps of an encoder have begun."""
    count = itertools.count(1)

    def step() -> None:
        bar.set_postfix_str(f"{name}, step {next(count)}")
        run()

    return step


def speed_text(speed: Speed) -> str:
    """Say which device times are for, and how its speed was found.

    Parameters
    ----------
    speed : Speed
        What they are estimated from.

    Returns
    -------
    str
        Words to go on after "for".

    Examples
    --------
    >>> speed_text(Speed(1e12, 2e11, 1e5, {"device": "a card"}))
    'a card, 1 TFLOP/s, 200 GB/s, 1e+05 operations/s; no clock was read'
    """
    measured = "; ".join(f"{n}: {v}" for n, v in speed.about.items() if n != "device")
    return (
        f"{speed.about['device']}, {speed.flops_per_second / 1e12:.3g} TFLOP/s, "
        f"{speed.bytes_per_second / GB:.3g} GB/s, "
        f"{speed.operations_per_second:.3g} operations/s"
        + (f" ({measured})" if measured else "; no clock was read")
    )
