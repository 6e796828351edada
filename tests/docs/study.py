"""The page of the study, from the archive of it that is committed."""

from __future__ import annotations

from tests.recipes.study import ARCHIVE, study

from .documents import ROOT

PAGE = ROOT / "docs" / "study.md"
_REPORT = study("report")
TABLES = _REPORT.TABLES


def rendered() -> str:
    """Give the page with its tables written anew."""
    return _REPORT.filled(PAGE.read_text(), _REPORT.Results.of(ARCHIVE))
