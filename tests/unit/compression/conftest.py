"""What tests of compression share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)
