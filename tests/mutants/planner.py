"""Sabotages of the planner: what is counted is what a step takes."""

from .mutant import Mutant

PROFILING_TESTS = "tests/unit/planner/test_profiling.py"
PLAN_TESTS = "tests/unit/planner/test_plan.py"
COUNTING_CODE = "speechbrain_rev/planner/counting.py"
PLAN_CODE = "speechbrain_rev/planner/planning.py"
WITHIN_CODE = "speechbrain_rev/planner/within.py"
PROFILE_CODE = "speechbrain_rev/planner/block_profile.py"
PROFILING_CODE = "speechbrain_rev/planner/profiling.py"
VERIFY_CODE = "speechbrain_rev/planner/verify.py"

PLANNER = [
    Mutant(
        "planner: what a caller still has by name is held to the backward pass",
        COUNTING_CODE,
        "min(b.after_bytes, x) for b, x in",
        "b.after_bytes for b, x in",
        PROFILING_TESTS,
        "in_any_modes and more",
    ),
    Mutant(
        "planner: blocks that are not trained recompute",
        COUNTING_CODE,
        "allowed[name] = (Mode.STORE,)",
        "pass",
        PROFILING_TESTS,
        "not_trained_store",
    ),
    Mutant(
        "planner: steps without contents are always believed",
        PROFILING_CODE,
        "if bare and stored and _alike(",
        "if bare or stored and _alike(",
        PROFILING_TESTS,
        "in_any_modes and lstm",
    ),
    Mutant(
        "planner: autocast is not looked for",
        PROFILING_CODE,
        "if torch.is_autocast_enabled(kind):",
        "if False:",
        PROFILING_TESTS,
        "not_counted_without and autocast",
    ),
    Mutant(
        "planner: what the first step makes is counted",
        PROFILING_CODE,
        "            hooks.callback(handle.remove)\n        step()",
        "            hooks.callback(handle.remove)",
        PROFILING_TESTS,
        "in_any_modes and first_step or not_counted_without",
    ),
    Mutant(
        "planner: what cannot run again is recomputed",
        VERIFY_CODE,
        "return list(alone)",
        "return []",
        PROFILING_TESTS,
        "cannot_run_again",
    ),
    Mutant(
        "planner: times are taken for a budget that nothing fits",
        PLAN_CODE,
        "            solve(found.profile)  # what no plan fits is told before times are taken\n",
        "",
        PROFILING_TESTS,
        "before_times_are_taken",
    ),
    Mutant(
        "planner: gradients are taken where the caller takes none",
        PROFILING_CODE,
        "torch.inference_mode(False)",
        "contextlib.nullcontext()",
        PROFILING_TESTS,
        "gradients_are_off",
    ),
    Mutant(
        "planner: a plan over the budget is not made anew",
        WITHIN_CODE,
        "allowed -= found.measured_bytes - budget_bytes",
        "return found",
        PLAN_TESTS,
        "above_their_prediction",
    ),
    Mutant(
        "planner: gradients that wait in a run of blocks are forgotten",
        PROFILE_CODE,
        "waiting += gradient_bytes[name] if reconstructs else 0",
        "pass",
        "tests/unit/planner/test_profile.py",
        "predicted",
    ),
]
