"""The values of a complete file, what replaces them, and where each was written.

Everything is held against the complete file as it stands: its values show the types,
its knobs their ranges. What replaces them goes into its text at once, so the comments
and the order stay.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from speechbrain_rev.hparams.arguments import unknown_key
from speechbrain_rev.hparams.arithmetic import compute
from speechbrain_rev.hparams.document import (
    CORE,
    NULL,
    Document,
    Edit,
    apply,
    end_of_value,
    excerpt,
    is_object,
    items,
    unknown,
    walk,
)
from speechbrain_rev.hparams.rules import RULES, Rule
from speechbrain_rev.hparams.values import (
    Value,
    given,
    knob_of,
    plain_value,
    shown_kind,
    write,
    wrong_kind,
)

Path = tuple[str, ...]
_FOLLOWED = ("!ref", "!copy")
#: Objects that files of version 0.1.0 name in another way, which still works.
_NOW_NAMED = {
    "!apply:speechbrain_rev.lobes.build_encoder": "!new:speechbrain_rev.lobes.SpeakerEncoder"
}
_REFERENCE = re.compile(r"<[^>]*>")


class _NotPlain(Exception):
    """A value that is known only once a placeholder is filled or an object built."""


class Settings:
    r"""A complete file with values of other files and of the command line put in.

    Parameters
    ----------
    complete : Document
        The complete file.

    Examples
    --------
    >>> settings = Settings(Document("train.yaml", "lr: 0.1  # peak\nrate: !ref <lr>"))
    >>> settings.give({"lr": "0.2"}, "command line")
    >>> settings.plain("rate"), settings.where("lr")
    (0.2, 'command line')
    >>> print(settings.text())
    lr: 0.2  # peak
    rate: !ref <lr>
    """

    def __init__(self, complete: Document) -> None:
        self._complete = complete
        self._entries = dict(_entries(complete.root))
        self._values = {
            path: Value(value, complete) for path, (_, value) in self._entries.items()
        }
        self._written: dict[Path, str] = {}

    def names(self) -> tuple[str, ...]:
        """Return the keys at the top, in their order."""
        return tuple(items(self._complete.root))

    def where(self, key: str) -> str:
        """Return where a top-level key's value was written."""
        return self._values[(key,)].where

    def is_null(self, key: str) -> bool:
        """Tell whether null, or nothing, is what a top-level key says."""
        return (key,) in self._values and str(self._values[(key,)].node.tag) == NULL

    def override(self, document: Document) -> None:
        """Put the values of an override file in.

        Raises
        ------
        ValueError
            If a key is unknown at any depth, a value has the wrong type, or an object
            would become another one.
        """
        values = {
            key: Value(node, document)
            for key, node in items(document.root).items()
            if key != "base"
        }
        self._replace((), values)

    def give(self, values: Mapping[str, object], source: str) -> None:
        """Put values of the command line or of a caller in.

        Raises
        ------
        ValueError
            As ``override`` does.
        """
        root = self._complete.root
        self._replace(
            (), {key: given(key, value, root, source) for key, value in values.items()}
        )

    def plain(self, key: str) -> object:
        """Return the plain value of a top-level key, references followed.

        None also where the key is missing, or is known only once a placeholder is
        filled or an object built.
        """
        with contextlib.suppress(_NotPlain):
            return self._value((key,), ()) if (key,) in self._values else None
        return None

    def plain_values(self) -> dict[str, Any]:
        """Return what is plain at the top, by key, references followed."""
        found = {}
        for name in self.names():
            with contextlib.suppress(_NotPlain):
                found[name] = self._value((name,), ())
        return found

    def text(self) -> str:
        """Return the complete text."""
        text = self._complete.text
        edits = []
        for path, written in self._written.items():
            key, value = self._entries[path]
            end = end_of_value(text, key, value)
            edits.append(Edit(key.end_mark.index, end, f": {written}"))
        return apply(edits, text)

    def nodes(self) -> Iterator[tuple[str, Value]]:
        """Yield every value at any depth with its dotted key, lists entered."""
        for path, value in self._values.items():
            dotted = ".".join(path)
            if isinstance(value.node, MappingNode):
                yield dotted, value
                continue
            for inner, node in walk(value.node, dotted):
                yield inner, Value(node, value.document)

    def check_references(self) -> None:
        """Refuse references to nothing, and circles of them.

        Raises
        ------
        ValueError
            With the key, the place and the nearest known name.
        """
        for dotted, value in self.nodes():
            for _, target in _targets(value.node):
                self._known(target, value, dotted)
        for path, value in self._values.items():
            if str(value.node.tag) not in _FOLLOWED:
                continue
            with contextlib.suppress(_NotPlain):
                self._value(path, ())

    def check_knob(self, key: str) -> None:
        """Refuse a top-level value that is not among those its knob may take.

        Raises
        ------
        ValueError
            With the key, the place, what was given and what is allowed.
        """
        if (key,) in self._values:
            self._check((key,))

    def check(self) -> None:
        """Refuse values that their knobs may not take, alone or together.

        Raises
        ------
        ValueError
            With the keys, the places, what was given and what is allowed.
        """
        for path in sorted(self._values, key=len):
            if len(path) == 1 or path in self._written:
                self._check(path)
        values = self.plain_values()
        for rule in RULES:
            if rule.broken(values):
                raise ValueError(self._broken(rule, values))

    def _replace(self, parent: Path, values: Mapping[str, Value]) -> None:
        siblings = {path[-1] for path in self._entries if path[:-1] == parent}
        for name, value in values.items():
            path = (*parent, name)
            if name not in siblings:
                prefix = ".".join([*parent, ""])
                words = (
                    unknown(name, siblings, prefix)
                    if parent
                    else unknown_key(name, siblings)
                )
                raise ValueError(f"{value.where}: {words}")
            _, old = self._entries[path]
            if isinstance(old, MappingNode) or is_object(old):
                self._replace(path, _children(".".join(path), old, value))
                continue
            knob = knob_of(path, old)
            kind = knob.kind if knob else shown_kind(old, self._complete.root)
            nullable = knob.null if knob else kind is None
            if knob and knob.or_word:
                # A text it may be, or else what the table says.
                word = getattr(value.node, "value", None) == knob.or_word
                kind = "str" if word else kind
            self._written[path] = write(
                value, kind, ".".join(path), nullable=nullable, knob=knob
            )
            self._values[path] = value

    def _check(self, path: Path) -> None:
        knob = knob_of(path, self._entries[path][1])
        if knob is None:
            return
        value, dotted = self._values[path], ".".join(path)
        try:
            found = self._value(path, ())
        except _NotPlain:
            return
        shown = excerpt(value.node)
        if str(value.node.tag) in _FOLLOWED:
            shown = f"{found} ({value.node.tag} {shown})"
        if not knob.has_kind(found):
            raise ValueError(wrong_kind(value.where, dotted, knob, shown))
        if not knob.allows(found):
            raise ValueError(
                f"{value.where}: {dotted} takes {knob.takes()}, not "
                f"{shown or 'an empty one'}.{knob.advice(found)}"
            )

    def _broken(self, rule: Rule, values: Mapping[str, object]) -> str:
        named = [f"{key} is {values[key]} ({self.where(key)})" for key in rule.knobs]
        return f"{', '.join(named)}: {rule.words}"

    def _value(self, path: Path, trail: tuple[Path, ...]) -> object:
        """Return a plain value; ``trail`` are the keys whose references led here."""
        value = self._values[path]
        if path in trail:
            circle = " -> ".join(".".join(step) for step in (*trail, path))
            raise ValueError(f"{value.where}: references go in a circle: {circle}.")
        return self._plain(value.node, value, (*trail, path))

    def _plain(self, node: Node, value: Value, trail: tuple[Path, ...]) -> object:
        if isinstance(node, SequenceNode) and not is_object(node):
            return [self._plain(item, value, trail) for item in node.value]
        if not isinstance(node, ScalarNode) or is_object(node):
            raise _NotPlain
        if str(node.tag) == "!PLACEHOLDER":
            raise _NotPlain
        if str(node.tag).startswith(CORE):
            try:
                return plain_value(node)
            except ValueError as error:
                dotted = ".".join(trail[-1])
                raise ValueError(
                    f"{value.where}: {dotted} is {excerpt(node)}, which is no number "
                    "that can be read."
                ) from error
        return self._referred(node, value, trail)

    def _referred(
        self, node: ScalarNode, value: Value, trail: tuple[Path, ...]
    ) -> object:
        """Follow ``!ref``: to a value, into a text, or into arithmetic."""
        dotted, filled = ".".join(trail[-1]), str(node.value)
        for written, target in _targets(node):
            found = self._value(self._known(target, value, dotted), trail)
            if "." in written:
                raise _NotPlain  # an attribute
            if isinstance(found, str) and _REFERENCE.search(found):
                raise ValueError(
                    f"{self._values[target].where}: {'.'.join(target)} is {found}, and "
                    f"where {dotted} refers to it, HyperPyYAML would follow what stands "
                    "between < and >. Rename it, or write !ref before it."
                )
            if written == node.value:
                return found
            filled = filled.replace(written, str(found))
        if filled == node.value:
            return filled
        try:
            return compute(filled)
        except ArithmeticError as error:
            raise ValueError(
                f"{value.where}: {dotted} cannot be computed: {node.value} is {filled}."
            ) from error

    def _known(self, target: Path, value: Value, dotted: str) -> Path:
        for depth, name in enumerate(target):
            parent = target[:depth]
            siblings = [path[-1] for path in self._values if path[:-1] == parent]
            if name not in siblings:
                where = f"{value.where}: {dotted} refers to an"
                prefix = ".".join([*parent, ""])
                raise ValueError(f"{where} {unknown(name, siblings, prefix)}")
        return target


def _entries(
    node: MappingNode, parent: Path = ()
) -> Iterator[tuple[Path, tuple[Node, Node]]]:
    """Yield keys and values of a mapping and of the mappings in it."""
    for key, value in node.value:
        path = (*parent, str(key.value))
        yield path, (key, value)
        if isinstance(value, MappingNode):
            yield from _entries(value, path)


def _targets(node: Node) -> Iterator[tuple[str, Path]]:
    """Yield what a reference refers to: as written, and as keys from the top."""
    if not isinstance(node, ScalarNode) or str(node.tag) not in _FOLLOWED:
        return
    for written in _REFERENCE.findall(node.value):
        # What follows a dot is an attribute of the object.
        key = written[1:-1].partition(".")[0]
        yield written, tuple(part.strip("]") for part in key.split("["))


def _object_of(node: Node) -> str:
    return _NOW_NAMED.get(str(node.tag), str(node.tag))


def _children(dotted: str, old: Node, value: Value) -> dict[str, Value]:
    """Return what changes inside a mapping or an object, which must stay what it is."""
    new = value.node
    if isinstance(old, MappingNode) and isinstance(new, MappingNode):
        if str(new.tag) == f"{CORE}map" or _object_of(new) == _object_of(old):
            return {
                key: Value(node, value.document) for key, node in items(new).items()
            }
    elif (str(new.tag), new.value) == (str(old.tag), old.value):
        return {}
    what = str(old.tag) if is_object(old) else "a mapping"
    raise ValueError(
        f"{value.where}: {dotted} is {what} and cannot become something else: change "
        "the knobs that it refers to, or its entries by name. For another object, "
        "resolve the file and edit the complete text."
    )
