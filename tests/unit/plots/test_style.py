"""What all pictures share: title, legend, source, the file, and matplotlib's door."""

import subprocess
import sys

import matplotlib
import pytest

from speechbrain_rev import plots
from speechbrain_rev.plots.style import picture
from tests.pictures import texts_of


def test_the_legend_has_each_label_once_below_the_title_and_the_source_fits(
    figures, tmp_path
):
    before = dict(matplotlib.rcParams)
    with picture(
        tmp_path / "a.png", 4, 3, title="T", source="a source " * 40
    ) as figure:
        for axes in figure.subplots(2, 1):
            axes.plot([1, 2], label="ours")
    (legend,) = figure.legends
    assert (legend.get_title().get_text(), texts_of(legend.texts)) == ("T", ["ours"])
    figure.draw_without_rendering()
    for shown in (legend, figure._supxlabel):
        assert 0 <= shown.get_window_extent().x0 <= shown.get_window_extent().x1
        assert shown.get_window_extent().x1 <= figure.bbox.width
    # The caller's settings are as they were.
    assert dict(matplotlib.rcParams) == before


def test_where_drawing_fails_no_file_is_written(tmp_path):
    with pytest.raises(KeyError), picture(tmp_path / "a.png", 4, 3):
        raise KeyError
    assert not list(tmp_path.iterdir())


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
        ("plan_map", [{8: {}}, {}], {}),
    ],
)
def test_where_nothing_is_left_to_draw_no_file_is_written(
    name, given, options, tmp_path
):
    with pytest.raises(ValueError, match="to draw; give at least one"):
        getattr(plots, name)(*given, tmp_path / "a.png", title="", source="", **options)
    assert not list(tmp_path.iterdir())
