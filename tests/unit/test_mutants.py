"""Sabotages keep up with the code that they sabotage."""

from pathlib import Path

import pytest

from tests.mutants.__main__ import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.promise)
def test_what_a_mutant_replaces_stands_once(mutant):
    code = Path(ROOT, mutant.file).read_text()
    assert code.count(mutant.code) == 1
    compile(code.replace(mutant.code, mutant.sabotage), mutant.file, "exec")
    assert Path(ROOT, mutant.tests).is_file()
