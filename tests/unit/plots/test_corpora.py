import pytest

from speechbrain_rev.plots import corpus_histograms

WORDS = {"title": "T", "source": "S"}


def counts_of(axes):
    """The edges and heights of the bars that are there."""
    return [
        (bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height())
        for bar in axes.patches
        if bar.get_height()
    ]


@pytest.mark.parametrize("seconds", [[2.0], [0.25, 0.5, 8.0], [1.5] * 7, [1.0, 4000.0]])
def test_each_utterance_and_each_speaker_is_in_one_bar(drawn, seconds):
    utterances = [1, 1, 2, 500]
    left, right = drawn(corpus_histograms, seconds, utterances, **WORDS).axes
    for axes, values in ((left, seconds), (right, utterances)):
        bars = counts_of(axes)
        assert sum(height for *_, height in bars) == len(values)
        for value in values:
            assert any(low <= value <= high for low, high, _ in bars)
    assert left.get_xlabel() == "seconds of an utterance"
    assert right.get_ylabel() == "speakers"
