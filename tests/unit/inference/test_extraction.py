"""Files and folders into an archive: each embedded once, and none lost to a bad one."""

import os
import tarfile

import numpy as np
import pytest
import soundfile
import torch

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


@pytest.fixture
def folder(tmp_path):
    """Four files of audio, and two of something else."""
    place = tmp_path / "speech"
    for seed, name in enumerate(NAMES):
        path = write_audio(place / name.lower(), speech_like(0.3, seed=seed))
        path.rename(place / name)
    for name in ("notes.txt", "README"):
        (place / name).write_text("no audio")
    return place


@pytest.fixture
def files(folder):
    return {name: folder / name for name in NAMES}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "rows.npz"


@pytest.fixture
def seen(counting):
    """A function that embeds by a function of the package; utterances that it read."""

    def embed(call, *arguments, fingerprint="one", **options):
        embedder = counting(fingerprint)
        call(arguments[0], embedder, *arguments[1:], **options)
        return embedder.model.seen

    return embed


def assert_embedded(archive, files, counting):
    """The archive has the rows of these files as they are, in their order."""
    assert archive.names == tuple(files)
    assert np.array_equal(archive.embeddings, counting().embed(list(files.values())))


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
    again, wanted = counting(model), {name: files[name] for name in then}
    made = embed_into(out, again, wanted)
    assert (again.model.seen, made.fingerprint) == (embedded, model)
    assert_embedded(made, wanted, counting)
    kept = EmbeddingArchive.load(out)
    assert (set(kept.names), kept.fingerprint) == (set(stored), model)


def test_other_audio_of_the_same_name_is_embedded(out, files, tmp_path, counting):
    embed_into(out, counting(), files)
    write_audio(files[NAMES[0]], speech_like(0.35, seed=99))
    other = {**files, "c.ogg": write_audio(tmp_path / "o.ogg", speech_like(0.3))}
    again = counting()
    assert_embedded(embed_into(out, again, other), other, counting)
    assert again.model.seen == 2


@pytest.mark.parametrize(
    ("error", "words", "save_seconds"),
    [
        (KeyboardInterrupt, "is kept; the same command goes on", 0.0),
        (ValueError, None, 600.0),
    ],
)
def test_an_interrupted_extraction_goes_on(
    out, files, counting, monkeypatch, error, words, save_seconds
):
    monkeypatch.setattr(extraction, "_SAVE_SECONDS", save_seconds)
    first, again = counting(), counting()
    original = first.embed_each

    def interrupted(*args, **options):
        for count, one in enumerate(original(*args, **options)):
            # Saved meanwhile, where that is due at once.
            assert out.exists() == (count > 0 and save_seconds == 0)
            if count == 2:
                raise error
            yield one

    monkeypatch.setattr(first, "embed_each", interrupted)
    with pytest.raises(error, match=words):
        embed_into(out, first, files)
    embed_into(out, again, files)
    assert again.model.seen == 2


@pytest.mark.parametrize(
    ("name", "fingerprint", "added", "words"),
    [
        ("o.npz", "one", None, "no file to embed"),
        ("o.npz", "one", 7, "7 names no embedding"),
        ("o.npz", "", "a", "without a fingerprint"),
        ("o.csv", "one", "a", r"ends in \.npz, not"),
        ("o.parquet", "one", "a", r"ends in \.npz, not"),
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


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_files_and_make_the_archive_of_one(
    tmp_path, files, counting, seen, processes
):
    # The second in a folder that is not there yet.
    alone, path = tmp_path / "alone.npz", tmp_path / "run" / "shared.npz"
    embed_into(alone, counting(), files)
    counts = [
        seen(embed_share, path, files, rank=rank, processes=processes)
        for rank in range(processes)
    ]
    assert not path.exists()
    assert (sum(counts), max(counts)) == (len(files), -(-len(files) // processes))
    assert seen(embed_into, path, files) == 0
    expected, shared = EmbeddingArchive.load(alone), EmbeddingArchive.load(path)
    assert (shared.names, shared.sources) == (expected.names, expected.sources)
    assert np.array_equal(shared.embeddings, expected.embeddings)
    assert list(path.parent.iterdir()) == [path]


def test_parts_of_any_number_of_processes_are_used_again(out, files, seen):
    # Of three processes the last was killed before it began.
    for rank in (0, 1):
        seen(embed_share, out, files, rank=rank, processes=3)
    # The third share is 2, which is among 0 and 2 of two.
    assert seen(embed_share, out, files, rank=0, processes=2) == 1
    (out.parent / "rows.part-1.npz").unlink()
    assert seen(embed_into, out, files) == 1
    assert not list(out.parent.glob("*.part-*"))


def test_a_damaged_part_is_embedded_again(out, files, counting, seen, caplog):
    for rank in range(2):
        seen(embed_share, out, files, rank=rank, processes=2)
    part = out.parent / "rows.part-1.npz"
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])
    seen(embed_share, out, files, rank=1, processes=2)
    assert "no archive of embeddings" in caplog.text
    assert EmbeddingArchive.load(part).names
    part.write_bytes(whole[:-100])
    assert_embedded(embed_into(out, counting(), files), files, counting)
    # It is not known to be of this model: whoever made it may remove it.
    assert list(out.parent.glob("rows.part-*")) == [part]


def test_parts_of_another_model_or_other_audio_are_not_used(
    out, files, counting, seen, caplog
):
    seen(embed_share, out, files, rank=0, processes=2, fingerprint="other")
    seen(embed_share, out, files, rank=1, processes=2)
    mine, other = (out.with_name(f"rows.part-{n}.npz") for n in ("of-mine", "0"))
    embed_into(mine, counting(), files)
    write_audio(files["a/1.wav"], speech_like(0.35, seed=99))
    again = counting()
    assert_embedded(embed_into(out, again, files), files, counting)
    assert again.model.seen == 2
    assert set(out.parent.glob("rows*")) == {out, other, mine}
    assert "rows.part-0.npz is of another model, and not used" in caplog.text


def test_no_two_write_one_archive_at_once(out, files, counting):
    idle = counting()

    class Meanwhile(FirstSamples):
        def forward(self, waves, samples):
            with pytest.raises(ValueError, match=r"process is writing .*rows\.npz"):
                embed_into(out, idle, files)
            embed_into(out.with_name("rows.more.npz"), counting(), files)
            return super().forward(waves, samples)

    busy = counting(model=Meanwhile)
    embed_into(out, busy, files)
    embed_into(out, idle, files)
    assert (busy.model.seen, idle.model.seen) == (4, 0)
    assert not list(out.parent.glob("*.lock"))


# ------------------------------------------------------------ folders


def test_a_folder_becomes_rows_by_names_relative_to_it(folder, files, out, counting):
    again = counting()
    (folder / "._a.wav").touch()  # as macOS leaves beside each file
    result = embed_folder(folder, out, counting())
    assert result.archive.names == tuple(NAMES)
    others = {".txt": 1, "without an ending": 1, "hidden": 1}
    assert (result.bad, result.others) == ({}, others)
    stored = EmbeddingArchive.load(out)
    assert (stored.fingerprint, stored.sources) == ("one", result.archive.sources)
    assert_embedded(stored, files, counting)
    write_audio(folder / "d.wav", speech_like(0.3, seed=9))
    embed_folder(folder, out, again)
    assert again.model.seen == 1
    # Audio that went bad has no row of what it was.
    write_audio(folder / "b/1.wav", np.zeros(8000, np.float32))
    embed_folder(folder, out, counting(), bad_files="drop")
    assert "b/1.wav" not in EmbeddingArchive.load(out).names


def test_other_channels_and_windows_are_not_taken_for_the_same(folder, out, counting):
    write_audio(folder / "b/1.wav", np.stack([speech_like(0.3)] * 2, axis=1))
    embed_folder(folder, out, counting(), channel="mix")
    with pytest.raises(ValueError, match="2 channels"):
        embed_folder(folder, out, counting())
    mean = {"channel": "mix"}
    for options, count in (
        ({"channel": 0}, 4),
        ({"channel": 0}, 0),
        ({**mean, "window": 3}, 4),
        ({**mean, "window": 3.0}, 0),
        ({**mean, "window": np.float32(3.0)}, 0),
    ):
        again = counting()
        embed_folder(folder, out, again, **options)
        assert again.model.seen == count


def test_another_model_s_embeddings_are_not_replaced(folder, out, counting):
    embed_folder(folder, out, counting())
    for content, words in (
        (out.read_bytes(), r"rows\.npz holds embeddings of another mod"),
        (b"mine", r"rows\.npz is no archive"),
    ):
        out.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            embed_folder(folder, out, counting("two"))
        assert out.read_bytes() == content


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
        (line,) = [line for line in lines if line.startswith(f"- {name}: ")]
        assert why in line
    assert f"The other 4 are in {out}" in str(error.value)
    assert EmbeddingArchive.load(out).names == tuple(NAMES)
    result = embed_folder(folder, out, again, window=window, bad_files="drop")
    assert again.model.seen == 0
    assert (result.archive.names, set(result.bad)) == (tuple(NAMES), set(bad))
    seconds, foreseen = look_through(list_audio(folder), window=window)
    assert set(foreseen) == set(bad) - {"silent.wav"}
    assert seconds == pytest.approx(4 * 0.3 + 0.5, abs=0.01)
    silent = folder / "silent.wav"
    with pytest.raises(ValueError, match=r"silent\.wav is silent"):
        embed_into(out, counting(), {"b": silent}, window=window)
    # Where no file is left, nothing is written.
    for how in ("refuse", "drop"):
        with pytest.raises(ValueError, match=r"(?s)1 files cannot.*silent"):
            embed_folder([silent], out.with_name("new.npz"), counting(), bad_files=how)
    assert not out.with_name("new.npz").exists()


class Diverged(torch.nn.Module):
    def forward(self, waves, samples):
        return waves[:, None, :4] * float("nan")


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({}, Diverged, "diverged"),
        ({"window": 0.25}, Diverged, "diverged"),
        ({"channel": "left"}, FirstSamples, "channel takes .*but is 'left'"),
        ({"window": 0.1}, FirstSamples, "window of 0.1 s is no"),
        ({"bad_files": "keep"}, FirstSamples, "refuse or drop, not 'keep'"),
    ],
)
def test_mistakes_are_not_taken_for_bad_audio(
    folder, out, counting, options, model, words
):
    given = {"bad_files": "drop", **options}
    with pytest.raises(ValueError, match=words):
        embed_folder(folder, out, counting(model=model), **given)
    if model is FirstSamples and "bad_files" not in options:
        with pytest.raises(ValueError, match=words):
            look_through(list_audio(folder), **options)


def test_names_not_in_utf_8_and_very_many_are_listed(folder, out, counting):
    (folder / os.fsdecode(b"\xff.wav")).write_text("no audio")
    (folder / os.fsdecode(b"b.\xff")).touch()
    result = embed_folder(folder, out, counting(), bad_files="drop")
    assert result.archive.names == tuple(NAMES)
    assert "1 .\\udcff" in list_audio(folder).passed_over()
    many = result.bad | {f"{i:06}.wav": "it is silent" for i in range(2000)}
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
    expected = ("a/1.wav", "a/2.FLAC", "x.sound", "b/1.wav")
    assert embed_folder(given, out, counting()).archive.names == expected
    (folder / "again").symlink_to(folder / "a")
    (folder / "round").symlink_to(folder)
    listed = list(list_audio(folder).files)
    assert listed == ["a/1.wav", "a/2.FLAC", "again/1.wav", "again/2.FLAC", "b/1.wav"]


def test_files_of_a_packed_folder_are_named_as_those_of_a_folder(
    tmp_path, counting, monkeypatch
):
    names, packed = ("id1/a.wav", "id1/b.wav", "id2/a.wav"), tmp_path / "c.packed"
    with Packing(packed, source="c", sample_rate=16000) as packing:
        for seed, name in enumerate(names):
            packing.add(name, torch.from_numpy(speech_like(0.3, seed=seed)))
        packing.finish()
    monkeypatch.chdir(tmp_path)
    for place in (packed, "./c.packed/"):
        archive = embed_folder(place, "whole.npz", counting()).archive
        assert_embedded(archive, {name: packed / name for name in names}, counting)
    assert list(list_audio("c.packed/id1").files) == ["a.wav", "b.wav"]
    listed = list_audio(["c.packed/id2", "c.packed/id1/b.wav"]).files
    assert list(listed) == ["c.packed/id2/a.wav", "c.packed/id1/b.wav"]


def test_what_holds_no_audio_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"no audio in .*1 \.txt"):
        list_audio(tmp_path)
    with pytest.raises(ValueError, match="an empty list"):
        list_audio([])


@pytest.mark.parametrize("part", ["rec.wav/10+100.wav", "x.tar/rec.wav"])
def test_audio_in_a_file_that_was_written_anew_is_other_audio(part, tmp_path):
    known = set()
    for length in (1000, 2000):
        soundfile.write(tmp_path / "rec.wav", np.zeros(length), 16000)
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            tar.add(tmp_path / "rec.wav", "rec.wav")
        known.add(extraction._source(tmp_path / part, None, None))
        assert extraction._source(tmp_path / part, None, None) in known
    assert len(known) == 2
