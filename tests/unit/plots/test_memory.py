import pytest

from speechbrain_rev.plots import (
    PartsBar,
    memory_by_depth,
    memory_parts,
    time_against_memory,
    time_by_batch,
)

from .names import points_of, texts_of

WORDS = {"title": "T", "source": "S"}
STORED = PartsBar("revnet57", "store", {"activations": 4e9, "optimizer_states": 4e7})
STAGE = PartsBar("resnet34", "stage 1", {"held": 1e6, "working": 1e5, "weights": 9})
OTHER = PartsBar("resnet34", "store", {"others": 1.0})
SHORT = {"store": {2: 0.5}, "planned": {4: 0.6, 2: 0.5}}
LONG = {"planned": {2: 0.5}, "compiled": {2: 0.4, 8: 0.4}}
CURVES = {
    "stored": [(0.06, 1.0, "")],
    "ours": [(0.01, 1.5, "1 MB"), (0.02, 1.3, "2 MB")],
}


def test_bars_are_as_long_as_a_step_and_curves_go_through_their_depths(drawn):
    steps = {"store": (3.0 * 2**30, 1.5), "reconstruct": (2.0**20, 2.5)}
    depths = {"store": {9: 2**20, 5: 2**19}, "reconstruct": {5: 2**18, 9: 2**18}}
    peaks, seconds, curves = drawn(memory_by_depth, steps, depths, **WORDS).axes
    assert [bar.get_width() for bar in peaks.patches] == [3072, 1]
    assert [bar.get_width() for bar in seconds.patches] == [1.5, 2.5]
    assert texts_of(peaks.get_yticklabels()) == list(steps)
    assert peaks.get_xlabel() == "peak of a step, MiB"
    assert seconds.get_xlabel() == "seconds of a step"
    assert texts_of(peaks.texts) == ["3,072", "1"]
    expected = [[(5, 0.5), (9, 1.0)], [(5, 0.25), (9, 0.25)]]
    assert [points_of(line) for line in curves.lines] == expected
    assert texts_of(curves.texts) == list(depths)


@pytest.mark.parametrize(
    ("bars", "unit"), [([STORED], "GB"), ([STORED, STAGE, OTHER], "GiB")]
)
def test_bars_of_parts_are_drawn_in_both_units(drawn, bars, unit):
    sizes, shares = drawn(memory_parts, bars, unit=unit, **WORDS).axes
    assert sizes.get_xlabel() == unit
    assert texts_of(sizes.get_yticklabels()) == [bar.label for bar in bars]
    assert shares.get_xlim() == (0, 100)


def test_a_way_has_one_colour_in_all_panels_and_its_points_by_batch(drawn):
    figure = drawn(time_by_batch, {"revnet57": SHORT, "df_revnet89": LONG}, **WORDS)
    colours = []
    for axes, curves in zip(figure.axes, (SHORT, LONG), strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines) == ["store", "planned", "compiled"]
        for name, line in lines.items():
            assert points_of(line) == sorted(curves.get(name, {}).items())
        colours.append([line.get_color() for line in lines.values()])
    assert colours[0] == colours[1]
    assert len(set(colours[0])) == 3
    assert texts_of(figure.axes[1].get_xticklabels()) == ["2", "4", "8"]


def test_each_panel_has_its_curves_and_words_stand_at_the_last_that_has_them(drawn):
    later = CURVES | {"later": [(0.03, 1.9, "1 MB")]}
    panels = {"revnet57": CURVES, "other": later}
    first, second = drawn(time_against_memory, panels, **WORDS).axes
    for axes, curves in ((first, CURVES), (second, later)):
        shown = [points_of(line) for line in axes.lines]
        assert shown == [[point[:2] for point in points] for points in curves.values()]
    places = [
        {t.get_text(): t.xy for t in axes.texts if t.get_text()}
        for axes in (first, second)
    ]
    assert places[0] == {"1 MB": (0.01, 1.5), "2 MB": (0.02, 1.3)}
    assert places[1] == {"1 MB": (0.03, 1.9), "2 MB": (0.02, 1.3)}
    assert texts_of(first.get_legend().texts) == ["stored", "ours"]
