"""What all tests share."""

import os
import sys
import tempfile

import pytest

from speechbrain_rev.planner.saved import VARIABLE


def pytest_configure(config):
    # Processes that share the work, and those that tests start, have the same folder.
    if VARIABLE not in os.environ:
        config.profiles = tempfile.TemporaryDirectory()
        os.environ[VARIABLE] = config.profiles.name
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        # The same code passes or fails, whoever tests it; --hypothesis-profile=default
        # looks for other examples.
        settings.register_profile("repeated", derandomize=True)
        settings.load_profile(config.getoption("--hypothesis-profile") or "repeated")


def pytest_unconfigure(config):
    if hasattr(config, "profiles"):
        del os.environ[VARIABLE]
        config.profiles.cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems():
    # hypothesis asks every loaded module for its file, and SpeechBrain's lazy ones
    # would then import packages that need not be installed.
    if "speechbrain" in sys.modules:
        from speechbrain.utils.importutils import LazyModule

        for module in list(sys.modules.values()):
            if isinstance(module, LazyModule):
                module.__file__ = None
