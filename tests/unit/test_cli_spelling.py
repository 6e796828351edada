"""Options of several words may have dashes or underscores between them."""

import pytest

from speechbrain_rev import cli
from speechbrain_rev.cli.command import _parser


def parser():
    made = cli.ArgumentParser()
    group = made.add_mutually_exclusive_group()
    group.add_argument("--bad-files")
    group.add_argument("--top_n", type=int)
    made.add_argument("--bits", type=int, choices=(8, 32))
    made.add_argument("names", nargs="*")
    return made


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("--bad-files=a_b-c", ("a_b-c", None, [])),
        ("--bad_files a_b-c", ("a_b-c", None, [])),
        ("--top-n 5", (None, 5, [])),
        ("-- --bad_files", (None, None, ["--bad_files"])),
    ],
)
def test_both_spellings_are_one_option_and_values_stay(given, value):
    parsed = parser().parse_args(given.split())
    assert (parsed.bad_files, parsed.top_n, parsed.names) == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--top-n=5 --bad_files=a", "not allowed with argument"),
        ("--bad-flies=a --top-m 5", "unrecognized arguments: --bad-flies=a --top-m"),
        ("--top=5", "unrecognized arguments: --top=5"),
        ("--bits=16", "argument --bits: invalid choice: 16"),
    ],
)
def test_an_option_is_refused_as_it_was_given(given, message, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(given.split())
    assert message in capsys.readouterr().err


def test_every_subcommand_takes_both():
    assert "--bad_files" not in parser().format_help()
    (commands,) = _parser()._subparsers._group_actions
    several = []
    for command in commands.choices.values():
        names = [name for name in command._option_string_actions if name[:2] == "--"]
        several += [name for name in names if {"-", "_"} & set(name[2:])]
        for name in names:
            for sign in "-_":
                other = f"--{name[2:].replace('-', sign).replace('_', sign)}"
                assert command._as_added(other) == name
    assert {"--dry_run", "--bad_files", "--optimizer_bits"} <= set(several)
