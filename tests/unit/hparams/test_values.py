"""Types: what a key takes, and how its value is written."""

import math

import numpy as np
import pytest
import yaml
from hyperpyyaml import load_hyperpyyaml, resolve_references
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode

from speechbrain_rev.hparams import resolve
from speechbrain_rev.hparams.document import Unreadable, plain, quoted
from tests.unit.hparams.files import refusal, values

# Of knobs, and of other keys, whose type is that of the value in the complete file.
REFUSED_VALUES = {
    "text for integer": ("seed: one", r"line 2: seed takes an integer .*, not one"),
    "number for integer": ("seed: 1.5", r"seed takes an integer .*, not 1\.5"),
    "truth for integer": ("seed: true", r"seed takes an integer .*, not true"),
    "minutes for integer": ("seed: 1:30", r"seed takes an integer .*, not 1:30"),
    "quoted integer": ("seed: '3'", r'seed takes an integer .*, not "3"'),
    "tagged integer": ("seed: !!int one", r"seed takes an integer .*, not one"),
    "text tagged": ("seed: !!str 3", r"seed takes an integer .*, not 3"),
    "too many digits": (
        f"seed: {'9' * 5000}",
        r"line 2: seed takes an integer .*, not 9+\.\.\. \(5000 characters\)",
    ),
    "no number": (
        f"margin: {'9' * 400}",
        r"line 2: margin takes a number .*, not 9+\.\.",
    ),
    "text for number": ("margin: wide", r"margin takes a number .*, not wide"),
    "quoted number": ("margin: '1e-4'", r'margin takes a number .*, not "1e-4"'),
    "text for family number": (
        "lr: fast",
        r"lr takes a number above 0, or null, not fast",
    ),
    "integer for truth": ("sync_batchnorm: 1", r"takes true or false, not 1"),
    "yes for truth": ("sync_batchnorm: yes", r"takes true or false, not yes"),
    "off for truth": ("sync_batchnorm: off", r"takes true or false, not off"),
    "number for text": (
        "arch: 57",
        r"arch takes one of 25 names, not 57\. All are: resnet34,",
    ),
    "number for referring text": ("folder: 3", r"folder takes a text, not 3"),
    "number for reference": ("trials_folder: 3", r"trials_folder takes a text, not 3"),
    "binary for text": ("folder: !!binary aGk=", r"takes a text, not !!binary aGk="),
    "date for text": ("folder: 2001-01-01", r"text, not !!timestamp 2001-01-01"),
    "question mark in a list": (
        "names: [a, b?]",
        r"names is \[a, b\?\]: HyperPyYAML cannot read a question mark in a list",
    ),
    "an odd end of line": ('folder: "a\\Nb"', r"cannot read .* the sign U\+0085"),
    "Python for text": (
        "folder: !!python/name:os.system",
        r"folder takes a text, not !!python/name:os\.system",
    ),
    "null for integer": ("seed: null", r"seed takes an integer .*, not null"),
    "nothing for integer": ("seed:", r"seed takes an integer .*, not nothing"),
    "scalar for list": ("speeds: 1.0", r"takes a list of numbers .*, not 1\.0"),
    "tuple for list": (
        "speeds: (1.0, 0.9)",
        r"list of numbers .*, not !tuple \(1\.0, 0\.9\)",
    ),
    "list for scalar": ("seed: [1]", r"seed takes an integer .*, not \[1\]"),
    "mapping for scalar": ("seed: {a: 1}", r"seed takes an integer .*, not a mapping"),
    "wrong member": ("speeds: [1.0, fast]", r"list of numbers .*, not \[1\.0, fast\]"),
    "list in list": ("names: [[a]]", r"names takes a list of texts, .*, not \[\[a\]\]"),
    "object for scalar": (
        "seed: !new:int [1]",
        r"seed takes an integer .*, not !new:int",
    ),
    "wrong type in object": ("encoder: {width: x}", r"encoder\.width takes an integer"),
    "wrong type at depth": (
        "loader: {inner: {deep: x}}",
        r"line 2: loader\.inner\.deep takes an integer, not x",
    ),
}


class TestTypes:
    @pytest.mark.parametrize("case", REFUSED_VALUES)
    def test_another_one_is_refused_with_key_and_place(self, write, case):
        content, message = REFUSED_VALUES[case]
        folder = write(near=f"base: train.yaml\n{content}\n")
        with pytest.raises(ValueError, match=message) as error:
            resolve(folder / "near.yaml")
        assert f"{folder / 'near.yaml'}, line 2: " in str(error.value)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("sead", "1", r"command line: unknown key 'sead'\. Did you mean seed"),
            ("seed", "one", r"command line: seed takes an integer .*, not one"),
            (
                "seed",
                "012",
                r"command line: .*leave the zero .*It is the value of seed",
            ),
            ("seed", "", r"command line: seed takes an integer .*, not nothing"),
            ("seed", "1\nlr: 2", r"command line: .*no valid YAML.*the value of seed"),
            ("speeds", "[1.0", r"command line: .*no valid YAML.*the value of speeds"),
            ("margin", math.nan, r"command line: margin takes a number .*, not NaN"),
            ("margin", np.float32(1), r"command line: margin is a float32: give a pla"),
            ("speeds", {1.0}, r"command line: speeds is a set: give a plain"),
            ("loader", "{batsh: 1}", r"command line: unknown key 'loader\.batsh'"),
            ("encoder", "!new:other.Encoder", r"encoder is !new:package\.Encoder"),
            ("data_folder", "null", r"data_folder takes a text, not null"),
        ],
    )
    def test_a_mistake_on_the_command_line_is_named(self, write, key, value, message):
        with pytest.raises(ValueError, match=message):
            resolve(write() / "train.yaml", {key: value})

    def test_an_integer_serves_as_a_number(self, write):
        composed = resolve(write() / "train.yaml", {"margin": "1", "lr": "2"})
        assert "margin: 1.0\n" in composed
        assert "lr: 2.0 " in composed

    @pytest.mark.parametrize("written", ["1e-4", "1E-4", "1.e-4", ".0001", "1_0.0e-5"])
    def test_numbers_are_written_so_that_all_readers_take_them(self, write, written):
        folder = write(near=f"base: train.yaml\nmargin: {written}\n")
        assert "\nmargin: 0.0001\n" in resolve(folder / "near.yaml")
        composed = resolve(write() / "train.yaml", {"margin": "1e-6"})
        assert "\nmargin: 1.0e-06\n" in composed

    def test_there_is_no_negative_zero(self, write):
        overrides = {"margin": "-0.0", "seed": "-0"}
        composed = resolve(write() / "train.yaml", overrides)
        assert "\nmargin: 0.0\n" in composed
        assert "\nseed: 0\n" in composed

    @pytest.mark.parametrize("written", ["True", "TRUE", "true"])
    def test_truth_values_are_written_in_one_way(self, write, written):
        composed = resolve(write() / "train.yaml", {"sync_batchnorm": written})
        assert "\nsync_batchnorm: true\n" in composed

    @pytest.mark.parametrize("written", ["~", "Null", ""])
    def test_null_may_be_written_in_any_way(self, write, written):
        folder = write(near=f"base: train.yaml\nsteps_per_epoch: {written}\n")
        assert "\nsteps_per_epoch: null\n" in resolve(folder / "near.yaml")

    def test_an_infinite_number_is_kept_where_no_knob_says_otherwise(self, write):
        file = write(mine="threshold: 1.0\n") / "mine.yaml"
        assert resolve(file, {"threshold": "-.INF"}) == "threshold: -.inf\n"

    def test_knobs_have_their_type_in_any_complete_file(self, write):
        folder = write(mine="seed: one\n", other="margin: '0.2'\n")
        assert refusal(folder / "mine.yaml").endswith(
            "mine.yaml, line 1: seed takes an integer from 0 to 4294967295, not one. For "
            "another one, SpeechBrain would seed with 0."
        )
        said = refusal(folder / "other.yaml")
        assert said.endswith(
            'takes a number of at least 0 and below 3.14159, not "0.2".'
        )

    @settings(max_examples=100, deadline=None)
    @given(st.from_regex(r"[-+]?[0-9a-fox_.]{1,6}(e[-+]?[0-9]{1,2})?", fullmatch=True))
    def test_scalars_are_read_as_ruamel_reads_them(self, written):
        reader = YAML(typ="safe", pure=True)
        node = reader.compose(written)
        if not isinstance(node, ScalarNode) or written.lstrip("+-")[:1] == "0":
            return
        try:
            expected = reader.load(written)
        except ValueError:  # "_" looks like an integer
            with pytest.raises(Unreadable):
                plain(node, str)
            return
        if not isinstance(expected, bool | int | float | str):
            expected = written
        assert plain(node, str) == expected
        assert type(plain(node, str)) is type(expected)


class TestText:
    @settings(max_examples=60, deadline=None)
    @given(st.text(st.characters(codec="utf-8", exclude_characters="\x85")))
    def test_any_text_survives_the_way_through_the_file(self, original):
        for reader in ("rt", "safe"):
            read = YAML(typ=reader, pure=True).load(f"a: {quoted(original)}  # note\n")
            assert read == {"a": original}
        # What HyperPyYAML would take for a tuple or a formula has to be quoted too.
        assert resolve_references(f"a: {quoted(original)}\n").getvalue()
        assert load_hyperpyyaml(f"a: {quoted(original)}\n") == {"a": original}

    @pytest.mark.parametrize(
        "original",
        [
            "=",
            "<<",
            "==",
            "=a",
            "a=b",
            "a==b=",
            "(a, b)",
            "1e-4",
            "1:30",
            "012",
            "no",
            "~",
            "{a}",
            "[a",
            "a\nb: 1",
            "'",
            '"\\',
            "C:\\new",
            "#",
            "a #b",
            "&a",
            "\x07",
            "\x7f",
            "\u2028",
            "\ufeff",
            "\U0010ffff",
        ],
    )
    def test_texts_with_a_meaning_elsewhere_survive_alone_and_in_a_list(
        self, write, original
    ):
        folder = write()
        override = {"base": "train.yaml", "names": [original, original]}
        (folder / "near.yaml").write_text(yaml.safe_dump(override, default_style='"'))
        for file, overrides in (
            (folder / "near.yaml", {"data_folder": original}),
            (folder / "train.yaml", {"data_folder": original, "names": [original] * 2}),
        ):
            composed = resolve(file, overrides)
            for found in (values(composed), load_hyperpyyaml(_flat(composed))):
                assert found["data_folder"] == original
                assert found["names"] == [original, original]


def _flat(composed):
    return composed.split("# objects")[0]
