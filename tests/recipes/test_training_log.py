import contextlib
import io
import sys

import pytest
import torch
from tqdm import tqdm

from tests.recipes.runs import recipe
from tests.unit.lobes.encoders import tiny

training_log = recipe("training_log")

STATS = {
    "epoch": 3,
    "train_loss": 4.5,
    "train_accuracy_percent": 12.5,
    "lr": 0.1,
    "margin": 0.2,
    "skipped_steps": 0,
    "unread_files": 0,
    "minutes": 1.5,
    "utterances_per_second": 99.6,
    "process_resident_peak_bytes": 3 * 2**29,
}


def test_the_log_line_has_units_for_reading_and_validation_only_where_it_was_made():
    line = training_log.shown(STATS)
    assert (line["utt/s"], line["process resident peak GiB"]) == (100, 1.5)
    assert "valid EER %" not in line
    line = training_log.shown({**STATS, "valid_eer_percent": 9.0})
    assert line["valid EER %"] == 9.0


def test_the_log_line_tells_unread_files_where_there_are_some():
    assert training_log.shown({**STATS, "unread_files": 3})["unread files"] == 3
    assert "unread files" not in training_log.shown(STATS)


def test_the_log_line_tells_skipped_steps_where_there_are_some():
    assert "skipped steps" not in training_log.shown(STATS)
    line = training_log.shown({**STATS, "skipped_steps": 2})
    assert line["skipped steps"] == 2


def test_peaks_of_gpu_and_process_have_names_of_their_own(monkeypatch):
    (process,) = training_log.peak_memory("cpu")
    monkeypatch.setattr(training_log.torch.cuda, "max_memory_allocated", lambda _: 7)
    measured = training_log.peak_memory("cuda")
    assert measured == {"cuda_allocated_peak_bytes": 7}
    assert process == "process_resident_peak_bytes"
    assert training_log.memory_shown(measured) == {"CUDA allocated peak GiB": 7 / 2**30}


def test_the_largest_values_in_exact_streams_are_told():
    encoder = tiny("revnet57", streams="exact")
    encoder(torch.randn(2, 43, 80))
    wrapped = torch.nn.Module()  # as DistributedDataParallel holds what it wraps
    wrapped.module = encoder
    found = training_log.Tally().ask(wrapped)["largest_streams"]
    assert list(found) == [f"stages.{i}.chain" for i in range(4)]
    assert all(0 < value < 2**14 for value in found.values())


def test_without_exact_streams_there_is_nothing_to_tell():
    floats = tiny("revnet57", streams="float")
    for encoder in (floats, tiny("resnet34"), torch.nn.Tanh()):
        assert training_log.Tally().ask(encoder) == {}


def test_the_largest_value_of_an_epoch_is_kept():
    encoder = torch.nn.Module()
    tally = training_log.Tally()
    for told, kept in (
        (2.0, 2.0),
        (1.0, 2.0),
        (3.0, 3.0),
        (float("nan"), None),
        (9, None),
    ):
        encoder.largest_streams = lambda told=told: {"stage": told}
        found = tally.ask(encoder)["largest_streams"]["stage"]
        assert found == kept or (kept is None and found != found)


class Terminal(io.StringIO):
    """Where somebody watches."""

    def isatty(self):
        return True


class Clock:
    """Time as a test wants it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


def test_the_bar_tells_speed_remaining_time_loss_and_memory(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**29)
    with training_log.progress_bar("epoch 1", 425, 0, off=False) as bar:
        clock.now += 2.0
        training_log.show_step(bar, 100, 4.5, "cuda")
    shown = terminal.getvalue().split("\r")
    assert any(
        "100/425 [00:02<00:06, 50.00utt/s, loss=4.50, allocated peak=1.50GiB]" in line
        for line in shown
    )


@pytest.mark.parametrize("others", [0, 1])
def test_a_log_file_gets_a_line_every_few_minutes(monkeypatch, clock, others):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with contextlib.ExitStack() as stack:
        for _ in range(others):
            stack.enter_context(tqdm(file=io.StringIO()))
        bar = stack.enter_context(
            training_log.progress_bar("epoch 1", 4000, 0, off=False)
        )
        for _ in range(700):
            clock.now += 1.0
            training_log.show_step(bar, 4, 4.5, "cpu")
    lines = stderr.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1:  30%")
    assert "4.00utt/s, loss=4.50, resident peak=" in lines[0]
    assert "\r" not in stderr.getvalue()


def test_memory_is_looked_at_once_a_second(monkeypatch, clock):
    looked = []
    monkeypatch.setattr(
        training_log, "peak_memory", lambda device: looked.append(device) or {}
    )
    monkeypatch.setattr(sys, "stderr", Terminal())
    with training_log.progress_bar("epoch 1", 400, 0, off=False) as bar:
        for _ in range(17):
            clock.now += 0.25
            training_log.show_step(bar, 4, 4.5, "cpu")
    assert len(looked) == 4


def test_the_peak_of_the_process_has_its_own_name_in_the_bar(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with training_log.progress_bar("epoch 1", 8, 0, off=False) as bar:
        clock.now += 2.0
        training_log.show_step(bar, 4, 4.5, "cpu")
    assert ", resident peak=" in terminal.getvalue()
    assert set(training_log.BAR_PEAKS) == set(training_log.PEAKS)
