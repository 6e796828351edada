"""What is asked for is read exactly, or the file is refused by name."""

import os

import numpy as np
import pytest
import soundfile
import torch
from torchaudio.functional import resample

from speechbrain_rev.audio import audio_info, read_audio, read_blocks
from tests.corpus import speak

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


def test_rate_and_channels_that_are_not_asked_for_are_refused_in_one_message(tmp_path):
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.stack([RAMP, -RAMP], axis=1), 44100)
    mix = r'channel="mix" \(--channel=mix\) for their mean or channel=0 .*first'
    rate = r"resample=True \(--resample=true\) or another sample_rate"
    for given, words in (
        (
            {},
            f"44100 samples .* and 2 channels, not 16000 and 1. Give {rate}, and {mix}",
        ),
        ({"channel": 0}, f"44100 samples per second, not 16000. Give {rate}"),
        ({"resample": True}, f"2 channels, not 1. Give {mix}"),
    ):
        with pytest.raises(ValueError, match=rf"stereo\.wav has {words}\.$"):
            read_audio(path, sample_rate=RATE, **given)


def test_the_channel_that_is_chosen_is_read(tmp_path):
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.stack([RAMP, -RAMP // 2], axis=1), RATE)
    with pytest.raises(
        ValueError, match=r"no channel 2: it has 2, counted from 0\. Give"
    ):
        read_audio(path, sample_rate=RATE, channel=2)
    for wrong in ("mean", -1, True):
        with pytest.raises(
            ValueError, match=rf"channel takes a number .*but is {wrong!r}\."
        ):
            read_audio(path, sample_rate=RATE, channel=wrong)
    both = torch.cat(list(read_blocks(path, block_samples=999)), dim=1)
    expected = np.stack([RAMP, -RAMP // 2]) / 2**15
    assert torch.equal(both, torch.tensor(expected).float())
    for channel, wanted in ((0, both[0]), (1, both[1]), ("mix", both.mean(0))):
        given = {"sample_rate": RATE, "channel": channel}
        assert torch.equal(read_audio(path, **given), wanted)
        part = read_audio(path, **given, start=10, samples=20, out=torch.ones(30))
        assert torch.equal(part, wanted[10:30])


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


LOSSY = [("ogg", "VORBIS"), ("opus", "OPUS"), ("mp3", "MPEG_LAYER_III")]


@pytest.fixture(params=LOSSY, ids=[kind for kind, _ in LOSSY])
def lossy(request, tmp_path):
    """A lossy file, and what one read from its beginning makes of it."""
    kind, subtype = request.param
    path = tmp_path / f"a.{kind}"
    container = "MP3" if kind == "mp3" else "OGG"
    wav = speak(120, 900, 40000, np.random.default_rng(0))
    soundfile.write(path, wav, RATE, format=container, subtype=subtype)
    with soundfile.SoundFile(path) as audio:
        return path, torch.from_numpy(audio.read(dtype="float32"))


def test_a_range_of_a_lossy_file_is_that_of_its_decoded_wav_to_the_bit(lossy):
    path, whole = lossy
    assert audio_info(path).samples == len(whole)
    assert audio_info(path).lossy
    assert torch.equal(
        torch.cat(list(read_blocks(path, block_samples=777)), 1)[0], whole
    )
    for start in (0, 1, 20001, 39999, 50000):
        for samples in (1, 3000, None):
            given = {"sample_rate": RATE, "start": start, "samples": samples}
            assert torch.equal(read_audio(path, **given), whole[start:][:samples])
    segment = path / f"1000+5000{path.suffix}"
    assert audio_info(segment).samples == 5000
    assert torch.equal(read_audio(segment, sample_rate=RATE), whole[1000:6000])


def test_files_of_another_rate_are_resampled_where_it_is_asked_for(tmp_path):
    path = tmp_path / "fast.wav"
    wav = speak(120, 900, 9001, np.random.default_rng(0))
    soundfile.write(path, np.stack([wav, 0.5 * wav], 1), 44100, subtype="FLOAT")
    mean = torch.tensor(0.75 * wav).float()
    wanted = resample(mean, 44100, RATE)
    given = {"sample_rate": RATE, "resample": True, "channel": "mix"}
    for start in (0, 1, 1000, 3000, len(wanted)):
        for samples in (1, 300, None):
            part = read_audio(path, **given, start=start, samples=samples)
            expected = wanted[start:][:samples]
            torch.testing.assert_close(part, expected, atol=1e-6, rtol=0)
    assert audio_info(path).samples_at(RATE) == len(wanted)
    # A segment has edges of its own: it is cut out, and then resampled.
    segment = read_audio(path / "1000+4000.wav", **given)
    cut = resample(mean[1000:5000], 44100, RATE)
    torch.testing.assert_close(segment, cut, atol=1e-6, rtol=0)
    first = read_audio(path, sample_rate=RATE, resample=True, channel=0)
    expected = resample(torch.tensor(wav).float(), 44100, RATE)
    torch.testing.assert_close(first, expected, atol=1e-6, rtol=0)
