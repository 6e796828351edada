"""What all tests share."""

import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems():
    # hypothesis asks every loaded module for its file, and SpeechBrain's lazy ones
    # would then import packages that need not be installed.
    if "speechbrain" in sys.modules:
        from speechbrain.utils.importutils import LazyModule

        for module in list(sys.modules.values()):
            if isinstance(module, LazyModule):
                module.__file__ = None
