import re
from pathlib import Path

import pytest
from hyperpyyaml import load_hyperpyyaml, resolve_references
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from speechbrain import Brain
from speechbrain import parse_arguments as parse_run_options

from speechbrain_rev.architectures import ARCHITECTURES, TRAINING_DEFAULTS
from speechbrain_rev.hparams import (
    compose,
    parse_arguments,
    placeholders,
    plain_settings,
    resolve,
    top_level_keys,
)
from speechbrain_rev.hparams.values import KINDS, text

FOLDER = Path(__file__).parents[2] / "hparams"
TRAIN = FOLDER / "train.yaml"
OVERRIDE_FILES = sorted(set(FOLDER.glob("*.yaml")) - {TRAIN})

COMPLETE = """\
# What this trains.
seed: 1986
arch: revnet57  # the encoder
optimizer_name: null
lr: null  # peak
final_lr: null
weight_decay: null
number_of_epochs: null
margin: 0.2
steps_per_epoch: null
sync_batchnorm: false
folder: !ref results/<arch>/<seed>
data_folder: !PLACEHOLDER  # speech
trials_folder: !ref <data_folder>
seconds: !ref <seed> * 2
speeds: [1.0, 0.9]
names: [a, b]  # of nobody, größer 🎤
empty:
lines:
  - one
  # between
  - two

# objects
loader:
    batch: 2  # utterances
    inner: {deep: 1}
encoder: !new:package.Encoder
    width: 3
    name: !ref <arch>
schedule: !name:package.schedule
"""


@pytest.fixture
def write(tmp_path):
    def write(**files):
        for name, content in {"train": COMPLETE, **files}.items():
            (tmp_path / f"{name}.yaml").write_text(content)
        return tmp_path

    return write


def values(composed):
    """All plain values, tags ignored."""
    return YAML(typ="rt").load(composed)


class TestComposition:
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
        (tmp_path / "a.yaml").write_text(
            "a: 1      # one\nb:    2", encoding="utf-8-sig"
        )
        assert resolve(tmp_path / "a.yaml", {"a": 3, "b": 4}) == "a: 3      # one\nb: 4"

    def test_an_integer_serves_as_a_number(self, write):
        composed = resolve(write() / "train.yaml", {"margin": "1", "lr": "2"})
        assert "margin: 1.0\n" in composed
        assert "lr: 2.0 " in composed
        assert "lr: .inf " in resolve(write() / "train.yaml", {"lr": ".inf"})

    def test_references_and_placeholders_may_replace_values(self, write):
        folder = write(
            near="base: train.yaml\nfolder: !ref <data_folder>/x\nseed: !PLACEHOLDER\n"
        )
        composed = resolve(folder / "near.yaml")
        assert "folder: !ref <data_folder>/x\n" in composed
        assert placeholders(composed) == ("seed", "data_folder")

    def test_a_value_may_go_back_to_null_where_null_means_something(self, write):
        folder = write(near="base: train.yaml\nlr: 0.3\nsteps_per_epoch: 7\n")
        found = values(
            resolve(folder / "near.yaml", {"lr": "null", "steps_per_epoch": "null"})
        )
        assert (found["lr"], found["steps_per_epoch"]) == (0.1, None)

    def test_values_of_a_caller_are_taken_as_they_are(self, write):
        overrides = {"speeds": [1.0], "sync_batchnorm": True, "lr": 1e-6, "empty": None}
        composed = resolve(write() / "train.yaml", overrides)
        found = values(composed)
        assert {key: found[key] for key in overrides} == overrides
        assert "lr: 1.0e-06 " in composed
        folder = Path("speech", "a b")
        composed = resolve(write() / "train.yaml", {"data_folder": folder})
        assert values(composed)["data_folder"] == str(folder)

    @settings(max_examples=60, deadline=None)
    @given(st.text(st.characters(codec="utf-8", exclude_categories=["C"])))
    def test_any_text_survives_the_way_through_the_file(self, original):
        for reader in ("rt", "safe"):
            read = YAML(typ=reader, pure=True).load(f"a: {text(original)}  # note\n")
            assert read == {"a": original}
        # What HyperPyYAML would take for a tuple or a formula has to be quoted too.
        assert resolve_references(f"a: {text(original)}\n").getvalue()
        assert load_hyperpyyaml(f"a: {text(original)}\n") == {"a": original}

    def test_nothing_that_a_file_names_is_built(self, write, tmp_path):
        mark = tmp_path / "mark"
        folder = write(bad=f"seed: 1\nx: !apply:pathlib.Path.touch ['{mark}']\n")
        resolve(folder / "bad.yaml")
        assert not mark.exists()


class TestFamilyDefaults:
    @pytest.mark.parametrize("arch", ["resnet34", "revnet57"])
    def test_residual_families_train_with_sgd(self, write, arch):
        found = values(resolve(write() / "train.yaml", {"arch": arch}))
        assert (found["optimizer_name"], found["lr"], found["weight_decay"]) == (
            "sgd",
            0.1,
            1e-4,
        )

    @pytest.mark.parametrize("arch", ["df_resnet56", "df_revnet89"])
    def test_depth_first_families_train_with_adamw(self, write, arch):
        found = values(resolve(write() / "train.yaml", {"arch": arch}))
        assert (found["optimizer_name"], found["lr"], found["weight_decay"]) == (
            "adamw",
            1.25e-4,
            0.05,
        )

    def test_rates_and_decay_follow_the_optimizer_and_the_rest_the_family(self, write):
        overrides = {"arch": "df_revnet89", "optimizer_name": "sgd"}
        found = values(resolve(write() / "train.yaml", overrides))
        assert (found["lr"], found["weight_decay"]) == (0.1, 1e-4)
        assert found["number_of_epochs"] == 165

    def test_what_a_file_says_is_not_replaced(self, write):
        found = values(resolve(write() / "train.yaml", {"lr": "0.7"}))
        assert found["lr"] == 0.7

    def test_an_optimizer_without_published_settings_asks_for_all_of_them(self, write):
        with pytest.raises(
            ValueError, match=r"adam .*: give final_lr, weight_decay too"
        ):
            resolve(write() / "train.yaml", {"optimizer_name": "adam", "lr": "0.1"})

    def test_nothing_is_filled_in_while_the_encoder_is_still_to_be_named(self, write):
        folder = write(near="base: train.yaml\narch: !PLACEHOLDER\n")
        assert "\nlr: null  # peak\n" in resolve(folder / "near.yaml")

    def test_an_unknown_encoder_is_refused(self, write):
        with pytest.raises(ValueError, match=r"revnet59.*revnet57"):
            resolve(write() / "train.yaml", {"arch": "revnet59"})


REFUSED_FILES = {
    "unknown key": ("sead: 1", r"line 2: unknown key 'sead'\. Did you mean seed or"),
    "unknown key, unlike any": ("qqq: 1", r"line 2: unknown key 'qqq'\. The nearest"),
    "unknown nested key": (
        "loader: {batsh: 1}",
        r"line 2: unknown key 'loader\.batsh'\. Did you mean loader\.batch\?",
    ),
    "unknown key two levels down": (
        "loader:\n    inner:\n        deap: 1",
        r"line 4: unknown key 'loader\.inner\.deap'\. Did you mean loader\.inner\.deep",
    ),
    "unknown argument": ("encoder: {wdth: 1}", r"'encoder\.wdth'.*encoder\.width"),
    "text for integer": ("seed: one", r"line 2: seed takes an integer, not one"),
    "number for integer": ("seed: 1.5", r"seed takes an integer, not 1\.5"),
    "truth for integer": ("seed: true", r"seed takes an integer, not true"),
    "text for number": ("margin: wide", r"margin takes a number, not wide"),
    "quoted number": ("margin: '0.3'", r"margin takes a number, not 0\.3"),
    "text for family number": ("lr: fast", r"lr takes a number or null, not fast"),
    "integer for truth": ("sync_batchnorm: 1", r"takes true or false, not 1"),
    "yes for truth": ("sync_batchnorm: yes", r"takes true or false, not yes"),
    "number for text": ("arch: 57", r"arch takes a text, not 57"),
    "number for referring text": ("folder: 3", r"folder takes a text, not 3"),
    "number for reference": ("trials_folder: 3", r"trials_folder takes a text, not 3"),
    "null for integer": ("seed: null", r"seed takes an integer, not null"),
    "nothing for integer": ("seed:", r"seed takes an integer, not nothing"),
    "scalar for list": ("speeds: 1.0", r"takes a list of numbers .*, not 1\.0"),
    "list for scalar": ("seed: [1]", r"seed takes an integer, not a list"),
    "mapping for scalar": ("seed: {a: 1}", r"seed takes an integer, not a mapping"),
    "wrong member": ("speeds: [1.0, fast]", r"takes a list of numbers .*, not a list"),
    "list in list": ("names: [[a]]", r"names takes a list of texts"),
    "object for scalar": ("seed: !new:int [1]", r"seed takes an integer"),
    "another object": (
        "encoder: !new:other.Encoder {width: 1}",
        r"encoder is !new:pac",
    ),
    "scalar for object": (
        "encoder: big",
        r"encoder is !new:package\.Encoder and cannot",
    ),
    "another function": (
        "schedule: !name:other",
        r"schedule is !name:package\.schedule",
    ),
    "object for mapping": ("loader: !new:dict {batch: 1}", r"loader is a mapping"),
    "scalar for mapping": ("loader: 3", r"loader is a mapping and cannot become"),
    "wrong type in object": ("encoder: {width: x}", r"encoder\.width takes an integer"),
    "twice": ("seed: 1\nseed: 2", r"line 3: the key 'seed' stands there twice"),
    "merge": ("<<: {seed: 1}", r"line 2: merging by << loses values"),
    "include": ("loader: !include:other.yaml", r"line 2: !include: is not followed"),
    "anchor": ("seed: &s 1", r"line 2: anchors \(&s\) are not followed"),
    "no YAML": ("seed: [1", r"no valid YAML"),
}


class TestRefusals:
    @pytest.mark.parametrize("case", REFUSED_FILES)
    def test_a_mistake_in_a_file_is_named_with_key_and_place(self, write, case):
        content, message = REFUSED_FILES[case]
        folder = write(near=f"base: train.yaml\n{content}\n")
        with pytest.raises(ValueError, match=message) as error:
            resolve(folder / "near.yaml")
        assert str(folder / "near.yaml") in str(error.value)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("sead", "1", r"command line: unknown key 'sead'\. Did you mean seed"),
            ("seed", "one", r"command line: seed takes an integer, not one"),
            ("speeds", "[1.0", r"command line.*no valid YAML.*Put the value of speeds"),
            ("loader", "{batsh: 1}", r"unknown key 'loader\.batsh'"),
            ("encoder", "!new:other.Encoder", r"encoder is !new:package\.Encoder"),
            ("data_folder", "null", r"data_folder takes a text, not null"),
        ],
    )
    def test_a_mistake_on_the_command_line_is_named(self, write, key, value, message):
        with pytest.raises(ValueError, match=message):
            resolve(write() / "train.yaml", {key: value})

    def test_a_circle_of_bases_is_shown(self, write):
        folder = write(a="base: b.yaml\n", b="base: c.yaml\n", c="base: a.yaml\n")
        with pytest.raises(ValueError, match=r"circle: .*a.* -> .*b.* -> .*c.* -> .*a"):
            resolve(folder / "a.yaml")

    def test_a_missing_base_is_named_with_the_file_that_wants_it(self, write):
        folder = write(near="base: none.yaml\n")
        with pytest.raises(ValueError, match=r"none\.yaml, the base of .*near\.yaml,"):
            resolve(folder / "near.yaml")

    @pytest.mark.parametrize("base", ["[train.yaml]", "3", "!ref <seed>"])
    def test_base_is_the_name_of_one_file(self, write, base):
        folder = write(near=f"base: {base}\n")
        with pytest.raises(
            ValueError, match=r"line 1: base takes the name of one file"
        ):
            resolve(folder / "near.yaml")

    @pytest.mark.parametrize("content", ["", "- a\n", "text"])
    def test_a_file_without_keys_is_refused(self, write, content):
        folder = write(near=content)
        with pytest.raises(ValueError, match=r"near\.yaml: lines `key: value`"):
            resolve(folder / "near.yaml")

    def test_a_file_that_is_no_text_is_refused(self, tmp_path):
        (tmp_path / "model.ckpt").write_bytes(b"PK\x03\x04\xff\xfe")
        with pytest.raises(
            ValueError, match=r"model\.ckpt cannot be read: it is no text"
        ):
            resolve(tmp_path / "model.ckpt")


class TestCommandLine:
    KEYS = ("lr", "precision", "trials")
    RUN_OPTIONS = ("device", "debug", "precision", "jit_module_keys")

    def parse(self, *arguments):
        return parse_arguments(arguments, keys=self.KEYS, run_options=self.RUN_OPTIONS)

    def test_both_ways_of_giving_a_value_mean_the_same(self):
        assert self.parse("--lr=0.1") == self.parse("--lr", "0.1")

    @pytest.mark.parametrize("value", ["a=b", "=", "x==y=", "-1", "[a, b]", "a b"])
    def test_a_value_may_hold_anything(self, value):
        assert self.parse(f"--trials={value}") == ({"trials": value}, ())

    def test_run_options_pass_unchanged_and_in_order(self):
        arguments = "--device cuda:0 --debug --jit_module_keys a b --device=cpu"
        overrides, run_arguments = self.parse("--lr=1", *arguments.split())
        assert overrides == {"lr": "1"}
        assert run_arguments == tuple(arguments.split())

    def test_a_key_of_the_file_wins_over_a_run_option_of_the_same_name(self):
        assert self.parse("--precision=bf16") == ({"precision": "bf16"}, ())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--lrr=1"], "unknown key 'lrr'. Did you mean lr?"),
            (["--devise=cpu"], "unknown key 'devise'. Did you mean device?"),
            (["--prec=fp16"], "unknown key 'prec'."),
            (["--lr"], "--lr takes one value, not none"),
            (["--lr="], "--lr takes one value, not none"),
            (["--lr", "1", "2"], "--lr takes one value, not 1 2"),
            (["--lr=1", "2"], "--lr takes one value, not 1 2"),
            (["--lr=1", "--lr=2"], "--lr is given twice (1 and 2)"),
            (["lr=1"], "'lr=1' is no option: write --key=value"),
            (["-lr=1"], "'-lr=1' is no option: write --key=value"),
            (["--"], "'--' is no option"),
        ],
    )
    def test_a_mistake_is_named(self, arguments, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            self.parse(*arguments)


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

    def test_text_stays_text_whatever_it_looks_like(self, write):
        file = str(write() / "train.yaml")
        for name in ("007", "1e5", "true", "a b", "~/x", "[", "#", "x: y", "(a)"):
            composed = compose([file, f"--data_folder={name}"]).text
            if name == "[":
                continue
            assert values(composed)["data_folder"] == name

    @pytest.mark.parametrize("arguments", [[], ["--lr=1", "train.yaml"]])
    def test_the_file_comes_first(self, arguments):
        with pytest.raises(ValueError, match="The hyperparameter file comes first"):
            compose(arguments)


class TestFilesOfTheProject:
    def test_every_encoder_has_a_file_of_its_name(self):
        for name in ARCHITECTURES:
            found = values(resolve(FOLDER / f"{name}.yaml"))
            assert found["arch"] == name
            assert found["optimizer_name"] == ARCHITECTURES[name].optimizer_name

    @pytest.mark.parametrize("file", OVERRIDE_FILES, ids=lambda file: file.stem)
    def test_an_override_file_is_short_and_composes(self, file):
        most = 8 if file.stem in ARCHITECTURES else 9
        assert 2 <= len(file.read_text().splitlines()) <= most
        composed = resolve(file)
        assert list(values(composed)) == list(top_level_keys(TRAIN))

    @pytest.mark.parametrize(
        "file", [TRAIN, *OVERRIDE_FILES], ids=lambda file: file.stem
    )
    def test_resolving_again_changes_nothing(self, file, tmp_path):
        composed = resolve(file)
        (tmp_path / "again.yaml").write_text(composed)
        assert resolve(tmp_path / "again.yaml") == composed

    @pytest.mark.parametrize("arch", ARCHITECTURES)
    def test_every_encoder_composes_with_every_regime(self, arch):
        for file in OVERRIDE_FILES:
            if file.stem not in ARCHITECTURES:
                assert values(resolve(file, {"arch": arch}))["arch"] == arch

    def test_no_setting_is_left_to_the_family_once_resolved(self):
        for defaults in TRAINING_DEFAULTS:
            arch = next(a for a in ARCHITECTURES.values() if a.family == defaults)
            found = values(resolve(TRAIN, {"arch": arch.name}))
            names = vars(TRAINING_DEFAULTS[defaults])
            assert {name: found[name] for name in names} == names

    def test_types_are_listed_for_just_those_knobs_that_do_not_show_theirs(self):
        found = values(TRAIN.read_text())
        hidden = {
            key
            for key, value in found.items()
            if value is None or value == [] or key in placeholders(TRAIN.read_text())
        }
        assert hidden == set(KINDS)

    def test_settings_stand_flat_before_what_is_built_from_them(self):
        settings_part = TRAIN.read_text().split("# What follows is built")[0]
        for value in values(settings_part).values():
            assert not isinstance(value, dict)

    def test_the_published_setting(self):
        found = values(resolve(FOLDER / "revnet57.yaml"))
        published = {
            "n_mels": 80,
            "chunk_samples": 199 * 160,
            "speeds": [1.0, 0.9, 1.1],
            "augment_prob": 0.6,
            "margin": 0.2,
            "scale": 32.0,
            "embedding_dim": 256,
            "momentum": 0.9,
            "weight_decay": 1e-4,
            "optimizer_bits": 8,
            "batch_size": 256,
            "lr": 0.1,
            "final_lr": 5e-5,
            "number_of_epochs": 150,
            "warmup_epochs": 6,
            "margin_start_epoch": 20,
            "margin_end_epoch": 40,
            "average_checkpoints": 10,
            "cohort_top_n": 600,
        }
        assert {key: found[key] for key in published} == published

    @pytest.mark.parametrize(
        ("name", "margin", "frames"),
        [("fine_tune", 0.2, 200), ("large_margin", 0.5, 600)],
    )
    def test_fine_tuning_is_short_at_a_small_rate_and_a_fixed_margin(
        self, name, margin, frames
    ):
        file = FOLDER / f"{name}.yaml"
        assert placeholders(resolve(file)) == ("pretrained_run", "arch", "data_folder")
        found = values(resolve(file, {"arch": "df_revnet281"}))
        published = {
            "optimizer_name": "sgd",
            "lr": 1e-4,
            "final_lr": 2.5e-5,
            "weight_decay": 1e-4,
            "number_of_epochs": 5,
            "warmup_epochs": 0.0,
            "margin": margin,
            "margin_start_epoch": 0,
            "margin_end_epoch": 0,
            "average_checkpoints": 1,
            "chunk_samples": (frames - 1) * 160,
        }
        assert {key: found[key] for key in published} == published

    @pytest.mark.parametrize("chunk_samples", [31840, 95840, 16000])
    def test_enough_is_read_for_the_fastest_speed(self, chunk_samples):
        composed = resolve(
            TRAIN, {"chunk_samples": chunk_samples, "data_folder": "data"}
        )
        found = YAML(typ="rt").load(resolve_references(composed).getvalue())
        assert int(found["sentence_len"] * found["sample_rate"]) >= 1.1 * chunk_samples


class TestRunOptions:
    def test_no_key_is_swallowed_as_the_beginning_of_a_run_option(self):
        # These are run options, read by the Brain from either place and by nobody else.
        shared = {"precision": "bf16", "max_grad_norm": 7.0, "ckpt_interval_steps": 7}
        for key in top_level_keys(TRAIN):
            given_value = shared.get(key, 7)
            _, run_options, overrides = parse_run_options(
                ["train.yaml", f"--{key}={given_value}"]
            )
            if key in shared:
                assert run_options[key] == given_value
                assert f"!ref <{key}>" not in TRAIN.read_text()
            else:
                assert overrides == f"{key}: 7"
                assert not run_options.overridden_args

    def test_the_brain_reads_the_shared_ones_from_the_file(self):
        brain = Brain(
            modules={},
            hparams={"precision": "bf16", "max_grad_norm": 7.0},
            run_opts={"device": "cpu"},
        )
        assert (brain.precision, brain.max_grad_norm) == ("bf16", 7.0)


class TestFeatures:
    @pytest.mark.parametrize(
        ("content", "named"),
        [
            ("compute_features: {hop_length: 5}", r"hop_length is 5, but must be 10"),
            ("compute_features: {win_length: 20}", r"win_length is 20, but must be 25"),
            ("mean_var_norm: {std_norm: true}", r"std_norm is true, but must be false"),
            ("mean_var_norm: {norm_type: global}", r"norm_type is global, but must be"),
            (
                "compute_features: {n_mels: 60}",
                r"n_mels is 60, but must be !ref <n_mels>",
            ),
            (
                "modules: {mean_var_norm: !ref <compute_features>}",
                r"modules\.mean_var_norm is !ref <compute_features>, but must",
            ),
        ],
    )
    def test_what_embedding_would_not_see_is_refused(self, tmp_path, content, named):
        file = tmp_path / "mine.yaml"
        file.write_text(f"base: {TRAIN}\n{content}\n")
        with pytest.raises(ValueError, match=rf"{named}.*n_mels and sample_rate"):
            resolve(file)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("features.Fbank", "features.MFCC"),
            ("    win_length: 25  # ms", "    f_min: 20"),
            ("hop_length: 10", "hop_length: 12"),
        ],
    )
    def test_a_complete_file_of_other_features_is_refused(self, tmp_path, old, new):
        text = TRAIN.read_text()
        assert old in text
        (tmp_path / "mine.yaml").write_text(text.replace(old, new))
        with pytest.raises(
            ValueError, match="embedding a run builds its features anew"
        ):
            resolve(tmp_path / "mine.yaml")

    def test_mel_bands_and_sample_rate_may_change(self):
        found = values(resolve(TRAIN, {"n_mels": 40, "sample_rate": 8000}))
        assert (found["n_mels"], found["sample_rate"]) == (40, 8000)


class TestPlainSettings:
    def test_plain_values_are_read_with_their_references_followed(self):
        found = plain_settings(
            "seed: 3\nrate: 16000\nspeeds: [1.0, 0.9]\nnothing: null\n"
            "folder: !ref results/<seed>\nseconds: !ref <rate> * 2\n"
        )
        assert found == {
            "seed": 3,
            "rate": 16000,
            "speeds": [1.0, 0.9],
            "nothing": None,
            "folder": "results/3",
            "seconds": 32000,
        }

    def test_objects_are_neither_built_nor_listed(self, tmp_path):
        mark = tmp_path / "mark"
        text = f"a: !apply:pathlib.Path.touch ['{mark}']\nb: {{c: 1}}\nd: !name:os.system\n"
        assert plain_settings(text) == {}
        assert not mark.exists()
