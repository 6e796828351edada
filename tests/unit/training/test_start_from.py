"""Runs that start from others."""

import pytest

from speechbrain_rev.training import start_from
from tests.run_folders import write_run


def labels(folder, names):
    lines = [f"'{name}' => {i}\n" for i, name in enumerate(names)]
    end = "================\n'starting_index' => 0\n"
    folder.mkdir(parents=True)
    (folder / "label_encoder.txt").write_text("".join(lines) + end)


HEAD = {"pooling": "statistics", "loss": "aam_softmax"}


@pytest.mark.parametrize(
    ("theirs", "ours", "narrowed_from"),
    [
        ([1.0, 0.9, 1.1], [1.0, 0.9, 1.1], None),
        ([1.0], [1.0], None),
        ([1.0, 0.9, 1.1], [1.0], 3),
        ([0.9, 1.0], [1.0], 2),
        ([1.0], [1.0, 0.9, 1.1], "refused"),
        ([1.0, 0.9, 1.1], [0.9], "refused"),
        ([0.9, 1.1], [1.0], "refused"),
        ([1.0, 0.9], [0.9, 1.0], "refused"),
    ],
)
def test_equal_speeds_keep_all_classes_and_speed_one_its_own(
    tmp_path, monkeypatch, theirs, ours, narrowed_from
):
    loaded = {}
    monkeypatch.setattr(
        start_from, "load_finished_run", lambda *_, **given: loaded.update(given)
    )
    settings = {"pretrained_run": str(tmp_path), "speeds": ours, "modules": {}}
    settings["save_folder"] = str(tmp_path / "own")
    settings |= HEAD
    write_run(tmp_path, speeds=theirs)
    for folder in ("save", "own"):
        labels(tmp_path / folder, ["a", "b"])
    if narrowed_from == "refused":
        with pytest.raises(ValueError, match=r"the speeds \[.* may also be \[1\.0\]"):
            start_from.start_from(settings)
        return
    start_from.start_from(settings)
    assert loaded == {"narrowed_from": narrowed_from}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"pooling": "another"},
            "has the pooling statistics, this run another.* Give pooling: statistics",
        ),
        (
            {"loss": "subcenter_aam_softmax"},
            "a classifier of head cosine, .* Give a loss of head cosine: aam_softmax",
        ),
        ({"save_folder": "own"}, "other speakers, or numbered differently"),
    ],
)
def test_another_pooling_head_or_speakers_are_not_started_from(
    tmp_path, monkeypatch, changed, message
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, speeds=[1.0])
    labels(tmp_path / "save", ["a", "b"])
    labels(tmp_path / "own", ["b", "a"])
    settings = {"pretrained_run": str(tmp_path), "speeds": [1.0], "modules": {}}
    settings |= HEAD | {"save_folder": "save"} | changed
    with pytest.raises(ValueError, match=message):
        start_from.start_from(settings)


@pytest.mark.parametrize("there", [None, "record", "labels"])
def test_what_is_no_finished_run_cannot_be_started_from(tmp_path, there):
    # An exported model has no record, and its labels beside its weights.
    if there == "record":
        write_run(tmp_path)
    if there == "labels":
        labels(tmp_path / "save", ["a", "b"])
    message = (
        "no record of a run, or no list of its training speakers: give the output_"
    )
    with pytest.raises(ValueError, match=message):
        start_from.start_from({"pretrained_run": str(tmp_path), "speeds": [1.0]})


def test_a_run_that_is_extended_is_not_started_from(tmp_path):
    write_run(tmp_path, number_of_epochs=9)
    labels(tmp_path / "save", ["a", "b"])
    settings = {"pretrained_run": str(tmp_path), "modules": {}, **HEAD}
    settings |= {"speeds": [1.0], "save_folder": str(tmp_path / "save")}
    with pytest.raises(ValueError, match=r"epochs up to 2\. Its classifier would"):
        start_from.start_from(settings)


def test_a_run_does_not_write_into_the_one_it_starts_from(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for ours in ("run", "run/below"):
        folders = {
            "output_folder": tmp_path / ours,
            "pretrained_run": tmp_path / "link",
        }
        with pytest.raises(ValueError, match="Give another output_folder"):
            start_from.refuse_own_folder(folders)
