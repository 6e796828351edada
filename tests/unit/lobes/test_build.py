"""Blocks that begin as the identity."""

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES
from tests.unit.lobes.encoders import FEW, feats, tiny

# One encoder of each kind of block, reversible and not.
KINDS = (*FEW, "resnet101", "df_resnet56")
SIZE = {"widths": (8, 16, 16, 16), "n_mels": 24}


def largest_added(encoder, given):
    """The largest of what functions, or branches of ordinary blocks, add to streams."""
    added = []
    for module in encoder.modules():
        if hasattr(module, "residual"):
            module = module.norm3 if hasattr(module, "norm3") else module.norm2
        elif not type(module).__name__.endswith("Residual"):
            continue
        module.register_forward_hook(lambda *a: added.append(float(a[-1].abs().max())))
    with torch.no_grad():
        encoder(given)
    return added


def test_the_kinds_are_all_there_are():
    kinds = {(row.block, row.reversible) for row in ARCHITECTURES.values()}
    tried = {(ARCHITECTURES[n].block, ARCHITECTURES[n].reversible) for n in KINDS}
    assert tried == kinds


@pytest.mark.parametrize("name", KINDS)
def test_no_block_adds_anything_at_first(name):
    x = feats(2, 24, torch.float32, n_mels=24)
    usual = tiny(name, mode="store", **SIZE)
    zero = tiny(name, mode="store", zero_init_residual=True, **SIZE)
    # The rest begins as it did, and random numbers go on as they did.
    assert torch.equal(zero.fc.weight, usual.fc.weight)
    added, nothing = largest_added(usual, x), largest_added(zero, x)
    assert min(added) > 0
    assert nothing == [0] * len(added)


@pytest.mark.parametrize("name", KINDS)
def test_blocks_learn_all_the_same(name):
    encoder = tiny(name, zero_init_residual=True, **SIZE)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    # Layers before those that were zero learn from the second step on.
    for _ in range(2):
        optimizer.zero_grad()
        y = encoder(torch.randn(4, 24, 24))
        torch.nn.functional.normalize(y, dim=-1)[..., 0].sum().backward()
        optimizer.step()
    assert all(p.grad.abs().max() > 0 for p in encoder.parameters())
