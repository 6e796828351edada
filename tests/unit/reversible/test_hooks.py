"""Hooks and tensors that outlive the first run of a function: as in plain torch, or named."""

import copy
import gc

import pytest
import torch
from torch import nn

from speechbrain_rev.reversible import AdditiveCoupling, Recompute, ReversibleChain
from speechbrain_rev.reversible.hooks import WatchingWarning
from speechbrain_rev.reversible.wrapping import recompute_blocks

from .chains import (
    MODES,
    assert_same_bits,
)

KEPT = []


class Keeping(nn.Module):
    """Keeps a map of its own, as an attribute or in a list that others have too."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x):
        y = self.first(x).tanh()
        if self.how == "attribute":
            self.aux = y
        else:
            KEPT.append(y if self.how == "list" else self.first.weight.square().sum())
        return self.second(y)

    def kept(self):
        return self.aux if self.how == "attribute" else KEPT.pop()


@pytest.fixture(autouse=True)
def nothing_kept():
    KEPT.clear()
    yield
    KEPT.clear()


@pytest.mark.parametrize("mode", [*MODES, "module", "block"])
@pytest.mark.parametrize("how", ["attribute", "list", "weights alone"])
def test_what_a_function_keeps_has_its_gradient_or_is_named(how, mode, recwarn):
    torch.manual_seed(0)
    functions = [Keeping(how) for _ in range(2)]
    found = []
    for run_mode in ("store", mode):
        f, other = copy.deepcopy(functions)
        if mode in MODES:
            blocks = [AdditiveCoupling(each, nn.Identity()) for each in (other, f)]
            run = ReversibleChain(blocks, mode=run_mode)
        elif run_mode == "store":
            run = f
        else:
            network = nn.Sequential(f)
            run = Recompute(f) if mode == "module" else recompute_blocks(network, "0")
        for _ in range(2):
            given = [torch.ones(2, 4)] * (1 + (mode in MODES))
            y = run(*given)
            loss = sum(part.sum() for part in (y if mode in MODES else [y]))
            kept = f.kept()
            if run_mode == "reconstruct":
                with pytest.raises(
                    RuntimeError, match=r"Keeping\) is reconstructed: t"
                ):
                    (loss + kept.sum()).backward(retain_graph=True)
            else:
                (loss + 10 * kept.square().mean()).backward()
        found.append({n: p.grad for n, p in f.named_parameters()})
    messages = [str(w.message) for w in recwarn]
    if mode != "reconstruct":
        assert_same_bits(*found)
        assert not messages
        return
    where = "as attribute aux" if how == "attribute" else "by code outside of it"
    assert len(messages) == 2  # one for each function, once
    for i, message in enumerate(messages):
        assert message.startswith(
            f"F of block {i} of the chain (Keeping) is reconstructed: a tensor of its first"
        )
        assert f"is kept {where}" in message
        assert "Use mode='store' or 'recompute' for this block" in message


def test_what_a_hook_caught_in_a_reconstructed_function_is_named():
    blocks = [AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    chain, caught = ReversibleChain(blocks), []
    for _ in range(2):  # hooks may come after the first step
        torch.add(*chain(torch.randn(2, 4), torch.randn(2, 4))).sum().backward()
    chain.blocks[1].f.register_forward_hook(lambda m, i, o: caught.append(o))
    with pytest.warns(WatchingWarning) as warned:
        chain(torch.randn(2, 4), torch.randn(2, 4))
    messages = " ".join(str(w.message) for w in warned)
    assert "forward hooks on the module itself fire in both of its runs" in messages
    assert "made by AddmmBackward0) is kept perhaps by a hook on itself" in messages


@pytest.mark.parametrize("operation", [torch.neg, torch.exp])
def test_a_loss_on_it_is_refused_whatever_was_saved(operation):
    caught = []
    chain = ReversibleChain([AdditiveCoupling(nn.Tanh(), nn.Tanh())])
    chain.blocks[0].f.forward = lambda x: (caught.append(operation(x)), x.tanh())[1]
    with pytest.warns(WatchingWarning, match=r"Tanh\) is reconstructed: a tensor"):
        chain(torch.randn(2, 4), torch.randn(2, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="Use mode='store' or 'recompute'"):
        caught[0].sum().backward()


@pytest.mark.slow
def test_a_graph_that_holds_itself_is_not_built_again(monkeypatch, recwarn):
    class Packing(nn.Module):
        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                return x.exp()

    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    made = []
    chain = ReversibleChain([AdditiveCoupling(Packing(), nn.Tanh())])
    for _ in range(3):
        x = torch.zeros(2, 4, requires_grad=True)
        torch.add(*chain(x, torch.zeros(2, 4))).sum().backward()
        gc.collect()
        kinds = [type(o).__name__ for o in gc.get_objects()]
        made.append(kinds.count("_SourceBackward"))
    assert made[2] == made[1] == made[0]
    assert not recwarn


@pytest.mark.parametrize(
    ("whole", "named"),
    [(True, "the module itself, 0, 1, 1.0, 1.1"), (False, "0, 1, 1.0, 1.1")],
)
def test_hooks_that_fire_twice_are_named_once(whole, named, recwarn):
    seen, uncopied = [], (i for i in range(3))
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    for m in module.modules():
        m.register_forward_hook(lambda *_: seen.append(uncopied))
    network = nn.Sequential(Recompute(module) if whole else module)
    if not whole:
        recompute_blocks(network, "0")
    for _ in range(2):
        network(torch.randn(2, 4, requires_grad=True)).sum().backward()
    # One on the block itself is around both runs.
    assert len(seen) == 2 * (10 if whole else 9)
    (warning,) = recwarn
    expected = f"A module is recomputed (Sequential): forward hooks on {named} fire in"
    assert str(warning.message).startswith(expected)


def test_global_hooks_are_named():
    seen = []
    everywhere = nn.modules.module.register_module_forward_hook
    handle = everywhere(lambda m, i, o: seen.append(type(m)))
    try:
        with pytest.warns(WatchingWarning, match=r"all modules \(global hooks\)"):
            y = Recompute(nn.Tanh())(torch.ones(2, requires_grad=True))
        y.sum().backward()
    finally:
        handle.remove()
    assert seen == [nn.Tanh, Recompute, nn.Tanh]
