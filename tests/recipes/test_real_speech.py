"""The recipe on real speech: needs a folder with minivox/ and noise/."""

import os
from pathlib import Path

import pytest

from speechbrain_rev.data import read_manifest
from speechbrain_rev.scoring import read_trials
from tests.recipes.runs import HPARAMS, recipe

FOLDER = os.environ.get("SPEECHBRAIN_REV_SPEECH")

pytestmark = pytest.mark.skipif(
    FOLDER is None,
    reason="SPEECHBRAIN_REV_SPEECH names no folder with minivox/ and noise/",
)


def test_two_steps_on_real_speech_with_real_noise(tmp_path, monkeypatch, capsys):
    train, speech = recipe("train"), Path(FOLDER or "")
    monkeypatch.setattr(train.sb, "create_experiment_directory", lambda folder: None)
    tests = [
        speech / "minivox" / f"{name}.txt" for name in ("veri_test", "veri_test_hard")
    ]
    train.main(
        [
            str(HPARAMS / "minivox.yaml"),
            f"--data_folder={speech / 'minivox'}",
            f"--train_list={speech / 'minivox' / 'train_list.txt'}",
            f"--trial_lists=[{', '.join(map(str, tests))}]",
            f"--noise_folder={speech / 'noise'}",
            f"--output_folder={tmp_path}",
            "--augment_prob=1.0",
            "--batch_size=8",
            "--valid_speakers=20",
            "--num_workers=0",
            "--device=cpu",
            "--dry_run",
        ]
    )
    assert "87 steps per epoch" in capsys.readouterr().out
    trained = {
        utterance.spk_id for utterance in read_manifest(tmp_path / "save/train.csv")
    }
    tested = {
        name.split("/")[0] for path in tests for name in read_trials(path).utterances
    }
    assert len(trained) == 100
    assert not trained & tested
