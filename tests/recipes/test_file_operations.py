"""The recipe's scripts, stopped after each file operation or with a full disk from there."""

import logging
import shutil
import sys

import matplotlib.figure  # noqa: F401 -- here once, and not in each process that draws
import numpy as np
import pytest
import speechbrain as sb

from speechbrain_rev.audio import read_audio
from speechbrain_rev.cli import run_script
from speechbrain_rev.data import audio_files, packing, read_manifest
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.data.preparation import read_prepared
from speechbrain_rev.inference import EmbeddingArchive, extraction
from speechbrain_rev.inference.thresholds import read_results
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer, verify_checkpoint
from speechbrain_rev.scoring import read_scores, read_trials
from speechbrain_rev.training.progress import beginning_log
from tests.corpus import write_corpus
from tests.recipes.runs import RECIPE, SHORT, arguments, log, recipe, weights
from tests.reliability.operations import (
    FAILURES,
    Case,
    Tried,
    check_failures,
    check_stops,
)
from tests.run_folders import write_scorable_run

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


class TestPacking(Tried):
    @pytest.fixture(params=[10**9, 1000], ids=["kept_at_the_end", "kept_often"])
    def case(self, request, corpus, tmp_path, monkeypatch):
        monkeypatch.setattr(packing, "_KEPT_EVERY_BYTES", request.param)
        packed = tmp_path / "out" / "corpus.packed"

        def accept():
            """What can be read has all bits of all files."""
            try:
                files = audio_files(packed)
            except ValueError:
                return
            assert len(files) == 4
            for path in audio_files(corpus):
                wav = read_audio(packed / path.relative_to(corpus), sample_rate=RATE)
                assert wav.equal(read_audio(path, sample_rate=RATE))

        return Case(
            work=script("prepare", "--pack", corpus, packed),
            folder=tmp_path / "out",
            accept=accept,
            goes_on=("corpus.packed/unfinished.jsonl",),
        )


class TestPreparation(Tried):
    @pytest.fixture
    def case(self, tmp_path):
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
                prepared = read_prepared(save)
                assert sum(prepared.left_out.values()) == 1
                assert (
                    len(read_manifest(save / "train.csv")) == prepared.utterances == 8
                )
                assert len(read_labels(save / "label_encoder.txt")) == prepared.speakers
                trials = read_trials(save / "valid_trials.txt")
                assert len(trials.labels) == prepared.valid_trials

        return Case(work=script("prepare", *command), folder=output, accept=accept)


@pytest.fixture(scope="module")
def scorable(tmp_path_factory):
    """A run and its data, of which nothing is embedded yet."""
    folder = tmp_path_factory.mktemp("scorable")
    data = write_corpus(folder / "data", speakers=4, utterances=1, seconds=0.4)
    return write_scorable_run(folder / "run", data)


@pytest.fixture(scope="module")
def extracted(scorable):
    """The same with embeddings, and what they are."""
    script("extract", scorable, "--device=cpu")()
    made = scorable.with_name("extracted")
    shutil.copytree(scorable, made)
    shutil.rmtree(scorable / "embeddings")
    return made


class TestExtraction(Tried):
    @pytest.fixture
    def case(self, scorable, extracted, monkeypatch):
        # Saved after each file.
        monkeypatch.setattr(extraction, "_SAVE_SECONDS", -1)
        folder = scorable / "embeddings"

        def accept():
            """What is there has the right numbers."""
            for path in folder.glob("*.npz"):
                archive = EmbeddingArchive.load(path)
                whole = EmbeddingArchive.load(extracted / "embeddings" / path.name)
                for name, row in zip(archive.names, archive.embeddings, strict=True):
                    expected = whole.embeddings[whole.names.index(name)]
                    assert np.allclose(row, expected, atol=1e-5)

        def read():
            """Of other batches, sums are rounded otherwise."""
            archives = map(EmbeddingArchive.load, sorted(folder.glob("*.npz")))
            speakers = (folder / "speakers.json").read_text()
            return [speakers, *((one.names, one.sources) for one in archives)]

        return Case(
            work=script("extract", scorable, "--device=cpu"),
            folder=folder,
            accept=accept,
            read=read,
        )


class TestScoring(Tried):
    @pytest.fixture
    def case(self, extracted):
        folder = extracted / "scores"

        def accept():
            """Results are there when all that they are of is, and can be read."""
            for path in folder.glob("*.txt"):
                read_scores(path)
            if (folder / "results.json").exists():
                assert read_results(extracted)["results"]
                assert len(list(folder.glob("*.txt"))) == 4

        return Case(
            work=script("score", extracted, "--bootstrap=0"),
            folder=folder,
            accept=accept,
        )


@pytest.fixture
def a_log(tmp_path, monkeypatch):
    """A run's folder and log, which does without lines that there is no space for."""
    folder = tmp_path / "out"
    monkeypatch.setattr(sb.utils.logger, "get_environment_description", lambda: "this")

    def begin():
        with beginning_log(folder):
            sb.create_experiment_directory(str(folder))

    def work():
        sys.argv = [str(RECIPE / "train.py")]
        try:
            run_script(begin)
        finally:
            for _ in range(3):
                logging.getLogger("train").warning("a line")

    def read():
        return (folder / "env.log").read_text()

    return Case(work=work, folder=folder, read=read)


@FAILURES
def test_a_log_without_space_lacks_lines_and_costs_no_traceback(a_log, kind):
    check_failures(a_log, kind)


@pytest.fixture
def training_run(corpus, tmp_path):
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


@pytest.mark.slow(drawn=False)
def test_a_training_run_that_is_stopped_ends_as_if_it_were_not(training_run):
    check_stops(training_run, most=5)


@pytest.mark.slow(drawn=False)
@FAILURES
def test_a_training_run_without_space_reports_it_and_goes_on(training_run, kind):
    check_failures(training_run, kind, most=5)
