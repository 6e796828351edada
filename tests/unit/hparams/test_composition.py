"""Files, bases and the command line become one text; types, references and families."""

import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hyperpyyaml import load_hyperpyyaml, resolve_references
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from speechbrain_rev.architectures import ARCHITECTURES, TRAINING_DEFAULTS
from speechbrain_rev.data.preparation import Prepared
from speechbrain_rev.hparams import (
    OptimizerWarning,
    compose,
    placeholders,
    plain_settings,
    resolve,
)
from tests.recipes.runs import recipe
from tests.unit.hparams.files import (
    COMPLETE,
    DATA,
    FOLDER,
    TRAIN,
    flat,
    refusal,
    values,
)

train = recipe("train")


def test_nearer_files_override_farther_ones_and_the_command_line_overrides_all(write):
    folder = write(
        middle="base: train.yaml\nseed: 1\nmargin: 9.0\nnames: [c]\n",
        near="base: middle.yaml\nseed: 2\nmargin: 0.4\n",
    )
    resolved = values(resolve(folder / "near.yaml", {"seed": "3"}))
    # A value that is overridden again need not be in range.
    assert (resolved["seed"], resolved["margin"], resolved["names"]) == (3, 0.4, ["c"])


def test_the_published_file_stays_letter_by_letter(tmp_path):
    file = tmp_path / "open.yaml"
    file.write_text(TRAIN.read_text().replace("arch: revnet46", "arch: !PLACEHOLDER"))
    assert resolve(file) == file.read_text()


def test_all_but_the_changed_values_is_the_complete_file_letter_by_letter(write):
    folder = write(
        near="base: train.yaml\narch: revnet46\nlines: [x]\nempty: 3\n"
        "loader: {batch: 4, inner: {deep: 9}}\nencoder: {width: 8}\n"
        "schedule: !name:package.schedule\n"
    )
    expected = (
        COMPLETE.replace("arch: revnet57", "arch: revnet46")
        .replace("optimizer_name: null", "optimizer_name: sgd")
        .replace("\nlr: null", "\nlr: 0.1 ")
        .replace("final_lr: null", "final_lr: 5e-05")
        .replace("weight_decay: null", "weight_decay: 0.0001")
        .replace("number_of_epochs: null", "number_of_epochs: 150")
        .replace("empty:", "empty: 3")
        .replace("lines:\n  - one\n  # between\n  - two", "lines: [x]")
        .replace("batch: 2", "batch: 4")
        .replace("deep: 1", "deep: 9")
        .replace("width: 3", "width: 8")
    )
    assert resolve(folder / "near.yaml") == expected


@pytest.mark.parametrize(
    ("content", "overrides", "composed"),
    [
        ("seed: 1\n# nothing else\n", {}, "seed: 1\n# nothing else\n"),
        ("\ufeffx: 1      # one\ny:    2", {"x": 3}, "x: 3      # one\ny: 2\n"),
        ("x:   # one\n# two\ny:\n", {"x": 1, "y": 2}, "x: 1 # one\n# two\ny: 2\n"),
        ("x: !PLACEHOLDER  # a\n# b\ny: 1\n", {}, "x: !PLACEHOLDER  # a\n# b\ny: 1\n"),
        (
            "x: !PLACEHOLDER  # a\n\n# b\ny: !PLACEHOLDER  # c\nz: 1\n",
            {"x": 2},
            "x: 2             # a\n\n# b\ny: !PLACEHOLDER  # c\nz: 1\n",
        ),
        ('x: "one\n  two"  # two\n', {"x": "b"}, 'x: "b"  # two\n'),
        ("x:\n- 1\n- 2\n# z\n", {"x": [3]}, "x: [3]\n# z\n"),
        ("x:  # a\n- 1\n- 2\n\n# b\ny: 1\n", {"x": [3]}, "x: [3] # a\n\n# b\ny: 1\n"),
        ("seed: 3\r\nx: 5\r\n", {}, "seed: 3\nx: 5\n"),
    ],
)
def test_comments_stay_where_they_are_around_any_value(
    write, content, overrides, composed
):
    file = write() / "odd.yaml"
    file.write_bytes(content.encode())
    assert resolve(file, overrides) == composed


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("link.yaml", r"circle: .*near\.yaml -> .*link\.yaml"),
        ("loop.yaml", r"the base of .*near\.yaml,.*Too many levels of symbolic links"),
        ("[train.yaml]", "line 1: base takes the name of one file"),
        ('""', "line 1: base takes the name of one file"),
    ],
)
def test_a_base_that_is_none_is_refused(write, base, message):
    folder = write(near=f"base: {base}\n")
    targets = {"loop": folder / "loop.yaml", "link": folder / "near.yaml"}
    for name, target in targets.items():
        (folder / f"{name}.yaml").symlink_to(target)
    assert re.search(message, refusal(folder / "near.yaml"))


TEXTS = st.sampled_from(
    ["a b", "größer 🎤", "1e-4", "no", "007", "<<", "a #b", "x: y", '"']
)
# Values that hold together whichever of them are chosen. Of a number with an exponent
# HyperPyYAML may lose the 16th digit.
CHOICES = {
    "seed": st.integers(0, 2**32 - 1),
    "output_folder": TEXTS,
    "noise_folder": st.none() | TEXTS,
    "trial_lists": st.lists(TEXTS, max_size=3),
    "arch": st.sampled_from(sorted(ARCHITECTURES)),
    "batch_size": st.integers(1, 2**63 - 1),
    "convolution_error": st.sampled_from([1e-30, 1e-5, 0.5, 1]),
    "scale": st.sampled_from([1e-300, 1.5e-07, 1, 123456.0, 1e300]),
    "sync_batchnorm": st.booleans(),
    "speeds": st.sampled_from([[1.0], [0.9, 1.0], [1.0, 1.05, 0.95]]),
    "steps_per_epoch": st.none() | st.integers(1, 10**9),
}


@pytest.fixture(scope="module")
def settings_of_train(tmp_path_factory):
    """The settings of train.yaml, without what is built from them."""
    path = tmp_path_factory.mktemp("flat") / "flat.yaml"
    path.write_text(flat(TRAIN.read_text()))
    return path


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)
@given(
    overrides=st.fixed_dictionaries({}, optional=CHOICES),
    draw=st.randoms(use_true_random=False),
)
def test_every_reader_reads_what_was_given_in_whichever_place_and_order(
    settings_of_train, tmp_path, overrides, draw
):
    composed = resolve(settings_of_train, {"data_folder": Path("data"), **overrides})
    loaded = load_hyperpyyaml(composed)
    assert loaded == plain_settings(composed)
    assert {key: loaded[key] for key in overrides} == overrides
    (tmp_path / "again.yaml").write_text(composed)
    assert resolve(tmp_path / "again.yaml") == composed
    # Two files that share the same values in another order.
    shuffled = draw.sample(list(overrides.items()), len(overrides))
    half = len(shuffled) // 2
    write_override(tmp_path / "far.yaml", settings_of_train, dict(shuffled[:half]))
    write_override(tmp_path / "near.yaml", "far.yaml", dict(shuffled[half:]))
    assert resolve(tmp_path / "near.yaml", DATA) == composed


def write_override(path, base, overrides):
    YAML(typ="safe", pure=True).dump({"base": str(base), **overrides}, path)


def test_compose_lists_all_that_is_missing_and_separates_run_options(write):
    file = str(write() / "train.yaml")
    with pytest.raises(ValueError, match=r"2 value\(s\).*: seed, data_folder\. .*--s"):
        compose([file, "--seed=!PLACEHOLDER"])
    for arguments in ([], ["--lr=1", file]):
        with pytest.raises(ValueError, match="The hyperparameter file comes first"):
            compose(arguments)
    arguments = [file, "--data_folder=/a=b/007", "--device", "cpu", "--seed", "3"]
    composition = compose(arguments, run_options=["device"])
    read = values(composition.text)
    assert (read["data_folder"], read["seed"]) == ("/a=b/007", 3)
    assert composition.file == file
    assert composition.run_arguments == ("--device", "cpu")


# Of knobs, and of other keys, whose type is that of the value in the complete file.
WRONG_VALUES = [
    ("seed: one", r"seed takes an integer .*, not one"),
    ("seed: '3'", "seed takes an integer .*, not '3'"),
    ("seed: null", r"seed takes an integer .*, not null"),
    ("seed: {a: 1}", r"seed takes an integer .*, not a mapping"),
    ("seed: !new:int [1]", r"seed takes an integer .*, not !new:int"),
    ("trials_folder: 3", r"trials_folder takes a text, or a list of them, not 3"),
    ("folder: 2001-01-01", r"text, not 2001-01-01"),
    ("speeds: (1.0, 0.9)", r"list of numbers .*, not .*\(1\.0, 0\.9\)"),
    ("speeds: [1.0, fast]", r"list of numbers .*, not \[1\.0, fast\]"),
    ("encoder: {width: x}", r"encoder\.width takes an integer"),
    # References to nothing, in a circle, or to values out of range.
    ("folder: !ref <sead>/x", r"refers to an unknown key 'sead'\. Did you mean s"),
    ("names: [a, !ref <nosuch>]", r"names refers to an unknown key 'nosuch'"),
    ("seed: !ref <seconds>", "circle: seed -> seconds -> seed"),
    ("margin: !ref <seed> / 0", "margin cannot be computed: <seed> / 0 is"),
    ("data_folder: <nope>", "data_folder refers to an unknown key 'nope'"),
    ("seed: !ref <arch>", r"to 4294967295, not revnet57 \(!ref <arch>\)\. For anot"),
    ("margin: !ref <seed>", r"and below 3\.14159, not 1986 \(!ref <seed>\)"),
    ("speeds: [!ref <arch>]", r"and of at most 10, not \[!ref <arch"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_VALUES)
def test_a_wrong_value_is_refused_with_key_and_place(write, content, message):
    said = refusal(write(near=f"base: train.yaml\n{content}\n") / "near.yaml")
    assert "near.yaml, line 2: " in said
    assert re.search(message, said)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sead", "1", r"unknown key 'sead'\. Did you mean seed"),
        ("base", "x.yaml", "unknown key 'base'"),
        ("margin", math.nan, r"margin takes a number .*, not \.nan"),
        (
            "data_folder",
            "null",
            r"data_folder takes a text, or a list of them, not null",
        ),
        ("folder", "!ref results/<sed>", "folder refers to an unknown key"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(write, key, value, message):
    said = refusal(write() / "train.yaml", {key: value})
    assert re.match(f"command line: {message}", said)


@pytest.mark.parametrize(
    ("key", "given_value", "written"),
    [
        ("margin", "1", "1.0"),
        ("margin", "1_0.0e-5", "0.0001"),
        ("margin", "1e-6", "1e-06"),
        ("seed", "0o12", "10"),
        ("seed", "0x0a", "10"),
        ("sync_batchnorm", "TRUE", "true"),
        ("steps_per_epoch", "~", "null"),
        ("folder", "!ref <data_folder>/x", "!ref <data_folder>/x"),
        ("names", "[!ref <arch>, b]", "[!ref <arch>, b]"),
    ],
)
def test_values_are_written_so_that_all_readers_take_them(
    write, key, given_value, written
):
    folder = write(near=f"base: train.yaml\n{key}: {given_value}\n")
    composed = resolve(folder / "near.yaml")
    assert f"\n{key}: {written}" in composed
    assert resolve(folder / "train.yaml", {key: given_value}) == composed


def test_references_are_followed_as_hyperpyyaml_does_and_placeholders_wait():
    text = resolve(TRAIN, DATA)
    expected = YAML(typ="rt").load(resolve_references(text).getvalue())
    read = plain_settings(text)
    assert len(read) > 40
    assert read == {key: expected[key] for key in read}
    waiting = "a: !PLACEHOLDER\nb: !ref <a>/x\nc: 5\nd: !ref <c.imag>\n"
    assert plain_settings(waiting) == {"c": 5}
    assert placeholders(waiting) == ("a",)
    with pytest.raises(
        ValueError, match="text, line 1: a refers to an unknown key 'b'"
    ):
        plain_settings("a: !ref <b>\n")


def test_nothing_that_a_file_names_is_built_or_listed(write, tmp_path):
    mark = tmp_path / "mark"
    text = f"x: !apply:pathlib.Path.touch ['{mark}']\ny: {{c: 1}}\nz: !name:os.system\n"
    assert plain_settings(resolve(write(bad=text) / "bad.yaml")) == {}
    assert not mark.exists()


def test_other_references_are_left_alone(write):
    references = ["<encoder.width>", "<loader[inner][deep]>", "<names>", "<empty>", "x"]
    added = "".join(f"other{i}: !ref {it}\n" for i, it in enumerate(references))
    assert resolve(write(mine=COMPLETE + added) / "mine.yaml").endswith(added)


def test_a_circle_may_be_broken_by_a_value(write):
    file = write(mine="x: !ref <y>\ny: !ref <x>\nz: [!ref <z>]\n") / "mine.yaml"
    assert "references go in a circle: x -> y -> x" in refusal(file)
    assert resolve(file, {"x": 1, "z": [2]}) == "x: 1\ny: !ref <x>\nz: [2]\n"


def test_a_value_in_place_of_a_knob_at_depth_is_held_to_its_range(tmp_path):
    file = tmp_path / "mine.yaml"
    for content, message in (
        ("wav_augment: {augment_prob: 2}", "wav_augment.augment_prob takes a numbe"),
        ("opt_class: {name: adamv}", "opt_class.name takes sgd, "),
    ):
        file.write_text(f"base: {TRAIN}\n{content}\n")
        assert refusal(file).startswith(f"{file}, line 2: {message}")


@pytest.mark.parametrize("family", TRAINING_DEFAULTS)
def test_null_stands_for_the_values_of_the_encoders_family(family):
    arch = next(row.name for row in ARCHITECTURES.values() if row.family == family)
    read = values(resolve(TRAIN, {"arch": arch}))
    expected = vars(TRAINING_DEFAULTS[family])
    assert {name: read[name] for name in expected} == expected


@pytest.mark.filterwarnings("ignore::speechbrain_rev.hparams.OptimizerWarning")
def test_rates_and_decay_go_with_the_optimizer_and_the_rest_with_the_family(write):
    file = write(mine="net: df_revnet89\narch: !ref <net>\nlr: null\n") / "train.yaml"
    read = values(resolve(file, {"arch": "df_revnet89", "optimizer_name": "sgd"}))
    expected = {"lr": 0.1, "weight_decay": 1e-4, "number_of_epochs": 165}
    assert {key: read[key] for key in expected} == expected
    said = refusal(file, {"optimizer_name": "adam", "lr": "0.1"})
    assert re.match(r"command line: .* adam .*: give final_lr, weight_decay too", said)
    # What is still to be named decides nothing.
    waiting = resolve(file, {"optimizer_name": "!PLACEHOLDER"})
    assert "\nlr: null  # peak\n" in waiting
    assert "\nnumber_of_epochs: 150\n" in waiting
    assert values(resolve(file.with_name("mine.yaml")))["lr"] == 1.25e-4


def caught(*arguments, call=resolve):
    """The warnings of a composition."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        call(*arguments)
    return [str(warning.message) for warning in recorded]


def test_another_optimizer_than_the_familys_is_named_once_with_its_place():
    for arch, other, family in (
        ("revnet57", "adamw", "sgd"),
        ("df_resnet56", "sgd", "adamw"),
    ):
        assert caught(TRAIN, {"arch": arch, "optimizer_name": family}) == []
        (said,) = caught(TRAIN, {"arch": arch, "optimizer_name": other})
        assert f"{arch} is to be trained with {other} (command line)" in said
        assert f"the paper trains its family with {family}" in said
    (said,) = caught(FOLDER / "minivox.yaml")
    assert "minivox.yaml, line 5)" in said
    # fine_tune sets sgd and leaves the encoder open.
    assert caught(FOLDER / "fine_tune.yaml") == []
    with pytest.warns(OptimizerWarning) as recorded:
        compose([str(TRAIN), "--data_folder=x", "--optimizer_name=adamw"])
    assert [warning.filename for warning in recorded] == [__file__]


def test_resolve_writes_utf_8_beside_a_warning_of_one_line_that_can_be_silenced(write):
    file = write() / "train.yaml"
    command = [sys.executable, "-m", "speechbrain_rev", "resolve", str(file)]
    shown, silent = (
        subprocess.run(
            [*command, "--optimizer_name=adamw"],
            env={**os.environ, "PYTHONWARNINGS": filters, "LC_ALL": "C"},
            capture_output=True,
            check=True,
        )
        for filters in ("", "ignore:Not the family")
    )
    assert shown.stderr.startswith(b"speechbrain-rev: warning: Not the family's")
    assert (shown.stderr.count(b"\n"), silent.stderr) == (1, b"")
    assert shown.stdout == silent.stdout
    assert "größer 🎤".encode() in shown.stdout


def test_training_shows_the_warning_once_in_its_first_process(tmp_path, monkeypatch):
    arguments = [str(TRAIN), "--data_folder=x", "--optimizer_name=adamw"]
    prepared = Prepared(512, 4, 0, 0, 0)

    def start():
        text, settings, *_ = train.compose_run(arguments)
        train.write_hyperparams(tmp_path, text, settings, prepared)

    assert len(caught(call=start)) == 1
    written = values((tmp_path / "hyperparams.yaml").read_text())
    assert (written["optimizer_name"], written["steps_per_epoch"]) == ("adamw", 2)
    monkeypatch.setenv("RANK", "1")
    assert caught(arguments, call=train.compose_run) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (20, 40, 6.0)),
        ({"number_of_epochs": 300}, (20, 40, 6.0)),
        ({"number_of_epochs": 14}, (2, 4, 1.0)),
        ({"number_of_epochs": 14, "warmup_epochs": 0.5}, (2, 4, 0.5)),
        ({"number_of_epochs": 14, "arch": "df_revnet281"}, (0, 0, 1.0)),
    ],
)
def test_the_schedule_of_a_short_run_scales_with_its_epochs(given, expected):
    read = values(resolve(TRAIN, {**DATA, **given}))
    names = ("margin_start_epoch", "margin_end_epoch", "warmup_epochs")
    assert tuple(read[name] for name in names) == expected


def test_a_run_that_gets_more_epochs_keeps_its_schedule():
    recorded = {"margin_start_epoch": 2, "margin_end_epoch": 4, "warmup_epochs": 1.0}
    command = [str(TRAIN), "--data_folder=a", "--number_of_epochs=30"]
    read = values(
        compose([*command, "--warmup_epochs=3"], recorded_of=lambda _: recorded).text
    )
    assert (read["margin_start_epoch"], read["margin_end_epoch"]) == (2, 4)
    assert read["warmup_epochs"] == 3
