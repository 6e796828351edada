"""Recipes of SpeechBrain within a memory budget: what they train, keep and refuse."""

import functools
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import speechbrain as sb
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.augment.augmenter import Augmenter
from speechbrain.augment.time_domain import AddNoise
from speechbrain.utils.train_logger import FileTrainLogger
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.modes import Mode
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.planner import repeated_blocks
from speechbrain_rev.planner.memory import live_bytes_peak, storage_bytes
from speechbrain_rev.reversible.comparison import RecomputeWarning
from speechbrain_rev.reversible.wrapping import (
    mode_of,
    recompute_blocks,
    recomputes,
)
from speechbrain_rev.sizes import size_text
from speechbrain_rev.training import memory_budget
from speechbrain_rev.training.memory_budget import (
    BrainStep,
    MemoryBudget,
    first_rows,
    rows_of,
    shapes_of,
)
from speechbrain_rev.training.memory_plan import PLAN, read_plans
from tests.corpus import write_noise
from tests.unit.planner.test_search import Stack
from tests.unit.training.brains import (
    RECIPES,
    SpeakerBrain,
    adapted_wavlm,
    batch_of,
    brain_of,
    loader_of,
)

ROOT = Path(__file__).parents[3]
#: Part of a stored step's peak that each is given: as little as it can do with, nearly.
SHARES = {"ecapa": 0.65, "resnet": 0.6, "xvector": 1.1, "conformer": 0.5, "wavlm": 0.5}


def trained(brain, *batches):
    torch.manual_seed(7)
    brain.fit([1], loader_of(*batches), progressbar=False)
    return brain


def state_of(brain):
    return {k: v.clone() for k, v in brain.modules.state_dict().items()}


def stored_peak(name):
    """What a step of a Brain takes, beside weights, gradients and optimizer states."""
    brain = brain_of(name)
    trained(brain, batch_of())
    for parameter in brain.modules.parameters():
        parameter.grad = torch.zeros_like(parameter)
    brain.modules.train()
    peak = live_bytes_peak(lambda: brain.fit_batch(batch_of()))
    return peak, BrainStep(brain).fixed_bytes()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "wavlm"))
        for name in RECIPES
    ],
)
def test_two_lines_change_memory_and_nothing_else(name):
    batches = batch_of(seed=1), batch_of(seed=2)
    expected = state_of(trained(brain_of(name), *batches))
    peak, fixed = stored_peak(name)
    budget = fixed + int(SHARES[name] * peak)
    brain = trained(brain_of(name, MemoryBudget, memory_budget=budget), *batches)
    assert all(torch.equal(v, expected[k]) for k, v in state_of(brain).items())
    modes = {*brain.memory_plan.modes.values()} - {"join", "selective"}
    assert modes == (set() if name == "xvector" else {"store", "recompute"})
    brain.modules.train()
    for parameter in brain.modules.parameters():
        parameter.grad = torch.zeros_like(parameter)
    taken = live_bytes_peak(lambda: brain.fit_batch(batch_of(seed=3)))
    assert fixed + taken <= budget


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "xvector"])
def test_recomputing_all_blocks_takes_no_more_than_torch_s_checkpoints(name):
    def peak(change):
        brain = trained(brain_of(name), batch_of())
        step = BrainStep(brain)
        for parameter in step.parameters():
            parameter.grad = torch.zeros_like(parameter)
        change(step, *repeated_blocks(step))
        brain.modules.train()
        return live_bytes_peak(lambda: step(batch_of()).backward())

    def checkpointed(step, *names):
        for block in map(step.get_submodule, names):
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False
            )

    ours, of_torch = peak(recompute_blocks), peak(checkpointed)
    assert ours <= 1.01 * of_torch
    assert ours < peak(lambda *_: None)


#: As SpeechBrain's recipes write it, with one line more.
YAML = """
memory_budget: 5MB
lr: 0.1
compute_features: !new:speechbrain.lobes.features.Fbank
    n_mels: 24
    sample_rate: 8000
mean_var_norm: !new:speechbrain.processing.features.InputNormalization
    norm_type: sentence
    std_norm: False
embedding_model: !new:speechbrain.lobes.models.ECAPA_TDNN.ECAPA_TDNN
    input_size: 24
    channels: [64, 64, 64, 64, 192]
    attention_channels: 16
    lin_neurons: 16
classifier: !new:speechbrain.lobes.models.ECAPA_TDNN.Classifier
    input_size: 16
    out_neurons: 5
modules:
    compute_features: !ref <compute_features>
    mean_var_norm: !ref <mean_var_norm>
    embedding_model: !ref <embedding_model>
    classifier: !ref <classifier>
compute_cost: !new:speechbrain.nnet.losses.LogSoftmaxWrapper
    loss_fn: !new:speechbrain.nnet.losses.AdditiveAngularMargin
        margin: 0.2
        scale: 30
lr_annealing: !new:speechbrain.nnet.schedulers.CyclicLRScheduler
    base_lr: 0.001
    max_lr: !ref <lr>
    step_size: 10
opt_class: !name:torch.optim.Adam
    lr: !ref <lr>
"""


def test_a_recipe_s_yaml_takes_one_line_more():
    states = []
    for bases, text in (
        ((), YAML.replace("memory_budget: 5MB\n", "")),
        ((MemoryBudget,), YAML),
    ):
        torch.manual_seed(0)
        hparams = load_hyperpyyaml(text)
        kind = type("Brain", (*bases, SpeakerBrain), {})
        brain = kind(
            hparams["modules"], hparams["opt_class"], hparams, {"device": "cpu"}
        )
        states.append(state_of(trained(brain, batch_of())))
    assert "recompute" in brain.memory_plan.modes.values()
    plain, planned = states
    assert all(torch.equal(value, plain[key]) for key, value in planned.items())


@pytest.mark.slow
def test_a_longer_batch_is_planned_before_it_runs_and_a_resumed_run_plans_nothing(
    tmp_path, monkeypatch
):
    planned = []

    def watched(step, budget):
        planned.append(step.inputs(step.batch, step.device)[0].sig.data.shape[1])
        return plan_step(step, budget)

    plan_step = memory_budget.plan_step
    monkeypatch.setattr(memory_budget, "plan_step", watched)
    settings = {"memory_budget": "20MB", "output_folder": str(tmp_path)}
    brain = brain_of("ecapa", MemoryBudget, **settings)
    lengths = (0.4, 0.3, 0.5, 0.4)
    trained(brain, *(batch_of(seconds=s) for s in lengths))
    assert planned == [3200, 4000]
    (kept,) = read_plans(tmp_path / PLAN)
    assert json.loads(kept.about["shapes"])[0] == [4, 4000]
    resumed = trained(
        brain_of("ecapa", MemoryBudget, **settings), batch_of(seconds=0.5)
    )
    assert planned == [3200, 4000]
    assert resumed.memory_plan == brain.memory_plan
    other = settings | {"memory_budget": "21MB"}
    trained(brain_of("ecapa", MemoryBudget, **other), batch_of(seconds=0.3))
    assert planned == [3200, 4000, 2400]


def test_memory_that_runs_out_ends_the_run_and_the_next_start_plans_less(
    tmp_path, monkeypatch
):
    settings = {"memory_budget": "20MB", "output_folder": str(tmp_path)}
    brain = brain_of("ecapa", MemoryBudget, **settings)

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(brain, "optimizers_step", out_of_memory)
    with pytest.raises(
        SystemExit, match=r"^Memory ran out.*plans for 18\.0 MiB;[^\n]*$"
    ):
        trained(brain, batch_of())
    again = trained(brain_of("ecapa", MemoryBudget, **settings), batch_of())
    fixed = BrainStep(again).fixed_bytes()
    inputs = storage_bytes(memory_budget._list_tensors(batch_of()))
    assert again.memory_plan.budget_bytes == int(0.9 * 20 * 2**20) - fixed - inputs
    (kept,) = read_plans(tmp_path / PLAN)
    assert kept == again.memory_plan
    resumed = brain_of("ecapa", MemoryBudget, **settings)
    assert resumed._planner.plan_for(batch_of()) == kept
    assert resumed._planner.allowed_bytes == int(0.9 * 20 * 2**20)


def test_planning_leaves_random_states_rates_and_the_brain_as_they_were():
    brain = brain_of("ecapa", MemoryBudget, memory_budget="20MB")
    plain = brain_of("ecapa")
    for own in (brain, plain):
        own.on_fit_start()
        own.modules.train()
        torch.manual_seed(3)
    before = state_of(brain)
    brain._planner.plan_for(batch_of())
    assert all(torch.equal(v, before[k]) for k, v in state_of(brain).items())
    assert brain.hparams.lr_annealing.clr_iterations == 0
    assert not brain.optimizer.state
    assert all(p.grad is None for p in brain.modules.parameters())
    assert torch.equal(torch.rand(2), torch.manual_seed(3) and torch.rand(2))


class Twice(torch.nn.Module):
    """Calls one of three layers twice, and another not at all."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4000, 64), torch.nn.Linear(64, 4000))
            for _ in range(4)
        )

    def forward(self, wavs, lens=None):
        x = self.layers[1](self.layers[0](self.layers[0](wavs)))
        return self.layers[3](x)[:, None, :5]


class Silent(sb.Brain):
    """A Brain of one network, which puts its targets into the batch."""

    def compute_forward(self, batch, stage):
        batch.targets = torch.ones(())
        return self.modules.model(batch.sig.data)

    def compute_objectives(self, predictions, batch, stage):
        return (predictions - batch.targets).square().mean()


def silent(model, *bases, **hparams):
    return type("Silent", (*bases, Silent), {})(
        {"model": model}, lambda p: torch.optim.SGD(p, 0.1), hparams, {"device": "cpu"}
    )


def test_blocks_that_cannot_be_planned_store_and_are_named(caplog):
    with caplog.at_level(logging.INFO, memory_budget.__name__):
        brain = trained(silent(Twice(), MemoryBudget, memory_budget="50MB"), batch_of())
    assert list(brain.memory_plan.modes) == ["model.layers.1", "model.layers.3"]
    assert "model.layers.0: it runs 2 times in a step" in caplog.text
    assert "model.layers.2: it does not run" in caplog.text


@pytest.mark.parametrize("network", [Twice(), torch.nn.Linear(4000, 5)])
def test_the_log_has_how_the_budget_is_shared(network, caplog):
    with caplog.at_level(logging.INFO, memory_budget.__name__):
        brain = trained(silent(network, MemoryBudget, memory_budget="50MB"), batch_of())
    about = brain.memory_plan.about
    assert about["reserved_bytes"] == "0"
    staying = int(about["staying_bytes"])
    assert brain.memory_plan.budget_bytes == 50 * 2**20 - staying
    words = f"budget 50.0 MiB, {size_text(staying)} of it for weights, gradients, "
    assert f"; {words}optimizer states and the batch" in caplog.text


def test_what_is_frozen_keeps_nothing():
    brain = brain_of("wavlm", MemoryBudget, memory_budget="100MB")
    brain.modules.wav2vec2.freeze_feature_encoder()
    brain.modules.wav2vec2.requires_grad_(False)
    trained(brain, batch_of())
    assert set(brain.memory_plan.modes.values()) == {"store"}
    with torch.no_grad():
        forward = live_bytes_peak(lambda: brain.modules.wav2vec2(batch_of().sig.data))
    assert brain.memory_plan.measured_bytes < 1.05 * forward


def test_adapters_of_a_frozen_network_train_alike_with_8_bit_states():
    eight_bits = functools.partial(build_optimizer, name="adamw", bits=8, lr=1e-3)
    made = functools.partial(brain_of, adapted_wavlm, optimizer=eight_bits)
    expected = state_of(trained(made(), batch_of(seed=1)))
    peak, fixed = stored_peak(adapted_wavlm)
    brain = made(MemoryBudget, memory_budget=fixed + int(0.7 * peak))
    trained(brain, batch_of(seed=1))
    assert "recompute" in brain.memory_plan.modes.values()
    assert all(torch.equal(v, expected[k]) for k, v in state_of(brain).items())


class WritesIntoItsInput(torch.nn.Module):
    """Four blocks, of which one changes what it was given, and one looks at its values."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(InPlace(i) for i in range(4))

    def forward(self, wavs, lens=None):
        x = wavs[..., :64]
        for layer in self.layers:
            x = layer(x)
        return x


class InPlace(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.linear = torch.nn.Linear(64, 64)
        self.other = torch.nn.Linear(64, 64)

    def forward(self, x):
        if self.number == 1:
            x.add_(1)
        y = self.other(self.linear(x).relu())
        if self.number == 2 and y.mean() > 0:
            y = 2 * y
        return y


def test_a_block_that_writes_into_its_input_stores_and_numbers_may_decide():
    def made(*bases, **hparams):
        torch.manual_seed(0)
        return silent(WritesIntoItsInput(), *bases, **hparams)

    expected = state_of(trained(made(), batch_of()))
    brain = made(MemoryBudget, memory_budget="50MB")
    with pytest.warns(UserWarning, match=r"Not recomputed.*model\.layers\.1"):
        trained(brain, batch_of())
    assert all(torch.equal(v, expected[k]) for k, v in state_of(brain).items())


#: Of no module: a second run draws other numbers than the first.
GENERATOR = torch.Generator()


class Drawing(InPlace):
    def forward(self, x):
        noise = torch.rand(64, generator=GENERATOR) if self.number == 4 else 1
        return (super().forward(x) * noise).relu()


def planned_with_noise(**hparams):
    """Train five blocks in less than they take stored; the second one draws noise."""
    model = Layers(map(Drawing, range(3, 8)))
    brain = silent(model, MemoryBudget, memory_budget=1_150_000, **hparams)
    return trained(brain, batch_of()).memory_plan.modes


def test_a_block_that_differs_in_its_second_run_stores():
    says = (
        r"Not recomputed.*: model\.1 \(Drawing\) computed something else .*mode='store'"
    )
    with pytest.warns(UserWarning, match=says):
        modes = planned_with_noise()
    assert modes["model.1"] == "store"
    assert "recompute" in modes.values()


def test_a_block_that_differs_recomputes_where_that_is_only_warned_of():
    with pytest.warns(RecomputeWarning, match="computed something else"):
        modes = planned_with_noise(memory_verify="warn")
    assert "recompute" in modes.values()


class Counting(Silent):
    """A Brain that logs, keeps losses with their graphs, and counts what cannot be copied."""

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        self.losses = [*getattr(self, "losses", []), loss]
        self.hparams.train_logger.log_stats({"loss": 1}, {"loss": float(loss)})
        self.hparams.steps["all"].append(len(self.losses))
        return loss


def test_steps_of_planning_are_not_logged_and_not_counted(tmp_path):
    brain = type("Counted", (MemoryBudget, Counting), {})(
        {"model": WritesIntoItsInput()},
        lambda p: torch.optim.SGD(p, 0.1),
        {
            "memory_budget": "50MB",
            "train_logger": FileTrainLogger(tmp_path / "log.txt"),
            "steps": {"all": []},
        },
        {"device": "cpu"},
    )
    with pytest.warns(UserWarning, match="Not recomputed"):
        trained(brain, batch_of(seconds=0.4), batch_of(seconds=0.5))
    assert len(brain.losses) == 2
    assert brain.hparams.steps["all"] == [1, 2]
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 2


def test_what_cannot_be_copied_is_named(caplog):
    lock = threading.Lock()
    brain = silent(Twice(), MemoryBudget, memory_budget="50MB", metric_lock=lock)
    trained(brain, batch_of())
    assert "metric_lock (lock) cannot be copied" in caplog.text
    memo = {}
    holder = SimpleNamespace(weights={"all": [torch.ones(2)]}, lock=lock)
    assert memory_budget._copy_value("holder", holder, memo) is holder
    assert not memo  # ids of parts that are gone would stand for others


class Halves(torch.nn.Module):
    """A block of two, as layers of Conformers have some."""

    def __init__(self):
        super().__init__()
        self.first, self.second = InPlace(0), InPlace(0)

    def forward(self, x):
        return self.second(self.first(x))


def test_what_an_earlier_plan_made_recompute_is_a_block_of_the_next():
    make = functools.partial(
        own_steps, Silent, layers=lambda: Layers(Halves() for _ in range(6))
    )
    short, long = batch_of(seconds=0.5), batch_of(seconds=0.6)
    plain = trained(make(), short, long)
    budget = BrainStep(plain).fixed_bytes() + taken_by(plain)
    brain = make(MemoryBudget, memory_budget=budget, memory_blocks="model.?")
    plans = [trained(brain, batch).memory_plan for batch in (short, long)]
    assert all("recompute" in plan.modes.values() for plan in plans)
    assert [*plans[0].modes] == [*plans[1].modes]
    stored = [int(plan.about["stored_bytes"]) for plan in plans]
    assert stored[1] > 1.1 * stored[0]


class Noisy(Silent):
    """A Brain that adds noise, of which its augmentation holds an iterator."""

    def compute_forward(self, batch, stage):
        batch.targets = torch.ones(())
        return self.modules.model(self.hparams.augment(*batch.sig)[0])


def test_noise_that_was_begun_goes_on_after_steps_of_planning(tmp_path, caplog):
    files = sorted((write_noise(tmp_path, clips=6) / "noise").glob("*.wav"))
    rows = [f"{n},1.5,{file},wav,\n" for n, file in enumerate(files)]
    csv = tmp_path / "noise.csv"
    csv.write_text("".join(["ID,duration,wav,wav_format,wav_opts\n", *rows]))

    def weights(*bases, **hparams):
        augment = Augmenter(augmentations=[AddNoise(csv_file=csv, sorting="random")])
        brain = own_steps(Noisy, *bases, augment=augment, **hparams)
        return state_of(trained(brain, *(batch_of(seconds=s) for s in (0.4, 0.5))))

    expected = weights()
    planned = weights(MemoryBudget, memory_budget="50MB")
    assert all(torch.equal(v, expected[k]) for k, v in planned.items())
    assert "cannot be copied" not in caplog.text


def test_what_is_frozen_later_is_planned_anew():
    peak, fixed = stored_peak("ecapa")
    budget = fixed + int(0.7 * peak)
    brain = trained(brain_of("ecapa", MemoryBudget, memory_budget=budget), batch_of())
    before = brain.memory_plan
    brain.modules.embedding_model.requires_grad_(False)
    trained(brain, batch_of())
    assert "recompute" in before.modes.values()
    assert "recompute" not in brain.memory_plan.modes.values()
    assert not any(map(recomputes, brain.modules.modules()))


def test_stages_are_opened():
    def stage():
        return torch.nn.Sequential(*(InPlace(0) for _ in range(2)))

    stages = torch.nn.ModuleDict({"a": stage(), "b": stage()})
    assert repeated_blocks(stages) == ["a.0", "a.1", "b.0", "b.1"]


class Plain(sb.Brain):
    """A Brain of one network, whose batches are tensors."""

    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.float().square().mean()


def tied():
    """Blocks of which four have a weight together, within one also twice."""

    def block():
        first = torch.nn.Linear(64, 64)
        return torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(64, 64))

    torch.manual_seed(0)
    network = torch.nn.Sequential(*(block() for _ in range(6)))
    for layer in (network[2][0], network[3][0], network[3][2], network[5][0]):
        layer.weight = network[0][0].weight
    return network


@pytest.mark.parametrize(
    ("precision", "budget"), [("fp32", "1.9MB"), ("bf16", "1.6MB")]
)
def test_blocks_with_weights_together_are_planned_and_train_alike(precision, budget):
    def brain(budget, *bases):
        return type("Tied", (*bases, Plain), {})(
            {"model": tied()},
            lambda p: torch.optim.SGD(p, 0.1),
            {"memory_budget": budget, "memory_blocks": "model.?"},
            {"device": "cpu", "precision": precision},
        )

    batches = [torch.randn(512, 64) for _ in range(3)]
    expected = state_of(trained(brain(None), *batches))
    planned = trained(brain(budget, MemoryBudget), *batches)
    assert all(torch.equal(v, expected[k]) for k, v in state_of(planned).items())
    modes = planned.memory_plan.modes
    assert list(modes) == [f"model.{i}" for i in range(6)]
    assert {"store", "recompute"} <= set(modes.values())


def test_blocks_within_blocks_are_planned_where_the_outer_ones_do_not_fit():
    def brain(*bases, **hparams):
        torch.manual_seed(0)
        return type("Stacked", (*bases, Plain), {})(
            {"model": torch.nn.Sequential(Stack(), Stack())},
            lambda p: torch.optim.SGD(p, 0.1),
            {"memory_budget": "0.6MB", **hparams},
            {"device": "cpu"},
        )

    batch = torch.randn(256, 16)
    with pytest.raises(SystemExit, match="Even the lightest plan"):
        trained(brain(MemoryBudget, memory_blocks=["model.?"]), batch)
    planned = trained(brain(MemoryBudget), batch)
    places = itertools.product(range(2), range(4))
    assert list(planned.memory_plan.modes) == [
        f"model.{i}.parts.{j}" for i, j in places
    ]
    expected = state_of(trained(brain(), batch))
    assert all(torch.equal(v, expected[k]) for k, v in state_of(planned).items())


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"memory_budget": 0}, {}, "memory_budget is 0"),
        ({"memory_budget": 1, "memory_verify": "off"}, {}, "verify is 'off'"),
        ({"memory_budget": "1GB"}, {"compile": True}, "compile and memory_budget"),
    ],
)
def test_settings_without_sense_are_refused_before_the_first_step(
    settings, options, message
):
    with pytest.raises(ValueError, match=message):
        type("Silent", (MemoryBudget, Silent), {})(
            {"model": Twice()}, None, settings, {"device": "cpu", **options}
        )


def test_a_class_that_comes_too_late_is_refused():
    with pytest.raises(TypeError, match=r"class Late\(MemoryBudget, sb\.Brain\)"):
        type("Late", (sb.Brain, MemoryBudget), {})


class Layers(torch.nn.Sequential):
    """Blocks that are planned, on the first numbers of each waveform."""

    def __init__(self, blocks=()):
        super().__init__(*(blocks or map(InPlace, [0] * 6)))

    def forward(self, wavs):
        return super().forward(wavs[:, : wavs.shape[1] // 64 * 64].reshape(-1, 64))


class Annealed(Silent):
    """As in LibriTTS/TTS/mstacotron2/train.py: what is done after the step of Brain."""

    def fit_batch(self, batch):
        loss = super().fit_batch(batch)
        self.optimizer.param_groups[0]["lr"] *= 0.5
        return loss


def own_steps(kind, *bases, layers=Layers, **hparams):
    torch.manual_seed(0)
    return type(kind.__name__, (*bases, kind), {})(
        {"model": layers()},
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        hparams,
        {"device": "cpu"},
    )


def taken_by(brain):
    """What a step takes beside gradients, which stay where they are, and its batch."""
    for parameter in brain.modules.parameters():
        parameter.grad = torch.zeros_like(parameter)
    brain.optimizer.zero_grad = lambda *_, **__: None
    batch = batch_of()
    return live_bytes_peak(lambda: brain.fit_batch(batch))


def test_a_fit_batch_of_its_own_is_refused():
    says = r"Annealed has a fit_batch .*on_fit_batch_end.*recompute_blocks"
    with pytest.raises(ValueError, match=says):
        own_steps(Annealed, MemoryBudget, memory_budget="50MB")
    own_steps(Annealed, MemoryBudget)  # without a budget


def test_a_default_of_an_argument_more_is_that_of_the_planned_step():
    class Scaled(Silent):
        def compute_forward(self, batch, stage, scale=0.5):
            return scale * super().compute_forward(batch, stage)

        def compute_objectives(self, predictions, batch, stage, copies=3):
            return super().compute_objectives(
                torch.cat([predictions] * copies), batch, stage
            )

    expected = state_of(trained(own_steps(Scaled), batch_of()))
    brain = own_steps(Scaled, MemoryBudget, memory_budget="50MB")
    assert all(
        torch.equal(v, expected[k])
        for k, v in state_of(trained(brain, batch_of())).items()
    )
    # Brain's own fit_batch divides a number more.
    assert 0 <= taken_by(brain) - brain.memory_plan.measured_bytes <= 4


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ecapa", {"memory_budget": "3MB"}, "What helps: fewer or shorter utterances"),
        ("ecapa", {"memory_budget": "much"}, "memory_budget"),
        ("xvector", {"memory_budget": "0.5MB"}, "no repeated blocks were found"),
        ("ecapa", {"memory_budget": "20MB", "memory_blocks": ["blobs.*"]}, "blobs"),
    ],
)
def test_bad_settings_name_what_helps(name, settings, message):
    # A budget that is too small ends the training, without a traceback.
    with pytest.raises((ValueError, SystemExit), match=message) as refused:
        trained(brain_of(name, MemoryBudget, **settings), batch_of())
    assert (refused.type is SystemExit) == ("memory_blocks" not in settings) or (
        settings["memory_budget"] == "much"
    )


def test_plans_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / PLAN).write_text("{}")
    settings = {"memory_budget": "20MB", "output_folder": str(tmp_path)}
    with pytest.raises(ValueError, match=f"{PLAN} is no plan .*delete that file"):
        brain_of("ecapa", MemoryBudget, **settings)


def test_without_a_budget_nothing_changes():
    brain = trained(brain_of("ecapa", MemoryBudget, memory_budget=None), batch_of())
    assert brain.memory_plan is None
    assert "compute_forward" not in vars(brain)


def test_the_first_rows_of_a_batch_are_a_batch():
    batch = batch_of(rows=4)
    few = first_rows(batch, 2)
    assert rows_of(batch) == 4
    assert rows_of(few) == 2
    assert torch.equal(few.sig.data, batch.sig.data[:2])
    assert few.id == batch.id[:2]
    assert shapes_of(batch)[0] == (4, 4000)


def test_a_step_that_does_not_fit_stored_is_planned_from_smaller_ones(monkeypatch):
    """Steps of more than two utterances run out of memory as long as all blocks store."""
    peak, fixed = stored_peak("ecapa")
    forward = BrainStep.forward

    def limited(self, batch):
        stored = {*map(mode_of, self.modules())} == {Mode.STORE}
        if stored and rows_of(batch) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, batch)

    monkeypatch.setattr(BrainStep, "forward", limited)
    brain = brain_of("ecapa", MemoryBudget, memory_budget=fixed + int(1.6 * peak))
    with pytest.warns(UserWarning, match="in steps of 2 and 4 of its 8 samples"):
        trained(brain, batch_of(rows=8))
    plan = brain.memory_plan
    assert plan.about["bytes"] == "counted in steps of 2 and 4 samples"
    assert plan.predicted_bytes == pytest.approx(plan.measured_bytes, rel=0.01)


#: One of two processes: trains on longer utterances than the other, and writes what it has.
PROCESS = """
import json, os, sys
import speechbrain as sb
import torch
from speechbrain_rev.training import MemoryBudget
from tests.unit.training.brains import batch_of, brain_of, loader_of

folder, budget = sys.argv[1:]
rank = int(os.environ["RANK"])
sb.utils.distributed.ddp_init_group({"distributed_backend": "gloo"})


class OnCPU:  # SpeechBrain names a device for each process, which a CPU has not
    def _wrap_distributed(self):
        for name, module in self.modules.items():
            if any(p.requires_grad for p in module.parameters()):
                self.modules[name] = torch.nn.parallel.DistributedDataParallel(module)


bases = [MemoryBudget] if budget != "none" else []
settings = {"memory_budget": budget, "output_folder": folder} if bases else {}
brain = brain_of("ecapa", *bases, OnCPU, **settings)
batches = [batch_of(seconds=s, seed=rank) for s in (0.3 + 0.1 * rank, 0.4 - 0.1 * rank)]
brain.fit([1], loader_of(*batches), progressbar=False)
plan = brain.memory_plan.to_json() if bases else ""
weights = [float(p.double().sum()) for p in brain.modules.parameters()]
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump([plan, weights], file)
"""


@pytest.mark.slow(drawn=False)
def test_two_processes_take_one_plan_and_train_as_without(tmp_path):
    def run(budget):
        folder = tmp_path / budget
        folder.mkdir()
        script = folder / "process.py"
        script.write_text(PROCESS)
        torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = [sys.executable, "-m", *torchrun, str(script), str(folder), budget]
        paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=os.environ | paths)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]

    (plan, weights), (other_plan, other_weights) = run("3.6MB")
    assert plan == other_plan
    assert '"recompute"' in plan
    assert weights == other_weights
    (_, expected), _ = run("none")
    assert weights == expected
    kept = read_plans(tmp_path / "3.6MB" / PLAN)
    assert [json.loads(own.about["shapes"])[0] for own in kept] == [[4, 3200]]
