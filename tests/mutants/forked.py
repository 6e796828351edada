"""Pytest in a fork of a process that has imported what takes seconds, of one project."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

# Nothing of the project: each fork imports that from the copy that it tests.
PRELOADED = (
    "torch",
    "torchaudio",
    "speechbrain",
    "scipy.stats",
    "hypothesis",
    "pytest",
)
WRONG_PROJECT = 100


def run_pytest(folder: Path, arguments: Sequence[str]) -> int:
    """Run the tests of a copy of the project, and give what pytest ends with.

    Parameters
    ----------
    folder
        The copy, with ``speechbrain_rev`` and ``tests``.
    arguments
        Those of pytest.

    Returns
    -------
    int
        The status of pytest, `WRONG_PROJECT` where another project would be imported,
        and less than zero where the tests ended their process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process = context.Process(target=_test, args=(folder, list(arguments)))
    process.start()
    process.join()
    return process.exitcode


def _test(folder: Path, arguments: list[str]) -> None:
    output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("speechbrain_rev", "tests"):
            del sys.modules[name]
    os.chdir(folder)
    # What was compiled of a sabotage could be taken for the next one of the same length.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path.insert(0, str(folder))
    package = importlib.util.find_spec("speechbrain_rev")
    if not Path(package.origin).resolve().is_relative_to(folder.resolve()):
        sys.exit(WRONG_PROJECT)
    sys.exit(int(pytest.main(arguments)))
