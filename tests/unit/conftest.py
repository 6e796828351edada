"""What tests of pictures share."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture(scope="module")
def figures():
    """The figures that were saved, in their order."""
    saved = []
    savefig = Figure.savefig

    def keep_and_save(figure, *args, **options):
        saved.append(figure)
        # What takes time is the number of pixels.
        savefig(figure, *args, **{**options, "dpi": 20})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep_and_save)
        yield saved
