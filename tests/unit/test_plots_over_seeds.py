import pytest

from speechbrain_rev.plots import curves_over_seeds

WORDS = {"title": "T", "source": "S"}


@pytest.fixture
def drawn(figures, tmp_path):
    """Draw panels; return their axes after checking that a PNG came out."""

    def draw(panels):
        path = tmp_path / "curves.png"
        curves_over_seeds(panels, path, **WORDS)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return figures[-1].axes

    return draw


def test_a_line_is_the_mean_over_seeds_and_its_band_goes_from_least_to_most(drawn):
    (axes,) = drawn({"loss": {"ours": [[4.0, 3.0], [6.0, 2.0]]}})
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
        for axes in drawn(panels)
    ]
    assert looks[0] == looks[1]
    assert len(set(looks[0].values())) == len(names)


def test_an_accuracy_of_zero_has_its_place(drawn):
    (axes,) = drawn({"accuracy, %": {"ours": [[0.0, 3.0]]}})
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
def test_curves_that_cannot_be_drawn_are_refused(tmp_path, panels, what):
    with pytest.raises(ValueError, match=what):
        curves_over_seeds(panels, tmp_path / "curves.png", **WORDS)
