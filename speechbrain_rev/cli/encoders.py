"""Subcommands that read or count what encoders take: ``models`` and ``memory``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from speechbrain_rev.architectures import ARCHITECTURES, FAMILIES, TYPES
from speechbrain_rev.catalog.table import MODES, SORT_KEYS
from speechbrain_rev.cli.options import (
    CARD_HELP,
    COMPUTES,
    READS,
    add_batch,
    add_bits,
    add_frames,
    add_head,
    add_names,
    add_output,
    any_of,
    check_plot,
    head_of_options,
    show,
    workers_for,
)

if TYPE_CHECKING:
    from speechbrain_rev.catalog.render import Cases
    from speechbrain_rev.devices import Gpu


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
        f"compare the {len(ARCHITECTURES)} encoders: size, accuracy, memory, what fits a GPU",
        "Error rates are the published ones. Memory was counted, no GPU is needed.",
        ["", " --card=11GB --batch=128 --fits --sort=vox1-h", " --plot=models.png"],
    )
    reads = command.add_argument_group(READS)
    add_names(reads)
    reads.add_argument(
        "--family",
        action="append",
        default=[],
        help=f"only {any_of(FAMILIES)}; may be given several times",
    )
    reads.add_argument(
        "--type",
        action="append",
        default=[],
        help=f"only {any_of(TYPES)}; may be given several times",
    )
    computes = command.add_argument_group(COMPUTES)
    computes.add_argument("--card", metavar="SIZE", help=CARD_HELP)
    add_batch(computes, 128)
    add_frames(computes)
    add_head(computes)
    computes.add_argument(
        "--fits", action="store_true", help="only encoders whose batch fits the GPU"
    )
    computes.add_argument(
        "--sort",
        metavar="COLUMN",
        help=f"{any_of(SORT_KEYS)}; memory: in the default mode, batch: the largest, days: "
        "the fewest",
    )
    computes.add_argument("--reverse", action="store_true", help="largest first")
    add_output(command)


def _add_memory(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "memory",
        _memory,
        "break a training step's memory down, before and after",
        "It lists activations, optimizer states, weights, gradients and others. Before: "
        "all activations are stored, and states have 32 bits. After: the encoder's default "
        "mode or a plan for a GPU, and 8-bit states. Memory is counted; no GPU is needed.",
        [
            " revnet57 resnet34",
            " resnet34 --mode=plan --card=4GB",
            " --plot=memory.png",
        ],
    )
    add_names(command.add_argument_group(READS))
    computes = command.add_argument_group(COMPUTES)
    add_batch(computes, 64)
    add_frames(computes)
    computes.add_argument(
        "--mode",
        help=f"after: {any_of((*MODES, 'plan'))} (default: reconstruct if the encoder is "
        "reversible, else store). plan: the fastest step that fits --card, seconds for "
        "each encoder",
    )
    add_bits(computes, "bits of optimizer states after")
    add_head(computes)
    computes.add_argument(
        "--card", metavar="SIZE", help=f"print whether it fits {CARD_HELP}"
    )
    computes.add_argument(
        "--stages",
        action="store_true",
        help="also by stages of the encoder: what each holds and works with (seconds "
        "for each encoder)",
    )
    add_output(command)
    command.set_defaults(
        less_memory="Name the encoders, which takes one process, or leave out --stages.",
        default_of=command.get_default,
    )


def _models(parsed: argparse.Namespace) -> None:
    from speechbrain_rev import catalog
    from speechbrain_rev.devices import parse_card

    check_plot(parsed.plot)
    gpu = None if parsed.card is None else parse_card(parsed.card)
    card_bytes = None if gpu is None else gpu.memory_bytes
    chosen = catalog.select(
        catalog.Training(
            card_bytes,
            batch=parsed.batch,
            frames=parsed.frames,
            head=head_of_options(parsed),
        ),
        names=parsed.names,
        families=parsed.family,
        types=parsed.type,
        fitting=parsed.fits,
        sort=parsed.sort,
        reverse=parsed.reverse,
        speed=None if gpu is None else gpu.speed,
    )
    report, what = catalog.ModelsReport(chosen), f"{len(chosen)} encoders"

    def draw(path: str) -> None:
        # Pictures import torch, which the table does not need.
        from speechbrain_rev.catalog.pictures import draw_models

        draw_models(chosen, path)

    show(report, parsed, draw, what)


def _memory(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.catalog import pictures
    from speechbrain_rev.catalog.breakdown import PLAN
    from speechbrain_rev.catalog.render import BreakdownReport
    from speechbrain_rev.devices import parse_card

    check_plot(parsed.plot)
    gpu = None if parsed.card is None else parse_card(parsed.card)
    card_bytes = None if gpu is None else gpu.memory_bytes
    _check_mode(parsed.mode, (*MODES, PLAN))
    planned = parsed.mode == PLAN
    if card_bytes is not None and parsed.plot is not None and not planned:
        raise ValueError(
            "--plot shows no GPU; leave out --card, add --mode=plan, or draw nothing."
        )
    breakdowns = _planned(parsed, gpu) if planned else _uniform(parsed)
    report, what = (
        BreakdownReport(breakdowns, card_bytes),
        f"{len(breakdowns)} encoders",
    )
    draw = pictures.draw_stages if parsed.stages else pictures.draw_breakdowns
    show(report, parsed, lambda path: draw(breakdowns, path, card_bytes), what)
    if card_bytes is not None and not planned:
        lacking = [after.name for *_, after in breakdowns if not after.fits(card_bytes)]
        if lacking:
            # JSON on stdout stays JSON.
            print(
                f"What does not fit may be planned: {_plan_command(parsed, lacking)}",
                file=sys.stderr if parsed.json else sys.stdout,
            )


def _plan_command(parsed: argparse.Namespace, names: Sequence[str]) -> str:
    """Write the command that plans encoders with the options that ``memory`` was given."""
    own = [
        f"--{option}={getattr(parsed, option)}"
        for option in ("frames", "optimizer_bits", "classes", "loss")
        if getattr(parsed, option) != parsed.default_of(option)
    ]
    # The default of --batch is another one there.
    given = [f"--card={parsed.card}", f"--batch={parsed.batch}", *own]
    return shlex.join(
        ["speechbrain-rev", "plan", *(names if parsed.names else ()), *given]
    )


def _check_mode(mode: str | None, counted: Sequence[str]) -> None:
    """Refuse modes in which no step is counted."""
    from speechbrain_rev.catalog.table import check_names
    from speechbrain_rev.modes import Mode

    if mode in [each.value for each in Mode if not each.spec.lossless]:
        raise ValueError(
            f"--mode={mode} is not counted: what it keeps depends on the speech. Give "
            f"one of {', '.join(counted)}; the recipe's --dry_run measures it."
        )
    check_names("--mode", [] if mode is None else [mode], counted)


def _uniform(parsed: argparse.Namespace) -> Sequence[Cases]:
    """Break steps down in which all blocks have one mode."""
    from speechbrain_rev.catalog.breakdown import before_and_after

    return [
        before_and_after(
            name,
            mode=parsed.mode,
            batch=parsed.batch,
            frames=parsed.frames,
            optimizer_bits=parsed.optimizer_bits,
            head=head_of_options(parsed),
            stages=parsed.stages,
        )
        for name in dict.fromkeys(parsed.names or ARCHITECTURES)
    ]


def _planned(parsed: argparse.Namespace, gpu: Gpu | None) -> Sequence[Cases]:
    """Break steps down whose blocks are planned for a GPU."""
    from speechbrain_rev.catalog import Training, plans
    from speechbrain_rev.catalog.breakdown import before_and_planned

    if gpu is None:
        raise ValueError(
            "--mode=plan plans for a GPU, and none was named: add, for instance, "
            f"--card=11GB, or give --mode={any_of(MODES)}."
        )
    training = Training(
        gpu.memory_bytes,
        batch=parsed.batch,
        frames=parsed.frames,
        optimizer_bits=parsed.optimizer_bits,
        head=head_of_options(parsed),
    )
    encoders = plans.plan_encoders(
        training,
        names=parsed.names,
        speed=gpu.speed,
        workers=workers_for(parsed.names),
    )
    if len(encoders) == 1:
        plans.check_fits(encoders[0])
    return [before_and_planned(encoder, stages=parsed.stages) for encoder in encoders]
