"""Train some of a study again, and say whether the same weights and scores come out.

python recipes/study/repeat.py STUDY DATA [--noise NOISE] [--seeds 1] [--conditions NAME]

STUDY is the --output of run.py, here or unpacked from an archive. What is chosen is trained
from its beginning below STUDY/repeated, and its weights, to the bit, and scores, as they are
written, are compared with those of the study. What was found is added to
STUDY/repeated.json, and to the report when run.py writes that again. The same processor and
versions of packages give the same, others need not (running/determinism.py has what was
seen); --twice trains what came out otherwise once more, which tells another machine from
chance. Given again, it goes on; what was begun by other code or elsewhere, and is not done,
it asks to remove.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Read by OpenMP when torch is loaded: a thread that waits takes no core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "VoxCeleb"))

from design.conditions import comparisons, conditions
from design.sizes import SIZES
from results.files import REPEATED, SETTING
from results.origins import machines_of
from results.repetitions import once_more
from results.runs import Study
from running.command_line import (
    HPARAMS,
    existing_folder,
    positive,
    settings_of_all,
    trial_lists,
)
from running.orphans import end_in_order
from running.repetition import repeat
from running.schedule import runs_of
from running.setting import check_setting, setting_of

from speechbrain_rev.cli import run_script
from speechbrain_rev.locks import writing_alone
from speechbrain_rev.whole_files import write_whole

_ONCE_MORE = "differing_once_more"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(argv)
    output = options.study.resolve()
    kept = json.loads(_setting_file(output).read_text(encoding="utf-8"))
    size = SIZES[kept["size"]]
    lists = trial_lists(options.data)
    names = [path.stem for path in lists]
    study = Study(output, conditions(), comparisons(), size.seeds, names)
    settings = settings_of_all(options.data, lists, options.noise, kept["device"])
    described = setting_of(study, kept["size"], size, HPARAMS, settings)
    noise = kept["noise"] and kept["noise"]["folder"]
    check_setting(
        output,
        described,
        f"Give what it was run with: {kept['data']}, --noise {noise}; if that is elsewhere "
        "now, move the study by archive.py. Other settings or sizes are another study.",
    )
    chosen = chosen_runs(study, options.seeds, options.conditions)
    print(f"{len(chosen)} trainings again, {options.jobs} at a time, of {output}")
    with writing_alone(output):
        found, failed = repeat(
            study,
            chosen,
            settings,
            size,
            HPARAMS,
            jobs=options.jobs,
            twice=options.twice,
            after=lambda one: keep(output, [one]),
        )
    for one in found:
        print(f"{one['name']}: {told(one)}")
    if differ := [one for one in found if one["differing"]]:
        failed.append(f"{len(differ)} of {len(found)} trainings came out otherwise.")
    if failed:
        sys.exit("\n".join(failed))


def chosen_runs(
    study: Study, seeds: Sequence[int], names: Sequence[str] | None
) -> list[Any]:
    """List the trainings of some seeds and conditions, in the order that they are given.

    All conditions are meant where none is.

    Raises
    ------
    ValueError
        If the study has no such seed or condition, or has not scored one of them.
    """
    if unknown := set(seeds) - set(study.seeds):
        raise ValueError(
            f"The study has no seed {', '.join(map(str, sorted(unknown)))}; it has "
            f"{', '.join(map(str, study.seeds))}."
        )
    wanted = [study.condition(name) for name in names or ()] or study.conditions
    places = {(run.seed, run.condition.name): run for run in runs_of(study)}
    asked = [(seed, condition.name) for seed in seeds for condition in wanted]
    runs = [places[place] for place in dict.fromkeys(asked)]
    if missing := [run.name for run in runs if not run.is_done]:
        raise ValueError(
            f"The study has not scored {'; '.join(missing)}: there is nothing to compare "
            "with. Choose others by --seeds and --conditions, or let run.py go on."
        )
    return runs


def told(found: Mapping[str, Any]) -> str:
    """Say what came out of a training that was done again."""
    if not found["differing"]:
        return "the same weights and scores"
    then = once_more(found)
    if "weights" not in found["differing"]:
        off = f"{found['score_difference']:.1g}"
        return f"the same weights; scores are off by {off}{then}"
    rates = [
        f"{trials} {100 * first:.2f} and {100 * found['eer_again'][trials]:.2f}"
        for trials, first in found["eer"].items()
    ]
    apart = found["distance_over_way"]
    far = "" if apart is None else f", {100 * apart:.0f} % of the way apart"
    return f"other weights{far}; EER in percent: {', '.join(rates)}{then}"


def keep(output: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Write down what came out; it replaces what did on the same machines before.

    What is known of a training's repetition on its own machine stays.
    """
    path = output / REPEATED
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    new = {_place(one): dict(one) for one in found}
    for old in kept:
        one = new.get(_place(old))
        if one and one[_ONCE_MORE] is None and _is_same(old, one):
            one[_ONCE_MORE] = old.get(_ONCE_MORE)
    kept = [one for one in kept if _place(one) not in new]
    write_whole(path, json.dumps([*kept, *new.values()], indent=1) + "\n")


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether the same came out of both repetitions, as far as is written down."""
    keys = ("weights", "weights_again", "eer_again", "score_difference")
    return all(one.get(key) == other.get(key) for key in keys)


def _place(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Say of which training something was found, and on which machines."""
    origins = found["origin"], found["origin_again"]
    return found["name"], *map(machines_of, origins)


def _setting_file(output: Path) -> Path:
    path = output / SETTING
    if not path.is_file():
        raise ValueError(
            f"{output} holds no study: it lacks {SETTING}. Give the --output of run.py, or "
            "where archive.py unpacked one."
        )
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", type=existing_folder, help="--output of run.py")
    parser.add_argument("data", type=existing_folder, help="the corpus it was run on")
    parser.add_argument(
        "--noise", type=existing_folder, help="the noise it was run with; default: none"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="default: the first"
    )
    parser.add_argument(
        "--conditions", nargs="+", metavar="NAME", help="default: all of the study"
    )
    parser.add_argument(
        "--twice",
        action="store_true",
        help="train once more, on this machine, what comes out otherwise than in the "
        "study: whether it is chance, or another machine",
    )
    parser.add_argument("--jobs", type=positive, default=2, help="trainings at a time")
    return parser


if __name__ == "__main__":
    end_in_order()
    run_script(main)
