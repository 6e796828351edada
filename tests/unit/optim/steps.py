"""Parameters, steps and what states stand for: shared by the tests of optimizers."""

import pytest
import torch

from speechbrain_rev import optim
from speechbrain_rev.optim.map import dynamic_tree
from speechbrain_rev.optimizers import OPTIMIZERS

CLASSES = {name: getattr(optim, row.class_name) for name, row in OPTIMIZERS.items()}
NAMES = list(CLASSES)
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)
DEVICES = ["cpu", CUDA]


def parameter(*shape, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))


def step(optimizer, seed=0):
    """One step on gradients that depend on seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for param in params_of(optimizer):
        grad = torch.randn(param.shape, generator=generator).to(param.device)
        param.grad = torch.empty_like(param).copy_(grad)
    optimizer.step()


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def states_of(optimizer):
    return [optimizer.state[param] for param in params_of(optimizer)]


def by_block(values, block_size=256):
    """Cut into blocks, [blocks, block_size], the last filled up with zeros."""
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block_size)).view(
        -1, block_size
    )


def decoded(state, number):
    """What an 8-bit state stands for: its code times the largest of its block."""
    values = dynamic_tree(signed=number == 1)[state[f"state{number}"].long()]
    scale = state[f"absmax{number}"].repeat_interleave(256)[: values.numel()]
    return values * scale.view_as(values)


def excess_error(state, number, moment, rtol=1e-6):
    """How much further from a moment its codes are than the nearest, over absmax.

    The nearest is looked for among all values, in float64. Scales must be the largest
    magnitudes up to rtol. In a block of zeros any code will do.
    """
    absmax = state[f"absmax{number}"].double()
    blocks = by_block(moment.double())
    torch.testing.assert_close(absmax, blocks.abs().amax(dim=1), rtol=rtol, atol=0)
    values = dynamic_tree(signed=number == 1).double()
    wanted = (blocks / absmax[:, None]).view(-1)[: moment.numel()]
    best = (wanted[:, None] - values).abs().amin(dim=1)
    taken = (wanted - values[state[f"state{number}"].long().view(-1)]).abs()
    return (taken - best)[wanted.isfinite()].max().item()


def assert_identical(actual, expected):
    """Equal to the last bit, in every tensor of nested states."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_identical(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_identical(one, other)
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    else:
        assert actual == expected
