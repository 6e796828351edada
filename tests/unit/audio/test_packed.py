"""Packed folders stand wherever folders of audio stand, or are refused."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from speechbrain_rev.audio import audio_exists, audio_info, read_audio
from speechbrain_rev.audio.columns import TextColumn, map_columns, save_columns
from speechbrain_rev.audio.packed import INDEX, SAMPLES, PackedAudio, find_packed
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
    os.truncate(copied / SAMPLES, 100)
    with pytest.raises(ValueError, match=r"copied\.packed/.*ends before"):
        read_audio(path, sample_rate=RATE)
    with pytest.raises(ValueError, match=r"has 100 bytes.*cut short"):
        PackedAudio(str(copied))
    (copied / SAMPLES).unlink()
    with pytest.raises(ValueError, match=r"it has no index\.columns or no samples"):
        PackedAudio(str(copied))


def put(column, row, value):
    """Change one number of a column, or one name."""

    def change(columns, about):
        values = list(columns[column]) if column == "names" else columns[column].copy()
        values[row] = value
        columns[column] = TextColumn.of(values) if column == "names" else values

    return change


def exchange(column):
    """Exchange the first two numbers of a column."""
    order = [1, 0, *range(2, FILES)]
    return lambda columns, about: columns.update({column: columns[column][order]})


def of_columns(column, convert):
    return lambda columns, about: columns.update({column: convert(columns)})


def of_about(name, value):
    return lambda columns, about: about.update({name: value})


OTHER_NAMES = "names are not those that were written"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda columns, about: columns.pop("keys"), "has the columns"),
        (of_columns("names", lambda c: c["keys"]), "names are no texts"),
        (of_columns("keys", lambda c: c["names"]), "keys are texts"),
        (of_columns("begins", lambda c: c["begins"][:12]), r"begins are \[12\]"),
        (of_columns("places", lambda c: c["places"][:, None]), r"places are \[24, 1\]"),
        (of_columns("scales", lambda c: c["scales"] * np.ones(1)), "scales .* float64"),
        (put("begins", 0, -1), "overlap, or leave out"),
        (put("lengths", 0, -5), "lengths are -5 to"),
        (put("lengths", FILES - 1, 5), "do not end"),
        (exchange("lengths"), "overlap, or leave out"),
        (put("scales", 2, np.nan), "a scale is not finite"),
        (exchange("places"), OTHER_NAMES),
        (exchange("keys"), OTHER_NAMES),
        (put("names", 0, "wav/id00000/s00/0000.wav"), OTHER_NAMES),
        (of_about("samples", "9" * 99), "samples is '999"),
        (of_about("sample_rate", "0"), "sample_rate is '0'"),
        (of_about("names", "0" * 32), OTHER_NAMES),
        (lambda columns, about: about.pop("names"), OTHER_NAMES),
    ],
)
def test_an_index_of_anything_but_files_one_behind_another_is_refused(
    packed, copied, change, reason
):
    columns, about = map_columns(packed / INDEX)
    change(columns, about)
    save_columns(copied / INDEX, columns, about)
    with pytest.raises(ValueError, match=rf"{INDEX} is damaged: .*{reason}.*pack anew"):
        audio_files(copied)


def test_no_flipped_bit_of_an_index_gives_the_audio_of_another_file(corpus, tmp_path):
    packed, flipped = tmp_path / "whole.packed", tmp_path / "flipped.packed"
    pack(corpus / "wav/id00000/s00", packed, sample_rate=RATE)
    whole, refused = PackedAudio(str(packed)), []
    shutil.copytree(packed, flipped)
    content = (packed / INDEX).read_bytes()
    for place in range(len(content)):
        other = bytearray(content)
        other[place] ^= 1 << place % 8
        (flipped / INDEX).write_bytes(other)
        try:
            opened = PackedAudio(str(flipped))
        except ValueError as error:
            refused.append(str(error))
            continue
        assert list(opened.names) == list(whole.names)
        for name in whole.names:
            ours, theirs = (one.read(name, 0, None) for one in (opened, whole))
            # A bit of a scale is not noticed, nor is one of the sample rate.
            assert np.array_equal(np.sign(ours), np.sign(theirs))
    assert all(str(flipped) in message for message in refused)
    # The 2 scales have 4 bytes each, the rate has 5.
    assert len(refused) >= len(content) - 2 * 4 - 5
