"""The console command ``speechbrain-rev``.

Each subcommand imports what it needs when it runs, so that ``--help`` is there at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from speechbrain_rev import __version__

_MEMORY_DEFAULTS = {
    "names": [],
    "batch": 64,
    "frames": 200,
    "mode": None,
    "optimizer_bits": 8,
    "card": None,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console command.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the command's name; by default that of this process.

    Returns
    -------
    int
        0, or 2 after an error of the user, which is one line on stderr.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # Closed by the caller (>&-), who wants to read nothing.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output (head, less) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, ImportError) as error:
        print(f"speechbrain-rev: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def run_script(script: Callable[[], object]) -> None:
    """Run a recipe; an error of the user ends it with one line instead of a traceback.

    Errors that come from elsewhere than this package and the recipe keep theirs.

    Parameters
    ----------
    script : callable
        The recipe's ``main``, which reads the command line.
    """
    own = (Path(__file__).parent, Path(sys.argv[0]).resolve().parent)
    try:
        script()
    except (ValueError, FileNotFoundError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not any(raised_in.resolve().is_relative_to(folder) for folder in own):
            raise
        sys.exit(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="speechbrain-rev",
        description="Very deep speaker encoders in little memory, with SpeechBrain.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace], None], summary: str, details: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}",
            allow_abbrev=False,
        )
        command.set_defaults(run=run)
        return command

    add(
        "env",
        _env,
        "print what a bug report needs",
        "Versions of this package and of those it stands on, devices and memory.",
    )

    command = add(
        "resolve",
        _resolve,
        "print a hyperparameter file as one complete file",
        "The result is plain HyperPyYAML, which SpeechBrain's own "
        "train_speaker_embeddings.py takes as well. Nothing is built or run.",
    )
    command.add_argument("file", metavar="FILE", help="e.g. hparams/df_revnet281.yaml")
    command.add_argument(
        "overrides",
        metavar="--key=value",
        nargs=argparse.REMAINDER,
        help="values that go before those of the file",
    )

    _add_models(add)
    _add_memory(add)

    run_help = "output_folder of a training run (recipes/VoxCeleb/train.py)"
    device_help = "cpu, cuda or cuda:N (default: the GPU if there is one)"
    command = add(
        "embed",
        _embed,
        "compute speaker embeddings of audio files",
        "Files may have any sample rate; several channels are averaged.",
    )
    command.add_argument("run_folder", metavar="RUN", help=run_help)
    command.add_argument("audio", metavar="FILE", nargs="+", help="audio files")
    command.add_argument(
        "--out",
        metavar="EMBEDDINGS.npz",
        help="write arrays `embeddings` [files, dim] and `files`; without it, a "
        "summary is printed",
    )
    command.add_argument("--device", help=device_help)

    command = add(
        "verify",
        _verify,
        "score whether two audio files have the same speaker",
        "The score is the cosine of the two embeddings, from -1 to 1.",
    )
    command.add_argument("run_folder", metavar="RUN", help=run_help)
    command.add_argument("first", metavar="A", help="audio file")
    command.add_argument("second", metavar="B", help="audio file")
    command.add_argument("--device", help=device_help)
    return parser


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


def _env(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.environment import environment

    del parsed
    for name, value in environment():
        print(f"{name:<17}{value}")


def _resolve(parsed: argparse.Namespace) -> None:
    from speechbrain_rev import hparams

    overrides, _ = hparams.parse_arguments(
        parsed.overrides, keys=hparams.top_level_keys(parsed.file)
    )
    with warnings.catch_warnings(record=True) as doubts:
        text = hparams.resolve(parsed.file, overrides)
    for doubt in doubts:
        print(f"speechbrain-rev: warning: {doubt.message}", file=sys.stderr)
    print(text, end="")


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


def _embed(parsed: argparse.Namespace) -> None:
    if parsed.out is not None and not parsed.out.endswith(".npz"):
        # numpy would write to another name than the one asked for.
        raise ValueError(f"--out takes a name that ends in .npz, not {parsed.out}.")
    if parsed.out is not None:
        _check_writable(Path(parsed.out))
    import numpy as np

    from speechbrain_rev.inference import SpeakerEmbedder
    from speechbrain_rev.inference.archive import write_arrays

    embedder = SpeakerEmbedder.from_run(parsed.run_folder, device=parsed.device)
    embeddings = embedder.embed_files(parsed.audio)
    if parsed.out is not None:
        files = np.array(parsed.audio)
        write_arrays(Path(parsed.out), {"embeddings": embeddings, "files": files})
        print(f"{parsed.out}: embeddings {list(embeddings.shape)}, files")
        return
    for file, embedding in zip(parsed.audio, embeddings, strict=True):
        start = " ".join(f"{value:.3f}" for value in embedding[:4])
        norm = np.linalg.norm(embedding)
        print(f"{file}: {len(embedding)} values, norm {norm:.3f}: {start} ...")
    print("--out=embeddings.npz writes them to a file.")


def _verify(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.inference import SpeakerEmbedder

    embedder = SpeakerEmbedder.from_run(parsed.run_folder, device=parsed.device)
    score = embedder.verify(parsed.first, parsed.second)
    print(f"{score:.4f}  cosine, from -1 to 1; higher means more alike")
    print(
        "The score above which two voices count as one speaker's has to be chosen on "
        "trials of your own kind of speech."
    )


def _check_writable(path: Path) -> None:
    """Refuse a place where no file can be written, before the work and not after it."""
    reason = ""
    if not path.parent.is_dir():
        reason = f"there is no folder {path.parent}. Make it first"
    elif path.is_dir():
        reason = "it is a folder. Give the name of a file"
    elif not os.access(path.parent, os.W_OK):
        reason = f"you may not write into the folder {path.parent}. Give another one"
    if reason:
        raise ValueError(f"--out {path} cannot be written: {reason}.")
