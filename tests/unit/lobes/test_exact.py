"""Reversible encoders train to the same bits in every memory mode."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.reversible import StreamWarning
from tests.unit.lobes.encoders import KINDS, tiny

REVERSIBLE = [name for name in KINDS if ARCHITECTURES[name].reversible]
STEPS = 3


def trained(name, mode, half, *, lengths=None):
    """Gradients of the last step, weights and buffers after some."""
    encoder = tiny(name, mode=mode, streams="exact", verify="raise", verify_every=1)
    optimizer = build_optimizer(encoder.parameters(), name="sgd", bits=32, lr=0.05)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**6, enabled=half is torch.float16
    )
    target = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(7))
    for seed in range(STEPS):
        torch.manual_seed(seed)
        feats = torch.randn(3, 43, 80)
        with torch.autocast("cpu", half, enabled=half is not None):
            loss = (encoder(feats, lengths) - target).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    encoder.check_streams()
    grads = {f"grad of {n}": p.grad for n, p in encoder.named_parameters()}
    return encoder.state_dict() | grads


@pytest.mark.parametrize(
    "half",
    [
        None,
        pytest.param(torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", REVERSIBLE)
def test_three_steps_have_the_same_bits_in_every_mode(name, half):
    expected = trained(name, "store", half)
    for mode in ("reconstruct", "recompute"):
        found = trained(name, mode, half)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), (mode, key)


@pytest.mark.parametrize("name", ["revnet46", "revnet57", "df_revnet66", "df_revnet89"])
def test_lengths_change_no_bit(name):
    lengths = torch.tensor([1.0, 0.6, 0.8])
    expected = trained(name, "store", None, lengths=lengths)
    found = trained(name, "reconstruct", None, lengths=lengths)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_streams_out_of_range_are_named_by_stage():
    encoder = tiny("revnet57", streams="exact")
    with torch.no_grad():
        encoder.stages[2].chain.blocks[0].g.conv2.weight.fill_(1e6)
    assert encoder(torch.randn(2, 43, 80)).isnan().all()
    with pytest.warns(StreamWarning) as told:
        encoder.check_streams()
    # The stages after it, which get nothing but NaN, say nothing.
    assert len(told) == 1
    assert re.search(r"stages\.2\.chain .* at G of block 0", str(told[0].message))


def test_the_largest_magnitude_of_each_stage_is_told():
    encoder = tiny("df_revnet66", streams="exact")
    encoder(torch.randn(2, 43, 80)).sum().backward()
    largest = encoder.largest_streams()
    assert list(largest) == [f"stages.{i}.chain" for i in range(4)]
    assert all(0 < value < 2**14 for value in largest.values())
    # Asked again, it has seen nothing since.
    assert set(encoder.largest_streams().values()) == {0.0}


def test_vanilla_encoders_have_no_streams():
    encoder = tiny("resnet34", streams="exact")
    encoder(torch.randn(2, 43, 80)).sum().backward()
    encoder.check_streams()
    assert encoder.largest_streams() == {}


def difference_to_floats(name, **settings):
    """How far rounding to steps moves embeddings in training."""
    outputs = []
    for streams in ("exact", "float"):
        torch.manual_seed(0)
        sizes = {"widths": (16, 16, 32, 32), "n_mels": 40}
        encoder = build_encoder(name, mode="store", streams=streams, **sizes | settings)
        outputs.append(encoder(torch.randn(8, 48, 40)))
    return float((outputs[0] - outputs[1]).abs().max())


@pytest.mark.parametrize("name", ["revnet57", "df_revnet66"])
def test_rounding_moves_an_embedding_by_less_than_evaluation_may(name):
    assert 0 < difference_to_floats(name, blocks=(1, 1, 2, 1)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["revnet197", "revnet245", "df_revnet354", "df_revnet377"]
)
def test_rounding_moves_little_at_any_depth(name):
    assert 0 < difference_to_floats(name) < 1e-4


class Looks(TorchDispatchMode):
    """Counts where the host asks for a number on the device, and waits for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["revnet46", "df_revnet89"])
def test_a_step_asks_the_device_for_nothing(name):
    encoder = tiny(name, streams="exact", verify="raise", verify_every=1)
    for _ in range(2):  # the second step reads the notes of the first
        with Looks() as looks:
            encoder(torch.randn(2, 43, 80)).sum().backward()
        assert looks.count == 0
    with Looks() as looks:
        bool(torch.ones(()) > 0)
    assert looks.count == 1
