"""Sabotage the package line by line and see that the tests notice.

Each mutant replaces one piece of code by a plausible mistake, in a copy of the
project, and runs the tests that guard it. A mutant that lives, a piece of code that is
no longer there and a test selection that cannot run are failures.

    python -m tests.mutants [--only WORDS] [--list]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .chunks import CHUNKS
from .compressing_plans import COMPRESSING_PLANS
from .compression import COMPRESSION
from .engine import ENGINE
from .exact import EXACT
from .half_precision import HALF_PRECISION
from .lengths import LENGTHS
from .mutant import Mutant
from .optimizer import OPTIMIZER
from .planner import PLANNER

ROOT = Path(__file__).resolve().parents[2]
TESTS_FAILED = 1
MUTANTS = [
    *CHUNKS,
    *COMPRESSING_PLANS,
    *COMPRESSION,
    *ENGINE,
    *EXACT,
    *HALF_PRECISION,
    *LENGTHS,
    *OPTIMIZER,
    *PLANNER,
]


def run_tests(folder: Path, mutants: list[Mutant]) -> int:
    """Run the tests that guard some promises in a copy of the project."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += sorted({mutant.tests for mutant in mutants})
    command += ["-k", " or ".join(f"({mutant.select})" for mutant in mutants)]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, check=False
    ).returncode


def copy_project(folder: Path) -> None:
    """Copy what the tests need, and see that it is the copy that gets tested."""
    for name in ("speechbrain_rev", "tests"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "setup.cfg", folder)
    imported = subprocess.run(
        [sys.executable, "-c", "import speechbrain_rev as s; print(s.__file__)"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if not Path(imported.strip()).resolve().is_relative_to(folder.resolve()):
        sys.exit(f"The tests would import {imported.strip()}, not the mutant.")


def verdict(folder: Path, mutant: Mutant) -> str | None:
    """Say what is wrong with the tests of one mutant, if anything is."""
    file = folder / mutant.file
    code = file.read_text()
    if code.count(mutant.code) != 1:
        return f"stands {code.count(mutant.code)} times in {mutant.file}: update it"
    file.write_text(code.replace(mutant.code, mutant.sabotage))
    try:
        compile(file.read_text(), mutant.file, "exec")
        status = run_tests(folder, [mutant])
    except SyntaxError as error:
        return f"does not compile: {error}"
    finally:
        file.write_text(code)
    if status == 0:
        return "LIVES: no test notices"
    return None if status == TESTS_FAILED else f"tests did not run (pytest {status})"


def main() -> None:
    """Try all mutants and exit with 1 if one lives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose promise has this")
    parser.add_argument("--list", action="store_true", help="name the mutants")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in m.promise]
    if options.list or not chosen:
        print("\n".join(m.promise for m in MUTANTS))
        sys.exit(0 if options.list else f"No mutant matches {options.only!r}.")
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        status = run_tests(folder, chosen)
        if status != 0:
            sys.exit(f"Tests end with {status} without any sabotage: mend that first.")
        for mutant in chosen:
            reason = verdict(folder, mutant)
            wrong += reason is not None
            print(f"{'killed' if reason is None else reason:10} {mutant.promise}")
            sys.stdout.flush()
    print(f"{len(chosen) - wrong} of {len(chosen)} mutants killed")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
