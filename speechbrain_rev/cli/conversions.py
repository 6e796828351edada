"""The subcommand ``convert``: other toolkits' models for use here, and back."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from speechbrain_rev.whole_files import check_file


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    command = add(
        "convert",
        _convert,
        "make a run folder of another toolkit's weights, or weights of a run folder",
        "From avg_model.pt of a WeSpeaker ResNet a folder for embed and verify; with "
        "--back, from such a folder an avg_model.pt. Nothing of the file is executed, "
        "and nothing is written over.",
    )
    command.add_argument("toolkit", choices=["wespeaker"], help="wespeaker")
    command.add_argument(
        "source", metavar="FROM", help="avg_model.pt, or with --back a run folder"
    )
    command.add_argument(
        "target", metavar="TO", help="a new folder, or with --back a new file"
    )
    command.add_argument(
        "--back", action="store_true", help="from a run folder to the toolkit's weights"
    )


def _convert(parsed: argparse.Namespace) -> None:
    if parsed.back:
        check_file("TO", parsed.target)
    from speechbrain_rev.inference import wespeaker

    if parsed.back:
        wespeaker.convert_to_wespeaker(parsed.source, parsed.target)
        print(f"{parsed.target}: weights of {parsed.source}, as WeSpeaker names them")
        return
    settings = wespeaker.convert_from_wespeaker(parsed.source, parsed.target)
    sizes = ", ".join(f"{name} {value}" for name, value in settings.items())
    print(f"{parsed.target}: {sizes}")
    if not Path(parsed.source).with_name("config.yaml").exists():
        print(
            "There is no config.yaml beside the weights: TSTP pooling, 16 kHz and "
            "windows of 25 ms each 10 ms are assumed, which weights do not tell."
        )
    print(
        f"speechbrain-rev embed {parsed.target} FILE embeds audio; projection, the "
        "classifier of its training, is left out."
    )
