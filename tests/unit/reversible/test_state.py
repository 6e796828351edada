"""What modules of other people keep, change and share, as it is in plain torch."""

import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import AdditiveCoupling, Recompute, ReversibleChain
from speechbrain_rev.reversible.wrapping import recompute_blocks

from .chains import distance

SIZE = 6


class Linear(nn.Module):
    """What all have: a layer, and what ``use`` makes of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return torch.sin(self.use(self.linear(x)))


class EmptyBuffer(Linear):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def use(self, x):
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * (now + 1)
        return x - self.mean


class LateBuffer(Linear):
    def use(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(SIZE))
        self.mean.mul_(0.5).add_(x.detach().mean(0) + 1)
        return x - self.mean.clone()


class ReadingStatistics(Linear):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZE)

    def use(self, x):
        mean = self.norm.running_mean.clone()
        return self.norm(x) - mean + self.norm.running_var.clone()


class Annealing(Linear):
    def __init__(self):
        super().__init__()
        self.relu, self.dropout = nn.LeakyReLU(0.5), nn.Dropout(0.5)

    def use(self, x):
        self.relu.negative_slope *= 0.5
        self.dropout.p *= 0.9
        return self.dropout(self.relu(x))


class ByNumpysChance(Linear):
    def use(self, x):
        # As layers of others drop: by numpy's global generator.
        return x * np.random.rand() if np.random.rand() < 0.5 else x.cos()  # noqa: NPY002


class ByPythonsChance(Linear):
    def use(self, x):
        return x * random.random()


class ScaledWeight(Linear):
    def use(self, x):
        parameter = isinstance(self.linear.weight, nn.Parameter)
        return x * self.linear.weight.scale * (1 + parameter)


class Memory(Linear):
    def __init__(self):
        super().__init__()
        self.maps = []

    def use(self, x):
        y = x.tanh()
        self.maps = [*self.maps[-3:], y * y]
        return y


KINDS = [
    EmptyBuffer, LateBuffer, ReadingStatistics, Annealing, ByNumpysChance,
    ByPythonsChance, Memory,
]  # fmt: skip


def trained(module, run, steps=3):
    found = {}
    for step in range(steps):
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)  # noqa: NPY002
        x = torch.randn(4, SIZE, requires_grad=True)
        run(x).square().sum().backward()
        found[f"x {step}"] = x.grad
        of_numpy = np.random.rand()  # noqa: NPY002
        chances = [torch.rand(1).item(), random.random(), of_numpy]
        found[f"chance {step}"] = torch.tensor(chances)
    found |= {n: p.grad for n, p in module.named_parameters()}
    return found | {n: b.clone() for n, b in module.named_buffers()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputed_module_is_as_in_plain_torch(kind):
    torch.manual_seed(0)
    plain = kind()
    again, block = copy.deepcopy(plain), copy.deepcopy(plain)
    network = recompute_blocks(nn.Sequential(block), "0")
    expected = trained(plain, plain)
    assert distance(trained(again, Recompute(again).train()), expected) == 0
    assert distance(trained(block, network), expected) == 0


@pytest.mark.filterwarnings("ignore::speechbrain_rev.reversible.hooks.WatchingWarning")
@pytest.mark.parametrize("mode", ["recompute", "reconstruct"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_residual_function_is_as_where_it_is_stored(kind, mode):
    torch.manual_seed(0)
    blocks = [AdditiveCoupling(kind(), kind()) for _ in range(2)]
    found = []
    for each in ("store", mode):
        chain = ReversibleChain(copy.deepcopy(blocks), mode=each)
        found.append(
            trained(chain, lambda x, chain=chain: torch.add(*chain(x, x.cos())))
        )
    assert distance(*found) == 0


@pytest.mark.parametrize("mode", ["recompute", "reconstruct"])
def test_attributes_of_weights_are_there_in_both_runs(mode):
    found = []
    for each in ("store", mode):
        torch.manual_seed(0)
        functions = ScaledWeight(), ScaledWeight()
        for function in functions:
            function.linear.weight.scale = 3.0
        chain = ReversibleChain([AdditiveCoupling(*functions)], mode=each)
        found.append(trained(chain, lambda x, c=chain: torch.add(*c(x, x.cos())), 1))
    assert distance(*found) == 0


class Aliases(Linear):
    def forward(self, a, b, weight=None):
        own = weight is self.linear.weight
        return torch.sin(self.linear(a * (2 if a is b else 3))) * (2 if own else 1)


@pytest.mark.parametrize("same", [True, False])
def test_arguments_that_are_one_object_stay_one(same):
    torch.manual_seed(0)
    plain = Aliases()
    again = copy.deepcopy(plain)
    found = []
    for module, run in ((plain, plain), (again, Recompute(again).train())):
        x = torch.linspace(-1, 1, 2 * SIZE).view(2, SIZE).requires_grad_()
        weight = module.linear.weight if same else None
        run(x, x if same else x.clone(), weight=weight).square().sum().backward()
        named = {n: p.grad for n, p in module.named_parameters()}
        found.append({"x": x.grad, **named})
    assert distance(*found) == 0


def test_one_list_that_is_given_twice_stays_one():
    class Appending(Linear):
        def forward(self, x, first, second):
            first.append(1)
            return self.linear(x) * len(second)

    given = []
    x = torch.ones(2, SIZE, requires_grad=True)
    module = Appending()
    Recompute(module).train()(x, given, given).sum().backward()
    assert given == [1]
    torch.testing.assert_close(
        x.grad, module.linear.weight.sum(0).expand(2, SIZE).detach()
    )


def test_attention_of_a_sequence_to_itself():
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
    again = recompute_blocks(copy.deepcopy(plain), "self_attn", "linear?")
    found = []
    for module in (plain, again):
        torch.manual_seed(1)
        x = torch.randn(5, 3, 8, requires_grad=True)
        module(x).square().sum().backward()
        named = {n: p.grad for n, p in module.named_parameters()}
        found.append({"x": x.grad, **named})
    assert distance(*found) == 0


@pytest.mark.parametrize("mode", ["store", "recompute", "reconstruct"])
def test_weights_that_are_handed_in_for_a_call_are_those_of_both_runs(mode, recwarn):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh())
    chain = ReversibleChain(
        [AdditiveCoupling(copy.deepcopy(plain), copy.deepcopy(plain))], mode=mode
    )
    stored = copy.deepcopy(chain)
    stored.set_mode("store")
    x = torch.linspace(-1, 1, 2 * SIZE).view(2, SIZE)
    pairs = [(chain, stored, (x, x))]
    if mode == "recompute":
        pairs.append((Recompute(plain).train(), Recompute(plain).eval(), (x,)))
    for module, other, given in pairs:
        found = []
        for each in (module, other):
            weights = {
                n: (p.detach() * 1.5).requires_grad_()
                for n, p in each.named_parameters()
            }
            y = functional_call(each, weights, given)
            y = torch.add(*y) if isinstance(y, tuple) else y
            grads = torch.autograd.grad(y.square().sum(), [*weights.values()])
            found.append(dict(zip(weights, grads, strict=True)))
        assert distance(*found) == 0
    assert not recwarn


def test_a_weight_that_is_exchanged_after_the_forward_pass_changes_nothing():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
    again = copy.deepcopy(plain)
    found = []
    for module, run in ((plain, plain), (again, Recompute(again).train())):
        x = torch.linspace(-1, 1, 2 * SIZE).view(2, SIZE).requires_grad_()
        loss = run(x).square().sum()
        module[2].weight = nn.Parameter(torch.zeros(SIZE, SIZE))
        module[1].register_forward_hook(lambda m, i, o: 2 * o)
        loss.backward()
        found.append({"x": x.grad, "weight": module[0].weight.grad})
        assert module[2].weight.grad is None
    assert distance(*found) == 0


class Averaging(Linear):
    def __init__(self):
        super().__init__()
        self.slow = nn.Linear(SIZE, SIZE).requires_grad_(False)

    def use(self, x):
        with torch.no_grad():
            for slow, p in zip(
                self.slow.parameters(), self.linear.parameters(), strict=True
            ):
                slow.mul_(0.9).add_(p, alpha=0.1)
        return x * self.slow(x)


class Rebinding(Averaging):
    def use(self, x):
        self.slow.weight.data = 0.5 * self.slow.weight.data
        return x * self.slow(x)


class Growing(Linear):
    def use(self, x):
        if not hasattr(self, "late"):
            self.late = nn.Linear(SIZE, SIZE)
        return self.late(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Averaging, r"wrote into its parameter slow\.weight in its forward pass"),
        (Rebinding, r"wrote into its parameter slow\.weight in its forward pass"),
        (Growing, "Use it once in evaluation|use it once in evaluation"),
        (lambda: nn.LazyLinear(3), "Use it once in evaluation before it trains"),
    ],
)
def test_what_cannot_run_twice_says_what_to_do(make, message):
    module = Recompute(make()).train()

    def step():
        module(torch.randn(4, SIZE, requires_grad=True)).sum().backward()

    with pytest.raises(RuntimeError, match=message):
        step()


def test_kept_maps_keep_no_earlier_steps_and_no_module():
    module = Memory()
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


class Bank(Linear):
    def __init__(self, kind):
        super().__init__()
        bank = torch.zeros(300, 300)
        if kind == "buffer":
            self.register_buffer("bank", bank)
        else:
            self.bank = bank

    def use(self, x):
        return x + self.bank[0, :SIZE]


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_a_large_tensor_that_is_only_read_is_not_held_twice(kind):
    module = Recompute(Bank(kind)).train()
    x = torch.randn(2, SIZE)

    def step():
        sum(module(x).sum() for _ in range(3)).backward()

    step()
    assert live_bytes_peak(step) < 4 * 300 * 300


def test_a_large_buffer_that_is_written_to_is_as_in_plain_torch():
    class Queue(Bank):
        def use(self, x):
            self.bank.add_(x.detach().mean())
            return super().use(x)

    torch.manual_seed(0)
    plain = Queue("buffer")
    again = copy.deepcopy(plain)
    found = [trained(plain, plain), trained(again, Recompute(again).train())]
    assert distance(*found) == 0
