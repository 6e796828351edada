"""Packing goes on where it was, and keeps all that 16 bits can hold."""

import errno
import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio import audio_exists, read_audio
from speechbrain_rev.audio.packed import INDEX, JOURNAL, TAR
from speechbrain_rev.audio.shards import members
from speechbrain_rev.data import audio_files
from speechbrain_rev.data.packing import Packing, pack
from tests.corpus import write_corpus

RATE = 16000


def begin(source, packed, count):
    """Pack the first files of a folder, and stop."""
    with Packing(packed, source=str(source.resolve()), sample_rate=RATE) as packing:
        for path in audio_files(source)[:count]:
            name = path.relative_to(source).as_posix()
            if name not in packing:
                packing.add(name, read_audio(path, sample_rate=RATE))
    return packed


@pytest.fixture
def begun(corpus, tmp_path):
    return begin(corpus, tmp_path / "begun.packed", 5)


def assert_same(one, other):
    for name in (TAR, INDEX):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert not (one / JOURNAL).exists()


class TestGoingOn:
    def test_it_goes_on_where_it_was(self, corpus, packed, begun):
        with pytest.raises(ValueError, match="not packed to its end"):
            audio_files(begun)
        # Samples behind those of the journal, and a line that is torn.
        with (begun / TAR).open("ab") as file:
            file.write(b"\1\2\3")
        with (begun / JOURNAL).open("a") as file:
            file.write('["wav/id00001/s0')
        begin(corpus, begun, 8)
        assert len((begun / JOURNAL).read_text().splitlines()) == 1 + 8
        pack(corpus, begun, sample_rate=RATE)
        assert_same(begun, packed)

    def test_ctrl_c_keeps_what_is_packed_and_says_so(
        self, corpus, packed, tmp_path, monkeypatch
    ):
        add, part = Packing.add, tmp_path / "part.packed"

        def third(made, *given):
            if len(made) == 3:
                raise KeyboardInterrupt
            add(made, *given)

        with monkeypatch.context() as patch:
            patch.setattr(Packing, "add", third)
            with pytest.raises(KeyboardInterrupt, match="packed is kept; the same com"):
                pack(corpus, part, sample_rate=RATE)
        assert len((part / JOURNAL).read_text().splitlines()) == 1 + 3
        pack(corpus, part, sample_rate=RATE)
        assert_same(part, packed)

    @pytest.mark.parametrize("change", [Path.unlink, lambda p: p.write_bytes(b"RIFF")])
    def test_a_source_that_changed_since_is_refused(self, corpus, tmp_path, change):
        source, part = tmp_path / "source", tmp_path / "part.packed"
        shutil.copytree(corpus, source)
        first, *_, last = audio_files(source)
        last.write_bytes(b"x")
        with pytest.raises(ValueError, match="1 cannot be read"):
            pack(source, part, sample_rate=RATE)
        # What was not packed may change.
        last.unlink()
        change(first)
        with pytest.raises(
            ValueError, match=r"1 file in .* changed or went .*pack anew"
        ):
            pack(source, part, sample_rate=RATE)

    def test_what_was_begun_with_others_is_refused(self, corpus, packed, begun):
        with (
            Packing(begun, source=str(corpus), sample_rate=RATE),
            pytest.raises(ValueError, match="Another process is packing"),
        ):
            Packing(begun, source=str(corpus), sample_rate=RATE)
        for other in ({"source": "a"}, {"sample_rate": 8000}):
            given = {"source": str(corpus), "sample_rate": RATE, **other}
            with pytest.raises(ValueError, match="was begun with"):
                Packing(begun, **given)
        with pytest.raises(ValueError, match="is packed already"):
            pack(corpus, packed, sample_rate=RATE)
        with pytest.raises(ValueError, match=r"does not end in \.packed.*Give x\.pack"):
            Packing(begun.with_name("x"), source="a", sample_rate=RATE)


class TestJournal:
    @pytest.mark.parametrize(
        "change",
        [
            lambda text: text + "no JSON\n",
            lambda text: text + '["a.wav", 5]\n',
            lambda text: text + "[" * 100_000 + "\n",
            # Without its first line.
            lambda text: text.partition("\n")[2],
        ],
    )
    def test_a_damaged_one_is_refused(self, corpus, begun, change):
        (begun / JOURNAL).write_text(change((begun / JOURNAL).read_text()))
        with pytest.raises(ValueError, match=rf"{JOURNAL} is damaged \(.*Delete"):
            pack(corpus, begun, sample_rate=RATE)

    def test_fewer_samples_than_it_has_are_refused(self, corpus, begun):
        os.truncate(begun / TAR, 100)
        with pytest.raises(ValueError, match=r"has 100 bytes, less than.*Delete"):
            pack(corpus, begun, sample_rate=RATE)


@pytest.mark.parametrize(
    ("subtype", "loud", "stored"),
    [
        ("PCM_16", 1.0, "PCM_16"),
        ("FLOAT", 3.0, "FLOAT"),
        ("PCM_24", 0.01, "FLOAT"),
    ],
)
def test_samples_of_any_kind_come_back_to_the_bit(tmp_path, subtype, loud, stored):
    path, packed = tmp_path / "source/a.wav", tmp_path / "a.packed"
    path.parent.mkdir()
    soundfile.write(path, loud * np.linspace(-1, 1, 999) ** 3, RATE, subtype=subtype)
    pack(path.parent, packed, sample_rate=RATE)
    with soundfile.SoundFile(path) as file:
        original = file.read(dtype="float32")
    assert np.array_equal(read_audio(packed / "a.wav", sample_rate=RATE), original)
    part = read_audio(packed / "a.wav", sample_rate=RATE, start=100, samples=300)
    assert np.array_equal(part, original[100:400])
    with tarfile.open(packed / TAR) as tar:
        member = io.BytesIO(tar.extractfile("a.wav").read())
    with soundfile.SoundFile(member) as file:
        assert file.subtype == stored
        assert np.array_equal(file.read(dtype="float32"), original)


@pytest.mark.parametrize(
    "name", ["ü.wav", f"{'a' * 120}/{'b' * 90}ü.wav", "\udcff.wav"]
)
def test_names_of_any_length_and_bytes_are_members(tmp_path, name):
    folder = tmp_path / "a.packed"
    with Packing(folder, source="a", sample_rate=RATE) as made:
        for each in (name, "b.wav"):
            made.add(each, torch.ones(5) / 2)
        made.finish()
    assert [member.name for member in members(folder / TAR)] == [name, "b.wav"]
    assert audio_files(folder) == sorted([folder / name, folder / "b.wav"])
    for each in (name, "b.wav"):
        assert read_audio(folder / each, sample_rate=RATE).tolist() == [0.5] * 5


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Packing(tmp_path / "a.packed", source="a", sample_rate=RATE) as made:
        made.add("a.wav", torch.ones(5) / 2)
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match=r"No space left.*goes on where it was"):
            made.finish()
        monkeypatch.undo()


def test_names_may_be_added_in_any_order(corpus, tmp_path):
    one = tmp_path / "one.packed"
    with Packing(one, source="corpus", sample_rate=RATE) as packing:
        for path in reversed(audio_files(corpus)):
            name = path.relative_to(corpus).as_posix()
            packing.add(name, read_audio(path, sample_rate=RATE))
        packing.finish()
    for path in audio_files(corpus):
        inside = read_audio(one / path.relative_to(corpus), sample_rate=RATE)
        assert torch.equal(inside, read_audio(path, sample_rate=RATE))
    assert not audio_exists(one / "nobody.wav")


def test_files_that_cannot_be_used_are_refused_or_left_out(tmp_path, capsys):
    source, packed = tmp_path / "corpus", tmp_path / "a.packed"
    session = write_corpus(source, speakers=2, seconds=0.1) / "wav/id00000/s00"
    (session / "text.wav").write_text("RIFF or not")
    noise = 0.1 * np.random.default_rng(0).standard_normal((800, 2))
    soundfile.write(session / "stereo.wav", noise, RATE)
    (session / "other.opus").write_bytes(b"OggS")
    (session / "00000.m4a").write_bytes(b"what 00000.wav is from")
    (session / "._00000.wav").write_bytes(b"what macOS left")
    with pytest.raises(ValueError, match=r"3 of 11 files cannot.*--bad_files=drop"):
        pack(source, packed, sample_rate=RATE)
    # What could be packed is there when it goes on.
    given = {"sample_rate": RATE, "drop": True, "channel": 0}
    assert pack(source, packed, **given) == 9
    said = capsys.readouterr().out
    assert "2 of 11 files cannot be used" in said
    assert "hidden, or a WAV or FLAC was made of them: 2 files, such as " in said
    listed = (packed / "left_out.csv").read_text()
    assert "text.wav,cannot be read" in listed
    assert "other.opus,cannot be read" in listed
    first = read_audio(packed / "wav/id00000/s00/stereo.wav", sample_rate=RATE)
    assert np.allclose(first, noise[:, 0], atol=2**-15)


def test_a_folder_of_which_nothing_can_be_packed_is_refused(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/text.wav").write_text("RIFF or not")
    with pytest.raises(ValueError, match="nothing is packed"):
        pack(tmp_path / "source", tmp_path / "a.packed", sample_rate=RATE, drop=True)
