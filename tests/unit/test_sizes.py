"""Sizes: a GB of memory is 2**30 bytes everywhere, and no size is written as zero."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechbrain_rev.sizes import (
    GIB,
    MIB,
    card_for,
    card_text,
    enough_text,
    largest_within,
    parse_size,
    reserve_of,
    size_text,
    whole_bytes,
)


@pytest.mark.parametrize(
    ("written", "size_bytes", "text"),
    [
        (size_text, 11 * GIB, "11.000 GiB"),
        (size_text, GIB // 2, "512.0 MiB"),
        (size_text, -5 * MIB, "-5.0 MiB"),
        (size_text, 100_000, "100000 bytes"),
        (size_text, 0, "0 bytes"),
        (card_text, 11 * GIB, "11 GiB"),
        (card_text, 11_000_000_000, "10.24 GiB"),
        (card_text, 100 * MIB, "100 MiB"),
    ],
)
def test_a_small_size_is_no_zero_and_a_gpu_has_no_needless_digits(
    written, size_bytes, text
):
    assert written(size_bytes) == text


#: Sizes as users give them; None where they are none.
GIVEN = {
    "11GB": 11 * GIB,
    "10.5 GiB": 10.5 * GIB,
    " 800mb ": 800 * MIB,
    "800MiB": 800 * MIB,
    "0.000001MB": 1,
    "500 B": 500,
    "100000000000000003B": 10**17 + 3,
    **dict.fromkeys(["", "11", "GB", "-1GB", "0GB", "0.5B", "1e3GB", "1TB", "auto"]),
    **dict.fromkeys(["٣GB", "1.GB"]),
}


@pytest.mark.parametrize("text", GIVEN)
def test_a_size_is_read_with_its_unit(text):
    assert parse_size(text) == GIVEN[text]


@pytest.mark.parametrize("size", [8 * MIB, 8.0 * MIB, "8MB", "8 mb", "8388608B"])
def test_a_caller_gives_bytes_or_a_size(size):
    assert whole_bytes("budget_bytes", size) == 8 * MIB


@pytest.mark.parametrize("size", ["8", "auto", None, float("inf"), float("nan"), [1]])
def test_what_a_caller_gives_that_is_no_size_is_refused_by_its_name(size):
    with pytest.raises(ValueError, match=r"budget_bytes is .*, which is no size"):
        whole_bytes("budget_bytes", size)


@given(st.integers(1, 2**50))
def test_a_size_that_is_advised_is_enough_and_hardly_more(size_bytes):
    advised = parse_size(enough_text(size_bytes))
    assert size_bytes <= advised <= max(1.001 * size_bytes + 1, size_bytes + MIB / 10)


@given(st.integers(0, 2**50))
def test_the_smallest_gpu_leaves_what_is_used(used_bytes):
    card_bytes = card_for(used_bytes)
    assert card_bytes - reserve_of(card_bytes) >= used_bytes
    assert card_bytes - 1 - reserve_of(card_bytes - 1) < used_bytes


#: Growths of sizes: straight lines, steps, and curves of both kinds.
GROWTHS = {
    "line": lambda n: 100 + 7 * n,
    "flat": lambda n: 50,
    "step": lambda n: 50 if n < 300 else 10**9,
    "square": lambda n: n * n,
    "root": lambda n: 1000 * math.isqrt(n),
}


@given(st.sampled_from([*GROWTHS]), st.integers(0, 10**6), st.integers(1, 1000))
def test_the_largest_number_within_a_limit_is_found(growth, limit, most):
    size_of = GROWTHS[growth]
    expected = sum(size_of(n) <= limit for n in range(1, most + 1))
    assert largest_within(size_of, limit, most) == expected


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 3000))
def test_it_is_found_whatever_the_sizes_are(steps, limit):
    sizes = [sum(steps[: n + 1]) for n in range(len(steps))]
    expected = sum(size <= limit for size in sizes)
    assert largest_within(lambda n: sizes[n - 1], limit, len(sizes)) == expected


@pytest.mark.parametrize(
    ("size_of", "limit", "most_asked", "expected"),
    [
        (GROWTHS["line"], 10**6, 6, 142_842),
        (GROWTHS["square"], 10**6, 30, 1000),
        *((lambda n, last=last: 50 if n <= last else 10**12, 10**9, 120, last)
          for last in (1, 3, 700, 99_999, 999_999)),
    ],
)  # fmt: skip
def test_few_sizes_are_asked_for_even_where_they_jump(
    size_of, limit, most_asked, expected
):
    asked = []

    def noted(n):
        asked.append(n)
        return size_of(n)

    assert largest_within(noted, limit, 10**6) == expected
    assert len(asked) <= most_asked
