"""Subcommand that hands a trained model on: ``export``."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    command = add(
        "export",
        _export,
        "write a trained model as a folder for others",
        "SpeechBrain's EncoderClassifier and SpeakerRecognition load it, and "
        "SpeakerEmbedder.from_hparams without running anything of it. Score the run "
        "first (recipes/VoxCeleb: extract.py, score.py): error rates and AS-Norm's "
        "cohort go with it.",
    )
    run_help = "output_folder of a training run (recipes/VoxCeleb/train.py)"
    command.add_argument("run_folder", metavar="RUN", help=run_help)
    command.add_argument("out", metavar="OUT", help="folder to write; new or empty")


def _export(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.inference import export_run

    missing = export_run(parsed.run_folder, parsed.out)
    print(f"{parsed.out}: README.md says what is in it and how it is loaded.")
    for words in missing:
        print(f"It lacks {words}.")
