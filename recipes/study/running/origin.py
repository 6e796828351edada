"""By which code a training was done, and where: what its bits depend on."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from results.files import ORIGIN
from results.origins import read_origin
from torch.backends.cpu import get_cpu_capability

import speechbrain_rev
from running.command_line import REPOSITORY
from speechbrain_rev.environment import environment
from speechbrain_rev.whole_files import write_whole

_SINCE = "since"


def write_origin(folder: Path) -> None:
    """Write down by which code and where a training is done; another, if it goes on there.

    Parameters
    ----------
    folder : pathlib.Path
        The run's.
    """
    here = {
        **code_and_machine(),
        "instructions": get_cpu_capability(),
    }
    entries = with_another(read_origin(folder), here)
    write_whole(folder / ORIGIN, json.dumps(entries, indent=1) + "\n")


def with_another(
    entries: Sequence[Mapping[str, Any]], here: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Append what code and machine are now, if they are none of those before."""
    known = any(not differing(entry, here) for entry in entries)
    return [*entries, *([] if known else [here])]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """List in what two origins differ, besides their days."""
    return [k for k in one | other if k != _SINCE and one.get(k) != other.get(k)]


def code_and_machine() -> dict[str, Any]:
    """Say which code runs, and where; where there is git, from which commit.

    The commit is that of this repository, of which the package may not be a part; of what
    is changed since there is a digest.
    """
    package = Path(speechbrain_rev.__file__)
    changes = _changes()
    return {
        "since": date.today().isoformat(),
        "speechbrain_rev": speechbrain_rev.__version__,
        "package_of_this_repository": package.is_relative_to(REPOSITORY),
        "commit": _git("rev-parse", "HEAD"),
        "changed": changes if changes is None else _digest(changes),
        "processor": dict(environment())["processor"],
        "torch": torch.__version__,
    }


def _digest(changes: str) -> str | bool:
    """Give 16 digits of the digest; False if nothing is changed."""
    return bool(changes) and hashlib.sha256(changes.encode()).hexdigest()[:16]


def _changes() -> str | None:
    """Give what differs from the commit, new modules too; empty if nothing does."""
    tracked = _git("diff", "HEAD")
    new = _git("ls-files", "--others", "--exclude-standard", "--full-name", ":/*.py")
    if tracked is None or new is None:
        return None
    modules = [REPOSITORY / name for name in new.splitlines()]
    return tracked + "".join(f"{m}\n{m.read_text()}" for m in modules)


def _git(*arguments: str) -> str | None:
    """Ask git about this repository; None where there is none."""
    argv: Sequence[str] = ["git", "-C", str(REPOSITORY), *arguments]
    try:
        asked = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None
