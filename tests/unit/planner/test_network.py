"""Any module can be a network of named blocks, each with modes of its own."""

import copy

import pytest
import torch
from torch import nn

from speechbrain_rev.modes import LOSSLESS
from speechbrain_rev.planner.network import NamedBlocks, as_network
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    Mode,
    Recompute,
    ReversibleChain,
    recompute_blocks,
)
from speechbrain_rev.reversible.wrapping import recomputes, store_blocks
from tests.unit.planner.networks import (
    Chained,
    encoder,
    gradients,
    half,
    layers,
    on_meta,
    peak_of,
    plain,
)


def test_an_encoder_is_a_network_by_itself():
    module = encoder("revnet46")
    assert as_network(module) is module
    with pytest.raises(
        ValueError, match=r"names its blocks by itself; leave out .*'a'"
    ):
        as_network(module, ["a"])


def test_blocks_of_chains_need_no_names():
    network = as_network(Chained(depth=2))
    names = ["body.blocks.0", "body.blocks.1"]
    assert list(network.named_blocks()) == names
    assert network.allowed_modes() == dict.fromkeys(names, LOSSLESS)
    assert network.block_modes() == dict.fromkeys(names, Mode.RECONSTRUCT)


def test_a_chain_is_a_network_too():
    chain = ReversibleChain([AdditiveCoupling(nn.Tanh(), nn.Tanh())])
    assert list(as_network(chain).named_blocks()) == ["blocks.0"]


def test_named_blocks_come_beside_those_of_chains():
    module = Chained(depth=2)
    network = as_network(module, ["head", "tail"])
    assert set(network.named_blocks()) == {
        "head", "tail", "body.blocks.0", "body.blocks.1",
    }  # fmt: skip
    assert network.named_blocks()["tail"] is module.tail
    assert network.allowed_modes()["head"] == (Mode.STORE, Mode.RECOMPUTE)


@pytest.mark.parametrize("pattern", ["*", "body", "body.blocks.*", "body.blocks.0.f"])
def test_what_is_within_a_chain_or_is_one_is_no_block_of_its_own(pattern):
    network = as_network(Chained(depth=1), ["head", pattern])
    assert not [n for n in network.named_blocks() if n == "body" or ".f" in n]
    assert "body.blocks.0" in network.named_blocks()


@pytest.mark.parametrize("module", [plain(2), nn.Linear(2, 2), nn.Identity()])
def test_a_module_without_chains_needs_names(module):
    with pytest.raises(ValueError, match="No name was given"):
        as_network(module)


def test_a_name_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="a name like 'blocks"):
        as_network(plain(2), ["blocks.*"])


def test_modes_are_given_and_read():
    network = as_network(Chained(depth=2), ["head", "tail"])
    modes = {
        "head": Mode.RECOMPUTE,
        "tail": Mode.STORE,
        "body.blocks.0": Mode.STORE,
        "body.blocks.1": Mode.RECOMPUTE,
    }
    network.set_mode({name: mode.value for name, mode in modes.items()})
    assert network.block_modes() == modes
    network.set_mode({"tail": "recompute"})
    assert network.block_modes() == modes | {"tail": Mode.RECOMPUTE}


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ({"head": "store", "neck": "store"}, "'neck' cannot be given mode 'store'"),
        ({"head": "reconstruct"}, "'head' cannot be given mode 'reconstruct'"),
        ({"head": "keep"}, "There is no memory mode 'keep'"),
    ],
)
def test_modes_that_a_block_cannot_have_are_refused_and_none_is_given(modes, message):
    module = Chained(depth=1)
    network = as_network(module, ["head"])
    network.set_mode({"head": "recompute"})
    with pytest.raises(ValueError, match=message):
        network.set_mode(modes)
    assert network.block_modes()["head"] is Mode.RECOMPUTE


def test_where_one_block_fails_all_keep_the_modes_that_they_had():
    module = Chained(depth=2)
    network = as_network(module, ["head", "tail"])
    module.body.set_mode(["compress", "recompute"])
    network.set_mode({"head": "recompute"})
    before, classes = network.block_modes(), [type(m) for m in module.modules()]
    module.tail.forward = module.tail.forward
    wanted = {"body.blocks.0": "store", "body.blocks.1": "store", "head": "store"}
    with pytest.raises(ValueError, match=r"tail .* has a forward of its own"):
        network.set_mode({**wanted, "tail": "recompute"})
    assert network.block_modes() == before
    assert [type(m) for m in module.modules()] == classes
    network.set_mode(wanted)
    assert set(network.block_modes().values()) == {Mode.STORE}


def test_what_is_behind_recompute_always_recomputes():
    module = nn.Sequential(Recompute(nn.Linear(2, 2)), nn.Linear(2, 2))
    network = as_network(module, ["0", "1"])
    assert network.allowed_modes()["0"] == (Mode.RECOMPUTE,)
    assert network.block_modes()["0"] is Mode.RECOMPUTE
    with pytest.raises(ValueError, match="'0' cannot be given mode 'store'"):
        network.set_mode({"0": "store"})


def test_a_block_without_a_tensor_is_refused():
    class Silent(nn.Module):
        def forward(self, x):
            return None

    module = nn.Sequential(Silent())
    network = as_network(module, ["0"])
    with network.watched(), pytest.raises(ValueError, match="Silent returns no tensor"):
        module(torch.zeros(1))


def test_a_block_may_return_several_tensors():
    class Two(nn.Module):
        def forward(self, x):
            return {"detached": x.detach(), "y": [x * 2, 3]}

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.two = nn.Linear(2, 2), Two()

        def forward(self, x):
            return self.two(self.linear(x))["y"][0]

    from speechbrain_rev.planner.trace import trace_bytes

    module, step = on_meta(Network(), torch.randn(3, 2))
    trace = trace_bytes(as_network(module, ["linear", "two"]), step)
    assert list(trace.blocks) == ["linear", "two"]


def test_watching_leaves_no_hook_even_after_an_error():
    module = Chained(depth=1)
    network = as_network(module, ["head", "tail"])
    with pytest.raises(RuntimeError), network.watched():
        module(torch.zeros(1, 3))
    assert not module.head._forward_hooks
    assert not module.tail._forward_pre_hooks


class Kept(nn.Sequential):
    """A class of its own, with state."""


def recomputed_and_stored(module):
    recompute_blocks(module, "*")
    assert all(recomputes(block) for block in module)
    return store_blocks(module, "*")


def test_storing_again_restores_class_attributes_and_state():
    module = nn.Sequential(Kept(nn.Linear(4, 4), nn.BatchNorm1d(4)), layers(4, 8))
    module[0].extra = "kept"
    classes = [type(m) for m in module.modules()]
    tensors = [id(t) for t in module.state_dict(keep_vars=True).values()]
    recomputed_and_stored(module)
    assert [type(m) for m in module.modules()] == classes
    assert type(module[0]) is Kept
    assert module[0].extra == "kept"
    assert [id(t) for t in module.state_dict(keep_vars=True).values()] == tensors
    assert "Recompute" not in repr(module)


def test_storing_again_restores_gradients_and_statistics_to_the_bit():
    torch.manual_seed(0)
    fresh = nn.Sequential(half(8), nn.Dropout(0.5), half(8))
    again = recomputed_and_stored(copy.deepcopy(fresh))
    x = torch.randn(16, 8)
    torch.manual_seed(1)
    expected = gradients(fresh, x)
    torch.manual_seed(1)
    found = gradients(again, x)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_storing_again_restores_memory():
    module, step = on_meta(plain(4), torch.randn(64, 64))
    stored = peak_of(step)
    recompute_blocks(module, "?")
    assert peak_of(step) < 0.8 * stored
    store_blocks(module, "?")
    assert peak_of(step) == stored


def test_storing_again_undoes_nesting_from_the_inside_and_from_the_outside():
    module = nn.Sequential(Kept(nn.Linear(4, 4), nn.Tanh()))
    recompute_blocks(module, "0")
    recompute_blocks(module, "0.1")
    store_blocks(module, "0")
    assert type(module[0]) is Kept
    assert recomputes(module[0][1])
    store_blocks(module, "0.1")
    assert type(module[0][1]) is nn.Tanh


def test_copies_and_chains_of_modes_do_not_pile_up():
    module = plain(2)
    network = NamedBlocks(module, "?")
    classes = set()
    for mode in ("recompute", "store") * 3:
        network.set_mode({"0": mode})
        classes.add(type(module[0]))
    assert len(classes) == 2
    assert type(copy.deepcopy(module)[0]) is nn.Sequential


def test_storing_what_stores_changes_nothing():
    module = plain(2)
    assert store_blocks(module, "?") is module
    assert type(module[0]) is nn.Sequential
    with pytest.raises(ValueError, match="a name like 'blocks"):
        store_blocks(module, "blocks")
