"""The table of encoders against what names and publication say."""

import re

import pytest

from speechbrain_rev.architectures import (
    ARCHITECTURES,
    ENCODERS,
    TRAINING_DEFAULTS,
    WESPEAKER_ARCHITECTURES,
    architecture,
)

ROWS = list(ARCHITECTURES.values())


def test_names_are_the_rows_and_every_reversible_encoder_has_a_counterpart():
    assert all(name == row.name for name, row in ARCHITECTURES.items())
    vanilla = {row.name for row in ROWS if not row.reversible}
    assert {row.counterpart for row in ROWS if row.reversible} == vanilla


def test_encoders_of_wespeaker_are_none_of_the_paper_s():
    assert list(ENCODERS) == [*ARCHITECTURES, *WESPEAKER_ARCHITECTURES]
    for name, row in WESPEAKER_ARCHITECTURES.items():
        assert architecture(name) is row
        assert (row.reversible, row.counterpart) == (False, None)
        # Downsampling layers of Gemini-DF-ResNets are counted in their names.
        own = 3 * sum(row.blocks) + 2 + 4 * (row.family == "df_resnet")
        assert row.layers == own == int(name.rpartition("resnet")[2])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_name_ends_in_the_layer_count_that_the_blocks_give(row):
    total = sum(row.blocks)
    layers = {
        ("resnet", "vanilla", "basic"): 2 * total + 2,
        ("resnet", "vanilla", "bottleneck"): 3 * total + 2,
        ("df_resnet", "vanilla", "df_bottleneck"): 3 * total + 2,
        ("revnet", "I", "basic"): 4 * total + 10,
        ("revnet", "I", "bottleneck"): 6 * total + 14,
        ("revnet", "II", "basic"): 4 * total + 5,
        ("revnet", "II", "bottleneck"): 6 * total + 5,
        ("df_revnet", "I", "df_bottleneck"): 6 * total + 6,
        ("df_revnet", "II", "df_bottleneck"): 6 * total + 5,
    }[row.family, row.type, row.block]
    assert row.layers == layers
    assert int(re.search(r"\d+$", row.name).group()) == layers


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_parameters_are_near_the_published_ones_and_the_counterpart_s(row):
    # The published tables disagree among themselves by up to 0.84 M (df_revnet89).
    if row.published_params_m is not None:
        assert abs(row.parameters / 1e6 - row.published_params_m) < 0.9
        assert (row.counterpart is None) == (not row.reversible)
    if row.counterpart is None:
        return
    vanilla = architecture(row.counterpart)
    assert not vanilla.reversible
    assert vanilla.family == row.family.replace("rev", "res")
    # "Similar parameters" is the paper's claim; its own tables differ by a fifth.
    assert row.parameters == pytest.approx(vanilla.parameters, rel=0.2)


def test_families_are_trained_as_published():
    optimizers = {f: d.optimizer_name for f, d in TRAINING_DEFAULTS.items()}
    assert optimizers == {
        "resnet": "sgd",
        "revnet": "sgd",
        "df_resnet": "adamw",
        "df_revnet": "adamw",
    }
    assert architecture("revnet57").training.weight_decay == 1e-4
    assert architecture("df_revnet89").training.weight_decay == 0.05
    assert architecture("df_revnet89").optimizer_name == "adamw"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("revnet58", "Did you mean revnet57"),
        ("df-revnet281", "Did you mean df_revnet281"),
        ("ResNet34", "esnet34"),
        ("ecapa", f"The {len(ENCODERS)} encoders are: resnet34"),
        (None, "There is no encoder None"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(name, words):
    with pytest.raises(ValueError, match=words):
        architecture(name)
