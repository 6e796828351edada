"""``torch.set_default_dtype`` changes layers that are built under it, and nothing else."""

import ast
import copy
from pathlib import Path

import pytest
import torch

import speechbrain_rev
from speechbrain_rev.data import SpeakerAugment
from speechbrain_rev.inference.graph import KaldiGraphFbank
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import build_optimizer
from tests.unit.reversible.chains import MODES

PACKAGE = Path(speechbrain_rev.__file__).parent
FACTORIES = {
    "arange", "as_tensor", "empty", "eye", "full", "hamming_window", "hann_window",
    "linspace", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def makes_by_default(node):
    """Whether a call makes a tensor of torch's default dtype, or might."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and ast.unparse(node.func.value) == "torch"
        and not {"dtype", "out"} & {keyword.arg for keyword in node.keywords}
    )


def is_of_a_layer(node):
    """Whether a call makes a parameter or a buffer, whose dtype torch's layers choose."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "nn.Parameter", "torch.nn.Parameter", "self.register_buffer",
    )  # fmt: skip


def test_every_tensor_is_made_with_a_dtype():
    calls = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        layers = [node for node in ast.walk(tree) if is_of_a_layer(node)]
        allowed = {id(part) for node in layers for part in ast.walk(node)}
        calls += [
            f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}"
            for node in ast.walk(tree)
            if makes_by_default(node) and id(node) not in allowed
        ]
    assert not calls, "\n".join(calls)


def under(dtype, compute):
    """Compute where torch makes tensors of a dtype by default."""
    torch.set_default_dtype(dtype)
    try:
        return compute()
    finally:
        torch.set_default_dtype(torch.float32)


def same_under_all(compute):
    expected = compute()
    for dtype in (torch.bfloat16, torch.float64):
        for one, other in zip(under(dtype, compute), expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("streams", ["exact", "float"])
@pytest.mark.parametrize("mode", [*MODES, "compress"])
def test_an_encoder_trains_alike(mode, streams):
    sizes = {"widths": (8, 16, 16, 24), "blocks": (2, 1, 1, 1), "n_mels": 16}
    encoder = build_encoder("revnet57", mode=mode, streams=streams, **sizes)
    # In bfloat16 no length above 256 is a whole number.
    feats, lengths = torch.randn(2, 301, 16), torch.tensor([1.0, 0.86])

    def trained():
        own = copy.deepcopy(encoder)
        y = own(feats, lengths)
        y.square().sum().backward()
        return [y.detach(), *(p.grad for p in own.parameters()), *own.buffers()]

    same_under_all(trained)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("pack_small", [False, True])
def test_8_bit_states_are_alike(name, pack_small):
    gradients = torch.randn(300, 70, 64, generator=torch.Generator().manual_seed(0))

    def trained():
        weights = [
            torch.nn.Parameter(x.clone()) for x in (gradients[0], gradients[0, 0])
        ]
        options = {"name": name, "bits": 8, "pack_small": pack_small}
        optimizer = build_optimizer(weights, lr=1e-3, **options)
        for gradient in gradients:
            weights[0].grad, weights[1].grad = gradient, gradient[0]
            optimizer.step()
        assert optimizer.skipped_steps == 0
        states = [v for state in optimizer.state.values() for v in state.values()]
        return [*weights, *(v for v in states if isinstance(v, torch.Tensor))]

    same_under_all(lambda: [x.detach() for x in trained()])


def test_waveforms_have_the_same_features():
    """Kaldi's filterbanks; SpeechBrain's own make their matrix by the default dtype."""
    waves, samples = torch.randn(2, 80000), torch.tensor([80000, 50123])
    front_end = KaldiGraphFbank(n_mels=40, sample_rate=16000)
    same_under_all(lambda: front_end(waves, samples))


def test_chunks_of_clean_speech_are_drawn_alike():
    wavs = torch.randn(6, 40000, generator=torch.Generator().manual_seed(0))

    def augmented():
        augment = SpeakerAugment(out_n_neurons=30, speeds=[1.0], seed=1)
        return augment(wavs, torch.ones(6, dtype=torch.float32))

    same_under_all(augmented)
