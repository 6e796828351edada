"""Rules between knobs, and features as embedding rebuilds them."""

import pytest

from speechbrain_rev.hparams.rules import RULES
from tests.unit.hparams.files import TRAIN, flat, refusal

# Values that are in their own range, but do not go together.
LIBRARY = {"optimizer_backend": "bitsandbytes"}
TOGETHER = [
    ({"margin_start_epoch": 50}, "margin_end_epoch is 40 (default of revnet46): the"),
    ({"final_lr": 0.2}, "lr is 0.1 (default of revnet46), final_lr is 0.2 (command"),
    ({"number_of_epochs": 6, "warmup_epochs": 6.0}, "warmup_epochs is 6.0 ("),
    ({"freeze_epochs": 150}, "the encoder would stay as it is. Give fewer frozen"),
    ({"chunk_samples": 399}, "that is less than one window of 25 ms"),
    ({"speeds": [1.0, 1.2]}, "too short for the fastest speed"),
    ({"speeds": [0.9, 1.1]}, "speeds is [0.9, 1.1] (command line): give different"),
    ({"speeds": [1.0, 0.999]}, "at most two decimals"),
    ({"valid_speakers": 1}, "Give 0 (no validation) or at least 2."),
    ({"arch": "resnet34", "mode": "reconstruct"}, "this encoder is not reversible"),
    ({"arch": "resnet34", "chunk": 800_000}, "works on all channels at once"),
    (
        {"pooling": "attentive", "pooling_variance": "unbiased"},
        "this pooling has no such estimate. Give population.",
    ),
    ({"arch": "revnet57", "n_mels": 84}, "in an encoder of type II, a multiple of it."),
    ({"widths": [8, 8]}, "each stage has its channels. Give one number for each"),
    ({"arch": "revnet57", "widths": [8, 8, 8, 6]}, "in one of type II multiples of 4."),
    (
        {"arch": "resnet34", "blocks": [1, 0, 1, 1]},
        "in a vanilla encoder, of at least 1.",
    ),
    (
        {"optimizer_name": "adamw", "nesterov": True},
        "has no such nesterov in this form",
    ),
    (LIBRARY | {"optimizer_block": 2048}, "bitsandbytes has blocks of 256"),
    (LIBRARY | {"optimizer_pack_small": True}, "keeps small tensors at 32 bits"),
    (
        LIBRARY | {"nesterov": True},
        "has no such nesterov in this form. Leave it out, or",
    ),
    (
        {"optimizer_name": "adam", "lr": 0.1, "final_lr": 0.1, "weight_decay": 0.1}
        | LIBRARY,
        "weight_decay is 0.1 (command line), optimizer_name is adam (command line), optim",
    ),
]


def test_values_that_do_not_go_together_are_named_with_all_places(tmp_path):
    file, broken = tmp_path / "flat.yaml", set()
    file.write_text(flat(TRAIN.read_text()))
    for overrides, message in TOGETHER:
        said = refusal(file, overrides)
        assert message in said
        broken |= {rule.knobs for rule in RULES if said.endswith(rule.words)}
    assert broken == {rule.knobs for rule in RULES}


#: As complete settings of earlier runs have it, but for the end.
FBANK = "compute_features: !new:speechbrain.lobes.features.Fbank {win_length: 25"
NORM = "!new:speechbrain.processing.features.InputNormalization"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_mels: !ref <n_mels>", "n_mels: 60", "is 60, but must be !ref <n_mels>"),
        ("build_features", "other", "lobes.features.build_features: embedding a run"),
        (
            "    kind: !ref <features>",
            "    f_min: 20",
            "f_min is 20, but must be left out",
        ),
        (
            "    mean_var_norm: !ref <mean_var_norm>",
            "    mean_var_norm: !ref <compute_features>",
            "modules.mean_var_norm is !ref <compute_features>, but must",
        ),
        # Whole files.
        (
            "",
            f"mean_var_norm: {NORM} [global]",
            f"mean_var_norm is {NORM} [global], but must be",
        ),
        (
            "",
            f"base: {TRAIN}\ncompute_features: {{kind: kaldi}}",
            "kind is kaldi, but must be !ref <features>",
        ),
        (
            "",
            f"{FBANK}, hop_length: 5}}",
            "hop_length is 5, but must be 10",
        ),
        (
            "",
            f"features: kaldi\n{FBANK}}}",
            "must be !apply:speechbrain_rev.lobes.features.build_features",
        ),
    ],
)
def test_features_that_embedding_would_not_see_are_refused_where_they_stand(
    tmp_path, old, new, message
):
    assert old in TRAIN.read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(TRAIN.read_text().replace(old, new, 1) if old else new)
    said = refusal(file)
    assert said.startswith(f"{file}, line ")
    assert message in said
    assert said.endswith("would not see this change. Change those only.")


def test_the_knobs_of_features_may_change(tmp_path):
    changed = {"features": "kaldi", "n_mels": 40, "sample_rate": 8000}
    assert refusal(TRAIN, changed) == ""
    earlier = tmp_path / "hyperparams.yaml"
    earlier.write_text(f"n_mels: 80\n{FBANK}, n_mels: !ref <n_mels>, hop_length: 10}}")
    assert refusal(earlier, {"n_mels": 40}) == ""
