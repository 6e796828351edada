"""Segments of recordings are read as the samples that they are."""

from functools import partial

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio import audio_exists, audio_info, read_audio, read_blocks
from speechbrain_rev.audio.segments import Segment, find_segment


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "rec.wav"
    soundfile.write(path, np.arange(1000) / 2000, 16000, subtype="FLOAT")
    return path


@pytest.mark.parametrize(("start", "samples"), [(0, 10), (100, 300), (900, None)])
def test_every_reader_gives_the_samples_of_the_segment(recording, start, samples):
    whole = read_audio(recording, sample_rate=16000)
    end = None if samples is None else start + samples
    path, wanted = Segment(recording, start, samples).path(), whole[start:end]
    assert find_segment(path) == Segment(recording, start, samples)
    assert audio_exists(path)
    assert audio_info(path).samples == len(wanted)
    assert torch.equal(read_audio(path, sample_rate=16000), wanted)
    out = torch.empty(400)
    part = read_audio(path, sample_rate=16000, start=4, samples=400, out=out)
    assert torch.equal(part, wanted[4:])
    blocks = list(read_blocks(path, block_samples=7))
    assert torch.equal(torch.cat(blocks, dim=1)[0], wanted)


@pytest.mark.parametrize("segment", [(1000, None), (900, 101), (2000, 1)])
def test_a_segment_that_ends_behind_its_recording_is_refused(recording, segment):
    path = Segment(recording, *segment).path()
    with pytest.raises(ValueError, match=r"has 1000 samples, and a segment .* ends at"):
        audio_info(path)


def test_a_file_in_a_folder_is_no_segment(recording, tmp_path):
    (tmp_path / "x.wav").mkdir()
    path = tmp_path / "x.wav/1+2.wav"
    path.write_bytes(recording.read_bytes())
    assert find_segment(path) is None
    assert audio_info(path).samples == 1000
    assert not audio_exists(tmp_path / "gone.wav/1+2.wav")


@pytest.mark.parametrize("channel", [0, 1])
def test_a_segment_may_be_of_a_channel(channel, tmp_path):
    pair = np.random.default_rng(0).uniform(-0.5, 0.5, (1000, 2)).astype(np.float32)
    soundfile.write(tmp_path / "rec.wav", pair, 16000, subtype="FLOAT")
    path = Segment(tmp_path / "rec.wav", 100, None, channel).path()
    wanted = torch.from_numpy(pair[100:, channel].copy())
    assert find_segment(path) == Segment(tmp_path / "rec.wav", 100, None, channel)
    assert (audio_info(path).samples, audio_info(path).channels) == (900, 1)
    for chosen in (None, 0, 1, "mix"):
        read = read_audio(path, sample_rate=16000, channel=chosen)
        assert torch.equal(read, wanted)
    assert torch.equal(torch.cat(list(read_blocks(path)), dim=1), wanted[None])
    beyond = Segment(tmp_path / "rec.wav", 100, None, 2).path()
    for use in (audio_info, partial(read_audio, sample_rate=16000)):
        with pytest.raises(ValueError, match=r"rec.wav has no channel 2: it has 2"):
            use(beyond)
