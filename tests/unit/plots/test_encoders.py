"""Pictures of encoders: memory against error rate, memory and batch by parameters."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from speechbrain_rev.catalog import Training, pictures, select
from speechbrain_rev.plots import (
    EncoderPoint,
    SizedEncoder,
    by_parameters,
    encoder_map,
)
from speechbrain_rev.plots.encoders import FAMILY_COLOURS
from speechbrain_rev.sizes import GIB, MIB
from tests.pictures import check_names, is_tie

WORDS = {
    "title": "Memory",
    "eer_label": "EER, %",
    "memory_label": "GiB",
    "source": "invented",
    "cards": {11 * GIB: 2 * GIB, 24 * GIB: 3 * GIB},
}
#: Vanilla and reversible ones, some of them close together.
ENCODERS = [
    EncoderPoint("small", "resnet", "vanilla", 1.9, 8 * GIB, None, 3 * GIB),
    EncoderPoint("large", "df_resnet", "vanilla", 1.4, 90 * GIB, None, 9 * GIB),
    EncoderPoint("small_I", "revnet", "I", 1.85, 3 * GIB, "small"),
    EncoderPoint("small_II", "revnet", "II", 1.84, 3 * GIB, "small"),
    EncoderPoint("large_I", "df_revnet", "I", 1.44, 5 * GIB, "large"),
    EncoderPoint("large_II", "df_revnet", "II", 1.45, 5 * GIB, "large"),
    EncoderPoint("large_III", "df_revnet", "II", 1.46, 5.1 * GIB, "large"),
]
PLANNED = {"title": "Planned", "source": "invented", "total_batch": 256}
FITS = SizedEncoder(
    "a_rev", "revnet", "II", 6_000_000, 10 * MIB, 60 * MIB, 50 * MIB, 800, 30 * MIB, 300
)
ALIKE = SizedEncoder(
    "b_rev", "revnet", "I", 6_100_000, 10 * MIB, 60 * MIB, 50 * MIB, 500, 40 * MIB, 235
)
LACKS = SizedEncoder(
    "a_res", "df_resnet", "vanilla", 20_000_000, 100 * MIB, 900 * MIB, None, 60
)
NOTHING = SizedEncoder(
    "b_res", "resnet", "vanilla", 15_000_000, 100 * MIB, 900 * MIB, None, None
)
SIZED = [FITS, ALIKE, LACKS, NOTHING]


@pytest.fixture
def axes_of(drawn):
    return lambda points: drawn(encoder_map, points, **WORDS).axes[0]


def place(point):
    return point.eer_percent, point.peak_bytes / GIB


def marks(axes, kinds="o^sx"):
    """Where marks are, each with its line."""
    lines = [line for line in axes.lines if line.get_marker() in kinds]
    return {tuple(xy): line for line in lines for xy in line.get_xydata()}


def arrows(axes):
    """Starts and ends."""
    arrows = [text for text in axes.texts if text.arrow_patch and not is_tie(text)]
    return {(tuple(arrow.get_position()), tuple(arrow.xy)) for arrow in arrows}


def test_marks_arrows_and_limits_are_where_their_figures_are(axes_of):
    axes = axes_of(ENCODERS)
    shown = marks(axes, "o^s")
    assert set(shown) == {place(point) for point in ENCODERS}
    for point in ENCODERS:
        is_hollow = to_hex(shown[place(point)].get_markerfacecolor()) == "#ffffff"
        assert is_hollow == (point.type == "vanilla")
    np.testing.assert_allclose(list(marks(axes, "x")), [(1.9, 3), (1.4, 9)])
    assert axes.get_yscale() == "log"
    by_name = {point.name: point for point in ENCODERS}
    expected = {
        (place(by_name[point.counterpart]), place(point))
        for point in ENCODERS
        if point.counterpart
    }
    assert arrows(axes) == expected
    # GPUs have labelled lines, and what is kept free is shaded.
    lines = [line.get_ydata()[0] for line in axes.lines if line.get_ls() == "--"]
    assert lines == [11, 24]
    labels = {t.get_text(): t.xy[1] for t in axes.texts if "GPU" in t.get_text()}
    assert labels == {"11 GiB GPU": 11, "24 GiB GPU": 24}
    back = axes.transData.inverted()
    bands = [back.transform(patch.get_extents())[:, 1] for patch in axes.patches]
    np.testing.assert_allclose(bands, [(9, 11), (21, 24)])
    # Without the vanilla encoder an arrow has nowhere to come from.
    alone = [point for point in ENCODERS if point.name != "large"]
    assert len(arrows(axes_of(alone))) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_one_encoder_and_equal_ones_are_named(axes_of, count):
    points = [EncoderPoint(f"same{i}", "revnet", "II", 1.5, GIB) for i in range(count)]
    axes = axes_of(points)
    check_names(axes, marks(axes), {point.name: place(point) for point in points})


def test_names_of_all_encoders_stand_within_the_axes_and_apart(drawn):
    models = select(Training(11 * GIB, batch=128, frames=200))
    (axes,) = drawn(pictures.draw_models, models).axes
    places = {
        row.name: (row.vox1_h_eer, model.step_peak_bytes(row.default_mode) / GIB)
        for model in models
        for row in [model.row]
        if row.vox1_h_eer is not None
    }
    check_names(axes, marks(axes), places)


def bars(axes):
    lines = [line for line in axes.lines if line.get_alpha() == 0.35]
    return [tuple(line.get_ydata()) for line in lines if len(line.get_ydata())]


def test_memory_and_batch_are_marks_bars_and_names_by_parameters(drawn):
    memory, batch = drawn(by_parameters, SIZED, **PLANNED).axes
    assert sorted(marks(memory, "o^s")) == [(6, 50), (6.1, 50)]
    assert sorted(marks(memory, "x")) == [(6, 30), (6.1, 40)]
    assert sorted(marks(batch, "o^s")) == [(6, 800), (6.1, 500), (20, 60)]
    assert sorted(marks(batch, "x")) == [(6, 300), (6.1, 235)]
    assert memory.get_yscale() == batch.get_yscale() == "log"
    # From the lightest mode to all stored, and from the published batch to the one here.
    assert bars(memory) == [(10, 60), (10, 60), (100, 900), (100, 900)]
    assert bars(batch) == [(300, 800), (235, 500)]
    (line,) = [line for line in batch.lines if line.get_ls() == "--"]
    assert list(line.get_ydata()) == [256, 256]
    for (_, size), line in marks(batch, "o^s").items():
        (family,) = {e.family for e in SIZED if e.largest_batch == size}
        assert line.get_markeredgecolor() == FAMILY_COLOURS[family]
        hollow = to_hex(line.get_markerfacecolor()) == "#ffffff"
        assert hollow == (family == "df_resnet")
    tops = {e.name: (e.parameters / 1e6, e.stored_bytes / MIB) for e in SIZED}
    check_names(memory, marks(memory), tops)
    sizes = {e.name: (e.parameters / 1e6, e.largest_batch) for e in SIZED}
    del sizes[NOTHING.name]
    check_names(batch, marks(batch), sizes)


def test_one_encoder_that_fits_nothing_can_be_drawn(drawn):
    memory, batch = drawn(by_parameters, [NOTHING], **PLANNED).axes
    assert len(memory.texts) > 0
    assert not batch.texts
