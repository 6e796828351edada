"""Every row of OPTIMIZERS, in every form: its steps are those of float64 and of 32 bits."""

import copy

import pytest
import torch

from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.optim.map import dynamic_tree
from speechbrain_rev.optimizers import AT_8_BIT, AT_32_BIT, OPTIMIZERS
from tests.unit.optim.steps import (
    DEVICES,
    assert_identical,
    parameter,
    params_of,
    step,
)

#: Values at which an option shows.
CHANGED = {
    "betas": (0.8, 0.95), "momentum": 0.7, "eps": 1e-3, "weight_decay": 0.1,
    "nesterov": True, "decoupled_decay": True,
}  # fmt: skip
#: Each row with its defaults, and with each of its options changed, beside the decay.
CASES = [
    (name, {option: CHANGED[option] for option in options if option})
    for name, row in OPTIMIZERS.items()
    for options in [
        (),
        *(
            (option, "weight_decay")
            for option in row.options
            if option in CHANGED and AT_8_BIT in row.options[option].forms
        ),
    ]
]
FORMS = {
    "blocks of 256": {},
    "blocks of 2048": {"block": 2048},
    "packed": {"pack_small": True},
    "blocks of 2048, packed": {"block": 2048, "pack_small": True},
}
#: By which part updates at 8 bits may differ from those at 32: twice the largest of all cases.
#: Lion's steps turn where a sign does.
UPDATE_ERROR = {"momentum": 0.03, "adam": 0.04, "lion": 0.33}
#: Two groups: a short last block, whole ones in channels_last, and small tensors.
SHAPES = [[(70, 70), (64, 16, 3, 3), (9,)], [(80, 60), (33,), (300,)]]


def exact_step(kind, options, weight, gradient, moments, steps):
    """Take a step in float64, with the formulas of torch's pages and of Lion's paper."""
    lr, decay = options["lr"], options["weight_decay"]
    if options["decoupled"]:
        weight = weight * (1 - lr * decay)
    else:
        gradient = gradient + decay * weight
    if kind == "momentum":
        moment = options["momentum"] * moments[0] + gradient
        nesterov = gradient + options["momentum"] * moment
        return weight - lr * (nesterov if options["nesterov"] else moment), [moment]
    beta1, beta2 = options["betas"]
    if kind == "lion":
        direction = (beta1 * moments[0] + (1 - beta1) * gradient).sign()
        moment = beta2 * moments[0] + (1 - beta2) * gradient
        return weight - lr * direction, [moment]
    assert kind == "adam"
    first = beta1 * moments[0] + (1 - beta1) * gradient
    second = beta2 * moments[1] + (1 - beta2) * gradient.square()
    root = (second / (1 - beta2**steps)).sqrt() + options["eps"]
    return weight - lr * first / (1 - beta1**steps) / root, [first, second]


class Exact:
    """Weights and moments in float64."""

    def __init__(self, row, optimizer):
        self.row, self.weights = row, [p.double() for p in params_of(optimizer)]
        self.moments = [[torch.zeros_like(w)] * row.moments for w in self.weights]
        self.steps = 0

    def step(self, optimizer):
        """Step on the gradients of an optimizer, by its groups' options."""
        self.steps += 1
        groups = [g for g in optimizer.param_groups for _ in g["params"]]
        for i, (param, group) in enumerate(
            zip(params_of(optimizer), groups, strict=True)
        ):
            decoupled = self.row.decoupled or group.get("decoupled_decay", False)
            self.weights[i], self.moments[i] = exact_step(
                self.row.rule, group | {"decoupled": decoupled}, self.weights[i],
                param.grad.double(), self.moments[i], self.steps,
            )  # fmt: skip


RATES = [0.01, 0.003]


def groups_of(device):
    """The first group has a rate of its own."""
    groups = []
    for shapes in SHAPES:
        params = [parameter(*s, seed=len(s), device=device) for s in shapes]
        for param in params:
            if param.dim() == 4:
                param.data = param.data.to(memory_format=torch.channels_last)
        groups.append({"params": params})
    groups[0]["lr"] = RATES[0]
    return groups


def built(name, options, device, groups=None, **form):
    groups = groups or groups_of(device)
    optimizer = build_optimizer(groups, name=name, lr=RATES[1], **options, **form)
    assert [group["lr"] for group in optimizer.param_groups] == RATES
    return optimizer


def resumed(optimizer, name, options, device, **form):
    """Load a checkpoint into an optimizer that has stepped elsewhere."""
    other = built(name, options, device, **form)
    step(other, 99)
    for new, param in zip(params_of(other), params_of(optimizer), strict=True):
        new.data.copy_(param.data)
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(saved)
    assert_identical(other.state_dict(), saved)
    return other


def code_excess(state, number, moment, block):
    """How much further than the nearest code a moment's are, over their blocks' largest."""
    offset, codes = state.get("offset", 0), state[f"state{number}"].reshape(-1).long()
    scales = state[f"absmax{number}"].double().repeat_interleave(block)[offset:]
    wanted = moment.reshape(-1) / scales[: moment.numel()]
    values = dynamic_tree(signed=number == 1).double().to(codes.device)
    # No second moment is stored as zero.
    nearest = (wanted[:, None] - values[number - 1 :]).abs().amin(dim=1)
    return ((wanted - values[codes]).abs() - nearest).max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_step_at_8_bits_is_float64s_and_follows_that_at_32_bits(
    name, options, form, device
):
    row, storing = OPTIMIZERS[name], {"bits": 8, **FORMS[form]}
    optimizer = built(name, options, device, **storing)
    in_8_bits = {key for key, o in row.options.items() if AT_32_BIT not in o.forms}
    # torch has no such SGD.
    plain = (
        None if in_8_bits & options.keys() else built(name, options, device, bits=32)
    )
    exact = Exact(row, optimizer)
    for seed in range(4):
        if seed == 2:
            optimizer = resumed(optimizer, name, options, device, **storing)
        # Both others start from the weights, and float64 from the moments that are stored.
        before = [p.detach().clone() for p in params_of(optimizer)]
        places = [(p.data_ptr(), p.stride()) for p in params_of(optimizer)]
        exact.weights = [w.double() for w in before]
        if seed:
            moments = [optimizer.read_moments(p) for p in params_of(optimizer)]
            exact.moments = [[m.double() for m in each] for each in moments]
        step(optimizer, seed)
        exact.step(optimizer)
        assert places == [(p.data_ptr(), p.stride()) for p in params_of(optimizer)]
        errors = []
        for i, param in enumerate(params_of(optimizer)):
            update = exact.weights[i] - before[i]
            # Roundings of weights, and some five of moments and quotients.
            limit = 2**-23 * exact.weights[i].abs() + 5e-6 * update.abs().max()
            assert ((param.double() - exact.weights[i]).abs() <= limit).all()
            state = optimizer.state[param]
            assert int(state["step"]) == seed + 1
            for number, moment in enumerate(exact.moments[i], 1):
                if state[f"state{number}"].dtype == torch.uint8:
                    block = storing.get("block", 256)
                    assert code_excess(state, number, moment, block) <= 1e-6
                else:
                    limit = 1e-6 * moment.abs().max()
                    assert (state[f"state{number}"] - moment).abs().max() <= limit
        if plain is not None:
            pairs = zip(params_of(plain), before, strict=True)
            for param, weight in pairs:
                param.data.copy_(weight)
            step(plain, seed)
            for param, own, weight in zip(
                params_of(plain), params_of(optimizer), before, strict=True
            ):
                distance = (own.detach() - param.detach()).norm()
                errors.append(float(distance / (param.detach() - weight).norm()))
            assert max(errors) <= UPDATE_ERROR[row.rule]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", [{"bits": 32}, {"bits": 8, "keep_32bit": True}])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_float32_states_follow_the_trajectory_of_float64(name, options, own, device):
    row = OPTIMIZERS[name]
    if any(AT_32_BIT not in row.options[option].forms for option in options):
        own = own | {"bits": 8, "keep_32bit": True}
    groups = groups_of(device)
    if "keep_32bit" in own:
        own = own | {"keep_32bit": [p for group in groups for p in group["params"]]}
    optimizer = built(name, options, device, groups, **own)
    exact = Exact(row, optimizer)
    for seed in range(6):
        if seed == 3:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = built(name, options, device, groups, **own)
            optimizer.load_state_dict(state)
        step(optimizer, seed)
        exact.step(optimizer)
    for param, weight in zip(params_of(optimizer), exact.weights, strict=True):
        # Weights of up to 4 are rounded in float32, some ten times a step.
        torch.testing.assert_close(param.double(), weight, rtol=1e-5, atol=1e-5)
