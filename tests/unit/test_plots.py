import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import norm

from speechbrain_rev import plots
from speechbrain_rev.scoring import det_curve, eer

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn(figures, tmp_path):
    """Call a plot function; return its figure after checking that a PNG came out."""

    def draw(function, rows):
        path = tmp_path / "picture.png"
        function(rows, path)
        content = path.read_bytes()
        assert content.startswith(PNG)
        return figures[-1]

    return draw


def scored(trials, distance, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.append(rng.integers(0, 2, size=trials - 2), [0, 1])
    return rng.normal(size=trials) + distance * labels, labels


def texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.texts]


def test_det_curves_are_labelled_with_the_eer_that_scoring_computes(drawn):
    systems = {"cosine": scored(300, 2), "as_norm": scored(300, 3, seed=1)}
    figure = drawn(plots.det_plot, {name: det_curve(*s) for name, s in systems.items()})
    assert texts(figure) == [
        f"{name}: EER {100 * eer(*s):.2f} %" for name, s in systems.items()
    ]


def test_eer_marks_and_ticks_are_at_their_normal_deviates(drawn):
    scores, labels = scored(300, 2)
    (axes,) = drawn(plots.det_plot, {"ours": det_curve(scores, labels)}).axes
    (mark,) = [line for line in axes.lines if line.get_marker() == "o"]
    expected = norm.ppf(eer(scores, labels))
    np.testing.assert_allclose(mark.get_xydata(), [[expected, expected]], rtol=1e-9)
    for place, text in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        assert place == pytest.approx(norm.ppf(float(text.get_text()) / 100))
    assert axes.get_xlim() == axes.get_ylim()


def test_a_curve_of_voxceleb_size_is_thinned_without_moving_it(drawn):
    curve = det_curve(*scored(580_000, 4))
    (axes,) = drawn(plots.det_plot, {"ours": curve}).axes
    line = axes.lines[1].get_xydata()
    assert 100 < len(line) < 20_000
    # A pixel is 0.005 deviates.
    for rate in (0.002, 0.01, 0.05, 0.2):
        full = np.interp(rate, curve.miss, curve.false_alarm)
        shown = np.interp(norm.ppf(rate), line[:, 1], line[:, 0])
        assert shown == pytest.approx(norm.ppf(full), abs=2e-3)


@pytest.mark.parametrize("distance", [-3, 100])
def test_the_worst_and_the_best_systems_are_drawn_within_the_axes(drawn, distance):
    curve = det_curve(*scored(200, distance))
    (axes,) = drawn(plots.det_plot, {"ours": curve, "all tied": TIED}).axes
    low, high = axes.get_xlim()
    assert np.isfinite([low, high]).all()
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    tied = marks[1].get_xydata()
    assert np.all((tied >= low) & (tied <= high))


TIED = SimpleNamespace(false_alarm=np.array([1.0, 0.0]), miss=np.array([0.0, 1.0]))


@pytest.mark.parametrize(
    ("false_alarm", "miss"),
    [
        ([0.0, 1.0], [1.0, 0.0]),
        ([1.0, 0.5], [0.0, 1.0]),
        ([1.0, 0.2, 0.4, 0.0], [0.0, 0.1, 0.2, 1.0]),
        ([1.0, np.nan, 0.0], [0.0, 0.1, 1.0]),
        ([1.0, 0.0], [0.0, 0.5, 1.0]),
        ([1.0], [0.0]),
        ([], []),
    ],
)
def test_what_is_no_det_curve_is_refused_by_name(tmp_path, false_alarm, miss):
    curve = SimpleNamespace(false_alarm=np.array(false_alarm), miss=np.array(miss))
    with pytest.raises(ValueError, match=r"'ours' does not run .* scoring\.det_curve"):
        plots.det_plot({"ours": curve}, tmp_path / "det.png")


def epochs(count, **changes):
    return [
        {
            "epoch": n,
            "train_loss": 9.0 / n,
            "lr": 0.1**n,
            "margin": 0.1 * n,
            "valid_eer_percent": 30.0 / n,
        }
        | changes
        for n in range(1, count + 1)
    ]


def test_training_curves_show_each_quantity_by_epoch_in_order(drawn):
    rows = epochs(5)
    figure = drawn(plots.training_curves, rows[::-1])
    shown = {axes.get_ylabel(): axes.lines[0].get_xydata() for axes in figure.axes}
    for label, key in {
        "training loss": "train_loss",
        "validation EER, %": "valid_eer_percent",
        "learning rate": "lr",
        "margin, radians": "margin",
    }.items():
        expected = [(row["epoch"], row[key]) for row in rows]
        np.testing.assert_allclose(shown[label], expected)
    titles = [axes.get_title(loc="right") for axes in figure.axes]
    assert titles == ["", "lowest 6.00 % in epoch 5", "", ""]


@pytest.mark.parametrize("how", ["missing", "none"])
def test_a_run_without_validation_has_no_panel_for_it(drawn, how):
    rows = epochs(3, valid_eer_percent=None)
    if how == "missing":
        rows = [{k: v for k, v in row.items() if "eer" not in k} for row in rows]
    figure = drawn(plots.training_curves, rows)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["training loss", "learning rate", "margin, radians"]


def test_one_epoch_and_quantities_of_zero_or_fixed_can_be_drawn(drawn):
    fixed = {"lr": 0.0, "margin": 0.5, "valid_eer_percent": 0.0}
    *others, margin = drawn(plots.training_curves, epochs(1, **fixed)).axes
    assert len(others) == 3
    low, high = margin.get_xlim()
    assert [tick for tick in margin.get_xticks() if low <= tick <= high] == [1]
    low, high = margin.get_ylim()
    assert low < 0 < 0.5 < high < 1


@pytest.mark.parametrize("key", ["epoch", "train_loss", "lr", "margin"])
def test_a_row_without_a_quantity_is_refused_by_number(tmp_path, key):
    rows = epochs(3)
    del rows[1][key]
    with pytest.raises(ValueError, match=f"Row 1 has no {key}"):
        plots.training_curves(rows, tmp_path / "training.png")


@pytest.mark.parametrize(("largest", "unit"), [(8e7, "MB"), (1.2e9, "GB")])
def test_bars_are_as_long_as_the_bytes_in_the_unit_named(drawn, largest, unit):
    rows = [("resnet34", "store", 6e7), ("revnet57", "store", largest)]
    rows.append(("revnet57", "reconstruct", 2.3e7))
    figure = drawn(plots.memory_bars, rows)
    (axes,) = figure.axes
    divisor = {"MB": 1e6, "GB": 1e9}[unit]
    widths = [bar.get_width() for bar in axes.patches[: len(rows)]]
    np.testing.assert_allclose(widths, [size / divisor for _, _, size in rows])
    assert axes.get_xlabel() == f"training memory per utterance, {unit}"
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "resnet34",
        "revnet57",
    ]
    assert texts(figure) == ["store", "reconstruct"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a", "save", 1.0)], "mode of 'a' is 'save'; modes are 'store'"),
        ([("a", "store", 0.0)], r"'a' in mode 'store' has 0\.0 bytes"),
        ([("a", "store", np.nan)], "nan bytes"),
        ([("a", "store", 1.0), ("a", "store", 2.0)], "'a' has mode 'store' twice"),
    ],
)
def test_bars_without_a_meaning_are_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        plots.memory_bars(rows, tmp_path / "memory.png")


@pytest.mark.parametrize(
    ("function", "nothing"),
    [(plots.det_plot, {}), (plots.training_curves, []), (plots.memory_bars, [])],
)
def test_a_picture_of_nothing_is_refused(tmp_path, function, nothing):
    with pytest.raises(ValueError, match="to draw; give at least one"):
        function(nothing, tmp_path / "nothing.png")


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
