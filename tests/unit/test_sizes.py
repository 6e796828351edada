"""Sizes in words: no zero for what is not nothing, and both units for a card."""

import pytest

from speechbrain_rev.models import parse_card
from speechbrain_rev.models.training_plan import parse_budget
from speechbrain_rev.sizes import GIB, MIB, card_text, size_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (11 * GIB, "11.000 GiB"),
        (GIB // 10 + 1, "0.100 GiB"),
        (GIB // 10 - 1, "102.4 MiB"),
        (5 * MIB, "5.0 MiB"),
        (-5 * MIB, "-5.0 MiB"),
        (100_000, "100000 bytes"),
        (1, "1 bytes"),
        (0, "0 bytes"),
    ],
)
def test_a_small_size_is_no_zero(size_bytes, text):
    assert size_text(size_bytes) == text


def test_the_same_words_are_another_size_for_a_card_and_a_budget_and_both_are_said():
    assert card_text(parse_card("11GB")) == "11 GiB (11.81 GB)"
    assert card_text(parse_budget("11GB")) == "10.24 GiB (11 GB)"
    assert card_text(parse_budget("11GiB")) == card_text(parse_card("11GiB"))
    with pytest.raises(ValueError, match=r"11GB are 11 GiB \(11\.81 GB\)"):
        parse_card("11")
    with pytest.raises(
        ValueError, match=r"11GiB .*what a card that is sold as 11GB has"
    ):
        parse_budget("11")
