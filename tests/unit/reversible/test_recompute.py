"""Recomputed modules: what is not a matter of layers, which test_generated.py goes over."""

import copy
import gc
import random
import types
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from speechbrain_rev.lobes.blocks import BasicResidual
from speechbrain_rev.modes import Mode
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import AdditiveCoupling, Recompute
from speechbrain_rev.reversible.comparison import RecomputeWarning, fingerprint
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.recompute import recompute
from speechbrain_rev.reversible.wrapping import (
    give_mode,
    recompute_blocks,
    store_blocks,
)

from .chains import (
    MODES,
    WITHOUT_STORAGE,
    Counted,
    assert_same_bits,
    chain_of,
    in_backward,
    loss_of,
    make_chain,
    module_with,
    streams,
)
from .processes import run_in_processes

SIZE = 6


def linear():
    return nn.Linear(SIZE, SIZE)


def batch_norm():
    return nn.BatchNorm1d(SIZE)


def inputs():
    return torch.linspace(-1, 1, 2 * SIZE).view(2, SIZE).requires_grad_()


def same_as_plain(plain, step):
    """Assert that a step has the same bits where a module is recomputed."""
    torch.manual_seed(0)
    again, grads = copy.deepcopy(plain), []
    for module, run in ((plain, plain), (again, Recompute(again).train())):
        x = inputs()
        step(module, run, x)
        grads.append({"x": x.grad} | {n: p.grad for n, p in module.named_parameters()})
    assert_same_bits(*grads)


@module_with(linear=linear)
def sharing(self, a, b, first, second, weight=None):
    """See which arguments are one object, and write to one that is a list."""
    first.append(1)
    own = weight is self.linear.weight
    return self.linear(a * (2 if a is b else 3)) * len(second) * (2 if own else 1)


@pytest.mark.parametrize("same", [True, False])
def test_arguments_that_are_one_object_stay_one_and_are_written_to_once(same):
    def step(module, run, x):
        steps, weight = [], module.linear.weight if same else None
        second = steps if same else [1]
        run(x, x if same else x.clone(), steps, second, weight=weight).sum().backward()
        assert steps == [1]

    same_as_plain(sharing(), step)


@module_with(value=lambda: nn.Parameter(torch.tensor(3.0)))
def constant(self, factor):
    return (self.value * factor,)


def test_inputs_need_not_be_tensors():
    module = constant()
    Recompute(module)(2.0)[0].backward()
    assert module.value.grad == 2.0


def test_a_module_that_is_exchanged_after_the_forward_pass_changes_nothing():
    def step(module, run, x):
        loss = run(x).square().sum()
        module[2].weight = nn.Parameter(torch.zeros(SIZE, SIZE))
        module[1].register_forward_hook(lambda m, i, o: 2 * o)
        loss.backward()
        assert module[2].weight.grad is None

    same_as_plain(nn.Sequential(linear(), nn.Tanh(), linear()), step)


@pytest.mark.parametrize("mode", [*MODES, "alone"])
def test_weights_that_are_handed_in_for_a_call_are_those_of_both_runs(mode, recwarn):
    torch.manual_seed(0)
    plain = nn.Sequential(linear(), nn.Tanh())
    if mode == "alone":
        modules, given = [Recompute(plain).train(), Recompute(plain).eval()], [inputs()]
    else:
        coupling = AdditiveCoupling(plain, copy.deepcopy(plain))
        modules = [
            make_chain([copy.deepcopy(coupling)], mode=m) for m in (mode, "store")
        ]
        given = [inputs(), inputs()]
    grads = []
    for module in modules:
        weights = {
            n: (p.detach() * 1.5).requires_grad_() for n, p in module.named_parameters()
        }
        y = functional_call(module, weights, tuple(given))
        y = torch.add(*y) if isinstance(y, tuple) else y
        grads.append(torch.autograd.grad(y.square().sum(), [*weights.values()]))
    assert all(map(torch.equal, *grads))
    assert not recwarn


def doing(forward):
    """A recomputed module that calls a function."""
    module = nn.Identity()
    module.forward = forward
    return Recompute(module).train()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: (x.exp(),) * (1 + in_backward()), "2 tensors returned for 1"),
        (lambda x: (x.exp(),) * (2 - in_backward()), "1 tensors returned for 2"),
        (lambda x: [x.exp().exp() if in_backward() else x.exp()], "computed something"),
        (lambda x: [x.exp() if in_backward() else x.exp().exp()], "computed something"),
        (lambda x: [x.exp()[: 1 + in_backward()].exp()], "computed something else"),
        # As in plain torch.
        (lambda x: [x.exp().add_(1)], "modified by an inplace operation"),
    ],
)
def test_a_second_run_that_differs_is_an_error(forward, message):
    loss = doing(forward)(torch.ones(2, requires_grad=True))[0].sum()
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


def test_what_an_object_holds_may_not_be_changed_before_the_backward_pass():
    given = types.SimpleNamespace(x=torch.ones(3, 4))
    loss = doing(lambda given: (given.x.requires_grad_() * 2).exp())(given).sum()
    with torch.no_grad():
        given.x.zero_()
    with pytest.raises(RuntimeError, match="computed something else"):
        loss.backward()


def frozen():
    return linear().requires_grad_(False)


@module_with(linear=linear, slow=frozen)
def averaging(self, x):
    with torch.no_grad():
        self.slow.weight.lerp_(self.linear.weight, 0.1)
    return self.linear(x) * self.slow(x)


@module_with(slow=frozen)
def rebinding(self, x):
    self.slow.weight.data = 0.5 * self.slow.weight.data
    return x * self.slow(x)


@module_with(linear=linear)
def growing(self, x):
    if not hasattr(self, "late"):
        self.late = linear()
    return self.late(self.linear(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (averaging, r"wrote into its parameter slow\.weight in its forward pass"),
        (rebinding, r"wrote into its parameter slow\.weight in its forward pass"),
        (growing, "use it once in evaluation"),
        (lambda: nn.LazyLinear(3), "Use it once in evaluation before it trains"),
        (lambda: nn.ReLU(inplace=True), r"ReLU wrote .* recompute_blocks"),
    ],
)
def test_what_cannot_run_twice_says_what_to_do(make, message):
    module = Recompute(make()).train()
    with pytest.raises(RuntimeError, match=message):
        module(inputs().sin()).sum().backward()


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_a_weight_of_a_chain_changed_through_data_is_noticed(mode):
    chain = chain_of("basic", 2, mode=mode).float()
    loss = loss_of(chain(*streams(torch.float32)))
    chain.blocks[0].f.conv1.weight.data.mul_(1.5)
    recomputes = mode == "recompute"
    says = (
        r"saves for its gradient, .*other values" if recomputes else "between forward"
    )
    with pytest.raises(RuntimeError, match=says):
        loss.backward()


GENERATOR = torch.Generator()


class Noisy(nn.Module):
    """What it does depends on a generator that is a global variable."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(SIZE, SIZE), way

    def forward(self, x):
        return self.way(self.linear(x), torch.rand(2, SIZE, generator=GENERATOR))


#: What goes wrong where the second run draws other numbers.
WRONG = {
    "factor": lambda y, noise: y.tanh() * noise,
    # Outputs are equal, gradients are not.
    "detached": lambda y, noise: torch.where(noise > 0.5, y, y.detach()),
    # Sums are equal.
    "rolled": lambda y, noise: y.roll(int(10 * noise[0, 0]), 1).exp(),
}


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("way", WRONG)
@pytest.mark.parametrize("verify", ["first", "raise", "warn", None])
def test_other_values_for_the_gradient_are_reported_in_the_first_step(
    way, verify, joins
):
    network = nn.Sequential(linear(), Noisy(WRONG[way]), linear())
    recompute_blocks(network, "0", "1", verify=verify)
    if joins:
        give_mode(network, Mode.JOIN, "1", verify=verify)
    GENERATOR.manual_seed(0)
    loss = network(inputs()).square().sum()
    message = r"1 \(Noisy\) computed something else .* saves for its gradient, .* other values"
    if verify in ("first", "raise"):
        with pytest.raises(RuntimeError, match=message):
            loss.backward()
    elif verify == "warn":
        with pytest.warns(RecomputeWarning, match=message):
            loss.backward()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss.backward()


def differ_in_one(rank, folder):
    store = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2
    )
    way = WRONG["factor"] if rank else lambda y, noise: y + noise
    network = DistributedDataParallel(Recompute(Noisy(way)))
    network(inputs()).square().sum().backward()


def test_of_several_processes_the_one_that_differs_raises(tmp_path):
    with pytest.raises(
        ProcessRaisedException, match=r"(?s)Process 1.*computed something"
    ):
        run_in_processes(differ_in_one, (str(tmp_path),), 2)


def test_a_sum_with_other_noise_has_the_right_gradient_and_is_no_difference():
    grads = {}
    for way in Recompute, nn.Sequential:
        torch.manual_seed(0)
        block = way(Noisy(lambda y, noise: y.tanh() + noise)).train()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            block(inputs()).sum().backward()
        grads[way] = [p.grad for p in block.parameters()]
    for ours, plain in zip(*grads.values(), strict=True):
        assert torch.equal(ours, plain)


def test_later_differences_are_compared_every_so_often_and_warned_of():
    block = Noisy(lambda y, noise: y * noise if noisy else y * 2)
    block = Recompute(block, verify_every=3).train()
    for call, noisy in enumerate([False, True, True, True]):  # noqa: B007
        loss = block(inputs()).sum()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss.backward()
        assert bool(caught) == (call == 3)


@module_with(linear=linear)
def at_times_noisy(self, x, is_noisy):
    noise = torch.rand(2, SIZE, generator=GENERATOR)
    return (self.linear(x) * (noise if is_noisy else 2)).tanh()


@pytest.mark.parametrize("noisy", [0, 1])
@pytest.mark.parametrize("together", [True, False])
def test_all_calls_before_a_backward_pass_has_ended_are_of_the_first_step(
    noisy, together
):
    block = Recompute(at_times_noisy()).train()
    losses = [block(inputs(), call == noisy).sum() for call in range(2)]
    if not together:
        losses[1 - noisy].backward()
    loss = sum(losses) if together else losses[noisy]
    with pytest.raises(RuntimeError, match="computed something else"):
        loss.backward()


def test_a_change_of_mode_begins_a_first_step_and_the_message_has_the_block_s_name():
    network = nn.Sequential(linear(), Noisy(lambda y, noise: y * 2))
    recompute_blocks(network, "*")
    network(inputs()).sum().backward()
    network[1].way = WRONG["factor"]
    store_blocks(network, "*")
    recompute_blocks(network, "*")
    with pytest.raises(RuntimeError, match=r"1 \(Noisy\) computed something else"):
        network(inputs()).sum().backward()


@pytest.mark.parametrize("needs_grad", [True, False])
def test_flags_of_inputs_are_those_of_the_first_run(needs_grad):
    def step(module, run, x):
        x.requires_grad_(needs_grad)
        loss = run(x).square().sum()
        x.requires_grad_(not needs_grad)
        loss.backward()

    same_as_plain(batch_norm(), step)


@module_with(linear=linear)
def laid_out(self, x, factor):
    y = self.linear(x).exp()
    if torch.rand((), generator=GENERATOR) < 0.5:
        return (factor * y).t().contiguous().t().square()
    return y.square()


def test_another_layout_is_no_difference_and_hides_no_other_values():
    seed = next(filter(differs_in_layout, range(99)))
    GENERATOR.manual_seed(seed)
    Recompute(laid_out(), verify="raise").train()(inputs(), 1).sum().backward()
    GENERATOR.manual_seed(seed)
    with pytest.raises(RuntimeError, match="has other values"):
        Recompute(laid_out()).train()(inputs(), 2).sum().backward()


def differs_in_layout(seed):
    numbers = torch.rand(2, generator=torch.Generator().manual_seed(seed))
    return (numbers[0] < 0.5) != (numbers[1] < 0.5)


class Labelled(torch.Tensor):
    """Has values as any tensor."""


def test_values_of_tensors_of_a_class_of_their_own_are_compared():
    x = torch.arange(6.0)
    (_, one), (_, other) = map(fingerprint, (x.as_subclass(Labelled), x.flip(0)))
    assert one != other
    assert one == fingerprint(x)[1]


@module_with(cells=lambda: nn.LSTM(SIZE, SIZE, batch_first=True))
def recurrent(self, x):
    return self.cells(x[None])[0]


def test_workspaces_of_libraries_may_differ():
    same_as_plain(recurrent(), lambda m, run, x: run(x).square().sum().backward())


@module_with(cells=lambda: nn.LSTM(SIZE, SIZE))
def packed(self, x):
    return pad_packed_sequence(self.cells(x)[0])[0]


def test_a_packed_sequence_is_an_argument_as_any_other():
    def step(module, run, x):
        given = pack_padded_sequence(x.view(2, 1, SIZE), [2])
        run(given).square().sum().backward()

    same_as_plain(packed(), step)


def test_a_freeze_between_the_passes_has_no_effect_on_the_step():
    def step(module, run, x):
        loss = run(x).square().sum()
        module.requires_grad_(False)
        loss.backward()
        module.requires_grad_(True)

    same_as_plain(nn.Sequential(linear(), nn.Tanh(), linear()), step)


@module_with(linear=linear)
def slope(self, x):
    return self.linear(x) + torch.func.grad(lambda y: (y**3).sum())(x)


@pytest.mark.parametrize("mode", [*WITHOUT_STORAGE, "alone"])
def test_transforms_of_functions_inside_a_block_are_refused_by_its_name(mode):
    coupling = AdditiveCoupling(slope(), slope())
    chain = make_chain([coupling], mode="store" if mode == "alone" else mode)
    module = Recompute(slope()).train() if mode == "alone" else chain
    given = [inputs()] if mode == "alone" else [inputs(), inputs()]
    with pytest.raises(RuntimeError, match=r"calls a transform of torch\.func"):
        module(*given)


@pytest.mark.parametrize("shape", [(3, 4), (1000,), (5, 7, 9), (2, 3, 4, 5)])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64],
)
def test_a_fingerprint_is_of_all_bits_and_their_places(shape, dtype):
    x = (torch.randn(shape) * 3).to(dtype)
    if dtype is torch.bool:
        x = torch.rand(shape) > 0.5
    order, own = fingerprint(x)
    assert order == tuple(range(len(shape)))
    assert own == fingerprint(x.clone())[1]
    flat = x.flatten()
    for place in (0, len(flat) // 2, len(flat) - 1):
        other = flat.clone()
        other[place] = ~other[place] if dtype is torch.bool else other[place] + 1
        assert fingerprint(other.view(shape))[1] != own
    assert fingerprint(x.roll(1, dims=-1))[1] != own or x.roll(1, dims=-1).equal(x)
    assert (
        fingerprint(x.to(torch.uint8) if dtype is torch.bool else x.to("meta")) is None
    )
    # An axis that repeats one value, and another layout.
    assert fingerprint(x.unsqueeze(0).expand(9, *shape))[1] is not None
    if len(shape) > 1:
        assert fingerprint(x.mT)[0] != order


def test_a_graph_that_is_kept_does_not_keep_the_activations():
    counted = Counted(nn.Sequential(nn.Tanh(), nn.Softplus()))
    x = torch.randn(2, 3, requires_grad=True)
    loss = Recompute(counted).train()(x).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    again = torch.autograd.grad(loss, x)
    assert torch.equal(*first, *again)
    assert len(counted.variables.runs()) >= 3


@module_with()
def mapping(self, x):
    """Return a large map beside the output, as attention does."""
    scores = x @ x.mT
    return x + 0.1 * scores.sin().softmax(-1).cos() @ x, scores


def test_a_first_run_holds_inputs_outputs_and_nothing_else():
    rows, blocks = 512, [Recompute(mapping()).train() for _ in range(3)]
    x, of_a_map = torch.randn(rows, 4).requires_grad_(), 4 * rows * rows

    def forward(x):
        maps = []
        for block in blocks:
            x, scores = block(x)
            maps.append(scores)
        return x

    # Two maps are kept; the third block has its own and an operation: what it reads and
    # what it writes.
    assert live_bytes_peak(lambda: forward(x)) < 5.5 * of_a_map


@module_with(
    linear=linear, norm=lambda: BatchNorm(SIZE), plain_norm=batch_norm, calls=int
)
def penalised(self, x):
    """Take gradients of its own, twice, of what is normalised, dropped and counted.

    Normalisations are differentiated once less: torch's has no third derivative.
    """
    self.calls += 1
    y = self.norm(self.linear(x)[..., None, None]).flatten(1)
    z = self.plain_norm(y).tanh()
    y = F.dropout(z.sin(), 0.3).exp() * random.random()
    (slope,) = torch.autograd.grad(y.square().sum(), z, create_graph=True)
    (slope,) = torch.autograd.grad(slope.sin().sum(), z, create_graph=True)
    slope = slope.tanh() * self.calls
    (again,) = torch.autograd.grad((slope * z).sum(), x, create_graph=True)
    return again.sigmoid() * y


@pytest.mark.parametrize("outer", [False, True])
def test_a_block_that_takes_gradients_itself_trains_alike(outer):
    plain = nn.Sequential(linear(), penalised())
    network = copy.deepcopy(plain)
    recompute_blocks(network, "1")
    run = Recompute(network).train() if outer else network
    for step in range(2):
        grads = []
        for module, call in ((plain, plain), (network, run)):
            torch.manual_seed(step)
            random.seed(step)
            x = torch.randn(4, SIZE).requires_grad_()
            call(x).square().sum().backward()
            grads.append(
                {n: p.grad for n, p in module.named_parameters()} | {"x": x.grad}
            )
            # Both drew as many numbers.
            grads[-1] |= {
                "torch": torch.rand(1),
                "python": torch.tensor(random.random()),
            }
        assert_same_bits(*grads)
        assert_same_bits(dict(network.named_buffers()), dict(plain.named_buffers()))
    assert network[1].calls == plain[1].calls == 2


@module_with(linear=linear, maps=list)
def remembering(self, x):
    y = self.linear(x).tanh()
    self.maps = [*self.maps[-3:], y * y]
    return y.sin()


@pytest.mark.slow
def test_kept_maps_keep_no_earlier_steps_and_no_module():
    module = remembering()
    network = Recompute(module).train()

    def alive():
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    counts = []
    for _ in range(3):
        for _ in range(5):
            network(torch.randn(3, SIZE)).sum().backward()
        counts.append(alive())
    assert counts[1] == counts[2]
    reference = weakref.ref(module)
    del module, network
    gc.collect()
    assert reference() is None


class Convolutions(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


def test_a_second_run_of_ours_leaves_the_last_convolution_out():
    f = BasicResidual(4)
    x = torch.randn(2, 4, 6, 10, requires_grad=True)
    with Convolutions() as mode:
        recompute(f, x).sum().backward()
    assert mode.count == 2 + 1
