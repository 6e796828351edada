"""By which code a training was done, and where: what its bits depend on."""

from __future__ import annotations

import hashlib
import json
import os
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
from running.determinism import told_of
from speechbrain_rev.devices import device_name
from speechbrain_rev.environment import environment
from speechbrain_rev.inference.run_folder import WEIGHTS
from speechbrain_rev.whole_files import write_whole

_SINCE = "since"


def write_origin(folder: Path, device: str, precision: str) -> None:
    """Write down by which code and where a training is done; another, if it goes on there.

    Of one that has checkpoints and says nothing of them, that is not known.

    Parameters
    ----------
    folder : pathlib.Path
        The run's.
    device, precision : str
        On what, and in what, it computes.
    """
    goes_on = any(folder.glob("save/CKPT*/CKPT.yaml")) or (folder / WEIGHTS).is_file()
    # What was ended before its first checkpoint begins anew.
    entries = (read_origin(folder) or [{}]) if goes_on else []
    here = {
        **origin_of(device, precision),
        "instructions": get_cpu_capability(),
    }
    entries = with_another(entries, here)
    write_whole(folder / ORIGIN, json.dumps(entries, indent=1) + "\n")


def origin_of(device: str, precision: str) -> dict[str, Any]:
    """Say by which code and where a training would be done, and what it is told to take."""
    return {
        **code_and_machine(),
        "device": device_name(torch.device(device)),
        "told": told_of(precision),
    }


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
    changes, commit = _changes(), _git("rev-parse", "HEAD")
    return {
        "since": date.today().isoformat(),
        "speechbrain_rev": speechbrain_rev.__version__,
        "package_of_this_repository": package.is_relative_to(REPOSITORY),
        "commit": commit and commit.decode().strip(),
        "changed": changes if changes is None else _digest(changes),
        "processor": dict(environment())["processor"],
        "torch": torch.__version__,
    }


def _digest(changes: bytes) -> str | bool:
    """Give 16 digits of the digest; False if nothing is changed."""
    return bool(changes) and hashlib.sha256(changes).hexdigest()[:16]


def _changes() -> bytes | None:
    """Give what code differs from the commit, new modules too; empty if none does."""
    tracked = _git("diff", "HEAD", "--", "*.py", "*.yaml")
    new = _git("ls-files", "-z", "--others", "--exclude-standard", "--", "*.py")
    if tracked is None or new is None:
        return None
    for name in filter(None, new.split(b"\0")):
        path = REPOSITORY / os.fsdecode(name)
        if path.is_file():
            tracked += name + b"\n" + path.read_bytes()
    return tracked


def _git(*arguments: str) -> bytes | None:
    """Ask git about this repository; None where there is none."""
    argv: Sequence[str] = ["git", "-C", str(REPOSITORY), *arguments]
    try:
        asked = subprocess.run(argv, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return asked.stdout if asked.returncode == 0 else None
