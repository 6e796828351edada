"""Archives of embeddings come back as they were saved, or are refused by name."""

import struct
import zipfile

import numpy as np
import pytest
import torch

from speechbrain_rev.inference import EmbeddingArchive
from speechbrain_rev.inference.archive import fingerprint_of

SUFFIXES = pytest.mark.parametrize("suffix", [".npz", ".parquet"])
ONES = np.ones((2, 3), np.float32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.npz"


@pytest.fixture
def tables():
    return pytest.importorskip("pyarrow")


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


@SUFFIXES
def test_rows_in_any_order_in_memory_come_back(tables, tmp_path, suffix):
    path, wide = tmp_path / f"some{suffix}", np.arange(24.0, dtype="f").reshape(4, 6)
    for rows in (wide[::2, ::3], np.asfortranarray(wide), wide[:, :1]):
        names = tuple("abcd"[: len(rows)])
        EmbeddingArchive(names, rows, "x").save(path)
        stored = EmbeddingArchive.load(path)
        assert (stored.names, stored.fingerprint, stored.sources) == (names, "x", ())
        assert np.array_equal(stored.embeddings, rows)
    # Who reads an .npz may change what was read.
    assert stored.embeddings.flags.writeable == (suffix == ".npz")


def test_parquet_has_columns_that_other_programs_read(tables, tmp_path):
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    EmbeddingArchive(("a", "b"), ONES, "one", ("s", "t")).save(path)
    table = parquet.read_table(path)
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds["name"] == kinds["source"] == "string"
    assert kinds["embedding"].startswith("fixed_size_list<")
    assert table["embedding"].to_pylist() == ONES.tolist()
    assert table.schema.metadata[b"fingerprint"] == b"one"


@SUFFIXES
def test_no_flipped_bit_of_an_archive_gives_other_embeddings(tables, tmp_path, suffix):
    path, messages = tmp_path / f"some{suffix}", []
    rows = np.arange(9, dtype=np.float32).reshape(3, 3) + 1
    EmbeddingArchive(("ann", "bob", "cid"), rows, "f00d").save(path)
    content = path.read_bytes()
    # The footer of a table has counts of three rows.
    length = int.from_bytes(content[-8:-4], "little") if suffix == ".parquet" else -8
    footer = len(content) - 8 - length
    flips = [(place, 1 << place % 8) for place in range(0, footer, 23)]
    flips += [(place, 4) for place in range(footer, len(content) - 8)]
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
    assert all(f"some{suffix} is no archive of" in words for words in messages)


def test_a_file_that_is_no_archive_is_refused(tables, path):
    for missing in (path, path.with_suffix(".parquet")):
        with pytest.raises(FileNotFoundError, match=r"extract\.py"):
            EmbeddingArchive.load(missing)
        for content in (b"", b"no zip", b"PAR1" * 20):
            missing.write_bytes(content)
            refused(missing, "embed again")


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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": ["a", None]}, "the name of row 1 is missing"),
        ({"name": ["a", "b\0"]}, "column name has a text with a NUL"),
        ({"name": [1, 2]}, "column name is of int64, not of texts"),
        ({"source": ["s", None]}, "2 names for 1 sources"),
        ({"embedding": "no lists"}, "are string, not lists of float32"),
        # pyarrow before 26 refuses the file itself.
        ({"embedding": [None, [1.0] * 3]}, "(an embedding, or a number|of size=3)"),
        ({"embedding": [[1.0, None, 1.0]] * 2}, "an embedding, or a number of one"),
        ({"embedding": [[float("nan")] * 3] * 2}, "of 'a' holds NaN"),
        ({"metadata": {}}, "fingerprint"),
        ({"metadata": {b"fingerprint": b"\xff"}}, "utf-8"),
    ],
)
def test_other_tables_are_refused(tables, tmp_path, changed, words):
    from pyarrow import parquet

    columns = {"name": ["a", "b"], "embedding": ONES.tolist(), "source": ["s", "t"]}
    columns |= {"metadata": {b"fingerprint": b"x"}} | changed
    metadata, rows = columns.pop("metadata"), columns["embedding"]
    if isinstance(rows, list):
        kind = tables.list_(tables.float32(), 3)
        columns["embedding"] = tables.array(rows, kind)
    else:
        columns["embedding"] = [rows] * 2
    path = tmp_path / "some.parquet"
    table = tables.table(columns).replace_schema_metadata(metadata)
    parquet.write_table(table, path)
    refused(path, words)
