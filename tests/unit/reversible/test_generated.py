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
    strategies,
)
from torch import Tensor, nn

from speechbrain_rev.reversible import AdditiveCoupling, Recompute, recompute_blocks

from . import generated
from .chains import EXACT, FLOAT32_ROUNDING, MODES, WITHOUT_STORAGE, Plain, make_chain
from .generated import CONTAINERS, Block, Chain, Layer, Network, Probe, Steps

#: Of each test.
EXAMPLES = int(os.environ.get("GENERATED_EXAMPLES", "10"))

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

#: A warning about hooks that fire in both runs of a block.
OF_HOOKS = re.compile("hooks on .* fire")


@pytest.mark.parametrize(
    "networks",
    [generated.recomputed_networks, generated.chosen_networks, generated.chains],
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=strategies.data())
def test_random_networks_train_as_in_plain_autograd(networks, data):
    trains_as_in_plain_autograd(data.draw(networks()))


LINEAR = Block((Layer("linear"),))
MAP = Block((Layer("map_for_the_loss"),))
NORMALISED = Block((Layer("batch_norm"), Layer("dropout")))
WITHOUT_ITS_INPUT = Block((Layer("without_its_input"),))
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
    "recomputed within": [
        case
        for layer in ("dropout", "attribute_of_a_weight")
        for case in everywhere(
            Block((Block((Layer("batch_norm"), Layer(layer)), recomputed=True),))
        )
    ],
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
        for mode in MODES
        for used in (0, 1)
        for streams in ("exact", "float")
    ]
    + [
        Chain(
            ((LINEAR, LINEAR, "store"), (WITHOUT_ITS_INPUT, LINEAR, mode)),
            TWICE,
            "exact",
            (0,),
        )
        for mode in MODES
    ],
    "streams without a graph": [
        chain(f, g, WITHOUT_INPUTS, mode)
        for mode in WITHOUT_STORAGE
        for f in (LINEAR, FROZEN)
        for g in (LINEAR, FROZEN)
    ],
}

#: Where a reconstructed chain refuses to train.
OUTCOMES = {
    "layer unregistered": {"trained", "refused"},
    "backward doubly": {"trained", "refused"},
    "kept maps": {"trained", "refused"},
}


@pytest.mark.parametrize("name", CASES)
def test_each_part_trains_as_in_plain_autograd(name):
    outcomes = {trains_as_in_plain_autograd(case) for case in CASES[name]}
    assert outcomes == OUTCOMES.get(name, {"trained"})


def trains_as_in_plain_autograd(case):
    """Assert that a case does, or is refused, or that the engine warns; say which."""
    with generated.default_dtype(case.training.dtype):
        outcome = compared(case)
    if currently_in_test_context():
        event(outcome)  # for --hypothesis-show-statistics
    return outcome


def compared(case):
    expected, error, _ = trained(plain_run(case))
    if error is not None:
        return "plain autograd refused"
    if generated.watches_what_is_left_out(case):
        return "hooks of what is left out"
    if isinstance(case, Chain) and max(map(largest, expected)) > TAME:
        return "near the range of exact streams"
    seen, error, warned = trained(engine_run(case))
    of_hooks = any(map(OF_HOOKS.search, warned))
    others = [text for text in warned if not OF_HOOKS.search(text)]
    known = [text for text in others if generated.may_warn(case, text)]
    assert others == known
    network = isinstance(case, Network)
    tolerance = ROUNDING[case.training.dtype] if network else EXACT
    assert_alike(seen, expected, tolerance, of_hooks)
    if error is not None:
        names_a_remedy = isinstance(error, RuntimeError | ValueError | TypeError)
        if (
            names_a_remedy
            and generated.is_difficult(case)
            and REMEDY.search(str(error))
        ):
            return "refused"
        raise error
    # Gradients of several passes are added up in an order that depends on the mode.
    if not network and case.streams == "exact" and case.training.passes == 1:
        stored = tuple((f, g, "store") for f, g, _ in case.couplings)
        expected, *_ = trained(engine_run(replace(case, couplings=stored)))
        assert_alike(gradients(seen), gradients(expected), 0, of_hooks)
    return "trained"


def gradients(seen):
    """Keep what gradients there were."""
    named = ({n: x for n, x in each.items() if "gradient of" in n} for each in seen)
    return list(filter(None, named))


def plain_run(case):
    """Build a case without the engine."""
    torch.manual_seed(0)
    if isinstance(case, Network):
        return NetworkRun(case, generated.build(case.block, {}))
    module = Plain(make_chain([], streams=case.streams))
    module.blocks.extend(couplings(case, lambda module: module))
    return NetworkRun(case, module)


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
    return NetworkRun(case, make_chain(blocks, mode=modes, streams=case.streams))


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
        if isinstance(self.case, Chain):
            outputs = self.module(x, side)
            return outputs, [outputs[place] for place in self.case.used]
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
        if kind in ("once", "twice", "by output"):
            parts = {"once": [loss], "twice": [loss, loss]}
            *others, last = parts.get(kind, [*terms[1:], terms[0]])
            for part in others:
                part.backward(retain_graph=True)
            last.backward()
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
        state = {
            "random state": torch.get_rng_state(),
            "Python's random state": hash(random.getstate()),
            "numpy's random state": hash((numbers.tobytes(), place)),
        }
        for name, m in self.named.items():
            for key, buffer in m.named_buffers(recurse=False):
                state |= facts(buffer, f"buffer {name}.{key}")
            if type(m).__module__ == generated.__name__:
                for key, value in vars(m).items():
                    if not key.startswith("_"):
                        state |= facts(value, f"attribute {name}.{key}")
            for i, probe in enumerate(probes_of(m)):
                state[f"calls of {probe.kind} {i} of {name}"] = probe.calls
        return {f"step {number}: {name}": value for name, value in state.items()}


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


#: What is compared of a value of a type.
STATE_OF = {
    torch.Generator: torch.Generator.get_state,
    random.Random: lambda x: hash(x.getstate()),
    np.random.Generator: lambda x: str(x.bit_generator.state),
    np.ndarray: lambda x: torch.from_numpy(x.copy()),
    nn.Module: lambda x: dict(x.named_buffers()),
    GeneratorType: lambda x: x.gi_frame.f_locals.get("i"),
    set: repr,
    itertools.count: repr,
    FunctionType: lambda f: [
        [x for c in f.__closure__ or () if (x := c.cell_contents) is not f],
        f.__defaults__,
        vars(f),
    ],
}


def facts(value, name, graph=False):
    """Give what there is to compare in a value, by name, copied."""
    state = next(
        (get for kind, get in STATE_OF.items() if isinstance(value, kind)), None
    )
    if isinstance(value, Tensor):
        yield name, value.detach().clone().to_dense()
        if graph:
            yield f"{name}, needs a gradient", value.requires_grad
    elif isinstance(value, tuple | list | deque | dict):
        yield f"{name}, type", type(value).__name__
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from facts(item, f"{name}[{key!r}]", graph)
    elif state is not None:
        yield from facts(state(value), name)
    elif value is None or isinstance(value, int | float | str):
        yield name, value
    elif not isinstance(value, Probe | Layer | Block):
        parts = [getattr(value, key, None) for key in PARTS]
        yield from facts([getattr(value, "__dict__", {}), *parts], name, graph)


#: Attributes that hold an object's state beside its dictionary.
PARTS = ("__self__", "args", "calls", "values")


def assert_alike(seen, expected, tolerance, of_hooks):
    """Compare all steps; `of_hooks` whether extra calls of forward hooks are reported."""
    for some, others in zip(seen, expected, strict=False):
        step = int(next(iter(others)).split()[1].rstrip(":"))
        # What differs by rounding makes weights that do: more so in each step.
        limit = tolerance * largest(others) * 100**step
        assert some.keys() == others.keys()
        for name, other in others.items():
            if of_hooks and re.search(r"calls of (pre-)?forward", name):
                continue
            if isinstance(other, Tensor | float):
                exactly = step == 0 and "gradient of" not in name
                options = {
                    "rtol": 0,
                    "atol": 0 if exactly else limit,
                    "equal_nan": True,
                }
                torch.testing.assert_close(some[name], other, **options)
            else:
                assert some[name] == other, name


def largest(seen):
    """Give the largest magnitude, 1 at least."""
    tensors = [
        x for x in seen.values() if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return max([1.0, *(float(x.abs().max()) for x in tensors if x.isfinite().all())])
