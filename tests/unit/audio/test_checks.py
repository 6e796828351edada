"""Training and inference refuse the same audio in the same words."""

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio import read_audio
from speechbrain_rev.audio.checks import check_channel
from speechbrain_rev.data.checking import read_checked
from speechbrain_rev.data.manifest import Cause
from speechbrain_rev.inference.audio import Recording

RATE = 16000


@pytest.mark.parametrize("offset", [0.0, 0.2])
@pytest.mark.parametrize(("loudness", "silent"), [(6e-5, True), (1.5e-4, False)])
def test_training_and_inference_have_one_threshold_of_silence(
    tmp_path, loudness, silent, offset
):
    path = tmp_path / "a.wav"
    wave = offset + loudness * (1.0 - 2.0 * (np.arange(RATE) % 2))
    soundfile.write(path, wave, RATE, subtype="FLOAT")
    listed = read_checked(path, sample_rate=RATE, whole=True)
    recording = Recording.of(path, None, str(path))
    if silent:
        assert listed.cause is Cause.SILENT
        with pytest.raises(ValueError, match=r"a\.wav is silent: .* below -80 dB"):
            recording.waveform(RATE, None)
    else:
        waveform, _ = recording.waveform(RATE, None)
        assert torch.equal(listed.wav, waveform)


@pytest.mark.parametrize("channel", [None, 2, "mean"])
def test_training_and_inference_refuse_a_channel_in_the_same_words(tmp_path, channel):
    path = tmp_path / "a.wav"
    soundfile.write(path, np.random.default_rng(0).normal(0, 0.1, (RATE, 2)), RATE)
    messages = set()
    for read in (
        lambda: check_channel(path, 2, channel),
        lambda: read_audio(path, sample_rate=RATE, channel=channel),
        lambda: Recording.of(path, None, str(path)).waveform(RATE, channel),
    ):
        with pytest.raises(ValueError, match="channel") as refused:
            read()
        messages.add(str(refused.value))
    assert len(messages) == 1
