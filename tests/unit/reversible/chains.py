"""Chains for the engine's tests and what plain autograd makes of them."""

import copy

import torch
from torch import nn

from speechbrain_rev.lobes.blocks import (
    BasicResidual,
    BottleneckResidual,
    DFBottleneckResidual,
)
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain

CHANNELS = 8


def torch_residual(channels):
    """A residual function of nothing but torch's own layers."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
    )


def dropout_residual(channels):
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1), nn.Dropout(0.5), nn.Tanh()
    )


RESIDUALS = {
    "basic": BasicResidual,
    "bottleneck": BottleneckResidual,
    "df_bottleneck": DFBottleneckResidual,
    "torch": torch_residual,
    "dropout": dropout_residual,
}


def chain_of(kind, depth=3, *, mode="reconstruct", dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    make = RESIDUALS[kind]
    blocks = [AdditiveCoupling(make(CHANNELS), make(CHANNELS)) for _ in range(depth)]
    return ReversibleChain(blocks, mode=mode).to(dtype)


def streams(dtype=torch.float64, *, batch=2, time=12, requires_grad=True, seed=1):
    torch.manual_seed(seed)
    shape = (batch, CHANNELS, 6, time)
    return [
        torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for _ in range(2)
    ]


class Plain(nn.Module):
    """The couplings of a chain in plain autograd: what every mode must equal."""

    def __init__(self, chain):
        super().__init__()
        self.blocks = copy.deepcopy(chain.blocks)

    def forward(self, x1, x2, mask=None):
        for block in self.blocks:
            x1, x2 = block(x1, x2, mask)
        return x1, x2


def loss_of(outputs):
    """A loss in which both streams and all places have gradients of their own."""
    y1, y2 = outputs
    weights = torch.linspace(-1, 1, y1.numel(), dtype=y1.dtype).view_as(y1)
    return (y1 * weights + (y2 * weights.flip(-1)).sin()).sum()


def step(module, inputs, *, seed=2):
    """One training step: outputs, gradients by name, and buffers by name."""
    torch.manual_seed(seed)
    outputs = module(*inputs)
    loss_of(outputs).backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    grads |= {f"x{i}": x.grad for i, x in enumerate(inputs, 1) if x.requires_grad}
    return outputs, grads, dict(module.named_buffers())


def distance(found, expected):
    """Relative distance of two dictionaries of tensors, None only where both are."""
    assert found.keys() == expected.keys()
    for name in found:
        assert (found[name] is None) == (expected[name] is None), name
    pairs = [
        (found[n].detach(), expected[n].detach()) for n in found if found[n] is not None
    ]
    difference = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return float((difference / sum(b.double().square().sum() for _, b in pairs)).sqrt())
