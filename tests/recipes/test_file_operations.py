"""The recipe's scripts, stopped after each file operation or with a full disk from there."""

import logging
import sys

import pytest
import speechbrain as sb

from speechbrain_rev.cli import run_script
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer, verify_checkpoint
from speechbrain_rev.scoring import read_trials
from speechbrain_rev.speech import audio_files, packing, read_audio, read_manifest
from tests.corpus import write_corpus
from tests.recipes.runs import RECIPE, SHORT, arguments, log, recipe, weights
from tests.reliability.operations import (
    FAILURES,
    SOME_OR_ALL,
    Case,
    check_failures,
    check_stops,
)

RATE = 16000


def script(name, *arguments):
    """A script of the recipe, as it is run from the command line."""
    main = recipe(name).main

    def work():
        sys.argv = [str(RECIPE / f"{name}.py"), *map(str, arguments)]
        run_script(main)

    return work


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return write_corpus(folder, speakers=2, utterances=1, seconds=0.1)


@pytest.fixture(params=[10**9, 1000], ids=["kept_at_the_end", "kept_often"])
def a_packing(request, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "_KEPT_EVERY", request.param)
    packed = tmp_path / "out" / "corpus.packed"

    def accept():
        """What can be read has all bits of all files."""
        try:
            found = audio_files(packed)
        except ValueError:
            return
        assert len(found) == 4
        for path in audio_files(corpus):
            wav = read_audio(packed / path.relative_to(corpus), sample_rate=RATE)
            assert wav.equal(read_audio(path, sample_rate=RATE))

    return Case(
        work=script("prepare", "--pack", corpus, packed),
        folder=tmp_path / "out",
        accept=accept,
        goes_on=("corpus.packed/unfinished.jsonl",),
    )


@SOME_OR_ALL
def test_a_packing_that_is_stopped_anywhere_goes_on(a_packing, most):
    check_stops(a_packing, most)


@SOME_OR_ALL
@FAILURES
def test_a_packing_without_space_says_so_and_goes_on(a_packing, kind, most):
    check_failures(a_packing, kind, most)


@pytest.fixture
def a_preparation(tmp_path):
    data = write_corpus(tmp_path / "data", speakers=4, seconds=0.3)
    # One that cannot be used, for a list of such.
    (data / "wav" / "id00003" / "s00" / "text.wav").write_text("RIFF or not")
    output = tmp_path / "out"
    given = {"bad_files": "drop", "valid_speakers": 2}
    command = [a for a in arguments(data, output, **given) if "device" not in a]

    def accept():
        """Lists that are vouched for are all there."""
        save = output / "save"
        if (save / "prepared.json").exists():
            prepared = recipe("prepare").read_prepared(save)
            assert prepared.dropped == 1
            assert len(read_manifest(save / "train.csv")) == prepared.utterances == 8
            assert len(recipe("prepare").speaker_numbers(save)) == prepared.speakers
            trials = read_trials(save / "valid_trials.txt")
            assert len(trials.labels) == prepared.valid_trials

    return Case(work=script("prepare", *command), folder=output, accept=accept)


@SOME_OR_ALL
def test_a_preparation_that_is_stopped_anywhere_is_made_anew(a_preparation, most):
    check_stops(a_preparation, most)


@SOME_OR_ALL
@FAILURES
def test_a_preparation_without_space_says_so_and_leaves_nothing(
    a_preparation, kind, most
):
    check_failures(a_preparation, kind, most)


@pytest.fixture
def a_log(tmp_path, monkeypatch):
    """A run's folder and log, which does without lines that there is no space for."""
    training_log, folder = recipe("training_log"), tmp_path / "out"
    monkeypatch.setattr(sb.utils.logger, "get_environment_description", lambda: "this")

    def work():
        sys.argv = [str(RECIPE / "train.py")]
        try:
            run_script(lambda: training_log.begin(folder))
        finally:
            for _ in range(3):
                logging.getLogger("train").warning("a line")

    def read():
        return (folder / "env.log").read_text()

    return Case(work=work, folder=folder, read=read)


@pytest.mark.parametrize("kind", ["full_from", "fails_at", "largest"])
def test_a_log_without_space_lacks_lines_and_costs_no_traceback(a_log, kind):
    check_failures(a_log, kind)


@pytest.fixture
def a_training(corpus, tmp_path):
    output = tmp_path / "out"
    command = arguments(corpus, output, **SHORT, seed=0, ckpt_interval_steps=1)

    def accept():
        """A folder that counts as a checkpoint is whole."""
        for checkpoint in WholeCheckpointer(output / "save").list_checkpoints():
            verify_checkpoint(checkpoint)

    def read():
        """Weights and log of the end, and how many checkpoints there are."""
        trained = {name: w.tolist() for name, w in weights(output).items()}
        return trained, log(output), len(list(output.glob("save/CKPT*")))

    return Case(
        work=script("train", *command, "--noprogressbar"),
        folder=output,
        accept=accept,
        read=read,
    )


@pytest.mark.slow
def test_a_training_that_is_stopped_ends_as_if_it_were_not(a_training):
    check_stops(a_training, most=5)


@pytest.mark.slow
@FAILURES
def test_a_training_without_space_says_so_and_goes_on(a_training, kind):
    check_failures(a_training, kind, most=5)
