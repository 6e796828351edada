"""Subcommand that shows a corpus: ``data``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from speechbrain_rev.cli.options import OUTPUT, READS, check_plot

if TYPE_CHECKING:
    from speechbrain_rev.data.listing import DataSettings
    from speechbrain_rev.data.overview import Overview

#: Settings of train.py that choose what is read, checked and defaulted as by train.py.
_SETTINGS = (
    "speaker_from", "sample_rate", "resample", "channel", "train_list", "trial_lists",
    "trials_folder", "bad_files", "check_audio", "outside_files",
    "short", "chunk_samples",
)  # fmt: skip
_EXAMPLES = (
    " LibriSpeech --plot=lengths.png",
    " calls --speaker_from='/call-([^-]+)-' --bad_files=drop --json",
)


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    command = add(
        "data",
        _data,
        "show what train.py would read of a corpus",
        "Format, speakers, hours, rates, lengths, and what is left out and why. Nothing "
        "is written but --plot. The status is 2 where train.py would refuse.",
        _EXAMPLES,
    )
    command.add_argument_group(READS).add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="data_folder of train.py: a folder of audio, a packed one, or a list; of "
        "several, speakers are kept apart",
    )
    output = command.add_argument_group(OUTPUT)
    output.add_argument(
        "--json", action="store_true", help="print one JSON document, in seconds"
    )
    output.add_argument(
        "--plot",
        metavar="FILE.png",
        help="also draw histograms of lengths and of utterances of a speaker; the name "
        "ends in .png, .pdf or .svg",
    )
    settings = command.add_argument_group(
        "settings of train.py",
        "hparams/train.yaml has what each is; trials_folder is PATH",
    )
    for name in _SETTINGS:
        settings.add_argument(f"--{name}", metavar="VALUE")


def _data(parsed: argparse.Namespace) -> None:
    check_plot(parsed.plot)
    from speechbrain_rev.data.overview import look_at

    overview = look_at(_settings(parsed), "PATH")
    if parsed.json:
        print(json.dumps(overview.plain(), indent=1))
    else:
        print(overview.text(), end="")
    if parsed.plot is not None and overview.seconds:
        _draw(overview, parsed.paths, parsed.plot)
    if overview.refused:
        raise ValueError(overview.refused)


def _settings(parsed: argparse.Namespace) -> DataSettings:
    """Take the settings as train.py does; speakers are held out of what is read here."""
    from speechbrain_rev.data.listing import DataSettings
    from speechbrain_rev.hparams import compose, plain_settings

    given = {n: getattr(parsed, n) for n in _SETTINGS if getattr(parsed, n) is not None}
    # Any encoder does.
    options = [f"--{name}={value}" for name, value in given.items()]
    text = compose(["revnet46", "--data_folder=.", "--output_folder=.", *options]).text
    settings = DataSettings.of(plain_settings(text))
    folders = parsed.paths[0] if len(parsed.paths) == 1 else parsed.paths
    tested = settings.trials_folder if parsed.trials_folder else None
    return replace(
        settings, data_folder=folders, trials_folder=tested, valid_speakers=0
    )


def _draw(overview: Overview, paths: Sequence[str], picture: str) -> None:
    from speechbrain_rev.data.rows import counted
    from speechbrain_rev.plots import corpus_histograms

    plain, of_speakers = overview.plain(), overview.of_speakers()
    corpus_histograms(
        overview.seconds,
        list(of_speakers.values()),
        picture,
        title=f"{plain['format']}: {counted(len(overview.seconds), 'utterance')} of "
        f"{counted(len(of_speakers), 'speaker')}",
        source=f"{', '.join(paths)}, as train.py would read it.",
    )
