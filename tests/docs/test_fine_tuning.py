"""docs/fine_tuning.md: its commands, one after the other, on a small corpus and network."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from speechbrain_rev import cli
from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.wespeaker import to_wespeaker
from speechbrain_rev.lobes import build_encoder
from tests.corpus import write_corpus
from tests.recipes.conftest import in_process
from tests.recipes.runs import recipe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/fine_tuning.md"
#: What makes it quick: a few steps of short segments.
SMALL = {
    "train.py": (
        "--batch_size=4 --chunk_samples=4880 --sentence_len=0.34 --valid_speakers=2 "
        "--num_workers=0 --steps_per_epoch=2 --device=cpu"
    ),
    "fine_tune.yaml": "--number_of_epochs=2 --warmup_epochs=1.0 --margin_end_epoch=2",
    "large_margin.yaml": "--number_of_epochs=1 --memory_budget=null",
    "extract.py": "--device=cpu",
    "verify": "--device=cpu",
}


def commands():
    """The page's commands, each in one line."""
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


@pytest.fixture
def there(tmp_path, monkeypatch):
    """The corpus and the weights that the page names."""
    write_corpus(tmp_path / "corpus", sessions=1, utterances=3)
    for number, speaker in enumerate(sorted((tmp_path / "corpus/wav").iterdir())):
        folder = tmp_path / "my_corpus" / ("ann" if number == 0 else speaker.name)
        folder.mkdir(parents=True)
        for place, path in enumerate(sorted(speaker.rglob("*.wav")), start=1):
            path.rename(folder / f"{place}.wav")
    settings = {"name": "resnet34", "widths": (4, 8, 8, 8), "blocks": (1, 1, 1, 1)}
    encoder = build_encoder(**settings)
    (tmp_path / "voxceleb_resnet34").mkdir()
    theirs = to_wespeaker(settings, encoder.state_dict())
    torch.save(theirs, tmp_path / "voxceleb_resnet34/avg_model.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_page_lead_to_a_model_that_verifies(
    there, monkeypatch, caplog
):
    caplog.set_level("INFO", logger="train")
    for command in commands():
        name = command[1] if command[0] == "speechbrain-rev" else Path(command[1]).name
        given = [
            str(ROOT / word) if word.startswith("hparams/") else word
            for word in command[2:]
        ]
        given += SMALL.get(name, "").split()
        for word in command[2:]:
            given += SMALL.get(Path(word).name, "").split()
        if command[0] == "speechbrain-rev":
            assert cli.main([name, *given]) == 0
        elif name == "train.py":
            with in_process() as train:
                train.main(given)
        else:
            assert command[0] == "python"
            monkeypatch.setattr(sys, "argv", [name, *given])
            recipe(name.removesuffix(".py")).main(given)
        printed = caplog.text
        caplog.clear()
        if "fine_tune.yaml" in " ".join(command):
            assert "Head: new, since it has no list of training speakers" in printed
        if "large_margin.yaml" in " ".join(command):
            assert "Head: kept" in printed
    embedder = SpeakerEmbedder.from_hparams("my_model", device="cpu")
    verified = embedder.verify(
        "my_corpus/ann/1.wav", "my_corpus/ann/2.wav", threshold="valid_trials"
    )
    assert verified.origin
