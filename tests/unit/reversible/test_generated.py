"""The engine against plain autograd, on each part of a network and on random networks.

``make generated EXAMPLES=10000`` draws more of them, and other ones each time.
"""

import itertools
import os
import random
import re
import warnings
from collections import deque
from dataclasses import replace
from types import FunctionType, GeneratorType

import numpy as np
import pytest
import torch
from hypothesis import (
    HealthCheck,
    currently_in_test_context,
    event,
    given,
    settings,
)
from torch import Tensor, nn

from speechbrain_rev.reversible import AdditiveCoupling, Recompute, recompute_blocks

from . import generated
from .chains import EXACT, FLOAT32_ROUNDING, WITHOUT_STORAGE, Plain, make_chain
from .generated import CONTAINERS, Block, Chain, Layer, Network, Probe, Steps

#: Of each test.
EXAMPLES = int(os.environ.get("GENERATED_EXAMPLES", "10"))

drawn = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck)
)

#: Rounding where gradients are added up in another order.
ROUNDING = {
    "float64": 1e-12,
    "float32": FLOAT32_ROUNDING,
    "bfloat16": FLOAT32_ROUNDING,
}

#: From here on rounding grows too much, and exact streams leave their range.
TAME = 1000

#: A message names what to do instead of what it refuses, or a write that autograd would
#: miss.
REMEDY = re.compile(r"mode=|\b[Uu]se |\bGive |\bRegister |modified (by an )?inplace")

#: A warning about what a forward pass changes and nobody can put back.
UNCOPIED = re.compile("cannot be copied")

#: A warning about hooks that fire in both runs of a block.
OF_HOOKS = re.compile("hooks on .* fire")


@drawn
@given(generated.recomputed_networks())
def test_a_recomputed_network_trains_as_in_plain_autograd(case):
    trains_as_in_plain_autograd(case)


@drawn
@given(generated.chosen_networks())
def test_a_network_of_recomputed_blocks_trains_as_in_plain_autograd(case):
    trains_as_in_plain_autograd(case)


@drawn
@given(generated.chains())
def test_a_chain_trains_as_its_couplings_in_plain_autograd(case):
    trains_as_in_plain_autograd(case)


LINEAR = Block((Layer("linear"),))
MAP = Block((Layer("map_for_the_loss"),))
NORMALISED = Block((Layer("batch_norm"), Layer("dropout")))
FROZEN = Block((Layer("linear", frozen=True),))
SEVERAL = {"returns": "tuple", "used": (0,)}
UNREGISTERED = Block((Layer("unregistered"),))
ROOT = Block(LINEAR.layers, **SEVERAL, gives=("square root of zero",))
TWICE = Steps(steps=2)
WITHOUT_INPUTS = Steps(inputs=(False, False))


def chain(f, g=LINEAR, training=TWICE, mode="reconstruct", **settings):
    return Chain(((f, g, mode),), training, **settings)


def everywhere(f, training=TWICE):
    """List what has a function: networks that recompute it, and chains in two modes."""
    f = replace(f, layers=(Layer("borrowed"), *f.layers))
    return [
        Network(f, training),
        Network(Block((f,)), training, names=(("layers.0",),)),
        chain(f, f, training, "recompute"),
        chain(f, f, training, "reconstruct", streams="exact"),
    ]


#: What the engine is tried on, by name: each part of a network by itself.
CASES = {
    **{f"layer {kind}": everywhere(Block((Layer(kind),))) for kind in generated.LAYERS},
    **{
        f"hook {kind}": everywhere(replace(LINEAR, hooks=(kind,)))
        for kind in generated.HOOKS
    },
    **{
        f"takes {kind}": [Network(replace(LINEAR, takes=kind))]
        for kind in generated.ARGUMENTS
    },
    **{
        f"returns {kind}": [Network(replace(LINEAR, returns=kind))]
        for kind in CONTAINERS
    },
    **{
        f"gives {kind}": [
            Network(replace(LINEAR, **SEVERAL, gives=("result", kind)), TWICE),
            Network(replace(LINEAR, **SEVERAL, gives=("result", kind)), WITHOUT_INPUTS),
        ]
        for kind in generated.OUTPUTS
    },
    **{
        f"backward {kind}": everywhere(LINEAR, Steps(backward=kind, passes=2))
        for kind in generated.BACKWARD
    },
    **{
        f"between {kind}": everywhere(NORMALISED, Steps(between=kind))
        for kind in generated.BETWEEN
    },
    "dtype bfloat16": [Network(Block((Layer("layer_norm"),)), Steps(dtype="bfloat16"))],
    "evaluated": everywhere(replace(NORMALISED, evaluated=True)),
    "recomputed within": everywhere(Block((replace(NORMALISED, recomputed=True),))),
    "unregistered alone": [chain(UNREGISTERED, UNREGISTERED, WITHOUT_INPUTS)],
    "kept maps": [
        Network(MAP, Steps(uses_aux=True)),
        chain(LINEAR, MAP, Steps(uses_aux=True)),
        chain(
            Block((Layer("remembering"),)),
            Block((Layer("recalling"),)),
            mode="recompute",
        ),
    ],
    "unused streams": [
        chain(LINEAR, Block((ROOT,)), mode=mode, used=(used,), streams=streams)
        for mode in WITHOUT_STORAGE
        for used in (0, 1)
        for streams in ("exact", "float")
    ],
    "streams without a graph": [
        chain(f, g, WITHOUT_INPUTS, mode)
        for mode in WITHOUT_STORAGE
        for f in (LINEAR, FROZEN)
        for g in (LINEAR, FROZEN)
    ],
}

#: Where a reconstructed chain refuses to train, or what cannot be put back is reported.
OUTCOMES = {
    "layer uncopied_iterator": {"warned"},
    "layer unregistered": {"trained", "refused"},
    "backward doubly": {"trained", "refused"},
    "kept maps": {"trained", "refused"},
}


@pytest.mark.parametrize("name", CASES)
def test_each_part_trains_as_in_plain_autograd(name):
    found = {trains_as_in_plain_autograd(case) for case in CASES[name]}
    assert found == OUTCOMES.get(name, {"trained"})


def trains_as_in_plain_autograd(case):
    """Assert that a case does, or is refused, or that the engine warns."""
    what, listed = compared(case)
    if currently_in_test_context():
        event(what)  # for --hypothesis-show-statistics
    assert not listed, "\n".join([repr(case), *listed])
    return what


def compared(case):
    """Say what the engine did, and list what is not as in plain autograd."""
    with generated.default_dtype(case.training.dtype):
        expected, error, _ = trained(plain_run(case))
        if error is not None:
            return "plain autograd refused", []
        if generated.watches_what_is_left_out(case):
            return "hooks of what is left out", []
        if isinstance(case, Chain) and max(map(largest, expected)) > TAME:
            return "near the range of exact streams", []
        found, error, warned = trained(engine_run(case))
        difficult = generated.is_difficult(case)
        of_hooks = any(map(OF_HOOKS.search, warned))
        others = [text for text in warned if not OF_HOOKS.search(text)]
        about = [generated.may_warn(case, text) for text in others]
        if any(map(UNCOPIED.search, itertools.compress(others, about))):
            return "warned", []
        odd = [text for text, known in zip(others, about, strict=True) if not known]
        listed = [f"warned: {text}" for text in odd]
        listed += unequal(found, expected, tolerance_of(case), of_hooks)
        if error is not None:
            if difficult and is_refusal(error):
                return "refused", listed
            return "failed", [f"{type(error).__name__}: {error}", *listed]
        if is_equal_to_the_bit(case):
            stored = tuple((f, g, "store") for f, g, _ in case.couplings)
            expected, *_ = trained(engine_run(replace(case, couplings=stored)))
            listed += unequal(gradients(found), gradients(expected), 0, of_hooks)
    return "trained", listed


def is_equal_to_the_bit(case):
    """Whether a case has the gradients of the same couplings with stored activations.

    Gradients of several passes are added up in an order that depends on the mode.
    """
    chain = not isinstance(case, Network) and case.streams == "exact"
    return chain and case.training.passes == 1


def gradients(seen):
    """Keep what gradients there were."""
    found = ({n: x for n, x in each.items() if "gradient of" in n} for each in seen)
    return list(filter(None, found))


def tolerance_of(case):
    """Say how far gradients may be off, as a share of the largest one."""
    if isinstance(case, Network):
        return ROUNDING[case.training.dtype]
    return EXACT


def is_refusal(error):
    """Whether an error says what to do instead."""
    known = isinstance(error, RuntimeError | ValueError | TypeError)
    return known and REMEDY.search(str(error)) is not None


def plain_run(case):
    """Build a case without the engine."""
    torch.manual_seed(0)
    if isinstance(case, Network):
        return NetworkRun(case, generated.build(case.block, {}))
    module = Plain(make_chain([], streams=case.streams))
    module.blocks.extend(couplings(case, lambda module: module))
    return ChainRun(case, module)


def engine_run(case):
    """Build a case as the engine runs it."""
    torch.manual_seed(0)
    if isinstance(case, Network):
        network = generated.build(case.block, {}, Recompute)
        for names in case.names:
            recompute_blocks(network, *names)
        return NetworkRun(case, network if case.names else Recompute(network))
    modes = [mode for *_, mode in case.couplings]
    blocks = couplings(case, Recompute)
    return ChainRun(case, make_chain(blocks, mode=modes, streams=case.streams))


def couplings(case, recompute):
    """Build the couplings of a chain."""
    pool = {}
    return [
        AdditiveCoupling(*(generated.build(half, pool, recompute) for half in halves))
        for *halves, _ in case.couplings
    ]


def trained(run):
    """Train: what there was to see, an error or None, and what warnings name."""
    seen, error = [], None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for number in range(run.training.steps):
                run.step(number, seen)
                if not run.is_tame():
                    break
        except Exception as raised:
            error = raised
    kinds = {type(m).__name__ for m in run.module.modules()}
    texts = {str(warning.message) for warning in caught}
    return seen, error, [t for t in texts if kinds & set(re.split(r"\W+", t))]


class NetworkRun:
    """The training of a network."""

    def __init__(self, case, module):
        self.case, self.training, self.module = case, case.training, module
        # A recomputed module has the name of what wraps it.
        self.named = {
            re.sub(r"\.?\bmodule\b", "", name).lstrip("."): m
            for name, m in module.named_modules()
        }
        self.parameters = {
            f"{name}.{key}": parameter
            for name, m in self.named.items()
            for owner in (m, *getattr(m, "others", ()))
            for key, parameter in owner.named_parameters(recurse=False)
        }
        unique = {id(p): p for p in self.parameters.values()}.values()
        make = {
            "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
            # What is divided by this eps must not be rounding alone.
            "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=0.01),
        }[self.training.optimizer]
        self.optimizer = make(list(unique) or [nn.Parameter(torch.zeros(()))])

    def step(self, number, seen):
        """Take a training step and append what there is to see."""
        # Without the seeds of other devices, which take as long as a network.
        torch.default_generator.manual_seed(number + 1)
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        self.optimizer.zero_grad()
        shape = self.training.batch, generated.SIZE
        inputs, terms = [], []
        for _ in range(self.training.passes):
            leaves = [
                torch.randn(shape).requires_grad_(needs)
                for needs in self.training.inputs
            ]
            inputs += leaves
            with self.precision():
                outputs, used = self.forward(*leaves)
            seen.append(dict(facts(outputs, f"step {number}: output", graph=True)))
            seen[-1] |= self.state(number)
            used = [y for y in used if isinstance(y, Tensor) and y.requires_grad]
            terms += [(y * weights_of(y)).sin().sum() for y in used]
        if self.training.uses_aux:
            maps = [x for m in self.named.values() for x in getattr(m, "aux", ())]
            terms += [x.square().sum() for x in maps if x.requires_grad]
        training = [(m, m.training) for m in self.module.modules()]
        if self.training.between == "evaluation":
            self.module.eval()
        elif self.training.between == "another pass":
            with self.precision():
                self.forward(*leaves)
        elif self.training.between == "random numbers":
            torch.rand(3)
        self.inputs = inputs
        if terms:
            self.backward(terms)
        for m, flag in training:
            m.training = flag
        seen.append(self.state(number))
        for name, x in self.leaves().items():
            seen[-1] |= facts(x.grad, f"step {number}: gradient of {name}")
        self.optimizer.step()

    def precision(self):
        """Give what a forward pass runs under."""
        half = self.training.dtype == "bfloat16"
        # A cast that several layers share adds up its gradients in half precision.
        return torch.autocast("cpu", torch.bfloat16, half, cache_enabled=False)

    def forward(self, x, side):
        """Give what the network returns and what of it the loss uses."""
        block = self.case.block
        if block.spoiled:
            x = x.clone()
        returned = generated.call(self.module, block.takes, x, side)
        if block.spoiled:
            x.mul_(2)
        values = CONTAINERS[block.returns][1](returned)
        return returned, [values[place] for place in block.used]

    def backward(self, terms):
        """Fill in the gradients."""
        kind, loss = self.training.backward, sum(terms)
        if kind == "by output":
            for term in terms[1:]:
                term.backward(retain_graph=True)
            terms[0].backward()
            return
        if kind in ("once", "twice"):
            if kind == "twice":
                loss.backward(retain_graph=True)
            loss.backward()
            return
        leaves = [x for x in self.leaves().values() if x.requires_grad]
        if kind == "of inputs":
            leaves = [x for x in self.inputs if x.requires_grad]
        elif kind == "of some":
            leaves = leaves[::2]
        doubly = kind == "doubly"
        if not leaves:
            return
        options = {"allow_unused": True, "create_graph": doubly}
        grads = torch.autograd.grad(loss, leaves, **options)
        if doubly:
            squares = [g.square().sum() for g in grads if g is not None and g.grad_fn]
            (loss + sum(squares)).backward()
            return
        for x, grad in zip(leaves, grads, strict=True):
            x.grad = grad

    def leaves(self):
        """Give inputs and parameters by name."""
        named = {f"input {i}": x for i, x in enumerate(self.inputs)}
        return named | self.parameters

    def is_tame(self):
        """Whether weights of the next step will be of a size with those of this one."""
        grads = [x.grad for x in self.leaves().values()]
        return all(grad is None or bool((grad.abs() < TAME).all()) for grad in grads)

    def state(self, number):
        """Give what a step changes beside gradients, by name."""
        _, numbers, place, *_ = np.random.get_state()  # noqa: NPY002
        found = {
            "random state": torch.get_rng_state(),
            "Python's random state": hash(random.getstate()),
            "numpy's random state": hash((numbers.tobytes(), place)),
        }
        for name, m in self.named.items():
            for key, buffer in m.named_buffers(recurse=False):
                found |= facts(buffer, f"buffer {name}.{key}")
            if type(m).__module__ == generated.__name__:
                for key, value in vars(m).items():
                    if not key.startswith("_"):
                        found |= facts(value, f"attribute {name}.{key}")
            for i, probe in enumerate(probes_of(m)):
                found[f"calls of {probe.kind} {i} of {name}"] = probe.calls
        return {f"step {number}: {name}": value for name, value in found.items()}


class ChainRun(NetworkRun):
    """The training of a chain."""

    def forward(self, x1, x2):
        """Give what the chain returns and what of it the loss uses."""
        outputs = self.module(x1, x2)
        return outputs, [outputs[place] for place in self.case.used]


def weights_of(y):
    """Give each place of a tensor a weight of its own."""
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)


def probes_of(module):
    """List the hooks of a module that count, those of its tensors included."""
    registered = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    hooks = [hook for hooks in registered for hook in hooks.values()]
    hooks.append(getattr(module, "probe", None))
    return [hook for hook in hooks if isinstance(hook, Probe)]


def facts(value, name, graph=False):
    """Give what there is to compare in a value, by name, copied."""
    if isinstance(value, Tensor):
        yield name, value.detach().clone().to_dense()
        if graph:
            yield f"{name}, needs a gradient", value.requires_grad
    elif isinstance(value, tuple | list | deque | dict):
        yield f"{name}, type", type(value).__name__
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from facts(item, f"{name}[{key!r}]", graph)
    elif isinstance(value, torch.Generator):
        yield name, value.get_state()
    elif isinstance(value, np.ndarray):
        yield name, torch.from_numpy(value.copy())
    elif isinstance(value, nn.Module):
        yield from facts(dict(value.named_buffers()), name)
    elif isinstance(value, GeneratorType):
        yield name, value.gi_frame.f_locals.get("i")
    elif isinstance(value, random.Random):
        yield name, value.getstate()
    elif isinstance(value, np.random.Generator):
        yield name, str(value.bit_generator.state)
    elif isinstance(value, set | itertools.count):
        yield name, repr(value)
    elif value is None or isinstance(value, int | float | str):
        yield name, value
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        others = [x for x in cells if x is not value]
        yield from facts([others, value.__defaults__, vars(value)], name)
    elif not isinstance(value, Probe | generated.Spec):
        parts = [getattr(value, key, None) for key in PARTS]
        yield from facts([getattr(value, "__dict__", {}), *parts], name, graph)


#: Attributes that hold an object's state beside its dictionary.
PARTS = ("__self__", "args", "calls", "values")


def unequal(found, expected, tolerance, of_hooks):
    """List the differences; `of_hooks` whether those of forward hooks are known."""
    listed = []
    for some, others in zip(found, expected, strict=False):
        step = int(next(iter(others)).split()[1].rstrip(":"))
        # What differs by rounding makes weights that do: more so in each step.
        limit = tolerance * largest(others) * 100**step
        for name in {**others, **some}:
            if of_hooks and re.search(r"calls of (pre-)?forward", name):
                continue
            if name not in some or name not in others:
                listed.append(f"{name}: only {'there' if name in some else 'plain'}")
                continue
            exactly = step == 0 and "gradient of" not in name
            how = _difference(some[name], others[name], 0 if exactly else limit)
            if how:
                listed.append(f"{name}: {how}")
    return listed


def largest(seen):
    """Give the largest magnitude, 1 at least."""
    tensors = [
        x for x in seen.values() if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return max([1.0, *(float(x.abs().max()) for x in tensors if x.isfinite().all())])


def _difference(a, b, limit):
    if isinstance(a, float) and isinstance(b, float):
        a, b = torch.tensor(a), torch.tensor(b)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None if type(a) is type(b) and a == b else f"{a} instead of {b}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
    if torch.allclose(a, b, rtol=0, atol=limit, equal_nan=True):
        return None
    if not a.is_floating_point():
        return "differs"
    return f"{a.tolist()} instead of {b.tolist()}, limit {limit:g}"
