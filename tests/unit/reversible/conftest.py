"""Chains have exact streams in quick tests, and float streams in slow ones, too."""

import pytest

from . import chains


@pytest.fixture(params=["exact", pytest.param("float", marks=pytest.mark.slow)])
def stream_format(request):
    """The number format of the chains that a test makes."""
    token = chains.FORMAT.set(request.param)
    yield request.param
    chains.FORMAT.reset(token)
