"""What each block keeps, so that a network trains as fast as a memory budget allows."""

from speechbrain_rev.planner.plan import Plan
from speechbrain_rev.planner.planning import plan
from speechbrain_rev.planner.problem import Infeasible
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.sweep import Sweep, sweep

__all__ = ["Infeasible", "Plan", "Profile", "Sweep", "plan", "sweep"]
