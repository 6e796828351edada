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
#: Options by which the page runs in seconds: a few steps of short segments.
QUICK = {
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
    """The page's commands, each as a list of arguments."""
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


@pytest.fixture
def page_folder(tmp_path, monkeypatch):
    """The working folder, with the corpus and the weights that the page names."""
    write_corpus(tmp_path / "corpus", sessions=1, utterances=3)
    for number, speaker in enumerate(sorted((tmp_path / "corpus/wav").iterdir())):
        folder = tmp_path / "my_corpus" / ("ann" if number == 0 else speaker.name)
        folder.mkdir(parents=True)
        for index, path in enumerate(sorted(speaker.rglob("*.wav")), start=1):
            path.rename(folder / f"{index}.wav")
    settings = {"name": "resnet34", "widths": (4, 8, 8, 8), "blocks": (1, 1, 1, 1)}
    encoder = build_encoder(**settings)
    (tmp_path / "voxceleb_resnet34").mkdir()
    theirs = to_wespeaker(settings, encoder.state_dict())
    torch.save(theirs, tmp_path / "voxceleb_resnet34/avg_model.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_page_lead_to_a_model_that_verifies(
    page_folder, monkeypatch, caplog
):
    caplog.set_level("INFO", logger="train")
    for command in commands():
        name = command[1] if command[0] == "speechbrain-rev" else Path(command[1]).name
        arguments = [
            str(ROOT / word) if word.startswith("hparams/") else word
            for word in command[2:]
        ]
        arguments += QUICK.get(name, "").split()
        for word in command[2:]:
            arguments += QUICK.get(Path(word).name, "").split()
        # What makes it quick takes the place of what the page gives.
        arguments = list({a.partition("=")[0]: a for a in arguments}.values())
        if command[0] == "speechbrain-rev":
            assert cli.main([name, *arguments]) == 0
        elif name == "train.py":
            with in_process() as train:
                train.main(arguments)
        else:
            assert command[0] == "python"
            monkeypatch.setattr(sys, "argv", [name, *arguments])
            recipe(name.removesuffix(".py")).main(arguments)
        log = caplog.text
        caplog.clear()
        if "fine_tune.yaml" in " ".join(command):
            assert "Head: new, since it has no list of training speakers" in log
        if "large_margin.yaml" in " ".join(command):
            assert "Head: kept" in log
    embedder = SpeakerEmbedder.from_hparams("my_model", device="cpu")
    verified = embedder.verify(
        "my_corpus/ann/1.wav", "my_corpus/ann/2.wav", threshold="valid_trials"
    )
    assert verified.origin
