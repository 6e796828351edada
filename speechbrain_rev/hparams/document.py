"""YAML as text with positions: how its values are read, shown and written.

Files are parsed into nodes only: no object that a file describes is ever built. Each node
knows its place. Values are replaced in the text, which keeps comments and order. Values
that YAML readers do not agree on are refused.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from hyperpyyaml.core import parse_arithmetic
from ruamel.yaml import YAML
from ruamel.yaml.error import StringMark, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.tag import Tag

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
_YAML_1_1 = yaml.resolver.Resolver()
# Packages of version 0.1.0, whose files of settings name their classes.
_NOW_IN = {"speechbrain_rev.speech.": "speechbrain_rev.data."}
_NAMED_IN = re.compile(rf"(?<=:)({'|'.join(map(re.escape, _NOW_IN))})(?=\w)")


class NotPlain(Exception):
    """A value that is known only once a placeholder is filled or an object built."""


class Unreadable(ValueError):
    """A number that cannot be read, as it is written."""


class Reference(str):
    """A reference as it is written; it is not followed."""


def read(file: Path, wanted_by: str = "") -> str:
    """Read a hyperparameter file, a regular one; an error names the file that wants it."""
    try:
        with open_regular(file) as opened:
            content = opened.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        if isinstance(error, UnicodeDecodeError):
            reason = f"it is no text in UTF-8 (byte {error.start + 1})"
        child = f", the base of {wanted_by}," if wanted_by else ""
        raise ValueError(
            f"The hyperparameter file {file}{child} cannot be read: {reason}."
        ) from error
    return _NAMED_IN.sub(lambda old: _NOW_IN[old[0]], text)


def parse_file(text: str, source: str) -> MappingNode:
    """Parse a file, which must have keys."""
    node = parse(text, source)
    if not isinstance(node, MappingNode) or is_object(node):
        raise ValueError(f"{source}: lines `key: value` are expected.")
    return node


def parse(text: str, source: str, *, is_file: bool = True) -> Node | None:
    """Parse one value or nothing; what would compose silently wrong is refused."""
    if directive := re.search(r"^%.*", text, re.MULTILINE):
        raise ValueError(
            f"{source}: leave {directive[0].strip()!r} out: values are read as in YAML "
            "1.2, as HyperPyYAML does."
        )
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
        for path, part in walk(node) if node is not None else ():
            keys = part.value if isinstance(part, MappingNode) else ()
            for marked in (part, *(key for key, _ in keys)):
                marked.start_mark.name = source
                if not is_file:
                    marked.start_mark.line = -1
            if wrong := _mistake(path, part):
                raise ValueError(f"{where(part)}: {wrong}")
            _refuse_keys(path, keys, text)
    except RecursionError as error:
        raise ValueError(f"{source}: brackets are nested too deep.") from error
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(error if mark is None else getattr(error, "problem", ""))
        line = f", line {mark.line + 1}" if mark is not None and is_file else ""
        raise ValueError(
            f"{source}{line}: this is no valid YAML: {' '.join(problem.split())}."
        ) from error
    return node


def _mistake(path: str, node: Node) -> str:
    """Return what is wrong with a node, if anything; texts in round brackets are tuples."""
    if is_plain(node, "str") and re.fullmatch(r"\(.*\)", node.value):
        # HyperPyYAML teaches ruamel.yaml its tuples, for the rest of the process. A file
        # must not mean one thing before that and another after it.
        node.ctag = Tag(suffix="!tuple")
    if node.anchor:
        return f"anchors (&{node.anchor}) are not followed from file to file; use !ref <key>."
    if str(node.tag).startswith("!include"):
        return "!include: is not followed; name the parent by `base: FILE`."
    if is_plain(node, "int") and re.match(r"[-+]?0_*\d", node.value):
        return (
            f"{path or 'the value'} is {excerpt(node)}, which is decimal for some YAML "
            "readers and octal for others: leave the zero in front out."
        )
    return ""


def _refuse_keys(path: str, entries: Iterable[tuple[Node, Node]], text: str) -> None:
    seen: set[str] = set()
    for key, value in entries:
        if not value.value:
            # What is empty ends where the next thing begins.
            value.start_mark = key.start_mark
        named = isinstance(key, ScalarNode) and not is_object(key) and key.value
        # HyperPyYAML takes texts alone for keys at the top.
        named = named and (path or str(key.tag) == f"{CORE}str")
        # `? key` on a line of its own, or a key of a flow mapping without a value.
        colon = text[key.end_mark.index :].lstrip(" ").startswith(":")
        wrong = ""
        if key.value == "<<":
            wrong = "merging by << loses values; name the parent by `base: FILE`."
        elif not named or not colon:
            wrong = "a key is a name with a colon after it: `key: value`."
        elif key.value in seen:
            wrong = f"the key {below(path, key.value)!r} stands there twice."
        if wrong:
            raise ValueError(f"{where(key)}: {wrong}")
        seen.add(key.value)


def literal(value: str, source: str, kind: str = "str") -> ScalarNode:
    """Return the node of a text that is not read as YAML."""
    return ScalarNode(f"{CORE}{kind}", value, StringMark(source, 0, -1, 0, "", 0))


def where(node: Node) -> str:
    """Return where a node was written, for error messages."""
    place = node.start_mark
    return place.name if place.line < 0 else f"{place.name}, line {place.line + 1}"


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
    """Return whether a node is more than plain values (``!new:``, ``!name:``, ``!!set``)."""
    return str(node.tag) not in (*_PLAIN, *FOLLOWED, PLACEHOLDER)


def is_reference(node: Node) -> TypeGuard[ScalarNode]:
    """Return whether a node is a scalar that stands for another value, or for one to come."""
    return isinstance(node, ScalarNode) and str(node.tag) in (*FOLLOWED, PLACEHOLDER)


def is_plain(node: Node, name: str) -> bool:
    """Return whether a node is a scalar without quotes that YAML reads as a ``name``."""
    scalar = isinstance(node, ScalarNode) and not node.style
    return scalar and str(node.tag) == f"{CORE}{name}"


def scalar_kind(node: ScalarNode) -> str:
    """Return the type of a scalar, by its tag: null, bool, int, float or str."""
    suffix = str(node.tag).removeprefix(CORE)
    return suffix if suffix in _SCALARS else "str"


def plain(node: Node, follow: Callable[[ScalarNode], object]) -> Any:
    """Return the Python value of a node, those of references by a function.

    ``NotPlain`` is raised for mappings and objects, ``Unreadable`` where an explicit tag
    does not fit (``!!int one``) or a number has more digits than Python reads.
    """
    if is_object(node) or isinstance(node, MappingNode):
        raise NotPlain
    if isinstance(node, SequenceNode):
        return [plain(item, follow) for item in node.value]
    assert isinstance(node, ScalarNode), "the only kind of node that is left"
    if is_reference(node):
        return follow(node)
    written = str(node.value).replace("_", "").lower()
    readers: dict[str, Callable[[], object]] = {
        "null": lambda: None,
        "bool": lambda: bool(("false", "true").index(written)),
        "int": lambda: int(written, base=0),
        "float": lambda: float(re.sub(r"\.(inf|nan)", r"\1", written)),
        "str": lambda: str(node.value),
    }
    try:
        return readers[scalar_kind(node)]()
    except ValueError as error:
        raise Unreadable(excerpt(node)) from error


def reference(node: ScalarNode) -> Reference:
    """Write a reference anew, or a placeholder."""
    return Reference(f"{node.tag} {quoted(node.value) if node.value else ''}".strip())


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


def refuse_disagreement(root: MappingNode) -> None:
    """Refuse values that are one thing for some YAML readers and another for others.

    HyperPyYAML reads YAML 1.2, PyYAML reads 1.1: ``1e-4`` is a number for the one and a
    text for the other, ``no`` a text and false. Values of other files and of the
    command line are written anew, for both alike.
    """
    for path, node in walk(root):
        tag = str(node.tag).removeprefix(CORE)
        if not isinstance(node, ScalarNode) or not is_plain(node, tag):
            continue
        ours = scalar_kind(node) if tag in ("value", "merge") else tag
        theirs = _YAML_1_1.resolve(yaml.ScalarNode, node.value, (True, False))
        theirs = theirs.removeprefix(CORE)
        if theirs == ours:
            continue
        instead = f'"{node.value}" in quotes'
        if theirs == "bool":
            instead += ", or true or false"
        elif ours in ("int", "float"):
            with contextlib.suppress(ValueError):
                instead = dump(plain(node, reference))
        raise ValueError(
            f"{where(node)}: {path} is {excerpt(node)}, which YAML 1.2 reads as {ours} and "
            f"YAML 1.1 as {theirs}. Write {instead}."
        )


def compute(formula: str) -> object:
    """Compute a formula as HyperPyYAML does; what is no formula is a text and stays.

    ``ArithmeticError`` is raised where it divides by zero or leaves the range of floats:
    integers have no largest one, and ``9 ** 9 ** 9`` would be computed for hours.
    ``NotPlain`` is raised for a formula of texts in quotes.

    Examples
    --------
    >>> compute("3 * 2 ** 4"), compute("results/3")
    (48, 'results/3')
    >>> compute("1986 ** 999999")
    Traceback (most recent call last):
    OverflowError: ...
    """
    try:
        is_formula = isinstance(ast.parse(formula, mode="eval").body, ast.BinOp)
        if is_formula and set("'\"") & set(formula):
            raise NotPlain
        # Of floats first: they overflow at once.
        parse_arithmetic(re.sub(r"(?<![\w.])\d+(?![\w.])", r"\g<0>.0", formula))
        result = parse_arithmetic(formula)
        if isinstance(result, int):
            float(result)
    except SyntaxError:
        return formula
    except (RecursionError, MemoryError) as error:
        raise ArithmeticError("the formula is nested too deep") from error
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
    r"""Return that a key is unknown, and which known one it may have meant.

    Examples
    --------
    >>> unknown("optimiser_bits", ["optimizer_bits", "lr"])
    "unknown key 'optimiser_bits'. Did you mean optimizer_bits?"
    >>> print(unknown("l\u0433", ["optimizer_bits", "lr"]))
    unknown key 'l\u0433'. The nearest known name is lr.
    """
    return f"unknown key {prefix + name!a}.{nearest(name, known, prefix)}"


def nearest(
    name: str, known: Iterable[str], prefix: str = "", *, far: bool = True
) -> str:
    """Suggest the known names that a wrong one may have meant; the nearest if far.

    Examples
    --------
    >>> nearest("optimiser_bits", ["optimizer_bits", "lr"])
    ' Did you mean optimizer_bits?'
    """
    known = {key.lower(): prefix + key for key in known}
    match = functools.partial(difflib.get_close_matches, name.lower(), known)
    if close := match(n=2, cutoff=0.6):
        return f" Did you mean {' or '.join(known[it] for it in close)}?"
    farther = match(n=1, cutoff=0.0) if far else []
    return "".join(f" The nearest known name is {known[it]}." for it in farther)
