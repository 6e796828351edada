"""Subcommands that compare encoders: ``models`` and ``memory``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from speechbrain_rev.cli.options import (
    CARD_HELP,
    add_names,
    add_output,
    add_speed,
    refuse_others,
    speed_of,
    workers_for,
)
from speechbrain_rev.whole_files import check_file

if TYPE_CHECKING:
    from speechbrain_rev.models.breakdown_render import Cases

_MODELS_DEFAULTS: dict[str, Any] = {
    "names": [],
    "card": None,
    "batch": 128,
    "frames": 200,
    "family": [],
    "type": [],
    "fits": False,
    "sort": None,
    "reverse": False,
    "plot": None,
}
_MEMORY_DEFAULTS: dict[str, Any] = {
    "names": [],
    "batch": 64,
    "frames": 200,
    "mode": None,
    "optimizer_bits": 8,
    "card": None,
    "speed": None,
    "stages": False,
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
        "compare the 25 encoders: size, accuracy, memory, what fits a GPU",
        "Error rates are the published ones. Memory was counted, no GPU is needed.",
    )
    add_names(command)
    command.add_argument("--card", metavar="SIZE", help=f"memory, {CARD_HELP}")
    command.add_argument(
        "--batch", type=int, help="utterances of a step (default: 128)"
    )
    command.add_argument(
        "--frames",
        type=int,
        help="of an utterance: 200 (2 s, the default) or 600 (6 s)",
    )
    command.add_argument(
        "--family",
        action="append",
        help="resnet, revnet, df_resnet or df_revnet; may be given several times",
    )
    command.add_argument("--type", action="append", help="vanilla, I or II; likewise")
    command.add_argument(
        "--fits", action="store_true", help="only those whose batch fits the GPU"
    )
    command.add_argument(
        "--sort",
        metavar="COLUMN",
        help="layers, parameters, vox1-o, vox1-e, vox1-h, store, recompute, "
        "reconstruct, memory (in the default mode) or batch (the largest)",
    )
    command.add_argument("--reverse", action="store_true", help="largest first")
    command.add_argument(
        "--published",
        action="store_true",
        help="Tables V and VI of the paper, those of 8 bit too, beside what is counted in "
        "their settings; takes no other option but --json",
    )
    add_output(command)
    command.set_defaults(**_MODELS_DEFAULTS)


def _add_memory(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "memory",
        _memory,
        "break a training step's memory down, before and after",
        "Activations, optimizer states, weights, gradients and others of a step that "
        "stores activations with states of 32 bit, and of one with the encoder's default "
        "mode, or as planned for a GPU, and 8-bit states. Counted: no GPU is needed.",
    )
    add_names(command)
    command.add_argument("--batch", type=int, help="utterances of a step (default: 64)")
    command.add_argument(
        "--frames",
        type=int,
        help="of an utterance (default: 200, 2 s; others than 200 and 600 take seconds, "
        "and do not go with --mode=plan)",
    )
    command.add_argument(
        "--mode",
        help="after: store, recompute or reconstruct (default: reconstruct if the "
        "encoder is reversible, else store), or plan: what blocks keep on --card, so that "
        "the step is as fast as fits (seconds for each encoder)",
    )
    command.add_argument(
        "--optimizer_bits",
        metavar="BITS",
        type=int,
        help="after: 8 (the default) or 32",
    )
    command.add_argument(
        "--card", metavar="SIZE", help=f"print whether it fits: {CARD_HELP}"
    )
    add_speed(command, "with --mode=plan, ")
    command.add_argument(
        "--stages",
        action="store_true",
        help="also by stages of the encoder: what each holds and works with (seconds "
        "for each encoder)",
    )
    command.add_argument(
        "--published",
        action="store_true",
        help="Table I of the paper beside the same two steps counted; takes no other "
        "option but --json and --plot",
    )
    add_output(command)
    command.set_defaults(
        **_MEMORY_DEFAULTS,
        less_memory="Name the encoders, which takes one process, or leave out --stages.",
    )


def _models(parsed: argparse.Namespace) -> None:
    from speechbrain_rev import models

    if parsed.published:
        from speechbrain_rev.models import published_render

        refuse_others(parsed, _MODELS_DEFAULTS, "Tables V and VI")
        as_json = published_render.trainings_as_json
        as_text = published_render.trainings_as_text
        print(as_json() if parsed.json else as_text(), end="")
        return
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
    from speechbrain_rev.models import breakdown_picture, breakdown_render
    from speechbrain_rev.models.breakdown import PLAN
    from speechbrain_rev.models.card import parse_card
    from speechbrain_rev.models.picture import check_png
    from speechbrain_rev.models.table import MODES

    if parsed.plot is not None:
        check_png(parsed.plot)
        check_file("--plot", parsed.plot)
    if parsed.published:
        _published(parsed)
        return
    card_bytes = None if parsed.card is None else parse_card(parsed.card)
    _check_mode(parsed.mode, (*MODES, PLAN))
    planned = parsed.mode == PLAN
    if card_bytes is not None and parsed.plot is not None and not planned:
        raise ValueError(
            "--plot shows no card; leave out --card, add --mode=plan, or draw nothing."
        )
    if parsed.speed is not None and not planned:
        raise ValueError(
            "--speed tells which plan is the fastest; add --mode=plan, or leave it out."
        )
    breakdowns = _planned(parsed, card_bytes) if planned else _uniform(parsed)
    if parsed.plot is not None:
        draw = breakdown_picture.draw_breakdowns
        if parsed.stages:
            draw = breakdown_picture.draw_stages
        draw(breakdowns, parsed.plot, card_bytes)
        print(f"{parsed.plot}: {len(breakdowns)} encoders")
        return
    render = breakdown_render.as_json if parsed.json else breakdown_render.as_text
    print(render(breakdowns, card_bytes), end="")


def _check_mode(mode: str | None, counted: Sequence[str]) -> None:
    """Refuse modes in which no step is counted."""
    from speechbrain_rev.models.table import check_names

    if mode == "compress":
        raise ValueError(
            "--mode=compress is not counted: what it keeps depends on the speech. Give "
            f"one of {', '.join(counted)}; the recipe's --dry_run measures it."
        )
    check_names("--mode", [] if mode is None else [mode], counted)


def _uniform(parsed: argparse.Namespace) -> Sequence[Cases]:
    """Break steps down in which all blocks have one mode."""
    from speechbrain_rev.architectures import ARCHITECTURES
    from speechbrain_rev.models.breakdown import before_and_after

    return [
        before_and_after(
            name,
            mode=parsed.mode,
            batch=parsed.batch,
            frames=parsed.frames,
            optimizer_bits=parsed.optimizer_bits,
            stages=parsed.stages,
        )
        for name in dict.fromkeys(parsed.names or ARCHITECTURES)
    ]


def _planned(parsed: argparse.Namespace, card_bytes: int | None) -> Sequence[Cases]:
    """Break steps down whose blocks are planned for a card."""
    from speechbrain_rev.models import Training, planning
    from speechbrain_rev.models.breakdown import before_and_planned

    if card_bytes is None:
        raise ValueError(
            "--mode=plan plans for a card, and none was named: add, for instance, "
            "--card=11GB, or give --mode=store, recompute or reconstruct."
        )
    training = Training(
        card_bytes,
        batch=parsed.batch,
        frames=parsed.frames,
        optimizer_bits=parsed.optimizer_bits,
    )
    encoders = planning.plan_encoders(
        training,
        names=parsed.names,
        speed=speed_of(parsed),
        workers=workers_for(parsed.names),
        progress=sys.stderr.isatty(),
    )
    if len(encoders) == 1:
        planning.check_fits(encoders[0])
    return [before_and_planned(encoder, stages=parsed.stages) for encoder in encoders]


def _published(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.models import breakdown_picture, table_one

    refuse_others(parsed, _MEMORY_DEFAULTS, "the two steps of Table I")
    if parsed.plot is not None:
        breakdown_picture.draw_table_one(parsed.plot)
        print(f"{parsed.plot}: {len(table_one.TABLE_ONE)} encoders")
        return
    print(table_one.as_json() if parsed.json else table_one.as_text(), end="")
