"""An encoder's form for inference gives its embeddings, in two streams."""

import copy
import functools

import pytest
import torch
from torch import nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import inference_form
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible.norm import BatchNorm
from tests.unit.lobes.encoders import FEW, KINDS, feats, tiny, with_statistics

LENGTHS = torch.tensor([1.0, 0.6])
#: Of an embedding's length: each of these encoders' 5 to 20 layers rounds once.
ROUNDING = {d: 16 * torch.finfo(d).eps for d in (torch.float32, torch.float64)}


def distance(ours, expected):
    """The largest distance over the length of the embedding."""
    return float(((ours - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@torch.no_grad()
def off(encoder, x, form=None):
    """How far the form is from the encoder, without lengths and with them."""
    form = form or inference_form(encoder)
    return max(distance(form(x, n), encoder(x, n)) for n in (None, LENGTHS))


@pytest.mark.parametrize("name", KINDS)
def test_it_gives_the_encoders_embeddings(name):
    encoder = with_statistics(tiny(name)).requires_grad_(False)
    for dtype, rounding in ROUNDING.items():
        assert off(encoder.to(dtype), feats(dtype=dtype)) < rounding
    assert not any(p.requires_grad for p in encoder.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_gives_the_embeddings_of_whole_encoders(name):
    encoder = with_statistics(tiny(name, widths=None, blocks=None))
    # As SpeakerEmbedder promises, whatever the depth.
    assert off(encoder, feats(dtype=torch.float32)) < 1e-5


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("variance", ["population", "unbiased"])
@torch.no_grad()
def test_an_utterance_is_embedded_alone_as_in_a_batch(name, variance):
    form = inference_form(with_statistics(tiny(name, pooling_variance=variance)))
    x = feats(dtype=torch.float32)
    x[1, 26:] = torch.nan
    before = x.clone()
    together = form(x, torch.tensor([1.0, 26 / 43]))
    assert distance(form(x[1:, :26]), together[1:]) < ROUNDING[torch.float32]
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("name", ["resnet34", "revnet57"])
@torch.no_grad()
def test_it_holds_no_more_than_the_encoder_whatever_its_depth(name):
    encoder, x = tiny(name).eval(), feats(dtype=torch.float32)
    peak = lambda module: live_bytes_peak(functools.partial(module, x))  # noqa: E731
    # Of four maps (the block's input, a convolution's, its normalisation's, its ReLU's)
    # three are left, beside what is smaller than a map.
    assert peak(inference_form(encoder)) <= 0.8 * peak(encoder)
    if ARCHITECTURES[name].reversible:
        forms = [inference_form(tiny(name, blocks=(n,) * 4)) for n in (1, 3)]
        assert peak(forms[0]) == peak(forms[1])


def test_it_has_no_normalisations_no_gradients_and_weights_of_its_own():
    encoder = tiny("revnet57")
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    form = inference_form(encoder)
    assert not any(isinstance(m, BatchNorm) for m in form.modules())
    assert all(type(m) is nn.Conv2d for m in form.modules() if hasattr(m, "stride"))
    assert not any(p.requires_grad for p in form.parameters())
    assert not form.training
    for p in form.parameters():
        p.zero_()
    after = encoder.state_dict()
    assert encoder.training
    assert all(torch.equal(after[name], value) for name, value in before.items())


class Doubled(nn.Conv2d):
    """A layer of a class of its own."""


def hook(module):
    module.register_forward_hook(lambda *given: 2 * given[-1])


FUNCTION = "stages.0.chain.blocks.0.f"
CONV = f"{FUNCTION}.conv1"


@pytest.mark.parametrize(
    ("add", "place", "message"),
    [
        (lambda m: setattr(m, "conv1", Doubled(8, 8, 3)), FUNCTION, "a class of its"),
        (lambda m: setattr(m, "bias", nn.Parameter(torch.ones(8))), CONV, "a bias"),
        (lambda m: setattr(m, "padding_mode", "reflect"), CONV, "padding_mode 'refle"),
        (lambda m: setattr(m, "forward", m.forward), CONV, "a forward of its own"),
        (nn.utils.parametrizations.spectral_norm, CONV, "a class of its own, Param"),
        (lambda m: m.register_forward_pre_hook(lambda *_: None), CONV, "forward hooks"),
        (hook, CONV, "forward hooks"),
        (hook, f"{FUNCTION}.norm", "forward hooks"),
        (hook, FUNCTION[:-2], "forward hooks"),
        (hook, "stages.0", "forward hooks"),
        (hook, "", "forward hooks"),
    ],
)
def test_what_it_would_leave_out_is_refused_by_name(add, place, message):
    encoder = tiny("revnet57")
    add(encoder.get_submodule(place))
    named = CONV if place == FUNCTION else place or "The encoder"
    with pytest.raises(ValueError, match=f"^{named} of revnet57 has {message}.* its f"):
        inference_form(encoder)


def test_a_normalisation_that_follows_no_convolution_is_refused():
    encoder = tiny("resnet34")
    encoder.stages[0].blocks[0].conv2 = nn.Identity()
    message = r"blocks\.0\.norm2 of resnet34 cannot .* which is Identity here"
    with pytest.raises(ValueError, match=message):
        inference_form(encoder)


def test_hooks_of_what_it_keeps_are_called():
    encoder = with_statistics(tiny("revnet57"))
    for place in ("stem", FUNCTION, "fc"):
        hook(encoder.get_submodule(place))
    assert off(encoder, feats(dtype=torch.float32)) < ROUNDING[torch.float32]


@pytest.mark.parametrize("mode", ["store", "recompute", "reconstruct", "compress"])
def test_the_form_of_an_encoder_that_has_just_trained_is_that_of_evaluation(mode):
    encoder, x = tiny("revnet57", mode=mode), feats(dtype=torch.float32)
    encoder(x.roll(1, 1)).square().sum().backward()
    form = inference_form(encoder)
    assert encoder.training
    assert off(encoder.eval(), x, form) < ROUNDING[torch.float32]
    assert all(p.grad is None for p in form.parameters())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_in_half_precision_it_is_as_near_to_the_exact_one(name, dtype):
    encoder, x = with_statistics(tiny(name)).to(dtype), feats(dtype=dtype)
    exact = copy.deepcopy(encoder).double()(x.double())
    plain, ours = encoder(x), inference_form(encoder)(x)
    assert ours.dtype == plain.dtype == dtype
    # Both round each layer to half precision, and the form its weights once more.
    assert distance(ours.double(), exact) <= 2 * distance(plain.double(), exact)
