"""Subcommands that read or count what encoders take: ``models`` and ``memory``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from speechbrain_rev import catalog
from speechbrain_rev.architectures import ARCHITECTURES, FAMILIES, TYPES
from speechbrain_rev.catalog.counts import FRAMES
from speechbrain_rev.catalog.table import MODES, PAPER, SORT_KEYS
from speechbrain_rev.cli.options import (
    CARD_HELP,
    COMPUTES,
    READS,
    add_output,
    add_training,
    card_note,
    cell,
    check_plot,
    counted_note,
    days_note,
    print_results,
    table_of,
    training_of,
)
from speechbrain_rev.devices import parse_card
from speechbrain_rev.heads import Head
from speechbrain_rev.modes import Mode
from speechbrain_rev.sizes import MIB, size_text

if TYPE_CHECKING:
    from rich.table import Table

    from speechbrain_rev.catalog.breakdown import Cases, EncoderBreakdown


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    command = add(
        "models",
        _models,
        f"compare the {len(ARCHITECTURES)} encoders: accuracy, memory, what fits a GPU",
        "Error rates are the published ones. Memory was counted, no GPU is needed.",
        ["", " --card=11GB --batch=128 --fits --sort=vox1-h", " --plot=models.png"],
    )
    reads = command.add_argument_group(READS)
    reads.add_argument(
        "names", metavar="ENCODER", nargs="*", help="only these (default: all)"
    )
    for name, kinds in (("family", FAMILIES), ("type", TYPES)):
        reads.add_argument(
            f"--{name}",
            action="append",
            default=[],
            choices=list(kinds),
            help=f"only of this {name}; may be given several times",
        )
    computes = command.add_argument_group(COMPUTES)
    computes.add_argument("--card", metavar="SIZE", help=CARD_HELP)
    add_training(computes, batch=128)
    computes.add_argument(
        "--fits", action="store_true", help="only encoders whose batch fits the GPU"
    )
    computes.add_argument(
        "--sort",
        choices=list(SORT_KEYS),
        help="memory: in the default mode; batch: the largest; days: the fewest",
    )
    computes.add_argument("--reverse", action="store_true", help="largest first")
    add_output(command)

    command = add(
        "memory",
        _memory,
        "break a training step's memory down, before and after",
        "It lists activations, optimizer states, weights, gradients and others. Before: "
        "all activations are stored, and states have 32 bits. After: the encoder's default "
        "mode and 8-bit states. Memory is counted; no GPU is needed. Whether a step fits "
        "a GPU is answered by models and plan.",
        [" revnet46 resnet34", " revnet197 --stages", " resnet34 --mode=recompute"],
    )
    command.add_argument_group(READS).add_argument(
        "names", metavar="ENCODER", nargs="+", help="e.g. revnet46"
    )
    computes = command.add_argument_group(COMPUTES)
    add_training(computes, batch=64)
    computes.add_argument(
        "--mode",
        choices=MODES,
        help="after (default: reconstruct if the encoder is reversible, else store)",
    )
    computes.add_argument(
        "--stages",
        action="store_true",
        help="also by stages of the encoder: what each holds and works with (seconds "
        "for each encoder)",
    )
    add_output(command)
    command.set_defaults(less_memory="Leave out --stages.")


def _models(parsed: argparse.Namespace) -> None:
    check_plot(parsed.plot)
    gpu = None if parsed.card is None else parse_card(parsed.card)
    card_bytes = None if gpu is None else gpu.memory_bytes
    models = catalog.select(
        training_of(parsed, card_bytes, parsed.batch),
        names=parsed.names,
        families=parsed.family,
        types=parsed.type,
        fitting=parsed.fits,
        sort=parsed.sort,
        reverse=parsed.reverse,
        speed=None if gpu is None else gpu.speed,
    )
    if parsed.plot is not None:
        # Pictures import torch, which the table does not need.
        from speechbrain_rev.catalog.pictures import draw_models

        draw_models(models, parsed.plot)
        print(f"{parsed.plot}: {len(models)} encoders")
        return
    print_results(
        parsed,
        [asdict(model) for model in models],
        lambda: [table_of([_model_row(model) for model in models])],
        models_notes(models[0]),
    )


def _model_row(model: catalog.ListedEncoder) -> dict[str, str]:
    row = {"encoder": model.row.name, "EER\nH, %": cell(model.row.vox1_h_eer, ".2f")}
    if model.training.card_bytes is None:
        row["M\nparams"] = f"{model.parameters / 1e6:.2f}"
        name, head, unit, form = "bytes_per_utterance", "MiB", MIB, ".1f"
    else:
        row["fastest\nmode"] = cell(model.fastest_mode)
        row["\ndays"] = cell(model.days, ".1f")
        name, head, unit, form = "largest_batch", "batch", 1, ".0f"
    for mode in MODES:
        figure = model.figure(name, mode)
        row[f"{head}\n{Mode(mode).spec.column}"] = cell(figure and figure / unit, form)
    return row


def models_notes(model: catalog.ListedEncoder) -> list[str]:
    """Name where figures of the table of encoders are from.

    Parameters
    ----------
    model : ListedEncoder
        One of them.
    """
    training = model.training
    counted = counted_note(training)
    if training.frames not in FRAMES:
        counted += (
            f" Of {training.frames} frames: at most, by the counts of "
            f"{' and '.join(map(str, FRAMES))}."
        )
    notes = [
        f'EER: Vox1-H, Tables V and VI of "{PAPER}". Not reproduced here.',
        counted,
    ]
    if training.card_bytes is None:
        return [*notes, "MiB: what one more utterance adds to a step, by mode."]
    head = training.head
    return [
        *notes,
        f"Batch: the largest that fits {card_note(training.card_bytes)}: encoder, "
        f"{training.optimizer_bits}-bit states and a classifier of {head.classes} with "
        f"{head.loss}. No such GPU was tried.",
        f"{days_note(model.speed)} All blocks in the fastest mode in which batch "
        f"{training.batch} fits. A plan mixes modes and chooses the chunk, and takes no "
        "longer: speechbrain-rev plan.",
    ]


def _memory(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.catalog import pictures
    from speechbrain_rev.catalog.breakdown import before_and_after

    check_plot(parsed.plot)
    encoders = [
        before_and_after(
            name,
            mode=parsed.mode,
            batch=parsed.batch,
            frames=parsed.frames,
            optimizer_bits=parsed.optimizer_bits,
            head=Head(parsed.classes, loss=parsed.loss),
            stages=parsed.stages,
        )
        for name in dict.fromkeys(parsed.names)
    ]
    if parsed.plot is not None:
        draw = pictures.draw_stages if parsed.stages else pictures.draw_breakdowns
        draw(encoders, parsed.plot)
        print(f"{parsed.plot}: {len(encoders)} encoders")
        return
    cases = [case for pair in encoders for case in pair]
    print_results(
        parsed,
        [asdict(case) for case in cases],
        lambda: [
            *(_parts_table(pair) for pair in encoders),
            *(_stages_table(case) for case in cases if case.stages),
        ],
        _memory_notes(parsed, cases[-1]),
    )


def _setting(case: EncoderBreakdown) -> str:
    return f"{case.mode}, {case.optimizer_name} {case.optimizer_bits} bit"


def _parts_table(pair: Cases) -> Table:
    before, after = pair
    sizes = {
        part: (size, after.report.parts[part])
        for part, size in before.report.parts.items()
    }
    sizes["total"] = before.report.total_bytes, after.report.total_bytes
    return table_of(
        [
            {
                f"\n\n{before.name}": part.replace("_", " "),
                f"before:\n{_setting(before)}".replace(", ", "\n"): size_text(old),
                f"after:\n{_setting(after)}".replace(", ", "\n"): size_text(new),
                "\n\nsaved": f"{1 - new / old:.1%}",
                "\nsaved of\nthe total": f"{(old - new) / before.report.total_bytes:.1%}",
            }
            for part, (old, new) in sizes.items()
        ]
    )


def _stages_table(case: EncoderBreakdown) -> Table:
    """Show what each stage takes, in MiB."""
    names = "held", "working", "peak", "weights", "gradients", "optimizer_states"
    rows = []
    for stage in case.stages:
        sizes = {name: getattr(stage, f"{name}_bytes") / MIB for name in names}
        cells = {n.removeprefix("optimizer_"): f"{sizes[n]:.1f}" for n in names}
        rows.append({"stage": stage.name} | cells)
    return table_of(rows, f"{case.name}, {_setting(case)}, MiB:")


def _memory_notes(parsed: argparse.Namespace, after: EncoderBreakdown) -> Iterator[str]:
    batch, frames, _ = after.report.input_shape
    yield (
        f"One step of {batch} utterances of {frames} frames in float32. Activations: the "
        f"peak of the encoder's own step, {after.how}, on meta tensors. The rest: counted, "
        f"of the encoder and a classifier of {after.classes}. Others: the batch and the "
        "classifier's step. Total: an upper bound, as parts do not all peak at once."
    )
    if parsed.stages:
        yield (
            "Stages: held is kept for the backward pass, working is the most beyond it, "
            "peak is working and all that is held. The largest peak is that of the "
            "activations. In mode reconstruct stem and transitions recompute."
        )
