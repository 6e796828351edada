"""Train the conditions of the study, a run after the other, and collect what came out.

python recipes/study/run.py DATA --noise_folder NOISE [--size small] [--output_folder FOLDER]

DATA is a corpus in VoxCeleb's layout that holds train_list.txt and trial lists
veri_test.txt and veri_test_*.txt. The references are trained first, with all seeds; the
margins are stated from them; then come the other conditions, seed by seed. A finished run
is skipped, and one that was killed goes on from its last checkpoint. A second command with
the same --output_folder, in another terminal, takes the runs that the first one has not begun.
The end is FOLDER/study.tar.xz, from which recipes/study/report.py writes the tables.

--dry_run lists the runs and about how long they take. --repeat trains finished runs once
more and compares their weights and scores, bit by bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import figures
from conditions import COHORT_UTTERANCES, CONDITIONS, SIZES, Condition, Size
from figures import Study
from torch.backends.cpu import get_cpu_capability
from tqdm import tqdm

from speechbrain_rev.bars import progress_bar
from speechbrain_rev.cli import run_script
from speechbrain_rev.data import audio_files, open_sources, read_manifest
from speechbrain_rev.devices import named_device
from speechbrain_rev.files import digest_of, read_rows, write_whole, writing_alone
from speechbrain_rev.hparams import OptimizerWarning, plain_settings, resolve
from speechbrain_rev.inference import FbankStatistics, SpeakerEmbedder
from speechbrain_rev.inference.evaluation import (
    cohort_files,
    extract,
    score,
    trial_files,
)
from speechbrain_rev.inference.runs import record_of

REPOSITORY = Path(__file__).parents[2]
HPARAMS = REPOSITORY / "hparams" / "minivox.yaml"
ONE_RUN = Path(__file__).with_name("one_run.py")
TRAIN_LIST, TRIAL_LISTS = "train_list.txt", ("veri_test.txt", "veri_test_*.txt")
ARCHIVE, REPEATED = "study.tar.xz", "repeated"
#: Instructions that x86 processors have in common: others sum in another order. Half
#: precision takes 8 times as long by them.
_AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "AVX2,STRICT",
}
#: A core for each run; a thread that waits takes none.
_THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}


@dataclass(frozen=True)
class Run:
    """One condition with one seed, in a folder of its own."""

    condition: Condition
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """The condition and the seed."""
        return f"{self.condition.name}, seed {self.seed}"

    @property
    def is_done(self) -> bool:
        """Whether it is scored."""
        return (self.folder / figures.SCORED).is_file()

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder.with_suffix(".log")

    @property
    def state(self) -> str:
        """How far it is."""
        begun = any(self.folder.glob("save/CKPT*/CKPT.yaml"))
        return "done" if self.is_done else "begun" if begun else "to train"


@dataclass(frozen=True)
class Schedule:
    """What a study trains and on what.

    Attributes
    ----------
    study : Study
        Its folder, conditions, seeds and lists.
    size : Size
        What its runs share.
    given : mapping
        Data and device, as settings of the recipe.
    """

    study: Study
    size: Size
    given: Mapping[str, Any]

    def runs(self) -> list[Run]:
        """List the runs: those of the references first, then the others seed by seed."""
        study = self.study
        rows = [(c, s) for s in study.seeds for c in study.conditions]
        rows.sort(key=lambda row: bool(row[0].references))
        return [Run(c, s, study.run_folder(c.name, s)) for c, s in rows]

    def settings(self, run: Run) -> dict[str, Any]:
        """Return the settings of a run, the later ones overriding the earlier."""
        arch, size = run.condition.arch, self.size
        widths = {"widths": list(size.widths[arch])} if arch in size.widths else {}
        return {
            **self.given,
            **size.settings,
            **widths,
            "arch": arch,
            **run.condition.settings,
            **size.of_conditions.get(run.condition.name, {}),
            "seed": run.seed,
            "output_folder": run.folder,
        }

    def command(self, run: Run) -> list[str]:
        """Return the command line of a run."""
        options = [f"--{k}={_as_text(v)}" for k, v in self.settings(run).items()]
        return [sys.executable, str(ONE_RUN), str(HPARAMS), *options, "--noprogressbar"]

    def forecast(self, runs: Sequence[Run]) -> str:
        """Estimate how long runs take, from finished ones or from the size."""
        done = [run for run in self.runs() if run.is_done]
        took = [
            sum(row["minutes"] for row in read_rows(r.folder / figures.EPOCHS))
            for r in done
        ]
        minutes = fmean(took) if took else self.size.minutes
        left = sum(not run.is_done for run in runs)
        if minutes is None:
            return f"{left} to train; how long a run takes is known once one is done."
        return (
            f"{left} to train, about {left * minutes / 60:.1f} hours one after another."
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(argv)
    schedule = schedule_of(options)
    runs, output = schedule.runs(), schedule.study.folder
    if options.dry_run:
        print("\n".join(f"{run.state:<9} {run.name}" for run in runs))
        print(f"{schedule.forecast(runs)} In {output}")
        return
    size = SIZES[options.size]
    advice = f"The size {options.size} is for {size.device}; --device takes another."
    named_device(schedule.given["device"], cpu=True, advice=advice)
    keep_setting(schedule, options.size, may_be_part=options.repeat)
    if options.repeat:
        repeat(schedule, runs)
        return
    print(f"{schedule.forecast(runs)} In {output}")
    lost = train(schedule, [run for run in runs if not run.condition.references])
    if lost:
        sys.exit("\n".join(["The references come first, and are not done:", *lost]))
    data, lists = schedule.given["data_folder"], schedule.given["trial_lists"]
    score_baselines(schedule.study, runs[0].folder, data, lists)
    figures.state_margins(schedule.study)
    lost = train(schedule, [run for run in runs if run.condition.references])
    collect(schedule)
    print(f"python recipes/study/report.py {output / ARCHIVE}")
    if lost:
        sys.exit("\n".join(["Not in it:", *lost, "The same command goes on."]))


def schedule_of(options: argparse.Namespace) -> Schedule:
    """Make the schedule that a command line asks for.

    Raises
    ------
    ValueError
        If a condition is not known or its references are missing, there are fewer than
        two seeds, or DATA lacks its lists.
    """
    size, data = SIZES[options.size], options.data.resolve()
    known = {one.name: one for one in CONDITIONS}
    names = options.conditions or list(known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--conditions {unknown[0]!r} is none of {', '.join(known)}.")
    for name in names:
        missing = [one for one in known[name].references if one not in names]
        if missing and not options.repeat:
            raise ValueError(
                f"--conditions {name!r} is compared with {missing[0]!r}: name that, too."
            )
    seeds = options.seeds or list(size.seeds)
    if len(set(seeds)) < (1 if options.repeat else 2):
        raise ValueError(f"--seeds {seeds[0]} shows no spread: give two or more.")
    lists = sorted(path for pattern in TRIAL_LISTS for path in data.glob(pattern))
    if not lists or not (data / TRAIN_LIST).is_file():
        raise ValueError(
            f"{data} lacks {TRAIN_LIST} or trial lists {' or '.join(TRIAL_LISTS)}. Give a "
            "corpus in VoxCeleb's layout with lines 'speaker path' and 'label path path'."
        )
    output = options.output_folder or REPOSITORY / "results" / f"study_{options.size}"
    given = {
        "data_folder": data,
        "train_list": data / TRAIN_LIST,
        "trial_lists": lists,
        "noise_folder": options.noise_folder and options.noise_folder.resolve(),
        "device": options.device or size.device,
    }
    chosen = [one for one in CONDITIONS if one.name in names]
    stems = [path.stem for path in lists]
    return Schedule(Study(output.resolve(), chosen, seeds, stems), size, given)


def keep_setting(schedule: Schedule, size: str, *, may_be_part: bool = False) -> None:
    """Write down what a study is; a folder holds one.

    Raises
    ------
    ValueError
        If the folder holds a study of another setting; a part of its seeds and conditions
        is taken where ``may_be_part``.
    """
    study, noise = schedule.study, schedule.given["noise_folder"]
    lists = [schedule.given["train_list"], *schedule.given["trial_lists"]]
    path = study.folder / figures.SETTING
    wanted = {
        "size": size,
        "device": schedule.given["device"],
        "seeds": list(study.seeds),
        "conditions": {
            run.condition.name: {
                key: value
                for key, value in schedule.settings(run).items()
                if key not in (*schedule.given, "seed", "output_folder")
            }
            for run in schedule.runs()
        },
        "hparams": _plain_settings(),
        "lists": {one.name: digest_of(one) for one in lists},
        "noise": noise and _names_below(noise),
    }
    wanted = json.loads(json.dumps(wanted))
    if not path.is_file():
        if may_be_part:
            raise ValueError(
                f"{study.folder} holds no study to repeat: it has no {figures.SETTING}."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(wanted, indent=1) + "\n")
        return
    kept = json.loads(path.read_text(encoding="utf-8"))
    if may_be_part:
        conditions = {n: kept["conditions"].get(n) for n in wanted["conditions"]}
        seeds = [seed for seed in wanted["seeds"] if seed in kept["seeds"]]
        kept = {**kept, "conditions": conditions, "seeds": seeds}
    if changed := [key for key in wanted if kept.get(key) != wanted[key]]:
        raise ValueError(
            f"{study.folder} holds a study with other {', '.join(changed)}. Give what it "
            "was begun with, or another --output_folder."
        )


def _plain_settings() -> dict[str, Any]:
    with warnings.catch_warnings():
        # Each run says what is unusual about its own.
        warnings.simplefilter("ignore", OptimizerWarning)
        return plain_settings(resolve(HPARAMS, {"data_folder": "data"}))


def _names_below(folder: Path) -> str:
    names = sorted(str(path.relative_to(folder)) for path in audio_files(folder))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def train(schedule: Schedule, runs: Sequence[Run]) -> list[str]:
    """Train and score runs that are not done, one after another.

    One that fails does not stop the others, unless none was ever done.

    Returns
    -------
    list of str
        What became of each that is not done.
    """
    lost: list[str] = []
    progress = progress_bar("runs", runs, unit="run", leave=True)
    for run in progress:
        if run.is_done:
            continue
        progress.set_postfix_str(run.name)
        try:
            # The process of the run holds the lock while it works.
            with writing_alone(run.folder):
                pass
        except ValueError as error:
            lost.append(f"{run.name}: {error}")
            continue
        if failure := call(schedule, run):
            lost.append(failure)
            tqdm.write(failure, file=sys.stderr)
            if not any(one.is_done for one in schedule.runs()):
                break
    return lost


def call(schedule: Schedule, run: Run) -> str | None:
    """Make one run in a process of its own; return how it failed, if it did."""
    run.folder.mkdir(parents=True, exist_ok=True)
    half = schedule.settings(run).get("precision", "fp32") != "fp32"
    has_avx2 = get_cpu_capability() in ("AVX2", "AVX512")
    instructions = _AVX2 if has_avx2 and not half else {}
    environment = {**instructions, **os.environ, **_THREADS}
    with run.log.open("ab") as log:
        ended = subprocess.run(
            schedule.command(run), stdout=log, stderr=log, env=environment, check=False
        )
    if ended.returncode == 0 and run.is_done:
        return None
    how = f"ended with status {ended.returncode}"
    if ended.returncode < 0:
        how = f"was ended by {signal.Signals(-ended.returncode).name}"
    last = run.log.read_text(errors="replace").strip().splitlines()[-1:]
    return f"{run.name}, {how}: {' '.join(last)} (all of it: {run.log})."


def score_baselines(
    study: Study, run: Path, data: Path, trial_lists: Sequence[Path]
) -> None:
    """Score trial lists by statistics of each utterance's filterbanks, once.

    Parameters
    ----------
    study : Study
        Holds the scores.
    run : Path
        A run, whose utterances make the cohort of AS-Norm. Filterbanks have as many bands
        as its encoder is given.
    data : Path
        Holds the speech of the trial lists.
    trial_lists : sequence of Path
        What is scored.
    """
    manifest = run / "save" / "train.csv"
    speakers = {item.ID: item.spk_id for item in read_manifest(manifest)}
    settings = record_of(run).settings
    sizes = {name: settings[name] for name in ("n_mels", "sample_rate")}
    top_n = settings["cohort_top_n"]
    for name, with_mean in figures.BASELINES.items():
        folder = study.baseline_folder(name)
        if (folder / figures.SCORED).is_file():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        statistics = FbankStatistics(**sizes, mean=with_mean)
        embedder = SpeakerEmbedder(
            statistics, device="cpu", fingerprint=f"{name} {sizes}"
        )
        tested = trial_files(trial_lists, open_sources(data))
        cohort = cohort_files(manifest, COHORT_UTTERANCES)
        extract(embedder, folder, tested, cohort)
        score(folder, trial_lists, speakers, cohort_top_n=top_n, replicates=0)


def collect(schedule: Schedule) -> None:
    """Compute the figures of all runs that are scored, and pack them."""
    study, runs = schedule.study, [run for run in schedule.runs() if run.is_done]
    peaks = {
        run.condition.name: {"peak_bytes": int((run.folder / figures.PEAK).read_text())}
        for run in runs
        if run.seed == study.seeds[0]
    }
    origins = [json.loads((run.folder / figures.ORIGIN).read_text()) for run in runs]
    code = {json.dumps(one): one for entries in origins for one in entries}
    results = {
        "figures": figures.compute(study),
        "setting": {"code": list(code.values())},
    }
    for name, content in ((figures.MEASURES, peaks), (figures.RESULTS, results)):
        write_whole(study.folder / name, json.dumps(content, indent=1) + "\n")
    figures.pack(study.folder, study.folder / ARCHIVE)


def repeat(schedule: Schedule, runs: Sequence[Run]) -> None:
    """Train finished runs once more below the study, and compare.

    Raises
    ------
    ValueError
        If one of them is not done.
    """
    if missing := [run.name for run in runs if not run.is_done]:
        raise ValueError(
            f"Only what is done can be repeated: {'; '.join(missing)} is not."
        )
    again = replace(
        schedule, study=replace(schedule.study, folder=schedule.study.folder / REPEATED)
    )
    lost = train(again, again.runs())
    for run, copy in zip(runs, again.runs(), strict=True):
        if copy.is_done:
            other = ", ".join(figures.differing(run.folder, copy.folder))
            print(f"{run.name}: {f'other {other}' if other else 'the same bits'}")
            lost += [f"{run.name} came out otherwise."] * bool(other)
    if lost:
        sys.exit("\n".join(lost))


def _as_text(value: Any) -> str:
    """Write a setting for the command line, where texts stand as they are."""
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    return json.dumps(value, default=os.fspath)


def _existing_folder(text: str) -> Path:
    if not text or not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = _existing_folder
    parser.add_argument("data", type=folder, help="corpus with its lists")
    parser.add_argument(
        "--noise_folder",
        metavar="FOLDER",
        type=folder,
        help="noise for augmentation; default: none",
    )
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        default="small",
        help="small: reduced widths, for CPUs; full: as published, for a GPU",
    )
    parser.add_argument(
        "--output_folder",
        metavar="FOLDER",
        type=Path,
        help="default: results/study_SIZE",
    )
    parser.add_argument("--device", help="default: that of the size")
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="default: those of the size"
    )
    parser.add_argument("--conditions", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument(
        "--dry_run", action="store_true", help="list the runs; train nothing"
    )
    parser.add_argument(
        "--repeat",
        action="store_true",
        help="train the chosen runs of a finished study once more, and compare",
    )
    return parser


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    # The run in progress ends with this process.
    signal.signal(signal.SIGTERM, _leave)
    run_script(main)
