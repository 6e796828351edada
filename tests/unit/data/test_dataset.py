"""Chunks depend on (seed, epoch, utterance) alone, and no unreadable file ends a run."""

import pytest
import soundfile
import torch
from torch.utils.data import DataLoader

from speechbrain_rev.audio import audio_info, read_audio
from speechbrain_rev.data import (
    ChunkDataset,
    EpochBatchSampler,
    Utterance,
    WholeUtterances,
    collate_chunks,
    collate_whole,
)
from tests.corpus import write_corpus

SAMPLES = 8000


@pytest.fixture(scope="module")
def utterances(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("speech"), speakers=3)
    return [
        Utterance(p.stem, str(p), audio_info(p).samples, p.parts[-3])
        for p in sorted((folder / "wav").rglob("*.wav"))
    ]


def dataset(utterances, samples=SAMPLES):
    numbers = {u.spk_id: n for n, u in enumerate(utterances)}
    return ChunkDataset(utterances, numbers, samples=samples, seed=3)


@pytest.fixture
def gone(tmp_path):
    return Utterance("gone", str(tmp_path / "gone.wav"), 16000, "id00001")


def test_chunks_are_the_same_with_and_without_workers(utterances):
    loaded = []
    for workers in (0, 2):
        torch.manual_seed(workers)
        sampler = EpochBatchSampler(len(utterances), 4, seed=3)
        sampler.set_epoch(1)
        loader = DataLoader(
            dataset(utterances),
            batch_sampler=sampler,
            collate_fn=collate_chunks,
            num_workers=workers,
        )
        batches = list(loader)
        loaded.append((torch.cat([b.wavs for b in batches]), batches))
    assert len(loaded[0][1]) == 3
    assert torch.equal(loaded[0][0], loaded[1][0])
    speakers = [[b.speakers.tolist() for b in batches] for _, batches in loaded]
    assert speakers[0] == speakers[1]


def test_chunks_come_from_their_utterance_and_move_from_epoch_to_epoch(utterances):
    chunks = dataset(utterances)
    for index, utterance in enumerate(utterances):
        whole = read_audio(utterance.wav, sample_rate=16000)
        pieces = whole.unfold(0, SAMPLES, 1)
        drawn = [chunks[epoch, index].wav for epoch in (1, 2, 3)]
        for chunk in drawn:
            alike = pieces[(pieces[:, :9] == chunk[:9]).all(dim=1)]
            assert (alike == chunk).all(dim=1).any()
        assert torch.equal(drawn[0], chunks[1, index].wav)
        assert len(pieces) < 100 or not torch.equal(drawn[0], drawn[1])
    speakers = [chunks[1, index].speaker for index in range(len(utterances))]
    assert speakers == [3] * 4 + [7] * 4 + [11] * 4
    # A short utterance is repeated.
    whole = read_audio(utterances[0].wav, sample_rate=16000)
    chunk = dataset(utterances, samples=30000)[1, 0].wav
    assert torch.equal(chunk, torch.cat([whole] * 4)[:30000])


def test_a_batch_read_at_once_is_that_of_its_chunks(utterances, gone):
    chunks = dataset([*utterances, gone], samples=12000)
    places = [(1, 0), (1, len(utterances)), (2, 5), (1, 3)]
    batch = collate_chunks(chunks.__getitems__(places))
    one_by_one = collate_chunks([chunks[place] for place in places])
    assert torch.equal(batch.wavs, one_by_one.wavs)
    assert torch.equal(batch.speakers, one_by_one.speakers)
    assert batch.unread == one_by_one.unread == batch.to("cpu").unread
    assert len(batch.unread) == 1


class TestUnreadable:
    def test_another_file_takes_its_place(self, utterances, gone):
        chunks = dataset([utterances[0], gone, *utterances[2:]])
        for epoch in range(1, 4):
            chunk = chunks[epoch, 1]
            ((path, reason),) = chunk.unread
            assert (path, "no such file" in reason) == (gone.wav, True)
            assert torch.equal(chunk.wav, chunks[epoch, 1].wav)
            others = [i for i in range(len(utterances)) if i != 1]
            same = [i for i in others if torch.equal(chunks[epoch, i].wav, chunk.wav)]
            assert [chunks[epoch, i].speaker for i in same] == [chunk.speaker]

    def test_one_lost_file_among_few_never_ends_a_run(self, utterances, gone):
        """Each try draws anew, so that no two files lead to each other for ever."""
        chunks = dataset([*utterances[:3], gone])
        # That of four files the lost one is drawn ten times has a chance of 60 / 4**9.
        tries = [len(chunks[epoch, 3].unread) for epoch in range(60)]
        assert min(tries) == 1
        assert 1 < max(tries) < 10

    def test_a_data_folder_that_is_gone_ends_it(self, gone):
        words = r"None of 10 files.*no such file.*still there"
        with pytest.raises(ValueError, match=words):
            dataset([gone] * 3)[1, 0]

    def test_other_lengths_than_were_listed_are_reported(self, utterances, tmp_path):
        soundfile.write(tmp_path / "empty.wav", [], 16000)
        listed = (utterances[0].wav, 10**9), (str(tmp_path / "empty.wav"), 0)
        reasons = ("is shorter than it was when it was listed", "holds no samples")
        for (path, samples), reason in zip(listed, reasons, strict=True):
            wrong = Utterance("wrong", path, samples, utterances[0].spk_id)
            chunk = dataset([wrong, *utterances])[1, 0]
            assert chunk.unread == ((path, f"{path} {reason}"),)


def test_whole_utterances_are_cut_where_they_are_too_long_or_have_a_reason(
    utterances, tmp_path
):
    soundfile.write(tmp_path / "empty.wav", [], 16000)
    files = {"one": utterances[2].wav, "gone": "gone.wav"}
    files["empty"] = tmp_path / "empty.wav"
    long, short = (WholeUtterances(files, max_samples=n) for n in (10**6, 100))
    name, batch = collate_whole([long[0]])
    assert name == "one"
    expected = read_audio(utterances[2].wav, sample_rate=16000)
    assert torch.equal(batch.wavs[0], expected)
    assert torch.equal(short[0][1], expected[:100])
    assert "no such file" in collate_whole([long[1]])[1]
    assert "holds no samples" in collate_whole([long[2]])[1]
