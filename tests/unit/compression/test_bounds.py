"""Rules that choose bounds: what they refuse."""

import pytest

from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    FixedBound,
    RangeBound,
)
from tests.unit.compression.test_adaptive import Training


@pytest.mark.parametrize("rule", [DeviationBound, FixedBound, RangeBound])
def test_a_fraction_or_bound_is_positive_and_finite(rule):
    with pytest.raises(ValueError, match="positive and finite"):
        rule(-1e-3)


def test_what_is_no_rule_and_the_state_of_another_rule_are_refused():
    with pytest.raises(ValueError, match="give one, such as"):
        ActivationCompression(convolutions=1e-3)
    saved = Training()
    saved.steps()
    with pytest.raises(ValueError, match=r"RangeBound\(.*keeps nothing"):
        ActivationCompression().load_state_dict(saved.compression.state_dict())
