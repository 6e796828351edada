import pytest

from speechbrain_rev.data import EpochBatchSampler


def batches(utterances, batch_size, epoch=1, start=0, **settings):
    sampler = EpochBatchSampler(utterances, batch_size, **settings)
    sampler.set_epoch(epoch)
    sampler.start_at(start)
    return list(sampler)


def indices(drawn):
    return [index for batch in drawn for _, index in batch]


def test_an_epoch_uses_utterances_equally_often_in_full_batches():
    drawn = batches(23, 4)
    assert [len(batch) for batch in drawn] == [4] * 5
    assert len(set(indices(drawn))) == 20
    drawn = batches(10, 4, steps=10)
    assert [indices(drawn).count(index) for index in range(10)] == [4] * 10


def test_repeated_utterances_of_a_long_epoch_get_chunks_of_their_own():
    for epochs in ((1, 2), (2, 3)):
        places = [p for e in epochs for b in batches(10, 4, e, steps=10) for p in b]
        assert len(set(places)) == len(places) == 80


def test_orders_differ_between_epochs_and_seeds_but_not_between_runs():
    assert batches(50, 5, epoch=1) == batches(50, 5, epoch=1)
    assert indices(batches(50, 5, epoch=1)) != indices(batches(50, 5, epoch=2))
    assert batches(50, 5, seed=1) != batches(50, 5, seed=2)


@pytest.mark.parametrize("start", [0, 7, 10])
def test_a_start_in_the_middle_gives_the_rest_of_the_same_epoch_once(start):
    sampler = EpochBatchSampler(50, 5)
    sampler.set_epoch(3)
    sampler.start_at(start)
    assert list(sampler) == batches(50, 5, epoch=3)[start:]
    assert len(sampler) == len(list(sampler)) == 10


def test_processes_share_each_step_so_that_their_number_does_not_matter():
    shares = [batches(50, 6, rank=rank, world_size=3) for rank in range(3)]
    assert [a + b + c for a, b, c in zip(*shares, strict=True)] == batches(50, 6)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "named"),
    [(8, 2, r"7 utterances.*batch_size 8"), (4, 3, "shared by 3 processes")],
)
def test_a_batch_that_cannot_be_made_is_refused(batch_size, world_size, named):
    with pytest.raises(ValueError, match=named):
        EpochBatchSampler(7, batch_size, world_size=world_size)
