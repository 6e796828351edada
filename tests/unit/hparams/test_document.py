"""YAML: what would compose silently wrong is refused with its place; how values are written."""

import re
import subprocess
import sys

import pytest
import yaml
from hyperpyyaml import load_hyperpyyaml, resolve_references
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from speechbrain_rev.hparams import document, resolve
from speechbrain_rev.hparams.document import (
    compute,
    parse_file,
    quoted,
    refuse_disagreement,
)
from tests.unit.hparams.files import refusal

# Lines of an override file, which begin at line 2, and the message.
MISTAKES = [
    ("sead: 1", r"line 2: unknown key 'sead'\. Did you mean seed or"),
    ("s\u0435\u0435d: 1", r"unknown key 's\\u0435\\u0435d'\.$"),
    ("device: cuda", r"unknown key 'device'\. It is a run option .* give --device"),
    ("loader: {batsh: 1}", r"'loader\.batsh'\. Did you mean loader\.batch\?"),
    ("loader:\n    inner:\n        deap: 1", r"line 4: .* mean loader\.inner\.deep"),
    ("encoder: !new:other.Encoder {width: 1}", r"line 2: encoder is !new:pac"),
    ("schedule: !name:other", r"line 2: schedule is !name:package\.schedule"),
    ("loader: !new:dict {batch: 1}", r"loader is a mapping"),
    ("seed: 1\nseed: 2", r"line 3: the key 'seed' stands there twice"),
    (
        "loader:\n  inner: {deep: 1, deep: 2}",
        r"line 3: .*'loader\.inner\.deep' .* twice",
    ),
    ("<<: {seed: 1}", r"line 2: merging by << loses values"),
    ("loader: !include:other.yaml", r"line 2: !include: is not followed"),
    ("seed: &s 1\nmargin: *s", r"line 2: anchors \(&s\) are not followed"),
    ("seed: *s", r"line 2: .*undefined alias 's'"),
    ("seed: [1", r"no valid YAML"),
    ("loader:\n\tbatch: 1", r"line 3: .*'\\t'"),
    ("seed: 1\n---\nseed: 2", r"line 3: .*another document"),
    ("? seed\n: 1", r"line 2: a key is a name with a colon"),
    ("3: 1", r"line 2: a key is a name with a colon"),
    ("!new:int seed: 1", r"line 2: a key is a name with a colon"),
    ("names: [007]", r"names\[0\] is 007, which"),
    (f"names: {'[' * 600}{']' * 600}", r"nested too deep"),
]
# Whole files.
NO_KEYS = "lines `key: value` are expected"
UNREADABLE = [
    (b"", NO_KEYS),
    (b"x: " + b"9" * 5000, "which is no number that can be read"),
    (b"- a\n", NO_KEYS),
    (b"!new:dict\nseed: 1\n", NO_KEYS),
    (b"{seed: 1, margin}\n", "line 1: a key is a name with"),
    (b"%YAML 1.1\n---\nseed: 1\n", "leave '%YAML 1.1' out"),
    (b"%TAG ! !new:\n---\nx: !int 1\n", "leave '%TAG ! !new:' out"),
    (b"seed: 1\nx: caf\xe9\n", r"no text in UTF-8 \(byte 15\)"),
    (b"seed: 1\n\x00", "no valid YAML: unacceptable character"),
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

    monkeypatch.setattr(document, "open", denied, raising=False)
    assert "none.yaml cannot be read: Permission" in refusal(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("1e-4", "YAML 1.2 reads as float and YAML 1.1 as str. Write 0.0001."),
        ("1e-9", "Write 1.0e-09."),
        ("0o12", "YAML 1.2 reads as int and YAML 1.1 as str. Write 10."),
        ("-08", "leave the zero in front out"),
        ("no", 'as str and YAML 1.1 as bool. Write "no" in quotes, or true or false.'),
        ("1:30", 'as str and YAML 1.1 as int. Write "1:30" in quotes.'),
        ("<<", 'Write "<<" in quotes.'),
    ],
)
def test_what_readers_disagree_on_is_refused_in_a_complete_file(
    write, written, instead
):
    folder = write(
        lone=f"seed: 3\nlr: {written}\n", listed=f"seed: 3\nx: [{written}]\n"
    )
    for name in ("lone", "listed"):
        said = refusal(folder / f"{name}.yaml")
        assert f"{name}.yaml, line 2: " in said
        assert said.endswith(instead) or "leave" in said
    # In quotes it may stand, and other files are written anew.
    file = write(mine=f"x: '{written}'\nlr: 0.1\n", near="base: mine.yaml\nlr: 1e-4\n")
    assert resolve(file / "near.yaml") == f"x: '{written}'\nlr: 0.0001\n"


@settings(max_examples=100, deadline=None)
@given(
    st.from_regex(r"[-+]?[0-9a-foxENO_.:]{1,7}(e[-+]?[0-9]{1,3})?", fullmatch=True)
    | st.sampled_from(["yes", "No", "ON", "off", "y", "true", "~", "null", ".inf"])
)
def test_what_passes_is_one_value_for_us_pyyaml_and_hyperpyyaml(written):
    text = f"x: {written}\n"
    try:
        root = parse_file(text, "x.yaml")
        refuse_disagreement(root)
    except ValueError:
        return
    try:
        ours = load_hyperpyyaml(text)
    except (IndexError, ValueError):
        return  # ruamel.yaml fails to write -0.e-0 and its like.
    assert repr(yaml.safe_load(text)) == repr(ours)
    assert repr(root.content["x"].plain(str)) == repr(ours["x"])


def test_tuples_are_objects_before_and_after_hyperpyyaml_was_used(write):
    folder = write(mine="x: (1, 2)\n", near="base: mine.yaml\nx: (1, 3)\n")
    load_hyperpyyaml("x: (1, 2)\n")
    load_hyperpyyaml("x: (1, 2)\n")
    after = parse_file("x: (1, 2)", "x").content["x"].tag
    code = (
        "from speechbrain_rev.hparams.document import parse_file\n"
        "print(parse_file('x: (1, 2)', 'x').content['x'].tag, end='')"
    )
    before = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert before == after == "!tuple"
    assert resolve(folder / "mine.yaml") == "x: (1, 2)\n"
    assert "x is !tuple and cannot become" in refusal(folder / "near.yaml")


@pytest.mark.parametrize(
    ("formula", "result"),
    [
        ("2 * 3 + 4 - 1", 9),
        ("7 / 2", 3.5),
        ("1e300 * 1e300", float("inf")),
        ("results/revnet57/1986", "results/revnet57/1986"),
        ("it's/here", "it's/here"),
        ("", ""),
        # What leaves the range of numbers is refused at once.
        ("1986 ** 1986 ** 2", ArithmeticError),
        ("1 // 1986 ** 10 ** 300", ArithmeticError),
        (" * ".join(["10 ** 300"] * 20), ArithmeticError),
        ("1 / 0", ArithmeticError),
        ("+".join(["1"] * 100_000), ArithmeticError),
        # What HyperPyYAML makes of texts is left to it.
        ("'a' * 10 ** 12", document.NotPlain),
        ("'%1000000000000d' % 1", document.NotPlain),
    ],
)
def test_a_formula_is_computed_or_refused_and_a_text_stays(formula, result):
    if isinstance(result, type):
        with pytest.raises(result):
            compute(formula)
    else:
        assert repr(compute(formula)) == repr(result)


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\x85"))
    | st.sampled_from(["<<", "a==b=", "(a, b)", "1e-4", "1:30", "no", "~", "[a", "007"])
    | st.sampled_from(['"\\', "a #b", "&a", "\x07", "\u2028", "\ufeff"])
)
def test_any_text_survives_the_way_through_the_file(original):
    for reader in ("rt", "safe"):
        text = f"a: {quoted(original)}  # note\n"
        assert YAML(typ=reader, pure=True).load(text) == {"a": original}
    # What HyperPyYAML would take for a tuple or a formula has to be quoted too.
    assert resolve_references(f"a: {quoted(original)}\n").getvalue()
    assert load_hyperpyyaml(f"a: {quoted(original)}\n") == {"a": original}
