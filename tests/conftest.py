"""What all tests share."""

import gc
import os
import random
import sys
import tempfile
import zlib

import pytest
from matplotlib.figure import Figure

from speechbrain_rev.planner.saved_profiles import VARIABLE


def pytest_addoption(parser):
    parser.addoption(
        "--sample",
        metavar="SEED",
        help="run half of the tests marked slow, one case of each, drawn by this seed; "
        "none of those marked slow(drawn=False)",
    )


def pytest_configure(config):
    # What commands print is as wide as it is, whatever the terminal of who tests.
    os.environ.pop("COLUMNS", None)
    # Processes that share the work, and those that tests start, have the same folder.
    if VARIABLE not in os.environ:
        config.profiles = tempfile.TemporaryDirectory()
        os.environ[VARIABLE] = config.profiles.name
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        # The same code passes or fails, whoever tests it; --hypothesis-profile=default
        # looks for other examples. How long a busy machine takes says nothing of the code.
        settings.register_profile(
            "repeated",
            derandomize=True,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        settings.load_profile(config.getoption("--hypothesis-profile") or "repeated")


def pytest_unconfigure(config):
    if hasattr(config, "profiles"):
        del os.environ[VARIABLE]
        config.profiles.cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    # hypothesis asks every loaded module for its file, and SpeechBrain's lazy ones
    # would then import packages that need not be installed.
    if "speechbrain" in sys.modules:
        from speechbrain.utils.importutils import LazyModule

        for module in list(sys.modules.values()):
            if isinstance(module, LazyModule):
                module.__file__ = None
    seed = config.getoption("--sample")
    if seed is not None:
        drawn = set(draw_cases(_of_slow(items), seed))
        left_out = [i for i in _of_slow(items) if i not in drawn]
        config.hook.pytest_deselected(items=left_out)
        left_out = set(left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    # Who counts live tensors collects garbage first, for which Python looks at all that
    # torch, scipy and SpeechBrain consist of: half a second each time.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter, config):
    seed = config.getoption("--sample")
    if seed is not None:
        terminalreporter.write_line(
            f"Half of the slow tests ran, one case of each: --sample={seed} draws the "
            "same again."
        )


def _of_slow(items):
    return [item for item in items if item.get_closest_marker("slow")]


def draw_cases(items, seed):
    """Draw half of the tests and a case of each, whatever other tests there are."""
    cases = {}
    for item in items:
        if all(mark.kwargs.get("drawn", True) for mark in item.iter_markers("slow")):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    draws = {name: random.Random(f"{seed} {name}") for name in cases}
    return [draws[n].choice(of) for n, of in cases.items() if draws[n].random() < 0.5]


@pytest.fixture(scope="session")
def fuzz_seed(pytestconfig):
    """What tests of random kills and damage draw from: another in each sample."""
    return zlib.crc32((pytestconfig.getoption("--sample") or "").encode())


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


@pytest.fixture
def drawn(figures, tmp_path):
    """Call a function that draws; return its figure after checking that a PNG came out."""

    def draw(function, *given, **words):
        path = tmp_path / "picture.png"
        function(*given, path, **words)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        # Sizes are known at the resolution drawn last.
        figures[-1].draw_without_rendering()
        return figures[-1]

    return draw
