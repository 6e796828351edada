import pytest

from speechbrain_rev.scoring import holm


def test_holm_multiplies_by_the_tests_that_are_left_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []
    with pytest.raises(ValueError, match=r"1\.5.*between 0 and 1"):
        holm([0.1, 1.5])
