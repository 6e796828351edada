"""What all pictures share: names beside points, nothing to draw, and matplotlib's door."""

import subprocess
import sys

import pytest

from speechbrain_rev import plots
from speechbrain_rev.plots.style import new_figure, write_names
from tests.pictures import check_names


def named(places, *, marks=(), **options):
    """Write names in axes from 0 to 1; return their texts by name."""
    figure = new_figure(4.0, 3.0)
    axes = figure.add_subplot(xlim=(0, 1), ylim=(0, 1))
    colours = dict.fromkeys(places, "black")
    write_names(figure, axes, places, colours, marks=marks, mark_size=6.0, **options)
    check_names(axes, [*marks, *places.values()], places)
    return {text.get_text(): text for text in axes.texts if text.get_text()}


@pytest.mark.parametrize(("upwards", "sign"), [(True, 1), (False, -1)])
def test_names_of_close_points_stand_like_flags_that_of_the_last_one_lowest(
    upwards, sign
):
    places = {f"point {i}": (0.4 + 0.02 * i, 0.5) for i in range(5)}
    texts = named(places, upwards=upwards)
    heights = [sign * texts[name].get_position()[1] for name in reversed(places)]
    assert heights == sorted(heights)
    assert heights[0] == pytest.approx(0)


def test_a_name_gives_way_to_marks_and_to_the_ends_of_the_axes():
    right, up = named({"a": (0.5, 0.5)})["a"].get_position()
    assert 3 < right < 10
    assert up == pytest.approx(0)
    assert named({"a": (0.5, 0.5)}, marks=[(0.55, 0.5)])["a"].get_position()[1] > 4
    assert named({"last one": (0.99, 0.5)})["last one"].get_position()[0] < 0
    assert named({"a": (0.5, 1.0)})["a"].get_position()[1] < 0
    full = {f"point {i}": (0.4 + 0.02 * i, 0.9) for i in range(5)}
    assert min(text.get_position()[1] for text in named(full).values()) < -4


def test_drawing_needs_no_pyplot_and_importing_neither_matplotlib_nor_torch(tmp_path):
    program = (
        "import sys\n"
        "from speechbrain_rev import plots\n"
        "assert not {'matplotlib', 'torch'} & set(sys.modules)\n"
        "plots.memory_parts([plots.PartsBar('a', 'b', {'weights': 1.0})], sys.argv[1], title='T', source='S')\n"
        "assert 'matplotlib' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "memory.png")]
    outcome = subprocess.run(command, check=False, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_without_matplotlib_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    bars = [plots.PartsBar("a", "b", {"weights": 1.0})]
    with pytest.raises(ImportError, match="pip install --force-reinstall matplotlib"):
        plots.memory_parts(bars, tmp_path / "a.png", title="", source="")


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        ("encoder_map", [[]], {"eer_label": "E", "memory_label": "M", "cards": {}}),
        ("by_parameters", [[]], {"total_batch": 256}),
        ("plan_map", [{8: {}}, {}], {}),
    ],
)
def test_where_nothing_is_left_to_draw_no_file_is_written(
    name, given, options, tmp_path
):
    with pytest.raises(ValueError, match="to draw; give at least one"):
        getattr(plots, name)(*given, tmp_path / "a.png", title="", source="", **options)
    assert not list(tmp_path.iterdir())
