"""Backend flags: pinned while a residual function runs, and the user's afterwards."""

import contextlib

import pytest
import torch
from torch import nn

from speechbrain_rev.modes import Mode
from speechbrain_rev.reversible import cudnn_flags
from speechbrain_rev.reversible import flags as backend_flags

from .chains import (
    MODES,
    as_global,
    chain_of,
    loss_of,
    module_with,
    streams,
)


def write(*flags):
    cudnn = torch.backends.cudnn
    cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision = flags


def in_force():
    cudnn = torch.backends.cudnn
    return cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision


@contextlib.contextmanager
def user_sets(precision):
    """Set benchmark mode and the precision of convolutions for a while."""
    before, flags = in_force(), (True, False, precision)
    write(*flags)
    try:
        yield
        assert in_force() == flags
    finally:
        write(*before)


@module_with(first=lambda: nn.Linear(12, 12), last=lambda: nn.Linear(12, 12))
def watched(self, x):
    """Note the flags of each run and of the gradient computed in it."""
    self.variables.note()
    x = self.first(x)
    if x.requires_grad:
        x.register_hook(lambda _: self.variables.note())
    return self.last(x)


@pytest.fixture
def as_on_cuda(monkeypatch):
    monkeypatch.setattr(backend_flags, "_decided_by_flags", lambda device: True)


def chain_that_is_watched(mode="reconstruct"):
    chain, seen = chain_of("basic", 1, mode=mode), []
    chain.blocks[0].f = watched().double()
    chain.blocks[0].f.variables = as_global(note=lambda: seen.append(in_force()))
    return chain, seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("as_on_cuda")
def test_both_runs_are_pinned_and_the_users_flags_return(mode):
    chain, seen = chain_that_is_watched(mode)
    with user_sets("tf32"):
        loss = loss_of(chain(*streams()))
    with user_sets("ieee"):
        loss.backward()
    pinned, again = (False, True, "tf32"), Mode(mode).spec.runs_twice
    assert seen[: 1 + again] == [pinned] * (1 + again)
    # Gradients are computed under the same flags as what they are gradients of.
    assert seen[1 + again :] == [pinned]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("as_on_cuda")
def test_all_runs_take_the_flags_of_cudnn_that_were_chosen(mode):
    chain, seen = chain_that_is_watched(mode)
    with user_sets("ieee"):
        with cudnn_flags(deterministic=False):
            loss = loss_of(chain(*streams()))
        loss.backward()
        # What comes later is pinned as ever.
        assert backend_flags.Flags.now({torch.device("cpu")}).deterministic
    assert seen == [(True, False, "ieee")] * (2 + Mode(mode).spec.runs_twice)


@pytest.mark.usefixtures("as_on_cuda")
def test_what_a_second_run_runs_first_has_its_flags():
    cpu = {torch.device("cpu")}
    with cudnn_flags(deterministic=False):
        flags = backend_flags.Flags.now(cpu)
    with user_sets("ieee"), flags():
        assert backend_flags.Flags.now(cpu) == flags
        assert in_force() == (True, False, flags.precision[-1])


def test_flags_of_cudnn_are_true_or_false():
    message = "deterministic is 'false', but takes True or False"
    with pytest.raises(ValueError, match=message), cudnn_flags(deterministic="false"):
        pass


@pytest.mark.usefixtures("as_on_cuda")
def test_flags_that_overlap_in_any_order_return_to_the_users():
    class Owner:
        pass

    with user_sets("ieee"):
        pinned, owner = backend_flags.Flags.now({torch.device("cpu")}), Owner()
        with pinned():
            pinned.hold(owner)
        assert in_force() == (False, True, "ieee")
        with pinned():
            del owner
            assert in_force() == (False, True, "ieee")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.usefixtures("as_on_cuda")
def test_flags_return_after_an_error(backward, mode):
    chain, seen = chain_that_is_watched(mode)

    def fail():
        seen.append(1)
        if len(seen) > backward:
            raise ZeroDivisionError

    chain.blocks[0].f.variables = as_global(note=fail)
    with user_sets("ieee"), pytest.raises(ZeroDivisionError):
        loss_of(chain(*streams())).backward()


def test_without_a_cuda_device_no_flag_is_touched():
    chain, seen = chain_that_is_watched()
    with user_sets("ieee"):
        loss_of(chain(*streams())).backward()
    assert set(seen) == {(True, False, "ieee")}
