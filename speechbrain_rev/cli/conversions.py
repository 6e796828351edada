"""The subcommand ``convert``: weights that others saved, for use here, and back."""

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
        "make a model's folder of weights that others saved with torch",
        "wespeaker: writes a folder for embed and verify from avg_model.pt of a ResNet; "
        "with --back, avg_model.pt from such a folder. speechbrain: writes an exported "
        "model with .safetensors from one that has embedding_model.ckpt alone. Nothing of "
        "a file is executed, and nothing is overwritten.",
    )
    command.add_argument(
        "toolkit", choices=["wespeaker", "speechbrain"], help="who saved the weights"
    )
    command.add_argument(
        "source",
        metavar="FROM",
        help="avg_model.pt; an exported model's folder, or a file of weights in it; "
        "with --back a run folder",
    )
    command.add_argument(
        "target", metavar="TO", help="a new folder, or with --back a new file"
    )
    command.add_argument(
        "--back",
        action="store_true",
        help="from a run folder to WeSpeaker's weights",
    )


def _convert(parsed: argparse.Namespace) -> None:
    if parsed.back:
        check_file("TO", parsed.target)
    if parsed.toolkit == "speechbrain":
        _convert_speechbrain(parsed)
        return
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


def _convert_speechbrain(parsed: argparse.Namespace) -> None:
    if parsed.back:
        raise ValueError(
            "--back is for wespeaker: an exported model has embedding_model.ckpt for "
            "SpeechBrain beside its .safetensors."
        )
    from speechbrain_rev.inference.export import convert_from_speechbrain

    missing = convert_from_speechbrain(parsed.source, parsed.target)
    print(f"{parsed.target}: the model of {parsed.source}, with .safetensors")
    if missing:
        print(f"It lacks {', '.join(missing)}, which {parsed.source} does not have.")
    print(f"speechbrain-rev embed {parsed.target} FILE embeds audio.")
