"""Packing goes on where it was, and keeps all that 16 bits can hold."""

import errno
import json
import math
import os
import zlib

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio.columns import map_columns
from speechbrain_rev.audio.packed import INDEX, JOURNAL, SAMPLES
from speechbrain_rev.data import (
    audio_exists,
    audio_files,
    read_audio,
)
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
    assert (one / SAMPLES).read_bytes() == (other / SAMPLES).read_bytes()
    (columns, about), (wanted, of_all) = map(map_columns, (one / INDEX, other / INDEX))
    assert about == of_all
    for name in wanted:
        assert list(columns[name]) == list(wanted[name])
    assert not (one / JOURNAL).exists()


class TestGoingOn:
    def test_it_goes_on_where_it_was(self, corpus, packed, begun):
        with pytest.raises(ValueError, match="not packed to its end"):
            audio_files(begun)
        # Samples behind those of the journal, and a line that is torn.
        with (begun / SAMPLES).open("ab") as file:
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

        def third(made, name, samples):
            if len(made) == 3:
                raise KeyboardInterrupt
            add(made, name, samples)

        with monkeypatch.context() as patch:
            patch.setattr(Packing, "add", third)
            with pytest.raises(KeyboardInterrupt, match="packed is kept; the same com"):
                pack(corpus, part, sample_rate=RATE)
        assert len((part / JOURNAL).read_text().splitlines()) == 1 + 3
        pack(corpus, part, sample_rate=RATE)
        assert_same(part, packed)

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


WAV = "wav/id00000/s00/00000.wav"


def summed(*row):
    """A line of a journal, with its checksum."""
    return json.dumps([*row, zlib.crc32(json.dumps(row).encode())])


class TestJournal:
    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("no JSON", "Expecting value"),
            ('["a.wav", 5]', "is no file with its length"),
            ('["a.wav", 5, 1.0]', "is no file with its length"),
            (summed("", 5, 1.0), "'' is no name"),
            (summed("a.wav", -5, 1.0), "a.wav has -5 samples"),
            (summed("a.wav", True, 1.0), "a.wav has True samples"),
            (summed("a.wav", 10**30, 1.0), f"a.wav has {10**30} samples"),
            (summed("a.wav", 5, math.nan), "a.wav has the scale nan"),
            (summed("a.wav", 5, 0.0), "a.wav has the scale 0.0"),
            (summed(WAV, 0, 1.0), f"{WAV} is there twice"),
            ("[" * 100_000, "recursion"),
        ],
    )
    def test_other_lines_than_files_are_refused(self, corpus, begun, line, reason):
        with (begun / JOURNAL).open("a") as file:
            file.write(line + "\n")
        named = rf"{JOURNAL} is damaged in line 7 \(.*{reason}.*Delete"
        with pytest.raises(ValueError, match=named):
            pack(corpus, begun, sample_rate=RATE)

    def test_a_changed_length_and_a_lost_line_are_noticed(self, corpus, begun):
        lines = (begun / JOURNAL).read_text().splitlines()
        name, samples, *rest = json.loads(lines[3])
        changed = [*lines[:3], json.dumps([name, samples - 1, *rest]), *lines[4:]]
        for text, reason in ((changed, r"4 \(it is not as it was"), (lines[1:], "1 ")):
            (begun / JOURNAL).write_text("\n".join(text) + "\n")
            with pytest.raises(ValueError, match=f"damaged in line {reason}"):
                pack(corpus, begun, sample_rate=RATE)

    def test_fewer_samples_than_it_has_are_refused(self, corpus, begun):
        os.truncate(begun / SAMPLES, 100)
        with pytest.raises(ValueError, match=r"has 100 bytes, less than.*Delete"):
            pack(corpus, begun, sample_rate=RATE)


@pytest.mark.parametrize(("subtype", "loud"), [("FLOAT", 3.0), ("PCM_24", 0.01)])
def test_samples_of_more_than_16_bits_keep_16_of_them(tmp_path, subtype, loud):
    path = tmp_path / "source/a.wav"
    path.parent.mkdir()
    soundfile.write(path, loud * np.linspace(-0.9, 1, 999) ** 3, RATE, subtype=subtype)
    pack(path.parent, tmp_path / "a.packed", sample_rate=RATE)
    inside = read_audio(tmp_path / "a.packed/a.wav", sample_rate=RATE)
    original = read_audio(path, sample_rate=RATE)
    step = original.abs().max() / (2**15 - 1)
    # Half a step, and what float32 makes of the largest sample.
    assert (inside - original).abs().max() <= 0.5 * step + 2e-7 * loud
    assert not torch.equal(inside, original)


def test_what_16_bits_cannot_hold_is_refused_by_name(tmp_path):
    inside = tmp_path / "a.packed"
    with Packing(inside, source="a", sample_rate=RATE) as made:
        made.add("a.wav", torch.ones(5) / 2)
        with pytest.raises(ValueError, match=r"a\.wav is in .* already"):
            made.add("a.wav", torch.ones(5) / 2)
        with pytest.raises(ValueError, match=r"b\.wav holds NaN"):
            made.add("b.wav", torch.tensor([0.1, float("nan")]))
        made.add("quiet.wav", torch.full((5,), 1e-43))
        made.finish()
    for name, value in (("quiet.wav", 0.0), ("a.wav", 0.5)):
        assert read_audio(inside / name, sample_rate=RATE).tolist() == [value] * 5


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Packing(tmp_path / "a.packed", source="a", sample_rate=RATE) as made:
        made.add("a.wav", torch.ones(5) / 2)
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match=r"No space left.*goes on where it was"):
            made.finish()
        monkeypatch.undo()


def test_names_in_any_order_and_with_one_key_are_told_apart(
    corpus, tmp_path, monkeypatch
):
    for module in ("audio.packed", "data.packing"):
        key = f"speechbrain_rev.{module}.key_of"
        monkeypatch.setattr(key, lambda name: np.int64(7))
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
