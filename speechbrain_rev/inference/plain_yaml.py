"""YAML files that somebody else made, read as data: nothing that they describe is built."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from speechbrain_rev.inference.own_files import REFUSED, open_own

# What SpeechBrain writes of our complete training YAML has 13 kB, of which 4,000 characters
# are values and names with all aliases expanded. The limit holds for the file, and for those.
_MAX_YAML_BYTES = 1_000_000
# That file is nested 7 deep, with its aliases.
_MAX_DEPTH = 50
# A number of more characters takes time, or has no end.
_MAX_NUMBER = 100

_MERGE = "tag:yaml.org,2002:merge"
_REFERENCE = re.compile(r"<([^<>\[\].]+)>")


class _Loader(yaml.SafeLoader):
    """Knows no tag, and bounds what aliases make of a file, before anything is made."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        #: Characters of each node that is complete, aliases expanded.
        self.sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose as SafeLoader does, within bounds."""
        event = self.peek_event()
        line = event.start_mark.line + 1
        if self.depth == _MAX_DEPTH:
            raise ValueError(f"line {line}: it is nested deeper than {_MAX_DEPTH}")
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        if node is None:
            return None
        if not isinstance(event, yaml.AliasEvent):
            self.sizes[node] = self._size(node)
        elif node not in self.sizes:
            raise ValueError(f"line {line}: *{event.anchor} is a part of itself")
        if self.sizes[node] > _MAX_YAML_BYTES:
            raise ValueError(
                f"line {line}: with aliases expanded it has more than "
                f"{_MAX_YAML_BYTES:,} characters"
            )
        return node

    def _size(self, node: yaml.Node) -> int:
        if isinstance(node, yaml.MappingNode):
            keys: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in keys:
                        raise ValueError(
                            f"{_line(key)}: {key.value} stands there twice"
                        )
                    keys.add((key.tag, key.value))
            return 1 + sum(self.sizes[part] for pair in node.value for part in pair)
        if isinstance(node, yaml.SequenceNode):
            return 1 + sum(self.sizes[member] for member in node.value)
        return 1 + len(node.value)


class YamlFile:
    """A YAML mapping of names to values, as nodes that are looked at one by one.

    Parameters
    ----------
    folder : pathlib.Path
        Where the file must really lie.
    name : str or pathlib.Path
        The file, relative to it.

    Attributes
    ----------
    path : pathlib.Path
        The file.
    top : dict of str to yaml.Node
        What stands at top level.

    Raises
    ------
    FileNotFoundError
        If the folder or file is missing.
    ValueError
        If it is no YAML mapping, a key stands in it twice, or it is too large, as it is
        or with its aliases expanded.
    """

    def __init__(self, folder: Path, name: str | Path) -> None:
        self.path = folder / name
        with open_own(folder, name) as file:
            content = file.read(_MAX_YAML_BYTES + 1)
        if len(content) > _MAX_YAML_BYTES:
            raise ValueError(
                f"{self.path} has more than {_MAX_YAML_BYTES:,} bytes; what a training run "
                "writes has less. Is it another file?"
            )
        try:
            self._loader = _Loader(content.decode())
            document = self._loader.get_single_node()
            if not isinstance(document, yaml.MappingNode):
                raise ValueError("it is no YAML mapping of names to values")
            self._document, self.top = document, self._members(document)
        except (yaml.YAMLError, *REFUSED) as error:
            raise ValueError(
                f"{self.path} cannot be read as plain values: {in_words(error)}. Is it "
                "what a training run wrote?"
            ) from error

    def members(self, node: yaml.MappingNode) -> dict[str, yaml.Node]:
        """Give the values of a mapping by their names, what ``<<`` merges among them."""
        try:
            return self._members(node)
        except yaml.YAMLError as error:
            raise ValueError(f"{self.path}, {in_words(error)}") from error

    def _members(self, node: yaml.MappingNode) -> dict[str, yaml.Node]:
        self._loader.flatten_mapping(node)
        return {
            key.value: value
            for key, value in node.value
            if isinstance(key, yaml.ScalarNode)
        }

    def plain(self, node: yaml.Node) -> Any:
        """Make the plain value of a node.

        Returns
        -------
        object
            A number, string, truth value, None, list or mapping.

        Raises
        ------
        ValueError, yaml.YAMLError
            If it has a tag, or a number without end; the message tells the line only.
        """
        self._check(node, set())
        return self._loader.construct_object(node, deep=True)

    def nodes(self) -> Iterator[tuple[str, yaml.Node]]:
        """Give each node once, in the order of the file, and the name that it stands under."""
        seen: set[yaml.Node] = set()
        waiting: list[tuple[str, yaml.Node]] = [("", self._document)]
        while waiting:
            name, node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            yield name, node
            if isinstance(node, yaml.MappingNode):
                waiting += [(_name(key), value) for key, value in reversed(node.value)]
            elif isinstance(node, yaml.SequenceNode):
                waiting += [(name, member) for member in reversed(node.value)]

    def follow(self, node: yaml.Node) -> yaml.Node | None:
        """Give what ``!ref <name>`` refers to, or the node if it is no reference.

        Returns
        -------
        yaml.Node or None
            None if it refers to no name at top level alone, or to itself.
        """
        for _ in range(len(self.top) + 1):
            if node.tag != "!ref":
                return node
            name = _REFERENCE.fullmatch(str(node.value))
            if name is None or name[1] not in self.top:
                return None
            node = self.top[name[1]]
        return None

    def refuse(self, node: yaml.Node, what: str) -> NoReturn:
        """Raise a ValueError that names the file and the node's line."""
        raise ValueError(f"{self.path}, {_line(node)}: {what}")

    def _check(self, node: yaml.Node, seen: set[yaml.Node]) -> None:
        """Refuse tags, and numbers without end."""
        if node in seen:
            return
        seen.add(node)
        if node.tag != _MERGE and node.tag not in self._loader.yaml_constructors:
            shown = node.tag.replace("tag:yaml.org,2002:", "!!", 1)
            raise ValueError(f"{_line(node)} has the tag {shown[:60]}")
        if isinstance(node, yaml.ScalarNode):
            if node.tag != "tag:yaml.org,2002:str" and len(node.value) > _MAX_NUMBER:
                raise ValueError(
                    f"{_line(node)} has {node.value[:40]!r}..., which has no end"
                )
            return
        for member in node.value:
            for part in member if isinstance(member, tuple) else (member,):
                self._check(part, seen)


def plain_values(
    folder: Path, name: str | Path, names: Sequence[str]
) -> dict[str, Any]:
    """Read those of the top-level names that a YAML file has, following no tag.

    Parameters
    ----------
    folder : pathlib.Path
        Where the file must really lie.
    name : str or pathlib.Path
        The file, relative to it.
    names : sequence of str
        The keys wanted.

    Returns
    -------
    dict
        A number, string, truth value, None, list or mapping for each name there. Aliases
        of YAML, as SpeechBrain writes them, are followed.

    Raises
    ------
    FileNotFoundError
        If the folder or file is missing.
    ValueError
        If it is no YAML mapping or too large, as it is or with its aliases expanded, or a
        value has a tag or a number without end.
    """
    file = YamlFile(folder, name)
    try:
        # Only these are constructed.
        return {key: file.plain(file.top[key]) for key in names if key in file.top}
    except (yaml.YAMLError, *REFUSED) as error:
        raise ValueError(
            f"{file.path} cannot be read as plain values: {in_words(error)}. The values of "
            f"{', '.join(names)} must stand there without tags and references, as "
            "train.py writes them."
        ) from error


def in_words(error: Exception) -> str:
    """Give what an error says in one line, that of a YAML parser with its line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _name(key: yaml.Node) -> str:
    return key.value if isinstance(key, yaml.ScalarNode) else ""
