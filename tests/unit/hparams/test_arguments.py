"""The command line: whole names, values with any sign in them, and run options."""

import pytest
from speechbrain import Brain
from speechbrain import parse_arguments as parse_run_options
from speechbrain.utils.run_opts import RunOptions

from speechbrain_rev.hparams import (
    parse_arguments,
    plain_settings,
    resolve,
    top_level_keys,
)
from speechbrain_rev.hparams.arguments import RUN_OPTIONS
from tests.recipes.runs import recipe
from tests.unit.hparams.files import TRAIN, refusal, values

train = recipe("train")


def parse(*arguments):
    return parse_arguments(
        arguments,
        keys=("lr", "precision", "trials"),
        run_options=("device", "debug", "precision", "jit_module_keys"),
    )


@pytest.mark.parametrize("value", ["a=b", "=", "x==y=", "-1", "[a=b, =c]", "a b"])
def test_a_value_may_hold_any_sign_in_either_way_of_giving_it(value):
    assert parse(f"--trials={value}") == ({"trials": value}, ())
    assert parse("--trials", value) == ({"trials": value}, ())
    assert parse(f"--trials=--{value}") == ({"trials": f"--{value}"}, ())


@pytest.mark.parametrize(
    ("given", "folders"),
    [
        (["--data_folder=a", "--data_folder", "b c"], ["a", "b c"]),
        (["--data_folder=[a, 'b, c']"], ["a", "b, c"]),
        (["--data_folder=[a"], "[a"),
        (["--data_folder=007"], "007"),
    ],
)
def test_several_folders_are_a_list_or_an_option_given_again(given, folders):
    overrides, _ = parse_arguments(given, keys=("data_folder",))
    text = resolve(TRAIN, overrides)
    assert plain_settings(text)["data_folder"] == folders
    assert plain_settings(text)["trials_folder"] == folders


def test_run_options_pass_unchanged_and_in_order_and_keys_win_over_them():
    arguments = ["--device", "cuda:0", "--debug", "--jit_module_keys", "a", "b"]
    overrides, run_arguments = parse("--lr=1", *arguments, "--precision=bf16")
    assert overrides == {"lr": "1", "precision": "bf16"}
    assert run_arguments == tuple(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lrr=1", "unknown key 'lrr'. Did you mean lr?"),
        ("--learning_rate=1", "unknown key 'learning_rate'. Did you mean lr?"),
        ("--prec=fp16", "unknown key 'prec'."),
        ("--dryrun", "unknown key 'dryrun'. Did you mean dry_run?"),
        ("--dry_run=true", "--dry_run takes no value"),
        ("--compile", "unknown key 'compile'. It is a run option"),
        ("--lr", "--lr takes one value, not none"),
        ("--lr=", "--lr takes one value, not none"),
        ("--lr=1 2", "--lr takes one value, not 1 2"),
        ("--lr --debug", "--lr takes one value, not none"),
        ("--lr=1 --lr 2", "--lr is given twice (1 and 2)"),
        ("lr=1", "'lr=1' is no option: write --key=value"),
        ("--", "'--' is no option"),
        ("--=1", "unknown key ''"),
    ],
)
def test_a_mistake_is_named_with_its_place(arguments, message):
    with pytest.raises(ValueError, match=r"^command line: ") as error:
        parse(*arguments.split())
    assert message in str(error.value)


def test_run_options_are_those_of_speechbrains_own_parser():
    actions = RunOptions._create_parser()._actions
    options = {name for action in actions for name in action.option_strings}
    assert {f"--{name}" for name in RUN_OPTIONS} == {
        option for option in options if option.startswith("--")
    }


def test_a_key_that_speechbrain_would_swallow_is_refused_where_it_stands(
    tmp_path, capsys
):
    file, near = tmp_path / "mine.yaml", tmp_path / "near.yaml"
    near.write_text("base: mine.yaml\nseed: 8\n")
    beginnings = {name[: len(name) // 2] for name in RUN_OPTIONS} - set(RUN_OPTIONS)
    for key in [*sorted(beginnings), "help"]:
        file.write_text(f"seed: 1\n{key}: 7\n")
        said = refusal(near)
        assert said.startswith(f"{file}, line 2: the key {key!r} is the beginning")
        assert any(f"--{name}" in said for name in RUN_OPTIONS)
        try:
            _, _, overrides = parse_run_options(["x.yaml", f"--{key}=7"])
        except SystemExit:  # several options begin so, or 7 is no value of one
            continue
        assert overrides == "", key


@pytest.mark.parametrize("key", ["optimizers", "my_debug", "x", "debug", "device"])
def test_other_keys_and_whole_run_options_may_be_keys(tmp_path, key):
    file = tmp_path / "mine.yaml"
    file.write_text(f"{key}: 7\n")
    assert resolve(file, {key: "8"}) == f"{key}: 8\n"


def test_no_key_of_ours_is_swallowed_and_shared_ones_reach_the_brain():
    # These are run options, read by the Brain from either place and by nobody else.
    shared = {
        "precision": "bf16",
        "max_grad_norm": 7.0,
        "ckpt_interval_steps": 7,
        "compile": True,
    }
    for key in top_level_keys(TRAIN):
        # There a switch is on if it is named.
        is_switch = shared.get(key) is True
        option = f"--{key}" if is_switch else f"--{key}={shared.get(key, 7)}"
        _, run_options, overrides = parse_run_options(["train.yaml", option])
        if key in shared:
            assert run_options[key] == shared[key]
            assert f"!ref <{key}>" not in TRAIN.read_text()
        else:
            assert overrides == f"{key}: 7"
            assert not run_options.overridden_args
    brain = Brain(modules={}, hparams=shared, run_opts={"device": "cpu"})
    assert (brain.precision, brain.max_grad_norm) == ("bf16", 7.0)
    assert brain.compile


def test_training_separates_keys_and_run_options_by_their_whole_names(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: {TRAIN}\ntrial_lists: [a=b.txt, =c, d==]\n")
    options = [
        "--precision=bf16",
        "--data_folder",
        "x=y",
        "--debug",
        "--jit_module_keys==",
    ]
    text, settings, run_options, *_ = train.compose_run([str(file), *options])
    assert settings["trial_lists"] == ["a=b.txt", "=c", "d=="]
    assert settings["data_folder"] == settings["trials_folder"] == "x=y"
    assert settings["precision"] == values(text)["precision"] == "bf16"
    assert run_options.overridden_args == {"debug", "jit_module_keys"}
