"""Pictures show what tables say, in the format of the file's ending."""

import pytest

from speechbrain_rev.architectures import ARCHITECTURES, Architecture
from speechbrain_rev.catalog import Training, pictures, select
from speechbrain_rev.catalog.breakdown import before_and_after
from speechbrain_rev.sizes import GIB

CARD = Training(8 * GIB, batch=128, frames=200)


@pytest.fixture
def drawn(monkeypatch):
    """Draw nothing; return what would be drawn."""
    calls = []
    monkeypatch.setattr(
        pictures,
        "encoder_map",
        lambda points, path, **words: calls.append((points, words)),
    )

    def draw(models):
        pictures.draw_models(models, "models.png")
        return calls[-1]

    return draw


def test_points_are_the_counted_peaks_in_the_default_mode_at_published_eer(drawn):
    models = select(CARD)
    points, _ = drawn(models)
    for model, point in zip(models, points, strict=True):
        assert point.name == model.row.name
        assert point.eer_percent == model.row.vox1_h_eer
        assert point.counterpart == model.row.counterpart
        mode = "reconstruct" if model.row.reversible else "store"
        assert point.peak_bytes == model.step_peak_bytes(mode)
        rival = None if model.row.reversible else model.step_peak_bytes("recompute")
        assert point.recompute_bytes == rival


def test_cards_of_11_and_24_gib_and_the_one_asked_for_have_a_line(drawn):
    _, words = drawn(select(CARD))
    assert list(words["cards"]) == [8 * GIB, 11 * GIB, 24 * GIB]
    assert words["cards"][8 * GIB] == CARD.reserve_bytes
    _, words = drawn(select(Training(None, batch=128, frames=200)))
    assert list(words["cards"]) == [11 * GIB, 24 * GIB]


def test_the_words_say_batch_length_and_where_figures_are_from(drawn):
    _, words = drawn(select(Training(None, batch=32, frames=600)))
    assert "32 utterances of 6 s" in words["title"]
    assert words["eer_label"] == "published Vox1-H EER, %"
    assert "GiB" in words["memory_label"]
    assert "not reproduced" in words["source"]
    assert "meta tensors" in words["source"]


def test_an_encoder_without_a_rate_or_a_count_is_no_point(drawn, monkeypatch):
    bare = Architecture(
        "revnet61", "revnet", "II", "basic", (48, 96, 192, 300), (2, 3, 6, 3), 61, 1
    )
    monkeypatch.setitem(ARCHITECTURES, bare.name, bare)
    points, _ = drawn(select(CARD))
    assert len(points) == 25
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["models.jpg", "models", "models.png.txt"])
def test_another_ending_is_refused_with_those_that_there_are(name):
    message = rf"--plot takes .*\.png, \.pdf or \.svg, not {name}\."
    with pytest.raises(ValueError, match=message):
        pictures.draw_models(select(CARD), name)


@pytest.mark.parametrize(
    ("name", "begins"),
    [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.SVG", b"<?xml")],
)
def test_a_picture_has_the_format_of_its_ending(name, begins, tmp_path):
    encoders = [before_and_after("resnet34", batch=64, frames=200)]
    pictures.draw_breakdowns(encoders, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
