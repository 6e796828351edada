"""A torchaudio that cannot be imported is one sentence, whatever is imported first."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from speechbrain_rev.torchaudio_pair import mismatch

RECIPE = Path(__file__).parents[2] / "recipes" / "VoxCeleb" / "train.py"
# Imports each package that imports SpeechBrain or torchaudio, and the recipe.
PROBE = """
import importlib, runpy, sys
from speechbrain_rev.cli import main
for name in ("data", "inference", "training"):
    try:
        importlib.import_module(f"speechbrain_rev.{name}")
    except ImportError as error:
        print(error)
try:
    runpy.run_path(sys.argv[1])
except ImportError as error:
    print(error)
main(["env"])
sys.exit(main(["embed", "model", "a.wav"]))
"""


def test_the_sentence_names_both_versions_and_what_to_install(tmp_path):
    (tmp_path / "torchaudio.py").write_text("raise OSError('undefined\\nsymbol')")
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, str(RECIPE)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    torch, torchaudio = version("torch"), version("torchaudio")
    sentence = mismatch(torch, torchaudio, OSError("undefined symbol"))
    lines = ended.stdout.splitlines()
    assert lines[:4] == [sentence] * 4
    (env,) = [line for line in lines[4:] if line.startswith("torchaudio ")]
    assert env.endswith(f"{torchaudio}, cannot be imported: {sentence}")
    assert ended.stderr.splitlines()[-1] == f"speechbrain-rev: {sentence}"


@pytest.mark.parametrize(
    ("torch", "torchaudio", "remedy"),
    [
        (
            "2.11.0+cu130",
            "2.11.1",
            "pip install torchaudio==2.11.0, from the index of that torch",
        ),
        ("2.12.0", "2.11.1+cpu", "pip install torchaudio==2.11.0"),
        ("2.15.0", "2.11.0", "pip install torchaudio==2.11.1"),
        ("2.11.0+cu126", "2.11.0", "install both from one index, for one CUDA"),
        ("2.15.0+cpu", "2.11.1+cu130", "install both from one index, for one CUDA"),
    ],
)
def test_each_torch_has_its_torchaudio(torch, torchaudio, remedy):
    message = mismatch(torch, torchaudio, RuntimeError("no"))
    assert message == (
        f"torchaudio {torchaudio} cannot be imported beside torch {torch} (no): {remedy}."
    )
