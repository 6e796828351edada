"""Find one setting for all encoders of the study, on its training speakers alone.

python recipes/study/search.py DATA --noise NOISE [--size small] [--output FOLDER]
    [--candidates NAME ...] [--encoders NAME ...]

Each candidate setting trains each encoder once, without some training speakers, between
whose utterances validation trials are made. The setting with the lowest mean of the
encoders' validation EERs is the one to take. Trial lists of other speakers are not read.
Given again, with others chosen or not, it trains what is not there yet; search.json has all
that was trained.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# Read by OpenMP when torch is loaded: a thread that waits takes no core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "VoxCeleb"))

from design.conditions import PAIRS, Condition
from design.sizes import COHORT_UTTERANCES, SIZES, Size
from measurements.baseline import score_baselines
from prepare import VALID_TRIALS
from report.tables import markdown
from running.command_line import (
    HPARAMS,
    REPOSITORY,
    TRAIN_LIST,
    existing_folder,
    positive,
)
from running.orphans import end_in_order
from running.trainings import (
    TRAIN,
    Run,
    TrainingsFailed,
    check_settings,
    resolved,
    settings_of,
    train_all,
)

from speechbrain_rev.cli import run_script
from speechbrain_rev.locks import writing_alone
from speechbrain_rev.whole_files import read_rows, write_whole

RESULTS = "search.json"
SEED = 1986
#: Of minivox's 120 training speakers.
VALID_SPEAKERS = 30
ENCODERS = [name for pair in PAIRS.items() for name in (pair[0], *pair[1])]
#: By what a candidate multiplies the rates of the study.
RATES = {"half the rate": 0.5, "twice the rate": 2.0}
#: What each candidate changes of the study's settings besides.
CANDIDATES: dict[str, dict[str, Any]] = {
    "as it is": {},
    **{name: {} for name in RATES},
    "scale 10": {"scale": 10.0},
    "scale 16": {"scale": 16.0},
    "scale 64": {"scale": 64.0},
    "warm-up of 4 epochs": {"warmup_epochs": 4.0},
    "no clipping": {"max_grad_norm": 1.0e9},
    "gradients clipped at 1": {"max_grad_norm": 1.0},
    "no weight decay": {"weight_decay": 0.0},
    "weight decay of 0.2": {"weight_decay": 0.2},
    "layers begin as torch has them": {"zero_init_residual": False},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(argv)
    size = SIZES[options.size]
    output = options.output or REPOSITORY / "results" / f"search_{options.size}"
    settings = {
        "data_folder": options.data.resolve(),
        "train_list": (options.data / TRAIN_LIST).resolve(),
        "noise_folder": options.noise and options.noise.resolve(),
        "device": options.device or size.device,
    }
    held_out = {**size.settings, "valid_speakers": options.valid_speakers}
    size = replace(size, settings=held_out)
    known = runs_of(output, size)
    runs = runs_of(output, size, options.candidates, options.encoders)
    print(f"{len(runs)} trainings, {options.jobs} at a time, in {output}")
    failed: list[str] = []
    with writing_alone(output):
        for run in known:
            if run.has_begun:
                check_settings(run, settings_of(run, settings, size), HPARAMS)
        try:
            train_all(runs, settings, size, HPARAMS, jobs=options.jobs)
        except TrainingsFailed as error:
            failed = ["What failed:", *error.sentences]
        trained = valid_eers([run for run in known if run.is_done])
        write_whole(output / RESULTS, json.dumps(trained, indent=1) + "\n")
        if done := [run for run in runs if run.is_done]:
            told = without_training(output, options.data, done[0], size)
            print(table(valid_eers(done)))
            for name, rate in told.items():
                print(f"Without training, {name} of filterbanks, cosine: {rate:.1f} %")
    if failed:
        sys.exit("\n".join(failed))


def without_training(
    output: Path, data: Path, run: Run, size: Size
) -> dict[str, float]:
    """Give the EERs of filterbank statistics on the validation trials, in percent."""
    rates = score_baselines(
        output,
        data,
        [run.folder / "save" / VALID_TRIALS],
        run.folder,
        utterances_per_speaker=COHORT_UTTERANCES,
        cohort_top_n=size.settings["cohort_top_n"],
    )
    return {
        name: 100 * row["eer"]
        for name, rows in rates.items()
        for row in rows
        if row["method"] == "cosine"
    }


def runs_of(
    output: Path,
    size: Size,
    candidates: Sequence[str] = tuple(CANDIDATES),
    encoders: Sequence[str] = tuple(ENCODERS),
) -> list[Run]:
    """List the trainings, all encoders of a candidate before the next one."""
    plain = resolved(HPARAMS, {"data_folder": "data", **size.settings})
    rates = {
        name: {key: factor * plain[key] for key in ("lr", "final_lr")}
        for name, factor in RATES.items()
    }
    return [
        Run(
            Condition(
                f"{candidate}: {name}",
                name,
                {
                    "mode": "store",
                    **CANDIDATES[candidate],
                    **rates.get(candidate, {}),
                },
            ),
            SEED,
            output / candidate.replace(" ", "_") / name,
            work=TRAIN,
        )
        for candidate in candidates
        for name in encoders
    ]


def valid_eers(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Read the validation EER that each training ended with, in percent."""
    rates: dict[str, dict[str, float]] = {}
    for run in runs:
        candidate = run.condition.name.partition(":")[0]
        log = run.folder / "train_log.jsonl"
        last = read_rows(log)[-1]
        of = rates.setdefault(candidate, {})
        of[run.condition.arch] = last["valid_eer_percent"]
    return rates


def table(rates: Mapping[str, Mapping[str, float]]) -> str:
    """Lay the rates out, the best mean first, over the encoders that all rows have."""
    encoders = list(dict.fromkeys(arch for of in rates.values() for arch in of))
    common = [arch for arch in encoders if all(arch in of for of in rates.values())]
    means = {
        name: statistics.mean([of[arch] for arch in common]) if common else math.nan
        for name, of in rates.items()
    }
    return markdown(
        [
            {
                "setting": name,
                **{a: f"{rates[name].get(a, math.nan):.1f}" for a in encoders},
                "mean": f"{means[name]:.1f}",
            }
            for name in sorted(means, key=means.__getitem__)
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=existing_folder, help=f"corpus with {TRAIN_LIST}")
    parser.add_argument(
        "--noise", type=existing_folder, help="folder of noise; default: none"
    )
    parser.add_argument(
        "--candidates",
        nargs="+",
        choices=list(CANDIDATES),
        default=list(CANDIDATES),
        metavar="NAME",
        help=f"of {', '.join(CANDIDATES)}; default: all",
    )
    parser.add_argument(
        "--encoders",
        nargs="+",
        choices=ENCODERS,
        default=ENCODERS,
        metavar="NAME",
        help=f"of {', '.join(ENCODERS)}; default: all",
    )
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--output", type=Path, help="default: results/search_SIZE")
    parser.add_argument("--device", help="default: that of the size")
    parser.add_argument("--jobs", type=positive, default=2, help="trainings at a time")
    parser.add_argument(
        "--valid_speakers",
        type=positive,
        default=VALID_SPEAKERS,
        help="training speakers that are held out for validation",
    )
    return parser


if __name__ == "__main__":
    end_in_order()
    run_script(main)
