"""A run of the recipe, from training to the folder that is handed on."""

import numpy as np
import pytest
import torch
from speechbrain.inference.classifiers import EncoderClassifier

from speechbrain_rev import cli
from speechbrain_rev.inference import SpeakerEmbedder, read_cohort
from speechbrain_rev.scoring import read_trials
from tests.corpus import write_corpus
from tests.recipes.runs import arguments, recipe
from tests.run_folders import speech_like


@pytest.mark.slow
def test_a_trained_and_scored_run_is_exported(tmp_path, capsys):
    data, run, out = (tmp_path / name for name in ("data", "run", "out"))
    write_corpus(data)
    recipe("train").main(arguments(data, run, seed=0))
    trials = str(run / "save" / "valid_trials.txt")
    recipe("extract").main([str(run), "--trials", trials, "--device=cpu"])
    recipe("score").main([str(run), "--trials", trials, "--bootstrap=0"])
    capsys.readouterr()
    assert cli.main(["export", str(run), str(out)]) == 0
    assert "lacks" not in capsys.readouterr().out
    wave = speech_like()
    expected = SpeakerEmbedder.from_run(run, device="cpu").embed(wave, 16000)
    embedder = SpeakerEmbedder.from_hparams(out, device="cpu")
    assert np.array_equal(embedder.embed(wave, 16000), expected)
    theirs = EncoderClassifier.from_hparams(source=str(out), run_opts={"device": "cpu"})
    cosines, _, _, labels = theirs.classify_batch(torch.from_numpy(wave)[None])
    # Six speakers, of which two were held out; training had three speeds of each.
    assert cosines.shape == (1, 4)
    assert labels[0] in {path.name for path in (data / "wav").iterdir()}
    assert read_cohort(out).means.shape == (4, len(expected))
    card = (out / "README.md").read_text()
    assert f"| {np.sum(read_trials(trials).labels):,} |" in card
    assert "16 utterances of 4 speakers, of data" in card
    assert str(tmp_path) not in card
