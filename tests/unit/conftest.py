"""What tests of pictures share."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, in their order."""
    saved = []
    savefig = Figure.savefig

    def keep_and_save(figure, *args, **options):
        saved.append(figure)
        savefig(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep_and_save)
    return saved
