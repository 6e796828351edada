"""The reference of settings is whole, and of today."""

import re

from speechbrain_rev.hparams import settings_help, top_level_keys
from speechbrain_rev.hparams.knobs import KNOBS, MOST_USED

from .yaml_reference import PAGE, SOURCE_OF, SOURCES, TRAIN, UNIT_OF, page, sections


def test_the_committed_page_is_what_the_command_writes():
    assert PAGE.read_text() == page(), "run python -m tests.docs.yaml_reference"


def test_every_key_has_one_entry():
    entries = re.findall(r"^### `(\S+)`$", page(), re.MULTILINE)
    assert len(set(entries)) == len(entries)
    # All other files build on this one.
    assert set(top_level_keys(TRAIN)) <= set(entries)


def test_every_key_says_what_it_means():
    for keys in sections(TRAIN.read_text()).values():
        for key in keys:
            assert " ".join(key.words).strip(), key.name


def test_the_help_lists_what_the_recipe_s_page_lists():
    """Beside run options, which no file has."""
    text = (PAGE.parents[1] / "recipes/VoxCeleb/README.md").read_text()
    listed = text.partition("These settings matter most:")[2].partition("\n<details")[0]
    named = re.findall(r"^\| `--(\w+)` \|", listed, re.MULTILINE)
    data = ("data_folder", "noise_folder", "rir_folder")
    assert set(MOST_USED) == {*data, *(name for name in named if name in KNOBS)}
    assert all(f"\n  --{name} " in settings_help() for name in MOST_USED)


def test_every_setting_has_a_source_that_is_named():
    assert {*SOURCE_OF, *UNIT_OF} <= {*KNOBS}
    for name, source in SOURCE_OF.items():
        assert any(word in source for word in (*SOURCES, "Jiang et al.")), name


def test_settings_with_a_range_of_numbers_have_a_unit():
    # Numbers that have none: a seed, a channel, factors, rates and decays.
    without = {"seed", "scale", "lr", "final_lr", "encoder_lr", "weight_decay"}
    without |= {"max_grad_norm", "channel"}
    for name, knob in KNOBS.items():
        if "int" in knob.kind or "float" in knob.kind:
            assert (name in UNIT_OF) != (name in without), name
