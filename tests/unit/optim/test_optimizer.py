"""Optimizers as classes and by name: who computes, copies, hooks, bytes of states."""

import copy
import inspect
import pickle
import subprocess
import sys

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml

from speechbrain_rev.optim import SGD, AdamW, build_optimizer, state_bytes
from speechbrain_rev.optimizers import OPTIMIZERS
from tests.unit.optim.steps import (
    CLASSES,
    assert_identical,
    parameter,
    params_of,
    step,
)

#: Options at which the classes' arithmetic shows.
OPTIONS = {
    "sgd": {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01},
    "adam": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1.0e-6},
    "adamw": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.1},
    "lion": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.1},
}
each_class = pytest.mark.parametrize("name", CLASSES)
each_bits = pytest.mark.parametrize("bits", [8, 32])


class Mine(SGD):
    """A user's own, with a rate of its own that its groups read."""

    def __init__(self, params, *, bits, keep_32bit):
        self.rate = 0.5
        super().__init__(params, bits=bits, lr=0.1, keep_32bit=keep_32bit)

    def add_param_group(self, param_group):
        super().add_param_group({"lr": self.rate, **param_group})


def weights():
    return [parameter(70, 70), parameter(80, 80, seed=1)]


def after_steps(optimizer, seeds=range(3)):
    for seed in seeds:
        step(optimizer, seed)
    return [optimizer.state_dict(), optimizer.param_groups[0]["params"]]


@each_bits
@each_class
def test_three_lines_of_yaml_make_what_the_function_makes_to_the_bit(name, bits):
    given = {"bits": bits} | OPTIONS[name]
    made = load_hyperpyyaml(
        f"layer: !new:torch.nn.Linear [80, 80]\n"
        f"opt_class: !name:speechbrain_rev.optim.{CLASSES[name].__name__}\n"
        f"    {{{', '.join(f'{k}: {v}' for k, v in given.items())}, "
        "keep_32bit: !ref <layer>}"
    )
    layer = made["layer"]
    twin = copy.deepcopy(layer)
    optimizer = made["opt_class"]([*weights(), *layer.parameters()])
    params = [*weights(), *twin.parameters()]
    function = build_optimizer(params, name=name, keep_32bit=twin, **given)
    assert type(optimizer) is type(function)
    assert_identical(after_steps(optimizer), after_steps(function))


@each_class
def test_at_32_bit_it_is_torchs_own_to_the_bit_and_of_no_other_class(name):
    eight, ours = (CLASSES[name](weights(), bits=b, **OPTIONS[name]) for b in (8, 32))
    for optimizer in (eight, ours):
        matching = {n for n, each in CLASSES.items() if isinstance(optimizer, each)}
        assert matching == {name}
        assert isinstance(optimizer, torch.optim.Optimizer)
    if not OPTIMIZERS[name].at_32_bit:
        return
    torchs = getattr(torch.optim, CLASSES[name].__name__)
    assert isinstance(ours, torchs)
    assert not isinstance(eight, torchs)
    theirs = torchs(weights(), **OPTIONS[name])
    assert_identical(after_steps(ours)[1], after_steps(theirs)[1])


@each_class
def test_signatures_and_documentation_name_the_options_of_the_row(name):
    row, made = OPTIMIZERS[name], CLASSES[name]
    parameters = dict(inspect.signature(made).parameters)
    of_function = inspect.signature(build_optimizer).parameters
    for key, option in row.options.items():
        default = parameters.pop(key).default
        assert default == (inspect.Parameter.empty if key == "lr" else option.default)
        assert f"{key} : {option.type}\n    {option.meaning}" in made.__doc__
    assert set(parameters) == set(of_function) - {"name", "lr", "options"}
    for key, parameter_of in parameters.items():
        assert parameter_of == of_function[key]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
)
@pytest.mark.parametrize("made", [*CLASSES.values(), Mine])
@pytest.mark.parametrize("steps", [0, 2])
@each_bits
def test_a_copy_goes_on_as_the_optimizer_would_and_leaves_it_alone(
    made, bits, steps, duplicate
):
    trained = weights()
    given = {"keep_32bit": trained[1]} | ({} if made is Mine else {"lr": 0.1})
    optimizer = made(trained, bits=bits, **given)
    after_steps(optimizer, range(steps))
    optimizer.param_groups[0]["lr"] = 0.05
    before = copy.deepcopy([optimizer.state_dict(), trained])
    copied_weights, copied = duplicate((trained, optimizer))
    assert type(copied) is type(optimizer)
    assert isinstance(copied, made)
    went_on = after_steps(copied, (7, 8))
    assert_identical([optimizer.state_dict(), trained], before)
    assert_identical(went_on, after_steps(optimizer, (7, 8)))
    assert went_on[1] is not trained
    if bits == 8:
        dtypes = [copied.state[weight]["state1"].dtype for weight in copied_weights]
        assert dtypes == [torch.uint8, torch.float32]
    other = made(weights(), bits=40 - bits, **(given | {"keep_32bit": []}))
    with pytest.raises(ValueError, match="The checkpoint's optimizer is"):
        copied.load_state_dict(other.state_dict())


def test_a_class_that_computes_makes_what_the_bits_ask_for():
    eight, plain = (SGD(weights(), bits=bits, lr=0.1) for bits in (8, 32))
    for given in (eight, plain):
        assert type(type(given)(weights(), bits=8, lr=0.1)) is type(eight)
        assert type(type(given)(weights(), bits=32, lr=0.1)) is type(plain)


@each_bits
def test_schedulers_and_hooks_run_once_a_step_beside_the_librarys_own(bits):
    import bitsandbytes

    # torch wraps the step of each class of which there is an optimizer.
    bitsandbytes.optim.AdamW([parameter(2)], lr=0.1)
    optimizer = AdamW(weights(), bits=bits, lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step(optimizer)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert calls == ["before", "after"]


@pytest.mark.parametrize(("name", "moments"), [("sgd", 1), ("adamw", 2)])
@each_bits
def test_state_bytes_are_those_of_codes_and_scales(name, moments, bits):
    trained = [parameter(256, 64), parameter(256, 32)]
    optimizer = build_optimizer(trained, name=name, bits=bits, lr=0.1)
    assert state_bytes(optimizer) == 0
    after_steps(optimizer)
    elements = sum(weight.numel() for weight in trained)
    # Steps are counted in a float32 of each parameter, by torch in Adam alone; at 8 bit
    # those of all, too.
    counts = len(trained) + 1 if bits == 8 else len(trained) * (moments - 1)
    extra = 4 * counts
    of_each = 1 + 4 / 256 if bits == 8 else 4
    assert state_bytes(optimizer) == moments * of_each * elements + extra


@pytest.mark.parametrize("block", [256, 2048])
@pytest.mark.parametrize("pack", [False, True])
def test_small_tensors_share_blocks_if_asked_to(block, pack):
    trained = [parameter(9), parameter(300), parameter(64, 64), parameter(4095)]
    optimizer = SGD(trained, bits=8, lr=0.1, block=block, pack_small=pack)
    after_steps(optimizer)
    values = sum(weight.numel() for weight in trained)
    small, blocks = values - 4096, 4096 // block
    of_small = small + 4 * -(-small // block) if pack else 4 * small
    counts = 4 * (len(trained) + 1)
    assert state_bytes(optimizer) == 4096 + 4 * blocks + of_small + counts


@pytest.mark.parametrize("backend", ["native", "bitsandbytes"])
@pytest.mark.slow
def test_bitsandbytes_is_imported_by_its_own_backend_only(backend):
    program = (
        "import sys, torch\n"
        "from speechbrain_rev.optim import build_optimizer\n"
        "weights = [torch.nn.Parameter(torch.ones(2))]\n"
        f"build_optimizer(weights, name='sgd', bits=8, lr=0.1, backend={backend!r})\n"
        "assert not torch.cuda.is_initialized()\n"
        "print('bitsandbytes' in sys.modules)\n"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip() == str(backend == "bitsandbytes")


def test_without_bitsandbytes_its_backend_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)

    class Own(SGD):
        """One whose base was not chosen before."""

    with pytest.raises(ImportError, match="optimizer_backend: native"):
        Own([parameter(2)], bits=8, lr=0.1, backend="bitsandbytes")
    build_optimizer([parameter(2)], name="sgd", bits=8, lr=0.1)


@pytest.mark.parametrize("bits", [8, 32])
def test_named_parameters_are_taken_as_torch_takes_them(bits):
    network = torch.nn.Linear(70, 70)
    named, plain = (
        build_optimizer(given, name="adamw", bits=bits, lr=0.1)
        for given in (network.named_parameters(), network.parameters())
    )
    (group,) = named.param_groups
    assert group["param_names"] == ["weight", "bias"]
    assert params_of(named) == params_of(plain)
    step(named)
    resumed = build_optimizer(
        network.named_parameters(), name="adamw", bits=bits, lr=0.1
    )
    resumed.load_state_dict(named.state_dict())
    assert_identical(resumed.state_dict(), named.state_dict())


def test_a_group_that_maximises_is_honoured_at_32_bit_and_refused_at_8():
    def groups():
        return [{"params": [parameter(70, 70)], "maximize": True}]

    ascending = build_optimizer(groups(), name="sgd", bits=32, lr=0.1)
    (weight,) = params_of(ascending)
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    ascending.step()
    assert (weight > before).all()
    with pytest.raises(ValueError, match="'maximize', which sgd at 8 bit does not"):
        build_optimizer(groups(), name="sgd", bits=8, lr=0.1)
