import contextlib
import os
import struct
import zipfile

import numpy as np
import pytest
import torch

from speechbrain_rev.inference import (
    EmbeddingArchive,
    SpeakerEmbedder,
    embed_into,
    embed_share,
    extraction,
    running,
)
from speechbrain_rev.whole_files import opened_whole
from tests.run_folders import speech_like, write_audio


class Counting(torch.nn.Module):
    """Embeds an utterance as its first samples; counts the utterances it has seen."""

    seen = 0

    def forward(self, waves, samples):
        self.seen += len(waves)
        return waves[:, :4].unsqueeze(1)


@pytest.fixture
def files(tmp_path):
    return {
        f"{i}.wav": write_audio(tmp_path / f"{i}.wav", speech_like(0.3, seed=i))
        for i in range(4)
    }


def embedder(fingerprint="one"):
    return SpeakerEmbedder(Counting(), device="cpu", fingerprint=fingerprint)


def test_what_is_there_from_the_same_model_is_not_embedded_again(tmp_path, files):
    path, first, second = tmp_path / "e" / "some.npz", embedder(), embedder()
    some = dict(list(files.items())[1:3])
    embed_into(path, first, some)
    made = embed_into(path, second, files)
    assert (first.model.seen, second.model.seen) == (2, 2)
    assert made.names == tuple(files)
    for name, row in zip(made.names, made.embeddings, strict=True):
        assert np.array_equal(row, embedder().embed([files[name]])[0])


def test_fewer_files_are_given_without_work_and_without_loss(tmp_path, files):
    path, first, second = tmp_path / "some.npz", embedder(), embedder()
    embed_into(path, first, files)
    some = dict(list(files.items())[2:])
    assert embed_into(path, second, some).names == tuple(some)
    assert second.model.seen == 0
    assert set(EmbeddingArchive.load(path).names) == set(files)


def test_other_files_are_added_to_those_that_are_there(tmp_path, files):
    path, names = tmp_path / "some.npz", list(files)
    for some in (names[:2], names[1:3]):
        made = embed_into(path, embedder(), {name: files[name] for name in some})
        assert list(made.names) == some
    assert set(EmbeddingArchive.load(path).names) == set(names[:3])


def test_embeddings_of_another_model_are_replaced(tmp_path, files):
    path, other = tmp_path / "some.npz", embedder("other")
    embed_into(path, embedder(), files)
    assert embed_into(path, other, files).fingerprint == "other"
    assert other.model.seen == len(files)
    assert EmbeddingArchive.load(path).fingerprint == "other"


def test_other_audio_of_the_same_names_is_embedded(tmp_path, files):
    path, again = tmp_path / "some.npz", embedder()
    clean = embed_into(path, embedder(), files)
    other = {
        name: write_audio(tmp_path / "noisy" / name, speech_like(0.3, seed=10 + i))
        for i, name in enumerate(files)
    }
    assert not np.allclose(embed_into(path, again, other).embeddings, clean.embeddings)
    assert again.model.seen == len(files)
    rewritten, name = embedder(), next(iter(files))
    write_audio(tmp_path / "noisy" / name, speech_like(0.35, seed=99))
    embed_into(path, rewritten, other)
    assert rewritten.model.seen == 1


@pytest.mark.parametrize("save_seconds", [0.0, 600.0])
def test_an_interrupted_extraction_goes_on_where_it_was_saved(
    tmp_path, files, monkeypatch, save_seconds
):
    monkeypatch.setattr(extraction, "_SAVE_SECONDS", save_seconds)
    path = tmp_path / "some.npz"
    files["broken.wav"] = tmp_path / "missing.wav"
    files["0.wav"] = write_audio(tmp_path / "longer.wav", speech_like(0.4))

    def one_at_a_time(paths, **_):
        for index, one in enumerate(paths):
            yield index, plain.embed([one])[0]

    plain, broken = embedder(), embedder()
    monkeypatch.setattr(broken, "embed_each", one_at_a_time)
    with pytest.raises(ValueError, match="missing"):
        embed_into(path, broken, files)
    assert len(EmbeddingArchive.load(path).names) == 4
    again = embedder()
    del files["broken.wav"]
    embed_into(path, again, files)
    assert again.model.seen == 0


def test_what_was_embedded_before_a_file_that_cannot_be_read_is_kept(
    tmp_path, files, monkeypatch
):
    monkeypatch.setattr(running, "_WAITING_SAMPLES", 1)
    path, names = tmp_path / "some.npz", list(files)
    files[names[2]].unlink()
    with pytest.raises(ValueError, match=names[2]):
        embed_into(path, embedder(), files)
    assert set(EmbeddingArchive.load(path).names) == set(names[:2])
    files[names[2]] = write_audio(tmp_path / "found.wav", speech_like(0.3, seed=2))
    again = embedder()
    assert embed_into(path, again, files).names == tuple(names)
    assert again.model.seen == 2


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "some.npz"
    EmbeddingArchive(("a",), np.ones((1, 2), np.float32), "one").save(path)

    def fail(file, **_):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        EmbeddingArchive(("b",), np.ones((1, 2), np.float32), "two").save(path)
    assert EmbeddingArchive.load(path).names == ("a",)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("names", "sources", "said"),
    [
        (("a", "b"), (), r"2 names for embeddings of shape \[1, 2\]"),
        (("a",), ("s", "t"), "1 names for 2 sources"),
        (("a\0",), (), "without NUL"),
        (("",), (), "'' names no embedding"),
        ((7,), (), "7 names no embedding: give texts"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(names, sources, said):
    with pytest.raises(ValueError, match=said):
        EmbeddingArchive(names, np.ones((1, 2), np.float32), "one", sources)


def test_no_files_or_names_that_are_none_are_refused_before_the_work(tmp_path, files):
    path, idle = tmp_path / "some.npz", embedder()
    with pytest.raises(ValueError, match="no file to embed"):
        embed_into(path, idle, {})
    with pytest.raises(ValueError, match="7 names no embedding"):
        embed_into(path, idle, {**files, 7: files["0.wav"]})
    assert idle.model.seen == 0
    assert not path.exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    tmp_path, files, monkeypatch
):
    one, path = embedder(), tmp_path / "archive" / "rows.npz"
    embed_into(path, one, dict(list(files.items())[:2]))
    # Whoever runs tests as root may write anywhere.
    monkeypatch.setattr(os, "access", lambda place, how: place != path.parent)
    with pytest.raises(ValueError, match=r"rows\.npz cannot be written: you may not"):
        embed_into(path, one, files)
    assert one.model.seen == 2
    # What is there is read all the same.
    assert len(embed_into(path, one, dict(list(files.items())[:2])).names) == 2


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    path = tmp_path / "some.npz"
    with pytest.raises(FileNotFoundError, match=r"extract\.py"):
        EmbeddingArchive.load(path)
    path.write_bytes(b"no zip")
    with pytest.raises(ValueError, match="embed again"):
        EmbeddingArchive.load(path)
    with path.open("wb") as file:
        np.save(file, np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"no \.npz file.* embed again"):
        EmbeddingArchive.load(path)
    np.savez(path, names=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="embed again"):
        EmbeddingArchive.load(path)
    write_npz(path, names=["a"])
    with pytest.raises(ValueError, match="1 names for embeddings"):
        EmbeddingArchive.load(path)


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


def with_one(value):
    rows = np.ones((2, 3), np.float32)
    rows[1, 2] = value
    return rows


BAD_ROWS = [
    (np.ones((2, 3)), r"\[2, 3\] of float64, not \[n, dim\] of float32"),
    (np.ones((2, 3), np.float16), "of float16, not"),
    (np.ones((2, 3), np.int32), "of int32, not"),
    (np.ones((2, 3), ">f4"), "of >f4, not"),
    (np.full((2, 3), "1.0"), "of <U3, not"),
    (np.ones(2, np.float32), r"embeddings are \[2\] of float32"),
    (np.ones((2, 0), np.float32), r"embeddings are \[2, 0\] of float32"),
    (with_one(np.nan), "the embedding of 'b' holds NaN or infinity"),
    (with_one(-np.inf), "the embedding of 'b' holds NaN or infinity"),
]


@pytest.mark.parametrize(("rows", "said"), BAD_ROWS)
def test_rows_of_anything_but_finite_float32_are_refused(tmp_path, rows, said):
    path = tmp_path / "some.npz"
    write_npz(path, embeddings=rows)
    with pytest.raises(ValueError, match=rf"some\.npz is no archive .*{said}.*again"):
        EmbeddingArchive.load(path)
    with pytest.raises(ValueError, match=said):
        EmbeddingArchive(("a", "b"), rows, "x")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"names": ["a", "a"]}, "the name 'a' is there twice"),
        ({"names": ["a", ""]}, "'' names no embedding"),
        ({"names": ["a", "b", "c"]}, "3 names for embeddings"),
        ({"names": [1.0, 2.0]}, "names are .* of float64, not .* of texts"),
        ({"names": [b"a", b"b"]}, r"names are .* of \|S1, not .* of texts"),
        ({"names": "ab"}, r"names are \[\] of <U2, not \[n\] of texts"),
        ({"names": [["a"], ["b"]]}, r"names are \[2, 1\] of <U1"),
        ({"names": None}, r"it has no names\.npy"),
        ({"embeddings": None}, r"it has no embeddings\.npy"),
        ({"fingerprint": None}, r"it has no fingerprint\.npy"),
        ({"fingerprint": ["x"]}, r"fingerprint are \[1\] of <U1"),
        ({"fingerprint": 7}, "fingerprint are .* of int64"),
        ({"fingerprint": "x\x1b[2J"}, "a fingerprint is a text of printable"),
        ({"sources": ["s"]}, "2 names for 1 sources"),
        ({"sources": [1, 2]}, "sources are .* of int64"),
        ({"sources": "st"}, r"sources are \[\] of"),
    ],
)
def test_other_names_sources_and_fingerprints_are_refused(tmp_path, changed, said):
    path = tmp_path / "some.npz"
    write_npz(path)
    assert EmbeddingArchive.load(path).names == ("a", "b")
    write_npz(path, **changed)
    with pytest.raises(ValueError, match=rf"some\.npz is no archive .*{said}.*again"):
        EmbeddingArchive.load(path)


def with_header(shape, dtype="<f4", content=bytes(24), version=(1, 0)):
    """Write an array whose header says what is given."""
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n"
    size = struct.pack("<H", len(header))
    return b"\x93NUMPY" + bytes(version) + size + header.encode() + content


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("member", "said"),
    [
        (with_header("(2, 2)"), r"embeddings are \[2, 2\] of float32 .* and 24 bytes"),
        (with_header("(2, 4)"), r"embeddings are \[2, 4\] of float32 .* and 24 bytes"),
        (with_header(f"(2, {10**12})"), "embeddings are .* and 24 bytes"),
        (with_header(f"(2, {10**30})"), "embeddings are .* and 24 bytes"),
        (with_header("(2, -3)"), "embeddings are"),
        (with_header("(2, 3)", "|O"), "of object, not"),
        (with_header("(2, 3)", "<f99"), "descr"),
        (with_header("(" * 300), "EOF in multi-line"),
        (with_header("(2, 3)", version=(9, 9)), r"of version \(9, 9\)"),
        (b"", "EOF"),
        (b"no array", "magic"),
    ],
    ids=map(str, range(11)),
)
def test_a_header_that_lies_is_refused_with_the_name_of_the_file(
    tmp_path, method, member, said
):
    path = tmp_path / "some.npz"
    write_npz(path, embeddings=None)
    with zipfile.ZipFile(path, "a", method) as members:
        members.writestr("embeddings.npy", member)
    with pytest.raises(ValueError, match=rf"some\.npz is no archive .*{said}"):
        EmbeddingArchive.load(path)


def test_two_arrays_of_one_name_are_refused(tmp_path):
    path = tmp_path / "some.npz"
    write_npz(path)
    with zipfile.ZipFile(path, "a") as members, pytest.warns(UserWarning, match="Dup"):
        members.writestr("embeddings.npy", with_header("(2, 3)"))
    with pytest.raises(ValueError, match=r"some\.npz .*it has 2 embeddings\.npy"):
        EmbeddingArchive.load(path)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_rows_in_any_order_in_memory_come_back(tmp_path, suffix):
    pytest.importorskip("pyarrow")
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)
    for rows in (wide.T[:4], wide[::2, ::3], np.asfortranarray(wide), wide[:, :1]):
        names = tuple("abcdef"[: len(rows)])
        EmbeddingArchive(names, rows, "x").save(tmp_path / f"some{suffix}")
        found = EmbeddingArchive.load(tmp_path / f"some{suffix}").embeddings
        assert np.array_equal(found, rows)


def test_a_parquet_footer_that_lies_loses_no_row(tmp_path):
    pytest.importorskip("pyarrow")
    path, rows = tmp_path / "some.parquet", np.eye(3, 4, dtype=np.float32)
    EmbeddingArchive(("a", "b", "c"), rows, "x").save(path)
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for place in range(footer, len(whole) - 8):
        for bit in range(2):  # of a count of three rows
            damaged = bytearray(whole)
            damaged[place] ^= 2 << bit
            path.write_bytes(damaged)
            with contextlib.suppress(ValueError):
                assert len(EmbeddingArchive.load(path).names) == 3


def test_a_name_of_no_character_is_refused(tmp_path):
    path = tmp_path / "some.npz"
    names = np.frombuffer(b"\xff" * 12, "<U1")
    np.savez(
        path, names=names, embeddings=np.eye(3, 4, dtype=np.float32), fingerprint="x"
    )
    with pytest.raises(ValueError, match=r"some\.npz"):
        EmbeddingArchive.load(path)


def test_an_archive_that_is_read_may_be_written_to(tmp_path):
    write_npz(tmp_path / "some.npz")
    rows = EmbeddingArchive.load(tmp_path / "some.npz").embeddings
    rows -= rows.mean(axis=0)
    assert not rows.any()


def write_parquet(path, **changed):
    """Write a table of two rows, but for some columns; None leaves one out."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {
        "name": ["a", "b"],
        "embedding": pyarrow.array(
            [[1.0] * 3] * 2, pyarrow.list_(pyarrow.float32(), 3)
        ),
        "source": ["s", "t"],
        **changed,
    }
    metadata = columns.pop("metadata", {b"fingerprint": b"x"})
    table = pyarrow.table({n: c for n, c in columns.items() if c is not None})
    parquet.write_table(table.replace_schema_metadata(metadata), path)


def lists(rows, kind="float32", size=3):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.array(rows, pyarrow.list_(getattr(pyarrow, kind)(), size))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": ["a", "a"]}, "the name 'a' is there twice"),
        ({"name": ["a", None]}, "the name of row 1 is missing"),
        ({"name": ["a", ""]}, "'' names no embedding"),
        ({"name": ["a", "b\0"]}, "column name has a text with a NUL"),
        ({"name": [1, 2]}, "column name is of int64, not of texts"),
        ({"name": [b"a", b"b"]}, "column name is of binary, not of texts"),
        ({"name": None}, "name"),
        ({"source": [1, 2]}, "column source is of int64"),
        ({"source": ["s", None]}, "2 names for 1 sources"),
        ({"source": None}, "source"),
        ({"embedding": None}, "embedding"),
        ({"embedding": ["1", "2"]}, "embeddings are string, not lists"),
        ({"embedding": [1.0, 2.0]}, "embeddings are double, not lists"),
        (
            {"embedding": ([1.0] * 3, "float64")},
            "embeddings are fixed_size_list.*double",
        ),
        ({"embedding": ([1] * 3, "int32")}, "embeddings are fixed_size_list.*int32"),
        ({"embedding": ([1.0] * 3, "float32", -1)}, "embeddings are list<"),
        ({"embedding": ([1.0, None, 1.0],)}, "an embedding, or a number of one"),
        ({"embedding": (None,)}, "an embedding, or a number of one"),
        ({"embedding": ([1.0, float("nan"), 1.0],)}, "of 'b' holds NaN"),
        ({"embedding": ([1.0, float("inf"), 1.0],)}, "of 'b' holds NaN"),
        ({"metadata": {}}, "fingerprint"),
        ({"metadata": {b"fingerprint": b"\xff"}}, "utf-8"),
        (
            {"metadata": {b"fingerprint": b"x\n"}},
            "a fingerprint is a text of printable",
        ),
    ],
)
def test_other_tables_are_refused(tmp_path, changed, said):
    path = tmp_path / "some.parquet"
    write_parquet(path)
    loaded = EmbeddingArchive.load(path)
    assert (loaded.names, loaded.sources) == (("a", "b"), ("s", "t"))
    if isinstance(changed.get("embedding"), tuple):
        last, *kind = changed["embedding"]
        changed = {"embedding": lists([[1] * 3, last], *kind)}
    write_parquet(path, **changed)
    with pytest.raises(ValueError, match=rf"some\.parquet is no archive .*{said}"):
        EmbeddingArchive.load(path)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_no_flipped_bit_of_an_archive_gives_other_embeddings(tmp_path, suffix):
    pytest.importorskip("pyarrow")
    path = tmp_path / f"some{suffix}"
    rows = np.arange(6, dtype=np.float32).reshape(2, 3) + 1
    EmbeddingArchive(("ann", "bob"), rows, "f00d", ("s", "t")).save(path)
    content, refused = path.read_bytes(), []
    for place in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            found = EmbeddingArchive.load(path)
        except ValueError as error:
            refused.append(str(error))
            continue
        assert found.names == ("ann", "bob")
        assert np.array_equal(found.embeddings, rows)
    assert len(refused) > len(content) / 9
    assert all(f"some{suffix} is no archive of embeddings" in said for said in refused)


def test_an_embedder_without_a_fingerprint_cannot_fill_an_archive(tmp_path, files):
    with pytest.raises(ValueError, match="fingerprint"):
        embed_into(tmp_path / "some.npz", embedder(""), files)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_files_and_make_the_archive_of_one(
    tmp_path, files, processes
):
    # The second in a folder that is not there yet.
    alone, path = tmp_path / "alone.npz", tmp_path / "run" / "shared.npz"
    embed_into(alone, embedder(), files)
    workers = [embedder() for _ in range(processes)]
    for rank, worker in enumerate(workers):
        embed_share(path, worker, files, rank=rank, processes=processes)
    assert not path.exists()
    assert sum(worker.model.seen for worker in workers) == len(files)
    assert max(worker.model.seen for worker in workers) == -(-len(files) // processes)
    last = embedder()
    made = embed_into(path, last, files)
    assert last.model.seen == 0
    assert made.names == tuple(files)
    expected, found = EmbeddingArchive.load(alone), EmbeddingArchive.load(path)
    assert (found.names, found.sources) == (expected.names, expected.sources)
    assert np.array_equal(found.embeddings, expected.embeddings)
    assert list(path.parent.iterdir()) == [path]


def test_parts_of_any_number_of_processes_are_used_again(tmp_path, files):
    path, again = tmp_path / "some.npz", [embedder() for _ in range(2)]
    # Of three processes the last was killed before it began.
    for rank in (0, 1):
        embed_share(path, embedder(), files, rank=rank, processes=3)
    for rank in (0, 1):
        embed_share(path, again[rank], files, rank=rank, processes=2)
    assert sum(worker.model.seen for worker in again) == 1
    last = embedder()
    embed_into(path, last, files)
    assert last.model.seen == 0
    assert set(EmbeddingArchive.load(path).names) == set(files)


def test_one_process_goes_on_where_several_were_interrupted(tmp_path, files):
    path, alone = tmp_path / "some.npz", embedder()
    embed_share(path, embedder(), files, rank=1, processes=2)
    assert embed_into(path, alone, files).names == tuple(files)
    assert alone.model.seen == 2
    assert not list(tmp_path.glob("*.part-*"))


def test_a_damaged_part_is_embedded_again(tmp_path, files, caplog):
    path = tmp_path / "shared.npz"
    for rank in range(2):
        embed_share(path, embedder(), files, rank=rank, processes=2)
    part = tmp_path / "shared.part-1.npz"
    part.write_bytes(part.read_bytes()[:-100])
    embed_share(path, embedder(), files, rank=1, processes=2)
    assert "no archive of embeddings" in caplog.text
    assert EmbeddingArchive.load(part).names
    part.write_bytes(part.read_bytes()[:-100])
    again = embed_into(path, embedder(), files)
    assert np.array_equal(
        again.embeddings, embed_into(tmp_path / "new.npz", embedder(), files).embeddings
    )
    # It is not known to be of this model: whoever made it may remove it.
    assert list(tmp_path.glob("shared.part-*")) == [part]
    assert "shared.part-1.npz is no archive of embeddings" in caplog.text


def test_only_parts_that_were_taken_in_are_deleted(tmp_path, files, caplog):
    path = tmp_path / "rows.npz"
    embed_share(path, embedder("other"), files, rank=0, processes=2)
    embed_share(path, embedder(), files, rank=1, processes=2)
    embed_into(tmp_path / "rows.part-of-mine.npz", embedder(), files)
    embed_into(path, embedder(), files)
    left = sorted(p.name for p in tmp_path.glob("rows*"))
    assert left == ["rows.npz", "rows.part-0.npz", "rows.part-of-mine.npz"]
    assert "rows.part-0.npz is of another model, and not used" in caplog.text


def test_no_two_write_one_archive_at_once(tmp_path, files):
    path, idle = tmp_path / "rows.npz", embedder()

    class Meanwhile(Counting):
        def forward(self, waves, samples):
            with pytest.raises(ValueError, match=r"process is writing .*rows\.npz"):
                embed_into(path, idle, files)
            embed_into(tmp_path / "rows.parquet.npz", embedder(), files)
            return super().forward(waves, samples)

    busy = SpeakerEmbedder(Meanwhile(), device="cpu", fingerprint="one")
    embed_into(path, busy, files)
    assert (busy.model.seen, idle.model.seen) == (4, 0)
    assert not list(tmp_path.glob("*.lock"))
    embed_into(path, idle, files)
    assert idle.model.seen == 0


def test_an_archive_and_its_table_are_written_side_by_side(tmp_path):
    pytest.importorskip("pyarrow")
    archive = EmbeddingArchive(("a",), np.ones((1, 2), np.float32), "one")
    with opened_whole(tmp_path / "rows.npz") as half:
        half.write(b"half")
        archive.save(tmp_path / "rows.parquet")
    assert EmbeddingArchive.load(tmp_path / "rows.parquet").names == ("a",)
    assert (tmp_path / "rows.npz").read_bytes() == b"half"


def test_parts_of_another_model_or_other_audio_are_not_used(tmp_path, files):
    path, again = tmp_path / "some.npz", embedder()
    embed_share(path, embedder("other"), files, rank=0, processes=2)
    embed_share(path, embedder(), files, rank=1, processes=2)
    write_audio(files["1.wav"], speech_like(0.35, seed=99))
    for rank in (0, 1):
        embed_share(path, again, files, rank=rank, processes=2)
    assert again.model.seen == 3
    made = embed_into(path, embedder(), files)
    expected = embedder().embed(list(files.values()))
    assert np.array_equal(made.embeddings, expected)
