"""The documents of the repository, and what is in them."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "recipes/VoxCeleb/README.md",
    *PAGES,
]

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SLUG = slugify(case="lower")


@dataclass(frozen=True)
class Fence:
    """A block of code in a document, and after which line it begins."""

    info: str
    code: str
    line: int


def name_of(document: Path) -> str:
    """Name a document as the repository does."""
    return str(document.relative_to(ROOT))


def fences(document: Path) -> Iterator[Fence]:
    """List the blocks of code of a document."""
    text = document.read_text()
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start(2))
        yield Fence(match[1].strip(), match[2], line)


def prose(document: Path) -> str:
    """Give a document without its blocks of code."""
    return _FENCE.sub("", document.read_text())


def links(document: Path) -> list[str]:
    """List what a document links to within the repository."""
    text = _CODE.sub("", prose(document))
    return [link for link in _LINK.findall(text) if "://" not in link]


def anchors(document: Path) -> list[str]:
    """List what can be linked to in a document: its headings."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(document), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h) for h in headings]
    return [_SLUG(text.replace("`", ""), "-") for text in texts]


def commands(document: Path) -> list[list[str]]:
    """List the commands in blocks that name no language, each as its words."""
    lines = [
        line.removeprefix("$ ")
        for fence in fences(document)
        if fence.info in ("", "console", "bash", "sh")
        for line in fence.code.replace("\\\n", " ").splitlines()
    ]
    split = []
    for line in lines:
        with contextlib.suppress(ValueError):  # not a command: a quote is open
            split.append(shlex.split(line, comments=True))
    return [words for words in split if words]
