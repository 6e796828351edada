"""Pictures of a corpus, of the course of a training run, and of error rates."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import norm

from speechbrain_rev.plots import corpus_histograms, det_plot, training_curves
from speechbrain_rev.scoring import det_curve, eer
from tests.pictures import points_of, texts_of

LABELS = {
    "training loss": "train_loss",
    "validation EER, %": "valid_eer_percent",
    "learning rate": "lr",
    "margin, radians": "margin",
}
TIED = SimpleNamespace(false_alarm=np.array([1.0, 0.0]), miss=np.array([0.0, 1.0]))


@pytest.mark.parametrize("seconds", [[2.0], [0.25, 0.5, 8.0], [1.5] * 7, [1.0, 4000.0]])
def test_each_utterance_and_each_speaker_is_in_one_bar(drawn, seconds):
    utterances = [1, 1, 2, 500]
    figure = drawn(corpus_histograms, seconds, utterances, title="T", source="S")
    left, right = figure.axes
    for axes, values in ((left, seconds), (right, utterances)):
        bars = [bar for bar in axes.patches if bar.get_height()]
        assert sum(bar.get_height() for bar in bars) == len(values)
        for value in values:
            assert any(0 <= value - bar.get_x() <= bar.get_width() for bar in bars)
    assert left.get_xlabel() == "seconds of an utterance"
    assert right.get_ylabel() == "speakers"


def epochs(count, **changes):
    return [
        {"epoch": n, "train_loss": 9.0 / n, "lr": 0.1**n, "margin": 0.1 * n,
         "valid_eer_percent": 30.0 / n} | changes
        for n in range(1, count + 1)
    ]  # fmt: skip


def test_training_curves_show_each_quantity_by_epoch_in_order(drawn):
    rows = epochs(5)
    figure = drawn(training_curves, rows[::-1])
    for axes, (label, key) in zip(figure.axes, LABELS.items(), strict=True):
        assert axes.get_ylabel() == label
        assert points_of(axes.lines[0]) == [(row["epoch"], row[key]) for row in rows]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["", "lowest 6.00 % in epoch 5", "", ""]
    # A run without validation has no panel for it.
    rows = epochs(3, valid_eer_percent=None)
    del rows[1]["valid_eer_percent"]
    labels = [axes.get_ylabel() for axes in drawn(training_curves, rows).axes]
    assert labels == ["training loss", "learning rate", "margin, radians"]


def test_one_epoch_and_quantities_of_zero_or_fixed_can_be_drawn(drawn):
    fixed = {"margin": 0.0, "valid_eer_percent": 0.0}
    *_, margin = drawn(training_curves, epochs(1, **fixed)).axes
    low, high = margin.get_xlim()
    assert [tick for tick in margin.get_xticks() if low <= tick <= high] == [1]
    assert margin.get_ylim()[0] == 0


def scored(trials, distance, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.append(rng.integers(0, 2, size=trials - 2), [0, 1])
    return rng.normal(size=trials) + distance * labels, labels


def test_curves_have_the_eer_of_scoring_and_axes_of_normal_deviates(drawn):
    systems = {"cosine": scored(300, 2), "as_norm": scored(300, 3, seed=1)}
    figure = drawn(det_plot, {name: det_curve(*s) for name, s in systems.items()})
    rates = {name: eer(*system) for name, system in systems.items()}
    (legend,), (axes,) = figure.legends, figure.axes
    labels = [f"{name}: EER {100 * rate:.2f} %" for name, rate in rates.items()]
    assert texts_of(legend.texts) == labels
    # A curve meets the line of equal rates at its EER.
    for line, rate in zip(axes.lines[1:], rates.values(), strict=True):
        false_alarm, miss = line.get_data()
        crossing = np.interp(0.0, miss - false_alarm, miss)
        assert norm.cdf(crossing) == pytest.approx(rate, abs=2e-3)
    percents = [float(text) for text in texts_of(axes.get_xticklabels())]
    np.testing.assert_allclose(axes.get_xticks(), norm.ppf(np.divide(percents, 100)))
    assert axes.get_xlim() == axes.get_ylim()


@pytest.mark.parametrize("distance", [-3, 100])
def test_the_worst_and_the_best_systems_are_drawn_in_finite_axes(drawn, distance):
    curve = det_curve(*scored(200, distance))
    (axes,) = drawn(det_plot, {"ours": curve, "all tied": TIED}).axes
    assert np.isfinite(axes.get_xlim()).all()
    assert all(np.isfinite(line.get_xydata()).all() for line in axes.lines)
    assert len(texts_of(axes.get_xticklabels())) > 3
