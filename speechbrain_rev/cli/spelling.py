"""Options in one spelling or the other."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

_WIDTH = 79


class ArgumentParser(argparse.ArgumentParser):
    """A parser that takes ``--bad-files`` and ``--bad_files`` for the same option.

    Help and errors show an option as it was added. A shortened option is refused. Parsers
    of subcommands do the same.

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
        self.examples = tuple(examples)
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
        # Arguments after -- are no options.
        end = given.index("--") if "--" in given else len(given)
        given[:end] = map(self._as_added, given[:end])
        parsed, others = super().parse_known_args(given, namespace)
        if others:
            # Not left to the parser above, which does not know this one's options.
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return parsed, others

    def _as_added(self, argument: str) -> str:
        option, equals, value = argument.partition("=")
        added = self._option_string_actions
        if option.startswith("--") and option not in added:
            words = option.replace("_", "-")
            for name in added:
                if name.replace("_", "-") == words:
                    return f"{name}{equals}{value}"
        return argument
