"""Files and folders into an archive: each embedded once, and none lost to a bad one."""

import io
import os
import sys

import numpy as np
import pytest
import torch

from speechbrain_rev.data import audio_files
from speechbrain_rev.data.packing import Packing
from speechbrain_rev.inference import (
    EmbeddingArchive,
    embed_folder,
    embed_into,
    embed_share,
    extraction,
)
from speechbrain_rev.inference.extraction import (
    describe_bad,
    list_audio,
    look_through,
)
from tests.run_folders import speech_like, write_audio
from tests.unit.inference.conftest import FirstSamples

NAMES = ["a/1.wav", "a/2.FLAC", "b/1.wav", "c.ogg"]
SUFFIXES = [".npz", ".parquet"]


@pytest.fixture
def folder(tmp_path):
    """Four files of audio, and two of something else."""
    place = tmp_path / "speech"
    for seed, name in enumerate(NAMES):
        path = write_audio(place / name.lower(), speech_like(0.3, seed=seed))
        path.rename(place / name)
    (place / "notes.txt").write_text("no audio")
    (place / "README").write_text("no audio")
    return place


@pytest.fixture
def files(folder):
    return {name: folder / name for name in NAMES}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "rows.npz"


@pytest.mark.parametrize(
    ("first", "model", "then", "embedded", "stored"),
    [
        (NAMES[1:3], "one", NAMES, 2, NAMES),
        (NAMES, "one", NAMES[2:], 0, NAMES),
        (NAMES[:2], "one", NAMES[1:3], 1, NAMES[:3]),
        (NAMES, "other", NAMES, 4, NAMES),
    ],
    ids=["more", "fewer", "others", "another model"],
)
def test_only_what_is_not_there_from_the_same_model_is_embedded(
    out, files, counting, first, model, then, embedded, stored
):
    embed_into(out, counting(), {name: files[name] for name in first})
    again = counting(model)
    made = embed_into(out, again, {name: files[name] for name in then})
    assert again.model.seen == embedded
    assert (list(made.names), made.fingerprint) == (then, model)
    for name, row in zip(made.names, made.embeddings, strict=True):
        assert np.array_equal(row, counting().embed(files[name]))
    found = EmbeddingArchive.load(out)
    assert (set(found.names), found.fingerprint) == (set(stored), model)


def test_other_audio_of_the_same_name_is_embedded(out, files, tmp_path, counting):
    embed_into(out, counting(), files)
    write_audio(files[NAMES[0]], speech_like(0.35, seed=99))
    other = {**files, "c.ogg": write_audio(tmp_path / "o.ogg", speech_like(0.3))}
    again = counting()
    made = embed_into(out, again, other)
    assert again.model.seen == 2
    assert np.array_equal(made.embeddings, counting().embed(list(other.values())))


@pytest.mark.parametrize(
    ("error", "save_seconds"), [(KeyboardInterrupt, 0.0), (ValueError, 600.0)]
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_interrupted_extraction_goes_on(
    tmp_path, files, counting, monkeypatch, error, save_seconds, suffix
):
    monkeypatch.setattr(extraction, "_SAVE_SECONDS", save_seconds)
    out, first, again = tmp_path / f"rows{suffix}", counting(), counting()
    original = first.embed_each

    def interrupted(*args, **options):
        for count, one in enumerate(original(*args, **options)):
            # Saved meanwhile, where that is due at once.
            assert out.exists() == (count > 0 and save_seconds == 0)
            if count == 2:
                raise error
            yield one

    monkeypatch.setattr(first, "embed_each", interrupted)
    with pytest.raises(error):
        embed_into(out, first, files)
    embed_into(out, again, files)
    assert again.model.seen == 2


@pytest.mark.parametrize(
    ("name", "fingerprint", "added", "words"),
    [
        ("o.npz", "one", None, "no file to embed"),
        ("o.npz", "one", 7, "7 names no embedding"),
        ("o.npz", "", "a", "without a fingerprint"),
        ("o.csv", "one", "a", r"ends in \.npz or \.parquet, not"),
        ("o", "one", "a", r"ends in \.npz or \.parquet, not"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path, files, counting, name, fingerprint, added, words
):
    idle = counting(fingerprint)
    given = {} if added is None else {**files, added: files[NAMES[0]]}
    with pytest.raises(ValueError, match=words):
        embed_into(tmp_path / name, idle, given)
    assert idle.model.seen == 0
    assert not (tmp_path / name).exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    tmp_path, files, counting, monkeypatch
):
    one, path = counting(), tmp_path / "archive" / "rows.npz"
    some = {name: files[name] for name in NAMES[:2]}
    embed_into(path, one, some)
    # Whoever runs tests as root may write anywhere.
    monkeypatch.setattr(os, "access", lambda place, how: place != path.parent)
    with pytest.raises(ValueError, match=r"rows\.npz cannot be written: you may not"):
        embed_into(path, one, files)
    assert one.model.seen == 2
    # What is there is read all the same.
    assert len(embed_into(path, one, some).names) == 2


def test_without_pyarrow_the_remedy_is_named_before_the_work(
    folder, tmp_path, counting, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    idle = counting()
    with pytest.raises(ImportError, match=r"speechbrain_rev\[parquet\]"):
        embed_folder(folder, tmp_path / "rows.parquet", idle)
    assert idle.model.seen == 0
    embed_folder(folder, tmp_path / "rows.npz", idle)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_files_and_make_the_archive_of_one(
    tmp_path, files, counting, processes
):
    # The second in a folder that is not there yet.
    alone, path = tmp_path / "alone.npz", tmp_path / "run" / "shared.npz"
    embed_into(alone, counting(), files)
    workers = [counting() for _ in range(processes)]
    for rank, worker in enumerate(workers):
        embed_share(path, worker, files, rank=rank, processes=processes)
    assert not path.exists()
    assert sum(worker.model.seen for worker in workers) == len(files)
    assert max(worker.model.seen for worker in workers) == -(-len(files) // processes)
    last = counting()
    assert embed_into(path, last, files).names == tuple(files)
    assert last.model.seen == 0
    expected, found = EmbeddingArchive.load(alone), EmbeddingArchive.load(path)
    assert (found.names, found.sources) == (expected.names, expected.sources)
    assert np.array_equal(found.embeddings, expected.embeddings)
    assert list(path.parent.iterdir()) == [path]


def test_parts_of_any_number_of_processes_are_used_again(out, files, counting):
    # Of three processes the last was killed before it began.
    for rank in (0, 1):
        embed_share(out, counting(), files, rank=rank, processes=3)
    again = counting()
    embed_share(out, again, files, rank=0, processes=2)
    # The third share is 2, which is among 0 and 2 of two.
    assert again.model.seen == 1
    (out.parent / "rows.part-1.npz").unlink()
    alone = counting()
    assert embed_into(out, alone, files).names == tuple(files)
    assert alone.model.seen == 1
    assert not list(out.parent.glob("*.part-*"))


def test_a_damaged_part_is_embedded_again(out, files, counting, caplog):
    for rank in range(2):
        embed_share(out, counting(), files, rank=rank, processes=2)
    part = out.parent / "rows.part-1.npz"
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])
    embed_share(out, counting(), files, rank=1, processes=2)
    assert "no archive of embeddings" in caplog.text
    assert EmbeddingArchive.load(part).names
    part.write_bytes(whole[:-100])
    made = embed_into(out, counting(), files)
    assert np.array_equal(made.embeddings, counting().embed(list(files.values())))
    # It is not known to be of this model: whoever made it may remove it.
    assert list(out.parent.glob("rows.part-*")) == [part]


def test_parts_of_another_model_or_other_audio_are_not_used(
    out, files, counting, caplog
):
    embed_share(out, counting("other"), files, rank=0, processes=2)
    embed_share(out, counting(), files, rank=1, processes=2)
    mine = out.with_name("rows.part-of-mine.npz")
    embed_into(mine, counting(), files)
    write_audio(files["a/1.wav"], speech_like(0.35, seed=99))
    again = counting()
    made = embed_into(out, again, files)
    assert again.model.seen == 2
    assert np.array_equal(made.embeddings, counting().embed(list(files.values())))
    other = out.with_name("rows.part-0.npz")
    assert set(out.parent.glob("rows*")) == {out, other, mine}
    assert "rows.part-0.npz is of another model, and not used" in caplog.text


def test_no_two_write_one_archive_at_once(out, files, counting):
    idle = counting()

    class Meanwhile(FirstSamples):
        def forward(self, waves, samples):
            with pytest.raises(ValueError, match=r"process is writing .*rows\.npz"):
                embed_into(out, idle, files)
            embed_into(out.with_name("rows.parquet.npz"), counting(), files)
            return super().forward(waves, samples)

    busy = counting(model=Meanwhile)
    embed_into(out, busy, files)
    assert (busy.model.seen, idle.model.seen) == (4, 0)
    assert not list(out.parent.glob("*.lock"))
    embed_into(out, idle, files)
    assert idle.model.seen == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_folder_becomes_rows_by_names_relative_to_it(
    folder, tmp_path, counting, suffix
):
    out = tmp_path / f"rows{suffix}"
    found = embed_folder(folder, out, counting())
    assert found.archive.names == tuple(NAMES)
    assert found.bad == {}
    assert found.others == {".txt": 1, "without an ending": 1}
    stored = EmbeddingArchive.load(out)
    assert stored.names == tuple(NAMES)
    assert (stored.fingerprint, stored.sources) == ("one", found.archive.sources)
    expected = counting().embed([folder / name for name in NAMES])
    assert np.array_equal(stored.embeddings, expected)
    again = counting()
    write_audio(folder / "d.wav", speech_like(0.3, seed=9))
    embed_folder(folder, out, again)
    assert again.model.seen == 1


def test_other_channels_and_windows_are_not_taken_for_the_same(folder, out, counting):
    write_audio(folder / "b/1.wav", np.stack([speech_like(0.3)] * 2, axis=1))
    embed_folder(folder, out, counting(), channels="mean")
    with pytest.raises(ValueError, match="2 channels"):
        embed_folder(folder, out, counting())
    for options in ({"channels": 0}, {"channels": "mean", "window": 3}):
        again, same = counting(), counting()
        embed_folder(folder, out, again, **options)
        assert again.model.seen == len(NAMES)
        embed_folder(folder, out, same, **options)
        assert same.model.seen == 0
    for window in (3.0, np.float32(3.0), np.int64(3)):
        embed_folder(folder, out, same, channels="mean", window=window)
    assert same.model.seen == 0


def test_another_model_s_embeddings_are_not_replaced(folder, out, counting):
    embed_folder(folder, out, counting())
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"rows\.npz holds embeddings of another mod"):
        embed_folder(folder, out, counting("two"))
    assert out.read_bytes() == before
    out.write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"rows\.npz is no archive"):
        embed_folder(folder, out, counting())
    assert out.read_bytes() == b"mine"


@pytest.mark.parametrize("window", [None, 0.25])
def test_bad_files_are_listed_all_at_once_and_lose_no_others(
    folder, out, counting, window
):
    (folder / "a/0.wav").write_text("no audio")
    write_audio(folder / "silent.wav", np.zeros(8000, np.float32))
    write_audio(folder / "short.wav", speech_like(0.1))
    write_audio(folder / "two.wav", np.stack([speech_like(0.3)] * 2, axis=1))
    (folder / "gone.wav").symlink_to(folder / "nowhere.wav")
    bad = {
        "a/0.wav": "cannot be read as audio",
        "gone.wav": "there is no such file",
        "short.wav": "at least 0.25 s",
        "silent.wav": "is silent",
        "two.wav": "2 channels",
    }
    again = counting()
    with pytest.raises(ValueError, match="5 files cannot be embedded:") as error:
        embed_folder(folder, out, counting(), window=window)
    lines = str(error.value).splitlines()
    for name, why in bad.items():
        assert [why in line for line in lines if line.startswith(f"- {name}: ")] == [
            True
        ]
    assert f"The other 4 are in {out}" in str(error.value)
    assert EmbeddingArchive.load(out).names == tuple(NAMES)
    found = embed_folder(folder, out, again, window=window, bad_files="skip")
    assert again.model.seen == 0
    assert found.archive.names == tuple(NAMES)
    assert set(found.bad) == set(bad)
    seconds, foreseen = look_through(list_audio(folder), window=window)
    assert set(foreseen) == set(bad) - {"silent.wav"}
    assert seconds == pytest.approx(4 * 0.3 + 0.5, abs=0.01)
    with pytest.raises(ValueError, match=r"silent\.wav is silent"):
        embed_into(out, counting(), {"b": folder / "silent.wav"}, window=window)


@pytest.mark.parametrize("bad_files", ["refuse", "skip"])
def test_a_folder_of_bad_files_alone_is_an_error_and_writes_nothing(
    tmp_path, out, counting, bad_files
):
    write_audio(tmp_path / "in/silent.wav", np.zeros(8000, np.float32))
    with pytest.raises(ValueError, match=r"(?s)1 files cannot.*silent"):
        embed_folder(tmp_path / "in", out, counting(), bad_files=bad_files)
    assert not out.exists()


def test_audio_that_went_bad_has_no_row_of_what_it_was(folder, out, counting):
    embed_folder(folder, out, counting())
    write_audio(folder / "b/1.wav", np.zeros(8000, np.float32))
    embed_folder(folder, out, counting(), bad_files="skip")
    assert "b/1.wav" not in EmbeddingArchive.load(out).names


class Diverged(torch.nn.Module):
    def forward(self, waves, samples):
        return waves[:, None, :4] * float("nan")


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({}, Diverged, "diverged"),
        ({"window": 0.25}, Diverged, "diverged"),
        ({"channels": "left"}, FirstSamples, "channels takes .*but is 'left'"),
        ({"window": 0.1}, FirstSamples, "window of 0.1 s is no"),
        ({"bad_files": "drop"}, FirstSamples, "refuse or skip, not 'drop'"),
    ],
)
def test_mistakes_are_not_taken_for_bad_audio(
    folder, out, counting, options, model, words
):
    with pytest.raises(ValueError, match=words):
        embed_folder(
            folder, out, counting(model=model), **{"bad_files": "skip", **options}
        )
    if model is FirstSamples and "bad_files" not in options:
        with pytest.raises(ValueError, match=words):
            look_through(list_audio(folder), **options)


def test_names_not_in_utf_8_and_very_many_are_listed(folder, out, counting):
    (folder / os.fsdecode(b"\xff.wav")).write_text("no audio")
    (folder / os.fsdecode(b"b.\xff")).touch()
    found = embed_folder(folder, out, counting(), bad_files="skip")
    assert found.archive.names == tuple(NAMES)
    assert "1 .\\udcff" in list_audio(folder).passed_over()
    many = found.bad | {f"{i:06}.wav": "it is silent" for i in range(2000)}
    text = describe_bad(many)
    assert text.startswith("2001 files cannot be embedded:\n- \\udcff.wav: ")
    assert "- and 1991 more: 000009.wav, " in text
    assert text.endswith("000108.wav, ...\n")
    with pytest.raises(ValueError, match="cannot be embedded") as error:
        embed_folder(folder, out, counting())
    str(error.value).encode()


def test_files_and_folders_are_named_as_given_and_links_are_followed(
    folder, out, counting, monkeypatch
):
    monkeypatch.chdir(folder)
    (folder / "c.ogg").rename(folder / "x.sound")
    given = ["a", "x.sound", "b/1.wav", "b/1.wav"]
    expected = ["a/1.wav", "a/2.FLAC", "x.sound", "b/1.wav"]
    assert list(list_audio(given).files) == expected
    assert embed_folder(given, out, counting()).archive.names == tuple(expected)
    (folder / "again").symlink_to(folder / "a")
    (folder / "round").symlink_to(folder)
    found = list(list_audio(folder).files)
    assert found == ["a/1.wav", "a/2.FLAC", "again/1.wav", "again/2.FLAC", "b/1.wav"]


def test_files_of_a_packed_folder_are_named_as_those_of_a_folder(
    tmp_path, counting, monkeypatch
):
    names, packed = ("id1/a.wav", "id1/b.wav", "id2/a.wav"), tmp_path / "c.packed"
    with Packing(packed, source="c", sample_rate=16000) as packing:
        for seed, name in enumerate(names):
            packing.add(name, torch.from_numpy(speech_like(0.3, seed=seed)))
        packing.finish()
    monkeypatch.chdir(tmp_path)
    expected = counting().embed([packed / name for name in names])
    for place in ("c.packed", packed, "./c.packed/"):
        found = embed_folder(place, "whole.npz", counting())
        assert found.archive.names == names
        assert np.array_equal(found.archive.embeddings, expected)
    assert list(list_audio("c.packed/id1").files) == ["a.wav", "b.wav"]
    given = ["c.packed/id2", "c.packed/id1/b.wav"]
    listed = list_audio(given).files
    assert list(listed) == ["c.packed/id2/a.wav", "c.packed/id1/b.wav"]


def test_what_holds_no_audio_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"no audio in .*1 \.txt"):
        list_audio(tmp_path)
    with pytest.raises(ValueError, match="an empty list"):
        list_audio([])
    for given in (io.BytesIO(b"a\nb\n"), b"a.wav", [io.BytesIO()], 3):
        words = "is read by the path of its file, and (BytesIO|bytes|int|list) is none"
        with pytest.raises(ValueError, match=f"{words}.*SpeakerEmbedder.embed takes"):
            list_audio(given)
        with pytest.raises(ValueError, match=words):
            audio_files(given)
