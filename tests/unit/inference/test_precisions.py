"""Half precision: what may be asked for, and how close its embeddings are."""

import numpy as np
import pytest
import torch

from speechbrain_rev.inference import SpeakerEmbedder, WaveformEncoder
from speechbrain_rev.inference.front_ends import FRONT_ENDS
from speechbrain_rev.lobes import build_encoder
from tests.run_folders import speech_like, write_run

DEVICES = [
    pytest.param("cpu", "bf16"),
    *(
        pytest.param(
            "cuda",
            precision,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    not torch.cuda.is_available(), reason="needs a CUDA device"
                ),
            ],
        )
        for precision in ("bf16", "fp16")
    ),
]
#: Half the distance of 1 from the next number: the relative error of one rounding.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.mark.parametrize(("device", "precision"), DEVICES)
@pytest.mark.parametrize("arch", ["resnet34", "revnet57", "df_resnet56", "df_revnet89"])
def test_embeddings_in_half_precision_are_as_close_as_roundings_allow(
    arch, device, precision
):
    torch.manual_seed(0)
    shape = {"widths": (8, 16, 16, 16), "blocks": (1, 1, 1, 1), "embedding_dim": 64}
    encoder = build_encoder(arch, **shape)
    layers = sum(
        isinstance(m, torch.nn.Conv2d | torch.nn.Linear) for m in encoder.modules()
    )
    model = WaveformEncoder(encoder)
    wave = speech_like()
    full, half = (
        SpeakerEmbedder(model, device=device, precision=p).embed(wave, 16000)
        for p in ("fp32", precision)
    )
    assert half.dtype == np.float32
    unit, other = (row / np.linalg.norm(row) for row in (full, half))
    off = np.linalg.norm(unit - other)
    # Each layer rounds its input, its weights and its output; independent errors add up
    # in squares (Higham and Mary, "A new approach to probabilistic rounding error
    # analysis", SIAM J. Sci. Comput. 2019), with a factor of 3 for certainty.
    bound = 3 * np.sqrt(3 * layers) * ROUNDING[precision]
    assert 0 < off <= bound
    # Of unit vectors, cosine = 1 - distance squared / 2.
    assert unit @ other >= 1 - bound**2 / 2


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_features_are_float32_under_autocast(front_end):
    wave = torch.from_numpy(speech_like()).unsqueeze(0)
    compute = FRONT_ENDS[front_end]()
    expected, _ = compute(wave)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = compute(wave)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp16", "fp16 is for GPUs"),
        ("float32", "takes fp32, bf16, fp16, not 'float32'"),
        (None, "not None"),
    ],
)
def test_a_precision_that_is_no_use_is_refused_before_anything_is_read(
    precision, message
):
    for load in (SpeakerEmbedder.from_run, SpeakerEmbedder.from_hparams):
        with pytest.raises(ValueError, match=message):
            load("nowhere", device="cpu", precision=precision)


def test_the_fingerprint_tells_precisions_apart(tmp_path):
    write_run(tmp_path)
    full, half = (
        SpeakerEmbedder.from_run(
            tmp_path, device="cpu", precision=precision
        ).fingerprint
        for precision in ("fp32", "bf16")
    )
    assert half == f"{full}, bf16"
