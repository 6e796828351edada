"""The tests of the engine hold for each format of the streams."""

import pytest

from tests.unit.reversible import chains


@pytest.fixture(
    autouse=True, params=["exact", pytest.param("float", marks=pytest.mark.slow)]
)
def stream_format(request):
    token = chains.FORMAT.set(request.param)
    yield request.param
    chains.FORMAT.reset(token)
