"""Pictures of the study: curves over seeds, and differences with their intervals."""

from tests.pictures import points_of, texts_of
from tests.recipes.study import study

pictures = study("pictures")
WORDS = {"title": "T", "source": "S"}
ROWS = [
    pictures.Difference("a - b", 0.1, -0.4, 0.6, 0.5, shown=True),
    pictures.Difference("c - b", 0.9, 0.2, 1.6, 1.5, shown=False),
]


def test_a_line_is_the_mean_over_seeds_and_its_band_goes_from_least_to_most(drawn):
    seeds = {"loss": {"ours": [[4.0, 3.0], [6.0, 2.0]]}, "zero": {"ours": [[0.0]]}}
    axes, other = drawn(pictures.curves_over_seeds, seeds, **WORDS).axes
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
        for axes in drawn(pictures.curves_over_seeds, panels, **WORDS).axes
    ]
    assert looks[0] == looks[1]
    assert len(set(looks[0].values())) == len(names)


def test_means_intervals_and_each_panel_s_own_margin_are_where_they_belong(drawn):
    panels = {"easy": (1.0, ROWS), "hard": (2.0, ROWS)}
    axes_of = drawn(pictures.forest_plot, panels, unit="%", **WORDS).axes
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
