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
    Counted,
    Plain,
    Run,
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
    module_with,
    step,
    streams,
    torch_residual,
    train_once,
)
from .processes import run_in_processes

each_format = pytest.mark.usefixtures("stream_format")
every_mode = pytest.mark.parametrize("mode", MODES)
without_storage = pytest.mark.parametrize("mode", WITHOUT_STORAGE)


@module_with(table=lambda: nn.Parameter(torch.randn(2, CHANNELS, 6, 12)))
def table(self, x):
    """Add a parameter of the stream's shape, whose gradient is the stream's own."""
    return x.tanh() + self.table


@module_with(bias=lambda: nn.Parameter(torch.zeros(1)))
def without_its_input(self, x):
    return self.bias.expand_as(x)


# Under autocast its output, the chain's input, is in half precision.
@module_with(conv=conv, chain=lambda: make_chain(couplings("basic", 2, CHANNELS // 2)))
def nested(self, x):
    return torch.cat(self.chain(*self.conv(x).chunk(2, dim=1)), dim=1)


@module_with(conv=conv, linear=lambda: nn.Linear(12, 12))
def partly_float32(self, x):
    """Have a layer that autocast must leave alone."""
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


@module_with(layer=lambda: nn.Sequential(conv(), nn.BatchNorm2d(CHANNELS)))
def called_twice(self, x):
    return self.layer(self.layer(x).tanh())


def shared():
    """Weights shared within a function, between functions, and between couplings."""
    f, g = RESIDUALS["basic"](CHANNELS), RESIDUALS["basic"](CHANNELS)
    f.conv2.weight = f.conv1.weight
    first = AdditiveCoupling(f, nn.Sequential(g, nn.Tanh(), g))
    return [first, AdditiveCoupling(g, f), first]


def to_channels_last(chain):
    chain.to(memory_format=torch.channels_last)


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


def without_gradients(module, precision):
    with precision.autocast(), torch.no_grad():
        y1, y2 = module(*streams(precision.weights))
    return {"y1": y1, "y2": y2, "sum": y1 + y2}


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
    "spectral_norm": Case(
        partial(couplings, lambda: parametrizations.spectral_norm(conv()))
    ),
    "layer_twice": Case(partial(couplings, layer_twice)),
    "called_twice": Case(partial(couplings, called_twice)),
    # Gradients of a weight are added up function by function, which plain autograd does
    # not do: what is below float32's rounding may differ.
    "shared": Case(shared, to_the_bit=False),
    "table": Case(partial(couplings, table, 3)),
    "nested": Case(partial(couplings, nested)),
    "recomputed": Case(partial(couplings, lambda: Recompute(torch_residual(CHANNELS)))),
    "evaluation": Case(basic, nn.Module.eval, to_the_bit=True),
    "no_grad": Case(basic, train=without_gradients, to_the_bit=True),
    "masked": Case(basic, train=partial(train_once, mask=MASK)),
    "channels_last": Case(
        basic, to_channels_last, partial(train_once, inputs=channels_last)
    ),
    "no_input_needs_a_gradient": Case(
        basic, train=partial(train_once, inputs=partial(streams, requires_grad=False))
    ),
    "one_input_needs_a_gradient": Case(
        basic,
        lambda chain: chain.requires_grad_(False),
        partial(train_once, inputs=only_second),
    ),
    "hooks_of_parameters": Case(basic, train=hooked),
    "saved_with_hooks": Case(basic, train=saved_with_hooks),
    "anomalies": Case(basic, train=looked_for_anomalies),
    "outputs_written_to": Case(basic, train=outputs_written_to),
    # A product in the backward pass of the float32 layer is rounded to half where the
    # caller is under autocast, and only there.
    "partly_float32": Case(partial(couplings, partly_float32)),
    "partly_float32_under_autocast": Case(
        partial(couplings, partly_float32), train=under_autocast
    ),
}


@each_format
@every_precision
# With exact streams the others are compared with it to the bit.
@pytest.mark.parametrize(
    "mode", [pytest.param("store", marks=pytest.mark.slow), *WITHOUT_STORAGE]
)
@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_plain_autograd(case, mode, precision):
    case = CASES[case]
    torch.manual_seed(0)
    chain = make_chain(case.make(), mode=mode).to(precision.weights)
    case.prepare(chain)
    equal_to_plain(chain, precision, case.train, to_the_bit=case.to_the_bit)


@each_format
@pytest.mark.parametrize("precision", [FLOAT64, BF16], ids=str)
@pytest.mark.parametrize("modes", [*itertools.permutations(MODES, 3)])
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
    again = copy.deepcopy(chain)
    again.set_mode("reconstruct")
    assert_same_bits(train_once(chain, precision), train_once(again, precision))
    assert_same_bits(dict(chain.named_buffers()), dict(again.named_buffers()))


@pytest.mark.parametrize("kind", RESIDUALS)
def test_the_inverse_of_a_coupling_gives_its_inputs(kind):
    # In evaluation, where a residual function is one and the same function twice.
    block = chain_of(kind).blocks[0].eval()
    x1, x2 = streams(requires_grad=False)
    r1, r2 = block.inverse(*block(x1, x2))
    assert distance({"1": r1, "2": r2}, {"1": x1, "2": x2}) < EXACT


@each_format
@without_storage
def test_each_residual_function_runs_once_in_each_pass(mode):
    chain = make_chain(couplings(lambda: Counted(conv()), 3), mode=mode)
    step(chain, streams(torch.float32))
    counted = [m for m in chain.modules() if isinstance(m, Counted)]
    assert [f.variables.runs() for f in counted] == [[False, True]] * 6


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
    [
        ("df_bottleneck", FLOAT32),
        pytest.param("torch", FLOAT32, marks=pytest.mark.slow),
        pytest.param("basic", FP16, marks=pytest.mark.slow),
    ],
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
@every_precision
@every_mode
def test_the_callers_tensors_and_gradients_are_left_alone(mode, precision):
    blocks = [*couplings("basic"), *couplings(without_its_input, 1)]
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
    chain, kept = chain_of("basic", mode=mode), []

    def keep(module, *given):
        tensors = [t for x in given for t in (x if isinstance(x, tuple) else (x,))]
        kept.extend((t, t.detach().clone()) for t in tensors)

    for block in chain.blocks:
        for f in (block.f, block.g):
            getattr(f, f"register_{register}")(keep)
    step(chain, streams())
    assert len(kept) >= 12
    assert all(torch.equal(*pair) for pair in kept)


@each_format
@without_storage
def test_a_nested_chain_runs_alike_where_the_first_run_has_no_graph(mode, monkeypatch):
    monkeypatch.setattr(segment, "may_keep", lambda f: False)
    equal_to_plain(make_chain(couplings(nested), mode=mode).double())


@each_format
@pytest.mark.parametrize("changed", ["weight", "mask"])
@without_storage
def test_what_changes_before_the_backward_pass_is_an_error(mode, changed):
    chain, mask = chain_of("basic", mode=mode), MASK.clone()
    loss = loss_of(chain(*streams(), mask))
    with torch.no_grad():
        (mask if changed == "mask" else chain.blocks[0].f.conv1.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Scaled(AdditiveCoupling):
    def forward(self, x1, x2, mask=None):
        return super().forward(2 * x1, x2, mask)


@module_with()
def pair(self, x):
    return x, x


NARROW = nn.Conv2d(CHANNELS, 4, 1)


def of_settings(blocks=None, **settings):
    return lambda: make_chain(basic() if blocks is None else blocks, **settings)


def sharded():
    chain = chain_of("basic")
    chain.blocks[0]._is_fsdp_managed_module = True  # as FSDP marks what it wraps
    assert chain.eval()(*streams())
    chain.train()(*streams())


def with_function(f, mode="reconstruct"):
    make_chain([AdditiveCoupling(f, nn.Identity())], mode=mode)(*streams(torch.float32))


def scripted():
    with_function(torch.jit.script(nn.Sequential(nn.Tanh())))


def within_cached_parametrisations():
    with parametrize.cached():
        with_function(parametrizations.weight_norm(conv()))


def longer():
    chain = chain_of("basic")
    chain.blocks.append(AdditiveCoupling(conv(), conv()))
    chain(*streams())


def with_a_mask_that_needs_a_gradient():
    chain_of("basic")(*streams(), MASK.clone().requires_grad_())


def of_other_shapes():
    x1, x2 = streams()
    chain_of("basic")(x1, x2[..., :5])


def to_half(dtype=torch.bfloat16, device="cpu"):
    x = [t.to(device, dtype) for t in streams()]
    chain = chain_of("basic").to(device, dtype)
    assert chain.eval()(*x)[0].dtype == dtype
    chain.train()(*x)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            of_settings(mode="keep"),
            "'keep'; the modes are 'store', 'selective', 'rec",
        ),
        (of_settings(mode=["store"]), "1 modes were given for 2 blocks"),
        (of_settings(streams="double"), "'double'; the formats are 'exact', 'float'"),
        (of_settings(chunk=0), "chunk is 0; it must be None or at least 1"),
        (of_settings(verify="shout"), "'raise', 'warn', or None"),
        (of_settings(verify_every=0), "verify_every is 0.* at least 1"),
        (of_settings(verify_every=1.5), "verify_every is 1.5"),
        (of_settings([Scaled(conv(), conv())]), "Give AdditiveCoupling"),
        (of_settings([conv()]), "Give AdditiveCoupling"),
        *((partial(with_function, nn.ReLU(True), m), "inplace=False") for m in MODES),
        *((partial(with_function, NARROW, m), "must keep the shape") for m in MODES),
        *((partial(with_function, pair(), m), "into tuple") for m in MODES),
        (scripted, r"torch\.jit\.script"),
        (sharded, "DistributedDataParallel"),
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
    chain = chain_of("dropout")

    def fail(*_):
        if in_backward():
            raise ZeroDivisionError

    handle = chain.blocks[0].f.register_forward_pre_hook(fail)
    parameters = list(chain.parameters())
    with pytest.raises(ZeroDivisionError):
        loss_of(chain(*streams())).backward()
    handle.remove()
    assert all(a is b for a, b in zip(chain.parameters(), parameters, strict=True))
    equal_to_plain(chain)


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
each_convolutional = pytest.mark.parametrize("kind", ["df_bottleneck", "torch"])


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
    """Take steps of accumulated micro-batches; seeds differ by rank."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for i in range(2):
        for last in (False, True)[-micro_batches:]:
            waits = not last and isinstance(module, DistributedDataParallel)
            with module.no_sync() if waits else contextlib.nullcontext():
                for rank in ranks:
                    seed = 100 * i + 10 * last + rank
                    with precision.autocast():
                        outputs = module(*streams(precision.weights, seed=seed))
                        loss = share * loss_of(outputs)
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = module.named_parameters()
    return {n.removeprefix("module."): p.detach().clone() for n, p in parameters}


def train_process(rank, folder, stream_format, static_graph, micro_batches, precision):
    torch.set_num_threads(1)
    FORMAT.set(stream_format)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    options = {"static_graph": static_graph, "gradient_as_bucket_view": True}
    for name, mode in (("mixed", MODES), ("store", "store")):
        chain = chain_of("dropout", len(MODES), mode=mode, dtype=precision.weights)
        module = DistributedDataParallel(chain, **options)
        weights = train(module, [rank], micro_batches, precision)
        torch.save(weights, f"{folder}/{name}{rank}.pt")
    dist.destroy_process_group()


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
    tmp_path, stream_format, static_graph, micro_batches, precision
):
    settings = static_graph, micro_batches, precision
    run_in_processes(train_process, (str(tmp_path), stream_format, *settings), 2)
    plain = Plain(chain_of("dropout", len(MODES), dtype=precision.weights))
    wide = copy.deepcopy(plain)
    expected = train(plain, [0, 1], micro_batches, precision, share=0.5)
    limit = EXACT
    if precision.half:
        in_float32 = train(wide, [0, 1], micro_batches, FLOAT32, share=0.5)
        limit = FLOAT32_ROUNDING + SHARE_OF_HALF * distance(expected, in_float32)
    for rank in (0, 1):
        mixed, stored = (
            torch.load(tmp_path / f"{name}{rank}.pt") for name in ("mixed", "store")
        )
        assert distance(mixed, expected) <= limit
        if stream_format == "exact":
            assert_same_bits(mixed, stored)


# Blocks that compress.

COMPRESSED = ["reconstruct", "compress", "recompute", "compress", "reconstruct"]


def compressing(modes):
    torch.manual_seed(0)
    chain = make_chain(couplings(partial(torch_residual, 4), len(modes)), mode=modes)
    chain.compression = ActivationCompression(
        convolutions=RangeBound(1e-2), normalisations=DeviationBound(1e-2)
    )
    return chain


def compressed_step(chain):
    torch.manual_seed(1)
    inputs = [torch.randn(2, 4, 20, 30).requires_grad_() for _ in range(2)]
    outputs = chain(*inputs)
    sum(y.square().mean() for y in outputs).backward()
    chain.check_streams()
    named = {**dict(chain.named_parameters()), "x.0": inputs[0], "x.1": inputs[1]}
    return outputs, FLOAT32.gradients(named.items())


def test_only_blocks_that_compress_do_and_gradients_handed_down_are_near():
    stored = compressing(["store"] * 6)
    mixed = compressing([*COMPRESSED, "store"])
    expected, exact = compressed_step(stored)
    outputs, grads = compressed_step(mixed)
    assert {name.split(".")[1] for name in mixed.compression.records} == {"1", "3"}
    assert all(map(torch.equal, outputs, expected))
    assert_same_bits(dict(mixed.named_buffers()), dict(stored.named_buffers()))
    changed = {name for name in exact if not torch.equal(grads[name], exact[name])}
    # The error of a batch normalisation's input is handed down to what is before.
    assert {name.removeprefix("blocks.")[0] for name in changed} == {*"0123x"}
    for name, grad in exact.items():
        assert (grads[name] - grad).norm() < 0.1 * grad.norm(), name


def test_what_is_recomputed_around_a_chain_is_not_compressed():
    """The second run is in the backward pass, where it would save nothing."""
    chain = compressing(["compress"] * 5)

    @module_with(chain=lambda: chain)
    def joined(self, x):
        return torch.cat(self.chain(*x.chunk(2, 1)), 1)

    torch.manual_seed(1)
    x, counted = torch.randn(2, 8, 20, 30), Counted(joined())
    Recompute(counted)(x).square().mean().backward()
    grads = {n: p.grad.clone() for n, p in chain.named_parameters()}
    assert not chain.compression.records
    assert counted.variables.runs() == [False, True]
    chain.zero_grad()
    chain.set_mode("store")
    joined()(x).square().mean().backward()
    assert_same_bits(grads, FLOAT32.gradients(chain.named_parameters()))
