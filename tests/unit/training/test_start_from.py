"""Locks of a run's folders, and runs that start from others."""

import pytest

from speechbrain_rev.locks import LOCK, locked
from speechbrain_rev.training import run_settings

PUBLISHED = {"widths": [48, 96, 192, 300], "blocks": None}


@pytest.mark.parametrize(
    ("record", "now", "words"),
    [
        ("widths: null\nblocks: null\n", PUBLISHED, None),
        ("widths: [8, 8, 8, 16]\n", PUBLISHED, r"widths: was \[8, 8, 8, 16\], is \[48"),
        # A converted model has no speeds.
        ("", {"speeds": [1.0]}, None),
        ("pooling: another\n", {"pooling": "another"}, None),
        ("pooling: another\n", {"pooling": "statistics"}, "was another, is statistics"),
    ],
)
def test_another_network_than_the_record_s_is_refused(tmp_path, record, now, words):
    (tmp_path / "hyperparams.yaml").write_text(f"arch: revnet57\n{record}")
    (tmp_path / "embedding_model.ckpt").touch()
    settings = {"output_folder": str(tmp_path), "save_folder": str(tmp_path / "save")}
    settings |= {"arch": "revnet57", **now}
    if words is None:
        run_settings.refuse_other_network(settings)
        return
    with pytest.raises(ValueError, match=words):
        run_settings.refuse_other_network(settings)


def test_two_runs_do_not_share_a_save_folder(tmp_path):
    first, second, save = (tmp_path / name for name in ("first", "second", "save"))
    first.mkdir()
    second.mkdir()
    with (
        run_settings.owned(first, save),
        pytest.raises(ValueError, match=r"into .*save: process .* another save_folder"),
        run_settings.owned(second, save),
    ):
        pass
    assert not any(path.name == LOCK for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("is_main", [True, False])
def test_of_several_processes_one_locks_the_folder(tmp_path, monkeypatch, is_main):
    monkeypatch.setattr(run_settings, "if_main_process", lambda: is_main)
    with locked(tmp_path / LOCK, "the run", "writing into"):
        if is_main:
            with pytest.raises(ValueError, match="another output_folder"):
                run_settings.owned(tmp_path).__enter__()
        else:
            with run_settings.owned(tmp_path), run_settings.owned(tmp_path):
                pass


def labels(folder, names):
    lines = [f"'{name}' => {i}\n" for i, name in enumerate(names)]
    end = "================\n'starting_index' => 0\n"
    folder.mkdir(parents=True)
    (folder / "label_encoder.txt").write_text("".join(lines) + end)


HEAD = {"pooling": "statistics", "loss": "aam_softmax"}
HEAD_LINES = "".join(f"{name}: {value}\n" for name, value in HEAD.items())


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
        run_settings, "load_finished_run", lambda *_, **given: loaded.update(given)
    )
    settings = {"pretrained_run": str(tmp_path), "speeds": ours, "modules": {}}
    settings["save_folder"] = str(tmp_path / "own")
    settings |= HEAD
    (tmp_path / "hyperparams.yaml").write_text(f"speeds: {theirs}\n{HEAD_LINES}")
    for folder in ("save", "own"):
        labels(tmp_path / folder, ["a", "b"])
    if narrowed_from == "refused":
        with pytest.raises(ValueError, match=r"the speeds \[.* may also be \[1\.0\]"):
            run_settings.start_from(settings)
        return
    run_settings.start_from(settings)
    assert loaded == {"narrowed_from": narrowed_from}


def test_another_pooling_is_not_started_from(tmp_path):
    (tmp_path / "hyperparams.yaml").write_text(f"speeds: [1.0]\n{HEAD_LINES}")
    labels(tmp_path / "save", ["a", "b"])
    settings = {"pretrained_run": str(tmp_path), "speeds": [1.0], "modules": {}}
    settings |= HEAD | {"pooling": "another", "save_folder": str(tmp_path / "save")}
    message = "has the pooling statistics, this run another.* Give pooling: statistics"
    with pytest.raises(ValueError, match=message):
        run_settings.start_from(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, r"lacks hyperparams\.yaml: give the output_folder"),
        # An exported model has neither speeds nor speakers.
        ("arch: revnet57\n", "as an exported model: give the output_folder"),
        ("speeds: [1.0]\n", "as an exported model: give the output_folder"),
        (
            f"speeds: [1.0]\n{HEAD_LINES}",
            "as an exported model: give the output_folder",
        ),
    ],
)
def test_what_is_no_finished_run_cannot_be_started_from(tmp_path, settings, message):
    if settings:
        (tmp_path / "hyperparams.yaml").write_text(settings)
    with pytest.raises(ValueError, match=message):
        run_settings.start_from({"pretrained_run": str(tmp_path), "speeds": [1.0]})


def test_a_run_does_not_write_into_the_one_it_starts_from(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for ours in ("run", "run/below"):
        folders = {
            "output_folder": tmp_path / ours,
            "pretrained_run": tmp_path / "link",
        }
        with pytest.raises(ValueError, match="Give another output_folder"):
            run_settings.refuse_own_folder(folders)
