"""Rules that choose bounds: what they refuse."""

import math

import pytest

from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    FixedBound,
    GradientBound,
    RangeBound,
)
from tests.unit.compression.test_adaptive import Training


@pytest.mark.parametrize(
    ("rule", "given", "words"),
    [
        (DeviationBound, {"fraction": -1e-3}, "positive and finite"),
        (FixedBound, {"error_bound": -1e-3}, "positive and finite"),
        (RangeBound, {"fraction": -1e-3}, "positive and finite"),
        (GradientBound, {"target": 0.0}, "positive and finite"),
        (GradientBound, {"target": math.nan}, "positive and finite"),
        (GradientBound, {"form": "paper"}, "must be one of"),
        (GradientBound, {"every": 0}, "whole number above 0"),
    ],
)
def test_nonsense_is_refused(rule, given, words):
    with pytest.raises(ValueError, match=words):
        rule(**given)


def test_what_is_no_rule_and_the_state_of_another_rule_are_refused():
    with pytest.raises(ValueError, match="give one of speechbrain_rev"):
        ActivationCompression(convolutions=1e-3)
    saved = Training()
    saved.steps()
    with pytest.raises(ValueError, match=r"RangeBound\(.*keeps nothing"):
        ActivationCompression().load_state_dict(saved.compression.state_dict())
