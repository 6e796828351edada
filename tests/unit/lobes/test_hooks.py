"""Hooks on the modules of encoders fire as often as in plain torch, or are named."""

import contextlib
import copy
import warnings
from collections import Counter

import pytest
import torch
from torch import nn

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.reversible import AdditiveCoupling
from speechbrain_rev.reversible.hooks import WatchingWarning

TINY = {
    "n_mels": 24,
    "embedding_dim": 8,
    "widths": (8, 8, 16, 16),
    "blocks": (1, 1, 1, 1),
}
KINDS = [
    "resnet34", "resnet101", "df_resnet56", "revnet46", "revnet57", "revnet140",
    "revnet155", "df_revnet66", "df_revnet89",
]  # fmt: skip
#: Of a family each, and of both types.
FEW = ["resnet34", "revnet46", "revnet140", "df_revnet89"]
BOTH_RUNS = "fire in both of its runs"


def encoders(names):
    for name in names:
        modes = ["store", "recompute"] + ["reconstruct"] * ("rev" in name)
        yield from ((name, mode) for mode in modes)


def watch(module, name, fired):
    """Count in ``fired`` how often hooks of each kind fire on a module."""

    def noted(kind):
        return lambda *_: fired.update([(kind, name)])

    def on_output(m, inputs, y):
        y = y[0] if isinstance(y, tuple) else y
        if y.requires_grad:
            y.register_hook(noted("tensor"))

    module.register_forward_pre_hook(noted("before"))
    module.register_forward_hook(noted("forward"))
    module.register_forward_hook(on_output)
    module.register_full_backward_pre_hook(noted("before backward"))
    module.register_full_backward_hook(noted("backward"))


@contextlib.contextmanager
def watched_everywhere(encoder, fired):
    """Count with hooks on all modules there are."""
    names = {id(m): name for name, m in encoder.named_modules()}
    everywhere = nn.modules.module

    def noted(kind):
        def note(m, *_):
            if id(m) in names:
                fired.update([(kind, names[id(m)])])

        return note

    with contextlib.ExitStack() as hooks:
        for kind, register in (
            ("before", everywhere.register_module_forward_pre_hook),
            ("forward", everywhere.register_module_forward_hook),
            ("before backward", everywhere.register_module_full_backward_pre_hook),
            ("backward", everywhere.register_module_full_backward_hook),
        ):
            hooks.callback(register(noted(kind)).remove)
        yield


def check(name, mode, training, lengths, how):
    torch.manual_seed(0)
    encoder = build_encoder(name, mode=mode, **TINY).train(training)
    called = {
        n: m for n, m in encoder.named_modules() if not isinstance(m, nn.ModuleList)
    }
    fired = Counter()
    x = torch.randn(2, 44, 24, requires_grad=True)
    relative = torch.tensor([1.0, 0.6]) if lengths else None
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if how == "everywhere":
            stack.enter_context(watched_everywhere(encoder, fired))
        else:
            for each, module in called.items():
                watch(module, each, fired)
        encoder(x, relative).square().sum().backward()
    messages = [str(w.message) for w in told]
    kinds = ["before", "forward", "before backward", "backward"]
    kinds += ["tensor"] * (how != "everywhere")
    for each, module in called.items():
        counts = {kind: fired[kind, each] for kind in kinds}
        if isinstance(module, AdditiveCoupling) and training:
            assert counts == dict.fromkeys(kinds, 0)
            assert any("Hooks on a coupling do not fire" in m for m in messages)
            continue
        twice = counts["forward"] == 2
        runs = 2 if twice else 1
        assert counts == dict.fromkeys(kinds, 1) | {"before": runs, "forward": runs}, (
            each
        )
        if twice:
            assert training
            assert mode != "store"
            inner = "global" if how == "everywhere" else each.rsplit(".", 1)[-1]
            assert any(BOTH_RUNS in m for m in messages), inner
    if not training or mode == "store":
        assert not any(BOTH_RUNS in m for m in messages)


@pytest.mark.parametrize("how", ["each", "everywhere"])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("name", "mode"), encoders(FEW))
def test_hooks_fire_as_often_as_in_plain_torch_or_are_named(
    name, mode, training, lengths, how
):
    check(name, mode, training, lengths, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["each", "everywhere"])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("name", "mode"), encoders([name for name in KINDS if name not in FEW])
)
def test_hooks_of_all_families_fire_as_often_or_are_named(
    name, mode, training, lengths, how
):
    check(name, mode, training, lengths, how)


@pytest.mark.filterwarnings("ignore:Hooks on a coupling")
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(("name", "mode"), encoders(FEW))
def test_hooks_on_a_stage_see_maps_and_change_no_gradient(name, mode, lengths):
    torch.manual_seed(0)
    encoder = build_encoder(name, mode=mode, **TINY)
    watched = copy.deepcopy(encoder)
    maps = []
    for stage in watched.stages:
        stage.register_forward_hook(lambda m, i, o: maps.append(o))
        stage.register_full_backward_hook(lambda m, i, o: None)
    x = torch.randn(2, 44, 24)
    relative = torch.tensor([1.0, 0.6]) if lengths else None
    for each in (encoder, watched):
        each(x, relative).square().sum().backward()
    assert [m.shape[1] for m in maps] == widths_of(watched)
    named = dict(watched.named_parameters())
    for key, p in encoder.named_parameters():
        # What a transition reads is then one tensor, convolved in one piece.
        torch.testing.assert_close(named[key].grad, p.grad, rtol=1e-3, atol=1e-4)
    # A loss on a map trains what is before it.
    watched.zero_grad()
    maps.clear()
    watched(x, relative)
    maps[0].square().sum().backward()
    assert watched.stem.convs[0].weight.grad.abs().sum() > 0


def widths_of(encoder):
    expansion = 4 if encoder.architecture.block == "bottleneck" else 1
    return [width * expansion for width in encoder.architecture.widths]


@pytest.mark.parametrize("name", ["revnet46", "revnet140", "df_revnet89"])
@pytest.mark.parametrize("layer", ["conv1", "conv2", "norm"])
def test_a_loss_on_a_map_caught_in_a_reconstructed_block_is_named(name, layer):
    encoder = build_encoder(name, **TINY)
    function = encoder.stages[1].chain.blocks[0].f
    caught = []
    function.get_submodule(layer).register_forward_hook(
        lambda m, i, o: caught.append(o)
    )
    with pytest.warns(WatchingWarning, match="It has no gradient") as told:
        encoder(torch.randn(2, 44, 24))
    assert f"a hook on {layer}" in " ".join(str(w.message) for w in told)


@pytest.mark.filterwarnings("ignore::speechbrain_rev.reversible.hooks.WatchingWarning")
@pytest.mark.parametrize("name", ["resnet34", "revnet46", "revnet140", "df_revnet89"])
def test_a_loss_on_a_map_of_a_recomputed_block_trains(name):
    torch.manual_seed(0)
    encoder = build_encoder(name, mode="store", **TINY)
    x, found = torch.randn(2, 44, 24), []
    for mode in ("store", "recompute"):
        each = copy.deepcopy(encoder)
        each.set_mode(mode)
        convs = [m for m in each.modules() if isinstance(m, nn.Conv2d)]
        caught = []
        for conv in convs:
            conv.register_forward_hook(lambda m, i, o, c=caught: c.append(o))
        (
            each(x).sum() + sum(y.square().mean() for y in caught[: len(convs)])
        ).backward()
        found.append({n: p.grad for n, p in each.named_parameters()})
    for key, grad in found[0].items():
        assert torch.equal(found[1][key], grad), key
