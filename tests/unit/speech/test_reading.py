import os
import struct

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.speech import (
    audio_files,
    audio_info,
    read_audio,
    read_blocks,
    read_first_channel,
)

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


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_U8", "FLOAT"])
def test_a_wav_file_that_is_cut_short_is_refused(tmp_path, subtype):
    path = tmp_path / "cut.wav"
    soundfile.write(path, RAMP[:999], 16000, subtype=subtype)
    whole = path.read_bytes()
    assert audio_info(path).samples == 999
    path.write_bytes(whole[:-200])
    with pytest.raises(ValueError, match=r"cut\.wav .* cut short, .* Copy or convert"):
        audio_info(path)


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0x80000000, 0xFFFFFFFF])
def test_a_wav_file_of_a_stream_says_no_size_and_is_read(tmp_path, size):
    path = tmp_path / "stream.wav"
    soundfile.write(path, RAMP, 16000)
    content = path.read_bytes()
    place = content.index(b"data") + 4
    path.write_bytes(content[:place] + struct.pack("<I", size) + content[place + 4 :])
    assert audio_info(path).channels == 1


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


def test_audio_is_found_at_any_depth_in_sorted_order_and_other_files_are_not(tmp_path):
    for name in ("b/c/2.FLAC", "a.wav", "b/1.wav", "b/readme.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = [path.relative_to(tmp_path).as_posix() for path in audio_files(tmp_path)]
    assert found == ["a.wav", "b/1.wav", "b/c/2.FLAC"]


def test_a_missing_and_an_empty_folder_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*nowhere"):
        audio_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no \.wav or \.flac file below"):
        audio_files(tmp_path)


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


@pytest.mark.parametrize("size", [0x7FFF_F000, 0xFFFF_FFFF])
def test_a_stream_is_read_in_blocks_to_its_end(tmp_path, size):
    path = tmp_path / "stream.wav"
    soundfile.write(path, RAMP, 16000)
    content = bytearray(path.read_bytes())
    content[4:8] = content[40:44] = struct.pack("<I", size)
    path.write_bytes(content)
    assert sum(block.shape[1] for block in read_blocks(path)) == 1000


def test_a_file_without_samples_has_no_blocks_but_an_error(tmp_path):
    path = tmp_path / "empty.wav"
    soundfile.write(path, np.zeros(0), 16000)
    with pytest.raises(ValueError, match=r"empty\.wav holds no samples"):
        list(read_blocks(path))
