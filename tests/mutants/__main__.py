"""Sabotage the package line by line and see that the tests notice.

Each mutant replaces one piece of code by a plausible mistake, in a copy of the
project, and runs the tests that guard it. A mutant that lives, a piece of code that is
no longer there and a test selection that cannot run are failures.

    python -m tests.mutants [--only WORDS] [--jobs 2] [--list]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from itertools import groupby
from multiprocessing.pool import ThreadPool
from operator import attrgetter
from pathlib import Path
from queue import Queue

from .chunks import CHUNKS
from .compressing_plans import COMPRESSING_PLANS
from .compression import COMPRESSION
from .engine import ENGINE
from .exact import EXACT
from .forked import run_pytest
from .half_precision import HALF_PRECISION
from .lengths import LENGTHS
from .mutant import Mutant
from .optimizer import OPTIMIZER
from .planner import PLANNER
from .selective import SELECTIVE

ROOT = Path(__file__).resolve().parents[2]
TESTS_FAILED = 1
by_tests = attrgetter("tests")
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
    *SELECTIVE,
]


def run_tests(folder: Path, mutants: list[Mutant]) -> int:
    """Run the tests that guard some promises in a copy of the project."""
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    arguments += sorted({mutant.tests for mutant in mutants})
    arguments += ["-k", " or ".join(f"({mutant.select})" for mutant in mutants)]
    return run_pytest(folder, arguments)


def copy_project(folder: Path) -> Path:
    """Copy what the tests need."""
    for name in ("speechbrain_rev", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "setup.cfg", folder)
    return folder


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


def unsabotaged(folder: Path, mutants: list[Mutant]) -> str | None:
    """Say which tests do not pass without any sabotage, if any do not."""
    status = run_tests(folder, mutants)
    if status == 0:
        return None
    return (
        f"{mutants[0].tests} ends with {status} without any sabotage: mend that first"
    )


def main() -> None:
    """Try all mutants and exit with 1 if one lives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose promise has this")
    parser.add_argument("--list", action="store_true", help="name the mutants")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: 1 or more mutants at a time")
    chosen = [m for m in MUTANTS if options.only in m.promise]
    if options.list or not chosen:
        print("\n".join(m.promise for m in MUTANTS))
        sys.exit(0 if options.list else f"No mutant matches {options.only!r}.")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name, ThreadPool(options.jobs) as pool:
        copies: Queue[Path] = Queue()
        for job in range(options.jobs):
            copies.put(copy_project(Path(name) / str(job)))

        def in_a_copy(work: tuple[Callable, object]) -> str | None:
            # A folder that only one of the jobs changes at a time.
            folder = copies.get()
            try:
                return work[0](folder, work[1])
            finally:
                copies.put(folder)

        of_a_file = [
            list(m) for _, m in groupby(sorted(chosen, key=by_tests), by_tests)
        ]
        reasons = pool.map(
            in_a_copy, [(unsabotaged, m) for m in of_a_file], chunksize=1
        )
        if any(reasons):
            sys.exit("\n".join(filter(None, reasons)))
        verdicts = pool.imap(in_a_copy, [(verdict, m) for m in chosen])
        wrong = 0
        for mutant, reason in zip(chosen, verdicts, strict=True):
            wrong += reason is not None
            print(f"{'killed' if reason is None else reason:10} {mutant.promise}")
            sys.stdout.flush()
    print(f"{len(chosen) - wrong} of {len(chosen)} mutants killed")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
