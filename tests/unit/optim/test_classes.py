"""SGD, Adam and AdamW as classes: what build_optimizer makes, under names of their own."""

import copy
import inspect
import pickle

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml

from speechbrain_rev import optim
from speechbrain_rev.optim import SGD, Adam, AdamW, build_optimizer
from tests.unit.optim.steps import assert_identical, parameter, step

CLASSES = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
#: Options at which the classes' arithmetic shows.
OPTIONS = {
    "sgd": {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01},
    "adam": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1.0e-6},
    "adamw": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.1},
}
BITS = [8, 32]
each_class = pytest.mark.parametrize("name", CLASSES)
each_bits = pytest.mark.parametrize("bits", BITS)


class Mine(SGD):
    """A user's own, with a rate of its own."""

    def __init__(self, params, *, bits):
        super().__init__(params, bits=bits, lr=0.5)


def weights():
    return [parameter(70, 70), parameter(80, 80, seed=1)]


def after_steps(optimizer, count=3):
    for seed in range(count):
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


@each_bits
@each_class
def test_an_optimizer_is_of_its_class_and_of_no_other(name, bits):
    optimizer = CLASSES[name](weights(), bits=bits, lr=0.1)
    assert [isinstance(optimizer, each) for each in CLASSES.values()] == [
        each == name for each in CLASSES
    ]
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer).__name__ == f"{CLASSES[name].__name__}{bits}bit"
    torchs = getattr(torch.optim, CLASSES[name].__name__)
    assert isinstance(optimizer, torchs) == (bits == 32)


@each_class
def test_32_bit_has_the_bits_of_torchs_own(name):
    ours = CLASSES[name](weights(), bits=32, **OPTIONS[name])
    theirs = getattr(torch.optim, CLASSES[name].__name__)(weights(), **OPTIONS[name])
    _, found = after_steps(ours)
    _, expected = after_steps(theirs)
    assert_identical(found, expected)


def test_classes_take_the_functions_arguments_and_each_its_own():
    of_function = dict(inspect.signature(build_optimizer).parameters)
    del of_function["name"]
    of_classes = [dict(inspect.signature(each).parameters) for each in CLASSES.values()]
    assert {name: p for each in of_classes for name, p in each.items()} == of_function
    sgd, adam, adamw = (each.keys() for each in of_classes)
    assert sgd - adam == {"momentum", "nesterov", "dampening"}
    assert adam - sgd == {"betas", "eps", "amsgrad"}
    assert adam == adamw


def message(build, *arguments, **options):
    with pytest.raises(ValueError, match=r".") as error:
        build(*arguments, **options)
    return str(error.value)


@each_bits
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sgd", {"lr": "1e-4"}),
        ("sgd", {"momentum": 1.0}),
        ("sgd", {"nesterov": "false"}),
        ("sgd", {"keep_32bit": "classifier"}),
        ("adam", {"eps": 0}),
        ("adamw", {"betas": 0.9}),
        ("adamw", {"weight_decay": -1}),
        ("adamw", {"bits": 16}),
        ("adamw", {"bits": 8.0}),
        ("adamw", {"bits": True}),
        ("adamw", {"params": []}),
        ("adamw", {"params": [{"params": weights()}, {"params": weights()}]}),
    ],
)
def test_values_out_of_range_are_refused_as_by_the_function(name, wrong, bits):
    given = {"params": weights(), "bits": bits, "lr": 0.1} | wrong
    assert message(CLASSES[name], **given) == message(
        build_optimizer, name=name, **given
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sgd", {"nesterov": True}),
        ("sgd", {"dampening": 0.5}),
        ("sgd", {"momentum": 0}),
        ("adam", {"amsgrad": True}),
        ("adam", {"weight_decay": 0.1}),
        ("adamw", {"amsgrad": True}),
        (
            "adamw",
            {"params": [torch.nn.Parameter(torch.ones(64, dtype=torch.float64))]},
        ),
    ],
)
def test_what_the_library_would_ignore_is_refused_as_by_the_function(name, wrong):
    given = {"params": weights(), "lr": 0.1} | wrong
    words = message(CLASSES[name], bits=8, **given)
    assert words == message(build_optimizer, name=name, bits=8, **given)
    CLASSES[name](bits=32, **given)


@each_bits
@pytest.mark.parametrize(
    ("name", "option"),
    [("sgd", "amsgrad"), ("adam", "momentum"), ("adamw", "nesterov"), ("sgd", "name")],
)
def test_an_option_of_another_optimizer_is_none_of_a_class(name, option, bits):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        CLASSES[name](weights(), bits=bits, lr=0.1, **{option: 0})


@pytest.mark.parametrize("missing", ["bits", "lr"])
def test_what_has_no_default_has_to_be_given(missing):
    given = {"bits": 8, "lr": 0.1}
    del given[missing]
    with pytest.raises(TypeError, match=f"missing 1 required .*'{missing}'"):
        SGD(weights(), **given)


@each_bits
@each_class
def test_checkpoints_go_from_the_class_to_the_function_and_back(name, bits):
    made = CLASSES[name](weights(), bits=bits, **OPTIONS[name])
    function = build_optimizer(weights(), name=name, bits=bits, **OPTIONS[name])
    for source, target in ((made, function), (function, made)):
        step(source, 5)
        saved = copy.deepcopy(source.state_dict())
        target.load_state_dict(saved)
        assert_identical(target.state_dict(), source.state_dict())
    other = optim.convert_checkpoint(
        made.state_dict(), CLASSES[name](weights(), bits=40 - bits, lr=0.1)
    )
    assert other["param_groups"][0]["built_as"] == f"{name} at {40 - bits} bit"


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
)
@pytest.mark.parametrize("made", [*CLASSES.values(), Mine])
@each_bits
def test_a_copy_goes_on_as_the_optimizer_would_and_refuses_what_it_refuses(
    made, bits, duplicate
):
    given = {"bits": bits} | ({} if made is Mine else {"lr": 0.1})
    optimizer = made(weights(), **given)
    after_steps(optimizer)
    copied = duplicate(optimizer)
    assert type(copied) is type(optimizer)
    assert isinstance(copied, made)
    step(copied, 7)
    step(optimizer, 7)
    assert_identical(copied.state_dict(), optimizer.state_dict())
    with pytest.raises(ValueError, match="one parameter group"):
        copied.add_param_group({"params": [parameter(3)]})
    with pytest.raises(ValueError, match="the checkpoint holds the states of"):
        copied.load_state_dict(
            made(weights(), **(given | {"bits": 40 - bits})).state_dict()
        )


def test_a_class_that_computes_takes_no_other_bits():
    eight = SGD(weights(), bits=8, lr=0.1)
    again = type(eight)(weights(), bits=8, lr=0.1)
    assert type(again) is type(eight)
    with pytest.raises(ValueError, match=r"bits is 32, but SGD8bit .* to SGD by its"):
        type(eight)(weights(), bits=32, lr=0.1)


@each_bits
def test_torchs_schedulers_and_hooks_take_it(bits):
    optimizer = AdamW(weights(), bits=bits, lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step(optimizer)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert calls == ["stepped"]
