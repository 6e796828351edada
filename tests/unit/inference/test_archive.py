import os

import numpy as np
import pytest
import torch

from speechbrain_rev.inference import (
    EmbeddingArchive,
    SpeakerEmbedder,
    batches,
    embed_into,
    embed_share,
    extraction,
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
    monkeypatch.setattr(batches, "_WAITING_SAMPLES", 1)
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
    np.savez(
        path, names=["a"], embeddings=np.ones((2, 3)), fingerprint="x", sources=["s"]
    )
    with pytest.raises(ValueError, match="1 names for embeddings"):
        EmbeddingArchive.load(path)


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
