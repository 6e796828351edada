"""YAML as text with positions: how its values are read, shown and written.

Files are parsed into values only: no object that a file describes is ever built. Each
value knows its key and its place. Values are replaced in the text, which keeps comments
and order. Values that YAML readers do not agree on are refused.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hyperpyyaml.core import parse_arithmetic
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from speechbrain_rev.architectures import nearest

PLACEHOLDER = "!PLACEHOLDER"
FOLLOWED = ("!ref", "!copy")
SCALARS = ("null", "bool", "int", "float", "str")
_CORE = "tag:yaml.org,2002:"
# A text may be "=" or "<<", which have tags of their own.
_PLAIN = {f"{_CORE}{name}": name for name in (*SCALARS, "seq", "map")} | {
    f"{_CORE}{name}": "str" for name in ("value", "merge")
}
# A complete file has some 10 kB.
_MAX_BYTES = 1_000_000
# Texts without quotes; in a formula the signs stand between spaces: <a> * 2.
_TEXT = re.compile(
    r"(\.{0,2}/|[A-Za-z_<]|~/)[\w./~<>()*+=@%&$-]*|<[\w<>()*/+. -]*[\w>)]"
)
_COLON = re.compile(" *:")
_READ_AS_OTHERS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "<<"}
_YAML_1_1 = yaml.resolver.Resolver()


class NotPlain(Exception):
    """A value that is known only once a placeholder is filled or an object built."""


class Reference(str):
    """A reference as it is written; it is not followed."""


@dataclass
class Value:
    """A value as it is written.

    Attributes
    ----------
    tag : str
        One of ``SCALARS``, ``seq`` or ``map``; else as written: ``!ref``, ``!!set``.
    content : str or list or dict
        Text of a scalar, members of a list, or values by key.
    where : str
        File and line of the key, or of the value itself in a list; for error messages.
    path : str
        Dotted key, such as ``loader.inner`` or ``names[0]``.
    is_word : bool
        Whether it is a scalar without quotes.
    start, end : int
        Positions in the text: after the key, and after the value without comments.
    """

    tag: str
    content: Any
    where: str
    path: str = ""
    is_word: bool = True
    start: int = 0
    end: int = 0

    @property
    def is_object(self) -> bool:
        """Whether it is more than plain values (``!new:``, ``!name:``, ``!!set``)."""
        return self.tag.startswith("!") and self.tag not in (*FOLLOWED, PLACEHOLDER)

    @property
    def is_reference(self) -> bool:
        """Whether it is a scalar that stands for another value, or for one to come."""
        is_scalar = isinstance(self.content, str)
        return is_scalar and self.tag in (*FOLLOWED, PLACEHOLDER)

    @property
    def shown(self) -> str:
        """What it says, for error messages."""
        if isinstance(self.content, str):
            text = self.content
            if len(text) > 60:
                text = f"{text[:50]}... ({len(text)} characters)"
            if self.is_object:
                return f"{self.tag} {text}".strip()
            # In quotes as it was, where that is what is wrong with it.
            return text if self.is_word else f'"{text}"'
        if self.is_object:
            return self.tag
        if isinstance(self.content, dict):
            return "a mapping"
        members = [member.shown for member in self.content[:10]]
        return f"[{', '.join(members)}{', ...' * (len(self.content) > 10)}]"

    def walk(self) -> Iterator[Value]:
        """Yield the value and all below it."""
        yield self
        if not isinstance(self.content, str):
            is_list = isinstance(self.content, list)
            for child in self.content if is_list else self.content.values():
                yield from child.walk()

    def plain(self, follow: Callable[[Value], object]) -> Any:
        """Return the Python value, those of references by a function.

        ``NotPlain`` is raised for mappings and objects, ``ValueError`` where an explicit
        tag does not fit (``!!int one``) or a number has more digits than Python reads.
        """
        if self.is_object or isinstance(self.content, dict):
            raise NotPlain
        if isinstance(self.content, list):
            return [member.plain(follow) for member in self.content]
        if self.is_reference:
            return follow(self)
        written = self.content.replace("_", "").lower()
        try:
            if self.tag == "bool":
                return bool(("false", "true").index(written))
            if self.tag == "int":
                return int(written, base=0)
            if self.tag == "float":
                return float(re.sub(r"\.(inf|nan)", r"\1", written))
        except ValueError as error:
            raise ValueError(
                f"{self.where}: {self.path} is {self.shown}, which is no number that can "
                "be read."
            ) from error
        return None if self.tag == "null" else self.content

    def as_reference(self) -> Reference:
        """Write a reference anew, or a placeholder."""
        text = quoted(self.content) if self.content else ""
        return Reference(f"{self.tag} {text}".strip())


def read(file: Path, wanted_by: str = "") -> str:
    """Read a hyperparameter file; an error names the file that wants it."""
    try:
        with open(file, "rb") as opened:
            content = opened.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        if isinstance(error, UnicodeDecodeError):
            reason = f"it is no text in UTF-8 (byte {error.start + 1})"
        child = f", the base of {wanted_by}," if wanted_by else ""
        raise ValueError(
            f"The hyperparameter file {file}{child} cannot be read: {reason}."
        ) from error


def parse_file(text: str, source: str) -> Value:
    """Parse a file, which must have keys."""
    root = parse(text, source)
    if root is None or root.tag != "map":
        raise ValueError(f"{source}: lines `key: value` are expected.")
    return root


def parse(text: str, source: str, key: str = "") -> Value | None:
    """Parse a file, or the value of a key; what would compose silently wrong is refused."""
    if directive := re.search(r"^%.*", text, re.MULTILINE):
        raise ValueError(
            f"{source}: leave {directive[0].strip()!r} out: values are read as in YAML "
            "1.2, as HyperPyYAML does."
        )
    try:
        node = YAML(typ="safe", pure=True).compose(text)
        return _Parser(text, source, not key).value(node, key) if node else None
    except RecursionError as error:
        raise ValueError(f"{source}: brackets are nested too deep.") from error
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(error if mark is None else getattr(error, "problem", ""))
        line = f", line {mark.line + 1}" if mark is not None and not key else ""
        raise ValueError(
            f"{source}{line}: this is no valid YAML: {' '.join(problem.split())}."
        ) from error


@dataclass
class _Parser:
    """Makes values of ruamel.yaml's nodes."""

    text: str
    source: str
    is_file: bool

    def where(self, node: Node) -> str:
        line = f", line {node.start_mark.line + 1}" if self.is_file else ""
        return f"{self.source}{line}"

    def value(self, node: Node, path: str, key: Node | None = None) -> Value:
        tag = _PLAIN.get(str(node.tag), str(node.tag).replace(_CORE, "!!"))
        is_word = isinstance(node, ScalarNode) and not node.style
        if tag == "str" and is_word and re.fullmatch(r"\(.*\)", node.value):
            # HyperPyYAML teaches ruamel.yaml its tuples, for the rest of the process. A
            # file must not mean one thing before that and another after it.
            tag = "!tuple"
        made = Value(tag, node.value, self.where(key or node), path, is_word)
        wrong = ""
        if node.anchor:
            wrong = f"anchors (&{node.anchor}) are not followed from file to file; use !ref <key>."
        elif tag.startswith("!include"):
            wrong = "!include: is not followed; name the parent by `base: FILE`."
        elif tag == "int" and is_word and re.match(r"[-+]?0_*\d", node.value):
            wrong = (
                f"{path or 'the value'} is {made.shown}, which is decimal for some YAML readers and "
                "octal for others: leave the zero in front out."
            )
        if wrong:
            raise ValueError(f"{made.where}: {wrong}")
        made.start = key.end_mark.index if key else 0
        made.end = node.end_mark.index
        while self.text[made.end - 1 : made.end].isspace():
            made.end -= 1
        if isinstance(node, MappingNode):
            made.content = self.entries(node, path)
        elif isinstance(node, SequenceNode):
            made.content = [
                self.value(item, f"{path}[{index}]")
                for index, item in enumerate(node.value)
            ]
            if made.content and not node.flow_style:
                made.end = max(member.end for member in made.content)
        elif not node.value and tag == "null":
            # An empty value has no place of its own: it ends with the colon.
            made.end = self.text.index(":", made.start) + 1 if key else 0
        return made

    def entries(self, node: MappingNode, path: str) -> dict[str, Value]:
        entries: dict[str, Value] = {}
        for key, value in node.value:
            named = isinstance(key, ScalarNode) and key.value
            # HyperPyYAML takes texts alone for keys at the top.
            tags = _PLAIN if path else (f"{_CORE}str",)
            # `? key` on a line of its own, or a key of a flow mapping without a value.
            colon = _COLON.match(self.text, key.end_mark.index)
            below = f"{path}.{key.value}" if path else key.value
            wrong = ""
            if key.value == "<<":
                wrong = "merging by << loses values; name the parent by `base: FILE`."
            elif not named or not colon or str(key.tag) not in tags:
                wrong = "a key is a name with a colon after it: `key: value`."
            elif key.value in entries:
                wrong = f"the key {below!r} stands there twice."
            if wrong:
                raise ValueError(f"{self.where(key)}: {wrong}")
            entries[key.value] = self.value(value, below, key)
        return entries


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


def refuse_disagreement(root: Value) -> None:
    """Refuse values that are one thing for some YAML readers and another for others.

    HyperPyYAML reads YAML 1.2, PyYAML reads 1.1: ``1e-4`` is a number for the one and a
    text for the other, ``no`` a text and false. Values of other files and of the
    command line are written anew, for both alike.
    """
    for value in root.walk():
        ours = value.tag.removeprefix("!!")
        if not value.is_word or ours.startswith("!"):
            continue
        theirs = _YAML_1_1.resolve(yaml.ScalarNode, value.content, (True, False))
        theirs = theirs.removeprefix(_CORE)
        if theirs == ours:
            continue
        instead = f'"{value.content}" in quotes'
        if theirs == "bool":
            instead += ", or true or false"
        elif ours in ("int", "float"):
            with contextlib.suppress(ValueError):
                instead = dump(value.plain(Value.as_reference))
        raise ValueError(
            f"{value.where}: {value.path} is {value.shown}, which YAML 1.2 reads as {ours} "
            f"and YAML 1.1 as {theirs}. Write {instead}."
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


#: What the command line and other toolkits call a setting of the recipe.
_ALSO_CALLED = {
    "batch": "batch_size",
    "budget": "memory_budget",
    "card": "memory_budget",
    "encoder": "arch",
    "epochs": "number_of_epochs",
    "frames": "chunk_samples",
    "learning_rate": "lr",
    "model": "arch",
    "out": "output_folder",
    "segment_seconds": "sentence_len",
    "workers": "num_workers",
}


def unknown(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return that a key is unknown, and which known one it may have meant.

    Examples
    --------
    >>> unknown("optimiser_bits", ["optimizer_bits", "lr"])
    "unknown key 'optimiser_bits'. Did you mean optimizer_bits?"
    >>> unknown("frames", ["streams", "chunk_samples"])
    "unknown key 'frames'. Did you mean chunk_samples?"
    """
    known = list(known)
    ours = _ALSO_CALLED.get(name.lower(), "")
    near = nearest(ours if ours in known else name, known, prefix)
    return f"unknown key {prefix + name!a}.{near}"
