"""The line of an epoch, the bar, and their memory."""

import pytest
import torch
from speechbrain.utils.train_logger import FileTrainLogger

from speechbrain_rev.sizes import GIB
from speechbrain_rev.training import progress

STATS = {
    "epoch": 3,
    "train_loss": 4.5,
    "train_accuracy_percent": 12.5,
    "lr": 0.1,
    "margin": 0.2,
    "skipped_steps": 0,
    "unread_files": 0,
    "minutes": 1.5,
    "data_wait_percent": 12.346,
    "utterances_per_second": 99.6,
    "process_resident_peak_bytes": 3 * GIB // 2,
}
LINE = {
    "epoch": 3,
    "loss": "4.50",
    "accuracy %": "12.50",
    "lr": "0.1",
    "margin": "0.20",
    "minutes": "1.50",
    "utt/s": 100,
    "waited for data %": "12.35",
    "process resident peak GiB": "1.50",
}


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, {}),
        ({"skipped_steps": 2}, {"skipped steps": 2}),
        ({"unread_files": 3}, {"unread files": 3}),
        ({"unread_validation_files": 1}, {"unread validation files": 1}),
        ({"valid_eer_percent": 9.0}, {"valid EER %": "9.00"}),
        ({"compression_ratio": 2.5}, {"activations compressed": "2.50"}),
        ({"resumed_after_step": 2000}, {"resumed after step": 2000}),
        ({"utterances_per_second": 1.26}, {"utt/s": "1.26"}),
    ],
)
def test_the_line_of_an_epoch_has_units_and_what_there_is_to_report(more, shown):
    assert progress.log_line(STATS | more) == LINE | shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0.147, "0.15"), (0.0, "0"), (1.0, "1.00"), (100.0, "100.00"), (0.0123, "0.012")],
)
def test_no_number_of_the_line_has_an_exponent(tmp_path, number, shown):
    names = ("train_loss", "train_accuracy_percent", "margin", "minutes")
    names += ("valid_eer_percent", "data_wait_percent", "compression_ratio")
    stats = STATS | dict.fromkeys(names, number) | {"lr": 4.93e-4}
    FileTrainLogger(tmp_path / "log.txt").log_stats(progress.log_line(stats))
    line = (tmp_path / "log.txt").read_text()
    assert line.count(f": {shown},") == len(names)
    assert "lr: 0.000493," in line
    assert "e-" not in line.replace("epoch", "")
    assert "e+" not in line


def test_peaks_of_gpu_and_process_have_names_of_their_own(monkeypatch):
    (process,) = progress.peak_memory("cpu")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 7 * GIB)
    measured = progress.peak_memory("cuda")
    assert process == "process_resident_peak_bytes"
    assert measured == {"cuda_allocated_peak_bytes": 7 * GIB}
    assert progress.memory_shown(measured) == {"CUDA allocated peak GiB": 7}


@pytest.mark.parametrize(("seconds", "duration"), [(0.5, "1.7 min"), (18.0, "1.0 h")])
def test_a_forecast_is_in_minutes_or_hours(seconds, duration):
    words = progress.forecast(100, [(2, seconds)], "cpu")
    assert f"100 steps per epoch, {seconds:.2f} s per step: {duration} for 2" in words


@pytest.fixture
def stepped(monkeypatch):
    """Show steps of four utterances, some seconds apart."""

    def show(steps, seconds, device="cpu"):
        now = [0.0]
        monkeypatch.setattr("tqdm.std.time", lambda: now[0])
        with progress.epoch_bar("epoch 1", 4000, 0, off=False) as bar:
            for _ in range(steps):
                now[0] += seconds
                progress.show_step(bar, 4, 4.5, device)

    return show


@pytest.mark.parametrize(
    ("device", "peak"), [("cuda", "allocated peak=1.50GiB]"), ("cpu", "resident peak=")]
)
def test_the_bar_shows_speed_remaining_time_loss_and_memory(
    monkeypatch, terminal, stepped, device, peak
):
    shown = terminal()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * GIB // 2)
    stepped(1, 2.0, device)
    words = f"4/4000 [00:02<33:18,  2.00utt/s, loss=4.50, {peak}"
    assert any(words in line for line in shown.getvalue().split("\r"))


def test_a_log_file_gets_a_line_every_few_minutes(log, stepped):
    shown = log()
    stepped(700, 1.0)
    lines = shown.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1:  30%")
    assert "4.00utt/s, loss=4.50, resident peak=" in lines[0]


def test_memory_is_measured_once_a_second(monkeypatch, terminal, stepped):
    terminal()
    measured = []
    monkeypatch.setattr(progress, "peak_memory", lambda one: measured.append(one) or {})
    stepped(17, 0.25)
    assert len(measured) == 4
