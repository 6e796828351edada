"""The plans that a run keeps in its folder, and what each was made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from speechbrain_rev.files import write_whole
from speechbrain_rev.planner import Plan
from speechbrain_rev.planner.plan import load_plans, plans_to_json

#: The file in a run's folder.
PLAN = "plan.json"


def read_plans(path: Path) -> list[Plan]:
    """Read the plans of a run, the newest last; none where there is no file.

    Raises
    ------
    ValueError
        If the file is no file of plans; the message says how to go on.
    """
    if not path.is_file():
        return []
    try:
        return load_plans(path)
    except ValueError as error:
        raise ValueError(
            f"{error} To do so, delete that file: memory_budget then plans."
        ) from error


def write_plans(path: Path, plans: Sequence[Plan]) -> None:
    """Write the plans of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, plans_to_json(plans))


def differences(
    plan: Plan, made_for: Mapping[str, str]
) -> dict[str, tuple[str | None, str]]:
    """Collect what a plan was made for that differs from what is asked for now.

    Examples
    --------
    >>> plan = Plan({}, None, 9, 8, 8, 1.0, {"batch": "4", "frames": "200"})
    >>> differences(plan, {"batch": "8", "frames": "200"})
    {'batch': ('4', '8')}
    """
    then = plan.about
    return {
        name: (then.get(name), now)
        for name, now in made_for.items()
        if then.get(name) != now
    }
