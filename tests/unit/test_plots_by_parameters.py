"""The picture of memory and largest batch by parameters."""

import functools
import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex

from speechbrain_rev.plots import SizedEncoder, by_parameters
from speechbrain_rev.plots.style import FAMILY_COLOURS

WORDS = {"title": "Planned", "source": "invented", "total_batch": 256}
FITS = SizedEncoder("a_rev", "revnet", "II", 6_000_000, 1e7, 6e7, 5e7, 800, 3e7, 300)
ALIKE = SizedEncoder("b_rev", "revnet", "I", 6_100_000, 1e7, 6e7, 5e7, 500, 4e7, 235)
LACKS = SizedEncoder("a_res", "df_resnet", "vanilla", 20_000_000, 1e8, 9e8, None, 60)
NOTHING = SizedEncoder("b_res", "resnet", "vanilla", 15_000_000, 1e8, 9e8, None, None)
ENCODERS = [FITS, ALIKE, LACKS, NOTHING]


@pytest.fixture(scope="module")
def axes_of(figures, tmp_path_factory):
    """Draw encoders; return both axes after checking that a PNG came out."""

    @functools.cache
    def draw(*encoders):
        path = tmp_path_factory.mktemp("drawn") / "plan.png"
        by_parameters(encoders, path, **WORDS)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        figures[-1].draw_without_rendering()
        return figures[-1].axes

    return draw


def places(axes, markers):
    lines = [line for line in axes.lines if line.get_marker() in markers]
    return sorted(tuple(xy) for line in lines for xy in line.get_xydata())


def bars(axes):
    lines = [line for line in axes.lines if line.get_alpha() == 0.35]
    return [tuple(line.get_ydata()) for line in lines if len(line.get_ydata())]


def test_marks_are_what_is_planned_and_crosses_what_was_published(axes_of):
    memory, batch = axes_of(*ENCODERS)
    assert places(memory, "o^s") == [(6, 50), (6.1, 50)]
    assert places(memory, "x") == [(6, 30), (6.1, 40)]
    assert places(batch, "o^s") == [(6, 800), (6.1, 500), (20, 60)]
    assert places(batch, "x") == [(6, 300), (6.1, 235)]
    assert memory.get_yscale() == batch.get_yscale() == "log"


def test_bars_lead_from_the_lightest_mode_to_all_stored_and_to_the_batch_here(axes_of):
    memory, batch = axes_of(*ENCODERS)
    assert bars(memory) == [(10, 60), (10, 60), (100, 900), (100, 900)]
    assert bars(batch) == [(300, 800), (235, 500)]
    (line,) = [line for line in batch.lines if line.get_ls() == "--"]
    assert list(line.get_ydata()) == [256, 256]


def test_families_have_colours_and_vanilla_encoders_are_hollow(axes_of):
    _, batch = axes_of(*ENCODERS)
    for line in batch.lines:
        if line.get_marker() in ("o", "^", "s") and len(line.get_xdata()):
            (family,) = {
                e.family for e in ENCODERS if e.largest_batch in line.get_ydata()
            }
            assert line.get_markeredgecolor() == FAMILY_COLOURS[family]
            hollow = to_hex(line.get_markerfacecolor()) == "#ffffff"
            assert hollow == (family == "df_resnet")


def test_names_stand_within_both_axes_and_apart(axes_of):
    for axes, missing in zip(axes_of(*ENCODERS), (set(), {"b_res"}), strict=True):
        texts = [text for text in axes.texts if text.get_text()]
        assert {t.get_text() for t in texts} == {e.name for e in ENCODERS} - missing
        boxes = [text.get_window_extent() for text in texts]
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        for box in boxes:
            assert axes.bbox.x0 <= box.x0 <= box.x1 <= axes.bbox.x1
            assert axes.bbox.y0 <= box.y0 <= box.y1 <= axes.bbox.y1


def test_one_encoder_that_fits_nothing_can_be_drawn(axes_of):
    memory, batch = axes_of(NOTHING)
    assert len(memory.texts) > 0
    assert not batch.texts


@pytest.mark.parametrize(
    ("encoders", "message"),
    [
        ([], "no encoder to draw"),
        ([FITS, FITS], "'a_rev' is there twice"),
        (
            [SizedEncoder("c", "revnet", "I", 1, 1.0, 1.0, np.inf, 1)],
            "planned_bytes of 'c' is inf",
        ),
        (
            [SizedEncoder("c", "revnet", "I", 1, 1.0, 1.0, None, 0)],
            "largest_batch of 'c' is 0",
        ),
    ],
)
def test_what_has_no_place_is_refused(encoders, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        by_parameters(encoders, tmp_path / "plan.png", **WORDS)
    assert not list(tmp_path.iterdir())
