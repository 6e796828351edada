"""The corpus of the tests of speech, for those of audio."""

from tests.unit.data.conftest import corpus, packed, prepared  # noqa: F401
