"""Archives of embeddings come back as they were saved, or are refused by name."""

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


def test_no_flipped_bit_of_an_archive_gives_other_embeddings(path):
    messages = []
    rows = np.arange(9, dtype=np.float32).reshape(3, 3) + 1
    EmbeddingArchive(("ann", "bob", "cid"), rows, "f00d").save(path)
    content = path.read_bytes()
    flips = [(place, 1 << place % 8) for place in range(0, len(content), 23)]
    for place, bit in flips:
        flipped = bytearray(content)
        flipped[place] ^= bit
        path.write_bytes(flipped)
        try:
            stored = EmbeddingArchive.load(path)
        except ValueError as error:
            messages.append(str(error))
        else:
            assert len(stored.names) == 3
            assert np.array_equal(stored.embeddings, rows)
    assert len(messages) > len(flips) / 4
    assert all(f"{path} is no archive of" in words for words in messages)


def test_a_file_that_is_no_archive_is_refused(path):
    with pytest.raises(FileNotFoundError, match=r"extract\.py"):
        EmbeddingArchive.load(path)
    for content in (b"", b"no zip", b"PAR1" * 20):
        path.write_bytes(content)
        refused(path, "embed again")


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
        ({"embeddings": ONES[:, :0]}, r"embeddings are \[2, 0\] of float32"),
        ({"embeddings": ONES * np.float32("inf")}, "'a' holds NaN or infinity"),
        ({"names": ["a", "a"]}, "the name 'a' is there twice"),
        ({"names": ["a", ""]}, "'' names no embedding"),
        ({"names": [1.0, 2.0]}, "names are .* of float64, not .* of texts"),
        # Code points that no character has.
        ({"names": np.frombuffer(b"\xff" * 8, "<U1")}, ""),
        ({"names": None}, r"it has no names\.npy"),
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


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("'<f4', 'shape': (2, 1000000000000)", "embeddings are .* and 24 bytes"),
        ("'<f4', 'shape': (2, -3)", "embeddings are"),
        ("'|O', 'shape': (2, 3)", "of object, not"),
        ("'<f99', 'shape': (2, 3)", "descr"),
        ("'<f4', 'shape': (2, 3)", r"of version \(9, 9\)"),
        ("", "EOF"),
    ],
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_that_lies_is_refused(path, method, header, words):
    text = f"{{'fortran_order': False, 'descr': {header}}}\n".encode()
    version = b"\x09\x09" if "version" in words else b"\x01\x00"
    array = b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + bytes(24)
    write_npz(path, embeddings=None)
    with zipfile.ZipFile(path, "a", method) as members:
        members.writestr("embeddings.npy", array if header else b"")
    refused(path, words)


def test_two_arrays_of_one_name_are_refused(path):
    write_npz(path)
    with zipfile.ZipFile(path, "a") as members, pytest.warns(UserWarning, match="Dup"):
        members.writestr("embeddings.npy", b"")
    refused(path, r"it has 2 embeddings\.npy")
