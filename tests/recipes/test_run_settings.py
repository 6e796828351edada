"""What a run's folder keeps when something else is done in it."""

import shutil
import time
from pathlib import Path

import pytest
import torch

from speechbrain_rev.data import VoxCelebFolder
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.inference import SpeakerEmbedder, evaluation
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer
from speechbrain_rev.lobes.checkpoints import is_end_of_epoch, load_finished_run
from speechbrain_rev.locks import LOCK, locked
from tests.corpus import write_corpus
from tests.recipes.runs import SHORT, arguments, recipe, run, weights

#: Whose chunk is not searched: what was counted for one trial serves the others.
FEW_STEPS = SHORT | {"steps_per_epoch": 2, "chunk": "null"}
WEIGHTS = Path("embedding_model.ckpt")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def finished(train, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train.main(arguments(data, folder, **FEW_STEPS))
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder):
    """Read all files of a run."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


OTHER_ARCH = {"arch": "revnet46"}, "arch: was revnet57, is revnet46"


@pytest.mark.parametrize(
    ("option", "changed", "words"),
    [
        ([], *OTHER_ARCH),
        (["--dry_run"], *OTHER_ARCH),
        (["--debug"], *OTHER_ARCH),
        ([], {"n_mels": 40}, "n_mels: was 24, is 40"),
        ([], {"speeds": "[1.0]"}, r"speeds: was \[1\.0, 0\.9, 1\.1\], is \[1\.0\]"),
    ],
)
def test_another_network_is_refused_and_the_run_stays_as_it_is(
    train, data, folder, option, changed, words
):
    before = contents(folder)
    with pytest.raises(ValueError, match=rf"another network \({words}\).*another outp"):
        train.main([*arguments(data, folder, **FEW_STEPS | changed), *option])
    assert contents(folder) == before


def test_a_folder_of_weights_alone_is_not_written_into_either(train, data, folder):
    shutil.rmtree(folder / "save")
    before = contents(folder)
    with pytest.raises(ValueError, match="arch: was revnet57, is revnet46"):
        train.main(
            [*arguments(data, folder, **FEW_STEPS, arch="revnet46"), "--dry_run"]
        )
    assert contents(folder) == before


@pytest.mark.parametrize("option", ["--dry_run", "--debug"])
def test_a_trial_in_a_run_s_folder_leaves_its_settings_and_plan(
    train, data, folder, option, capsys
):
    """Nor is it held to that plan, which may be of another batch."""
    (folder / "plan.json").write_text("no plan of this batch")
    before = contents(folder)
    changed = {"number_of_epochs": 3, "memory_budget": "1GB", "lr": 0.5}
    train.main([*arguments(data, folder, **FEW_STEPS | changed), option])
    assert contents(folder) == before
    # It was tried with what was given.
    assert option == "--debug" or "for 3 epochs" in capsys.readouterr().out
    assert SpeakerEmbedder.from_run(folder)


def test_a_folder_of_the_user_s_is_not_the_trial_s(train, data, folder):
    (folder / "trial").mkdir()
    (folder / "trial" / "notes.txt").write_text("mine")
    before = contents(folder)
    train.main([*arguments(data, folder, **FEW_STEPS), "--dry_run"])
    assert contents(folder) == before


def test_what_debugging_persistently_leaves_has_its_settings(train, data, folder):
    argv = arguments(data, folder, **FEW_STEPS | {"number_of_epochs": 2, "lr": 0.5})
    train.main([*argv, "--debug", "--debug_persistently"])
    assert "lr: 0.5" in (folder / "hyperparams.yaml").read_text()


@pytest.mark.parametrize(
    ("widths", "other"), [("null", False), ("[8, 8, 8, 16]", True)]
)
def test_published_widths_are_those_that_are_meant_by_null(tmp_path, widths, other):
    settings = recipe("run_settings")
    record = f"arch: revnet57\nwidths: {widths}\nblocks: null\n"
    (tmp_path / "hyperparams.yaml").write_text(record)
    (tmp_path / "embedding_model.ckpt").touch()
    now = {"output_folder": str(tmp_path), "save_folder": str(tmp_path / "save")}
    now |= {"arch": "revnet57", "widths": [48, 96, 192, 300], "blocks": None}
    if not other:
        settings.refuse_other_network(now)
        return
    with pytest.raises(ValueError, match=r"widths: was \[8, 8, 8, 16\], is \[48"):
        settings.refuse_other_network(now)


def test_a_trial_that_fails_leaves_them_too(train, data, folder):
    before = contents(folder)
    argv = arguments(data, folder, **FEW_STEPS | {"memory_budget": "0.05MB"})
    with pytest.raises(ValueError, match="It lacks"):
        train.main([*argv, "--dry_run"])
    assert contents(folder) == before


def test_more_epochs_go_on_with_the_run(train, data, folder):
    train.main(arguments(data, folder, **FEW_STEPS | {"number_of_epochs": 2}))
    assert "number_of_epochs: 2" in (folder / "hyperparams.yaml").read_text()


def test_a_finished_run_that_is_started_again_says_so_and_changes_nothing(
    data, finished, tmp_path
):
    # At one place, which its settings name, and as the script, which writes logs.
    folder = shutil.move(shutil.copytree(finished, tmp_path / "copy"), tmp_path / "run")
    argv = [*arguments(data, folder, **FEW_STEPS)]
    before = contents(folder)
    again = run(argv)
    assert again.returncode == 0, again.stderr
    assert again.stdout == (
        f"{folder} is a finished run of at least 1 epochs: nothing is trained or changed. "
        "To train on, give more by --number_of_epochs; to train anew, another "
        "output_folder.\n"
    )
    assert contents(folder) == before


def test_settings_that_a_finished_run_does_not_heed_are_named(
    train, data, folder, capsys
):
    train.main(arguments(data, folder, **FEW_STEPS | {"lr": 0.5}))
    words = "output_folder. These settings had no effect: lr: was 0.1, is 0.5.\n"
    assert capsys.readouterr().out.endswith(words)


def test_a_finished_run_whose_checkpoints_are_gone_keeps_its_weights(
    train, data, folder, capsys
):
    for checkpoint in (folder / "save").glob("CKPT*"):
        shutil.rmtree(checkpoint)
    before = contents(folder)
    train.main(arguments(data, folder, **FEW_STEPS))
    assert "is a finished run" in capsys.readouterr().out
    with pytest.raises(ValueError, match="other data settings"):
        train.main(arguments(data, folder, **FEW_STEPS | {"valid_speakers": 2}))
    assert contents(folder) == before


def test_more_epochs_without_checkpoints_do_not_begin_anew(train, data, folder):
    for checkpoint in (folder / "save").glob("CKPT*"):
        shutil.rmtree(checkpoint)
    before = contents(folder)
    with pytest.raises(ValueError, match="finished run without checkpoints"):
        train.main(arguments(data, folder, **FEW_STEPS | {"number_of_epochs": 2}))
    assert contents(folder) == before


def test_an_average_of_which_checkpoints_are_gone_is_not_made_anew(
    train, data, folder, capsys
):
    longer = arguments(
        data, folder, **FEW_STEPS | {"number_of_epochs": 2, "average_checkpoints": 2}
    )
    train.main(longer)
    first, *_ = sorted((folder / "save").glob("CKPT*"), key=lambda p: p.stat().st_mtime)
    shutil.rmtree(first)
    (folder / "save" / "SHA256SUMS").unlink()
    before = contents(folder)
    train.main(longer)
    assert "is a finished run" in capsys.readouterr().out
    assert contents(folder) == before


def test_two_runs_do_not_share_a_save_folder(tmp_path):
    run_settings = recipe("run_settings")
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


def test_more_epochs_go_on_from_the_last_one_and_end_anew(train, data, folder, capsys):
    before, log = contents(folder), (folder / "train_log.jsonl").read_bytes()
    longer = arguments(data, folder, **FEW_STEPS | {"number_of_epochs": 2})

    def killed(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        # Between the last checkpoint and the result.
        patch.setattr(train, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            train.main(longer)
    assert contents(folder)[WEIGHTS] == before[WEIGHTS]
    train.main(longer)
    assert "is a finished run" not in capsys.readouterr().out
    assert contents(folder)[WEIGHTS] != before[WEIGHTS]
    assert (folder / "train_log.jsonl").read_bytes().startswith(log)
    train.main(longer)
    assert "is a finished run of at least 2 epochs" in capsys.readouterr().out


def test_a_finished_run_of_a_time_without_checksums_stays_as_it_is(
    train, data, folder, capsys
):
    (folder / "save" / "SHA256SUMS").unlink()
    before = contents(folder)
    train.main(arguments(data, folder, **FEW_STEPS))
    assert "is a finished run" in capsys.readouterr().out
    assert contents(folder) == before


def test_a_clock_that_is_set_back_changes_no_run(
    train, data, folder, tmp_path, monkeypatch
):
    twin = shutil.copytree(folder, tmp_path / "twin")
    longer = FEW_STEPS | {"number_of_epochs": 3, "average_checkpoints": 2}
    train.main(arguments(data, twin, **longer))
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() - 86400)
    train.main(arguments(data, folder, **longer))
    kept = {
        found.meta["epoch"]
        for found in WholeCheckpointer(folder / "save").list_checkpoints()
        if is_end_of_epoch(found)
    }
    assert kept == {2, 3}
    wanted = weights(twin)
    assert all(torch.equal(v, wanted[name]) for name, v in weights(folder).items())


def test_a_self_test_of_a_finished_run_may_have_other_data(
    train, data, finished, capsys
):
    before = contents(finished)
    changed = FEW_STEPS | {"seed": 7}
    train.main([*arguments(data, finished, **changed), "--self_test"])
    assert "Exact: 3 steps" in capsys.readouterr().out
    assert contents(finished) == before


def test_one_training_owns_its_folder(train, data, folder):
    longer = arguments(data, folder, **FEW_STEPS | {"number_of_epochs": 2})
    with locked(folder / LOCK, "the run", "writing into"):
        before = contents(folder)
        for option in ([], ["--dry_run"]):
            with pytest.raises(
                ValueError, match=r"writing into .*: process \d+ on .*outp"
            ):
                train.main([*longer, *option])
        assert contents(folder) == before
    train.main(longer)
    assert not (folder / LOCK).exists()


def flip(path):
    """Change a bit in the middle of a file, and in no character that ends a line."""
    content = bytearray(path.read_bytes())
    place = next(
        i for i in range(len(content) // 2, 0, -1) if chr(content[i]).isalnum()
    )
    content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def interrupted(train, data, tmp_path_factory):
    """A run with validation, of which an epoch is to come."""
    folder = tmp_path_factory.mktemp("interrupted")
    train.main(arguments(data, folder, **FEW_STEPS | {"valid_speakers": 2}))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "save/train.csv",
        "save/valid_trials.txt",
        "save/label_encoder.txt",
        "save/prepared.json",
        "train_log.jsonl",
        "embedding_model.ckpt",
    ],
)
def test_a_flipped_bit_in_what_a_run_goes_on_with_is_refused(
    train, data, interrupted, tmp_path, name
):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    flip(folder / name)
    before = contents(folder)
    changed = FEW_STEPS | {"valid_speakers": 2}
    if name != WEIGHTS.name:
        changed |= {"number_of_epochs": 2}
    with pytest.raises(ValueError, match=rf"{name}\b.* is not as it was written"):
        train.main(arguments(data, folder, **changed))
    kept = [n for n in before if n.suffix == ".ckpt" or n.name == "train_log.jsonl"]
    assert all(contents(folder)[n] == before[n] for n in kept)


def test_weights_that_were_deleted_are_made_anew_of_the_checkpoints(
    train, data, folder
):
    wanted = weights(folder)
    (folder / WEIGHTS).unlink()
    train.main(arguments(data, folder, **FEW_STEPS))
    found = weights(folder)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_flipped_bits_are_refused_by_who_evaluates(interrupted, tmp_path):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    for name in ("train.csv", "valid_trials.txt", "label_encoder.txt"):
        flip(folder / "save" / name)
    flip(folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"train\.csv is not as it was written"):
        evaluation.cohort_files(folder / "save" / "train.csv")
    with pytest.raises(ValueError, match=r"valid_trials\.txt is not as it was written"):
        evaluation.trial_files(
            [folder / "save" / "valid_trials.txt"], VoxCelebFolder(folder)
        )
    with pytest.raises(
        ValueError, match=r"label_encoder\.txt is not as it was written"
    ):
        read_labels(folder / "save/label_encoder.txt")
    with pytest.raises(ValueError, match=r"embedding_model\.ckpt is not as it was"):
        SpeakerEmbedder.from_run(folder)
    with pytest.raises(ValueError, match=r"embedding_model\.ckpt is not as it was"):
        load_finished_run({}, folder)


def test_of_several_processes_one_owns_the_folder(tmp_path, monkeypatch):
    run_settings = recipe("run_settings")
    monkeypatch.setattr(run_settings, "if_main_process", lambda: False)
    with locked(tmp_path / LOCK, "the run", "writing into"):
        others = [run_settings.owned(tmp_path) for _ in range(2)]
        for other in others:
            with other:
                pass
        monkeypatch.setattr(run_settings, "if_main_process", lambda: True)
        with (
            pytest.raises(ValueError, match="another output_folder"),
            run_settings.owned(tmp_path),
        ):
            pass
