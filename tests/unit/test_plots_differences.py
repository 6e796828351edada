import pytest

from speechbrain_rev.plots import Difference, forest_plot

WORDS = {"unit": "%", "title": "T", "source": "S"}
ROWS = [
    Difference("a - b", 0.1, -0.4, 0.6, 0.5, shown=True),
    Difference("c - b", 0.9, 0.2, 1.6, 1.5, shown=False),
]


@pytest.fixture
def drawn(figures, tmp_path):
    """Draw panels; return their axes after checking that a PNG came out."""

    def draw(panels):
        path = tmp_path / "forest.png"
        forest_plot(panels, path, **WORDS)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return figures[-1].axes

    return draw


def lines(axes):
    return [line.get_xydata().tolist() for line in axes.get_lines()]


def test_means_intervals_and_each_panel_s_own_margin_are_where_they_belong(drawn):
    panels = drawn({"easy": (1.0, ROWS), "hard": (2.0, ROWS)})
    for axes, margin in zip(panels, (1.0, 2.0), strict=True):
        assert [[margin, 0], [margin, 1]] in lines(axes)
        for place, row in enumerate(ROWS):
            assert [[row.low, place], [row.high, place]] in lines(axes)
            assert [[row.mean, place]] in lines(axes)
            assert [[row.bound, place]] in lines(axes)
    assert [axes.get_title(loc="left") for axes in panels] == ["easy", "hard"]


def test_differences_are_named_from_above_and_told_apart_by_what_is_shown(drawn):
    (axes,) = drawn({"easy": (1.0, ROWS)})
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
def test_what_cannot_be_drawn_is_refused(tmp_path, panels, what):
    with pytest.raises(ValueError, match=what):
        forest_plot(panels, tmp_path / "forest.png", **WORDS)


@pytest.mark.parametrize("ends", [(1.0, 0.0), (float("nan"), 1.0)])
def test_intervals_that_are_none_are_refused(ends):
    with pytest.raises(ValueError, match="'a - b' has the mean"):
        Difference("a - b", 0.5, *ends, 0.6, shown=True)
