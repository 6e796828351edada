"""Options of several words may have dashes or underscores between them."""

import pytest

from speechbrain_rev import cli
from speechbrain_rev.cli.command import _parser


def parser():
    found = cli.ArgumentParser(allow_abbrev=False)
    group = found.add_mutually_exclusive_group()
    group.add_argument("--bad-files")
    group.add_argument("--top_n", type=int)
    found.add_argument("names", nargs="*")
    return found


@pytest.mark.parametrize("option", ["--bad-files", "--bad_files"])
@pytest.mark.parametrize("given", ["{}=a_b-c", "{} a_b-c"])
def test_both_spellings_are_one_option_and_values_stay(option, given):
    assert parser().parse_args(given.format(option).split()).bad_files == "a_b-c"


def test_the_other_spelling_is_the_same_option_for_groups_and_types():
    assert parser().parse_args(["--top-n", "5"]).top_n == 5
    with pytest.raises(SystemExit):
        parser().parse_args(["--top-n=5", "--bad_files=a"])


def test_what_follows_two_dashes_is_no_option():
    assert parser().parse_args(["--", "--bad_files"]).names == ["--bad_files"]


def test_an_option_that_there_is_not_is_told_as_it_was_given(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--bad-flies=a", "--top-m", "5"])
    assert "unrecognized arguments: --bad-flies=a --top-m" in capsys.readouterr().err


def test_help_shows_one_spelling_only():
    told = parser().format_help()
    assert "--bad-files" in told
    assert "--bad_files" not in told


def test_every_subcommand_takes_both():
    (commands,) = _parser()._subparsers._group_actions
    several = []
    for command in commands.choices.values():
        names = [name for name in command._option_string_actions if name[:2] == "--"]
        several += [name for name in names if {"-", "_"} & set(name[2:])]
        for name in names:
            for sign in "-_":
                other = f"--{name[2:].replace('-', sign).replace('_', sign)}"
                assert command._as_added(other) == name
    assert {"--dry-run", "--bad-files", "--optimizer_bits"} <= set(several)


@pytest.mark.parametrize("option", ["--bad-files=--", "--bad_files=--"])
def test_two_dashes_are_no_value_of_an_option(option, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args([option])
    assert (
        "argument --bad-files: expected one argument, not --" in capsys.readouterr().err
    )
