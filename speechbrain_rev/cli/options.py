"""What several subcommands share: options, tables, sentences on memory and time."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from speechbrain_rev.catalog.counts import counted_with
from speechbrain_rev.catalog.table import EPOCHS, UTTERANCES, Training
from speechbrain_rev.files import check_file
from speechbrain_rev.heads import HEAD, HEAD_OF, Head
from speechbrain_rev.sizes import card_text, reserve_of, reserve_text

if TYPE_CHECKING:
    from rich.table import Table

    from speechbrain_rev.devices import Speed

#: Groups of options in the help of each subcommand, in this order.
READS, COMPUTES, OUTPUT = "what it reads", "what it computes", "output"
#: Help of --card.
CARD_HELP = (
    "the GPU: its memory, e.g. 11GB or 10.5GiB, both in GiB (2**30 bytes), as GPUs are "
    "sold; or its name, e.g. 'RTX 3090'"
)

# Columns of a file or a pipe.
_WIDTH = 100


# An argument of Python before the option that it is on the command line.
_ARGUMENT = re.compile(r"\w+=[^()]*? \((--[^()]+)\)")


def on_terminal(words: str) -> str:
    r"""Lay out an error in one line, or in its own lines where it lists something.

    Where a sentence has an argument of Python and then, in brackets, an option, it is the
    option that counts here.

    Examples
    --------
    >>> print(on_terminal('2 files:\n- a.wav: 2 channels.\n- b.wav: gone\nGive channel="mix" (--channel=mix).'))
    2 files:
    - a.wav: 2 channels.
    - b.wav: gone
    Give --channel=mix.
    """
    words = _ARGUMENT.sub(r"\1", words).strip()
    rows = words.splitlines() if "\n- " in words else [words]
    return "\n".join(" ".join(row.split()) for row in rows)


def count(text: str) -> int:
    """Read a whole number from 1 on, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def add_training(
    command: argparse._ActionsContainer, *, batch: int | None = None
) -> None:
    """Let a subcommand take a training step; its batch, too, if that has a default."""
    if batch is not None:
        command.add_argument(
            "--batch",
            "--batch_size",
            metavar="N",
            type=count,
            default=batch,
            help="utterances of a step (default: %(default)s)",
        )
    command.add_argument(
        "--frames",
        metavar="N",
        type=count,
        default=200,
        help="frames of an utterance, 10 ms each (default: 200, 2 s)",
    )
    command.add_argument(
        "--optimizer_bits",
        type=int,
        choices=(8, 32),
        default=8,
        help="bits of optimizer states (default: %(default)s)",
    )
    command.add_argument(
        "--classes",
        metavar="N",
        type=count,
        default=HEAD.classes,
        help="classes of the classifier: speakers times speeds (default: %(default)s, "
        "VoxCeleb2 at three speeds)",
    )
    command.add_argument(
        "--loss",
        choices=list(HEAD_OF),
        default=HEAD.loss,
        help="its loss (default: %(default)s)",
    )


def training_of(
    parsed: argparse.Namespace, card_bytes: int | None, batch: int
) -> Training:
    """Give the training step that ``add_training`` lets a user describe."""
    head = Head(parsed.classes, loss=parsed.loss)
    return Training(card_bytes, batch, parsed.frames, parsed.optimizer_bits, head)


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
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"it takes a JSON object, '{{\"name\": ...}}', not {text!r}"
        ) from error


def add_output(command: argparse.ArgumentParser) -> None:
    """Let a subcommand print JSON or draw a picture."""
    output = command.add_argument_group(OUTPUT).add_mutually_exclusive_group()
    add_json(output)
    output.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw a picture instead; the name ends in .png, .pdf or .svg",
    )


def add_json(output: argparse._ActionsContainer) -> None:
    """Let a subcommand print JSON."""
    output.add_argument("--json", action="store_true", help="print JSON, in bytes")


def cell(value: float | str | None, form: str = "") -> str:
    """Write a value of a table; "-" for None."""
    return "-" if value is None else format(value, form)


def table_of(rows: Sequence[Mapping[str, str]], title: str | None = None) -> Table:
    """Make a table of rows, whose keys are the heads: words on the left, figures right.

    Examples
    --------
    >>> table = table_of([{"encoder": "revnet46", "layers": "46"}])
    >>> [column.header for column in table.columns], table.row_count
    (['encoder', 'layers'], 1)
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in rows[0]:
        is_words = any(row[head][:1].isalpha() for row in rows)
        table.add_column(head, justify="left" if is_words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def print_results(
    parsed: argparse.Namespace,
    document: object,
    tables: Callable[[], Iterable[Table]],
    notes: Iterable[str],
) -> None:
    """Print JSON if it was asked for, or else tables and sentences below.

    Parameters
    ----------
    parsed : argparse.Namespace
        The options.
    document : object
        What JSON has.
    tables : callable
        Makes the tables.
    notes : iterable of str
        What the figures are, a paragraph each.
    """
    if parsed.json:
        print(json.dumps(document, indent=1))
        return
    from rich.console import Console

    console = Console(
        width=None if sys.stdout.isatty() else _WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )
    with console.capture() as capture:
        for table in tables():
            console.print(table)
            console.print()
        for note in notes:
            console.print(note)
    print(capture.get(), end="")


def counted_note(training: Training) -> str:
    """Name what was counted, of which step."""
    versions = counted_with()
    return (
        f"Memory: utterances of {training.frames} frames in float32, counted on meta "
        f"tensors (torch {versions['torch']}, {versions['date']})."
    )


def card_note(card_bytes: int) -> str:
    """Name the memory of a GPU, its reserve, and what that leaves."""
    reserved = reserve_of(card_bytes)
    rest = card_text(max(0, card_bytes - reserved))
    return f"{card_text(card_bytes)}, {reserve_text(reserved)}, {rest} left"


def days_note(speed: Speed) -> str:
    """Name what days of training are estimated from."""
    return (
        f"Days: {EPOCHS} epochs of the {UTTERANCES:,} utterances of VoxCeleb2 dev (DF "
        "encoders train 165: a tenth more), encoder and optimizer alone, estimated from "
        f"counts of operations for {speed}."
    )


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
