"""Encoder, pooling and training head under bf16, and under fp16 with a scaled loss."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.lobes.pooling import StatisticsPooling
from speechbrain_rev.optim import build_optimizer
from tests.unit.lobes.encoders import KINDS, feats, tiny
from tests.unit.reversible.chains import (
    BF16,
    FLOAT32,
    FLOAT32_ROUNDING,
    FP16,
    SHARE_OF_HALF,
    distance,
    each_half,
)

#: The largest power of two at which none of these networks overflows. A scaler starts
#: at 2**16 and finds such a one by skipping steps.
SCALE = 2.0**10
WITHOUT_STORAGE = ["reconstruct", "recompute"]


class Head(torch.nn.Module):
    """An encoder with what training adds to it; returns the loss."""

    def __init__(self, name, mode):
        super().__init__()
        self.encoder = tiny(name, mode=mode)
        self.classifier = CosineClassifier(32, 6)
        self.loss = AAMSoftmax(margin=0.2, scale=32.0)

    def forward(self, x, lengths=None):
        self.embeddings = self.encoder(x, lengths)
        self.cosines = self.classifier(self.embeddings)
        return self.loss(self.cosines, torch.arange(len(x)).unsqueeze(1))


def train(name, mode, precision, lengths=None):
    """One step: the head with unscaled gradients."""
    precision = replace(precision, scale=precision.scale and SCALE)
    head = Head(name, mode)
    with precision.autocast():
        loss = head(feats(4, 27, torch.float32), lengths)
    scaler = precision.scaler()
    scaler.scale(loss).backward()
    scaler.unscale_(torch.optim.SGD(head.parameters(), lr=0.1))
    return head, loss


def grads_of(head):
    return {name: p.grad for name, p in head.named_parameters()}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("precision", "padded"),
    [
        (BF16, False),
        (BF16, True),
        pytest.param(FP16, False, marks=pytest.mark.slow),
        (FP16, True),
    ],
    ids=str,
)
def test_gradients_and_buffers_of_all_modes_are_those_of_store(name, precision, padded):
    lengths = torch.tensor([1.0, 0.8, 0.6, 0.4]) if padded else None
    stored, loss = train(name, "store", precision, lengths)
    in_float32, _ = train(name, "store", FLOAT32, lengths)
    assert loss.dtype == torch.float32
    of_half = distance(grads_of(stored), grads_of(in_float32))
    assert 0 < of_half < 0.5
    for mode in WITHOUT_STORAGE:
        if mode == "reconstruct" and not ARCHITECTURES[name].reversible:
            continue
        head, found = train(name, mode, precision, lengths)
        assert torch.equal(found, loss)
        limit = FLOAT32_ROUNDING + SHARE_OF_HALF * of_half
        limit = limit if mode == "reconstruct" else 0
        assert distance(grads_of(head), grads_of(stored)) <= limit
        assert all(p.grad.dtype == torch.float32 for p in head.parameters())
        buffers = zip(head.named_buffers(), stored.buffers(), strict=True)
        for (key, buffer), expected in buffers:
            assert torch.equal(buffer, expected), key


@each_half
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["resnet34", "revnet57", "df_revnet89"])
def test_pooling_and_cosines_in_the_whole_network_are_float32s_of_what_they_get(
    name, training, precision
):
    calls, entering = [], []
    head = Head(name, None).train(training)
    pooling = head.encoder.pooling
    hook = pooling.register_forward_hook(lambda *call: calls.append(call[1:]))
    head.encoder.fc.register_forward_pre_hook(lambda _, x: entering.append(x[0]))
    with precision.autocast():
        head(feats(4, 43, torch.float32), torch.tensor([1.0, 0.8, 0.6, 0.4]))
    hook.remove()
    (((mask, *parts), pooled),) = calls
    # Streams are float32; what ordinary blocks return is in half precision.
    dtype = torch.float32 if ARCHITECTURES[name].reversible else precision.half
    assert {maps.dtype for maps in parts} == {dtype}
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, pooling(mask, *(maps.float() for maps in parts)))
    assert entering[0].dtype == torch.float32
    # The linear layer is autocast's, and the last to be.
    assert head.embeddings.dtype == precision.half
    assert head.cosines.dtype == torch.float32
    assert torch.equal(head.cosines, head.classifier(head.embeddings.float()))


@each_half
@pytest.mark.parametrize("variance", ["population", "unbiased"])
@pytest.mark.parametrize("masks", [False, True])
def test_pooling_and_its_gradient_are_float32s(precision, variance, masks):
    torch.manual_seed(0)
    # Sums, squares and scaled gradients are above fp16's largest number.
    maps = (torch.randn(2, 3, 4, 500) * 200 + 1000).to(precision.half)
    frames = torch.tensor([[500], [300]])
    mask = (torch.arange(500) < frames).float()[:, None, None, :] if masks else None
    results = []
    for x, autocasts in ((maps.clone(), precision), (maps.float(), FLOAT32)):
        x.requires_grad_()
        with autocasts.autocast():
            pooled = StatisticsPooling(12, variance=variance)(mask, x).chunk(2, dim=1)
            loss = SCALE * (pooled[0].square().sum() + pooled[1].sum())
        loss.backward()
        results.append((*pooled, x.grad))
    for found, expected in zip(*results, strict=True):
        assert expected.dtype == torch.float32
        assert torch.equal(found, expected.to(found.dtype))
    assert results[0][0].dtype == results[0][1].dtype == torch.float32


@each_half
def test_the_floor_of_the_variance_holds_in_half_precision(precision):
    # 1e-7 is nothing to fp16, and the root of nothing has no gradient.
    maps = torch.full((2, 3, 4, 50), 7.0, dtype=precision.half, requires_grad=True)
    with precision.autocast():
        std = StatisticsPooling(12, variance="population")(None, maps)[:, 12:]
    assert torch.equal(std, torch.full_like(std, 1e-7).sqrt())
    (SCALE * std.sum()).backward()
    assert maps.grad.isfinite().all()


@each_half
@pytest.mark.parametrize("name", ["resnet34", "revnet57", "df_revnet89"])
def test_features_in_half_precision_are_taken_for_what_they_are(name, precision):
    encoder = tiny(name).eval()
    x, lengths = (
        feats(2, 43, torch.float32).to(precision.half),
        torch.tensor([1.0, 0.6]),
    )
    with precision.autocast(), torch.no_grad():
        assert torch.equal(encoder(x, lengths), encoder(x.float(), lengths))


@each_half
@pytest.mark.parametrize("name", KINDS)
def test_padding_changes_embeddings_less_than_half_precision_does(name, precision):
    encoder = tiny(name).eval()
    long, short = feats(1, 45, torch.float32), feats(1, 27, torch.float32)
    padding = torch.nn.functional.pad(short, (0, 0, 0, 18), value=7.0)
    with torch.no_grad():
        exact = torch.cat([encoder(long), encoder(short)])
        with precision.autocast():
            alone = torch.cat([encoder(long), encoder(short)]).float()
            together = encoder(
                torch.cat([long, padding]), torch.tensor([1.0, 27 / 45])
            ).float()
    assert (together - alone).norm() <= (alone - exact).norm()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("bits", [8, 32])
def test_a_step_that_overflows_leaves_weights_and_optimizer_as_they_are(bits, name):
    # The first step overflows as well: states that are not there are not made.
    head = Head("revnet57", "reconstruct")
    optimizer = build_optimizer(head.parameters(), name=name, bits=bits, lr=1e-3)
    scaler = FP16.scaler()
    scaler.scale(torch.zeros(()))  # makes the scale that is set here at each step
    skipped = []
    for scale in (2.0**40, SCALE, 2.0**40, SCALE):
        scaler.update(scale)
        before = copy.deepcopy((head.state_dict(), optimizer.state_dict()))
        with FP16.autocast():
            loss = head(feats(4, 43, torch.float32))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(scaler.get_scale() < scale)
        assert loss.isfinite()
        weights = {n: before[0][n] for n, _ in head.named_parameters()}
        moved = distance(dict(head.named_parameters()), weights)
        assert (moved == 0) == skipped[-1]
        if skipped[-1]:
            states = optimizer.state_dict()["state"], before[1]["state"]
            torch.testing.assert_close(*states, rtol=0, atol=0)
    assert skipped == [True, False, True, False]
    states = [x for x in tree_leaves(states[0]) if isinstance(x, torch.Tensor)]
    assert any(x.dtype == torch.uint8 for x in states) == (bits == 8)
    assert all(v.isfinite().all() for v in head.state_dict().values())
