"""Subcommands that plan for a GPU: ``plan`` and ``sweep``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from speechbrain_rev.architectures import ARCHITECTURES, architecture
from speechbrain_rev.cli.options import (
    CARD_HELP,
    COMPUTES,
    OUTPUT,
    READS,
    add_json,
    add_output,
    add_training,
    card_note,
    cell,
    check_plot,
    days_note,
    print_results,
    table_of,
    training_of,
)
from speechbrain_rev.devices import gpu_at_hand, parse_card
from speechbrain_rev.files import check_file
from speechbrain_rev.modes import Mode
from speechbrain_rev.sizes import GIB, card_text, size_text

if TYPE_CHECKING:
    from speechbrain_rev.catalog import Training
    from speechbrain_rev.catalog.plans import PlannedEncoder, SweptEncoder
    from speechbrain_rev.devices import GpuAtHand
    from speechbrain_rev.planner.sweep import BatchPlan


def batches(text: str) -> range:
    """Read FIRST:LAST or FIRST:LAST:STEP, for argparse.

    Examples
    --------
    >>> list(batches("16:64:16")), len(batches("16:64"))
    ([16, 32, 48, 64], 49)
    """
    first, last, *step = map(int, text.split(":"))
    return range(first, last + 1, *step)


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    command = add(
        "plan",
        _plan,
        "plan what encoders keep on a GPU, so that they train as fast as fits",
        "For each encoder it prints the memory of a training step, what blocks keep, the "
        "days that 150 epochs of VoxCeleb2 take, and the largest batch; for one encoder "
        f"also what each block does. All {len(ARCHITECTURES)} are predicted, within two "
        "minutes. Encoders that are named are counted, which takes a minute or two for a "
        "deep one that hardly fits. No GPU is needed.",
        [" --card=11GB", " resnet152 --card='RTX 3090' --batch=64 --save=plan.json"],
    )
    reads = command.add_argument_group(READS)
    reads.add_argument(
        "names", metavar="ENCODER", nargs="*", help="only these (default: all)"
    )
    card = reads.add_mutually_exclusive_group(required=True)
    card.add_argument("--card", metavar="SIZE", help=CARD_HELP)
    card.add_argument(
        "--device", help="cuda or cuda:N: what is free now on the GPU of this machine"
    )
    add_training(command.add_argument_group(COMPUTES), batch=128)
    output = command.add_argument_group(OUTPUT)
    add_json(output)
    output.add_argument(
        "--save",
        metavar="PLAN.json",
        help="write the plan of one encoder, for plan_file in its hyperparameters",
    )
    command.set_defaults(
        less_memory="Instead of --device give the GPU's memory, for instance --card=11GB."
    )

    command = add(
        "sweep",
        _sweep,
        "find the batch that trains the most utterances a second on a GPU",
        "Each batch between two bounds gets the fastest plan that fits. A larger batch "
        "uses a device better, and leaves less memory to its blocks. A batch takes a "
        "second or two, with --device=cpu half a minute or more. No GPU is needed.",
        [" revnet46 --card=11GB --batches=64:256:64", " resnet34 --card=4GB --json"],
    )
    reads = command.add_argument_group(READS)
    reads.add_argument("name", metavar="ENCODER", help="e.g. revnet46")
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
        type=batches,
        default="16:256:16",
        help="sizes to be tried (default: %(default)s)",
    )
    add_training(computes)
    add_output(command)
    command.set_defaults(
        less_memory="Give smaller --batches, or leave out --device, which estimates times."
    )


def _counts(modes: Iterable[str]) -> str:
    """Write how many blocks have each mode, as "store 9, reconstruct 8"."""
    names = list(modes)
    return ", ".join(f"{m.value} {names.count(m)}" for m in Mode if m in names)


def _plan(parsed: argparse.Namespace) -> None:
    if parsed.save is not None:
        if len(set(parsed.names)) != 1:
            raise ValueError("--save writes the plan of one encoder; name one.")
        check_file("--save", parsed.save)
    at_hand = None if parsed.device is None else gpu_at_hand(parsed.device)
    gpu = parse_card(parsed.card) if at_hand is None else at_hand.listed()
    card_bytes = gpu.memory_bytes if at_hand is None else at_hand.free_bytes
    training = training_of(parsed, card_bytes, parsed.batch)

    from speechbrain_rev.catalog import plans

    encoders = plans.plan_encoders(training, names=parsed.names, speed=gpu.speed)
    if len(encoders) == 1:
        plans.check_fits(encoders[0])
    if parsed.save is not None:
        encoders[0].as_plan().save(parsed.save)
    print_results(
        parsed,
        [asdict(encoder) for encoder in encoders],
        lambda: [table_of([_plan_row(encoder) for encoder in encoders])],
        _plan_notes(encoders, at_hand),
    )
    if parsed.save is not None:
        # JSON on stdout stays JSON.
        print(
            f"{parsed.save}: the plan of {encoders[0].model.row.name}. Train with it: "
            f"--plan_file={shlex.quote(parsed.save)} --batch_size={parsed.batch}",
            file=sys.stderr if parsed.json else sys.stdout,
        )


def _plan_row(encoder: PlannedEncoder) -> dict[str, str]:
    lacking = encoder.lacking_bytes
    return {
        "encoder": encoder.model.row.name,
        "EER\nH, %": cell(encoder.model.row.vox1_h_eer, ".2f"),
        "\nGiB": f"{encoder.needed_bytes / GIB:.2f}",
        "\nmissing": size_text(lacking) if lacking else "-",
        "time /\nstored": f"{encoder.seconds / encoder.stored_seconds:.2f}",
        "\ndays": cell(encoder.days, ".1f"),
        "largest\nbatch": cell(encoder.largest_batch),
        "\nblocks": _counts(encoder.modes.values()),
    }


def _card_notes(
    training: Training, how: str, at_hand: GpuAtHand | None
) -> Iterator[str]:
    """Name the GPU, and what its memory is compared with."""
    assert training.card_bytes is not None
    gpu = card_note(training.card_bytes)
    if at_hand is None:
        yield f"GPU: {gpu}; none was tried."
    else:
        yield f"Free of {card_text(at_hand.total_bytes)} on {at_hand.name}: {gpu}."
    yield (
        f"GiB: {how} on meta tensors, utterances of {training.frames} frames in float32, "
        f"{training.optimizer_bits}-bit states and classifier included. join: blocks that "
        "are recomputed in one go with the block before."
    )


def _plan_notes(
    encoders: list[PlannedEncoder], at_hand: GpuAtHand | None
) -> Iterator[str]:
    encoder, training = encoders[0], encoders[0].model.training
    if len(encoders) == 1:
        yield from encoder.stages
        channels = encoder.channels[0] or "all"
        yield f"channels at a time in stage 1: {channels} (chunk {encoder.chunk_bytes})"
        yield ""
    how = "predicted" if encoder.counted_bytes is None else "counted"
    yield from _card_notes(training, how, at_hand)
    yield (
        f"Of a batch of {training.batch}: GiB, missing (beyond what is left), blocks and "
        "time. Largest batch: fits, and a larger one may. EER: published, not reproduced."
    )
    yield days_note(encoder.model.speed)


def _sweep(parsed: argparse.Namespace) -> None:
    check_plot(parsed.plot)
    gpu = parse_card(parsed.card)
    row = architecture(parsed.name)

    from speechbrain_rev.catalog import pictures, plans

    swept = plans.sweep_encoder(
        row,
        training_of(parsed, gpu.memory_bytes, 1),
        parsed.batches,
        device=parsed.device,
        speed=gpu.speed,
    )
    if parsed.plot is not None:
        pictures.draw_sweep(swept, parsed.plot)
        print(f"{parsed.plot}: {len(swept.sweep.plans)} batches")
        return
    print_results(
        parsed,
        asdict(swept),
        lambda: [table_of([_batch_row(p, swept) for p in swept.sweep.plans])],
        _sweep_notes(swept),
    )


def _batch_row(plan: BatchPlan, swept: SweptEncoder) -> dict[str, str]:
    remark = "best" if plan.batch == swept.best_batch else ""
    if not plan.modes:
        remark = "memory ran out while it was timed"
    elif plan.timed_batch not in (None, plan.batch):
        remark = f"{remark} timed at batch {plan.timed_batch}".strip()
    return {
        "batch": str(plan.batch),
        "utterances / s": f"{plan.samples_per_second:.1f}",
        "GiB": f"{plan.predicted_bytes / GIB:.2f}",
        "blocks": _counts(plan.modes.values()),
        "": remark,
    }


def _sweep_notes(swept: SweptEncoder) -> Iterator[str]:
    yield f"{swept.sweep}\n"
    yield from _card_notes(swept.training, "predicted", None)
    time = f"estimated from counts of operations for {swept.speed}"
    if swept.device is not None:
        time = (
            f"{swept.sweep.about['seconds']}, of a shallow encoder at each batch, or of as "
            "many utterances as fit there"
        )
    yield (
        f"Times: {time}. With the optimizer's {1e3 * swept.sweep.other_seconds:.3g} ms, "
        "without classifier and reading. Plans were not run."
    )
