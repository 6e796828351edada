"""Pictures of benchmarks show what they were given."""

import pytest

from tests.benchmarks.pictures import (
    gradient_angles,
    loss_curves,
    time_against_memory,
    time_by_batch,
)
from tests.pictures import points_of, texts_of

WORDS = {"title": "T", "source": "S"}
SHORT = {"store": {2: 0.5}, "planned": {4: 0.6, 2: 0.5}}
LONG = {"planned": {2: 0.5}, "compiled": {2: 0.4, 8: 0.4}}
CURVES = {
    "stored": [(0.06, 1.0, "")],
    "ours": [(0.01, 1.5, "1 MB"), (0.02, 1.3, "2 MB")],
}


def test_a_point_is_the_mean_up_to_its_own_step_and_curves_are_named(drawn):
    curves = {"ours": [1.0, 3.0, 8.0], "plain": [1.0, 1.0, 1.0]}
    figure = drawn(loss_curves, curves, mean_of=2, **WORDS)
    (axes,), (legend,) = figure.axes, figure.legends
    assert points_of(axes.lines[0]) == [(2, 2.0), (3, 5.5)]
    assert "mean of 2" in axes.get_xlabel()
    assert texts_of(legend.texts) == ["ours", "plain"]


def height(axes, angle):
    """Where an angle is on the axis, from 0 at its foot to 1."""
    x, y = axes.transData.transform((0, angle))
    return axes.transAxes.inverted().transform((x, y))[1]


def test_angles_lie_on_a_logarithmic_axis_and_zero_below_it(drawn):
    curves = {"float": [(0, 2e-5), (10, 3.0)], "exact": [(0, 0.0), (10, 0.0)]}
    figure = drawn(gradient_angles, curves, **WORDS)
    (axes,), (legend,) = figure.axes, figure.legends
    assert 0 < height(axes, 0.0) < height(axes, 2e-5) - 0.05
    steps = [height(axes, 10.0**k) - height(axes, 10.0 ** (k - 1)) for k in (-2, 0)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)
    assert height(axes, 3.0) < 1
    assert [points_of(line) for line in axes.get_lines()] == list(curves.values())
    assert texts_of(legend.texts) == ["float", "exact"]


@pytest.mark.parametrize("angles", [[0.0, 0.0], [1e-9, 180.0]])
def test_angles_of_zero_alone_and_of_any_size_are_within_the_axes(drawn, angles):
    points = list(enumerate(angles))
    (axes,) = drawn(gradient_angles, {"ours": points}, **WORDS).axes
    assert all(0 < height(axes, angle) <= 1 for angle in angles)


def test_a_way_has_one_colour_in_all_panels_and_its_points_by_batch(drawn):
    figure = drawn(time_by_batch, {"revnet57": SHORT, "df_revnet89": LONG}, **WORDS)
    colours = []
    for axes, curves in zip(figure.axes, (SHORT, LONG), strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines) == ["store", "planned", "compiled"]
        for name, line in lines.items():
            assert points_of(line) == sorted(curves.get(name, {}).items())
        colours.append([line.get_color() for line in lines.values()])
    assert colours[0] == colours[1]
    assert len(set(colours[0])) == 3
    labels = texts_of(figure.axes[1].get_xticklabels())
    assert {"2", "4", "8"} <= set(labels)


def test_each_panel_has_its_curves_and_words_beside_their_points(drawn):
    panels = {"revnet57": CURVES, "other": CURVES | {"later": [(0.03, 1.9, "")]}}
    figure = drawn(time_against_memory, panels, **WORDS)
    for axes, curves in zip(figure.axes, panels.values(), strict=True):
        shown = [points_of(line) for line in axes.lines]
        assert shown == [[point[:2] for point in points] for points in curves.values()]
        places = {
            t.get_text().strip(): t.xy for t in axes.texts if t.get_text().strip()
        }
        assert places == {"1 MB": (0.01, 1.5), "2 MB": (0.02, 1.3)}
    (legend,) = figure.legends
    assert texts_of(legend.texts) == ["stored", "ours", "later"]
