"""The recipe on segments of recordings: what it trains and embeds is the utterances."""

import numpy as np
import pytest

from speechbrain_rev.data import read_manifest
from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.evaluation import cohort_files
from tests.recipes.runs import FEW_STEPS, arguments, assert_same_weights, recipe
from tests.unit.data.test_formats import as_segments, rows_of


@pytest.mark.slow
def test_segments_train_and_embed_the_bits_of_their_own_files(train, data, tmp_path):
    runs = {}
    for name, folder in {
        "files": data,
        "segments": as_segments(rows_of(data), tmp_path / "kaldi"),
    }.items():
        runs[name] = tmp_path / name
        train.main(arguments(folder, runs[name], **FEW_STEPS))
    assert_same_weights(runs["files"], runs["segments"])
    embedder = SpeakerEmbedder.from_run(runs["segments"])
    for one, other in zip(
        *(cohort_files(run / "save/train.csv", 1).values() for run in runs.values()),
        strict=True,
    ):
        assert one != other
        assert np.array_equal(embedder.embed(one), embedder.embed(other))


@pytest.mark.slow
def test_a_run_on_segments_is_validated_extracted_and_scored(train, data, tmp_path):
    kaldi = as_segments(rows_of(data), tmp_path / "kaldi")
    run = tmp_path / "run"
    train.main(arguments(kaldi, run, **FEW_STEPS | {"valid_speakers": 2}))
    assert len(read_manifest(run / "save/train.csv")) == 16
    trials = f"--trials={run / 'save/valid_trials.txt'}"
    recipe("extract").main([str(run), "--device=cpu", trials])
    recipe("score").main([str(run), "--bootstrap=0", trials])
    assert (run / "scores/results.json").is_file()
