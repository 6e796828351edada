"""Plans, a sweep and breakdowns that are made once."""

import pytest

from speechbrain_rev.architectures import ARCHITECTURES, Architecture, architecture
from speechbrain_rev.catalog import Training
from speechbrain_rev.catalog.breakdown import before_and_after
from speechbrain_rev.catalog.plans import plan_encoders, sweep_encoder
from speechbrain_rev.devices import parse_card
from speechbrain_rev.sizes import GIB


@pytest.fixture(scope="session")
def tight():
    """Plans for a GPU too small to store all of either encoder."""
    return plan_encoders(Training(5 * GIB, 128, 200), names=["resnet34", "revnet57"])


@pytest.fixture(scope="session")
def swept():
    """Plans of batches of which the first alone is stored, and the last does not fit."""
    training = Training(4 * GIB, 1, 200)
    speed = parse_card("RTX 2080 Ti").speed
    sizes = [16, 48, 80, 1000]
    return sweep_encoder(architecture("resnet34"), training, sizes, speed=speed)


@pytest.fixture(scope="session")
def pairs():
    """Breakdowns before and after, of a step that is stored and one that reconstructs."""
    names = ("resnet34", "revnet57")
    return [before_and_after(name, batch=64, frames=200) for name in names]


@pytest.fixture(scope="session")
def staged():
    """A breakdown by stages, before and after."""
    return before_and_after("resnet34", batch=16, frames=200, stages=True)


@pytest.fixture
def uncounted(monkeypatch):
    """A row that was neither counted nor published."""
    row = Architecture(
        "revnet61", "revnet", "II", "basic", (48, 96, 192, 300), (2, 3, 6, 3), 61,
        6_300_000,
    )  # fmt: skip
    monkeypatch.setitem(ARCHITECTURES, row.name, row)
    return row
