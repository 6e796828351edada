"""What cannot be counted without computing is counted in real steps, or reported."""

import itertools
import weakref

import pytest
import torch
from torch import nn

from speechbrain_rev.compression import (
    ActivationCompression,
    RangeBound,
    compress_activations,
)
from speechbrain_rev.planner import Infeasible, Step, memory, plan, profiling, step_of
from speechbrain_rev.planner.compression_probe import CompressionProbe
from speechbrain_rev.planner.network import as_network
from speechbrain_rev.reversible import Mode
from tests.unit.planner.networks import (
    SCALARS,
    Chained,
    Scaled,
    convolutions,
    layers,
    peak_of,
    plain,
    profile_module,
)

WIDTH = 32
X = torch.randn(32, 20, WIDTH)


class Row(nn.Module):
    """Blocks in a row, of which each may return more than the next one takes."""

    def __init__(self, *blocks):
        super().__init__()
        self.b = nn.ModuleList(blocks or (layers(WIDTH, 4 * WIDTH) for _ in range(3)))

    def forward(self, x):
        for block in self.b:
            outputs = block(x)
            x = outputs[0] if isinstance(outputs, tuple) else outputs
        return x


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


class Autocast(Row):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Looking(Row):
    """Goes on by the numbers that it gets."""

    def forward(self, x):
        return super().forward(x if x.abs().sum().item() else x + 1)


class FirstStep(Row):
    """Makes what it needs in its first step."""

    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.zeros(10**5, device=x.device)
        return super().forward(x)


def lstms():
    return Row(*(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3)))


REAL, META = "counted in steps on cpu", "counted on meta tensors"
NETWORKS = {
    "more": (lambda: Holding(*(WithMore(n) for n in (256, 64, 512))), META),
    "lstm": (lstms, REAL),
    "autocast": (Autocast, REAL),
    "item": (Looking, REAL),
    "first_step": (FirstStep, META),
}


def peak_after_a_step(module, modes):
    """What a real step allocates, after one that is not counted."""
    trial = step_of(module, X, blocks=["b.*"]).trial()
    trial.network.set_mode(modes)
    trial.run()
    return peak_of(trial.run)


@pytest.mark.parametrize("name", NETWORKS)
def test_real_steps_take_what_was_predicted_in_any_modes_and_plans_fit(name):
    make, how = NETWORKS[name]
    torch.manual_seed(0)
    profile = profile_module(make(), X, blocks=["b.*"])
    assert profile.about["bytes"].startswith(how)
    names = [block.name for block in profile.blocks]
    peaks = []
    for chosen in itertools.product(("store", "recompute"), repeat=3):
        modes = dict(zip(names, chosen, strict=True))
        peaks.append(peak_after_a_step(make(), modes))
        assert profile.peak_bytes(modes) == pytest.approx(peaks[-1], rel=0.02), modes
    budget = (peaks[0] + peaks[-1]) // 2
    planned = plan(make(), X, budget, blocks=["b.*"])
    peak = peak_after_a_step(make(), planned.modes)
    assert peak == planned.measured_bytes <= budget


@pytest.mark.parametrize(
    ("name", "what"), [("autocast", "autocast, of which meta"), ("item", r"item\(\)")]
)
def test_what_needs_numbers_is_not_counted_without(name, what):
    message = rf"does not run on meta.*{what}.*measure=True"
    with pytest.raises(ValueError, match=message):
        plan(NETWORKS[name][0](), X, 10**9, blocks=["b.*"], measure=False)


def test_recurrent_layers_are_warned_of_where_nothing_is_computed():
    with pytest.warns(UserWarning, match=r"recurrent layers \(b\.0, b\.1, b\.2\)"):
        plan(lstms(), X[:, :4], 10**9, blocks=["b.*"], measure=False)


@pytest.mark.parametrize("measure", [True, False])
def test_first_blocks_that_are_not_trained_store(measure):
    module = Row(*(layers(WIDTH, WIDTH) for _ in range(4)))
    module.b[:2].requires_grad_(False)
    profile = profile_module(module, X, blocks=["b.*"], measure=measure)
    modes = [block.modes for block in profile.blocks]
    again = ["store", "selective", "recompute"]
    # The first one that is trained has none to join.
    assert modes == [["store"]] * 2 + [again, [*again, "join"]]
    light, full = (profile.uniform(m) for m in ("recompute", "store"))
    budget = (profile.peak_bytes(light) + profile.peak_bytes(full)) // 2
    planned = plan(module, X, budget, blocks=["b.*"], measure=measure)
    assert planned.measured_bytes <= budget
    assert list(planned.modes.values())[:2] == ["store", "store"]


def with_a_forward_of_its_own():
    tanh = nn.Tanh()
    tanh.forward = tanh.forward
    return tanh


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (lambda: nn.ReLU(inplace=True), r" \(ReLU\) wrote into its"),
        (with_a_forward_of_its_own, ".*forward of its own"),
    ],
)
def test_what_cannot_run_again_runs_once_and_is_named(block, reason, measure):
    module = Row(layers(WIDTH, WIDTH), block(), layers(WIDTH, WIDTH))
    with pytest.warns(UserWarning, match=rf"Not recomputed.* b\.1{reason}"):
        profile = profile_module(module, X, blocks=["b.*"], measure=measure)
    once = ["store", "selective"]
    assert [b.modes for b in profile.blocks[1:]] == [once, [*once, "recompute"]]


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*deprecated", "ignore:Not recomp"
)
@pytest.mark.parametrize("measure", [True, False])
def test_scripted_blocks_are_refused(measure):
    module = Row(layers(WIDTH, WIDTH), torch.jit.script(nn.Tanh()))
    with pytest.raises(ValueError, match=r"'b\.1' is scripted .* Name other blocks"):
        plan(module, X, 10**9, blocks=["b.*"], measure=measure)


def test_budgets_that_nothing_fits_are_refused_before_times_are_taken(monkeypatch):
    monkeypatch.setattr(profiling, "measured_seconds", None)
    for budget, error in ((1000, Infeasible), (10**9, TypeError)):
        with pytest.raises(error):
            plan(plain(2), torch.randn(8, 64), budget, blocks=["?"])


@pytest.mark.slow
def test_what_does_not_fit_where_it_is_is_planned_without_computing(monkeypatch):
    tried, make = [], Step.trial

    def trial_that_does_not_fit(step, *batch):
        trial = make(step, *batch)
        tried.append(weakref.ref(trial.module))

        def run():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        return trial._replace(run=run)

    module, x = plain(3), torch.randn(8, 64)
    expected = plan(module, x, 10**9, blocks=["?"], measure=False)
    monkeypatch.setattr(Step, "trial", trial_that_does_not_fit)
    with pytest.warns(UserWarning, match=r"does not fit on cpu: .*A smaller example"):
        assert plan(module, x, 10**9, blocks=["?"]) == expected
    assert tried[0]() is None
    with pytest.raises(
        MemoryError, match="nor does one of 2 samples, and none can run"
    ):
        plan(Looking(), X, 10**9, blocks=["b.*"])
    # What the memory does not hold is not tried.
    monkeypatch.setattr(profiling, "fits_device", lambda peak, device: False)
    monkeypatch.setattr(Step, "trial", None)
    with pytest.warns(UserWarning, match="does not fit on cpu"):
        assert plan(module, x, 10**9, blocks=["?"]) == expected


def test_times_are_measured_where_the_module_is_or_estimated():
    module, x = plain(3, width=16), torch.randn(8, 16)
    measured, estimated = (
        profile_module(module, x, blocks=["?"], measure=m) for m in (True, False)
    )
    assert measured.about["seconds"].startswith("measured on cpu")
    assert "estimated" in estimated.about["seconds"]
    for profile in (measured, estimated):
        assert all(c.seconds > 0 for b in profile.blocks for c in b.costs.values())
    stored = measured.uniform("store")
    assert measured.peak_bytes(stored) == estimated.peak_bytes(stored)
    meta = profile_module(module.to("meta"), x.to("meta"), blocks=["?"])
    assert "estimated" in meta.about["seconds"]
    assert meta.about["reconstruction"] == "no block reconstructs"


def probe_of(module, x, blocks=()):
    step = step_of(module, x, blocks=blocks)
    with step.training():
        return CompressionProbe(step, 1.0)


def two_blocks(count=1):
    torch.manual_seed(0)
    return nn.Sequential(convolutions(4, count), convolutions(4, count))


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_tried_in_part_or_not_at_all(monkeypatch):
    module, x = two_blocks(2), torch.randn(8, 4, 20, 20)
    step = step_of(module, x, blocks="?")
    with step.training():
        trial = step.trial()
        trial.network.set_mode({"0": "store", "1": "store"})
        stored = step.copy_bytes + peak_of(trial.run)
        free = int(stored / 2 / memory.SHARE) + SCALARS
        monkeypatch.setattr(memory, "available_ram_bytes", lambda: free)
        assert CompressionProbe(step, 0.1).batch == 4
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: 0)
    monkeypatch.setattr(Step, "trial", None)
    given = {"blocks": "?", "max_gradient_error": 0.1}
    with pytest.raises(MemoryError, match=r"one sample on cpu takes .*leave it out"):
        plan(module, x, 10**9, **given)
    # Of a batch that cannot be divided no smaller one is tried.
    with pytest.raises(MemoryError, match=r"not fit on cpu.* same number of rows"):
        plan(Scaled(*module), (x, torch.ones(1, 4, 1, 1)), 10**9, **given)


def test_bounds_are_those_that_the_network_was_given():
    module, x = two_blocks(), torch.randn(2, 4, 30, 40)
    errors = []
    for fraction in (1e-1, 1e-3):
        rule = RangeBound(fraction)
        module.compression = ActivationCompression(
            convolutions=rule, normalisations=rule
        )
        probe = probe_of(module, x, "?")
        errors.append(probe.gradient_error(dict.fromkeys("01", "compress")))
    assert errors[0] > 10 * errors[1] > 0
    as_network(module, "?").set_mode({"0": "compress"})
    module(x).sum().backward()
    assert module.compression.records
    finer = as_network(module, "?.*")
    finer.set_mode(dict.fromkeys(finer.named_blocks(), "store"))
    assert not any("forward" in vars(part) for part in module.modules())
    module.compression = RangeBound(1e-3)
    with pytest.raises(ValueError, match="give it to an ActivationCompression"):
        as_network(module, "?")


def test_a_network_without_bounds_has_those_of_its_plan_or_of_its_one_chain():
    module = two_blocks()
    as_network(module, "?").set_mode({"0": "compress"})
    module(torch.randn(2, 4, 30, 40)).sum().backward()
    assert module.compression.records.keys() == {"0.0", "0.1"}
    with pytest.raises(ValueError, match="blocks that compress, by a plan"):
        compress_activations(module)
    chained = Chained(depth=1)
    network = as_network(chained, ["head"])
    assert network.compression is chained.body.compression


@pytest.mark.parametrize("limit", [0.1, None])
def test_what_is_compressed_as_a_whole_is_refused(limit):
    module = convolutions(4, 1)
    compress_activations(module)
    with pytest.raises(ValueError, match="has all its activations compressed"):
        plan(module, torch.randn(2, 4, 9, 9), 1, blocks="?", max_gradient_error=limit)


@pytest.mark.parametrize(
    ("device", "value", "message"),
    [
        ("meta", 0.0, "max_gradient_error needs numbers"),
        ("cpu", float("nan"), r"gradient is nan.*Give a batch"),
        ("cpu", 0.0, r"gradient is 0\.0.*Give a batch"),
    ],
)
def test_a_gradient_of_which_no_error_can_be_measured_is_refused(
    device, value, message
):
    module = nn.Sequential(nn.Conv1d(4, 4, 3, bias=False), nn.ReLU()).to(device)
    x = torch.full((2, 4, 9), value, device=device)
    with pytest.raises(ValueError, match=message):
        plan(module, x, 10**9, blocks="?", max_gradient_error=0.1)


def test_blocks_that_compression_does_not_cover_have_no_such_mode():
    torch.manual_seed(0)
    first = nn.Conv1d(4, 4, 3), nn.GELU(), nn.Flatten()
    module = nn.Sequential(*first, nn.Linear(152, 4))
    probe = probe_of(module, torch.randn(4, 4, 40), ["?"])
    assert list(probe.squared_errors) == ["0"]
    allowed = probe.network.allowed_modes()
    assert [n for n, modes in allowed.items() if Mode.COMPRESS in modes] == ["0"]


def test_times_are_taken_of_what_compresses_too(compressing):
    with compressing.step.training():
        measured = compressing.profiler.timed()
    assert measured.about["seconds"].startswith("measured on cpu")
    for block in measured.blocks:
        assert "compress" in block.modes
        assert all(cost.seconds > 0 for cost in block.costs.values())
    lossy = measured.uniform("compress")
    assert measured.peak_bytes(lossy) == compressing.profile.peak_bytes(lossy)
