"""Members of tar files are read as the files that they are, or the tar is refused."""

import io
import os
import tarfile

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio import audio_exists, audio_info, read_audio, read_blocks
from speechbrain_rev.audio.segments import Segment, file_of, find_segment
from speechbrain_rev.audio.shards import find_tar, members
from tests.unit.data.test_formats import write_tar

LONG = "a" * 120 + "/" + "b" * 90 + "ü"


@pytest.fixture(params=["a.wav", "a.flac", "a.ogg", "stream.wav"])
def audio(request, tmp_path):
    path = tmp_path / request.param
    draw = np.random.default_rng(0).uniform(-0.5, 0.5, 4000)
    soundfile.write(path, draw, 16000)
    if request.param == "stream.wav":
        # A header of a stream says no length.
        content = bytearray(path.read_bytes())
        content[40:44] = b"\xff" * 4
        path.write_bytes(content)
    return path


def test_every_reader_gives_the_samples_of_the_file(audio, tmp_path):
    tar = write_tar(
        tmp_path / "x.tar",
        {"o.txt": b"x" * 700, f"id1/{audio.name}": audio, "p.wav": b""},
    )
    path, wanted = tar / "id1" / audio.name, read_audio(audio, sample_rate=16000)
    assert audio_exists(path)
    assert not audio_exists(tar / "id2" / audio.name)
    assert audio_info(path) == audio_info(audio)
    assert torch.equal(read_audio(path, sample_rate=16000), wanted)
    blocks = list(read_blocks(path, block_samples=7))
    assert torch.equal(torch.cat(blocks, dim=1)[0], wanted)
    part = read_audio(path, sample_rate=16000, start=100, samples=300)
    assert torch.equal(part, wanted[100:400])
    segment = Segment(path, 100, 300).path()
    assert torch.equal(read_audio(segment, sample_rate=16000), wanted[100:400])
    assert file_of(segment) == tar


@pytest.mark.parametrize(
    "form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_members_are_those_that_tarfile_finds(form, tmp_path):
    names = ["a.wav", "./b.wav", "c/d.wav", "ü.wav"]
    names += [] if form == tarfile.USTAR_FORMAT else [LONG]
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=form) as tar:
        folder = tarfile.TarInfo("c")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 600 * number
            tar.addfile(info, io.BytesIO(os.urandom(info.size)))
    with tarfile.open(path) as tar:
        wanted = [
            (os.path.normpath(m.name), m.offset_data, m.size) for m in tar if m.isfile()
        ]
    assert [tuple(member) for member in members(path)] == wanted


def test_a_tar_that_was_written_anew_is_read_anew(tmp_path):
    for length in (100, 200):
        soundfile.write(tmp_path / "a.wav", [0.0] * length, 16000)
        tar = write_tar(tmp_path / "x.tar", {"a.wav": tmp_path / "a.wav"})
        os.utime(tar, ns=(length, length))
        assert audio_info(tar / "a.wav").samples == length


def test_a_file_in_a_tar_or_a_folder_of_such_a_name_is_no_segment(tmp_path):
    soundfile.write(tmp_path / "a.wav", [0.5] * 100, 16000)
    tar = write_tar(tmp_path / "x.tar", {"y/1+2.wav": tmp_path / "a.wav"})
    assert find_segment(tar / "y/1+2.wav") is None
    assert audio_info(tar / "y/1+2.wav").samples == 100
    (tmp_path / "z.tar").mkdir()
    os.link(tmp_path / "a.wav", tmp_path / "z.tar/a.wav")
    assert find_tar(tmp_path / "z.tar/a.wav") is None
    assert audio_info(tmp_path / "z.tar/a.wav").samples == 100


def test_a_missing_member_is_reported_as_missing(tmp_path):
    tar = write_tar(tmp_path / "x.tar", {"a.wav": b""})
    for path in (tar / "b.wav", tmp_path / "y.tar/b.wav"):
        with pytest.raises(ValueError, match=r"b.wav cannot be read .* no such file"):
            read_audio(path, sample_rate=16000)


@pytest.mark.parametrize("content", [b"no audio", b"OggS" * 99, b"RIFF1234WAVE" * 9])
def test_a_member_that_is_no_audio_is_named_as_a_path(content, tmp_path):
    tar = write_tar(tmp_path / "x.tar", {"a.wav": content})
    with pytest.raises(ValueError, match=r"x\.tar/a\.wav cannot be read as") as error:
        audio_info(tar / "a.wav")
    assert "<" not in str(error.value)


def spoilt(tmp_path, change):
    path = write_tar(tmp_path / "x.tar", {"a.spk": b"ann", "a.wav": b"x" * 2000})
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: b"\x1f\x8b" + b, "is compressed.*gunzip"),
        (lambda b: b"(\xb5/\xfd" + b, "is compressed.*unzstd"),
        (lambda b: b"", "no tar, or is cut short"),
        (lambda b: b[:3], "cut short"),
        (lambda b: b[:1024], "cut short: the mark of its end"),
        (lambda b: b[:1100], "cut short"),
        (lambda b: b[:2000], "cut short: 'a.wav' ends behind it"),
        (lambda b: b"RIFF" * 1000, "no tar, or is cut short or damaged"),
        (lambda b: b[:1030] + b"x" + b[1031:], "damaged, at byte 1024"),
        (lambda b: b + b, "goes on behind the mark of its end"),
    ],
)
def test_a_tar_that_cannot_be_read_to_its_end_is_refused(change, match, tmp_path):
    path = spoilt(tmp_path, change)
    with pytest.raises(ValueError, match=match):
        list(members(path))
    with pytest.raises(ValueError, match=match):
        audio_exists(path / "a.wav")


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("a.wav", tarfile.SYMTYPE, "'a.wav' is a link"),
        ("a.wav", tarfile.LNKTYPE, "'a.wav' is a link"),
        ("a.wav", tarfile.GNUTYPE_SPARSE, "a sparse file"),
        ("../a.wav", tarfile.REGTYPE, "'../a.wav' leads out"),
        ("/a.wav", tarfile.REGTYPE, "'/a.wav' leads out"),
    ],
)
def test_what_is_no_file_in_the_tar_is_refused(name, kind, match, tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "b.wav"
        tar.addfile(info)
    with pytest.raises(ValueError, match=match):
        list(members(tmp_path / "x.tar"))


def test_every_truncation_of_a_tar_is_refused(tmp_path):
    whole = spoilt(tmp_path, bytes).read_bytes()
    end = whole.rstrip(b"\0")
    for length in range(0, len(end), 97):
        (tmp_path / "cut.tar").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut short|no tar"):
            list(members(tmp_path / "cut.tar"))
