"""Packed folders stand wherever folders of audio stand, or are refused."""

import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio import audio_exists, audio_info, read_audio
from speechbrain_rev.audio.packed import (
    FLOATS,
    INDEX,
    INTEGERS,
    TAR,
    PackedAudio,
    find_packed,
    wav_header,
)
from speechbrain_rev.audio.reading import open_bytes
from speechbrain_rev.audio.segments import bytes_of
from speechbrain_rev.data import ChunkDataset, SpeakerAugment, Utterance, audio_files
from speechbrain_rev.data.packing import pack
from speechbrain_rev.inference.extraction import _source
from tests.corpus import write_noise, write_rirs

RATE = 16000
FILES = 24


@pytest.fixture
def copied(packed, tmp_path):
    """A packed folder that a test may damage."""
    return shutil.copytree(packed, tmp_path / "copied.packed")


@pytest.mark.parametrize(
    ("start", "samples"), [(0, None), (17, 1000), (1500, 10**6), (10**6, 5)]
)
def test_every_range_of_a_packed_file_is_that_of_the_file(
    corpus, packed, start, samples
):
    files = audio_files(corpus)
    assert len(files) == FILES
    for path in files:
        inside = packed / path.relative_to(corpus)
        assert audio_info(inside) == audio_info(path)
        ranges = {"sample_rate": RATE, "start": start, "samples": samples}
        assert torch.equal(read_audio(inside, **ranges), read_audio(path, **ranges))


def test_a_packed_folder_lists_what_it_holds(corpus, packed):
    names = [path.relative_to(corpus) for path in audio_files(corpus)]
    assert audio_files(packed) == [packed / name for name in names]
    some = packed / "wav/id00001"
    assert audio_files(some) == [p for p in audio_files(packed) if some in p.parents]
    assert audio_exists(audio_files(packed)[0])
    assert not audio_exists(some)
    assert not audio_exists(some / "s00/nobody.wav")
    with pytest.raises(ValueError, match=r"There is no audio below .*typo"):
        audio_files(packed / "typo")


def test_chunks_and_augmentation_are_those_of_files(
    corpus, packed, tmp_path, monkeypatch
):
    def chunks(root):
        rows = [
            Utterance(p.stem, str(p), audio_info(p).samples, "ann")
            for p in audio_files(root)
        ]
        dataset = ChunkDataset(rows, {"ann": 0}, samples=2200)
        return torch.stack([dataset[1, index].wav for index in range(len(dataset))])

    def augmented(noise, rirs):
        folders = {"noise_folder": noise, "rir_folder": rirs}
        augment = SpeakerAugment(
            out_n_neurons=9, chunk_samples=2000, augment_prob=1.0, **folders
        )
        return augment(chunks(corpus), torch.ones(FILES))[0]

    assert torch.equal(chunks(corpus), chunks(packed))
    # Relative folders, and noise that has ratios of its own.
    monkeypatch.chdir(tmp_path)
    write_noise(Path("noise/music"))
    folders = Path("noise"), write_rirs(Path("rooms"))
    packs = [folder.with_suffix(".packed") for folder in folders]
    for folder, target in zip(folders, packs, strict=True):
        pack(folder, target, sample_rate=RATE)
    assert torch.equal(augmented(*folders), augmented(*packs))


class TestPaths:
    def test_folders_may_have_such_names_and_hold_packed_ones(
        self, packed, tmp_path, monkeypatch
    ):
        outer = tmp_path / "run.packed"
        inner = shutil.copytree(packed, outer / "speech.packed")
        assert len(audio_files(inner)) == FILES
        write_noise(outer / "files")
        assert len(audio_files(outer / "files")) == 2
        monkeypatch.chdir(outer)
        relative = audio_files("speech.packed")
        monkeypatch.chdir(tmp_path)
        assert [str(path) for path in relative] == [str(p) for p in audio_files(inner)]

    def test_paths_that_lead_into_no_packed_folder_are_left_alone(self, tmp_path):
        for path in ("a.wav", "a.packed.wav", "x.packedness/a.wav", tmp_path):
            assert find_packed(path) is None

    def test_a_folder_packed_anew_is_read_anew(self, copied, tmp_path):
        path = audio_files(copied)[0]
        before = _source(path, None, None)
        shutil.rmtree(copied)
        write_noise(tmp_path / "noise", clips=1)
        moved = tmp_path / "noise" / path.relative_to(copied)
        moved.parent.mkdir(parents=True)
        (tmp_path / "noise/noise/clip_0.wav").rename(moved)
        pack(tmp_path / "noise", copied, sample_rate=RATE)
        assert len(read_audio(path, sample_rate=RATE)) == 24000
        assert _source(path, None, None) != before

    def test_a_link_to_a_packed_folder_is_no_other_audio(self, packed, tmp_path):
        (tmp_path / "link.packed").symlink_to(packed)
        path = audio_files(packed)[0]
        other = tmp_path / "link.packed" / path.relative_to(packed)
        assert _source(other, None, None) == _source(path, None, None)


def test_an_unusable_packed_folder_is_refused_by_name(copied, tmp_path):
    path = audio_files(copied)[-1]
    with pytest.raises(ValueError, match=r"nothing\.packed is no packed folder"):
        audio_info(tmp_path / "nothing.packed/a.wav")
    with pytest.raises(ValueError, match="no such file in that packed folder"):
        read_audio(copied / "nobody.wav", sample_rate=RATE)
    with pytest.raises(ValueError, match="has 16000 samples per second, not 8000"):
        read_audio(path, sample_rate=8000)
    with pytest.raises(ValueError, match="start is -1"):
        read_audio(path, sample_rate=RATE, start=-1)
    os.truncate(copied / TAR, 100)
    with pytest.raises(ValueError, match=r"copied\.packed/.*ends before"):
        read_audio(path, sample_rate=RATE)
    with pytest.raises(ValueError, match=r"has 100 bytes.*cut short"):
        PackedAudio(str(copied))
    (copied / TAR).unlink()
    with pytest.raises(OSError, match=r"No such file.*copied\.packed/audio\.tar"):
        PackedAudio(str(copied))


def test_a_packed_folder_is_a_tar_of_wav_files(corpus, packed):
    with tarfile.open(packed / TAR) as tar:
        names = [path.relative_to(corpus).as_posix() for path in audio_files(corpus)]
        assert tar.getnames() == names
        for name in names:
            content = io.BytesIO(tar.extractfile(name).read())
            samples, rate = soundfile.read(content, dtype="float32")
            assert rate == RATE
            read = read_audio(corpus / name, sample_rate=RATE)
            assert np.array_equal(samples, read)
            assert bytes_of(packed / name) == len(content.getvalue())
            with open_bytes(packed / name) as file:
                assert file.read() == content.getvalue()


@pytest.mark.parametrize("kind", [INTEGERS, FLOATS])
def test_a_header_holds_any_number_of_samples(tmp_path, kind):
    for samples in (RATE, 2**32 // kind.itemsize - 40, 2**32 // kind.itemsize, 2**33):
        path, header = tmp_path / "a.wav", wav_header(samples, RATE, kind)
        path.write_bytes(header)
        # A hole takes no disk.
        os.truncate(path, len(header) + samples * kind.itemsize)
        assert audio_info(path).samples == samples
        assert soundfile.info(path).frames == samples


def test_no_flipped_bit_of_an_index_gives_other_audio(corpus, tmp_path):
    packed, flipped = tmp_path / "whole.packed", tmp_path / "flipped.packed"
    pack(corpus / "wav/id00000/s00", packed, sample_rate=RATE)
    whole, messages = PackedAudio(str(packed)), []
    shutil.copytree(packed, flipped)
    content = (packed / INDEX).read_bytes()
    for place in range(len(content)):
        other = bytearray(content)
        other[place] ^= 1 << place % 8
        (flipped / INDEX).write_bytes(other)
        try:
            opened = PackedAudio(str(flipped))
            names = list(opened.names)
        except ValueError as error:
            messages.append(str(error))
            continue
        assert names == list(whole.names)
        assert opened.sample_rate == whole.sample_rate
        for name in names:
            ours, theirs = (one.read(name, 0, None) for one in (opened, whole))
            assert np.array_equal(ours, theirs)
    assert all(f"{INDEX} is damaged: " in message for message in messages)
    # Others are in headers of the archive that nobody reads.
    assert len(messages) > len(content) // 2
