"""Any module can be a network of named blocks, each with modes that it can really have."""

import pytest
import torch
from torch import nn

from speechbrain_rev.modes import LOSSLESS, WITHOUT_INVERSE
from speechbrain_rev.planner.network import as_network
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.reversible import (
    Mode,
    Recompute,
)
from tests.unit.planner.networks import (
    Chained,
    Returning,
    chain,
    encoder,
    on_meta,
    plain,
)

IN_CHAIN = ["body.blocks.0", "body.blocks.1"]


def test_an_encoder_is_a_network_by_itself():
    module = encoder("revnet46")
    assert as_network(module) is module
    with pytest.raises(
        ValueError, match=r"names its blocks by itself; leave out .*'a'"
    ):
        as_network(module, ["a"])


@pytest.mark.parametrize(
    ("module", "given", "names"),
    [
        (Chained(depth=2), (), IN_CHAIN),
        (chain(1, 4), (), ["blocks.0"]),
        (Chained(depth=2), ("head", "tail"), ["head", "tail", *IN_CHAIN]),
        # What is within a chain, or is one, is no block of its own.
        *(
            (Chained(depth=2), ("head", inside), ["head", *IN_CHAIN])
            for inside in ("body", "body.blocks.*", "body.blocks.0.f")
        ),
        (plain(2), "*", ["0", "1"]),
    ],
)
def test_blocks_of_chains_need_no_names_and_named_ones_come_beside(
    module, given, names
):
    network = as_network(module, given)
    blocks = network.named_blocks()
    assert set(blocks) == set(names)
    assert all(module.get_submodule(name) is block for name, block in blocks.items())
    for name, modes in network.allowed_modes().items():
        assert modes == (LOSSLESS if "blocks" in name else WITHOUT_INVERSE)


@pytest.mark.parametrize(
    ("module", "names", "message"),
    [
        *((module, [], "No name was given") for module in (plain(2), nn.Identity())),
        (plain(2), ["blocks.*"], "a name like 'blocks"),
        (plain(2), None, r"blocks is None: give names of submodules .* 'blocks\.\*'"),
    ],
)
def test_a_module_without_chains_needs_names_that_match(module, names, message):
    with pytest.raises(ValueError, match=message):
        as_network(module, names)


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ({"head": "store", "neck": "store"}, "'neck' cannot be given mode 'store'"),
        ({"head": "reconstruct"}, "'head' cannot be given mode 'reconstruct'"),
        ({"head": "keep"}, "There is no memory mode 'keep'"),
        (
            {**dict.fromkeys(["head", *IN_CHAIN], "store"), "tail": "recompute"},
            r"tail .* has a forward of its own",
        ),
    ],
)
def test_modes_that_a_block_cannot_have_are_refused_and_none_is_given(modes, message):
    module = Chained(depth=2)
    module.tail.forward = module.tail.forward
    network = as_network(module, ["head", "tail"])
    module.body.set_mode(["compress", "recompute"])
    network.set_mode({"head": "recompute"})
    before, classes = network.block_modes(), [type(m) for m in module.modules()]
    with pytest.raises(ValueError, match=message):
        network.set_mode(modes)
    assert network.block_modes() == before
    assert [type(m) for m in module.modules()] == classes


def test_what_is_behind_recompute_always_recomputes():
    module = nn.Sequential(Recompute(nn.Linear(2, 2)), nn.Linear(2, 2))
    network = as_network(module, ["0", "1"])
    assert network.allowed_modes()["0"] == (Mode.RECOMPUTE,)
    assert network.block_modes()["0"] is Mode.RECOMPUTE
    with pytest.raises(ValueError, match="'0' cannot be given mode 'store'"):
        network.set_mode({"0": "store"})


def test_a_block_returns_one_tensor_or_several_but_not_none():
    two = Returning(lambda x: {"detached": x.detach(), "y": [x * 2, 3]})
    last = Returning(lambda outputs: outputs["y"][0])
    module, step = on_meta(nn.Sequential(nn.Linear(2, 2), two, last), torch.ones(3, 2))
    assert list(trace_bytes(as_network(module, ["0", "1"]), step).blocks) == ["0", "1"]
    silent = nn.Sequential(Returning(lambda x: None))
    with (
        as_network(silent, ["0"]).watched(),
        pytest.raises(ValueError, match="Returning returns no tensor"),
    ):
        silent(torch.zeros(1))
