"""The picture of memory against error rate."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex

from speechbrain_rev.plots import EncoderPoint, encoder_map
from speechbrain_rev.plots.labels import place_labels

GIB = 2**30
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
NO_LINES = np.zeros((0, 2, 2))


@pytest.fixture
def axes_of(figures, tmp_path):
    """Draw encoders; return the axes after checking that a PNG came out."""

    def draw(points):
        path = tmp_path / "map.png"
        encoder_map(points, path, **WORDS)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        # Sizes are known at the resolution drawn last, places at the figure's own.
        figures[-1].draw_without_rendering()
        (axes,) = figures[-1].axes
        return axes

    return draw


def place(point):
    return point.eer_percent, point.peak_bytes / GIB


def names(axes, points):
    wanted = {point.name for point in points}
    return {t.get_text(): t for t in axes.texts if t.get_text() in wanted}


def arrows(axes):
    """Starts and ends; a line from a point to its name has no head."""
    found = [
        text
        for text in axes.texts
        if text.arrow_patch is not None
        and type(text.arrow_patch.get_arrowstyle()).__name__ == "CurveFilledB"
    ]
    return {(tuple(text.get_position()), tuple(text.xy)) for text in found}


def test_each_encoder_is_a_mark_at_its_figures_vanilla_ones_hollow(axes_of):
    axes = axes_of(ENCODERS)
    marks = {
        tuple(xy): line
        for line in axes.lines
        if line.get_marker() in ("o", "^", "s")
        for xy in line.get_xydata()
    }
    assert set(marks) == {place(point) for point in ENCODERS}
    for point in ENCODERS:
        is_hollow = to_hex(marks[place(point)].get_markerfacecolor()) == "#ffffff"
        assert is_hollow == (point.type == "vanilla")
    crosses = [line.get_xydata() for line in axes.lines if line.get_marker() == "x"]
    np.testing.assert_allclose(np.concatenate(crosses), [(1.9, 3), (1.4, 9)])
    assert axes.get_yscale() == "log"


def test_an_arrow_leads_from_each_vanilla_encoder_to_its_counterparts(axes_of):
    by_name = {point.name: point for point in ENCODERS}
    assert arrows(axes_of(ENCODERS)) == {
        (place(by_name[point.counterpart]), place(point))
        for point in ENCODERS
        if point.counterpart
    }
    # Without the vanilla one there is nowhere to come from.
    alone = [point for point in ENCODERS if point.name != "large"]
    assert len(arrows(axes_of(alone))) == 2


def test_cards_have_labelled_lines_and_what_is_kept_free_is_shaded(axes_of):
    axes = axes_of(ENCODERS)
    lines = [line.get_ydata()[0] for line in axes.lines if line.get_ls() == "--"]
    assert lines == [11, 24]
    labels = {t.get_text(): t.xy[1] for t in axes.texts if "card" in t.get_text()}
    assert labels == {"11 GiB card": 11, "24 GiB card": 24}
    bands = [patch.get_extents() for patch in axes.patches]
    back = axes.transData.inverted()
    edges = [back.transform([(0, band.y0), (0, band.y1)])[:, 1] for band in bands]
    np.testing.assert_allclose(edges, [(9, 11), (21, 24)])


def test_names_stand_within_the_picture_and_cover_neither_names_nor_marks(axes_of):
    axes = axes_of(ENCODERS)
    texts = names(axes, ENCODERS)
    assert set(texts) == {point.name for point in ENCODERS}
    boxes = [text.get_window_extent() for text in texts.values()]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    within = axes.bbox
    for box in boxes:
        assert within.x0 <= box.x0 <= box.x1 <= within.x1
        assert within.y0 <= box.y0 <= box.y1 <= within.y1
        for point in ENCODERS:
            assert not box.contains(*axes.transData.transform(place(point)))


@pytest.mark.parametrize("count", [1, 2])
def test_one_encoder_and_equal_ones_can_be_drawn(axes_of, count):
    points = [EncoderPoint(f"same{i}", "revnet", "II", 1.5, GIB) for i in range(count)]
    assert len(names(axes_of(points), points)) == count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eer_percent": 0.0}, r"'a' has an error rate of 0\.0"),
        ({"peak_bytes": np.inf}, "inf bytes"),
        ({"recompute_bytes": 0.0}, r"recomputed 0\.0"),
    ],
)
def test_an_encoder_without_a_place_is_refused(tmp_path, change, message):
    figures = {"eer_percent": 1.0, "peak_bytes": 1e9} | change
    point = EncoderPoint("a", "resnet", "vanilla", **figures)
    with pytest.raises(ValueError, match=message):
        encoder_map([point], tmp_path / "map.png", **WORDS)


@pytest.mark.parametrize(
    ("points", "message"),
    [([], "no encoder to draw"), ([*ENCODERS, ENCODERS[0]], "'small' is there twice")],
)
def test_none_and_the_same_twice_are_refused(tmp_path, points, message):
    with pytest.raises(ValueError, match=message):
        encoder_map(points, tmp_path / "map.png", **WORDS)


def placed(*, lines=NO_LINES, marks=((100.0, 100.0, 3.0),), within=(0.0, 200.0)):
    """Where one label of 40 by 8 at (100, 100) goes."""
    (label,) = place_labels(
        np.array([[100.0, 100.0]]),
        np.array([[40.0, 8.0]]),
        marks=np.array(marks),
        lines=np.array(lines),
        within=np.array([[within[0]] * 2, [within[1]] * 2]),
    )
    return label


def test_a_label_stands_beside_its_point_and_gives_way_to_lines_and_edges():
    free = placed()
    assert free.centre[0] > 120
    assert free.centre[1] == 100
    assert free.leader is None
    line_to_the_right = [[[100.0, 100.0], [200.0, 100.0]]]
    assert placed(lines=line_to_the_right).centre[0] < 80
    assert placed(within=(0.0, 120.0)).centre[0] <= 100


@pytest.mark.parametrize("number", [2, 4, 6])
def test_labels_of_close_points_do_not_cover_each_other(number):
    points = np.array([[100.0 + 5 * i, 100.0] for i in range(number)])
    labels = place_labels(
        points,
        np.full((number, 2), (40.0, 8.0)),
        marks=np.column_stack([points, np.full(number, 3.0)]),
        lines=NO_LINES,
        within=np.array([[0.0, 0.0], [250.0, 200.0]]),
    )
    for one, other in itertools.combinations(labels, 2):
        across, up = np.abs(one.centre - other.centre)
        assert across >= 40 or up >= 8


def test_a_label_without_room_stands_off_and_is_tied_to_its_point():
    steps = (-14.0, 0.0, 14.0)
    ring = [(100.0 + x, 100.0 + y, 8.0) for x in steps for y in steps]
    label = placed(marks=ring)
    np.testing.assert_allclose(label.leader[0], [100, 100])
    assert np.all(np.abs(label.leader[1] - label.centre) <= [20 + 1e-9, 4 + 1e-9])
    assert np.abs(label.centre - 100).max() > 22
