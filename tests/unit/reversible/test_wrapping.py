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

from speechbrain_rev.modes import Mode
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import AdditiveCoupling, recompute_blocks
from speechbrain_rev.reversible.recompute import JoinWarning
from speechbrain_rev.reversible.wrapping import (
    chosen_blocks,
    give_mode,
    mode_of,
    recomputes,
    store_blocks,
)

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


class Passing(nn.Module):
    """A block of a row that hands its input, a mask and a list of maps on."""

    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(40)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, mask, *, scale):
        y = self.outer(self.drop(torch.relu(self.inner(x))))
        return scale * torch.tanh(self.norm(x + y)) * mask, mask


class Rows(nn.Module):
    """Blocks one after the other, as networks of others call them."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Passing() for _ in range(6))
        self.between = between
        self.double()

    def forward(self, x):
        mask = (torch.rand(3, 40, 1) > 0.2).double()
        for block in self.blocks:
            x, mask = block(x, mask, scale=1.5)
            x = x if self.between is None else self.between(x)
        return x


def in_runs(network, pattern, length):
    """Let blocks run again in runs of some length."""
    for i, name in enumerate(chosen_blocks(network, [pattern])):
        give_mode(network, Mode.JOIN if i % length else Mode.RECOMPUTE, name)
    return network


@pytest.mark.parametrize("length", [2, 3, 10])
@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (Rows, "blocks.*"),
        (resnet, "layer?.*"),
        (lambda: nn.Sequential(*(attention() for _ in range(4))), "*"),
    ],
)
def test_runs_of_blocks_have_the_bits_of_stored_ones(make, pattern, length):
    network, stored = in_runs(make(), pattern, length), make()
    expected, state = gradients(stored), torch.get_rng_state()
    assert_same_bits(gradients(network), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_bits(dict(network.named_buffers()), dict(stored.named_buffers()))


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_run_again_in_the_same_runs(clone):
    twin = clone(in_runs(Rows(), "blocks.*", 3))
    modes = [mode_of(block).value for block in twin.blocks]
    assert modes == ["recompute", "join", "join"] * 2
    assert_same_bits(gradients(twin), gradients(Rows()))


def test_each_block_of_a_run_runs_twice_and_a_kept_graph_keeps_no_activations():
    layers = [Counted(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(5)]
    network = in_runs(nn.Sequential(*layers), "?", 3)
    network(torch.randn(2, 8)).sum().backward()
    assert [layer.variables.runs() for layer in layers] == [[False, True]] * 5
    x = torch.randn(2, 8, requires_grad=True)
    loss = network(x).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(loss, x))
    assert all(len(layer.variables.runs()) >= 5 for layer in layers)


def test_a_branch_that_goes_back_before_the_rest_does_not_break_its_run():
    """What a block of the run kept for itself has its gradient, in any order."""

    class Branched(nn.Sequential):
        def forward(self, x):
            self.aside = (x.detach() @ self[0].weight).tanh()
            return super().forward(x)

    def gradients_of(length):
        torch.manual_seed(0)
        network = nn.Sequential(
            *(Branched(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        )
        if length:
            in_runs(network, "?", length)
        y = network(torch.linspace(-1, 1, 16).view(2, 8)).sum()
        network[1].aside.sum().backward()
        y.backward()
        network[2].aside.sum().backward()
        return {name: p.grad for name, p in network.named_parameters()}

    assert_same_bits(gradients_of(4), gradients_of(0))


@pytest.mark.parametrize(
    "between", [lambda x: x * 1.0, lambda x: x.mul_(1.0), lambda x: x.view_as(x)]
)
def test_a_block_that_does_not_follow_the_one_before_keeps_its_input(between):
    network, stored = in_runs(Rows(between), "blocks.*", 6), Rows(between)
    with pytest.warns(
        JoinWarning, match="Passing has mode 'join', but its input"
    ) as seen:
        assert_same_bits(gradients(network), gradients(stored))
    assert len([each for each in seen if each.category is JoinWarning]) == 5
    gradients(network)  # It was reported, once.


@pytest.mark.slow
def test_the_peak_of_equal_blocks_grows_as_the_root_of_their_number():
    def peak(count, length):
        with torch.device("meta"):
            blocks = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count))
            network = nn.Sequential(*blocks)
            for p in network.parameters():
                p.grad = torch.zeros_like(p)
            x = torch.randn(1000, 16)
        in_runs(network, "*", length)
        return live_bytes_peak(lambda: network(x).square().sum().backward())

    # Twice as many inputs, and twice as long a run, of four times as many blocks.
    assert peak(64, 8) <= 2.05 * peak(16, 4)
    assert peak(64, 1) >= 3 * peak(16, 1)
    assert peak(64, 8) <= 0.35 * peak(64, 1)
