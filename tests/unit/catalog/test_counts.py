"""The committed counts are what a step really holds, and reading between them is safe."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog.table import BATCHES, FRAMES, MODES, Peak, counted_peaks
from speechbrain_rev.modes import LOSSLESS
from tests.benchmarks.counts import training_step_peak

PEAKS = counted_peaks()
STALE = (
    "The engine or an encoder stores something else than what is committed. If that is "
    "meant, count again: CONTRIBUTING.md says how."
)
#: One encoder of each block and transition, in each mode at one of the lengths.
SAMPLE = [
    ("resnet34", "store", 200),
    ("resnet34", "recompute", 600),
    ("resnet101", "store", 600),
    ("df_resnet56", "recompute", 200),
    ("revnet46", "reconstruct", 200),
    ("revnet57", "store", 600),
    ("revnet57", "recompute", 200),
    ("revnet57", "reconstruct", 600),
    ("revnet46", "recompute", 200),
    ("revnet140", "reconstruct", 600),
    ("revnet155", "reconstruct", 200),
    ("df_revnet66", "recompute", 600),
    ("df_revnet89", "store", 200),
    ("df_revnet89", "reconstruct", 600),
]


def recount(name, mode, frames, batch, **options):
    return training_step_peak(name, mode=mode, frames=frames, batch=batch, **options)


def test_every_encoder_is_counted_in_every_mode_that_it_has():
    expected = {
        (row.name, mode, frames)
        for row, mode, frames in itertools.product(
            ARCHITECTURES.values(), MODES, FRAMES
        )
        if row.reversible or mode != "reconstruct"
    }
    assert set(PEAKS) == expected
    # What is compressed takes bytes that depend on the data.
    assert set(MODES) == {mode.value for mode in LOSSLESS}
    assert {peak.batches for peak in PEAKS.values()} == {BATCHES}


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_recount_finds_the_committed_bytes(case):
    assert recount(*case, 2) == PEAKS[case](2), STALE


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_recount_of_everything_finds_the_committed_bytes(name):
    cases = [case for case in PEAKS if case[0] == name]
    assert {case: recount(*case, 64) for case in cases} == {
        case: PEAKS[case](64) for case in cases
    }, STALE


# Parameter gradients make the peak of revnet126, recomputed, at this batch.
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("resnet34", "store"),
        ("revnet126", "recompute"),
        ("revnet57", "reconstruct"),
        pytest.param("resnet34", "recompute", marks=pytest.mark.slow),
        pytest.param("df_revnet66", "reconstruct", marks=pytest.mark.slow),
    ],
)
def test_a_step_on_the_cpu_holds_the_committed_bytes(name, mode):
    real = recount(name, mode, 200, 2, device="cpu")
    assert real == PEAKS[name, mode, 200](2)


# Parameter gradients make the peak of the second at small batches, not at large ones.
@pytest.mark.parametrize(
    "case",
    [
        ("resnet34", "store", 200),
        ("revnet126", "recompute", 200),
        pytest.param(("revnet46", "reconstruct", 200), marks=pytest.mark.slow),
        pytest.param(("df_revnet89", "store", 200), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_read_off_between_and_beyond_the_counts_is_never_below_a_count(case):
    for batch in (3, 96):
        assert recount(*case, batch) <= PEAKS[case](batch)
    assert recount(*case, 700) == PEAKS[case](700)


@pytest.mark.parametrize("case", PEAKS, ids=str)
def test_peaks_are_convex_in_the_batch_from_two_on(case):
    points = list(zip(BATCHES, PEAKS[case].peak_bytes, strict=True))[1:]
    slopes = [
        (high - low) / (many - few)
        for (few, low), (many, high) in itertools.pairwise(points)
    ]
    assert slopes == sorted(slopes)
    # The last is reached, or what lies beyond would be read off too low.
    assert slopes[-1] == pytest.approx(slopes[-2], rel=1e-3)


moments = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(1, 10**8)), min_size=1, max_size=5
)


@given(moments, st.integers(2, 256))
def test_a_peak_is_safe_between_the_counts_of_any_step(moments, batch):
    """A moment of a step holds a constant and so much for each utterance."""

    def held(batch):
        return max(constant + slope * batch for constant, slope in moments)

    peak = Peak(BATCHES, [held(batch) for batch in BATCHES])
    assert held(batch) <= peak(batch)
    if batch in BATCHES:
        assert held(batch) == peak(batch)
    if len(moments) == 1:
        assert (peak(batch), peak(9999)) == (held(batch), held(9999))
        assert peak.bytes_per_utterance == moments[0][1]


def test_counting_refuses_what_does_not_exist():
    with pytest.raises(ValueError, match="Did you mean revnet57"):
        recount("revnet58", "store", 200, 2)
    with pytest.raises(ValueError, match="resnet34 has no reversible blocks"):
        recount("resnet34", "reconstruct", 200, 2)
