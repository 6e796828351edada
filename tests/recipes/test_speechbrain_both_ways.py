"""A run of ours in SpeechBrain and a run of SpeechBrain's here: the same embeddings."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.inference.classifiers import EncoderClassifier
from speechbrain.inference.speaker import SpeakerRecognition
from speechbrain.utils.parameter_transfer import Pretrainer

from speechbrain_rev.hparams import resolve
from speechbrain_rev.inference import SpeakerEmbedder, export_run
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.scoring import cosine
from tests.recipes.stock import fit, write_experiment, write_labels
from tests.run_folders import TINY, speech_like, write_finished_run

HPARAMS = Path(__file__).parents[2] / "hparams"
CPU = {"device": "cpu"}
#: One encoder of each family, and of each type of reversible ones.
ENCODERS = (
    "resnet34",
    "df_resnet56",
    "revnet46",
    "revnet57",
    "df_revnet66",
    "df_revnet89",
)
SIZE = {name: TINY[name] for name in ("widths", "blocks", "embedding_dim")}
# Rounding, in float32.
SAME = {"rtol": 0, "atol": 1e-6}


@pytest.fixture(autouse=True)
def seeds(monkeypatch):
    # What seed_everything leaves in the environment goes again.
    for name in ("SB_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))


@pytest.fixture(scope="module")
def waves():
    return [speech_like(1.3, seed=seed) for seed in (0, 1)]


def assert_same(found, expected):
    """Compare embeddings of unit length."""
    largest = np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found / largest, expected / largest, **SAME)


@pytest.fixture(params=ENCODERS)
def ours(request, tmp_path, waves):
    """A run of this package, and its embeddings."""
    run = tmp_path / "run"
    write_finished_run(run, arch=request.param)
    embedder = SpeakerEmbedder.from_run(run, device="cpu")
    return request.param, run, embedder.embed(waves, 16000)


def test_speechbrain_s_interfaces_embed_as_we_do(ours, tmp_path, waves):
    _, run, expected = ours
    export_run(run, tmp_path / "model")
    source = {"source": str(tmp_path / "model"), "run_opts": CPU}
    batch = torch.from_numpy(np.stack(waves))
    classifier = EncoderClassifier.from_hparams(**source)
    assert_same(classifier.encode_batch(batch).squeeze(1).numpy(), expected)
    verification = SpeakerRecognition.from_hparams(**source)
    score, _ = verification.verify_batch(batch[:1], batch[1:])
    own = cosine(expected[:1], expected[1:])
    np.testing.assert_allclose(score.flatten().numpy(), own, **SAME)


def test_speechbrain_s_pretrainer_loads_a_run(ours, waves):
    arch, run, expected = ours
    file = f"""
features: !new:speechbrain.lobes.features.Fbank
    n_mels: {TINY["n_mels"]}
norm: !new:speechbrain.processing.features.InputNormalization
    norm_type: sentence
    std_norm: false
model: !new:speechbrain_rev.lobes.SpeakerEncoder
    name: {arch}
    widths: {TINY["widths"]}
    blocks: {TINY["blocks"]}
    embedding_dim: {TINY["embedding_dim"]}
"""
    built = load_hyperpyyaml(file)
    paths = {"model": str(run / "embedding_model.ckpt")}
    pretrainer = Pretrainer(loadables={"model": built["model"]}, paths=paths)
    pretrainer.collect_files()
    pretrainer.load_collected()
    assert isinstance(built["model"].eval(), SpeakerEncoder)
    assert_same(
        embedded(waves, built["features"], built["norm"], built["model"]), expected
    )


@torch.no_grad()
def embedded(waves, features, norm, model):
    """Embed as a script of SpeechBrain does."""
    batch = torch.from_numpy(np.stack(waves))
    return model(norm(features(batch), torch.ones(len(batch)))).squeeze(1).numpy()


@pytest.mark.parametrize("arch", ENCODERS)
def test_a_run_of_speechbrain_s_script_embeds_and_exports_here(arch, tmp_path, waves):
    file, run = tmp_path / "complete.yaml", tmp_path / "run"
    settings = {
        **SIZE, "data_folder": "nowhere", "output_folder": str(run), "batch_size": 4,
        "chunk_samples": 8000, "num_workers": 0, "out_n_neurons": 12, "steps_per_epoch": 2,
        "number_of_epochs": 1, "warmup_epochs": 0, "chunk": None,
    }  # fmt: skip
    file.write_text(resolve(HPARAMS / f"{arch}.yaml", settings))
    write_experiment(run, file, {})
    with file.open(encoding="utf-8") as stream:
        hparams = load_hyperpyyaml(stream)
    modules = fit(hparams).modules.eval()
    write_labels(run)
    expected = embedded(
        waves, modules.compute_features, modules.mean_var_norm, modules.embedding_model
    )
    found = SpeakerEmbedder.from_run(run, device="cpu").embed(waves, 16000)
    assert_same(found, expected)
    export_run(run, tmp_path / "model")
    model = SpeakerEmbedder.from_hparams(tmp_path / "model", device="cpu")
    assert_same(model.embed(waves, 16000), expected)
    theirs = EncoderClassifier.from_hparams(str(tmp_path / "model"), run_opts=CPU)
    batch = torch.from_numpy(np.stack(waves))
    assert_same(theirs.encode_batch(batch).squeeze(1).numpy(), expected)
