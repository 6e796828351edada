# ruff: noqa: NPY002 -- numpy's global state is what is tested.
import random

import numpy as np
import torch

from speechbrain_rev.data import GlobalRandomState, generator, seeding
from speechbrain_rev.data.seeding import draw_below


def draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_all_global_states_come_back(tmp_path):
    state = GlobalRandomState()
    # So that numpy and Python hold half-used state, too.
    random.gauss(0, 1)
    np.random.standard_normal(1)
    state._save(tmp_path / "state.ckpt")
    expected = draws(), random.gauss(0, 1), np.random.standard_normal()
    draws()
    state._load(tmp_path / "state.ckpt", end_of_epoch=False)
    assert (draws(), random.gauss(0, 1), np.random.standard_normal()) == expected


def test_numbers_are_drawn_evenly_and_anew_for_each_place():
    numbers = np.array([draw_below(5, "chunk", 0, place) for place in range(5000)])
    assert [draw_below(5, "chunk", 0, place) for place in range(9)] == list(numbers[:9])
    # Five standard deviations of a binomial count.
    assert np.abs(np.bincount(numbers) - 1000).max() < 5 * (5000 * 0.2 * 0.8) ** 0.5
    pairs = np.bincount(5 * numbers[1:] + numbers[:-1])
    assert np.abs(pairs - 200).max() < 5 * (5000 * 0.04 * 0.96) ** 0.5


def test_places_get_streams_of_their_own():
    places = [(1, 2), (2, 1), (12,), ("1", 2), (1, 2, 0)]
    # Neighbours are unrelated, too.
    places += [("step", 0, step) for step in range(50)]
    drawn = [torch.rand(200, generator=generator(*place)) for place in places]
    correlation = torch.corrcoef(torch.stack(drawn)) - torch.eye(len(places))
    # 200 draws: standard deviation 0.071; 1,485 pairs stay below 5 of them.
    assert correlation.abs().max() < 0.36


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def test_processes_fold_their_ranks_into_all_global_states(monkeypatch):
    seed_all(7)
    per_rank = [draws()]
    for rank in (0, 1, 1, 2):
        seed_all(7)
        monkeypatch.setattr(seeding, "process_rank", lambda rank=rank: rank)
        GlobalRandomState().fold_rank()
        per_rank.append(draws())
    unfolded, first, second, again, third = per_rank
    assert (first, second) == (unfolded, again)
    for drawn in zip(first, second, third, strict=True):
        assert len(set(map(str, drawn))) == 3


def test_a_process_that_is_new_goes_on_from_the_first_ones_state(tmp_path, monkeypatch):
    state = GlobalRandomState()
    state._save(tmp_path / "state.ckpt")
    per_rank = []
    for rank in (0, 1, 2, 1):
        monkeypatch.setattr(seeding, "process_rank", lambda rank=rank: rank)
        state._load(tmp_path / "state.ckpt", end_of_epoch=False)
        per_rank.append(draws())
    assert per_rank[1] == per_rank[3]
    assert len({str(drawn) for drawn in per_rank}) == 3
