import pytest

from speechbrain_rev.plots import loss_curves

WORDS = {"title": "T", "source": "S"}


@pytest.fixture
def drawn(figures, tmp_path):
    """Draw curves; return the axes after checking that a PNG came out."""

    def draw(curves, **options):
        path = tmp_path / "losses.png"
        loss_curves(curves, path, **WORDS, **options)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return figures[-1].axes[0]

    return draw


def test_a_point_is_the_mean_up_to_its_own_step(drawn):
    axes = drawn({"ours": [1.0, 3.0, 8.0]}, first_step=301, mean_of=2)
    (line,) = axes.get_lines()
    assert line.get_xydata().tolist() == [[302, 2.0], [303, 5.5]]
    assert "mean of 2" in axes.get_ylabel()


def test_curves_are_named(drawn):
    axes = drawn({"plain": [1.0], "ours": [1.0]})
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
def test_curves_that_cannot_be_drawn_are_refused(curves, options, what, tmp_path):
    with pytest.raises(ValueError, match=what):
        loss_curves(curves, tmp_path / "losses.png", **WORDS, **options)
