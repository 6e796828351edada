"""SpeechBrain's own networks, compressed by a line of YAML or Python."""

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN
from speechbrain.lobes.models.ResNet import ResNet

from speechbrain_rev.compression import (
    DeviationBound,
    RangeBound,
    compress_activations,
)
from speechbrain_rev.planner.memory import LiveBytes

NETWORKS = {
    "ResNet": """
embedding_model: !new:speechbrain.lobes.models.ResNet.ResNet
    input_size: 80
    channels: [16, 16, 32, 32]
    block_sizes: [1, 1, 1, 1]
    lin_neurons: 16
""",
    "ECAPA_TDNN": """
embedding_model: !new:speechbrain.lobes.models.ECAPA_TDNN.ECAPA_TDNN
    input_size: 80
    channels: [64, 64, 64, 64, 192]
    attention_channels: 32
    lin_neurons: 16
""",
}
COMPRESSED = """
compression: !apply:speechbrain_rev.compression.compress_activations
    - !ref <embedding_model>
"""


def step(network):
    """Bytes between forward and backward pass, and the gradients."""
    network.zero_grad()
    torch.manual_seed(1)
    x, weighting = torch.randn(4, 100, 80), torch.randn(4, 1, 16)
    with LiveBytes() as meter:
        loss = (network(x) * weighting).sum()
        held = meter.live
        loss.backward()
    return held, {n: p.grad.clone() for n, p in network.named_parameters()}


def distance(found, exact):
    error = sum(float((found[n] - exact[n]).square().sum()) for n in exact)
    return (error / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


@pytest.mark.parametrize(("name", "ratio"), [("ResNet", 2.5), ("ECAPA_TDNN", 1.3)])
def test_two_lines_of_yaml_save_memory_within_the_bounds(name, ratio):
    torch.manual_seed(0)
    plain = load_hyperpyyaml(NETWORKS[name])["embedding_model"]
    hparams = load_hyperpyyaml(NETWORKS[name] + COMPRESSED)
    network = hparams["embedding_model"]
    assert type(network) in (ECAPA_TDNN, ResNet)
    network.load_state_dict(plain.state_dict())
    stored, exact = step(plain)
    held, found = step(network)
    assert held < stored / ratio
    assert 0 < distance(found, exact) < 0.02
    assert all(not n.startswith("unnamed") for n in hparams["compression"].records)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(NETWORKS))
def test_smaller_bounds_make_smaller_errors(name):
    torch.manual_seed(0)
    network = load_hyperpyyaml(NETWORKS[name])["embedding_model"]
    _, exact = step(network)
    compression = compress_activations(network)
    errors = []
    for fraction in (1e-2, 1e-4):
        compression.rules["convolution"] = RangeBound(fraction)
        compression.rules["normalisation"] = DeviationBound(fraction)
        errors.append(distance(step(network)[1], exact))
    assert errors[1] < errors[0] / 20


def test_pooled_statistics_are_left_as_they_are():
    """Batch normalisation of one value for each utterance would enlarge an error."""
    torch.manual_seed(0)
    network = load_hyperpyyaml(NETWORKS["ResNet"])["embedding_model"]
    compression = compress_activations(network)
    step(network)
    pooled = {"norm_stats", "norm_embed"}
    assert pooled <= dict(network.named_modules()).keys()
    assert not pooled & compression.records.keys()
