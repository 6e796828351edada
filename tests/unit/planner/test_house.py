"""Each question has one function, and no code of the planner is there for tests alone."""

import ast
import re
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
    found = {
        (path.relative_to(PACKAGE).as_posix(), question)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef)
        and node.name.strip("_") == question
        and path.parent.name != "cli"
    }
    module = getattr(planner, question).__module__.removeprefix("speechbrain_rev.")
    assert found - OF_THE_TABLE == {(f"{module.replace('.', '/')}.py", question)}


def _definitions():
    """Give public functions, classes and methods of both folders, with their modules."""
    for house in HOUSES:
        for path in sorted((PACKAGE / house).glob("*.py")):
            for node in ast.walk(_tree(path)):
                for child in ast.iter_child_nodes(node):
                    if not isinstance(child, ast.FunctionDef | ast.ClassDef):
                        continue
                    is_inner = not isinstance(node, ast.Module | ast.ClassDef)
                    if not child.name.startswith("_") and not is_inner:
                        yield path, child, isinstance(node, ast.ClassDef)


@cache
def _code():
    """Give all that is run but tests, with the names that each of its files imports."""
    paths = [p for folder in ("recipes", "docs") for p in (ROOT / folder).rglob("*.py")]
    return {
        path: {
            (node.module, alias.name)
            for node in ast.walk(_tree(path))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for path in [*PACKAGE.rglob("*.py"), *paths]
    }


@cache
def _attributes():
    """Give what stands before each attribute, also of ``getattr``, and where that is."""
    found = []
    for path in _code():
        for node in ast.walk(_tree(path)):
            match node:
                case ast.Attribute(value=before, attr=name):
                    found.append((ast.unparse(before), name, path, node.lineno))
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"),
                    args=[before, ast.Constant(value=name), *_],
                ):
                    found.append((ast.unparse(before), name, path, node.lineno))
                # Cells of tables read attributes by their dotted names.
                case ast.Call(
                    func=ast.Name(id="_of"), args=[ast.Constant(value=name), *_]
                ):
                    found += [("row", n, path, node.lineno) for n in name.split(".")]
    return found


@cache
def _names_in_pages():
    """Give the names in the code of README and documentation."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\w+", " ".join(code)))


def _is_used(path, definition, is_method):
    name, own = definition.name, range(definition.lineno, definition.end_lineno + 1)
    if name in _names_in_pages():
        return True
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    owners = {module.rpartition(".")[2], module.split(".")[1]}
    if any(
        attribute == name
        and (is_method or before in owners)
        and not (place == path and line in own)
        for before, attribute, place, line in _attributes()
    ):
        return True
    if is_method:
        return False
    return any(
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and node.id == name
        and node.lineno not in own
        for node in ast.walk(_tree(path))
    ) or any(
        imported == name and f"{module}.".startswith(f"{source}.")
        for place, imports in _code().items()
        if place.name != "__init__.py"
        for source, imported in imports
    )


def test_nothing_is_there_for_tests_alone():
    unused = [
        f"{path.relative_to(ROOT)}:{definition.lineno} {definition.name}"
        for path, definition, is_method in _definitions()
        if not _is_used(path, definition, is_method)
    ]
    assert not unused


def test_what_only_itself_names_is_unused():
    source = PACKAGE / "planner" / "plan.py"
    lonely = ast.parse("def lonely(n):\n    return lonely(n - 1)").body[0]
    assert not _is_used(source, lonely, False)
    assert not _is_used(source, lonely, True)
