"""What docs/embedding.md shows runs."""

import re
from pathlib import Path

import numpy as np
import pytest

from speechbrain_rev import cli
from speechbrain_rev.inference import Cohort, export_run
from speechbrain_rev.inference.trained import read_weights
from tests.hub_server import Repository, ask, serving
from tests.run_folders import speech_like, write_audio, write_finished_run

PAGE = Path(__file__).parents[2] / "docs/embedding.md"


@pytest.fixture
def hub():
    with serving() as served:
        yield served


@pytest.fixture
def there(tmp_path, monkeypatch, hub):
    """The files that the page names, and the model on the Hub."""
    write_finished_run(tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "my_model")
    for seed, name in enumerate(["a.wav", "b.flac", "c.wav", "speech/d.wav"]):
        write_audio(tmp_path / name, speech_like(0.5, seed=seed))
    write_audio(tmp_path / "stereo.wav", np.stack([speech_like(0.5)] * 2, axis=1))
    write_audio(tmp_path / "meeting.wav", speech_like(21.0))
    (tmp_path / "speakers").mkdir()
    means = np.random.default_rng(0).standard_normal((4, 16))
    fingerprint = read_weights(tmp_path / "run").fingerprint
    monkeypatch.setattr(
        "speechbrain_rev.inference.read_cohort",
        lambda _: Cohort(means, 3, fingerprint),
    )
    files = {path.name: path.read_bytes() for path in (tmp_path / "my_model").iterdir()}
    hub.repositories["owner/model"] = Repository()
    hub.repositories["owner/model"].commit(files, "v1.0")
    ask(hub.endpoint, tmp_path / "cache", monkeypatch)
    monkeypatch.chdir(tmp_path)


def test_python_blocks_run_one_after_the_other(there):
    names = {}
    for code in re.findall(r"```python notest\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), names)
    assert names["many"].shape == (2, 16)
    assert names["result"].archive.names == ("d.wav",)
    assert names["comparison"].score


def test_commands_run(there):
    commands = re.findall(r"^speechbrain-rev (.*)$", PAGE.read_text(), re.MULTILINE)
    expected = ["verify", "embed", "embed", "enrol", "verify", "verify"]
    assert [c.split()[0] for c in commands] == expected
    for command in commands:
        assert cli.main([*command.split(), "--device=cpu"]) == 0
