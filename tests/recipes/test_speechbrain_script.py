"""A resolved file serves SpeechBrain's own train_speaker_embeddings.py, unmodified."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import speechbrain
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.utils.distributed import run_on_main

from speechbrain_rev.hparams import resolve
from speechbrain_rev.inference import SpeakerEmbedder, export_run
from tests.recipes.stock import (
    SPEAKERS,
    Script,
    assert_embeds_as,
    fit,
    utterances,
    write_experiment,
    write_labels,
)
from tests.run_folders import speech_like, write_audio

HPARAMS = Path(__file__).parents[2] / "hparams"
TINY = {
    "widths": [8, 8, 8, 8],
    "blocks": [1, 1, 1, 1],
    # Large enough for the linear layer's states to be of 8 bit.
    "embedding_dim": 64,
    "chunk_samples": 8000,
    "batch_size": 4,
    "number_of_epochs": 2,
    "warmup_epochs": 0.5,
    "num_workers": 0,
    "out_n_neurons": 3 * SPEAKERS,
    "steps_per_epoch": 2,
    "margin_start_epoch": 1,
    "margin_end_epoch": 2,
}
ENCODERS = ["df_revnet89", "revnet57"]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    output = tmp_path_factory.mktemp("script")

    def load(encoder):
        folders = {"data_folder": "nowhere", "output_folder": str(output / encoder)}
        text = resolve(HPARAMS / f"{encoder}.yaml", {**TINY, **folders})
        return load_hyperpyyaml(text)

    with pytest.MonkeyPatch.context() as patch:
        # What seed_everything leaves in the environment goes again.
        for name in ("SB_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTHONHASHSEED"):
            patch.setenv(name, os.environ.get(name, "0"))
        yield load


@pytest.fixture(scope="module")
def trained(load):
    """By an encoder, what its file builds and the Brain that trained it."""

    def trained(encoder):
        hparams = load(encoder)
        return hparams, fit(hparams)

    return functools.cache(trained)


def largest(module):
    return max(module.parameters(), key=torch.numel)


class TestContract:
    def test_preparation_gets_what_it_asks_for(self, load):
        hparams = load("revnet57")
        assert hparams["save_folder"] == f"{hparams['output_folder']}/save"
        # voxceleb_prepare.py writes files of these names, and of no others.
        assert hparams["train_annotation"] == f"{hparams['save_folder']}/train.csv"
        assert hparams["valid_annotation"] == f"{hparams['save_folder']}/dev.csv"
        assert Path(hparams["verification_file"]).name == "veri_test2.txt"
        assert hparams["split_ratio"] == [90, 10]
        assert (hparams["skip_prep"], hparams["random_chunk"]) == (False, True)
        for name in ("prepare_noise_data", "prepare_rir_data"):
            run_on_main(hparams[name])

    def test_what_it_adds_by_itself_is_left_out(self, load):
        hparams = load("revnet57")
        assert "use_tacotron2_mel_spec" not in hparams
        assert "collate_fn" not in hparams["dataloader_options"]

    @pytest.mark.parametrize("encoder", ENCODERS)
    def test_its_brain_trains_logs_and_saves(self, trained, encoder):
        hparams, brain = trained(encoder)
        log = Path(hparams["train_log"]).read_text().splitlines()
        assert [line.split(",")[0] for line in log] == ["epoch: 1", "epoch: 2"]
        assert all("ErrorRate" in line for line in log)
        (checkpoint,) = Path(hparams["save_folder"]).glob("CKPT*")
        saved = {file.stem for file in checkpoint.glob("*.ckpt")}
        assert {"embedding_model", "classifier", "optimizer", "counter"} <= saved
        assert {"lr_annealing", "wav_augment"} <= saved
        assert len(brain.optimizer.param_groups) == 1

    @pytest.mark.parametrize("encoder", ENCODERS)
    def test_rate_and_margin_follow_the_schedule_at_every_step(self, trained, encoder):
        hparams, brain = trained(encoder)
        _, rates, margins = zip(*brain.steps, strict=True)
        schedule = hparams["lr_annealing"]
        assert rates == tuple(schedule.learning_rate(step) for step in range(4))
        assert len(set(rates)) > 2
        assert margins == tuple(schedule.margin_at(step) for step in range(1, 5))
        assert margins[0] < margins[-1] == hparams["margin"]

    def test_states_of_large_tensors_have_8_bit(self, trained):
        _, brain = trained("df_revnet89")
        weight = largest(brain.raw_modules["embedding_model"])
        assert torch.uint8 in {
            value.dtype
            for value in brain.optimizer.state[weight].values()
            if isinstance(value, torch.Tensor)
        }

    def test_a_finished_run_is_found_finished(self, load, trained):
        hparams, _ = trained("revnet57")
        again = load("revnet57")
        assert fit(again).steps == []
        assert again["lr_annealing"].step == hparams["lr_annealing"].step == 4
        assert again["wav_augment"].step == hparams["wav_augment"].step == 4
        weight = largest(again["embedding_model"])
        assert torch.equal(weight, largest(hparams["embedding_model"]))

    @pytest.mark.parametrize("encoder", ENCODERS)
    def test_what_it_leaves_embeds_and_is_exported(self, trained, encoder, tmp_path):
        hparams, brain = trained(encoder)
        run = tmp_path / "run"
        shutil.copytree(hparams["output_folder"], run)
        file = tmp_path / "resolved.yaml"
        file.write_text(resolve(HPARAMS / f"{encoder}.yaml", TINY))
        folders = {"data_folder": "nowhere", "output_folder": str(run)}
        write_experiment(run, file, folders)
        write_labels(run)
        assert "*id00" in (run / "hyperparams.yaml").read_text()
        wav = torch.from_numpy(speech_like())
        embedder = SpeakerEmbedder.from_run(run, device="cpu")
        assert_embeds_as(brain, wav, embedder.embed(wav, sample_rate=16000))
        export_run(run, tmp_path / "model")
        weight = torch.load(tmp_path / "model/classifier.ckpt", weights_only=True)
        # The speed recorded, of three.
        assert torch.equal(weight["weight"], hparams["classifier"].weight[:SPEAKERS])
        embedder = SpeakerEmbedder.from_hparams(tmp_path / "model", device="cpu")
        assert_embeds_as(brain, wav, embedder.embed(wav, sample_rate=16000))

    def test_validation_leaves_labels_and_augmentation_alone(self, load):
        hparams = load("revnet57")
        hparams["wav_augment"] = None
        brain = Script(
            modules=hparams["modules"], hparams=hparams, run_opts={"device": "cpu"}
        )
        brain.modules.eval()
        brain.on_stage_start(speechbrain.Stage.VALID)
        batch = PaddedBatch(utterances(hparams, 4))
        loss = brain.evaluate_batch(batch, speechbrain.Stage.VALID)
        assert loss.isfinite()


RECIPES = os.environ.get("SPEECHBRAIN_RECIPES")


@pytest.mark.skipif(
    not RECIPES, reason="SPEECHBRAIN_RECIPES does not name SpeechBrain's recipes folder"
)
class TestScript:
    SCRIPT = Path(RECIPES or "", "VoxCeleb/SpeakerRec/train_speaker_embeddings.py")

    def test_every_key_that_it_reads_is_there(self, load):
        source = self.SCRIPT.read_text()
        optional = set(re.findall(r"hasattr\(\s*self\.hparams, \"(\w+)\"", source))
        keys = set(re.findall(r"hparams\[\"(\w+)\"\]|self\.hparams\.(\w+)", source))
        wanted = {name for pair in keys for name in pair if name} - optional
        hparams = load("revnet57")
        assert len(wanted) > 20
        assert wanted <= set(hparams)
        modules = set(re.findall(r"self\.modules\.(\w+)", source))
        assert modules <= set(hparams["modules"])

    @pytest.mark.parametrize("encoder", ENCODERS)
    def test_it_trains_from_the_resolved_file_alone(self, encoder, tmp_path):
        data = tmp_path / "data"
        for speaker in range(SPEAKERS + 1):
            for session in ("a", "b", "c"):
                name = f"wav/id{speaker:05}/{session}/00001.wav"
                write_audio(data / name, speech_like(2.4, seed=speaker))
        trial = f"1 id{SPEAKERS:05}/a/00001.wav id{SPEAKERS:05}/b/00001.wav\n"
        (tmp_path / "trials.txt").write_text(trial)
        write_audio(tmp_path / "noise" / "buzz.wav", speech_like(0.5, seed=99))
        overrides = {**TINY, "noise_folder": str(tmp_path / "noise")}
        file = tmp_path / "resolved.yaml"
        file.write_text(resolve(HPARAMS / f"{encoder}.yaml", overrides))
        done = subprocess.run(
            [
                *[sys.executable, str(self.SCRIPT), str(file), "--device=cpu"],
                *[f"--data_folder={data}", f"--output_folder={tmp_path / 'run'}"],
                f"--verification_file={tmp_path / 'trials.txt'}",
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        log = (tmp_path / "run" / "train_log.txt").read_text().splitlines()
        assert [line.split(",")[0] for line in log] == ["epoch: 1", "epoch: 2"]
        embedder = SpeakerEmbedder.from_run(tmp_path / "run", device="cpu")
        embeddings = embedder.embed([data / "wav/id00000/a/00001.wav"])
        assert embeddings.shape == (1, TINY["embedding_dim"])
