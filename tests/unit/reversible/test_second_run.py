"""What a second run could miss without anybody noticing."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    Recompute,
    ReversibleChain,
    segment,
)
from speechbrain_rev.reversible.norm import BatchNorm

from .chains import (
    CHANNELS,
    EXACT,
    FLOAT32_ROUNDING,
    FLOAT64,
    RESIDUALS,
    Plain,
    as_global,
    chain_of,
    distance,
    equal_to_plain,
    every_precision,
    hooks_fire_twice,
    in_backward,
    loss_of,
    make_chain,
    step,
    streams,
)
from .test_chain import MODES

WITHOUT_STORAGE = ["reconstruct", "recompute"]


def chain_from(make, mode="reconstruct", depth=2, dtype=torch.float64):
    torch.manual_seed(0)
    blocks = [AdditiveCoupling(make(), make()) for _ in range(depth)]
    return make_chain(blocks, mode=mode).to(dtype)


def conv():
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_used_twice_stays_the_modules_own(mode, precision):
    def make():
        layer = nn.Sequential(conv(), nn.BatchNorm2d(CHANNELS))
        return nn.Sequential(layer, nn.Tanh(), layer)

    chain = chain_from(make, mode, dtype=precision.weights)
    before = dict(chain.named_parameters(remove_duplicate=False))
    equal_to_plain(chain, precision)
    after = dict(chain.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is p for name, p in before.items())


class Table(nn.Module):
    """Adds a parameter of the stream's shape, whose gradient is the stream's own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, CHANNELS, 6, 12))

    def forward(self, x):
        return x.tanh() + self.table


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_in_the_shape_of_the_stream_gets_its_own_gradient(mode, precision):
    equal_to_plain(chain_from(Table, mode, 3, precision.weights), precision)


@every_precision
@pytest.mark.parametrize("kind", ["basic", "torch", "dropout"])
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_the_training_state_is_that_of_the_forward_pass(kind, mode, precision):
    def train(module, precision):
        torch.manual_seed(2)
        with precision.autocast():
            loss = loss_of(module(*streams(precision.weights)))
        module.eval()
        precision.scaler().scale(loss).backward()
        assert not any(m.training for m in module.modules())
        return {n: p.grad for n, p in module.named_parameters()}

    chain = chain_of(kind, mode=mode, dtype=precision.weights)
    equal_to_plain(chain, precision, train)


@every_precision
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_frozen_normalisation_in_a_training_chain(mode, precision):
    chain = chain_of("torch", mode=mode, dtype=precision.weights)
    chain.blocks[0].f[1].eval()
    assert not Plain(chain).blocks[0].f[1].training
    equal_to_plain(chain, precision)


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_statistics_of_frozen_normalisation_are_those_of_the_first_run(mode):
    chain = chain_of("torch", mode=mode)
    norms = [b.f[1] for b in chain.blocks] + [b.g[1] for b in chain.blocks]
    for norm in norms:
        norm.eval()
    plain = Plain(chain)
    inputs, again = streams(), streams()
    loss_of(plain(*again)).backward()
    loss = loss_of(chain(*inputs))
    for norm in norms:
        norm.running_mean.add_(1.0)
        norm.running_var.mul_(2.0)
    loss.backward()
    assert distance({"x": inputs[0].grad}, {"x": again[0].grad}) < EXACT


@pytest.mark.parametrize("mode", MODES)
def test_a_foreign_tensor_is_trained_where_nothing_else_is(mode):
    weight = torch.randn(CHANNELS, 1, 1, dtype=torch.float64, requires_grad=True)

    class Foreign(nn.Module):
        def forward(self, x):
            return x * weight

    chain = chain_from(Foreign, mode)
    loss_of(chain(*streams(requires_grad=False))).backward()
    grads = {"weight": weight.grad}
    weight.grad = None
    loss_of(Plain(chain)(*streams(requires_grad=False))).backward()
    assert distance(grads, {"weight": weight.grad}) < EXACT


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = conv()
        self.others = [conv().double()]

    def forward(self, x):
        return self.own(x) + self.others[0](x)


def test_tensors_that_are_neither_inputs_nor_parameters_are_refused():
    chain = chain_from(Unregistered, "reconstruct")
    loss = loss_of(chain(*streams()))
    with pytest.raises(RuntimeError, match="neither its input nor its registered"):
        loss.backward()


@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_tensors_that_are_neither_inputs_nor_parameters_have_their_gradient(mode):
    chain, found = chain_from(Unregistered, mode), []
    for module in (chain, Plain(chain)):
        loss_of(module(*streams())).backward()
        functions = [f for block in module.blocks for f in (block.f, block.g)]
        found.append({str(i): f.others[0].weight.grad for i, f in enumerate(functions)})
    assert distance(*found) < EXACT


def test_masks_have_no_gradient():
    chain = chain_of("basic")
    mask = torch.ones(2, 1, 1, 12, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match=r"mask\.detach"):
        chain(*streams(), mask)


def test_a_mask_changed_before_the_backward_pass_is_an_error():
    chain = chain_of("basic")
    mask = torch.ones(2, 1, 1, 12, dtype=torch.float64)
    loss = loss_of(chain(*streams(), mask))
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_cached_parametrisations_are_refused(mode):
    chain = chain_from(lambda: parametrizations.weight_norm(conv()), mode)
    with parametrize.cached(), pytest.raises(RuntimeError, match="Leave the context"):
        chain(*streams())


class ReadingNorm(nn.BatchNorm2d):
    """Reads its running statistics in training."""

    def forward(self, x):
        shifted = x - self.running_mean.clone().view(1, -1, 1, 1)
        return super().forward(x) + shifted.tanh()


class EvalCounter(nn.Module):
    """Writes a buffer that it reads, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(()))
        self.conv = conv()

    def forward(self, x):
        self.count += 1
        return self.conv(x) * self.count.clone()


@every_precision
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
@pytest.mark.parametrize("kind", ["reads in training", "writes in evaluation"])
def test_buffers_that_matter_are_those_of_the_first_run(kind, mode, precision):
    def make():
        if kind == "reads in training":
            return nn.Sequential(conv(), ReadingNorm(CHANNELS))
        return EvalCounter()

    chain = chain_from(make, mode, dtype=precision.weights)
    if kind == "writes in evaluation":
        for block in chain.blocks:
            block.f.eval()
    equal_to_plain(chain, precision)


class Nested(nn.Module):
    """A chain within a residual function."""

    def __init__(self):
        super().__init__()
        half = CHANNELS // 2
        # Under autocast its output, the chain's input, is in half precision.
        self.conv = conv()
        self.chain = make_chain(
            AdditiveCoupling(RESIDUALS["basic"](half), RESIDUALS["basic"](half))
            for _ in range(2)
        )

    def forward(self, x):
        return torch.cat(self.chain(*self.conv(x).chunk(2, dim=1)), dim=1)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_a_nested_chain_runs_alike_in_both_runs(mode, precision):
    equal_to_plain(chain_from(Nested, mode, dtype=precision.weights), precision)


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_a_nested_chain_runs_alike_where_the_first_run_has_no_graph(mode, monkeypatch):
    monkeypatch.setattr(segment, "may_keep", lambda f: False)
    equal_to_plain(chain_from(Nested, mode))


@hooks_fire_twice
@every_precision
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_a_nested_chain_sees_the_same_layout_in_both_runs(mode, precision):
    chain = chain_from(Nested, mode, depth=1, dtype=precision.weights)
    seen = []
    variables = as_global(note=seen.append)
    inner = chain.blocks[0].f.chain.blocks[0].f
    inner.register_forward_pre_hook(
        lambda _, args: variables.note((args[0].stride(), args[0].dtype))
    )
    step(chain, streams(precision.weights), precision)
    assert len(seen) > 1
    assert len(set(seen)) == 1


@hooks_fire_twice
@every_precision
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hooks", ["forward", "backward"])
def test_what_hooks_keep_is_not_overwritten(hooks, mode, precision):
    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    kept, copies = [], []

    def keep(module, args, *rest):
        for x in (*args, *rest):
            for t in x if isinstance(x, tuple) else (x,):
                kept.append(t)
                copies.append(t.detach().clone())

    for block in chain.blocks:
        for f in (block.f, block.g):
            if hooks == "forward":
                f.register_forward_hook(keep)
            else:
                f.register_full_backward_hook(keep)
    step(chain, streams(precision.weights), precision)
    assert len(kept) >= 12
    for found, copy in zip(kept, copies, strict=True):
        assert torch.equal(found, copy)


def test_what_a_chain_would_not_call_is_refused_or_said():
    class Scaled(AdditiveCoupling):
        def forward(self, x1, x2, mask=None):
            return super().forward(2 * x1, x2, mask)

    for block in (Scaled(conv(), conv()), conv()):
        with pytest.raises(ValueError, match="Give AdditiveCoupling"):
            make_chain([block])
    chain = chain_of("basic")
    chain.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="on the coupling's f and g"):
        chain(*streams())
    chain.blocks.append(AdditiveCoupling(conv(), conv()))
    chain.blocks[0]._forward_hooks.clear()
    with pytest.raises(RuntimeError, match="set_mode after"):
        chain(*streams())


def test_a_residual_function_must_return_a_tensor():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(ValueError, match="into tuple"):
        chain_from(Pair)(*streams())


def test_a_scripted_module_is_refused():
    scripted = torch.jit.script(nn.Sequential(nn.Tanh()))
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script"):
        make_chain([AdditiveCoupling(scripted, conv())])(*streams(torch.float32))


@hooks_fire_twice
def test_one_chain_in_two_threads_is_refused_and_keeps_its_parameters():
    chain = chain_of("basic")
    parameters = list(chain.parameters())
    entered, leave = threading.Event(), threading.Event()
    waiting = threading.local()

    def wait(module, args):
        if in_backward() and getattr(waiting, "here", False):
            entered.set()
            leave.wait()

    chain.blocks[-1].g.register_forward_pre_hook(wait)
    other = loss_of(chain(*streams()))

    def train():
        waiting.here = True
        loss_of(chain(*streams())).backward()

    thread = threading.Thread(target=train)
    thread.start()
    entered.wait()
    try:
        with pytest.raises(RuntimeError, match="Two threads"):
            other.backward()
    finally:
        leave.set()
        thread.join()
    assert all(a is b for a, b in zip(chain.parameters(), parameters, strict=True))


@hooks_fire_twice
def test_an_error_in_the_backward_pass_leaves_the_module_as_it_was():
    chain = chain_of("dropout")
    parameters = list(chain.parameters())
    fails = [False]
    variables = as_global(fails=lambda: fails[0])

    def fail(module, args):
        if variables.fails():
            raise ZeroDivisionError

    chain.blocks[0].f.register_forward_pre_hook(fail)
    loss = loss_of(chain(*streams()))
    fails[0] = True
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    fails[0] = False
    assert all(a is b for a, b in zip(chain.parameters(), parameters, strict=True))
    equal_to_plain(chain)


def test_no_valid_frame_leaves_the_running_statistics_finite():
    norm = BatchNorm(4, relu=True).double()
    x = torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    before = norm.running_mean.clone(), norm.running_var.clone()
    y = norm(x, torch.zeros(2, 1, 1, 5, dtype=torch.float64))
    y.sum().backward()
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])
    assert not y.any()
    assert not x.grad.any()
    with pytest.raises(ValueError, match=r"\[batch, channel, freq, time\]"):
        norm(torch.randn(2, 4, dtype=torch.float64))


def test_a_compiled_chain_has_gradients():
    chain = chain_of("dropout", 1)
    assert (
        distance(*(train_compiled(c, FLOAT64) for c in (chain, Plain(chain)))) < EXACT
    )


def train_compiled(module, precision):
    """Gradients of one step; plain modules are not compiled."""
    compiled = module
    if isinstance(module, ReversibleChain):
        compiled = torch.compile(module, backend="aot_eager")
    torch.manual_seed(2)
    with precision.autocast():
        loss = loss_of(compiled(*streams(precision.weights)))
    precision.scaler().scale(loss).backward()
    return {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.slow
@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_chain_equals_the_chain(mode, precision):
    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    equal_to_plain(chain, precision, train_compiled)


@pytest.mark.slow
@pytest.mark.parametrize("stream_format", ["exact"], indirect=True)
@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_encoder_equals_the_encoder(mode, precision):
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        encoder = build_encoder(
            "revnet57", mode=mode, widths=(8,) * 4, blocks=(1,) * 4
        ).to(precision.weights)
        run = torch.compile(encoder, backend="aot_eager") if compiles else encoder
        with precision.autocast():
            y = run(torch.randn(2, 24, 80, dtype=precision.weights))
        loss = y.to(precision.weights).square().mean()
        precision.scaler().scale(loss).backward()
        results.append({n: p.grad for n, p in encoder.named_parameters()})
    assert distance(*results) < (FLOAT32_ROUNDING if precision.half else EXACT)


def test_recompute_of_a_module_without_tensors_among_its_inputs():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.tensor(3.0))

        def forward(self, factor):
            return (self.value * factor,)

    constant = Constant()
    (y,) = Recompute(constant)(2.0)
    y.backward()
    assert constant.value.grad == 2.0
