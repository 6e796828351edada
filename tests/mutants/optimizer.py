"""Sabotages of the 8-bit optimizers."""

from .mutant import Mutant

REFERENCE_CODE = "speechbrain_rev/optim/reference.py"
STRICT_CODE = "speechbrain_rev/optim/strict.py"

OPTIMIZER = [
    Mutant(
        "8 bit: a value midway between two codes takes the upper one",
        REFERENCE_CODE,
        "above = normalised > lookup",
        "above = normalised >= lookup",
        "tests/unit/optim/test_reference.py",
        "midway_between",
    ),
    Mutant(
        "8 bit: a gradient that is not finite leaves finite states",
        STRICT_CODE,
        "state[name].add_(summand)",
        "pass",
        "tests/unit/optim/test_strict.py",
        "is_not_finite_makes",
    ),
    Mutant(
        "8 bit: second moments read back as zero",
        REFERENCE_CODE,
        "    raise_second(state)\n    return state",
        "    return state",
        "tests/unit/optim/test_strict.py",
        "too_small_for_its_block",
    ),
    Mutant(
        "8 bit: the library's inexact quantiser runs on the CPU",
        STRICT_CODE,
        'return p.device.type == "cpu"',
        "return False",
        "tests/unit/optim/test_strict.py",
        "torchs_own_from_the_moments",
    ),
]
