import numpy as np
import pytest

from speechbrain_rev.plots import (
    Difference,
    curves_over_seeds,
    forest_plot,
    gradient_angles,
    loss_curves,
    training_curves,
)

WORDS = {"title": "T", "source": "S"}
ROWS = [
    Difference("a - b", 0.1, -0.4, 0.6, 0.5, shown=True),
    Difference("c - b", 0.9, 0.2, 1.6, 1.5, shown=False),
]


def epochs(count, **changes):
    return [
        {
            "epoch": n,
            "train_loss": 9.0 / n,
            "lr": 0.1**n,
            "margin": 0.1 * n,
            "valid_eer_percent": 30.0 / n,
        }
        | changes
        for n in range(1, count + 1)
    ]


def test_training_curves_show_each_quantity_by_epoch_in_order(drawn):
    rows = epochs(5)
    figure = drawn(training_curves, rows[::-1])
    shown = {axes.get_ylabel(): axes.lines[0].get_xydata() for axes in figure.axes}
    for label, key in {
        "training loss": "train_loss",
        "validation EER, %": "valid_eer_percent",
        "learning rate": "lr",
        "margin, radians": "margin",
    }.items():
        expected = [(row["epoch"], row[key]) for row in rows]
        np.testing.assert_allclose(shown[label], expected)
    titles = [axes.get_title(loc="right") for axes in figure.axes]
    assert titles == ["", "lowest 6.00 % in epoch 5", "", ""]


@pytest.mark.parametrize("how", ["missing", "none"])
def test_a_run_without_validation_has_no_panel_for_it(drawn, how):
    rows = epochs(3, valid_eer_percent=None)
    if how == "missing":
        rows = [{k: v for k, v in row.items() if "eer" not in k} for row in rows]
    figure = drawn(training_curves, rows)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["training loss", "learning rate", "margin, radians"]


def test_one_epoch_and_quantities_of_zero_or_fixed_can_be_drawn(drawn):
    fixed = {"lr": 0.0, "margin": 0.5, "valid_eer_percent": 0.0}
    *others, margin = drawn(training_curves, epochs(1, **fixed)).axes
    assert len(others) == 3
    low, high = margin.get_xlim()
    assert [tick for tick in margin.get_xticks() if low <= tick <= high] == [1]
    low, high = margin.get_ylim()
    assert low < 0 < 0.5 < high < 1


def test_no_epoch_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no epoch to draw; give at least one"):
        training_curves([], tmp_path / "training.png")


@pytest.mark.parametrize("key", ["epoch", "train_loss", "lr", "margin"])
def test_a_row_without_a_quantity_is_refused_by_number(tmp_path, key):
    rows = epochs(3)
    del rows[1][key]
    with pytest.raises(ValueError, match=f"Row 1 has no {key}"):
        training_curves(rows, tmp_path / "training.png")


def test_a_point_is_the_mean_up_to_its_own_step(drawn):
    (axes,) = drawn(
        loss_curves, {"ours": [1.0, 3.0, 8.0]}, first_step=301, mean_of=2, **WORDS
    ).axes
    (line,) = axes.get_lines()
    assert line.get_xydata().tolist() == [[302, 2.0], [303, 5.5]]
    assert "mean of 2" in axes.get_ylabel()


def test_curves_of_losses_are_named(drawn):
    (axes,) = drawn(loss_curves, {"plain": [1.0], "ours": [1.0]}, **WORDS).axes
    texts = [text.get_text() for text in axes.get_legend().texts]
    assert texts == ["plain", "ours"]


@pytest.mark.parametrize(
    ("curves", "options", "what"),
    [
        ({}, {}, "no curve"),
        ({"ours": [1.0]}, {"mean_of": 2}, "'ours' of 'losses' has no points"),
        ({"ours": [1.0, 0.0]}, {}, "'ours' of 'losses' has a point of 2 steps and 0.0"),
    ],
)
def test_losses_that_cannot_be_drawn_are_refused(curves, options, what, tmp_path):
    with pytest.raises(ValueError, match=what):
        loss_curves(curves, tmp_path / "losses.png", **WORDS, **options)


def test_a_line_is_the_mean_over_seeds_and_its_band_goes_from_least_to_most(drawn):
    (axes,) = drawn(
        curves_over_seeds, {"loss": {"ours": [[4.0, 3.0], [6.0, 2.0]]}}, **WORDS
    ).axes
    (line,), (band,) = axes.get_lines(), axes.collections
    assert line.get_xydata().tolist() == [[1, 5.0], [2, 2.5]]
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
    assert corners == {(1, 4.0), (1, 6.0), (2, 3.0), (2, 2.0)}


def test_a_training_has_one_look_in_all_panels_and_each_its_own(drawn):
    names = [f"n{i}" for i in range(17)]
    first = {name: [[1.0, 2.0]] for name in names}
    panels = {"loss": first, "accuracy": dict(reversed(first.items()))}
    looks = [
        {x.get_label(): (x.get_color(), x.get_linestyle()) for x in axes.get_lines()}
        for axes in drawn(curves_over_seeds, panels, **WORDS).axes
    ]
    assert looks[0] == looks[1]
    assert len(set(looks[0].values())) == len(names)


def test_an_accuracy_of_zero_has_its_place(drawn):
    (axes,) = drawn(
        curves_over_seeds, {"accuracy, %": {"ours": [[0.0, 3.0]]}}, **WORDS
    ).axes
    assert axes.get_lines()[0].get_xydata().tolist() == [[1, 0.0], [2, 3.0]]
    assert axes.get_ylim()[0] < 0


@pytest.mark.parametrize(
    ("panels", "what"),
    [
        ({}, "no panel"),
        ({"loss": {}}, "'loss' has no curve"),
        ({"loss": {"a": []}}, "'a' of 'loss' has no points"),
        ({"loss": {"a": [[1.0], [1.0, 2.0]]}}, r"'a' of 'loss' have \[1, 2\] epochs"),
        ({"loss": {"a": [[]]}}, "'a' of 'loss' has no points"),
        ({"loss": {"a": [[1.0, float("nan")]]}}, "has nan in epoch 2"),
    ],
)
def test_seeds_that_cannot_be_drawn_are_refused(tmp_path, panels, what):
    with pytest.raises(ValueError, match=what):
        curves_over_seeds(panels, tmp_path / "curves.png", **WORDS)


def height(axes, angle):
    """Where an angle is on the axis, from 0 at its foot to 1."""
    x, y = axes.transData.transform((0, angle))
    return axes.transAxes.inverted().transform((x, y))[1]


def test_zero_has_a_place_of_its_own_below_the_smallest_angle(drawn):
    (axes,) = drawn(
        gradient_angles,
        {"float": [(0, 2e-5), (10, 3.0)], "exact": [(0, 0.0), (10, 0.0)]},
        **WORDS,
    ).axes
    assert 0 < height(axes, 0.0) < height(axes, 2e-5) - 0.05
    assert axes.get_yticklabels()[0].get_text() == "0"


def test_angles_above_zero_lie_on_a_logarithmic_axis(drawn):
    (axes,) = drawn(gradient_angles, {"float": [(0, 2e-5), (10, 3.0)]}, **WORDS).axes
    steps = [height(axes, 10.0**k) - height(axes, 10.0 ** (k - 1)) for k in (-2, 0)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)
    assert height(axes, 3.0) < 1


@pytest.mark.parametrize("angles", [[0.0, 0.0], [1e-9, 180.0]])
def test_curves_of_angles_are_named_and_drawn_as_given(drawn, angles):
    points = list(enumerate(angles))
    (axes,) = drawn(gradient_angles, {"ours": points}, **WORDS).axes
    (line,) = axes.get_lines()
    assert [tuple(point) for point in line.get_xydata()] == points
    assert [text.get_text() for text in axes.get_legend().texts] == ["ours"]


def test_long_names_and_sources_are_within_the_figure(drawn):
    curves = {f"{k}{'e' * 60}": [(0, 1.0)] for k in range(4)}
    words = {"title": "T", "source": "a source of many words " * 12}
    figure = drawn(gradient_angles, curves, **words)
    legend = figure.axes[0].get_legend()
    assert len(legend.texts) == 4
    for shown in (legend, figure._supxlabel):
        assert shown.get_window_extent().x0 >= 0
        assert shown.get_window_extent().x1 <= figure.bbox.width


@pytest.mark.parametrize(
    ("curves", "what"),
    [
        ({}, "no curve"),
        ({"a": []}, "'a' has no points"),
        ({"a": [(0, float("nan"))]}, "'a' has an angle of nan at step 0"),
        ({"a": [(3, 181.0)]}, "'a' has an angle of 181.0 at step 3"),
    ],
)
def test_angles_that_cannot_be_drawn_are_refused(tmp_path, curves, what):
    with pytest.raises(ValueError, match=what):
        gradient_angles(curves, tmp_path / "angles.png", **WORDS)


def lines(axes):
    return [line.get_xydata().tolist() for line in axes.get_lines()]


def test_means_intervals_and_each_panel_s_own_margin_are_where_they_belong(drawn):
    panels = drawn(
        forest_plot, {"easy": (1.0, ROWS), "hard": (2.0, ROWS)}, unit="%", **WORDS
    ).axes
    for axes, margin in zip(panels, (1.0, 2.0), strict=True):
        assert [[margin, 0], [margin, 1]] in lines(axes)
        for place, row in enumerate(ROWS):
            assert [[row.low, place], [row.high, place]] in lines(axes)
            assert [[row.mean, place]] in lines(axes)
            assert [[row.bound, place]] in lines(axes)
    assert [axes.get_title(loc="left") for axes in panels] == ["easy", "hard"]


def test_differences_are_named_from_above_and_told_apart_by_what_is_shown(drawn):
    (axes,) = drawn(forest_plot, {"easy": (1.0, ROWS)}, unit="%", **WORDS).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a - b", "c - b"]
    bottom, top = axes.get_ylim()
    assert bottom > top
    marks = {
        line.get_xydata()[0][0]: line.get_markerfacecolor()
        for line in axes.get_lines()
        if len(line.get_xydata()) == 1
    }
    assert marks[0.1] != marks[0.9] == "white"


@pytest.mark.parametrize(
    ("panels", "what"),
    [
        ({}, "no panel"),
        ({"easy": (1.0, [])}, "no difference"),
        ({"easy": (1.0, ROWS), "hard": (1.0, ROWS[::-1])}, "'hard' has the labels"),
        ({"easy": (-1.0, ROWS)}, "margin of 'easy' is -1.0"),
    ],
)
def test_differences_that_cannot_be_drawn_are_refused(tmp_path, panels, what):
    with pytest.raises(ValueError, match=what):
        forest_plot(panels, tmp_path / "forest.png", unit="%", **WORDS)


@pytest.mark.parametrize("ends", [(1.0, 0.0), (float("nan"), 1.0)])
def test_intervals_that_are_none_are_refused(ends):
    with pytest.raises(ValueError, match="'a - b' has the mean"):
        Difference("a - b", 0.5, *ends, 0.6, shown=True)
