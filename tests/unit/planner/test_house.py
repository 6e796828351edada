"""Each question has one function, and no code of the planner is there for tests alone."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import speechbrain_rev
from speechbrain_rev import planner

PACKAGE = Path(speechbrain_rev.__file__).parent
ROOT = Path(__file__).parents[3]
QUESTIONS = ("profile", "plan", "largest_batch", "sweep", "remedies")
#: Methods of the table of encoders, which read the line through committed counts, without
#: torch, and run no step.
OF_THE_TABLE = {f"catalog/{name}.py" for name in ("plans", "render", "table")}


@cache
def definitions():
    """Give all functions and classes of the package, with their modules."""
    return [
        (path, node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_has_one_definition(question):
    """A private twin, as ``_sweep``, is one too; commands of the same name parse options."""
    modules = {
        path.relative_to(PACKAGE).as_posix()
        for path, node in definitions()
        if node.name.strip("_") == question and path.parent.name != "cli"
    }
    own = getattr(planner, question).__module__.removeprefix("speechbrain_rev.")
    table = OF_THE_TABLE if question == "largest_batch" else set()
    assert modules - table == {f"{own.replace('.', '/')}.py"}


def words_of(path):
    """The words in each line of a file: of pages only code, of code all but docstrings."""
    text = path.read_text()
    if path.suffix == ".md":
        code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)
        text = "\n".join(code)
    lines = [line.partition("  # ")[0] for line in text.splitlines()]
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                for number in range(node.lineno - 1, node.end_lineno):
                    lines[number] = ""
    return [set(re.findall(r"\w+", line)) for line in lines]


@cache
def places():
    """Where each word is: files, and numbers of lines from 0."""
    folders = ROOT / "recipes", ROOT / "docs", PACKAGE
    files = [ROOT / "README.md"]
    files += [p for folder in folders for p in folder.rglob("*.py")]
    files += (ROOT / "docs").rglob("*.md")
    places = defaultdict(list)
    for file in files:
        if file.name != "__init__.py":
            for number, words in enumerate(words_of(file)):
                for word in words:
                    places[word].append((file, number))
    return places


def is_used(path, node):
    """Whether a line outside of its own definition names it."""
    own = range(node.lineno - 1, node.end_lineno)
    return any(
        file != path or number not in own for file, number in places()[node.name]
    )


def test_nothing_is_there_for_tests_alone():
    unused = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, node in definitions()
        if path.parent.name in ("planner", "catalog") and not node.name.startswith("_")
        if not is_used(path, node)
    ]
    assert not unused
    lonely = ast.parse("def lonely(n):\n    return lonely(n - 1)").body[0]
    assert not is_used(PACKAGE / "planner" / "plan.py", lonely)
