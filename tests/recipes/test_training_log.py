import json

import torch

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


def epochs(folder):
    lines = (folder / training_log.LOG).read_text().splitlines()
    return [(json.loads(line)["epoch"], json.loads(line)["lr"]) for line in lines]


def test_an_epoch_trained_again_replaces_its_line_and_those_after_it(tmp_path):
    for epoch, lr in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4)):
        training_log.append_epoch(tmp_path, {"epoch": epoch, "lr": lr})
    assert epochs(tmp_path) == [(1, 0.1), (2, 0.4)]


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


def test_curves_are_drawn_from_the_log(tmp_path):
    for epoch in (1, 2):
        training_log.append_epoch(tmp_path, {**STATS, "epoch": epoch})
    training_log.draw_curves(tmp_path)
    assert (tmp_path / "training_curves.png").stat().st_size > 1000


def test_without_matplotlib_training_ends_well_and_says_so(
    tmp_path, monkeypatch, capsys
):
    def missing(rows, path):
        raise ImportError("pip install matplotlib")

    monkeypatch.setattr(training_log.plots, "training_curves", missing)
    training_log.append_epoch(tmp_path, STATS)
    training_log.draw_curves(tmp_path)
    assert "is not drawn: pip install matplotlib" in capsys.readouterr().out


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
