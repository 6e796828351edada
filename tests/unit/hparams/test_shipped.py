"""The project's files: short, composed with every encoder, and known by their names."""

import re
import shlex

import pytest

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.cli import main
from speechbrain_rev.hparams import (
    compose,
    placeholders,
    plain_settings,
    resolve,
    shipped,
    top_level_keys,
)
from speechbrain_rev.hparams.knobs import KNOBS
from speechbrain_rev.optimizers import OPTIMIZERS
from tests.unit.hparams.files import (
    DATA,
    FOLDER,
    PUBLISHED_SETTINGS,
    TRAIN,
    flat,
    refusal,
    values,
)

OVERRIDE_FILES = sorted(set(FOLDER.glob("*.yaml")) - {TRAIN})
REGIMES = [file for file in OVERRIDE_FILES if file.stem not in ARCHITECTURES]

# A regime may train an encoder with another optimizer than its family's on purpose.
pytestmark = pytest.mark.filterwarnings(
    "ignore::speechbrain_rev.hparams.OptimizerWarning"
)


@pytest.mark.parametrize("file", REGIMES, ids=lambda file: file.stem)
def test_an_override_file_is_short_composes_and_composes_again(file, tmp_path):
    keys = values(file.read_text())
    assert 2 <= len(keys) <= 13
    assert next(iter(keys)) == "base"
    # A key to a line: no setting hides among others, or in a comment.
    assert len(file.read_text().splitlines()) == len(keys)
    for arch in ("revnet46", "df_resnet56"):
        overrides = {"data_folder": "data", "pretrained": "run", "arch": arch}
        text = resolve(file, overrides)
        assert placeholders(text) == ()
    composed = values(text)
    assert list(composed) == list(top_level_keys(TRAIN))
    for key, value in {**keys, **overrides}.items():
        if key != "base":
            # ruamel.yaml compares two references by identity.
            taken, given = (getattr(it, "value", it) for it in (composed[key], value))
            assert taken == given, key
    (tmp_path / "again.yaml").write_text(text)
    assert resolve(tmp_path / "again.yaml") == text


def test_settings_stand_flat_and_have_a_type_before_what_is_built_from_them():
    for key, value in values(flat(TRAIN.read_text())).items():
        assert not isinstance(value, dict)
        if value is None or value == []:
            assert key in KNOBS


def test_files_have_the_values_that_they_are_for():
    settings = plain_settings(resolve(FOLDER / "revnet57.yaml", DATA))
    requested = {**PUBLISHED_SETTINGS, "cohort_top_n": 600}
    assert {key: settings[key] for key in requested} == requested
    assert OPTIMIZERS["sgd"].options["momentum"].default == 0.9


def test_the_small_encoder_is_trained_as_in_the_run_that_the_readme_records():
    readme = (FOLDER.parent / "recipes/VoxCeleb/README.md").read_text()
    command = re.search(r"train\.py (hparams/small\.yaml(?:.|\n)*?)\npython", readme)[1]
    given = shlex.split(command.replace("hparams", str(FOLDER)).replace("\\\n", ""))
    composed = compose(given, run_options=["device"])
    settings = plain_settings(composed.text)
    requested = {
        "batch_size": 64,
        "number_of_epochs": 150,
        "optimizer_name": "adamw",
        "lr": 1e-3,
        "final_lr": 1e-5,
        "chunk_samples": 24160,
    }
    assert {key: settings[key] for key in requested} == requested
    # 1,950 steps, which the README states, of the 840 utterances of its corpus.
    assert 840 // settings["batch_size"] * settings["number_of_epochs"] == 1950


def test_the_large_margin_is_fine_tuned_on_longer_speech_at_a_small_rate():
    file = FOLDER / "large_margin.yaml"
    assert placeholders(resolve(file)) == ("pretrained", "data_folder")
    settings = plain_settings(resolve(file, {**DATA, "arch": "df_revnet281"}))
    requested = {
        "margin": 0.5,
        "chunk_samples": 599 * 160,
        "sentence_len": 5.99,
        "speeds": [1.0],
        "optimizer_name": "sgd",
        "lr": 1e-4,
        "final_lr": 2.5e-5,
        "number_of_epochs": 5,
        "warmup_epochs": 0.0,
        "margin_end_epoch": 0,
        "average_checkpoints": 1,
    }
    assert {key: settings[key] for key in requested} == requested


def test_a_name_means_the_file_unless_the_current_folder_has_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped.shipped() == {file.stem: file for file in FOLDER.glob("*.yaml")}
    for name in ARCHITECTURES:
        file = shipped.shipped()[name]
        assert file.read_text() == f"base: train.yaml\narch: {name}\n"
    path = FOLDER / "df_revnet89.yaml"
    assert resolve("df_revnet89", DATA) == resolve(path, DATA)
    assert top_level_keys("df_revnet89") == top_level_keys(path)
    composed = compose(["df_revnet89", "--data_folder=data"])
    assert composed.text == resolve(path, DATA)
    (tmp_path / "revnet57").write_text("arch: revnet46\n")
    assert resolve("revnet57") == "arch: revnet46\n"


def test_a_path_is_never_taken_for_a_name_and_an_unknown_name_is_refused(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for path in ("revnet57.yaml", "./revnet57", "hparams/revnet57"):
        with pytest.raises(
            ValueError, match=r"No such file.*without folder.* mean revnet57"
        ):
            resolve(path)
    assert main(["resolve", "revnet75"]) == 2
    said = capsys.readouterr().err
    assert "revnet75 cannot be read: No such file" in said
    assert "revnet57" in said
    monkeypatch.setattr(shipped, "_FOLDERS", (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(FileNotFoundError, match=r"in neither .*a nor .*b\. Install"):
        shipped.file_of("revnet57")


@pytest.mark.parametrize("base", ["train", "df_revnet89.yaml"])
def test_a_base_of_that_name_is_the_packages_from_any_folder(
    base, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    # The current folder is not looked in.
    (tmp_path / base).write_text("seed: 1\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "mine.yaml").write_text(f"base: {base}\nbatch_size: 7\n")
    path = FOLDER / f"{base.removesuffix('.yaml')}.yaml"
    expected = resolve(path, {"batch_size": 7, **DATA})
    assert resolve("below/mine.yaml", DATA) == expected


def test_a_base_beside_the_file_is_never_replaced_by_one_of_the_package(tmp_path):
    base, file = tmp_path / "train.yaml", tmp_path / "mine" / "mine.yaml"
    file.parent.mkdir()
    base.write_text("seed: 1\n")
    file.write_text("base: ../train.yaml\nseed: 2\n")
    assert resolve(file) == "seed: 2\n"
    base.unlink()
    base.symlink_to(tmp_path / "moved.yaml")
    assert "train.yaml, the base of" in refusal(file)
    assert "No such file" in refusal(file)


@pytest.mark.parametrize("base", ["tran.yaml", "./train.yaml"])
def test_a_base_in_neither_place_is_refused_with_the_nearest_name(base, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"seed: 1\nbase: {base}\n")
    said = refusal(file)
    assert said.startswith(f"{file}, line 2: its base {base} is not there: no file of")
    assert said.endswith("comes with the package. Did you mean train?")
