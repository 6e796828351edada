"""Judge the study of docs/study.md by margins of more draws: python -m tests.docs.study_margins.

Its own are of 1,000 draws and stay as they were stated; this says what depends on that.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

from speechbrain_rev import scoring
from tests.docs.study_figures import unpacked
from tests.recipes.study import study

#: Other draws, to see how far their chance moves a margin.
SEEDS = 50
LEVEL = 0.05


def main() -> None:
    """Print margins of EERs, verdicts that differ, and how many hold by Holm's method."""
    figures, runs = study("results.figures"), study("results.runs")
    with unpacked() as (whole, _):
        stated = figures.read_margins(whole)
        more = copy.deepcopy(stated)
        print(
            "EER margins in points: stated, of more draws, deviation by chance in percent"
        )
        for name, lists in stated["margins"].items():
            for trials, rates in lists.items():
                of_seeds = whole.rates(name, trials, figures.METHOD)
                for rate in rates:
                    margin = scoring.detectable_margin(of_seeds[rate])
                    more["margins"][name][trials][rate] = margin
                eer, draws = of_seeds[runs.EER], stated["made_of"]["replicates"]
                chance = [
                    scoring.detectable_margin(eer, seed=seed, draws=draws)
                    for seed in range(SEEDS)
                ]
                print(
                    f"{name}, {trials}: {100 * rates[runs.EER]:.2f}, "
                    f"{100 * more['margins'][name][trials][runs.EER]:.2f}, "
                    f"{100 * np.std(chance) / np.mean(chance):.1f}"
                )
        before = figures.compute_figures(whole)["comparisons"]
        (whole.folder / "margins.json").write_text(json.dumps(more))
        after = figures.compute_figures(whole)["comparisons"]
    pairs = list(zip(verdicts(before), verdicts(after), strict=True))
    print(f"{sum(a != b for a, b in pairs)} of {len(pairs)} verdicts differ")
    for words, comparisons in (("stated", before), ("of more draws", after)):
        held, tests = holding(comparisons, runs.EER)
        print(f"margins {words}: {held} of {tests} tests hold by Holm's method")


def verdicts(comparisons: list[dict[str, Any]]) -> list[str]:
    """List what was found within the margin, by comparison, list and rate."""
    return [
        rate["within"]
        for comparison in comparisons
        for rates in comparison["differences"].values()
        for rate in rates.values()
    ]


def holding(comparisons: list[dict[str, Any]], rate: str) -> tuple[int, int]:
    """Count the tests that hold when they are corrected for their number, and all."""
    corrected = [
        rates[rate]["p_holm"]
        for comparison in comparisons
        if not comparison["control"]
        for rates in comparison["differences"].values()
        if rates[rate]["p_holm"] is not None
    ]
    return sum(p < LEVEL for p in corrected), len(corrected)


if __name__ == "__main__":
    main()
