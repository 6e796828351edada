"""No samples are missing, and none are too many, whatever a header says of them."""

import os
import struct

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.data import audio_info, read_audio, read_blocks, read_first_channel
from tests.audio_headers import say

from .test_reading import RAMP, RATE


@pytest.fixture(scope="module")
def noise():
    return np.random.default_rng(0).standard_normal(48000) / 10


READERS = [
    audio_info,
    lambda path: read_audio(path, sample_rate=RATE),
    lambda path: read_audio(path, sample_rate=RATE, samples=10),
    lambda path: read_first_channel(path, sample_rate=RATE),
    lambda path: list(read_blocks(path)),
]


def read_in_all_ways(path):
    """Read a file whole with each reader, and check that they agree on its length."""
    whole = read_audio(path, sample_rate=RATE)
    parts = ({"samples": 700}, {"start": 700})
    for wav in (
        read_first_channel(path, sample_rate=RATE),
        torch.cat(list(read_blocks(path, block_samples=300)), dim=1)[0],
        read_audio(path, sample_rate=RATE, samples=10**6),
        torch.cat([read_audio(path, sample_rate=RATE, **part) for part in parts]),
    ):
        assert torch.equal(wav, whole)
    assert audio_info(path).samples == len(whole)
    assert read_audio(path, sample_rate=RATE, start=10**6, samples=9).shape == (0,)
    return whole


HEADERS = [
    ("WAV", "PCM_16", None),
    ("WAV", "PCM_U8", None),
    ("WAV", "PCM_16", "BIG"),
    ("WAVEX", "PCM_24", None),
    ("RF64", "PCM_24", None),
    ("W64", "PCM_24", None),
    ("AIFF", "FLOAT", None),
    ("AU", "ULAW", None),
    ("CAF", "PCM_16", None),
    ("NIST", "PCM_16", None),
    ("NIST", "ALAW", None),
]


@pytest.mark.parametrize(
    ("format", "subtype", "endian"), [*HEADERS, ("FLAC", "PCM_16", None)]
)
def test_all_samples_are_read_and_no_others_wherever_a_file_ends(
    tmp_path, format, subtype, endian
):
    path = tmp_path / "cut.wav"
    given = {"format": format, "subtype": subtype, "endian": endian}
    # An odd number of bytes in some.
    soundfile.write(path, RAMP[:101], RATE, **given)
    content, whole = path.read_bytes(), read_in_all_ways(path)
    assert len(whole) == 101
    if format != "FLAC":
        path.write_bytes(content + b"\1" * 101)
        assert torch.equal(read_in_all_ways(path), whole)
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


@pytest.mark.parametrize("format", ["VOC", "IRCAM", "PVF", "AVR"])
def test_a_format_of_unknown_length_is_refused(tmp_path, format):
    path = tmp_path / "some.wav"
    soundfile.write(path, RAMP, RATE, format=format, subtype="PCM_16")
    with pytest.raises(ValueError, match=rf"some\.wav .* {format} .* Convert it to WA"):
        audio_info(path)


def joined(content):
    return content + content


def with_samples(content):
    return content + content[-9000:]


@pytest.mark.parametrize("change", [joined, with_samples])
@pytest.mark.parametrize("format", ["WAV", "WAVEX", "RF64", "W64", "AIFF", "CAF"])
def test_samples_behind_those_that_a_header_has_are_not_passed_over(
    tmp_path, noise, format, change
):
    path = tmp_path / "more.wav"
    soundfile.write(path, noise[:9001], RATE, format=format, subtype="PCM_16")
    content = path.read_bytes()
    path.write_bytes(change(content))
    with pytest.raises(
        ValueError, match=r"more\.wav .* bytes follow the 180\d\d.* Files were joined"
    ):
        audio_info(path)


@pytest.mark.parametrize(
    "behind",
    [
        b"LIST" + struct.pack("<I", 5000) + b"INFO" + bytes(range(256)) * 20,
        b"id3 " + struct.pack("<I", 5000) + b"\1" * 5000 + bytes(4096),
        b"TAG+" + b"\1" * 5000,
        bytes(50_000),
    ],
)
@pytest.mark.parametrize("samples", [9000, 9001])
def test_chunks_tags_and_zeros_behind_the_samples_are_passed_over(
    tmp_path, noise, behind, samples
):
    path = tmp_path / "tagged.wav"
    soundfile.write(path, noise[:samples], RATE, subtype="PCM_U8")
    whole = read_in_all_ways(path)
    path.write_bytes(path.read_bytes() + behind[: 5008 if b"LIST" in behind else None])
    assert torch.equal(read_in_all_ways(path), whole)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_ogg_files_that_were_joined_are_refused(tmp_path, noise, subtype):
    path = tmp_path / "joined.ogg"
    soundfile.write(path, noise, RATE, format="OGG", subtype=subtype)
    assert len(read_in_all_ways(path)) == 48000
    path.write_bytes(joined(path.read_bytes()))
    for read in READERS:
        with pytest.raises(
            ValueError, match=r"joined\.ogg .* several OGG files joined"
        ):
            read(path)


STREAMS = {
    **{
        ("WAV", hex(size)): (b"data", 4, "<I", size)
        for size in (0, 0x7FFF_F000, 0xFFFF_FFFF)
    },
    ("WAVEX", "0"): (b"data", 4, "<I", 0),
    ("RF64", "0"): (b"ds64", 16, "<QQ", 0, 0),
    ("RF64", "-1"): (b"ds64", 16, "<q", -1),
    ("W64", "empty"): (b"data", 16, "<Q", 24),
    ("W64", "largest"): (b"data", 16, "<Q", 2**63 - 1),
    ("AIFF", "0"): (b"SSND", 4, ">I", 0),
    ("AIFF", "empty"): (b"SSND", 4, ">I", 8),
    ("AIFF", "largest"): (b"SSND", 4, ">I", 0x7F00_0008),
    ("AU", "0"): (b".snd", 8, ">I", 0),
    ("AU", "-1"): (b".snd", 8, ">i", -1),
    ("CAF", "-1"): (b"data", 4, ">q", -1),
    ("CAF", "empty"): (b"data", 4, ">q", 4),
    # 4 bits of it are in the byte before.
    ("FLAC", "0"): (b"fLaC", 22, ">I", 0),
}


class TestStreams:
    """The writer of a stream does not know its end, and writes no size."""

    @pytest.mark.parametrize(("format", "size"), STREAMS)
    def test_it_has_the_samples_that_there_are(self, tmp_path, noise, format, size):
        path = tmp_path / "stream.wav"
        soundfile.write(path, noise[:9001], RATE, format=format, subtype="PCM_16")
        whole = read_in_all_ways(path)
        say(path, *STREAMS[format, size])
        assert len(whole) == 9001
        assert torch.equal(read_in_all_ways(path), whole)

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
    def path(self, tmp_path, noise):
        path = tmp_path / "stream.flac"
        soundfile.write(path, noise, RATE)
        say(path, b"fLaC", 22, ">I", 0)
        return path

    def test_a_tag_before_it_is_skipped(self, path, noise):
        # Of the size 128 + 1, in bytes of seven bits.
        tag = b"ID3\3\0\0\0\0\1\1" + bytes(129)
        path.write_bytes(tag + path.read_bytes())
        assert len(read_in_all_ways(path)) == len(noise)

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
        with pytest.raises(ValueError, match=r"stream\.flac holds no samples"):
            audio_info(path)

    def test_it_needs_a_libsndfile_that_reports_a_cut(self, path, monkeypatch):
        monkeypatch.setattr(soundfile, "__libsndfile_version__", "1.2.0")
        with pytest.raises(ValueError, match=r"stream\.flac .*libsndfile 1\.2\.0 not"):
            audio_info(path)
        # Of a version that has no number at its end.
        monkeypatch.setattr(soundfile, "__libsndfile_version__", "1.2.2-exp")
        assert audio_info(path).samples == 48000


def cut(path, part):
    os.truncate(path, int(part * path.stat().st_size))


def test_fewer_samples_than_the_header_has_are_refused(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "ramp.flac", RAMP, RATE)
    monkeypatch.setattr(soundfile.SoundFile, "frames", 1001)
    with pytest.raises(
        ValueError, match="header says 1001 samples, and there are 1000"
    ):
        list(read_blocks(tmp_path / "ramp.flac"))


@pytest.mark.parametrize(
    ("format", "subtype", "reason"),
    [
        ("MP3", None, "its header says 48000 samples, and there are"),
        ("OGG", "VORBIS", "its last page is not marked as the end"),
        ("OGG", "OPUS", "its last page is not marked as the end"),
    ],
)
def test_of_an_estimated_length_a_warning_names_what_seems_to_be_missing(
    tmp_path, noise, format, subtype, reason, caplog
):
    path = tmp_path / "some.audio"
    soundfile.write(path, noise, RATE, format=format, subtype=subtype)
    assert sum(block.shape[1] for block in read_blocks(path)) == 48000
    assert not caplog.text
    cut(path, 0.6)
    assert 10000 < sum(block.shape[1] for block in read_blocks(path)) < 40000
    assert f"{path} seems to be cut short" in caplog.text
    assert reason in caplog.text
