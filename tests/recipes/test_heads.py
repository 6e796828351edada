"""Poolings, heads and features in the recipe: trained, exported, embedded, verified, loaded."""

import pytest
import soundfile
import torch
from speechbrain.inference.speaker import SpeakerRecognition

from speechbrain_rev.heads import HEAD_OF, HEADS, POOLINGS
from speechbrain_rev.inference import SpeakerEmbedder, export_run
from speechbrain_rev.inference.wespeaker import (
    convert_from_wespeaker,
    convert_to_wespeaker,
)
from tests.recipes.runs import FEW_STEPS, arguments

#: The first loss of each head, and each pooling.
ROWS = [
    *({"loss": next(iter(row.losses))} for row in HEADS.values()),
    *({"pooling": pooling} for pooling in POOLINGS if pooling != "statistics"),
]
#: A network of WeSpeaker's, as it is fed there.
WESPEAKER = {"arch": "resnet34", "widths": "[8, 16, 32, 64]", "blocks": "[1, 1, 1, 1]"}
WESPEAKER |= {"features": "kaldi", "pooling_variance": "unbiased"}


@pytest.mark.parametrize(
    "settings",
    [*(pytest.param(row, marks=pytest.mark.slow) for row in ROWS), WESPEAKER],
)
def test_a_run_is_trained_exported_and_loaded_everywhere(
    train, data, tmp_path, settings
):
    run, model = tmp_path / "run", tmp_path / "model"
    train.main(arguments(data, run, **FEW_STEPS | settings))
    export_run(run, model)
    first, second = (
        next((data / "wav" / speaker).rglob("*.wav"))
        for speaker in ("id00000", "id00001")
    )
    embedders = SpeakerEmbedder.from_run(run), SpeakerEmbedder.from_hparams(model)
    expected = embedders[0].embed(first)
    torch.testing.assert_close(embedders[1].embed(first), expected)
    score = embedders[1].verify(first, second, threshold=0.5).score
    assert -1 <= score <= 1
    saved = str(tmp_path / "saved")
    theirs = SpeakerRecognition.from_hparams(str(model), savedir=saved)
    waves = [
        torch.tensor(soundfile.read(file, dtype="float32")[0])[None]
        for file in (first, second)
    ]
    embedding = theirs.encode_batch(waves[0])[0, 0]
    # Their features are those of one utterance, in the same operations.
    torch.testing.assert_close(
        embedding, torch.as_tensor(expected).reshape(-1), rtol=1e-4, atol=1e-5
    )
    assert float(theirs.verify_batch(*waves)[0]) == pytest.approx(score, abs=1e-5)
    scores = theirs.classify_batch(waves[0])[0]
    head = HEAD_OF[settings.get("loss", next(iter(HEAD_OF)))]
    weight = theirs.mods.classifier.weight
    assert weight.shape == head.weight_shape(scores.shape[-1], embedding.numel())
    (model / "embedding_model.safetensors").unlink()
    (model / "SHA256SUMS").unlink()
    export_run(model, tmp_path / "again")
    again = SpeakerEmbedder.from_hparams(tmp_path / "again").embed(first)
    torch.testing.assert_close(again, expected)
    if settings is WESPEAKER:
        assert "| features | kaldi |" in (model / "README.md").read_text()
        convert_to_wespeaker(run, tmp_path / "avg_model.pt")
        convert_from_wespeaker(tmp_path / "avg_model.pt", tmp_path / "back")
        back = SpeakerEmbedder.from_hparams(tmp_path / "back").embed(first)
        torch.testing.assert_close(back, expected)


def test_a_run_with_another_head_is_refused_at_its_folder(train, data, finished):
    other = FEW_STEPS | {"loss": "subcenter_aam_softmax"}
    with pytest.raises(ValueError, match="head: was cosine, is subcenter"):
        train.main(arguments(data, finished, **other))
