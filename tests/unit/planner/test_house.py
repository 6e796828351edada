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
HOUSES = ("planner", "catalog")


@cache
def _tree(path):
    return ast.parse(path.read_text())


#: Methods of the table of encoders, which read the line through committed counts, without
#: torch, and run no step.
OF_THE_TABLE = {
    ("catalog/plans.py", "largest_batch"),
    ("catalog/render.py", "largest_batch"),
    ("catalog/table.py", "largest_batch"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_has_one_definition(question):
    """A private twin, as ``_sweep``, is one too; commands of the same name parse options."""
    definitions = {
        (path.relative_to(PACKAGE).as_posix(), question)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef)
        and node.name.strip("_") == question
        and path.parent.name != "cli"
    }
    module = getattr(planner, question).__module__.removeprefix("speechbrain_rev.")
    assert definitions - OF_THE_TABLE == {(f"{module.replace('.', '/')}.py", question)}


def _definitions():
    """Give public functions, classes and methods of both folders, with their modules."""
    for house in HOUSES:
        for path in sorted((PACKAGE / house).glob("*.py")):
            for node in ast.walk(_tree(path)):
                if not isinstance(node, ast.Module | ast.ClassDef):
                    continue
                for child in node.body:
                    is_one = isinstance(child, ast.FunctionDef | ast.ClassDef)
                    if is_one and not child.name.startswith("_"):
                        yield path, child


@cache
def _uses():
    """Give the places where names are loaded or imported, but for tests, by name."""
    paths = [p for folder in ("recipes", "docs") for p in (ROOT / folder).rglob("*.py")]
    uses = defaultdict(list)
    for path in [*PACKAGE.rglob("*.py"), *paths]:
        for node in ast.walk(_tree(path)):
            names = []
            match node:
                case ast.Attribute(attr=name):
                    names = [name]
                case ast.Name(id=name, ctx=ast.Load()):  # of this file's own
                    names = [f"{path}: {name}"]
                case ast.ImportFrom(names=imported) if path.name != "__init__.py":
                    names = [alias.name for alias in imported]
                # Tables and getattr read attributes by their names, dotted ones too.
                case ast.Call(args=args):
                    texts = [a.value for a in args if isinstance(a, ast.Constant)]
                    names = ".".join(map(str, texts)).split(".")
            for name in names:
                uses[name].append((path, node.lineno))
    return uses


@cache
def _names_in_pages():
    """Give the names in the code of README and documentation."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\w+", " ".join(code)))


def _is_used(path, definition):
    name, own = definition.name, range(definition.lineno, definition.end_lineno + 1)
    places = [*_uses()[name], *_uses()[f"{path}: {name}"]]
    return name in _names_in_pages() or any(
        place != path or line not in own for place, line in places
    )


def test_nothing_is_there_for_tests_alone():
    unused = [
        f"{path.relative_to(ROOT)}:{definition.lineno} {definition.name}"
        for path, definition in _definitions()
        if not _is_used(path, definition)
    ]
    assert not unused


def test_what_only_itself_names_is_unused():
    lonely = ast.parse("def lonely(n):\n    return lonely(n - 1)").body[0]
    assert not _is_used(PACKAGE / "planner" / "plan.py", lonely)
