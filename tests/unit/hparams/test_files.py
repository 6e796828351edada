"""The files of the project: short, and each composes with every encoder."""

import functools

import pytest
from hyperpyyaml import load_hyperpyyaml

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.hparams import (
    placeholders,
    plain_settings,
    resolve,
    top_level_keys,
)
from speechbrain_rev.hparams.knobs import KNOBS
from tests.unit.hparams.files import DATA, FOLDER, TRAIN, values

OVERRIDE_FILES = sorted(set(FOLDER.glob("*.yaml")) - {TRAIN})
REGIMES = [file for file in OVERRIDE_FILES if file.stem not in ARCHITECTURES]

# A regime may train an encoder with another optimizer than its family's on purpose.
pytestmark = pytest.mark.filterwarnings(
    "ignore::speechbrain_rev.hparams.OptimizerWarning"
)

# The first encoder of each family, which decides what null stands for.
FIRST = list(
    {row.family: name for name, row in reversed(ARCHITECTURES.items())}.values()
)


@functools.cache
def composed(file):
    return resolve(file)


@functools.cache
def found_in(file):
    return values(composed(file))


def test_every_encoder_has_a_file_of_its_name():
    for name in ARCHITECTURES:
        found = found_in(FOLDER / f"{name}.yaml")
        assert found["arch"] == name
        assert found["optimizer_name"] == ARCHITECTURES[name].optimizer_name


@pytest.mark.parametrize("file", OVERRIDE_FILES, ids=lambda file: file.stem)
def test_an_override_file_is_short_and_composes(file):
    keys = values(file.read_text())
    assert 2 <= len(keys) <= 8
    assert next(iter(keys)) == "base"
    # A key to a line: no setting hides among others, or in a comment.
    assert len(file.read_text().splitlines()) == len(keys)
    assert list(found_in(file)) == list(top_level_keys(TRAIN))


#: How version 0.1.0 and this one name the encoder.
OLD, NEW = (
    f"embedding_model: {tag}"
    for tag in (
        "!apply:speechbrain_rev.lobes.build_encoder",
        "!new:speechbrain_rev.lobes.SpeakerEncoder",
    )
)


@pytest.mark.parametrize(("complete", "over"), [(OLD, NEW), (NEW, OLD), (OLD, OLD)])
def test_files_of_version_0_1_0_still_compose_and_build(complete, over, tmp_path):
    text = TRAIN.read_text()
    assert text.count(NEW) == 1
    (tmp_path / "train.yaml").write_text(text.replace(NEW, complete))
    (tmp_path / "mine.yaml").write_text(
        f"base: train.yaml\nembedding_model: {over.partition(' ')[2]} {{chunk: null}}\n"
        "arch: revnet57\nblocks: [1, 1, 1, 1]\nwidths: [8, 8, 8, 8]\n"
    )
    made = resolve(tmp_path / "mine.yaml", DATA)
    assert made.count(f"\n{complete}\n") == 1
    encoder = load_hyperpyyaml(made)["embedding_model"]
    assert encoder.architecture.widths == (8, 8, 8, 8)
    assert encoder.channels == [None] * 4


@pytest.mark.parametrize("file", [TRAIN, *OVERRIDE_FILES], ids=lambda file: file.stem)
def test_resolving_again_changes_nothing(file, tmp_path):
    (tmp_path / "again.yaml").write_text(composed(file))
    assert resolve(tmp_path / "again.yaml") == composed(file)


each_regime = pytest.mark.parametrize(
    "file", [TRAIN, *REGIMES], ids=lambda file: file.stem
)


@each_regime
def test_an_encoder_of_each_family_composes_with_it(file):
    assert_composes(file, FIRST)


@pytest.mark.slow
@each_regime
def test_every_encoder_composes_with_it(file):
    assert_composes(file, [name for name in ARCHITECTURES if name not in FIRST])


def assert_composes(file, encoders):
    stated = {}
    base = file
    while base != TRAIN:
        keys = values(base.read_text())
        stated = {**keys, **stated}
        base = base.parent / keys["base"]
    overrides = {"data_folder": "data", "pretrained_run": "run"}
    for arch in encoders:
        text = resolve(file, {**overrides, "arch": arch})
        assert placeholders(text) == ()
        found = values(text)
        expected = {**stated, **overrides, "arch": arch}
        assert {key: as_written(found[key]) for key in expected if key != "base"} == {
            key: as_written(value) for key, value in expected.items() if key != "base"
        }


def as_written(value):
    """A reference by its text: ruamel.yaml compares two of them by identity."""
    return getattr(value, "value", value)


def test_settings_stand_flat_before_what_is_built_from_them():
    settings_part = TRAIN.read_text().split("# What follows is built")[0]
    for value in values(settings_part).values():
        assert not isinstance(value, dict)


def test_a_setting_that_shows_no_type_has_one_in_the_table():
    for key, value in values(TRAIN.read_text()).items():
        if value is None or value == []:
            assert key in KNOBS


def test_the_published_setting():
    found = found_in(FOLDER / "revnet57.yaml")
    published = {
        "n_mels": 80,
        "chunk_samples": 199 * 160,
        "speeds": [1.0, 0.9, 1.1],
        "augment_prob": 0.6,
        "margin": 0.2,
        "scale": 32.0,
        "embedding_dim": 256,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "optimizer_bits": 8,
        "batch_size": 256,
        "lr": 0.1,
        "final_lr": 5e-5,
        "number_of_epochs": 150,
        "warmup_epochs": 6,
        "margin_start_epoch": 20,
        "margin_end_epoch": 40,
        "average_checkpoints": 10,
        "cohort_top_n": 600,
    }
    assert {key: found[key] for key in published} == published


def test_the_setting_that_the_study_begins_with():
    found = found_in(FOLDER / "minivox.yaml")
    trained = {
        "speeds": [1.0, 0.9, 1.1],
        "augment_prob": 0.2,
        "optimizer_name": "adamw",
        "zero_init_residual": True,
    }
    assert {key: found[key] for key in trained} == trained


@pytest.mark.parametrize(
    ("name", "margin", "frames"),
    [("fine_tune", 0.2, 200), ("large_margin", 0.5, 600)],
)
def test_fine_tuning_is_short_at_a_small_rate_and_a_fixed_margin(name, margin, frames):
    file = FOLDER / f"{name}.yaml"
    assert placeholders(composed(file)) == ("pretrained_run", "arch", "data_folder")
    found = values(resolve(file, {"arch": "df_revnet281"}))
    published = {
        "optimizer_name": "sgd",
        "lr": 1e-4,
        "final_lr": 2.5e-5,
        "weight_decay": 1e-4,
        "number_of_epochs": 5,
        "warmup_epochs": 0.0,
        "margin": margin,
        "margin_start_epoch": 0,
        "margin_end_epoch": 0,
        "average_checkpoints": 1,
        "chunk_samples": (frames - 1) * 160,
    }
    assert {key: found[key] for key in published} == published


def test_a_large_margin_is_for_true_speakers_within_the_memory_that_is_there():
    file = FOLDER / "large_margin.yaml"
    found = plain_settings(resolve(file, {"arch": "revnet57", "data_folder": "data"}))
    assert found["speeds"] == [1.0]
    assert found["sentence_len"] == 5.99
    assert found["memory_budget"] == "auto"
