"""YAML: a mistake is named with its place, and a value is read as it was written."""

import re

import pytest
from hyperpyyaml import load_hyperpyyaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from speechbrain_rev.hparams import document, plain_settings, resolve
from speechbrain_rev.hparams.document import dump
from tests.unit.hparams.files import refusal

# Lines of an override file, which begin at line 2, and the message.
MISTAKES = [
    ("sead: 1", r"line 2: unknown key 'sead'\. Did you mean seed or"),
    ("s\u0435\u0435d: 1", r"unknown key 's\\u0435\\u0435d'\.$"),
    ("3: 1", r"line 2: unknown key '3'"),
    ("device: cuda", r"unknown key 'device'\. It is a run option .* give --device"),
    ("loader: {batsh: 1}", r"'loader\.batsh'\. Did you mean loader\.batch\?"),
    ("loader:\n    inner:\n        deap: 1", r"line 4: .* mean loader\.inner\.deep"),
    ("encoder: !new:other.Encoder {width: 1}", r"line 2: encoder is !new:pac"),
    ("schedule: !name:other", r"line 2: schedule is !name:package\.schedule"),
    ("loader: !new:dict {batch: 1}", r"loader is a mapping"),
    ("seed: 1\nseed: 2", r'line 3: .*found duplicate key "seed"'),
    ("loader:\n  inner: {deep: 1, deep: 2}", r'line 3: .*duplicate key "deep"'),
    ("<<: !include:other.yaml", r"line 2: .*expected a mapping .* for merging"),
    ("loader: !include:other.yaml", r"line 2: !include: is not followed"),
    ("seed: *s", r"line 2: .*undefined alias 's'"),
    ("seed: [1", r"no valid YAML"),
    ("loader:\n\tbatch: 1", r"line 3: .*'\\t'"),
    ("seed: 1\n---\nseed: 2", r"line 3: .*another document"),
]
# Whole files.
NO_KEYS = "lines `key: value` are expected"
UNREADABLE = [
    (b"", NO_KEYS),
    (b"- a\n", NO_KEYS),
    (b"!new:dict\nseed: 1\n", NO_KEYS),
    (b"seed: 1\nx: caf\xe9\n", "cannot be read: 'utf-8' codec can't decode byte 0xe9"),
    (b"seed: 1\n\x00", "no valid YAML: .*not allowed"),
]


@pytest.mark.parametrize(("content", "message"), MISTAKES)
def test_a_mistake_is_named_with_key_and_place_on_one_line(write, content, message):
    file = write(near=f"base: train.yaml\n{content}\n") / "near.yaml"
    said = refusal(file)
    assert said.startswith(str(file))
    assert re.search(message, said)
    assert "\n" not in said


@pytest.mark.parametrize(("content", "message"), UNREADABLE)
def test_what_is_no_file_of_keys_is_refused_by_its_name(tmp_path, content, message):
    file = tmp_path / "x.yaml"
    file.write_bytes(content)
    assert str(file) in refusal(file)
    assert re.search(message, refusal(file))


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, monkeypatch):
    assert "none.yaml cannot be read: No such" in refusal(tmp_path / "none.yaml")
    assert "cannot be read: Is a dir" in refusal(tmp_path)

    def denied(*args, **options):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "mine.yaml").touch()
    monkeypatch.setattr(document.Path, "read_text", denied)
    assert "mine.yaml cannot be read: Permission" in refusal(tmp_path / "mine.yaml")


@pytest.mark.parametrize("written", ["1e-4", "0o12", "012", "no", "1:30", "~", ".inf"])
def test_a_value_of_a_complete_file_is_what_hyperpyyaml_reads(tmp_path, written):
    file = tmp_path / "mine.yaml"
    file.write_text(f"x: {written}\n")
    assert plain_settings(resolve(file)) == load_hyperpyyaml(file.read_text())


def test_anchors_and_merges_of_an_override_file_are_followed_in_it(write):
    near = "base: train.yaml\nseed: &s 1\nloader: {batch: *s}\n<<: {margin: 0.3}\n"
    assert plain_settings(resolve(write(near=near) / "near.yaml"))["margin"] == 0.3
    read = load_hyperpyyaml("a: &s 1\nloader: {batch: *s}\n")
    assert read["loader"]["batch"] == 1


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\x85"))
    | st.sampled_from(["<<", "a==b=", "1e-4", "1:30", "no", "~", "[a", "007", "b?"])
    | st.sampled_from(['"\\', "a #b", "&a", "\x07", "\u2028", "\ufeff"])
)
def test_any_text_survives_the_way_through_the_file(original):
    text = f"x: [{dump(original)}]  # note\n"
    for reader in ("rt", "safe"):
        assert YAML(typ=reader, pure=True).load(text) == {"x": [original]}
    assert load_hyperpyyaml(text) == {"x": [original]}
