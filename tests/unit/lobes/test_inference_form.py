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

from .encoders import KINDS, feats, tiny, with_statistics

NAMES = [row.name for row in ARCHITECTURES.values()]
REVERSIBLE = [name for name in KINDS if ARCHITECTURES[name].reversible]
LENGTHS = torch.tensor([1.0, 0.6])
#: Of an embedding's length: each of these encoders' 5 to 20 layers rounds once, in either
#: precision.
LAYERS = 16
ROUNDING = LAYERS * torch.finfo(torch.float32).eps


def distance(ours, expected):
    """The largest distance over the length of the embedding."""
    off = (ours - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(off.max())


@torch.no_grad()
def distances(encoder, x):
    """How far the form is from the encoder, without lengths and with them."""
    form = inference_form(encoder)
    for lengths in (None, LENGTHS):
        yield distance(form(x, lengths), encoder(x, lengths))


@pytest.mark.parametrize("name", KINDS)
def test_it_gives_the_encoder_s_embeddings(name):
    encoder = with_statistics(tiny(name))
    assert max(distances(encoder, feats(dtype=torch.float32))) < ROUNDING
    # It is folded exactly, but for rounding.
    exactly = LAYERS * torch.finfo(torch.float64).eps
    assert max(distances(encoder.double(), feats())) < exactly


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_gives_the_embeddings_of_whole_encoders(name):
    encoder = with_statistics(tiny(name, widths=None, blocks=None))
    # As SpeakerEmbedder promises, whatever the depth.
    assert max(distances(encoder, feats(dtype=torch.float32))) < 1e-5


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("variance", ["population", "unbiased"])
@torch.no_grad()
def test_an_utterance_is_embedded_alone_as_in_a_batch(name, variance):
    form = inference_form(with_statistics(tiny(name, pooling_variance=variance)))
    x = feats(dtype=torch.float32)
    frames = round(0.6 * x.shape[1])
    x[1, frames:] = torch.nan
    together = form(x, torch.tensor([1.0, frames / x.shape[1]]))
    assert distance(form(x[1:, :frames]), together[1:]) < ROUNDING


@pytest.mark.parametrize("name", REVERSIBLE)
@torch.no_grad()
def test_its_peak_does_not_grow_with_depth(name):
    x = feats(dtype=torch.float32)
    forms = [inference_form(tiny(name, blocks=(n,) * 4)) for n in (1, 3)]
    peaks = [live_bytes_peak(functools.partial(form, x)) for form in forms]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_it_holds_no_more_than_the_encoder(name):
    encoder, x = tiny(name).eval(), feats(dtype=torch.float32)
    form = inference_form(encoder)
    ours, plain = live_bytes_peak(lambda: form(x)), live_bytes_peak(lambda: encoder(x))
    # Of four maps (the block's input, a convolution's, its normalisation's, its ReLU's)
    # three are left, beside what is smaller than a map. Where a transition's convolution
    # makes the peak, both hold the same.
    limit = plain if ARCHITECTURES[name].block == "bottleneck" else 0.8 * plain
    assert ours <= limit


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


def test_what_it_is_given_stays_as_it_was():
    x = feats(dtype=torch.float32)
    before = x.clone()
    inference_form(tiny("df_revnet66"))(x, LENGTHS)
    assert torch.equal(x, before)


def test_a_normalisation_that_follows_no_convolution_is_refused():
    encoder = tiny("resnet34")
    encoder.stages[0].blocks[0].conv2 = nn.Identity()
    message = r"blocks\.0\.norm2 of resnet34 cannot .* which is Identity here"
    with pytest.raises(ValueError, match=message):
        inference_form(encoder)


class Doubled(nn.Conv2d):
    def forward(self, input):
        return 2 * super().forward(input)


def doubled(encoder, place):
    conv = Doubled(8, 8, 3, padding=1, bias=False)
    encoder.set_submodule(place, conv)


def with_bias(encoder, place):
    encoder.get_submodule(place).bias = nn.Parameter(torch.ones(8))


def reflecting(encoder, place):
    encoder.get_submodule(place).padding_mode = "reflect"


def hooked(encoder, place):
    encoder.get_submodule(place).register_forward_hook(lambda *given: 2 * given[-1])


def hooked_before(encoder, place):
    encoder.get_submodule(place).register_forward_pre_hook(lambda *given: None)


def spectral(encoder, place):
    nn.utils.parametrizations.spectral_norm(encoder.get_submodule(place))


def patched(encoder, place):
    encoder.get_submodule(place).forward = lambda x, mask=None: 2 * x


CONV = "stages.0.chain.blocks.0.f.conv1"


@pytest.mark.parametrize(
    ("add", "place", "said"),
    [
        (doubled, CONV, "a class of its own, Doubled"),
        (with_bias, CONV, "a bias"),
        (reflecting, CONV, "padding_mode 'reflect'"),
        (hooked, CONV, "forward hooks"),
        (hooked, "stages.0.chain.blocks.0.f.norm", "forward hooks"),
        (hooked, "stages.0.chain.blocks.0", "forward hooks"),
        (hooked, "stages.0", "forward hooks"),
        (hooked, "", "forward hooks"),
        (hooked_before, CONV, "forward hooks"),
        (spectral, CONV, "a class of its own, ParametrizedConv2d"),
        (patched, CONV, "a forward of its own"),
    ],
)
def test_what_it_would_leave_out_is_refused_by_name(add, place, said):
    encoder = tiny("revnet57")
    add(encoder, place)
    named = f"^{place or 'The encoder'} of revnet57 has {said}, which its form"
    with pytest.raises(ValueError, match=named):
        inference_form(encoder)


@torch.no_grad()
def test_hooks_of_what_it_keeps_are_called():
    encoder = with_statistics(tiny("revnet57"))
    for place in ("stem", "stages.0.chain.blocks.0.f", "fc"):
        hooked(encoder, place)
    assert max(distances(encoder, feats(dtype=torch.float32))) < ROUNDING


@pytest.mark.parametrize("mode", ["store", "recompute", "reconstruct", "compress"])
def test_the_form_of_an_encoder_that_has_just_trained_is_that_of_evaluation(mode):
    encoder = tiny("revnet57", mode=mode)
    encoder(feats(4, dtype=torch.float32)).square().sum().backward()
    form = inference_form(encoder)
    assert encoder.training
    x = feats(dtype=torch.float32)
    with torch.no_grad():
        assert distance(form(x), encoder.eval()(x)) < ROUNDING
    assert all(p.grad is None for p in form.parameters())


def test_a_frozen_encoder_stays_frozen_and_has_the_same_form():
    encoder = with_statistics(tiny("resnet34")).requires_grad_(False)
    assert max(distances(encoder, feats(dtype=torch.float32))) < ROUNDING
    assert not any(p.requires_grad for p in encoder.parameters())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_form_of_an_encoder_in_half_precision_is_as_near_to_the_exact_one(
    name, dtype
):
    encoder = with_statistics(tiny(name)).to(dtype)
    x = feats(dtype=dtype)
    with torch.no_grad():
        exact = copy.deepcopy(encoder).double()(x.double())
        plain, ours = encoder(x), inference_form(encoder)(x)
    assert ours.dtype == plain.dtype == dtype
    # Both round each layer to half precision, and the form its weights once more.
    off, plain_off = distance(ours.double(), exact), distance(plain.double(), exact)
    assert off <= 2 * plain_off


def test_what_is_no_batch_of_filterbanks_is_refused_as_by_the_encoder():
    with pytest.raises(ValueError, match="needs at least 9 frames"):
        inference_form(tiny("revnet57"))(torch.zeros(1, 8, 80))
