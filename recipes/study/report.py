"""Write the tables and pictures of a study from its archive.

python recipes/study/report.py results/study_small/study.tar.xz [--page docs/study.md]

Without --page, report.md and its pictures are written beside the archive. With it, the
tables between the page's markers are written anew, and the pictures beside the page. The
sentences of a page are written by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "VoxCeleb"))

from conditions import Condition
from figures import EER, EPOCHS, MEASURES, METHOD, RESULTS, YES, read_archive
from pictures import Difference, curves_over_seeds, forest_plot

from speechbrain_rev.cli import run_script
from speechbrain_rev.files import write_whole
from speechbrain_rev.sizes import MIB

#: Of a test; a verdict that holds at it when corrected for the number of tests is bold.
LEVEL = 0.05
#: The untrained baseline that errs least.
UNTRAINED = "mean and deviation"
_CURVES = {"train_loss": "training loss", "train_accuracy_percent": "accuracy, %"}
_TEMPLATE = """# Study

<!-- table: study_compared -->
<!-- end -->

<!-- table: study_rates -->
<!-- end -->
"""


@dataclass(frozen=True)
class Results:
    """What an archive holds of a study.

    Attributes
    ----------
    figures : mapping
        As ``figures.compute`` gives them.
    measures : mapping
        The memory of a step of each condition.
    code : sequence of mapping
        By which code and where it was trained.
    epochs : mapping
        The log of each run, by condition and seed.
    """

    figures: Mapping[str, Any]
    measures: Mapping[str, Any]
    code: Sequence[Mapping[str, Any]]
    epochs: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]

    @classmethod
    def of(cls, archive: Path) -> Results:
        """Read an archive."""
        texts = read_archive(archive)
        results = json.loads(texts[RESULTS])
        figures = results["figures"]
        logs = {
            (name, seed): texts[f"runs/{Condition(name).folder}/{seed}/{EPOCHS}"]
            for name in figures["conditions"]
            for seed in figures["seeds"]
        }
        epochs = {
            key: [json.loads(line) for line in log.splitlines()]
            for key, log in logs.items()
        }
        measures = json.loads(texts[MEASURES])
        return cls(figures, measures, results["setting"]["code"], epochs)


def compared_table(results: Results) -> str:
    """Show what came of each comparison on each list."""
    lists = list(results.figures["baseline"][UNTRAINED])
    heads = ["candidate", "reference"]
    for trials in lists:
        heads += [trials, "bound", "margin", "within"]
    rows = []
    for one in results.figures["comparisons"]:
        row = [one["candidate"], one["reference"]]
        for trials in lists:
            rate = one["differences"][trials][EER]
            numbers = _percent(rate["upper"]), _percent(rate["margin"])
            row += [_interval(rate), *numbers, _verdict(one, rate)]
        rows.append(row)
    return _markdown(heads, rows)


def _verdict(comparison: Mapping[str, Any], rate: Mapping[str, Any]) -> str:
    if comparison["must_be_identical"]:
        return "equal bits" if comparison["identical"] else "NOT EQUAL"
    if comparison["control"]:
        return "worse, as it must" if rate["higher"] else "NOT SEEN"
    if rate["within"] != YES:
        return str(rate["within"])
    holds = rate["p_holm"] is not None and rate["p_holm"] < LEVEL
    wide = ", wide" * rate["wide"]
    return f"{'**yes**' if holds else YES}{wide}{', but worse' * rate['higher']}"


def rates_table(results: Results) -> str:
    """Show the EER of each condition, and the memory of its step."""
    figures = results.figures
    untrained = figures["baseline"][UNTRAINED]
    lists = list(untrained)
    rows = [
        [
            f"{UNTRAINED} of filterbanks, untrained",
            "",
            *(_percent(untrained[trials][METHOD][EER]) for trials in lists),
            "",
        ]
    ]
    for name, condition in figures["conditions"].items():
        last = [results.epochs[name, seed][-1] for seed in figures["seeds"]]
        accuracy = fmean(epoch["train_accuracy_percent"] for epoch in last)
        rates = [_interval(condition["rates"][trials][METHOD][EER]) for trials in lists]
        peak = results.measures[name]["peak_bytes"] / MIB
        rows.append([name, f"{accuracy:.0f}", *rates, f"{peak:.1f}"])
    return _markdown(["condition", "training accuracy, %", *lists, "peak, MiB"], rows)


#: What goes between the markers of a page.
TABLES: Mapping[str, Callable[[Results], str]] = {
    "study_compared": compared_table,
    "study_rates": rates_table,
}


def filled(text: str, results: Results) -> str:
    """Write the tables of a page anew, each between ``table: NAME`` and ``end``.

    Raises
    ------
    ValueError
        If the page has no place for one of them.
    """
    for name, table in TABLES.items():
        before, mark, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(
                f"The page has no place for the table {name}. Write "
                f"'<!-- table: {name} -->' and '<!-- end -->' where it goes."
            )
        text = f"{before}{mark}{table(results)}\n{end}{after}"
    return text


def draw(results: Results, folder: Path) -> list[str]:
    """Draw differences and training curves of what is compared with each reference.

    Returns
    -------
    list of str
        The names of the files.
    """
    machines = [f"{one['processor']}, torch {one['torch']}" for one in results.code]
    source = f"{'; '.join(dict.fromkeys(machines))}; since {results.code[0]['since']}."
    comparisons, drawn = results.figures["comparisons"], []
    for name in dict.fromkeys(one["margin_of"] for one in comparisons):
        drawn += [f"study_differences_{name}.png", f"study_training_{name}.png"]
        rows = [one for one in comparisons if one["margin_of"] == name]
        _draw_differences(rows, folder / drawn[-2], source)
        candidates = [o["candidate"] for o in comparisons if o["reference"] == name]
        _draw_curves(results, name, candidates, folder / drawn[-1], source)
    return drawn


def _draw_differences(
    comparisons: Sequence[Mapping[str, Any]], path: Path, source: str
) -> None:
    panels = {}
    for trials in comparisons[0]["differences"]:
        rates = [one["differences"][trials][EER] for one in comparisons]
        rows = [
            Difference(
                _subtraction(one),
                mean=100 * rate["mean"],
                low=100 * rate["low"],
                high=100 * rate["high"],
                bound=100 * rate["upper"],
                shown=rate["within"] == YES,
            )
            for one, rate in zip(comparisons, rates, strict=True)
        ]
        panels[trials] = 100 * rates[0]["margin"], rows
    forest_plot(
        panels,
        path,
        unit="percentage points",
        title="EER, AS-Norm: candidate less reference",
        source="95 % intervals over speakers and seeds, and the one-sided 95 % bound; "
        f"filled where that is below the margin of {comparisons[0]['margin_of']}, and the "
        f"study can tell. {source}",
    )


def _subtraction(comparison: Mapping[str, Any]) -> str:
    role = "control: " if comparison["control"] else ""
    names = comparison["candidate"], comparison["reference"]
    return role + " \N{MINUS SIGN} ".join(names)


def _draw_curves(
    results: Results,
    reference: str,
    candidates: Sequence[str],
    path: Path,
    source: str,
) -> None:
    seeds = results.figures["seeds"]
    panels = {
        label: {
            name: [[epoch[key] for epoch in results.epochs[name, s]] for s in seeds]
            for name in [reference, *candidates]
        }
        for key, label in _CURVES.items()
    }
    curves_over_seeds(
        panels,
        path,
        title=f"Training of {reference} and what is compared to it",
        source=f"Mean and range of {len(seeds)} seeds. {source}",
    )


def _interval(rate: Mapping[str, float]) -> str:
    mean, low, high = (_percent(rate[key]) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _percent(rate: float) -> str:
    """Write a rate or a difference in percent, never as a negative zero."""
    return f"{round(100 * rate, 2) + 0.0:.2f}"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archive", type=Path, help="study.tar.xz of run.py")
    parser.add_argument("--page", type=Path, help="whose tables are written anew")
    options = parser.parse_args(argv)
    results = Results.of(options.archive)
    page = options.page or options.archive.with_name("report.md")
    text = page.read_text(encoding="utf-8") if options.page else _TEMPLATE
    pictures = draw(results, page.parent)
    if not options.page:
        text += "".join(f"\n![{name}]({name})\n" for name in pictures)
    write_whole(page, filled(text, results))
    print(page)


if __name__ == "__main__":
    run_script(main)
