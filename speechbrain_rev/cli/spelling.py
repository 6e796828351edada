"""Options in one spelling or the other, and suggestions for those that there are not."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_WIDTH = 79


class ArgumentParser(argparse.ArgumentParser):
    """A parser that takes ``--bad-files`` and ``--bad_files`` for the same option.

    Help and errors show an option as it was added. An unknown or shortened option, or an
    unknown choice, is refused with the nearest one. Parsers of subcommands do the same.

    Parameters
    ----------
    *args
        As of ``argparse.ArgumentParser``.
    examples : sequence of str, optional
        Commands, which stand at the end of the help.
    **kwargs
        As of ``argparse.ArgumentParser``.

    Examples
    --------
    >>> parser = ArgumentParser()
    >>> _ = parser.add_argument("--bad-files")
    >>> _ = parser.add_argument("--top_n", type=int)
    >>> parser.parse_args(["--bad_files=drop", "--top-n", "5"])
    Namespace(bad_files='drop', top_n=5)
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A shortened --trial_lists could be read as --trials_folder.
        self.allow_abbrev = False
        # Python 3.14 may suggest choices itself; here all versions say the same.
        self.suggest_on_error = False
        self.examples = tuple(examples)
        self._hint = ""
        if examples:
            # The formatter that keeps the lines of examples fills no description.
            self.formatter_class = argparse.RawDescriptionHelpFormatter
            self.description = textwrap.fill(self.description or "", _WIDTH)
            self.epilog = "\n  ".join(["examples:", *examples])

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does, options spelled as they were added; refuse others."""
        given = list(sys.argv[1:] if args is None else args)
        # What follows -- is no option.
        end = given.index("--") if "--" in given else len(given)
        given[:end] = map(self._as_added, given[:end])
        for argument in given[:end]:
            option, _, value = argument.partition("=")
            if option.startswith("--") and value == "--":
                # argparse of Python before 3.13 makes an empty list of it.
                self.error(f"argument {option}: expected one argument, not --")
        # Options of a subcommand are its parser's to know.
        self._hint = "" if self._subparsers else self._nearest_options(given[:end])
        parsed, others = super().parse_known_args(given, namespace)
        if others:
            # Not left to the parser above, which does not know this one's options.
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return parsed, others

    def error(self, message: str) -> NoReturn:
        """Exit with a message, and what a misspelt option may have meant."""
        super().error(f"{message}{self._hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = _meant([value], list(action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None

    def _as_added(self, argument: str) -> str:
        option, equals, value = argument.partition("=")
        added = self._option_string_actions
        if option.startswith("--") and option not in added:
            words = option.replace("_", "-")
            for name in added:
                if name.replace("_", "-") == words:
                    return f"{name}{equals}{value}"
        return argument

    def _nearest_options(self, given: Iterable[str]) -> str:
        added = self._option_string_actions
        shown = [name for name in added if name.startswith("--")]
        options = [argument.partition("=")[0] for argument in given]
        unknown = [o for o in options if o.startswith("--") and o not in added]
        return _meant(unknown, shown)


def _meant(given: Iterable[str], known: Sequence[str]) -> str:
    """Suggest for each name the nearest known one, if it is near enough."""
    by_word = {str(name).lstrip("-").replace("_", "-"): str(name) for name in known}
    nearest = [
        by_word[match]
        for name in given
        for match in difflib.get_close_matches(
            str(name).lower().lstrip("-").replace("_", "-"), by_word, n=1
        )
    ]
    return f". Did you mean {' and '.join(dict.fromkeys(nearest))}?" if nearest else ""
