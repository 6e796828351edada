"""A YAML file as text with positions: how its values are read, shown and written.

Files are parsed into nodes only: no object that a file describes is ever built. Values
change in the text, so that comments and the order stay; what YAML readers do not agree
on is refused.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import json
import operator
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver, implicit_resolvers

from speechbrain_rev.whole_files import open_regular

CORE = "tag:yaml.org,2002:"
NULL = f"{CORE}null"
PLACEHOLDER = "!PLACEHOLDER"
FOLLOWED = ("!ref", "!copy")
# A complete file has some 10 kB.
_MAX_BYTES = 1_000_000
_SCALARS = ("null", "bool", "int", "float", "str")
# A text may be "=" or "<<", which have tags of their own.
_PLAIN = {f"{CORE}{name}" for name in (*_SCALARS, "value", "merge", "seq", "map")}
# Texts without quotes; in a formula the signs stand between spaces: <a> * 2.
_TEXT = re.compile(
    r"(\.{0,2}/|[A-Za-z_<]|~/)[\w./~<>()*+=@%&$-]*|<[\w<>()*/+. -]*[\w>)]"
)
_READ_AS_OTHERS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "<<"}
_TRUTH = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_YAML_1_1 = yaml.resolver.Resolver()
# Packages of version 0.1.0, whose files of settings name their classes.
_NOW_IN = {"speechbrain_rev.speech.": "speechbrain_rev.data."}
_NAMED_IN = re.compile(rf"(?<=:)({'|'.join(map(re.escape, _NOW_IN))})(?=\w)")
_WORDS = {
    "null": "nothing",
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "timestamp": "a date",
    "str": "a text",
    "value": "a sign",
    "merge": "a sign",
}


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
        if directive := re.search(r"^%.*", self.text, re.MULTILINE):
            raise ValueError(
                f"{self.source}: leave {directive[0].strip()!r} out: values are read "
                "as in YAML 1.2, as HyperPyYAML does."
            )
        reader = YAML(typ="safe", pure=True)
        reader.Resolver = _Resolver
        try:
            node: Node | None = reader.compose(self.text)
            for path, part in walk(node) if node is not None else ():
                self._refuse(path, part)
        except RecursionError as error:
            raise ValueError(f"{self.source}: brackets are nested too deep.") from error
        except YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = str(error if mark is None else getattr(error, "problem", ""))
            place = self.source if mark is None else self._line(mark.line)
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
        wrong = ""
        if node.anchor:
            wrong = (
                f"anchors (&{node.anchor}) are not followed from file to file; use "
                "!ref <key>."
            )
        elif str(node.tag).startswith("!include"):
            wrong = "!include: is not followed; name the parent by `base: FILE`."
        elif is_plain(node, "int") and re.match(r"[-+]?0_*\d", node.value):
            wrong = (
                f"{path or 'the value'} is {excerpt(node)}, which is decimal for some "
                "YAML readers and octal for others: leave the zero in front out."
            )
        if wrong:
            raise ValueError(f"{self.where(node)}: {wrong}")
        if isinstance(node, MappingNode):
            self._refuse_keys(path, node)

    def _refuse_keys(self, path: str, node: MappingNode) -> None:
        seen: set[str] = set()
        for key, value in node.value:
            if not value.value:
                # What is empty ends where the next thing begins.
                value.start_mark = key.start_mark
            named = isinstance(key, ScalarNode) and not is_object(key) and key.value
            # HyperPyYAML takes texts alone for keys at the top.
            named = named and (path or str(key.tag) == f"{CORE}str")
            # `? key` on a line of its own, or a key of a flow mapping without a value.
            colon = self.text[key.end_mark.index :].lstrip(" ").startswith(":")
            wrong = ""
            if key.value == "<<":
                wrong = "merging by << loses values; name the parent by `base: FILE`."
            elif not named or not colon:
                wrong = "a key is a name with a colon after it: `key: value`."
            elif key.value in seen:
                wrong = f"the key {below(path, key.value)!r} stands there twice."
            if wrong:
                raise ValueError(f"{self.where(key)}: {wrong}")
            seen.add(key.value)


@dataclass(frozen=True)
class Value:
    """A value and the document in which it was written."""

    node: Node
    document: Document

    @property
    def where(self) -> str:
        """The place, for error messages."""
        return self.document.where(self.node)


class NotPlain(Exception):
    """A value that is known only once a placeholder is filled or an object built."""


class Unreadable(ValueError):
    """A number that cannot be read, as it is written."""


class Reference(str):
    """What a reference says, as it is written; where it leads is not looked at."""


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
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        text = _NAMED_IN.sub(lambda old: _NOW_IN[old[0]], text)
        return Document(str(file), text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        if isinstance(error, UnicodeDecodeError):
            reason = f"it is no text in UTF-8 (byte {error.start + 1})"
        child = f", the base of {wanted_by}," if wanted_by else ""
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
    return str(node.tag) not in (*_PLAIN, *FOLLOWED, PLACEHOLDER)


def is_reference(node: Node) -> TypeGuard[ScalarNode]:
    """Tell whether a node is a scalar that stands for another value, or for one to come."""
    return isinstance(node, ScalarNode) and str(node.tag) in (*FOLLOWED, PLACEHOLDER)


def is_plain(node: Node, name: str) -> bool:
    """Tell whether a node is a scalar without quotes that YAML reads as a ``name``."""
    scalar = isinstance(node, ScalarNode) and not node.style
    return scalar and str(node.tag) == f"{CORE}{name}"


def scalar_kind(node: ScalarNode) -> str:
    """Return the type of a scalar, by its tag: null, bool, int, float or str."""
    suffix = str(node.tag).removeprefix(CORE)
    return suffix if suffix in _SCALARS else "str"


def plain(node: Node, follow: Callable[[ScalarNode], object]) -> Any:
    """Return the Python value of a node, those of references by a function.

    Raises
    ------
    NotPlain
        For mappings and objects.
    Unreadable
        If an explicit tag does not fit (``!!int one``), or a number has more digits
        than Python reads.

    Examples
    --------
    >>> plain(Document("a value", "[1, -.inf, yes]").node(), follow=str)
    [1, -inf, 'yes']
    """
    if is_object(node) or isinstance(node, MappingNode):
        raise NotPlain
    if isinstance(node, SequenceNode):
        return [plain(item, follow) for item in node.value]
    assert isinstance(node, ScalarNode), "the only kind of node that is left"
    if is_reference(node):
        return follow(node)
    written = str(node.value).replace("_", "").lower()
    read: dict[str, Callable[[], object]] = {
        "null": lambda: None,
        "bool": lambda: bool(("false", "true").index(written)),
        "int": lambda: int(written, base=0),
        "float": lambda: float(re.sub(r"\.(inf|nan)", r"\1", written)),
        "str": lambda: str(node.value),
    }
    try:
        return read[scalar_kind(node)]()
    except ValueError as error:
        raise Unreadable(excerpt(node)) from error


def reference(node: ScalarNode) -> Reference:
    """Write a reference anew, or a placeholder."""
    return Reference(
        f"{node.tag} {quoted(node.value)}" if node.value else str(node.tag)
    )


def dump(value: object) -> str:
    """Write a plain value on one line, so that all YAML readers agree on it.

    Examples
    --------
    >>> print(dump([1e-6, True, None, "1.10", Reference("!ref <seed>")]))
    [1.0e-06, true, null, "1.10", !ref <seed>]
    """
    if isinstance(value, list):
        # A bracket that follows at once would be read as part of a bare tag.
        parts = [f"{dump(item)}{' ' * (item == PLACEHOLDER)}" for item in value]
        return f"[{', '.join(parts)}]"
    if isinstance(value, str):
        return value if isinstance(value, Reference) else quoted(value)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    assert isinstance(value, int | float), "the only plain value that is left"
    # Adding zero to a negative zero takes its sign.
    written = repr(value + 0).replace("inf", ".inf").replace("nan", ".nan")
    # YAML 1.1 readers take 1e-06 for a text and 1.0e-06 for a number.
    return written if "." in written else written.replace("e", ".0e")


def quoted(value: str) -> str:
    r"""Quote a text unless every YAML reader takes it for a text as it is.

    Examples
    --------
    >>> print(quoted("results/<arch>"), quoted("1.10"), quoted("yes"), quoted("a b"))
    results/<arch> "1.10" "yes" "a b"
    >>> print(quoted("a\x7fb"))
    "a\U0000007fb"
    """
    is_word = value.lower() in _READ_AS_OTHERS
    return value if _TEXT.fullmatch(value) and not is_word else as_json(value)


def as_json(value: object) -> str:
    """Write a value in JSON, of which YAML readers take all but some characters."""
    return "".join(
        character if character.isprintable() else f"\\U{ord(character):08x}"
        for character in json.dumps(value, default=os.fspath, ensure_ascii=False)
    )


def refuse_disagreement(document: Document) -> None:
    r"""Refuse values that are one thing for some YAML readers and another for others.

    HyperPyYAML reads YAML 1.2, PyYAML reads 1.1: ``1e-4`` is a number for the one and a
    text for the other, ``no`` a text and false. Values of other files and of the
    command line are written anew, for both alike.

    Raises
    ------
    ValueError
        With the key, the place and what to write instead.

    Examples
    --------
    >>> refuse_disagreement(Document("train.yaml", "seed: 3\nlr: 1e-4\n"))
    Traceback (most recent call last):
    ValueError: train.yaml, line 2: lr is 1e-4, a number for some YAML readers and a...
    """
    for path, node in walk(document.root):
        tag = str(node.tag).removeprefix(CORE)
        if not isinstance(node, ScalarNode) or not is_plain(node, tag):
            continue
        ours = scalar_kind(node) if tag in ("value", "merge") else tag
        theirs = _YAML_1_1.resolve(yaml.ScalarNode, node.value, (True, False))
        theirs = theirs.removeprefix(CORE)
        if theirs == ours:
            continue
        instead = f'it in quotes: "{node.value}"'
        if truth := _TRUTH.get(node.value.lower()):
            instead = f'{truth}, or "{node.value}"'
        elif ours in ("int", "float"):
            with contextlib.suppress(ValueError):
                instead = dump(plain(node, reference))
        raise ValueError(
            f"{document.where(node)}: {path} is {excerpt(node)}, {_WORDS[ours]} for "
            f"some YAML readers and {_WORDS[theirs]} for others. Write {instead}."
        )


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.Mod: operator.mod,
}


def compute(formula: str) -> object:
    """Compute a formula as HyperPyYAML does, within the range of a number.

    Integers have no largest one: ``9 ** 9 ** 9`` would be computed for hours.

    Parameters
    ----------
    formula : str
        With all references filled in.

    Returns
    -------
    object
        What HyperPyYAML would make of it; what is no formula is a text and stays.

    Raises
    ------
    ArithmeticError
        If a step of it divides by zero, repeats a text or leaves the range of floats.

    Examples
    --------
    >>> compute("3 * 2 ** 4"), compute("results/3")
    (48, 'results/3')
    >>> compute("1986 ** 999999")
    Traceback (most recent call last):
    OverflowError: ...
    """
    try:
        return _computed(ast.parse(formula, mode="eval").body)
    except (TypeError, SyntaxError, KeyError):
        return formula
    except (RecursionError, MemoryError) as error:
        raise ArithmeticError("the formula is nested too deep") from error


def _computed(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if not isinstance(node, ast.BinOp):
        raise TypeError(node)
    operation = _OPERATIONS[type(node.op)]
    left, right = _computed(node.left), _computed(node.right)
    kinds = {type(left), type(right)}
    if kinds & {str, bytes} and operation in (operator.mul, operator.mod):
        raise ArithmeticError("a text would be repeated or filled")
    if kinds <= {int, bool} and operation is operator.pow:
        # Overflows at once where the integer would take hours.
        float(left) ** right
    result = operation(left, right)
    if isinstance(result, int):
        float(result)
    return result


def excerpt(node: Node) -> str:
    """Show what a node says, for error messages."""
    if isinstance(node, ScalarNode):
        value = str(node.value)
        if len(value) > 60:
            value = f"{value[:50]}... ({len(value)} characters)"
        if is_object(node):
            return f"{str(node.tag).replace(CORE, '!!')} {value}".strip()
        # In quotes as it was, where that is what is wrong with it.
        return f'"{value}"' if node.style else value
    if is_object(node):
        return str(node.tag)
    if not isinstance(node, SequenceNode):
        return "a mapping"
    shown = [excerpt(item) for item in node.value[:10]]
    return f"[{', '.join(shown)}{', ...' * (len(node.value) > 10)}]"


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
    by_plain_name = {_without_form(key): prefix + key for key in known}
    match = functools.partial(
        difflib.get_close_matches, _without_form(name), by_plain_name
    )
    if close := match(n=2, cutoff=0.6):
        return f" Did you mean {' or '.join(by_plain_name[it] for it in close)}?"
    farther = match(n=1, cutoff=0.0) if far else []
    return "".join(f" The nearest known name is {by_plain_name[it]}." for it in farther)


def _without_form(name: str) -> str:
    """Take case, width and ornament off a name."""
    return unicodedata.normalize("NFKC", name).casefold()
