import pytest

from speechbrain_rev.plots import time_against_memory

WORDS = {"title": "T", "source": "S"}
CURVES = {
    "stored": [(0.06, 1.0, "")],
    "ours": [(0.01, 1.5, "1 MB"), (0.02, 1.3, "2 MB")],
}


def test_each_panel_has_its_curves_and_what_distinguishes_points(figures, tmp_path):
    path = tmp_path / "curves.png"
    time_against_memory({"revnet57": CURVES, "other": CURVES}, path, **WORDS)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(figures[-1].axes) == 2
    for axes in figures[-1].axes:
        drawn = [[tuple(point) for point in line.get_xydata()] for line in axes.lines]
        assert drawn == [[point[:2] for point in points] for points in CURVES.values()]
        assert [t.get_text() for t in axes.texts if t.get_text()] == ["1 MB", "2 MB"]
    names = [text.get_text() for text in figures[-1].axes[0].get_legend().texts]
    assert names == ["stored", "ours"]


def test_what_curves_have_in_common_is_written_at_the_last(figures, tmp_path):
    curves = CURVES | {"later": [(0.03, 1.9, "1 MB")]}
    time_against_memory({"revnet57": curves}, tmp_path / "curves.png", **WORDS)
    (axes,) = figures[-1].axes
    assert {t.get_text(): t.xy for t in axes.texts if t.get_text()} == {
        "1 MB": (0.03, 1.9),
        "2 MB": (0.02, 1.3),
    }


@pytest.mark.parametrize(
    ("panels", "what"),
    [
        ({}, "no panel"),
        ({"a": {}}, "'a' has no curve"),
        ({"a": {"b": []}}, "'b' of 'a' has no points"),
        ({"a": {"b": [(0.0, 1.0, "")]}}, "a point of 0.0 GB"),
        ({"a": {"b": [(1.0, float("nan"), "")]}}, "and nan times"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, panels, what):
    with pytest.raises(ValueError, match=what):
        time_against_memory(panels, tmp_path / "curves.png", **WORDS)
