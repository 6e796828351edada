"""Hooks and tensors that outlive the first run of a function: as in plain torch, or named."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from speechbrain_rev.reversible import AdditiveCoupling, Recompute, ReversibleChain
from speechbrain_rev.reversible.hooks import WatchingWarning
from speechbrain_rev.reversible.wrapping import recompute_blocks

from .chains import CHANNELS, RESIDUALS, as_global, distance, streams

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
        elif self.how == "list":
            KEPT.append(y)
        elif self.how == "weights alone":
            KEPT.append(self.first.weight.square().sum())
        return self.second(y)

    def kept(self):
        return self.aux if self.how == "attribute" else KEPT.pop()


@pytest.fixture(autouse=True)
def nothing_kept():
    KEPT.clear()
    yield
    KEPT.clear()


def with_aux(module, run, x):
    """Gradients where a loss is on what the module kept, too."""
    out = run(x)
    (out.sum() + 10 * module.kept().square().mean()).backward()
    return {"x": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


@pytest.mark.parametrize("how", ["attribute", "list", "weights alone"])
def test_what_a_recomputed_module_keeps_has_the_plain_gradient(how):
    torch.manual_seed(0)
    plain = Keeping(how)
    again, third = copy.deepcopy(plain), copy.deepcopy(plain)
    network = recompute_blocks(nn.Sequential(third), "0")
    found = [
        with_aux(module, run, torch.ones(3, 4, requires_grad=True))
        for module, run in (
            (plain, plain), (again, Recompute(again).train()), (third, network),
        )
    ]  # fmt: skip
    assert distance(found[1], found[0]) == 0
    assert distance(found[2], found[0]) == 0


@pytest.mark.parametrize("mode", ["store", "recompute", "reconstruct"])
@pytest.mark.parametrize("how", ["attribute", "list", "weights alone"])
def test_what_a_residual_function_keeps_has_its_gradient_or_is_named(
    how, mode, recwarn
):
    torch.manual_seed(0)
    chain = ReversibleChain(
        [AdditiveCoupling(Keeping(how), nn.Linear(4, 4)) for _ in range(2)],
        mode="store",
    )
    again = copy.deepcopy(chain)
    again.set_mode(mode)
    found = []
    for module in (chain, again):
        for _ in range(2):
            y1, y2 = module(torch.ones(2, 4), torch.zeros(2, 4))
            kept = module.blocks[1].f.kept()
            KEPT.clear()
            loss = y1.sum() + y2.sum()
            if mode == "reconstruct" and module is again:
                with pytest.raises(
                    RuntimeError, match=r"Keeping\) is reconstructed: tensors"
                ):
                    (loss + kept.sum()).backward(retain_graph=True)
                module.zero_grad()
            else:
                loss = loss + 10 * kept.square().mean()
            loss.backward()
        found.append({n: p.grad for n, p in module.named_parameters()})
    if mode != "reconstruct":
        assert distance(*found) == 0
        assert not recwarn
        return
    where = "attribute aux" if how == "attribute" else "by code outside of it"
    messages = [str(w.message) for w in recwarn]
    assert len(messages) == 2  # one for each function, once
    for i, message in enumerate(messages):
        assert message.startswith(
            f"F of block {i} of the chain (Keeping) is reconstructed: a tensor of its first"
        )
        assert f"is kept as {where}" in message or f"is kept {where}" in message
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
        y1, y2 = chain(x, torch.zeros(2, 4))
        (y1 + y2).sum().backward()
        gc.collect()
        made.append(
            sum(1 for o in gc.get_objects() if type(o).__name__ == "_SourceBackward")
        )
    assert made[2] == made[1] == made[0]
    assert not recwarn


@pytest.mark.parametrize("operation", [torch.neg, torch.exp])
def test_a_loss_on_it_is_refused_whatever_was_saved(operation):
    caught = []
    chain = ReversibleChain([AdditiveCoupling(nn.Tanh(), nn.Tanh())])
    chain.blocks[0].f.forward = lambda x: (caught.append(operation(x)), x.tanh())[1]
    with pytest.warns(WatchingWarning, match=r"Tanh\) is reconstructed: a tensor"):
        chain(torch.randn(2, 4), torch.randn(2, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="Use mode='store' or 'recompute'"):
        caught[0].sum().backward()


@pytest.mark.parametrize("kind", RESIDUALS)
@pytest.mark.parametrize("mode", ["recompute", "reconstruct"])
def test_functions_that_keep_nothing_are_not_named(kind, mode, recwarn):
    functions = [RESIDUALS[kind](CHANNELS) for _ in range(2)]
    functions.append(parametrizations.weight_norm(nn.Conv2d(CHANNELS, CHANNELS, 1)))
    functions.append(parametrizations.spectral_norm(nn.Conv2d(CHANNELS, CHANNELS, 1)))
    chain = ReversibleChain(
        [AdditiveCoupling(*functions[:2]), AdditiveCoupling(*functions[2:])],
        mode=mode,
    )
    for _ in range(2):
        torch.add(*chain(*streams(torch.float32))).sum().backward()
    assert not recwarn


def counting(module, kind, counts):
    """Count, by name, how often hooks of a kind fire on a module and those within it."""
    for name, m in module.named_modules():
        if isinstance(m, nn.ModuleList):
            continue
        counts[name] = 0

        def count(name=name):
            counts[name] += 1

        variables = as_global(count=count)

        def hook(*_, variables=variables):
            variables.count()

        def on_output(m, inputs, y, hook=hook):
            if y.requires_grad:
                y.register_hook(hook)

        {
            "forward": m.register_forward_hook,
            "before": m.register_forward_pre_hook,
            "backward": m.register_full_backward_hook,
            "before backward": m.register_full_backward_pre_hook,
            "tensor": m.register_forward_hook,
        }[kind](on_output if kind == "tensor" else hook)


@pytest.mark.parametrize(
    "kind", ["forward", "before", "backward", "before backward", "tensor"]
)
@pytest.mark.parametrize("recomputed", ["Recompute", "block"])
def test_hooks_in_a_recomputed_module_fire_once_or_are_named(kind, recomputed, recwarn):
    counts = {}
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    counting(module, kind, counts)
    network = nn.Sequential(module)
    if recomputed == "block":
        recompute_blocks(network, "0")
    else:
        network = nn.Sequential(Recompute(module))
    for _ in range(2):
        network(torch.randn(2, 4, requires_grad=True)).sum().backward()
    outside = {} if recomputed == "Recompute" else {"": 2}
    within = 4 if kind in ("forward", "before") else 2
    assert counts == dict.fromkeys(counts, within) | outside
    messages = [str(w.message) for w in recwarn]
    if kind in ("forward", "before", "tensor"):
        named = "0, 1, 1.0, 1.1" if outside else "the module itself, 0, 1, 1.0, 1.1"
        assert messages[0].startswith(
            f"A module is recomputed (Sequential): forward hooks on {named} fire in both of its runs"
        )
        assert len(messages) == 1
    else:
        assert not messages


def test_global_hooks_are_named():
    seen = []
    everywhere = nn.modules.module.register_module_forward_hook
    handle = everywhere(lambda m, i, o: seen.append(type(m)))
    try:
        module = Recompute(nn.Tanh()).train()
        with pytest.warns(WatchingWarning, match=r"all modules \(global hooks\)"):
            y = module(torch.ones(2, requires_grad=True))
        y.sum().backward()
    finally:
        handle.remove()
    assert seen == [nn.Tanh, Recompute, nn.Tanh]
