"""Subcommands that compare encoders: ``models`` and ``memory``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

_MEMORY_DEFAULTS = {
    "names": [],
    "batch": 64,
    "frames": 200,
    "mode": None,
    "optimizer_bits": 8,
    "card": None,
}


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    _add_models(add)
    _add_memory(add)


def _add_models(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "models",
        _models,
        "compare the 25 encoders: size, accuracy, memory, what fits a card",
        "Error rates are the published ones. Memory was counted, no GPU is needed.",
    )
    command.add_argument(
        "names", metavar="ENCODER", nargs="*", help="only these (default: all)"
    )
    command.add_argument("--card", metavar="SIZE", help="memory, e.g. 11GB or 10.5GiB")
    command.add_argument(
        "--batch", type=int, default=128, help="utterances of a step (default: 128)"
    )
    command.add_argument(
        "--frames",
        type=int,
        default=200,
        help="of an utterance: 200 (2 s, the default) or 600 (6 s)",
    )
    command.add_argument(
        "--family",
        action="append",
        default=[],
        help="resnet, revnet, df_resnet or df_revnet; may be given several times",
    )
    command.add_argument(
        "--type", action="append", default=[], help="vanilla, I or II; likewise"
    )
    command.add_argument(
        "--fits", action="store_true", help="only those whose batch fits the card"
    )
    command.add_argument(
        "--sort",
        metavar="COLUMN",
        help="layers, parameters, vox1-o, vox1-e, vox1-h, store, recompute, "
        "reconstruct, memory (in the default mode) or batch (the largest)",
    )
    command.add_argument("--reverse", action="store_true", help="largest first")
    output = command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, in bytes")
    output.add_argument("--plot", metavar="FILE.png", help="draw a picture instead")


def _add_memory(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "memory",
        _memory,
        "break a training step's memory down, before and after",
        "Activations, optimizer states, weights, gradients and others of a step that "
        "stores activations with states of 32 bit, and of one with the encoder's default "
        "mode and states of 8 bit. Counted, no GPU is needed.",
    )
    command.add_argument(
        "names", metavar="ENCODER", nargs="*", help="only these (default: all)"
    )
    command.add_argument("--batch", type=int, help="utterances of a step (default: 64)")
    command.add_argument(
        "--frames",
        type=int,
        help="of an utterance (default: 200, 2 s; others than 200 and 600 take seconds)",
    )
    command.add_argument(
        "--mode",
        help="after: store, recompute or reconstruct (default: reconstruct if the "
        "encoder is reversible, else store)",
    )
    command.add_argument(
        "--optimizer_bits",
        metavar="BITS",
        type=int,
        help="after: 8 (the default) or 32",
    )
    command.add_argument(
        "--card", metavar="SIZE", help="say whether it fits, e.g. 11GB or 10.5GiB"
    )
    command.add_argument(
        "--published",
        action="store_true",
        help="Table I of the paper beside the same two steps counted; takes no other "
        "option but --json and --plot",
    )
    output = command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, in bytes")
    output.add_argument("--plot", metavar="FILE.png", help="draw a picture instead")
    command.set_defaults(**_MEMORY_DEFAULTS)


def _models(parsed: argparse.Namespace) -> None:
    from speechbrain_rev import models

    card_bytes = None if parsed.card is None else models.parse_card(parsed.card)
    chosen = models.select(
        models.Training(card_bytes, batch=parsed.batch, frames=parsed.frames),
        names=parsed.names,
        families=parsed.family,
        types=parsed.type,
        fitting=parsed.fits,
        sort=parsed.sort,
        reverse=parsed.reverse,
    )
    if parsed.plot is not None:
        from speechbrain_rev.models.picture import draw

        draw(chosen, parsed.plot)
        print(f"{parsed.plot}: {len(chosen)} encoders")
        return
    print(models.as_json(chosen) if parsed.json else models.as_text(chosen), end="")


def _memory(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.architectures import ARCHITECTURES
    from speechbrain_rev.models import breakdown_picture, breakdown_render
    from speechbrain_rev.models.breakdown import before_and_after
    from speechbrain_rev.models.card import parse_card
    from speechbrain_rev.models.picture import check_png

    if parsed.plot is not None:
        check_png(parsed.plot)
    if parsed.published:
        _published(parsed)
        return
    card_bytes = None if parsed.card is None else parse_card(parsed.card)
    if card_bytes is not None and parsed.plot is not None:
        raise ValueError("--plot shows no card; leave out --card, or draw nothing.")
    encoders = [
        before_and_after(
            name,
            mode=parsed.mode,
            batch=parsed.batch,
            frames=parsed.frames,
            optimizer_bits=parsed.optimizer_bits,
        )
        for name in dict.fromkeys(parsed.names or ARCHITECTURES)
    ]
    if parsed.plot is not None:
        breakdown_picture.draw_breakdowns(encoders, parsed.plot)
        print(f"{parsed.plot}: {len(encoders)} encoders")
        return
    render = breakdown_render.as_json if parsed.json else breakdown_render.as_text
    print(render(encoders, card_bytes), end="")


def _published(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.models import breakdown_picture, table_one

    for name, default in _MEMORY_DEFAULTS.items():
        if getattr(parsed, name) != default:
            option = "ENCODER" if name == "names" else f"--{name}"
            raise ValueError(
                "--published shows the two steps of Table I as they are; leave out "
                f"{option}."
            )
    if parsed.plot is not None:
        breakdown_picture.draw_table_one(parsed.plot)
        print(f"{parsed.plot}: {len(table_one.TABLE_ONE)} encoders")
        return
    print(table_one.as_json() if parsed.json else table_one.as_text(), end="")
