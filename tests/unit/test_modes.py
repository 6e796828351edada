"""A memory mode is one row, from which all that lists modes follows."""

import json
import os
import pickle
import re
import subprocess
import sys
from textwrap import dedent

import pytest

from speechbrain_rev.catalog.table import MODES
from speechbrain_rev.hparams.knobs import KNOBS
from speechbrain_rev.modes import Mode, as_mode
from speechbrain_rev.planner.saved_profiles import VARIABLE
from speechbrain_rev.plots.style import MODE_COLOURS

#: A mode that moves what a block saves to the host, as a maintainer would add it.
ROW = """
    ON_TRIAL = ModeSpec(
        "on_trial",
        "all activations, in the memory of the host",
        "trial",
        "#F0E442",
        context="torch.autograd.graph:save_on_cpu",
    )

"""

#: Loads the module of modes with that row, and nothing else of the package changed.
WITH_THE_ROW = """
import importlib.util, json, pathlib, sys
import speechbrain_rev

name = "speechbrain_rev.modes"
spec = importlib.util.find_spec(name)
lines = pathlib.Path(spec.origin).read_text().split("\\n\\n#: Modes that a block")
module = sys.modules[name] = speechbrain_rev.modes = importlib.util.module_from_spec(spec)
text = (lines[0] + ROW + "\\n#: Modes that a block" + lines[1])
exec(compile(text, spec.origin, "exec"), vars(module))
"""


@pytest.fixture
def with_the_row(tmp_path):
    """Run code in a process whose package has the mode, and read what it prints."""

    def run(code):
        program = f"ROW = {ROW!r}\n{WITH_THE_ROW}\n{dedent(code)}"
        ended = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, VARIABLE: str(tmp_path)},
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_is_its_name_everywhere(mode):
    assert mode == mode.value == mode.spec.name == as_mode(mode.value)
    assert pickle.loads(pickle.dumps(mode)) is mode
    assert re.fullmatch("#[0-9A-F]{6}", mode.spec.colour)
    with mode.spec.around():
        pass


def test_lists_of_modes_follow_from_the_rows_that_tell_them_apart():
    for field in ("column", "colour", "keeps"):
        assert len({getattr(mode.spec, field) for mode in Mode}) == len(Mode)
    names = [mode.value for mode in Mode]
    assert names == list(MODE_COLOURS)
    # A network cannot join as a whole.
    alone = [mode for mode in Mode if not mode.spec.joins]
    assert list(KNOBS["mode"].one_of) == [mode.value for mode in alone]
    assert list(MODES) == [mode.value for mode in alone if mode.spec.lossless]


def test_a_mode_is_added_by_one_row(with_the_row):
    """Gradients, plans, knobs, tables and pictures have it, and its peak is the GPU's."""
    seen = with_the_row("""
        import torch
        from torch import nn
        from speechbrain_rev.lobes import build_encoder
        from speechbrain_rev.planner import Plan, plan
        from speechbrain_rev.planner.memory import live_bytes_peak
        from speechbrain_rev.hparams.knobs import KNOBS
        from speechbrain_rev.catalog.table import MODES
        from speechbrain_rev.plots.style import MODE_COLOURS

        def encoder(name):
            torch.manual_seed(0)
            return build_encoder(name, widths=[16] * 4, blocks=[1] * 4, n_mels=16)

        def gradients(module, mode):
            module.set_mode(mode)
            module.zero_grad()
            torch.manual_seed(1)
            module(torch.randn(2, 40, 16)).square().sum().backward()
            return [p.grad for p in module.parameters()]

        def equal(name):
            own, stored = (gradients(encoder(name), m) for m in ("on_trial", "store"))
            return all(map(torch.equal, own, stored))

        layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
        network, x = nn.Sequential(*layers), torch.randn(4096, 256)
        whole = plan(network, x, "1GiB", blocks="*", measure=False)
        tight = plan(network, x, "24MiB", blocks="*", measure=False)
        read = Plan.from_json(tight.to_json())
        read.apply(network)
        print(json.dumps({
            "equal": [equal("revnet57"), equal("resnet34")],
            "knob": KNOBS["mode"].one_of,
            "columns": MODES,
            "colour": MODE_COLOURS["on_trial"],
            "whole": sorted(set(whole.modes.values())),
            "tight": sorted(set(tight.modes.values())),
            "peaks": [whole.measured_bytes, tight.measured_bytes],
            "off by": tight.measured_bytes / tight.predicted_bytes,
            "budget": tight.budget_bytes,
        }))
    """)
    assert seen["equal"] == [True, True]
    assert "on_trial" in seen["knob"]
    assert seen["columns"][-1] == "on_trial"
    assert seen["colour"] == "#F0E442"
    assert seen["whole"] == ["store"]
    assert {"on_trial", "recompute"} <= {*seen["tight"]}
    assert seen["peaks"][1] <= seen["budget"] < seen["peaks"][0]
    assert seen["off by"] == pytest.approx(1, abs=0.005)


@pytest.mark.slow(drawn=False)
def test_commands_have_a_mode_that_was_added(with_the_row):
    """What was not counted is "-", and what moves to the host is not the GPU's."""
    seen = with_the_row("""
        import contextlib, io
        from speechbrain_rev.cli import main

        def printed(line):
            with contextlib.redirect_stdout(io.StringIO()) as text:
                main(line.split())
            return text.getvalue()

        stored, offloaded = (
            json.loads(printed(f"memory revnet57 --mode={mode} --json"))
            for mode in ("store", "on_trial")
        )
        print(json.dumps({
            "models": printed("models revnet57 resnet34 --sort=on_trial"),
            "memory": [cases[-1] for cases in (stored, offloaded)],
            "plan": json.loads(printed("plan revnet57 --card=4GB --batch=128 --json")),
        }))
    """)
    assert "trial" in seen["models"]
    stored, offloaded = seen["memory"]
    assert (stored["how"], offloaded["how"]) == ("counted", "counted just now")
    assert offloaded["blocks"]["on_trial"] == sum(offloaded["blocks"].values()) == 17
    activations = [case["report"]["activations_bytes"] for case in seen["memory"]]
    assert activations[1] < 0.25 * activations[0]
    assert seen["plan"][0]["lacking_bytes"] == 0
