"""The command itself: its subcommands, and errors as one line."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from speechbrain_rev import __version__
from speechbrain_rev.cli import corpora, encoders, exports, plans, speakers
from speechbrain_rev.cli.options import READS, on_terminal
from speechbrain_rev.cli.spelling import ArgumentParser
from speechbrain_rev.files import is_of_disk

# Advice where memory ran out; commands that run tensors name their own options.
_LESS_MEMORY = "End what else uses it, and try again."
# As shells have it of Ctrl-C, and of who writes where nobody reads.
_INTERRUPTED = 130
_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console command.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the command's name; by default that of this process.

    Returns
    -------
    int
        0; 2 after an error of the user or where memory ran out, 130 after Ctrl-C, each
        of which is one line on stderr.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # Closed by the caller (>&-), who wants to read nothing.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    _name_user()
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        _end_output()
    except KeyboardInterrupt as interrupt:
        return _interrupted("speechbrain-rev", interrupt)
    except (ValueError, OSError, ImportError) as error:
        return _failed(_words(error))
    except (MemoryError, RuntimeError) as error:
        from speechbrain_rev.planner.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        # A refusal of our own has its advice already.
        own = str(error) if type(error) is MemoryError else ""
        return _failed(own or f"Memory ran out. {parsed.less_memory}")
    return 0


def _name_user() -> None:
    """Give a user without a name one, as torch's compiler cannot be imported without."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"uid{os.getuid()}"


def _words(error: Exception) -> str:
    """Give an error's words; where a disk is full, what it is that cannot be written."""
    if isinstance(error, OSError) and is_of_disk(error) and error.strerror:
        place = error.filename or "A file"
        return (
            f"{place} cannot be written ({error.strerror}). Free some space, or mend what is "
            "wrong, and give the same command again."
        )
    return str(error)


def _failed(words: str) -> int:
    """Print what is wrong; give the exit status."""
    print(f"speechbrain-rev: {on_terminal(words)}", file=sys.stderr)
    return 2


def _end_output() -> None:
    """Write nothing more: whoever read the output (head, less) has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupted(name: str, interrupt: KeyboardInterrupt) -> int:
    """Print where Ctrl-C came, as long work passes it on; give the exit status."""
    where = f" {interrupt}" if interrupt.args else "."
    print(f"\n{name}: interrupted{where}", file=sys.stderr)
    return _INTERRUPTED


def run_script(script: Callable[[], object]) -> None:
    """Run a recipe; an error of the user ends it with one line instead of a traceback.

    Errors that come from elsewhere than this package and the recipe keep theirs, but for a
    disk that is full. Ctrl-C ends it with one line, too, and status 130; a reader of its
    output that is gone with status 141.

    Parameters
    ----------
    script : callable
        The recipe's ``main``, which reads the command line.
    """
    _name_user()
    own = (Path(__file__).parents[1], Path(sys.argv[0]).resolve().parent)
    try:
        script()
        sys.stdout.flush()
    except BrokenPipeError:
        # A run that trains ends so, too.
        _end_output()
        name = Path(sys.argv[0]).name
        print(f"{name}: ended, for its output was closed.", file=sys.stderr)
        sys.exit(_CLOSED)
    except KeyboardInterrupt as interrupt:
        sys.exit(_interrupted(Path(sys.argv[0]).name, interrupt))
    except (ValueError, OSError, ImportError, MemoryError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = any(raised_in.resolve().is_relative_to(folder) for folder in own)
        if not is_of_disk(error) and (not ours or not str(error)):
            raise
        sys.exit(f"{Path(sys.argv[0]).name}: {on_terminal(_words(error))}")


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="speechbrain-rev",
        description="Very deep speaker encoders in little memory, with SpeechBrain.",
        examples=[
            "speechbrain-rev models --card=11GB --fits",
            "speechbrain-rev plan --help",
        ],
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str,
        run: Callable[[argparse.Namespace], None],
        summary: str,
        details: str,
        examples: Sequence[str],
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}",
            examples=[f"speechbrain-rev {name}{example}" for example in examples],
        )
        command.set_defaults(run=run, less_memory=_LESS_MEMORY)
        return command

    add(
        "env",
        _env,
        "print what a bug report needs",
        "Versions of this package and of those it stands on, devices and memory.",
        [""],
    )

    command = add(
        "resolve",
        _resolve,
        "print a hyperparameter file as one complete file",
        "The result is plain HyperPyYAML, which SpeechBrain's own "
        "train_speaker_embeddings.py takes as well. Nothing is built or run.",
        [" df_revnet281 --batch_size=64", " hparams/large_margin.yaml > complete.yaml"],
    )
    reads = command.add_argument_group(READS)
    reads.add_argument(
        "file",
        metavar="FILE",
        help="a path, or the name of one that comes with the package, e.g. df_revnet281",
    )
    reads.add_argument(
        "overrides",
        metavar="--key=value",
        nargs=argparse.REMAINDER,
        help="values that override those of the file",
    )

    for group in (corpora, encoders, plans, speakers, exports):
        group.add_commands(add)
    return parser


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
    warned = [str(doubt.message) for doubt in doubts]
    settings = hparams.plain_settings(text)
    # A complete file of one's own may have neither; mode overrides both.
    if settings.get("mode") is None:
        warned += [
            f"{name} is read by the training recipe of this package only: under "
            "SpeechBrain's own script the file trains in the default mode. There, give "
            "mode, or write a plan (speechbrain-rev plan ENCODER --card SIZE --save "
            "plan.json) and, in the file, mode: "
            "!apply:speechbrain_rev.planner.Plan.load [plan.json]"
            for name in ("memory_budget", "plan_file")
            if settings.get(name) is not None
        ]
    if settings.get("pretrained") is not None:
        warned.append(
            "pretrained is read by recipes/VoxCeleb/train.py only, which takes the encoder's "
            "settings from it: another script trains the encoder of this file from scratch."
        )
    for line in warned:
        print(f"speechbrain-rev: warning: {line}", file=sys.stderr)
    print(text, end="")
