"""What has to hold between knobs, and features as embedding rebuilds them."""

import math

import pytest

from speechbrain_rev.hparams import resolve
from speechbrain_rev.hparams.rules import RULES, KnobRule
from tests.unit.hparams.files import TRAIN, refusal, values

# Values that are in their own range, but do not go together.
TOGETHER = [
    ({"keep_checkpoints": 5}, "keep_checkpoints is 5 (command line), average_check"),
    ({"average_checkpoints": 11}, "average_checkpoints is 11 (command line): those"),
    ({"margin_start_epoch": 50}, "margin_end_epoch is 40 (default of revnet57): the"),
    ({"snr_low": 20.0}, "snr_low is 20.0 (command line), snr_high is 15.0 ("),
    ({"final_lr": 0.2}, "lr is 0.1 (default of revnet57), final_lr is 0.2 (command"),
    ({"lr": 1e-6}, "Give a smaller final_lr too."),
    ({"number_of_epochs": 6}, "warmup_epochs is 6.0 ("),
    ({"chunk_samples": 399}, "that is less than one window of 25 ms"),
    ({"sentence_len": 2.188}, "sentence_len is 2.188 (command line), sample_rate is"),
    ({"speeds": [1.0, 1.2]}, "too short for the fastest speed"),
    ({"speeds": [0.9, 1.1]}, "speeds is [0.9, 1.1] (command line): give different"),
    ({"speeds": [1.0, 1.0]}, "give different speeds"),
    ({"speeds": [1.0, 0.999]}, "at most two decimals"),
    ({"speeds": []}, "1.0 among them"),
    ({"valid_speakers": 1}, "Give 0 (no validation) or at least 2."),
    ({"arch": "resnet34", "mode": "reconstruct"}, "this encoder is not reversible"),
    ({"arch": "resnet34", "chunk": 800_000}, "works on all channels at once"),
    ({"n_mels": 84}, "Give a multiple of 8."),
    (
        {"widths": [8, 8, 8, 6]},
        "Give a number for each of its 4 stages, multiples of 4.",
    ),
    (
        {"arch": "resnet34", "blocks": [1, 0, 1, 1]},
        "Give a number for each of its 4 stages, of at least 1.",
    ),
    ({"momentum": 0.0}, "momentum is 0.0 (command line): bitsandbytes has no"),
    (
        {"optimizer_name": "adam", "lr": 0.1, "final_lr": 0.1, "weight_decay": 0.1},
        "weight_decay is 0.1 (command line): bitsandbytes would",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), TOGETHER)
def test_values_that_do_not_go_together_are_named_with_all_places(overrides, said):
    assert said in refusal(TRAIN, overrides)


def test_a_value_that_a_rule_cannot_compute_with_breaks_it():
    rule = KnobRule(("sentence_len",), lambda seconds: round(seconds) > 0, "")
    assert rule.broken({"sentence_len": math.inf})


def test_every_rule_is_broken_by_one_of_these():
    broken = set()
    for overrides, _ in TOGETHER:
        said = refusal(TRAIN, overrides)
        given = values(TRAIN) | overrides
        broken |= {rule.knobs for rule in RULES if said.endswith(rule.advice(given))}
    assert broken == {rule.knobs for rule in RULES}


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
