"""The picture of the table shows what the table says."""

import pytest

from speechbrain_rev.models import Training, picture, select
from speechbrain_rev.sizes import GIB

CARD = Training(8 * GIB, batch=128, frames=200)


@pytest.fixture
def drawn(monkeypatch):
    """Draw nothing; return what would be drawn."""
    calls = []
    monkeypatch.setattr(
        picture,
        "encoder_map",
        lambda points, path, **words: calls.append((points, words)),
    )

    def draw(models):
        picture.draw(models, "models.png")
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


def test_a_name_that_is_no_png_is_refused():
    with pytest.raises(ValueError, match=r"--plot takes .*\.png, not models\.pdf"):
        picture.draw(select(CARD), "models.pdf")
