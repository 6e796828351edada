"""Pictures show what tables do, in the format of the file's ending."""

import dataclasses

import pytest

from speechbrain_rev.catalog import Training, pictures, select
from speechbrain_rev.sizes import GIB

CARD = Training(8 * GIB, batch=128, frames=200)


@pytest.fixture
def drawn(monkeypatch):
    """Draw nothing; give what would be drawn, and its words."""
    calls = []
    for name in ("encoder_map", "memory_parts", "plan_map"):
        monkeypatch.setattr(
            pictures, name, lambda *given, **words: calls.append((given, words))
        )

    def draw(function, shown, *given):
        function(shown, "a.png", *given)
        (*what, path), words = calls[-1]
        assert path == "a.png"
        return *what, words

    return draw


def test_points_are_the_counted_peaks_in_the_default_mode_at_published_eer(drawn):
    models = [each for each in select(CARD) if each.row.vox1_h_eer is not None]
    points, words = drawn(pictures.draw_models, select(CARD))
    for model, point in zip(models, points, strict=True):
        row = model.row
        assert (point.name, point.counterpart) == (row.name, row.counterpart)
        assert point.eer_percent == row.vox1_h_eer
        assert point.peak_bytes == model.step_peak_bytes(row.default_mode)
        rival = None if row.reversible else model.step_peak_bytes("recompute")
        assert point.recompute_bytes == rival
    assert list(words["cards"]) == [8 * GIB, 11 * GIB, 24 * GIB]
    assert words["cards"][8 * GIB] == CARD.reserve_bytes


def test_the_words_have_batch_length_and_where_figures_are_from(drawn, uncounted):
    models = select(Training(None, batch=32, frames=600))
    points, words = drawn(pictures.draw_models, models)
    assert uncounted.name not in [point.name for point in points]
    assert list(words["cards"]) == [11 * GIB, 24 * GIB]
    assert "32 utterances of 6 s" in words["title"]
    assert words["eer_label"] == "published Vox1-H EER, %"
    assert "not reproduced" in words["source"]
    assert "meta tensors" in words["source"]


def test_the_picture_of_breakdowns_shows_the_parts(pairs, drawn):
    cases = [case for pair in pairs for case in pair]
    bars, words = drawn(pictures.draw_breakdowns, pairs)
    assert [bar.parts for bar in bars] == [case.report.parts for case in cases]
    assert [bar.group for bar in bars] == [case.name for case in cases]
    assert "64 utterances of 200 frames" in words["title"]
    assert words["source"].startswith("Counted on meta")


def test_the_picture_of_stages_has_a_bar_for_each(staged, drawn):
    bars, words = drawn(pictures.draw_stages, [staged])
    assert words["title"].endswith("200 frames")
    stages = [stage for case in staged for stage in case.stages]
    for bar, stage in zip(bars, stages, strict=True):
        assert bar.label == stage.name
        assert bar.parts["working"] == stage.working_bytes
        assert bar.parts["held"] == max(0, stage.held_bytes)
        assert bar.parts["optimizer_states"] == stage.optimizer_states_bytes
    assert bars[0].group == "resnet34, store, sgd 32 bit"
    assert bars[-1].group == "resnet34, store, sgd 8 bit"


def test_a_picture_has_the_format_of_its_ending_and_others_are_refused(pairs, tmp_path):
    formats = {"a.png": b"\x89PNG", "a.pdf": b"%PDF", "a.SVG": b"<?xml"}
    for name, begins in formats.items():
        pictures.draw_breakdowns(pairs[:1], tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)
    for name in ("models", "models.png.txt"):
        message = rf"--plot takes .*\.png, \.pdf or \.svg, not {name}\."
        with pytest.raises(ValueError, match=message):
            pictures.check_picture(name)


def test_a_batch_without_a_plan_is_left_white_and_named(swept, drawn):
    first, *plans = swept.sweep.plans
    ran_out = dataclasses.replace(first, modes={})
    sweep = dataclasses.replace(swept.sweep, plans=[ran_out, *plans])
    modes, speeds, words = drawn(
        pictures.draw_sweep, dataclasses.replace(swept, sweep=sweep)
    )
    assert (modes[16], list(speeds)) == ({}, [48, 80])
    assert "No plan fits batch 1000." in words["source"]
    assert "too little memory to time it, at 16" in words["source"]
