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


def statistics_one_by_one(embeddings, cohort, top_n):
    means, deviations = [], []
    for embedding in embeddings:
        scores = cosine(np.tile(embedding, (len(cohort), 1)), cohort)
        nearest = sorted(scores, reverse=True)[:top_n]
        means.append(np.mean(nearest))
        deviations.append(np.std(nearest))
    return np.array(means), np.array(deviations)


@pytest.mark.parametrize("top_n", [2, 5, 29, 30])
def test_statistics_equal_those_of_sorting_every_score(rng, monkeypatch, top_n):
    # Three rows a block, so that whole blocks and a last, shorter one are met.
    monkeypatch.setattr(MODULE, "_BLOCK_BYTES", 3 * 30 * 8)
    embeddings, cohort = rng.normal(size=(10, 8)), rng.normal(size=(30, 8))
    mean, std = cohort_statistics(embeddings, cohort, top_n=top_n)
    expected_mean, expected_std = statistics_one_by_one(embeddings, cohort, top_n)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-12)
    np.testing.assert_allclose(std, expected_std, rtol=1e-10)


def test_float32_statistics_are_within_float32_rounding_of_float64(rng):
    embeddings, cohort = rng.normal(size=(20, 256)), rng.normal(size=(900, 256))
    exact = cohort_statistics(embeddings, cohort)
    rounded = cohort_statistics(
        embeddings.astype(np.float32), cohort.astype(np.float32)
    )
    # A cosine of 256 float32 products: 256 roundings of 6e-8 at the very worst, in
    # practice their root.
    np.testing.assert_allclose(rounded[0], exact[0], atol=16 * 6e-8)
    np.testing.assert_allclose(rounded[1], exact[1], atol=16 * 6e-8)


def test_neither_the_length_of_embeddings_nor_the_order_of_the_cohort_matters(rng):
    embeddings, cohort = rng.normal(size=(4, 8)), rng.normal(size=(30, 8))
    other = cohort_statistics(embeddings * 7, cohort[::-1] * 0.1, top_n=9)
    expected = cohort_statistics(embeddings, cohort, top_n=9)
    np.testing.assert_allclose(other, expected, rtol=1e-12)


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
    with pytest.raises(
        ValueError, match=f"top_n is {top_n!r}, .* 30 speakers.*2 to 30"
    ):
        cohort_statistics(
            rng.normal(size=(3, 4)), rng.normal(size=(30, 4)), top_n=top_n
        )


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
    for row in range(20):
        by_enrol = (scores[row] - enrol_mean[row]) / enrol_std[row]
        by_test = (scores[row] - test_mean[row]) / test_std[row]
        assert normalised[row] == pytest.approx((by_enrol + by_test) / 2, rel=1e-12)
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
