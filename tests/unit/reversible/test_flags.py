"""Backend flags: pinned while a residual function runs, and the user's afterwards."""

import contextlib

import pytest
import torch
from torch import nn

from speechbrain_rev.reversible import replay
from tests.unit.reversible.chains import (
    as_global,
    chain_of,
    hooks_fire_twice,
    loss_of,
    streams,
)

MODES = ["store", "reconstruct", "recompute"]


@contextlib.contextmanager
def user_sets(benchmark, deterministic, precision):
    cudnn, conv = torch.backends.cudnn, torch.backends.cudnn.conv
    before = cudnn.benchmark, cudnn.deterministic, conv.fp32_precision
    cudnn.benchmark, cudnn.deterministic = benchmark, deterministic
    conv.fp32_precision = precision
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, conv.fp32_precision = before


def in_force():
    cudnn = torch.backends.cudnn
    _, (conv, precision) = replay._precision_flags()
    return cudnn.benchmark, cudnn.deterministic, getattr(conv, precision)


class Watched(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.variables = as_global(note=seen.append)
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        self.variables.note(in_force())
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.variables.note(in_force()))
        return self.last(x)


@pytest.fixture
def as_on_cuda(monkeypatch):
    monkeypatch.setattr(replay, "_decided_by_flags", lambda device: True)


@pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="torch before 2.9"
)
@pytest.mark.parametrize("mode", MODES)
def test_both_runs_are_pinned_and_the_user_flags_return(mode, as_on_cuda):
    chain, seen = chain_of("basic", 1, mode=mode).double(), []
    chain.blocks[0].f = Watched(seen).double()
    with user_sets(True, False, "tf32"):
        loss = loss_of(chain(*streams()))
        assert in_force() == (True, False, "tf32")
    with user_sets(True, False, "ieee"):
        loss.backward()
        assert in_force() == (True, False, "ieee")
    again = mode != "store"
    pinned = (False, True, "tf32")
    assert seen[: 1 + again] == [pinned] * (1 + again)
    if again:
        # Gradients are computed under the same flags as what they are gradients of.
        assert seen[2:] == [pinned]


def test_flags_that_overlap_in_any_order_return_to_the_users(as_on_cuda):
    class Owner:
        pass

    cpu = {torch.device("cpu")}
    with user_sets(True, False, "ieee"):
        pinned, owner = replay.Flags.now(cpu), Owner()
        with pinned():
            pinned.hold(owner)
        assert in_force() == (False, True, "ieee")
        with pinned():
            del owner
            assert in_force() == (False, True, "ieee")
        assert in_force() == (True, False, "ieee")


@hooks_fire_twice
def test_flags_return_after_an_error(as_on_cuda):
    chain = chain_of("basic", 1)

    def fail(*_):
        raise ValueError("on purpose")

    chain.blocks[0].g.conv2.register_forward_pre_hook(fail)
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    with pytest.raises(ValueError, match="on purpose"):
        chain(*streams())
    assert before == (
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    )


def test_without_a_cuda_device_no_flag_is_touched():
    chain, seen = chain_of("basic", 1), []
    chain.blocks[0].f = Watched(seen).double()
    before = in_force()
    loss_of(chain(*streams())).backward()
    assert set(seen) == {before}
