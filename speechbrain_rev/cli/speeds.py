"""The subcommand ``calibrate``: how fast this machine is, for estimates of times."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from speechbrain_rev.whole_files import check_file


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    command = add(
        "calibrate",
        _calibrate,
        "measure how fast a device trains, for --speed of plan, sweep and memory",
        "Blocks of all kinds are timed in all modes, and the speed that explains their "
        "times best is written. Two minutes or more on a CPU.",
    )
    command.add_argument("file", metavar="SPEED.json", help="where it is written")
    command.add_argument(
        "--device", default="cpu", help="cpu (the default), cuda or cuda:N"
    )
    command.set_defaults(
        less_memory="End what else uses the device, or give another --device."
    )


def _calibrate(parsed: argparse.Namespace) -> None:
    check_file("SPEED.json", parsed.file)

    from speechbrain_rev.devices import timed_device
    from speechbrain_rev.models import calibration
    from speechbrain_rev.whole_files import write_whole

    device = timed_device(parsed.device)
    shown = sys.stderr.isatty()
    if not shown:
        names = ", ".join(calibration.ENCODERS)
        told = f"Blocks of {names} are timed on {device}: minutes on a CPU."
        print(told, file=sys.stderr, flush=True)
    speed = calibration.calibrate(device, progress=shown)
    write_whole(parsed.file, speed.to_json())
    print(
        f"{parsed.file}: {speed.flops_per_second / 1e9:.3g} GFLOP/s, "
        f"{speed.bytes_per_second / 1e9:.3g} GB/s, "
        f"{speed.operations_per_second:.3g} operations/s"
    )
    for name, value in speed.about.items():
        print(f"{name}: {value}")
