"""bitsandbytes as the oracle of steps with 8-bit states, and as a backend."""

import copy

import pytest
import torch

from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.optim.map import dynamic_tree
from tests.unit.optim.steps import DEVICES, parameter, params_of, step

#: Even steps of the library's quantiser on a CPU, from -1 to 1 and from 0 to 1.
EVEN_STEP = {1: 2 / 65_535, 2: 1 / 65_535}
OPTIONS = {
    "sgd": {"lr": 0.1, "weight_decay": 0.01},
    "adam": {"lr": 0.01},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
}


def optimizer_of(name, device, **given):
    weights = [parameter(70, 70, device=device), parameter(64, 16, 3, 3, device=device)]
    weights.append(parameter(30, device=device))
    weights[1].data = weights[1].data.to(memory_format=torch.channels_last)
    return build_optimizer(weights, name=name, bits=8, **OPTIONS[name], **given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_is_the_librarys_within_one_code_and_its_quantisers_error(name, device):
    ours, library = (
        optimizer_of(name, device, backend=backend)
        for backend in ("native", "bitsandbytes")
    )
    for seed in range(4):
        # Both start each step from what ours left.
        library.load_state_dict(copy.deepcopy(ours.state_dict()))
        for one, other in zip(params_of(ours), params_of(library), strict=True):
            other.data.copy_(one.data)
        before = [p.detach().clone() for p in params_of(ours)]
        step(ours, seed)
        step(library, seed)
        pairs = zip(params_of(ours), params_of(library), before, strict=True)
        for one, other, old in pairs:
            # The library's corrections and quotients are off by 2e-4 of the update.
            update = (one.detach() - old).abs()
            apart = (one.detach() - other.detach()).abs()
            assert (apart <= 2e-4 * update + 2e-6).all()
            if one.numel() < 4096:
                assert torch.equal(one, other)
                continue
            states = ours.state[one], library.state[other]
            for number in (1, 2)[: len(ours.read_moments(one))]:
                codes, theirs = (s[f"state{number}"].int().cpu() for s in states)
                values = dynamic_tree(signed=number == 1)
                step_of = EVEN_STEP[number] + 1e-5
                off = (values[codes.long()] - values[theirs.long()]).abs()
                # One code, or as many as lie within a step of its quantiser.
                assert ((off <= 2 * step_of) | ((codes - theirs).abs() <= 1)).all()
                absmax, expected = (s[f"absmax{number}"] for s in states)
                torch.testing.assert_close(absmax, expected, rtol=3e-5, atol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_its_steps_are_skipped_and_its_checkpoints_read_as_ours(name):
    library = optimizer_of(name, "cpu", backend="bitsandbytes")
    step(library)
    before = copy.deepcopy([library.state_dict(), params_of(library)])
    params_of(library)[1].grad[0, 0, 0, 0] = float("inf")
    library.step()
    assert str([library.state_dict(), params_of(library)]) == str(before)
    ours = optimizer_of(name, "cpu")
    ours.load_state_dict(library.state_dict())
    step(ours)
