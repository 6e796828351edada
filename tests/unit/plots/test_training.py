import pytest

from speechbrain_rev.plots import (
    Difference,
    curves_over_seeds,
    forest_plot,
    gradient_angles,
    loss_curves,
    training_curves,
)

from .names import points_of, texts_of

WORDS = {"title": "T", "source": "S"}
ROWS = [
    Difference("a - b", 0.1, -0.4, 0.6, 0.5, shown=True),
    Difference("c - b", 0.9, 0.2, 1.6, 1.5, shown=False),
]
LABELS = {
    "training loss": "train_loss",
    "validation EER, %": "valid_eer_percent",
    "learning rate": "lr",
    "margin, radians": "margin",
}


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
    titles = [axes.get_title(loc="right") for axes in figure.axes]
    assert titles == ["", "lowest 6.00 % in epoch 5", "", ""]
    # A run without validation has no panel for it.
    rows = epochs(3, valid_eer_percent=None)
    del rows[1]["valid_eer_percent"]
    labels = [axes.get_ylabel() for axes in drawn(training_curves, rows).axes]
    assert labels == ["training loss", "learning rate", "margin, radians"]


def test_one_epoch_and_quantities_of_zero_or_fixed_can_be_drawn(drawn):
    fixed = {"lr": 0.0, "margin": 0.5, "valid_eer_percent": 0.0}
    *_, margin = drawn(training_curves, epochs(1, **fixed)).axes
    low, high = margin.get_xlim()
    assert [tick for tick in margin.get_xticks() if low <= tick <= high] == [1]
    low, high = margin.get_ylim()
    assert low < 0 < 0.5 < high < 1


def test_a_point_is_the_mean_up_to_its_own_step_and_curves_are_named(drawn):
    curves = {"ours": [1.0, 3.0, 8.0], "plain": [1.0, 1.0, 1.0]}
    (axes,) = drawn(loss_curves, curves, first_step=301, mean_of=2, **WORDS).axes
    assert points_of(axes.lines[0]) == [(302, 2.0), (303, 5.5)]
    assert "mean of 2" in axes.get_ylabel()
    assert texts_of(axes.get_legend().texts) == ["ours", "plain"]


def test_a_line_is_the_mean_over_seeds_and_its_band_goes_from_least_to_most(drawn):
    seeds = {"loss": {"ours": [[4.0, 3.0], [6.0, 2.0]]}, "zero": {"ours": [[0.0]]}}
    axes, other = drawn(curves_over_seeds, seeds, **WORDS).axes
    (line,), (band,) = axes.get_lines(), axes.collections
    assert points_of(line) == [(1, 5.0), (2, 2.5)]
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
    assert corners == {(1, 4.0), (1, 6.0), (2, 3.0), (2, 2.0)}
    assert other.get_ylim()[0] < 0


def test_a_run_has_one_look_in_all_panels_and_each_its_own(drawn):
    names = [f"n{i}" for i in range(17)]
    first = {name: [[1.0, 2.0]] for name in names}
    panels = {"loss": first, "accuracy": dict(reversed(first.items()))}
    looks = [
        {x.get_label(): (x.get_color(), x.get_linestyle()) for x in axes.get_lines()}
        for axes in drawn(curves_over_seeds, panels, **WORDS).axes
    ]
    assert looks[0] == looks[1]
    assert len(set(looks[0].values())) == len(names)


def height(axes, angle):
    """Where an angle is on the axis, from 0 at its foot to 1."""
    x, y = axes.transData.transform((0, angle))
    return axes.transAxes.inverted().transform((x, y))[1]


def test_angles_lie_on_a_logarithmic_axis_and_zero_below_it(drawn):
    curves = {"float": [(0, 2e-5), (10, 3.0)], "exact": [(0, 0.0), (10, 0.0)]}
    (axes,) = drawn(gradient_angles, curves, **WORDS).axes
    assert 0 < height(axes, 0.0) < height(axes, 2e-5) - 0.05
    assert axes.get_yticklabels()[0].get_text() == "0"
    steps = [height(axes, 10.0**k) - height(axes, 10.0 ** (k - 1)) for k in (-2, 0)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)
    assert height(axes, 3.0) < 1
    assert [points_of(line) for line in axes.get_lines()] == list(curves.values())
    assert texts_of(axes.get_legend().texts) == ["float", "exact"]


@pytest.mark.parametrize("angles", [[0.0, 0.0], [1e-9, 180.0]])
def test_angles_of_zero_alone_and_of_any_size_are_within_the_axes(drawn, angles):
    points = list(enumerate(angles))
    (axes,) = drawn(gradient_angles, {"ours": points}, **WORDS).axes
    assert all(0 < height(axes, angle) <= 1 for angle in angles)


def test_long_names_and_sources_are_within_the_figure(drawn):
    curves = {f"{k}{'e' * 60}": [(0, 1.0)] for k in range(4)}
    words = {"title": "T", "source": "a source of many words " * 12}
    figure = drawn(gradient_angles, curves, **words)
    legend = figure.axes[0].get_legend()
    assert len(legend.texts) == 4
    for shown in (legend, figure._supxlabel):
        assert shown.get_window_extent().x0 >= 0
        assert shown.get_window_extent().x1 <= figure.bbox.width


def test_means_intervals_and_each_panel_s_own_margin_are_where_they_belong(drawn):
    panels = {"easy": (1.0, ROWS), "hard": (2.0, ROWS)}
    axes_of = drawn(forest_plot, panels, unit="%", **WORDS).axes
    for axes, (name, (margin, _)) in zip(axes_of, panels.items(), strict=True):
        lines = [points_of(line) for line in axes.get_lines()]
        expected = [[(margin, 0), (margin, 1)]]
        for place, row in enumerate(ROWS):
            expected += [[(row.low, place), (row.high, place)], [(row.mean, place)]]
            expected.append([(row.bound, place)])
        assert all(points in lines for points in expected)
        assert axes.get_title(loc="left") == name
    assert texts_of(axes_of[0].get_yticklabels()) == ["a - b", "c - b"]
    assert axes_of[0].yaxis_inverted()
    marks = {
        points_of(line)[0][0]: line.get_markerfacecolor()
        for line in axes_of[0].get_lines()
        if len(points_of(line)) == 1
    }
    assert marks[0.1] != marks[0.9] == "white"


@pytest.mark.parametrize("ends", [(1.0, 0.0), (float("nan"), 1.0)])
def test_intervals_that_are_none_are_refused(ends):
    with pytest.raises(ValueError, match="'a - b' has the mean"):
        Difference("a - b", 0.5, *ends, 0.6, shown=True)
