"""A YAML file as text with positions, so that values change and comments stay.

Files are parsed into nodes only: no object that a file describes is ever built.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

CORE = "tag:yaml.org,2002:"
NULL = f"{CORE}null"
REFERENCES = ("!ref", "!copy", "!PLACEHOLDER")


@dataclass(frozen=True)
class Document:
    """One file or one value of the command line.

    Attributes
    ----------
    source : str
        The file's name, or "command line".
    text : str
        What stands there.
    """

    source: str
    text: str

    @functools.cached_property
    def root(self) -> MappingNode:
        """Keys and values, parsed; what would compose silently wrong is refused."""
        node = self.node()
        if not isinstance(node, MappingNode):
            raise ValueError(f"{self.source}: lines `key: value` are expected.")
        return node

    def node(self) -> Node | None:
        """Parse the text, which may be any one value or nothing."""
        try:
            node: Node | None = YAML(typ="safe", pure=True).compose(self.text)
        except YAMLError as error:
            place, problem = self.source, str(error)
            if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
                place += f", line {error.problem_mark.line + 1}"
                problem = str(error.problem)
            raise ValueError(
                f"{place}: this is no valid YAML: {' '.join(problem.split())}."
            ) from error
        if node is not None:
            for _, part in walk(node):
                self._refuse(part)
        return node

    def where(self, node: Node) -> str:
        """Say where a node stands, for error messages."""
        return f"{self.source}, line {node.start_mark.line + 1}"

    def _refuse(self, node: Node) -> None:
        place = self.where(node)
        if node.anchor:
            raise ValueError(
                f"{place}: anchors (&{node.anchor}) are not followed from file to "
                "file; use !ref <key>."
            )
        if str(node.tag).startswith("!include"):
            raise ValueError(
                f"{place}: !include: is not followed; name the parent by `base: FILE`."
            )
        if not isinstance(node, MappingNode):
            return
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value == "<<":
                raise ValueError(
                    f"{self.where(key)}: merging by << loses values; name the parent "
                    "by `base: FILE`."
                )
            if key.value in seen:
                raise ValueError(
                    f"{self.where(key)}: the key {key.value!r} stands there twice."
                )
            seen.add(key.value)


@dataclass(frozen=True)
class Edit:
    """Characters ``start`` to ``end`` of a text become ``replacement``."""

    start: int
    end: int
    replacement: str


def apply(edits: Iterable[Edit], text: str) -> str:
    r"""Change a text in places that do not overlap.

    Examples
    --------
    >>> apply([Edit(3, 4, "2"), Edit(8, 9, "4")], "a: 1\nb: 3\n")
    'a: 2\nb: 4\n'
    """
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.replacement + text[edit.end :]
    return text


def read(file: Path, wanted_by: str = "") -> Document:
    """Read a hyperparameter file.

    Raises
    ------
    ValueError
        If it cannot be read; the message says which file names it as its base.
    """
    try:
        return Document(str(file), file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        child = f", the base of {wanted_by}," if wanted_by else ""
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(
            f"The hyperparameter file {file}{child} cannot be read: {reason}."
        ) from error


def items(node: MappingNode) -> dict[str, Node]:
    """Return the values of a mapping by key."""
    return {key.value: value for key, value in node.value}


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield a node and all below it, each with its dotted key."""
    yield path, node
    if isinstance(node, MappingNode):
        for key, value in node.value:
            yield from walk(value, f"{path}.{key.value}" if path else str(key.value))
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            yield from walk(value, f"{path}[{index}]")


def end_of_value(text: str, key: Node, value: Node) -> int:
    """Return where a value's last character is, comments after it left out."""
    if isinstance(value, SequenceNode) and value.value and not value.flow_style:
        return max(end_of_value(text, key, item) for item in value.value)
    # An empty value has no place of its own: it ends with the colon.
    after_colon = int(key.end_mark.index) + 1
    return max(after_colon, len(text[: value.end_mark.index].rstrip()))


def is_object(node: Node) -> bool:
    """Tell whether a node describes an object (``!new:``, ``!name:``, ``!apply:``)."""
    tag = str(node.tag)
    return not tag.startswith(CORE) and tag not in REFERENCES


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest the known names that a wrong one may have meant.

    Examples
    --------
    >>> nearest("optimiser_bits", ["optimizer_bits", "lr"])
    ' Did you mean optimizer_bits?'
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    if close:
        return f" Did you mean {' or '.join(prefix + key for key in close)}?"
    farther = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return "".join(f" The nearest known key is {prefix}{key}." for key in farther)
