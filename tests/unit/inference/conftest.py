"""One tiny run and one exported model, which tests copy to change them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from speechbrain_rev.inference import SpeakerEmbedder, export_run
from speechbrain_rev.inference.thresholds import RESULTS
from tests.run_folders import write_finished_run, write_scores


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A finished run and the classifier in it; nobody changes it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, write_finished_run(folder)


@pytest.fixture(scope="session")
def embedder(trained):
    return SpeakerEmbedder.from_run(trained[0], device="cpu")


@pytest.fixture(scope="session")
def exported(trained, tmp_path_factory):
    """The files of an exported model: content by name."""
    out = tmp_path_factory.mktemp("exported") / "out"
    export_run(trained[0], out)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture
def run(trained, tmp_path):
    """A finished run of the test's own."""
    return shutil.copytree(trained[0], tmp_path / "run")


@pytest.fixture
def scored_run(run):
    write_scores(run)
    return run


@pytest.fixture
def model(exported, tmp_path, monkeypatch):
    """An exported model of the test's own, which writes nothing where it is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in exported.items():
        (folder / name).write_bytes(content)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield folder
    assert not any(path.name == "executed" for path in tmp_path.rglob("*"))
    assert not list((tmp_path / "cwd").iterdir())


class FirstSamples(torch.nn.Module):
    """Embeds an utterance as its first samples; counts the utterances it has seen."""

    seen = 0

    def forward(self, waves, samples):
        self.seen += len(waves)
        return waves[:, :4].unsqueeze(1)


@pytest.fixture
def counting():
    """A function that makes an embedder, which counts utterances in its ``model.seen``."""

    def make(fingerprint="one", model=FirstSamples):
        return SpeakerEmbedder(model(), device="cpu", fingerprint=fingerprint)

    return make


def put(folder, name, content):
    """Write a file of a model, with its checksum."""
    content = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(content)
    sums = (folder / "SHA256SUMS").read_text().splitlines()
    sums = [line for line in sums if not line.endswith(f"  {name}")]
    sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}")
    (folder / "SHA256SUMS").write_text("\n".join(sums) + "\n")


def close(a, b, tolerance=1e-5):
    """Whether an embedding is another but for sums of other grouping."""
    return np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


class Attack:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def change_results(run, *rows, **changed):
    """Change the one result of a scored run, or make one of it for each row given."""
    report = json.loads((run / RESULTS).read_text())
    (old,) = report["results"]
    report["results"] = [{**old, **row, **changed} for row in rows or [{}]]
    (run / RESULTS).write_text(json.dumps(report))


#: Reads each file or folder with no more memory than is stated, and says how it ended.
WITHIN_MEMORY = """
import resource, sys
from pathlib import Path
from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.untrusted import read_tensors

def read(path):
    if path.is_dir():
        SpeakerEmbedder.from_hparams(path, device="cpu")
    else:
        read_tensors(path)

beside, times = map(int, sys.argv[1:3])
paths = [Path(argument) for argument in sys.argv[3:]]
read(paths[0])
for path in paths:
    files = path.glob("embedding_model.*") if path.is_dir() else [path]
    size = max(file.stat().st_size for file in files)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    more = beside + times * min(2**32 if path.is_file() else 10**8, size)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))
    try:
        read(path)
        print("loaded")
    except ValueError as error:
        print("memory" if isinstance(error.__cause__, MemoryError) else "refused")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
"""


def within_memory(beside, times, paths):
    """Read each with so many bytes beside its size, so many times; how each ended."""
    code = [sys.executable, "-c", WITHIN_MEMORY, f"{beside}", f"{times}"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [*code, *map(str, paths)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()
