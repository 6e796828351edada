"""Sabotages of the 8-bit optimizers."""

from .mutant import Source, Tests

REFERENCE_CODE = Source("speechbrain_rev/optim/reference.py")
STRICT_CODE = Source("speechbrain_rev/optim/strict.py")
REFERENCE_TESTS = Tests("tests/unit/optim/test_reference.py")
STRICT_TESTS = Tests("tests/unit/optim/test_strict.py")

OPTIMIZER = [
    REFERENCE_CODE(
        "8 bit: a value midway between two codes takes the upper one",
        "above = normalised > lookup",
        "above = normalised >= lookup",
        REFERENCE_TESTS("midway_between"),
    ),
    STRICT_CODE(
        "8 bit: a gradient that is not finite leaves finite states",
        "state[name].add_(summand)",
        "pass",
        STRICT_TESTS("is_not_finite_makes"),
    ),
    REFERENCE_CODE(
        "8 bit: second moments read back as zero",
        "    raise_second(state)\n    return state",
        "    return state",
        STRICT_TESTS("too_small_for_its_block"),
    ),
    STRICT_CODE(
        "8 bit: the library's inexact quantiser runs on the CPU",
        'return p.device.type == "cpu"',
        "return False",
        STRICT_TESTS("torchs_own_from_the_moments"),
    ),
]
