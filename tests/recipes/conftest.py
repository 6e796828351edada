"""What tests of the recipe share."""

from contextlib import contextmanager

import pytest
import speechbrain as sb

from speechbrain_rev.training import epoch_log
from tests.corpus import write_corpus, write_noise
from tests.recipes.runs import FEW_STEPS, arguments, recipe


@contextmanager
def in_process():
    """The recipe's script in this process, without SpeechBrain's log and the curves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sb, "create_experiment_directory", lambda folder: None)
        patch.setattr(epoch_log.plots, "training_curves", lambda rows, path: None)
        yield recipe("train")


@pytest.fixture(scope="module")
def train():
    with in_process() as script:
        yield script


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Speech of six speakers, beside a folder of noise."""
    folder = tmp_path_factory.mktemp("data")
    write_noise(folder / "noise")
    return write_corpus(folder / "corpus")


@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """A run of one epoch of two steps; who writes into it copies it."""
    folder = tmp_path_factory.mktemp("finished")
    with in_process() as script:
        script.main(arguments(data, folder, **FEW_STEPS))
    return folder
