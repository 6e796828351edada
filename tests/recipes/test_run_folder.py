"""What a run's folder keeps when something else is done in it."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from speechbrain_rev import cli
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.files import LOCK, locked
from speechbrain_rev.inference import SpeakerEmbedder, evaluation, runs
from speechbrain_rev.inference.trained import read_weights
from speechbrain_rev.planner import Plan
from speechbrain_rev.training import run_folder
from speechbrain_rev.training.start_from import read_pretrained
from tests.recipes.conftest import in_process
from tests.recipes.runs import (
    FEW_STEPS,
    arguments,
    assert_same_weights,
    contents,
)

WEIGHTS = Path("embedding_model.ckpt")


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def again(train, data, folder, capsys):
    """Give the command of the run once more, with other settings; returns the output."""

    def main(*options, **changed):
        train.main([*arguments(data, folder, **FEW_STEPS | changed), *options])
        return capsys.readouterr().out

    return main


def move_paths(folder, old, new):
    """Let the files of a run that was copied name where it is now."""
    for file in (folder / "hyperparams.yaml", folder / "run.json"):
        file.write_text(file.read_text().replace(str(old), str(new)))


def delete_checkpoints(folder):
    for checkpoint in (folder / "save").glob("CKPT*"):
        shutil.rmtree(checkpoint)


@pytest.mark.parametrize(
    ("options", "changed", "words"),
    [
        ([], {"arch": "revnet46"}, "arch: was revnet57, is revnet46"),
        (["--dry_run"], {"n_mels": 40}, "n_mels: was 24, is 40"),
        (["--debug"], {"speeds": "[1.0]"}, r"speeds: was \[1.*1\.1\], is \[1\.0\]"),
    ],
)
def test_another_network_is_refused_and_the_run_stays_as_it_is(
    again, folder, options, changed, words
):
    if options == ["--debug"]:
        shutil.rmtree(folder / "save")  # The weights alone tell it, too.
    before = contents(folder)
    with pytest.raises(ValueError, match=rf"another network \({words}\).*another outp"):
        again(*options, **changed)
    assert contents(folder) == before


@pytest.mark.parametrize(
    "option", ["--dry_run", pytest.param("--debug", marks=pytest.mark.slow)]
)
def test_a_trial_in_a_run_s_folder_leaves_its_files(again, folder, option):
    """Nor does it take the run's plan where that is of another batch."""
    asked = {"memory_budget": "1GB", "batch": "7"}
    another = Plan({"gone": "store"}, None, 2**30, 2**20, 2**20, 0.1, asked)
    another.save(folder / "plan.json")
    (folder / "trial").mkdir()
    (folder / "trial" / "notes.txt").write_text("mine")
    before = contents(folder)
    output = again(option, number_of_epochs=3, memory_budget="1GB", lr=0.5)
    with pytest.raises(
        ValueError, match=r"max_gradient_error is 0\.05, .* is null\. G"
    ):
        again(option, max_gradient_error=0.05)
    assert contents(folder) == before
    left = "for what is left of 3 epochs (1 done), without"
    assert (left in output) == (option == "--dry_run")
    assert SpeakerEmbedder.from_run(folder)


def test_a_dry_run_refuses_what_the_run_would_refuse(again, folder):
    before = contents(folder)
    refusals = []
    with pytest.raises(ValueError, match="this one is sgd at 8 bit by bitsandbytes"):
        again("--dry_run", number_of_epochs=2, optimizer_backend="bitsandbytes")
    for options in (["--dry_run"], []):
        with pytest.raises(ValueError, match="this one is sgd at 32") as refused:
            again(*options, number_of_epochs=2, optimizer_bits=32)
        refusals.append(str(refused.value))
        if options:
            assert contents(folder) == before
    assert refusals[0] == refusals[1]
    delete_checkpoints(folder)
    for options in (["--dry_run"], []):
        with pytest.raises(ValueError, match=r"has trained 1 epochs, and .* has ch"):
            again(*options, number_of_epochs=2)


@pytest.mark.slow
def test_what_is_refused_at_recovery_leaves_settings_and_plan(again, folder):
    again(number_of_epochs=2, memory_budget="1GB")
    settings, plan = folder / "hyperparams.yaml", folder / "plan.json"
    before, planned = settings.read_bytes(), plan.read_bytes()
    other = {"number_of_epochs": 3, "memory_budget": "2GB"}
    with pytest.raises(ValueError, match="this one is sgd at 32"):
        again(optimizer_bits=32, **other)
    assert (settings.read_bytes(), plan.read_bytes()) == (before, planned)
    assert "finished run" in again(number_of_epochs=2, memory_budget="1GB")
    (folder / ".settings.part").mkdir()
    again(**other)
    assert "memory_budget: 2GB" in settings.read_text()
    assert Plan.load(plan).about["memory_budget"] == "2GB"
    assert not list(folder.glob(".settings*"))
    planned = plan.read_bytes()
    again(memory_budget="2GB", number_of_epochs=4)
    # Another plan has other measured times.
    assert plan.read_bytes() == planned


def test_a_run_s_own_settings_given_for_another_folder_are_refused(
    train, folder, tmp_path
):
    before = contents(folder)
    again = [str(folder / "hyperparams.yaml"), f"--output_folder={tmp_path / 'other'}"]
    with pytest.raises(
        ValueError, match=r"is of the run in .*, and names folders of it"
    ) as refused:
        train.main([*again, "--device=cpu"])
    assert contents(folder) == before
    assert not (tmp_path / "other").exists()
    (options,) = re.findall(r"give also (.*); to begin another", str(refused.value))
    train.main([*again, "--device=cpu", *shlex.split(options)])
    assert contents(folder) == before
    assert str(folder) not in (tmp_path / "other" / "hyperparams.yaml").read_text()


@pytest.mark.parametrize("named", [False, True])
def test_the_file_of_a_moved_run_is_refused_until_it_names_where_it_is(
    train, folder, finished, tmp_path, named
):
    file, gone = folder / "hyperparams.yaml", tmp_path / "gone"
    move_paths(folder, finished, gone)
    before = contents(folder)
    given = [str(file), "--device=cpu", "--number_of_epochs=2"]
    given += [f"--output_folder={folder}"] * named
    with pytest.raises(
        ValueError, match=r"is of the run in .* where it was"
    ) as refused:
        train.main(given)
    assert contents(folder) == before
    assert not gone.exists()
    (options,) = re.findall(r"give also (.*); to begin another", str(refused.value))
    train.main([*given, *shlex.split(options)])
    assert len((folder / "train_log.txt").read_text().splitlines()) == 2
    assert not gone.exists()


def test_checkpoints_of_another_run_are_refused_and_own_ones_may_be_moved(
    again, folder, finished, tmp_path
):
    move_paths(folder, finished, folder)
    save, new = tmp_path / "disk" / "save", tmp_path / "new"
    save.parent.mkdir()
    (folder / "save").rename(save)
    before = contents(save)
    with pytest.raises(ValueError, match="checkpoints of a run with another output_f"):
        again(output_folder=new, save_folder=save, number_of_epochs=2)
    assert contents(save) == before
    assert not new.exists()
    again(save_folder=save, number_of_epochs=2)
    again(save_folder=save, number_of_epochs=3)
    shutil.copytree(save, folder / "save")
    again(save_folder=save, number_of_epochs=4)
    with pytest.raises(ValueError, match="checkpoints of a run with another output_f"):
        again(save_folder=shutil.copytree(save, tmp_path / "third" / "save"))


def test_a_run_that_is_extended_says_of_which_epochs_its_weights_are(
    again, folder, data, caplog
):
    def embed():
        caplog.clear()
        assert cli.main(["embed", str(folder), str(next(data.rglob("*.wav")))]) == 0
        return caplog.text

    def standing():
        return read_weights(folder).standing

    assert not standing()
    assert "not finished" not in embed()
    record = runs.read_record(folder)
    settings = {**record.settings, "number_of_epochs": 3}
    replace(record, settings=settings).write(folder)
    words = (
        f"{folder} is not finished: it is being extended to 3 epochs, 1 are done, and its "
        "weights are those of an earlier end, the mean of epochs up to 1."
    )
    assert standing() == words
    assert words in embed()
    (folder / WEIGHTS).unlink()
    assert "are of epoch 1 of 3, of the newest checkpoint" in standing()


def test_a_run_is_extended_under_its_name_and_says_what_was_otherwise(
    again, folder, tmp_path
):
    before = runs.read_record(folder)
    again(output_folder=folder, number_of_epochs=2, weight_decay=0.5)
    after = runs.read_record(folder)
    assert after.run == before.run
    assert after.weights.epochs != before.weights.epochs
    assert after.weights.fingerprint == read_weights(folder).fingerprint
    (earlier,) = after.earlier
    assert earlier.epochs == before.epochs
    assert earlier.values["weight_decay"] == before.settings["weight_decay"]
    # Another run's checkpoints in the place of its own.
    shutil.copytree(folder, tmp_path / "other")
    record = runs.read_record(tmp_path / "other")
    replace(record, run="another").write(tmp_path / "other")
    with pytest.raises(ValueError, match="a checkpoint of another run than that in"):
        again(output_folder=tmp_path / "other", number_of_epochs=3)


def test_a_save_folder_that_is_a_file_is_refused(again, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "save").touch()
    with pytest.raises(OSError, match=r"save_folder: .* written to .File exists"):
        again(output_folder=tmp_path / "new")


def test_epochs_are_counted_by_checkpoints(again, folder):
    """An edited file does not make a run longer, nor do fewer epochs end it."""
    path = folder / "hyperparams.yaml"
    text = path.read_text()
    path.write_text(text.replace("number_of_epochs: 1", "number_of_epochs: 2"))
    assert path.read_text() != text
    assert "Finished: " in again(number_of_epochs=2)
    with pytest.raises(
        ValueError, match=r"is 1, and the run .* trained 2: its weights"
    ):
        again(number_of_epochs=1, average_checkpoints=2)


def test_an_average_of_fewer_checkpoints_than_asked_is_named(again):
    printed = again(number_of_epochs=2, average_checkpoints=3)
    assert "(average_checkpoints is 3, and there are no more). " in printed


def test_what_is_killed_before_it_recovers_leaves_a_finished_run(
    again, train, monkeypatch
):
    def end(*_):
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(train, "give_modes", end)
        # A process that is killed clears nothing away.
        patch.setattr(run_folder.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(InterruptedError):
            again(number_of_epochs=2)
    assert "is a finished run" in again()


def test_a_path_that_begins_with_the_folder_s_text_is_listed(again, folder):
    other = folder.with_name(f"{folder.name}2")
    other.mkdir()
    printed = again(train_log=other / "log.txt", number_of_epochs=2)
    assert re.search(
        rf"train_log: was \S+, is {re.escape(str(other))}/log\.txt", printed
    )


def test_what_is_counted_where_null_is_listed_where_given(again):
    assert "steps_per_epoch: was " in again(number_of_epochs=2, steps_per_epoch=1)


def test_an_epoch_that_takes_some_of_the_utterances_says_so(again, tmp_path):
    new = {"output_folder": tmp_path / "new"}
    words = (
        r"steps_per_epoch is 1: an epoch takes 4 utterances of the (\d+) there are; n"
    )
    (utterances,) = re.findall(words, again("--debug", **new, steps_per_epoch=1))
    for steps in ("null", int(utterances) // 4):
        printed = again("--debug", **new, steps_per_epoch=steps, number_of_epochs=1)
        assert "steps_per_epoch is" not in printed


def test_settings_that_differ_from_those_of_a_run_are_listed(again, folder):
    printed = again(number_of_epochs=2, lr=0.5)
    began = f"Settings differ from those that the run in {folder} last had: "
    assert f"{began}lr: was 0.1, is 0.5; number_of_epochs: was 1, is 2.\n" in printed
    assert began not in again("--debug", number_of_epochs=2, lr=0.5)


def test_checking_that_a_run_no_longer_does_is_no_changed_setting(again, caplog):
    assert "check_audio" not in again(number_of_epochs=2, check_audio=True)
    assert "check_audio: no effect" in caplog.text


def test_other_processes_than_those_of_the_checkpoint_are_listed(again, monkeypatch):
    monkeypatch.setattr(run_folder, "process_count", lambda: 2)
    assert "; processes: was 1, is 2.\n" in again(number_of_epochs=2)


@pytest.mark.parametrize(
    ("batch_size", "rates", "advice"),
    [
        (8, {}, "--lr=0.05 --final_lr=2.5e-05."),
        (2, {}, "--lr=0.2 --final_lr=0.0001."),
        (3, {"lr": 0.1}, "--lr=0.133333 --final_lr=6.66667e-05."),
        (2, {"lr": 0.2, "final_lr": 1e-4}, None),
    ],
)
def test_another_batch_names_the_rates_that_keep_the_learning_rate(
    again, folder, batch_size, rates, advice
):
    words = (
        "The learning rate follows batch_size and grad_accumulation_factor. To keep the "
        "learning rate, give "
    )
    changed = {"number_of_epochs": 2, "batch_size": batch_size, **rates}
    printed = again(**changed, steps_per_epoch=1)
    assert (words in printed) == (advice is not None)
    if advice is not None:
        assert f"{words}{advice}\n" in printed
        given = [word.strip("-.").split("=") for word in advice.split()]
        kept = {name: float(rate) for name, rate in given}
        for name, then in (("lr", 0.1), ("final_lr", 5e-5)):
            assert kept[name] * batch_size == pytest.approx(then * 4, rel=1e-5)


@pytest.mark.slow
def test_accumulated_batches_count_as_the_larger_batch_that_they_are(again, folder):
    twice = "--grad_accumulation_factor=2"
    rates = {"lr": 0.05, "final_lr": 2.5e-5}
    words = "; grad_accumulation_factor: was 1, is 2. The learning rate follows"
    printed = again(twice, number_of_epochs=2)
    assert words in printed
    assert "give --lr=0.05 --final_lr=2.5e-05.\n" in printed
    printed = again(twice, number_of_epochs=3, **rates)
    assert "accumulation" not in printed
    printed = again(number_of_epochs=4, **rates)
    assert "; grad_accumulation_factor: was 2, is 1. The learning rate" in printed
    assert "give --lr=0.1 --final_lr=5e-05.\n" in printed


@pytest.mark.parametrize("lost", ["nothing", "checkpoints"])
def test_a_finished_run_that_is_started_again_changes_nothing(again, folder, lost):
    if lost == "checkpoints":
        delete_checkpoints(folder)
    before = contents(folder)
    words = (
        f"{folder} is a finished run of at least 1 epochs: nothing is trained or changed. "
        "To train on, give more by --number_of_epochs; to train anew, another "
        "output_folder."
    )
    assert again() == f"{words}\n"
    assert (
        again(lr=0.5) == f"{words} These settings had no effect: lr: was 0.1, is 0.5.\n"
    )
    with pytest.raises(ValueError, match="a run on other data"):
        again(valid_speakers=2)
    if lost == "checkpoints":
        with pytest.raises(ValueError, match=r"has trained 1 epochs, and .* has ch"):
            again(number_of_epochs=2)
    assert contents(folder) == before


def test_an_extension_says_to_what_rate_it_goes_back(
    train, again, folder, monkeypatch, caplog
):
    """Two steps to 0.00014; of nine epochs the third step has more."""

    def killed(*_):
        raise KeyboardInterrupt

    caplog.set_level("INFO", "train")
    monkeypatch.setattr(train.SpeakerBrain, "on_stage_start", killed)
    with pytest.raises(KeyboardInterrupt):
        again(number_of_epochs=9)
    rates = r"goes back from 0\.000\d+ to 0\.00269, as the schedule of 9 epochs has it"
    assert re.search(rates, caplog.text)


def test_more_epochs_go_on_from_the_last_one_and_end_anew(
    train, again, folder, monkeypatch
):
    weights, log = (folder / WEIGHTS).read_bytes(), (folder / "train_log.jsonl")
    first_line = log.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # Between the last checkpoint and the result.
        patch.setattr(train, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            again(number_of_epochs=2)
    assert (folder / WEIGHTS).read_bytes() == weights
    assert "is a finished run" not in again(number_of_epochs=2)
    assert (folder / WEIGHTS).read_bytes() != weights
    assert log.read_bytes().startswith(first_line)
    assert "number_of_epochs: 2" in (folder / "hyperparams.yaml").read_text()
    assert "is a finished run of at least 2 epochs" in again(number_of_epochs=2)


def test_one_training_run_owns_its_folder(again, folder, finished):
    (folder / WEIGHTS).unlink()
    with locked(folder / LOCK, "the run", "writing into"):
        before = contents(folder)
        for options in ([], ["--dry_run"]):
            with pytest.raises(
                ValueError, match=r"is writing into .*\. Wait for it, or"
            ):
                again(*options, number_of_epochs=2)
        assert contents(folder) == before
    # Weights that were deleted are made anew of the checkpoints.
    again()
    assert_same_weights(folder, finished)
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
def interrupted(data, tmp_path_factory):
    """A run with validation, of which an epoch is to come."""
    folder = tmp_path_factory.mktemp("interrupted")
    with in_process() as script:
        script.main(arguments(data, folder, **FEW_STEPS | {"valid_speakers": 2}))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "save/train.csv",
        "save/valid_trials.txt",
        "save/label_encoder.txt",
        "save/prepared.json",
        "embedding_model.ckpt",
    ],
)
def test_a_flipped_bit_in_what_a_run_goes_on_with_is_refused(
    again, interrupted, tmp_path, name
):
    folder = shutil.copytree(interrupted, tmp_path / "flipped")
    flip(folder / name)
    before = contents(folder)
    changed = {"valid_speakers": 2, "output_folder": folder}
    if name != WEIGHTS.name:
        changed["number_of_epochs"] = 2
    with pytest.raises(ValueError, match=rf"{name}\b.* is not as it was written"):
        again(**changed)
    kept = [n for n in before if n.suffix == ".ckpt" or n.name == "train_log.jsonl"]
    assert all(contents(folder)[n] == before[n] for n in kept)


def test_flipped_bits_are_refused_by_who_evaluates(interrupted, tmp_path):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    save = folder / "save"
    lists = [save / "valid_trials.txt"]
    for name, read in {
        "train.csv": lambda: evaluation.cohort_files(save / "train.csv"),
        "valid_trials.txt": lambda: evaluation.trial_files(lists, []),
        "label_encoder.txt": lambda: read_labels(save / "label_encoder.txt"),
    }.items():
        flip(save / name)
        with pytest.raises(ValueError, match=f"{name} is not as it was written"):
            read()
    flip(folder / WEIGHTS)
    for read in (SpeakerEmbedder.from_run, lambda one: read_pretrained(str(one))):
        with pytest.raises(ValueError, match=r"embedding_model\.ckpt is not as it was"):
            read(folder)
