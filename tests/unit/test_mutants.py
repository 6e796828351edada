"""Sabotages keep up with the code that they sabotage."""

from pathlib import Path

import pytest

from tests.mutants import forked
from tests.mutants.__main__ import MUTANTS, ROOT
from tests.mutants.forked import WRONG_PROJECT, run_pytest


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.promise)
def test_what_a_mutant_replaces_stands_once(mutant):
    code = Path(ROOT, mutant.file).read_text()
    assert code.count(mutant.code) == 1
    compile(code.replace(mutant.code, mutant.sabotage), mutant.file, "exec")
    assert Path(ROOT, mutant.tests).is_file()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose one test asks for what its package says."""
    monkeypatch.setattr(forked, "PRELOADED", ("pytest",))
    for name in ("speechbrain_rev", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "speechbrain_rev/__init__.py").write_text("VALUE = 1\n")
    (tmp_path / "tests/test_value.py").write_text(
        "import speechbrain_rev\n\n\n"
        "def test_value():\n    assert speechbrain_rev.VALUE == 1\n"
    )
    return tmp_path


def test_the_tests_of_a_copy_see_the_copys_package(project):
    assert run_pytest(project, ["-q", "tests"]) == 0
    (project / "speechbrain_rev/__init__.py").write_text("VALUE = 2\n")
    assert run_pytest(project, ["-q", "tests"]) == 1


def test_a_copy_without_the_package_is_not_tested(project):
    (project / "speechbrain_rev/__init__.py").unlink()
    (project / "speechbrain_rev").rmdir()
    assert run_pytest(project, ["-q", "tests"]) == WRONG_PROJECT


def test_what_ends_its_process_has_a_status_below_zero(project):
    (project / "tests/test_value.py").write_text("import os\nos.abort()\n")
    assert run_pytest(project, ["-q", "tests"]) < 0
