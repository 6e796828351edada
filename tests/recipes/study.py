"""The study's modules, and short runs to try them on."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.corpus import write_corpus
from tests.recipes.runs import arguments, recipe

STUDY = Path(__file__).parents[2] / "recipes" / "study"
#: So large that the embedding layer's weight (32 x 192) is stored in 8 bits.
SIZES = {"widths": "[8, 8, 8, 32]", "embedding_dim": "32"}
SETTINGS = {**SIZES, "optimizer_bits": 32, "valid_speakers": 0, "steps_per_epoch": 3}


def study(name: str):
    """Import a module of the study, which finds its neighbours as when it is run."""
    recipe("train")
    if str(STUDY) not in sys.path:
        sys.path.insert(0, str(STUDY))
    return importlib.import_module(name)


def trained_run(
    folder: Path, **changed: object
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Train by the recipe in this process: the run, and the weights that it began with."""
    train = recipe("train")
    begun = {}

    def remember(brain, _start=train.SpeakerBrain.on_fit_start):
        _start(brain)
        begun.update({k: v.clone() for k, v in brain.modules.state_dict().items()})

    data = write_corpus(folder / "data", sessions=3)
    with pytest.MonkeyPatch.context() as patch:
        # Without SpeechBrain's log and the curves.
        patch.setattr(train.sb, "create_experiment_directory", lambda folder: None)
        curves = recipe("epoch_log").plots
        patch.setattr(curves, "training_curves", lambda rows, path: None)
        patch.setattr(train.SpeakerBrain, "on_fit_start", remember)
        (folder / "run").mkdir()
        train.main(arguments(data, folder / "run", **SETTINGS | changed))
    return folder / "run", begun


def copy_with(run: Path, folder: Path, old: str, new: str) -> Path:
    """Copy a run and change a line of its settings."""
    shutil.copytree(run, folder)
    settings = folder / "hyperparams.yaml"
    text = settings.read_text()
    assert text.count(f"\n{old}") == 1
    settings.write_text(text.replace(f"\n{old}", f"\n{new}"))
    return folder


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What a folder holds: of each file its time and its bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }
