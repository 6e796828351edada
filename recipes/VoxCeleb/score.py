"""Score trial lists with the embeddings that extract.py made.

``python recipes/VoxCeleb/score.py RUN_FOLDER`` prints a table and writes into the run's
folder

- scores/results.json: equal error rates and detection costs, the thresholds that have
  them, and how they were made
- scores/<trial list>.<cosine|as_norm>.txt: "enrol test label score"
- scores/det.png: false alarms against misses

AS-Norm's cohort are the mean embeddings of the training speakers. Intervals are of 95 %,
of speakers drawn with replacement, where names of utterances begin with the speaker.
``--from_scores FILE`` computes metrics and plot of a file of scores, whoever wrote it.
Processes of torchrun share the search of the cohort; the first does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speechbrain_rev.cli import ArgumentParser, run_script
from speechbrain_rev.cli.options import COMPUTES, READS
from speechbrain_rev.inference.evaluation import REPLICATES, score_file, score_run
from speechbrain_rev.processes import joined, process_rank

EXAMPLES = (
    "python recipes/VoxCeleb/score.py results/df_revnet281/1986",
    "python recipes/VoxCeleb/score.py --from_scores scores.txt",
)


def command_line() -> ArgumentParser:
    """Give the parser of the command line."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0], examples=EXAMPLES)
    reads = parser.add_argument_group(READS)
    given = reads.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "run_folder",
        metavar="RUN_FOLDER",
        nargs="?",
        type=Path,
        help="output_folder of train.py",
    )
    given.add_argument(
        "--from_scores",
        metavar="FILE",
        type=Path,
        help="lines 'enrol test label score', whose metrics are computed",
    )
    reads.add_argument(
        "--trial_lists",
        metavar="LIST",
        nargs="+",
        help="instead of the run's trial_lists",
    )
    reads.add_argument(
        "--data_folder",
        metavar="FOLDER",
        help="where the training data are now, if the run's trial_lists moved with them",
    )
    computes = parser.add_argument_group(COMPUTES)
    computes.add_argument(
        "--cohort_top_n", metavar="N", type=int, help="instead of the run's"
    )
    computes.add_argument(
        "--subtract_mean",
        action="store_true",
        help="centre embeddings on the mean of the training set's",
    )
    computes.add_argument(
        "--bootstrap",
        metavar="N",
        type=int,
        default=REPLICATES,
        help=f"draws of speakers for intervals; 0: none; default: {REPLICATES}",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line()
    options = parser.parse_args(argv)
    run, file = options.run_folder, options.from_scores
    with joined():
        if run:
            report = score_run(
                run,
                trials=options.trial_lists,
                data_folder=options.data_folder,
                cohort_top_n=options.cohort_top_n,
                subtract_mean=options.subtract_mean,
                replicates=options.bootstrap,
            )
            written = (
                f"{run / 'scores'}: results.json, det.png and the scores of each list"
            )
        else:
            report = (
                score_file(file, options.bootstrap) if process_rank() == 0 else None
            )
            written = f"{file}.json, {file}.png"
    if report is not None:
        print("\n".join([*report.remarks, report.table(), written]))


if __name__ == "__main__":
    run_script(main)
