"""Sabotages of plans that compress: of their limit, and of what is measured for it."""

from .mutant import Mutant

KNAPSACK = "tests/unit/planner/test_knapsack.py"
PLANS = "tests/unit/planner/test_plan.py"
PROFILING = "tests/unit/planner/test_profiling.py"
TRAINING = "tests/unit/catalog/test_plans.py"
KNAPSACK_CODE = "speechbrain_rev/planner/knapsack.py"
NETWORK_CODE = "speechbrain_rev/planner/network.py"
PROFILE_CODE = "speechbrain_rev/planner/profile.py"
ACTIVATIONS_CODE = "speechbrain_rev/compression/activations.py"
PROBE_CODE = "speechbrain_rev/planner/profiling.py"
WITHIN_CODE = "speechbrain_rev/planner/plan.py"
RUN_PLAN_CODE = "speechbrain_rev/catalog/plans.py"

COMPRESSING_PLANS = [
    Mutant(
        "compressing plan: the error may be twice its limit",
        KNAPSACK_CODE,
        "return squared_error(problem, modes) <= limit * (1 + ROUNDING)",
        "return squared_error(problem, modes) <= limit * 4",
        KNAPSACK,
        "within_both_limits",
    ),
    Mutant(
        "compressing plan: no price of the error is tried",
        KNAPSACK_CODE,
        "for _ in range(_PRICES):",
        "for _ in range(0):",
        KNAPSACK,
        "long_chains",
    ),
    Mutant(
        "compressing plan: what is left of the limit is not used up",
        KNAPSACK_CODE,
        "        _repaired(problem, modes, budget_bytes, max_squared_error)\n",
        "        modes\n",
        KNAPSACK,
        "within_both_limits",
    ),
    Mutant(
        "compressing plan: what is needed is said as if there were no limit",
        KNAPSACK_CODE,
        "        least = lightest_capped(problem, max_squared_error)\n",
        "        least = lightest(problem)\n",
        KNAPSACK,
        "what_is_needed",
    ),
    Mutant(
        "compressing plan: the lightest plan has no limit",
        PROFILE_CODE,
        "if self.gradient_error(m) ** 2 <= limit]",
        "]",
        PLANS,
        "error_that_is_above",
    ),
    Mutant(
        "compressing plan: the measured error is not compared",
        WITHIN_CODE,
        "        if error <= limit:\n",
        "        if True:\n",
        PLANS,
        "error_that_is_above",
    ),
    Mutant(
        "compressing plan: where no limit is kept the last plan compresses all the same",
        WITHIN_CODE,
        "return solve(replace(profile, max_gradient_error=0.0))",
        "return solve(profile)",
        PLANS,
        "keeps_the_limit",
    ),
    Mutant(
        "compressing plan: what is needed is said of lossless plans alone",
        WITHIN_CODE,
        "            if error.needed_bytes > left_bytes:\n",
        "            if False:\n",
        PLANS,
        "needs_is_reported",
    ),
    Mutant(
        "compressing plan: a batch that does not fit is tried as a whole",
        PROBE_CODE,
        "return batch_that_fits(needed_bytes, wanted, step.device)",
        "return wanted",
        PROFILING,
        "tried_in_part",
    ),
    Mutant(
        "compressing plan: errors of blocks are added, not their squares",
        PROBE_CODE,
        "self.squared_errors[name] = error**2",
        "self.squared_errors[name] = error",
        PLANS,
        "no_lossless_one_fits",
    ),
    Mutant(
        "compressing plan: gradients of one step are added to those of the next",
        PROBE_CODE,
        "                p.grad.zero_()\n",
        "                pass\n",
        PLANS,
        "no_lossless_one_fits",
    ),
    Mutant(
        "compressing plan: blocks that nothing makes smaller may compress",
        PROBE_CODE,
        "if smaller and math.isfinite(error):",
        "if True:",
        PROFILING,
        "does_not_cover",
    ),
    Mutant(
        "compressing plan: every block of a module compresses",
        ACTIVATIONS_CODE,
        "own = Compressing(network, compression, everywhere=False)",
        "own = Compressing(network, compression)",
        PLANS,
        "no_lossless_one_fits or limit_of_its_error",
    ),
    Mutant(
        "compressing plan: a block that compressed goes on when it is to store",
        NETWORK_CODE,
        "            stop_compressing(self.module)\n            return\n",
        "            return\n",
        PLANS,
        "no_lossless_one_fits",
    ),
    Mutant(
        "compressing plan: all layers are counted with the same bits",
        ACTIVATIONS_CODE,
        "bits = self._assumed_bits.get(wanted.layer, ASSUMED_BITS)",
        "bits = ASSUMED_BITS",
        TRAINING,
        "without_contents",
    ),
    Mutant(
        "compressing plan: a run's plan stands under another limit of its error",
        RUN_PLAN_CODE,
        '_ASKED = ("memory_budget", "max_gradient_error", "bounds")',
        '_ASKED = ("memory_budget", "bounds")',
        TRAINING,
        "another_limit",
    ),
    Mutant(
        "compressing plan: a lossless plan is left with the budget of a lossy one",
        WITHIN_CODE,
        """            # It was made for less than a lossless plan has.
            break""",
        "            return found",
        TRAINING,
        "has_all_the_room",
    ),
    Mutant(
        "compressing plan: what the whole batch takes is not compared",
        WITHIN_CODE,
        "if peak is not None and peak <= left_bytes:",
        "if peak is not None:",
        TRAINING,
        "whole_batch",
    ),
]
