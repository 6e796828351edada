"""What all pictures share: names beside points, what is refused, and matplotlib's door."""

import subprocess
import sys

import pytest

from speechbrain_rev import plots
from speechbrain_rev.plots import Difference, EncoderPoint, PartsBar, SizedEncoder
from speechbrain_rev.plots.style import new_figure, write_names

from .names import check_names


def named(places, *, marks=(), **options):
    """Write names in axes from 0 to 1; return their texts by name."""
    figure = new_figure(4.0, 3.0)
    axes = figure.add_subplot(xlim=(0, 1), ylim=(0, 1))
    colours = dict.fromkeys(places, "black")
    write_names(figure, axes, places, colours, marks=marks, mark_size=6.0, **options)
    check_names(axes, [*marks, *places.values()], places)
    return {text.get_text(): text for text in axes.texts if text.get_text()}


def test_a_name_stands_to_the_right_of_its_point():
    right, up = named({"alone": (0.5, 0.5)})["alone"].get_position()
    assert 3 < right < 10
    assert up == pytest.approx(0)


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
        "plots.memory_bars([('a', 'store', 1.0)], sys.argv[1])\n"
        "assert 'matplotlib' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "memory.png")]
    outcome = subprocess.run(command, check=False, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_without_matplotlib_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install --force-reinstall matplotlib"):
        plots.memory_bars([("a", "store", 1.0)], tmp_path / "memory.png")


NAN, INF = float("nan"), float("inf")
WORDS = {"title": "T", "source": "S"}
MAP = {"eer_label": "E", "memory_label": "M", "cards": {}}
POINT = EncoderPoint("a", "resnet", "vanilla", 1.0, 1e9)
ROW = {"epoch": 1, "train_loss": 1.0, "lr": 0.1, "margin": 0.0}
ROWS = [Difference(name, 0.1, -0.4, 0.6, 0.5, shown=True) for name in "ab"]


def sized(planned, batch):
    return SizedEncoder("c", "revnet", "I", 1, 1.0, 1.0, planned, batch)


def point(**changed):
    return EncoderPoint(
        "a", "resnet", "vanilla", **{"eer_percent": 1.0, "peak_bytes": 1e9} | changed
    )


def parts(**sizes):
    return [PartsBar("a", "b", sizes)]


#: For each picture what it refuses, and the reason.
REFUSED = {
    "training_curves": [
        ([], "no epoch to draw; give at least one"),
        *(([ROW, {k: v for k, v in ROW.items() if k != key}], f"Row 1 has no {key}")
          for key in ROW),
    ],
    "det_plot": [({}, "no curve to draw; give at least one")],
    "memory_bars": [
        ([], "no bar to draw; give at least one"),
        ([("a", "save", 1.0)], "'a' has the mode 'save'; modes are 'store'"),
        ([("a", "store", 0.0)], r"'a' in mode 'store' has 0\.0 bytes"),
        ([("a", "store", NAN)], "nan bytes"),
        ([("a", "store", 1.0), ("a", "store", 2.0)], "'a' has mode 'store' twice"),
    ],
    "memory_parts": [
        ([], "There is no bar"),
        (parts(activation=1.0), "'a' has a part 'activation'; parts are activations, held"),
        (parts(weights=-1.0), r"weights of 'a' has -1\.0 bytes"),
        (parts(weights=NAN), "weights of 'a' has nan bytes"),
        (parts(weights=0), "'a' has nothing to draw"),
    ],
    "time_by_batch": [
        ({}, "no panel"),
        ({"a": {}}, "'a' has no curve"),
        ({"a": {"b": {}}}, "'b' of 'a' has no points"),
        ({"a": {"b": {0: 1.0}}}, "a point of 0 utterances"),
    ],
    "time_against_memory": [
        ({"a": {"b": [(0.0, 1.0, "")]}}, "a point of 0.0 MiB"),
    ],
    "loss_curves": [
        ({}, "no curve"),
        ({"ours": []}, "'ours' of 'losses' has no points"),
        ({"ours": [1.0, 0.0]}, "'ours' of 'losses' has a point of 2 steps and 0.0"),
    ],
    "curves_over_seeds": [
        ({}, "no panel"),
        ({"loss": {}}, "'loss' has no curve"),
        ({"loss": {"a": []}}, "'a' of 'loss' has no points"),
        ({"loss": {"a": [[1.0], [1.0, 2.0]]}}, r"'a' of 'loss' have \[1, 2\] epochs"),
        ({"loss": {"a": [[1.0, NAN]]}}, "has nan in epoch 2"),
    ],
    "gradient_angles": [
        ({}, "no curve"),
        ({"a": []}, "'a' has no points"),
        ({"a": [(0, NAN)]}, "'a' has an angle of nan at step 0"),
        ({"a": [(3, 181.0)]}, "'a' has an angle of 181.0 at step 3"),
    ],
    "forest_plot": [
        ({}, "no panel"),
        ({"easy": (1.0, [])}, "no difference"),
        ({"easy": (1.0, ROWS), "hard": (1.0, ROWS[::-1])}, "'hard' has the labels"),
        ({"easy": (-1.0, ROWS)}, "margin of 'easy' is -1.0"),
    ],
    "reversible_step": [
        ({}, "no mode to draw"),
        ({"keep": ([1, 1], [1, 1])}, "has the mode 'keep'; modes are 'store'"),
        ({"store": ([1], [1, 1])}, r"has 1 moment\(s\); give at least 2"),
        ({"store": ([1, 1], [1, -1])}, "-1 bytes are alive"),
    ],
    "encoder_map": [
        ([], "no encoder to draw"),
        ([POINT, POINT], "'a' is there twice"),
        ([point(eer_percent=0.0)], r"eer_percent of 'a' is 0\.0"),
        ([point(peak_bytes=INF)], "peak_bytes of 'a' is inf"),
        ([point(recompute_bytes=0.0)], r"recompute_bytes of 'a' is 0\.0"),
    ],
    "by_parameters": [
        ([], "no encoder to draw"),
        ([sized(None, 1), sized(None, 1)], "'c' is there twice"),
        ([sized(INF, 1)], "planned_bytes of 'c' is inf"),
        ([sized(None, 0)], "largest_batch of 'c' is 0"),
    ],
    "plan_map": [
        (({}, {}), "There is no plan"),
        (({8: {"a": "store"}, 9: {"b": "store"}}, {8: 1, 9: 1}), "batch 9 is for b, "),
        (({8: {"a": "keep"}}, {8: 1}), "'a' in the plan of batch 8 has the mode 'keep'"),
        (({8: {"a": "store"}}, {}), "Batch 8 trains nan"),
        (({8: {"a": "store"}}, {8: INF}), "Batch 8 trains inf"),
        (({8: {"a": "store"}}, {8: 1, 9: 1}), "Batch 9 has a throughput but no plan"),
    ],
}  # fmt: skip
OPTIONS = {
    "training_curves": {},
    "det_plot": {},
    "memory_bars": {},
    "encoder_map": WORDS | MAP,
    "by_parameters": WORDS | {"total_batch": 256},
    "forest_plot": WORDS | {"unit": "%"},
}


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_be_drawn_is_refused_before_a_file_is_written(
    name, given, reason, tmp_path
):
    given = given if name == "plan_map" else (given,)
    draw, options = getattr(plots, name), OPTIONS.get(name, WORDS)
    with pytest.raises(ValueError, match=reason):
        draw(*given, tmp_path / "picture.png", **options)
    assert not list(tmp_path.iterdir())
