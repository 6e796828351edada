"""Steps stored and as configured: what is compared, and what is said of a difference."""

import dataclasses
import functools
import re

import pytest
import torch

from speechbrain_rev.catalog import self_test as module
from speechbrain_rev.catalog.self_test import (
    FirstSteps,
    FreshTraining,
    first_difference,
    self_test,
    without_weights,
)
from speechbrain_rev.catalog.steps import TrainingStep
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.reversible import Mode
from tests.unit.reversible.chains import in_backward

TINY = {"widths": (8, 8, 8, 8), "blocks": (1, 0, 0, 1), "n_mels": 24}
CPU = torch.device("cpu")
BATCH, FRAMES = 4, 24


class Trained:
    """A training run of noise; `change` may spoil gradients, and skip the step."""

    def __init__(self, change=lambda *_: None, *, spoilt=None, device=CPU, **settings):
        torch.manual_seed(0)
        self.encoder = build_encoder(
            "revnet57", **{**TINY, "embedding_dim": 16, "verify": None, **settings}
        )
        if spoilt is not None:
            coupling = self.encoder.stages[0].chain.blocks[0]
            coupling.f = spoilt(coupling.f)
        self.classifier = CosineClassifier(16, 10)
        self.change = change
        modules = {"embedding_model": self.encoder, "classifier": self.classifier}
        self.modules = torch.nn.ModuleDict(modules).train().to(device)
        self.device = device
        adamw = functools.partial(build_optimizer, name="adamw", bits=32, lr=0.01)
        self.optimizer = adamw(self.modules.parameters())
        self.loss, self.make_optimizer = AAMSoftmax(), adamw

    def step(self, **changed):
        step = TrainingStep(
            self.encoder,
            self.classifier,
            self.loss,
            self.make_optimizer,
            optimizer_name="adamw",
            optimizer_bits=32,
            batch=BATCH,
            frames=FRAMES,
            precision="fp32",
            device=CPU,
        )
        return without_weights(dataclasses.replace(step, **changed))

    def fresh(self):
        return FreshTraining(self.encoder, self.modules, self.optimizer, self.take)

    def take(self, number, batch, seen):
        draws = torch.Generator().manual_seed(number)
        feats = torch.randn(BATCH, FRAMES, 24, generator=draws)[:batch]
        classes = torch.randint(10, (BATCH, 1), generator=draws)[:batch]
        feats, classes = feats.to(self.device), classes.to(self.device)
        self.loss(self.classifier(self.encoder(feats)), classes).backward()
        skips = self.change(self, number, batch)
        seen()
        if not skips:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def compared(change=lambda *_: None, *, budget_bytes=None, **settings):
    own = {name: settings.pop(name) for name in ("precision",) if name in settings}
    step = Trained(**settings).step(**own)

    def begin():
        return Trained(change, **settings).fresh()

    return self_test(step, begin, budget_bytes=budget_bytes)


def modes_of(training):
    return set(training.encoder.block_modes().values())


def stores(training):
    return modes_of(training) == {Mode.STORE}


FLIPPED = "embedding_model.stem.convs.0.weight"


def flip(training, bits):
    """Change some of the lowest bits of one value of a gradient."""
    grad = training.modules.get_parameter(FLIPPED).grad
    grad.view(torch.int32).flatten()[3] ^= bits


@pytest.fixture(scope="module")
def exact():
    return compared()


def test_steps_that_reconstruct_have_the_bits_of_stored_ones(exact):
    assert exact.agrees
    assert exact.verdict.startswith("Exact: 3 steps")
    stored, configured = exact.runs
    assert (stored.batch, configured.batch) == (BATCH, BATCH)
    assert configured.counted_bytes < stored.counted_bytes
    assert configured.measured_bytes < stored.measured_bytes


def test_gradients_buffers_weights_and_states_of_every_step_are_compared(exact):
    names = [set(record) for record in exact.runs[1].records]
    weight = "embedding_model.fc.weight"
    buffer = "buffer of embedding_model.stem"
    assert f"weight of {weight}" in names[0]
    assert any(name.startswith(buffer) for name in names[0])
    for after in names[1:]:
        assert {f"gradient of {weight}", f"weight of {weight}"} <= after
        assert f"optimizer state exp_avg of {weight}" in after
        assert any(name.startswith(buffer) for name in after)
    before, *steps = (run[f"weight of {weight}"] for run in exact.runs[1].records)
    for now in steps:
        assert not torch.equal(before, now)
        before = now


def test_the_table_has_both_peaks_and_says_where_none_is_allocated(exact):
    text = exact.text()
    assert re.search(r"^as configured +4 +[\d.]+ MiB +[\d.]+ MiB", text, re.MULTILINE)
    assert "As configured: 4 recompute, 2 reconstruct." in text
    assert "cpu reports no allocated peak" in text
    assert text.splitlines()[-1] == exact.verdict
    for width in (60, 80):
        assert max(map(len, exact.text(width).splitlines()[:-1])) <= width


class Differs(torch.nn.Module):
    """Computes something else in its second run."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return (self.function(*args) * (1.1 if in_backward() else 1)).tanh()


def test_a_function_that_does_not_compute_the_same_twice_is_reported():
    found = compared(spoilt=Differs)
    assert not found.agrees
    assert re.match(
        r"Differs: step 1, gradient of embedding_model\.stem\.\S+: \d+ of \d+ values, by "
        r"up to \S+; \d+ of \d+ tensors .*Give --mode=store",
        found.verdict,
    )


def in_reconstruction(training):
    return Mode.RECONSTRUCT in modes_of(training)


def in_two_orders(training):
    return not (stores(training) or torch.are_deterministic_algorithms_enabled())


def in_each_run(training, runs={}):  # noqa: B006
    """Number the runs, which each get other bits."""
    return runs.setdefault(training.modules, len(runs))


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (in_reconstruction, "Give --mode=recompute, which is exact here"),
        (in_two_orders, "Deterministic kernels make them equal"),
        (in_each_run, "Two runs with all blocks stored differ too"),
    ],
)
def test_one_bit_of_one_gradient_is_found_and_its_remedy_was_tried(fault, remedy):
    def change(training, *_):
        flip(training, int(fault(training)))

    found = compared(change)
    assert not found.agrees
    assert re.match(
        rf"Differs: step 1, gradient of {re.escape(FLIPPED)}: 1 of \d+ values, by up to "
        r"\S+; ",
        found.verdict,
    )
    assert remedy in found.verdict
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("limit", ["memory_budget", "the device"])
def test_bits_are_compared_at_the_largest_half_whose_stored_steps_fit(exact, limit):
    def full(training, number, batch):
        del number
        if limit == "the device" and stores(training) and batch > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    budget = exact.runs[0].counted_bytes - 1 if limit == "memory_budget" else None
    found = compared(full, budget_bytes=budget)
    assert found.agrees, found.verdict
    runs = [(run.name.split()[0], run.batch) for run in found.runs]
    assert runs == [("all", 2), ("as", 2), ("as", BATCH)]
    words = " ".join(found.text().split())
    assert f"more than {limit}" in words
    assert "bits are compared at batch 2" in words


@pytest.mark.parametrize(
    ("full", "rows", "verdict"),
    [
        (stores, ["as"], "Not compared: with all blocks stored not even one"),
        (in_reconstruction, ["all"], "Memory ran out as configured, at batch 4"),
    ],
)
def test_what_fits_in_no_batch_is_said_and_does_not_agree(full, rows, verdict):
    def change(training, *_):
        if full(training):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    found = compared(change)
    assert not found.agrees
    assert [run.name.split()[0] for run in found.runs] == rows
    assert found.verdict.startswith(verdict)


def test_errors_that_are_not_of_memory_are_not_taken_for_it():
    def change(*_):
        raise RuntimeError("Expected 4 channels")

    with pytest.raises(RuntimeError, match="4 channels"):
        compared(change)


@pytest.mark.parametrize("settings", [{"streams": "float"}, {"mode": "compress"}])
def test_modes_that_are_not_exact_by_design_state_the_error_of_the_gradient(settings):
    found = compared(**settings)
    assert found.agrees
    words = "streams: float" if "streams" in settings else "6 blocks compress"
    told = re.match(
        rf"Not exact by design \({words}\): relative error of the gradient (\S+) in step "
        r"1, most of it in the gradient of \S+; \S+ and \S+ in later steps",
        found.verdict,
    )
    assert 0 < float(told[1]) < 0.1


def test_a_gradient_with_an_error_of_its_own_size_does_not_agree():
    def change(training, *_):
        if not stores(training):
            for parameter in training.modules.parameters():
                parameter.grad.neg_()

    found = compared(change, streams="float")
    assert not found.agrees
    assert "error of the gradient is as large as the gradient" in found.verdict


def test_float_streams_that_nothing_is_reconstructed_of_are_exact():
    found = compared(streams="float", mode="recompute")
    assert found.verdict.startswith("Exact: ")


def test_gradients_that_are_not_finite_are_not_compared():
    def change(training, *_):
        training.modules["classifier"].weight.grad.fill_(float("nan"))

    found = compared(change)
    assert not found.agrees
    assert found.verdict.startswith("Not compared: gradients are not finite")


def test_steps_that_a_loss_scaler_skips_are_taken_again():
    def change(training, number, batch):
        del batch
        if number < 2:
            training.modules["classifier"].weight.grad.fill_(float("inf"))
        return number < 2

    found = compared(change, precision="fp16")
    assert found.verdict.startswith("Exact: ")
    taken = [record is not None for record in found.runs[1].records]
    assert taken == [True, False, False, True, True, True]


def test_a_step_that_is_skipped_in_one_run_alone_is_a_difference():
    def change(training, number, batch):
        del batch
        if number == 1 and not stores(training):
            training.modules["classifier"].weight.grad.fill_(float("inf"))

    found = compared(change)
    assert found.verdict.startswith(
        "Differs: step 2, gradient: not finite as configured, where the step is skipped"
    )


def test_other_weights_at_the_beginning_are_a_difference():
    def begin(calls=iter((0, 1))):  # noqa: B008
        training = Trained()
        with torch.no_grad():
            training.classifier.weight[0, 0] += next(calls, 0)
        return training.fresh()

    found = self_test(Trained().step(), begin)
    name = "weight of classifier.weight"
    assert found.verdict.startswith(f"Differs: before the first step, {name}: 1 of 160")


def test_signs_of_zeros_are_bits():
    found = first_difference(*([{}, {"w": torch.tensor([x])}] for x in (0.0, -0.0)))
    assert found.how_far == "equal but for the signs of zeros"
    assert first_difference(*[[{}, {"w": torch.tensor([float("nan")])}]] * 2) is None


def test_a_peak_above_the_budget_of_a_gpu_does_not_agree(exact):
    def verdict(budget_bytes):
        step = dataclasses.replace(Trained().step(), device=torch.device("cuda"))
        runs = module._Comparison(FirstSteps(step, None), budget_bytes)
        return runs.verdict(*exact.runs, exact.runs[-1])

    peak = exact.runs[-1].measured_bytes
    assert verdict(peak)[0]
    agrees, words = verdict(peak - 1)
    assert not agrees
    assert words.startswith("Above the budget: ")
    assert "Exact: " in words
