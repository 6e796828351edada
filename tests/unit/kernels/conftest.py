"""Triton on the CPU: interpreted, and compiled without being run."""

from importlib.util import find_spec

import pytest

from tests.unit.kernels.process import Process


def process(**environment):
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    process = Process(**environment)
    yield process
    process.close()


@pytest.fixture(scope="session")
def interpreter():
    yield from process(TRITON_INTERPRET="1")


@pytest.fixture(scope="session")
def compiler(tmp_path_factory):
    cache = tmp_path_factory.mktemp("triton")
    yield from process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
