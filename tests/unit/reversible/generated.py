"""Random networks, as plain data from which they are built.

A `Block` lists its layers, among them other blocks, and how its arguments and outputs are
packed. Its `repr` is Python: a failing example can be pasted into a test.
"""

import contextlib
import itertools
import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from speechbrain_rev.modes import LOSSLESS

from .chains import module_with

#: Features of every tensor: it is [batch, SIZE].
SIZE = 4


@dataclass(frozen=True)
class Layer:
    """A layer of `LAYERS`; those of one kind that are shared are one module."""

    kind: str
    shared: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class Block:
    """Layers in a row, and what surrounds them."""

    layers: tuple["Layer | Block", ...]
    #: One of `ARGUMENTS`.
    takes: str = "tensor"
    #: One of `CONTAINERS`, of the `OUTPUTS` named in `gives`.
    returns: str = "tensor"
    gives: tuple[str, ...] = ("result",)
    #: Places in `gives` of what the block or loss around it uses.
    used: tuple[int, ...] = (0,)
    #: Of `HOOKS`.
    hooks: tuple[str, ...] = ()
    #: Whether the block around it recomputes it.
    recomputed: bool = False
    #: Whether the block around it writes into its input afterwards.
    spoiled: bool = False
    #: Whether it is in evaluation while the rest is trained.
    evaluated: bool = False


@dataclass(frozen=True)
class Steps:
    """How a network is trained."""

    steps: int = 1
    optimizer: str = "SGD"
    #: Forward passes before each backward pass.
    passes: int = 1
    #: One of `BACKWARD`.
    backward: str = "once"
    #: One of `BETWEEN`.
    between: str = "nothing"
    uses_aux: bool = False
    batch: int = 3
    #: Of weights and inputs; with "bfloat16" these are float32, under autocast.
    dtype: str = "float64"
    #: Whether each input needs a gradient.
    inputs: tuple[bool, bool] = (True, True)


@dataclass(frozen=True)
class Network:
    """A block that is recomputed, or some submodules of it."""

    block: Block
    training: Steps = Steps()
    #: The names of each call of `recompute_blocks`; the block as a whole without any.
    names: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Chain:
    """Couplings, each of two blocks that keep a tensor's shape and a mode."""

    couplings: tuple[tuple[Block, Block, str], ...]
    training: Steps = Steps()
    streams: str = "float"
    #: Which outputs the loss uses.
    used: tuple[int, ...] = (0, 1)


class First(NamedTuple):
    """A named tuple for arguments and outputs."""

    first: Any
    rest: Any


@dataclass(frozen=True)
class Frozen:
    values: tuple


class Slotted:
    __slots__ = ("values",)

    def __init__(self, values):
        self.values = values


class Output(dict):
    """As those of transformers: a dictionary whose items are attributes too."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__.update(items)


def values_of(packed):
    return list(packed.values)


#: Those that torch's trees do not know.
OBJECTS: dict[str, tuple[Callable, Callable]] = {
    "dataclass": (lambda values: Frozen(tuple(values)), values_of),
    "slots": (Slotted, values_of),
    "namespace": (lambda values: SimpleNamespace(values=values), values_of),
    "items and attributes": (
        lambda values: Output(**dict(zip("abcdef", values, strict=False))),
        lambda packed: list(vars(packed).values()),
    ),
    "set in a tuple": (
        lambda values: ({"name"}, values),
        lambda packed: list(packed[1]),
    ),
}

#: How values are packed, and unpacked again.
CONTAINERS: dict[str, tuple[Callable, Callable]] = {
    "tensor": (lambda values: values[0], lambda packed: [packed]),
    "tuple": (tuple, list),
    "list": (list, list),
    "dict": (
        lambda values: dict(zip("abcdef", values, strict=False)),
        lambda packed: list(packed.values()),
    ),
    "named tuple": (
        lambda values: First(values[0], tuple(values[1:])),
        lambda packed: [packed.first, *packed.rest],
    ),
    "nested": (
        lambda values: {"a": [values[0], (1, "text", None)], "b": (values[1:],)},
        lambda packed: [packed["a"][0], *packed["b"][0]],
    ),
    **OBJECTS,
}


def call(module, takes, x, side):
    """Call a module with two tensors and a number, packed in one of `ARGUMENTS`."""
    if takes == "arguments":
        return module(x, side)
    if takes == "keywords":
        return module(x, scale=0.5, side=side)
    return module(CONTAINERS[takes][0]([x, side, 0.5]))


ARGUMENTS = ["tensor", "arguments", "keywords", *list(CONTAINERS)[1:]]
#: Those of every kind but objects.
PLAIN = len(OBJECTS)

#: What a block may return, of its input and its result.
OUTPUTS = {
    "result": lambda x, y: y,
    "function": lambda x, y: y.sin(),
    "view": lambda x, y: y.view(-1).view(y.shape),
    "part": lambda x, y: y[:1],
    "input": lambda x, y: x,
    "view of input": lambda x, y: x[1:2],
    "detached": lambda x, y: y.detach(),
    "without graph": lambda x, y: _without_graph(y),
    "whole numbers": lambda x, y: (y > 0).long(),
    "square root of zero": lambda x, y: (y - y.detach()).sqrt(),
    "square root": lambda x, y: (y * 0).sqrt(),
    "number": lambda x, y: 3.5,
    "nothing": lambda x, y: None,
}


@torch.no_grad()
def _without_graph(x):
    return x * 2


LAYERS: dict[str, Callable[[], nn.Module]] = {}

#: Layers that a second run may refuse, if it says what to do.
DIFFICULT = set()


def layer(*, difficult=False, **attributes):
    """Name a class of layers of a forward method; attributes are made by functions."""

    def make(forward):
        LAYERS[forward.__name__] = module_with(**attributes)(forward)
        if difficult:
            DIFFICULT.add(forward.__name__)

    return make


def _linear():
    return nn.Linear(SIZE, SIZE)


def _weight():
    return nn.Parameter(torch.randn(SIZE))


def _ones():
    return torch.ones(SIZE)


def _buffer():
    return nn.Buffer(torch.ones(SIZE))


LAYERS |= {
    "linear": _linear,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "dropout": nn.Dropout,
    "layer_norm": lambda: nn.LayerNorm(SIZE),
    "batch_norm": lambda: nn.BatchNorm1d(SIZE),
    "spectral_norm": lambda: parametrizations.spectral_norm(_linear()),
}


@layer(norm=lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True))
def instance_norm(self, x):
    return self.norm(x.view(-1, 2, SIZE // 2)).view(x.shape)


@layer(linear=_linear)
def skipped_by_chance(self, x):
    return x if torch.rand(()) < 0.5 else self.linear(x)


@layer(used=_linear, unused=_linear)
def with_an_unused_layer(self, x):
    return self.used(x)


@layer(weight=_weight)
def without_its_input(self, x):
    return self.weight.expand_as(x)


@layer(linear=_linear)
def partly_without_graph(self, x):
    with torch.no_grad():
        gate = self.linear(x).sigmoid()
    return x.sin() * gate + x.detach().cos()


@layer(linear=_linear)
def same_layer_twice(self, x):
    return self.linear(self.linear(x).tanh())


@layer(linear=_linear)
def narrower(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return self.linear(x).to(x.dtype).tanh()


@layer(weight=_weight)
def square_root_that_nobody_uses(self, x):
    y = x * self.weight
    (y * 0).sqrt()
    return y


@layer(weights=lambda: nn.ParameterDict(dict.fromkeys("ab", _weight())))
def two_names(self, x):
    return (x * self.weights["a"]).sin() + self.weights["b"]


@layer(weight=_weight)
def borrowed(self, x):
    """Use a weight that all layers of this kind share."""
    return (x + self.weight).sin()


@layer(gru=lambda: nn.GRU(2, 2, batch_first=True))
def recurrent(self, x):
    return self.gru(x.view(-1, 2, SIZE // 2))[0].reshape(x.shape)


@layer(count=lambda: nn.Buffer(torch.zeros(())))
def counting_buffer(self, x):
    self.count += 1
    return x.sin() * (1 + self.count / 8)


@layer(mean=_buffer)
def rebound_buffer(self, x):
    self.mean = 0.5 * self.mean + x.detach().mean(0)
    return (x - self.mean).sin()


class EmptyBuffer(nn.Module):
    """Makes a buffer in its forward pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        mean = x.detach().mean(0)
        self.mean = mean if self.mean is None else 0.5 * (self.mean + mean)
        return (x - self.mean).sin()


LAYERS["empty_buffer"] = EmptyBuffer


@layer()
def late_buffer(self, x):
    if not hasattr(self, "mean"):
        self.register_buffer("mean", x.new_zeros(SIZE))
    self.mean.mul_(0.5).add_(x.detach().mean(0))
    return (x - self.mean.clone()).sin()


@layer(norm=lambda: nn.BatchNorm1d(SIZE))
def reading_its_statistics(self, x):
    mean, variance = self.norm.running_mean.clone(), self.norm.running_var.clone()
    return self.norm(x) - mean + variance


@layer(relu=lambda: nn.LeakyReLU(0.5), dropout=nn.Dropout)
def annealing(self, x):
    self.relu.negative_slope *= 0.5
    self.dropout.p *= 0.9
    return self.dropout(self.relu(x))


@layer()
def by_chance_of_python_and_numpy(self, x):
    # As layers of others drop: by global generators.
    y = x * random.random()
    return y * np.random.rand() if np.random.rand() < 0.5 else y.cos()  # noqa: NPY002


def _scaled_weight():
    weight = _weight()
    weight.scale = 0.5
    return weight


@layer(weight=_scaled_weight)
def attribute_of_a_weight(self, x):
    return x * self.weight.scale * (1 + isinstance(self.weight, nn.Parameter))


# What changes plain attributes.


@layer(difficult=True, calls=int)
def counting(self, x):
    self.calls += 1
    return x.sin() * (1 + self.calls / 8)


@layer(difficult=True, scale=_ones)
def tensor_rebound(self, x):
    self.scale = 0.5 * self.scale + x.detach().mean(0)
    return (x + self.scale).sin()


class Listed(list):
    """A list that has an attribute, too."""

    calls = 0

    def count(self):
        self.calls += 1
        return self.calls


class Private:
    __slots__ = ("__calls",)

    def __init__(self):
        self.__calls = 0

    def count(self):
        self.__calls += 1
        return self.__calls

    calls = property(lambda self: self.__calls)


def _noting(notes):
    """Make a function that changes an object around it."""

    def note():
        notes[0] += 1
        return float(notes[0])

    return note


def _counting():
    """Make a function that counts its calls in a variable around it."""
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


def _attributed():
    """Make a function that counts its calls in an attribute of its own."""

    def count():
        count.calls += 1
        return count.calls

    count.calls = 0
    return count


def _defaulted():
    """Make a function that counts its calls in what it takes by default."""

    def count(calls=[0]):  # noqa: B006
        calls[0] += 1
        return calls[0]

    return count


def _moved(queue, value):
    queue.append(value)
    return sum(queue)


def _norm_of(state):
    state[0](torch.randn(3, SIZE))
    return state[0].running_mean.clone()


#: What makes an attribute, and what changes it and makes a number or a tensor of it.
STATES = {
    "list": (list, lambda s: s.append(1) or len(s)),
    "set": (set, lambda s: s.add(len(s)) or len(s)),
    "tensors_as_keys": (dict, lambda s: s.update({_ones(): 1}) or len(s)),
    "tensor_in_place": (_ones, lambda s: s.mul_(1.25).clone()),
    "sparse_tensor": (lambda: torch.eye(SIZE).to_sparse(), lambda s: s.to_dense()[0]),
}

#: The same of what is nested deeper, which a second run does not put back.
NESTED = {
    "list_in_a_list": (lambda: [[]], lambda s: s[0].append(1) or len(s[0])),
    "tensor_in_a_tuple": (lambda: (_ones(), 0), lambda s: s[0].add_(1).clone()),
    "private_slots": (Private, lambda s: s.count()),
    "list_with_an_attribute": (Listed, lambda s: s.count()),
    "torchs_generator": (
        lambda: torch.Generator().manual_seed(7),
        lambda s: torch.rand(SIZE, generator=s),
    ),
    "pythons_generator": (lambda: random.Random(7), lambda s: s.random()),
    "numpys_generator": (lambda: np.random.default_rng(7), lambda s: s.random()),
    "iterator": (itertools.count, next),
    "uncopied_iterator": (lambda: (i for i in range(1000)), next),
    "unregistered_norm": (lambda: [nn.BatchNorm1d(SIZE)], _norm_of),
    "method": (lambda: Private().count, lambda s: s()),
    "method_of_a_list": (lambda: [].append, lambda s: s(1) or len(s.__self__)),
    "method_of_a_generator": (lambda: random.Random(7).random, lambda s: s()),
    "method_of_an_iterator": (lambda: itertools.count().__next__, lambda s: s()),
    "variable_around_a_function": (_counting, lambda s: s()),
    "list_around_a_function": (lambda: _noting([0]), lambda s: s()),
    "array_around_a_function": (lambda: _noting(np.zeros(1)), lambda s: s()),
    "attribute_of_a_function": (_attributed, lambda s: s()),
    "default_of_a_function": (_defaulted, lambda s: s()),
    "partial_function": (lambda: partial(_moved, deque([0.5], 2)), lambda s: s(0.25)),
    "partial_function_of_a_tensor": (
        lambda: partial(torch.Tensor.add_, _ones(), other=1),
        lambda s: s().clone(),
    ),
    "array": (lambda: np.zeros(1), lambda s: s.__iadd__(1)[0]),
}


def _stateful(name, make, read):
    def forward(self, x):
        return (x * (1 + read(self.state) / 8)).sin()

    forward.__name__ = name
    layer(difficult=True, state=make)(forward)


for _name, (_make, _read) in STATES.items():
    _stateful(_name, _make, _read)


@layer(difficult=True, aux=list)
def map_for_the_loss(self, x):
    self.aux = [x.sin()]
    return x.cos()


@layer(difficult=True, memory=dict)
def remembering(self, x):
    """Keep a map for layers that recall it."""
    self.memory["map"] = x.sin()
    return x.cos()


@layer(difficult=True, memory=dict)
def recalling(self, x):
    kept = self.memory.get("map")
    return x if kept is None or kept.shape != x.shape else x * kept


#: Layers that keep a map, which has no graph where a first run has none.
KEEPING = {"map_for_the_loss", "remembering", "recalling"}


# What writes in place.


@layer(difficult=True)
def relu_in_place(self, x):
    return x.relu_()


@layer(difficult=True, weight=_weight)
def view_in_place(self, x):
    y = x + self.weight
    first = y.view(-1)[:SIZE]
    first.tanh_()
    return y.cos()


# What uses more of autograd than its graph.


@layer(difficult=True, others=lambda: [_linear()])
def unregistered(self, x):
    return self.others[0](x).tanh()


@layer(difficult=True, weight=_weight)
def slope_of_its_input(self, x):
    if not x.requires_grad:
        return (self.weight * x).cos() * self.weight
    y = (self.weight * x).sin()
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


@layer(difficult=True)
def gradient_of_its_own(self, x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(leaf.sin().sum(), leaf)
    return x.tanh() * grad


class Probe:
    """A hook that counts its calls, and may replace one of its arguments.

    Autograd calls a backward hook without a gradient, too, where an operation after it
    gives it none: that is no call.
    """

    def __init__(self, kind, place, factor=None):
        self.kind, self.place, self.factor, self.calls = kind, place, factor, 0

    def __call__(self, *given):
        gradients = given[-1] if "backward" in self.kind else ()
        self.calls += all(x is not None for x in gradients[:1])
        return self.factor and _scaled(given[self.place], self.factor)


def _scaled(value, factor):
    if type(value) is tuple:
        return tuple(_scaled(x, factor) for x in value)
    return value * factor if isinstance(value, torch.Tensor) else value


@layer(difficult=True, probe=lambda: Probe("tensor hook", 0, 2))
def hook_of_a_tensor(self, x):
    y = x.sin()
    if y.requires_grad:
        y.register_hook(self.probe)
    return y.cos()


#: How each is registered, and what it multiplies by what.
HOOKS = {
    "forward hook": ("register_forward_hook", 2),
    "forward hook that replaces": ("register_forward_hook", 2, 2),
    "pre-forward hook": ("register_forward_pre_hook", 1),
    "pre-forward hook that replaces": ("register_forward_pre_hook", 1, 2),
    "backward hook": ("register_full_backward_hook", 1),
    "backward hook that replaces": ("register_full_backward_hook", 1, 2),
    "pre-backward hook": ("register_full_backward_pre_hook", 1),
}


class Generated(nn.Module):
    """What a `Block` says."""

    def __init__(self, block, layers):
        super().__init__()
        self.block, self.layers = block, nn.ModuleList(layers)
        for kind in block.hooks:
            register, *changes = HOOKS[kind]
            getattr(self, register)(Probe(kind, *changes))

    def forward(self, *given, side=None, scale=None):
        x, side, scale = self._opened(given, side, scale)
        y = x if side is None else x + scale * side
        for layer, spec in zip(self.layers, self.block.layers, strict=True):
            y = _run(layer, spec, y)
        values = [OUTPUTS[kind](x, y) for kind in self.block.gives]
        return CONTAINERS[self.block.returns][0](values)

    def _opened(self, given, side, scale):
        takes = self.block.takes
        if takes == "tensor":
            return given[0], None, None
        if takes == "arguments":
            return *given, 0.5
        if takes == "keywords":
            return given[0], side, scale
        return CONTAINERS[takes][1](given[0])


def _run(module, spec, x):
    if isinstance(spec, Layer):
        return module(x)
    side = x if spec.takes in ("tuple", "keywords") else x[:1]
    returned = call(module, spec.takes, x, side)
    values = CONTAINERS[spec.returns][1](returned)
    if spec.spoiled:
        x.mul_(2)
    parts = [values[place] for place in spec.used]
    parts = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(parts) == 1 and parts[0].shape == x.shape and parts[0].dtype == x.dtype:
        return parts[0]
    return sum(parts, torch.zeros_like(x))


@contextlib.contextmanager
def default_dtype(name):
    """Make the tensors of a case's weights and inputs for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if name == "float64" else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(block, pool, recompute=lambda module: module):
    """Build a block, whose inner ones go through `recompute` where they say so.

    What several blocks share is in `pool`.
    """
    made = [
        build(spec, pool, recompute) if isinstance(spec, Block) else _layer(spec, pool)
        for spec in block.layers
    ]
    made = [
        recompute(m) if isinstance(spec, Block) and spec.recomputed else m
        for m, spec in zip(made, block.layers, strict=True)
    ]
    module = fresh(Generated)(block, made)
    return module.eval() if block.evaluated else module


def fresh(cls):
    """Make a subclass for one module: some warnings are given once for a class."""
    return type(cls.__name__, (cls,), {"__module__": __name__})


def _layer(spec, pool):
    if spec.shared and spec in pool:
        return pool[spec]
    made = LAYERS[spec.kind]()
    if type(made).__module__ == __name__:
        made.__class__ = fresh(type(made))
    own = {"borrowed": "weight", "remembering": "memory", "recalling": "memory"}
    if name := own.get(spec.kind):
        setattr(made, name, pool.setdefault(name, getattr(made, name)))
    if spec.frozen:
        made.requires_grad_(False)
    if spec.shared:
        pool[spec] = made
    return made


def names_of(block, prefix=""):
    """List the names of a block's layers and inner blocks, at any depth."""
    for i, spec in enumerate(block.layers):
        name = f"{prefix}layers.{i}"
        yield name
        if isinstance(spec, Block):
            yield from names_of(spec, f"{name}.")


def parts_of(block):
    """List a block, its layers and its inner blocks, at any depth."""
    yield block
    for spec in block.layers:
        yield from parts_of(spec) if isinstance(spec, Block) else [spec]


DTYPES = ["float64", "float64", "float32", "bfloat16"]
BACKWARD = ["once", "twice", "of inputs", "of some", "by output", "doubly"]
BETWEEN = ["nothing", "evaluation", "random numbers", "another pass"]


def all_parts(case):
    """List the blocks and layers of a case, at any depth."""
    if isinstance(case, Network):
        return list(parts_of(case.block))
    halves = [half for f, g, _ in case.couplings for half in (f, g)]
    return [part for half in halves for part in parts_of(half)]


def watches_what_is_left_out(case):
    """Whether gradients of some inputs are asked for, and hooks see the others'.

    A reconstructed function computes those all the same.
    """
    return (
        case.training.backward in ("of some", "of inputs")
        and not isinstance(case, Network)
        and any(mode == "reconstruct" for *_, mode in case.couplings)
        and any(
            part.kind == "hook_of_a_tensor"
            if isinstance(part, Layer)
            else any("backward" in kind for kind in part.hooks)
            for part in all_parts(case)
        )
    )


def is_difficult(case):
    """Whether a case has what an engine may refuse to run twice."""
    return case.training.backward == "doubly" or any(
        part.kind in DIFFICULT
        if isinstance(part, Layer)
        else part.spoiled or part.hooks or OBJECTS.keys() & {part.takes, part.returns}
        for part in all_parts(case)
    )


def may_warn(case, text):
    """Whether a case has what a warning may be about."""
    kinds = {part.kind for part in all_parts(case) if isinstance(part, Layer)}
    named = {LAYERS[kind].__name__ for kind in kinds & DIFFICULT}
    return bool(kinds & KEEPING or named & set(re.split(r"\W+", text)))


def seldom(value, otherwise):
    """Draw something else in one case of five."""
    return st.sampled_from([value] * 4 + [None]).flatmap(
        lambda drawn: st.just(value) if drawn == value else otherwise
    )


def layers(difficult):
    """Layers of any kind, or of those that every engine has to run."""
    kinds = [kind for kind in LAYERS if difficult or kind not in DIFFICULT]
    return st.builds(
        Layer,
        st.sampled_from(kinds),
        shared=seldom(False, st.just(True)),
        frozen=seldom(False, st.just(True)),
    )


@st.composite
def blocks(draw, difficult, depth=2, keeps_shape=False, nests=False):
    """A block of at most three layers; `nests` whether inner ones are recomputed."""
    layer = layers(difficult)
    inner = blocks(difficult, depth - 1, nests=nests) if depth else layer
    rows = st.lists(st.one_of(layer, layer, inner), min_size=1, max_size=3)
    hooks = seldom((), st.sampled_from([(kind,) for kind in HOOKS]))
    chosen = {
        "layers": tuple(draw(rows)),
        "hooks": draw(hooks) if difficult else (),
        "evaluated": draw(st.sampled_from([False] * 9 + [True])),
    }
    if keeps_shape:
        first = chosen["layers"][0]
        if getattr(first, "spoiled", False) or first == Layer("relu_in_place"):
            # A residual function may not write into its input.
            chosen["layers"] = (Layer("borrowed"), *chosen["layers"])
        return Block(**chosen)
    returns = draw(st.sampled_from(list(CONTAINERS)[: None if difficult else -PLAIN]))
    several = 1 if returns == "tensor" else 3
    gives = st.lists(st.sampled_from(list(OUTPUTS)), min_size=1, max_size=several)
    chosen["gives"] = gives = tuple(draw(gives)) if several > 1 else ("result",)
    places = st.sets(st.sampled_from(range(len(gives))), min_size=1)
    return Block(
        **chosen,
        takes=draw(st.sampled_from(ARGUMENTS[: None if difficult else -PLAIN])),
        returns=returns,
        used=tuple(sorted(draw(places))),
        recomputed=nests and draw(st.booleans()),
        spoiled=difficult and draw(seldom(False, st.just(True))),
    )


def steps(dtypes):
    """How to train, in one of some dtypes."""
    return st.builds(
        Steps,
        steps=st.integers(1, 3),
        optimizer=st.sampled_from(["SGD", "AdamW"]),
        passes=st.sampled_from([1, 1, 1, 2]),
        backward=st.sampled_from(["once"] * 4 + BACKWARD),
        between=st.sampled_from(["nothing"] * 2 + BETWEEN),
        uses_aux=st.booleans(),
        batch=st.integers(2, 3),
        dtype=st.sampled_from(dtypes),
        inputs=st.tuples(seldom(True, st.just(False)), st.booleans()),
    )


def recomputed_networks():
    """Blocks that are recomputed as a whole, and blocks within them as well."""
    block = st.booleans().flatmap(lambda difficult: blocks(difficult, nests=True))
    return st.builds(Network, block, steps(DTYPES))


@st.composite
def chosen_networks(draw):
    """Networks of which some submodules are recomputed."""
    block = draw(blocks(draw(st.booleans())))
    names = st.lists(st.sampled_from(list(names_of(block))), min_size=1, max_size=2)
    calls = st.lists(names.map(tuple), min_size=1, max_size=2).map(tuple)
    return Network(block, draw(steps(DTYPES)), draw(calls))


@st.composite
def couplings(draw):
    """One or two couplings, in any modes."""
    half = blocks(draw(st.booleans()), depth=1, keeps_shape=True, nests=True)
    mode = st.sampled_from([mode.value for mode in LOSSLESS])
    return tuple(draw(st.lists(st.tuples(half, half, mode), min_size=1, max_size=2)))


def chains():
    """Chains in any modes."""
    return st.builds(
        Chain,
        couplings(),
        steps(["float64"]),
        streams=st.sampled_from(["float", "exact"]),
        used=st.sampled_from([(0, 1), (0,), (1,)]),
    )
