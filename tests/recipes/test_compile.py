"""Runs with compile: true: bits of all modes, plans, the log, and what they go on with."""

import functools
import logging
import re
import shutil

import pytest

from speechbrain_rev.planner import Plan
from speechbrain_rev.reversible import compile_pieces, compiled
from speechbrain_rev.training import steps
from tests.recipes.runs import FEW_STEPS, arguments, assert_same_weights

pytestmark = pytest.mark.slow

COMPILED = FEW_STEPS | {"compile": "true"}

#: Torch's kernels, and those that inductor generates.
each_backend = pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow(drawn=False),
                pytest.mark.skipif(
                    shutil.which("g++") is None, reason="inductor needs g++ here"
                ),
            ],
        ),
    ],
)


@pytest.fixture
def trained(train, data, tmp_path, monkeypatch, caplog):
    """Train a run of a name, or go on with it; returns its folder and its log."""
    monkeypatch.setattr(compiled, "_COMPILED", {})

    def main(name, backend="aot_eager", **settings):
        caplog.clear()
        caplog.set_level(logging.INFO, "train")
        own = functools.partial(compile_pieces, backend=backend)
        monkeypatch.setattr(steps, "compile_pieces", own)
        train.main(arguments(data, tmp_path / name, **settings))
        return tmp_path / name, caplog.text

    return main


@each_backend
def test_a_compiled_run_has_the_same_bits_in_every_mode_and_logs_its_start(
    trained, backend
):
    stored, log = trained("store", backend, **COMPILED, mode="store")
    (line,) = re.findall(r"compile: compiling (\d+) pieces .* took \d+ s\n", log)
    # Normalising and adding to the streams.
    assert int(line) >= 2
    for mode in ("reconstruct", "recompute"):
        assert_same_weights(trained(mode, backend, **COMPILED, mode=mode)[0], stored)


@pytest.mark.slow
def test_a_plan_is_of_compiled_steps_and_changes_none_of_their_bits(trained):
    planned, log = trained("planned", **COMPILED, memory_budget="1GB")
    plan = Plan.load(planned / "plan.json")
    assert plan.about["compiled"] == "aot_eager"
    # What planning compiled is in the line of the first step.
    assert log.index("memory plan:") < log.index("compile: compiling")
    assert_same_weights(planned, trained("stored", **COMPILED, mode="store")[0])
    _, log = trained("other", **FEW_STEPS, plan_file=planned / "plan.json")
    assert "made for compiled aot_eager, and this is None" in log


def test_a_run_that_goes_on_does_so_compiled(trained, tmp_path):
    for epochs in (1, 2):
        trained("run", **COMPILED | {"number_of_epochs": epochs}, mode="store")
    with pytest.raises(
        ValueError, match="began with compile: true, and compile is now"
    ):
        trained("run", **FEW_STEPS | {"number_of_epochs": 3}, mode="store")


def test_without_compile_nothing_is_compiled(trained):
    assert "compiling" not in trained("run", **FEW_STEPS)[1]


def test_a_self_test_of_a_compiled_run_compares_compiled_steps(
    train, data, tmp_path, monkeypatch, capsys
):
    own = functools.partial(compile_pieces, backend="aot_eager")
    monkeypatch.setattr(steps, "compile_pieces", own)
    monkeypatch.setattr(compiled, "_COMPILED", {})
    train.main([*arguments(data, tmp_path, **COMPILED), "--self_test"])
    assert "Exact: 3 steps as configured have the bits" in capsys.readouterr().out
    assert compiled.compiling()[0] >= 2
