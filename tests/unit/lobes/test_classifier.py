import itertools
import math

import pytest
import torch
from speechbrain.nnet.losses import (
    AdditiveAngularMargin,
    AngularMargin,
    LogSoftmaxWrapper,
)

from speechbrain_rev.data import SpeakerAugment
from speechbrain_rev.lobes.classifier import (
    LOSSES,
    AAMSoftmax,
    AMSoftmax,
    CosineClassifier,
    build_loss,
    true_speakers,
)
from tests.unit.reversible.chains import FLOAT32, each_half


def reference_loss(cosines, targets, margin, scale):
    """ArcFace by angles, in float64, one utterance at a time."""
    losses = []
    for row, target in zip(cosines.double().squeeze(1), targets.flatten(), strict=True):
        logits = [scale * c.item() for c in row]
        angle = math.acos(row[target])
        if angle + margin < math.pi:
            logits[target] = scale * math.cos(angle + margin)
        else:
            logits[target] = scale * (math.cos(angle) - margin * math.sin(margin))
        total = math.log(sum(math.exp(value - max(logits)) for value in logits))
        losses.append(max(logits) + total - logits[target])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("margin", [0.0, 0.2, 0.5])
def test_the_loss_equals_arcface_computed_by_angles_in_float64(margin):
    torch.manual_seed(0)
    cosines = torch.rand(64, 1, 7) * 1.98 - 0.99
    targets = torch.randint(7, (64, 1))
    # So that the continuation beyond pi - margin is met, too.
    cosines[:8].scatter_(2, targets[:8, None], -0.995)
    loss = AAMSoftmax(margin=margin, scale=32.0)(cosines, targets)
    expected = reference_loss(cosines, targets, margin, 32.0)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_a_margin_of_the_cosine_is_speechbrain_s_angular_margin(margin):
    torch.manual_seed(0)
    cosines, targets = torch.rand(64, 1, 7) * 1.98 - 0.99, torch.randint(7, (64, 1))
    theirs = LogSoftmaxWrapper(AngularMargin(margin=margin, scale=32.0))
    ours = AMSoftmax(margin=margin, scale=32.0)
    # Float32 rounding of logarithms of some tens.
    torch.testing.assert_close(ours(cosines, targets), theirs(cosines, targets))


@pytest.mark.parametrize("name", LOSSES)
def test_a_margin_that_is_set_later_counts(name):
    cosines, targets = torch.tensor([[[0.5, 0.4]]]), torch.tensor([[0]])
    loss = build_loss(name, margin=0.0)
    before = loss(cosines, targets)
    loss.margin = 0.3
    assert loss(cosines, targets) > before + 1


def test_a_loss_that_there_is_not_is_refused():
    with pytest.raises(
        ValueError, match="one of aam_softmax, am_softmax, but is 'aam'"
    ):
        build_loss("aam")


def test_the_loss_falls_as_the_target_cosine_rises_past_the_continuation_too():
    target_cosines = torch.linspace(-0.9999, 0.9999, 400)
    cosines = torch.stack([target_cosines, torch.zeros(400)], dim=1).unsqueeze(1)
    loss_fn = AAMSoftmax(margin=0.5, scale=4.0)
    losses = [loss_fn(row[None], torch.tensor([[0]])).item() for row in cosines]
    assert all(b < a for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize("cosine", [-1.0, 1.0, 1.0 + 1e-6, -1.0 - 1e-6])
def test_loss_and_gradient_are_finite_at_the_ends_of_the_cosine(cosine):
    cosines = torch.tensor([[[cosine, 0.3]]], requires_grad=True)
    loss = AAMSoftmax()(cosines, torch.tensor([[0]]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(cosines.grad).all()


@pytest.mark.parametrize(("margin", "scale"), [(0.2, 30), (0.5, 32)])
def test_the_loss_is_that_of_speechbrains_two_classes(margin, scale):
    torch.manual_seed(1)
    cosines = torch.rand(64, 1, 7) * 2 - 1
    targets = torch.randint(7, (64, 1))
    theirs = LogSoftmaxWrapper(AdditiveAngularMargin(margin=margin, scale=scale))
    ours = AAMSoftmax(margin=margin, scale=scale)(cosines, targets, torch.ones(64))
    torch.testing.assert_close(ours, theirs(cosines, targets, torch.ones(64)))


@pytest.mark.parametrize("speakers", [6, 360, 17982])
def test_directions_begin_as_long_for_few_speakers_as_for_those_of_voxceleb2(speakers):
    torch.manual_seed(0)
    found = CosineClassifier(input_size=256, out_neurons=speakers).weight
    usual = torch.empty(17982, 256)
    torch.nn.init.xavier_uniform_(usual)
    torch.testing.assert_close(found.std(), usual.std(), rtol=0.05, atol=0)
    assert found.abs().max() <= usual.abs().max() * 1.001


@pytest.mark.parametrize("score", [-3.0, 1.02, 30.0])
def test_scores_that_are_no_cosines_are_refused_with_a_classifier_to_take(score):
    scores, targets = torch.tensor([[[score, 0.3]]]), torch.tensor([[0]])
    with pytest.raises(ValueError, match=r"takes cosines.*CosineClassifier"):
        AAMSoftmax()(scores, targets)


def test_what_is_not_finite_is_left_to_whoever_skips_steps():
    scores, targets = torch.full((1, 1, 2), math.nan), torch.tensor([[0]])
    assert AAMSoftmax()(scores, targets).isnan()


SCORES = torch.tensor([[[30.0, 0.3]]]), torch.tensor([[0]])
COSINES = torch.tensor([[[0.9, 0.3]]]), torch.tensor([[0]])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_batch_that_is_not_finite_leaves_the_next_one_to_be_looked_at(value):
    loss = AAMSoftmax()
    loss(torch.full((1, 1, 2), value), torch.tensor([[0]]))
    with pytest.raises(ValueError, match="takes cosines"):
        loss(*SCORES)


@pytest.mark.parametrize("batch", [10, 100, 1000])
def test_scores_that_grow_in_training_are_refused_later(batch):
    loss = AAMSoftmax()
    for _ in range(batch - 1):
        loss(*COSINES)
    with pytest.raises(ValueError, match="takes cosines"):
        loss(*SCORES)


def test_the_scores_of_four_batches_only_are_waited_for(monkeypatch):
    waits, item = [], torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda x: waits.append(x) or item(x))
    loss, looks = AAMSoftmax(), []
    for batch in range(1, 1101):
        waits.clear()
        loss(*COSINES)
        if waits:
            looks.append(batch)
    assert looks == [1, 10, 100, 1000]


def test_cosines_of_a_classifier_in_bfloat16_are_taken():
    # The first of bfloat16 above 1.
    scores = torch.tensor([[[1.0078125, 0.3]]], dtype=torch.bfloat16)
    assert AAMSoftmax()(scores, torch.tensor([[0]])).isfinite()


def test_a_margin_set_later_is_the_one_used():
    cosines, targets = torch.rand(4, 1, 3), torch.tensor([[0], [1], [2], [0]])
    scheduled = AAMSoftmax(margin=0.0)
    scheduled.margin = 0.3
    assert torch.equal(
        scheduled(cosines, targets), AAMSoftmax(margin=0.3)(cosines, targets)
    )


def test_lengths_are_accepted_as_speechbrain_passes_them():
    cosines, targets = torch.rand(2, 1, 3), torch.tensor([[0], [1]])
    loss_fn = AAMSoftmax()
    assert torch.equal(
        loss_fn(cosines, targets), loss_fn(cosines, targets, torch.ones(2))
    )


@each_half
def test_cosines_loss_and_gradients_are_float32s_under_autocast(precision):
    torch.manual_seed(0)
    classifier = CosineClassifier(input_size=16, out_neurons=5)
    embeddings = torch.randn(8, 1, 16).to(precision.half)
    targets = torch.randint(5, (8, 1))
    results = []
    for x, autocasts in (
        (embeddings.clone(), precision),
        (embeddings.float(), FLOAT32),
    ):
        x.requires_grad_()
        classifier.zero_grad()
        with autocasts.autocast():
            cosines = classifier(x)
            loss = AAMSoftmax()(cosines, targets)
        loss.backward()
        results.append((cosines, loss, classifier.weight.grad, x.grad))
    for found, expected in zip(*results, strict=True):
        assert expected.dtype == torch.float32
        assert torch.equal(found, expected.to(found.dtype))
    assert all(found.dtype == torch.float32 for found in results[0][:3])


@each_half
def test_the_loss_of_cosines_in_half_precision_is_float32s_of_them(precision):
    # The steps of both halves below 1 are far larger than 1e-7, the bound's distance.
    cosines = torch.tensor([[[1.0, 0.5]], [[-1.0, 0.25]], [[0.75, 0.125]]])
    targets = torch.tensor([[0], [0], [1]])
    results = []
    for x in (cosines.to(precision.half), cosines):
        x.requires_grad_()
        with precision.autocast():
            loss = AAMSoftmax()(x, targets)
        loss.backward()
        results.append((loss, x.grad))
    (loss, grad), (expected, expected_grad) = results
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert torch.equal(grad, expected_grad.to(grad.dtype))
    assert grad.isfinite().all()


def test_cosines_do_not_depend_on_the_length_of_embeddings_or_weights():
    classifier = CosineClassifier(input_size=16, out_neurons=5)
    embeddings = torch.randn(8, 1, 16)
    cosines = classifier(embeddings)
    with torch.no_grad():
        classifier.weight *= 3.0
    assert torch.allclose(classifier(0.1 * embeddings), cosines, atol=1e-6)
    assert cosines.abs().max() <= 1 + 1e-6
    expected = torch.nn.functional.cosine_similarity(
        embeddings, classifier.weight[None], dim=-1
    )
    assert torch.allclose(cosines.squeeze(1), expected, atol=1e-6)


def test_true_speakers_are_those_whose_labels_normal_speed_leaves_alone():
    speeds, speakers = (0.9, 1.0, 1.1), 5
    augment = SpeakerAugment(
        out_n_neurons=speakers * len(speeds), chunk_samples=800, speeds=speeds
    )
    weight = torch.randn(speakers * len(speeds), 3)
    labels = torch.arange(40).remainder(speakers).unsqueeze(1)
    augment(torch.randn(40, 881), torch.ones(40))
    classes = augment.replicate_labels(labels)
    assert len(classes.unique()) > 2 * speakers
    kept = classes == labels
    narrowed = true_speakers(weight, speeds=len(speeds))
    assert len(narrowed) == speakers
    assert torch.equal(narrowed[labels[kept]], weight[classes[kept]])
