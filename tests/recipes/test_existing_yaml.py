"""Lines of this package in YAMLs of SpeechBrain's recipe, run by a Brain like its script's."""

import functools
import re
import shlex
from pathlib import Path

import pytest
import speechbrain
import torch
from hyperpyyaml import load_hyperpyyaml, resolve_references

from speechbrain_rev.data import SpeakerAugment
from speechbrain_rev.hparams import compose, resolve
from speechbrain_rev.inference import SpeakerEmbedder, export_run
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.classifier import AAMSoftmax
from speechbrain_rev.lobes.schedules import SpeakerSchedule
from speechbrain_rev.optim import AdamW
from tests.corpus import write_noise, write_rooms
from tests.recipes.stock import (
    KEYS,
    assert_embeds_as,
    blocks,
    documented_lines,
    fit,
    in_small,
    write_experiment,
    write_labels,
    write_shape,
)

HPARAMS = Path(__file__).parents[2] / "hparams"
#: As the checkpointer keeps all that a resumed run needs.
RECOVERABLES = blocks("yaml")[2].rstrip("\n")


@pytest.fixture(autouse=True)
def one_thread():
    # The order of sums must not depend on how many cores are idle.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(path, folder, *arguments):
    """Read a file and a command line as the script does, and download noise after that."""
    folders = [f"--data_folder={folder / 'data'}", f"--output_folder={folder / 'run'}"]
    file, run_opts, overrides = speechbrain.parse_arguments(
        [str(path), *arguments, *folders, "--device=cpu", "--noprogressbar"]
    )
    with open(file, encoding="utf-8") as stream:
        hparams = load_hyperpyyaml(stream, overrides)
    write_noise(folder / "data" / "noise")
    write_rooms(folder / "data" / "rir")
    return hparams, run_opts


def lines_for(name, *keys):
    """The document's lines for keys of a shape, and what else they need there."""
    lines = documented_lines(name)
    if name == "train_x_vectors" and "compute_cost" in keys:
        keys = (*keys, "classifier")
    return [lines[key] for key in keys]


def all_lines(name):
    return [*lines_for(name, *KEYS), RECOVERABLES]


def is_ours(hparams, key):
    value = hparams[key]
    return {
        "embedding_model": lambda: isinstance(value, SpeakerEncoder),
        "opt_class": lambda: getattr(value, "func", value) is AdamW,
        "wav_augment": lambda: isinstance(value, SpeakerAugment),
        "lr_annealing": lambda: isinstance(value, SpeakerSchedule),
        "compute_cost": lambda: isinstance(value, AAMSoftmax),
    }[key]()


def slowly(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def states(brain):
    """All numbers that a training leaves: weights, statistics, optimizer states."""
    modules = brain.modules.state_dict()
    found = {f"modules.{name}": value for name, value in modules.items()}
    for index, state in enumerate(brain.optimizer.state.values()):
        found |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    return found


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


#: The one whose keys differ most from what takes their place, and the others.
ALONE = ["train_x_vectors", *slowly("train_resnet", "train_ecapa_tdnn")]
TOGETHER = ["train_resnet", *slowly("train_x_vectors", "train_ecapa_tdnn")]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("key", [None, *KEYS])
def test_each_line_alone_trains_in_each_file(tmp_path, name, key):
    lines = lines_for(name, key) if key else []
    hparams, _ = load(write_shape(tmp_path, name, lines), tmp_path)
    assert [k for k in KEYS if is_ours(hparams, k)] == [key] * bool(key)
    before = {
        k: v.clone() for k, v in hparams["modules"]["classifier"].named_parameters()
    }
    brain = fit(hparams)
    losses, rates, _ = zip(*brain.steps, strict=True)
    assert len(losses) == 4
    assert torch.tensor(losses).isfinite().all()
    if key == "lr_annealing":
        schedule = hparams["lr_annealing"]
        assert rates == tuple(schedule.learning_rate(step) for step in range(4))
    if key == "opt_class":
        assert torch.uint8 in {
            getattr(v, "dtype", None) for v in states(brain).values()
        }
    after = dict(hparams["modules"]["classifier"].named_parameters())
    assert any(not torch.equal(before[k], after[k]) for k in before)
    assert list(Path(hparams["save_folder"]).glob("CKPT*"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TOGETHER)
def test_all_lines_together_train_in_each_file(tmp_path, name, precision):
    path = write_shape(tmp_path, name, all_lines(name))
    hparams, run_opts = load(path, tmp_path, f"--precision={precision}")
    assert all(is_ours(hparams, key) for key in KEYS)
    brain = fit(hparams, run_opts=run_opts.as_dict())
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert brain.dtypes == {expected}
    assert {value.dtype for value in brain.modules.parameters()} == {torch.float32}
    assert torch.tensor([loss for loss, *_ in brain.steps]).isfinite().all()


def resolved(folder, arch="revnet57"):
    """Write what `speechbrain-rev resolve` prints of a file, in small."""
    small = {
        "widths": [8, 8, 8, 8],
        "blocks": [1, 1, 1, 1],
        "embedding_dim": 64,
        "n_mels": 24,
        "chunk_samples": 4640,
        "batch_size": 4,
        "number_of_epochs": 2,
        "warmup_epochs": 1.0,
        "num_workers": 0,
        "out_n_neurons": 12,
        "steps_per_epoch": 2,
        "margin_start_epoch": 1,
        "margin_end_epoch": 2,
        "noise_folder": str(write_noise(folder / "noise")),
        "rir_folder": str(write_rooms(folder / "rir")),
    }
    path = folder / "resolved.yaml"
    path.write_text(resolve(HPARAMS / f"{arch}.yaml", small), encoding="utf-8")
    return path


def interrupted_and_not(path, tmp_path, last_step, *arguments):
    """Train twice, once interrupted at a step; the Brain of each that comes to its end."""
    arguments = ["--ckpt_interval_steps=1", *arguments]
    hparams, run_opts = load(path, tmp_path / "whole", *arguments)
    whole = fit(hparams, run_opts=run_opts.as_dict())
    hparams, run_opts = load(path, tmp_path / "parts", *arguments)
    with pytest.raises(KeyboardInterrupt):
        fit(hparams, last_step=last_step, run_opts=run_opts.as_dict())
    hparams, run_opts = load(path, tmp_path / "parts", *arguments)
    return whole, fit(hparams, run_opts=run_opts.as_dict())


class TestResume:
    """A checkpoint of each step is written after it; an interruption comes before."""

    @pytest.mark.parametrize("precision", ["fp32", *slowly("bf16")])
    @pytest.mark.parametrize("last_step", [2, *slowly(3)])
    @pytest.mark.parametrize(
        "name", ["train_x_vectors", *slowly("train_resnet", "train_ecapa_tdnn")]
    )
    def test_an_interrupted_run_has_the_bits_of_one_that_was_not(
        self, tmp_path, name, last_step, precision
    ):
        path = write_shape(tmp_path, name, all_lines(name))
        whole, parts = interrupted_and_not(
            path, tmp_path, last_step, f"--precision={precision}"
        )
        assert parts.steps == whole.steps[last_step - 1 :]
        assert_same_bits(states(whole), states(parts))
        kept = {getattr(value, "dtype", None) for value in states(parts).values()}
        assert torch.uint8 in kept
        assert parts.hparams.lr_annealing.step == 4

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    def test_so_has_one_of_a_resolved_file(self, tmp_path, precision):
        whole, parts = interrupted_and_not(
            resolved(tmp_path), tmp_path, 2, f"--precision={precision}"
        )
        assert whole.precision == precision
        assert parts.steps == whole.steps[1:]
        assert_same_bits(states(whole), states(parts))

    def test_an_augmentation_that_is_not_kept_draws_again(self, tmp_path):
        # What the two names among the recoverables are for.
        name = "train_resnet"
        path = write_shape(tmp_path, name, lines_for(name, *KEYS))
        whole, parts = interrupted_and_not(path, tmp_path, 2)
        assert parts.steps[0] != whole.steps[1]

    def test_a_schedule_that_is_not_kept_is_told_of(self, tmp_path):
        name = "train_x_vectors"
        path = write_shape(tmp_path, name, lines_for(name, "lr_annealing"))
        with pytest.warns(UserWarning, match="among the checkpointer's recoverables"):
            interrupted_and_not(path, tmp_path, 3)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("lr_annealing", r"position of a SpeakerSchedule.*output_folder"),
        pytest.param("opt_class", "adamw at 8 bit.*Resume", marks=pytest.mark.slow),
        pytest.param("embedding_model", "state_dict", marks=pytest.mark.slow),
    ],
)
def test_a_run_does_not_go_on_with_another_line_than_it_began_with(tmp_path, key, told):
    name = "train_resnet"
    fit(load(write_shape(tmp_path, name, []), tmp_path)[0])
    path = write_shape(tmp_path, name, [*lines_for(name, key), "number_of_epochs: 3"])
    with pytest.raises((ValueError, RuntimeError), match=told):
        fit(load(path, tmp_path)[0])


def commands(file):
    """The document's command lines for a file, as the script's arguments behind its name.

    Those of the files in hparams/speechbrain are run in test_speechbrain_files.py.
    """
    text = "\n".join(block for block in blocks("") if "train_speaker_emb" in block)
    every = [
        shlex.split(command)
        for command in re.findall(r"^python .*", text.replace("\\\n", ""), re.MULTILINE)
    ]
    found = [c for c in every if c[2] not in ("training.yaml", "verification.yaml")]
    assert (len(found), len(every)) == (4, 6)
    assert all(command[3] == "--data_folder=/data/VoxCeleb" for command in found)
    return [command[4:] for command in found if command[2] == file]


class TestCommandLine:
    def test_keys_of_a_resolved_file_are_options(self, tmp_path):
        (arguments,) = commands("resolved.yaml")
        path = resolved(tmp_path, "df_revnet89")
        hparams, _ = load(path, tmp_path, *arguments)
        encoder = hparams["embedding_model"]
        assert (encoder.architecture.name, encoder.n_mels) == ("revnet57", 64)
        assert hparams["compute_features"].compute_fbanks.n_mels == 64
        optimizer = hparams["opt_class"](encoder.parameters())
        assert isinstance(optimizer, AdamW)
        assert isinstance(optimizer, torch.optim.AdamW)  # 32 bits

    def test_entries_of_an_object_are_changed_in_braces(self, tmp_path):
        (arguments,) = commands("mine.yaml")
        lines = [*lines_for("train_resnet", "embedding_model", "opt_class")]
        path = write_shape(tmp_path, "train_resnet", lines)
        hparams, _ = load(path, tmp_path, *arguments)
        encoder = hparams["embedding_model"]
        assert (encoder.architecture.name, encoder.n_mels) == ("revnet57", 64)
        assert hparams["opt_class"].func is AdamW
        assert hparams["opt_class"].keywords["bits"] == 32
        for key, wrong in (("embedding_model", "named"), ("opt_class", "bit")):
            with pytest.raises(TypeError, match=f"unexpected keyword .*'{wrong}'"):
                load(path, tmp_path, f"--{key}={{{wrong}: 8}}")[0][key]([torch.ones(1)])

    def test_what_the_document_lists_is_ignored_silently_here_and_not_by_us(
        self, tmp_path
    ):
        path = write_shape(tmp_path, "train_resnet", lines_for("train_resnet", *KEYS))
        whole = resolved(tmp_path, "df_revnet89")
        ours = HPARAMS / "df_revnet89.yaml"
        other = "!name:speechbrain_rev.optim.SGD {bits: 32}"
        hparams, _ = load(path, tmp_path, f"--opt_class={other}")
        assert hparams["opt_class"].func is AdamW
        assert hparams["opt_class"].keywords["bits"] == 32
        for more, kind in ((", lr: 0.1}", functools.partial), ("}", dict)):
            given = f"!apply:typing.cast [any, {other.rstrip('}')}{more}]"
            opt_class = load(path, tmp_path, f"--opt_class={given}")[0]["opt_class"]
            assert type(opt_class) is kind
        with pytest.raises(ValueError, match="cannot become something else"):
            resolve(ours, {"opt_class": other})
        hparams, _ = load(path, tmp_path, "--dataloader_options={batch: 8}")
        assert hparams["dataloader_options"]["batch_size"] == 4
        with pytest.raises(
            ValueError, match=r"unknown key 'dataloader_options\.batch'"
        ):
            resolve(ours, {"dataloader_options": "{batch: 8}"})
        _, run_opts, left = speechbrain.parse_arguments([str(whole), "--optimizer=sgd"])
        assert run_opts.optimizer_step_limit == "sgd"
        assert left == ""
        with pytest.raises(ValueError, match="unknown key 'optimizer'"):
            compose([str(ours), "--optimizer=sgd"])
        changed, as_it_was = (
            load(whole, tmp_path, *more)[0] for more in (["--arch=revnet57"], [])
        )
        assert changed["embedding_model"].architecture.name == "revnet57"
        for key in ("optimizer_name", "lr", "number_of_epochs"):
            assert changed[key] == as_it_was[key]
        planned, _ = load(whole, tmp_path, "--memory_budget=11GB")
        modes = planned["embedding_model"].block_modes()
        assert modes == as_it_was["embedding_model"].block_modes()

    @pytest.mark.parametrize(
        "arguments", commands("hparams/train_resnet.yaml"), ids=len
    )
    def test_each_command_of_the_document_takes_the_place_of_keys(
        self, tmp_path, arguments
    ):
        given = [argument[2:].partition("=")[0] for argument in arguments]
        path = write_shape(tmp_path, "train_resnet", ["n_mels: 80"])
        hparams, _ = load(path, tmp_path, *arguments)
        assert [key for key in KEYS if is_ours(hparams, key)] == given
        assert hparams["modules"]["embedding_model"] is hparams["embedding_model"]

    @pytest.mark.parametrize("name", ALONE)
    def test_a_line_in_a_list_trains_as_the_line_in_the_file_does(self, tmp_path, name):
        # Of x-vectors the classifier that goes with the loss, too.
        lines = lines_for(name, *KEYS)
        written, _ = load(write_shape(tmp_path, name, lines), tmp_path / "written")
        arguments = []
        for line in lines:
            key, _, value = line.partition(": ")
            arguments.append(f"--{key}=!apply:typing.cast [any, {value}]")
        path = write_shape(tmp_path, name, [])
        given, _ = load(path, tmp_path / "given", *arguments)
        one, other = fit(written), fit(given)
        assert one.steps == other.steps
        assert_same_bits(states(one), states(other))

    def test_what_is_in_braces_is_merged_into_what_the_file_has(self, tmp_path):
        path = write_shape(tmp_path, "train_resnet", [])
        hparams, _ = load(path, tmp_path, "--classifier={input_size: 64}")
        assert hparams["classifier"].weight.shape == (4, 64)
        line = documented_lines("train_resnet")["embedding_model"].partition(": ")[2]
        with pytest.raises(TypeError, match=r"ResNet.*argument 'name'"):
            load(path, tmp_path, f"--embedding_model={line}")

    def test_the_copy_in_the_output_folder_is_complete(self, tmp_path):
        path = write_shape(tmp_path, "train_resnet", [])
        lines = documented_lines("train_resnet")
        values = {key: lines[key].partition(": ")[2] for key in KEYS}
        _, _, overrides = speechbrain.parse_arguments(
            [
                *[str(path), "--data_folder=nowhere", f"--output_folder={tmp_path}"],
                *[f"--{k}=!apply:typing.cast [any, {v}]" for k, v in values.items()],
            ]
        )
        # As SpeechBrain's create_experiment_directory writes it.
        copy = resolve_references(path.read_text(), overrides).read()
        again = load_hyperpyyaml(copy)
        assert all(is_ours(again, key) for key in KEYS)
        assert "!ref" not in copy


@pytest.mark.parametrize("name", ["train_resnet", *slowly("train_ecapa_tdnn")])
def test_a_trained_encoder_embeds_and_is_exported(tmp_path, name):
    path = write_shape(tmp_path, name, lines_for(name, "embedding_model"))
    hparams, _ = load(path, tmp_path)
    run = Path(hparams["output_folder"])
    write_experiment(run, path, {"data_folder": "nowhere", "output_folder": str(run)})
    brain = fit(hparams)
    write_labels(run)
    wav = torch.randn(8000)
    embedding = SpeakerEmbedder.from_run(run, device="cpu").embed(
        wav, sample_rate=16000
    )
    assert_embeds_as(brain, wav, embedding)
    # All but what this script does not make.
    missing = export_run(run, tmp_path / "model")
    assert [words.partition(",")[0] for words in missing] == [
        "cohort.safetensors",
        "measured error rates: the run has no scores/results.json",
    ]
    exported = SpeakerEmbedder.from_hparams(tmp_path / "model", device="cpu")
    assert_embeds_as(brain, wav, exported.embed(wav, sample_rate=16000))
    weight = torch.load(tmp_path / "model/classifier.ckpt", weights_only=True)["weight"]
    assert torch.equal(weight, hparams["classifier"].weight)


def test_scores_that_are_no_cosines_are_refused_at_the_first_step(tmp_path):
    line = documented_lines("train_x_vectors")["compute_cost"]
    hparams, _ = load(write_shape(tmp_path, "train_x_vectors", [line]), tmp_path)
    with pytest.raises(ValueError, match=r"takes cosines.*CosineClassifier"):
        fit(hparams)


def test_a_margin_rises_with_the_loss_that_the_schedule_is_given(tmp_path):
    name = "train_resnet"
    line = in_small(blocks("yaml")[1].splitlines()[-1], name)
    lines = [*lines_for(name, "compute_cost"), line]
    hparams, _ = load(write_shape(tmp_path, name, lines), tmp_path)
    assert hparams["lr_annealing"].loss is hparams["compute_cost"]
    margins = [margin for *_, margin in fit(hparams).steps]
    assert margins[0] < margins[-1] == 0.2
