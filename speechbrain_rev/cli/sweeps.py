"""The subcommand ``sweep``: which batch trains fastest on a card."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from speechbrain_rev.cli.files import check_writable


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
        "find the batch that trains the most utterances a second on a card",
        "Each batch between two bounds has the fastest plan that fits; a larger one uses "
        "a device better, and takes memory from its blocks. A batch takes some seconds. "
        "No GPU is needed.",
    )
    command.add_argument("name", metavar="ENCODER", help="e.g. revnet57")
    command.add_argument(
        "--card", metavar="SIZE", required=True, help="memory, e.g. 11GB or 10.5GiB"
    )
    command.add_argument(
        "--batches",
        metavar="FIRST:LAST[:STEP]",
        default="16:256:16",
        help="sizes to be tried (default: 16:256:16)",
    )
    command.add_argument(
        "--frames",
        type=int,
        default=200,
        help="of an utterance: 200 (2 s, the default) or 600 (6 s)",
    )
    command.add_argument(
        "--optimizer_bits",
        metavar="BITS",
        type=int,
        default=8,
        help="of the optimizer's states: 8 (the default) or 32",
    )
    command.add_argument(
        "--device",
        help="cpu, cuda or cuda:N: take times there, of a shallow encoder at each batch "
        "(default: estimate them from counts of operations)",
    )
    output = command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, in bytes")
    output.add_argument("--plot", metavar="FILE.png", help="draw a picture instead")


def _sweep(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.architectures import architecture
    from speechbrain_rev.models import Training, parse_card

    if parsed.plot is not None:
        from speechbrain_rev.models.picture import check_png

        check_png(parsed.plot)
        check_writable("--plot", parsed.plot)
    row = architecture(parsed.name)
    card_bytes = parse_card(parsed.card)

    from speechbrain_rev.models import sweeping, sweeping_render

    batches = sweeping.parse_batches(parsed.batches)
    training = Training(
        card_bytes, batches[0], parsed.frames, optimizer_bits=parsed.optimizer_bits
    )
    try:
        swept = sweeping.sweep_encoder(
            row, training, batches, device=parsed.device, progress=sys.stderr.isatty()
        )
    except MemoryError as error:
        raise ValueError(str(error)) from error
    if parsed.plot is not None:
        from speechbrain_rev.models.sweeping_picture import draw_sweep

        draw_sweep(swept, parsed.plot)
        print(f"{parsed.plot}: {len(swept.sweep.plans)} batches")
        return
    render = sweeping_render.as_json if parsed.json else sweeping_render.as_text
    print(render(swept), end="")
