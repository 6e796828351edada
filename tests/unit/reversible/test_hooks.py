"""Hooks and tensors that outlive the first run of a function: as in plain torch, or named."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from speechbrain_rev.reversible import AdditiveCoupling, Recompute, ReversibleChain
from speechbrain_rev.reversible.hooks import WatchingWarning
from speechbrain_rev.reversible.wrapping import recompute_blocks

from .chains import MODES, assert_same_bits, module_with

KEPT = []


def layers():
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


@module_with(layers=layers)
def keeping_an_attribute(self, x):
    self.aux = self.layers[0](x).tanh()
    return self.layers[1](self.aux)


@module_with(layers=layers)
def keeping_in_a_list(self, x):
    """Keep a map in a list that others have, too."""
    KEPT.append(self.layers[0](x).tanh())
    return self.layers[1](KEPT[-1])


@module_with(layers=layers)
def keeping_of_weights_alone(self, x):
    KEPT.append(self.layers[0].weight.square().sum())
    return self.layers[1](self.layers[0](x).tanh())


@pytest.fixture(autouse=True)
def nothing_kept():
    KEPT.clear()
    yield
    KEPT.clear()


@pytest.mark.parametrize("run", [*MODES, Recompute, lambda f: recompute_blocks(f, "0")])
@pytest.mark.parametrize(
    "make", [keeping_an_attribute, keeping_in_a_list, keeping_of_weights_alone]
)
def test_what_a_function_keeps_has_its_gradient_or_is_refused(make, run, recwarn):
    torch.manual_seed(0)
    functions, mode, name = [make(), make()], run, make.__name__

    def trained(run):
        """Take two steps with what the last function kept in the loss."""
        f, other = copy.deepcopy(functions)
        if mode in MODES:
            blocks = [AdditiveCoupling(each, nn.Identity()) for each in (other, f)]
            module = ReversibleChain(blocks, mode=run)
        else:
            module = run(nn.Sequential(f))
        for _ in range(2):
            outputs = module(*[torch.ones(2, 4)] * (1 + (mode in MODES)))
            kept = f.aux if name == "KeepingAnAttribute" else KEPT.pop()
            loss = sum(y.sum() for y in outputs)
            if run == "reconstruct":
                says = (
                    rf"F of block \d of the chain \({name}\) is reconstructed: tensors"
                )
                with pytest.raises(RuntimeError, match=f"{says} that were made inside"):
                    (loss + kept.sum()).backward(retain_graph=True)
            else:
                (loss + 10 * kept.square().mean()).backward()
        return {n: p.grad for n, p in f.named_parameters()}

    expected = trained("store" if mode in MODES else lambda module: module)
    grads = trained(run)
    if mode != "reconstruct":
        assert_same_bits(grads, expected)
    assert not recwarn


def test_what_a_hook_caught_in_a_reconstructed_function_is_refused():
    blocks = [AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    chain, caught = ReversibleChain(blocks), []
    for _ in range(2):  # hooks may come after the first step
        torch.add(*chain(torch.randn(2, 4), torch.randn(2, 4))).sum().backward()
    chain.blocks[1].f.register_forward_hook(lambda m, i, o: caught.append(o))
    with pytest.warns(WatchingWarning) as warned:
        chain(torch.randn(2, 4), torch.randn(2, 4))
    messages = " ".join(str(w.message) for w in warned)
    assert "forward hooks on the module itself fire in both of its runs" in messages
    with pytest.raises(RuntimeError, match="Use mode='store' or 'recompute'"):
        caught[0].sum().backward()


@pytest.mark.parametrize("operation", [torch.neg, torch.exp])
def test_a_loss_on_it_is_refused_whatever_was_saved(operation):
    caught = []
    chain = ReversibleChain([AdditiveCoupling(nn.Tanh(), nn.Tanh())])
    chain.blocks[0].f.forward = lambda x: (caught.append(operation(x)), x.tanh())[1]
    chain(torch.randn(2, 4), torch.randn(2, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="Use mode='store' or 'recompute'"):
        caught[0].sum().backward()


def test_a_module_that_keeps_a_map_of_its_first_run_dies_with_its_chain():
    @module_with()
    def keeping(self, x):
        self.kept = x.exp()
        return self.kept * 1.0

    chain = ReversibleChain([AdditiveCoupling(keeping(), nn.Tanh())])
    x = torch.zeros(2, 4, requires_grad=True)
    torch.add(*chain(x, torch.zeros(2, 4, requires_grad=True))).sum().backward()
    module = weakref.ref(chain.blocks[0].f)
    del chain
    gc.collect()
    assert module() is None


def test_graphs_that_hold_themselves_are_few():
    @module_with()
    def packing(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return x.exp()

    made = []
    chain = ReversibleChain([AdditiveCoupling(packing(), nn.Tanh())])
    for _ in range(12):
        x = torch.zeros(2, 4, requires_grad=True)
        torch.add(*chain(x, torch.zeros(2, 4, requires_grad=True))).sum().backward()
        gc.collect()
        kinds = [type(o).__name__ for o in gc.get_objects()]
        made.append(kinds.count("_SourceBackward"))
    assert made[0] < made[7] == made[-1] == made[0] + 7


@pytest.mark.parametrize("streams", ["exact", "float"])
def test_what_somebody_keeps_of_many_runs_is_not_overwritten(streams):
    kept = []
    chain = ReversibleChain(
        [AdditiveCoupling(nn.Tanh(), nn.Tanh()) for _ in range(3)], streams=streams
    )
    for block in chain.blocks:
        block.g.forward = lambda x: (kept.append((x, x.clone())), x.tanh())[1]
    for _ in range(12):
        x1, x2 = (torch.randn(2, 4, requires_grad=True) for _ in range(2))
        torch.add(*chain(x1, x2)).sum().backward()
    assert len(kept) == 12 * 3 * 2
    for x, copied in kept:
        assert torch.equal(x, copied)


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
