"""What all pictures share: names beside points, what is refused, and matplotlib's door."""

import subprocess
import sys
from dataclasses import replace

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
    with pytest.raises(ImportError, match="pip install --force-reinstall matplotlib"):
        plots.memory_parts(parts(weights=1.0), tmp_path / "a.png", title="", source="")


NAN, INF = float("nan"), float("inf")
POINT = EncoderPoint("a", "resnet", "vanilla", 1.0, 1e9)
ROW = {"epoch": 1, "train_loss": 1.0, "lr": 0.1, "margin": 0.0}
ROWS = [Difference(name, 0.1, -0.4, 0.6, 0.5, shown=True) for name in "ab"]


SIZED = SizedEncoder("c", "revnet", "I", 1, 1.0, 1.0, 1.0, 0)


def parts(**sizes):
    return [PartsBar("a", "b", sizes)]


#: For each picture what it refuses beside nothing, and the reason.
REFUSED = {
    "training_curves": [
        ([ROW, {k: v for k, v in ROW.items() if k != key}], f"Row 1 has no {key}")
        for key in ROW
    ],
    "det_plot": [],
    "memory_by_depth": [
        (({"save": (1.0, 1.0)}, {"store": {8: 1.0}}), "has the mode 'save'; modes are 'store'"),
        (({"store": (0.0, 1.0)}, {"store": {8: 1.0}}), r"'store' of 'a step' has a point of 0\.0"),
        (({"store": (1.0, 1.0)}, {"store": {}}), "'store' of 'memory against depth' has no points"),
    ],
    "memory_parts": [
        (parts(activation=1.0), "'a' has a part 'activation'; parts are activations, held"),
        (parts(weights=-1.0), r"weights of 'a' has -1\.0 bytes"),
        (parts(weights=0), "'a' has nothing to draw"),
    ],
    "time_by_batch": [
        ({"a": {}}, "'a' has no curve"),
        ({"a": {"b": {}}}, "'b' of 'a' has no points"),
        ({"a": {"b": {0: 1.0}}}, "a point of 0 utterances"),
    ],
    "time_against_memory": [({"a": {"b": [(0.0, 1.0, "")]}}, "a point of 0.0 MiB")],
    "loss_curves": [
        ({"ours": []}, "'ours' of 'losses' has no points"),
        ({"ours": [1.0, 0.0]}, "'ours' of 'losses' has a point of 2 steps and 0.0"),
    ],
    "curves_over_seeds": [
        ({"loss": {}}, "'loss' has no curve"),
        ({"loss": {"a": []}}, "'a' of 'loss' has no points"),
        ({"loss": {"a": [[1.0], [1.0, 2.0]]}}, r"'a' of 'loss' have \[1, 2\] epochs"),
        ({"loss": {"a": [[1.0, NAN]]}}, "has nan in epoch 2"),
    ],
    "gradient_angles": [
        ({"a": []}, "'a' has no points"),
        ({"a": [(3, 181.0)]}, "'a' has an angle of 181.0 at step 3"),
    ],
    "forest_plot": [
        ({"easy": (1.0, [])}, "no difference"),
        ({"easy": (1.0, ROWS), "hard": (1.0, ROWS[::-1])}, "'hard' has the labels"),
        ({"easy": (-1.0, ROWS)}, "margin of 'easy' is -1.0"),
    ],
    "reversible_step": [
        ({"keep": ([1, 1], [1, 1])}, "has the mode 'keep'; modes are 'store'"),
        ({"store": ([1], [1, 1])}, r"has 1 moment\(s\); give at least 2"),
        ({"store": ([1, 1], [1, -1])}, "-1 bytes are alive"),
    ],
    "encoder_map": [
        ([POINT, POINT], "'a' is there twice"),
        ([replace(POINT, eer_percent=0.0)], r"eer_percent of 'a' is 0\.0"),
        ([replace(POINT, peak_bytes=INF)], "peak_bytes of 'a' is inf"),
    ],
    "by_parameters": [([SIZED, SIZED], "largest_batch of 'c' is 0")],
    "plan_map": [
        (({8: {"a": "store"}, 9: {"b": "store"}}, {8: 1, 9: 1}), "batch 9 is for b, "),
        (({8: {"a": "keep"}}, {8: 1}), "'a' in the plan of batch 8 has the mode 'keep'"),
        (({8: {"a": "store"}}, {}), "Batch 8 trains nan"),
        (({8: {"a": "store"}}, {8: 1, 9: 1}), "Batch 9 has a throughput but no plan"),
    ],
}  # fmt: skip
WITHOUT_WORDS = "training_curves", "det_plot"
OF_TWO = "plan_map", "memory_by_depth"
OPTIONS = {
    "encoder_map": {"eer_label": "E", "memory_label": "M", "cards": {}},
    "by_parameters": {"total_batch": 256},
    "forest_plot": {"unit": "%"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_is_refused_before_a_file_is_written(name, tmp_path):
    words = {} if name in WITHOUT_WORDS else {"title": "T", "source": "S"}
    nothing = ({}, {}) if name in OF_TWO else {}
    for given, reason in (*REFUSED[name], (nothing, "give at least one|has no curve")):
        given = given if name in OF_TWO else (given,)
        with pytest.raises(ValueError, match=reason):
            getattr(plots, name)(
                *given, tmp_path / "a.png", **words, **OPTIONS.get(name, {})
            )
    assert not list(tmp_path.iterdir())
