"""The backend bitsandbytes is that library's own optimizer behind the same names."""

import copy

import bitsandbytes
import pytest

from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.optimizers import BY_LIBRARY, OPTIMIZERS
from tests.unit.optim.steps import assert_identical, parameter, params_of, step

VALUES = {"lr": 0.01, "momentum": 0.8, "betas": (0.8, 0.95), "eps": 1e-6}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_and_resumed_ones_are_those_of_the_librarys_class(name):
    row = OPTIMIZERS[name]
    options = {key: value for key, value in VALUES.items() if key in row.options} | (
        {"weight_decay": 0.1} if BY_LIBRARY in row.options["weight_decay"].forms else {}
    )

    def weights():
        return [parameter(70, 70), parameter(30, seed=1)]

    theirs = getattr(bitsandbytes.optim, f"{row.class_name}8bit")(weights(), **options)
    ours = build_optimizer(
        weights(), name=name, bits=8, backend="bitsandbytes", **options
    )
    assert isinstance(ours, type(theirs))
    for seed in range(4):
        if seed == 2:
            saved = copy.deepcopy(ours.state_dict())
            ours = build_optimizer(
                params_of(ours), name=name, bits=8, backend="bitsandbytes", **options
            )
            ours.load_state_dict(saved)
        step(theirs, seed)
        step(ours, seed)
        assert_identical(params_of(ours), params_of(theirs))
