"""What cannot be counted without computing is counted in real steps, or said."""

import copy
import itertools
import weakref

import pytest
import torch
from torch import nn

from speechbrain_rev.planner import Infeasible, plan, profiling
from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.planner.network import as_network
from speechbrain_rev.planner.probe import run_once
from speechbrain_rev.planner.step import Step, step_of
from tests.unit.planner.networks import (
    SCALARS,
    encoder,
    on_meta,
    peak_of,
    plain,
    profile_module,
)

WIDTH = 32
X = torch.randn(32, 40, WIDTH)


def layers():
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    )


class Row(nn.Module):
    """Blocks in a row, of which each may return more than the next one takes."""

    def __init__(self, *blocks):
        super().__init__()
        self.b = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.b:
            x = self.first(block(x))
        return x

    def first(self, found):
        return found[0] if isinstance(found, tuple) else found


class WithMore(nn.Module):
    """Returns what is larger than what the next block takes."""

    def __init__(self, hidden):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        h = self.into(x).relu()
        return self.out(h), h


class Holding(Row):
    """Has what a block returned by a name of its own until the next one has run."""

    def forward(self, x):
        for block in self.b:
            x, _more = block(x)
        return x


class Second(Row):
    """Goes on with the second of what a block returns."""

    def first(self, found):
        return found[1]


class Aside(nn.Module):
    """Returns what is not used, and then what is."""

    def __init__(self):
        super().__init__()
        self.inner, self.aside = layers(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.aside(x), self.inner(x)


class Autocast(Row):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Attribute(Row):
    """Has a tensor that is no buffer."""

    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.scale = torch.ones(WIDTH)

    def forward(self, x):
        return super().forward(x * self.scale)


class Looking(Row):
    """Goes on by what it finds."""

    def forward(self, x):
        return super().forward(x if x.abs().sum().item() else x + 1)


class FirstStep(Row):
    """Makes what it needs in its first step."""

    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.zeros(10**5, device=x.device)
        return super().forward(x)


REAL = "counted in steps on cpu"
META = "counted on meta tensors"
NETWORKS = {
    "more": (lambda: Holding(*(WithMore(n) for n in (256, 64, 512))), META),
    "first_largest": (lambda: Holding(*(WithMore(n) for n in (512, 16, 16))), META),
    "second": (lambda: Second(*(Aside() for _ in range(3))), META),
    "lstm": (lambda: Row(*(lstm() for _ in range(3))), REAL),
    "autocast": (lambda: Autocast(*(layers() for _ in range(3))), REAL),
    "attribute": (lambda: Attribute(*(layers() for _ in range(3))), REAL),
    "item": (lambda: Looking(*(layers() for _ in range(3))), REAL),
    "first_step": (lambda: FirstStep(*(layers() for _ in range(3))), META),
}


def lstm():
    return nn.LSTM(WIDTH, WIDTH, batch_first=True)


def peak_after_a_step(module, modes):
    """What a real step allocates, after one that is not counted."""
    trial = step_of(module, X, blocks=["b.*"]).trial()
    trial.network.set_mode(modes)
    trial.run()
    with LiveBytes() as meter:
        trial.run()
    return meter.peak


@pytest.mark.parametrize("name", NETWORKS)
def test_real_steps_take_what_was_predicted_in_any_modes(name):
    make, how = NETWORKS[name]
    torch.manual_seed(0)
    profile = profile_module(make(), X, blocks=["b.*"])
    assert profile.about["bytes"].startswith(how)
    names = [block.name for block in profile.blocks]
    for chosen in itertools.product(("store", "recompute"), repeat=3):
        modes = dict(zip(names, chosen, strict=True))
        peak = peak_after_a_step(make(), modes)
        assert abs(profile.peak_bytes(modes) - peak) <= 0.02 * peak, modes


@pytest.mark.parametrize("name", NETWORKS)
def test_plans_are_within_their_budget_in_real_steps(name):
    make, _ = NETWORKS[name]
    torch.manual_seed(0)
    peaks = {
        chosen: peak_after_a_step(make(), dict.fromkeys(("b.0", "b.1", "b.2"), chosen))
        for chosen in ("store", "recompute")
    }
    budget = sum(peaks.values()) // 2
    found = plan(make(), X, budget, blocks=["b.*"])
    assert peak_after_a_step(make(), found.modes) == found.measured_bytes <= budget


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("autocast", "autocast, of which meta"),
        ("attribute", "meta"),
        ("item", r"item\(\)"),
    ],
)
def test_what_needs_numbers_is_not_counted_without(name, what):
    module = NETWORKS[name][0]()
    with pytest.raises(
        ValueError, match=rf"does not run on meta.*{what}.*measure=True"
    ):
        plan(module, X, 10**9, blocks=["b.*"], measure=False)


def test_recurrent_layers_are_warned_of_where_nothing_is_computed():
    module = NETWORKS["lstm"][0]()
    with pytest.warns(UserWarning, match=r"recurrent layers \(b\.0, b\.1, b\.2\)"):
        plan(module, X[:, :4], 10**9, blocks=["b.*"], measure=False)


@pytest.mark.parametrize("measure", [True, False])
def test_first_blocks_that_are_not_trained_store(measure):
    module = Row(*(layers() for _ in range(4)))
    module.b[:2].requires_grad_(False)
    profile = profile_module(module, X, blocks=["b.*"], measure=measure)
    assert [block.modes for block in profile.blocks] == [
        ["store"],
        ["store"],
        ["store", "recompute"],
        ["store", "recompute"],
    ]
    light, full = (profile.uniform(m) for m in ("recompute", "store"))
    assert list(light.values()) == ["store", "store", "recompute", "recompute"]
    budget = (profile.peak_bytes(light) + profile.peak_bytes(full)) // 2
    found = plan(module, X, budget, blocks=["b.*"], measure=measure)
    assert found.measured_bytes <= budget
    assert list(found.modes.values())[:2] == ["store", "store"]


def test_an_encoder_whose_first_stages_are_frozen_is_planned():
    module = encoder("revnet57", blocks=(1, 2, 1, 1), chunk=None)
    module.stem.requires_grad_(False)
    module.stages[0].requires_grad_(False)
    x = torch.randn(2, 48, 80)
    stored, step = on_meta(copy.deepcopy(module), x)
    stored.set_mode("store")
    budget = peak_of(step) * 7 // 8
    tight = plan(module, x, budget, measure=False)
    assert tight.measured_bytes <= budget
    assert tight.modes["stem"] == "store"


@pytest.mark.parametrize("measure", [True, False])
def test_a_network_of_which_nothing_is_trained_is_refused(measure):
    module = plain(2).requires_grad_(False)
    with pytest.raises(ValueError, match="depends on nothing that is trained"):
        plan(module, torch.randn(4, 64), 10**9, blocks=["?"], measure=measure)


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("loss", [lambda y: y, lambda y: 3.0])
def test_what_is_no_loss_is_refused(measure, loss):
    x = torch.randn(4, 64)
    with pytest.raises(ValueError, match=r"The loss is .* a tensor of one number"):
        plan(plain(2), x, 10**9, blocks=["?"], loss=loss, measure=measure)


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_plans_are_made_where_gradients_are_off(off, measure):
    module, x = plain(2), torch.randn(4, 64)
    expected = plan(module, x, 10**9, blocks=["?"], measure=False)
    with off():
        found = plan(module, x.clone(), 10**9, blocks=["?"], measure=measure)
        assert not torch.is_grad_enabled()
    assert abs(found.measured_bytes - expected.measured_bytes) <= SCALARS


@pytest.mark.parametrize("measure", [True, False])
def test_what_cannot_run_again_is_stored_and_named(measure):
    module = Row(layers(), nn.ReLU(inplace=True), layers())
    with pytest.warns(UserWarning, match=r"Not recomputed.* b\.1: ReLU wrote into its"):
        profile = profile_module(module, X, blocks=["b.*"], measure=measure)
    assert [b.modes for b in profile.blocks][1:] == [["store"], ["store", "recompute"]]


def test_scripted_blocks_are_refused():
    module = Row(layers(), torch.jit.script(nn.Tanh()))
    for measure in (True, False):
        with pytest.raises(
            ValueError, match=r"'b\.1' is scripted .* Name other blocks"
        ):
            plan(module, X, 10**9, blocks=["b.*"], measure=measure)


def test_blocks_with_a_forward_of_their_own_store():
    module = Row(layers(), layers(), layers())
    module.b[1].forward = module.b[1].forward
    with pytest.warns(
        UserWarning, match=r"Not recomputed.* b\.1: .*forward of its own"
    ):
        profile = profile_module(module, X, blocks=["b.*"])
    assert [len(block.modes) for block in profile.blocks] == [2, 1, 2]


def test_memory_that_runs_out_in_a_second_run_is_not_its_failure(monkeypatch):
    network = as_network(Row(layers(), layers()), ["b.*"])

    def step():
        if "recompute" in network.block_modes().values():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        run_once(network, step)


def test_budgets_that_nothing_fits_are_refused_before_times_are_taken(monkeypatch):
    def slow(*_, **__):
        raise AssertionError("times were taken")

    monkeypatch.setattr(profiling, "measured_seconds", slow)
    with pytest.raises(Infeasible):
        plan(plain(2), torch.randn(8, 64), 1000, blocks=["?"])
    with pytest.raises(AssertionError, match="times were taken"):
        plan(plain(2), torch.randn(8, 64), 10**9, blocks=["?"])


def greedy(copies):
    """Steps where a module is that do not fit there."""
    make = Step.trial

    def trial_that_does_not_fit(step):
        trial = make(step)
        copies.append(weakref.ref(trial.module))

        def run():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        return trial._replace(run=run)

    return trial_that_does_not_fit


def test_what_does_not_fit_where_it_is_is_planned_without_computing(monkeypatch):
    copies = []
    module, x = plain(3), torch.randn(8, 64)
    expected = plan(module, x, 10**9, blocks=["?"], measure=False)
    monkeypatch.setattr(Step, "trial", greedy(copies))
    with pytest.warns(UserWarning, match=r"does not fit on cpu: .*A smaller example"):
        found = plan(module, x, 10**9, blocks=["?"])
    assert found == expected
    assert copies[0]() is None


def test_what_the_memory_does_not_hold_is_not_tried(monkeypatch):
    monkeypatch.setattr(profiling, "fits_device", lambda peak, device: False)
    monkeypatch.setattr(Step, "trial", None)
    with pytest.warns(UserWarning, match="does not fit on cpu"):
        found = plan(plain(3), torch.randn(8, 64), 10**9, blocks=["?"])
    assert "estimated" in found.about["seconds"]


def test_what_neither_fits_nor_runs_without_numbers_is_an_error(monkeypatch):
    monkeypatch.setattr(Step, "trial", greedy([]))
    module = Attribute(layers())
    with pytest.raises(MemoryError, match="none can run without numbers"):
        plan(module, X, 10**9, blocks=["b.*"])
