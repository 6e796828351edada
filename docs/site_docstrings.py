"""Docstrings as the site's reader of them takes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example\n-+$", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):(`[^`]+`)")


class AsTheSiteReads(griffe.Extension):
    """Name examples as numpy does, and leave out roles of another tool.

    Classes that are made of rows are looked at, not read.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Add the classes of optimizers."""
        del kwargs
        if pkg.name != "speechbrain_rev":
            return
        from speechbrain_rev.optim.optimizer import CLASSES

        path = Path(__file__).parents[1] / "speechbrain_rev/optim/__init__.py"
        made = griffe.inspect("optim", filepath=path, parent=pkg, extensions=None)
        for each in CLASSES.values():
            known = made[each.__name__]
            pkg["optim"].set_member(each.__name__, known)
            known.parent = pkg["optim"]
            self.on_object(obj=known)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of what was loaded."""
        del kwargs
        if obj.docstring is not None:
            text = _EXAMPLE.sub("Examples\n--------", obj.docstring.value)
            obj.docstring.value = _ROLE.sub(r"\1", text)
