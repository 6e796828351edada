"""Sabotages of the planner: what is counted is what a step takes."""

from .mutant import Source, Tests

PROFILING_TESTS = Tests("tests/unit/planner/test_profiling.py")
PLAN_TESTS = Tests("tests/unit/planner/test_plan.py")
STEP_TESTS = Tests("tests/unit/planner/test_step.py")
BUDGET_TESTS = Tests("tests/unit/training/test_memory_budget.py")
SEARCH_TESTS = Tests("tests/unit/planner/test_search.py")
TRACE_TESTS = Tests("tests/unit/planner/test_trace.py")
PLAN_CODE = Source("speechbrain_rev/planner/plan.py")
REFUSALS_CODE = Source("speechbrain_rev/planner/refusals.py")
PROFILE_CODE = Source("speechbrain_rev/planner/profile.py")
PROFILING_CODE = Source("speechbrain_rev/planner/profiling.py")
TRIED_CODE = Source("speechbrain_rev/planner/tried_modes.py")
STEP_CODE = Source("speechbrain_rev/planner/step.py")
PROFILE_TESTS = Tests("tests/unit/planner/test_profile.py")
SIZES_CODE = Source("speechbrain_rev/sizes.py")
SWEEP_CODE = Source("speechbrain_rev/planner/sweep.py")
MEMORY_CODE = Source("speechbrain_rev/planner/memory.py")
TRACE_CODE = Source("speechbrain_rev/planner/trace.py")

KNAPSACK_CODE = Source("speechbrain_rev/planner/knapsack.py")
KNAPSACK_TESTS = Tests("tests/unit/planner/test_knapsack.py")

PLANNER = [
    KNAPSACK_CODE(
        "planner: of a run only the last block counts",
        "        going_on = max(going_on, inside + cost.in_run.working_bytes)\n",
        "",
        KNAPSACK_TESTS("worst_moment_of_a_run"),
    ),
    KNAPSACK_CODE(
        "planner: a run is as long as one block",
        "        if modes[-1] not in joined[index]:\n",
        "        if True:\n",
        KNAPSACK_TESTS("no_plan_is_faster"),
    ),
    TRACE_CODE(
        "planner: memory that is allocated counts as read and written",
        "    if func.is_view or packet in _NO_KERNEL:\n",
        "    if func.is_view:\n",
        TRACE_TESTS("memory_that_an_operation_moves"),
    ),
    TRACE_CODE(
        "planner: what is written as a whole counts as read",
        "taken[1:] if packet in _OVERWRITES or packet in _LIKE else taken",
        "taken",
        TRACE_TESTS("memory_that_an_operation_moves"),
    ),
    TRACE_CODE(
        "planner: what is given to be written to counts as read",
        'read = [x for x in read if x is not kwargs.get("out")]',
        "read = [*read]",
        TRACE_TESTS("memory_that_an_operation_moves"),
    ),
    PROFILE_CODE(
        "planner: activations of a run are not held until its backward pass",
        "held = stored.held_bytes + max(0, kept)",
        "held = 0",
        PROFILE_TESTS("any_run"),
    ),
    PROFILE_CODE(
        "planner: the first block of a run drops its input",
        "kept = 0 if joins else stored.dropped_bytes - cost.dropped_bytes",
        "kept = 0",
        PROFILE_TESTS("any_run and drop"),
    ),
    TRIED_CODE(
        "planner: blocks join whatever runs before them",
        "if not kept_its_input(blocks[name])",
        "if True",
        PLAN_TESTS("not_follow"),
    ),
    PLAN_CODE(
        "planner: blocks within blocks are planned for nothing",
        "finer.slowdown < planned.slowdown - _FASTER",
        "finer.slowdown < planned.slowdown",
        SEARCH_TESTS("hardly_faster"),
    ),
    PLAN_CODE(
        "planner: blocks within blocks are not planned where the outer ones do not fit",
        "if step.searched and left > 0:",
        "if False:",
        SEARCH_TESTS("fit_where"),
    ),
    STEP_CODE(
        "planner: blocks that the user named are opened",
        "searched=not patterns",
        "searched=True",
        BUDGET_TESTS("outer_ones_do_not_fit"),
    ),
    TRACE_CODE(
        "planner: what a caller still has by name is held to the backward pass",
        "x.made <= begin + 1 and x.freed > following",
        "x.made <= begin + 1 < x.freed",
        PROFILING_TESTS("in_any_modes and more"),
    ),
    TRACE_CODE(
        "planner: the last block of a stage lets go of the stage's input",
        "yield sum(held) - named,",
        "yield sum(held),",
        PROFILE_TESTS("any_run and stages"),
    ),
    TRACE_CODE(
        "planner: an input's name counts after the forward pass that it ends with",
        "x.outlived >= self._freed_at_peaks[backward]",
        "x.freed > end",
        PROFILE_TESTS("any_run and drop"),
    ),
    PROFILE_CODE(
        "planner: outputs that later blocks take are not alive at the end of the forward",
        "there += cost.held_bytes + cost.left_bytes",
        "there += cost.held_bytes",
        PLAN_TESTS("to_a_thousandth"),
    ),
    PROFILE_CODE(
        "planner: outputs that later blocks take are not alive in the forward pass",
        "forward.append(there + cost.forward_bytes)",
        "pass",
        PROFILE_TESTS("any_plan_of_another"),
    ),
    PROFILING_CODE(
        "planner: blocks join whoever else reads their input",
        "if chosen[n].spec.joins and seen.shares_input",
        "if False",
        PLAN_TESTS("what_others_read"),
    ),
    PROFILING_CODE(
        "planner: blocks that are not trained recompute",
        "allowed[name] = (Mode.STORE,)",
        "pass",
        PROFILING_TESTS("not_trained_store"),
    ),
    PROFILING_CODE(
        "planner: steps without contents are always believed",
        "if bare and stored and _alike(",
        "if bare or stored and _alike(",
        PROFILING_TESTS("in_any_modes and lstm"),
    ),
    PROFILING_CODE(
        "planner: autocast is not looked for",
        "if torch.is_autocast_enabled(kind):",
        "if False:",
        PROFILING_TESTS("not_counted_without and autocast"),
    ),
    PROFILING_CODE(
        "planner: what the first step makes is counted",
        "                hooks.callback(handle.remove)\n            trial.run()",
        "                hooks.callback(handle.remove)",
        PROFILING_TESTS("in_any_modes and first_step or not_counted_without"),
    ),
    TRIED_CODE(
        "planner: what cannot run again is recomputed",
        "if m is not Mode.RECOMPUTE) for n in once",
        "if m is not Mode.RECOMPUTE) for n in ()",
        PROFILING_TESTS("cannot_run_again"),
    ),
    PLAN_CODE(
        "planner: times are taken for a budget that nothing fits",
        "                if not counted.fits:\n",
        "                if False:\n",
        PROFILING_TESTS("before_times_are_taken"),
    ),
    STEP_CODE(
        "planner: gradients are taken where the caller takes none",
        "torch.inference_mode(False)",
        "contextlib.nullcontext()",
        STEP_TESTS("gradients_are_off"),
    ),
    PLAN_CODE(
        "planner: a plan over the budget is not made anew",
        "allowed -= tried.measured_bytes - budget_bytes",
        "return tried",
        PLAN_TESTS("above_their_prediction"),
    ),
    PROFILE_CODE(
        "planner: gradients that wait in a run of blocks are forgotten",
        "waiting += gradient_bytes[name] if reconstructs else 0",
        "pass",
        PROFILE_TESTS("predicted"),
    ),
    REFUSALS_CODE(
        "planner: the first step of another batch is counted",
        "trial.run()  # Tensors that a first step makes are not counted.",
        "pass",
        PLAN_TESTS("largest_batch_has_a_plan and made"),
    ),
    PROFILING_CODE(
        "planner: other batches are counted without numbers that are needed",
        "return replace(real, needs_numbers=True)",
        "return real",
        PLAN_TESTS("other_batches_are_not_known"),
    ),
    REFUSALS_CODE(
        "planner: one sample without batch statistics ends the search of a batch",
        "return _needed_bytes(profiler, lightest, 2)",
        "raise",
        PLAN_TESTS("largest_batch_has_a_plan and normalised"),
    ),
    SIZES_CODE(
        "planner: a budget that is advised is rounded down",
        "-(-size_bytes * 10 // MIB)",
        "(size_bytes * 10 // MIB)",
        PLAN_TESTS("each_is_enough"),
    ),
    STEP_CODE(
        "planner: other batches have the rows of the example in another order",
        "return whole[:count].detach()",
        "return whole[-count:].detach()",
        STEP_TESTS("sliced_and_repeated"),
    ),
    SWEEP_CODE(
        "planner: a sweep forgets the limit of the gradient's error",
        "profiler_of(step.at(sizes[0]), max_gradient_error)",
        "profiler_of(step.at(sizes[0]), None)",
        PLAN_TESTS("more_samples_fit"),
    ),
    MEMORY_CODE(
        "planner: tensors of other devices are counted too",
        "x.device.type != self._type",
        "False",
        TRACE_TESTS("network_s_device"),
    ),
    TRACE_CODE(
        "planner: copies between devices are not counted",
        "self._host += sum(map(_bytes, made))",
        "pass",
        TRACE_TESTS("copies_from"),
    ),
]
