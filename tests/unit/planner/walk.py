"""The walk of a memory budget, from the recipe's setting to the modes of the run.

``python -m tests.unit.planner.walk`` prints it, so that a reader can follow it.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.checkpointer import CHANNELS
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.planner import Infeasible, Plan
from speechbrain_rev.planner.plan import Choice
from speechbrain_rev.planner.profile import VARIABLE
from speechbrain_rev.training import give_modes

_ROOT = Path(__file__).parents[3]
_HOUSES = _ROOT / "speechbrain_rev", _ROOT / "recipes" / "VoxCeleb"

#: A budget that is no other number of a step.
BUDGET = "1234567B"

# What is no function of its own, but a part of the one in which it stands.
_INLINE = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}

# Numbers below are counts of blocks or samples.
_LEAST_BYTES = 2**12


class Call(NamedTuple):
    """A function of ours that calls another one with the budget, or gets a plan of it."""

    caller_module: str
    caller: str
    module: str
    function: str

    @property
    def climbs(self) -> bool:
        """Whether the other function is on a floor above."""
        return floor_of(self.module) < floor_of(self.caller_module)


class Walk:
    """Calls that carry a budget: a profile function of ``sys.setprofile``.

    Parameters
    ----------
    text : str
        The budget, as a user writes it.
    """

    def __init__(self, text: str) -> None:
        self.text, self.sizes = text, set[int]()
        #: The calls, in their order, each once.
        self.calls: dict[Call, None] = {}
        self._carrying: set[types.FrameType] = set()

    @property
    def modules(self) -> list[str]:
        """All files that the budget comes to."""
        return sorted(
            {module for c in self.calls for module in (c.module, c.caller_module)}
        )

    @property
    def climbs(self) -> list[Call]:
        """The calls from a lower floor to one above."""
        return [call for call in self.calls if call.climbs]

    def table(self) -> str:
        """Write a line for each call."""
        head = (
            f"{len(self.calls)} calls in {len(self.modules)} modules, "
            f"{len(self.climbs)} to a floor above"
        )
        lines = [
            f"{c.caller_module}.{c.caller} -> {c.module}.{c.function}{' up' * c.climbs}"
            for c in self.calls
        ]
        return "\n".join([head, *lines])

    def __call__(self, frame: types.FrameType, event: str, given: object) -> None:
        if event not in ("call", "return") or not _is_ours(frame):
            return
        if event == "call":
            if any(self._is_carried(value) for value in frame.f_locals.values()):
                self._carrying.add(frame)
                self._note(frame)
            return
        if frame not in self._carrying:
            if self._is_carried(given):
                self._note(frame)
            return
        self._carrying.remove(frame)
        if type(given) is int and given >= _LEAST_BYTES:
            self.sizes.add(given)

    def _is_carried(self, value: object, *, is_field: bool = False) -> bool:
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

    def _note(self, frame: types.FrameType) -> None:
        caller = frame.f_back
        while caller is not None and not _is_ours(caller):
            caller = caller.f_back
        if caller is not None:  # The walk's first function is called by us.
            self.calls[Call(*_place(caller), *_place(frame))] = None


@functools.cache
def _module_at(path: str) -> str | None:
    for house in _HOUSES:
        if Path(path).is_relative_to(house):
            return ".".join(Path(path).relative_to(_ROOT).with_suffix("").parts)
    return None


def _is_ours(frame: types.FrameType) -> bool:
    code = frame.f_code
    return code.co_name not in _INLINE and _module_at(code.co_filename) is not None


def _place(frame: types.FrameType) -> tuple[str, str]:
    code = frame.f_code
    # Python 3.10 knows the last part of the name only.
    name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")
    return str(_module_at(code.co_filename)), name


@functools.cache
def _floors() -> list[list[str]]:
    """Read the floors, upper ones first, from the settings of import-linter."""
    settings = configparser.ConfigParser()
    settings.read(_ROOT / "setup.cfg")
    lines = settings["importlinter:contract:layers"]["layers"].split("\n")
    named = [[name.strip() for name in line.split("|")] for line in lines if line]
    return [["recipes"], *named]


def floor_of(module: str) -> int:
    """Count the floors above that of a module."""
    for number, names in enumerate(_floors()):
        if any(f"{module}.".startswith(f"{name}.") for name in names):
            return number
    raise LookupError(f"{module} is on no floor of setup.cfg.")


@contextlib.contextmanager
def followed(text: str) -> Iterator[Walk]:
    """Follow a budget through all that is called meanwhile."""
    walk, before = Walk(text), sys.getprofile()
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(before)


def walk_of_recipe(folder: Path, **changed: Any) -> Walk:
    """Let the recipe give an encoder the modes that a budget allows, and follow that.

    Parameters
    ----------
    folder : Path
        An empty one, of the run.
    **changed : object
        Settings of the recipe that are other ones.

    Returns
    -------
    Walk
        From ``give_modes`` of the recipe on.
    """
    torch.manual_seed(0)
    encoder = build_encoder(
        "revnet57",
        widths=(8, 8, 8, 8),
        blocks=(1, 0, 0, 1),
        n_mels=24,
        embedding_dim=16,
    )
    settings = {
        "memory_budget": BUDGET,
        "plan_file": None,
        "mode": None,
        "max_gradient_error": None,
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
    classifier = CosineClassifier(16, 10)
    begins = types.SimpleNamespace(restore=lambda checkpointer, chosen: False)
    brain = types.SimpleNamespace(
        hparams=types.SimpleNamespace(**settings),
        modules=nn.ModuleDict({"embedding_model": encoder, "classifier": classifier}),
        checkpointer=types.SimpleNamespace(
            recoverables={CHANNELS: begins}, restore_states=lambda *names: None
        ),
        precision="fp32",
        device="cpu",
    )
    with followed(str(settings["memory_budget"])) as walk:
        give_modes(brain, folder)
    return walk


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        os.environ[VARIABLE] = os.path.join(made, "profiles")
        print(walk_of_recipe(Path(made)).table())
