"""Arguments of optimizers: the function and the classes refuse alike."""

import pytest
import torch

from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.optimizers import OPTIMIZERS
from tests.unit.optim.steps import CLASSES, parameter, states_of, step


def refusal(build, **given):
    with pytest.raises((ValueError, TypeError), match=r".") as error:
        build(**given)
    return str(error.value)


def refused_alike(name, given):
    """The message of the function, which the class must have too."""
    said = refusal(build_optimizer, name=name, **given)
    assert refusal(CLASSES[name], **given) == said
    return said


SHARED = parameter(2)
ALL_OPTIONS = {key for row in OPTIMIZERS.values() for key in row.options} - {"lr"}
WEIGHTS = torch.ones(4096)
STRAY = torch.nn.Linear(3, 2)
#: As a DTensor has it.
SHARDED = torch.ones(4096)
SHARDED.device_mesh = "a mesh"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": True}, "bits is True"),
        ({"bits": 8.0}, "bits is 8.0"),
        ({"lr": -0.1}, "lr is -0.1; it must be a number from 0"),
        ({"lr": "1e-4"}, "lr is '1e-4'; it must be a number from 0. (YAML reads 1e-4"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"lr": 10**400}, "it must be a number from 0"),
        ({"amsgrad": "false"}, "amsgrad is 'false'; it must be True or False"),
        ({"momentum": 0.9}, "momentum is no option of adamw, which has lr, betas, eps"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"betas": (0.9, 1.0)}, "betas is 1.0"),
        ({"betas": [0.9]}, "give a list of two numbers"),
        ({"eps": 0}, "eps is 0; it must be a number above 0"),
        ({"params": []}, "empty parameter list"),
        ({"params": STRAY}, "'Linear' object is not iterable"),
        ({"params": "weights"}, "can only optimize Tensors"),
        ({"lr": torch.tensor(0.1)}, "lr is tensor(0.1000); it must be a number"),
        (
            {"params": [{"params": [SHARED], "lr": torch.tensor(1)}]},
            "lr is tensor(1); it",
        ),
        ({"params": 2 * [{"params": [SHARED]}]}, "in more than one parameter group"),
        ({"params": [{"params": [SHARED], "rate": 1}]}, "has 'rate', which adamw at"),
        ({"params": [{"params": [SHARED], "lr": -1}]}, "lr is -1; it must be a number"),
        ({"block": 512}, "block is 512; blocks have 256 or 2048 values"),
        ({"pack_small": "no"}, "pack_small is 'no'; it must be True or False"),
        ({"backend": "cuda"}, "backend is 'cuda'; it must be 'native' or"),
        ({"backend": "bitsandbytes", "block": 2048}, "cannot do block=2048"),
        ({"backend": "bitsandbytes", "keep_32bit": SHARED}, "or keep_32bit"),
        ({"keep_32bit": STRAY}, "parameter of shape [2, 3] that is not among"),
        ({"keep_32bit": "classifier"}, "keep_32bit holds a str"),
        ({"keep_32bit": {"classifier": STRAY}}, "keep_32bit holds a dict"),
    ],
)
def test_what_no_optimizer_takes_is_refused_by_the_function_and_the_class(
    options, message
):
    given = {"params": [parameter(2)], "bits": 8, "lr": 0.1} | options
    assert message in refused_alike("adamw", given)


@pytest.mark.parametrize("name", ["AdamW", None])
def test_an_unknown_name_is_refused_with_all(name):
    said = refusal(build_optimizer, params=[parameter(2)], name=name, bits=8, lr=0.1)
    assert f"{name!r} does not exist; there are 'sgd', 'adam', 'adamw'" in said


@pytest.mark.parametrize("name", CLASSES)
def test_options_that_are_none_are_not_given_and_defaults_are_the_classes(name):
    row = OPTIMIZERS[name]
    (group,) = build_optimizer(
        [parameter(2)], name=name, bits=32, lr=0.1, **dict.fromkeys(ALL_OPTIONS)
    ).param_groups
    expected = {key: o.default for key, o in row.options.items() if key != "lr"}
    expected.pop("decoupled_decay", None)
    assert {key: group[key] for key in expected} == expected
    others = ALL_OPTIONS - row.options.keys()
    for option in others:
        said = refused_alike(
            name, {"params": [parameter(2)], "bits": 8, "lr": 0.1, option: 0.9}
        )
        assert f"{option} is no option of {name}" in said


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"dampening": 0.5}, "sgd at 8 bit cannot do dampening=0.5"),
        ("adam", {"params": [SHARDED.double()]}, "params[0] is torch.float64"),
        ("adam", {"amsgrad": True}, "adam at 8 bit cannot do amsgrad"),
        ("adamw", {"params": [WEIGHTS.double()]}, "params[0] is torch.float64"),
        ("sgd", {"params": [WEIGHTS.bfloat16()]}, "params[0] is torch.bfloat16"),
        ("sgd", {"params": [SHARDED]}, "params[0] is sharded by FSDP"),
    ],
)
def test_what_8_bit_cannot_do_is_refused_there_only(name, options, message):
    given = {"params": [parameter(64, 64)], "lr": 0.1} | options
    assert message in refused_alike(name, {"bits": 8} | given)
    optimizer = build_optimizer(name=name, bits=32, **given)
    (group,) = optimizer.param_groups
    options.pop("params", None)
    assert {key: group[key] for key in options} == options


@pytest.mark.parametrize(
    ("name", "bits", "options", "message"),
    [
        (
            "sgd",
            32,
            {"decoupled_decay": True},
            "decoupled_decay=True. Leave it out: it",
        ),
        ("sgd", 8, {"nesterov": True, "backend": "bitsandbytes"}, "cannot do nesterov"),
        ("adam", 8, {"weight_decay": 0.1, "backend": "bitsandbytes"}, "cannot do weig"),
    ],
)
def test_what_one_form_alone_can_do_is_refused_elsewhere(name, bits, options, message):
    given = {"params": [parameter(64, 64)], "lr": 0.1, "bits": bits}
    assert message in refused_alike(name, given | options)


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was():
    optimizer = build_optimizer([parameter(2)], name="sgd", bits=8, lr=0.1)
    for group, message in (
        ({"params": [parameter(2)], "momentum": 1}, "momentum is 1; it must be"),
        ({"params": [torch.ones(2).double()]}, r"params\[0\] is torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_what_a_backend_cannot_do_is_refused_in_a_group_too():
    group = {"params": [parameter(2)], "nesterov": True}
    with pytest.raises(ValueError, match="'nesterov', which sgd at 8 bit by bits"):
        build_optimizer([group], name="sgd", bits=8, lr=0.1, backend="bitsandbytes")


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda layer: layer.parameters(),
        lambda layer: [{"params": list(layer.parameters())}],
        lambda layer: iter([{"params": layer.parameters()}]),
    ],
)
def test_every_form_of_one_group_gives_one_group(wrap, bits):
    layer = torch.nn.Linear(64, 64)
    optimizer = build_optimizer(wrap(layer), name="sgd", bits=bits, lr=0.1)
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in layer.parameters()]


@pytest.mark.parametrize(
    "choose",
    [
        lambda layers: layers[1],
        lambda layers: layers[1].parameters(),
        lambda layers: [[layers[1].weight], layers[1].parameters()],
        lambda layers: torch.nn.ModuleDict({"classifier": layers[1]}),
    ],
)
def test_small_tensors_and_modules_in_any_form_stay_at_32_bit(choose):
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
    # A frozen one may be kept without being trained.
    layers[1].bias.requires_grad_(False)
    params = [layers[0].weight, layers[1].weight, parameter(4095), parameter(4096)]
    optimizer = build_optimizer(
        params, name="adamw", bits=8, lr=0.1, keep_32bit=choose(layers)
    )
    step(optimizer)
    bits = [8 * state["state1"].element_size() for state in states_of(optimizer)]
    assert bits == [8, 32, 32, 8]
