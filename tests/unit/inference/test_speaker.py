"""Embedders: the encoder's embeddings, whatever device, precision, form and batch."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization

from speechbrain_rev.inference import (
    FbankStatistics,
    SpeakerEmbedder,
    WaveformEncoder,
    running,
)
from speechbrain_rev.inference.front_ends import FRONT_ENDS
from speechbrain_rev.lobes import build_encoder, inference_form
from speechbrain_rev.lobes.description import FrontEnd
from speechbrain_rev.lobes.pretrained import load_strictly
from speechbrain_rev.scoring import cosine_trials, eer, read_trials
from tests.run_folders import TINY, speech_like, tiny_encoder, write_audio, write_run
from tests.unit.inference.conftest import close

FAMILIES = ["resnet34", "revnet57", "df_resnet56", "df_revnet89"]
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_an_embedding_is_the_encoder_s_on_training_s_features(tmp_path):
    encoder = write_run(tmp_path)
    embedder = SpeakerEmbedder.from_run(tmp_path, device="cpu")
    wave = torch.from_numpy(speech_like())
    features = Fbank(n_mels=80, sample_rate=16000)(wave.unsqueeze(0))
    normalise = InputNormalization(norm_type="sentence", std_norm=False)
    with torch.no_grad():
        expected = encoder.eval()(normalise(features, torch.ones(1)))[0, 0].numpy()
    before = torch.get_rng_state()
    row = embedder.embed(wave, 16000)
    assert (row.shape, row.dtype) == ((TINY["embedding_dim"],), np.float32)
    assert close(row, expected)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        embedder.model.encoder.fc.bias.fill_(1e38).mul_(10)
    with pytest.raises(ValueError, match="diverged"):
        embedder.embed(wave, 16000)


def model_of(arch, front_end):
    torch.manual_seed(0)
    if arch == "statistics":
        return FbankStatistics()
    shape = {"widths": (8, 16, 16, 16), "blocks": (1, 1, 1, 1), "embedding_dim": 16}
    encoder = build_encoder(arch, **shape)
    if front_end == "speechbrain":
        # As SpeakerEmbedder runs encoders on CPUs.
        encoder = inference_form(encoder.eval())
    return WaveformEncoder(encoder, FrontEnd(front_end, 16000, 80))


@pytest.mark.parametrize(
    ("arch", "front_end"),
    [
        *((arch, front_end) for arch in FAMILIES for front_end in FRONT_ENDS),
        ("statistics", None),
    ],
)
def test_an_embedding_does_not_depend_on_its_companions(
    arch, front_end, tmp_path, monkeypatch
):
    # Large batches, of which one holds the longest and the shortest.
    monkeypatch.setattr(running, "_BATCH_SAMPLES", {"cpu": 10**9})
    monkeypatch.setattr(running, "_ALIKE", 0.0)
    embedder = SpeakerEmbedder(model_of(arch, front_end), device="cpu")
    sizes, together = [], embedder.model.forward

    def counting(waves, samples):
        sizes.append(len(waves))
        return together(waves, samples)

    monkeypatch.setattr(embedder.model, "forward", counting)
    # 160 samples are a hop: also one more or less than whole hops. Of 8001 samples are 51
    # of 101 frames, a part that float32 rounds up.
    lengths = [4000, 16000, 15999, 8001, 15841]
    waves = [speech_like(seed=i)[:n] for i, n in enumerate(lengths)]
    # Arrays and files in turns.
    given = [
        write_audio(tmp_path / f"{i}.wav", wave) if i % 2 else wave
        for i, wave in enumerate(waves)
    ]
    rows = embedder.embed(given, 16000)
    assert sizes == [len(lengths)]
    for row, wave in zip(rows, waves, strict=True):
        assert close(row, embedder.embed(wave, 16000))


def test_many_files_of_one_length_keep_their_order(embedder, tmp_path, terminal):
    paths = [
        write_audio(tmp_path / f"{i}.flac", speech_like(0.3, seed=i)) for i in range(20)
    ]
    shown = terminal()
    rows = embedder.embed(paths)
    assert "embedding: 100%" in (before := shown.getvalue())
    for index in (0, 15, 16, 19):
        assert close(rows[index], embedder.embed([paths[index]])[0])
    assert shown.getvalue() == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "meta"}, "takes cpu, cuda, or cuda:N .* not meta"),
        ({"device": 7.5}, "takes cpu, cuda, or cuda:N .* not 7.5"),
        ({"device": "cuda"}, "sees 0 CUDA devices"),
        ({"precision": "fp16"}, "fp16 is for GPUs"),
        ({"precision": "float32"}, "takes fp32, bf16, fp16, not 'float32'"),
    ],
)
def test_a_device_or_precision_that_is_no_use_is_refused_before_anything_is_read(
    trained, monkeypatch, given, message
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for load in (SpeakerEmbedder.from_run, SpeakerEmbedder.from_hparams):
        with pytest.raises(ValueError, match=message):
            load("nowhere", **given)
    assert SpeakerEmbedder.from_run(trained[0]).device.type == "cpu"


def test_the_fingerprint_is_of_weights_and_precision(trained, embedder, tmp_path):
    write_run(tmp_path, seed=1)
    other, again = (
        SpeakerEmbedder.from_run(folder, device="cpu").fingerprint
        for folder in (tmp_path, trained[0])
    )
    assert embedder.fingerprint == again != other
    half = SpeakerEmbedder.from_run(trained[0], device="cpu", precision="bf16")
    assert half.fingerprint == f"{again}, bf16"


#: Half the distance of 1 from the next number: the relative error of one rounding.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "bf16"),
        pytest.param("cuda", "bf16", marks=NEEDS_GPU),
        pytest.param("cuda", "fp16", marks=NEEDS_GPU),
    ],
)
@pytest.mark.parametrize("arch", FAMILIES)
def test_embeddings_in_half_precision_are_as_close_as_roundings_allow(
    arch, device, precision
):
    model = model_of(arch, "kaldi")
    layers = sum(
        isinstance(m, torch.nn.Conv2d | torch.nn.Linear) for m in model.modules()
    )
    full, half = (
        SpeakerEmbedder(model, device=device, precision=p).embed(speech_like(), 16000)
        for p in ("fp32", precision)
    )
    assert half.dtype == np.float32
    unit, other = (row / np.linalg.norm(row) for row in (full, half))
    # Each layer rounds its input, its weights and its output; independent errors add up
    # in squares (Higham and Mary, "A new approach to probabilistic rounding error
    # analysis", SIAM J. Sci. Comput. 2019), with a factor of 3 for certainty.
    bound = 3 * np.sqrt(3 * layers) * ROUNDING[precision]
    assert 0 < np.linalg.norm(unit - other) <= bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_cpu_s_embedding(trained, embedder):
    wave = speech_like()
    on_gpu = SpeakerEmbedder.from_run(trained[0])
    assert on_gpu.device.type == "cuda"
    # cuDNN may compute convolutions in TF32: 10 bits of mantissa.
    assert close(on_gpu.embed(wave, 16000), embedder.embed(wave, 16000), 1e-2)


def test_weights_of_a_wrapper_are_loaded_strictly(tmp_path):
    linear, wrapper = torch.nn.Linear(2, 2), torch.nn.Module()
    wrapper.module = torch.nn.Linear(2, 2)
    for module in (wrapper, wrapper.module):
        file = io.BytesIO()
        torch.save(wrapper.state_dict(), file)
        file.seek(0)
        before = [p.clone() for p in wrapper.parameters()]
        load_strictly(module, file)
        assert all(map(torch.equal, wrapper.parameters(), before))
    torch.save({"module.weight": torch.ones(2, 2)}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"1 missing \(the first is bias\)"):
        load_strictly(linear, tmp_path / "a.ckpt")
    torch.save([torch.ones(2)], tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="holds no encoder of this package") as error:
        load_strictly(tiny_encoder(), tmp_path / "a.ckpt")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_baseline_tells_real_speakers_apart_as_well_as_it_is_known_to():
    if "SPEECHBRAIN_REV_SPEECH" not in os.environ:
        pytest.skip("SPEECHBRAIN_REV_SPEECH names no folder with minivox")
    minivox = Path(os.environ["SPEECHBRAIN_REV_SPEECH"]) / "minivox"
    embedder = SpeakerEmbedder(FbankStatistics(), device="cpu")
    trials = read_trials(minivox / "veri_test.txt")
    paths = [minivox / "wav" / name for name in trials.utterances]
    rows = trials.rows(trials.utterances)
    scores = cosine_trials(embedder.embed(paths), *rows)
    # 16.3 % with another filterbank.
    assert 0.13 < eer(scores, trials.labels) < 0.18
