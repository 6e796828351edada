import pytest

from speechbrain_rev.plots import time_by_batch

WORDS = {"title": "T", "source": "S"}
SHORT = {"store": {2: 0.5}, "planned": {4: 0.6, 2: 0.5}}
LONG = {"planned": {2: 0.5}, "compiled": {2: 0.4, 8: 0.4}}


def test_a_way_has_one_colour_in_all_panels_and_its_points_by_batch(figures, tmp_path):
    path = tmp_path / "batches.png"
    time_by_batch({"revnet57": SHORT, "df_revnet89": LONG}, path, **WORDS)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    colours = []
    for axes, curves in zip(figures[-1].axes, (SHORT, LONG), strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines) == ["store", "planned", "compiled"]
        for name, line in lines.items():
            points = [tuple(point) for point in line.get_xydata()]
            assert points == sorted(curves.get(name, {}).items())
        colours.append([line.get_color() for line in lines.values()])
    assert colours[0] == colours[1]
    assert len(set(colours[0])) == 3
    ticks = [text.get_text() for text in figures[-1].axes[1].get_xticklabels()]
    assert ticks == ["2", "4", "8"]


@pytest.mark.parametrize(
    ("panels", "what"),
    [
        ({}, "no panel"),
        ({"a": {}}, "'a' has no curve"),
        ({"a": {"b": {}}}, "'b' of 'a' has no points"),
        ({"a": {"b": {0: 1.0}}}, "a point of 0 utterances"),
        ({"a": {"b": {2: float("nan")}}}, "and nan seconds"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, panels, what):
    with pytest.raises(ValueError, match=what):
        time_by_batch(panels, tmp_path / "batches.png", **WORDS)
