"""Messages that troubleshooting quotes are those of the sources."""

import ast
import re

import pytest

from .documents import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
#: Where a value stands in a message.
HOLE = "\0"


def quoted():
    """List the messages of the page, each in one line."""
    messages = re.findall(r"(?:^> .*\n)+", PAGE.read_text(), re.MULTILINE)
    return [" ".join(re.sub("(?m)^> ", "", message).split()) for message in messages]


def texts(node):
    """List the texts of a source file, with holes for what is filled in; no docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.JoinedStr):
            parts = [
                v.value if isinstance(v, ast.Constant) else HOLE for v in child.values
            ]
            yield "".join(map(str, parts))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        else:
            yield from texts(child)


SOURCES = [
    text
    for folder in ("speechbrain_rev", "recipes")
    for file in sorted((ROOT / folder).rglob("*.py"))
    for text in texts(ast.parse(file.read_text()))
]


def is_said(message, sources):
    """Tell whether a source says the message: in order, in one text, all its pieces."""
    pieces = [p for p in (p.strip() for p in message.split("...")) if len(p) > 1]
    form = ".*".join(map(re.escape, pieces))
    return any(re.search(form, source, re.DOTALL) for source in sources)


@pytest.mark.parametrize("message", quoted())
def test_a_message_that_is_quoted_is_one_of_the_sources(message):
    assert is_said(message, SOURCES)


def test_a_message_that_nobody_says_is_noticed():
    assert not is_said("The streams of ... left their bed", SOURCES)
    assert not is_said("the lightest plan ... Even", ["Even the lightest plan"])
