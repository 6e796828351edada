"""The plain values of a complete text, read without building what it describes."""

from __future__ import annotations

from typing import Any

from speechbrain_rev.hparams.document import Document
from speechbrain_rev.hparams.settings import Settings


def plain_settings(text: str) -> dict[str, Any]:
    r"""Read the plain values at the top of a complete text, following references.

    Parameters
    ----------
    text : str
        Complete HyperPyYAML.

    Returns
    -------
    dict
        Numbers, texts, truth values, None and lists of them by key. Keys of objects,
        functions, mappings and placeholders are left out.

    Raises
    ------
    ValueError
        If the text is no HyperPyYAML, or a reference leads nowhere.

    Examples
    --------
    >>> plain_settings("seed: 3\nfolder: !ref results/<seed>\nencoder: !new:os.system")
    {'seed': 3, 'folder': 'results/3'}
    """
    return Settings(Document("text", text)).plain_values()
