import os
import struct

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.data import (
    audio_info,
    read_audio,
    read_blocks,
    read_first_channel,
)
from tests.audio_headers import say

RAMP = np.arange(1000, dtype=np.int16)


@pytest.fixture(params=[".wav", ".flac"])
def ramp(request, tmp_path):
    path = tmp_path / f"ramp{request.param}"
    soundfile.write(path, RAMP, 16000)
    return path


@pytest.mark.parametrize(
    ("start", "samples", "expected"),
    [(0, None, RAMP), (100, 50, RAMP[100:150]), (990, 50, RAMP[990:]), (2000, 5, [])],
)
def test_the_samples_asked_for_are_read_exactly(ramp, start, samples, expected):
    wav = read_audio(ramp, sample_rate=16000, start=start, samples=samples)
    assert torch.equal(wav, torch.tensor(np.array(expected) / 2**15).float())


def test_the_header_tells_length_rate_and_channels(ramp):
    info = audio_info(ramp)
    assert (info.samples, info.sample_rate, info.channels) == (1000, 16000, 1)


def test_another_rate_is_refused_with_both_rates_and_the_remedy(ramp):
    with pytest.raises(ValueError, match=r"16000 samples .* 8000 are expected.*sox"):
        read_audio(ramp, sample_rate=8000)
    with pytest.raises(ValueError, match="8000 are expected"):
        read_first_channel(ramp, sample_rate=8000)


def test_several_channels_are_refused_unless_their_treatment_is_said(tmp_path):
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.stack([RAMP, -RAMP // 2], axis=1), 16000)
    with pytest.raises(ValueError, match=r"2 channels.*remix"):
        read_audio(path, sample_rate=16000)
    mean = torch.cat(list(read_blocks(path, block_samples=999)), dim=1).mean(dim=0)
    both = np.stack([RAMP, -RAMP // 2]).mean(axis=0) / 2**15
    assert torch.equal(mean, torch.tensor(both).float())
    first = read_first_channel(path, sample_rate=16000)
    assert torch.equal(first, torch.tensor(RAMP / 2**15).float())


def test_an_unreadable_file_is_named(tmp_path):
    path = tmp_path / "broken.flac"
    path.write_bytes(b"no audio at all")
    with pytest.raises(ValueError, match=r"broken\.flac cannot be read"):
        read_audio(path, sample_rate=16000)
    with pytest.raises(ValueError, match=r"none\.wav .*no such file"):
        audio_info(tmp_path / "none.wav")


def read_in_all_ways(path):
    """Read a file whole with each reader, and check that they agree on its length."""
    whole = read_audio(path, sample_rate=16000)
    for wav in (
        read_first_channel(path, sample_rate=16000),
        torch.cat(list(read_blocks(path, block_samples=300)), dim=1)[0],
        read_audio(path, sample_rate=16000, samples=10**6),
        torch.cat(
            [
                read_audio(path, sample_rate=16000, samples=700),
                read_audio(path, sample_rate=16000, start=700),
            ]
        ),
    ):
        assert torch.equal(wav, whole)
    assert audio_info(path).samples == len(whole)
    assert read_audio(path, sample_rate=16000, start=10**6, samples=9).shape == (0,)
    return whole


HEADERS = [
    ("WAV", "PCM_16"),
    ("WAV", "PCM_U8"),
    ("WAV", "FLOAT"),
    ("WAVEX", "PCM_24"),
    ("RF64", "PCM_16"),
    ("RF64", "PCM_24"),
    ("W64", "PCM_16"),
    ("W64", "PCM_24"),
    ("AIFF", "PCM_16"),
    ("AIFF", "FLOAT"),
    ("AU", "PCM_16"),
    ("AU", "ULAW"),
    ("CAF", "PCM_16"),
    ("NIST", "PCM_16"),
    ("NIST", "ALAW"),
]


@pytest.mark.parametrize(("format", "subtype"), HEADERS)
@pytest.mark.parametrize("missing", [1, 2, 200, 900])
def test_a_file_that_is_cut_short_is_refused_by_every_reader(
    tmp_path, format, subtype, missing
):
    path = tmp_path / "cut.wav"
    soundfile.write(path, RAMP, 16000, format=format, subtype=subtype)
    assert len(read_in_all_ways(path)) == 1000
    os.truncate(path, path.stat().st_size - missing)
    for read in (
        audio_info,
        lambda path: read_audio(path, sample_rate=16000),
        lambda path: read_audio(path, sample_rate=16000, samples=10),
        lambda path: read_first_channel(path, sample_rate=16000),
        lambda path: list(read_blocks(path)),
    ):
        with pytest.raises(
            ValueError, match=rf"cut\.wav .* cut short, {missing} of .* Copy or convert"
        ):
            read(path)


@pytest.mark.parametrize(("format", "subtype"), [*HEADERS, ("FLAC", "PCM_16")])
def test_wherever_a_file_ends_no_samples_are_missing_unsaid(tmp_path, format, subtype):
    path = tmp_path / "cut.wav"
    soundfile.write(path, RAMP[:101], 16000, format=format, subtype=subtype)
    content, whole = path.read_bytes(), read_audio(path, sample_rate=16000)
    sizes = [
        *range(1, len(content) - 100, 31),
        *range(len(content) - 100, len(content)),
    ]
    refused = []
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


@pytest.mark.parametrize(("format", "subtype"), HEADERS)
def test_what_follows_the_samples_is_none_of_them(tmp_path, format, subtype):
    path = tmp_path / "padded.wav"
    # An odd number of bytes in some.
    soundfile.write(path, RAMP[:999], 16000, format=format, subtype=subtype)
    whole = read_in_all_ways(path)
    with path.open("ab") as file:
        file.write(b"\1" * 101)
    assert len(whole) == 999
    assert torch.equal(read_in_all_ways(path), whole)


def test_a_wav_file_of_the_other_byte_order_is_not_cut_unseen(tmp_path):
    path = tmp_path / "cut.wav"
    soundfile.write(path, RAMP, 16000, endian="BIG", format="WAV")
    assert path.read_bytes()[:4] == b"RIFX"
    assert len(read_in_all_ways(path)) == 1000
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(ValueError, match="cut short, 2 of 2000"):
        audio_info(path)


def test_a_long_wav_file_that_is_cut_short_is_no_stream(tmp_path):
    path = tmp_path / "cut.wav"
    soundfile.write(path, RAMP, 16000)
    say(path, b"data", 4, "<I", 3_000_000_000)
    with pytest.raises(ValueError, match="cut short, 2999998000 of 3000000000"):
        audio_info(path)


@pytest.mark.parametrize("format", ["VOC", "IRCAM", "PVF", "AVR"])
def test_a_format_of_which_a_cut_cannot_be_told_is_refused(tmp_path, format):
    path = tmp_path / "some.wav"
    soundfile.write(path, RAMP, 16000, format=format, subtype="PCM_16")
    with pytest.raises(
        ValueError, match=rf"some\.wav .* {format} .* Convert it to WAV"
    ):
        audio_info(path)


STREAMS = {
    **{
        ("WAV", hex(size)): (b"data", 4, "<I", size)
        for size in (0, 0x7FFF_F000, 0x8000_0000, 0xFFFF_FFFF)
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


@pytest.mark.parametrize(("format", "size"), STREAMS)
def test_a_stream_says_no_size_and_has_the_samples_that_there_are(
    tmp_path, noise, format, size
):
    path = tmp_path / "stream.wav"
    soundfile.write(path, noise[:9001], 16000, format=format, subtype="PCM_16")
    whole = read_in_all_ways(path)
    say(path, *STREAMS[format, size])
    assert len(whole) == 9001
    assert torch.equal(read_in_all_ways(path), whole)


@pytest.mark.parametrize("riff", [0, 36, 0xFFFF_FFFF])
def test_the_size_of_the_whole_wav_file_is_not_needed(tmp_path, riff):
    path = tmp_path / "stream.wav"
    soundfile.write(path, np.stack([RAMP, -RAMP], axis=1), 16000)
    say(path, b"RIFF", 4, "<I", riff)
    say(path, b"data", 4, "<I", 0)
    assert audio_info(path).samples == 1000
    both = torch.cat(list(read_blocks(path, block_samples=300)), dim=1)
    assert torch.equal(both[0], torch.tensor(RAMP / 2**15).float())
    assert torch.equal(both[1], -both[0])


def test_what_libsndfile_skips_is_skipped(tmp_path, noise):
    path = tmp_path / "tagged.flac"
    soundfile.write(path, noise, 16000)
    whole = read_audio(path, sample_rate=16000)
    say(path, b"fLaC", 22, ">I", 0)
    # Of the size 128 + 1, in bytes of seven bits.
    tag = b"ID3\3\0\0\0\0\1\1" + bytes(129)
    path.write_bytes(tag + path.read_bytes())
    assert torch.equal(read_in_all_ways(path), whole)


@pytest.mark.parametrize("missing", [1, 2, 100, 5000])
def test_flac_of_unknown_length_that_is_cut_short_is_refused(tmp_path, noise, missing):
    path = tmp_path / "cut.flac"
    soundfile.write(path, noise, 16000)
    say(path, b"fLaC", 22, ">I", 0)
    os.truncate(path, path.stat().st_size - missing)
    for read in (audio_info, lambda path: list(read_blocks(path))):
        with pytest.raises(ValueError, match=r"cut\.flac cannot be read as audio"):
            read(path)


def test_flac_of_unknown_length_needs_a_libsndfile_that_tells_of_a_cut(
    tmp_path, monkeypatch
):
    path = tmp_path / "stream.flac"
    soundfile.write(path, RAMP, 16000)
    monkeypatch.setattr(soundfile, "__libsndfile_version__", "1.2.0")
    assert audio_info(path).samples == 1000
    say(path, b"fLaC", 22, ">I", 0)
    with pytest.raises(
        ValueError, match=r"stream\.flac .*libsndfile 1\.2\.0 not whether"
    ):
        audio_info(path)
    # Of a version that has no number at its end.
    monkeypatch.setattr(soundfile, "__libsndfile_version__", "1.2.2-exp")
    assert audio_info(path).samples == 1000


def test_a_wav_file_of_nothing_but_other_chunks_holds_no_samples(tmp_path):
    path = tmp_path / "empty.wav"
    soundfile.write(path, RAMP[:0], 16000)
    text = b"INFOISFT" + struct.pack("<I", 5001) + b"a" * 5001
    with path.open("ab") as file:
        file.write(b"LIST" + struct.pack("<I", len(text)) + text + b"\0")
    assert audio_info(path).samples == 0
    with pytest.raises(ValueError, match=r"empty\.wav holds no samples"):
        list(read_blocks(path))


def test_flac_without_frames_holds_no_samples(tmp_path):
    path = tmp_path / "empty.flac"
    soundfile.write(path, RAMP, 16000)
    content = bytearray(path.read_bytes()[:42])
    # The only block of the header, of unknown length.
    content[4] |= 128
    content[22:26] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"empty\.flac holds no samples"):
        audio_info(path)


def test_more_than_a_header_can_say_is_refused_and_not_cut_off(tmp_path):
    path = tmp_path / "days.wav"
    soundfile.write(path, RAMP, 16000)
    say(path, b"data", 4, "<I", 0)
    os.truncate(path, 2**32 + 100)
    with pytest.raises(
        ValueError, match=r"days\.wav .*more than .* Convert it to FLAC"
    ):
        audio_info(path)


def test_audio_without_a_header_is_named(tmp_path):
    path = tmp_path / "samples.raw"
    path.write_bytes(RAMP.tobytes())
    with pytest.raises(ValueError, match=r"samples\.raw cannot .* no header"):
        audio_info(path)
    with pytest.raises(ValueError, match=r"samples\.raw cannot .* no header"):
        read_audio(path, sample_rate=16000)


@pytest.mark.skipif(os.name != "posix", reason="names are Unicode elsewhere")
def test_a_name_that_is_not_utf_8_is_named_in_signs_that_can_be_printed(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.wav")
    with open(path, "wb"):
        pass
    with pytest.raises(ValueError, match=r"caf\\udce9\.wav .* not in UTF-8") as refused:
        audio_info(path)
    assert str(refused.value).encode()


def cut(path, part):
    """Keep the first part of a file's bytes."""
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])


@pytest.fixture
def noise():
    return np.random.default_rng(0).standard_normal(48000) / 10


@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_a_flac_file_that_is_cut_short_is_refused(tmp_path, noise, part):
    path = tmp_path / "cut.flac"
    soundfile.write(path, noise, 16000)
    cut(path, part)
    with pytest.raises(ValueError, match=r"cut\.flac"):
        list(read_blocks(path, block_samples=1000))


def test_a_file_that_has_fewer_samples_than_its_header_says_is_refused(
    ramp, monkeypatch
):
    monkeypatch.setattr(soundfile.SoundFile, "frames", 1001)
    with pytest.raises(
        ValueError, match="header says 1001 samples, and there are 1000"
    ):
        list(read_blocks(ramp))


@pytest.mark.parametrize(
    ("format", "subtype", "said"),
    [
        ("MP3", None, "its header says 48000 samples, and there are"),
        ("OGG", "VORBIS", "its last page is not marked as the end"),
        ("OGG", "OPUS", "its last page is not marked as the end"),
    ],
)
def test_of_an_estimated_length_a_warning_says_what_seems_to_be_missing(
    tmp_path, noise, format, subtype, said, caplog
):
    path = tmp_path / "some.audio"
    soundfile.write(path, noise, 16000, format=format, subtype=subtype)
    assert sum(block.shape[1] for block in read_blocks(path)) == 48000
    assert not caplog.text
    cut(path, 0.6)
    assert 10000 < sum(block.shape[1] for block in read_blocks(path)) < 40000
    assert f"{path} seems to be cut short" in caplog.text
    assert said in caplog.text


def test_a_file_without_samples_has_no_blocks_but_an_error(tmp_path):
    path = tmp_path / "empty.wav"
    soundfile.write(path, np.zeros(0), 16000)
    with pytest.raises(ValueError, match=r"empty\.wav holds no samples"):
        list(read_blocks(path))
