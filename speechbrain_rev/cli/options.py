"""What several subcommands share of their options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

# Kinds of encoders are profiled side by side; there are about a dozen.
_MOST_WORKERS = 4

#: What --card takes.
CARD_HELP = "e.g. 11GB or 10.5GiB, both in GiB (2**30 bytes), as cards are sold"


def refuse_others(
    parsed: argparse.Namespace, defaults: Mapping[str, Any], tables: str
) -> None:
    """Refuse options beside --published, which shows tables as they are.

    Parameters
    ----------
    parsed : argparse.Namespace
        The options.
    defaults : mapping of str to any
        Options that do not go with it, and their values if they were not given.
    tables : str
        What is shown.

    Raises
    ------
    ValueError
        If another option was given; the message names it.
    """
    for name, default in defaults.items():
        if getattr(parsed, name) != default:
            option = "ENCODER" if name == "names" else f"--{name}"
            raise ValueError(
                f"--published shows {tables} of the paper as they are; leave out {option}."
            )


def workers_for(names: Sequence[str]) -> int:
    """Tell how many processes plan encoders: one for a few that are named."""
    return 1 if names else min(os.cpu_count() or 1, _MOST_WORKERS)
