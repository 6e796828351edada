"""Working on some channels at a time: the same network, in less memory."""

import pytest
import torch
from torch import nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.blocks import BasicResidual, DFBottleneckResidual
from speechbrain_rev.lobes.chunks import channels_by_level
from speechbrain_rev.memory import live_bytes_peak
from tests.unit.lobes.encoders import KINDS
from tests.unit.reversible.chains import BF16, EXACT, FLOAT32, FLOAT64, FP16, distance

SMALL = {"widths": (16, 16, 32, 32), "blocks": (2, 1, 1, 1)}
#: One channel at a time at the first level, some at the others.
CHUNK = 80_000
REVERSIBLE = [name for name in KINDS if ARCHITECTURES[name].reversible]


def trained(name, mode, chunk, precision=FLOAT32, streams="exact", lengths=None):
    """Gradients, buffers and the output of one step."""
    torch.manual_seed(0)
    encoder = build_encoder(
        name, mode=mode, chunk=chunk, streams=streams, verify="raise", verify_every=1,
        **SMALL,
    ).to(precision.weights)  # fmt: skip
    torch.manual_seed(1)
    feats = torch.randn(3, 43, 80, dtype=precision.weights)
    with precision.autocast():
        y = encoder(feats, lengths)
    weights = torch.linspace(-1, 1, y.numel(), dtype=precision.weights).view_as(y)
    precision.scaler().scale((y.to(precision.weights) * weights).sum()).backward()
    encoder.check_streams()
    grads = {f"grad of {n}": p.grad for n, p in encoder.named_parameters()}
    return grads | dict(encoder.named_buffers()) | {"y": y.detach()}


@pytest.mark.parametrize("precision", [FLOAT32, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", REVERSIBLE)
def test_every_mode_has_the_bits_of_storing(name, precision):
    lengths = torch.tensor([1.0, 0.5, 0.7])
    expected = trained(name, "store", CHUNK, precision, lengths=lengths)
    for mode in ("reconstruct", "recompute"):
        found = trained(name, mode, CHUNK, precision, lengths=lengths)
        for key, value in expected.items():
            assert torch.equal(found[key], value), (mode, key)


@pytest.mark.parametrize("name", REVERSIBLE)
def test_gradients_are_those_of_the_whole(name):
    whole = trained(name, "store", None, FLOAT64, "float")
    assert (
        distance(trained(name, "reconstruct", CHUNK, FLOAT64, "float"), whole) < 1e-12
    )


@pytest.mark.parametrize("kind", [BasicResidual, DFBottleneckResidual])
def test_pieces_add_up_to_the_whole_and_update_its_statistics(kind):
    torch.manual_seed(0)
    whole = kind(8).double()
    parts = kind(8).double()
    parts.load_state_dict(whole.state_dict())
    x = torch.randn(2, 8, 6, 10, dtype=torch.float64)
    pieces = parts.pieces(3)
    assert [p.norm.channels for p in pieces][-1] == whole.norm.channels % 3 or 3
    total = sum(piece(x) for piece in pieces)
    assert distance({"y": total}, {"y": whole(x)}) < EXACT
    assert distance(dict(parts.named_buffers()), dict(whole.named_buffers())) < EXACT


class Derived(BasicResidual):
    """Computes something else than the class that it comes from."""

    def forward(self, x, mask=None):
        return super().forward(x, mask).tanh()


def with_hook(f):
    f.conv1.register_forward_hook(lambda *_: None)
    return f


def with_other_layer(f):
    f.conv2 = nn.Sequential(f.conv2)
    return f


def with_weight_norm(f):
    nn.utils.parametrizations.weight_norm(f.conv1)
    return f


@pytest.mark.parametrize("change", [with_hook, with_other_layer, with_weight_norm])
def test_what_is_not_as_it_was_built_is_run_whole(change):
    f = change(BasicResidual(8))
    assert list(f.pieces(3)) == [f]


def test_memory_falls_with_the_chunk():
    def peak(chunk):
        with torch.device("meta"):
            encoder = build_encoder("df_revnet89", chunk=chunk)
            feats = torch.randn(16, 200, 80)
        for p in encoder.parameters():
            p.grad = torch.zeros_like(p)
        return live_bytes_peak(lambda: encoder(feats).square().sum().backward())

    peaks = [peak(chunk) for chunk in (None, 1_600_000, 800_000, 400_000)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] < 0.4 * peaks[0]


@pytest.mark.parametrize("n_mels", [24, 40, 80])
def test_channels_do_not_depend_on_the_utterance(n_mels):
    channels = channels_by_level("auto", n_mels)
    for level, number in enumerate(channels):
        size = 4 * -(-n_mels // 2**level) * -(-200 // 2**level)
        assert number * size <= 800_000 < (number + 1) * size


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "large", True])
def test_other_sizes_are_refused(chunk):
    with pytest.raises(ValueError, match="takes 'auto', a number of bytes, or null"):
        build_encoder("revnet57", chunk=chunk)
