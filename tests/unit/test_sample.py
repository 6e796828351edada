"""Which slow tests a sample draws."""

from types import SimpleNamespace

from tests.conftest import draw_cases


def slow_items(count, cases, **options):
    marks = [SimpleNamespace(kwargs={}), SimpleNamespace(kwargs=options)]
    return [
        SimpleNamespace(
            nodeid=f"tests/test_a.py::test_{number}[{case}]",
            iter_markers=lambda name: marks,
        )
        for number in range(count)
        for case in range(cases)
    ]


def names(items):
    return [item.nodeid.partition("[")[0] for item in items]


def test_a_case_of_half_of_the_tests_is_drawn_again_by_the_same_seed():
    items = slow_items(200, 3)
    drawn = draw_cases(items, "a")
    assert len(set(names(drawn))) == len(drawn)
    # Ten standard deviations of 200 tosses of a coin.
    assert abs(len(drawn) - 100) < 70
    assert draw_cases(items, "a") == drawn != draw_cases(items, "b")
    # Other tests change nothing.
    few = items[:30]
    assert draw_cases(few, "a") == [item for item in drawn if item in few]


def test_what_is_not_drawn_runs_among_all_slow_tests_alone():
    assert not draw_cases(slow_items(50, 1, drawn=False), "a")
