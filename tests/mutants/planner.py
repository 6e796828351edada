"""Sabotages of the planner: what is counted is what a step takes."""

from .mutant import Mutant

PROFILING_TESTS = "tests/unit/planner/test_profiling.py"
PLAN_TESTS = "tests/unit/planner/test_plan.py"
STEP_TESTS = "tests/unit/planner/test_step.py"
TRACE_TESTS = "tests/unit/planner/test_trace.py"
PLAN_CODE = "speechbrain_rev/planner/plan.py"
PROFILE_CODE = "speechbrain_rev/planner/profile.py"
PROFILING_CODE = "speechbrain_rev/planner/profiling.py"
NETWORK_CODE = "speechbrain_rev/planner/network.py"
STEP_CODE = "speechbrain_rev/planner/step.py"

PLANNER = [
    Mutant(
        "planner: what a caller still has by name is held to the backward pass",
        PROFILING_CODE,
        "min(b.after_bytes, x) for b, x in",
        "b.after_bytes for b, x in",
        PROFILING_TESTS,
        "in_any_modes and more",
    ),
    Mutant(
        "planner: blocks that are not trained recompute",
        PROFILING_CODE,
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
        "                hooks.callback(handle.remove)\n            trial.run()",
        "                hooks.callback(handle.remove)",
        PROFILING_TESTS,
        "in_any_modes and first_step or not_counted_without",
    ),
    Mutant(
        "planner: what cannot run again is recomputed",
        NETWORK_CODE,
        "return list(alone)",
        "return []",
        PROFILING_TESTS,
        "cannot_run_again",
    ),
    Mutant(
        "planner: times are taken for a budget that nothing fits",
        PLAN_CODE,
        "                if not counted.fits:\n",
        "                if False:\n",
        PROFILING_TESTS,
        "before_times_are_taken",
    ),
    Mutant(
        "planner: gradients are taken where the caller takes none",
        STEP_CODE,
        "torch.inference_mode(False)",
        "contextlib.nullcontext()",
        STEP_TESTS,
        "gradients_are_off",
    ),
    Mutant(
        "planner: a plan over the budget is not made anew",
        PLAN_CODE,
        "allowed -= tried.measured_bytes - budget_bytes",
        "return tried",
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
    Mutant(
        "planner: the first step of another batch is counted",
        PLAN_CODE,
        "trial.run()  # What a first step makes is not counted.",
        "pass",
        PLAN_TESTS,
        "largest_batch_has_a_plan and made",
    ),
    Mutant(
        "planner: other batches are counted without numbers that are needed",
        PROFILING_CODE,
        "return replace(real, needs_numbers=True)",
        "return real",
        PLAN_TESTS,
        "other_batches_are_not_known",
    ),
    Mutant(
        "planner: one sample without batch statistics ends the search of a batch",
        PLAN_CODE,
        "return _needed_bytes(profiler, lightest, 2)",
        "raise",
        PLAN_TESTS,
        "largest_batch_has_a_plan and normalised",
    ),
    Mutant(
        "planner: a budget that is advised is rounded down",
        "speechbrain_rev/sizes.py",
        "-(-size_bytes * 10 // MIB)",
        "(size_bytes * 10 // MIB)",
        PLAN_TESTS,
        "each_is_enough",
    ),
    Mutant(
        "planner: other batches have the rows of the example in another order",
        STEP_CODE,
        "return whole[:count].detach()",
        "return whole[-count:].detach()",
        STEP_TESTS,
        "sliced_and_repeated",
    ),
    Mutant(
        "planner: a sweep forgets the limit of the gradient's error",
        "speechbrain_rev/planner/sweep.py",
        "profiler_of(step.at(sizes[0]), max_gradient_error)",
        "profiler_of(step.at(sizes[0]), None)",
        PLAN_TESTS,
        "more_samples_fit",
    ),
    Mutant(
        "planner: tensors of other devices are counted too",
        "speechbrain_rev/planner/memory.py",
        "x.device.type != self._type",
        "False",
        TRACE_TESTS,
        "network_s_device",
    ),
    Mutant(
        "planner: copies between devices are not counted",
        "speechbrain_rev/planner/trace.py",
        "self._host += sum(map(_bytes, made))",
        "pass",
        TRACE_TESTS,
        "copies_from",
    ),
]
