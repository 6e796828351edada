"""Half precision: loss scaling, overflows, and what stays in float32."""

import copy

import pytest
import torch
from torch import nn

from speechbrain_rev.lobes.classifier import CosineClassifier
from speechbrain_rev.reversible import AdditiveCoupling, Recompute
from speechbrain_rev.reversible.norm import BatchNorm

from .chains import (
    BF16,
    CHANNELS,
    FLOAT32,
    FLOAT32_ROUNDING,
    FP16,
    SHARE_OF_HALF,
    Run,
    chain_of,
    distance,
    each_half,
    equal_to_plain,
    loss_of,
    make_chain,
    streams,
    train_once,
)
from .test_chain import MODES

WITHOUT_STORAGE = ["reconstruct", "recompute"]
#: Residual functions whose last layer is a convolution.
CONVOLUTIONAL = ["basic", "bottleneck", "df_bottleneck", "torch"]


def run_of(kind, mode, precision, **options):
    chain = chain_of(kind, mode=mode, dtype=torch.float32)
    return Run(chain, precision, **options)


@each_half
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
@pytest.mark.parametrize("kind", ["basic", "dropout"])
def test_training_with_clipped_gradients_goes_where_it_goes_in_store(
    kind, mode, precision
):
    runs = {m: run_of(kind, m, precision) for m in ("store", mode)}
    runs["float32"] = run_of(kind, "store", FLOAT32)
    moved, norms = {}, {}
    for name, run in runs.items():
        start, _ = run.state()
        # Below all norms found, so that a gradient still scaled would be clipped alike.
        norms[name] = [run.step(max_norm=10.0)[1] for _ in range(4)]
        assert min(norms[name]) > 10
        moved[name] = {n: p - start[n] for n, p in run.chain.named_parameters()}
    of_half = distance(moved["store"], moved["float32"])
    assert 0 < of_half < 0.1
    limit = FLOAT32_ROUNDING + SHARE_OF_HALF * of_half
    assert distance(moved[mode], moved["store"]) <= (
        limit if mode != "recompute" else 0
    )
    torch.testing.assert_close(norms["store"], norms["float32"], rtol=0.1, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["basic", "torch", "dropout"])
def test_a_step_whose_gradients_overflow_changes_statistics_alone(kind, mode):
    run, stored = (run_of(kind, m, FP16) for m in (mode, "store"))
    for r in (run, stored):
        r.step()
        before = r.state()
        r.scaler.update(2.0**40)
        r.step()
        torch.testing.assert_close(r.state(), before, rtol=0, atol=0)
        assert r.scaler.get_scale() == 2.0**39
    # The forward pass was run, once.
    for name, buffer in run.chain.named_buffers():
        assert torch.equal(buffer, dict(stored.chain.named_buffers())[name]), name
        assert buffer.isfinite().all()
        if name.endswith("num_batches_tracked"):
            assert buffer == 2
    for name, grad in run.grads.items():
        assert torch.equal(grad.isfinite(), stored.grads[name].isfinite()), name
    # The step after it is taken as if nothing had happened.
    for r in (run, stored):
        r.scaler.update(FP16.scale)
        r.step()
    (weights, momenta), (expected, expected_momenta) = run.state(), stored.state()
    assert distance(weights, expected) <= FLOAT32_ROUNDING
    assert momenta.keys() == expected_momenta.keys()
    assert any(not torch.equal(weights[n], before[0][n]) for n in weights)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CONVOLUTIONAL)
def test_a_streams_gradient_too_large_for_half_is_infinite_in_half(kind, mode):
    # Nothing else would overflow: what comes after it in the backward pass is small.
    chain = chain_of(kind, mode=mode, dtype=torch.float32)
    with torch.no_grad():
        for module in chain.modules():
            if isinstance(module, BatchNorm | nn.BatchNorm2d):
                module.weight.fill_(1e-6)
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(1e-3)
    for scale, finite in ((2.0**12, True), (2.0**20, False)):
        run = Run(copy.deepcopy(chain), FP16, init_scale=scale)
        _, norm = run.step()
        assert norm.isfinite() == finite


@pytest.mark.parametrize("place", ["first convolution", "last convolution"])
@pytest.mark.parametrize("block", [0, -1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CONVOLUTIONAL)
def test_an_overflow_in_the_forward_pass_is_never_silent(kind, mode, block, place):
    chain = chain_of(kind, mode=mode, dtype=torch.float32)
    modules = list(chain.blocks[block].f.modules())
    convolutions = [m for m in modules if isinstance(m, nn.Conv2d)]
    (norm,) = (m for m in modules if isinstance(m, BatchNorm | nn.BatchNorm2d))
    with torch.no_grad():
        # Below fp16's largest number: it is what leaves the convolution that overflows.
        convolutions[0 if place.startswith("first") else -1].weight.fill_(6e4)
        norm.weight.fill_(64)
    finite, run = Run(copy.deepcopy(chain), BF16), Run(chain, FP16)
    if chain.format_name == "float":
        # It is fp16 that overflows. Exact streams are out of their range in any case.
        loss, norm = finite.step()
        assert loss.isfinite()
        assert norm.isfinite()
    before = run.state()
    loss, norm = run.step()
    assert not loss.isfinite()
    assert not norm.isfinite()
    assert run.scaler.get_scale() == FP16.scale / 2
    # torch's own normalisation is not finite from here on.
    assert kind == "torch" or all(b.isfinite().all() for b in chain.buffers())
    torch.testing.assert_close(run.state(), before, rtol=0, atol=0)


class PartlyFloat32(nn.Module):
    """A residual function with a layer that autocast must leave alone."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        x = self.conv(x)
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float()).tanh()


def backward_under_autocast(module, precision):
    inputs = streams(precision.weights)
    with precision.autocast():
        loss = loss_of(module(*inputs))
        precision.scaler().scale(loss).backward()
    return {name: p.grad for name, p in module.named_parameters()}


@each_half
@pytest.mark.parametrize("train", [train_once, backward_under_autocast])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_made_in_the_callers_autocast_state(mode, train, precision):
    # Where the caller has left autocast, a product in the backward pass of the float32
    # layer is no more rounded to half than in plain autograd.
    torch.manual_seed(0)
    blocks = (AdditiveCoupling(PartlyFloat32(), PartlyFloat32()) for _ in range(2))
    chain = make_chain(blocks, mode=mode)
    grads = equal_to_plain(chain, precision, train)
    if mode == "reconstruct" and train is train_once:
        chain.set_mode("store")
        chain.zero_grad()
        # Two blocks are too few for the rounding of the streams to reach a half.
        assert distance(grads, train(chain, precision)) < FLOAT32_ROUNDING


class Two(nn.Module):
    """Returns a tensor in half precision and one in float32."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.classifier = CosineClassifier(12, 5)

    def forward(self, x):
        maps = self.norm(self.conv(x)).relu()
        cosines = self.classifier(maps.mean((1, 2)).unsqueeze(1))
        return {"maps": maps, "cosines": cosines}


@each_half
def test_recompute_keeps_the_dtype_of_each_output_and_its_gradient(precision):
    torch.manual_seed(0)
    module = Two()
    results = []
    for m in (module, Recompute(copy.deepcopy(module))):
        (x, _) = streams(torch.float32)
        with precision.autocast():
            y = m(x)
            loss = y["maps"].float().square().mean() + y["cosines"].square().mean()
        assert y["maps"].dtype == precision.half
        assert y["cosines"].dtype == torch.float32
        precision.scaler().scale(loss).backward()
        results.append([x.grad, *(p.grad for p in m.parameters()), *m.buffers()])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@each_half
@pytest.mark.parametrize("kind", ["basic", "dropout"])
def test_without_gradients_streams_in_half_are_those_of_training(kind, precision):
    chain = chain_of(kind, dtype=torch.float32)
    results = []
    for module, gradients in ((copy.deepcopy(chain), True), (chain, False)):
        torch.manual_seed(2)
        inputs = [x.to(precision.half) for x in streams(requires_grad=False)]
        with torch.set_grad_enabled(gradients), precision.autocast():
            results.append(module(*inputs))
    for a, b in zip(*results, strict=True):
        assert b.dtype == torch.float32
        if chain.format_name == "float":
            assert torch.equal(a, b)
        # Exact streams are rounded to 2**-16 in training, after which few values
        # round to another half, whose relative step is at most 2**-7.
        assert distance({"y": a}, {"y": b}) < 2.0**-7


class Constant(nn.Module):
    """A residual of 1/4 in each place, in half precision under autocast."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        nn.init.zeros_(self.linear.weight)
        nn.init.constant_(self.linear.bias, 0.25)

    def forward(self, x):
        return self.linear(x)


@each_half
@pytest.mark.parametrize("training", [True, False])
def test_small_residuals_reach_large_streams_in_half(training, precision):
    # At 512 the steps of fp16 are 1/2 and those of bf16 are 4.
    chain = make_chain(AdditiveCoupling(Constant(), Constant()) for _ in range(32))
    inputs = [torch.full((1, 2, 12), 512.0, dtype=precision.half)] * 2
    with precision.autocast():
        y1, y2 = chain.train(training)(*inputs)
    for y in (y1, y2):
        assert torch.equal(y, torch.full_like(y, 512 + 32 / 4))


@each_half
@pytest.mark.parametrize("mode", MODES)
def test_networks_converted_to_half_precision_are_refused_in_training(mode, precision):
    chain = chain_of("basic", mode=mode).to(precision.half)
    with pytest.raises(ValueError, match=r"torch\.autocast"):
        chain(*streams(precision.half))
    assert chain.eval()(*streams(precision.half))[0].dtype == precision.half
    meta = chain.train().to("meta")
    with pytest.raises(ValueError, match=r"torch\.autocast"):
        meta(*(x.to("meta") for x in streams(precision.half)))
