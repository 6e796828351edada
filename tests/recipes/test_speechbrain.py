"""SpeechBrain's own scripts with our files, and with single lines of this package.

The scripts' Brain is that of tests/recipes/stock.py; with SPEECHBRAIN_RECIPES, SpeechBrain's
sources or the folder recipes in them, the scripts themselves are run.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import soundfile
import speechbrain
import torch
from hyperpyyaml import load_hyperpyyaml, resolve_references
from speechbrain.dataio import audio_io
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.utils.distributed import run_on_main
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from speechbrain_rev.data import SpeakerAugment
from speechbrain_rev.hparams import resolve
from speechbrain_rev.inference import SpeakerEmbedder, export_run
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.classifier import AAMSoftmax
from speechbrain_rev.lobes.schedules import SpeakerSchedule
from speechbrain_rev.optim import AdamW
from speechbrain_rev.planner import Plan
from speechbrain_rev.scoring import cosine_trials, read_scores
from tests.corpus import write_corpus, write_noise, write_rirs
from tests.recipes.stock import (
    KEYS,
    SPEAKERS,
    assert_embeds_as,
    blocks,
    documented_lines,
    fit,
    in_small,
    write_experiment,
    write_labels,
    write_shape,
)
from tests.run_folders import TINY, speech_like, write_audio, write_finished_run

HPARAMS = Path(__file__).parents[2] / "hparams"
VERIFICATION, TRAINING = (
    HPARAMS / "speechbrain" / f"{name}.yaml" for name in ("verification", "training")
)
RECIPES = os.environ.get("SPEECHBRAIN_RECIPES")
needs_recipes = pytest.mark.skipif(
    not RECIPES, reason="SPEECHBRAIN_RECIPES does not name SpeechBrain's recipes folder"
)
ALL_RECIPES = Path(RECIPES or "")
if (ALL_RECIPES / "recipes").is_dir():
    ALL_RECIPES /= "recipes"
SPEAKER_REC = ALL_RECIPES / "VoxCeleb" / "SpeakerRec"
VERIFICATION_SCRIPT = SPEAKER_REC / "speaker_verification_cosine.py"
TRAINING_SCRIPT = SPEAKER_REC / "train_speaker_embeddings.py"


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch):
    """Restore what seed_everything leaves; one thread: sums have one order."""
    for name in ("SB_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def overrides_of(settings):
    """What SpeechBrain makes of settings on the command line."""
    options = [f"--{name}={value}" for name, value in settings.items()]
    return speechbrain.parse_arguments(["file", *options])[2]


def load_file(file, **settings):
    """Read a file with settings as the scripts do."""
    with file.open(encoding="utf-8") as stream:
        return load_hyperpyyaml(stream, overrides_of(settings))


def load(path, folder, *arguments):
    """Read a file and a command line as the script does, and download noise after that."""
    folders = [f"--data_folder={folder / 'data'}", f"--output_folder={folder / 'run'}"]
    file, run_opts, overrides = speechbrain.parse_arguments(
        [str(path), *arguments, *folders, "--device=cpu", "--noprogressbar"]
    )
    with open(file, encoding="utf-8") as stream:
        hparams = load_hyperpyyaml(stream, overrides)
    write_noise(folder / "data/noise")
    write_rirs(folder / "data/rir")
    return hparams, run_opts


#: SpeechBrain 1.1 moved what its verification script calls by the old name.
RUN = """
import os, runpy, sys
import speechbrain
if not hasattr(speechbrain.core, "parse_arguments"):
    speechbrain.core.parse_arguments = speechbrain.parse_arguments
sys.path.insert(0, os.path.dirname(sys.argv[1]))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def run_script(script, file, **settings):
    """Run a script on a file, with settings on the command line."""
    options = [f"--{name}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(script), str(file), "--device=cpu", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=settings["output_folder"].parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def states(brain):
    """All numbers that training leaves: weights, statistics, optimizer states."""
    modules = brain.modules.state_dict()
    numbers = {f"modules.{name}": value for name, value in modules.items()}
    for index, state in enumerate(brain.optimizer.state.values()):
        numbers |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    return numbers


def dtypes_of(brain):
    return {getattr(value, "dtype", None) for value in states(brain).values()}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def assert_embeds(brain, wav, run, tmp_path, *, speeds=None):
    """A run and the model exported from it embed as the trained modules do."""
    embedder = SpeakerEmbedder.from_run(run, device="cpu")
    assert_embeds_as(brain, wav, embedder.embed(wav, sample_rate=16000))
    missing = export_run(run, tmp_path / "model", speeds=speeds)
    embedder = SpeakerEmbedder.from_hparams(tmp_path / "model", device="cpu")
    assert_embeds_as(brain, wav, embedder.embed(wav, sample_rate=16000))
    return missing


SMALL = {
    "widths": [8, 8, 8, 8],
    "blocks": [1, 1, 1, 1],
    # Large enough for the linear layer's states to be 8-bit.
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


def write_resolved(folder, arch="revnet57", **changed):
    """Write what `speechbrain-rev resolve` prints of a file, in small."""
    path = folder / "resolved.yaml"
    settings = {**SMALL, "data_folder": "nowhere", "output_folder": "out", **changed}
    path.write_text(resolve(HPARAMS / f"{arch}.yaml", settings), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def load_resolved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    run = folder / "run"
    file = write_resolved(folder, "df_revnet89", output_folder=str(run))
    return lambda: load_hyperpyyaml(file.read_text())


class TestResolvedFile:
    """A resolved file serves train_speaker_embeddings.py, unmodified."""

    def test_preparation_gets_what_it_asks_for(self, load_resolved):
        hparams = load_resolved()
        save = hparams["save_folder"]
        assert save == f"{hparams['output_folder']}/save"
        # voxceleb_prepare.py writes files of these names, and of no others.
        assert hparams["train_annotation"] == f"{save}/train.csv"
        assert hparams["valid_annotation"] == f"{save}/dev.csv"
        assert Path(hparams["verification_file"]).name == "veri_test2.txt"
        assert hparams["split_ratio"] == [90, 10]
        assert (hparams["skip_prep"], hparams["random_chunk"]) == (False, True)
        for name in ("prepare_noise_data", "prepare_rir_data"):
            run_on_main(hparams[name])
        # The script adds these by itself.
        assert "use_tacotron2_mel_spec" not in hparams
        assert "collate_fn" not in hparams["dataloader_options"]

    def test_rate_and_margin_follow_the_schedule_at_every_step(self, load_resolved):
        hparams = load_resolved()
        brain = fit(hparams)
        _, rates, margins = zip(*brain.steps, strict=True)
        schedule = hparams["lr_annealing"]
        assert rates == tuple(schedule.learning_rate(step) for step in range(4))
        assert len(set(rates)) > 2
        assert margins == tuple(schedule.margin_at(step) for step in range(1, 5))
        assert margins[0] < margins[-1] == hparams["margin"]
        assert torch.uint8 in dtypes_of(brain)

    @needs_recipes
    def test_every_key_that_the_script_reads_is_there(self, load_resolved):
        source, hparams = TRAINING_SCRIPT.read_text(), load_resolved()
        optional = set(re.findall(r"hasattr\(\s*self\.hparams, \"(\w+)\"", source))
        keys = set(re.findall(r"hparams\[\"(\w+)\"\]|self\.hparams\.(\w+)", source))
        wanted = {name for pair in keys for name in pair if name} - optional
        assert len(wanted) > 20
        assert wanted <= set(hparams)
        modules = set(re.findall(r"self\.modules\.(\w+)", source))
        assert modules <= set(hparams["modules"])


#: As the checkpointer keeps all that a resumed run needs.
RECOVERABLES = blocks("yaml")[2].rstrip("\n")
RESNET, XVECTORS = "train_resnet", "train_x_vectors"


def lines_for(name, *keys):
    """The document's lines for keys of a shape, and what else they need there."""
    lines = documented_lines(name)
    if name == XVECTORS and "compute_cost" in keys:
        keys = (*keys, "classifier")
    return [lines[key] for key in keys]


def all_lines(name):
    return [*lines_for(name, *KEYS), RECOVERABLES]


def ours_in(hparams):
    """The keys whose values are of this package."""
    optimizer = hparams["opt_class"]
    kinds = {
        "embedding_model": isinstance(hparams["embedding_model"], SpeakerEncoder),
        "opt_class": getattr(optimizer, "func", optimizer) is AdamW,
        "wav_augment": isinstance(hparams["wav_augment"], SpeakerAugment),
        "lr_annealing": isinstance(hparams["lr_annealing"], SpeakerSchedule),
        "compute_cost": isinstance(hparams["compute_cost"], AAMSoftmax),
    }
    return [key for key in KEYS if kinds[key]]


def interrupted_and_not(path, tmp_path, last_step, *arguments):
    """Train twice, once interrupted at a step; the Brain of each that is finished."""
    arguments = ["--ckpt_interval_steps=1", *arguments]
    hparams, run_opts = load(path, tmp_path / "whole", *arguments)
    whole = fit(hparams, run_opts=run_opts.as_dict())
    hparams, run_opts = load(path, tmp_path / "parts", *arguments)
    with pytest.raises(KeyboardInterrupt):
        fit(hparams, last_step=last_step, run_opts=run_opts.as_dict())
    hparams, run_opts = load(path, tmp_path / "parts", *arguments)
    return whole, fit(hparams, run_opts=run_opts.as_dict())


class TestLines:
    """The lines of docs/migrating.md in files of SpeechBrain's recipe."""

    @pytest.mark.parametrize(
        "key",
        [
            KEYS[0],
            *(pytest.param(k, marks=pytest.mark.slow) for k in (None, *KEYS[1:])),
        ],
    )
    def test_each_alone_trains(self, tmp_path, key):
        lines = lines_for(XVECTORS, key) if key else []
        hparams, _ = load(write_shape(tmp_path, XVECTORS, lines), tmp_path)
        assert ours_in(hparams) == [key] * bool(key)
        weights = dict(hparams["modules"]["classifier"].named_parameters())
        before = {name: value.clone() for name, value in weights.items()}
        brain = fit(hparams)
        losses, rates, _ = zip(*brain.steps, strict=True)
        assert len(losses) == 4
        assert torch.tensor(losses).isfinite().all()
        if key == "lr_annealing":
            schedule = hparams["lr_annealing"]
            assert rates == tuple(schedule.learning_rate(step) for step in range(4))
        assert (torch.uint8 in dtypes_of(brain)) == (key == "opt_class")
        assert any(not torch.equal(before[name], weights[name]) for name in before)
        assert list(Path(hparams["save_folder"]).glob("CKPT*"))

    @pytest.mark.parametrize(
        ("name", "last_step", "precision"),
        [
            (RESNET, 3, "bf16"),
            pytest.param(XVECTORS, 2, "fp32", marks=pytest.mark.slow),
            pytest.param("resolved", 2, "bf16", marks=pytest.mark.slow),
        ],
    )
    def test_an_interrupted_run_has_the_bits_of_one_that_was_not(
        self, tmp_path, name, last_step, precision
    ):
        """A checkpoint of each step is written after it; an interruption comes before."""
        if name == "resolved":
            folders = {"noise_folder": str(write_noise(tmp_path / "noise"))}
            path = write_resolved(tmp_path, **folders)
        else:
            path = write_shape(tmp_path, name, all_lines(name))
        given = f"--precision={precision}"
        whole, parts = interrupted_and_not(path, tmp_path, last_step, given)
        assert whole.precision == precision
        streams = torch.bfloat16 if precision == "bf16" else torch.float32
        assert whole.dtypes == {streams}
        assert {value.dtype for value in whole.modules.parameters()} == {torch.float32}
        assert parts.steps == whole.steps[last_step - 1 :]
        assert_same_bits(states(whole), states(parts))
        assert torch.uint8 in dtypes_of(parts)
        assert parts.hparams.lr_annealing.step == 4

    def test_a_schedule_that_is_not_among_the_recoverables_warns(self, tmp_path):
        path = write_shape(tmp_path, XVECTORS, lines_for(XVECTORS, "lr_annealing"))
        with pytest.warns(UserWarning, match="among the checkpointer's recoverables"):
            interrupted_and_not(path, tmp_path, 3)

    def test_a_run_does_not_go_on_with_another_line_than_it_began_with(self, tmp_path):
        fit(load(write_shape(tmp_path, RESNET, []), tmp_path)[0])
        for key, words in (
            ("lr_annealing", r"position of a SpeakerSchedule.*output_folder"),
            ("opt_class", "adamw at 8 bit.*Resume"),
        ):
            lines = [*lines_for(RESNET, key), "number_of_epochs: 3"]
            path = write_shape(tmp_path, RESNET, lines)
            with pytest.raises(ValueError, match=words):
                fit(load(path, tmp_path)[0])

    def test_a_trained_encoder_embeds_and_is_exported(self, tmp_path):
        path = write_shape(tmp_path, RESNET, lines_for(RESNET, "embedding_model"))
        hparams, _ = load(path, tmp_path)
        run = Path(hparams["output_folder"])
        folders = {"data_folder": "nowhere", "output_folder": str(run)}
        write_experiment(run, path, folders)
        brain = fit(hparams)
        write_labels(run)
        # All but what this script does not make.
        missing = assert_embeds(brain, torch.randn(8000), run, tmp_path)
        names = [words.partition(",")[0] for words in missing]
        assert names == ["cohort.safetensors", "thresholds.json"]
        weight = torch.load(tmp_path / "model/classifier.ckpt", weights_only=True)
        assert torch.equal(weight["weight"], hparams["classifier"].weight)

    def test_a_margin_rises_with_the_loss_that_the_schedule_is_given(self, tmp_path):
        line = in_small(blocks("yaml")[1].splitlines()[-1], RESNET)
        lines = [*lines_for(RESNET, "compute_cost"), line]
        hparams, _ = load(write_shape(tmp_path, RESNET, lines), tmp_path)
        assert hparams["lr_annealing"].loss is hparams["compute_cost"]
        margins = [margin for *_, margin in fit(hparams).steps]
        assert margins[0] < margins[-1] == 0.2


def commands(file):
    """The document's command lines for a file, as arguments behind data_folder."""
    text = "\n".join(block for block in blocks("") if "train_speaker_emb" in block)
    command_lines = [
        shlex.split(command)
        for command in re.findall(r"^python .*", text.replace("\\\n", ""), re.MULTILINE)
    ]
    assert len(command_lines) == 6
    assert all(
        c[3] == "--data_folder=/data/VoxCeleb" for c in command_lines if c[2] == file
    )
    return [command[4:] for command in command_lines if command[2] == file]


class TestCommandLine:
    @pytest.mark.parametrize("name", ["resolved.yaml", "mine.yaml"])
    def test_keys_are_options_and_entries_of_an_object_stand_in_braces(
        self, tmp_path, name
    ):
        (arguments,) = commands(name)
        lines = lines_for(RESNET, "embedding_model", "opt_class")
        path = write_shape(tmp_path, RESNET, lines)
        if name == "resolved.yaml":
            path = write_resolved(tmp_path, "df_revnet89")
        hparams, _ = load(path, tmp_path, *arguments)
        encoder = hparams["embedding_model"]
        assert (encoder.architecture.name, encoder.n_mels) == ("revnet46", 64)
        optimizer = hparams["opt_class"](encoder.parameters())
        assert isinstance(optimizer, AdamW)
        assert isinstance(optimizer, torch.optim.AdamW)  # 32 bits

    def test_entries_are_merged_into_what_the_file_has(self, tmp_path):
        path = write_shape(tmp_path, RESNET, [])
        hparams, _ = load(path, tmp_path, "--classifier={input_size: 64}")
        assert hparams["classifier"].weight.shape == (4, 64)
        line = documented_lines(RESNET)["embedding_model"].partition(": ")[2]
        with pytest.raises(TypeError, match=r"ResNet.*argument 'name'"):
            load(path, tmp_path, f"--embedding_model={line}")

    @pytest.mark.parametrize(
        "arguments", commands("hparams/train_resnet.yaml"), ids=len
    )
    def test_each_command_of_the_document_takes_the_place_of_keys(
        self, tmp_path, arguments
    ):
        given = [argument[2:].partition("=")[0] for argument in arguments]
        path = write_shape(tmp_path, RESNET, ["n_mels: 80"])
        hparams, _ = load(path, tmp_path, *arguments)
        assert ours_in(hparams) == given
        assert hparams["modules"]["embedding_model"] is hparams["embedding_model"]

    def test_a_line_in_a_list_trains_as_the_line_in_the_file_does(self, tmp_path):
        # Of x-vectors the classifier that goes with the loss, too.
        lines = lines_for(XVECTORS, *KEYS)
        written, _ = load(write_shape(tmp_path, XVECTORS, lines), tmp_path / "written")
        pairs = [line.split(": ", 1) for line in lines]
        arguments = [f"--{key}=!apply:typing.cast [any, {v}]" for key, v in pairs]
        path = write_shape(tmp_path, XVECTORS, [])
        given, _ = load(path, tmp_path / "given", *arguments)
        one, other = fit(written), fit(given)
        assert one.steps == other.steps
        assert_same_bits(states(one), states(other))
        # The copy that create_experiment_directory writes is complete.
        folders = [f"--{name}_folder={tmp_path}" for name in ("data", "output")]
        command = [str(path), *folders, *arguments]
        overrides = speechbrain.parse_arguments(command)[2]
        copy = resolve_references(path.read_text(), overrides).read()
        assert ours_in(load_hyperpyyaml(copy)) == [*KEYS]
        assert "!ref" not in copy


MODEL = {name: TINY[name] for name in ("arch", "widths", "blocks", "embedding_dim")}
EMBEDDERS = {
    "exported": SpeakerEmbedder.from_hparams,
    "run": SpeakerEmbedder.from_run,
}
#: What the verification script reads, and what it reads if it is there.
READ = {
    "data_folder", "output_folder", "save_folder", "verification_file", "split_ratio",
    "skip_prep", "train_data", "enrol_data", "test_data", "n_train_snts",
    "train_dataloader_opts", "enrol_dataloader_opts", "test_dataloader_opts",
    "compute_features", "mean_var_norm", "embedding_model", "pretrainer",
}  # fmt: skip
OPTIONAL = {"score_norm", "cohort_size", "voxceleb_source"}


def built(source, model=MODEL):
    """What verification.yaml builds, with the weights, as the script gets them."""
    params = load_file(VERIFICATION, data_folder="d", pretrain_path=source, **model)
    run_on_main(params["pretrainer"].collect_files)
    params["pretrainer"].load_collected()
    params["embedding_model"].eval()
    return params


@torch.no_grad()
def embed_built(modules, wavs, lens=None):
    """Embed waveforms, [batch, samples], as the scripts do: [batch, embedding_dim]."""
    lens = torch.ones(len(wavs)) if lens is None else lens
    feats = modules["mean_var_norm"](modules["compute_features"](wavs), lens)
    return modules["embedding_model"](feats, lens).squeeze(1).numpy()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a finished run and the model that was exported from it."""
    folder = tmp_path_factory.mktemp("models")
    write_finished_run(folder / "run")
    export_run(folder / "run", folder / "exported")
    return folder


class TestVerification:
    def test_every_key_that_the_script_reads_is_there(self):
        given = {"data_folder": "d", "pretrain_path": "m", **MODEL}
        params = load_file(VERIFICATION, **given)
        assert params.keys() >= READ | {"score_norm", "cohort_size"}
        # voxceleb_prepare.py writes lists of these names, and of no others.
        for side in ("train", "enrol", "test"):
            assert params[f"{side}_data"] == f"{params['save_folder']}/{side}.csv"
        if RECIPES:
            source = VERIFICATION_SCRIPT.read_text()
            assert set(re.findall(r"\"(\w+)\" in params", source)) == OPTIONAL
            read = set(re.findall(r"params\[\"(\w+)\"\]", source))
            assert read - OPTIONAL == READ

    @pytest.mark.parametrize("source", EMBEDDERS)
    def test_utterances_have_the_embeddings_that_the_package_gives(
        self, source, models, tmp_path
    ):
        params = built(models / source)
        files = [
            write_audio(tmp_path / f"{n}.wav", speech_like(1 + 0.37 * n, seed=n))
            for n in range(4)
        ]
        expected = EMBEDDERS[source](models / source, device="cpu").embed(files)
        items = [{"id": f.stem, "sig": audio_io.load(f)[0][0]} for f in files]
        options = {**params["test_dataloader_opts"], "collate_fn": PaddedBatch}
        batches = DataLoader(items, **options)
        embeddings = np.concatenate(
            [embed_built(params, *batch.sig) for batch in batches]
        )
        np.testing.assert_allclose(embeddings, expected, atol=1e-6)

    def test_a_model_of_other_values_is_refused_in_one_line(self, models):
        sizes = {k: v for k, v in MODEL.items() if k not in ("widths", "blocks")}
        for wrong, words in (
            ({**MODEL, "embedding_dim": 8}, "what hyperparams.yaml"),
            (sizes, f"blocks {MODEL['blocks']} and embedding_dim 16"),
            (sizes, "Give --arch, --widths, --blocks"),
        ):
            with pytest.raises(ValueError, match="does not fit") as error:
                built(models / "exported", wrong)
            assert words in str(error.value)
            assert "\n" not in str(error.value)

    @needs_recipes
    def test_the_script_scores_a_model_with_it(self, models, tmp_path):
        # Pieces of 3 s are the cohort.
        data = write_corpus(tmp_path / "data", seconds=4.5)
        paths = sorted((data / "wav").rglob("*.wav"))[-8:]
        names = [p.relative_to(data / "wav").with_suffix("").as_posix() for p in paths]
        pairs = [(a, b) for a in names for b in names if a < b]
        lines = [f"{int(a[:7] == b[:7])} {a}.wav {b}.wav\n" for a, b in pairs]
        (tmp_path / "trials.txt").write_text("".join(lines))
        text = VERIFICATION.read_text().replace("score_norm: s-norm\n", "")
        (tmp_path / "file.yaml").write_text(text)
        run_script(
            VERIFICATION_SCRIPT,
            tmp_path / "file.yaml",
            data_folder=data,
            pretrain_path=models / "run",
            verification_file=tmp_path / "trials.txt",
            output_folder=tmp_path / "out",
            **MODEL,
        )
        trials, scores = read_scores(tmp_path / "out/scores.txt")
        assert list(zip(trials.enrol, trials.test, strict=True)) == pairs
        embedder = SpeakerEmbedder.from_run(models / "run", device="cpu")
        expected = cosine_trials(embedder.embed(paths), *trials.rows(names))
        # The file has six digits.
        np.testing.assert_allclose(scores, expected, atol=2e-6)


SHORT = {
    "widths": [8, 8, 8, 8],
    "blocks": [1, 1, 1, 1],
    "n_mels": 24,
    # Large enough for the last layer's states to be 8-bit.
    "embedding_dim": 96,
    "number_of_epochs": 2,
    "batch_size": 4,
    "num_workers": 0,
    "step_size": 6,
    "out_n_neurons": SPEAKERS,
    "sentence_len": 0.3,
}


@pytest.fixture
def settings(tmp_path):
    """Settings of training.yaml in small, with archives instead of downloads."""
    folders = write_noise(tmp_path / "NOISE"), write_rirs(tmp_path / "RIR")
    archives = {
        f"{folder.name}_DATASET_URL": shutil.make_archive(folder, "zip", folder)
        for folder in folders
    }
    places = {"data_folder": tmp_path / "data", "output_folder": tmp_path / "run"}
    return {**places, **SHORT, **archives}


def test_training_yaml_trains_our_encoder_with_8_bits(settings, tmp_path):
    hparams, run = load_file(TRAINING, **settings), tmp_path / "run"
    run_on_main(hparams["prepare_noise_data"])
    run_on_main(hparams["prepare_rir_data"])
    assert isinstance(hparams["modules"]["embedding_model"], SpeakerEncoder)
    assert len(hparams["wav_augment"](torch.randn(2, 4800), torch.ones(2))[0]) == 10
    brain = fit(hparams)
    losses, rates, _ = zip(*brain.steps, strict=True)
    assert len(losses) == 4
    assert torch.tensor(losses).isfinite().all()
    # It rises to lr in step_size steps.
    assert list(rates) == sorted(rates)
    assert hparams["lr"] / 2 < rates[-1] < hparams["lr"]
    assert torch.uint8 in dtypes_of(brain)
    wave = speech_like()
    embedding = SpeakerEmbedder.from_run(run, device="cpu").embed(wave, 16000)
    # verification.yaml takes the checkpoint as it is.
    (checkpoint,) = (run / "save").glob("CKPT*")
    sizes = ("widths", "blocks", "n_mels", "embedding_dim")
    model = {"arch": "df_revnet89", **{name: SHORT[name] for name in sizes}}
    embeddings = embed_built(built(checkpoint, model), torch.from_numpy(wave)[None])
    np.testing.assert_allclose(embeddings[0], embedding, atol=1e-6)


@needs_recipes
@pytest.mark.parametrize("arch", ["df_revnet89", "revnet57", None])
def test_the_script_trains_with_each_file(arch, settings, tmp_path):
    data = write_corpus(tmp_path / "data", speakers=SPEAKERS + 1, seconds=2.4)
    trial = f"1 id{SPEAKERS:05}/s00/00000.wav id{SPEAKERS:05}/s01/00000.wav\n"
    (tmp_path / "trials.txt").write_text(trial)
    given = {"data_folder": data, "output_folder": tmp_path / "run"}
    file = TRAINING
    if arch is None:
        given = settings
    else:
        noise = str(write_noise(tmp_path / "noise"))
        file = write_resolved(tmp_path, arch, noise_folder=noise)
    trials = tmp_path / "trials.txt"
    run_script(TRAINING_SCRIPT, file, verification_file=trials, **given)
    log = (tmp_path / "run/train_log.txt").read_text().splitlines()
    assert [line.split(",")[0] for line in log] == ["epoch: 1", "epoch: 2"]
    embedder = SpeakerEmbedder.from_run(tmp_path / "run", device="cpu")
    embeddings = embedder.embed([data / "wav/id00000/s00/00000.wav"])
    assert len(embeddings) == 1


#: One encoder of each family, and of each type of reversible ones.
ENCODERS = [
    "df_revnet66",
    *(
        pytest.param(arch, marks=pytest.mark.slow)
        for arch in ("resnet34", "df_resnet56", "revnet46", "revnet57", "df_revnet89")
    ),
]


@pytest.mark.parametrize("arch", ENCODERS)
def test_a_run_of_speechbrains_script_embeds_and_exports_here(arch, tmp_path):
    run, batch = tmp_path / "run", torch.from_numpy(speech_like(1.3)).unsqueeze(0)
    given = {"number_of_epochs": 1, "warmup_epochs": 0, "margin_start_epoch": 0}
    given |= {"output_folder": str(run), "margin_end_epoch": 1}
    file = write_resolved(tmp_path, arch, **given)
    write_experiment(run, file, {})
    hparams = load_hyperpyyaml(file.read_text())
    brain = fit(hparams)
    write_labels(run)
    assert_embeds(brain, batch[0], run, tmp_path, speeds=3)
    weight = torch.load(tmp_path / "model/classifier.ckpt", weights_only=True)
    # The speed recorded, of three.
    assert torch.equal(weight["weight"], hparams["classifier"].weight[:SPEAKERS])


#: Random numbers that the scripts draw without a seed have one here. What the script holds in
#: tensors at most is printed, if asked for.
SEEDED = """
import os, random, runpy, sys
import numpy as np
from speechbrain_rev.planner.memory import live_bytes_peak

measured = sys.argv.pop(1) == "measured"
random.seed(0)
np.random.seed(0)
run = lambda: runpy.run_path(sys.argv.pop(1), run_name="__main__")
print("peak", live_bytes_peak(run) if measured else run() and 0)
"""


class Recipe(NamedTuple):
    """One of SpeechBrain's, in small, and the part of its memory that is its budget."""

    script: Path
    file: str
    small: dict
    share: float
    log_line: str = r"Memory plan for a batch of .*recompute"

    def run(self, epochs, folder, *, measured=False, budget_bytes=None, **settings):
        """Train up to so many epochs, with two lines more if there is a budget."""
        script, file = self.script, self.script.parent / "hparams" / self.file
        if budget_bytes is not None:
            script, file = with_two_lines(script, file, budget_bytes, folder.parent)
        given = {**settings, **self.small, "number_of_epochs": epochs}
        options = [f"--{name}={value}" for name, value in given.items()]
        command = [script, file, "--device=cpu", f"--output_folder={folder}", *options]
        paths = [str(self.script.parent), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, "-c", SEEDED, "measured" if measured else "", *command],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder.parent,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(paths),
            },
        )
        assert done.returncode == 0, (
            done.stderr[-3000:],
            (folder / "log.txt").read_text()[-3000:],
        )
        return int(done.stdout.split("peak ")[-1])


def with_two_lines(script, file, budget_bytes, folder):
    """Write a recipe's script and file anew, with a line of each changed or added."""
    line = re.compile(r"^class (\w+)\((sb(?:\.core)?\.Brain)\):$", re.MULTILINE)
    ours = (
        "from speechbrain_rev.training import MemoryBudget\n"
        r"class \1(MemoryBudget, \2):"
    )
    text, count = line.subn(ours, script.read_text(encoding="utf-8"))
    assert count == 1, (
        f"{script} has {count} lines as class SpeakerBrain(sb.core.Brain):"
    )
    own_script, own_file = folder / script.name, folder / f"with_budget_{file.name}"
    own_script.write_text(text, encoding="utf-8")
    yaml = file.read_text(encoding="utf-8")
    own_file.write_text(f"{yaml}\nmemory_budget: {budget_bytes}B\n", encoding="utf-8")
    return own_script, own_file


SMALL_SPEAKERS = {
    "batch_size": 8,
    "num_workers": 0,
    "out_n_neurons": SPEAKERS,
}
SPEECH_RECOGNITION = ALL_RECIPES / "LibriSpeech" / "ASR" / "CTC"
UNCHANGED = {
    # Utterances as long as the recipe's, in which weights and features are a small part.
    "ecapa": Recipe(
        TRAINING_SCRIPT,
        "train_ecapa_tdnn.yaml",
        {
            **SMALL_SPEAKERS,
            "n_mels": 24,
            "embedding_model": "{channels: [64, 64, 64, 64, 192], attention_channels: 8}",
        },
        0.5,
    ),
    "resnet": Recipe(
        TRAINING_SCRIPT,
        "train_resnet.yaml",
        SMALL_SPEAKERS
        | {
            "embedding_model": "{channels: [8, 8, 16, 16], block_sizes: [2, 2, 2, 1]}",
            "sentence_len": 1.0,
        },
        0.6,
    ),
    "x-vectors": Recipe(
        TRAINING_SCRIPT,
        "train_x_vectors.yaml",
        SMALL_SPEAKERS
        | {
            "embedding_model": "{tdnn_channels: [64, 64, 64, 64, 192]}",
            "emb_dim": 64,
            "sentence_len": 1.0,
        },
        1.1,
        "Everything is stored, for no block that is repeated was found",
    ),
    "conformer": Recipe(
        SPEECH_RECOGNITION / "train.py",
        "conformer_large.yaml",
        {
            "skip_prep": True,
            "dynamic_batching": False,
            # The largest batch is met in the first epoch, and planned there.
            "sorting": "descending",
            "speed_perturb": "{speeds: [100]}",
            "batch_size": 4,
            "num_workers": 0,
            "num_encoder_layers": 4,
            "d_model": 64,
            "d_ffn": 128,
        },
        0.75,
    ),
}


@pytest.fixture
def corpora(tmp_path):
    """What the recipes read, each by the names of its settings."""
    folders = write_noise(tmp_path / "NOISE"), write_rirs(tmp_path / "RIR")
    data = write_corpus(tmp_path / "data", speakers=SPEAKERS + 1, seconds=4.5)
    trial = f"1 id{SPEAKERS:05}/s00/00000.wav id{SPEAKERS:05}/s01/00000.wav\n"
    (tmp_path / "trials.txt").write_text(trial)
    speakers = {
        "data_folder": data,
        "verification_file": tmp_path / "trials.txt",
        "noise_annotation": tmp_path / "noise.csv",
        "rir_annotation": tmp_path / "rir.csv",
        **{
            f"{folder.name}_DATASET_URL": shutil.make_archive(folder, "zip", folder)
            for folder in folders
        },
    }
    words = "the quick brown fox jumps over a lazy dog's house"
    files = sorted((data / "wav").rglob("*.wav"))
    rows = [
        f"u{n},{soundfile.info(file).duration},{file},{words}\n"
        for n, file in enumerate(files)
    ]
    csv = tmp_path / "words.csv"
    csv.write_text("".join(["ID,duration,wav,wrd\n", *rows]))
    recognition = {"data_folder": data, "train_csv": csv, "valid_csv": csv}
    recognition["test_csv"] = f"[{csv}]"
    return {TRAINING_SCRIPT: speakers, SPEECH_RECOGNITION / "train.py": recognition}


def kept_in(run):
    """All numbers of a run's last checkpoint, and its log of epochs."""
    *_, folder = sorted((run / "save").glob("CKPT*"))
    files = sorted(folder.glob("*.ckpt"))
    values = {
        f"{file.name} {n}": value
        for file in files
        if zipfile.is_zipfile(file)
        for n, value in enumerate(tree_leaves(torch.load(file, weights_only=True)))
    }
    assert values
    return {"log": (run / "train_log.txt").read_text(), **values}


@needs_recipes
@pytest.mark.slow
@pytest.mark.parametrize("name", UNCHANGED)
def test_a_recipe_trains_within_a_part_of_its_memory_by_two_lines(
    name, corpora, tmp_path
):
    recipe = UNCHANGED[name]
    settings = corpora[recipe.script]
    plain, planned = tmp_path / "plain", tmp_path / "planned"
    recipe.run(1, plain, **settings)
    # A run that goes on makes no plan, whose steps would be measured, too.
    stored_bytes = recipe.run(2, plain, measured=True, **settings)
    fixed_bytes = sum(
        value.nbytes * (1 if name.startswith("optimizer") else 2)  # and its gradient
        for name, value in kept_in(plain).items()
        if isinstance(value, torch.Tensor)
    )
    budget_bytes = fixed_bytes + int(recipe.share * (stored_bytes - fixed_bytes))
    recipe.run(1, planned, budget_bytes=budget_bytes, **settings)
    log = (planned / "log.txt").read_text()
    peak_bytes = recipe.run(
        2, planned, measured=True, budget_bytes=budget_bytes, **settings
    )
    assert_same_bits(kept_in(plain), kept_in(planned))
    assert re.search(recipe.log_line, log)
    both = (planned / "log.txt").read_text()
    assert both.count("Memory plan for") == log.count("Memory plan for")
    plan = Plan.load(planned / "plan.json")
    assert not plan.modes or plan.measured_bytes <= recipe.share * int(
        plan.about["stored_bytes"]
    )
    assert peak_bytes <= budget_bytes
