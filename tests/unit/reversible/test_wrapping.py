"""Networks and blocks of SpeechBrain's own, recomputed and reconstructed unchanged."""

import copy
import inspect
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from speechbrain.lobes.models.ECAPA_TDNN import (
    ECAPA_TDNN,
    SERes2NetBlock,
    TDNNBlock,
)
from speechbrain.lobes.models.ResNet import BasicBlock, ResNet, SEBasicBlock
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import AdditiveCoupling, recompute_blocks
from speechbrain_rev.reversible.wrapping import recomputes, store_blocks

from .chains import (
    FLOAT64,
    Counted,
    assert_same_bits,
    distance,
    equal_to_plain,
    make_chain,
    train_once,
)

#: float64 rounding: gradients are added up in another order.
ROUNDING = 1e-12


def ecapa():
    torch.manual_seed(0)
    widths = {"attention_channels": 8, "se_channels": 8, "res2net_scale": 4}
    channels = [16] * 4 + [48]
    return ECAPA_TDNN(
        8, channels=channels, lin_neurons=6, dropout=0.2, **widths
    ).double()


def resnet():
    torch.manual_seed(0)
    sizes = {"channels": [4, 4, 8, 8], "block_sizes": [1, 2, 1, 1]}
    return ResNet(8, lin_neurons=6, **sizes).double()


def shared():
    """A block in two places, with batch statistics."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(40), nn.Dropout(), nn.Tanh())
    return nn.Sequential(block, nn.Linear(8, 8), block).double()


def attention():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1).double()


#: The names that halve the memory.
ECAPA_NAMES = ("blocks.*", "mfa", "asp.*")
RESNET_NAMES = ("layer?.*",)
each_network = pytest.mark.parametrize(
    ("make", "names"), [(ecapa, ECAPA_NAMES), (resnet, RESNET_NAMES)]
)


def gradients(network, run=None, **keywords):
    """The gradients of one step by name, that of the input included."""
    torch.manual_seed(1)
    x = torch.randn(3, 40, 8, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(2)
    run = network if run is None else run
    run(x, **keywords).square().sum().backward()
    return {"x": x.grad} | {n: p.grad for n, p in network.named_parameters()}


LENGTHS = torch.tensor([1.0, 0.5, 0.75])


@pytest.mark.parametrize(
    ("make", "calls", "chosen", "keywords"),
    [
        (ecapa, [ECAPA_NAMES], 8, {"lengths": LENGTHS}),
        (ecapa, [("*.tdnn?", "asp_bn")], 7, {}),
        (ecapa, [ECAPA_NAMES, ("blocks.*.*", "asp")], 25, {}),
        (resnet, [("layer?", "attention")], 5, {}),
        (resnet, [("*",)], 11, {}),
        (shared, ["0"], 1, {}),
        (shared, ["2"], 1, {}),
        (attention, [("self_attn", "linear?")], 3, {}),
    ],
)
def test_gradients_and_buffers_are_those_of_the_network_as_it_came(
    make, calls, chosen, keywords
):
    network, stored = make(), make()
    for names in calls:
        recompute_blocks(network, *names)
    assert len([m for m in network.modules() if recomputes(m)]) == chosen
    expected = gradients(stored, **keywords)
    assert distance(gradients(network, **keywords), expected) <= ROUNDING
    assert_same_bits(dict(network.named_buffers()), dict(stored.named_buffers()))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (
            partial(ECAPA_TDNN, channels=[1024] * 4 + [3072], lin_neurons=192),
            ECAPA_NAMES,
        ),
        (partial(ResNet, lin_neurons=256), RESNET_NAMES),
    ],
)
@pytest.mark.slow
def test_one_line_halves_the_memory_of_an_utterance(make, names):
    with torch.device("meta"):
        network = make(80)

    def peak(batch):
        network.zero_grad()
        x = torch.randn(batch, 200, 80, device="meta")
        return live_bytes_peak(lambda: network(x).square().sum().backward())

    def of_an_utterance():
        return (peak(96) - peak(32)) / 64

    stored = of_an_utterance()
    recompute_blocks(network, *names)
    assert of_an_utterance() <= 0.5 * stored


@each_network
def test_nothing_gets_another_name_type_or_identity(make, names):
    network, stored = make(), make()
    parts = [*network.modules(), *network.parameters()]
    assert recompute_blocks(network, *names) is network
    left = [*network.modules(), *network.parameters()]
    assert all(a is b for a, b in zip(left, parts, strict=True))
    assert list(network.state_dict()) == list(stored.state_dict())
    pairs = zip(network.named_modules(), stored.named_modules(), strict=True)
    for (name, module), (other_name, other) in pairs:
        assert name == other_name
        assert isinstance(module, type(other))
        assert type(module).__name__ == type(other).__name__
        assert vars(module).keys() == vars(other).keys()
        assert inspect.signature(module.forward) == inspect.signature(other.forward)
    recomputed = repr(network)
    assert repr(store_blocks(network, *names)) == repr(stored) != recomputed


@pytest.mark.parametrize(
    "clone",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: pickle.loads(pickle.dumps(m, protocol=0)),
    ],
    ids=["copy", "pickle", "old pickle"],
)
def test_copies_recompute_alike(clone):
    network = recompute_blocks(ecapa(), *ECAPA_NAMES)
    twin = clone(network)
    assert repr(twin) == repr(network)
    assert_same_bits(gradients(twin), gradients(network))


@pytest.mark.parametrize(
    ("calls", "runs"),
    [
        # Of matches within one another the outermost is taken.
        ([("1.0", "*")], [2, 2, 2]),
        # A second call changes nothing or nests.
        ([("*",), ("*",)], [2, 2, 2]),
        ([("*",), ("1.0",)], [2, 3, 2]),
    ],
)
def test_blocks_run_twice_in_training_and_once_elsewhere(calls, runs):
    layers = [Counted(nn.Linear(4, 4)) for _ in range(3)]
    network, x = nn.Sequential(layers[0], nn.Sequential(*layers[1:])), torch.ones(4)
    for names in calls:
        recompute_blocks(network, *names)
    network(x).sum().backward()
    assert [len(layer.variables.runs()) for layer in layers] == runs
    with torch.no_grad():
        network(x)
    network.eval()(x).sum().backward()
    assert [len(layer.variables.runs()) - 2 for layer in layers] == runs


@pytest.fixture
def one_process(tmp_path):
    store = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        partial(torch.compile, backend="eager"),
        torch.jit.script,
    ],
)
@pytest.mark.usefixtures("one_process")
def test_wrapped_networks_compute_the_same(wrap):
    network = recompute_blocks(resnet(), *RESNET_NAMES)
    grads, expected = gradients(network, wrap(network)), gradients(resnet())
    assert distance(grads, expected) <= ROUNDING


def patched():
    network = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
    network[1].forward = torch.sin
    return network


def partly_scripted():
    return nn.Sequential(nn.Tanh(), torch.jit.script(nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("make", "names", "message"),
    [
        (ecapa, (), r"No name was given\. ECAPA_TDNN has blocks\.0 .*'blocks\.\*'"),
        (ecapa, ("blocks.*", "block.*"), r"like 'block\.\*'. .* mfa \(TDNNBlock\)"),
        # A list is no module that is called.
        (ecapa, ("blocks",), "a name like 'blocks'"),
        (ecapa, ("",), "a name like ''"),
        (ecapa, (TDNNBlock,), r"TDNNBlock.* is no name"),
        (lambda: nn.Linear(4, 4), ("*",), r"Linear has no submodules .* Recompute\("),
        (partly_scripted, ("*",), "1 is scripted"),
        (patched, ("*",), r"1 \(Linear\) has a forward of its own"),
    ],
)
def test_what_cannot_be_chosen_is_refused_and_nothing_is_changed(make, names, message):
    network = make()
    with pytest.raises((ValueError, TypeError), match=message):
        recompute_blocks(network, *names)
    assert not any(map(recomputes, network.modules()))


@pytest.mark.usefixtures("stream_format")
@pytest.mark.parametrize(
    ("f", "g", "shape"),
    [
        (
            partial(TDNNBlock, 16, 16, 3, 1, dropout=0.2),
            partial(SERes2NetBlock, 16, 16, 4, se_channels=8, kernel_size=3),
            (2, 16, 40),
        ),
        (partial(SEBasicBlock, 16, 16), partial(BasicBlock, 16, 16), (2, 16, 6, 10)),
    ],
)
def test_chains_of_speechbrain_blocks_train_as_plain_couplings_do(f, g, shape):
    def inputs(dtype):
        torch.manual_seed(1)
        return [torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(2)]

    torch.manual_seed(0)
    chain = make_chain([AdditiveCoupling(f(), g()) for _ in range(2)]).double()
    equal_to_plain(chain, FLOAT64, partial(train_once, inputs=inputs))
