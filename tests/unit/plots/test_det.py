from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import norm

from speechbrain_rev.plots import det_plot
from speechbrain_rev.scoring import det_curve, eer
from tests.pictures import texts_of

TIED = SimpleNamespace(false_alarm=np.array([1.0, 0.0]), miss=np.array([0.0, 1.0]))


def scored(trials, distance, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.append(rng.integers(0, 2, size=trials - 2), [0, 1])
    return rng.normal(size=trials) + distance * labels, labels


def marks_of(axes):
    return [line.get_xydata() for line in axes.lines if line.get_marker() == "o"]


def test_curves_have_the_eer_of_scoring_and_axes_of_normal_deviates(drawn):
    systems = {"cosine": scored(300, 2), "as_norm": scored(300, 3, seed=1)}
    figure = drawn(det_plot, {name: det_curve(*s) for name, s in systems.items()})
    rates = {name: eer(*system) for name, system in systems.items()}
    (legend,), (axes,) = figure.legends, figure.axes
    labels = [f"{name}: EER {100 * rate:.2f} %" for name, rate in rates.items()]
    assert texts_of(legend.texts) == labels
    for mark, rate in zip(marks_of(axes), rates.values(), strict=True):
        np.testing.assert_allclose(mark, [[norm.ppf(rate)] * 2], rtol=1e-9)
    percents = [float(text) for text in texts_of(axes.get_xticklabels())]
    np.testing.assert_allclose(axes.get_xticks(), norm.ppf(np.divide(percents, 100)))
    assert axes.get_xlim() == axes.get_ylim()


def test_a_curve_of_voxceleb_size_is_thinned_without_moving_it(drawn):
    curve = det_curve(*scored(580_000, 4))
    (axes,) = drawn(det_plot, {"ours": curve}).axes
    line = axes.lines[1].get_xydata()
    assert 100 < len(line) < 20_000
    # A pixel is 0.005 deviates.
    for rate in (0.002, 0.01, 0.05, 0.2):
        full = np.interp(rate, curve.miss, curve.false_alarm)
        shown = np.interp(norm.ppf(rate), line[:, 1], line[:, 0])
        assert shown == pytest.approx(norm.ppf(full), abs=2e-3)


@pytest.mark.parametrize("distance", [-3, 100])
def test_the_worst_and_the_best_systems_are_drawn_within_the_axes(drawn, distance):
    curve = det_curve(*scored(200, distance))
    (axes,) = drawn(det_plot, {"ours": curve, "all tied": TIED}).axes
    low, high = axes.get_xlim()
    assert np.isfinite([low, high]).all()
    assert np.all((marks_of(axes)[1] >= low) & (marks_of(axes)[1] <= high))
