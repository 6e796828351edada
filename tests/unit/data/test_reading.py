"""What is asked for is read exactly, or the file is refused by name."""

import os

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.data import audio_info, read_audio, read_blocks, read_first_channel

RAMP = np.arange(1000, dtype=np.int16)
RATE = 16000


@pytest.fixture(params=[".wav", ".flac"])
def ramp(request, tmp_path):
    path = tmp_path / f"ramp{request.param}"
    soundfile.write(path, RAMP, RATE)
    return path


@pytest.mark.parametrize(
    ("start", "samples", "expected"),
    [(0, None, RAMP), (100, 50, RAMP[100:150]), (990, 50, RAMP[990:]), (2000, 5, [])],
)
def test_the_samples_asked_for_are_read_exactly(ramp, start, samples, expected):
    wav = read_audio(ramp, sample_rate=RATE, start=start, samples=samples)
    assert torch.equal(wav, torch.tensor(np.array(expected) / 2**15).float())
    info = audio_info(ramp)
    assert (info.samples, info.sample_rate, info.channels) == (1000, RATE, 1)


def test_another_rate_is_refused_with_both_rates_and_the_remedy(ramp):
    for read in (read_audio, read_first_channel):
        with pytest.raises(ValueError, match=r"16000 samples .* 8000 are exp.*sox"):
            read(ramp, sample_rate=8000)


def test_several_channels_are_refused_unless_their_treatment_is_named(tmp_path):
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.stack([RAMP, -RAMP // 2], axis=1), RATE)
    with pytest.raises(ValueError, match=r"2 channels.*remix"):
        read_audio(path, sample_rate=RATE)
    both = torch.cat(list(read_blocks(path, block_samples=999)), dim=1)
    expected = np.stack([RAMP, -RAMP // 2]) / 2**15
    assert torch.equal(both, torch.tensor(expected).float())
    assert torch.equal(read_first_channel(path, sample_rate=RATE), both[0])


def test_what_is_no_audio_is_refused_by_name(tmp_path):
    (tmp_path / "broken.flac").write_bytes(b"no audio at all")
    (tmp_path / "samples.raw").write_bytes(RAMP.tobytes())
    for name, reason in (
        ("broken.flac", "cannot be read"),
        ("samples.raw", "cannot be read .* no header"),
        ("none.wav", "cannot be read .* no such file"),
    ):
        for read in (audio_info, lambda path: read_audio(path, sample_rate=RATE)):
            with pytest.raises(ValueError, match=rf"{name} {reason}"):
                read(tmp_path / name)


@pytest.mark.skipif(os.name != "posix", reason="names are Unicode elsewhere")
def test_a_name_that_is_not_utf_8_is_named_in_signs_that_can_be_printed(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.wav")
    with open(path, "wb"):
        pass
    with pytest.raises(ValueError, match=r"caf\\udce9\.wav .* not in UTF-8") as refused:
        audio_info(path)
    assert str(refused.value).encode()


def test_a_file_without_samples_has_no_blocks_but_an_error(tmp_path):
    path = tmp_path / "empty.wav"
    soundfile.write(path, np.zeros(0), RATE)
    with pytest.raises(ValueError, match=r"empty\.wav holds no samples"):
        list(read_blocks(path))


def test_a_header_of_more_samples_than_the_file_can_hold_is_refused(ramp, monkeypatch):
    monkeypatch.setattr(soundfile.SoundFile, "frames", 10**9)
    with pytest.raises(
        ValueError, match="its header says 1000000000 samples, more than"
    ):
        audio_info(ramp)
