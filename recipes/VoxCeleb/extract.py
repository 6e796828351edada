"""Embed each utterance of the trial lists and of the training set, once.

``python recipes/VoxCeleb/extract.py RUN_FOLDER`` writes into the run's folder

- embeddings/trials.npz: the utterances of all trial lists
- embeddings/cohort.npz: the training utterances, from which score.py makes the cohort

Where the training data have moved, ``--data_folder`` is where they are now; lists and
trials_folder of the run that lie in the old folder are looked for there too.

Embeddings that are there already from the same weights are kept. Several processes, each
with a GPU of its own, share the work: ``torchrun --nproc_per_node=4
recipes/VoxCeleb/extract.py RUN_FOLDER``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speechbrain_rev.cli import ArgumentParser, run_script
from speechbrain_rev.cli.options import COMPUTES, READS
from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.evaluation import (
    channel_of_run,
    extract,
    files_of_run,
)
from speechbrain_rev.processes import joined, own_device

EXAMPLES = (
    "python recipes/VoxCeleb/extract.py results/df_revnet281/1986",
    "python recipes/VoxCeleb/extract.py results/df_revnet281/1986 "
    "--trial_lists veri_test2.txt",
)


def command_line() -> ArgumentParser:
    """Give the parser of the command line."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0], examples=EXAMPLES)
    reads = parser.add_argument_group(READS)
    reads.add_argument(
        "run_folder", metavar="RUN_FOLDER", type=Path, help="output_folder of train.py"
    )
    reads.add_argument(
        "--trial_lists",
        metavar="LIST",
        nargs="+",
        help="instead of the run's trial_lists",
    )
    reads.add_argument(
        "--trials_folder", metavar="FOLDER", help="instead of the run's trials_folder"
    )
    reads.add_argument(
        "--data_folder",
        metavar="FOLDER",
        help="where the training data are now, if they have moved",
    )
    reads.add_argument(
        "--outside_files",
        action="store_true",
        help="read what names in lists and links lead to outside the folders",
    )
    reads.add_argument(
        "--utterances_per_speaker",
        metavar="N",
        type=int,
        help="how many of each training speaker make its mean; default: all",
    )
    parser.add_argument_group(COMPUTES).add_argument(
        "--device", help="default: the GPU if there is one, each process its own"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line()
    options = parser.parse_args(argv)
    count = options.utterances_per_speaker
    if count is not None and count < 1:
        parser.error(f"--utterances_per_speaker takes 1 or more, not {count}")
    trials, cohort = files_of_run(
        options.run_folder,
        trials=options.trial_lists,
        trials_folder=options.trials_folder,
        data_folder=options.data_folder,
        outside_files=options.outside_files,
        utterances_per_speaker=count,
    )
    device = own_device(options.device)
    embedder = SpeakerEmbedder.from_run(options.run_folder, device=device)
    with joined():
        made = extract(
            embedder,
            options.run_folder,
            trials,
            cohort,
            channel=channel_of_run(options.run_folder),
        )
    for path, archive in made.items():
        utterances, dim = archive.embeddings.shape
        print(f"{path}: {utterances} embeddings of {dim} dimensions")


if __name__ == "__main__":
    run_script(main)
