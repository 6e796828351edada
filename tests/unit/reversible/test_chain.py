"""Chains against their couplings in plain autograd, in every mode, precision and format."""

import contextlib
import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    RangeBound,
)
from speechbrain_rev.modes import Mode
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    Recompute,
    ReversibleChain,
    segment,
)
from speechbrain_rev.reversible.norm import BatchNorm

from .chains import (
    BF16,
    CHANNELS,
    EXACT,
    FLOAT32,
    FLOAT32_ROUNDING,
    FLOAT64,
    FORMAT,
    FP16,
    MODES,
    RESIDUALS,
    SHARE_OF_HALF,
    WITHOUT_STORAGE,
    Plain,
    Run,
    as_global,
    assert_same_bits,
    chain_of,
    conv,
    distance,
    each_half,
    equal_to_plain,
    every_precision,
    hooks_fire_twice,
    in_backward,
    loss_of,
    make_chain,
    step,
    streams,
    torch_residual,
    train_once,
)
from .processes import run_in_processes

each_format = pytest.mark.usefixtures("stream_format")
every_mode = pytest.mark.parametrize("mode", MODES)
without_storage = pytest.mark.parametrize("mode", WITHOUT_STORAGE)


class Table(nn.Module):
    """Adds a parameter of the stream's shape, whose gradient is the stream's own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, CHANNELS, 6, 12))

    def forward(self, x):
        return x.tanh() + self.table


class Bias(nn.Module):
    """Does not look at its input."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.bias.expand_as(x)


class Nested(nn.Module):
    """A chain within a residual function."""

    def __init__(self):
        super().__init__()
        # Under autocast its output, the chain's input, is in half precision.
        self.conv = conv()
        self.chain = make_chain(couplings("basic", 2, CHANNELS // 2))

    def forward(self, x):
        return torch.cat(self.chain(*self.conv(x).chunk(2, dim=1)), dim=1)


class PartlyFloat32(nn.Module):
    """Has a layer that autocast must leave alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = conv(), nn.Linear(12, 12)

    def forward(self, x):
        x = self.conv(x)
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.to(self.linear.weight.dtype)).tanh()


def couplings(make, depth=2, channels=CHANNELS):
    """Couplings of residual functions: of a kind, or as a function makes them."""
    if isinstance(make, str):
        make = partial(RESIDUALS[make], channels)
    return [AdditiveCoupling(make(), make()) for _ in range(depth)]


def layer_twice():
    layer = nn.Sequential(conv(), nn.BatchNorm2d(CHANNELS))
    return nn.Sequential(layer, nn.Tanh(), layer)


def shared():
    """Weights shared within a function, between functions, and between couplings."""
    f, g = RESIDUALS["basic"](CHANNELS), RESIDUALS["basic"](CHANNELS)
    f.conv2.weight = f.conv1.weight
    first = AdditiveCoupling(f, nn.Sequential(g, nn.Tanh(), g))
    return [first, AdditiveCoupling(g, f), first]


def to_channels_last(chain):
    chain.to(memory_format=torch.channels_last)


def no_parameters(chain):
    chain.requires_grad_(False)


def channels_last(dtype):
    layout = torch.channels_last
    return [
        x.detach().to(memory_format=layout).requires_grad_() for x in streams(dtype)
    ]


def only_second(dtype):
    x1, x2 = streams(dtype)
    return [x1.detach(), x2]


def under_autocast(module, precision):
    """Take a step whose backward pass is under autocast, too."""
    inputs = streams(precision.weights)
    with precision.autocast():
        loss = loss_of(module(*inputs))
        precision.scaler().scale(loss).backward()
    return precision.gradients(module.named_parameters())


def hooked(module, precision):
    calls = []
    for p in module.parameters():
        p.register_hook(lambda g: (calls.append(1), 2 * g)[1])
    grads = train_once(module, precision)
    assert len(calls) == len(list(module.parameters()))
    return grads


def saved_with_hooks(module, precision):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (packed.append(1), x.clone())[1], lambda x: x
    ):
        grads = train_once(module, precision)
    assert packed
    return grads


def looked_for_anomalies(module, precision):
    with torch.autograd.set_detect_anomaly(True):
        return train_once(module, precision)


def outputs_written_to(module, precision):
    with precision.autocast():
        y1, y2 = module(*streams(precision.weights))
        in_place = isinstance(module, ReversibleChain)
        y1, y2 = (y1.mul_(2), y2.mul_(3)) if in_place else (y1 * 2, y2 * 3)
        loss = loss_of((y1, y2))
    precision.scaler().scale(loss).backward()
    return precision.gradients(module.named_parameters())


@dataclass(frozen=True)
class Case:
    """Couplings, what is done to their chain, and how it trains."""

    make: Callable[[], list]
    prepare: Callable[[ReversibleChain], Any] = lambda chain: None
    train: Callable = train_once
    to_the_bit: bool | None = None


basic = partial(couplings, "basic")
MASK = (torch.arange(12) < torch.tensor([[12], [7]])).float()[:, None, None, :]

#: What test_generated.py does not go over in float64.
CASES = {
    **{kind: Case(partial(couplings, kind, 3)) for kind in RESIDUALS},
    "empty": Case(list, to_the_bit=True),
    "identity": Case(partial(couplings, nn.Identity, 1), to_the_bit=True),
    "spectral_norm": Case(
        partial(couplings, lambda: parametrizations.spectral_norm(conv()))
    ),
    "layer_twice": Case(partial(couplings, layer_twice)),
    # Gradients of a weight are added up function by function, which plain autograd does
    # not do: what is below float32's rounding may differ.
    "shared": Case(shared, to_the_bit=False),
    "table": Case(partial(couplings, Table, 3)),
    "nested": Case(partial(couplings, Nested)),
    "evaluation": Case(basic, nn.Module.eval, to_the_bit=True),
    "masked": Case(basic, train=partial(train_once, mask=MASK)),
    "channels_last": Case(
        basic, to_channels_last, partial(train_once, inputs=channels_last)
    ),
    "no_input_needs_a_gradient": Case(
        basic, train=partial(train_once, inputs=partial(streams, requires_grad=False))
    ),
    "one_input_needs_a_gradient": Case(
        basic, no_parameters, partial(train_once, inputs=only_second)
    ),
    "hooks_of_parameters": Case(basic, train=hooked),
    "saved_with_hooks": Case(basic, train=saved_with_hooks),
    "anomalies": Case(basic, train=looked_for_anomalies),
    "outputs_written_to": Case(basic, train=outputs_written_to),
    # A product in the backward pass of the float32 layer is rounded to half where the
    # caller is under autocast, and only there.
    "partly_float32": Case(partial(couplings, PartlyFloat32)),
    "partly_float32_under_autocast": Case(
        partial(couplings, PartlyFloat32), train=under_autocast
    ),
}


@each_format
@every_precision
@every_mode
@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_plain_autograd(case, mode, precision):
    case = CASES[case]
    torch.manual_seed(0)
    chain = make_chain(case.make(), mode=mode).to(precision.weights)
    case.prepare(chain)
    equal_to_plain(chain, precision, case.train, to_the_bit=case.to_the_bit)


@each_format
@pytest.mark.parametrize("precision", [FLOAT64, BF16], ids=str)
@pytest.mark.parametrize(
    "modes", [m for m in itertools.product(MODES, repeat=3) if len(set(m)) > 1]
)
@pytest.mark.parametrize("case", ["basic", "shared"])
def test_each_block_may_have_its_own_mode(case, modes, precision):
    torch.manual_seed(0)
    chain = make_chain(CASES[case].make(), mode=modes).to(precision.weights)
    equal_to_plain(chain, precision, to_the_bit=CASES[case].to_the_bit)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [FLOAT32, BF16, FP16], ids=str)
@pytest.mark.parametrize("kind", ["basic", "bottleneck", "df_bottleneck"])
def test_no_depth_changes_a_bit(kind, precision):
    chain = chain_of(kind, 188, mode="store", dtype=torch.float32, streams="exact")
    steps = []
    for mode in ("store", "reconstruct"):
        again = copy.deepcopy(chain)
        again.set_mode(mode)
        outputs, *named = step(again, streams(torch.float32), precision)
        steps.append({"y1": outputs[0], "y2": outputs[1]} | named[0] | named[1])
    assert_same_bits(*steps)


@pytest.mark.parametrize("kind", RESIDUALS)
def test_the_inverse_of_a_coupling_gives_its_inputs(kind):
    # In evaluation, where a residual function is one and the same function twice.
    block = chain_of(kind).blocks[0].eval()
    x1, x2 = streams(requires_grad=False)
    r1, r2 = block.inverse(*block(x1, x2))
    assert distance({"1": r1, "2": r2}, {"1": x1, "2": x2}) < EXACT


class Counted(nn.Module):
    """Notes each run and whether it is in a backward pass."""

    def __init__(self, runs):
        super().__init__()
        self.conv, self.variables = conv(), as_global(note=runs.append)

    def forward(self, x):
        self.variables.note(in_backward())
        return self.conv(x)


@each_format
@without_storage
def test_each_residual_function_runs_once_in_each_pass(mode):
    runs = [[] for _ in range(6)]
    blocks = [
        AdditiveCoupling(Counted(runs[i]), Counted(runs[i + 1])) for i in (0, 2, 4)
    ]
    step(make_chain(blocks, mode=mode), streams(torch.float32))
    assert runs == [[False, True]] * 6


def activations_peak(depth, mode, kind="basic", precision=FLOAT32):
    """Live peak of a step without the parameters' gradients, which grow with depth."""
    chain = chain_of(kind, depth, mode=mode, dtype=torch.float32).requires_grad_(False)
    x = streams(torch.float32, batch=8, time=100)

    def train():
        with precision.autocast():
            loss = loss_of(chain(*x))
        loss.backward()

    return live_bytes_peak(train)


@each_format
@pytest.mark.parametrize(
    ("kind", "precision"),
    [*((kind, FLOAT32) for kind in RESIDUALS if kind != "dropout"), ("basic", FP16)],
    ids=str,
)
def test_peak_memory_of_reconstruction_does_not_grow_with_depth(kind, precision):
    shallow = activations_peak(2, "reconstruct", kind, precision)
    deep = activations_peak(8, "reconstruct", kind, precision)
    # Notes about the streams are some numbers a block.
    assert deep <= 1.0015 * shallow
    assert activations_peak(8, "store", kind, precision) > 1.5 * deep


def test_recomputation_keeps_two_streams_of_each_block():
    stream = 8 * CHANNELS * 6 * 100 * 4
    grown = activations_peak(6, "recompute") - activations_peak(2, "recompute")
    assert grown == pytest.approx(4 * 2 * stream, rel=0.05)


@each_format
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_train_alike_and_a_mode_changes_no_key(clone):
    chain = chain_of("dropout", mode="store")
    keys = list(chain.state_dict())
    chain.set_mode(["reconstruct", "store", Mode.RECOMPUTE])
    # A step leaves nothing that cannot be copied.
    step(chain, streams())
    chain.zero_grad()
    twin = clone(chain)
    assert twin.modes == chain.modes
    assert list(twin.state_dict()) == keys
    assert_same_bits(train_once(twin, FLOAT64), train_once(chain, FLOAT64))


@each_format
@pytest.mark.parametrize("precision", [FLOAT32, BF16], ids=str)
@every_mode
def test_evaluation_and_no_grad_are_plain_torch_to_the_bit(mode, precision):
    chain = chain_of("basic", mode=mode, dtype=torch.float32)
    x, plain = streams(torch.float32), Plain(chain)
    with precision.autocast():
        with torch.no_grad():
            in_training = chain(*x), plain(*x)
        in_evaluation = chain.eval()(*x), plain.eval()(*x)
    for found, expected in (in_training, in_evaluation):
        assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, chain.buffers(), plain.buffers()))


@each_format
@every_precision
@every_mode
def test_the_callers_tensors_and_gradients_are_left_alone(mode, precision):
    blocks = [*couplings("basic"), AdditiveCoupling(Bias(), Bias())]
    chain = make_chain(blocks, mode=mode).to(precision.weights)
    x = streams(precision.weights)
    with precision.autocast():
        y = chain(*x)
    own = [*x, *y, *(torch.randn_like(each) for each in y)]
    before = [t.detach().clone() for t in own]
    torch.autograd.backward(y, own[4:])
    for a, b in zip(own, before, strict=True):
        assert torch.equal(a, b)
        assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()


@each_format
@hooks_fire_twice
@every_mode
@pytest.mark.parametrize("register", ["forward_hook", "full_backward_hook"])
def test_what_hooks_keep_is_not_overwritten(register, mode):
    chain, kept, copies = chain_of("basic", mode=mode), [], []

    def keep(module, args, *rest):
        for x in (args, *rest):
            for t in x if isinstance(x, tuple) else (x,):
                kept.append(t)
                copies.append(t.detach().clone())

    for block in chain.blocks:
        for f in (block.f, block.g):
            getattr(f, f"register_{register}")(keep)
    step(chain, streams())
    assert len(kept) >= 12
    assert all(map(torch.equal, kept, copies))


@each_format
@without_storage
def test_a_nested_chain_runs_alike_where_the_first_run_has_no_graph(mode, monkeypatch):
    monkeypatch.setattr(segment, "may_keep", lambda f: False)
    equal_to_plain(make_chain(couplings(Nested), mode=mode).double())


def change_a_weight(chain, mask):
    chain.blocks[0].f.conv1.weight.mul_(2)


def change_the_mask(chain, mask):
    mask.zero_()


@each_format
@pytest.mark.parametrize("change", [change_a_weight, change_the_mask])
@without_storage
def test_what_changes_before_the_backward_pass_is_an_error(mode, change):
    chain, mask = chain_of("basic", mode=mode), MASK.clone()
    loss = loss_of(chain(*streams(), mask))
    with torch.no_grad():
        change(chain, mask)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Scaled(AdditiveCoupling):
    def forward(self, x1, x2, mask=None):
        return super().forward(2 * x1, x2, mask)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def coupling(f):
    return [AdditiveCoupling(f, nn.Identity())]


@pytest.mark.parametrize(
    ("blocks", "settings", "message"),
    [
        (basic, {"mode": "keep"}, "'keep'; the modes are 'store', 'reconstruct', 'rec"),
        (basic, {"mode": ["store"]}, "1 modes were given for 2 blocks"),
        (basic, {"streams": "double"}, "'double'; the formats are 'float', 'exact'"),
        (basic, {"chunk": 0}, "chunk is 0; it must be None or at least 1"),
        (basic, {"verify": "shout"}, "'warn', 'raise', or None"),
        (basic, {"verify_every": 0}, "verify_every is 0.* at least 1"),
        (basic, {"verify_every": 1.5}, "verify_every is 1.5"),
        (lambda: [Scaled(conv(), conv())], {}, "Give AdditiveCoupling"),
        (lambda: [conv()], {}, "Give AdditiveCoupling"),
    ],
)
def test_impossible_settings_are_refused(blocks, settings, message):
    with pytest.raises(ValueError, match=message):
        make_chain(blocks(), **settings)


@every_mode
@pytest.mark.parametrize(
    ("f", "message"),
    [
        (partial(nn.ReLU, inplace=True), "inplace=False"),
        (lambda: nn.Conv2d(CHANNELS, 4, 1), "must keep the shape"),
        (Pair, "into tuple"),
    ],
)
def test_what_is_no_residual_function_is_refused(mode, f, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        make_chain(coupling(f()), mode=mode)(*streams(torch.float32))


def forward_of(chain, x=None, mask=None):
    return chain(*(x or streams()), mask)


def sharded():
    chain = chain_of("basic")
    chain.blocks[0]._is_fsdp_managed_module = True  # as FSDP marks what it wraps
    assert chain.eval()(*streams())
    return forward_of(chain.train())


def scripted():
    function = torch.jit.script(nn.Sequential(nn.Tanh()))
    return forward_of(make_chain(coupling(function)))


def within_cached_parametrisations():
    with parametrize.cached():
        forward_of(make_chain(coupling(parametrizations.weight_norm(conv().double()))))


def longer():
    chain = chain_of("basic")
    chain.blocks.append(AdditiveCoupling(conv(), conv()))
    return forward_of(chain)


def with_a_mask_that_needs_a_gradient():
    return forward_of(chain_of("basic"), mask=MASK.clone().requires_grad_())


def of_other_shapes():
    x1, x2 = streams()
    return forward_of(chain_of("basic"), [x1, x2[..., :5]])


def to_half(dtype=torch.bfloat16, device="cpu"):
    x = [t.to(device, dtype) for t in streams()]
    chain = chain_of("basic").to(device, dtype)
    assert chain.eval()(*x)[0].dtype == dtype
    return forward_of(chain.train(), x)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (sharded, "DistributedDataParallel"),
        (scripted, r"torch\.jit\.script"),
        (within_cached_parametrisations, "Leave the context"),
        (longer, "set_mode after"),
        (with_a_mask_that_needs_a_gradient, r"mask\.detach"),
        (of_other_shapes, "one shape, dtype and device"),
        (to_half, r"torch\.autocast"),
        (partial(to_half, torch.float16), r"torch\.autocast"),
        (partial(to_half, device="meta"), r"torch\.autocast"),
        (lambda: torch.jit.script(chain_of("basic")), "torch.export"),
    ],
)
def test_what_cannot_be_trained_says_what_to_do(run, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        run()


def test_hooks_on_a_coupling_do_not_fire_and_a_warning_names_those_that_do():
    chain = chain_of("basic")
    chain.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="on the coupling's f and g"):
        chain(*streams())


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


@each_format
@hooks_fire_twice
def test_an_error_in_the_backward_pass_leaves_the_module_as_it_was():
    chain, fails = chain_of("dropout"), [False]
    variables = as_global(fails=lambda: fails[0])

    def fail(module, args):
        if variables.fails():
            raise ZeroDivisionError

    chain.blocks[0].f.register_forward_pre_hook(fail)
    parameters = list(chain.parameters())
    loss = loss_of(chain(*streams()))
    fails[0] = True
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    fails[0] = False
    assert all(a is b for a, b in zip(chain.parameters(), parameters, strict=True))
    equal_to_plain(chain)


def compiled_step(module, precision):
    """Take a step; plain modules are not compiled."""
    compiled = module
    if isinstance(module, ReversibleChain):
        compiled = torch.compile(module, backend="aot_eager")
    grads = step(compiled, streams(precision.weights), precision)[1]
    return {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}


@each_format
@pytest.mark.parametrize(
    ("kind", "mode", "precision"),
    [
        ("dropout", "reconstruct", FLOAT64),
        *(pytest.param("basic", m, BF16, marks=pytest.mark.slow) for m in MODES),
    ],
    ids=str,
)
def test_a_compiled_chain_equals_the_chain(kind, mode, precision):
    chain = chain_of(kind, 1, mode=mode, dtype=precision.weights)
    equal_to_plain(chain, precision, compiled_step)


# Half precision: loss scaling and overflows.


@each_format
@every_mode
@pytest.mark.parametrize("kind", ["basic", "torch"])
def test_a_step_whose_gradients_overflow_changes_statistics_alone(kind, mode):
    chains = [chain_of(kind, mode=m, dtype=torch.float32) for m in (mode, "store")]
    run, stored = runs = [Run(chain, FP16) for chain in chains]
    for r in runs:
        r.step()
        before = r.state()
        r.scaler.update(2.0**40)
        r.step()
        torch.testing.assert_close(r.state(), before, rtol=0, atol=0)
        assert r.scaler.get_scale() == 2.0**39
    # The forward pass was run, once.
    buffers = dict(run.chain.named_buffers())
    assert_same_bits(buffers, dict(stored.chain.named_buffers()))
    assert all(b.isfinite().all() for b in buffers.values())
    for name, grad in run.grads.items():
        assert torch.equal(grad.isfinite(), stored.grads[name].isfinite()), name
    # The step after it is taken as if nothing had happened.
    for r in runs:
        r.scaler.update(FP16.scale)
        r.step()
    assert distance(run.state()[0], stored.state()[0]) <= FLOAT32_ROUNDING


#: Residual functions whose last layer is a convolution.
each_convolutional = pytest.mark.parametrize(
    "kind", [kind for kind in RESIDUALS if kind != "dropout"]
)


def is_norm(module):
    return isinstance(module, BatchNorm | nn.BatchNorm2d)


@each_format
@every_mode
@each_convolutional
def test_a_streams_gradient_too_large_for_half_is_infinite_in_half(kind, mode):
    # Nothing else would overflow: what comes after it in the backward pass is small.
    chain = chain_of(kind, mode=mode, dtype=torch.float32)
    with torch.no_grad():
        for module in chain.modules():
            if is_norm(module):
                module.weight.fill_(1e-6)
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(1e-3)
    for scale, finite in ((2.0**12, True), (2.0**20, False)):
        _, norm = Run(copy.deepcopy(chain), FP16, init_scale=scale).step()
        assert norm.isfinite() == finite


@each_format
@pytest.mark.parametrize("place", [0, -1])
@every_mode
@each_convolutional
def test_an_overflow_in_the_forward_pass_is_never_silent(kind, mode, place):
    chain = chain_of(kind, mode=mode, dtype=torch.float32)
    modules = list(chain.blocks[place].f.modules())
    with torch.no_grad():
        # Below fp16's largest number: it is what leaves the convolution that overflows.
        [m for m in modules if isinstance(m, nn.Conv2d)][place].weight.fill_(6e4)
        next(filter(is_norm, modules)).weight.fill_(64)
    finite, run = Run(copy.deepcopy(chain), BF16), Run(chain, FP16)
    if chain.format_name == "float":
        # It is fp16 that overflows. Exact streams are out of their range in any case.
        assert all(x.isfinite() for x in finite.step())
    before = run.state()
    loss, norm = run.step()
    assert not loss.isfinite()
    assert not norm.isfinite()
    assert run.scaler.get_scale() == FP16.scale / 2
    # torch's own normalisation is not finite from here on.
    assert kind == "torch" or all(b.isfinite().all() for b in chain.buffers())
    torch.testing.assert_close(run.state(), before, rtol=0, atol=0)


@each_format
@each_half
@pytest.mark.parametrize("training", [True, False])
def test_small_residuals_reach_large_streams_in_half(training, precision):
    def constant():
        linear = nn.Linear(12, 12)
        nn.init.zeros_(linear.weight)
        nn.init.constant_(linear.bias, 0.25)
        return linear

    # At 512 the steps of fp16 are 1/2 and those of bf16 are 4.
    chain = make_chain(couplings(constant, 32)).train(training)
    inputs = [torch.full((1, 2, 12), 512.0, dtype=precision.half)] * 2
    with precision.autocast():
        outputs = chain(*inputs)
    for y in outputs:
        assert torch.equal(y, torch.full_like(y, 512 + 32 / 4))


# Several processes.


def train(module, ranks, micro_batches, precision, share=1.0):
    """Take steps of accumulated micro-batches; seeds tell the ranks apart."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for i in range(2):
        for last in (False, True)[-micro_batches:]:
            for rank in ranks:
                inputs = streams(precision.weights, seed=100 * i + 10 * last + rank)
                waits = not last and isinstance(module, DistributedDataParallel)
                with module.no_sync() if waits else contextlib.nullcontext():
                    with precision.autocast():
                        loss = share * loss_of(module(*inputs))
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def train_process(rank, folder, static_graph, micro_batches, precision, format):
    torch.set_num_threads(1)
    FORMAT.set(format)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    options = {"static_graph": static_graph, "gradient_as_bucket_view": True}
    for name, mode in (("mixed", MODES), ("store", "store")):
        chain = chain_of("dropout", mode=mode, dtype=precision.weights)
        weights = train(
            DistributedDataParallel(chain, **options), [rank], micro_batches, precision
        )
        weights = {n.removeprefix("module."): p for n, p in weights.items()}
        torch.save(weights, f"{folder}/{name}{rank}.pt")
    dist.destroy_process_group()


@each_format
@pytest.mark.parametrize(
    ("static_graph", "micro_batches", "precision"),
    [
        # torch's reducer itself fails where a static graph meets no_sync.
        (False, 2, FLOAT64),
        pytest.param(True, 1, FLOAT64, marks=pytest.mark.slow),
        pytest.param(False, 2, BF16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ddp_averages_the_gradients_of_processes(
    tmp_path, static_graph, micro_batches, precision
):
    settings = static_graph, micro_batches, precision
    run_in_processes(train_process, (str(tmp_path), *settings, FORMAT.get()), 2)
    chain = chain_of("dropout", dtype=precision.weights)
    expected = train(Plain(chain), [0, 1], micro_batches, precision, share=0.5)
    limit = EXACT
    if precision.half:
        wide = train(Plain(chain), [0, 1], micro_batches, FLOAT32, share=0.5)
        limit = FLOAT32_ROUNDING + SHARE_OF_HALF * distance(expected, wide)
    for rank in (0, 1):
        found, stored = (
            torch.load(tmp_path / f"{name}{rank}.pt") for name in ("mixed", "store")
        )
        assert distance(found, expected) <= limit
        if FORMAT.get() == "exact":
            assert_same_bits(found, stored)


# Blocks that compress.

MIXED = ["reconstruct", "compress", "recompute", "compress", "reconstruct"]


def compressing(modes):
    torch.manual_seed(0)
    chain = make_chain(couplings(partial(torch_residual, 4), len(modes)), mode=modes)
    chain.compression = ActivationCompression(
        convolutions=RangeBound(1e-2), normalisations=DeviationBound(1e-2)
    )
    return chain


def compressed_step(chain):
    torch.manual_seed(1)
    x1, x2 = torch.randn(2, 2, 4, 20, 30).requires_grad_().unbind()
    y1, y2 = chain(x1, x2)
    (y1.square().mean() + y2.square().mean()).backward()
    chain.check_streams()
    return (y1, y2), FLOAT32.gradients(chain.named_parameters())


def blocks_of(names):
    return {name.split(".")[1] for name in names}


def test_only_blocks_that_compress_are_compressed_and_streams_stay_exact():
    stored, mixed = compressing(["store"] * 6), compressing([*MIXED, "store"])
    expected, exact = compressed_step(stored)
    outputs, found = compressed_step(mixed)
    assert blocks_of(mixed.compression.records) == {"1", "3"}
    assert all(map(torch.equal, outputs, expected))
    assert_same_bits(dict(mixed.named_buffers()), dict(stored.named_buffers()))
    # The error of a batch normalisation's input goes down to the blocks before.
    differing = {name for name in exact if not torch.equal(found[name], exact[name])}
    assert blocks_of(differing) == {"0", "1", "2", "3"}
    for name, grad in exact.items():
        assert (found[name] - grad).norm() < 0.1 * grad.norm(), name


def test_what_is_recomputed_around_a_chain_is_not_compressed():
    """The second run is in the backward pass, where it would save nothing."""
    chain, runs = compressing(["compress"] * 5), []
    variables = as_global(note=runs.append)

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = chain

        def forward(self, x):
            variables.note(1)
            return torch.cat(self.chain(*x.chunk(2, 1)), 1)

    torch.manual_seed(1)
    x = torch.randn(2, 8, 20, 30)
    Recompute(Joined())(x).square().mean().backward()
    found = {n: p.grad.clone() for n, p in chain.named_parameters()}
    assert not chain.compression.records
    assert len(runs) == 2
    chain.zero_grad()
    chain.set_mode("store")
    Joined()(x).square().mean().backward()
    assert_same_bits(found, FLOAT32.gradients(chain.named_parameters()))
