"""Archives of embeddings come back as they were saved, or are refused by name."""

import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from speechbrain_rev.inference import EmbeddingArchive
from speechbrain_rev.inference.archive import fingerprint_of

ONES = np.ones((2, 3), np.float32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.npz"


def refused(path, words):
    with pytest.raises(ValueError, match=rf"{path.name} is no archive .*{words}"):
        EmbeddingArchive.load(path)


def test_a_fingerprint_is_of_names_shapes_types_and_values_alone():
    a, b = torch.arange(6.0).reshape(2, 3), torch.tensor(3)
    same = {"b": b, "a": torch.nn.Parameter(a.T.contiguous().T)}
    others = [
        {"a": a},
        {"c": a, "b": b},
        {"a": a.reshape(3, 2), "b": b},
        {"a": a.view(torch.int32), "b": b},
        {"a": a + torch.eye(2, 3) * 1e-6, "b": b},
        {"a": a, "b": b, "c": torch.zeros(0)},
        {"a": a.to(torch.bfloat16), "b": b},
    ]
    assert fingerprint_of(same) == fingerprint_of({"a": a, "b": b})
    assert len({fingerprint_of(weights) for weights in [same, *others]}) == 8


def test_rows_in_any_order_in_memory_come_back(path):
    wide = np.arange(24.0, dtype="f").reshape(4, 6)
    for rows in (wide[::2, ::3], np.asfortranarray(wide), wide[:, :1]):
        names = tuple("abcd"[: len(rows)])
        EmbeddingArchive(names, rows, "x").save(path)
        stored = EmbeddingArchive.load(path)
        assert (stored.names, stored.fingerprint, stored.sources) == (names, "x", ())
        assert np.array_equal(stored.embeddings, rows)
    # Callers may change the embeddings that they have read.
    assert stored.embeddings.flags.writeable


def test_a_damaged_archive_is_refused_by_name(path):
    rows = np.arange(9, dtype=np.float32).reshape(3, 3) + 1
    EmbeddingArchive(("ann", "bob", "cid"), rows, "f00d").save(path)
    whole = path.read_bytes()
    values = whole.index(rows.tobytes())
    for place in range(values, values + rows.nbytes):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        refused(path, "Bad CRC-32")
    for length in range(0, len(whole), 23):
        path.write_bytes(whole[:length])
        refused(path, "only a part of one.*embed again")


def test_no_flipped_bit_of_an_archive_ends_in_another_error(path):
    EmbeddingArchive(("ann", "bob"), ONES, "f00d").save(path)
    whole, messages = path.read_bytes(), []
    for place in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            EmbeddingArchive.load(path)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > len(whole) / 7 / 4
    assert all(f"{path} is no archive of" in message for message in messages)


def test_a_file_that_is_no_archive_is_refused(path):
    with pytest.raises(FileNotFoundError, match=r"extract\.py"):
        EmbeddingArchive.load(path)
    for content in (b"no zip", b"PAR1" * 20, pickle.dumps({"names": ["a"]})):
        path.write_bytes(content)
        refused(path, r"it is no \.npz file.*embed again")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"names": ("a", "b")}, r"2 names for embeddings of shape \[1, 3\]"),
        ({"names": ("a\0",)}, "without NUL"),
        ({"names": (7,)}, "7 names no embedding: give texts"),
        ({"fingerprint": 7}, "a fingerprint is a text of printable"),
        ({"fingerprint": "x" * 501}, "a fingerprint is a text of printable"),
    ],
)
def test_what_a_file_would_not_give_back_is_refused(changed, words):
    given = {"names": ("a",), "embeddings": ONES[:1], "fingerprint": "x"}
    with pytest.raises(ValueError, match=words):
        EmbeddingArchive(**given | changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"embeddings": ONES.astype(">f4")}, r"of >f4, not \[n, dim\] of float32"),
        ({"embeddings": ONES[0]}, r"embeddings are \[3\] of float32"),
        ({"embeddings": ONES * np.float32("inf")}, "'a' holds NaN or infinity"),
        ({"names": ["a", "a"]}, "the name 'a' is there twice"),
        ({"names": ["a", ""]}, "'' names no embedding"),
        ({"names": [1.0, 2.0]}, "names are .* of float64, not .* of texts"),
        # Code points that no character has.
        ({"names": np.frombuffer(b"\xff" * 8, "<U1")}, ""),
        ({"names": None}, "names is not a file"),
        ({"fingerprint": ["x"]}, r"fingerprint are \[1\] of <U1"),
        ({"fingerprint": "x\x1b[2J"}, "a fingerprint is a text of printable"),
        ({"sources": ["s"]}, "2 names for 1 sources"),
    ],
)
def test_other_arrays_are_refused(path, changed, words):
    write_npz(path, **changed)
    refused(path, words)


def write_npz(path, **changed):
    """Write an archive of two rows with some arrays changed; None leaves one out."""
    arrays = {"names": ["a", "b"], "embeddings": ONES, "fingerprint": "x"}
    arrays |= {"sources": ["s", "t"], **changed}
    np.savez(path, **{name: a for name, a in arrays.items() if a is not None})


class Code:
    """An object whose pickle runs code where it is loaded."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


def test_code_in_an_archive_is_not_run(path):
    made = path.with_name("made")
    write_npz(path, names=np.array([Code(made), "b"], dtype=object))
    refused(path, "Object arrays cannot be loaded")
    assert not made.exists()


def test_an_array_larger_than_memory_is_refused(path):
    write_npz(path, embeddings=None)
    header = (
        b"{'fortran_order': False, 'descr': '<f4', 'shape': (2, 1000000000000000)}\n"
    )
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    with zipfile.ZipFile(path, "a") as members:
        members.writestr("embeddings.npy", array)
    refused(path, "Unable to allocate")
