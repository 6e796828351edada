"""State in plain attributes: changed once, and seen as the first run saw it."""

import copy
import gc
import inspect
import itertools
import logging
import os
import random
import threading
import types
import weakref
from collections import deque
from functools import cache, partial, singledispatch

import numpy as np
import pytest
import torch
from speechbrain.processing.features import InputNormalization
from torch import nn

from speechbrain_rev.reversible import (
    AdditiveCoupling,
    Recompute,
    ReversibleChain,
    state,
)
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.state import Attributes

from .chains import distance


class Counter:
    def __init__(self):
        self.calls = 1


class Listed(list):
    """A list that has an attribute, too."""

    def __init__(self):
        super().__init__([1])
        self.calls = 1


class Private:
    __slots__ = ("__calls",)

    def __init__(self):
        self.__calls = 1

    def count(self):
        self.__calls += 1

    @property
    def calls(self):
        return self.__calls


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 1


def counting():
    """Make a function that counts its calls in a variable around it."""
    calls = 1

    def count():
        nonlocal calls
        calls += 1

    count.calls = lambda: calls
    return count


def noting(notes):
    """Make a function that changes an object around it."""

    def note():
        if isinstance(notes, list):
            notes.append(1)
        else:
            notes[0] += 1

    note.calls = lambda: float(sum(notes))
    return note


def attributed():
    """Make a function that counts its calls in an attribute of its own."""

    def count():
        count.calls += 1

    count.calls = 1
    return count


def defaulted():
    """Make a function that counts its calls in what it takes by default."""

    def count(calls=[1]):  # noqa: B006
        calls[0] += 1

    return count


class Object:
    """Of a value and how a call changes it; ``read`` makes a number of it."""

    def __init__(self, value, change, read):
        self.value, self.change, self.read = value, change, read


def rebound(module):
    module.state = module.state * 1.5


def in_place(module):
    module.state.mul_(1.5)


def called(module):
    module.state()


STATES = {
    "number": (lambda: 1, lambda m: setattr(m, "state", m.state + 1), lambda s: s),
    "rebound tensor": (lambda: torch.ones(4), rebound, lambda s: s),
    "tensor in place": (lambda: torch.ones(4), in_place, lambda s: s.clone()),
    "tensor in a list": (
        lambda: [torch.ones(4)],
        lambda m: m.state[0].add_(1),
        lambda s: s[0].clone(),
    ),
    "tensor in a tuple": (
        lambda: (torch.ones(4), 0),
        lambda m: m.state[0].add_(1),
        lambda s: s[0].clone(),
    ),
    "list": (lambda: [1], lambda m: m.state.append(2), len),
    "nested lists": (lambda: [[1]], lambda m: m.state[0].append(2), lambda s: len(s[0])),
    "queue": (lambda: deque([1, 2], 3), lambda m: m.state.append(5), sum),
    "set": (lambda: {1}, lambda m: m.state.add(len(m.state) + 1), len),
    "dictionary": (
        lambda: {"calls": 1},
        lambda m: m.state.update(calls=m.state["calls"] + 1),
        lambda s: s["calls"],
    ),
    "object": (
        Counter,
        lambda m: setattr(m.state, "calls", m.state.calls + 1),
        lambda s: s.calls,
    ),
    "slots": (
        Slots,
        lambda m: setattr(m.state, "calls", m.state.calls + 1),
        lambda s: s.calls,
    ),
    "list with an attribute": (
        Listed,
        lambda m: setattr(m.state, "calls", m.state.calls + 1),
        lambda s: s.calls,
    ),
    "private slots": (Private, lambda m: m.state.count(), lambda s: s.calls),
    "tensors as keys": (
        lambda: {torch.ones(2): 1},
        lambda m: m.state.update({torch.ones(2): 2}),
        len,
    ),
    "sparse tensor": (
        lambda: torch.eye(4).to_sparse(),
        lambda m: None,
        lambda s: s.to_dense()[0] + 1,
    ),
    "array": (
        lambda: np.ones(4),
        lambda m: np.add(m.state, 1, out=m.state),
        lambda s: torch.tensor(s).float(),
    ),
    "torch's generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda m: None,
        lambda s: torch.rand(4, generator=s),
    ),
    "Python's generator": (
        lambda: random.Random(3), lambda m: None, lambda s: s.random()
    ),
    "numpy's generator": (
        lambda: np.random.default_rng(3),
        lambda m: None,
        lambda s: float(s.random()),
    ),
    "iterator that copies": (itertools.count, lambda m: None, lambda s: next(s) + 1),
    "unregistered module": (
        lambda: [nn.BatchNorm1d(4)],
        lambda m: m.state[0](torch.randn(3, 4)),
        lambda s: s[0].running_mean.clone() + 1,
    ),
    "method": (lambda: Private().count, called, lambda s: s.__self__.calls),
    "method of a list": (
        lambda: [1].append, lambda m: m.state(1), lambda s: len(s.__self__)
    ),
    "method of a generator": (
        lambda: random.Random(3).random, lambda m: None, lambda s: s()
    ),
    "method of an iterator": (
        lambda: itertools.count(1).__next__, lambda m: None, lambda s: s()
    ),
    "variable around a function": (counting, called, lambda s: s.calls()),
    "list around a function": (lambda: noting([1]), called, lambda s: s.calls()),
    "array around a function": (lambda: noting(np.ones(1)), called, lambda s: s.calls()),
    "attribute of a function": (attributed, called, lambda s: s.calls),
    "default of a function": (defaulted, called, lambda s: s.__defaults__[0][0]),
    "partial function": (
        lambda: partial(deque.append, deque([1]), 2), called, lambda s: len(s.args[0])
    ),
    "partial function of a tensor": (
        lambda: partial(torch.Tensor.add_, torch.ones(4), other=1),
        called,
        lambda s: s.args[0].clone(),
    ),
}  # fmt: skip


class Stateful(nn.Module):
    def __init__(self, kind):
        super().__init__()
        make, self.change, self.read = STATES[kind]
        self.state, self.linear = make(), nn.Linear(4, 4)

    def forward(self, x):
        self.change(self)
        return self.linear(x * self.read(self.state)).tanh()


def comparable(state):
    """Give what two states are equal by."""
    if isinstance(state, torch.Tensor):
        return state.to_dense().tolist()
    if isinstance(state, (list, tuple, deque)):
        return [comparable(x) for x in state]
    if isinstance(state, nn.Module):
        return {n: b.tolist() for n, b in state.named_buffers()}
    if isinstance(state, partial):
        return comparable(state.args)
    if isinstance(getattr(state, "__defaults__", None), tuple):
        return state.__defaults__
    if hasattr(state, "__self__") and not isinstance(state, type):
        return comparable(state.__self__)
    for read in ("tolist", "getstate", "calls", "bit_generator", "get_state"):
        if hasattr(state, read):
            found = getattr(state, read)
            found = found() if callable(found) else getattr(found, "state", found)
            return comparable(found) if isinstance(found, torch.Tensor) else found
    return repr(state)


@pytest.mark.filterwarnings(
    "ignore:Pickle, copy, and deepcopy support:DeprecationWarning"
)
@pytest.mark.parametrize("kind", STATES)
def test_state_is_changed_once_and_gradients_are_plain(kind):
    torch.manual_seed(0)
    plain = Stateful(kind)
    again = Stateful(kind)
    again.load_state_dict(plain.state_dict())
    identity = id(again.state)
    found = []
    for module, run in ((plain, plain), (again, Recompute(again).train())):
        torch.manual_seed(1)
        for step in range(3):
            run(torch.randn(2, 4) + step).square().sum().backward()
        found.append({n: p.grad for n, p in module.named_parameters()})
    assert distance(*found) == 0
    assert comparable(again.state) == comparable(plain.state)
    if kind not in ("number", "rebound tensor"):
        assert id(again.state) == identity


@pytest.mark.filterwarnings(
    "ignore:Pickle, copy, and deepcopy support:DeprecationWarning"
)
@pytest.mark.parametrize("mode", ["recompute", "reconstruct"])
@pytest.mark.parametrize("kind", STATES)
def test_state_in_a_chain_is_changed_once(kind, mode):
    torch.manual_seed(0)
    # Functions are what they were in a copy.
    chain, again = (
        ReversibleChain(
            [AdditiveCoupling(Stateful(kind), Stateful(kind)) for _ in range(2)],
            mode=each,
        )
        for each in ("store", mode)
    )
    again.load_state_dict(chain.state_dict())
    found = []
    for module in (chain, again):
        torch.manual_seed(1)
        for _ in range(2):
            y1, y2 = module(torch.randn(2, 4), torch.randn(2, 4))
            (y1 + y2.square()).sum().backward()
        found.append({n: p.grad for n, p in module.named_parameters()})
    assert distance(*found) == 0
    for block, other in zip(chain.blocks, again.blocks, strict=True):
        assert comparable(block.f.state) == comparable(other.f.state)
        assert comparable(block.g.state) == comparable(other.g.state)


def test_speechbrains_normalisation_counts_once():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = InputNormalization(norm_type="global")
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return self.linear(self.norm(x, torch.ones(len(x))))

    torch.manual_seed(0)
    plain = Normalised()
    again = copy.deepcopy(plain)
    found = []
    for module, run in ((plain, plain), (again, Recompute(again).train())):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            run(
                torch.randn(4, 10, 6, generator=generator) + seed
            ).square().sum().backward()
        found.append({n: p.grad for n, p in module.named_parameters()})
    assert again.norm.count == plain.norm.count
    assert distance(*found) == 0


def test_two_passes_before_one_backward_leave_what_the_last_left():
    torch.manual_seed(0)
    plain = Stateful("tensor in place")
    again = copy.deepcopy(plain)
    found = []
    for module, run in ((plain, plain), (again, Recompute(again).train())):
        x = torch.linspace(-1, 1, 8).view(2, 4)
        losses = [run(x + i).sum() for i in range(3)]
        losses[1].backward()
        sum(losses[::2]).backward()
        found.append({n: p.grad for n, p in module.named_parameters()})
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(again.state, plain.state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (i for i in range(9)), "state (generator) cannot be copied"),
        (
            lambda: os.fdopen(os.dup(1), "w"),
            "(TextIOWrapper) cannot be copied",
        ),
        (lambda: list(map(str, range(30_000))), None),
        (
            lambda: [[i] for i in range(30_000)],
            "(more than 20,000 objects) cannot be copied",
        ),
    ],
)
def test_what_cannot_be_copied_is_named_once(make, message, recwarn):
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = make()

        def forward(self, x):
            return x.tanh()

    module = Recompute(Holding()).train()
    for _ in range(2):
        module(torch.ones(2, requires_grad=True)).sum().backward()
    assert [message in str(w.message) for w in recwarn] == [True] * (
        message is not None
    )
    getattr(module.module.state, "close", list)()
    assert all("mode='store'" in str(w.message) for w in recwarn)


def test_attributes_of_a_class_are_changed_once():
    class Counting(nn.Module):
        calls = 0
        seen: list = []  # noqa: RUF012

        def forward(self, x):
            type(self).calls += 1
            self.seen.append(1)
            return x * (self.calls + len(self.seen))

    x = torch.ones(2, requires_grad=True)
    for calls in (1, 2):
        x.grad = None
        Recompute(Counting()).train()(x).sum().backward()
        assert (Counting.calls, len(Counting.seen)) == (calls, calls)
        assert torch.equal(x.grad, torch.full((2,), 2.0 * calls))


def test_small_attributes_after_a_large_one_are_put_back(recwarn):
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.large, self.calls = [[i] for i in range(30_000)], 0
            self.array = np.ones(100_000)
            self.log = logging.getLogger("speechbrain_rev")

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    module = Holding()
    x = torch.ones(2, requires_grad=True)
    Recompute(module).train()(x).sum().backward()
    assert module.calls == 1
    assert torch.equal(x.grad, torch.ones(2))
    named = sorted(str(w.message).split(" cannot")[0] for w in recwarn)
    assert named == [
        "Holding.array (an array of shape [100000])",
        "Holding.large (more than 20,000 objects)",
    ]


def test_functions_that_hook_are_left_alone(recwarn):
    seen, training = [], (i for i in range(3))
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module[0].register_forward_hook(lambda *_: seen.append(training))
    Recompute(module).train()(torch.ones(3, 2)).sum().backward()
    assert len(seen) == 2
    assert ["fire in both" in str(w.message) for w in recwarn] == [True]


def test_what_leads_to_too_much_is_walked_once(monkeypatch, recwarn):
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.large = [[i] for i in range(30_000)]

    module, visited, places_of = Holding(), [], state._places_of
    monkeypatch.setattr(
        state, "_places_of", lambda x: visited.append(1) or places_of(x)
    )
    Attributes(module)
    assert len(visited) >= 20_000
    visited.clear()
    Attributes(module)
    assert len(visited) < 100


def test_packages_are_told_by_their_whole_name():
    kept = types.new_class("Kept", (nn.Module,))
    kept.__module__, kept.calls = "abcnet.layers", 0

    def forward(self, x):
        kept.calls += 1
        return x * kept.calls

    kept.forward = forward
    x = torch.ones(2, requires_grad=True)
    Recompute(kept()).train()(x).sum().backward()
    assert kept.calls == 1
    assert torch.equal(x.grad, torch.ones(2))


def test_locks_and_functions_are_left_alone(recwarn):
    module = nn.Identity()
    module.lock, module.call, module.kind = threading.Lock(), torch.tanh, nn.Linear
    module.signature = inspect.signature(nn.Linear.forward)
    module.dispatched, module.cached = singledispatch(torch.tanh), cache(torch.tanh)
    module.forward = torch.autocast("cpu", enabled=False)(lambda x: x.tanh())
    Recompute(module).train()(torch.ones(2, requires_grad=True)).sum().backward()
    assert not recwarn


def test_modules_of_this_package_keep_nothing_for_a_second_run():
    module = BatchNorm(4)
    found = Attributes(module)
    module(torch.randn(2, 4, 3, 3))
    assert found.complete() is None


class Reading(nn.Module):
    """Reads what it does not change."""

    def __init__(self, value):
        super().__init__()
        self.value, self.linear = value, nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x * torch.as_tensor(self.value).mean()).tanh()


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (1.0, lambda m: setattr(m, "value", 3.0)),
        (torch.ones(4), lambda m: m.value.mul_(3)),
        (np.ones(4, np.float32), lambda m: m.value.fill(3)),
        (torch.ones(300, 300), lambda m: setattr(m, "value", torch.full((2,), 3.0))),
    ],
)
def test_what_changes_after_the_forward_pass_is_as_it_was_for_the_second_run(
    value, change
):
    torch.manual_seed(0)
    plain = Reading(copy.deepcopy(value))
    again = copy.deepcopy(plain)
    found = []
    for module, run in ((plain, plain), (again, Recompute(again).train())):
        loss = run(torch.linspace(-1, 1, 8).view(2, 4)).sum()
        change(module)
        loss.backward()
        found.append({n: p.grad for n, p in module.named_parameters()})
        assert torch.as_tensor(module.value).mean() == 3
    if isinstance(value, torch.Tensor) and value.numel() == 4:
        return  # plain torch refuses nothing here, and its own gradient is of the new value
    assert distance(*found) == 0


def test_a_large_tensor_that_changes_after_the_forward_pass_is_named():
    module = Reading(torch.ones(300, 300))
    loss = Recompute(module).train()(torch.randn(2, 4)).sum()
    module.value.mul_(2)
    with pytest.raises(RuntimeError, match=r"Reading\.value, of shape \[300, 300\]"):
        loss.backward()


def test_an_error_in_the_second_run_leaves_what_the_first_left():
    class Failing(Stateful):
        def forward(self, x):
            y = super().forward(x)
            if torch._C._current_graph_task_id() != -1:
                raise ZeroDivisionError
            return y

    module = Failing("list")
    loss = Recompute(module).train()(torch.randn(2, 4)).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert module.state == [1, 2]


def test_state_of_an_earlier_step_keeps_no_graph():
    class Carrying(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(4, 4), torch.zeros(2, 4)

        def forward(self, x):
            self.last = self.linear(x + self.last.detach())
            return self.last

    module = Recompute(Carrying()).train()
    first = weakref.ref(module(torch.randn(2, 4)))
    kept = [module(torch.randn(2, 4)) for _ in range(3)]
    gc.collect()
    assert first() is None
    sum(y.sum() for y in kept).backward()
