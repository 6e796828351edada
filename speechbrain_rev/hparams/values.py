"""Values of hyperparameters: how they are given, of which type, and how written.

A knob's type is that of its row in ``KNOBS``; another key's is the one that its value
in the complete file shows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from speechbrain_rev.hparams.document import (
    CORE,
    NULL,
    REFERENCES,
    Document,
    excerpt,
    is_object,
    items,
    walk,
)
from speechbrain_rev.hparams.knobs import KNOBS, WORDS, Knob


@dataclasses.dataclass(frozen=True)
class Value:
    """A value and the document in which it was written."""

    node: Node
    document: Document

    @property
    def where(self) -> str:
        """The place, for error messages."""
        return self.document.where(self.node)


def given(key: str, value: object, root: MappingNode, source: str) -> Value:
    """Read a value as the command line or a caller gives it.

    Text for a knob that takes text stays as it was typed: a folder may be called 007.

    Parameters
    ----------
    key : str
        The top-level key.
    value : object
        Text as typed, or a plain value.
    root : MappingNode
        The complete file's.
    source : str
        Where the value comes from, for error messages.
    """
    try:
        written = value if isinstance(value, str) else _json(value)
    except TypeError as error:
        raise ValueError(
            f"{source}: {key} is a {type(value).__name__}: give a plain number, text, "
            "truth value, None, or a list of these."
        ) from error
    document = Document(source, written, is_file=False)
    literal = isinstance(value, str) and value != "null" and not value.startswith("!")
    if kind_of(key, root) == "str" and literal:
        return Value(ScalarNode(f"{CORE}str", value), document)
    try:
        node = document.node()
    except ValueError as error:
        raise ValueError(
            f"{error} It is the value of {key}; a text may need quotes."
        ) from error
    return Value(node or ScalarNode(NULL, ""), document)


def knob_of(path: Sequence[str], node: Node) -> Knob | None:
    """Return the row that an entry of the complete file is held to, if any.

    Parameters
    ----------
    path : sequence of str
        The entry's keys from the top.
    node : Node
        Its value in the complete file; a reference to a knob alone stands for it.
    """
    if len(path) == 1 and path[0] in KNOBS:
        return KNOBS[path[0]]
    return KNOBS.get(_referred(node))


def kind_of(key: str, root: MappingNode) -> str | None:
    """Return what a top-level key takes, None for any plain value.

    Examples
    --------
    >>> kind_of("names", Document("train.yaml", "names: [a, b]").root)
    'list of str'
    """
    known = items(root)
    if key in KNOBS:
        return KNOBS[key].kind
    return shown_kind(known[key], root) if key in known else None


def shown_kind(node: Node, root: MappingNode) -> str | None:
    """Return the type that a value of the complete file shows, None for any."""
    if isinstance(node, SequenceNode):
        kinds = {shown_kind(item, root) for item in node.value}
        inner = f"list of {kinds.pop()}" if len(kinds) == 1 else ""
        return inner if inner in WORDS else "list"
    if str(node.tag) in REFERENCES:
        if _referred(node):
            return kind_of(_referred(node), root)
        # Letters outside the references make a text, the rest is arithmetic.
        outside = re.sub(r"<[^>]*>", "", str(node.value))
        return "str" if re.search(r"[^\W\d]", outside) else None
    suffix = str(node.tag).removeprefix(CORE)
    if suffix == "null" or not isinstance(node, ScalarNode):
        return None
    return suffix if suffix in ("bool", "int", "float") else "str"


def _referred(node: Node) -> str:
    """Return the one key that a reference stands for, else nothing."""
    if str(node.tag) not in REFERENCES or not isinstance(node, ScalarNode):
        return ""
    alone = re.fullmatch(r"<(\w+)>", node.value)
    return alone[1] if alone else ""


def plain_value(node: ScalarNode) -> bool | int | float | str | None:
    """Return the Python value of a scalar that is no reference and no object.

    Raises
    ------
    ValueError
        If an explicit tag does not fit (``!!int one``), or a number has more digits
        than Python reads.

    Examples
    --------
    >>> plain_value(ScalarNode(f"{CORE}float", "-.inf"))
    -inf
    """
    kind = shown_kind(node, MappingNode("", []))
    if kind in (None, "str"):
        return None if kind is None else str(node.value)
    written = str(node.value).replace("_", "").lower()
    if kind == "int":
        return int(written, base=0)
    if kind == "float":
        return float(written.replace(".inf", "inf").replace(".nan", "nan"))
    if written not in ("true", "false"):
        raise ValueError(f"{node.value} is no truth value.")
    return written == "true"


def write(
    value: Value,
    kind: str | None,
    key: str,
    *,
    nullable: bool,
    knob: Knob | None = None,
) -> str:
    """Write a value as it will stand in the text, on one line.

    Parameters
    ----------
    value : Value
        The value.
    kind : str or None
        What the key takes.
    key : str
        The dotted key.
    nullable : bool
        Whether null means something.
    knob : Knob or None
        Its row, if it has one, for the error message.

    Raises
    ------
    ValueError
        If the value is of another type. An integer serves where a number is taken.
    """
    node, tag = value.node, str(value.node.tag)
    if tag == NULL and nullable:
        return "null"
    if tag in REFERENCES and isinstance(node, ScalarNode):
        return _reference(node)
    for _, part in walk(node):
        signs = "\x85" if part is node else "\x85?"
        if isinstance(part, ScalarNode) and set(signs) & set(part.value):
            # It writes texts anew before it reads them, some of them wrongly.
            raise ValueError(
                f"{value.where}: {key} is {excerpt(node)}: HyperPyYAML cannot read a "
                "question mark in a list, nor the sign U+0085. Rename what it names."
            )
    try:
        written = _plain(node, kind)
    except (OverflowError, ValueError):
        written = None
    if written is None:
        words = WORDS[kind] if kind else "a plain value or list"
        takes = f"{words} or null" if nullable and kind else words
        raise ValueError(wrong_kind(value.where, key, knob or takes, excerpt(node)))
    return written


def wrong_kind(where: str, key: str, takes: Knob | str, shown: str) -> str:
    """Say that a value is of another type than its key takes."""
    words, advice = takes, ""
    if isinstance(takes, Knob):
        words, advice = takes.takes(), takes.advice()
        # How a list is written; the example has not the length that some must have.
        example = WORDS[takes.kind].partition(" such as ")[2]
        if example and takes.length is None:
            words += f", such as {example}"
    return f"{where}: {key} takes {words}, not {shown or 'nothing'}.{advice}"


def text(value: str) -> str:
    r"""Quote a text unless every YAML reader takes it for a text as it is.

    Examples
    --------
    >>> print(text("results/<arch>"), text("1.10"), text("yes"), text("a b"))
    results/<arch> "1.10" "yes" "a b"
    >>> print(text("a\x7fb"))
    "a\U0000007fb"
    """
    words = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "<<"}
    plain = re.fullmatch(r"(\.{0,2}/|[A-Za-z_<]|~/)[\w./~<>()*+=@%&$-]*", value)
    if plain and value.lower() not in words:
        return value
    # In a formula the signs stand between spaces: <a> * 2.
    if re.fullmatch(r"<[\w<>()*/+. -]*[\w>)]", value) and value != "<<":
        return value
    return _json(value)


def _json(value: object) -> str:
    """Write a value in JSON, of which YAML readers take all but some characters."""
    return "".join(
        character if character.isprintable() else f"\\U{ord(character):08x}"
        for character in json.dumps(value, default=os.fspath, ensure_ascii=False)
    )


def _reference(node: ScalarNode) -> str:
    return f"{node.tag} {text(node.value)}" if node.value else str(node.tag)


def _plain(node: Node, kind: str | None) -> str | None:
    """Write a node of the wanted kind, or return None where it is of another one."""
    if is_object(node) or isinstance(node, MappingNode):
        return None
    if isinstance(node, SequenceNode):
        if kind is not None and not kind.startswith("list"):
            return None
        inner = kind.removeprefix("list of ") if kind and kind != "list" else None
        written = [_item(item, inner) for item in node.value]
        parts = [part for part in written if part is not None]
        return f"[{', '.join(parts)}]" if len(parts) == len(written) else None
    assert isinstance(node, ScalarNode), "the only kind of node that is left"
    found, value = shown_kind(node, MappingNode("", [])), plain_value(node)
    if kind == "float" and type(value) is int:
        value, found = float(value), kind
    if value is None or kind not in (None, found):
        return None
    if isinstance(value, str):
        return text(value)
    return str(value).lower() if isinstance(value, bool) else _number(value)


def _item(node: Node, kind: str | None) -> str | None:
    if str(node.tag) in REFERENCES and isinstance(node, ScalarNode):
        # A bracket that follows at once would be read as part of a bare tag.
        return f"{_reference(node)} " if not node.value else _reference(node)
    return _plain(node, kind)


def _number(number: float) -> str:
    # Adding zero to a negative zero takes its sign.
    written = repr(number + 0).replace("inf", ".inf").replace("nan", ".nan")
    # YAML 1.1 readers take 1e-06 for a text and 1.0e-06 for a number.
    return written if "." in written else written.replace("e", ".0e")
