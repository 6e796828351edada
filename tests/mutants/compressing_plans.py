"""Sabotages of plans that compress: of their limit, and of what is measured for it."""

from .mutant import Source, Tests

KNAPSACK = Tests("tests/unit/planner/test_knapsack.py")
PLANS = Tests("tests/unit/planner/test_plan.py")
PROFILING = Tests("tests/unit/planner/test_profiling.py")
TRAINING = Tests("tests/unit/training/test_memory_plan.py")
KNAPSACK_CODE = Source("speechbrain_rev/planner/knapsack.py")
NETWORK_CODE = Source("speechbrain_rev/planner/network.py")
PROFILE_CODE = Source("speechbrain_rev/planner/profile.py")
ACTIVATIONS_CODE = Source("speechbrain_rev/compression/activations.py")
PROBE_CODE = Source("speechbrain_rev/planner/compression_probe.py")
PLAN_CODE = Source("speechbrain_rev/planner/plan.py")
RUN_PLAN_CODE = Source("speechbrain_rev/training/memory_plan.py")

COMPRESSING_PLANS = [
    KNAPSACK_CODE(
        "compressing plan: the error may be twice its limit",
        "return squared_error(problem, modes) <= limit * (1 + ROUNDING)",
        "return squared_error(problem, modes) <= limit * 4",
        KNAPSACK("within_both_limits"),
    ),
    KNAPSACK_CODE(
        "compressing plan: no price of the error is tried",
        "for _ in range(_PRICES):",
        "for _ in range(0):",
        KNAPSACK("long_chains"),
    ),
    KNAPSACK_CODE(
        "compressing plan: what is left of the limit is not used up",
        "        _repaired(problem, modes, budget_bytes, max_squared_error)\n",
        "        modes\n",
        KNAPSACK("within_both_limits"),
    ),
    KNAPSACK_CODE(
        "compressing plan: what is needed is reported as if there were no limit",
        "        least = lightest_capped(problem, max_squared_error)\n",
        "        least = lightest(problem)\n",
        KNAPSACK("what_is_needed"),
    ),
    PROFILE_CODE(
        "compressing plan: the lightest plan has no limit",
        "if self.gradient_error(m) ** 2 <= limit]",
        "]",
        PLANS("error_that_is_above"),
    ),
    PLAN_CODE(
        "compressing plan: the measured error is not compared",
        "        if error <= limit:\n",
        "        if True:\n",
        PLANS("error_that_is_above"),
    ),
    PLAN_CODE(
        "compressing plan: where no limit is kept the last plan compresses all the same",
        "return solve(replace(profile, max_gradient_error=0.0))",
        "return solve(profile)",
        PLANS("keeps_the_limit"),
    ),
    PLAN_CODE(
        "compressing plan: what is needed is reported of lossless plans alone",
        "            if error.needed_bytes > left_bytes:\n",
        "            if False:\n",
        PLANS("needs_is_reported"),
    ),
    PROBE_CODE(
        "compressing plan: a batch that does not fit is tried as a whole",
        "return batch_that_fits(needed_bytes, wanted, step.device)",
        "return wanted",
        PROFILING("tried_in_part"),
    ),
    PROBE_CODE(
        "compressing plan: errors of blocks are added, not their squares",
        "self.squared_errors[name] = error**2",
        "self.squared_errors[name] = error",
        PLANS("no_lossless_one_fits"),
    ),
    PROBE_CODE(
        "compressing plan: gradients of one step are added to those of the next",
        "                p.grad.zero_()\n",
        "                pass\n",
        PLANS("no_lossless_one_fits"),
    ),
    PROBE_CODE(
        "compressing plan: blocks that nothing makes smaller may compress",
        "if smaller and math.isfinite(error):",
        "if True:",
        PROFILING("does_not_cover"),
    ),
    ACTIVATIONS_CODE(
        "compressing plan: every block of a module compresses",
        "network.forward = Compressing(network, compression, everywhere=False)",
        "network.forward = Compressing(network, compression)",
        PLANS("no_lossless_one_fits or limit_of_its_error"),
    ),
    NETWORK_CODE(
        "compressing plan: a block that compressed goes on when it is to store",
        "            stop_compressing_blocks(self.module)\n            return\n",
        "            return\n",
        PLANS("no_lossless_one_fits"),
    ),
    ACTIVATIONS_CODE(
        "compressing plan: all layers are counted with the same bits",
        "bits = self._assumed_bits.get(wanted.layer, ASSUMED_BITS)",
        "bits = ASSUMED_BITS",
        TRAINING("without_contents"),
    ),
    RUN_PLAN_CODE(
        "compressing plan: a run's plan stands under another limit of its error",
        '_ASKED = ("memory_budget", "max_gradient_error", "bounds")',
        '_ASKED = ("memory_budget", "bounds")',
        TRAINING("another_limit"),
    ),
    PLAN_CODE(
        "compressing plan: a lossless plan is left with the budget of a lossy one",
        """            # It was made for less than a lossless plan has.
            break""",
        "            return found",
        PLANS("has_the_whole_budget"),
    ),
    PLAN_CODE(
        "compressing plan: what the whole batch takes is not compared",
        "if peak is not None and peak <= left_bytes:",
        "if peak is not None:",
        PLANS("whole_batch"),
    ),
]
