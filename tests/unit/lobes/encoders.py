"""Small encoders of every kind, features for them, and steps of their training."""

import contextlib

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.reversible.norm import BatchNorm
from tests.unit.reversible.chains import FLOAT32

#: One encoder of each way to be built.
KINDS = [
    "resnet34", "resnet101", "df_resnet56", "revnet46", "revnet57", "revnet140",
    "revnet155", "df_revnet66", "df_revnet89",
]  # fmt: skip
REVERSIBLE = [name for name in KINDS if ARCHITECTURES[name].reversible]
#: Of a family each, and of both types.
FEW = ["resnet34", "revnet46", "revnet140", "df_revnet89"]
#: Sizes for what does not depend on the number of mel bands.
NARROW = {"n_mels": 24, "embedding_dim": 8, "blocks": (1, 1, 1, 1)}
#: Sizes and a working set: one channel at a time at the first level, some at the others.
CHUNKED = {"widths": (8, 16, 32, 32), "chunk": 24_000, "n_mels": 24}
LENGTHS = torch.tensor([1.0, 0.6, 0.8])


def tiny(name, **settings):
    """The same shape of network, small enough to run in a test."""
    torch.manual_seed(0)
    sizes = {"widths": (8, 8, 16, 16), "blocks": (1, 2, 1, 1), "embedding_dim": 32}
    return build_encoder(name, **(sizes | settings))


def on_meta(name, **settings):
    """A shallow encoder of full width for counting bytes, with gradients, on meta."""
    with torch.device("meta"):
        encoder = build_encoder(name, **{"blocks": (1, 1, 1, 1)} | settings)
    for p in encoder.parameters():
        p.grad = torch.zeros_like(p)
    return encoder


def feats(batch=2, time=43, dtype=torch.float64, n_mels=80):
    torch.manual_seed(1)
    return torch.randn(batch, time, n_mels, dtype=dtype)


def modes_of(name):
    return ["store", "selective", "recompute"] + ["reconstruct"] * ARCHITECTURES[
        name
    ].reversible


#: All encoders in all modes that they have.
IN_MODES = [(name, mode) for name in KINDS for mode in modes_of(name)]


def narrow(batch=2, time=44):
    return feats(batch, time, torch.float32, n_mels=24)


def but_slow(cases, *quick):
    """Mark all of some cases, names or tuples, as slow but for a few."""
    values = {case: case if isinstance(case, tuple) else (case,) for case in cases}
    slow = pytest.mark.slow
    return [
        pytest.param(*v, marks=[slow] * (c not in quick)) for c, v in values.items()
    ]


def with_statistics(encoder):
    """Give normalisations statistics and factors as after a training."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for norm in encoder.modules():
            if isinstance(norm, BatchNorm):
                norm.running_mean.normal_(0, 0.2, generator=draw)
                norm.running_var.uniform_(0.5, 2.0, generator=draw)
                norm.weight.uniform_(0.5, 1.5, generator=draw)
                norm.bias.normal_(0, 0.2, generator=draw)
    return encoder.eval()


def assert_padding_is_left_out(encoder, x, short, *networks):
    """Assert that a shorter second utterance is embedded as it is alone."""
    lengths = torch.tensor([1.0, short / x.shape[1]])
    with torch.no_grad():
        alone = torch.cat([encoder(x[:1]), encoder(x[1:, :short])])
        for network in (encoder, *networks):
            embeddings = []
            for value in (7.0, 1e30, float("inf"), float("nan")):
                x[1, short:] = value
                embeddings.append(network(x, lengths))
                assert torch.equal(embeddings[-1], embeddings[0])
            # Float32 rounding through the network.
            torch.testing.assert_close(embeddings[0], alone, atol=1e-4, rtol=0)


def grads_of(module):
    return {name: p.grad for name, p in module.named_parameters()}


def trained(
    encoder, x, lengths=None, *, precision=FLOAT32, steps=1, backward=None, run=None
):
    """Train: gradients of the last step, embeddings, weights and buffers, by name.

    The backward pass runs as in ``backward``, the forward pass by ``run`` in the place of
    the encoder.
    """
    parameters = [p for p in encoder.parameters() if p.requires_grad]
    optimizer = build_optimizer(parameters, name="sgd", bits=32, lr=0.05)
    scaler = precision.scaler()
    for step in range(steps):
        optimizer.zero_grad()
        with precision.autocast():
            y = (run or encoder)(x.roll(step, 1), lengths)
        directions = torch.linspace(-1, 1, y.numel(), dtype=precision.weights)
        with backward or contextlib.nullcontext():
            scaler.scale(
                (y.to(precision.weights) * directions.view_as(y)).sum()
            ).backward()
        scaler.step(optimizer)
        scaler.update()
    encoder.check_streams()
    grads = {f"grad of {n}": g for n, g in grads_of(encoder).items() if g is not None}
    return {**encoder.state_dict(), **grads, "y": y.detach()}


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key
