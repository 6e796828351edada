"""Networks and blocks of SpeechBrain's own, recomputed and reconstructed unchanged."""

import copy
import inspect
import pickle
from functools import partial

import hyperpyyaml
import pytest
import torch
import torch.distributed as dist
from speechbrain.lobes.models.ECAPA_TDNN import (
    ECAPA_TDNN,
    Res2NetBlock,
    SERes2NetBlock,
    TDNNBlock,
)
from speechbrain.lobes.models.ResNet import BasicBlock, ResNet, SEBasicBlock
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import AdditiveCoupling, recompute_blocks

from .chains import (
    FLOAT64,
    as_global,
    distance,
    equal_to_plain,
    loss_of,
    make_chain,
    train_once,
)


@pytest.fixture(autouse=True)
def stream_format():
    """Only chains have streams: see each_format."""


each_format = pytest.mark.parametrize(
    "streams", ["exact", pytest.param("float", marks=pytest.mark.slow)]
)

#: float64 rounding: gradients are added up in another order.
ROUNDING = 1e-12

#: The names that halve the memory.
ECAPA_NAMES = ("blocks.*", "mfa", "asp.*")
RESNET_NAMES = ("layer?.*",)

ecapa_of_the_recipe = partial(
    ECAPA_TDNN, 80, channels=[1024, 1024, 1024, 1024, 3072], lin_neurons=192
)
resnet_of_the_recipe = partial(ResNet, 80, lin_neurons=256)


def ecapa(dropout=0.2):
    torch.manual_seed(0)
    return ECAPA_TDNN(
        8,
        channels=[16] * 4 + [48],
        attention_channels=8,
        se_channels=8,
        res2net_scale=4,
        lin_neurons=6,
        dropout=dropout,
    ).double()


def resnet():
    torch.manual_seed(0)
    sizes = {"channels": [4, 4, 8, 8], "block_sizes": [1, 2, 1, 1]}
    return ResNet(8, lin_neurons=6, **sizes).double()


def feats(batch=3):
    torch.manual_seed(1)
    return torch.randn(batch, 40, 8, dtype=torch.float64)


def gradients(network, **keywords):
    """The gradients of one step by name, that of the input included."""
    x = feats().requires_grad_()
    torch.manual_seed(2)
    network(x, **keywords).square().sum().backward()
    return {"x": x.grad} | {n: p.grad for n, p in network.named_parameters()}


def equal_to_stored(network, names, make, **keywords):
    """Assert that a step gives what it gives in the network as it came."""
    stored = make()
    expected = gradients(stored, **keywords)
    assert distance(gradients(network, **keywords), expected) <= ROUNDING
    buffers, expected = dict(network.named_buffers()), dict(stored.named_buffers())
    assert list(buffers) == list(expected)
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected[name]), name
    counts = {b for n, b in buffers.items() if n.endswith("num_batches_tracked")}
    assert {int(count) for count in counts} == {1}
    assert len([m for m in network.modules() if recomputes(m)]) == names


def recomputes(module):
    return repr(module).startswith("Recompute[")


each_network = pytest.mark.parametrize(
    ("make", "names"), [(ecapa, ECAPA_NAMES), (resnet, RESNET_NAMES)]
)


@pytest.mark.parametrize(
    ("make", "names", "chosen"),
    [
        (ecapa, ECAPA_NAMES, 8),
        (ecapa, ("*",), 8),
        (ecapa, ("*.tdnn?", "asp_bn"), 7),
        (resnet, RESNET_NAMES, 5),
        (resnet, ("layer?", "attention"), 5),
        (resnet, ("*",), 11),
    ],
)
def test_gradients_and_buffers_are_those_of_the_network_as_it_came(make, names, chosen):
    equal_to_stored(recompute_blocks(make(), *names), chosen, make)


def test_lengths_reach_the_blocks_as_keywords():
    lengths = torch.tensor([1.0, 0.5, 0.75])
    network = recompute_blocks(ecapa(), *ECAPA_NAMES)
    equal_to_stored(network, 8, ecapa, lengths=lengths)
    assert distance(gradients(ecapa(), lengths=lengths), gradients(ecapa())) > 0.01


@pytest.mark.parametrize(
    ("make", "names"),
    [(ecapa_of_the_recipe, ECAPA_NAMES), (resnet_of_the_recipe, RESNET_NAMES)],
)
def test_one_line_halves_the_memory_of_an_utterance(make, names):
    with torch.device("meta"):
        network = make()

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
    modules, parameters = list(network.modules()), list(network.parameters())
    assert recompute_blocks(network, *names) is network
    assert all(a is b for a, b in zip(network.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))
    for listed in ("named_modules", "named_parameters", "named_buffers"):
        found, expected = (getattr(n, listed)() for n in (network, stored))
        assert [name for name, _ in found] == [name for name, _ in expected]
    for module, other in zip(network.modules(), stored.modules(), strict=True):
        assert isinstance(module, type(other))
        assert type(module).__name__ == type(other).__name__
        assert vars(module).keys() == vars(other).keys()
        assert inspect.signature(module.forward) == inspect.signature(other.forward)


@each_network
def test_checkpoints_load_both_ways(make, names):
    network, stored = recompute_blocks(make(), *names), make()
    gradients(stored)  # running statistics that tell the networks apart
    assert list(network.state_dict()) == list(stored.state_dict())
    network.load_state_dict(stored.state_dict())
    x = feats()
    assert torch.equal(network.eval()(x), stored.eval()(x))
    make().load_state_dict(network.state_dict())


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
    assert distance(gradients(twin), gradients(network)) == 0
    both = zip(twin.parameters(), network.parameters(), strict=True)
    assert not any(p is q for p, q in both)


class Counted(nn.Module):
    """Counts how often it runs."""

    def __init__(self):
        super().__init__()
        self.linear, runs = nn.Linear(4, 4), [0]
        self.variables = as_global(note=runs.append, count=lambda: len(runs) - 1)

    def forward(self, x):
        self.variables.note(1)
        return self.linear(x).tanh()


def row():
    return nn.Sequential(Counted(), nn.Sequential(Counted(), Counted()))


def runs(network):
    network(torch.randn(2, 4)).sum().backward()
    return [m.variables.count() for m in network.modules() if isinstance(m, Counted)]


def test_of_matches_within_one_another_the_outermost_is_taken():
    network = recompute_blocks(row(), "1.0", "*")
    assert [name for name, m in network.named_modules() if recomputes(m)] == ["0", "1"]
    assert runs(network) == [2, 2, 2]


def test_a_second_call_changes_nothing_or_nests():
    assert runs(recompute_blocks(recompute_blocks(row(), "*"), "*")) == [2, 2, 2]
    assert runs(recompute_blocks(recompute_blocks(row(), "*"), "1.0")) == [2, 3, 2]
    network = recompute_blocks(ecapa(), *ECAPA_NAMES)
    equal_to_stored(recompute_blocks(network, "blocks.*.*", "asp"), 25, ecapa)


def test_evaluation_and_passes_without_gradients_run_once():
    network, x = recompute_blocks(row(), "*"), torch.randn(2, 4)
    with torch.no_grad():
        network(x)
    network.eval()(x).sum().backward()
    counted = [m for m in network.modules() if isinstance(m, Counted)]
    assert [m.variables.count() for m in counted] == [2, 2, 2]


def shared():
    """A block in two places, with batch statistics."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(40), nn.Dropout(), nn.Tanh())
    return nn.Sequential(block, nn.Linear(8, 8), block).double()


@pytest.mark.parametrize("name", ["0", "2"])
def test_a_block_in_two_places_recomputes_in_both(name):
    network, stored = recompute_blocks(shared(), name), shared()
    assert network[0] is network[2]
    assert recomputes(network[0])
    assert distance(gradients(network), gradients(stored)) <= ROUNDING
    assert network[0][1].num_batches_tracked == 2
    for found, expected in zip(network.buffers(), stored.buffers(), strict=True):
        assert torch.equal(found, expected)


def test_hooks_on_a_chosen_block_fire_once():
    def of_a_hook(network):
        seen = []
        block = network.blocks[1]
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
        block.register_forward_hook(lambda _, args, y: seen.append(y))
        block.register_full_backward_hook(lambda _, dx, dy: seen.append(dy[0].shape))
        outputs = network(feats())
        _, y = seen
        # What a hook takes out has a graph.
        (y.square().sum() + outputs.square().sum()).backward()
        assert len(seen) == 3
        return {n: p.grad for n, p in network.named_parameters()}

    found = of_a_hook(recompute_blocks(ecapa(dropout=0), *ECAPA_NAMES))
    assert distance(found, of_a_hook(ecapa(dropout=0))) <= ROUNDING


def test_ddp_sees_the_same_names_and_gradients(tmp_path):
    network = recompute_blocks(resnet(), *RESNET_NAMES)
    store = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        found = gradients(DistributedDataParallel(network))
    finally:
        dist.destroy_process_group()
    found = {name.removeprefix("module."): grad for name, grad in found.items()}
    assert distance(found, gradients(resnet())) <= ROUNDING


def test_compiled_and_scripted_networks_compute_the_same():
    network, expected = recompute_blocks(resnet(), *RESNET_NAMES), gradients(resnet())
    assert distance(gradients(torch.jit.script(network)), expected) <= ROUNDING
    network.load_state_dict(resnet().state_dict())
    network.zero_grad()
    torch.compile(network, backend="eager")(feats()).square().sum().backward()
    found = {n: p.grad for n, p in network.named_parameters()}
    del expected["x"]
    assert distance(found, expected) <= ROUNDING


def test_a_yaml_names_the_blocks():
    text = """
embedding_model: !apply:speechbrain_rev.reversible.recompute_blocks
    - !new:speechbrain.lobes.models.ECAPA_TDNN.ECAPA_TDNN
        input_size: 80
        channels: [16, 16, 16, 16, 48]
    - "blocks.*"
    - mfa
    - "asp.*"
"""
    network = hyperpyyaml.load_hyperpyyaml(text)["embedding_model"]
    assert isinstance(network, ECAPA_TDNN)
    assert len([m for m in network.modules() if recomputes(m)]) == 8


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            (),
            r"No name was given. ECAPA_TDNN has blocks\.0 \(TDNNBlock\), .*'blocks\.\*'",
        ),
        (("blocks.*", "block.*"), r"a name like 'block\.\*'. .* mfa \(TDNNBlock\)"),
        # A list is no module that is called.
        (("blocks",), "a name like 'blocks'"),
        (("",), "a name like ''"),
    ],
)
def test_names_that_match_nothing_are_refused_and_nothing_is_changed(names, message):
    network = ecapa()
    with pytest.raises(ValueError, match=message):
        recompute_blocks(network, *names)
    assert not any(map(recomputes, network.modules()))


def test_other_things_than_names_are_refused():
    with pytest.raises(TypeError, match=r"TDNNBlock.* is no name"):
        recompute_blocks(ecapa(), TDNNBlock)
    with pytest.raises(ValueError, match=r"Linear has no submodules .* Recompute\("):
        recompute_blocks(nn.Linear(4, 4), "*")


def test_modules_whose_class_does_not_decide_what_runs_are_refused():
    scripted = nn.Sequential(nn.Tanh(), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="1 is scripted"):
        recompute_blocks(scripted, "*")
    patched = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
    patched[1].forward = torch.sin
    with pytest.raises(ValueError, match=r"1 \(Linear\) has a forward of its own"):
        recompute_blocks(patched, "*")
    assert not any(map(recomputes, [*scripted, *patched]))


def test_a_block_that_writes_into_its_input_is_refused_by_name():
    block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    network = recompute_blocks(nn.Sequential(nn.Linear(4, 4), block), "1")
    with pytest.raises(RuntimeError, match=r"Sequential wrote .* recompute_blocks"):
        network(torch.randn(2, 4))


CHANNELS = 16

#: SpeechBrain's blocks as residual functions, and the shape of their streams.
COUPLINGS = {
    "tdnn": (
        partial(TDNNBlock, CHANNELS, CHANNELS, 3, 1, dropout=0.2),
        partial(Res2NetBlock, CHANNELS, CHANNELS, 4, dilation=2),
        (2, CHANNELS, 40),
    ),
    "se_res2net": (
        partial(TDNNBlock, CHANNELS, CHANNELS, 3, 2),
        partial(SERes2NetBlock, CHANNELS, CHANNELS, 4, se_channels=8, kernel_size=3),
        (2, CHANNELS, 40),
    ),
    "resnet": (
        partial(SEBasicBlock, CHANNELS, CHANNELS),
        partial(BasicBlock, CHANNELS, CHANNELS),
        (2, CHANNELS, 6, 10),
    ),
}


def chain_of_speechbrain(kind, depth, dtype, **settings):
    f, g, _ = COUPLINGS[kind]
    torch.manual_seed(0)
    blocks = [AdditiveCoupling(f(), g()) for _ in range(depth)]
    return make_chain(blocks, **settings).to(dtype)


def streams_of(kind, dtype, batch=2):
    torch.manual_seed(1)
    shape = (batch, *COUPLINGS[kind][2][1:])
    return [torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(2)]


@each_format
@pytest.mark.parametrize("kind", COUPLINGS)
def test_chains_of_speechbrain_blocks_train_as_plain_couplings_do(kind, streams):
    # To the bit as stored in exact streams, buffers included: see equal_to_plain.
    settings = {"mode": "reconstruct", "streams": streams}
    chain = chain_of_speechbrain(kind, 2, torch.float64, **settings)
    train = partial(train_once, inputs=partial(streams_of, kind))
    equal_to_plain(chain, FLOAT64, train)
    counts = [b for n, b in chain.named_buffers() if n.endswith("num_batches_tracked")]
    assert counts
    assert all(count == 1 for count in counts)


@each_format
@pytest.mark.parametrize("kind", ["tdnn", "resnet"])
def test_memory_of_chains_of_speechbrain_blocks_does_not_grow_with_depth(kind, streams):
    def peak(depth, mode):
        # Without the parameters' gradients, which grow with depth.
        settings = {"mode": mode, "streams": streams, "verify": None}
        chain = chain_of_speechbrain(kind, depth, torch.float32, **settings)
        chain.requires_grad_(False)
        x = streams_of(kind, torch.float32, batch=8)
        return live_bytes_peak(lambda: loss_of(chain(*x)).backward())

    assert peak(5, "reconstruct") <= 1.02 * peak(2, "reconstruct")
    assert peak(5, "store") > 1.8 * peak(2, "store")
