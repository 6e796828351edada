"""Packed folders stand wherever folders of audio stand."""

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.data import ChunkDataset, read_audio, read_manifest
from tests.audio_headers import say_no_length
from tests.corpus import write_corpus, write_noise, write_rooms
from tests.recipes.runs import SHORT, arguments, log, recipe, weights

prepare = recipe("prepare")
RATE = 16000


def pack(source, packed, *options):
    prepare.main(["--pack", str(source), str(packed), *options])
    return packed


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of audio, and the same packed, by what a training calls them."""
    root = tmp_path_factory.mktemp("packing")
    made = {
        "data_folder": write_corpus(root / "corpus"),
        "noise_folder": write_noise(root / "noise"),
        "rir_folder": write_rooms(root / "rooms"),
    }
    packed = {k: pack(f, root / f"{f.name}.packed") for k, f in made.items()}
    return made, packed


def test_the_lists_of_a_packed_folder_are_those_of_its_files(folders, tmp_path):
    rows = []
    for name, found in zip(("files", "packed"), folders, strict=True):
        data, output = found["data_folder"], tmp_path / name
        prepare.main([arg for arg in arguments(data, output) if "device" not in arg])
        manifest = read_manifest(output / "save" / "train.csv")
        rows.append([(u.ID, u.wav[len(str(data)) :], u.samples) for u in manifest])
        rows.append((output / "save" / "valid_trials.txt").read_text())
    assert rows[:2] == rows[2:]
    assert len(rows[0]) == 16


def test_a_packed_folder_may_be_named_from_where_one_is(folders, tmp_path, monkeypatch):
    packed = folders[1]["data_folder"]
    monkeypatch.chdir(packed.parent)
    argv = arguments(packed.name, tmp_path / "run")
    prepare.main([arg for arg in argv if "device" not in arg])
    assert len(read_manifest(tmp_path / "run" / "save" / "train.csv")) == 16


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_streams_are_listed_packed_and_trained_on_as_files_of_known_length(
    tmp_path, suffix
):
    found = []
    for name in ("files", "streams"):
        data = write_corpus(tmp_path / name, seconds=0.3, suffix=suffix)
        if name == "streams":
            for path in data.rglob(f"*{suffix}"):
                say_no_length(path)
        output = tmp_path / f"{name}_run"
        argv = arguments(data, output, check_audio=True)
        prepare.main([arg for arg in argv if "device" not in arg])
        listed = read_manifest(output / "save" / "train.csv")
        rows = [(u.ID, u.samples) for u in listed]
        packed = pack(data, tmp_path / f"{name}.packed")
        numbers = dict.fromkeys(listed.speaker_names, 0)
        chunks = ChunkDataset(listed, numbers, samples=2000)
        wavs = torch.stack([chunks[1, index].wav for index in range(len(chunks))])
        found.append((rows, wavs, (packed / "samples.int16").read_bytes()))
    (rows, wavs, samples), (of_streams, wavs_of_streams, samples_of_streams) = found
    assert len(rows) == 16
    assert min(length for _, length in rows) > 3000
    assert (rows, samples) == (of_streams, samples_of_streams)
    assert torch.equal(wavs, wavs_of_streams)


@pytest.mark.slow
def test_a_training_on_packed_folders_has_the_bits_of_one_on_files(
    train, folders, tmp_path
):
    runs = []
    settings = SHORT | {"valid_speakers": 2}
    for name, found in zip(("files", "packed"), folders, strict=True):
        output = tmp_path / name
        others = {name: f for name, f in found.items() if name != "data_folder"}
        train.main(arguments(found["data_folder"], output, **others, **settings))
        runs.append(output)
    files, packed = map(weights, runs)
    assert all(torch.equal(files[key], packed[key]) for key in files)
    assert log(runs[0]) == log(runs[1])


def test_files_that_cannot_be_used_are_refused_or_left_out(tmp_path, capsys):
    source = write_corpus(tmp_path / "corpus", speakers=2, seconds=0.1)
    session = source / "wav" / "id00000" / "s00"
    (session / "text.wav").write_text("RIFF or not")
    noise = 0.1 * np.random.default_rng(0).standard_normal((800, 2))
    soundfile.write(session / "stereo.wav", noise, RATE)
    (session / "other.opus").write_bytes(b"OggS")
    (session / "00000.m4a").write_bytes(b"what 00000.wav is from")
    with pytest.raises(ValueError, match=r"3 of 11 files cannot.*--bad_files=drop"):
        pack(source, tmp_path / "a.packed")
    # What could be packed is there when it goes on.
    pack(source, tmp_path / "a.packed", "--first-channel", "--bad-files=drop")
    told = capsys.readouterr().out
    assert "2 of 11 files cannot be used" in told
    assert "9 files" in told.splitlines()[-1]
    listed = (tmp_path / "a.packed" / "bad_files.txt").read_text()
    assert "text.wav\tcannot be read" in listed
    assert "other.opus\tno WAV or FLAC" in listed
    first = read_audio(
        tmp_path / "a.packed/wav/id00000/s00/stereo.wav", sample_rate=RATE
    )
    assert np.allclose(first, noise[:, 0], atol=2**-15)


def test_a_folder_of_which_nothing_can_be_packed_is_refused(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "text.wav").write_text("RIFF or not")
    with pytest.raises(ValueError, match="nothing is packed"):
        pack(tmp_path / "source", tmp_path / "a.packed", "--bad_files=drop")


def test_the_command_says_what_it_does(capsys):
    prepare.main([])
    assert "--pack FOLDER PACKED" in capsys.readouterr().out
