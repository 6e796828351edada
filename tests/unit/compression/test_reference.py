"""The stream of compressed activations, made once more in plain Python."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speechbrain_rev.compression import Form, decode, encode, reference
from speechbrain_rev.planner.memory import live_bytes_peak
from tests.unit.compression.values import FLOATS, KINDS, values


def blocks_of(codes):
    words, widths = [], []
    for at in range(0, len(codes), 32):
        block = codes[at : at + 32]
        width = max(block).bit_length()
        widths.append(width)
        words.extend(
            sum((code >> bit & 1) << lane for lane, code in enumerate(block))
            for bit in range(width)
        )
    return words, widths


def single(number):
    return struct.unpack("f", struct.pack("f", number))[0]


def written_in_plain_python(x, scale):
    """Make both forms, as the reference documents them."""
    _, inverse, _ = scale.tolist()
    q = [
        int(math.copysign(max(1, math.ceil(single(abs(v) * inverse))), v)) if v else 0
        for v in x.tolist()
    ]
    mask = [
        sum((v != 0) << lane for lane, v in enumerate(q[at : at + 32]))
        for at in range(0, len(q), 32)
    ]
    some = [v for v in q if v]
    if any(v < 0 for v in q):
        sparse = [2 * (abs(v) - 1) + (v < 0) for v in some]
    else:
        sparse = [v - 1 for v in some]
    k = q if 0 in q else [v - (v > 0) for v in q]
    bases = [min(k[at : at + 32]) for at in range(0, len(k), 32)]
    dense = [v - bases[at // 32] for at, v in enumerate(k)]
    zigzag = [2 * b if b >= 0 else -2 * b - 1 for b in bases]
    return {
        Form.SPARSE: (mask, *blocks_of(sparse)),
        Form.DENSE: (*blocks_of(dense), *blocks_of(zigzag)),
    }


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([k for k in KINDS if k != "bits"]), st.integers(1, 1500),
    st.integers(0, 1000), st.sampled_from([0.3, 0.01, 1e-3, 1e-5]), st.sampled_from(FLOATS),
)  # fmt: skip
def test_stream_and_size_are_as_documented(kind, size, seed, bound, dtype):
    x = values(kind, size, dtype, seed, bound)
    bound *= float(x.abs().max())
    if not 0 < bound < float("inf"):
        return
    counted = reference.statistics(x)
    scale = reference.scale_of(counted, torch.tensor(bound).double(), dtype)
    if not scale[0] > 0:
        assert encode(x, bound).reason == "bound below precision"
        return
    expected = written_in_plain_python(x, scale)
    nonzeros = int((x != 0).sum())
    sparse, dense, base = reference.sizes(x, scale, counted).tolist()
    made = {
        Form.SPARSE: reference.pack_sparse(x, scale, counted, nonzeros, sparse),
        Form.DENSE: reference.pack_dense(x, scale, counted, dense, base),
    }
    for form, parts in made.items():
        words = [[word & 0xFFFFFFFF for word in part.tolist()] for part in parts]
        assert words == list(expected[form])
    nbytes = {form: sum(p.nbytes for p in parts) for form, parts in made.items()}
    compressed = encode(x, bound)
    assert compressed.nbytes == min(*nbytes.values(), x.nbytes)
    assert compressed.nbytes == nbytes.get(compressed.form, x.nbytes)
    assert (compressed.nonzeros, compressed.values) == (nonzeros, size)


@pytest.mark.parametrize("slice_size", [1024, 4096])
@pytest.mark.parametrize("kind", ["relu", "sparse", "normal"])
def test_slices_change_no_bits(monkeypatch, kind, slice_size):
    x = values(kind, 9 * 1024 + 77, torch.float32, 0)
    expected = encode(x, 0.01)
    whole = decode(expected)
    monkeypatch.setattr(reference, "SLICE", slice_size)
    sliced = encode(x, 0.01)
    for one, other in zip(sliced.payload, expected.payload, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(decode(sliced), whole)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("relu", torch.float32), ("normal", torch.bfloat16)], ids=str
)
def test_memory_in_between_is_small(monkeypatch, kind, dtype):
    monkeypatch.setattr(reference, "SLICE", 2**11)
    x = values(kind, 2**16, dtype, 0)
    kept = []
    peak = live_bytes_peak(lambda: kept.append(encode(x, 0.1)))
    (compressed,) = kept
    assert compressed.form is not Form.RAW
    assert peak <= compressed.nbytes + 60 * 2**11
    peak = live_bytes_peak(lambda: decode(compressed))
    # Blocks' starts are 8 bytes of 32 values.
    assert peak <= x.nbytes + 3 * 8 * len(x) // 32 + 60 * 2**11
