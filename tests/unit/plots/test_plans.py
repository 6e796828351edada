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


def test_one_batch_is_enough(figures, tmp_path):
    plan_map({8: PLANS[8]}, {8: 1.0}, tmp_path / "plans.png", **WORDS)
    names = [t.get_text() for t in figures[-1].axes[0].get_legend().texts]
    assert names == ["store"]


def test_many_blocks_are_named_by_chain(figures, tmp_path):
    names = ["stem", *(f"stages.{i}.chain.{j}" for i in range(2) for j in range(20))]
    plan_map({8: dict.fromkeys(names, "store")}, {8: 1.0}, tmp_path / "a.png", **WORDS)
    labels = figures[-1].axes[0].get_yticklabels()
    assert [t.get_text() for t in labels] == ["stages.0.chain", "stages.1.chain"]


def test_a_block_that_is_alone_has_its_own_name(figures, tmp_path):
    chains = [[f"stages.{i}.chain.{j}" for j in range(10)] for i in range(2)]
    names = ["stem", *chains[0], "stages.1.entry", *chains[1]]
    plan_map({8: dict.fromkeys(names, "store")}, {8: 1.0}, tmp_path / "a.png", **WORDS)
    upper, lower = figures[-1].axes
    assert [t.get_text() for t in upper.get_yticklabels()] == [
        "stem",
        "stages.0.chain",
        "stages.1.entry",
        "stages.1.chain",
    ]
    assert lower.get_ylabel() == "utterances per second"


@pytest.mark.parametrize(
    ("plans", "speeds", "what"),
    [
        ({}, {}, "There is no plan"),
        ({8: {}}, {}, "There is no plan"),
        ({8: {"a": "store"}, 9: {"b": "store"}}, {8: 1, 9: 1}, "batch 9 is for b, "),
        (
            {8: {"a": "keep"}},
            {8: 1},
            "'a' in the plan of batch 8 has the mode 'keep'; modes are 'store'",
        ),
        ({8: {"a": "store"}}, {}, "Batch 8 trains nan"),
        ({8: {"a": "store"}}, {8: 0}, "Batch 8 trains 0"),
        ({8: {"a": "store"}}, {8: float("inf")}, "Batch 8 trains inf"),
        ({8: {"a": "store"}}, {8: 1, 9: 1}, "Batch 9 has a throughput but no plan"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, plans, speeds, what):
    with pytest.raises(ValueError, match=what):
        plan_map(plans, speeds, tmp_path / "plans.png", **WORDS)
    assert not list(tmp_path.iterdir())
