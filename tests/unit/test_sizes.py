"""Sizes in words: no zero for what is not nothing, and both units for a card."""

import pytest

from speechbrain_rev.models import parse_card
from speechbrain_rev.sizes import (
    GB,
    GIB,
    MB,
    MIB,
    card_text,
    parse_size,
    size_text,
    whole_bytes,
)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (11 * GIB, "11.000 GiB"),
        (GIB, "1.000 GiB"),
        (GIB // 2, "512.0 MiB"),
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
    assert card_text(parse_size("11GB")) == "10.24 GiB (11 GB)"
    assert card_text(parse_size("11GiB")) == card_text(parse_card("11GiB"))
    assert card_text(100 * MB) == "95.37 MiB (100 MB)"
    assert card_text(GB) == "953.7 MiB (1 GB)"
    with pytest.raises(ValueError, match=r"11GB are 11 GiB \(11\.81 GB\)"):
        parse_card("11")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("11GB", 11 * 10**9),
        ("10.5 GiB", 10.5 * GIB),
        (" 800mb ", 800 * 10**6),
        ("800MiB", 800 * MIB),
        ("0.000001MB", 1),
    ],
)
def test_a_size_is_read_with_its_unit(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "11", "GB", "-1GB", "0GB", "1e3GB", "1TB", "auto", "٣GB", "1.GB"]
)
def test_what_is_no_size_is_none(text):
    assert parse_size(text) is None


@pytest.mark.parametrize("size", [8_000_000, 8e6, "8MB", "8 mb"])
def test_a_caller_gives_bytes_or_a_size(size):
    assert whole_bytes("budget_bytes", size) == 8_000_000


@pytest.mark.parametrize("size", ["8", "auto", None, float("inf"), float("nan"), [1]])
def test_what_a_caller_gives_that_is_no_size_is_refused_by_its_name(size):
    with pytest.raises(ValueError, match=r"budget_bytes is .*, which is no size"):
        whole_bytes("budget_bytes", size)
