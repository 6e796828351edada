"""m4a has the samples that ffmpeg makes of it, and what cannot be read is named."""

import runpy
import subprocess
import sys
import tarfile

import av
import imageio_ffmpeg
import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio import audio_info, m4a, read_audio, read_blocks
from speechbrain_rev.data import open_sources
from speechbrain_rev.data.checking import read_checked
from speechbrain_rev.data.packing import pack
from tests.corpus import speak, write_corpus, write_m4a

RATE = 16000


def speech(samples):
    return speak(120, 900, samples, np.random.default_rng(0))


def last_packet(path):
    """Where the last packet begins."""
    with av.open(str(path)) as container:
        return [packet.pos for packet in container.demux() if packet.size][-1]


@pytest.fixture(scope="module")
def ffmpeg():
    """The binary of imageio-ffmpeg, where this machine can run it."""
    try:
        path = imageio_ffmpeg.get_ffmpeg_exe()
        subprocess.run([path, "-version"], check=True, capture_output=True)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"ffmpeg does not run here: {error}")
    return path


@pytest.mark.parametrize(
    ("samples", "rate", "channels", "options"),
    [
        # Less than a frame of 1024, frames, and a sample more.
        *[(n, RATE, 1, {}) for n in (500, 1024, 4001, 20000)],
        (20001, 44100, 2, {}),
        (20001, 48000, 1, {"movflags": "faststart"}),
        # Without the list that says where the first sample is.
        (20001, RATE, 1, {"use_editlist": "0"}),
        (20001, RATE, 1, {"movflags": "frag_keyframe+empty_moov"}),
    ],
)
def test_samples_are_those_of_ffmpeg_without_priming_and_padding(
    ffmpeg, tmp_path, samples, rate, channels, options
):
    wav = speech(samples)
    given = np.stack([wav, -0.5 * wav]) if channels == 2 else wav
    path = write_m4a(tmp_path / "a.m4a", given, rate, **options)
    made = tmp_path / "a.wav"
    command = [ffmpeg, "-v", "error", "-i", path, "-c:a", "pcm_f32le", made]
    subprocess.run(command, check=True)
    wanted, wanted_rate = soundfile.read(made, dtype="float32", always_2d=True)
    blocks = torch.cat(list(read_blocks(path, block_samples=999)), dim=1)
    assert torch.equal(blocks, torch.from_numpy(wanted).T)
    info = audio_info(path)
    assert (info.samples, info.sample_rate) == (len(wanted), wanted_rate)
    assert info.channels == channels
    if not options and rate == RATE:
        assert info.samples == samples


def test_a_range_is_that_of_the_decoded_whole_to_the_bit(tmp_path):
    path = write_m4a(tmp_path / "a.m4a", speech(9000))
    whole = read_audio(path, sample_rate=RATE)
    for start in (0, 1, 1023, 1024, 5000, 8999, 9000, 9999):
        for samples in (1, 1024, 3000, None):
            part = read_audio(path, sample_rate=RATE, start=start, samples=samples)
            assert torch.equal(part, whole[start:][:samples])
    segment = read_audio(path / "1000+5000.m4a", sample_rate=RATE, start=500)
    assert torch.equal(segment, whole[1500:6000])
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(path, "key.m4a")
    member = tmp_path / "a.tar/key.m4a"
    assert audio_info(member).samples == len(whole)
    assert torch.equal(read_audio(member, sample_rate=RATE, start=1500), whole[1500:])
    for checked in (False, True):
        beyond = read_checked(path / "8000+1001.m4a", sample_rate=RATE, whole=checked)
        assert "9000 samples, and a segment of it begins at 8000 and" in beyond.detail


def test_what_cannot_be_read_is_named_with_its_remedy(tmp_path):
    for name, options in (("end", {}), ("begin", {"movflags": "faststart"})):
        whole = write_m4a(tmp_path / f"{name}.m4a", speech(9000), **options)
        content = whole.read_bytes()
        # The last byte of speech, and a packet that is there whole without those behind it.
        for end in (content.index(b"mdat") + 3000, last_packet(whole), -1):
            whole.write_bytes(content[:end])
            if name == "end" and end == -1:
                # Behind all samples.
                assert audio_info(whole).samples == 9000
                continue
            with pytest.raises(ValueError, match=r"m4a cannot be.*cut short.*Copy it"):
                audio_info(whole)
            whole.write_bytes(content)
    damaged = tmp_path / "damaged.m4a"
    first = content.index(b"mdat") + 200
    damaged.write_bytes(content[:first] + b"\xff" * 2000 + content[first + 2000 :])
    with pytest.raises(ValueError, match=r"damaged\.m4a cannot be .*Copy it again"):
        audio_info(damaged)
    (tmp_path / "text.m4a").write_text("no audio at all, but a text of some length")
    with pytest.raises(ValueError, match=r"text\.m4a cannot be read.*Copy it again"):
        audio_info(tmp_path / "text.m4a")
    with pytest.raises(ValueError, match=r"none\.m4a cannot be read.*no such file"):
        audio_info(tmp_path / "none.m4a")
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.wav .* is m4a, and its name .*rename it"):
        audio_info(tmp_path / "a.wav")
    silent = tmp_path / "film.m4a"
    with av.open(str(silent), "w", format="mp4") as container:
        film = container.add_stream("mpeg4", rate=25)
        film.width = film.height = 16
        frames = [av.VideoFrame(16, 16, "yuv420p")]
        for frame in (*frames, None):
            container.mux(film.encode(frame))
    with pytest.raises(ValueError, match=r"film\.m4a .*no stream of audio\. Leave"):
        audio_info(silent)


def test_without_pyav_the_error_says_how_to_install_it(tmp_path, monkeypatch, prepared):
    corpus = write_corpus(tmp_path / "vox", speakers=2, seconds=0.1, suffix=".m4a")
    monkeypatch.setitem(sys.modules, "av", None)
    for use in (
        lambda: prepared(corpus),
        lambda: pack(corpus, tmp_path / "vox.packed", sample_rate=RATE),
        lambda: read_audio(next(corpus.rglob("*.m4a")), sample_rate=RATE),
    ):
        with pytest.raises(ImportError, match=r"pip install 'speechbrain_rev\[m4a\]'"):
            use()


def test_pyav_is_not_imported_before_an_m4a_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    assert runpy.run_path(m4a.__file__)["SUFFIX"] == ".m4a"


def test_voxceleb2_as_downloaded_is_prepared_and_packed(tmp_path, prepared):
    write_corpus(tmp_path / "made", speakers=3, seconds=0.1, suffix=".m4a")
    (tmp_path / "vox2/dev").mkdir(parents=True)
    (tmp_path / "made/wav").rename(tmp_path / "vox2/dev/aac")
    (source,) = open_sources(tmp_path / "vox2")
    assert source.format == "VoxCeleb"
    rows = list(source.rows([]))
    assert prepared(tmp_path / "vox2").utterances == len(rows) == 12
    packed = tmp_path / "vox2.packed"
    assert pack(tmp_path / "vox2", packed, sample_rate=RATE) == 12
    (source,) = open_sources(packed)
    for one, other in zip(rows, source.rows([]), strict=True):
        assert one.name == other.name
        wav, again = (read_audio(row.wav, sample_rate=RATE) for row in (one, other))
        assert (wav - again).abs().max() <= wav.abs().max() / 2**15 / 2 * 1.01
