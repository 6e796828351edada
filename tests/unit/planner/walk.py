"""The walk of a memory budget, from the recipe's setting to the modes of the run.

``python -m tests.unit.planner.walk`` prints it, and that of a batch, from the example to its
plan, so that a reader can follow them.
"""

from __future__ import annotations

import configparser
import contextlib
import dataclasses
import functools
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.checkpointer import CHANNELS
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.planner import Infeasible, Plan, plan
from speechbrain_rev.planner.choice import Choice
from speechbrain_rev.planner.saved_profiles import VARIABLE
from speechbrain_rev.training import give_modes

ROOT = Path(__file__).parents[3]
FOLDERS = ROOT / "speechbrain_rev", ROOT / "recipes" / "VoxCeleb"
#: A budget, and a batch's size, that are no other numbers of a step.
BUDGET, ROWS = "1234567B", 917
# What is no function of its own, but a part of the one in which it stands.
INLINE = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
# Numbers below are counts of blocks or samples.
LEAST_BYTES = 2**12


class Call(NamedTuple):
    """A function of ours that calls another one with the budget, or gets a plan of it."""

    caller_module: str
    caller: str
    module: str
    function: str

    @property
    def climbs(self):
        """Whether the other function is on a floor above."""
        return floor_of(self.module) < floor_of(self.caller_module)

    def __str__(self):
        words = f"{self.caller_module}.{self.caller} -> {self.module}.{self.function}"
        return words + " up" * self.climbs


class Walk:
    """Calls that carry a budget: a profile function of ``sys.setprofile``."""

    def __init__(self, text):
        self.text, self.sizes = text, set()
        #: The calls, in their order, each once.
        self.calls, self._carrying = {}, set()

    @property
    def modules(self):
        return {module for c in self.calls for module in (c.module, c.caller_module)}

    @property
    def climbs(self):
        return [call for call in self.calls if call.climbs]

    def __call__(self, frame, event, given):
        if event not in ("call", "return") or not is_ours(frame):
            return
        if event == "call":
            if any(map(self._is_carried, frame.f_locals.values())):
                self._carrying.add(frame)
                self._note(frame)
        elif frame in self._carrying:
            self._carrying.remove(frame)
            if type(given) is int and given >= LEAST_BYTES:
                self.sizes.add(given)
        elif self._is_carried(given):
            self._note(frame)

    def _is_carried(self, value, *, is_field=False):
        if isinstance(value, Plan | Choice | Infeasible):
            return True
        if isinstance(value, str | int):
            return value == self.text or value in self.sizes
        names = getattr(value, "_fields", ()) if isinstance(value, tuple) else ()
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
        # A field that is not set yet is none.
        fields = [] if is_field else [getattr(value, name, None) for name in names]
        return any(self._is_carried(each, is_field=True) for each in fields)

    def _note(self, frame):
        caller = frame.f_back
        while caller is not None and not is_ours(caller):
            caller = caller.f_back
        if caller is not None:  # The walk's first function is called by us.
            self.calls[Call(*place(caller), *place(frame))] = None


class BatchWalk(Walk):
    """Calls that carry an example batch: its tensors, its size, or a step of that size."""

    def __init__(self, rows):
        super().__init__(None)
        self.rows = rows

    def _is_carried(self, value, *, is_field=False):
        if isinstance(value, torch.Tensor):
            return value.dim() > 0 and len(value) == self.rows
        if type(value) is int:
            return value == self.rows
        names = getattr(value, "_fields", ()) if isinstance(value, tuple) else ()
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
        fields = [] if is_field else [getattr(value, name, None) for name in names]
        return any(self._is_carried(each, is_field=True) for each in fields)

    @property
    def crossings(self):
        """Calls from one module of the planner to another."""
        ours = "speechbrain_rev.planner."
        return [
            call
            for call in self.calls
            if call.module.startswith(ours)
            and call.caller_module.startswith(ours)
            and call.module != call.caller_module
        ]


@functools.cache
def module_at(path):
    if not any(Path(path).is_relative_to(folder) for folder in FOLDERS):
        return None
    return ".".join(Path(path).relative_to(ROOT).with_suffix("").parts)


def is_ours(frame):
    code = frame.f_code
    return code.co_name not in INLINE and module_at(code.co_filename) is not None


def place(frame):
    code = frame.f_code
    # Python 3.10 knows the last part of the name only.
    name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")
    return module_at(code.co_filename), name


@functools.cache
def floors():
    """Read the floors, upper ones first, from the settings of import-linter."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings["importlinter:contract:layers"]["layers"].split("\n")
    return ["recipes", *filter(None, lines)]


def floor_of(module):
    """Count the floors above that of a module."""
    names = ([name.strip() for name in line.split("|")] for line in floors())
    return next(
        number
        for number, floor in enumerate(names)
        if any(f"{module}.".startswith(f"{name}.") for name in floor)
    )


@contextlib.contextmanager
def followed(walk):
    """Follow a budget, or a batch, through all that is called meanwhile."""
    before = sys.getprofile()
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(before)


def walk_of_recipe(folder, **changed):
    """Let the recipe give an encoder the modes that a budget allows, and follow that."""
    torch.manual_seed(0)
    sizes = {"widths": (8, 8, 8, 8), "blocks": (1, 0, 0, 1), "n_mels": 24}
    settings = {
        "memory_budget": BUDGET,
        **dict.fromkeys(("plan_file", "mode", "max_gradient_error")),
        "chunk": "auto",
        "batch_size": 4,
        "chunk_samples": 3680,
        "sample_rate": 16000,
        "compute_cost": AAMSoftmax(),
        "opt_class": functools.partial(torch.optim.SGD, lr=0.1),
        "optimizer_name": "sgd",
        "optimizer_bits": 32,
        "output_folder": str(folder),
        **changed,
    }
    modules = {
        "embedding_model": build_encoder("revnet57", embedding_dim=16, **sizes),
        "classifier": CosineClassifier(16, 10),
    }
    begins = types.SimpleNamespace(restore=lambda checkpointer, chosen: False)
    brain = types.SimpleNamespace(
        hparams=types.SimpleNamespace(**settings),
        modules=nn.ModuleDict(modules),
        checkpointer=types.SimpleNamespace(
            recoverables={CHANNELS: begins}, restore_states=lambda *names: None
        ),
        precision="fp32",
        device="cpu",
    )
    with followed(Walk(str(settings["memory_budget"]))) as walk:
        give_modes(brain, folder)
    return walk


def walk_of_batch():
    """Plan a network for an example batch, in half of what it takes stored."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(6))
    network, batch = nn.Sequential(*layers), torch.randn(ROWS, 24)
    stored = plan(network, batch, "1GB", blocks="?").measured_bytes
    with followed(BatchWalk(ROWS)) as walk:
        plan(network, batch, int(0.8 * stored), blocks="?")
    return walk


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        os.environ[VARIABLE] = os.path.join(made, "profiles")
        walked = walk_of_recipe(Path(made))
    counts = len(walked.calls), len(walked.modules), len(walked.climbs)
    print("a budget: {} calls in {} modules, {} to a floor above".format(*counts))
    print(*walked.calls, sep="\n")
    walked = walk_of_batch()
    counts = len(walked.calls), len(walked.modules), len(walked.crossings)
    print("a batch: {} calls in {} modules, {} between the planner's".format(*counts))
    print(*walked.calls, sep="\n")
