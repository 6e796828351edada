"""Steps stored and as configured: what is compared, and how a difference is reported."""

import dataclasses
import functools
import itertools
import re

import pytest
import torch

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.reversible import Mode
from speechbrain_rev.training import step_comparison as module
from speechbrain_rev.training.step_comparison import (
    FreshTraining,
    first_difference,
    self_test,
    without_weights,
)
from tests.unit.reversible.chains import in_backward

from .recipe_steps import CPU, TINY, step_of

pytestmark = pytest.mark.slow

BATCH = 4


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
        self.loss = AAMSoftmax()
        adamw = functools.partial(build_optimizer, name="adamw", bits=32, lr=0.01)
        self.make_optimizer = adamw
        self.optimizer = adamw(self.modules.parameters())

    def step(self, **changed):
        own = {"classifier": self.classifier, "make_optimizer": self.make_optimizer}
        return without_weights(step_of(encoder=self.encoder, **own | changed))

    def fresh(self):
        return FreshTraining(self.encoder, self.modules, self.optimizer, self.take)

    def take(self, number, batch, seen):
        draws = torch.Generator().manual_seed(number)
        feats = torch.randn(BATCH, 24, 24, generator=draws)[:batch]
        classes = torch.randint(10, (BATCH, 1), generator=draws)[:batch]
        embeddings = self.encoder(feats.to(self.device))
        self.loss(self.classifier(embeddings), classes.to(self.device)).backward()
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
    text = exact.text()
    assert re.search(r"^as configured +4 +[\d.]+ MiB +[\d.]+ MiB", text, re.MULTILINE)
    assert "As configured: 4 recompute, 2 reconstruct." in text
    assert "cpu reports no allocated peak" in text
    assert text.splitlines()[-1] == exact.verdict
    assert max(map(len, exact.text(60).splitlines()[:-1])) <= 60


def test_gradients_buffers_weights_and_states_of_every_step_are_compared(exact):
    records, weight = exact.runs[1].records, "embedding_model.fc.weight"
    always = {
        f"weight of {weight}",
        "buffer of embedding_model.stem.norms.0.running_mean",
    }
    later = {f"gradient of {weight}", f"optimizer state exp_avg of {weight}"}
    for number, record in enumerate(records):
        assert always | (later if number else set()) <= record.keys()
    weights = [record[f"weight of {weight}"] for record in records]
    assert not any(torch.equal(*pair) for pair in itertools.pairwise(weights))


class Differs(torch.nn.Module):
    """Computes something else in its second run."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return (self.function(*args) * (1.1 if in_backward() else 1)).tanh()


def in_reconstruction(training, *_):
    return Mode.RECONSTRUCT in modes_of(training)


def in_two_orders(training, *_):
    return not (stores(training) or torch.are_deterministic_algorithms_enabled())


def in_each_run(training, *_, runs={}):  # noqa: B006
    """Number the runs, which each get other bits."""
    return runs.setdefault(training.modules, len(runs))


def flipping(fault):
    """Change some of the lowest bits of one value of a gradient."""

    def change(training, *_):
        grad = training.modules.get_parameter(FLIPPED).grad
        grad.view(torch.int32).flatten()[3] ^= int(fault(training))

    return change


def without_memory(full):
    def change(*step):
        if full(*step):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    return change


def spoiling(value, where=lambda *_: True, *, skips=False):
    """Set a gradient to a value in some steps, which are then skipped or not."""

    def change(training, *step):
        if where(training, *step):
            training.classifier.weight.grad.fill_(value)
            return skips
        return False

    return change


def negated(training, *_):
    if not stores(training):
        for parameter in training.modules.parameters():
            parameter.grad.neg_()


ONE_BIT = rf"Differs: step 1, gradient of {re.escape(FLIPPED)}: 1 of \d+ values, by up to \S+; .*"
INEXACT = (
    r"Not exact by design \({}\): relative error of the gradient (0\.0\d+|\d\.?\d*e-\d+) in "
    r"step 1, most of it in the gradient of \S+; \S+ and \S+ in later steps"
)
#: What changes a run, its settings, and the verdict.
VERDICTS = {
    "computes twice": (None, {"spoilt": Differs},
        r"Differs: step 1, gradient of embedding_model\.stem\.\S+: \d+ of \d+ values, by "
        r"up to \S+; \d+ of \d+ tensors .*Give --mode=store"),
    "one bit, reconstructed": (flipping(in_reconstruction), {},
        ONE_BIT + "Give --mode=recompute, which is exact here"),
    "one bit, orders": (flipping(in_two_orders), {},
        ONE_BIT + "Deterministic kernels make them equal"),
    "one bit, each run": (flipping(in_each_run), {},
        ONE_BIT + "Two runs with all blocks stored differ too"),
    "no memory, stored": (without_memory(lambda t, *_: stores(t)), {},
        "Not compared: with all blocks stored not even one"),
    "no memory, configured": (without_memory(in_reconstruction), {},
        "Memory ran out as configured, at batch 4"),
    "float streams": (None, {"streams": "float"}, INEXACT.format("streams: float")),
    "compressed": (None, {"mode": "compress"}, INEXACT.format("6 blocks compress")),
    "float, recomputed": (None, {"streams": "float", "mode": "recompute"}, "Exact: "),
    "negated": (negated, {"streams": "float"},
        "Not exact by .*the error of the gradient is as large as the gradient"),
    "not finite": (spoiling(float("nan")), {},
        "Not compared: gradients are not finite"),
    "skipped once": (spoiling(float("inf"), lambda t, n, b: n == 1 and not stores(t)), {},
        "Differs: step 2, gradient: not finite as configured, where the step is skipped"),
}  # fmt: skip
AGREE = {"float streams", "compressed", "float, recomputed"}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_names_the_first_difference_and_its_remedy(name):
    change, settings, verdict = VERDICTS[name]
    tested = compared(change or (lambda *_: None), **settings)
    assert re.match(verdict, tested.verdict), tested.verdict
    assert tested.agrees == (name in AGREE)
    assert not torch.are_deterministic_algorithms_enabled()
    rows = [run.name.split()[0] for run in tested.runs]
    expected = {"no memory, stored": ["as"], "no memory, configured": ["all"]}
    assert rows == expected.get(name, ["all", "as"])


@pytest.mark.parametrize("limit", ["memory_budget", "the device"])
def test_bits_are_compared_at_the_largest_half_whose_stored_steps_fit(exact, limit):
    def full(training, number, batch):
        return limit == "the device" and stores(training) and batch > 2

    budget = exact.runs[0].counted_bytes - 1 if limit == "memory_budget" else None
    tested = compared(without_memory(full), budget_bytes=budget)
    assert tested.agrees, tested.verdict
    runs = [(run.name.split()[0], run.batch) for run in tested.runs]
    assert runs == [("all", 2), ("as", 2), ("as", BATCH)]
    words = " ".join(tested.text().split())
    assert f"more than {limit}" in words
    assert "bits are compared at batch 2" in words


def test_steps_that_a_loss_scaler_skips_are_taken_again():
    skipped = spoiling(float("inf"), lambda t, number, b: number < 2, skips=True)
    tested = compared(skipped, precision="fp16")
    assert tested.verdict.startswith("Exact: ")
    taken = [record is not None for record in tested.runs[1].records]
    assert taken == [True, False, False, True, True, True]


def test_other_weights_at_the_beginning_are_a_difference():
    def begin(calls=iter((0, 1))):  # noqa: B008
        training = Trained()
        with torch.no_grad():
            training.classifier.weight[0, 0] += next(calls, 0)
        return training.fresh()

    verdict = self_test(Trained().step(), begin).verdict
    name = "weight of classifier.weight"
    assert verdict.startswith(f"Differs: before the first step, {name}: 1 of 160")


def test_signs_of_zeros_are_bits():
    zeros, nans = ([[{}, {"w": torch.tensor([x])}] for x in pair]
                   for pair in ((0.0, -0.0), (float("nan"),) * 2))  # fmt: skip
    assert first_difference(*zeros).how_far == "equal but for the signs of zeros"
    assert first_difference(*nans) is None


def test_a_peak_above_the_budget_of_a_gpu_does_not_agree(exact):
    def verdict(budget_bytes):
        step = dataclasses.replace(Trained().step(), device=torch.device("cuda"))
        runs = module._Comparison(step, None, budget_bytes)
        return runs.verdict(*exact.runs, exact.runs[-1])

    peak = exact.runs[-1].measured_bytes
    assert verdict(peak)[0]
    agrees, words = verdict(peak - 1)
    assert not agrees
    assert words.startswith("Above the budget: ")
    assert "Exact: " in words
