"""Subcommands that plan for a GPU: ``plan`` and ``sweep``."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Callable
from functools import partial

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.cli.options import (
    CARD_HELP,
    COMPUTES,
    OUTPUT,
    READS,
    add_batch,
    add_bits,
    add_frames,
    add_head,
    add_names,
    add_output,
    check_plot,
    head_of_options,
    print_report,
    show,
    workers_for,
)
from speechbrain_rev.files import check_file


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    _add_plan(add)
    _add_sweep(add)


def _add_plan(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "plan",
        _plan,
        "plan what encoders keep on a GPU, so that they train as fast as fits",
        "For each encoder it prints the memory and time of a training step, the days that "
        "150 epochs of VoxCeleb2 take, the largest batch, and how many such GPUs make a "
        "total batch of 256; for one encoder also what each block does. channels are "
        "those that blocks work on at a time; the setting chunk is their bytes. "
        f"All {len(ARCHITECTURES)} are predicted, within two minutes. Encoders that are named are counted, "
        "which takes a minute or two for a deep one that hardly fits. No GPU is needed.",
        [" --card=11GB", " resnet152 --card='RTX 3090' --batch=64 --save=plan.json"],
    )
    reads = command.add_argument_group(READS)
    add_names(reads)
    card = reads.add_mutually_exclusive_group(required=True)
    card.add_argument("--card", metavar="SIZE", help=CARD_HELP)
    card.add_argument(
        "--device", help="cuda or cuda:N: what is free now on the GPU of this machine"
    )
    computes = command.add_argument_group(COMPUTES)
    add_batch(computes, 128)
    add_frames(computes)
    add_bits(computes)
    add_head(computes)
    output = command.add_argument_group(OUTPUT)
    output.add_argument("--json", action="store_true", help="print JSON, in bytes")
    output.add_argument(
        "--save",
        metavar="PLAN.json",
        help="write the plan of one encoder, for plan_file in its hyperparameters",
    )
    command.set_defaults(
        less_memory="Name the encoders, which takes one process, and instead of --device "
        "the GPU's memory, for instance --card=11GB."
    )


def _add_sweep(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "sweep",
        _sweep,
        "find the batch that trains the most utterances a second on a GPU",
        "Each batch between two bounds gets the fastest plan that fits. A larger batch "
        "uses a device better, and leaves less memory to its blocks. A batch takes a "
        "second or two, with --device=cpu half a minute or more. No GPU is needed.",
        [" revnet57 --card=11GB --batches=64:256:64", " resnet34 --card=4GB --json"],
    )
    reads = command.add_argument_group(READS)
    reads.add_argument("name", metavar="ENCODER", help="e.g. revnet57")
    reads.add_argument("--card", metavar="SIZE", required=True, help=CARD_HELP)
    reads.add_argument(
        "--device",
        help="cpu, cuda or cuda:N: take times there, of a shallow encoder at each batch "
        "(default: estimate them from counts of operations)",
    )
    computes = command.add_argument_group(COMPUTES)
    computes.add_argument(
        "--batches",
        metavar="FIRST:LAST[:STEP]",
        default="16:256:16",
        help="sizes to be tried (default: 16:256:16)",
    )
    add_frames(computes)
    add_bits(computes)
    add_head(computes)
    add_output(command)
    command.set_defaults(
        less_memory="Give smaller --batches, or leave out --device, which estimates times."
    )


def _plan(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.catalog import Training
    from speechbrain_rev.devices import gpu_at_hand, parse_card

    if parsed.save is not None:
        if len(set(parsed.names)) != 1:
            raise ValueError("--save writes the plan of one encoder; name one.")
        check_file("--save", parsed.save)
    at_hand = None if parsed.device is None else gpu_at_hand(parsed.device)
    gpu = parse_card(parsed.card) if at_hand is None else at_hand.listed()
    training = Training(
        gpu.memory_bytes if at_hand is None else at_hand.free_bytes,
        batch=parsed.batch,
        frames=parsed.frames,
        optimizer_bits=parsed.optimizer_bits,
        head=head_of_options(parsed),
    )

    from speechbrain_rev.catalog import plans, render

    # What was imported stays: collections of garbage need not look through it.
    gc.freeze()
    encoders = plans.plan_encoders(
        training,
        names=parsed.names,
        speed=gpu.speed,
        workers=workers_for(parsed.names),
    )
    if len(encoders) == 1:
        plans.check_fits(encoders[0])
    if parsed.save is not None:
        encoders[0].as_plan().save(parsed.save)
    print_report(render.PlansReport(encoders, at_hand), as_json=parsed.json)
    if parsed.save is not None:
        # JSON on stdout stays JSON.
        print(
            f"{parsed.save}: the plan of {encoders[0].model.row.name}. Train with it: "
            f"--plan_file={shlex.quote(parsed.save)} --batch_size={parsed.batch}",
            file=sys.stderr if parsed.json else sys.stdout,
        )


def _sweep(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.architectures import architecture
    from speechbrain_rev.catalog import Training
    from speechbrain_rev.devices import parse_card

    check_plot(parsed.plot)
    row = architecture(parsed.name)
    gpu = parse_card(parsed.card)

    from speechbrain_rev.catalog import pictures, plans, render

    batches = plans.parse_batches(parsed.batches)
    training = Training(
        gpu.memory_bytes,
        batches[0],
        parsed.frames,
        optimizer_bits=parsed.optimizer_bits,
        head=head_of_options(parsed),
    )
    swept = plans.sweep_encoder(
        row,
        training,
        batches,
        device=parsed.device,
        speed=gpu.speed,
    )
    what = f"{len(swept.sweep.plans)} batches"
    draw = partial(pictures.draw_sweep, swept)
    show(render.SweepReport(swept), parsed, draw, what)
