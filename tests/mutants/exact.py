"""Sabotages of exact streams: items 3 to 5 of the engine's contract."""

from .mutant import Mutant

CHAIN_TESTS = "tests/unit/reversible/test_chain.py"
FLAGS_TESTS = "tests/unit/reversible/test_replay.py"
FORMATS_TESTS = "tests/unit/reversible/test_streams.py"
MONITOR_TESTS = "tests/unit/reversible/test_monitor.py"
ENCODER_TESTS = "tests/unit/lobes/test_encoder.py"
BUFFERS_CODE = "speechbrain_rev/reversible/replay.py"
CHAIN_CODE = "speechbrain_rev/reversible/chain.py"
FIXED_CODE = "speechbrain_rev/reversible/fixed_point.py"
FLAGS_CODE = "speechbrain_rev/reversible/replay.py"
FORMATS_CODE = "speechbrain_rev/reversible/streams.py"
MONITOR_CODE = "speechbrain_rev/reversible/monitor.py"
REPLAY_CODE = "speechbrain_rev/reversible/replay.py"
STREAMS_CODE = "speechbrain_rev/reversible/streams.py"

EXACT = [
    Mutant(
        "3: values are cut off, not rounded",
        FIXED_CODE,
        ".mul_(steps).round_()",
        ".mul_(steps).trunc_()",
        FORMATS_TESTS,
        "nearest_steps",
    ),
    Mutant(
        "3: what is subtracted is a step off",
        FIXED_CODE,
        "    return torch.sub(value, rounded,",
        "    return torch.sub(value, rounded + 1,",
        FORMATS_TESTS,
        "loses_nothing",
    ),
    Mutant(
        "3: storing adds gradients of shared weights up in another order",
        CHAIN_CODE,
        "shared = shared_by(f for b in couplings for f in (b.f, b.g))",
        "pass",
        CHAIN_TESTS,
        "equals_plain and shared and float64",
    ),
    Mutant(
        "3: storing shares casts of weights",
        REPLAY_CODE,
        "with Autocast.now(devices)(), Flags.now(devices)(), lists:",
        "with Flags.now(devices)(), lists:",
        CHAIN_TESTS,
        "equals_plain and layer_twice and bf16",
    ),
    Mutant(
        "4: weights of the checksum go in even steps",
        MONITOR_CODE,
        "            weights ^= weights >> 32\n",
        "",
        MONITOR_TESTS,
        "errors_that_cancel",
    ),
    Mutant(
        "4: all places have one weight",
        MONITOR_CODE,
        "weights.mul_(_SPREAD).bitwise_or_(1)",
        "weights.zero_().bitwise_or_(1)",
        MONITOR_TESTS,
        "opposite_errors",
    ),
    Mutant(
        "4: no step is due for a look",
        MONITOR_CODE,
        "self._steps % self.every == 0",
        "self._steps % self.every == 1",
        MONITOR_TESTS,
        "raises_where_asked",
    ),
    Mutant(
        "4: the user's benchmark mode stays on",
        FLAGS_CODE,
        '_PINNED = {"benchmark": False, "deterministic": True}',
        '_PINNED = {"deterministic": True}',
        FLAGS_TESTS,
        "pinned or flags",
    ),
    Mutant(
        "5: a magnitude above the limit passes",
        MONITOR_CODE,
        "fine = (notes.largest < limit).all()",
        "fine = notes.largest.isfinite().all()",
        MONITOR_TESTS,
        "outputs_and_gradients_are_nan",
    ),
    Mutant(
        "5: the limit is all that an int32 holds",
        FORMATS_CODE,
        "limit = 2.0**14",
        "limit = 2.0**15",
        MONITOR_TESTS,
        "wraps_around",
    ),
    Mutant(
        "5: gradients of what left its range are numbers",
        STREAMS_CODE,
        "return grad.clone() if validity is None else grad + validity.to(grad.dtype)",
        "return grad.clone()",
        MONITOR_TESTS,
        "outputs_and_gradients_are_nan",
    ),
    Mutant(
        "5: running statistics keep what left its range",
        BUFFERS_CODE,
        "fine = (validity == 0).to(before.device)",
        "fine = (validity != 1).to(before.device)",
        MONITOR_TESTS,
        "leaves_running_statistics",
    ),
    Mutant(
        "5: each later stage reports the NaN that it was given",
        MONITOR_CODE,
        "return before is not None and (",
        "return False and (",
        ENCODER_TESTS,
        "named_by_stage",
    ),
]
