"""Each pooling and each head in the recipe: trained, exported, embedded, verified, loaded."""

import pytest
import soundfile
import torch
from speechbrain.inference.speaker import EncoderClassifier

from speechbrain_rev.heads import HEAD_OF, HEADS, POOLINGS
from speechbrain_rev.inference import SpeakerEmbedder, export_run
from tests.recipes.runs import FEW_STEPS, arguments

#: The first loss of each head, and each pooling.
ROWS = [
    *(("statistics", next(iter(row.losses))) for row in HEADS.values()),
    *(
        (pooling, next(iter(HEAD_OF)))
        for pooling in POOLINGS
        if pooling != "statistics"
    ),
]


@pytest.mark.parametrize(("pooling", "loss"), ROWS)
@pytest.mark.slow
def test_a_run_is_trained_exported_and_loaded_everywhere(
    train, data, tmp_path, pooling, loss
):
    run, model = tmp_path / "run", tmp_path / "model"
    options = FEW_STEPS | {"pooling": pooling, "loss": loss}
    train.main(arguments(data, run, **options))
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
    theirs = EncoderClassifier.from_hparams(str(model), savedir=str(tmp_path / "saved"))
    wave = torch.tensor(soundfile.read(first, dtype="float32")[0])[None]
    embedding = theirs.encode_batch(wave)[0, 0]
    # Their features are those of one utterance, in the same operations.
    torch.testing.assert_close(
        embedding, torch.as_tensor(expected).reshape(-1), rtol=1e-4, atol=1e-5
    )
    scores = theirs.classify_batch(wave)[0]
    head = HEAD_OF[loss]
    weight = theirs.mods.classifier.weight
    assert weight.shape == head.weight_shape(scores.shape[-1], embedding.numel())
    (model / "embedding_model.safetensors").unlink()
    (model / "SHA256SUMS").unlink()
    export_run(model, tmp_path / "again")
    again = SpeakerEmbedder.from_hparams(tmp_path / "again").embed(first)
    torch.testing.assert_close(again, expected)


def test_a_run_with_another_head_is_refused_at_its_folder(train, data, finished):
    other = FEW_STEPS | {"loss": "subcenter_aam_softmax"}
    with pytest.raises(ValueError, match="head: was cosine, is subcenter"):
        train.main(arguments(data, finished, **other))
