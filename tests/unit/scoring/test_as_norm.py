"""AS-Norm: statistics of the cohort, speakers' means, and normalised scores."""

import importlib
import tracemalloc

import numpy as np
import pytest

from speechbrain_rev.scoring import as_norm, cohort_statistics, cosine, speaker_means

# The package's attribute of this name is the function.
MODULE = importlib.import_module("speechbrain_rev.scoring.as_norm")


@pytest.fixture
def rng():
    return np.random.default_rng(2)


@pytest.mark.parametrize("top_n", [2, 5, 29, 30])
def test_statistics_equal_those_of_sorting_every_score(rng, monkeypatch, top_n):
    # Three rows a block, so that whole blocks and a last, shorter one are met.
    monkeypatch.setattr(MODULE, "_BLOCK_BYTES", 3 * 30 * 8)
    embeddings, cohort = rng.normal(size=(10, 8)), rng.normal(size=(30, 8))
    # Neither the length of embeddings nor the order of the cohort matters.
    mean, std = cohort_statistics(embeddings * 7, cohort[::-1] * 0.1, top_n=top_n)
    for row, embedding in enumerate(embeddings):
        scores = cosine(np.tile(embedding, (len(cohort), 1)), cohort)
        nearest = sorted(scores, reverse=True)[:top_n]
        assert mean[row] == pytest.approx(np.mean(nearest), rel=1e-12)
        assert std[row] == pytest.approx(np.std(nearest), rel=1e-10)


def test_float32_statistics_are_within_float32_rounding_of_float64(rng):
    given = rng.normal(size=(20, 256)), rng.normal(size=(900, 256))
    exact = cohort_statistics(*given)
    rounded = cohort_statistics(*(each.astype(np.float32) for each in given))
    # A cosine of 256 float32 products: 256 roundings of 6e-8 at the very worst, in
    # practice their root.
    np.testing.assert_allclose(rounded, exact, atol=16 * 6e-8)


def test_memory_does_not_grow_with_the_embeddings(rng):
    cohort = rng.normal(size=(18_000, 16)).astype(np.float32)
    embeddings = rng.normal(size=(3_000, 16)).astype(np.float32)
    tracemalloc.start()
    cohort_statistics(embeddings, cohort)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All scores at once would be 216 MB; two blocks of 32 MiB and the cohort are less.
    assert peak < 100e6


@pytest.mark.parametrize("top_n", [0, 1, 31, 2.5, 10**30, True, "5"])
def test_a_top_n_the_cohort_cannot_give_is_refused_not_clamped(rng, top_n):
    embeddings, cohort = rng.normal(size=(3, 4)), rng.normal(size=(30, 4))
    message = f"top_n is {top_n!r}, .* 30 speakers.*2 to 30"
    with pytest.raises(ValueError, match=message):
        cohort_statistics(embeddings, cohort, top_n=top_n)


@pytest.mark.parametrize(
    ("embeddings", "cohort", "message"),
    [
        ([[1.0, 2.0]], [[1.0]] * 9, "2 dimensions but the cohort has 1"),
        ([[0.0, 0.0]], [[1.0, 2.0]] * 9, r"embeddings\[0\] of 1 holds zeros only"),
        ([[1.0, 2.0]], [[1.0, np.nan]] * 9, r"cohort\[0\] \(and 8 more\)"),
        ([[1.0, 2.0]], [[0.3, 0.7]] * 9, r"embeddings\[0\] scores alike"),
    ],
)
def test_bad_embeddings_and_cohorts_are_refused(embeddings, cohort, message):
    with pytest.raises(ValueError, match=message):
        cohort_statistics(embeddings, cohort, top_n=2)


def test_speaker_means_weigh_utterances_alike_whatever_their_length(rng, monkeypatch):
    monkeypatch.setattr(MODULE, "_BLOCK_BYTES", 7 * 5 * 8)
    embeddings = rng.normal(size=(40, 5)) * rng.uniform(0.1, 10, size=(40, 1))
    speakers = [f"id{number}" for number in rng.integers(0, 6, size=40)]
    names, means = speaker_means(embeddings, speakers)
    assert list(names) == sorted(set(speakers))
    for name, mean in zip(names, means, strict=True):
        mine = embeddings[np.array(speakers) == name]
        directions = mine / np.linalg.norm(mine, axis=1, keepdims=True)
        np.testing.assert_allclose(mean, directions.mean(axis=0), rtol=1e-12)
    with pytest.raises(ValueError, match="embeddings 40, speakers 39"):
        speaker_means(embeddings, speakers[:-1])


def test_as_norm_averages_the_z_scores_of_both_sides(rng):
    scores, enrol_mean, test_mean = rng.normal(size=(3, 20))
    enrol_std, test_std = rng.uniform(0.1, 1, size=(2, 20))
    normalised = as_norm(scores, enrol_mean, enrol_std, test_mean, test_std)
    z_scores = (scores - enrol_mean) / enrol_std, (scores - test_mean) / test_std
    np.testing.assert_allclose(normalised, np.mean(z_scores, axis=0), rtol=1e-12)
    swapped = as_norm(scores, test_mean, test_std, enrol_mean, enrol_std)
    np.testing.assert_array_equal(swapped, normalised)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enrol_std": [0.1, 0.0]}, r"enrol_std\[1\] is 0.0"),
        ({"test_std": [-1.0, 1.0]}, r"test_std\[0\] is -1.0"),
        ({"test_mean": [0.1]}, "scores 2, .*test_mean 1"),
        ({"scores": [np.nan, 1.0]}, r"scores\[0\] of 2 holds NaN"),
        ({"enrol_mean": [[0.1], [0.2]]}, r"enrol_mean has shape \[2, 1\]"),
    ],
)
def test_statistics_that_cannot_normalise_are_refused(change, message):
    names = ("scores", "enrol_mean", "enrol_std", "test_mean", "test_std")
    arguments = {name: [0.1, 0.2] for name in names}
    with pytest.raises(ValueError, match=message):
        as_norm(**(arguments | change))
