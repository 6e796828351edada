"""Hooks on the modules of encoders fire as often as in plain torch, or are named."""

import copy
import warnings
from collections import Counter

import pytest
import torch
from torch import nn

from speechbrain_rev.reversible import AdditiveCoupling
from tests.unit.lobes.encoders import (
    CHUNKED,
    FEW,
    IN_MODES,
    LENGTHS,
    NARROW,
    but_slow,
    grads_of,
    narrow,
    tiny,
)

BOTH_RUNS = "fire in both of its runs"
FEW_IN_MODES = [case for case in IN_MODES if case[0] in FEW]


KINDS = ("before", "forward", "before backward", "backward", "tensor")


def watch(modules):
    """Count how often hooks of each kind fire on each module."""
    fired = Counter()

    def noted(kind, name):
        return lambda *_: fired.update([(kind, name)])

    def on_output(name):
        def hook(m, inputs, y):
            y = y[0] if isinstance(y, tuple) else y
            if y.requires_grad:
                y.register_hook(noted("tensor", name))

        return hook

    for name, module in modules.items():
        module.register_forward_pre_hook(noted("before", name))
        module.register_forward_hook(noted("forward", name))
        module.register_forward_hook(on_output(name))
        module.register_full_backward_pre_hook(noted("before backward", name))
        module.register_full_backward_hook(noted("backward", name))
    return fired


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("name", "mode"), but_slow(IN_MODES, *FEW_IN_MODES))
def test_hooks_fire_as_often_as_in_plain_torch_or_are_named(name, mode, training):
    encoder = tiny(name, mode=mode, **NARROW).train(training)
    modules = dict(encoder.named_modules())
    modules = {n: m for n, m in modules.items() if type(m) is not nn.ModuleList}
    fired = watch(modules)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        y = encoder(narrow().requires_grad_(), LENGTHS[:2] if training else None)
        y.square().sum().backward()
    messages = [str(w.message) for w in warned]
    for each, module in modules.items():
        counts = {kind: fired[kind, each] for kind in KINDS}
        if isinstance(module, AdditiveCoupling) and training:
            assert counts == dict.fromkeys(KINDS, 0)
            assert any("Hooks on a coupling do not fire" in m for m in messages)
            continue
        runs = 2 if counts["forward"] == 2 else 1
        expected = dict.fromkeys(KINDS, 1) | {"before": runs, "forward": runs}
        assert counts == expected, each
        if runs == 2:
            assert training
            assert mode != "store"
            assert any(BOTH_RUNS in m for m in messages)
    if not training or mode == "store":
        assert not any(BOTH_RUNS in m for m in messages)


@pytest.mark.filterwarnings("ignore:Hooks on a coupling")
@pytest.mark.parametrize(("name", "mode"), FEW_IN_MODES)
def test_hooks_on_a_stage_see_maps_and_change_no_gradient(name, mode):
    encoder = tiny(name, mode=mode, **NARROW)
    watched, maps = copy.deepcopy(encoder), []
    for stage in watched.stages:
        stage.register_forward_hook(lambda m, i, o: maps.append(o))
        stage.register_full_backward_hook(lambda m, i, o: None)
    for each in (encoder, watched):
        each(narrow(), LENGTHS[:2]).square().sum().backward()
    row = encoder.architecture
    expansion = 4 if row.block == "bottleneck" else 1
    assert [m.shape[1] for m in maps] == [width * expansion for width in row.widths]
    # What a transition reads is then one tensor, convolved in one piece.
    grads, expected = grads_of(watched), grads_of(encoder)
    torch.testing.assert_close(grads, expected, rtol=1e-3, atol=1e-4)
    # A loss on a map trains what is before it.
    watched.zero_grad()
    maps.clear()
    watched(narrow())
    maps[0].square().sum().backward()
    assert watched.stem.convs[0].weight.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*fire in both of its runs")
@pytest.mark.parametrize("training", [False, True])
def test_hooks_of_a_shortcut_fire(training):
    encoder, seen = tiny("revnet46", **CHUNKED).train(training), []
    encoder.stages[1].entry.shortcut.register_forward_hook(lambda *_: seen.append(1))
    encoder(narrow(2, 24))
    assert seen == [1]
