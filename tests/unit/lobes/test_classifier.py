"""Cosines of speakers, and losses with a margin: equal to others', in float32."""

import math

import pytest
import torch
from speechbrain.nnet.losses import (
    AdditiveAngularMargin,
    AngularMargin,
    LogSoftmaxWrapper,
)
from torch.nn.functional import cosine_similarity

from speechbrain_rev import heads
from speechbrain_rev.data import SpeakerAugment
from speechbrain_rev.heads import HEAD_OF, HEADS, HeadRow
from speechbrain_rev.inference.export import CardFacts, model_card, model_yaml
from speechbrain_rev.inference.runs import TrainingRecord
from speechbrain_rev.inference.trained import Weights
from speechbrain_rev.lobes.classifier import (
    AAMSoftmax,
    ClassScores,
    CosineClassifier,
    build_classifier,
    build_loss,
    true_speakers,
)
from tests.run_folders import HAPPENED, SETTINGS, tiny_encoder
from tests.unit.reversible.chains import FLOAT32, each_half

LOSSES = list(HEAD_OF)


def row_of(name, classifier, losses):
    """A row of classes of this module or of another one."""
    path = "{0.__module__}:{0.__qualname__}".format
    return HeadRow(
        name,
        path(classifier),
        {loss: path(kind) for loss, kind in losses.items()},
        weight_shape=lambda classes, dim: (classes, dim),
        step_bytes=lambda classes, dim, batch: 4 * classes * (dim + batch),
    )


def batch(*rows, dtype=torch.float32):
    """Give scores of utterances of the first class, and their classes."""
    scores = torch.tensor(rows, dtype=dtype).unsqueeze(1)
    return scores, torch.zeros(len(rows), 1, dtype=torch.long)


COSINES = batch([0.9, 0.3])


def assert_equal_in_half(halves, expected):
    for half, exact in zip(halves, expected, strict=True):
        assert half.isfinite().all()
        assert torch.equal(half, exact.to(half.dtype))


def drawn():
    torch.manual_seed(0)
    cosines, targets = torch.rand(64, 1, 7) * 1.98 - 0.99, torch.randint(7, (64, 1))
    # So that the continuation of ArcFace beyond pi - margin is met, too.
    return cosines.scatter(2, targets[:8, None], -0.995), targets


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("aam_softmax", AdditiveAngularMargin), ("am_softmax", AngularMargin)],
)
@pytest.mark.parametrize("margin", [0.0, 0.2, 0.5])
def test_losses_are_speechbrains_with_lengths_as_it_passes_them(name, theirs, margin):
    given = (*drawn(), torch.ones(64))
    expected = LogSoftmaxWrapper(theirs(margin=margin, scale=32.0))(*given)
    # Float32 rounding of logarithms of some tens.
    torch.testing.assert_close(build_loss(name, margin=margin)(*given), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_a_margin_that_is_set_later_counts(name):
    loss = build_loss(name, margin=0.0)
    loss.margin = 0.3
    assert torch.equal(loss(*drawn()), build_loss(name, margin=0.3)(*drawn()))


def test_a_loss_that_there_is_not_is_refused():
    message = f"one of {', '.join(LOSSES)}, but is 'aam'"
    with pytest.raises(ValueError, match=message):
        build_loss("aam")
    with pytest.raises(ValueError, match=message):
        build_classifier("aam", input_size=1, out_neurons=1)


class Centered(AAMSoftmax):
    def __init__(self, margin, scale):
        super().__init__(margin, scale)
        self.center = torch.nn.Parameter(torch.ones(1))


class Averaging(AAMSoftmax):
    def __init__(self, margin, scale):
        super().__init__(margin, scale)
        self.register_buffer("average", torch.ones(1), persistent=False)


@pytest.mark.parametrize(
    ("kind", "held"), [(Centered, "center"), (Averaging, "average")]
)
def test_a_loss_that_would_have_to_be_trained_or_saved_is_refused(
    monkeypatch, kind, held
):
    row = row_of("another", CosineClassifier, {"held": kind})
    monkeypatch.setitem(HEAD_OF, "held", row)
    message = (
        rf"loss held \({kind.__name__}\) has {held}, but .* no par.* the classifier"
    )
    with pytest.raises(ValueError, match=message):
        build_loss("held")


class Plain(torch.nn.Linear):
    """A classifier of scores that are no cosines."""

    def __init__(self, input_size, out_neurons):
        super().__init__(input_size, out_neurons, bias=False)


class TestAnotherHead:
    """A classifier and its losses are a row: the YAML and exports follow."""

    @pytest.fixture(autouse=True)
    def plain(self, monkeypatch):
        row = row_of("plain", Plain, {"plain_softmax": AAMSoftmax})
        monkeypatch.setitem(HEADS, "plain", row)
        monkeypatch.setitem(HEAD_OF, "plain_softmax", row)

    def test_the_loss_chooses_the_classifier(self):
        sizes = {"input_size": 8, "out_neurons": 3}
        assert type(build_classifier("plain_softmax", **sizes)) is Plain
        assert type(build_loss("plain_softmax")) is AAMSoftmax
        for name in LOSSES:
            classifier = build_classifier(name, **sizes)
            shape = HEAD_OF[name].weight_shape(3, 8)
            assert [p.shape for p in classifier.parameters()] == [shape]

    def test_an_exported_model_names_it(self):
        text = model_yaml(tiny_encoder().description, 3, HEADS["plain"])
        assert f"classifier: {HEADS['plain'].tag}\n" in text


@pytest.mark.parametrize("loss", [*LOSSES, "another", None])
def test_a_card_cites_the_paper_of_its_loss_and_of_no_other(loss, tmp_path):
    weights = Weights(tmp_path, "f00d", tiny_encoder().description, {}, "")
    record = TrainingRecord(
        "a run", {**SETTINGS, "loss": loss}, weights=None, **HAPPENED
    )
    card = model_card(CardFacts(weights, 2, record, None, None, [], []))
    kinds = {name: type(build_loss(name)) for name in LOSSES}
    papers = {kind.citation for kind in kinds.values()} - {""}
    expected = {kinds[loss].citation} if loss in kinds else set()
    assert {paper for paper in papers if f"\n- {paper}\n" in card} == expected - {""}
    assert "\n\nFingerprint" in card
    assert "\n\n\nFingerprint" not in card


def plain_loss(name, embeddings, weight, targets, margin, scale):
    """The loss in the precision of its inputs, by a loop over utterances."""
    cosines = torch.nn.functional.normalize(embeddings, dim=-1) @ (
        torch.nn.functional.normalize(weight, dim=-1).flatten(0, -2).T
    )
    cosines = cosines.unflatten(1, (len(weight), -1)).amax(2)
    losses = []
    for row, target in zip(cosines, targets.flatten(), strict=True):
        logits = list(row)
        angle = row[target].acos()
        moved = (angle + margin).cos()
        if angle > math.pi - margin:
            moved = row[target] - margin * math.sin(margin)
        logits[target] = row[target] - margin if name == "am_softmax" else moved
        if name == "subcenter_aam_softmax":
            others = [i for i in row.argsort(descending=True).tolist() if i != target]
            for i in others[:5]:
                logits[i] = (row[i].acos() - 0.06 * margin / 0.2).cos()
        logits = scale * torch.stack(logits)
        losses.append(logits.logsumexp(0) - logits[target])
    return torch.stack(losses).mean()


def in_float64(name, embeddings, weight, targets):
    leaves = [x.detach().double().requires_grad_() for x in (embeddings, weight)]
    loss = plain_loss(name, leaves[0].squeeze(1), leaves[1], targets, 0.2, 32.0)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("classes", [3, 97])
@pytest.mark.parametrize("in_parts", [False, True])
@each_half
def test_loss_and_gradients_are_a_plain_loops_whatever_autocast_and_parts(
    name, classes, in_parts, precision, monkeypatch
):
    torch.manual_seed(0)
    embeddings, targets = torch.randn(9, 1, 16), torch.randint(classes, (9, 1))
    classifier = build_classifier(name, input_size=16, out_neurons=classes)
    expected = in_float64(name, embeddings, classifier.weight, targets)
    if in_parts:
        monkeypatch.setattr(heads, "SCORES_BYTES", 0)
        # Ten classes of one direction.
        monkeypatch.setattr(heads, "PART_BYTES", 4 * 16 * 10)
    loss, x = build_loss(name, margin=0.2), embeddings.requires_grad_()
    with precision.autocast():
        scores = classifier(x)
        assert isinstance(scores, ClassScores) == in_parts
        value = loss(scores, targets)
        # A schedule sets the margin of the next step before the backward pass.
        loss.margin = 0.0
    value.backward()
    results = value.detach(), x.grad, classifier.weight.grad
    for result, exact in zip(results, expected, strict=True):
        assert result.dtype == torch.float32
        # Logits up to 32 are rounded, and the root at a cosine of 1 makes it larger.
        limit = 5e-5 * exact.abs().max().clamp_min(1e-3)
        assert (result - exact).abs().max() <= limit
    best = classifier.eval()(embeddings).argmax(-1)
    assert torch.equal(scores.detach().argmax(-1), best)


def test_a_classifier_in_parts_gives_all_scores_in_evaluation(monkeypatch):
    monkeypatch.setattr(heads, "SCORES_BYTES", 0)
    classifier = build_classifier("aam_softmax", input_size=16, out_neurons=9)
    assert isinstance(classifier(torch.randn(4, 1, 16)), ClassScores)
    assert classifier.eval()(torch.randn(4, 1, 16)).shape == (4, 1, 9)
    alone = CosineClassifier(16, 9)
    assert alone(torch.randn(4, 1, 16)).shape == (4, 1, 9)


def test_loss_and_gradient_are_finite_at_the_ends_of_the_cosine():
    for cosine in (-1.0, 1.0, 1.0 + 1e-6, -1.0 - 1e-6):
        cosines, targets = batch([cosine, 0.3])
        loss = AAMSoftmax()(cosines.requires_grad_(), targets)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(cosines.grad).all()
    # The first of bfloat16 above 1.
    assert AAMSoftmax()(*batch([1.0078125, 0.3], dtype=torch.bfloat16)).isfinite()


class TestScores:
    """What is no cosine is refused, in the batches that are looked at."""

    @pytest.mark.parametrize(
        ("number", "score"),
        [(1, -3.0), (1, 1.02), (1, 30.0), (10, 30.0), (100, 30.0), (1000, 30.0)],
    )
    def test_those_that_are_no_cosines_are_refused_with_a_classifier(
        self, number, score
    ):
        loss = AAMSoftmax()
        for _ in range(number - 1):
            loss(*COSINES)
        with pytest.raises(ValueError, match=r"takes cosines.*CosineClassifier"):
            loss(*batch([score, 0.3]))

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_those_not_finite_leave_the_next_batch_to_be_looked_at(self, value):
        loss = AAMSoftmax()
        assert loss(*batch([value, value])).isnan()
        with pytest.raises(ValueError, match="takes cosines"):
            loss(*batch([30.0, 0.3]))

    def test_those_of_four_batches_only_are_waited_for(self, monkeypatch):
        waits, item = [], torch.Tensor.item
        loss, looks = AAMSoftmax(), []
        monkeypatch.setattr(torch.Tensor, "item", lambda x: waits.append(x) or item(x))
        for number in range(1, 1101):
            waits.clear()
            loss(*COSINES)
            looks += [number] if waits else []
        assert looks == [1, 10, 100, 1000]


@each_half
def test_cosines_loss_and_gradients_are_float32s_under_autocast(precision):
    classifier = CosineClassifier(input_size=16, out_neurons=5)
    embeddings = torch.randn(8, 1, 16).to(precision.half)
    results = []
    for x, autocasts in (
        (embeddings.clone(), precision),
        (embeddings.float(), FLOAT32),
    ):
        x.requires_grad_()
        classifier.zero_grad()
        with autocasts.autocast():
            cosines = classifier(x)
            loss = AAMSoftmax()(cosines, torch.arange(8).remainder(5).unsqueeze(1))
        loss.backward()
        results.append((cosines, loss, classifier.weight.grad, x.grad))
    assert {value.dtype for value in (*results[0][:3], *results[1])} == {torch.float32}
    assert_equal_in_half(*results)


@each_half
def test_the_loss_of_cosines_in_half_precision_is_float32s_of_them(precision):
    # The steps of both halves below 1 are far larger than 1e-7, the bound's distance.
    cosines, targets = batch([1.0, 0.5], [-1.0, 0.25], [0.125, 0.75])
    results = []
    for x in (cosines.to(precision.half), cosines):
        x.requires_grad_()
        with precision.autocast():
            loss = AAMSoftmax()(x, targets)
        loss.backward()
        results.append((loss, x.grad))
    assert results[0][0].dtype == torch.float32
    assert_equal_in_half(*results)


@pytest.mark.parametrize("speakers", [6, 360, 17982])
def test_directions_begin_as_long_for_few_speakers_as_for_those_of_voxceleb2(speakers):
    torch.manual_seed(0)
    weight = CosineClassifier(input_size=256, out_neurons=speakers).weight
    usual = torch.empty(17982, 256)
    torch.nn.init.xavier_uniform_(usual)
    torch.testing.assert_close(weight.std(), usual.std(), rtol=0.05, atol=0)
    assert weight.abs().max() <= usual.abs().max() * 1.001


def test_cosines_do_not_depend_on_the_length_of_embeddings_or_weights():
    classifier = CosineClassifier(input_size=16, out_neurons=5)
    embeddings = torch.randn(8, 1, 16)
    expected = cosine_similarity(embeddings, classifier.weight[None], dim=-1)
    for _ in range(2):
        cosines = classifier(embeddings)
        torch.testing.assert_close(cosines.squeeze(1), expected, atol=1e-6, rtol=0)
        with torch.no_grad():
            classifier.weight *= 3.0
        embeddings = 0.1 * embeddings


def test_true_speakers_are_those_whose_labels_normal_speed_leaves_alone():
    speeds, speakers = (0.9, 1.0, 1.1), 5
    augment = SpeakerAugment(out_n_neurons=15, chunk_samples=800, speeds=speeds)
    weight = torch.randn(15, 3)
    labels = torch.arange(40).remainder(speakers).unsqueeze(1)
    augment(torch.randn(40, 881), torch.ones(40))
    classes = augment.replicate_labels(labels)
    assert len(classes.unique()) > 2 * speakers
    kept = classes == labels
    narrowed = true_speakers(weight, speeds=len(speeds))
    assert len(narrowed) == speakers
    assert torch.equal(narrowed[labels[kept]], weight[classes[kept]])
