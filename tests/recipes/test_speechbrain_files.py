"""Files of hparams/speechbrain serve SpeechBrain's own scripts, unmodified."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import speechbrain
import torch
from hyperpyyaml import load_hyperpyyaml, resolve_references
from speechbrain.dataio import audio_io
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.utils.distributed import run_on_main
from torch.utils.data import DataLoader

from speechbrain_rev.inference import SpeakerEmbedder, export_run
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.scoring import cosine_trials, eer, read_scores
from tests.corpus import write_corpus, write_noise, write_rooms
from tests.recipes.stock import SPEAKERS, Script, fit
from tests.run_folders import TINY, speech_like, write_audio, write_finished_run

FOLDER = Path(__file__).parents[2] / "hparams" / "speechbrain"
VERIFICATION, TRAINING = FOLDER / "verification.yaml", FOLDER / "training.yaml"

RECIPES = os.environ.get("SPEECHBRAIN_RECIPES")
needs_recipes = pytest.mark.skipif(
    not RECIPES, reason="SPEECHBRAIN_RECIPES does not name SpeechBrain's recipes folder"
)
SPEAKER_REC = Path(RECIPES or "", "VoxCeleb", "SpeakerRec")
VERIFICATION_SCRIPT = SPEAKER_REC / "speaker_verification_cosine.py"
TRAINING_SCRIPT = SPEAKER_REC / "train_speaker_embeddings.py"

#: SpeechBrain 1.1 moved what its verification script calls by the old name.
RUN = """
import os, runpy, sys
import speechbrain
if not hasattr(speechbrain.core, "parse_arguments"):
    speechbrain.core.parse_arguments = speechbrain.parse_arguments
sys.path.insert(0, os.path.dirname(sys.argv[1]))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def overrides_of(settings):
    """What SpeechBrain makes of settings on the command line."""
    options = [f"--{name}={value}" for name, value in settings.items()]
    return speechbrain.parse_arguments(["file", *options])[2]


def load(file, **settings):
    """Read a file and a command line as the scripts do."""
    with file.open(encoding="utf-8") as stream:
        return load_hyperpyyaml(stream, overrides_of(settings))


def run(script, file, **settings):
    """Run a script on a file, with what a user gives on the command line."""
    options = [f"--{name}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(script), str(file), "--device=cpu", *options],
        capture_output=True, text=True, check=False, cwd=settings["output_folder"].parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(autouse=True)
def seeds(monkeypatch):
    # What seed_everything leaves in the environment goes again.
    for name in ("SB_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a finished run and the model that was exported from it."""
    folder = tmp_path_factory.mktemp("models")
    write_finished_run(folder / "run")
    export_run(folder / "run", folder / "exported")
    return folder


MODEL = {name: TINY[name] for name in ("arch", "widths", "blocks", "embedding_dim")}
EMBEDDERS = {
    "exported": SpeakerEmbedder.from_hparams,
    "run": SpeakerEmbedder.from_run,
}


def loaded(source, model=MODEL):
    """What the file builds, with the weights, as the script gets them."""
    params = load(VERIFICATION, data_folder="d", pretrain_path=source, **model)
    run_on_main(params["pretrainer"].collect_files)
    params["pretrainer"].load_collected()
    params["embedding_model"].eval()
    return params


@torch.no_grad()
def embed_by(params, wavs, lens=None):
    """Embed waveforms, [batch, samples], as the script does: [batch, embedding_dim]."""
    lens = torch.ones(len(wavs)) if lens is None else lens
    feats = params["mean_var_norm"](params["compute_features"](wavs), lens)
    return params["embedding_model"](feats, lens).squeeze(1).numpy()


#: What the verification script reads, and what it reads if it is there.
KEYS = {
    "data_folder", "output_folder", "save_folder", "verification_file", "split_ratio",
    "skip_prep", "train_data", "enrol_data", "test_data", "n_train_snts",
    "train_dataloader_opts", "enrol_dataloader_opts", "test_dataloader_opts",
    "compute_features", "mean_var_norm", "embedding_model", "pretrainer",
}  # fmt: skip
OPTIONAL = {"score_norm", "cohort_size", "voxceleb_source"}


class TestVerification:
    def test_every_key_that_the_script_reads_is_there(self):
        params = load(VERIFICATION, data_folder="d", pretrain_path="m", **MODEL)
        assert params.keys() >= KEYS | {"score_norm", "cohort_size"}
        # voxceleb_prepare.py writes lists of these names, and of no others.
        for side in ("train", "enrol", "test"):
            assert params[f"{side}_data"] == f"{params['save_folder']}/{side}.csv"

    @pytest.mark.parametrize("source", EMBEDDERS)
    def test_utterances_have_the_embeddings_that_the_package_gives(
        self, source, models, tmp_path
    ):
        params = loaded(models / source)
        files = [
            write_audio(tmp_path / f"{n}.wav", speech_like(1 + 0.37 * n, seed=n))
            for n in range(4)
        ]
        expected = EMBEDDERS[source](models / source, device="cpu").embed(files)
        items = [{"id": f.stem, "sig": audio_io.load(f)[0][0]} for f in files]
        options = {**params["test_dataloader_opts"], "collate_fn": PaddedBatch}
        batches = DataLoader(items, **options)
        found = np.concatenate([embed_by(params, *batch.sig) for batch in batches])
        np.testing.assert_allclose(found, expected, atol=1e-6)

    def test_a_model_of_other_values_is_refused(self, models):
        source = models / "exported"
        wrong = {**MODEL, "embedding_dim": 8}
        params = load(VERIFICATION, data_folder="d", pretrain_path=source, **wrong)
        params["pretrainer"].collect_files()
        with pytest.raises(ValueError, match=r"does not fit what hyperparams\.yaml"):
            params["pretrainer"].load_collected()

    def test_a_model_of_another_size_is_described_in_one_line(self, models):
        sizes = {k: v for k, v in MODEL.items() if k not in ("widths", "blocks")}
        params = load(
            VERIFICATION,
            data_folder="d",
            pretrain_path=models / "exported",
            **sizes,
        )
        params["pretrainer"].collect_files()
        with pytest.raises(ValueError, match="does not fit") as raised:
            params["pretrainer"].load_collected()
        said = str(raised.value)
        assert "\n" not in said
        assert (
            f"blocks {MODEL['blocks']} and embedding_dim {MODEL['embedding_dim']}"
            in said
        )
        assert "Give --arch, --widths, --blocks" in said

    @needs_recipes
    def test_the_list_of_keys_is_that_of_the_script(self):
        source = VERIFICATION_SCRIPT.read_text()
        optional = set(re.findall(r"\"(\w+)\" in params", source))
        assert optional == OPTIONAL
        read = set(re.findall(r"params\[\"(\w+)\"\]", source))
        assert read - optional == KEYS

    @needs_recipes
    @pytest.mark.parametrize(
        ("source", "norm"), [("exported", "s-norm"), ("run", None)]
    )
    def test_the_script_scores_a_model_with_it(self, source, norm, models, tmp_path):
        # Pieces of 3 s are the cohort.
        data = write_corpus(tmp_path / "data", seconds=4.5)
        speakers = sorted(path.name for path in (data / "wav").iterdir())[-2:]
        files = {
            path.relative_to(data / "wav").with_suffix("").as_posix(): path
            for speaker in speakers
            for path in sorted((data / "wav" / speaker).rglob("*.wav"))
        }
        pairs = [(a, b) for a in files for b in files if a < b]
        lines = [f"{int(a[:7] == b[:7])} {a}.wav {b}.wav\n" for a, b in pairs]
        (tmp_path / "trials.txt").write_text("".join(lines))
        text = VERIFICATION.read_text()
        if norm is None:
            text = text.replace("score_norm: s-norm\n", "")
        (tmp_path / "file.yaml").write_text(text)
        run(
            VERIFICATION_SCRIPT,
            tmp_path / "file.yaml",
            data_folder=data,
            pretrain_path=models / source,
            verification_file=tmp_path / "trials.txt",
            output_folder=tmp_path / "out",
            cohort_size=5,
            **MODEL,
        )
        trials, scores = read_scores(tmp_path / "out" / "scores.txt")
        assert list(zip(trials.enrol, trials.test, strict=True)) == pairs
        said = (tmp_path / "out" / "log.txt").read_text()
        rate = float(re.search(r"EER\(%\)=([\d.]+)", said)[1]) / 100
        # It takes the mean of both error rates where they are nearest: a trial of each
        # kind apart at most from where the lines between them cross.
        same = trials.labels.sum()
        trial = (1 / same + 1 / (len(scores) - same)) / 2
        assert rate == pytest.approx(eer(scores, trials.labels), abs=trial)
        if norm is None:
            embedder = EMBEDDERS[source](models / source, device="cpu")
            embeddings = embedder.embed(list(files.values()))
            rows = trials.rows(list(files))
            # The file has six digits.
            np.testing.assert_allclose(
                scores, cosine_trials(embeddings, *rows), atol=2e-6
            )


SHORT = {
    "widths": [8, 8, 8, 8],
    "blocks": [1, 1, 1, 1],
    "n_mels": 24,
    # Large enough for the last layer's states to have 8 bit.
    "embedding_dim": 96,
    "number_of_epochs": 2,
    "batch_size": 4,
    "num_workers": 0,
    "step_size": 6,
    "out_n_neurons": SPEAKERS,
    "sentence_len": 0.3,
}


class TestTraining:
    @pytest.fixture
    def downloads(self, tmp_path):
        """Archives in the place of those that the script downloads."""
        write_noise(tmp_path / "noise")
        write_rooms(tmp_path / "rooms")
        return {
            f"{name}_DATASET_URL": shutil.make_archive(
                str(tmp_path / folder), "zip", tmp_path / folder
            )
            for name, folder in {"NOISE": "noise", "RIR": "rooms"}.items()
        }

    def test_its_recipe_trains_our_encoder_with_8_bit(self, downloads, tmp_path):
        folder = tmp_path / "run"
        settings = {
            "data_folder": tmp_path / "data",
            "output_folder": folder,
            **SHORT,
            **downloads,
        }
        hparams = load(TRAINING, **settings)
        run_on_main(hparams["prepare_noise_data"])
        run_on_main(hparams["prepare_rir_data"])
        encoder = hparams["modules"]["embedding_model"]
        assert isinstance(encoder, SpeakerEncoder)
        utterance = torch.randn(2, 4800)
        assert len(hparams["wav_augment"](utterance, torch.ones(2))[0]) == 10
        brain = fit(hparams, brain=Watched)
        losses = [loss for loss, _ in brain.steps]
        assert len(losses) == 4
        assert torch.tensor(losses).isfinite().all()
        # It rises to lr in step_size steps.
        rates = [rate for _, rate in brain.steps]
        assert rates == sorted(rates)
        assert hparams["lr"] / 2 < rates[-1] < hparams["lr"]
        assert torch.uint8 in {
            value.dtype
            for value in brain.optimizer.state[encoder.fc.weight].values()
            if isinstance(value, torch.Tensor)
        }
        # As create_experiment_directory writes it.
        with TRAINING.open(encoding="utf-8") as stream:
            text = resolve_references(stream, overrides_of(settings)).getvalue()
        (folder / "hyperparams.yaml").write_text(text)
        self.assert_embeds(folder, tmp_path)

    @needs_recipes
    def test_the_script_trains_with_it(self, downloads, tmp_path):
        data = write_corpus(tmp_path / "data", speakers=SPEAKERS + 1)
        trial = f"1 id{SPEAKERS:05}/s00/00000.wav id{SPEAKERS:05}/s01/00000.wav\n"
        (tmp_path / "trials.txt").write_text(trial)
        run(
            TRAINING_SCRIPT,
            TRAINING,
            data_folder=data,
            output_folder=tmp_path / "run",
            verification_file=tmp_path / "trials.txt",
            **SHORT,
            **downloads,
        )
        log = (tmp_path / "run" / "train_log.txt").read_text().splitlines()
        assert [line.split(",")[0] for line in log] == ["epoch: 1", "epoch: 2"]
        self.assert_embeds(tmp_path / "run", tmp_path)

    def assert_embeds(self, folder, tmp_path):
        wave = speech_like()
        embedder = SpeakerEmbedder.from_run(folder, device="cpu")
        (embedding,) = embedder.embed([write_audio(tmp_path / "some.wav", wave)])
        assert embedding.shape == (SHORT["embedding_dim"],)
        # The other file takes the checkpoint as it is.
        (checkpoint,) = (folder / "save").glob("CKPT*")
        sizes = ("widths", "blocks", "n_mels", "embedding_dim")
        model = {"arch": "df_revnet89", **{name: SHORT[name] for name in sizes}}
        found = embed_by(loaded(checkpoint, model), torch.from_numpy(wave)[None])
        np.testing.assert_allclose(found[0], embedding, atol=1e-6)


class Watched(Script):
    """Remembers losses and rates."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.steps.append((loss.item(), self.optimizer.param_groups[0]["lr"]))
