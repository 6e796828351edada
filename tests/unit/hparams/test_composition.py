"""Files, bases and the command line become one text."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hyperpyyaml import load_hyperpyyaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.hparams import compose, placeholders, plain_settings, resolve
from tests.unit.hparams.files import COMPLETE, DATA, TRAIN, values


class TestResolve:
    def test_a_complete_file_is_its_own_composition(self, write):
        file = write(plain="seed: 1\n# nothing else\n") / "plain.yaml"
        assert resolve(file) == file.read_text()

    def test_nearer_files_go_before_farther_ones_and_the_command_line_before_all(
        self, write
    ):
        folder = write(
            middle="base: train.yaml\nseed: 1\nmargin: 0.3\nnames: [c]\n",
            near="base: middle.yaml\nseed: 2\nmargin: 0.4\n",
        )
        found = values(resolve(folder / "near.yaml", {"seed": "3"}))
        assert (found["seed"], found["margin"], found["names"]) == (3, 0.4, ["c"])

    @pytest.mark.skipif(os.name != "posix", reason="there are no such files elsewhere")
    @pytest.mark.parametrize("kind", ["fifo", "zero", "null", "socket", "folder"])
    def test_a_base_is_a_regular_file(self, write, tmp_path, kind):
        folder, base = write(near="base: base.yaml\n"), tmp_path / "base.yaml"
        if kind == "fifo":
            os.mkfifo(base)
        elif kind == "folder":
            base.mkdir()
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(base))
        else:
            # Whoever reads one to its end does not come back.
            base.symlink_to(f"/dev/{kind}")
        with pytest.raises(
            ValueError, match=r"base\.yaml, the base of .*near\.yaml, cannot be read: "
        ):
            resolve(folder / "near.yaml")

    def test_a_base_and_a_file_have_a_bounded_size(self, write):
        folder = write(near="base: base.yaml\n", base="seed: 1\n")
        for name in ("base.yaml", "near.yaml"):
            os.truncate(folder / name, 2**40)
            with pytest.raises(
                ValueError,
                match=rf"{name}.* cannot be read: it has more than 1,000,000",
            ):
                resolve(folder / "near.yaml")

    def test_lines_end_in_any_way(self, write):
        folder = write(near="base: train.yaml\n")
        (folder / "near.yaml").write_bytes(
            b"\xef\xbb\xbfbase: train.yaml\r\nseed: 5\rmargin: 0.3\r\n"
        )
        found = values(resolve(folder / "near.yaml"))
        assert (found["seed"], found["margin"]) == (5, 0.3)

    def test_base_is_found_beside_the_file_that_names_it(self, write, tmp_path):
        write()
        other = tmp_path / "mine"
        other.mkdir()
        (other / "run.yaml").write_text("base: ../train.yaml\nseed: 5\n")
        assert values(resolve(other / "run.yaml"))["seed"] == 5

    def test_all_but_the_changed_values_is_the_complete_file_letter_by_letter(
        self, write
    ):
        folder = write(
            near="base: train.yaml\narch: revnet46\nlines: [x]\nempty: 3\n"
            "loader: {batch: 4, inner: {deep: 9}}\nencoder: {width: 8}\n"
        )
        expected = (
            COMPLETE.replace("arch: revnet57", "arch: revnet46")
            .replace("optimizer_name: null", "optimizer_name: sgd")
            .replace("\nlr: null", "\nlr: 0.1")
            .replace("final_lr: null", "final_lr: 5.0e-05")
            .replace("weight_decay: null", "weight_decay: 0.0001")
            .replace("number_of_epochs: null", "number_of_epochs: 150")
            .replace("empty:", "empty: 3")
            .replace("lines:\n  - one\n  # between\n  - two", "lines: [x]")
            .replace("batch: 2", "batch: 4")
            .replace("deep: 1", "deep: 9")
            .replace("width: 3", "width: 8")
        )
        assert resolve(folder / "near.yaml") == expected

    def test_an_aligned_comment_and_a_missing_last_newline_do_no_harm(self, tmp_path):
        (tmp_path / "x.yaml").write_text(
            "x: 1      # one\ny:    2", encoding="utf-8-sig"
        )
        assert resolve(tmp_path / "x.yaml", {"x": 3, "y": 4}) == "x: 3      # one\ny: 4"

    def test_a_comment_after_nothing_stays_where_it_is(self, write):
        folder = write(odd="x:   # one\n# two\ny:\nz: !PLACEHOLDER  # three\n")
        composed = resolve(folder / "odd.yaml", {"x": 1, "y": 2, "z": 3})
        assert composed == "x: 1   # one\n# two\ny: 2\nz: 3  # three\n"

    def test_values_over_several_lines_make_room_for_one(self, write):
        folder = write(
            odd='x: |\n  one\n  two\n# after\ny: "one\n  two"  # two\nz:\n- 1\n- 2\n'
        )
        composed = resolve(folder / "odd.yaml", {"x": "a", "y": "b", "z": [3]})
        assert composed == "x: a\n# after\ny: b  # two\nz: [3]\n"

    @pytest.mark.parametrize("newline", ["\r\n", "\r"])
    def test_lines_may_end_as_on_other_systems(self, tmp_path, newline):
        file = tmp_path / "near.yaml"
        lines = [f"base: {TRAIN}", "seed: 3", "margin: 0.5  # wide", ""]
        file.write_bytes(newline.join(lines).encode("utf-8-sig"))
        assert resolve(file) == resolve(TRAIN, {"seed": 3, "margin": 0.5})

    def test_references_and_placeholders_may_replace_values(self, write):
        folder = write(
            near="base: train.yaml\nfolder: !ref <data_folder>/x\nseed: !PLACEHOLDER\n"
            "names: [!ref <arch>, !ref <data_folder>/x, b]\n"
        )
        composed = resolve(folder / "near.yaml")
        assert "folder: !ref <data_folder>/x\n" in composed
        assert "names: [!ref <arch>, !ref <data_folder>/x, b] " in composed
        assert placeholders(composed) == ("seed", "data_folder")

    def test_a_value_may_go_back_to_null_where_null_means_something(self, write):
        folder = write(near="base: train.yaml\nlr: 0.3\nsteps_per_epoch: 7\n")
        found = values(
            resolve(folder / "near.yaml", {"lr": "null", "steps_per_epoch": "null"})
        )
        assert (found["lr"], found["steps_per_epoch"]) == (0.1, None)

    def test_values_of_a_caller_are_taken_as_they_are(self, write):
        overrides = {
            "speeds": [1.0],
            "sync_batchnorm": True,
            "final_lr": 1e-6,
            "empty": None,
        }
        composed = resolve(write() / "train.yaml", overrides)
        found = values(composed)
        assert {key: found[key] for key in overrides} == overrides
        assert "final_lr: 1.0e-06\n" in composed
        folder = Path("speech", "a b")
        composed = resolve(write() / "train.yaml", {"data_folder": folder})
        assert values(composed)["data_folder"] == str(folder)

    def test_nothing_that_a_file_names_is_built(self, write, tmp_path):
        mark = tmp_path / "mark"
        folder = write(bad=f"seed: 1\nx: !apply:pathlib.Path.touch ['{mark}']\n")
        resolve(folder / "bad.yaml")
        assert not mark.exists()

    def test_a_value_that_is_overridden_again_must_fit_its_type_only(self, write):
        # What counts in the end is in range; a wrong type is a slip in any file.
        folder = write(middle="base: train.yaml\nmargin: 9.0\n")
        (folder / "near.yaml").write_text("base: middle.yaml\nmargin: 0.5\n")
        assert values(resolve(folder / "near.yaml"))["margin"] == 0.5
        (folder / "middle.yaml").write_text("base: train.yaml\nmargin: wide\n")
        with pytest.raises(ValueError, match=r"middle\.yaml, line 2: margin takes"):
            resolve(folder / "near.yaml")


class TestBases:
    def test_a_circle_is_shown(self, write):
        folder = write(a="base: b.yaml\n", b="base: c.yaml\n", c="base: a.yaml\n")
        with pytest.raises(ValueError, match=r"circle: .*a.* -> .*b.* -> .*c.* -> .*a"):
            resolve(folder / "a.yaml")

    def test_a_circle_by_another_name_is_shown(self, write):
        folder = write(a="base: link.yaml\n")
        (folder / "link.yaml").symlink_to(folder / "a.yaml")
        with pytest.raises(ValueError, match=r"circle: .*a\.yaml -> .*link\.yaml"):
            resolve(folder / "a.yaml")

    @pytest.mark.parametrize(
        ("base", "reason"),
        [
            (".", "Is a directory"),
            ("loop.yaml", "Too many levels of symbolic links"),
            ('"a\\0b"', "null byte"),
            ("x" * 5000, "File name too long"),
        ],
    )
    def test_one_that_cannot_be_read_is_named_with_the_file_that_wants_it(
        self, write, base, reason
    ):
        folder = write(near=f"base: {base}\n")
        (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
        with pytest.raises(ValueError, match=rf"the base of .*near\.yaml,.*{reason}"):
            resolve(folder / "near.yaml")

    @pytest.mark.parametrize(
        "base", ["[train.yaml]", "3", "!ref <seed>", "", "null", "!PLACEHOLDER", '""']
    )
    def test_base_is_the_name_of_one_file(self, write, base):
        folder = write(near=f"base: {base}\n")
        with pytest.raises(
            ValueError, match=r"line 1: base takes the name of one file"
        ):
            resolve(folder / "near.yaml")

    def test_the_command_line_cannot_name_one(self, write):
        with pytest.raises(ValueError, match="command line: unknown key 'base'"):
            resolve(write() / "train.yaml", {"base": "x.yaml"})


def texts(exclude):
    """Any that are taken as they are: neither arithmetic nor references to HyperPyYAML."""
    characters = st.characters(codec="utf-8", exclude_characters=exclude)
    return st.text(characters, min_size=1).filter(
        lambda text: (
            text != "null"
            and not re.match(r"!|\s*[-+.(0-9]|.*<[^>]*>", text, re.DOTALL)
        )
    )


def numbers(low, high):
    """Numbers of 6 digits: of one with an exponent HyperPyYAML may lose the 16th."""
    return st.floats(low, high).map(lambda number: float(f"{number:.6g}"))


# Values that hold together whichever of them are chosen.
CHOICES = {
    "seed": st.integers(0, 2**32 - 1),
    "output_folder": texts("\x85"),
    "noise_folder": st.none() | texts("\x85"),
    "trial_lists": st.lists(texts("\x85?"), max_size=3),
    "arch": st.sampled_from(sorted(ARCHITECTURES)),
    "batch_size": st.integers(1, 2**63 - 1),
    "augment_prob": numbers(0, 1),
    "margin": numbers(0, 3.1415),
    "snr_low": numbers(-1e30, 0),
    "scale": numbers(1e-300, 1e300),
    "lr": numbers(1e-4, 1e300),
    "weight_decay": st.none() | numbers(0, 1),
    "optimizer_bits": st.sampled_from([8, 32]),
    "sync_batchnorm": st.booleans(),
    "speeds": st.sampled_from([[1.0], [0.9, 1.0], [1.0, 1.05, 0.95]]),
    "steps_per_epoch": st.none() | st.integers(1, 10**9),
}
OVERRIDES = st.fixed_dictionaries({}, optional=CHOICES)


def stated(overrides):
    """What of the overrides no family default replaces."""
    return {
        key: value
        for key, value in overrides.items()
        if not (key == "weight_decay" and value is None)
    }


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """The settings of train.yaml, without what is built from them."""
    path = tmp_path_factory.mktemp("flat") / "flat.yaml"
    path.write_text(TRAIN.read_text().split("# What follows is built")[0])
    return path


class TestStability:
    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(OVERRIDES)
    def test_resolving_again_changes_nothing(self, flat, tmp_path, overrides):
        composed = resolve(flat, overrides)
        (tmp_path / "again.yaml").write_text(composed)
        assert resolve(tmp_path / "again.yaml") == composed

    @settings(max_examples=12, deadline=None)
    @given(OVERRIDES)
    def test_every_reader_finds_the_values_that_were_given(self, flat, overrides):
        composed = resolve(flat, {**DATA, **overrides})
        loaded = load_hyperpyyaml(composed)
        ours = plain_settings(composed)
        assert loaded == ours
        expected = stated(overrides)
        assert {key: loaded[key] for key in expected} == expected

    @settings(
        max_examples=12,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(OVERRIDES, st.randoms(use_true_random=False))
    def test_neither_order_nor_place_of_the_values_matters(
        self, flat, tmp_path, overrides, draw
    ):
        expected = resolve(flat, overrides)
        shuffled = dict(draw.sample(list(overrides.items()), len(overrides)))
        assert resolve(flat, shuffled) == expected
        # A file of the same values, and two files that share them.
        half = len(shuffled) // 2
        parts = [dict(list(shuffled.items())[:half]), dict([*shuffled.items()][half:])]
        write_override(tmp_path / "one.yaml", flat, shuffled)
        write_override(tmp_path / "far.yaml", flat, parts[0])
        write_override(tmp_path / "near.yaml", "far.yaml", parts[1])
        assert resolve(tmp_path / "one.yaml") == expected
        assert resolve(tmp_path / "near.yaml") == expected

    def test_two_processes_write_the_same_bytes(self, tmp_path):
        command = [sys.executable, "-m", "speechbrain_rev", "resolve"]
        arguments = [str(TRAIN), "--arch=df_revnet89", "--output_folder=größer 🎤"]
        written = [
            subprocess.run(
                [*command, *arguments],
                env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONUTF8": "1"},
                capture_output=True,
                check=True,
            ).stdout
            for hash_seed in ("0", "1")
        ]
        assert written[0] == written[1]
        assert "größer 🎤".encode() in written[0]


def write_override(path, base, overrides):
    """Write a file of settings; ruamel writes a few texts, as ': 0', so that none reads them."""
    yaml = YAML(typ="safe", pure=True)
    # A text that is folded at an escape gets a space.
    yaml.width = 2**20
    values = {"base": str(base), **overrides}
    yaml.dump(values, path)
    try:
        read = yaml.load(path)
    except YAMLError:
        read = None
    assume(read == values)


class TestCompose:
    def test_all_that_is_missing_is_listed_together(self, write):
        folder = write(near="base: train.yaml\nseed: !PLACEHOLDER\n")
        with pytest.raises(
            ValueError, match=r"2 value\(s\).*: seed, data_folder\. .*--s"
        ):
            compose([str(folder / "near.yaml")])

    def test_text_and_run_options_come_apart(self, write):
        file = str(write() / "train.yaml")
        composition = compose(
            [file, "--data_folder=/a=b/007", "--device", "cpu", "--seed", "3"],
            run_options=["device"],
        )
        found = values(composition.text)
        assert (found["data_folder"], found["seed"]) == ("/a=b/007", 3)
        assert (composition.file, composition.run_arguments) == (
            file,
            ("--device", "cpu"),
        )

    @pytest.mark.parametrize(
        "name", ["007", "1e5", "true", "a b", "~/x", "[", "#", "x: y", "(a)", "=", "<<"]
    )
    def test_text_stays_text_whatever_it_looks_like(self, write, name):
        file = str(write() / "train.yaml")
        composed = compose([file, f"--data_folder={name}"]).text
        assert values(composed)["data_folder"] == name

    @pytest.mark.parametrize("arguments", [[], ["--lr=1", "train.yaml"]])
    def test_the_file_comes_first(self, arguments):
        with pytest.raises(ValueError, match="The hyperparameter file comes first"):
            compose(arguments)
