"""Docstrings as the site's reader of them takes them."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example\n-+$", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):(`[^`]+`)")


class AsTheSiteReads(griffe.Extension):
    """Name examples as numpy does, and leave out roles of another tool."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of what was loaded."""
        del kwargs
        if obj.docstring is not None:
            text = _EXAMPLE.sub("Examples\n--------", obj.docstring.value)
            obj.docstring.value = _ROLE.sub(r"\1", text)
