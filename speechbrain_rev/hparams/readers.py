"""What YAML readers do not agree on, in a file whose text stays as it is.

HyperPyYAML reads YAML 1.2, PyYAML reads 1.1: ``1e-4`` is a number for the one and a
text for the other, ``no`` a text and false. Values of other files and of the command
line are written anew, for both alike.
"""

from __future__ import annotations

import yaml
from ruamel.yaml.nodes import Node, ScalarNode

from speechbrain_rev.hparams.document import CORE, Document, excerpt, is_plain, walk

_YAML_1_1 = yaml.resolver.Resolver()
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


def refuse_disagreement(document: Document) -> None:
    r"""Refuse values that are one thing for some YAML readers and another for others.

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
        ours = str(node.tag).removeprefix(CORE)
        if not isinstance(node, ScalarNode) or not is_plain(node, ours):
            continue
        if ours in ("value", "merge"):
            ours = "str"  # "=" and "<<", at which readers fail
        theirs = _YAML_1_1.resolve(yaml.ScalarNode, node.value, (True, False))
        theirs = theirs.removeprefix(CORE)
        if theirs != ours:
            raise ValueError(
                f"{document.where(node)}: {path} is {excerpt(node)}, {_WORDS[ours]} for "
                f"some YAML readers and {_WORDS[theirs]} for others. Write "
                f"{_portable(node, ours)}."
            )


def _portable(node: Node, kind: str) -> str:
    """Write a value so that all readers agree."""
    value = str(node.value)
    if kind == "int":
        return "it as a decimal number"
    if kind != "float":
        switch = {"yes": "true", "on": "true", "no": "false", "off": "false"}
        instead = switch.get(value.lower())
        return f'{instead}, or "{value}"' if instead else f'it in quotes: "{value}"'
    mantissa, _, exponent = value.lower().lstrip("+").partition("e")
    if "." not in mantissa:
        mantissa += ".0"
    if mantissa.startswith((".", "-.")):
        mantissa = mantissa.replace(".", "0.")
    if exponent and exponent[0] not in "+-":
        exponent = f"+{exponent}"
    return f"{mantissa}e{exponent}" if exponent else mantissa
