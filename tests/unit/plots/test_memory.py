"""Pictures of memory: encoders against error rate, parts of a step, plans by batch size."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from speechbrain_rev.catalog import Training, pictures, select
from speechbrain_rev.plots import (
    EncoderPoint,
    PartsBar,
    encoder_map,
    memory_parts,
    plan_map,
)
from speechbrain_rev.plots.style import MODE_COLOURS
from speechbrain_rev.sizes import GIB
from tests.pictures import points_of, texts_of

TITLES = {"title": "T", "source": "S"}
WORDS = {
    **TITLES,
    "eer_label": "EER, %",
    "memory_label": "GiB",
    "cards": {11 * GIB: 2 * GIB, 24 * GIB: 3 * GIB},
}
ENCODERS = [
    EncoderPoint("small", "resnet", "vanilla", 1.9, 8 * GIB, None, 3 * GIB),
    EncoderPoint("large", "df_resnet", "vanilla", 1.4, 90 * GIB, None, 9 * GIB),
    EncoderPoint("small_I", "revnet", "I", 1.85, 3 * GIB, "small"),
    EncoderPoint("small_II", "revnet", "II", 1.84, 3 * GIB, "small"),
    EncoderPoint("large_I", "df_revnet", "I", 1.44, 5 * GIB, "large"),
]


@pytest.fixture
def axes_of(drawn):
    return lambda points: drawn(encoder_map, points, **WORDS).axes[0]


def marks(axes, kinds):
    """Where marks are, each with its line."""
    lines = [line for line in axes.lines if line.get_marker() in kinds]
    return {tuple(xy): line for line in lines for xy in line.get_xydata()}


def pairs(axes):
    """Both ends of lines from encoder to encoder."""
    lines = [line for line in axes.lines if line.get_alpha() == 0.45]
    return {tuple(points_of(line)) for line in lines}


def test_marks_names_lines_and_limits_are_where_their_figures_are(axes_of):
    axes = axes_of(ENCODERS)
    shown = marks(axes, "o^s")
    assert set(shown) == {point.place for point in ENCODERS}
    for point in ENCODERS:
        is_hollow = to_hex(shown[point.place].get_markerfacecolor()) == "#ffffff"
        assert is_hollow == (point.type == "vanilla")
    np.testing.assert_allclose(list(marks(axes, "x")), [(1.9, 3), (1.4, 9)])
    assert axes.get_yscale() == "log"
    places = {text.get_text(): text.xy for text in axes.texts}
    assert places.items() >= {point.name: point.place for point in ENCODERS}.items()
    by_name = {point.name: point.place for point in ENCODERS}
    expected = {(by_name[p.counterpart], p.place) for p in ENCODERS if p.counterpart}
    assert pairs(axes) == expected
    # GPUs have labelled lines, and what is kept free is shaded.
    lines = [line.get_ydata()[0] for line in axes.lines if line.get_ls() == "--"]
    assert lines == [11, 24]
    assert places.items() >= {" 11 GiB GPU": (1, 11), " 24 GiB GPU": (1, 24)}.items()
    back = axes.transData.inverted()
    bands = [back.transform(patch.get_extents())[:, 1] for patch in axes.patches]
    np.testing.assert_allclose(bands, [(9, 11), (21, 24)])
    # Without the vanilla encoder a line has nowhere to come from.
    alone = [point for point in ENCODERS if point.name != "large"]
    assert len(pairs(axes_of(alone))) == 2


def test_names_of_all_encoders_lie_in_the_figure_and_hide_no_mark(drawn):
    models = select(Training(11 * GIB, batch=128, frames=200))
    (axes,) = drawn(pictures.draw_models, models).axes
    names = {model.row.name for model in models}
    boxes = [t.get_window_extent() for t in axes.texts if t.get_text() in names]
    assert len(boxes) == sum(model.row.vox1_h_eer is not None for model in models)
    centres = axes.transData.transform(list(marks(axes, "o^s")))
    for box in boxes:
        assert axes.bbox.y0 <= box.y0 <= box.y1 <= axes.bbox.y1
        assert not any(box.contains(*centre) for centre in centres)


def bars_of(axes):
    """Each part's bars by label, as (left, width)."""
    return {
        part.get_label(): [(bar.get_x(), bar.get_width()) for bar in part]
        for part in axes.containers
    }


def test_parts_stand_side_by_side_in_gib_and_in_percent_of_their_bar(drawn):
    stored = PartsBar("revnet57", "store", {"weights": GIB, "activations": 3 * GIB})
    stage = PartsBar("resnet34", "stage 1", {"held": 6.0, "weights": 2.0})
    other = PartsBar("resnet34", "store", {"weights": 4.0})
    axes = drawn(memory_parts, [stored, stage, other], **TITLES).axes
    sizes, shares, *second = axes
    assert bars_of(sizes)["activations"] == [(0, 3)]
    assert bars_of(sizes)["weights"] == [(3, 1)]
    assert bars_of(shares)["activations"] == [(0, 75)]
    assert bars_of(second[1])["held"] == [(0, 75), (0, 0)]
    assert bars_of(second[1])["weights"] == [(75, 25), (0, 100)]
    assert [axes[i].get_title(loc="left") for i in (0, 2)] == ["revnet57", "resnet34"]
    assert texts_of(second[0].get_yticklabels()) == ["stage 1", "store"]
    assert texts_of(sizes.texts) == ["4.000 GiB"]
    (legend,) = sizes.figure.legends
    assert texts_of(legend.texts) == ["activations", "held", "weights"]


PLANS = {
    8: {"stem": "store", "b.0": "store", "b.1": "store"},
    32: {"stem": "store", "b.0": "reconstruct", "b.1": "store"},
    16: {},
    64: {"stem": "recompute", "b.0": "reconstruct", "b.1": "reconstruct"},
}
SPEEDS = {8: 50.0, 32: 70.0, 64: 60.0}


def test_each_cell_has_the_colour_of_its_mode(drawn):
    figure = drawn(plan_map, PLANS, SPEEDS, **TITLES)
    upper, lower = figure.axes
    (mesh, *_), (legend,) = upper.collections, figure.legends
    modes = [[PLANS[batch].get(b) for batch in sorted(PLANS)] for b in PLANS[8]]
    colours = [[to_rgb(MODE_COLOURS.get(m, "white")) for m in row] for row in modes]
    np.testing.assert_allclose(mesh.get_array(), colours)
    line, best = lower.lines
    assert points_of(line) == sorted(SPEEDS.items())
    assert best.get_xdata()[0] == 32
    words = ["store", "reconstruct", "recompute", "fastest: batch 32"]
    assert texts_of(legend.texts) == words
    # The first block is at the top.
    assert texts_of(upper.get_yticklabels()) == ["stem", "b.0", "b.1"]
    assert upper.yaxis_inverted()
    # Cells are as wide as batches are apart.
    assert list(mesh.get_coordinates()[0, :, 0]) == [4, 12, 24, 48, 80]


def test_one_batch_has_a_cell_and_each_of_many_blocks_a_name_apart(drawn):
    blocks = [f"stages.{i}.chain.{j}" for i in range(2) for j in range(40)]
    plans = {8: dict.fromkeys(blocks, "store")}
    upper, lower = drawn(plan_map, plans, {8: 1.0}, **TITLES).axes
    assert upper.get_xlim() == (7.5, 8.5)
    names = upper.get_yticklabels()
    assert texts_of(names) == blocks
    boxes = [name.get_window_extent() for name in names]
    assert all(b.y1 < a.y0 for a, b in itertools.pairwise(boxes))
    assert lower.get_ylabel() == "utterances per second"
