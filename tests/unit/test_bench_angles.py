import math

import pytest
import torch

from tests.benchmarks.angles import angle_degrees


@pytest.mark.parametrize("degrees", [0.0, 1e-12, 1e-9, 1e-3, 14.0, 90.0, 179.0, 180.0])
def test_planted_angles_are_found_to_the_last_digits(degrees):
    turn = math.radians(degrees)
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    y = torch.tensor([math.cos(turn), math.sin(turn)], dtype=torch.float64)
    found = angle_degrees(x, 3 * y)
    assert abs(found - degrees) <= 1e-14 * max(1.0, degrees)


def test_equal_vectors_are_at_exactly_zero_whatever_their_type_and_shape():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert angle_degrees(x, x.clone()) == 0.0
    assert angle_degrees(x.bfloat16(), x.bfloat16()) == 0.0


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        ([1.0], [1.0, 2.0], r"shapes \[1\] and \[2\]"),
        ([1.0], [0.0], "length 0.0 has no direction"),
        ([math.nan], [1.0], "length nan has no direction"),
        ([1.0], [math.inf], "length inf has no direction"),
    ],
)
def test_vectors_without_an_angle_are_refused(a, b, what):
    with pytest.raises(ValueError, match=what):
        angle_degrees(torch.tensor(a), torch.tensor(b))
