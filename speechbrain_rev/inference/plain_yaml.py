"""A few plain values of a YAML file that somebody else made, without building the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from speechbrain_rev.inference.own_files import REFUSED, open_own

# A complete training YAML has some 10 kB; the rest is not ours.
_MAX_YAML_BYTES = 1_000_000
# A number of more characters takes time, or has no end.
_MAX_NUMBER = 100


class _Loader(yaml.SafeLoader):
    """Knows no tag, and remembers what has an anchor, or stands for what has one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.anchored: set[int] = set()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose as SafeLoader does."""
        anchor = self.peek_event().anchor
        node: yaml.Node | None = super().compose_node(parent, index)
        if anchor is not None:
            self.anchored.add(id(node))
        return node


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
        The keys wanted. Their values are refused where they refer to another part of
        the file, which may make them as large as they like.

    Returns
    -------
    dict
        A number, string, truth value, None, list or mapping for each name there.

    Raises
    ------
    FileNotFoundError
        If the folder or file is missing.
    ValueError
        If it is no YAML mapping, or a value has a tag, an anchor, a reference to one or
        a number without end.
    """
    path = folder / name
    with open_own(folder, name) as file:
        content = file.read(_MAX_YAML_BYTES + 1)
    if len(content) > _MAX_YAML_BYTES:
        raise ValueError(
            f"{path} has more than {_MAX_YAML_BYTES:,} bytes; what a training run writes "
            "has less. Is it another file?"
        )
    try:
        loader = _Loader(content.decode())
        document = loader.get_single_node()
        if isinstance(document, yaml.MappingNode):
            wanted = [(k.value, v) for k, v in document.value if k.value in names]
            for _, node in wanted:
                _check_node(node, loader.anchored)
            # Only these are constructed.
            return {key: loader.construct_object(v, deep=True) for key, v in wanted}
    except (yaml.YAMLError, *REFUSED) as error:
        raise ValueError(
            f"{path} cannot be read as plain values: {error}. The values of "
            f"{', '.join(names)} must stand there without tags and references, as "
            "train.py writes them."
        ) from error
    raise ValueError(f"{path} is no YAML mapping of names to values.")


def _check_node(node: yaml.Node, anchored: set[int]) -> None:
    """Refuse values that repeat a part of the file, and numbers without end."""
    line = node.start_mark.line + 1
    if id(node) in anchored or node.tag == "tag:yaml.org,2002:merge":
        raise ValueError(f"line {line} repeats a part of the file")
    if isinstance(node, yaml.ScalarNode):
        if node.tag != "tag:yaml.org,2002:str" and len(node.value) > _MAX_NUMBER:
            raise ValueError(
                f"line {line} has {node.value[:40]!r}..., which has no end"
            )
        return
    for member in node.value:
        for part in member if isinstance(member, tuple) else (member,):
            _check_node(part, anchored)
