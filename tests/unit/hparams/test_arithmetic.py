"""Formulas: HyperPyYAML's results, and none that takes hours."""

import pytest
from hyperpyyaml.core import parse_arithmetic

from speechbrain_rev.hparams.arithmetic import compute


@pytest.mark.parametrize(
    "formula",
    [
        "2 * 3 + 4 - 1",
        "7 / 2",
        "7 // 2",
        "7 % 4",
        "2 ** 10",
        "2 ** 1023",
        "(2 - 4) ** 3 ** 2",
        "2 ** (0 - 3)",
        "2 ** 0.5",
        "1 ** 10 ** 300",
        "0.1 * 3",
        "1e300 * 1e300",
        "-1 + 2",
        "results/revnet57/1986",
        "'a' + 'b'",
        "'a' - 'b'",
        "None * 2",
        "2 *",
        "[1, 2] * 2",
        "a b",
        "",
    ],
)
def test_it_gives_what_hyperpyyaml_gives(formula):
    expected = parse_arithmetic(formula)
    assert compute(formula) == expected
    assert type(compute(formula)) is type(expected)


@pytest.mark.parametrize(
    "formula",
    [
        "1986 ** 1986 ** 2",
        "1986 ** 999999",
        "(0 - 2) ** 10 ** 18",
        "2 ** 99 ** 99 ** 99",
        "1 // 1986 ** 10 ** 300",
        " * ".join(["10 ** 300"] * 20),
        "1 / 0",
        "2.0 ** 9999",
        "'a' * 10 ** 12",
        "'%1000000000000d' % 1",
        "+".join(["1"] * 100_000),
    ],
)
def test_what_leaves_the_range_of_numbers_is_refused_at_once(formula):
    with pytest.raises(ArithmeticError):
        compute(formula)
