"""What autograd keeps of a network: compressed once, freed, and nothing else touched."""

import contextlib
import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from speechbrain.lobes.models.ResNet import ResNet
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    FixedBound,
    RangeBound,
    Rule,
    compress_activations,
)
from speechbrain_rev.compression.activations import (
    compress_blocks,
    compression_in,
    is_compressing,
    not_compressing,
    registering,
    stop_compressing,
    stop_compressing_blocks,
)
from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.reversible import Mode, recompute_blocks
from speechbrain_rev.reversible.wrapping import give_mode, mode_of, store_blocks
from tests.unit.reversible.chains import distance


def small_network(*, inplace=False):
    layers = []
    for channels in (1, 8):
        conv = nn.Conv2d(channels, 8, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(8), nn.ReLU(inplace)]
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 1, bias=False))


def maps(channels=1):
    return torch.randn(4, channels, 20, 30)


def compressor(fraction=1e-3):
    return ActivationCompression(
        convolutions=RangeBound(fraction), normalisations=DeviationBound(fraction)
    )


def step(network, x, compression=None):
    """Bytes that live between forward and backward pass, and gradients."""
    network.zero_grad()
    gc.collect()
    around = compression.during(network) if compression else contextlib.nullcontext()
    with LiveBytes() as meter:
        with around:
            loss = network(x).square().mean()
        held = meter.live
        loss.backward()
    return held, grads_of(network)


def grads_of(network):
    return {name: p.grad.clone() for name, p in network.named_parameters()}


class ByLayer(Rule):
    """Give each layer an absolute bound of its own."""

    def __init__(self, **bounds):
        self.bounds = bounds

    def bound_for(self, layer):
        return FixedBound(self.bounds[layer])


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_are_within_bounds_of_one_compressed_copy_of_a_storage(inplace):
    network, x = small_network(inplace=inplace), torch.randn(4, 1, 40, 50)
    stored, exact = step(network, x)
    errors = []
    for fraction in (1e-2, 1e-3, 1e-4):
        compression = compressor(fraction)
        held, grads = step(network, x, compression)
        errors.append(distance(grads, exact))
        # Each layer's input is there once, though a ReLU and a convolution saved it, and
        # of the batch normalisations their statistics; the last output is the loss's.
        kept = sum(r.kept_bytes for r in compression.records.values())
        assert kept <= held <= kept + 4 * 4 * 40 * 50 * 4 + 4096
        assert held < stored / (2 if fraction == 1e-2 else 1)
    assert 0 < errors[2] < errors[1] < errors[0] < 0.05
    assert errors[2] < 1e-4


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_that_need_no_activation_are_equal_to_the_bit(autocast):
    """Those handed down by convolutions need their weights only, and biases neither."""
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3))
    x, compression, grads = maps(2).requires_grad_(), compressor(2e-2), []
    for around in (contextlib.nullcontext(), compression.during(network)):
        network.zero_grad()
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), around:
            y = network(x)
        y.float().square().mean().backward()
        grads.append([x.grad, *(layer.bias.grad for layer in network)])
    assert all(map(torch.equal, *grads))
    # What autocast made of the first input is what was saved of it.
    forms = {layer: r.form for layer, r in compression.records.items()}
    assert forms == {"0": "dense", "1": "dense"}


@pytest.mark.parametrize("a_layers_input", [False, True])
def test_a_custom_function_gets_what_it_saved_in_its_layout(a_layers_input):
    network = small_network().to(memory_format=torch.channels_last)
    seen = []

    class Own(torch.autograd.Function):
        saves_layer_input = a_layers_input

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0])
            return grad

    with compressor(1e-1).during(network):
        hidden = network[:3](maps())
        y = network[3](hidden).sum() + network[3](Own.apply(hidden)).sum()
    exact = hidden.detach().clone()
    y.backward()
    assert seen[0].stride() == (8 * 20 * 30, 1, 8 * 30, 8)
    assert torch.equal(seen[0], exact) == (not a_layers_input)


class Saving(torch.autograd.Function):
    """A function of the user's own that saves its input."""

    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("recorded", [True, False])
def test_what_a_custom_function_keeps_is_not_compressed_besides(recorded):
    network, compression = small_network(), compressor()
    with compression.during(network):
        hidden = network[:3](maps())
        with torch.set_grad_enabled(recorded):
            y = Saving.apply(hidden)
        network[3](hidden)
    assert y.requires_grad == recorded
    # Under no_grad the function keeps nothing.
    assert ("3" in compression.records) == (not recorded)


def test_custom_functions_are_watched_while_any_thread_has_a_pass():
    original = FunctionCtx.save_for_backward
    begun, end = threading.Event(), threading.Event()

    def other():
        with compressor().during(small_network()):
            begun.set()
            end.wait()

    thread = threading.Thread(target=other, daemon=True)
    network, seen = small_network(), []
    try:
        with contextlib.suppress(ZeroDivisionError), compressor(1e-1).during(network):
            thread.start()
            begun.wait()
            hidden = network[:3](maps())
            seen.append(FunctionCtx.save_for_backward)
            raise ZeroDivisionError
        seen.append(FunctionCtx.save_for_backward)
        # This thread's pass has ended: the function's saved tensors are not compressed.
        Saving.apply(hidden).sum().backward()
    finally:
        end.set()
    thread.join()
    assert seen[0] is seen[1] is not original
    assert FunctionCtx.save_for_backward is original


@pytest.mark.parametrize("compressed", [True, False])
def test_a_change_in_place_after_saving_is_an_error(compressed):
    conv, w = nn.Conv2d(1, 4, 3), maps().requires_grad_()
    with compressor().during(conv):
        hidden = maps()
        y = conv(hidden) if compressed else hidden * w
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_a_kept_graph_can_be_used_again():
    network = small_network()
    with compressor().during(network):
        y = network(maps()).square().mean()
    first = torch.autograd.grad(y, list(network.parameters()), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, [*network.parameters()])))


@pytest.mark.parametrize("how", ["evaluation", "no_grad", "frozen", "empty batch"])
def test_nothing_is_compressed_where_nothing_is_trained(how):
    network, compression = small_network(), compressor()
    network.train(how != "evaluation").requires_grad_(how != "frozen")
    x = maps()[: 0 if how == "empty batch" else 4]
    with torch.set_grad_enabled(how != "no_grad"), compression.during(network):
        network[0](x)
    assert not compression.records


def test_what_is_saved_after_the_pass_is_not_touched():
    network = small_network()
    with compressor(1e-1).during(network):
        y = network(maps())
    w = torch.randn_like(y, requires_grad=True)
    (y * w).sum().backward()
    assert torch.equal(w.grad, y)


def test_checkpoints_of_torch_inside_recompute_exactly():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    network, x = small_network(), maps()
    for norm in (network[1], network[4]):
        norm.momentum = 0.0  # torch's checkpoint would update them twice
    exact = step(network, x)[1]
    again = step(Checkpointed(*network), x, compressor(1e-1))[1]
    assert all(torch.equal(again[name], grad) for name, grad in exact.items())


def test_two_layers_with_one_input_share_a_copy_of_the_smaller_bound():
    layers = nn.ModuleDict({"a": nn.Conv2d(1, 4, 3), "b": nn.Conv2d(1, 4, 3)})
    compression = ActivationCompression(convolutions=ByLayer(a=0.5, b=0.01))
    x = maps().requires_grad_()
    with LiveBytes() as meter, compression.during(layers):
        hidden = x * 1
        y = layers["a"](hidden).mean() + layers["b"](hidden).mean()
        del hidden
        held = meter.live
    assert compression.records["a"].error_bound == pytest.approx(0.01)
    assert held < 1.2 * compression.records["a"].kept_bytes + 64
    y.backward()


def test_a_smaller_bound_for_another_view_leaves_the_copy_its_shape():
    layers = nn.ModuleDict({"flat": nn.Conv1d(4, 4, 1), "conv": nn.Conv2d(4, 4, 3)})
    x, grads = maps(4), []
    for bounds in ({"flat": 1e-7, "conv": 1e-7}, {"flat": 0.5, "conv": 1e-4}):
        layers.zero_grad()
        compression = ActivationCompression(convolutions=ByLayer(**bounds))
        with compression.during(layers):
            hidden = x * 1
            y = layers["flat"](hidden.flatten(2)).square().mean()
            y = y + layers["conv"](hidden).square().mean()
        y.backward()
        grads.append(grads_of(layers))
    assert distance(grads[1], grads[0]) < 1e-3


def test_views_of_one_storage_share_a_copy_and_what_no_layer_takes_is_kept():
    conv, other_conv = nn.Conv2d(1, 4, 3), nn.Conv2d(2, 4, 3)
    u = torch.randn(4, 600, requires_grad=True)
    v, w = maps(4).requires_grad_(), maps(2).requires_grad_()
    x, compression = maps(), compressor()
    with compression.during(conv):
        hidden = x * 1
        y = (hidden.flatten(1) * u).sum() + conv(hidden).sum()
    with compressor(1e-1).during(other_conv):
        whole = maps(4) * 1
        taken, other = whole.chunk(2, 1)
        y = y + other_conv(taken).sum() + (other * w).sum() + (whole * v).sum()
    exact = whole.clone()
    y.backward()
    error = (u.grad - x.flatten(1)).abs().max()
    assert 0 < error <= compression.records[""].error_bound * 1.01
    assert torch.equal(w.grad, exact[:, 2:])
    assert torch.equal(v.grad, exact)


@pytest.mark.parametrize("order", [1, -1])
def test_a_part_that_a_layer_takes_has_a_bound_of_its_own(order):
    convs = nn.ModuleDict({"whole": nn.Conv2d(4, 4, 3), "part": nn.Conv2d(2, 4, 3)})
    x, grads = torch.cat([maps(2), 1e3 * maps(2)], 1), []
    for wanted in (False, True):
        convs.zero_grad()
        with compressor().during(convs, wanted=wanted):
            hidden = x * 1
            given = {"part": hidden[:, :2], "whole": hidden}
            y = sum(convs[n](given[n]).square().sum() for n in sorted(given)[::order])
        y.backward()
        grads.append({"weight": convs["part"].weight.grad.clone()})
    assert 0 < distance(grads[1], grads[0]) < 1e-3


@pytest.mark.parametrize("compressed", [True, False])
def test_a_graph_that_no_backward_pass_releases_is_freed(compressed):
    network, seen = small_network(), []
    for layer in network[1:]:
        layer.register_forward_hook(
            lambda _, inputs, y: seen.append(weakref.ref(y.untyped_storage()))
        )
    with compressor().during(network, everywhere=compressed):
        y = network(maps()).sigmoid().relu()
    seen.append(weakref.ref(y.untyped_storage()))
    del y
    gc.collect()
    assert [ref() is None for ref in seen] == [True] * len(seen)


def data_times_three(hidden):
    """Give what has a version counter of its own, and change it by another one."""
    hidden.data.mul_(3)
    return hidden.data


@pytest.mark.parametrize(
    "other", [torch.Tensor.detach, data_times_three, torch._neg_view]
)
def test_changes_that_are_counted_apart_or_wait_are_not_lost(other):
    conv, w = nn.Conv2d(2, 4, 3), maps(2).requires_grad_()
    with compressor(1e-5).during(conv):
        hidden = maps(2) * 1
        y = conv(hidden).sum()
        z = other(hidden)
        y = y + (w * z).sum()
        seen = z.clone()
    y.backward()
    assert (w.grad - seen).abs().max() < 1e-3


def test_what_is_not_finite_is_kept_and_counted_once_for_all_that_share_it():
    branches = nn.ModuleList([nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 5)])
    x, compression = maps(), compressor()
    x[0, 0, 0, 0] = float("nan")
    with compression.during(branches):
        y = sum(branch(x).sum() for branch in branches)
    y.backward()
    assert compression.nonfinite_count == 1
    assert compression.records["0"].form == "raw"
    assert branches[1].weight.grad.isnan().any()


@pytest.mark.parametrize(
    ("kind", "rule", "dtype", "message"),
    [
        ("convolution", 0.01, torch.float32, r"rule of convolutions is 0\.01"),
        ("convolutions", FixedBound(1), torch.float32, "one of 'convolution' and one"),
        ("convolution", FixedBound(1), torch.float64, "float64.*Convert them"),
    ],
)
def test_rules_and_types_that_cannot_be_are_refused_in_the_next_pass(
    kind, rule, dtype, message
):
    compression = compressor()
    compression.rules[kind] = rule
    with pytest.raises(ValueError, match=message):
        step(nn.Conv2d(1, 4, 3).to(dtype), maps().to(dtype), compression)


def with_a_sparse_product():
    conv, graph = nn.Conv1d(4, 4, 3, padding=1), torch.eye(50).to_sparse()
    conv.register_forward_hook(lambda m, i, y: torch.sparse.mm(graph, y[0].t()))
    return nn.Sequential(conv)


@pytest.mark.parametrize(
    ("make", "shape", "layers"),
    [
        (small_network, (4, 1, 20, 30), ["0", "1", "3", "4", "6"]),
        (lambda: nn.Sequential(nn.LazyConv1d(4, 3), nn.ReLU()), (2, 3, 50), ["0"]),
        (with_a_sparse_product, (1, 4, 50), ["0"]),
    ],
)
def test_records_are_of_the_layers_of_the_last_pass(make, shape, layers):
    network = make()
    compression = compress_activations(network)
    for _ in range(2):  # a lazy layer takes shape, and a name, in its first pass
        compression.records["of another pass"] = None
        network(torch.randn(shape)).sum().backward()
    assert list(compression.records) == layers


def test_what_may_come_back_rounded_is_saved_in_the_forward_pass_alone():
    found, network = [is_compressing()], nn.Conv1d(1, 2, 3)

    def note(*_):
        found.append(is_compressing())

    with ActivationCompression().during(network):
        note()
        with not_compressing():
            note()
        y = network(torch.randn(2, 1, 50))
        y.register_hook(note)
        y.sum().backward()
    with ActivationCompression().during(network, everywhere=False):
        note()
        with registering():
            note()
    assert found == [False, True, False, False, False, True]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_in_the_network_leaves_no_pass_under_way(error):
    def failing(_, inputs):
        raise error("broken")

    network = small_network()
    network[0].register_forward_pre_hook(failing)
    compress_activations(network)
    with pytest.raises(error):
        network(maps())
    other, compression = small_network(), compressor()
    step(other, maps(), compression)
    assert compression.records


def test_a_network_compresses_by_itself_and_can_be_copied():
    network, x = small_network(), maps()
    exact = step(network, x)[1]
    compression = compress_activations(network, convolutions=RangeBound(1e-2))
    assert 0 < distance(step(network, x)[1], exact) < 0.05
    assert len(compression.records) == 5
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert step(twin, x)[1].keys() == exact.keys()
    with pytest.raises(ValueError, match="already"):
        compress_activations(network)


def test_a_network_of_speechbrain_takes_less_memory_but_for_what_is_pooled():
    sizes = {"channels": [16, 16, 32, 32], "block_sizes": [1] * 4, "lin_neurons": 16}
    network, feats = ResNet(80, **sizes), torch.randn(4, 100, 80)
    stored, exact = step(network, feats)
    layers = compress_activations(network).records
    held, grads = step(network, feats)
    assert held < stored / 2.5
    assert 0 < distance(grads, exact) < 0.02
    assert all(not n.startswith("unnamed") for n in layers)
    # Normalisation of one value for each utterance would enlarge an error.
    pooled = {"norm_stats", "norm_embed"}
    assert pooled <= dict(network.named_modules()).keys() - layers.keys()


class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU())


def layers_of(network):
    """Name the layers that a training step compresses."""
    if compression_in(network):
        compression_in(network).records.clear()
    torch.manual_seed(1)
    network(torch.randn(4, 8, 40)).square().sum().backward()
    return set(compression_in(network).records)


class TestBlocks:
    """Some blocks of a network compressed, and nothing else of it."""

    @pytest.fixture
    def network(self):
        network = nn.Sequential(Layer(), Layer(), Layer())
        compress_blocks(network, ActivationCompression())
        give_mode(network, Mode.COMPRESS, "0")
        return network

    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))]
    )
    def test_copies_compress_the_same_blocks_by_their_own(self, network, duplicate):
        other = duplicate(network)
        assert layers_of(other) == {"0.0", "0.1"}
        assert not compression_in(network).records
        assert all(p.grad is None for p in network.parameters())

    def test_more_can_be_chosen_and_all_be_stored_again(self, network):
        give_mode(network, Mode.COMPRESS, "2")
        compress_blocks(network, compression_in(network))
        assert layers_of(network) == {"0.0", "0.1", "2.0", "2.1"}
        store_blocks(network, "0")
        assert layers_of(network) == {"2.0", "2.1"}
        store_blocks(network, "*")
        stop_compressing_blocks(network)
        assert compression_in(network) is None
        assert [mode_of(block) for block in network] == 3 * [Mode.STORE]
        assert all("forward" not in vars(m) for m in network.modules())

    def test_a_forward_of_ones_own_is_called_and_stays(self, network):
        calls = []

        def forward(x):
            calls.append(len(x))
            return nn.Sequential.forward(network[1], x)

        network[1].forward = forward
        give_mode(network, Mode.COMPRESS, "1")
        assert layers_of(network) == {"0.0", "0.1", "1.0", "1.1"}
        assert calls == [4]
        with pytest.raises(ValueError, match="has a forward of its own"):
            recompute_blocks(network, "1")
        assert mode_of(network[1]) is Mode.COMPRESS
        store_blocks(network, "*")
        assert network[1].forward is forward

    def test_an_error_in_a_block_ends_its_compression(self, network):
        with pytest.raises(RuntimeError, match="channels"):
            network(torch.randn(4, 9, 40))
        assert layers_of(network) == {"0.0", "0.1"}

    def test_blocks_may_recompute_and_compress_again(self, network):
        for change, mode, layers in (
            (recompute_blocks, Mode.RECOMPUTE, set()),
            (
                lambda n, b: give_mode(n, Mode.COMPRESS, b),
                Mode.COMPRESS,
                {"0.0", "0.1"},
            ),
        ):
            change(network, "0")
            assert mode_of(network[0]) is mode
            assert layers_of(network) == layers

    def test_what_is_compressed_as_a_whole_has_no_block_to_choose(self):
        network = nn.Sequential(Layer())
        compression = compress_activations(network)
        with pytest.raises(
            ValueError, match=r"has all its activations .* stop_compressing"
        ):
            compress_blocks(network, ActivationCompression())
        stop_compressing_blocks(network)
        assert compression_in(network) is compression
        stop_compressing(network)
        compress_blocks(network, ActivationCompression())
        with pytest.raises(ValueError, match="Blocks that compress, by a plan"):
            stop_compressing(network)


@pytest.mark.parametrize("own", [False, True])
def test_a_network_that_stops_compressing_is_as_it_was_before(own):
    network = nn.Sequential(Layer())
    if own:
        network.forward = network[0].forward
    before = dict(vars(network))
    compress_activations(network)
    stop_compressing(network)
    assert vars(network) == before
    with pytest.raises(ValueError, match="is not in force for this Sequential"):
        stop_compressing(network)
