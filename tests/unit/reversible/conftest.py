"""The tests of the engine hold for each format of the streams."""

import pytest

from speechbrain_rev.reversible.formats import FORMATS
from tests.unit.reversible import chains


@pytest.fixture(autouse=True, params=FORMATS)
def stream_format(request):
    token = chains.FORMAT.set(request.param)
    yield request.param
    chains.FORMAT.reset(token)
