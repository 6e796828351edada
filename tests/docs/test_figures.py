"""The picture of a reversible block shows what it was given."""

import pytest

from speechbrain_rev.plots.style import MODE_COLOURS
from speechbrain_rev.sizes import MIB
from tests.docs.figures import MODES, alive, reversible_step
from tests.pictures import points_of, texts_of

ALIVE = {
    "store": ([MIB, 3 * MIB], [3 * MIB, 2 * MIB, 0]),
    "reconstruct": ([MIB, MIB], [MIB, 0]),
}


def test_curves_are_the_bytes_given_beside_the_block_forward_and_backward(drawn):
    forward, backward, axes = drawn(reversible_step, ALIVE, title="T", source="S").axes
    lines = {line.get_label(): line for line in axes.lines}
    # Passes are equally long.
    stored = [(0, 1), (1, 3), (1, 3), (1.5, 2), (2, 0)]
    assert points_of(lines["store"]) == stored
    assert points_of(lines["reconstruct"]) == [(0, 1), (1, 1), (1, 1), (2, 0)]
    assert lines["store"].get_color() == MODE_COLOURS["store"]
    for drawing, sign in ((forward, "+"), (backward, "\N{MINUS SIGN}")):
        words = texts_of(drawing.texts)
        assert [words.count(word) for word in ("F", "G", sign)] == [1, 1, 2]


@pytest.mark.slow
def test_the_committed_picture_shows_what_it_says():
    """Reconstruction keeps as little at any depth, other modes more with each block."""

    def grown(mode):
        shallow, deep = (max(map(max, alive(mode, blocks))) for blocks in (4, 8))
        return deep / shallow

    growth = {mode: grown(mode) for mode in MODES}
    assert growth["store"] > 1.8
    assert 1.2 < growth["recompute"] < growth["store"]
    assert growth["reconstruct"] < 1.1
