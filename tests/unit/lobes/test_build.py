"""Blocks that begin as the identity."""

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder

# One encoder of each kind of block, reversible and not.
KINDS = ("resnet34", "resnet101", "df_resnet56", "revnet46", "revnet140", "df_revnet89")
SIZE = {"widths": (8, 16, 16, 16), "blocks": (1, 2, 1, 1), "n_mels": 24}


def branches(encoder, given):
    """What reversible functions, or branches of ordinary blocks, add to the streams."""
    added = []
    hooks = []
    for module in encoder.modules():
        if type(module).__name__.endswith("Residual"):
            hooks.append(module.register_forward_hook(lambda *a: added.append(a[-1])))
        elif hasattr(module, "residual"):
            norm = module.norm3 if hasattr(module, "norm3") else module.norm2
            hooks.append(norm.register_forward_hook(lambda *a: added.append(a[-1])))
    encoder(given)
    for hook in hooks:
        hook.remove()
    return added


def test_the_kinds_are_all_there_are():
    kinds = {(row.block, row.reversible) for row in ARCHITECTURES.values()}
    tried = {(ARCHITECTURES[n].block, ARCHITECTURES[n].reversible) for n in KINDS}
    assert tried == kinds


@pytest.mark.parametrize("name", KINDS)
def test_no_block_adds_anything_at_first(name):
    given = torch.randn(2, 24, 24, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    usual = build_encoder(name, mode="store", **SIZE)
    added = branches(usual, given)
    assert added
    assert all(x.abs().max() > 0 for x in added)
    torch.manual_seed(0)
    zero = build_encoder(name, mode="store", zero_init_residual=True, **SIZE)
    added = branches(zero, given)
    assert added
    assert all(x.abs().max() == 0 for x in added)
    # The rest begins as it did, and random numbers go on as they did.
    assert torch.equal(zero.fc.weight, usual.fc.weight)


@pytest.mark.parametrize("name", KINDS)
def test_blocks_learn_all_the_same(name):
    torch.manual_seed(0)
    encoder = build_encoder(name, zero_init_residual=True, **SIZE)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    # Layers before those that were zero learn from the second step on.
    for _ in range(2):
        optimizer.zero_grad()
        given = torch.randn(4, 24, 24, generator=generator)
        torch.nn.functional.normalize(encoder(given), dim=-1)[..., 0].sum().backward()
        optimizer.step()
    assert all(p.grad.abs().max() > 0 for p in encoder.parameters())
