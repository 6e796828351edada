"""A training whose streams leave their range ends, and says why."""

import pytest
import torch

from speechbrain_rev.reversible import StreamWarning
from tests.corpus import write_corpus
from tests.recipes.runs import arguments


def test_speechbrains_patience_with_what_is_not_finite_ends_it(
    train, tmp_path, monkeypatch
):
    class Overflowing(train.SpeakerBrain):
        def on_fit_start(self):
            super().on_fit_start()
            chain = self.modules.embedding_model.stages[0].chain
            torch.nn.init.constant_(chain.blocks[0].g.conv2.weight, 1e9)

    monkeypatch.setattr(train, "SpeakerBrain", Overflowing)
    data = write_corpus(tmp_path / "corpus")
    argv = arguments(data, tmp_path / "run", arch="revnet57", nonfinite_patience=1)
    with (
        pytest.warns(StreamWarning, match=r"stages\.0\.chain left their range"),
        pytest.raises(ValueError, match="more than --nonfinite_patience=1"),
    ):
        train.main(argv)
