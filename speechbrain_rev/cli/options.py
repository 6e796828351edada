"""What several subcommands share of their options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from speechbrain_rev.devices import usable_cpus
from speechbrain_rev.heads import HEAD, HEAD_OF, Head
from speechbrain_rev.whole_files import check_file

if TYPE_CHECKING:
    from speechbrain_rev.catalog.render import Report

# Kinds of encoders are profiled side by side; there are about a dozen.
_MOST_WORKERS = 4

#: Groups of options in the help of each subcommand, in this order.
READS, COMPUTES, OUTPUT = "what it reads", "what it computes", "output"
#: What --card takes.
CARD_HELP = (
    "the GPU: its memory, e.g. 11GB or 10.5GiB, both in GiB (2**30 bytes), as GPUs are "
    "sold; or its name, e.g. 'RTX 3090'"
)


def any_of(names: Iterable[str]) -> str:
    """List names in a sentence.

    Examples
    --------
    >>> any_of(["store", "recompute", "plan"])
    'store, recompute or plan'
    """
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def workers_for(names: Sequence[str]) -> int:
    """Choose how many processes plan encoders: one for a few that are named."""
    return 1 if names else min(usable_cpus(), _MOST_WORKERS)


def add_names(command: argparse._ActionsContainer) -> None:
    """Let a subcommand take names of encoders."""
    command.add_argument(
        "names", metavar="ENCODER", nargs="*", help="only these (default: all)"
    )


def add_batch(command: argparse._ActionsContainer, default: int) -> None:
    """Let a subcommand take the utterances of a step."""
    command.add_argument(
        "--batch",
        "--batch_size",
        metavar="N",
        type=int,
        default=default,
        help=f"utterances of a step (default: {default})",
    )


def add_frames(command: argparse._ActionsContainer) -> None:
    """Let a subcommand take the length of utterances."""
    command.add_argument(
        "--frames",
        metavar="N",
        type=int,
        default=200,
        help="frames of an utterance, 10 ms each (default: 200, 2 s)",
    )


def add_bits(
    command: argparse._ActionsContainer, words: str = "bits of optimizer states"
) -> None:
    """Let a subcommand take bits of optimizer states."""
    command.add_argument(
        "--optimizer_bits",
        metavar="BITS",
        type=int,
        default=8,
        help=f"{words}: 8 (the default) or 32",
    )


def add_head(command: argparse._ActionsContainer) -> None:
    """Let a subcommand take the classifier that is trained with the encoder."""
    command.add_argument(
        "--classes",
        metavar="N",
        type=int,
        default=HEAD.classes,
        help="classes of the classifier: speakers times speeds (default: "
        f"{HEAD.classes}, VoxCeleb2 at three speeds)",
    )
    command.add_argument(
        "--loss",
        choices=list(HEAD_OF),
        default=HEAD.loss,
        help=f"its loss (default: {HEAD.loss})",
    )


def add_encoder(command: argparse._ActionsContainer) -> None:
    """Let a subcommand take weights that have no description of their encoder."""
    command.add_argument(
        "--encoder",
        metavar="JSON",
        type=_encoder,
        help="of weights without a description: name, front_end and what else build_encoder "
        'takes, as \'{"name": "resnet34", "front_end": {"kind": "speechbrain", '
        '"sample_rate": 16000}}\'',
    )


def _encoder(text: str) -> dict[str, Any]:
    # argparse reports what is no JSON, and names the option.
    return dict(json.loads(text))


def head_of_options(parsed: argparse.Namespace) -> Head:
    """Give the classifier that ``add_head`` lets a user describe."""
    if parsed.classes < 1:
        raise ValueError(f"--classes is {parsed.classes}; give at least 1.")
    return Head(parsed.classes, loss=parsed.loss)


def add_output(command: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Let a subcommand print JSON or draw a picture; give the group of such options."""
    group = command.add_argument_group(OUTPUT)
    output = group.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, in bytes")
    output.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw a picture instead; the name ends in .png, .pdf or .svg",
    )
    return group


def show(
    report: Report, parsed: argparse.Namespace, draw: Callable[[str], object], what: str
) -> None:
    """Draw a picture if one was asked for; else print JSON, or text as wide as the terminal.

    Parameters
    ----------
    report : Report
        What the command prints.
    parsed : argparse.Namespace
        The options.
    draw : callable
        Draws the picture into a file.
    what : str
        How many of what are drawn.
    """
    if parsed.plot is not None:
        draw(parsed.plot)
        print(f"{parsed.plot}: {what}")
        return
    from speechbrain_rev.catalog.columns import terminal_width

    text = report.json() if parsed.json else report.text(terminal_width())
    print(text, end="")


def check_plot(path: str | None, option: str = "--plot") -> None:
    """Refuse, before any work, a picture that cannot be drawn or written.

    Parameters
    ----------
    path : str or None
        Its file, if one was named.
    option : str
        What names it.

    Raises
    ------
    ValueError
        If its ending is none of a picture, or the file cannot be written.
    """
    if path is not None:
        from speechbrain_rev.catalog.pictures import check_picture

        check_picture(path, option)
        check_file(option, path)
