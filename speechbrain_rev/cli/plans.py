"""The subcommand ``plan``: what fits a card, and how fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from speechbrain_rev.cli.options import (
    CARD_HELP,
    add_names,
    add_output,
    add_speed,
    add_training,
    refuse_others,
    speed_of,
    workers_for,
)
from speechbrain_rev.whole_files import check_file

_DEFAULTS: dict[str, Any] = {
    "names": [],
    "batch": 128,
    "frames": 200,
    "optimizer_bits": 8,
    "speed": None,
    "save": None,
    "plot": None,
}


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    command = add(
        "plan",
        _plan,
        "plan what encoders keep on a GPU, so that they train as fast as fits",
        "For each encoder: memory of a training step, its time, the largest batch, and "
        "how many such GPUs make a total batch of 256. All 25 are predicted, within two "
        "minutes; those that are named are counted, which takes up to minutes for a deep "
        "one that hardly fits. No GPU is needed.",
    )
    add_names(command)
    card = command.add_mutually_exclusive_group(required=True)
    card.add_argument("--card", metavar="SIZE", help=f"memory, {CARD_HELP}")
    card.add_argument(
        "--device", help="cuda or cuda:N: what is free now on the GPU of this machine"
    )
    card.add_argument(
        "--published",
        action="store_true",
        help="Table VII of the paper, GPUs of 11 GiB for a batch of 256, beside what is "
        "counted; takes no other option but --json",
    )
    command.add_argument(
        "--batch", type=int, help="utterances of a step (default: 128)"
    )
    add_training(command)
    add_speed(command)
    command.add_argument(
        "--save",
        metavar="PLAN.json",
        help="write the plan of one encoder, for plan_file in its hyperparameters",
    )
    add_output(command)
    command.set_defaults(
        **_DEFAULTS,
        less_memory="Name the encoders, which takes one process, and instead of --device "
        "the card's memory, for instance --card=11GB.",
    )


def _plan(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.models import Training, parse_card

    if parsed.published:
        from speechbrain_rev.models import published_render

        refuse_others(parsed, _DEFAULTS, "the cards of Table VII")
        as_json = published_render.cards_as_json
        as_text = published_render.cards_as_text
        print(as_json() if parsed.json else as_text(), end="")
        return
    if parsed.save is not None and len(set(parsed.names)) != 1:
        raise ValueError("--save writes the plan of one encoder; name one.")
    if parsed.plot is not None:
        from speechbrain_rev.models.picture import check_png

        check_png(parsed.plot)
    for option in ("save", "plot"):
        if getattr(parsed, option) is not None:
            check_file(f"--{option}", getattr(parsed, option))
    at_hand = None
    if parsed.device is not None:
        from speechbrain_rev.models.card_at_hand import card_at_hand

        at_hand = card_at_hand(parsed.device)
    training = Training(
        parse_card(parsed.card) if at_hand is None else at_hand.free_bytes,
        batch=parsed.batch,
        frames=parsed.frames,
        optimizer_bits=parsed.optimizer_bits,
    )

    from speechbrain_rev.models import planning, planning_render

    encoders = planning.plan_encoders(
        training,
        names=parsed.names,
        speed=speed_of(parsed),
        workers=workers_for(parsed.names),
        progress=sys.stderr.isatty(),
    )
    if len(encoders) == 1:
        planning.check_fits(encoders[0])
    if parsed.save is not None:
        encoders[0].as_plan().save(parsed.save)
    if parsed.plot is not None:
        from speechbrain_rev.models.planning_picture import draw_plans

        draw_plans(encoders, parsed.plot)
        print(f"{parsed.plot}: {len(encoders)} encoders")
        return
    render = planning_render.as_json if parsed.json else planning_render.as_text
    print(render(encoders, at_hand), end="")
