import subprocess
import sys

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml

from speechbrain_rev.optim import build_optimizer, state_bytes, strict
from tests.unit.optim.steps import parameter, step


def bits_of(optimizer):
    return [
        8 * optimizer.state[param]["state1"].element_size()
        for param in optimizer.param_groups[0]["params"]
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_at_32_bit_torchs_own_optimizer_computes_with_the_given_options(name, expected):
    optimizer = build_optimizer(
        [parameter(2)], name=name, bits=32, lr=0.3, weight_decay=0.2, betas=(0.5, 0.6)
    )
    assert isinstance(optimizer, expected)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.2)
    assert group.get("betas", (0.5, 0.6)) == (0.5, 0.6)
    assert group.get("momentum", 0.9) == 0.9


def test_options_that_only_torch_honours_reach_it_at_32_bit():
    sgd = build_optimizer([parameter(2)], name="sgd", bits=32, lr=1, nesterov=True)
    assert sgd.param_groups[0]["nesterov"] is True
    sgd = build_optimizer([parameter(2)], name="sgd", bits=32, lr=1, dampening=0.1)
    assert sgd.param_groups[0]["dampening"] == 0.1
    adam = build_optimizer([parameter(2)], name="adam", bits=32, lr=1, amsgrad=True)
    assert adam.param_groups[0]["amsgrad"] is True


def test_tensors_of_fewer_than_4096_elements_stay_at_32_bit():
    optimizer = build_optimizer(
        [parameter(4095), parameter(4096), parameter(1), parameter(2, 4000)],
        name="sgd",
        bits=8,
        lr=0.1,
    )
    step(optimizer)
    assert bits_of(optimizer) == [32, 8, 32, 8]


@pytest.mark.parametrize(
    "choose",
    [
        lambda layers: layers[1],
        lambda layers: [layers[1]],
        lambda layers: layers[1].weight,
        lambda layers: (layers[1].weight,),
        lambda layers: layers[1].parameters(),
        lambda layers: [[layers[1].weight], layers[1].parameters()],
        lambda layers: torch.nn.ModuleDict({"classifier": layers[1]}),
    ],
)
def test_modules_and_parameters_given_in_any_form_stay_at_32_bit(choose):
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
    optimizer = build_optimizer(
        layers.parameters(), name="adamw", bits=8, lr=0.1, keep_32bit=choose(layers)
    )
    step(optimizer)
    assert bits_of(optimizer) == [8, 32, 32, 32, 8, 32]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda layer: layer.parameters(),
        lambda layer: list(layer.parameters()),
        lambda layer: {"params": layer.parameters()},
        lambda layer: [{"params": list(layer.parameters())}],
        lambda layer: iter([{"params": layer.parameters()}]),
    ],
)
@pytest.mark.parametrize("bits", [8, 32])
def test_every_form_of_one_group_gives_one_group(wrap, bits):
    layer = torch.nn.Linear(64, 64)
    optimizer = build_optimizer(wrap(layer), name="sgd", bits=bits, lr=0.1)
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in layer.parameters()]


def test_it_serves_as_opt_class_in_a_hyperpyyaml_file():
    hparams = load_hyperpyyaml(
        """
        lr: 0.1
        momentum: 0.9
        optimizer_name: adamw
        optimizer_bits: 8
        encoder: !new:torch.nn.Linear [64, 64]
        classifier: !new:torch.nn.Linear [64, 65]
        opt_class: !name:speechbrain_rev.optim.build_optimizer
            name: !ref <optimizer_name>
            bits: !ref <optimizer_bits>
            lr: !ref <lr>
            momentum: !ref <momentum>
            weight_decay: 0.05
            betas: [0.8, 0.9]
            keep_32bit: [!ref <classifier>]
        """
    )
    modules = torch.nn.ModuleList([hparams["encoder"], hparams["classifier"]])
    optimizer = hparams["opt_class"](modules.parameters())
    step(optimizer)
    assert bits_of(optimizer) == [8, 32, 32, 32]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["weight_decay"] == 0.05


@pytest.mark.parametrize(
    ("name", "bits", "per_parameter"),
    [
        ("sgd", 8, 1 + 4 / 256),
        ("adamw", 8, 2 * (1 + 4 / 256)),
        ("sgd", 32, 4),
        ("adamw", 32, 8),
    ],
)
def test_state_bytes_are_those_of_codes_and_scales(name, bits, per_parameter):
    weights = [parameter(256, 64), parameter(256, 32)]
    optimizer = build_optimizer(weights, name=name, bits=bits, lr=0.1)
    assert state_bytes(optimizer) == 0
    step(optimizer)
    step(optimizer)
    elements = sum(weight.numel() for weight in weights)
    # One table of 256 float32 values for each moment, shared by all parameters; torch
    # counts steps in a float32 of each parameter in Adam.
    moments = 1 if name == "sgd" else 2
    extra = 1024 * moments if bits == 8 else 4 * len(weights) * (moments - 1)
    assert state_bytes(optimizer) == per_parameter * elements + extra


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamv"}, r"'adamv' does not exist; .* Did you mean 'adam'"),
        ({"name": "AdamW"}, "Did you mean 'adamw'"),
        ({"name": "SGD"}, "Did you mean 'sgd'"),
        ({"name": None}, "None does not exist"),
        ({"bits": 16}, "bits is 16"),
        ({"bits": True}, "bits is True"),
        ({"bits": "8"}, "bits is '8'"),
        ({"bits": 8.0}, r"bits is 8\.0"),
        ({"lr": -0.1}, "lr is -0.1; it must be a number from 0"),
        ({"lr": "1e-4"}, r"lr is '1e-4'.*write 1\.0e-4"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"lr": None}, "lr is None"),
        ({"lr": 10**400}, "lr is 10+; it must be a number from 0"),
        ({"nesterov": "false"}, "nesterov is 'false'; it must be True or False"),
        ({"amsgrad": "false"}, "amsgrad is 'false'; it must be True or False"),
        ({"amsgrad": 0}, "amsgrad is 0; it must be True or False"),
        ({"momentum": 1.0}, "momentum is 1.0; it must be a number from 0 to below 1"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"betas": (0.9, 1.0)}, "betas is 1.0"),
        ({"betas": 0.9}, "betas is 0.9; give a list of two numbers"),
        ({"betas": [0.9]}, "give a list of two numbers"),
        ({"betas": "0.9"}, "give a list of two numbers"),
        ({"eps": 0}, "eps is 0; it must be a number above 0"),
    ],
)
@pytest.mark.parametrize("bits", [8, 32])
def test_names_and_values_out_of_range_are_refused(options, message, bits):
    options = {"name": "adamw", "bits": bits, "lr": 0.1} | options
    with pytest.raises(ValueError, match=message):
        build_optimizer([parameter(2)], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "sgd", "nesterov": True}, "sgd at 8 bit cannot do nesterov"),
        ({"name": "sgd", "dampening": 0.5}, "sgd at 8 bit cannot do dampening=0.5"),
        ({"name": "sgd", "momentum": 0}, "sgd at 8 bit cannot do momentum=0"),
        ({"name": "adam", "amsgrad": True}, "adam at 8 bit cannot do amsgrad"),
        ({"name": "adamw", "amsgrad": True}, "adamw at 8 bit cannot do amsgrad"),
        ({"name": "adam", "weight_decay": 0.1}, "L2 weight_decay .*'adamw'"),
    ],
)
def test_what_the_library_would_ignore_is_refused_at_8_bit_only(options, message):
    options = {"lr": 0.1} | options
    with pytest.raises(ValueError, match=message):
        build_optimizer([parameter(64, 64)], bits=8, **options)
    step(build_optimizer([parameter(64, 64)], bits=32, **options))


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamw", "nesterov": True}, "belongs to sgd, not to adamw"),
        ({"name": "adam", "dampening": 0.1}, "belongs to sgd, not to adam"),
        ({"name": "sgd", "amsgrad": True}, "belongs to adam and adamw, not to sgd"),
    ],
)
def test_options_of_another_optimizer_are_refused(options, message, bits):
    with pytest.raises(ValueError, match=message):
        build_optimizer([parameter(2)], bits=bits, lr=0.1, **options)


def shared_parameter():
    return [parameter(2)] * 2


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "params is empty"),
        (torch.nn.Linear(2, 2), r"params is a Linear; .*module\.parameters\(\)"),
        (torch.ones(2), "params is a Tensor"),
        (None, "params is a NoneType"),
        ("weights", "params is a str"),
        ([1.0], r"params\[0\] is a float"),
        (list(torch.nn.Linear(2, 2).named_parameters()), r"params\[0\] is a tuple"),
        (shared_parameter(), "holds a parameter twice"),
        ([{"params": [parameter(2)]}, {"params": [parameter(2)]}], "2 parameter group"),
        ([{"params": [parameter(2)], "lr": 0.1}], r"options of their own \(lr\)"),
        ({"params": []}, "params is empty"),
    ],
)
def test_parameters_in_another_form_are_refused(params, message, bits):
    with pytest.raises(ValueError, match=message):
        build_optimizer(params, name="sgd", bits=bits, lr=0.1)


@pytest.mark.parametrize("bits", [8, 32])
def test_another_parameter_group_is_refused(bits):
    optimizer = build_optimizer([parameter(2)], name="sgd", bits=bits, lr=0.1)
    with pytest.raises(ValueError, match=r"Give all parameters when it is made"):
        optimizer.add_param_group({"params": [parameter(3)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (torch.nn.Linear(3, 2), r"parameter of shape \[2, 3\] that is not among"),
        ("classifier", "keep_32bit holds a str"),
        ([None], "keep_32bit holds a NoneType"),
        ({"classifier": torch.nn.Linear(3, 2)}, "keep_32bit holds a dict"),
    ],
)
def test_what_cannot_be_kept_at_32_bit_is_refused(keep, message, bits):
    with pytest.raises(ValueError, match=message):
        build_optimizer([parameter(2)], name="sgd", bits=bits, lr=0.1, keep_32bit=keep)


def test_a_frozen_parameter_may_be_kept_without_being_trained():
    layer = torch.nn.Linear(64, 64)
    layer.bias.requires_grad_(False)
    optimizer = build_optimizer(
        [layer.weight], name="sgd", bits=8, lr=0.1, keep_32bit=layer
    )
    step(optimizer)
    assert bits_of(optimizer) == [32]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_that_are_not_float32_are_refused_at_8_bit_only(dtype):
    weight = torch.nn.Parameter(torch.ones(4096, dtype=dtype))
    with pytest.raises(ValueError, match=rf"params\[0\] is {dtype}"):
        build_optimizer([weight], name="sgd", bits=8, lr=0.1)
    build_optimizer([weight], name="sgd", bits=32, lr=0.1)


def test_bitsandbytes_is_imported_for_8_bit_only():
    program = (
        "import sys, torch\n"
        "from speechbrain_rev.optim import build_optimizer\n"
        "weights = [torch.nn.Parameter(torch.ones(2))]\n"
        "build_optimizer(weights, name='sgd', bits=32, lr=0.1)\n"
        "assert 'bitsandbytes' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
        "build_optimizer(weights, name='sgd', bits=8, lr=0.1)\n"
        "assert 'bitsandbytes' in sys.modules\n"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "gemm_4bit" not in outcome.stderr


def test_without_bitsandbytes_8_bit_is_refused_with_the_way_out(monkeypatch):
    strict.strict_class.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match="optimizer_bits: 32"):
        build_optimizer([parameter(2)], name="sgd", bits=8, lr=0.1)
    build_optimizer([parameter(2)], name="sgd", bits=32, lr=0.1)
