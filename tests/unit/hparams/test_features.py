"""The features of a run are those that embedding rebuilds."""

import pytest

from speechbrain_rev.hparams import resolve
from tests.unit.hparams.files import TRAIN, values


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("compute_features: {hop_length: 5}", r"hop_length is 5, but must be 10"),
        ("compute_features: {win_length: 20}", r"win_length is 20, but must be 25"),
        ("mean_var_norm: {std_norm: true}", r"std_norm is true, but must be false"),
        ("mean_var_norm: {norm_type: global}", r"norm_type is global, but must be"),
        ("compute_features: {n_mels: 60}", r"n_mels is 60, but must be !ref <n_mels>"),
        (
            "modules: {mean_var_norm: !ref <compute_features>}",
            r"modules\.mean_var_norm is !ref <compute_features>, but must",
        ),
    ],
)
def test_what_embedding_would_not_see_is_refused_where_it_was_written(
    tmp_path, content, named
):
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: {TRAIN}\n{content}\n")
    with pytest.raises(ValueError, match=rf"{named}.*n_mels and sample_rate") as error:
        resolve(file)
    assert str(error.value).startswith(f"{file}, line 2: ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("features.Fbank", "features.MFCC"),
        ("    win_length: 25  # ms", "    f_min: 20"),
        ("hop_length: 10", "hop_length: 12"),
        ("std_norm: false", "std_norm: false\n    avg_factor: 0.5"),
    ],
)
def test_a_complete_file_of_other_features_is_refused(tmp_path, old, new):
    text = TRAIN.read_text()
    assert old in text
    (tmp_path / "mine.yaml").write_text(text.replace(old, new))
    with pytest.raises(ValueError, match="embedding a run builds its features anew"):
        resolve(tmp_path / "mine.yaml")


def test_arguments_without_names_are_refused(tmp_path):
    new = "!new:speechbrain.processing.features.InputNormalization"
    (tmp_path / "mine.yaml").write_text(f"mean_var_norm: {new} [global]\n")
    with pytest.raises(ValueError, match=r"mean_var_norm\[0\] is global, but must be"):
        resolve(tmp_path / "mine.yaml")


def test_mel_bands_and_sample_rate_may_change():
    found = values(resolve(TRAIN, {"n_mels": 40, "sample_rate": 8000}))
    assert (found["n_mels"], found["sample_rate"]) == (40, 8000)
