"""Archives of embeddings come back as they were saved, or are refused by name."""

import struct
import zipfile

import numpy as np
import pytest
import torch

from speechbrain_rev.inference import EmbeddingArchive
from speechbrain_rev.inference.archive import fingerprint_of

SUFFIXES = [".npz", ".parquet"]


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
    same = [
        {"b": b, "a": a},
        {"a": a.T.contiguous().T, "b": b},
        {"a": torch.nn.Parameter(a.clone()), "b": b},
    ]
    others = [
        {},
        {"a": a},
        {"c": a, "b": b},
        {"a": a.reshape(3, 2), "b": b},
        {"a": a.view(torch.int32), "b": b},
        {"a": a + torch.eye(2, 3) * 1e-6, "b": b},
        {"a": a, "b": torch.tensor([3])},
        {"a": a, "b": b, "c": torch.zeros(0)},
        *({"a": a.to(kind)} for kind in (torch.bfloat16, torch.bool, torch.float64)),
    ]
    assert len({fingerprint_of(weights) for weights in same}) == 1
    found = {fingerprint_of(weights) for weights in [same[0], *others]}
    assert len(found) == 1 + len(others)


def with_one(value):
    rows = np.ones((2, 3), np.float32)
    rows[1, 2] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (np.ones((2, 3)), r"\[2, 3\] of float64, not \[n, dim\] of float32"),
        (np.ones((2, 3), ">f4"), "of >f4, not"),
        (np.ones(2, np.float32), r"embeddings are \[2\] of float32"),
        (np.ones((2, 0), np.float32), r"embeddings are \[2, 0\] of float32"),
        (with_one(np.nan), "the embedding of 'b' holds NaN or infinity"),
    ],
)
def test_rows_of_anything_but_finite_float32_are_refused(path, rows, words):
    write_npz(path, embeddings=rows)
    refused(path, words)
    with pytest.raises(ValueError, match=words):
        EmbeddingArchive(("a", "b"), rows, "x")


@pytest.mark.parametrize(
    ("names", "fingerprint", "sources", "words"),
    [
        (("a", "b"), "x", (), r"2 names for embeddings of shape \[1, 2\]"),
        (("a",), "x", ("s", "t"), "1 names for 2 sources"),
        (("a\0",), "x", (), "without NUL"),
        ((7,), "x", (), "7 names no embedding: give texts"),
        (("a",), "a\n", (), "a fingerprint is a text of printable"),
        (("a",), "x" * 501, (), "a fingerprint is a text of printable"),
        (("a",), 7, (), "a fingerprint is a text of printable"),
    ],
)
def test_what_a_file_would_not_give_back_is_refused(names, fingerprint, sources, words):
    with pytest.raises(ValueError, match=words):
        EmbeddingArchive(names, np.ones((1, 2), np.float32), fingerprint, sources)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_in_any_order_in_memory_come_back_and_may_be_changed(
    tables, tmp_path, suffix
):
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)
    for rows in (wide.T[:4], wide[::2, ::3], np.asfortranarray(wide), wide[:, :1]):
        names = tuple("abcdef"[: len(rows)])
        EmbeddingArchive(names, rows, "x").save(tmp_path / f"some{suffix}")
        found = EmbeddingArchive.load(tmp_path / f"some{suffix}")
        assert (found.names, found.fingerprint, found.sources) == (names, "x", ())
        assert np.array_equal(found.embeddings, rows)
    EmbeddingArchive(("a",), rows[:1], "x").save(tmp_path / "a.npz")
    loaded = EmbeddingArchive.load(tmp_path / "a.npz").embeddings
    loaded += 1
    assert np.array_equal(loaded, rows[:1] + 1)


def test_parquet_has_columns_that_other_programs_read(tables, tmp_path):
    from pyarrow import parquet

    rows = np.eye(2, 3, dtype=np.float32)
    path = tmp_path / "rows.parquet"
    EmbeddingArchive(("a", "b"), rows, "one", ("s", "t")).save(path)
    table = parquet.read_table(path)
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds["name"] == kinds["source"] == "string"
    assert kinds["embedding"].startswith("fixed_size_list<")
    assert table["embedding"].to_pylist() == rows.tolist()
    assert table.schema.metadata[b"fingerprint"] == b"one"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_flipped_bit_of_an_archive_gives_other_embeddings(tables, tmp_path, suffix):
    path = tmp_path / f"some{suffix}"
    rows = np.arange(9, dtype=np.float32).reshape(3, 3) + 1
    EmbeddingArchive(("ann", "bob", "cid"), rows, "f00d").save(path)
    content, refused = path.read_bytes(), []
    # The footer of a table has counts of three rows.
    length = int.from_bytes(content[-8:-4], "little") if suffix == ".parquet" else -8
    footer = len(content) - 8 - length
    flips = [(place, 1 << place % 8) for place in range(0, footer, 3)]
    flips += [(place, 4) for place in range(footer, len(content) - 8)]
    for place, bit in flips:
        flipped = bytearray(content)
        flipped[place] ^= bit
        path.write_bytes(flipped)
        try:
            found = EmbeddingArchive.load(path)
        except ValueError as error:
            refused.append(str(error))
            continue
        assert len(found.names) == 3
        assert np.array_equal(found.embeddings, rows)
    assert len(refused) > len(flips) / 4
    assert all(
        f"some{suffix} is no archive of embeddings" in words for words in refused
    )


def test_a_file_that_is_no_archive_is_refused(tables, tmp_path, path):
    for missing in (path, path.with_suffix(".parquet")):
        with pytest.raises(FileNotFoundError, match=r"extract\.py"):
            EmbeddingArchive.load(missing)
        for content in (b"", b"no zip", b"PAR1" * 20):
            missing.write_bytes(content)
            refused(missing, "embed again")
    with path.open("wb") as file:
        np.save(file, np.ones((2, 3)))
    refused(path, r"no \.npz file.* embed again")


def write_npz(path, **changed):
    """Write what an archive of two rows is, but for some arrays; None leaves one out."""
    arrays = {
        "names": ["a", "b"],
        "embeddings": np.ones((2, 3), np.float32),
        "fingerprint": "x",
        "sources": ["s", "t"],
        **changed,
    }
    np.savez(path, **{name: a for name, a in arrays.items() if a is not None})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"names": ["a", "a"]}, "the name 'a' is there twice"),
        ({"names": ["a", ""]}, "'' names no embedding"),
        ({"names": [1.0, 2.0]}, "names are .* of float64, not .* of texts"),
        ({"names": [["a"], ["b"]]}, r"names are \[2, 1\] of <U1"),
        # Code points that no character has.
        ({"names": np.frombuffer(b"\xff" * 8, "<U1")}, ""),
        ({"names": None}, r"it has no names\.npy"),
        ({"fingerprint": None}, r"it has no fingerprint\.npy"),
        ({"fingerprint": ["x"]}, r"fingerprint are \[1\] of <U1"),
        ({"fingerprint": "x\x1b[2J"}, "a fingerprint is a text of printable"),
        ({"sources": ["s"]}, "2 names for 1 sources"),
        ({"sources": [1, 2]}, "sources are .* of int64"),
    ],
)
def test_other_names_sources_and_fingerprints_are_refused(path, changed, words):
    write_npz(path)
    assert EmbeddingArchive.load(path).names == ("a", "b")
    write_npz(path, **changed)
    refused(path, words)


def with_header(shape, dtype="<f4", version=(1, 0)):
    """Write an array of 24 bytes whose header says what is given."""
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n"
    size = struct.pack("<H", len(header))
    return b"\x93NUMPY" + bytes(version) + size + header.encode() + bytes(24)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("member", "words"),
    [
        (with_header("(2, 2)"), r"embeddings are \[2, 2\] of float32 .* and 24 bytes"),
        (with_header(f"(2, {10**30})"), "embeddings are .* and 24 bytes"),
        (with_header("(2, -3)"), "embeddings are"),
        (with_header("(2, 3)", "|O"), "of object, not"),
        (with_header("(2, 3)", "<f99"), "descr"),
        (with_header("(2, 3)", version=(9, 9)), r"of version \(9, 9\)"),
        (b"", "EOF"),
    ],
    ids=map(str, range(7)),
)
def test_a_header_that_lies_is_refused(path, method, member, words):
    write_npz(path, embeddings=None)
    with zipfile.ZipFile(path, "a", method) as members:
        members.writestr("embeddings.npy", member)
    refused(path, words)


def test_two_arrays_of_one_name_are_refused(path):
    write_npz(path)
    with zipfile.ZipFile(path, "a") as members, pytest.warns(UserWarning, match="Dup"):
        members.writestr("embeddings.npy", with_header("(2, 3)"))
    refused(path, r"it has 2 embeddings\.npy")


def lists(last, kind="float32", size=3):
    """A column of two lists, of which the last is given."""
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.array([[1] * 3, last], pyarrow.list_(getattr(pyarrow, kind)(), size))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": ["a", "a"]}, "the name 'a' is there twice"),
        ({"name": ["a", None]}, "the name of row 1 is missing"),
        ({"name": ["a", "b\0"]}, "column name has a text with a NUL"),
        ({"name": [1, 2]}, "column name is of int64, not of texts"),
        ({"source": ["s", None]}, "2 names for 1 sources"),
        ({"embedding": None}, "embedding"),
        ({"embedding": ([1.0] * 3, "float64")}, "are fixed_size_list.*double"),
        ({"embedding": ([1.0, None, 1.0],)}, "an embedding, or a number of one"),
        ({"embedding": ([1.0, float("nan"), 1.0],)}, "of 'b' holds NaN"),
        ({"metadata": {}}, "fingerprint"),
        ({"metadata": {b"fingerprint": b"\xff"}}, "utf-8"),
    ],
)
def test_other_tables_are_refused(tables, tmp_path, changed, words):
    from pyarrow import parquet

    if isinstance(changed.get("embedding"), tuple):
        changed = {"embedding": lists(*changed["embedding"])}
    columns = {"name": ["a", "b"], "embedding": lists([1] * 3), "source": ["s", "t"]}
    columns |= {"metadata": {b"fingerprint": b"x"}, **changed}
    metadata = columns.pop("metadata")
    table = tables.table({n: c for n, c in columns.items() if c is not None})
    path = tmp_path / "some.parquet"
    parquet.write_table(table.replace_schema_metadata(metadata), path)
    refused(path, words)
