"""Test whether reversible encoders are as accurate, at 8 bit and in memory modes.

python recipes/study/run.py DATA --noise NOISE [--size small] [--output FOLDER]

DATA is a corpus in VoxCeleb's layout that holds train_list.txt and trial lists
veri_test.txt and veri_test_*.txt. Each condition is trained with each seed on the same
data in the same order, scored, and compared with its reference. The margins of the
comparisons are made of the vanilla encoders alone, and written before anything else is
trained; then the first seed is trained, measured and probed, then the others. From the
third on, the report is written with each seed that is done. What is done is not done
again: after a crash the same command goes on. What fails is told, and left out of the
report; then the status is 1. --dry_run lists what would be trained; --report_only writes
the report of what is there, without speech; --compare FOLDER says whether another run of
the study has the same numbers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# Read by OpenMP when torch is loaded: a thread that waits takes no core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "VoxCeleb"))

import torch
from design.conditions import comparisons, conditions
from design.sizes import SIZES
from measurements.of_study import measure_encoders, measure_steps, probe
from report.writing import compare, write_report
from results.files import MARGINS, REPORT, RESULTS, SETTING
from results.runs import Study
from running.command_line import (
    HPARAMS,
    REPOSITORY,
    TRAIN_LIST,
    existing_folder,
    positive,
    settings_of_all,
    trial_lists,
)
from running.determinism import compute_repeatably
from running.orphans import end_in_order
from running.schedule import attempt, finished, first_of, runs_of, so_far, train
from running.setting import keep_setting, setting_of
from running.trainings import THREADS

from speechbrain_rev.cli import run_script
from speechbrain_rev.devices import named_device
from speechbrain_rev.environment import usable_cpus
from speechbrain_rev.locks import writing_alone

#: From which on a study is reported before it is at its end.
FEWEST_SEEDS = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = _parser()
    options = parser.parse_args(argv)
    output = options.output or REPOSITORY / "results" / f"study_{options.size}"
    output = output.resolve()
    if options.compare:
        tell_differences(output, options.compare)
        return
    if options.report_only:
        write_only_report(output)
        return
    if options.data is None:
        parser.error("DATA is needed: a corpus with its lists")
    size = SIZES[options.size]
    lists = trial_lists(options.data)
    names = [path.stem for path in lists]
    study = Study(output, conditions(), comparisons(), size.seeds, names)
    device = options.device or size.device
    jobs = options.jobs or (1 if device.startswith("cuda") else usable_cpus())
    runs = runs_of(study)
    done = sum(run.is_done for run in runs)
    print(
        f"{len(study.conditions)} conditions, seeds {', '.join(map(str, study.seeds))}: "
        f"{len(runs)} trainings, {done} of them done, {jobs} at a time, in {output}"
    )
    if options.dry_run:
        print("\n".join(condition.name for condition in study.conditions))
        return
    advice = f"The size {options.size} is for {size.device}; --device takes another."
    named_device(device, cpu=True, advice=advice)
    if device == "cpu":
        # Figures of gradients are sums, whose order depends on threads.
        torch.set_num_threads(THREADS)
    settings = settings_of_all(options.data, lists, options.noise, device)
    with writing_alone(output):
        described = setting_of(study, options.size, size, HPARAMS, settings)
        setting = keep_setting(output, described)
        first = first_of(study, runs)
        failed = train(study, first, settings, size, HPARAMS, jobs=jobs)
        look_at_first(study, device)
        others = [run for run in runs if run not in first]

        def after(lost: Sequence[str]) -> None:
            told = [*failed, *lost]
            attempt("The report so far", lambda: report_so_far(study, setting, told))

        after([])
        failed += train(study, others, settings, size, HPARAMS, jobs=jobs, after=after)
        failed += evaluate(study, setting, device, failed)
    if (output / REPORT).is_file():
        print((output / REPORT).read_text(encoding="utf-8"))
    if failed:
        sys.exit("\n".join(["What failed:", *failed]))


def write_only_report(output: Path) -> None:
    """Write the report of a study that is there, here or unpacked from an archive.

    Raises
    ------
    ValueError
        If there is none, its margins are not stated yet, or fewer seeds are there than are
        reported.
    """
    missing = [name for name in (SETTING, MARGINS) if not (output / name).is_file()]
    if missing:
        raise ValueError(
            f"{output} has no study to report: it lacks {' and '.join(missing)}. Give the "
            "--output of one whose references are trained, or where archive.py unpacked it."
        )
    setting = json.loads((output / SETTING).read_text(encoding="utf-8"))
    lists = [Path(name).stem for name in setting["lists"] if name != TRAIN_LIST]
    whole = Study(output, conditions(), comparisons(), setting["seeds"], lists)
    part = so_far(whole)
    if len(part.seeds) < min(FEWEST_SEEDS, len(whole.seeds)):
        missing = [run.name for run in runs_of(whole) if not run.is_done]
        raise ValueError(
            f"{output} has all trainings of {len(part.seeds)} seeds, which is too few for a "
            f"report; it lacks {'; '.join(missing)}. Go on with run.py DATA."
        )
    path = output / RESULTS
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    with writing_alone(output):
        write_report(part, setting, failed=known.get("failed", []))
    print((output / REPORT).read_text(encoding="utf-8"))


def report_so_far(
    study: Study, setting: Mapping[str, Any], failed: Sequence[str]
) -> None:
    """Write the report of the seeds that are there, while others are trained.

    A seed of which a training failed is not there: what failed is told.
    """
    part = so_far(study)
    # Two tell hardly a spread; all are reported when nothing is trained any more.
    if len(part.seeds) < FEWEST_SEEDS or len(part.seeds) == len(study.seeds):
        return
    path = study.folder / RESULTS
    known = json.loads(path.read_text()) if path.is_file() else {"figures": {}}
    told = known["figures"].get("seeds"), known.get("failed", [])
    if told != (list(part.seeds), list(failed)):
        write_report(part, setting, failed=failed)


def evaluate(
    study: Study,
    setting: Mapping[str, Any],
    device: str,
    failed: Sequence[str],
) -> list[str]:
    """Write the report, measure and probe, and write it again with that.

    Returns
    -------
    list of str
        What failed besides what had failed already.
    """
    lost = attempt("The report", lambda: write_report(study, setting, failed=failed))
    lost += look_at_first(study, device)
    return lost + attempt(
        "The report of measures and probes",
        lambda: write_report(study, setting, failed=[*failed, *lost]),
    )


def look_at_first(study: Study, device: str) -> list[str]:
    """Measure and probe the trainings of the first seed; say what failed."""
    left = finished(replace(study, seeds=study.seeds[:1]))
    lost = attempt("Measures of a step", lambda: measure_steps(left, device))
    lost += attempt("Measures of encoders", lambda: measure_encoders(study, device))
    lost += attempt("Probes", lambda: probe(left, device))
    if torch.cuda.is_initialized():
        # Trainings are other processes.
        gc.collect()
        torch.cuda.empty_cache()
    return lost


def tell_differences(output: Path, other: Path) -> None:
    """Say whether two studies have the same numbers; if not, end with status 1.

    Raises
    ------
    ValueError
        If one of them has none, or both are one.
    """
    if output.resolve() == other.resolve():
        raise ValueError(
            f"{output} would be compared with itself. Give the --output of another run."
        )
    for folder in (output, other):
        path = folder / RESULTS
        if not path.is_file() or "figures" not in json.loads(path.read_text()):
            raise ValueError(
                f"{folder} has no {RESULTS} with the figures of a study. Give the "
                "--output of one whose report is written, and --compare of another."
            )
    differing = compare(output, other)
    if differing:
        print("\n".join(differing))
        sys.exit(f"{len(differing)} figures differ.")
    figures = json.loads((output / RESULTS).read_text())["figures"]
    print(
        f"{output} and {other} have the same figures, to the last bit: of "
        f"{len(figures['conditions'])} conditions, seeds "
        f"{', '.join(map(str, figures['seeds']))}."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "data",
        type=existing_folder,
        nargs="?",
        help="corpus with its lists; not for --compare and --report_only",
    )
    parser.add_argument(
        "--noise",
        type=existing_folder,
        help="folder of noise for augmentation; default: none",
    )
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        default="small",
        help="small: reduced widths, for CPUs; full: as published, for a GPU",
    )
    parser.add_argument("--output", type=Path, help="default: results/study_SIZE")
    parser.add_argument(
        "--device", help="default: the GPU for the full size, the CPU for the small one"
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        help="trainings at a time, a core each; default: all cores, 1 on a GPU",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="list what would be trained"
    )
    parser.add_argument(
        "--report_only",
        action="store_true",
        help="write the report of what is in --output; train and measure nothing",
    )
    parser.add_argument(
        "--compare",
        metavar="FOLDER",
        type=Path,
        help="compare the figures of --output with those of this study",
    )
    return parser


if __name__ == "__main__":
    end_in_order()
    compute_repeatably()
    run_script(main)
