"""Short training runs of the recipe, in this process or in one that is killed."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from speechbrain_rev.files import read_rows

RECIPE = Path(__file__).parents[2] / "recipes" / "VoxCeleb"
HPARAMS = Path(__file__).parents[2] / "hparams"

TINY = {
    "arch": "revnet57",
    "widths": "[8, 8, 8, 8]",
    "blocks": "[1, 0, 0, 1]",
    "n_mels": "24",
    "embedding_dim": "16",
    "chunk_samples": "4640",  # 30 frames
    "batch_size": "4",
    "number_of_epochs": "2",
    "warmup_epochs": "1.0",
    "margin_start_epoch": "1",
    "margin_end_epoch": "2",
    "average_checkpoints": "2",
    "valid_speakers": "2",
    "ckpt_interval_steps": "2",
    "num_workers": "0",
}


#: One epoch without validation, for those whose subject is not the schedule.
SHORT = {
    "number_of_epochs": 1,
    "average_checkpoints": 1,
    "warmup_epochs": "0.0",
    "margin_start_epoch": 0,
    "margin_end_epoch": 0,
    "valid_speakers": 0,
}

#: Two steps whose chunk is not searched: profiles of one run serve others.
FEW_STEPS = {**SHORT, "steps_per_epoch": 2, "chunk": "null"}


def arguments(data: Path, output: Path, **changed: object) -> list[str]:
    """A command line of train.py."""
    folders = {"data_folder": data, "output_folder": output}
    settings = {**TINY, **folders, **changed}
    options = [f"--{key}={value}" for key, value in settings.items()]
    return [str(HPARAMS / "train.yaml"), *options, "--device=cpu"]


def log(folder: Path) -> list[dict]:
    """What a run wrote down about its epochs, without what no second run repeats."""
    timings = {"minutes", "utterances_per_second", "process_resident_peak_bytes"}
    timings |= {"data_wait_percent", "resumed_after_step"}
    return [
        {k: v for k, v in row.items() if k not in timings}
        for row in read_rows(folder / "train_log.jsonl")
    ]


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """All files of a folder, with the times at which they were written."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in files
    }


def assert_same_weights(one: Path, other: Path) -> None:
    """Two runs ended with the same bits."""
    trained, expected = weights(one), weights(other)
    assert trained.keys() == expected.keys()
    for name, value in trained.items():
        assert torch.equal(value, expected[name]), name


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What a run trained."""
    return torch.load(folder / "embedding_model.ckpt", weights_only=True)


def recipe(name: str):
    """Import a script of the recipe, which finds its neighbours as when it is run."""
    if str(RECIPE) not in sys.path:
        sys.path.insert(0, str(RECIPE))
    return importlib.import_module(name)


_KILLED = """
import os, sys
import torch
from speechbrain.utils.checkpoints import Checkpointer
sys.path.insert(0, {recipe!r})
import train

def die_after_step(self, *args, _progress=train.SpeakerBrain.on_fit_batch_end):
    _progress(self, *args)
    if self.hparams.lr_annealing.step == {step}:
        os._exit(9)

def die_in_checkpoint(self, *args, _save=Checkpointer._save_checkpoint_metafile):
    meta = _save(self, *args)
    saved.append(meta)
    if len(saved) == {checkpoint}:
        os._exit(9)
    return meta

def drop_out(self, batch, stage, _embed=train.SpeakerBrain.compute_forward):
    # The encoders draw nothing; a network that does must resume as well.
    outputs = _embed(self, batch, stage)
    if stage == train.sb.Stage.TRAIN:
        # Scaled as dropout has it, scores would be no cosines any more.
        outputs = outputs * (torch.rand_like(outputs) > 0.1)
    return outputs

saved = []
Checkpointer._save_checkpoint_metafile = die_in_checkpoint
train.SpeakerBrain.on_fit_batch_end = die_after_step
train.SpeakerBrain.compute_forward = drop_out
train.main(sys.argv[1:])
"""


def run(
    argv: list[str], *, killed_at_step: int = 0, killed_in_checkpoint: int = 0
) -> subprocess.CompletedProcess:
    """Run train.py with dropout in a process that dies.

    It dies after a step, or while it writes a checkpoint, both counted from 1.
    """
    script = _KILLED.format(
        recipe=str(RECIPE), step=killed_at_step, checkpoint=killed_in_checkpoint
    )
    return subprocess.run(
        [sys.executable, "-c", script, *argv],
        # One thread: the order of sums must not depend on how many cores are idle.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
