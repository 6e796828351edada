import pytest

from speechbrain_rev.plots import gradient_angles

WORDS = {"title": "T", "source": "S"}


@pytest.fixture
def drawn(figures, tmp_path):
    """Draw curves; return the axes after checking that a PNG came out."""

    def draw(curves):
        path = tmp_path / "angles.png"
        gradient_angles(curves, path, **WORDS)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return figures[-1].axes[0]

    return draw


def height(axes, angle):
    """Where an angle is on the axis, from 0 at its foot to 1."""
    x, y = axes.transData.transform((0, angle))
    return axes.transAxes.inverted().transform((x, y))[1]


def test_zero_has_a_place_of_its_own_below_the_smallest_angle(drawn):
    axes = drawn({"float": [(0, 2e-5), (10, 3.0)], "exact": [(0, 0.0), (10, 0.0)]})
    assert 0 < height(axes, 0.0) < height(axes, 2e-5) - 0.05
    assert axes.get_yticklabels()[0].get_text() == "0"


def test_angles_above_zero_lie_on_a_logarithmic_axis(drawn):
    axes = drawn({"float": [(0, 2e-5), (10, 3.0)]})
    steps = [height(axes, 10.0**k) - height(axes, 10.0 ** (k - 1)) for k in (-2, 0)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)
    assert height(axes, 3.0) < 1


@pytest.mark.parametrize("angles", [[0.0, 0.0], [1e-9, 180.0]])
def test_curves_are_named_and_drawn_as_given(drawn, angles):
    points = list(enumerate(angles))
    (line,) = (axes := drawn({"ours": points})).get_lines()
    assert [tuple(point) for point in line.get_xydata()] == points
    assert [text.get_text() for text in axes.get_legend().texts] == ["ours"]


def test_long_names_and_sources_are_within_the_figure(figures, tmp_path):
    curves = {f"{k}{'e' * 60}": [(0, 1.0)] for k in range(4)}
    words = {"title": "T", "source": "a source of many words " * 12}
    gradient_angles(curves, tmp_path / "angles.png", **words)
    figure = figures[-1]
    figure.draw_without_rendering()
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
def test_what_cannot_be_drawn_is_refused(tmp_path, curves, what):
    with pytest.raises(ValueError, match=what):
        gradient_angles(curves, tmp_path / "angles.png", **WORDS)
