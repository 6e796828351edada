"""Formats and their damages: all samples are read and no others, or a file is refused."""

import os
import struct

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio import audio_info, read_audio, read_blocks
from tests.audio_headers import say

from .test_reading import RAMP, RATE

NOISE = np.random.default_rng(0).standard_normal(48000) / 10
READERS = [
    audio_info,
    lambda path: read_audio(path, sample_rate=RATE),
    lambda path: read_audio(path, sample_rate=RATE, samples=10),
    lambda path: list(read_blocks(path)),
]


def read_in_all_ways(path):
    """Read a file whole with each reader, and check that they agree on its length."""
    whole = read_audio(path, sample_rate=RATE)
    parts = ({"samples": 700}, {"start": 700})
    for wav in (
        torch.cat(list(read_blocks(path, block_samples=300)), dim=1)[0],
        read_audio(path, sample_rate=RATE, samples=10**6),
        torch.cat([read_audio(path, sample_rate=RATE, **part) for part in parts]),
    ):
        assert torch.equal(wav, whole)
    assert audio_info(path).samples == len(whole)
    assert read_audio(path, sample_rate=RATE, start=10**6, samples=9).shape == (0,)
    return whole


def by_library(path):
    """What libsndfile reads itself; None where it refuses the file."""
    try:
        return torch.from_numpy(soundfile.read(path, dtype="float32")[0])
    except soundfile.LibsndfileError:
        return None


DAMAGES = {
    "whole": lambda content: content,
    "cut": lambda content: content[: len(content) * 3 // 5],
    "followed": lambda content: content + b"\1" * 101,
    "joined": lambda content: content + content,
    "with samples": lambda content: content + content[-9000:],
}
ALL, FEWER, LIBRARY = "all samples", "those before the cut", "those of libsndfile"
CUT, JOINED = r"is cut short, \d+ of \d+ bytes", r"bytes follow .* Files were joined"
RIFF = {"cut": CUT, "joined": JOINED, "with samples": JOINED}
SPHERE = {"cut": CUT}
AS_LIBRARY = dict.fromkeys(["cut", "followed", "joined", "with samples"], LIBRARY)
#: What becomes of each damage: all samples unless it is named.
FORMATS = {
    ("WAV", "PCM_16", None): RIFF,
    ("WAV", "PCM_U8", None): RIFF,
    ("WAV", "PCM_16", "BIG"): RIFF,
    ("WAVEX", "PCM_24", None): RIFF,
    ("RF64", "PCM_24", None): RIFF,
    ("NIST", "PCM_16", None): SPHERE,
    ("NIST", "ALAW", None): SPHERE,
    ("FLAC", "PCM_16", None): {"cut": "cannot be read as audio: "},
    ("OGG", "VORBIS", None): {"cut": FEWER},
    ("OGG", "OPUS", None): {"cut": FEWER},
    ("MP3", "MPEG_LAYER_III", None): {"cut": FEWER},
    ("W64", "PCM_24", None): AS_LIBRARY,
    ("AIFF", "FLOAT", None): AS_LIBRARY,
    ("AU", "ULAW", None): AS_LIBRARY,
    ("CAF", "PCM_16", None): AS_LIBRARY,
    ("VOC", "PCM_16", None): AS_LIBRARY,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_damaged_file_has_all_its_samples_or_is_refused(tmp_path, form, damage):
    path, (format, subtype, endian) = tmp_path / "a.wav", form
    given = {"format": format, "subtype": subtype, "endian": endian}
    soundfile.write(path, NOISE[:40001], RATE, **given)
    whole = read_in_all_ways(path)
    assert len(whole) == 40001
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    outcome = FORMATS[form].get(damage, ALL)
    if outcome == LIBRARY:
        wanted = by_library(path)
        outcome = "cannot be read as audio: " if wanted is None else LIBRARY
    if outcome == ALL:
        assert torch.equal(read_in_all_ways(path), whole)
    elif outcome == LIBRARY:
        assert torch.equal(read_in_all_ways(path), wanted)
    elif outcome == FEWER:
        part = read_in_all_ways(path)
        assert 8000 < len(part) < 32000
        # A decoder makes up what the last packet leaves open.
        assert torch.equal(part[:-3000], whole[: len(part) - 3000])
    else:
        with pytest.raises(ValueError, match=rf"a\.wav .*{outcome}"):
            read_audio(path, sample_rate=RATE)


SIZED = [form for form, outcomes in FORMATS.items() if outcomes in (RIFF, SPHERE)]


@pytest.mark.parametrize("form", SIZED, ids=str)
def test_a_file_that_says_its_size_is_refused_wherever_it_ends(tmp_path, form):
    path, (format, subtype, endian) = tmp_path / "cut.wav", form
    given = {"format": format, "subtype": subtype, "endian": endian}
    # An odd number of bytes in some.
    soundfile.write(path, RAMP[:101], RATE, **given)
    content, whole = path.read_bytes(), read_in_all_ways(path)
    last, refused = len(content) - 100, []
    sizes = [*range(1, last, 31), *range(last, len(content))]
    for size in sizes:
        path.write_bytes(content[:size])
        try:
            (block,) = read_blocks(path)
        except ValueError as error:
            refused.append(str(error))
            continue
        # A byte that makes the size even.
        assert size == len(content) - 1
        assert torch.equal(block[0], whole)
    assert len(refused) >= len(sizes) - 1
    assert all(str(path) in message for message in refused)


@pytest.mark.parametrize("read", READERS)
def test_each_reader_refuses_a_file_that_is_cut_short(tmp_path, read):
    path = tmp_path / "cut.wav"
    soundfile.write(path, RAMP, RATE)
    os.truncate(path, 2044 - 900)
    with pytest.raises(
        ValueError, match=r"cut\.wav .* cut short, 900 of 2000 .*Copy or convert"
    ):
        read(path)


def test_an_mp3_that_is_shorter_than_its_header_says_is_named(tmp_path, caplog):
    path = tmp_path / "a.mp3"
    soundfile.write(path, NOISE, RATE)
    assert sum(block.shape[1] for block in read_blocks(path)) == 48000
    assert not caplog.text
    os.truncate(path, int(0.6 * path.stat().st_size))
    assert 10000 < sum(block.shape[1] for block in read_blocks(path)) < 40000
    words = (
        f"{path} seems to be cut short: its header says 48000 samples, and there are"
    )
    assert words in caplog.text


@pytest.mark.parametrize(
    "behind",
    [
        b"LIST" + struct.pack("<I", 5000) + b"INFO" + bytes(range(256)) * 20,
        b"id3 " + struct.pack("<I", 5000) + b"\1" * 5000 + bytes(4096),
        b"TAG+" + b"\1" * 5000,
        b"ID3\3" + b"\1" * 5000,
        bytes(50_000),
    ],
    ids=["LIST", "id3 ", "TAG+", "ID3", "zeros"],
)
@pytest.mark.parametrize("samples", [9000, 9001])
def test_chunks_tags_and_zeros_behind_the_samples_are_passed_over(
    tmp_path, behind, samples
):
    path = tmp_path / "tagged.wav"
    soundfile.write(path, NOISE[:samples], RATE, subtype="PCM_U8")
    whole = read_in_all_ways(path)
    path.write_bytes(path.read_bytes() + behind[: 5008 if b"LIST" in behind else None])
    assert torch.equal(read_in_all_ways(path), whole)


class TestWidths:
    """A header has the bytes of a sample thrice: bits, bytes of all channels, a second."""

    @pytest.mark.parametrize("order", ["LITTLE", "BIG"])
    @pytest.mark.parametrize(
        ("subtype", "bits", "block"),
        [("PCM_16", 8, 2), ("PCM_16", 8, 1), ("PCM_U8", 16, 1), ("PCM_24", 16, 3)],
    )
    def test_another_width_than_that_of_the_samples_is_refused(
        self, tmp_path, subtype, bits, block, order
    ):
        path = tmp_path / "lies.wav"
        soundfile.write(path, NOISE, RATE, subtype=subtype, endian=order)
        assert len(read_in_all_ways(path)) == 48000
        say(path, b"fmt ", 20, "<HH" if order == "LITTLE" else ">HH", block, bits)
        for read in READERS:
            with pytest.raises(
                ValueError, match=rf"lies\.wav .* says {bits} bits .*, and sizes as of"
            ):
                read(path)

    def test_bytes_per_second_that_are_of_no_width_say_nothing(self, tmp_path):
        path = tmp_path / "sloppy.wav"
        soundfile.write(path, NOISE, RATE)
        say(path, b"fmt ", 16, "<I", 0)
        assert len(read_in_all_ways(path)) == 48000


STREAMS = {
    **{
        ("WAV", hex(size)): (b"data", 4, "<I", size)
        for size in (0, 0x7FFF_F000, 0x8000_0000, 0xFFFF_FFFF)
    },
    ("WAVEX", "0"): (b"data", 4, "<I", 0),
    ("RF64", "0"): (b"ds64", 16, "<QQ", 0, 0),
    ("RF64", "-1"): (b"ds64", 16, "<q", -1),
    # 4 bits of it are in the byte before.
    ("FLAC", "0"): (b"fLaC", 22, ">I", 0),
}


class TestStreams:
    """The writer of a stream does not know its end, and writes no size."""

    @pytest.mark.parametrize(("format", "size"), STREAMS)
    def test_it_has_the_samples_that_there_are(self, tmp_path, format, size):
        path = tmp_path / "stream.wav"
        soundfile.write(path, NOISE[:9001], RATE, format=format, subtype="PCM_16")
        whole = read_in_all_ways(path)
        say(path, *STREAMS[format, size])
        assert len(whole) == 9001
        assert torch.equal(read_in_all_ways(path), whole)
        assert not audio_info(path).lossy

    @pytest.mark.parametrize("riff", [0, 0xFFFF_FFFF])
    def test_the_size_of_the_whole_wav_file_is_not_needed(self, tmp_path, riff):
        path = tmp_path / "stream.wav"
        soundfile.write(path, np.stack([RAMP, -RAMP], axis=1), RATE)
        say(path, b"RIFF", 4, "<I", riff)
        say(path, b"data", 4, "<I", 0)
        both = torch.cat(list(read_blocks(path, block_samples=300)), dim=1)
        assert torch.equal(both, torch.tensor(np.stack([RAMP, -RAMP])) / 2**15)

    def test_a_long_file_that_is_cut_short_is_none(self, tmp_path):
        path = tmp_path / "cut.wav"
        soundfile.write(path, RAMP, RATE)
        say(path, b"data", 4, "<I", 3_000_000_000)
        with pytest.raises(ValueError, match="cut short, 2999998000 of 3000000000"):
            audio_info(path)

    def test_more_than_a_header_can_hold_is_refused_and_not_cut_off(self, tmp_path):
        path = tmp_path / "days.wav"
        soundfile.write(path, RAMP, RATE)
        say(path, b"data", 4, "<I", 0)
        os.truncate(path, 2**32 + 100)
        with pytest.raises(ValueError, match=r"days\.wav .*more than .* Convert it to"):
            audio_info(path)

    def test_other_chunks_alone_are_no_samples(self, tmp_path):
        path = tmp_path / "empty.wav"
        soundfile.write(path, RAMP[:0], RATE)
        text = b"INFOISFT" + struct.pack("<I", 5001) + b"a" * 5001
        with path.open("ab") as file:
            file.write(b"LIST" + struct.pack("<I", len(text)) + text + b"\0")
        assert audio_info(path).samples == 0


class TestFlacOfUnknownLength:
    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "stream.flac"
        soundfile.write(path, NOISE, RATE)
        say(path, b"fLaC", 22, ">I", 0)
        return path

    def test_a_tag_before_it_is_skipped(self, path):
        # Of the size 128 + 1, in bytes of seven bits.
        tag = b"ID3\3\0\0\0\0\1\1" + bytes(129)
        path.write_bytes(tag + path.read_bytes())
        assert len(read_in_all_ways(path)) == len(NOISE)

    @pytest.mark.parametrize("missing", [1, 100, 5000])
    def test_it_is_refused_where_it_is_cut_short(self, path, missing):
        os.truncate(path, path.stat().st_size - missing)
        for read in (audio_info, lambda path: list(read_blocks(path))):
            with pytest.raises(ValueError, match=r"stream\.flac cannot be read as aud"):
                read(path)

    def test_without_frames_it_holds_no_samples(self, path):
        content = bytearray(path.read_bytes()[:42])
        # The only block of the header.
        content[4] |= 128
        path.write_bytes(content)
        assert audio_info(path).samples == 0


def test_flac_with_fewer_samples_than_its_header_has_is_refused(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "ramp.flac", RAMP, RATE)
    monkeypatch.setattr(soundfile.SoundFile, "frames", 1001)
    with pytest.raises(
        ValueError, match="header says 1001 samples, and there are 1000"
    ):
        list(read_blocks(tmp_path / "ramp.flac"))
