"""bf16, and fp16 with a scaled loss, on a CUDA device: the same promises as on the CPU."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.lobes.pooling import StatisticsPooling
from speechbrain_rev.optim import build_optimizer
from tests.corpus import write_corpus
from tests.recipes.runs import arguments, recipe
from tests.unit.lobes.encoders import tiny
from tests.unit.reversible.chains import (
    BF16,
    FLOAT32,
    FP16,
    MODES,
    RESIDUALS,
    Run,
    chain_of,
    equal_to_plain,
    streams,
    train_once,
)

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
each_half = pytest.mark.parametrize(
    "precision", [replace(p, device=DEVICE) for p in (BF16, FP16)], ids=str
)


@pytest.fixture(autouse=True)
def equal_kernels(monkeypatch):
    # Two runs of one convolution add up in one order.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def on_device(dtype):
    return [x.detach().to(DEVICE).requires_grad_() for x in streams(dtype)]


@each_half
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", RESIDUALS)
def test_gradients_and_buffers_equal_plain_autograds(kind, mode, precision):
    chain = chain_of(kind, mode=mode, dtype=torch.float32).to(DEVICE)
    equal_to_plain(chain, precision, partial(train_once, inputs=on_device))


@each_half
@pytest.mark.parametrize("mode", MODES)
def test_masked_chains_equal_plain_autograd(mode, precision):
    chain = chain_of("basic", mode=mode, dtype=torch.float32).to(DEVICE)
    mask = (torch.arange(12) < torch.tensor([[12], [7]])).float()[:, None, None, :]
    train = partial(train_once, inputs=on_device, mask=mask.to(DEVICE))
    equal_to_plain(chain, precision, train)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["basic", "dropout"])
def test_a_step_whose_gradients_overflow_changes_statistics_alone(kind, mode):
    precision = replace(FP16, device=DEVICE)
    run, stored = (
        Run(chain_of(kind, mode=m, dtype=torch.float32).to(DEVICE), precision)
        for m in (mode, "store")
    )
    for r in (run, stored):
        r.step()
        before = r.state()
        r.scaler.update(2.0**40)
        r.step()
        torch.testing.assert_close(r.state(), before, rtol=0, atol=0)
        assert r.scaler.get_scale() == 2.0**39
    buffers = dict(stored.chain.named_buffers())
    for name, buffer in run.chain.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@each_half
@pytest.mark.parametrize("masks", [False, True])
def test_pooling_and_cosines_are_float32s(precision, masks):
    torch.manual_seed(0)
    maps = (torch.randn(2, 3, 4, 500, device=DEVICE) * 200 + 1000).to(precision.half)
    frames = torch.tensor([[500], [300]], device=DEVICE)
    mask = (torch.arange(500, device=DEVICE) < frames).float()[:, None, None, :]
    classifier = CosineClassifier(24, 5).to(DEVICE)
    pooling = StatisticsPooling(12, variance="population")
    results = []
    for x, autocasts in (
        (maps.clone(), precision),
        (maps.float(), replace(FLOAT32, device=DEVICE)),
    ):
        x.requires_grad_()
        classifier.zero_grad()
        with autocasts.autocast():
            pooled = pooling(mask if masks else None, x)
            cosines = classifier(pooled.unsqueeze(1))
            loss = AAMSoftmax()(cosines, torch.tensor([[0], [1]], device=DEVICE))
        loss.backward()
        results.append((pooled, cosines, loss, classifier.weight.grad, x.grad))
    for x, expected in zip(*results, strict=True):
        assert torch.equal(x, expected.to(x.dtype))
    assert all(x.dtype == torch.float32 for x in results[0][:-1])


@each_half
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", ["revnet57", "df_revnet66", "resnet34"])
def test_encoders_train(name, bits, precision):
    torch.manual_seed(0)
    encoder = tiny(name).to(DEVICE)
    optimizer = build_optimizer(encoder.parameters(), name="adamw", bits=bits, lr=3e-3)
    scaler = precision.scaler(init_scale=2.0**16)
    feats = torch.randn(8, 96, 80, device=DEVICE)
    target = torch.randn(8, 1, 32, device=DEVICE)
    losses = []
    for _ in range(30):
        with precision.autocast():
            loss = (encoder(feats).float() - target).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert all(v.isfinite().all() for v in encoder.state_dict().values())


class Stopped(BaseException):
    """What no handler of errors sees."""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_recipe_trains_resumes_and_counts_skipped_steps(
    precision, tmp_path, monkeypatch
):
    train, taken, stop_at = recipe("train"), [], [0]
    monkeypatch.setattr(train.sb, "create_experiment_directory", lambda folder: None)

    class WatchedBrain(train.SpeakerBrain):
        def init_optimizers(self):
            super().init_optimizers()
            weight, before = self.optimizer.param_groups[0]["params"][0], []
            self.optimizer.register_step_pre_hook(
                lambda *_: before.append(weight.detach().clone())
            )
            self.optimizer.register_step_post_hook(
                lambda *_: taken.append(not torch.equal(weight, before.pop()))
            )

        def on_fit_batch_end(self, *args):
            super().on_fit_batch_end(*args)
            if self.hparams.lr_annealing.step == stop_at[0]:
                raise Stopped

    monkeypatch.setattr(train, "SpeakerBrain", WatchedBrain)
    data = write_corpus(tmp_path / "corpus")
    settings = {"precision": precision, "valid_speakers": 0, "ckpt_interval_steps": 4}
    whole, parts = (
        [*arguments(data, tmp_path / name, **settings)[:-1], f"--device={DEVICE}"]
        for name in ("whole", "parts")
    )
    train.main(whole)
    lines = log(tmp_path / "whole")
    assert lines[-1]["steps"] == 12
    assert all(torch.tensor(line["train_loss"]).isfinite() for line in lines)
    assert sum(line["skipped_steps"] for line in lines) == taken.count(False)
    assert len(taken) == 12
    # A scale of 2**16 is too large for the first steps.
    assert (lines[0]["skipped_steps"] > 0) == (precision == "fp16")
    stop_at[0] = 5
    with pytest.raises(Stopped):
        train.main(parts)
    saved = list((tmp_path / "parts" / "save").glob("CKPT*/scaler.ckpt"))
    assert len(saved) == (precision == "fp16")
    stop_at[0] = 0
    train.main(parts)
    for key in ("steps", "lr"):
        assert [x[key] for x in log(tmp_path / "parts")] == [x[key] for x in lines]


def log(folder):
    return [json.loads(line) for line in (folder / "train_log.jsonl").open()]
