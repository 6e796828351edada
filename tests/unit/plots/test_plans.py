import pytest
from matplotlib.colors import to_rgba

from speechbrain_rev.plots import plan_map
from speechbrain_rev.plots.style import MODE_COLOURS

WORDS = {"title": "T", "source": "S"}
PLANS = {
    8: {"stem": "store", "b.0": "store", "b.1": "store"},
    32: {"stem": "store", "b.0": "reconstruct", "b.1": "store"},
    16: {},
    64: {"stem": "recompute", "b.0": "reconstruct", "b.1": "reconstruct"},
}
SPEEDS = {8: 50.0, 32: 70.0, 64: 60.0}


def colours_of(mesh):
    """What a cell shows, [block][batch]."""
    values = mesh.get_array().reshape(mesh._coordinates.shape[0] - 1, -1)
    return [[tuple(mesh.cmap(mesh.norm(v))) for v in row] for row in values]


def test_each_cell_has_the_colour_of_its_mode(figures, tmp_path):
    path = tmp_path / "plans.png"
    plan_map(PLANS, SPEEDS, path, **WORDS)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    upper, lower = figures[-1].axes
    for block, row in zip(PLANS[8], colours_of(upper.collections[0]), strict=True):
        for batch, colour in zip(sorted(PLANS), row, strict=True):
            mode = PLANS[batch].get(block)
            assert colour == to_rgba(MODE_COLOURS[mode] if mode else "white")
    (line, best) = lower.lines
    assert [tuple(p) for p in line.get_xydata()] == sorted(SPEEDS.items())
    assert best.get_xdata()[0] == 32
    assert [t.get_text() for t in lower.texts] == ["70 at batch 32"]
    names = [text.get_text() for text in upper.get_legend().texts]
    assert names == ["store", "reconstruct", "recompute"]
    assert [t.get_text() for t in upper.get_yticklabels()] == ["stem", "b.0", "b.1"]
    # The first block is at the top.
    assert upper.yaxis_inverted()
    # Cells are as wide as batches are apart.
    edges = upper.collections[0].get_coordinates()[0, :, 0]
    assert list(edges) == [4, 12, 24, 48, 80]


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
def test_many_blocks_are_named_by_chain(figures, tmp_path, blocks, labels):
    plan_map({8: dict.fromkeys(blocks, "store")}, {8: 1.0}, tmp_path / "a.png", **WORDS)
    upper, lower = figures[-1].axes
    shown = [t.get_text() for t in upper.get_yticklabels()]
    assert shown == labels
    assert [t.get_text() for t in upper.get_legend().texts] == ["store"]
    assert lower.get_ylabel() == "utterances per second"
