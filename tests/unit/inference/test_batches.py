"""Files come in batches of similar length, read ahead of what embeds them."""

import threading

import pytest
import torch

from speechbrain_rev.inference import running

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def reading(lengths):
    return lambda i: torch.zeros(lengths[i])


def sizes(lengths, device):
    groups = list(running.read_batches(range(len(lengths)), reading(lengths), device))
    assert sorted(i for group in groups for i, _ in group) == list(range(len(lengths)))
    assert all(len(w) == lengths[i] for group in groups for i, w in group)
    return [[len(w) for _, w in group] for group in groups]


def test_batches_are_alike_in_length_and_bounded():
    lengths = [1_000_000, 900_000, 100, 90, 80, 70, 60, 50, *[40] * 40, 7]
    found = sizes(lengths, CUDA)
    assert found[:2] == [[1_000_000], [900_000]]
    assert max(len(size) for size in found) == 16
    assert all(min(size) >= 0.75 * max(size) for size in found)


def test_a_cpu_s_batches_hold_a_few_seconds():
    lengths = [*[40_000] * 3, *[16_000] * 12, 200_000]
    assert sizes(lengths, CPU) == [
        [200_000], *[[40_000] * n for n in (2, 1)], *[[16_000] * n for n in (5, 5, 2)]
    ]  # fmt: skip
    assert sizes(lengths, CUDA) == [[200_000], [40_000] * 3, [16_000] * 12]


def test_the_next_files_are_read_while_the_first_are_embedded_and_no_more(monkeypatch):
    monkeypatch.setattr(running, "_WAITING_SAMPLES", 50)
    read, seen, reader = reading([100, 200, 300, 400]), [], []
    second = threading.Event()

    def noting(i):
        seen.append(i)
        reader.append(threading.current_thread())
        if i == 1:
            second.set()
        return read(i)

    given = running.read_batches(range(4), noting, CPU)
    assert [i for i, _ in next(given)] == [0]
    # Nobody has asked for more.
    assert second.wait(timeout=60)
    assert seen == [0, 1]
    assert [i for group in given for i, _ in group] == [1, 2, 3]
    assert seen == [0, 1, 2, 3]
    assert threading.main_thread() not in reader


def test_a_file_that_cannot_be_read_is_told_of_after_those_before_it(monkeypatch):
    monkeypatch.setattr(running, "_WAITING_SAMPLES", 50)

    def failing(i):
        if i == 2:
            raise ValueError("2 cannot be read")
        return torch.zeros(100)

    given = running.read_batches(range(4), failing, CPU)
    assert [next(given)[0][0] for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="2 cannot be read"):
        next(given)


def test_what_is_read_as_none_is_left_out():
    read = [torch.zeros(100), None, torch.zeros(90)].__getitem__
    (group,) = running.read_batches(range(3), read, CPU)
    assert [i for i, _ in group] == [0, 2]


def test_reading_ends_with_what_asked_for_it(monkeypatch):
    monkeypatch.setattr(running, "_WAITING_SAMPLES", 50)
    before = threading.active_count()
    given = running.read_batches(range(50), reading([100] * 50), CPU)
    next(given)
    given.close()
    assert threading.active_count() == before
