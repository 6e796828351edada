"""Sabotages of exact streams: items 3 to 5 of the engine's contract."""

from .mutant import Source, Tests

CHAIN_TESTS = Tests("tests/unit/reversible/test_chain.py")
FLAGS_TESTS = Tests("tests/unit/reversible/test_flags.py")
FORMATS_TESTS = Tests("tests/unit/reversible/test_streams.py")
MONITOR_TESTS = Tests("tests/unit/reversible/test_monitor.py")
ENCODER_TESTS = Tests("tests/unit/lobes/test_encoder.py")
FLAGS_CODE = Source("speechbrain_rev/reversible/flags.py")
BUFFERS_CODE = Source("speechbrain_rev/reversible/replay.py")
CHAIN_CODE = Source("speechbrain_rev/reversible/chain.py")
FIXED_CODE = Source("speechbrain_rev/reversible/fixed_point.py")
FORMATS_CODE = Source("speechbrain_rev/reversible/streams.py")
MONITOR_CODE = Source("speechbrain_rev/reversible/monitor.py")

EXACT = [
    FIXED_CODE(
        "3: values are cut off, not rounded",
        "    out.round_()",
        "    out.trunc_()",
        FORMATS_TESTS("nearest_steps"),
    ),
    FIXED_CODE(
        "3: what is subtracted is a step off",
        "_changed(torch.sub, value, f,",
        "_changed(torch.sub, value - 1, f,",
        FORMATS_TESTS("loses_nothing"),
    ),
    FIXED_CODE(
        "3: the next function reads a sum that is a step off",
        "        decode(value, steps, floats.dtype, floats)",
        "        decode(value + 1, steps, floats.dtype, floats)",
        CHAIN_TESTS("equals_plain and basic"),
    ),
    CHAIN_CODE(
        "3: storing adds gradients of shared weights up in another order",
        "shared = shared_by(f for b in couplings for f in (b.f, b.g))",
        "pass",
        CHAIN_TESTS("equals_plain and shared and float64"),
    ),
    BUFFERS_CODE(
        "3: storing shares casts of weights",
        "with Autocast.now(devices)(), Flags.now(devices)(), lists:",
        "with Flags.now(devices)(), lists:",
        CHAIN_TESTS("equals_plain and called_twice and bf16"),
    ),
    MONITOR_CODE(
        "4: weights of the checksum go in even steps",
        "    weights ^= weights >> 32\n",
        "",
        MONITOR_TESTS("errors_that_cancel"),
    ),
    MONITOR_CODE(
        "4: all places have one weight",
        "weights.mul_(_SPREAD).bitwise_or_(1)",
        "weights.zero_().bitwise_or_(1)",
        MONITOR_TESTS("opposite_errors"),
    ),
    MONITOR_CODE(
        "4: blocks are compared where a step is counted",
        "dispatch_mode() is not None or not has_values",
        "not has_values",
        MONITOR_TESTS("counted_compares_no_block"),
    ),
    MONITOR_CODE(
        "4: no step is due for a look",
        "self._count % self.every == 0",
        "self._count % self.every == 1",
        MONITOR_TESTS("every_so_many"),
    ),
    FLAGS_CODE(
        "4: the user's benchmark mode stays on",
        '            (cudnn, "benchmark", not self.deterministic),\n',
        "",
        FLAGS_TESTS("pinned or flags"),
    ),
    FLAGS_CODE(
        "4: what is stored has the user's flags in the backward pass",
        "        return tuple(next(carried) if y.requires_grad else y for y in outputs)",
        "        return outputs",
        FLAGS_TESTS("pinned"),
    ),
    FLAGS_CODE(
        "4: carried flags stay in force after the backward pass",
        "    def __call__(self) -> None:\n        self._end()",
        "    def __call__(self) -> None:\n        _kept.append(self)\n\n\n_kept = []",
        FLAGS_TESTS("pinned"),
    ),
    MONITOR_CODE(
        "5: a magnitude above the limit passes",
        "fine = (notes.largest < limit).all()",
        "fine = notes.largest.isfinite().all()",
        MONITOR_TESTS("outputs_and_gradients_are_nan"),
    ),
    FORMATS_CODE(
        "5: the limit is all that an int32 holds",
        "limit = 2.0**14",
        "limit = 2.0**15",
        MONITOR_TESTS("wraps_around"),
    ),
    FORMATS_CODE(
        "5: gradients of what left its range are numbers",
        "return own if validity is None else own.add_(validity.to(own.dtype))",
        "return own",
        FORMATS_TESTS("layout_of_the_stream"),
    ),
    BUFFERS_CODE(
        "5: running statistics keep what left its range",
        "fine = (validity == 0).to(before.device)",
        "fine = (validity != 1).to(before.device)",
        MONITOR_TESTS("leaves_running_statistics"),
    ),
    CHAIN_CODE(
        "5: our own running statistics keep what left its range",
        "statistics.require(validity)",
        "statistics.require(None)",
        MONITOR_TESTS("leaves_running_statistics"),
    ),
    MONITOR_CODE(
        "5: each later stage reports the NaN that it was given",
        "return before is not None and (",
        "return False and (",
        ENCODER_TESTS("named_by_stage"),
    ),
]
