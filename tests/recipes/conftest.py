"""What tests of the recipe share."""

import pytest

from tests.recipes.runs import recipe


@pytest.fixture(scope="module")
def train():
    """The recipe's script in this process, without SpeechBrain's log and the curves."""
    script, epoch_log = recipe("train"), recipe("epoch_log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.sb, "create_experiment_directory", lambda folder: None)
        patch.setattr(epoch_log.plots, "training_curves", lambda rows, path: None)
        yield script
