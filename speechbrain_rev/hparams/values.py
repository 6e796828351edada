"""Types of hyperparameters: what a knob takes, and how its value is written.

A knob's type is the one that its value in the complete file shows. Only knobs that are
null, empty or a placeholder there have theirs in the table.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from speechbrain_rev.architectures import TrainingDefaults
from speechbrain_rev.hparams.document import (
    CORE,
    NULL,
    REFERENCES,
    Document,
    is_object,
    items,
)

COMMAND_LINE = "command line"

KINDS = {
    # Null stands for what the architecture's family uses.
    **{
        field.name: field.type if isinstance(field.type, str) else field.type.__name__
        for field in dataclasses.fields(TrainingDefaults)
    },
    # Null stands for what the complete file's comment says.
    "widths": "list of int",
    "blocks": "list of int",
    "mode": "str",
    "steps_per_epoch": "int",
    "train_list": "str",
    "valid_trials": "str",
    "noise_folder": "str",
    "rir_folder": "str",
    "pretrained_run": "str",
    # These are never null.
    "data_folder": "str",
    "trial_lists": "list of str",
}
_NEVER_NULL = ("data_folder", "trial_lists")

_WORDS = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "list": "a list such as [a, b]",
    "list of int": "a list of integers such as [8, 16]",
    "list of float": "a list of numbers such as [1.0, 0.9]",
    "list of str": "a list of texts such as [a.txt, b.txt]",
}


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that replaces one of the complete file, and where it was written."""

    node: Node
    document: Document

    @property
    def where(self) -> str:
        """The place, for error messages."""
        if self.document.source == COMMAND_LINE:
            return COMMAND_LINE
        return self.document.where(self.node)


def given(key: str, value: object, root: MappingNode) -> Value:
    """Read a value as the command line or a caller gives it.

    Text for a knob that takes text stays as it was typed: a folder may be called 007.
    """
    kind = kind_of(key, root)
    written = value if isinstance(value, str) else json.dumps(value, default=os.fspath)
    document = Document(COMMAND_LINE, written)
    literal = isinstance(value, str) and value != "null" and not value.startswith("!")
    if kind == "str" and literal:
        return Value(ScalarNode(f"{CORE}str", value), document)
    try:
        node = document.node()
    except ValueError as error:
        raise ValueError(f"{error} Put the value of {key} in quotes.") from error
    return Value(node or ScalarNode(NULL, ""), document)


def kind_of(key: str, root: MappingNode) -> str | None:
    """Return what a top-level knob takes, None for any plain value.

    Examples
    --------
    >>> kind_of("speeds", Document("train.yaml", "speeds: [1.0, 0.9]").root)
    'list of float'
    """
    if key in KINDS:
        return KINDS[key]
    known = items(root)
    return shown_kind(known[key], root) if key in known else None


def shown_kind(node: Node, root: MappingNode) -> str | None:
    """Return the type that a value of the complete file shows, None for any."""
    if isinstance(node, SequenceNode):
        kinds = {shown_kind(item, root) for item in node.value}
        inner = f"list of {kinds.pop()}" if len(kinds) == 1 else ""
        return inner if inner in _WORDS else "list"
    if str(node.tag) in REFERENCES:
        written = str(node.value)
        alone = re.fullmatch(r"<(\w+)>", written)
        if alone:
            return kind_of(alone[1], root)
        # Letters outside the references make a text, the rest is arithmetic.
        return "str" if re.search(r"[^\W\d]", re.sub(r"<[^>]*>", "", written)) else None
    suffix = str(node.tag).removeprefix(CORE)
    if suffix == "null" or not isinstance(node, ScalarNode):
        return None
    return suffix if suffix in ("bool", "int", "float") else "str"


def write(value: Value, kind: str | None, key: str) -> str:
    """Write a value as it will stand in the text, on one line.

    Parameters
    ----------
    value : Value
        The value.
    kind : str or None
        What the knob takes.
    key : str
        The knob's dotted key.

    Raises
    ------
    ValueError
        If the value is of another type. An integer serves where a number is taken.
    """
    node, tag = value.node, str(value.node.tag)
    nullable = kind is None or (key in KINDS and key not in _NEVER_NULL)
    if tag == NULL and nullable:
        return "null"
    if tag in REFERENCES and isinstance(node, ScalarNode):
        return f"{tag} {text(node.value)}" if node.value else tag
    written = _plain(node, kind)
    if written is None:
        words = _WORDS[kind] if kind else "a plain value or list"
        raise ValueError(
            f"{value.where}: {key} takes {words}"
            f"{' or null' if nullable and kind else ''}, not {_excerpt(node)}."
        )
    return written


def text(value: str) -> str:
    """Quote a text unless every YAML reader takes it for a text as it is.

    Examples
    --------
    >>> print(text("results/<arch>"), text("1.10"), text("yes"), text("a b"))
    results/<arch> "1.10" "yes" "a b"
    """
    words = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
    plain = re.fullmatch(r"(\.{0,2}/|[A-Za-z_<]|~/)[\w./~<>()*+=@%&$-]*", value)
    if plain and value.lower() not in words:
        return value
    # In a formula the signs stand between spaces: <a> * 2.
    if re.fullmatch(r"<[\w<>()*/+. -]*[\w>)]", value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _plain(node: Node, kind: str | None) -> str | None:
    """Write a node of the wanted kind, or return None where it is of another one."""
    if is_object(node) or isinstance(node, MappingNode):
        return None
    if isinstance(node, SequenceNode):
        if kind is not None and not kind.startswith("list"):
            return None
        inner = kind.removeprefix("list of ") if kind and kind != "list" else None
        written = [_plain(item, inner) for item in node.value]
        parts = [part for part in written if part is not None]
        return f"[{', '.join(parts)}]" if len(parts) == len(written) else None
    found = shown_kind(node, MappingNode("", []))
    if found == "int" and kind == "float":
        return _number(float(_read(node.value)))
    if found is None or kind not in (None, found):
        return None
    if found == "bool":
        return str(node.value).lower()
    return text(node.value) if found == "str" else _number(_read(node.value))


def _read(written: str) -> float:
    number = YAML(typ="safe", pure=True).load(written)
    assert isinstance(number, (int, float)), "the node's tag says that it is a number"
    return number


def _number(number: float) -> str:
    written = repr(number).replace("inf", ".inf").replace("nan", ".nan")
    # YAML 1.1 readers take 1e-06 for a text and 1.0e-06 for a number.
    return written if "." in written else written.replace("e", ".0e")


def _excerpt(node: Node) -> str:
    if isinstance(node, ScalarNode):
        tag = f"{node.tag} " if is_object(node) else ""
        return f"{tag}{node.value}" if node.value or tag else "nothing"
    return "a list" if isinstance(node, SequenceNode) else "a mapping"
