"""YAML through ruamel.yaml's round trip, which keeps tags, comments, order and lines.

No object that a file describes is ever built: a tag is a word beside a value.
"""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.representer import RoundTripRepresenter

PLACEHOLDER = "!PLACEHOLDER"
#: Tags of a text that stands for another value.
FOLLOWED = ("!ref", "!copy")
KeyPath = tuple[str, ...]


class _Representer(RoundTripRepresenter):
    """Writes null as a word; ruamel.yaml writes nothing."""


_Representer.add_representer(
    type(None), lambda self, _: self.represent_scalar("tag:yaml.org,2002:null", "null")
)


def _round_trip() -> YAML:
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.preserve_quotes = True
    yaml.width = sys.maxsize
    yaml.indent(mapping=4, sequence=4, offset=2)
    return yaml


def read_file(file: Path, wanted_by: str = "") -> CommentedMap:
    """Read a hyperparameter file; an error names the file that wants it."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        child = f", the base of {wanted_by}," if wanted_by else ""
        raise ValueError(
            f"The hyperparameter file {file}{child} cannot be read: {reason}."
        ) from error
    return parse_file(text, str(file))


def parse_file(text: str, source: str) -> CommentedMap:
    """Parse the text of a file, which must have keys."""
    root = parse(text, source)
    if not isinstance(root, CommentedMap) or tag_of(root):
        raise ValueError(f"{source}: lines `key: value` are expected.")
    _move_comments_behind_tags(root)
    for _, value, line in entries(root):
        if tag_of(value).startswith("!include:"):
            raise ValueError(
                f"{source}{line}: !include: is not followed; name the parent by `base: FILE`."
            )
        if isinstance(value, CommentedMap):
            _move_comments_behind_tags(value)
    return root


def parse(text: str, source: str) -> Any:
    """Parse a file, or the value of an option."""
    try:
        return _round_trip().load(text)
    except (YAMLError, ValueError) as error:
        problem = line = ""
        if isinstance(error, MarkedYAMLError):
            problem = error.problem or ""
            mark = error.problem_mark
            line = f", line {mark.line + 1}" if mark is not None else ""
        problem = " ".join((problem or str(error)).split())
        raise ValueError(
            f"{source}{line}: this is no valid YAML: {problem}."
        ) from error


def _move_comments_behind_tags(mapping: CommentedMap) -> None:
    """Put comments behind an empty tag, as of !PLACEHOLDER, on the tag's line again.

    ruamel.yaml reads them as comments before the next key.
    """
    for key, following in itertools.pairwise(mapping):
        before = (mapping.ca.items.get(following) or (None, None))[1]
        if before and before[0].start_mark.line == mapping.lc.key(key)[0]:
            mapping.ca.items.setdefault(key, [None] * 4)[2] = before.pop(0)


def text_of(root: CommentedMap) -> str:
    """Write a whole file."""
    stream = io.StringIO()
    _round_trip().dump(root, stream)
    return stream.getvalue()


def dump(value: object) -> str:
    """Write a value on one line; of a mapping, its tag alone.

    Examples
    --------
    >>> print(dump([1e-6, True, None, "1.10", "a b"]))
    [1e-06, true, null, '1.10', a b]
    """
    if isinstance(value, Mapping):
        return tag_of(value) or "a mapping"
    if isinstance(value, list) and tag_of(value):
        return f"{tag_of(value)} {dump(list(value))}"
    root = CommentedMap(key=flow_list([value]))
    return text_of(root)[len("key: [") : -len("]\n")]


def flow_list(values: Iterable[object]) -> CommentedSeq:
    """Return a list that is written in brackets, the lists in it too."""
    made = CommentedSeq(flow_list(v) if isinstance(v, list) else v for v in values)
    made.fa.set_flow_style()
    return made


def tag_of(value: object) -> str:
    """Return the tag of a value, such as ``!ref``; a value without one has none."""
    tag = getattr(value, "tag", None)
    return str(tag.value or "") if tag is not None else ""


def is_object(value: object) -> bool:
    """Return whether a value is made by HyperPyYAML, from its tag."""
    return tag_of(value) not in ("", PLACEHOLDER, *FOLLOWED)


def entries(
    mapping: CommentedMap, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any, str]]:
    """Yield path, value and line of each entry, those of mappings in it too."""
    for key, value in mapping.items():
        below = (*path, str(key))
        yield below, value, line_of(mapping, key)
        if isinstance(value, CommentedMap):
            yield from entries(value, below)


def line_of(mapping: Mapping[str, Any], key: str) -> str:
    """Return the line of a key, if its mapping was read and not merged by ``<<``."""
    lines = mapping.lc.data if isinstance(mapping, CommentedMap) else None
    return f", line {lines[key][0] + 1}" if lines and key in lines else ""
