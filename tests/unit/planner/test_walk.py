"""A memory budget is easy to follow from the recipe's setting to the plan of the run.

A walk is all that happens to a budget while the recipe's ``give_modes`` plans a tiny
training run, writes the plan, reads it and gives the encoder its modes.

- What is followed: the setting's text; each number of bytes that one of our functions made
  of it; a plan, a choice or an error made of it.
- A call counts if the function is in ``speechbrain_rev`` or ``recipes/VoxCeleb`` and such a
  value is among its arguments, in a variable of the functions around it that it uses, in a
  field of a dataclass or NamedTuple among these, or is what it returns. Comprehensions
  belong to their function. The caller is the next function of ours below it on the stack.
  The same caller and called function count once.
- A call climbs if its module is on a higher floor than the caller's, in the order of
  import-linter, with the recipe above all. Callbacks are calls.
"""

import pytest

from speechbrain_rev import sizes
from speechbrain_rev.planner.step import Step
from tests.unit.planner.walk import BUDGET, Walk, followed, walk_of_recipe

MOST_MODULES, MOST_CALLS, MOST_CLIMBS = 10, 35, 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{}, {"memory_budget": "554321B"}, {"max_gradient_error": 0.05}],
    ids=["plenty", "little", "compressing"],
)
def test_a_budget_comes_to_its_plan_in_few_calls(tmp_path, monkeypatch, changed):
    monkeypatch.setenv("SPEECHBRAIN_REV_PROFILES", str(tmp_path / "profiles"))
    walk = walk_of_recipe(tmp_path, **changed)
    # It was followed all the way.
    reached = {call.function.split(".")[-1].partition(":")[0] for call in walk.calls}
    assert {"budget_bytes_of", "plan_step", "solve", "of_values", "apply"} <= reached
    assert len(walk.sizes) == 2
    calls = "\n".join(map(str, walk.calls))
    assert len(walk.modules) <= MOST_MODULES, calls
    assert len(walk.calls) <= MOST_CALLS, calls
    assert len(walk.climbs) <= MOST_CLIMBS, calls


def test_a_call_back_to_a_floor_above_climbs():
    step = Step(None, None, 1, None)
    with followed(Walk(BUDGET)) as walk:
        walk.sizes.add(1)
        sizes.largest_within(step.left_bytes, 0, 1)
    (climb,) = walk.climbs
    package = "speechbrain_rev"
    places = f"{package}.sizes", f"{package}.planner.step"
    assert (climb.caller_module, climb.module) == places
