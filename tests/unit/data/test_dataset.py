import os
from pathlib import Path

import pytest
import soundfile
import torch
from torch.utils.data import DataLoader

from speechbrain_rev.data import (
    ChunkDataset,
    EpochBatchSampler,
    Utterance,
    VoxCelebFolder,
    WholeUtterances,
    audio_info,
    collate_chunks,
    collate_whole,
    read_audio,
)
from speechbrain_rev.data.dataset import Chunk
from tests.corpus import write_corpus

SAMPLES = 8000


@pytest.fixture(scope="module")
def utterances(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("corpus"), speakers=3)
    paths = sorted((folder / "wav").rglob("*.wav"))
    return [
        Utterance(p.stem, str(p), audio_info(p).samples, p.parts[-3]) for p in paths
    ]


def dataset(utterances, **changed):
    numbers = {u.spk_id: n for n, u in enumerate(utterances)}
    return ChunkDataset(
        utterances, numbers, **{"samples": SAMPLES, "seed": 3, **changed}
    )


def loaded(utterances, epoch, num_workers):
    sampler = EpochBatchSampler(len(utterances), 4, seed=3)
    sampler.set_epoch(epoch)
    loader = DataLoader(
        dataset(utterances),
        batch_sampler=sampler,
        collate_fn=collate_chunks,
        num_workers=num_workers,
    )
    return list(loader)


def test_chunks_are_the_same_with_and_without_workers(utterances):
    torch.manual_seed(0)
    alone = loaded(utterances, 1, 0)
    torch.manual_seed(1)
    with_workers = loaded(utterances, 1, 2)
    assert len(alone) == len(with_workers) == 3
    for a, b in zip(alone, with_workers, strict=True):
        assert torch.equal(a.wavs, b.wavs)
        assert torch.equal(a.speakers, b.speakers)


def test_chunks_come_from_their_utterance_and_move_from_epoch_to_epoch(utterances):
    chunks = dataset(utterances)
    for index, utterance in enumerate(utterances):
        whole = read_audio(utterance.wav, sample_rate=16000)
        pieces = whole.unfold(0, SAMPLES, 1)
        drawn = [chunks[epoch, index][0] for epoch in (1, 2, 3)]
        for chunk in drawn:
            alike = pieces[(pieces[:, :9] == chunk[:9]).all(dim=1)]
            assert (alike == chunk).all(dim=1).any()
        assert torch.equal(drawn[0], chunks[1, index][0])
        assert len(pieces) < 100 or not torch.equal(drawn[0], drawn[1])


def test_short_utterances_are_repeated(utterances):
    chunk = dataset(utterances, samples=30000)[1, 0].wav
    whole = read_audio(utterances[0].wav, sample_rate=16000)
    assert len(chunk) == 30000
    assert torch.equal(chunk, torch.cat([whole] * 4)[:30000])


def test_chunks_carry_their_speaker(utterances):
    chunks = dataset(utterances)
    speakers = [chunks[1, index][1] for index in range(len(utterances))]
    assert speakers == [3] * 4 + [7] * 4 + [11] * 4


def test_a_whole_utterance_that_cannot_be_read_is_a_reason(tmp_path):
    soundfile.write(tmp_path / "empty.wav", [], 16000)
    given = WholeUtterances(
        VoxCelebFolder(tmp_path), ["gone.wav", "empty.wav"], max_samples=100
    )
    assert collate_whole([given[0]])[0] == "gone.wav"
    assert "no such file" in collate_whole([given[0]])[1]
    assert "holds no samples" in collate_whole([given[1]])[1]


@pytest.mark.parametrize("format", ["WAV", "NIST", "AIFF", "AU", "W64", "RF64"])
def test_speech_that_was_cut_short_after_it_was_listed_is_not_used(
    utterances, tmp_path, format
):
    path = tmp_path / "cut.wav"
    wav = read_audio(utterances[0].wav, sample_rate=16000)
    soundfile.write(path, wav, 16000, format=format, subtype="PCM_16")
    listed = [Utterance("cut", str(path), len(wav), utterances[0].spk_id)] * 2
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(
        ValueError, match=r"None of 10 .*cut\.wav .* is cut short, 2 of"
    ):
        dataset(listed, samples=100)[1, 0]
    corpus = VoxCelebFolder(tmp_path)
    name, why = WholeUtterances(corpus, ["cut.wav"], max_samples=10**6)[0]
    assert (name, "is cut short, 2 of" in why) == ("cut.wav", True)


def test_whole_utterances_are_cut_only_where_they_are_too_long(utterances):
    corpus = VoxCelebFolder(Path(utterances[0].wav).parents[2])
    names = [Path(u.wav).relative_to(corpus.root).as_posix() for u in utterances]
    long, short = (
        WholeUtterances(corpus, names, max_samples=samples) for samples in (10**6, 100)
    )
    assert long[2][0] == names[2]
    assert torch.equal(long[2][1], read_audio(utterances[2].wav, sample_rate=16000))
    assert len(short[2][1]) == 100


def test_in_the_place_of_a_file_that_cannot_be_read_is_another_one(
    utterances, tmp_path
):
    lost = [*utterances]
    lost[1] = Utterance("gone", str(tmp_path / "gone.wav"), 16000, lost[1].spk_id)
    chunks = dataset(lost)
    for epoch in range(1, 4):
        found = chunks[epoch, 1]
        ((path, why),) = found.unread
        assert (path, "no such file" in why) == (str(tmp_path / "gone.wav"), True)
        assert torch.equal(found.wav, chunks[epoch, 1].wav)
        instead = [
            i
            for i in range(len(lost))
            if i != 1 and torch.equal(chunks[epoch, i].wav, found.wav)
        ]
        assert [chunks[epoch, i].speaker for i in instead] == [found.speaker]
    batch = collate_chunks([chunks[1, 0], found])
    assert batch.unread == [(str(tmp_path / "gone.wav"), why)]
    assert batch.to("cpu").unread == batch.unread


def test_a_header_that_lies_of_the_length_is_told_of(utterances, tmp_path):
    short = Utterance("short", utterances[0].wav, 10**9, utterances[0].spk_id)
    ((_, why),) = dataset([short, *utterances])[1, 0].unread
    assert f"{utterances[0].wav} is shorter than it was" in why


def test_a_file_without_samples_is_told_of(utterances, tmp_path):
    soundfile.write(tmp_path / "empty.wav", [], 16000)
    empty = Utterance("empty", str(tmp_path / "empty.wav"), 0, utterances[0].spk_id)
    found = dataset([empty, *utterances])[1, 0]
    assert found.unread == ((empty.wav, f"{empty.wav} holds no samples"),)


def test_a_data_folder_that_is_gone_ends_it(tmp_path):
    gone = [Utterance(str(i), str(tmp_path / f"{i}.wav"), 16000, "a") for i in range(3)]
    with pytest.raises(
        ValueError, match=r"None of 10 files.*no such file.*still there"
    ):
        dataset(gone)[1, 0]


def test_one_lost_file_among_few_never_ends_a_training(utterances, tmp_path):
    """Each try draws anew, so that no two files lead to each other for ever."""
    gone = Utterance("gone", str(tmp_path / "x.wav"), 16000, "id00000")
    chunks = dataset([*utterances[:3], gone])
    # That of four files the lost one is drawn ten times has a chance of 60 / 4**9.
    tries = [len(chunks[epoch, 3].unread) for epoch in range(60)]
    assert min(tries) == 1
    assert 1 < max(tries) < 10


def test_a_batch_read_at_once_is_that_of_its_chunks(utterances, tmp_path):
    gone = Utterance("gone", str(tmp_path / "x.wav"), 16000, "id00000")
    chunks = dataset([*utterances, gone], samples=12000)
    places = [(1, 0), (1, len(utterances)), (2, 5), (1, 3)]
    batch = collate_chunks(chunks.__getitems__(places))
    one_by_one = collate_chunks([chunks[place] for place in places])
    assert torch.equal(batch.wavs, one_by_one.wavs)
    assert torch.equal(batch.speakers, one_by_one.speakers)
    assert batch.unread == one_by_one.unread
    assert len(batch.unread) == 1


def test_the_first_utterances_of_a_batch_are_a_copy():
    batch = collate_chunks([Chunk(torch.full((8,), float(i)), i) for i in range(3)])
    first = batch.first(2)
    assert first.speakers.tolist() == [[0], [1]]
    assert len(batch.first(4)) == 3
    first.wavs.fill_(9.0)
    assert batch.wavs[:, 0].tolist() == [0.0, 1.0, 2.0]


def test_speakers_that_have_no_number_are_named(utterances):
    numbers = {u.spk_id: n for n, u in enumerate(utterances) if u.spk_id != "id00001"}
    with pytest.raises(ValueError, match=r"1 speakers .* have no number.*'id00001'"):
        ChunkDataset(utterances, numbers, samples=SAMPLES)
