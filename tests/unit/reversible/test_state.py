"""State in plain attributes: what test_generated.py does not go over, layer by layer."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import AdditiveCoupling, Recompute, StreamError
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.state import Attributes

from . import generated
from .chains import assert_same_bits, in_backward, make_chain, module_with


class Module(nn.Module):
    """Has a layer and what it is given, and calls a function of these."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self.linear, self.own = nn.Linear(4, 4), forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.linear(self.own(self, x)).tanh()


def counted(module, x):
    module.calls.append(1)
    return x * len(module.calls)


def trained(module, *, between=lambda module: None):
    """Gradients of a step, and of what happens before its backward pass."""
    run = Recompute(module)
    loss = run(torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()).sum()
    between(module)
    loss.backward()
    return {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("kind", generated.NESTED)
def test_what_is_nested_and_enters_a_gradient_is_refused_in_the_first_step(kind):
    make, read = generated.NESTED[kind]
    module = Module(lambda m, x: (x * (1 + read(m.state) / 8)).sin(), state=make())
    with pytest.raises(RuntimeError, match=r"Module computed something else .* saves"):
        trained(module)


def test_what_is_nested_and_enters_no_gradient_may_be_changed_twice():
    module = Module(lambda m, x: m.calls[0].append(1) or x, calls=[[]])
    plain = copy.deepcopy(module)
    plain(torch.linspace(-1, 1, 8).view(2, 4)).sum().backward()
    grads = {n: p.grad for n, p in plain.named_parameters()}
    assert_same_bits(trained(module), grads)
    assert module.calls == [[1, 1]]


@pytest.mark.parametrize("kind", ["list_in_a_list", "torchs_generator"])
def test_exact_streams_notice_what_is_nested(kind):
    make, read = generated.NESTED[kind]
    halves = (
        Module(lambda m, x: x * (1 + read(m.state) / 8), state=make()) for _ in "fg"
    )
    chain = make_chain([AdditiveCoupling(*halves)], streams="exact")
    y = torch.add(*chain(*torch.randn(2, 3, 4)))
    with pytest.raises(StreamError, match="does not compute the same twice"):
        y.sum().backward()


def test_packages_are_known_by_their_whole_name():
    module = module_with(calls=list)(counted)()
    type(module).__module__ = "abcnet.layers"
    x = torch.ones(2, requires_grad=True)
    Recompute(module).train()(x).sum().backward()
    assert module.calls == [1]
    assert torch.equal(x.grad, torch.ones(2))


def test_modules_of_this_package_keep_nothing_for_a_second_run():
    module = BatchNorm(4)
    attributes = Attributes([module])
    module(torch.randn(2, 4, 3, 3))
    assert attributes.complete() is None


def scaled(module, x):
    return x * torch.as_tensor(module.value).mean()


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (Module(scaled, value=1.0), lambda m: setattr(m, "value", 3.0)),
        (Module(scaled, value=torch.ones(4)), lambda m: m.value.mul_(3)),
        (
            Module(scaled, value=torch.ones(300, 300)),
            lambda m: setattr(m, "value", torch.full((2,), 3.0)),
        ),
        (
            Module(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(4).eval()),
            lambda m: m.norm.running_mean.add_(3),
        ),
    ],
)
def test_a_second_run_sees_what_was_before_the_forward_pass(module, change):
    plain = trained(copy.deepcopy(module))
    changed = copy.deepcopy(module)
    change(changed)
    assert_same_bits(trained(module, between=change), plain)
    for name, value in vars(module).items():
        if name == "value":
            assert torch.equal(*map(torch.as_tensor, (value, changed.value)))
    assert_same_bits(dict(module.named_buffers()), dict(changed.named_buffers()))


def hooking(module, x):
    module.linear.register_forward_hook(lambda layer, given, y: y.cos())
    return x


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        (hooking, lambda module: len(module.linear._forward_hooks)),
    ],
)
def test_what_was_empty_is_empty_for_the_second_run_and_filled_once(forward, count):
    module = Module(forward)
    plain = copy.deepcopy(module)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    steps = []
    for m, run in ((plain, plain), (module, Recompute(module).train())):
        run(x).sum().backward()
        steps.append({n: p.grad for n, p in m.named_parameters()})
        assert count(m) == 1
    assert_same_bits(*steps)


def test_a_large_tensor_that_changes_after_the_forward_pass_is_named():
    module = Module(scaled, value=torch.ones(300, 300))
    with pytest.raises(RuntimeError, match=r"Module\.value, of shape \[300, 300\]"):
        trained(module, between=lambda m: m.value.mul_(2))


def read_first(module, x):
    return x + module.bank[0, :4]


def write_and_read(module, x):
    module.bank.add_(x.detach().mean() + 1)
    return read_first(module, x)


@pytest.mark.parametrize("make", [nn.Buffer, torch.Tensor])
def test_a_large_tensor_that_is_only_read_is_not_held_twice(make):
    run = Recompute(Module(read_first, bank=make(torch.zeros(300, 300)))).train()

    def step():
        sum(run(torch.ones(2, 4)).sum() for _ in range(3)).backward()

    step()
    assert live_bytes_peak(step) < 4 * 300 * 300


def test_a_large_buffer_that_is_written_to_is_written_once():
    module = Module(write_and_read, bank=nn.Buffer(torch.zeros(300, 300)))
    plain = copy.deepcopy(module)
    for run in (plain, Recompute(module).train()):
        for _ in range(2):
            run(torch.ones(2, 4)).sum().backward()
    assert_same_bits(module.state_dict(), plain.state_dict())
    assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)


def test_an_error_in_the_second_run_leaves_what_the_first_left():
    def fail(module, x):
        y = counted(module, x)
        if in_backward():
            raise ZeroDivisionError
        return y

    module = Module(fail, calls=[])
    with pytest.raises(ZeroDivisionError):
        trained(module)
    assert module.calls == [1]


def carried(module, x):
    module.last = module.linear(x) + module.last.detach()
    return module.last


def test_state_of_an_earlier_step_keeps_no_graph():
    run = Recompute(Module(carried, last=torch.zeros(2, 4))).train()
    first = weakref.ref(run(torch.randn(2, 4)))
    kept = [run(torch.randn(2, 4)) for _ in range(3)]
    gc.collect()
    assert first() is None
    sum(y.sum() for y in kept).backward()
