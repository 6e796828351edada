"""Cosines of rows and of trials, and embeddings without their mean."""

import importlib
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speechbrain_rev.scoring import cosine, cosine_trials, subtract_mean

# The package's attribute of this name is the function.
MODULE = importlib.import_module("speechbrain_rev.scoring.cosine")


@pytest.fixture
def rng():
    return np.random.default_rng(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_tensors_of_any_precision_score_as_torch_does_in_float64(rng, dtype):
    a, b = torch.tensor(rng.normal(size=(2, 50, 16))).to(dtype)
    expected = torch.nn.functional.cosine_similarity(a.double(), b.double())
    given_ = a.clone().requires_grad_()
    np.testing.assert_allclose(cosine(given_, b), expected.numpy(), rtol=1e-13)


@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.floats(1e-30, 1e30),
    dim=st.integers(1, 20),
)
@settings(max_examples=50, deadline=None)
def test_cosine_stays_within_one_and_ignores_length(seed, scale, dim):
    a, b = np.random.default_rng(seed).normal(size=(2, 4, dim))
    scores = cosine(a, b)
    assert np.all(np.abs(scores) <= 1.0)
    np.testing.assert_allclose(cosine(a * scale, b), scores, rtol=0, atol=1e-13)
    np.testing.assert_allclose(cosine(a, -b), -scores, rtol=0, atol=1e-13)
    assert cosine(a, a * scale).max() <= 1.0


def test_trials_by_row_number_score_as_the_gathered_pairs(rng, monkeypatch):
    monkeypatch.setattr(MODULE, "_TRIALS_PER_CHUNK", 7)
    embeddings, (enrol, test) = rng.normal(size=(20, 6)), rng.integers(0, 20, (2, 50))
    pairs = cosine(embeddings[enrol], embeddings[test])
    np.testing.assert_array_equal(cosine_trials(embeddings, enrol, test), pairs)


def test_memory_of_voxceleb_sized_trials_does_not_grow_with_their_number(rng):
    embeddings = rng.normal(size=(2_000, 256)).astype(np.float32)
    trials = 580_000
    enrol, test = rng.integers(0, len(embeddings), size=(2, trials))
    tracemalloc.start()
    scores = cosine_trials(embeddings, enrol, test)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(scores) == trials
    # Gathering both sides at once would take 1,188 MB.
    assert peak < 60e6


def test_centred_embeddings_have_the_mean_taken_away_and_keep_their_type(rng):
    embeddings = rng.normal(size=(10, 4)).astype(np.float32) + 3
    centred = subtract_mean(embeddings, embeddings.mean(axis=0))
    assert centred.dtype == np.float32
    np.testing.assert_allclose(centred.mean(axis=0), 0.0, atol=1e-6)
    with pytest.raises(ValueError, match="4 dimensions but mean has 3"):
        subtract_mean(embeddings, [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0, 3.0]], r"a has shape \[1, 2\] and b \[1, 3\]"),
        ([[1.0, 2.0]], [[1.0, 2.0]] * 2, "one row per trial"),
        ([1.0, 2.0], [1.0, 2.0], r"a has shape \[2\].*\[rows, dim\]"),
        ([[[1.0]]], [[[1.0]]], r"squeeze\(1\)"),
        (np.empty((0, 3)), np.empty((0, 3)), "at least one row"),
        ([[1.0], [0.0]], [[1.0], [1.0]], r"a\[1\] of 2 holds zeros only"),
        ([[1.0]] * 3, [[1.0], [np.nan], [np.inf]], r"b\[1\] \(and 1 more\) of 3.*NaN"),
        ([["x"]], [["y"]], "real numbers are needed"),
        ([[1.0], [1.0, 2.0]], [[1.0]], "a cannot be read as a numpy array"),
        (torch.ones(1, 2).bfloat16(), torch.ones(1, 2), r"float\(\)\.cpu\(\)"),
    ],
)
def test_embeddings_that_cannot_be_scored_are_refused_by_name(a, b, message):
    with pytest.raises(ValueError, match=message):
        cosine(a, b)


@pytest.mark.parametrize(
    ("enrol", "test", "message"),
    [
        ([0, 2], [0, 1], "enrol_rows reaches from 0 to 2, but .* rows 0 to 1"),
        ([0, 1], [0, -1], "test_rows reaches from -1 to 0"),
        ([0.0, 1.0], [0, 1], "enrol_rows .* array of integers"),
        ([0], [0, 1], "enrol_rows 1, test_rows 2"),
        ([], [], "at least one row number"),
    ],
)
def test_row_numbers_that_mean_nothing_are_refused(enrol, test, message):
    with pytest.raises(ValueError, match=message):
        cosine_trials([[1.0], [2.0]], enrol, test)
