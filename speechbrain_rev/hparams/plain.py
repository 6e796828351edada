"""The plain values of a complete text, read without building what it describes."""

from __future__ import annotations

from typing import Any

import yaml
from hyperpyyaml import resolve_references


def plain_settings(text: str) -> dict[str, Any]:
    r"""Read the plain values at the top of a complete text, following references.

    Parameters
    ----------
    text : str
        Complete HyperPyYAML, without placeholders.

    Returns
    -------
    dict
        Numbers, texts, truth values, None and lists of them by key. Keys of objects,
        functions and mappings are left out.

    Examples
    --------
    >>> plain_settings("seed: 3\nfolder: !ref results/<seed>\nencoder: !new:os.system")
    {'seed': 3, 'folder': 'results/3'}
    """
    loader = yaml.SafeLoader(resolve_references(text))
    document = loader.get_single_node()
    entries = document.value if isinstance(document, yaml.MappingNode) else []
    return {
        key.value: loader.construct_object(value, deep=True)
        for key, value in entries
        if not value.tag.startswith("!") and not isinstance(value, yaml.MappingNode)
    }
