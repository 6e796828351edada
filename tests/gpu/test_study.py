"""Runs of the study on a CUDA device: equal weights where modes claim them."""

from pathlib import Path

import pytest
import torch

from tests.recipes.study import study, tiny_size, write_data

conditions, figures, run = study("conditions"), study("figures"), study("run")
MODES = ("store", "reconstruct")


def check_two_modes(folder: Path, device: str) -> None:
    """Train and score in two modes: equal weights at the end, by less memory."""
    data, noise = write_data(folder)
    rows = [conditions.Condition(f"revnet46, {m}", {"mode": m}) for m in MODES]
    lists = sorted(data.glob("veri_test*.txt"))
    given = {
        "data_folder": data,
        "train_list": data / "train_list.txt",
        "trial_lists": lists,
        "noise_folder": noise,
        "device": device,
    }
    names = [path.stem for path in lists]
    whole = figures.Study(folder / "study", rows, [1], names)
    schedule = run.Schedule(whole, tiny_size(), given)
    assert run.train(schedule, schedule.runs()) == []
    stored, reconstructed = (one.folder for one in schedule.runs())
    assert figures.digest(stored) == figures.digest(reconstructed)
    peaks = [int((f / figures.PEAK).read_text()) for f in (stored, reconstructed)]
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_runs_on_a_gpu_end_with_equal_weights_in_two_modes(tmp_path):
    check_two_modes(tmp_path, "cuda")


@pytest.mark.slow(drawn=False)
def test_runs_on_the_cpu_end_with_equal_weights_in_two_modes(tmp_path):
    check_two_modes(tmp_path, "cpu")
