import pytest
from matplotlib.colors import to_rgba

from speechbrain_rev.plots import plan_map
from speechbrain_rev.plots.style import MODE_COLOURS
from tests.pictures import points_of, texts_of

WORDS = {"title": "T", "source": "S"}
PLANS = {
    8: {"stem": "store", "b.0": "store", "b.1": "store"},
    32: {"stem": "store", "b.0": "reconstruct", "b.1": "store"},
    16: {},
    64: {"stem": "recompute", "b.0": "reconstruct", "b.1": "reconstruct"},
}
SPEEDS = {8: 50.0, 32: 70.0, 64: 60.0}


def test_each_cell_has_the_colour_of_its_mode(drawn):
    upper, lower = drawn(plan_map, PLANS, SPEEDS, **WORDS).axes
    mesh = upper.collections[0]
    shown = mesh.cmap(mesh.norm(mesh.get_array())).reshape(-1, 4).tolist()
    modes = [PLANS[batch].get(block) for block in PLANS[8] for batch in sorted(PLANS)]
    colours = [MODE_COLOURS[mode] if mode else "white" for mode in modes]
    assert shown == [list(to_rgba(colour)) for colour in colours]
    line, best = lower.lines
    assert points_of(line) == sorted(SPEEDS.items())
    assert best.get_xdata()[0] == 32
    assert texts_of(lower.texts) == ["70 at batch 32"]
    names = texts_of(upper.get_legend().texts)
    assert names == ["store", "reconstruct", "recompute"]
    # The first block is at the top.
    assert texts_of(upper.get_yticklabels()) == ["stem", "b.0", "b.1"]
    assert upper.yaxis_inverted()
    # Cells are as wide as batches are apart.
    assert list(mesh.get_coordinates()[0, :, 0]) == [4, 12, 24, 48, 80]


CHAINS = [[f"stages.{i}.chain.{j}" for j in range(20)] for i in range(2)]
BLOCKS = ["stem", *CHAINS[0][:10], "stages.1.entry", *CHAINS[1][:10]]


@pytest.mark.parametrize(
    ("blocks", "labels"),
    [
        (["stem"], ["stem"]),
        (BLOCKS, ["stem", "stages.0.chain", "stages.1.entry", "stages.1.chain"]),
        (["stem", *CHAINS[0], *CHAINS[1]], ["stages.0.chain", "stages.1.chain"]),
    ],
)
def test_many_blocks_are_named_by_chain(drawn, blocks, labels):
    plans = {8: dict.fromkeys(blocks, "store")}
    upper, lower = drawn(plan_map, plans, {8: 1.0}, **WORDS).axes
    assert texts_of(upper.get_yticklabels()) == labels
    assert texts_of(upper.get_legend().texts) == ["store"]
    assert lower.get_ylabel() == "utterances per second"
