"""The engine among everything else that a training step may use."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from speechbrain_rev.reversible import AdditiveCoupling, Recompute, ReversibleChain

from .chains import (
    CHANNELS,
    RESIDUALS,
    Plain,
    chain_of,
    distance,
    loss_of,
    step,
    streams,
)
from .test_chain import EXACT, MODES

WITHOUT_STORAGE = ["reconstruct", "recompute"]


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_dropout_masks_are_those_of_the_forward_pass(mode):
    chain = chain_of("dropout", mode=mode)
    _, grads, _ = step(chain, streams())
    _, expected, _ = step(Plain(chain), streams())
    assert distance(grads, expected) < EXACT


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_the_global_random_state_is_left_as_plain_autograd_leaves_it(mode):
    chain = chain_of("dropout", mode=mode)
    step(Plain(chain), streams())
    expected = torch.rand(3)
    step(chain, streams())
    assert torch.equal(torch.rand(3), expected)


class Watched(nn.Module):
    """A residual function that notes the dtype its convolution returns."""

    def __init__(self, dtypes):
        super().__init__()
        self.residual = RESIDUALS["basic"](CHANNELS)
        self.dtypes = dtypes

    def forward(self, x):
        y = self.residual(x)
        self.dtypes.append((y.dtype, torch.is_autocast_enabled("cpu")))
        return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_the_second_run_has_the_autocast_of_the_first(mode, dtype):
    dtypes = []
    torch.manual_seed(0)
    chain = ReversibleChain(
        [AdditiveCoupling(Watched(dtypes), Watched(dtypes))], mode=mode
    )
    x = streams(torch.float32)
    with torch.autocast("cpu", dtype):
        loss = loss_of(chain(*x))
    loss.backward()  # outside autocast, as SpeechBrain does
    assert dtypes == [(dtype, True)] * 4
    assert x[0].grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_half_precision_gradients_stay_close_to_stored_ones(mode, dtype):
    grads = {}
    for m in ("store", mode):
        chain = chain_of("basic", 4, mode=m, dtype=torch.float32)
        x = streams(torch.float32)
        with torch.autocast("cpu", dtype):
            loss = loss_of(chain(*x))
        loss.backward()
        grads[m] = {n: p.grad for n, p in chain.named_parameters()}
    # Recomputation repeats the arithmetic; reconstruction rounds streams in float32.
    assert distance(grads[mode], grads["store"]) <= (0.02 if "str" in mode else 0)


def test_a_cast_made_without_a_graph_does_not_cut_a_stored_block_off():
    # The two blocks share their parameters; autocast caches casts of weights.
    block = chain_of("basic", 1).float().blocks[0]
    chain = ReversibleChain([block, block], mode=["reconstruct", "store"])
    plain = Plain(chain)
    results = []
    for module in (chain, plain):
        x = streams(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(module(*x))
        loss.backward()
        results.append({n: p.grad for n, p in module.named_parameters()})
    assert distance(*results) < 0.05


def test_autograd_grad_on_parameters_alone():
    chain = chain_of("basic")
    plain = Plain(chain)
    found, expected = (
        torch.autograd.grad(loss_of(m(*streams(requires_grad=False))), m.parameters())
        for m in (chain, plain)
    )
    assert distance(dict(enumerate(found)), dict(enumerate(expected))) < EXACT


@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_needs_no_gradient_does_not_stop_the_training(mode):
    chain = chain_of("basic", mode=mode)
    _, grads, _ = step(chain, streams(requires_grad=False))
    _, expected, _ = step(Plain(chain), streams(requires_grad=False))
    assert distance(grads, expected) < EXACT


@pytest.mark.parametrize("mode", MODES)
def test_only_one_stream_needs_a_gradient(mode):
    chain = chain_of("basic", mode=mode).requires_grad_(False)
    x1, x2 = streams()
    _, grads, _ = step(chain, [x1.detach(), x2])
    _, expected, _ = step(Plain(chain), [x1.detach(), x2.detach().requires_grad_()])
    assert distance(grads, expected) < EXACT


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_hooks_of_parameters_fire_once_and_may_change_the_gradient(mode):
    chain = chain_of("basic", mode=mode)
    plain = Plain(chain)
    calls = []
    for module in (chain, plain):
        for p in module.parameters():
            p.register_hook(lambda g: (calls.append(1), 2 * g)[1])
    _, grads, _ = step(chain, streams())
    assert len(calls) == len(list(chain.parameters()))
    _, expected, _ = step(plain, streams())
    assert distance(grads, expected) < EXACT


@pytest.mark.parametrize("mode", MODES)
def test_gradients_accumulate_over_steps(mode):
    chain = chain_of("basic", mode=mode)
    plain = Plain(chain)
    for module in (chain, plain):
        for seed in (1, 2):
            loss_of(module(*streams(seed=seed))).backward()
    found, expected = (
        {n: p.grad for n, p in m.named_parameters()} for m in (chain, plain)
    )
    assert distance(found, expected) < EXACT


@pytest.mark.parametrize("mode", MODES)
def test_a_kept_graph_gives_the_same_gradients_again(mode):
    chain = chain_of("basic", mode=mode)
    loss = loss_of(chain(*streams()))
    parameters = list(chain.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters, retain_graph=True)
    third = torch.autograd.grad(loss, parameters)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, parameters)


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_grad_scaler_finds_the_same_gradients_and_skips_an_overflow(mode):
    chain = chain_of("basic", mode=mode, dtype=torch.float32)
    _, expected, _ = step(copy.deepcopy(chain), streams(torch.float32))
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(chain(*streams(torch.float32)))).backward()
    scaler.unscale_(optimizer)
    grads = {n: p.grad for n, p in chain.named_parameters()}
    # A scale that is a power of two changes no bit, but for streams reconstructed.
    expected = {n: g for n, g in expected.items() if n in grads}
    assert distance(grads, expected) < 1e-6
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in chain.parameters()]
    scaler.scale(loss_of(chain(*streams(torch.float32))) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    for p, b in zip(chain.parameters(), before, strict=True):
        assert torch.equal(p, b)
    assert scaler.get_scale() < 1024.0


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_get_no_gradient(mode):
    chain = chain_of("basic", mode=mode)
    for name, p in chain.named_parameters():
        p.requires_grad_("conv1" not in name)
    _, grads, _ = step(chain, streams())
    _, expected, _ = step(Plain(chain), streams())
    assert distance(grads, expected) < EXACT
    assert grads["blocks.0.f.conv1.weight"] is None


@pytest.mark.parametrize("mode", MODES)
def test_shared_parameters_get_the_sum_of_their_gradients(mode):
    torch.manual_seed(0)
    f, g = (RESIDUALS["basic"](CHANNELS).double() for _ in range(2))
    f.conv2.weight = f.conv1.weight  # shared within a function
    block = AdditiveCoupling(f, g)
    chain = ReversibleChain([block, AdditiveCoupling(g, f), block], mode=mode)
    _, grads, _ = step(chain, streams())
    _, expected, _ = step(Plain(chain), streams())
    assert distance(grads, expected) < EXACT


class Holding(nn.Module):
    """Has a layer that it uses only if asked to."""

    def __init__(self, layer, uses):
        super().__init__()
        self.layer, self.uses = layer, uses

    def forward(self, x):
        return self.layer(x) if self.uses else x.sin()


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_a_later_function_leaves_unused_keeps_its_gradient(mode):
    torch.manual_seed(0)
    layer = RESIDUALS["basic"](CHANNELS).double()
    blocks = [
        AdditiveCoupling(Holding(layer, False), Holding(layer, True)) for _ in range(2)
    ]
    chain = ReversibleChain(blocks, mode=mode)
    _, grads, _ = step(chain, streams())
    _, expected, _ = step(Plain(chain), streams())
    assert distance(grads, expected) < EXACT


@pytest.mark.parametrize("mode", MODES)
def test_weight_norm_works(mode):
    def make():
        conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        return nn.utils.parametrizations.weight_norm(conv)

    torch.manual_seed(0)
    chain = ReversibleChain(
        (AdditiveCoupling(make(), make()) for _ in range(2)), mode=mode
    ).double()
    _, grads, _ = step(chain, streams())
    _, expected, _ = step(Plain(chain), streams())
    assert distance(grads, expected) < EXACT


@pytest.mark.parametrize("mode", MODES)
def test_channels_last_is_kept(mode):
    chain = chain_of("basic", mode=mode).to(memory_format=torch.channels_last)
    x = [
        t.detach().to(memory_format=torch.channels_last).requires_grad_()
        for t in streams()
    ]
    y, grads, _ = step(chain, x)
    assert y[0].is_contiguous(memory_format=torch.channels_last)
    _, expected, _ = step(Plain(chain), streams())
    assert distance(grads, expected) < EXACT


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_and_no_grad_are_plain_torch_to_the_bit(mode):
    chain = chain_of("basic", mode=mode, dtype=torch.float32)
    x = streams(torch.float32)
    plain = Plain(chain)
    with torch.no_grad():
        in_training = chain(*x), plain(*x)
    in_evaluation = chain.eval()(*x), plain.eval()(*x)
    for found, expected in (in_training, in_evaluation):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_with_gradients_equals_plain_autograd(mode):
    chain = chain_of("basic", mode=mode).eval()
    _, grads, _ = step(chain, streams())
    _, expected, _ = step(Plain(chain), streams())
    assert distance(grads, expected) == 0


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_train_alike(clone):
    chain = chain_of("basic", mode=["reconstruct", "store", "recompute"])
    step(chain, streams())  # a step leaves nothing that cannot be copied
    chain.zero_grad()
    twin = clone(chain)
    assert twin.modes == chain.modes
    _, grads, _ = step(twin, streams())
    _, expected, _ = step(chain, streams())
    assert distance(grads, expected) == 0


@pytest.mark.parametrize("mode", MODES)
def test_saved_tensor_hooks_around_the_chain(mode):
    packed = []

    def pack(x):
        packed.append(x)
        return x.clone()

    chain = chain_of("basic", mode=mode)
    plain = Plain(chain)
    torch.manual_seed(2)
    x = streams()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss_of(chain(*x)).backward()
    found = {n: p.grad for n, p in chain.named_parameters()}
    _, expected, _ = step(plain, streams())
    assert packed
    assert distance(found, {n: expected[n] for n in found}) < EXACT


def test_anomaly_mode_works():
    chain = chain_of("basic")
    with torch.autograd.set_detect_anomaly(True):
        _, grads, _ = step(chain, streams())
    _, expected, _ = step(Plain(chain), streams())
    assert distance(grads, expected) < EXACT


@pytest.mark.parametrize("mode", MODES)
def test_the_callers_tensors_are_left_alone(mode):
    chain = chain_of("basic", mode=mode)
    x = streams()
    before = [t.detach().clone() for t in x]
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
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return self.bias.expand_as(x)


@pytest.mark.parametrize("last", ["basic", "bias"])
@pytest.mark.parametrize("mode", MODES)
def test_the_callers_gradients_are_left_alone(mode, last):
    blocks = list(chain_of("basic").blocks)
    if last == "bias":
        blocks.append(AdditiveCoupling(Bias(), Bias()))
    chain = ReversibleChain(blocks, mode=mode)
    outputs = chain(*streams())
    given = [torch.randn_like(y) for y in outputs]
    before = [g.clone() for g in given]
    torch.autograd.backward(outputs, given)
    for a, b in zip(given, before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_writing_into_the_outputs_does_not_harm_the_gradients(mode):
    chain = chain_of("basic", mode=mode)
    plain = Plain(chain)
    results = []
    for module in (chain, plain):
        x = streams()
        y1, y2 = module(*x)
        y1, y2 = (y1.mul_(2), y2.mul_(3)) if module is chain else (y1 * 2, y2 * 3)
        loss_of((y1, y2)).backward()
        results.append({n: p.grad for n, p in module.named_parameters()})
    assert distance(*results) < EXACT


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_parameters_changed_before_the_backward_pass_are_an_error(mode):
    chain = chain_of("basic", mode=mode)
    loss = loss_of(chain(*streams()))
    with torch.no_grad():
        chain.blocks[0].f.conv1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("module", ["chain", "recompute"])
def test_differentiating_twice_says_what_to_do(module):
    if module == "chain":
        loss = loss_of(chain_of("basic")(*streams()))
    else:
        loss = Recompute(RESIDUALS["basic"](CHANNELS).double())(streams()[0]).sum()
    with pytest.raises(RuntimeError, match="mode='store'"):
        loss.backward(create_graph=True)


def test_stored_chains_can_be_differentiated_twice():
    torch.manual_seed(0)
    chain = chain_of("basic", 1, mode="store")
    x = streams(batch=1, time=3)

    def function(x1, x2):
        return chain(x1[..., :2, :], x2[..., :2, :])[1].square().sum()

    assert torch.autograd.gradgradcheck(function, x, atol=1e-4, nondet_tol=1e-9)


def test_sharded_parameters_are_refused():
    chain = chain_of("basic")
    chain.blocks[0]._is_fsdp_managed_module = True  # as FSDP marks what it wraps
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        chain(*streams())
    assert chain.eval()(*streams())


def train(module, ranks, micro_batches, share=1.0):
    """Two steps of accumulated micro-batches; seeds tell the ranks apart."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for i in range(2):
        for last in (False, True)[-micro_batches:]:
            for rank in ranks:
                inputs = streams(seed=100 * i + 10 * last + rank)
                waits = not last and isinstance(module, DistributedDataParallel)
                with module.no_sync() if waits else contextlib.nullcontext():
                    (share * loss_of(module(*inputs))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def train_process(rank, folder, static_graph, micro_batches):
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    chain = chain_of("dropout", mode=["reconstruct", "recompute", "store"])
    model = DistributedDataParallel(
        chain, static_graph=static_graph, gradient_as_bucket_view=True
    )
    train(model, [rank], micro_batches)
    torch.save(dict(chain.named_parameters()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("static_graph", "micro_batches"),
    # torch's reducer itself fails where a static graph meets no_sync.
    [(False, 2), (True, 1)],
)
def test_ddp_averages_the_gradients_of_processes(tmp_path, static_graph, micro_batches):
    mp.spawn(train_process, (str(tmp_path), static_graph, micro_batches), nprocs=2)
    expected = train(Plain(chain_of("dropout")), [0, 1], micro_batches, share=0.5)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert distance(found, expected) < EXACT


def sync_chain(mode):
    torch.manual_seed(0)
    return ReversibleChain(
        (
            AdditiveCoupling(
                RESIDUALS["basic"](CHANNELS, sync=True),
                RESIDUALS["basic"](CHANNELS, sync=True),
            )
            for _ in range(3)
        ),
        mode=mode,
    ).double()


def sync_process(rank, folder):
    torch.set_num_threads(1)
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
    mp.spawn(sync_process, (str(tmp_path),), nprocs=2)
    whole = Plain(sync_chain("store"))
    y1, y2 = whole(*streams(batch=2))
    (y1.sin() + y2.square()).sum().backward()
    expected = {n: p.grad for n, p in whole.named_parameters()}
    for rank in (0, 1):
        grads, buffers = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert distance(grads, expected) < EXACT
        assert distance(buffers, dict(whole.named_buffers())) < EXACT
