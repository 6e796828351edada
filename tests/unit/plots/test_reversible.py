"""The picture of a reversible block shows what it was given, and refuses the rest."""

import pytest

from speechbrain_rev.plots import reversible_step
from speechbrain_rev.plots.style import MODE_COLOURS
from speechbrain_rev.sizes import MIB
from tests.docs.figures import MODES, alive

ALIVE = {
    "store": ([MIB, 3 * MIB], [3 * MIB, 2 * MIB, 0]),
    "reconstruct": ([MIB, MIB], [MIB, 0]),
}
WORDS = {"title": "T", "source": "S"}


@pytest.fixture
def drawn(figures, tmp_path):
    """Draw, and give the axes of what was written."""

    def draw(given):
        path = tmp_path / "reversible.png"
        reversible_step(given, path, **WORDS)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return figures[-1].axes

    return draw


def test_curves_are_the_bytes_given_and_passes_are_equally_long(drawn):
    axes = drawn(ALIVE)[-1]
    lines = {line.get_label(): line for line in axes.lines if line.get_label() in ALIVE}
    assert lines["store"].get_xdata().tolist() == [0, 1, 1, 1.5, 2]
    assert lines["store"].get_ydata().tolist() == [1, 3, 3, 2, 0]
    assert lines["reconstruct"].get_ydata().tolist() == [1, 1, 1, 0]
    assert lines["store"].get_color() == MODE_COLOURS["store"]


def test_the_block_is_drawn_forward_and_backward(drawn):
    forward, backward, _ = drawn(ALIVE)
    for axes, sign in ((forward, "+"), (backward, "\N{MINUS SIGN}")):
        words = [text.get_text() for text in axes.texts]
        assert [words.count(word) for word in ("F", "G", sign)] == [1, 1, 2]


def test_the_committed_picture_shows_what_it_says():
    """Reconstruction keeps as little at any depth, other modes more with each block."""
    peaks = {
        mode: [max(map(max, alive(mode, blocks))) for blocks in (4, 8)]
        for mode in MODES
    }
    grown = {mode: deep / shallow for mode, (shallow, deep) in peaks.items()}
    assert grown["store"] > 1.8
    assert 1.2 < grown["recompute"] < grown["store"]
    assert grown["reconstruct"] < 1.1
