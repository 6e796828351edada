"""What each block keeps, so that a network trains as fast as a memory budget allows."""

from speechbrain_rev.planner.knapsack import Infeasible
from speechbrain_rev.planner.memory import (
    LiveBytes,
    MemoryReport,
    breakdown,
    live_bytes_peak,
)
from speechbrain_rev.planner.plan import Plan, plan, plan_step
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.profiling import profile
from speechbrain_rev.planner.refusals import largest_batch, remedies
from speechbrain_rev.planner.search import repeated_blocks
from speechbrain_rev.planner.step import Step, step_of
from speechbrain_rev.planner.sweep import Sweep, sweep

__all__ = [
    "Infeasible",
    "LiveBytes",
    "MemoryReport",
    "Plan",
    "Profile",
    "Step",
    "Sweep",
    "breakdown",
    "largest_batch",
    "live_bytes_peak",
    "plan",
    "plan_step",
    "profile",
    "remedies",
    "repeated_blocks",
    "step_of",
    "sweep",
]
