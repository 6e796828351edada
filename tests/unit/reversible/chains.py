"""Chains for the engine's tests and what plain autograd makes of them."""

import copy
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from speechbrain_rev.lobes.blocks import (
    BasicResidual,
    BottleneckResidual,
    DFBottleneckResidual,
)
from speechbrain_rev.modes import LOSSLESS
from speechbrain_rev.reversible import AdditiveCoupling, Mode, ReversibleChain
from speechbrain_rev.reversible.segment import residual
from speechbrain_rev.reversible.streams import FORMATS

CHANNELS = 8
MODES = [mode.value for mode in LOSSLESS]
WITHOUT_STORAGE = [mode.value for mode in LOSSLESS if mode.spec.runs_twice]

# float64 rounding through a few blocks, with a wide margin: an error of the method
# (a wrong mask, a stale statistic) shows at 1e-3 or more.
EXACT = 1e-10

# Float streams are reconstructed up to their rounding in float32, after which few
# values round to another half. What that adds must be small against the error of half
# precision itself. Through these few blocks it is 0 to 0.05 of that error, and about 1
# where a second run computes in another precision than the first.
SHARE_OF_HALF = 0.25

# Rounding of float streams, 1e-7 of a value, through a few blocks with a wide margin:
# for residual functions that autocast leaves in float32.
FLOAT32_ROUNDING = 1e-5


def as_global(**functions):
    """Hold functions where a second run finds what the first left, as in globals."""
    return type("Global", (), {k: staticmethod(f) for k, f in functions.items()})


def module_with(**attributes):
    """Make a class of modules of a forward method; attributes are made by functions."""

    def make(forward):
        def __init__(self):
            super(made, self).__init__()
            for name, value in attributes.items():
                setattr(self, name, value())

        name = "".join(word.title() for word in forward.__name__.split("_"))
        members = {"__init__": __init__, "forward": forward}
        made = type(name, (nn.Module,), members | {"__module__": forward.__module__})
        return made

    return make


class Counted(nn.Module):
    """Notes each run of a module, and whether it is in a backward pass."""

    def __init__(self, module):
        super().__init__()
        runs = []
        self.module = module
        self.variables = as_global(note=runs.append, runs=lambda: runs)

    def forward(self, x):
        self.variables.note(in_backward())
        return self.module(x)


@dataclass(frozen=True)
class Precision:
    """How a step computes: weights, autocast, and a scaled loss as SpeechBrain has it."""

    name: str
    weights: torch.dtype
    half: torch.dtype | None = None
    scale: float | None = None
    #: Whether all uses of a weight share one cast, whose gradient is added up in half.
    shares_casts: bool = True
    device: str = "cpu"

    def __str__(self):
        """Give the name, for the ids of tests."""
        return self.name

    def autocast(self):
        return torch.autocast(
            self.device,
            self.half or torch.bfloat16,
            enabled=self.half is not None,
            cache_enabled=self.shares_casts,
        )

    def scaler(self, **options):
        """A scaler, which does nothing but in fp16."""
        settings = {"init_scale": self.scale, "enabled": self.scale is not None}
        return torch.amp.GradScaler(self.device, **settings | options)

    def gradients(self, named):
        """The gradients of a scaled loss, as they are without the scale."""
        grads = {name: x.grad for name, x in named}
        return {n: g if g is None else g / (self.scale or 1) for n, g in grads.items()}


FLOAT64 = Precision("float64", torch.float64)
FLOAT32 = Precision("float32", torch.float32)
BF16 = Precision("bf16", torch.float32, torch.bfloat16)
#: A larger scale would overflow: the losses here are sums.
FP16 = Precision("fp16", torch.float32, torch.float16, scale=2.0**8)

every_precision = pytest.mark.parametrize(
    "precision", [FLOAT64, BF16, pytest.param(FP16, marks=pytest.mark.slow)], ids=str
)
each_half = pytest.mark.parametrize("precision", [BF16, FP16], ids=str)


def conv(channels=CHANNELS, *, bias=True):
    return nn.Conv2d(channels, channels, 3, padding=1, bias=bias)


def torch_residual(channels):
    """A residual function of nothing but torch's own layers."""
    first, last = conv(channels, bias=False), conv(channels, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(channels), nn.ReLU(), last)


RESIDUALS = {
    "basic": BasicResidual,
    "bottleneck": BottleneckResidual,
    "df_bottleneck": DFBottleneckResidual,
    "torch": torch_residual,
    "dropout": lambda channels: nn.Sequential(
        conv(channels), nn.Dropout(0.5), nn.Tanh()
    ),
}


#: The format of the chains' streams; conftest.py runs the tests in each of them.
FORMAT = ContextVar("FORMAT", default="exact")


def chain_of(
    kind, depth=3, *, mode="reconstruct", dtype=torch.float64, seed=0, **settings
):
    torch.manual_seed(seed)
    make = RESIDUALS[kind]
    blocks = [AdditiveCoupling(make(CHANNELS), make(CHANNELS)) for _ in range(depth)]
    return make_chain(blocks, mode=mode, **settings).to(dtype)


def make_chain(blocks, **settings):
    """A chain in the format under test, whose streams are looked at in each pass."""
    checks = {"verify": "raise", "verify_every": 1}
    return ReversibleChain(blocks, **{"streams": FORMAT.get(), **checks, **settings})


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
        self.blocks.training = chain.training
        self.format_name = chain.format_name

    def forward(self, x1, x2, mask=None):
        if self.format_name == "float" or not (
            self.blocks.training and torch.is_grad_enabled()
        ):
            for block in self.blocks:
                x1, x2 = block(x1, x2, mask)
            return x1, x2
        x1, x2 = fixed(x1), fixed(x2)
        for block in self.blocks:
            x1 = x1 + fixed(residual(block.f, x2, mask))
            x2 = x2 + fixed(residual(block.g, x1, mask))
        return x1, x2


#: Hooks that are a test's own instrument.
hooks_fire_twice = pytest.mark.filterwarnings(
    "ignore::speechbrain_rev.reversible.hooks.WatchingWarning"
)


def in_backward():
    """Whether a backward pass goes on in this thread."""
    return torch._C._current_graph_task_id() != -1


class Differs(nn.Module):
    """Computes something else in its second run."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return (self.function(*args) * (1.1 if in_backward() else 1)).tanh()


def fixed(x):
    """Round to the exact format's steps; the gradient passes as it is."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    steps = FORMATS["exact"].steps
    rounded = (wide.detach() * steps).round() / steps
    return wide + (rounded - wide.detach())


def loss_of(outputs):
    """A loss in which both streams and all places have gradients of their own."""
    y1, y2 = outputs
    weights = torch.linspace(-1, 1, y1.numel(), dtype=y1.dtype, device=y1.device)
    weights = weights.view_as(y1)
    return (y1 * weights + (y2 * weights.flip(-1)).sin()).sum()


class Counting(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def step(module, inputs, precision=FLOAT64, *, mask=None, seed=2):
    """One training step: outputs, gradients by name, and buffers by name."""
    torch.manual_seed(seed)
    tensors = dict(module.named_parameters())
    tensors |= {f"x{i}": x for i, x in enumerate(inputs, 1) if x.requires_grad}
    scaler = precision.scaler()
    optimizer = torch.optim.SGD(tensors.values(), lr=0.1)
    with precision.autocast():
        outputs = module(*inputs) if mask is None else module(*inputs, mask)
        loss = loss_of(outputs)
    scaler.scale(loss).backward()  # outside autocast, as SpeechBrain does
    scaler.unscale_(optimizer)
    grads = {name: x.grad for name, x in tensors.items()}
    return outputs, grads, dict(module.named_buffers())


def train_once(module, precision, *, inputs=streams, mask=None):
    """The gradients of one step, by name, and its outputs."""
    outputs, grads, _ = step(module, inputs(precision.weights), precision, mask=mask)
    return grads | {f"y{i}": y for i, y in enumerate(outputs, 1)}


def equal_to_plain(chain, precision=FLOAT64, train=train_once, *, to_the_bit=None):
    """Assert that training gives what it gives in plain autograd; return gradients.

    `train` is called with a module and a precision. Outputs, buffers and the random state
    are equal to the bit, and so are gradients in half precision unless streams are
    reconstructed. With exact streams gradients are, to the bit, those of the chain with its
    activations stored. The module keeps its parameters.
    """
    if to_the_bit is None:
        to_the_bit = precision.half and Mode.RECONSTRUCT not in chain.modes
    plain, wide, stored = Plain(chain), Plain(chain), copy.deepcopy(chain)
    parameters = dict(chain.named_parameters(remove_duplicate=False))
    grads, random_state = train(chain, precision), torch.get_rng_state()
    chain.check_streams()
    expected = train(plain, replace(precision, shares_casts=False))
    assert torch.equal(random_state, torch.get_rng_state())
    after = dict(chain.named_parameters(remove_duplicate=False))
    assert after.keys() == parameters.keys()
    assert all(after[name] is p for name, p in parameters.items())
    for name in ("y1", "y2") if "y1" in grads else ():
        assert torch.equal(grads.pop(name), expected.pop(name)), name
    limit = 0 if to_the_bit else EXACT
    if precision.half and not to_the_bit:
        in_float32 = train(wide, replace(FLOAT32, device=precision.device))
        of_half = distance(expected, {name: in_float32[name] for name in expected})
        limit = FLOAT32_ROUNDING + SHARE_OF_HALF * of_half
    assert distance(grads, expected) <= limit
    if chain.format_name == "exact":
        stored.set_mode(Mode.STORE)
        assert_same_bits(train(stored, precision), grads)
    assert_same_bits(dict(plain.named_buffers()), dict(chain.named_buffers()))
    return grads


def assert_same_bits(tensors, expected):
    """Assert that what has a name in one dictionary is the same, or None, in another."""
    for name, x in expected.items():
        assert (x is None) == (tensors[name] is None), name
        assert x is None or torch.equal(tensors[name], x), name


def distance(tensors, expected):
    """Relative distance of two dictionaries of tensors, None only where both are."""
    assert tensors.keys() == expected.keys()
    for name, x in expected.items():
        assert (x is None) == (tensors[name] is None), name
    given = [name for name, x in expected.items() if x is not None]
    wide = [
        (tensors[n].detach().double(), expected[n].detach().double()) for n in given
    ]
    difference = sum((a - b).square().sum() for a, b in wide)
    return float((difference / sum(b.square().sum() for _, b in wide)).sqrt())


class Run:
    """A chain in training: the steps that SpeechBrain takes, one at a time."""

    def __init__(self, chain, precision, **options):
        self.chain, self.precision = chain, precision
        self.optimizer = torch.optim.SGD(chain.parameters(), lr=1e-4, momentum=0.9)
        self.scaler = precision.scaler(**options)
        self.steps = 0

    def step(self, max_norm=1e9):
        """Return the loss and the norm of the gradients before they are clipped."""
        inputs = streams(torch.float32, seed=self.steps)
        inputs = [x.to(self.precision.device) for x in inputs]
        self.steps += 1
        torch.manual_seed(self.steps)
        with self.precision.autocast():
            loss = loss_of(self.chain(*inputs))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.chain.parameters(), max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.grads = {n: p.grad for n, p in self.chain.named_parameters()}
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    def state(self):
        """Weights and what the optimizer keeps, copied."""
        momenta = self.optimizer.state_dict()["state"]
        return copy.deepcopy((dict(self.chain.named_parameters()), momenta))
