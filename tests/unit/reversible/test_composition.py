"""The engine among everything else that a training step may use."""

import contextlib
import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain

from .chains import (
    BF16,
    CHANNELS,
    EXACT,
    FLOAT32,
    FLOAT32_ROUNDING,
    FLOAT64,
    FORMAT,
    FP16,
    RESIDUALS,
    SHARE_OF_HALF,
    Plain,
    as_global,
    chain_of,
    distance,
    each_half,
    equal_to_plain,
    every_precision,
    loss_of,
    make_chain,
    step,
    streams,
    train_once,
)
from .processes import run_in_processes
from .test_chain import MODES

WITHOUT_STORAGE = ["reconstruct", "recompute"]


@every_precision
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_dropout_masks_are_those_of_the_forward_pass(mode, precision):
    equal_to_plain(chain_of("dropout", mode=mode, dtype=precision.weights), precision)


@every_precision
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_the_global_random_state_is_left_as_plain_autograd_leaves_it(mode, precision):
    chain = chain_of("dropout", mode=mode, dtype=precision.weights)
    step(Plain(chain), streams(precision.weights), precision)
    expected = torch.rand(3)
    step(chain, streams(precision.weights), precision)
    assert torch.equal(torch.rand(3), expected)


class Watched(nn.Module):
    """A residual function that notes the dtype its convolution returns."""

    def __init__(self, dtypes):
        super().__init__()
        self.residual = RESIDUALS["basic"](CHANNELS)
        self.variables = as_global(note=dtypes.append)

    def forward(self, x):
        y = self.residual(x)
        self.variables.note((y.dtype, torch.is_autocast_enabled("cpu")))
        return y


@each_half
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_the_second_run_has_the_autocast_of_the_first(mode, precision):
    dtypes = []
    torch.manual_seed(0)
    chain = make_chain([AdditiveCoupling(Watched(dtypes), Watched(dtypes))], mode=mode)
    x = streams(torch.float32)
    step(chain, x, precision)
    assert dtypes == [(precision.half, True)] * 4
    assert x[0].grad.dtype == torch.float32


@each_half
@pytest.mark.parametrize("modes", [["reconstruct", "store"], ["recompute", "store"]])
def test_a_cast_made_without_a_graph_does_not_cut_a_stored_block_off(modes, precision):
    # The two blocks share their parameters; autocast caches casts of weights.
    block = chain_of("basic", 1).float().blocks[0]
    chain = make_chain([block, block], mode=modes)
    equal_to_plain(chain, precision)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_autograd_grad_on_parameters_alone(mode, precision):
    def train(module, precision):
        inputs = streams(precision.weights, requires_grad=False)
        with precision.autocast():
            loss = precision.scaler().scale(loss_of(module(*inputs)))
        names, parameters = zip(*module.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, parameters)
        assert all(p.grad is None for p in parameters)
        return dict(zip(names, grads, strict=True))

    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    equal_to_plain(chain, precision, train)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_needs_no_gradient_does_not_stop_the_training(mode, precision):
    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    inputs = partial(streams, requires_grad=False)
    equal_to_plain(chain, precision, partial(train_once, inputs=inputs))


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_only_one_stream_needs_a_gradient(mode, precision):
    def inputs(dtype):
        x1, x2 = streams(dtype)
        return [x1.detach(), x2]

    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    chain.requires_grad_(False)
    equal_to_plain(chain, precision, partial(train_once, inputs=inputs))


@every_precision
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_hooks_of_parameters_fire_once_and_may_change_the_gradient(mode, precision):
    def train(module, precision):
        calls = []
        for p in module.parameters():
            p.register_hook(lambda g: (calls.append(1), 2 * g)[1])
        grads = train_once(module, precision)
        assert len(calls) == len(list(module.parameters()))
        return grads

    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    equal_to_plain(chain, precision, train)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_gradients_accumulate_over_steps(mode, precision):
    def train(module, precision):
        scaler = precision.scaler()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for seed in (1, 2):
            with precision.autocast():
                loss = loss_of(module(*streams(precision.weights, seed=seed)))
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        return {n: p.grad for n, p in module.named_parameters()}

    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    equal_to_plain(chain, precision, train)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_a_kept_graph_gives_the_same_gradients_again(mode, precision):
    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    with precision.autocast():
        loss = loss_of(chain(*streams(precision.weights)))
    parameters = list(chain.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters, retain_graph=True)
    third = torch.autograd.grad(loss, parameters)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, parameters)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_get_no_gradient(mode, precision):
    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    for name, p in chain.named_parameters():
        p.requires_grad_("conv1" not in name)
    grads = equal_to_plain(chain, precision)
    assert grads["blocks.0.f.conv1.weight"] is None


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_shared_parameters_get_the_sum_of_their_gradients(mode, precision):
    torch.manual_seed(0)
    f, g = (RESIDUALS["basic"](CHANNELS) for _ in range(2))
    f.conv2.weight = f.conv1.weight  # shared within a function
    block = AdditiveCoupling(f, g)
    chain = make_chain([block, AdditiveCoupling(g, f), block], mode=mode)
    # Gradients of a weight are added up function by function, which plain autograd
    # does not do: what is below float32's rounding may differ.
    equal_to_plain(chain.to(precision.weights), precision, to_the_bit=False)


class Holding(nn.Module):
    """Has a layer that it uses only if asked to."""

    def __init__(self, layer, uses):
        super().__init__()
        self.layer, self.uses = layer, uses

    def forward(self, x):
        return self.layer(x) if self.uses else x.sin()


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_a_later_function_leaves_unused_keeps_its_gradient(
    mode, precision
):
    torch.manual_seed(0)
    layer = RESIDUALS["basic"](CHANNELS)
    blocks = [
        AdditiveCoupling(Holding(layer, False), Holding(layer, True)) for _ in range(2)
    ]
    equal_to_plain(make_chain(blocks, mode=mode).to(precision.weights), precision)


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_no_function_uses_gets_no_gradient(mode):
    halves = (Holding(RESIDUALS["basic"](CHANNELS), False) for _ in range(2))
    chain = make_chain([AdditiveCoupling(*halves)], mode=mode).double()
    loss_of(chain(*streams())).backward()
    assert all(p.grad is None for p in chain.parameters())


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_weight_norm_works(mode, precision):
    def make():
        conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        return nn.utils.parametrizations.weight_norm(conv)

    torch.manual_seed(0)
    blocks = (AdditiveCoupling(make(), make()) for _ in range(2))
    equal_to_plain(make_chain(blocks, mode=mode).to(precision.weights), precision)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_channels_last_is_kept(mode, precision):
    def inputs(dtype):
        layout = torch.channels_last
        return [
            t.detach().to(memory_format=layout).requires_grad_() for t in streams(dtype)
        ]

    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    chain = chain.to(memory_format=torch.channels_last)
    y = chain(*inputs(precision.weights))
    assert y[0].is_contiguous(memory_format=torch.channels_last)
    equal_to_plain(chain, precision, partial(train_once, inputs=inputs))


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_and_no_grad_are_plain_torch_to_the_bit(mode, precision):
    chain = chain_of("basic", mode=mode, dtype=torch.float32)
    x = streams(torch.float32)
    plain = Plain(chain)
    with precision.autocast():
        with torch.no_grad():
            in_training = chain(*x), plain(*x)
        in_evaluation = chain.eval()(*x), plain.eval()(*x)
    for found, expected in (in_training, in_evaluation):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_with_gradients_equals_plain_autograd(mode, precision):
    chain = chain_of("basic", mode=mode, dtype=precision.weights).eval()
    equal_to_plain(chain, precision, to_the_bit=True)


@every_precision
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_train_alike(clone, precision):
    chain = chain_of("basic", mode=["reconstruct", "store", "recompute"])
    chain = chain.to(precision.weights)
    # A step leaves nothing that cannot be copied.
    step(chain, streams(precision.weights), precision)
    chain.zero_grad()
    twin = clone(chain)
    assert twin.modes == chain.modes
    _, grads, _ = step(twin, streams(precision.weights), precision)
    _, expected, _ = step(chain, streams(precision.weights), precision)
    assert distance(grads, expected) == 0


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_saved_tensor_hooks_around_the_chain(mode, precision):
    packed = []

    def pack(x):
        packed.append(x)
        return x.clone()

    def train(module, precision):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return train_once(module, precision)

    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    equal_to_plain(chain, precision, train)
    assert packed


@every_precision
def test_anomaly_mode_works(precision):
    chain = chain_of("basic", dtype=precision.weights)
    with torch.autograd.set_detect_anomaly(True):
        equal_to_plain(chain, precision)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_the_callers_tensors_are_left_alone(mode, precision):
    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    x = streams(precision.weights)
    before = [t.detach().clone() for t in x]
    with precision.autocast():
        y = chain(*x)
    kept = [t.detach().clone() for t in y]
    loss_of(y).backward()
    for tensors, copies in ((x, before), (y, kept)):
        for a, b in zip(tensors, copies, strict=True):
            assert torch.equal(a, b)
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()


class Bias(nn.Module):
    """A residual function that does not look at its input."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.bias.expand_as(x)


@every_precision
@pytest.mark.parametrize("last", ["basic", "bias"])
@pytest.mark.parametrize("mode", MODES)
def test_the_callers_gradients_are_left_alone(mode, last, precision):
    blocks = list(chain_of("basic").blocks)
    if last == "bias":
        blocks.append(AdditiveCoupling(Bias(), Bias()))
    chain = make_chain(blocks, mode=mode).to(precision.weights)
    with precision.autocast():
        outputs = chain(*streams(precision.weights))
    given = [torch.randn_like(y) for y in outputs]
    before = [g.clone() for g in given]
    torch.autograd.backward(outputs, given)
    for a, b in zip(given, before, strict=True):
        assert torch.equal(a, b)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_writing_into_the_outputs_does_not_harm_the_gradients(mode, precision):
    def train(module, precision):
        with precision.autocast():
            y1, y2 = module(*streams(precision.weights))
            in_place = isinstance(module, ReversibleChain)
            y1, y2 = (y1.mul_(2), y2.mul_(3)) if in_place else (y1 * 2, y2 * 3)
            loss = loss_of((y1, y2))
        precision.scaler().scale(loss).backward()
        return {n: p.grad for n, p in module.named_parameters()}

    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    equal_to_plain(chain, precision, train)


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_parameters_changed_before_the_backward_pass_are_an_error(mode):
    chain = chain_of("basic", mode=mode)
    loss = loss_of(chain(*streams()))
    with torch.no_grad():
        chain.blocks[0].f.conv1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_differentiating_twice_says_what_to_do():
    loss = loss_of(chain_of("basic")(*streams()))
    with pytest.raises(RuntimeError, match="mode='store'"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_chains_with_a_graph_can_be_differentiated_twice(mode):
    chain = chain_of("basic", mode=mode)
    twice = []
    for module in (chain, Plain(chain)):
        x = streams()
        grads = torch.autograd.grad(loss_of(module(*x)), x, create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        twice.append({n: p.grad for n, p in module.named_parameters()})
    assert distance(*twice) < EXACT


def test_sharded_parameters_are_refused():
    chain = chain_of("basic")
    chain.blocks[0]._is_fsdp_managed_module = True  # as FSDP marks what it wraps
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        chain(*streams())
    assert chain.eval()(*streams())


def train(module, ranks, micro_batches, precision, share=1.0):
    """Steps of accumulated micro-batches; seeds tell the ranks apart.

    In fp16 the loss of rank 1 overflows in the first step, which all have to skip.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = precision.scaler()
    for i in range(3 if precision.scale else 2):
        for last in (False, True)[-micro_batches:]:
            for rank in ranks:
                inputs = streams(precision.weights, seed=100 * i + 10 * last + rank)
                waits = not last and isinstance(module, DistributedDataParallel)
                with module.no_sync() if waits else contextlib.nullcontext():
                    with precision.autocast():
                        loss = share * loss_of(module(*inputs))
                    overflows = precision.scale and (i, rank) == (0, 1)
                    scaler.scale(1e30 * loss if overflows else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (precision.scale / 2 if precision.scale else 1)
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def train_process(rank, folder, modes, static_graph, micro_batches, precision, format):
    torch.set_num_threads(1)
    FORMAT.set(format)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    chain = chain_of("dropout", mode=modes, dtype=precision.weights)
    model = DistributedDataParallel(
        chain, static_graph=static_graph, gradient_as_bucket_view=True
    )
    train(model, [rank], micro_batches, precision)
    torch.save(dict(chain.named_parameters()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("static_graph", "micro_batches", "precision"),
    [
        # torch's reducer itself fails where a static graph meets no_sync.
        (False, 2, FLOAT64),
        pytest.param(True, 1, FLOAT64, marks=pytest.mark.slow),
        pytest.param(False, 2, BF16, marks=pytest.mark.slow),
        pytest.param(False, 2, FP16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ddp_averages_the_gradients_of_processes(
    tmp_path, static_graph, micro_batches, precision
):
    settings = (static_graph, micro_batches, precision, FORMAT.get())
    found = train_in_processes(
        tmp_path / "mixed", ["reconstruct", "recompute", "store"], *settings
    )
    chain = chain_of("dropout", dtype=precision.weights)
    expected = train(Plain(chain), [0, 1], micro_batches, precision, share=0.5)
    limit = EXACT
    if precision.half:
        wide = train(Plain(chain), [0, 1], micro_batches, FLOAT32, share=0.5)
        limit = FLOAT32_ROUNDING + SHARE_OF_HALF * distance(expected, wide)
    assert all(distance(weights, expected) <= limit for weights in found)
    if FORMAT.get() == "exact":
        stored = train_in_processes(tmp_path / "stored", "store", *settings)
        for weights, others in zip(found, stored, strict=True):
            assert all(torch.equal(weights[name], others[name]) for name in others)


def train_in_processes(folder, modes, *settings):
    """The weights that each of two processes ends with."""
    folder.mkdir()
    run_in_processes(train_process, (str(folder), modes, *settings), 2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def sync_chain(mode):
    torch.manual_seed(0)
    return make_chain(
        (
            AdditiveCoupling(
                RESIDUALS["basic"](CHANNELS, sync=True),
                RESIDUALS["basic"](CHANNELS, sync=True),
            )
            for _ in range(3)
        ),
        mode=mode,
    ).double()


def sync_process(rank, folder, format):
    torch.set_num_threads(1)
    FORMAT.set(format)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    chain = sync_chain(["reconstruct", "recompute", "store"])
    share = slice(rank, rank + 1)
    inputs = [x.detach()[share].requires_grad_() for x in streams(batch=2)]
    y1, y2 = chain(*inputs)
    (y1.sin() + y2.square()).sum().backward()
    for p in chain.parameters():
        dist.all_reduce(p.grad)
    grads = {n: p.grad for n, p in chain.named_parameters()}
    torch.save((grads, dict(chain.named_buffers())), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_shared_statistics_work_in_every_mode(tmp_path):
    run_in_processes(sync_process, (str(tmp_path), FORMAT.get()), 2)
    whole = Plain(sync_chain("store"))
    y1, y2 = whole(*streams(batch=2))
    (y1.sin() + y2.square()).sum().backward()
    expected = {n: p.grad for n, p in whole.named_parameters()}
    for rank in (0, 1):
        grads, buffers = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert distance(grads, expected) < EXACT
        assert distance(buffers, dict(whole.named_buffers())) < EXACT
