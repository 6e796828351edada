import pytest

from speechbrain_rev.plots import state_errors

WORDS = {"title": "T", "source": "S"}


@pytest.fixture
def drawn(figures, tmp_path):
    """Draw curves; return the axes after checking that a PNG came out."""

    def draw(panels):
        path = tmp_path / "errors.png"
        state_errors(panels, path, **WORDS)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return figures[-1].axes

    return draw


def test_errors_are_drawn_in_percent_a_panel_for_each_state(drawn):
    moments = {"all": [(1, 0.01), (3, 0.5)], "linear": [(2, 2.0)]}
    step = {"linear": [(2, 0.1)], "c": [(1, 0.25)]}
    one, other = drawn({"moment": moments, "step": step})
    points = [line.get_xydata().tolist() for line in one.get_lines()]
    assert points == [[[1, 1.0], [3, 50.0]], [[2, 200.0]], []]
    points = [line.get_xydata().tolist() for line in other.get_lines()]
    assert points == [[], [[2, 10.0]], [[1, 25.0]]]
    assert [axes.get_ylabel() for axes in (one, other)] == ["moment, %", "step, %"]
    # Layers have one colour, and a name also where the first panel lacks them.
    assert one.get_lines()[1].get_color() == other.get_lines()[1].get_color()
    assert [text.get_text() for text in one.get_legend().texts] == [
        "all",
        "linear",
        "c",
    ]


@pytest.mark.parametrize(
    "errors", [[0.011], [0.01, 0.0101], [1e-3, 0.1], [1e-5, 100.0]]
)
def test_the_axis_has_few_ticks_above_and_below_all_errors(drawn, errors):
    (axes,) = drawn({"state": {"all": list(enumerate(errors, 1))}})
    ticks, (low, high) = axes.get_yticks(), axes.get_ylim()
    assert low <= min(ticks) <= 100 * min(errors)
    assert 100 * max(errors) <= max(ticks) <= high
    assert len(ticks) <= 10


@pytest.mark.parametrize(
    ("curves", "what"),
    [
        ({}, "'state' has no curve"),
        ({"first": []}, "'first' of 'state' has no points"),
        ({"first": [(0, 0.1)]}, "0 epochs and 0.1 error"),
        ({"first": [(1, 0.0)]}, "1 epochs and 0.0 error"),
        ({"first": [(1, float("nan"))]}, "1 epochs and nan error"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, curves, what):
    with pytest.raises(ValueError, match=what):
        state_errors({"state": curves}, tmp_path / "errors.png", **WORDS)
