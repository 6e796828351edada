"""The command line: whole names, values with any sign in them, and run options."""

import re

import pytest
from hyperpyyaml import load_hyperpyyaml
from speechbrain import Brain
from speechbrain import parse_arguments as parse_run_options
from speechbrain.utils.run_opts import RunOptions

from speechbrain_rev.hparams import (
    compose,
    parse_arguments,
    plain_settings,
    resolve,
    top_level_keys,
)
from speechbrain_rev.hparams.arguments import RUN_OPTIONS
from tests.recipes.runs import recipe
from tests.unit.hparams.files import TRAIN, refusal, values

train = recipe("train")


class TestParsing:
    KEYS = ("lr", "precision", "trials")
    RUN_OPTIONS = ("device", "debug", "precision", "jit_module_keys")

    def parse(self, *arguments):
        return parse_arguments(arguments, keys=self.KEYS, run_options=self.RUN_OPTIONS)

    def test_both_ways_of_giving_a_value_mean_the_same(self):
        assert self.parse("--lr=0.1") == self.parse("--lr", "0.1")

    @pytest.mark.parametrize(
        "value", ["a=b", "=", "=x", "x==y=", "--lr=2", "-1", "[a, b]", "a b"]
    )
    def test_a_value_may_hold_anything(self, value):
        assert self.parse(f"--trials={value}") == ({"trials": value}, ())

    @pytest.mark.parametrize("value", ["a=b", "=", "=x", "x==y=", "-1", "[a=b, =c]"])
    def test_a_value_of_its_own_may_hold_all_but_a_beginning_of_dashes(self, value):
        assert self.parse("--trials", value) == ({"trials": value}, ())

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
            (["--l\u0433=1"], "unknown key 'l\u0433' (l\\u0433 in ASCII)."),
            (["--devise=cpu"], "unknown key 'devise'. Did you mean device?"),
            (["--prec=fp16"], "unknown key 'prec'."),
            (["--compile"], "unknown key 'compile'. It is a run option"),
            (["--lr"], "--lr takes one value, not none"),
            (["--lr="], "--lr takes one value, not none"),
            (["--lr", "1", "2"], "--lr takes one value, not 1 2"),
            (["--lr=1", "2"], "--lr takes one value, not 1 2"),
            (["--lr", "--debug"], "--lr takes one value, not none"),
            (["--lr=1", "--lr=2"], "--lr is given twice (1 and 2)"),
            (["--lr=1", "--lr", "1"], "--lr is given twice (1 and 1)"),
            (["lr=1"], "'lr=1' is no option: write --key=value"),
            (["-lr=1"], "'-lr=1' is no option: write --key=value"),
            (["--"], "'--' is no option"),
            (["--=1"], "unknown key ''"),
        ],
    )
    def test_a_mistake_is_named_with_its_place(self, arguments, message):
        with pytest.raises(ValueError, match=f"^command line: {re.escape(message)}"):
            self.parse(*arguments)


class TestEqualsSigns:
    """The whole way, from the command line or a file to what a run reads."""

    VALUES = ("a=b", "=", "==x", "a=b=c", "--a=b", "=a, b")

    @pytest.mark.parametrize("value", VALUES)
    def test_in_a_value_they_reach_the_run(self, value):
        arguments = [f"--data_folder={value}", f"--noise_folder={value}"]
        text, found, _ = train.compose_run([str(TRAIN), *arguments])
        flat = text.split("# What follows is built")[0]
        for read in (found, load_hyperpyyaml(flat)):
            assert (read["data_folder"], read["noise_folder"]) == (value, value)
            assert read["trials_folder"] == value

    @pytest.mark.parametrize("value", [v for v in VALUES if not v.startswith("--")])
    def test_in_a_value_of_its_own_they_reach_the_run(self, value):
        _, found, _ = train.compose_run([str(TRAIN), "--data_folder", value])
        assert found["data_folder"] == value

    @pytest.mark.parametrize("how", ["--trial_lists={}", "--trial_lists {}", "file"])
    def test_inside_a_list_they_reach_the_run(self, tmp_path, how):
        written, file = "[a=b.txt, =c, d==, =, '=e, =f']", TRAIN
        options = how.format(written.replace(" ", "")).split()
        if how == "file":
            file, options = tmp_path / "mine.yaml", []
            file.write_text(f"base: {TRAIN}\ntrial_lists: {written}\n")
        _, found, _ = train.compose_run([str(file), "--data_folder=x", *options])
        last = "=e, =f" if how == "file" else "=e,=f"
        assert found["trial_lists"] == ["a=b.txt", "=c", "d==", "=", last]

    @pytest.mark.parametrize("written", ["a=b", "=", "=x", "'='", '"a = b"'])
    def test_in_a_file_they_reach_the_run(self, tmp_path, written):
        file = tmp_path / "mine.yaml"
        file.write_text(f"base: {TRAIN}\ndata_folder: {written}\n")
        found = plain_settings(compose([str(file)]).text)
        assert found["data_folder"] == written.strip("'\"")

    def test_in_a_run_option_they_pass(self):
        arguments = ["--data_folder=x", "--log_config=a=b.yaml", "--device=cpu"]
        _, _, run_opts = train.compose_run([str(TRAIN), *arguments])
        assert (run_opts.log_config, run_opts.device) == ("a=b.yaml", "cpu")

    def test_a_number_cannot_begin_with_one(self):
        assert refusal(TRAIN, {"batch_size": "=3"}) == (
            "command line: batch_size takes an integer of at least 1, not =3."
        )


def beginnings():
    """All beginnings of SpeechBrain's run options that are no run options."""
    return sorted(
        {name[:end] for name in RUN_OPTIONS for end in range(1, len(name))}
        - set(RUN_OPTIONS)
    )


class TestRunOptions:
    def test_they_are_those_of_speechbrains_own_parser(self):
        actions = RunOptions._create_parser()._actions
        options = {name for action in actions for name in action.option_strings}
        assert {f"--{name}" for name in RUN_OPTIONS} == {
            option for option in options if option.startswith("--")
        }

    def test_speechbrain_swallows_every_beginning_of_one(self, capsys):
        # What the refusal below is for: the value does not reach the file.
        for key in beginnings():
            try:
                _, _, overrides = parse_run_options(["x.yaml", f"--{key}=7"])
            except SystemExit:  # several options begin so, or 7 is no value of one
                continue
            assert overrides == "", key

    def test_a_file_that_defines_such_a_key_is_refused_where_it_does(self, tmp_path):
        for key in [*beginnings(), "help"]:
            file = tmp_path / "mine.yaml"
            file.write_text(f"seed: 1\n{key}: 7\n")
            said = refusal(file)
            assert said.startswith(f"{file}, line 2: the key {key!r} is the beginning")
            assert any(f"--{name}" in said for name in RUN_OPTIONS)
            (tmp_path / "near.yaml").write_text(f"base: mine.yaml\n{key}: 8\n")
            assert refusal(tmp_path / "near.yaml") == said
        with pytest.raises(ValueError, match="the key 'help' is the beginning"):
            compose([str(file), "--help=8"])

    @pytest.mark.parametrize("key", ["optimizers", "devices", "my_debug", "x"])
    def test_other_keys_that_look_like_one_reach_the_file(self, tmp_path, key):
        file = tmp_path / "mine.yaml"
        file.write_text(f"{key}: 7\n")
        assert resolve(file, {key: "8"}) == f"{key}: 8\n"
        _, run_options, overrides = parse_run_options(["mine.yaml", f"--{key}=8"])
        assert overrides == f"{key}: 8"
        assert not run_options.overridden_args

    def test_a_run_option_by_its_full_name_may_be_a_key(self, tmp_path):
        file = tmp_path / "mine.yaml"
        file.write_text("debug: false\ndevice: cpu\n")
        assert resolve(file, {"device": "cuda"}) == "debug: false\ndevice: cuda\n"

    def test_no_key_of_ours_is_swallowed(self):
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

    def test_training_takes_keys_and_run_options_apart_by_their_whole_names(self):
        arguments = ["--precision=bf16", "--data_folder", "x", "--seed=3", "--debug"]
        text, found, run_opts = train.compose_run([str(TRAIN), *arguments])
        assert (found["precision"], found["seed"]) == ("bf16", 3)
        assert values(text)["precision"] == "bf16"
        assert run_opts.overridden_args == {"debug"}

    def test_the_brain_reads_the_shared_ones_from_the_file(self):
        brain = Brain(
            modules={},
            hparams={"precision": "bf16", "max_grad_norm": 7.0},
            run_opts={"device": "cpu"},
        )
        assert (brain.precision, brain.max_grad_norm) == ("bf16", 7.0)
