"""Some blocks of a network compressed, and nothing else of it."""

import copy
import pickle

import pytest
import torch
from torch import nn

from speechbrain_rev.compression import ActivationCompression, compress_activations
from speechbrain_rev.compression.activations import (
    compress_within,
    compression_in,
    stop_compressing,
)
from speechbrain_rev.reversible import Mode, recompute_blocks
from speechbrain_rev.reversible.wrapping import give_mode, mode_of, store_blocks


class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU())


def network_of(*chosen):
    torch.manual_seed(0)
    network = nn.Sequential(*(Layer() for _ in range(3)))
    compress_within(network, ActivationCompression())
    give_mode(network, Mode.COMPRESS, *map(str, chosen))
    return network


def layers_of(network):
    torch.manual_seed(1)
    network(torch.randn(4, 8, 40)).square().sum().backward()
    return set(compression_in(network).records)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))]
)
def test_copies_compress_the_same_blocks_by_their_own(duplicate):
    network = network_of(1)
    other = duplicate(network)
    assert layers_of(other) == {"1.0", "1.1"}
    assert not compression_in(network).records
    for own, theirs in zip(network.parameters(), other.parameters(), strict=True):
        assert own.grad is None
        assert theirs.grad is not None


def test_more_blocks_can_be_chosen_and_all_be_stored_again():
    network = network_of(0)
    give_mode(network, Mode.COMPRESS, "2")
    compress_within(network, compression_in(network))
    assert layers_of(network) == {"0.0", "0.1", "2.0", "2.1"}
    store_blocks(network, "0")
    compression_in(network).records.clear()
    assert layers_of(network) == {"2.0", "2.1"}
    store_blocks(network, "*")
    stop_compressing(network)
    assert compression_in(network) is None
    assert [mode_of(block) for block in network] == 3 * [Mode.STORE]
    assert all("forward" not in vars(m) for m in network.modules())


def test_a_forward_of_one_s_own_is_called_and_stays():
    network = nn.Sequential(Layer(), Layer())
    calls = []

    def forward(x):
        calls.append(len(x))
        return nn.Sequential.forward(network[0], x)

    network[0].forward = forward
    compress_within(network, ActivationCompression())
    give_mode(network, Mode.COMPRESS, "0")
    assert layers_of(network) == {"0.0", "0.1"}
    assert calls == [4]
    with pytest.raises(ValueError, match="has a forward of its own"):
        recompute_blocks(network, "0")
    assert mode_of(network[0]) is Mode.COMPRESS
    store_blocks(network, "*")
    assert network[0].forward is forward


def test_an_error_within_a_block_ends_its_compression():
    network = network_of(0)
    with pytest.raises(RuntimeError, match="channels"):
        network(torch.randn(4, 9, 40))
    assert layers_of(network) == {"0.0", "0.1"}


def test_other_blocks_may_recompute():
    network = network_of(0, 2)
    exact = store_blocks(copy.deepcopy(network), "*")
    recompute_blocks(network, "1")
    assert layers_of(network) == {"0.0", "0.1", "2.0", "2.1"}
    torch.manual_seed(1)
    exact(torch.randn(4, 8, 40)).square().sum().backward()
    off, true = (
        torch.cat([p.grad.flatten() for p in own.parameters()])
        for own in (network, exact)
    )
    assert 0 < (off - true).norm() < 0.1 * true.norm()


def test_a_block_that_compressed_recomputes_and_the_other_way_round():
    network = network_of(0)
    recompute_blocks(network, "0")
    assert mode_of(network[0]) is Mode.RECOMPUTE
    assert layers_of(network) == set()
    give_mode(network, Mode.COMPRESS, "0")
    assert mode_of(network[0]) is Mode.COMPRESS
    assert type(network[0]) is Layer
    assert layers_of(network) == {"0.0", "0.1"}


def test_what_is_compressed_as_a_whole_has_no_block_to_choose():
    network = nn.Sequential(Layer())
    compression = compress_activations(network)
    with pytest.raises(ValueError, match=r"has all its activations .* Leave that call"):
        compress_within(network, ActivationCompression())
    stop_compressing(network)
    assert compression_in(network) is compression
