"""What autograd keeps of a network: compressed once, freed, and nothing else touched."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    FixedBound,
    RangeBound,
    compress_activations,
)
from speechbrain_rev.planner.memory import LiveBytes


def small_network(*, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace),
        nn.Conv2d(8, 4, 1, bias=False),
    )


def compressor(fraction: float = 1e-3) -> ActivationCompression:
    return ActivationCompression(
        convolutions=RangeBound(fraction), normalisations=DeviationBound(fraction)
    )


def gradients(network, x, compression=None):
    network.zero_grad()
    if compression is None:
        y = network(x)
    else:
        with compression.during(network):
            y = network(x)
    y.square().mean().backward()
    return {name: p.grad.clone() for name, p in network.named_parameters()}


def distance(found, expected):
    error = sum(float((found[n] - expected[n]).square().sum()) for n in expected)
    return (error / sum(float(g.square().sum()) for g in expected.values())) ** 0.5


def held_bytes(network, x, compression=None):
    """Bytes that live between forward and backward pass."""
    gc.collect()
    with LiveBytes() as meter:
        if compression is None:
            y = network(x).square().mean()
        else:
            with compression.during(network):
                y = network(x).square().mean()
        held = meter.live
        y.backward()
    return held


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_differ_by_no_more_than_the_bounds_allow(inplace):
    torch.manual_seed(0)
    network, x = small_network(inplace=inplace), torch.randn(4, 1, 20, 30)
    exact = gradients(network, x)
    errors = [
        distance(gradients(network, x, compressor(fraction)), exact)
        for fraction in (1e-2, 1e-3, 1e-4)
    ]
    assert errors[2] < errors[1] < errors[0] < 0.05
    assert 0 < errors[2] < 1e-4


@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_held_is_one_compressed_copy_of_each_storage(inplace):
    torch.manual_seed(0)
    network, x = small_network(inplace=inplace), torch.randn(4, 1, 40, 50)
    compression = compressor(1e-2)
    held = held_bytes(network, x, compression)
    # Each layer's input is there once, though a ReLU and a convolution saved it, and of
    # the batch normalisations their statistics; the last output is the loss's.
    kept = sum(r.kept_bytes for r in compression.records.values())
    rest = 4 * 4 * 40 * 50 * 4 + 4096
    assert kept <= held <= kept + rest
    assert held < held_bytes(network, x) / 2


def test_storages_of_compressed_inputs_are_freed():
    torch.manual_seed(0)
    network, seen = small_network(), []
    for layer in network[1:]:
        layer.register_forward_pre_hook(
            lambda _, inputs: seen.append(weakref.ref(inputs[0].untyped_storage()))
        )
    with compressor().during(network):
        y = network(torch.randn(4, 1, 20, 30))
    gc.collect()
    # Batch normalisations' outputs are nobody's input that is kept; all others were.
    assert [ref() is None for ref in seen] == [True] * len(seen)
    y.sum().backward()


def test_gradients_that_need_no_activation_are_equal_to_the_bit():
    """Those handed down by convolutions need their weights only."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3))
    x = torch.randn(2, 2, 20, 30, requires_grad=True)
    network(x).square().mean().backward()
    exact, x.grad = x.grad, None
    biases = [layer.bias.grad.clone() for layer in network]
    network.zero_grad()
    with compressor(1e-2).during(network):
        y = network(x)
    y.square().mean().backward()
    assert torch.equal(x.grad, exact)
    assert all(
        torch.equal(layer.bias.grad, b)
        for layer, b in zip(network, biases, strict=True)
    )


def test_weights_are_not_compressed_under_autocast():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.Conv2d(4, 4, 3))
    x = torch.randn(2, 2, 20, 30, requires_grad=True)

    def input_gradient(compression):
        x.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if compression is None:
                y = network(x)
            else:
                with compression.during(network):
                    y = network(x)
        y.float().square().mean().backward()
        return x.grad

    compression = compressor(2e-2)
    assert torch.equal(input_gradient(compression), input_gradient(None))
    # What autocast made of the first input is what was saved of it.
    forms = {layer: r.form for layer, r in compression.records.items()}
    assert forms == {"0": "dense", "1": "dense"}


def test_the_layout_of_what_was_saved_is_restored():
    torch.manual_seed(0)
    network = small_network().to(memory_format=torch.channels_last)
    x = torch.randn(4, 1, 20, 30).to(memory_format=torch.channels_last)
    seen = []

    class Look(torch.autograd.Function):
        saves_layer_input = True

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.stride = x.stride()
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append((ctx.saved_tensors[0].stride(), ctx.stride))
            return grad

    conv = network[3]
    compression = compressor()
    with compression.during(network):
        hidden = network[:3](x)
        y = conv(hidden) + conv(Look.apply(hidden))
    y.sum().backward()
    assert seen[0][0] == seen[0][1] == (8 * 20 * 30, 1, 8 * 30, 8)


def test_a_change_in_place_after_saving_is_an_error():
    torch.manual_seed(0)
    network, x = small_network(), torch.randn(4, 1, 20, 30)
    with compressor().during(network):
        hidden = network[:3](x)
        y = network[3](hidden)
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_a_change_of_what_is_not_compressed_is_an_error_too():
    w = torch.randn(4, requires_grad=True)
    x = torch.randn(4)
    network = nn.Identity()
    with compressor().during(network):
        y = (w * x).sum()
        x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


def test_a_kept_graph_can_be_used_again():
    torch.manual_seed(0)
    network, x = small_network(), torch.randn(4, 1, 20, 30)
    with compressor().during(network):
        y = network(x).square().mean()
    first = torch.autograd.grad(y, list(network.parameters()), retain_graph=True)
    second = torch.autograd.grad(y, list(network.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_nothing_is_done_without_training(how):
    torch.manual_seed(0)
    network, x = small_network(), torch.randn(4, 1, 20, 30)
    compression = compressor()
    if how == "eval":
        network.eval()
    with torch.set_grad_enabled(how == "eval"), compression.during(network):
        network(x)
    assert not compression.records


def test_custom_functions_get_what_they_saved():
    torch.manual_seed(0)
    kept = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            kept.append(x.detach().clone())
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert torch.equal(ctx.saved_tensors[0], kept[0])
            return grad * 2

    conv = nn.Conv2d(1, 4, 3)
    with compressor(1e-1).during(conv):
        x = (torch.randn(2, 1, 20, 30) * conv.bias[0]).relu()
        y = Own.apply(x).sum() + conv(x).sum()
    y.backward()


def test_checkpoints_of_torch_within_recompute_exactly():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    network, x = small_network(), torch.randn(4, 1, 20, 30)
    exact = gradients(network, x)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    outer = Checkpointed()
    for norm in (network[1], network[4]):
        norm.momentum = 0.0  # torch's checkpoint would update them twice
    found = gradients(outer, x, compressor(1e-1))
    assert all(torch.equal(found[f"inner.{name}"], g) for name, g in exact.items())


def test_two_layers_with_one_input_share_a_copy_within_the_smaller_bound():
    torch.manual_seed(0)
    a, b = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3)
    network = nn.ModuleDict({"a": a, "b": b})

    class Bounds(FixedBound):
        def bound_for(self, layer):
            return FixedBound(0.5 if layer == "a" else 0.01)

    compression = ActivationCompression(convolutions=Bounds(1.0))
    x = torch.randn(4, 1, 20, 30, requires_grad=True)
    with LiveBytes() as meter, compression.during(network):
        hidden = x * 1
        y = a(hidden).mean() + b(hidden).mean()
        del hidden
        held = meter.live
    one = compression.records["a"]
    assert one.error_bound == pytest.approx(0.01)
    assert held < 1.2 * one.kept_bytes + 64
    y.backward()


def test_a_smaller_bound_for_another_view_leaves_the_copy_its_shape():
    torch.manual_seed(0)
    flat, conv = nn.Conv1d(4, 4, 1), nn.Conv2d(4, 4, 3)
    network = nn.ModuleDict({"flat": flat, "conv": conv})

    class Bounds(FixedBound):
        def bound_for(self, layer):
            return FixedBound(0.5 if layer == "flat" else 1e-4)

    def weight_gradients(compression):
        network.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(2, 4, 20, 30)
        with compression.during(network):
            hidden = x * 1
            y = flat(hidden.flatten(2)).square().mean()
            y = y + conv(hidden).square().mean()
        y.backward()
        return {n: p.grad.clone() for n, p in network.named_parameters()}

    exact = weight_gradients(ActivationCompression(convolutions=FixedBound(1e-7)))
    found = weight_gradients(ActivationCompression(convolutions=Bounds(1.0)))
    assert distance(found, exact) < 1e-3


def test_views_of_one_storage_share_a_copy():
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 4, 3)
    w = torch.randn(4, 600, requires_grad=True)
    x = torch.randn(4, 1, 20, 30)
    compression = compressor(1e-3)
    with compression.during(conv):
        hidden = x * 1
        y = (hidden.flatten(1) * w).mean() + conv(hidden).mean()
    y.backward()
    bound = compression.records[""].error_bound
    error = (w.grad * 4 * 600 - x.flatten(1)).abs().max()
    assert 0 < error <= bound * 1.01


def test_what_no_layer_takes_is_not_compressed_with_the_rest_of_its_storage():
    torch.manual_seed(0)
    conv, w = nn.Conv2d(2, 4, 3), torch.randn(4, 2, 20, 30, requires_grad=True)
    with compressor(1e-1).during(conv):
        taken, other = (torch.randn(4, 4, 20, 30) * w.detach().mean()).chunk(2, 1)
        y = conv(taken).sum() + (other * w).sum()
    exact = other.clone()
    y.backward()
    assert torch.equal(w.grad, exact)


def test_what_lies_around_a_layers_input_is_not_compressed_with_it():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 4, 3)
    v, w = (torch.randn(4, n, 20, 30, requires_grad=True) for n in (4, 2))
    with compressor(1e-1).during(conv):
        whole = torch.randn(4, 4, 20, 30) * 1
        taken, other = whole.chunk(2, 1)
        y = conv(taken).sum() + (other * w).sum() + (whole * v).sum()
    exact = whole.clone()
    y.backward()
    assert torch.equal(w.grad, exact[:, 2:])
    assert torch.equal(v.grad, exact)


@pytest.mark.parametrize("part_first", [False, True])
def test_a_part_that_a_layer_takes_has_a_bound_of_its_own(part_first):
    torch.manual_seed(0)
    convs = nn.ModuleDict({"whole": nn.Conv2d(4, 4, 3), "part": nn.Conv2d(2, 4, 3)})
    x = torch.cat([torch.randn(4, 2, 20, 30), 1e3 * torch.randn(4, 2, 20, 30)], 1)

    def gradient(compression):
        convs.zero_grad()
        with compression.during(convs, wanted=compression is not off):
            h = x * 1
            part = convs["part"](h[:, :2]) if part_first else 0
            y = convs["whole"](h)
            if not part_first:
                part = convs["part"](h[:, :2])
        (y.sum() + part.square().sum()).backward()
        return {"weight": convs["part"].weight.grad.clone()}

    off = compressor()
    exact = gradient(off)
    assert 0 < distance(gradient(compressor()), exact) < 1e-3


@pytest.mark.parametrize("compressed", [True, False])
def test_a_graph_that_no_backward_pass_releases_is_freed(compressed):
    torch.manual_seed(0)
    network, seen = small_network(), []
    for layer in network[1:]:
        layer.register_forward_hook(
            lambda _, inputs, y: seen.append(weakref.ref(y.untyped_storage()))
        )
    with compressor().during(network, everywhere=compressed):
        y = network(torch.randn(4, 1, 20, 30)).sigmoid().relu()
    seen.append(weakref.ref(y.untyped_storage()))
    del y
    gc.collect()
    assert [ref() is None for ref in seen] == [True] * len(seen)


def test_what_runs_in_a_backward_pass_within_the_context_is_let_be():
    torch.manual_seed(0)
    conv, x = nn.Conv2d(1, 4, 3), torch.randn(4, 1, 20, 30)
    compression = compressor()

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            compression.records.clear()
            with torch.enable_grad():
                # Of another tensor: of this one there is a copy already.
                conv(2 * x).sum().backward()
            return grad

    with compression.during(conv):
        Again.apply(conv(x)).sum().backward()
    assert not compression.records


def test_tensors_without_strides_are_let_be():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3, padding=1)
            self.register_buffer("graph", torch.eye(50).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.graph, self.conv(x)[0].t())

    network = Sparse()
    compression = compress_activations(network)
    network(torch.randn(1, 4, 50)).sum().backward()
    assert compression.records.keys() == {"conv"}


def test_lazy_layers_take_shape_in_their_first_pass():
    network = nn.Sequential(nn.LazyConv1d(4, 3), nn.ReLU())
    compression = compress_activations(network)
    for _ in range(2):
        network(torch.randn(2, 3, 50)).sum().backward()
    assert compression.records.keys() == {"0"}


@pytest.mark.parametrize("shared", [True, False])
def test_changes_that_are_counted_apart_are_not_taken_for_none(shared):
    """What ``.data`` gives has a version counter of its own."""
    torch.manual_seed(0)
    conv, w = nn.Conv2d(2, 4, 3), torch.randn(4, 2, 20, 30, requires_grad=True)
    with compressor(1e-5).during(conv):
        hidden = torch.randn(4, 2, 20, 30) * 1
        y = conv(hidden).sum()
        if not shared:
            hidden.data.mul_(3)
        z = hidden if shared else hidden.data
        y = y + (w * z).sum()
        seen = z.clone()
    y.backward()
    assert (w.grad - seen).abs().max() < 1e-3


def test_a_negation_that_waits_is_not_lost():
    torch.manual_seed(0)
    conv, w = nn.Conv2d(2, 4, 3), torch.randn(4, 2, 20, 30, requires_grad=True)
    with compressor(1e-5).during(conv):
        hidden = torch.randn(4, 2, 20, 30) * 1
        negated = torch._neg_view(hidden)
        y = conv(hidden).sum() + (w * negated).sum()
    y.backward()
    assert (w.grad + hidden).abs().max() < 1e-3


def test_an_empty_batch_and_frozen_layers_are_no_matter():
    network = small_network()
    compression = compressor()
    with compression.during(network):
        network[0](torch.randn(0, 1, 20, 30)).sum().backward()
        frozen = nn.Conv2d(1, 2, 3).double().requires_grad_(False)
        frozen(torch.randn(2, 1, 20, 30).double())
    assert not compression.records


def test_nan_and_infinity_are_kept_and_counted():
    torch.manual_seed(0)
    conv, x = nn.Conv2d(1, 4, 3, bias=False), torch.randn(4, 1, 20, 30)
    x[0, 0, 0, 0] = float("nan")
    compression = compressor()
    found = gradients(conv, x, compression)
    assert found["weight"].isnan().any()
    assert compression.nonfinite_count == 1
    assert compression.records[""].form == "raw"


def test_what_no_copy_makes_smaller_is_looked_at_once_for_all_that_share_it():
    torch.manual_seed(0)
    branches = nn.ModuleList([nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 5)])
    x = torch.randn(4, 1, 20, 30)
    x[0, 0, 0, 0] = float("inf")
    compression = compressor()
    with compression.during(branches):
        sum(branch(x).sum() for branch in branches)
    assert compression.nonfinite_count == 1


def test_rules_that_are_none_are_refused_in_the_next_pass():
    conv, x = nn.Conv2d(1, 4, 3), torch.randn(4, 1, 20, 30)
    compression = compressor()
    compression.rules["convolution"] = 0.01
    with pytest.raises(ValueError, match=r"rule of convolutions is 0\.01"):
        gradients(conv, x, compression)
    compression = compressor()
    compression.rules["convolutions"] = FixedBound(0.01)
    with pytest.raises(ValueError, match=r"one of 'convolution' and one of"):
        gradients(conv, x, compression)


def test_records_are_those_of_the_last_pass():
    branches = nn.ModuleList([nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 5)])
    compression, x = compressor(), torch.randn(4, 1, 20, 30)
    for i, branch in enumerate(branches):
        with compression.during(branches):
            branch(x)
        assert list(compression.records) == [str(i)]


def test_a_type_that_cannot_be_compressed_is_an_error():
    conv, x = nn.Conv2d(1, 4, 3).double(), torch.randn(4, 1, 20, 30).double()
    with pytest.raises(ValueError, match=r"float64.*Convert the network"):
        gradients(conv, x, compressor())


def test_layers_are_named_after_the_network():
    network = small_network()
    compression = compressor()
    gradients(network, torch.randn(4, 1, 20, 30), compression)
    assert list(compression.records) == ["0", "1", "3", "4", "6"]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_in_the_network_leaves_no_pass_under_way(error):
    class Fails(nn.Module):
        def forward(self, x):
            raise error("broken")

    network = Fails()
    compress_activations(network)
    with pytest.raises(error):
        network(torch.randn(2))
    other = small_network()
    compression = compressor()
    gradients(other, torch.randn(4, 1, 20, 30), compression)
    assert compression.records


def test_a_network_compresses_by_itself_and_can_be_copied():
    torch.manual_seed(0)
    network, x = small_network(), torch.randn(4, 1, 20, 30)
    exact = gradients(network, x)
    compression = compress_activations(network, convolutions=RangeBound(1e-2))
    found = gradients(network, x)
    assert 0 < distance(found, exact) < 0.05
    assert len(compression.records) == 5
    assert gradients(copy.deepcopy(network), x).keys() == exact.keys()
    assert gradients(pickle.loads(pickle.dumps(network)), x).keys() == exact.keys()
    with pytest.raises(ValueError, match="already"):
        compress_activations(network)


def test_what_is_saved_after_the_pass_is_not_touched():
    torch.manual_seed(0)
    network, x = small_network(), torch.randn(4, 1, 20, 30)
    with compressor(1e-1).during(network):
        y = network(x)
    w = torch.randn_like(y, requires_grad=True)
    (y * w).sum().backward()
    assert torch.equal(w.grad, y)
