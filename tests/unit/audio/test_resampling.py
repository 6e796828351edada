"""What is resampled in parts is what the whole is resampled to."""

from fractions import Fraction

import pytest
import torch
from torchaudio.functional import resample as by_torchaudio

from speechbrain_rev.audio.resampling import (
    rate_ratio,
    resample,
    resample_blocks,
    resampled_length,
    resampled_range,
)
from tests.run_folders import speech_like


@pytest.mark.parametrize(
    ("rate", "target", "block"),
    [(48000, 16000, 7), (44100, 16000, 160), (16000, 44100, 999)],
)
def test_resampling_block_by_block_equals_resampling_as_a_whole(rate, target, block):
    wave = torch.from_numpy(speech_like(0.05 if block == 7 else 0.3, rate=rate))
    ratio = Fraction(target, rate).limit_denominator(1000)
    whole, blocks = (
        resample(wave, ratio),
        list(resample_blocks(wave.split(block), ratio)),
    )
    joined = torch.cat(blocks)
    assert len(blocks) > 1
    assert joined.shape == whole.shape
    # The same sums of the same numbers: 8 units in the last place of full scale.
    assert (joined - whole).abs().max() <= 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_a_range_is_that_of_the_whole_file_resampled_by_torchaudio(rate):
    wave = torch.from_numpy(speech_like(0.2, rate=rate))[:-13]
    whole, ratio = by_torchaudio(wave, rate, 16000), rate_ratio(rate, 16000)
    assert resampled_length(len(wave), ratio) == len(whole)
    read_at_all = 0

    def read(start, samples):
        nonlocal read_at_all
        part = wave[start:] if samples is None else wave[start : start + samples]
        read_at_all += len(part)
        return part

    for start in (0, 1, 159, 160, 161, 1000, len(whole) - 1, len(whole)):
        for samples in (1, 320, 10**6, None):
            part = resampled_range(read, ratio, start, samples)
            wanted = whole[start:][:samples]
            assert part.shape == wanted.shape
            # Sums of the same products, in another order: of full scale 1.
            torch.testing.assert_close(part, wanted, atol=1e-6, rtol=0)
    read_at_all = 0
    resampled_range(read, ratio, 1000, 320)
    # Not the whole: of either side what the filter reaches, and a period of the rates.
    assert read_at_all < 320 / ratio + 6 * ratio.denominator + 40
