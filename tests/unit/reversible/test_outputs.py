"""Outputs of any kind, used or not: what comes of a recomputed module is plain autograd's."""

import collections
import copy
import dataclasses
import enum
import types

import pytest
import torch
from torch import nn

from speechbrain_rev.reversible import AdditiveCoupling, Recompute, ReversibleChain
from speechbrain_rev.reversible.monitor import StreamWarning
from speechbrain_rev.reversible.wrapping import recompute_blocks

from .chains import as_global, chain_of, distance, loss_of, streams

MODES = ["store", "recompute", "reconstruct"]


def in_sequence(module):
    """A network of which the module is a recomputed block."""
    return recompute_blocks(nn.ModuleDict({"block": module}), "block")["block"]


each_way = pytest.mark.parametrize("recomputed", [Recompute, in_sequence])


class Several(nn.Module):
    """Outputs that are used, unused, behind an infinite derivative, and cut off."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        with torch.no_grad():
            without = self.used(x)
        used = self.used(x)
        return used, self.unused(x.sqrt()), used.detach(), without, x.argmax()


@each_way
def test_an_output_that_nobody_uses_has_no_gradient(recomputed):
    module = Several()
    x = torch.zeros(2, 3, requires_grad=True)
    recomputed(module).train()(x)[0].sum().backward()
    assert torch.equal(x.grad, module.used.weight.sum(0).expand(2, 3))
    assert module.unused.weight.grad is None
    assert module.used.weight.grad is not None


@each_way
def test_what_was_cut_off_claims_no_graph(recomputed):
    outputs = recomputed(Several()).train()(torch.ones(2, 3, requires_grad=True))
    assert [y.requires_grad for y in outputs] == [True, True, False, False, False]
    for y in outputs[2:]:
        assert torch.equal(copy.deepcopy(y), y)
        y.numpy()


@each_way
def test_inputs_without_a_gradient_make_outputs_without_one(recomputed):
    module = recomputed(nn.Tanh()).train()
    x = torch.randn(2, 3)
    assert not module(x).requires_grad
    y = module(x.requires_grad_())
    assert y.requires_grad
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, 1 - x.detach().tanh().square())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.weight * x


class Root(nn.Module):
    def forward(self, x):
        return x.clamp_min(0).sqrt()


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("streams_format", ["exact", "float"])
@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_nobody_uses_has_no_gradient(mode, streams_format, used):
    torch.manual_seed(0)
    couplings = [
        AdditiveCoupling(Scaled(), Root()),
        AdditiveCoupling(nn.Linear(3, 3), nn.Linear(3, 3)),
    ]
    # Floats that are reconstructed are not the zeros at which the root is so steep.
    for depth in (1, 2) if streams_format == "exact" else (1,):
        chain = ReversibleChain(
            copy.deepcopy(couplings[:depth]), mode=mode, streams=streams_format
        )
        plain = copy.deepcopy(chain.blocks)
        found = []
        for run in (chain, lambda *x, plain=plain: in_turn(plain, *x)):
            x1, x2 = (
                torch.zeros(3, requires_grad=True),
                torch.ones(3, requires_grad=True),
            )
            run(x1, x2)[used].sum().backward()
            modules = chain.blocks if run is chain else plain
            named = {n: p.grad for n, p in modules.named_parameters()}
            found.append({"x1": x1.grad, "x2": x2.grad, **named})
        for name, expected in found[1].items():
            grad = found[0][name]
            assert (grad is None) == (expected is None), name
            if grad is not None:
                # Values of exact streams are rounded to 2 ** -16.
                torch.testing.assert_close(
                    grad, expected, rtol=1e-4, atol=1e-4, equal_nan=True
                )


def in_turn(blocks, x1, x2):
    for block in blocks:
        x1, x2 = block(x1, x2)
    return x1, x2


@pytest.mark.parametrize("mode", MODES)
def test_weights_behind_an_unused_stream_do_not_decay(mode):
    chain = chain_of("basic", 1, mode=mode)
    optimizer = torch.optim.AdamW(chain.parameters(), lr=0.1, weight_decay=0.5)
    before = [p.clone() for p in chain.blocks[0].g.parameters()]
    chain(*streams())[0].square().sum().backward()
    optimizer.step()
    for p, old in zip(chain.blocks[0].g.parameters(), before, strict=True):
        assert p.grad is None
        assert torch.equal(p, old)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trained", ["f", "g", "neither"])
def test_streams_claim_a_graph_where_plain_torch_does(trained, mode):
    chain = ReversibleChain(
        [AdditiveCoupling(nn.Linear(3, 3), nn.Linear(3, 3))], mode=mode
    )
    chain.requires_grad_(False)
    if trained != "neither":
        getattr(chain.blocks[0], trained).requires_grad_(True)
    x = torch.randn(2, 3), torch.randn(2, 3)
    expected = [y.requires_grad for y in chain.blocks[0](*x)]
    assert [y.requires_grad for y in chain(*x)] == expected


@dataclasses.dataclass
class Out:
    x: torch.Tensor
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: tuple[torch.Tensor, int]


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Output(collections.OrderedDict):
    """As those of transformers: a dictionary whose items are attributes too."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__.update(items)


Pair = collections.namedtuple("Pair", "x n")

KINDS = {
    "tensor": (lambda y: y, lambda out: out),
    "dataclass": (Out, lambda out: out.x),
    "frozen": (lambda y: Frozen((y, 3)), lambda out: out.x[0]),
    "slots": (Slotted, lambda out: out.x),
    "named tuple": (lambda y: Pair(y, 3), lambda out: out.x),
    "nested": (lambda y: {"a": [Out(y)], "b": None}, lambda out: out["a"][0].x),
    "namespace": (lambda y: types.SimpleNamespace(x=y), lambda out: out.x),
    "items and attributes": (lambda y: Output(x=y), lambda out: out.x),
    "set in a tuple": (lambda y: ({"name"}, [y]), lambda out: out[1][0]),
}


class Wrapping(nn.Module):
    """Takes its input out of an object, and gives its output in one."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, given):
        make, open_ = KINDS[self.kind]
        return make(self.linear(open_(given)).tanh())


@each_way
@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_any_kind_go_in_and_come_out(kind, recomputed):
    make, open_ = KINDS[kind]
    plain = Wrapping(kind)
    found = []
    for module in (plain, copy.deepcopy(plain)):
        run = module if module is plain else recomputed(module).train()
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        out = run(make(x))
        assert type(out) is type(make(x))
        open_(out).square().sum().backward()
        named = {n: p.grad for n, p in module.named_parameters()}
        found.append({"x": x.grad, **named})
    assert distance(*found) == 0


def test_what_a_module_puts_into_a_dictionary_it_was_given_is_put_there_once():
    class Caching(nn.Module):
        def forward(self, x, cache):
            cache["steps"].append(x.detach())
            return x * len(cache["steps"])

    x, cache = torch.ones(2, requires_grad=True), {"steps": []}
    Recompute(Caching()).train()(x, cache).sum().backward()
    assert len(cache["steps"]) == 1
    assert torch.equal(x.grad, torch.ones(2))


def test_what_an_object_holds_may_not_be_changed_before_the_backward_pass():
    module = Recompute(Wrapping("namespace")).train()
    given = types.SimpleNamespace(x=torch.ones(3, 4))
    loss = module(given).x.sum()
    given.x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Penalised(nn.Module):
    """Takes a gradient in its forward pass, without a context for it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        y = self.linear(x.tanh()).tanh()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sum() + slope.square().sum()


@each_way
def test_gradients_may_be_taken_in_the_forward_pass(recomputed):
    plain = Penalised()
    again = copy.deepcopy(plain)
    found = []
    for module, run in ((plain, plain), (again, recomputed(again).train())):
        run(torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()).backward()
        found.append({n: p.grad for n, p in module.named_parameters()})
    assert distance(*found) == 0


@pytest.mark.parametrize("mode", MODES)
def test_gradients_may_be_taken_in_a_residual_function(mode):
    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 0.5))

        def forward(self, x):
            y = (self.weight * x).sin()
            return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    blocks = [AdditiveCoupling(Slope(), Slope()) for _ in range(2)]
    found = []
    for each in ("store", mode):
        chain = ReversibleChain(copy.deepcopy(blocks), mode=each)
        x = [torch.linspace(-1, i, 6).view(2, 3).requires_grad_() for i in (1, 2)]
        loss_of(chain(*x)).backward()
        named = {n: p.grad for n, p in chain.named_parameters()}
        found.append({"x1": x[0].grad, "x2": x[1].grad, **named})
    assert distance(*found) == 0


class Run(enum.Enum):
    FIRST, SECOND = range(2)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({Run.FIRST: 1, Run.SECOND: 2}, "2 tensors returned for 1"),
        ({Run.FIRST: 2, Run.SECOND: 1}, "1 tensors returned for 2"),
    ],
)
def test_another_number_of_outputs_is_an_error(outputs, message):
    def forward(x):
        run = Run.FIRST if torch._C._current_graph_task_id() == -1 else Run.SECOND
        return (x.exp(),) * outputs[run]

    module = nn.Identity()
    module.forward = forward
    loss = Recompute(module).train()(torch.ones(2, requires_grad=True))[0].sum()
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


@pytest.mark.parametrize("more", [True, False])
def test_other_operations_in_the_second_run_are_an_error(more):
    def forward(x):
        second = torch._C._current_graph_task_id() != -1
        return x.exp().exp() if second is more else x.exp()

    module = nn.Identity()
    module.forward = forward
    loss = Recompute(module).train()(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"computed something else.*mode='store'"):
        loss.backward()


def test_writing_to_what_was_used_is_an_error_as_in_plain_torch():
    class Overwriting(nn.Module):
        def forward(self, x):
            y = x.exp()
            return y.add_(1)

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Overwriting()(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Recompute(Overwriting()).train()(x).sum().backward()


@each_way
def test_a_recomputed_module_can_be_differentiated_twice(recomputed):
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    again = copy.deepcopy(plain)
    found = []
    for module, run in ((plain, plain), (again, recomputed(again).train())):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        named = {n: p.grad for n, p in module.named_parameters()}
        found.append({"x": x.grad, **named})
    assert distance(*found) == 0


@pytest.mark.parametrize("mode", ["recompute", "reconstruct"])
def test_a_weight_changed_through_data_is_noticed(mode):
    chain = chain_of("basic", 2, mode=mode).float()
    chain.monitor.verify = "warn"
    loss = loss_of(chain(*streams(torch.float32)))
    chain.blocks[0].f.conv1.weight.data.mul_(1.5)

    def backward():
        loss.backward()
        chain.check_streams()

    with pytest.warns(
        StreamWarning, match="after the forward pass|between forward and"
    ):
        backward()


def test_a_weight_of_any_network_changed_through_data_is_noticed_and_named():
    network = recompute_blocks(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), "0")
    loss = network(torch.randn(2, 3)).sum()
    network[0].weight.data.add_(1)
    with pytest.warns(
        UserWarning, match="weight of Linear was changed after the forward"
    ):
        loss.backward()


def test_a_graph_that_is_kept_does_not_keep_the_activations():
    module = Recompute(
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    ).train()
    runs = []
    variables = as_global(note=runs.append)
    module.module[1].forward = lambda x: (variables.note(1), x.tanh())[1]
    x = torch.randn(2, 3, requires_grad=True)
    loss = module(x).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    again = torch.autograd.grad(loss, x)
    assert torch.equal(*first, *again)
    assert len(runs) >= 3
