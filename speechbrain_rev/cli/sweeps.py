"""The subcommand ``sweep``: which batch trains fastest on a card."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from speechbrain_rev.cli.options import (
    CARD_HELP,
    add_output,
    add_speed,
    add_training,
    speed_of,
)
from speechbrain_rev.whole_files import check_file


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    command = add(
        "sweep",
        _sweep,
        "find the batch that trains the most utterances a second on a GPU",
        "Each batch between two bounds has the fastest plan that fits; a larger one uses "
        "a device better, and takes memory from its blocks. A batch takes some seconds, "
        "with --device=cpu half a minute or more. No GPU is needed.",
    )
    command.add_argument("name", metavar="ENCODER", help="e.g. revnet57")
    command.add_argument(
        "--card", metavar="SIZE", required=True, help=f"memory, {CARD_HELP}"
    )
    command.add_argument(
        "--batches",
        metavar="FIRST:LAST[:STEP]",
        default="16:256:16",
        help="sizes to be tried (default: 16:256:16)",
    )
    add_training(command)
    times = command.add_mutually_exclusive_group()
    times.add_argument(
        "--device",
        help="cpu, cuda or cuda:N: take times there, of a shallow encoder at each batch "
        "(default: estimate them from counts of operations)",
    )
    add_speed(times)
    add_output(command)
    command.set_defaults(
        less_memory="Give smaller --batches, or leave out --device, which estimates times."
    )


def _sweep(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.architectures import architecture
    from speechbrain_rev.models import Training, parse_card

    if parsed.plot is not None:
        from speechbrain_rev.models.picture import check_png

        check_png(parsed.plot)
        check_file("--plot", parsed.plot)
    row = architecture(parsed.name)
    card_bytes = parse_card(parsed.card)

    from speechbrain_rev.models import sweeping, sweeping_render

    batches = sweeping.parse_batches(parsed.batches)
    training = Training(
        card_bytes, batches[0], parsed.frames, optimizer_bits=parsed.optimizer_bits
    )
    swept = sweeping.sweep_encoder(
        row,
        training,
        batches,
        device=parsed.device,
        speed=speed_of(parsed),
        progress=sys.stderr.isatty(),
    )
    if parsed.plot is not None:
        from speechbrain_rev.models.sweeping_picture import draw_sweep

        draw_sweep(swept, parsed.plot)
        print(f"{parsed.plot}: {len(swept.sweep.plans)} batches")
        return
    render = sweeping_render.as_json if parsed.json else sweeping_render.as_text
    print(render(swept), end="")
