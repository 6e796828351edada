"""A YAML file as text with positions, so that values change and comments stay.

Files are parsed into nodes only: no object that a file describes is ever built.
"""

from __future__ import annotations

import difflib
import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver, implicit_resolvers

from speechbrain_rev.whole_files import open_regular

CORE = "tag:yaml.org,2002:"
NULL = f"{CORE}null"
REFERENCES = ("!ref", "!copy", "!PLACEHOLDER")
# A complete file has some 10 kB.
_MAX_BYTES = 1_000_000
_SCALARS = ("null", "bool", "int", "float", "str")
# A text may be "=" or "<<", which have tags of their own.
_PLAIN = {f"{CORE}{name}" for name in (*_SCALARS, "value", "merge", "seq", "map")}


def _patterns() -> dict[str, list[tuple[str, Any]]]:
    """Return what a scalar without quotes may be, by its first character."""
    patterns: dict[str, list[tuple[str, Any]]] = {
        "(": [("!tuple", re.compile(r"^\(.*\)$"))]
    }
    for versions, tag, pattern, firsts in implicit_resolvers:
        if (1, 2) in versions and tag.startswith(CORE):
            for first in firsts:
                patterns.setdefault(first, []).append((tag, pattern))
    return patterns


class _Resolver(VersionedResolver):
    """Reads scalars as YAML 1.2 and HyperPyYAML do, in every process alike.

    Loading by HyperPyYAML adds its tuples to ruamel.yaml for the rest of the process.
    A file must not mean one thing before that and another after it.
    """

    versioned_resolver: ClassVar[dict[str, list[tuple[str, Any]]]] = _patterns()


@dataclass(frozen=True)
class Document:
    """One file or one value from elsewhere.

    Attributes
    ----------
    source : str
        The file's name, or where else the text comes from.
    text : str
        What stands there.
    is_file : bool
        Whether lines of it can be looked up.
    """

    source: str
    text: str
    is_file: bool = True

    @functools.cached_property
    def root(self) -> MappingNode:
        """Keys and values, parsed; what would compose silently wrong is refused."""
        node = self.node()
        if not isinstance(node, MappingNode) or is_object(node):
            raise ValueError(f"{self.source}: lines `key: value` are expected.")
        return node

    def node(self) -> Node | None:
        """Parse the text, which may be any one value or nothing."""
        directive = re.search(r"^%.*", self.text, re.MULTILINE)
        if directive:
            raise ValueError(
                f"{self.source}: leave {directive[0].strip()!r} out: values are read "
                "as in YAML 1.2, as HyperPyYAML does."
            )
        try:
            reader = YAML(typ="safe", pure=True)
            reader.Resolver = _Resolver
            node: Node | None = reader.compose(self.text)
            if node is not None:
                for path, part in walk(node):
                    self._refuse(path, part)
        except RecursionError as error:
            raise ValueError(f"{self.source}: brackets are nested too deep.") from error
        except YAMLError as error:
            place, problem = self.source, str(error)
            if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
                place = self._line(error.problem_mark.line)
                problem = str(error.problem)
            raise ValueError(
                f"{place}: this is no valid YAML: {' '.join(problem.split())}."
            ) from error
        return node

    def where(self, node: Node) -> str:
        """Say where a node stands, for error messages."""
        return self._line(node.start_mark.line) if self.is_file else self.source

    def _line(self, index: int) -> str:
        return f"{self.source}, line {index + 1}" if self.is_file else self.source

    def _refuse(self, path: str, node: Node) -> None:
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
        if isinstance(node, MappingNode):
            self._refuse_keys(path, node)
        elif is_plain(node, "int") and re.match(r"[-+]?0_*\d", node.value):
            raise ValueError(
                f"{place}: {path or 'the value'} is {excerpt(node)}, which is decimal "
                "for some YAML readers and octal for others: leave the zero in front "
                "out."
            )

    def _refuse_keys(self, path: str, node: MappingNode) -> None:
        seen: set[str] = set()
        for key, value in node.value:
            place = self.where(key)
            if not value.value:
                # What is empty ends where the next thing begins.
                value.start_mark = key.start_mark
            if key.value == "<<":
                raise ValueError(
                    f"{place}: merging by << loses values; name the parent by "
                    "`base: FILE`."
                )
            named = isinstance(key, ScalarNode) and not is_object(key) and key.value
            if not path:
                # HyperPyYAML takes texts alone for keys at the top.
                named = named and str(key.tag) == f"{CORE}str"
            # `? key` on a line of its own, or a key of a flow mapping without a value.
            colon = self.text[key.end_mark.index :].lstrip(" ").startswith(":")
            if not named or not colon:
                raise ValueError(
                    f"{place}: a key is a name with a colon after it: `key: value`."
                )
            if key.value in seen:
                raise ValueError(
                    f"{place}: the key {below(path, key.value)!r} stands there twice."
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
    """Read a hyperparameter file, a regular one.

    Raises
    ------
    ValueError
        If it cannot be read, is no regular file, or has more than a million bytes; the
        message says which file names it as its base.
    """
    try:
        with open_regular(file) as opened:
            content = opened.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        text = content.decode("utf-8-sig")
        return Document(str(file), text.replace("\r\n", "\n").replace("\r", "\n"))
    except (OSError, ValueError) as error:
        child = f", the base of {wanted_by}," if wanted_by else ""
        reason = (
            error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        )
        if isinstance(error, UnicodeDecodeError):
            reason = f"it is no text in UTF-8 (byte {error.start + 1})"
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
            yield from walk(value, below(path, str(key.value)))
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            yield from walk(value, f"{path}[{index}]")


def below(path: str, key: str) -> str:
    """Return the dotted key of an entry of a mapping."""
    return f"{path}.{key}" if path else key


def end_of_value(text: str, key: Node, value: Node) -> int:
    """Return where a value's last character is, comments after it left out."""
    if isinstance(value, SequenceNode) and value.value and not value.flow_style:
        return max(end_of_value(text, key, item) for item in value.value)
    if not value.value and is_plain(value, "null"):
        # An empty value has no place of its own: it ends with the colon.
        return text.index(":", key.end_mark.index) + 1
    return len(text[: value.end_mark.index].rstrip())


def is_object(node: Node) -> bool:
    """Tell whether a node is more than plain values (``!new:``, ``!name:``, ``!!set``)."""
    tag = str(node.tag)
    return tag not in _PLAIN and tag not in REFERENCES


def is_plain(node: Node, name: str) -> bool:
    """Tell whether a node is a scalar without quotes that YAML reads as a ``name``."""
    return (
        isinstance(node, ScalarNode)
        and not node.style
        and str(node.tag) == f"{CORE}{name}"
    )


def excerpt(node: Node) -> str:
    """Show what a node says, for error messages."""
    if isinstance(node, ScalarNode):
        tag = str(node.tag)
        value = str(node.value)
        if len(value) > 60:
            value = f"{value[:50]}... ({len(value)} characters)"
        if is_object(node):
            return f"{tag.replace(CORE, '!!')} {value}".strip()
        # In quotes as it was, where that is what is wrong with it.
        return f'"{value}"' if node.style else value
    if isinstance(node, SequenceNode) and not is_object(node):
        shown = [excerpt(item) for item in node.value[:10]]
        return f"[{', '.join(shown)}{', ...' * (len(node.value) > 10)}]"
    return str(node.tag) if is_object(node) else "a mapping"


def unknown(name: str, known: Iterable[str], prefix: str = "") -> str:
    r"""Say that a key is unknown, and which known one it may have meant.

    Examples
    --------
    >>> unknown("optimiser_bits", ["optimizer_bits", "lr"])
    "unknown key 'optimiser_bits'. Did you mean optimizer_bits?"
    >>> print(unknown("l\u0433", ["optimizer_bits", "lr"]))
    unknown key 'l\u0433' (l\u0433 in ASCII). The nearest known name is lr.
    """
    dotted = f"{prefix}{name}"
    letters = "" if name.isascii() else f" ({ascii(dotted)[1:-1]} in ASCII)"
    return f"unknown key {dotted!r}{letters}.{nearest(name, known, prefix)}"


def nearest(
    name: str, known: Iterable[str], prefix: str = "", *, far: bool = True
) -> str:
    """Suggest the known names that a wrong one may have meant; the nearest if far.

    Examples
    --------
    >>> nearest("optimiser_bits", ["optimizer_bits", "lr"])
    ' Did you mean optimizer_bits?'
    """
    by_plain_name = {_without_form(key): key for key in known}
    close = difflib.get_close_matches(
        _without_form(name), by_plain_name, n=2, cutoff=0.6
    )
    if close:
        names = [prefix + by_plain_name[plain] for plain in close]
        return f" Did you mean {' or '.join(names)}?"
    if not far:
        return ""
    farther = difflib.get_close_matches(
        _without_form(name), by_plain_name, n=1, cutoff=0.0
    )
    return "".join(
        f" The nearest known name is {prefix}{by_plain_name[plain]}."
        for plain in farther
    )


def _without_form(name: str) -> str:
    """Take case, width and ornament off a name."""
    return unicodedata.normalize("NFKC", name).casefold()
