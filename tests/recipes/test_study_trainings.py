"""Processes of the study's trainings, most of them a script that trains nothing."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from speechbrain_rev.hparams import OptimizerWarning, plain_settings, resolve
from tests.recipes.study import STUDY, study
from tests.recipes.tiny_study import tiny_size

trainings, conditions = study("running.trainings"), study("design.conditions")
determinism = study("running.determinism")
HPARAMS = Path(__file__).parents[2] / "hparams" / "minivox.yaml"
SETTINGS = {"data_folder": "data", "device": "cpu"}
#: Writes its settings, and then does what the environment says of its seed.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
given = dict(a[2:].split("=", 1) for a in sys.argv[2:] if "=" in a)
folder = Path(given["output_folder"])
with (folder / "starts").open("a") as file:
    file.write("started\\n")
(folder / "pid").write_text(str(os.getpid()))
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))
does = os.environ.get("SEED_" + given["seed"], "works")
print("seed", given["seed"], does, os.environ["OMP_NUM_THREADS"])
if does == "fails after the first began":
    while not (folder.parent / "1" / "pid").exists():
        time.sleep(0.01)
if does.startswith("fails"):
    sys.exit("the loss is NaN")
if does == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "hangs":
    time.sleep(600)
if does != "forgets":
    (folder / "done").touch()
"""


@pytest.fixture
def runs(tmp_path):
    """Three runs of one condition, by seed."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    work = trainings.Work(script, Path("done"))
    condition = conditions.Condition("revnet46", "revnet46")
    return {
        seed: trainings.Run(condition, seed, tmp_path / "runs" / str(seed), work)
        for seed in (1, 2, 3)
    }


def train_all(runs, *, jobs=1, **given):
    wanted = list(runs.values())
    trainings.train_all(wanted, SETTINGS, tiny_size(), HPARAMS, jobs=jobs, **given)


def starts(run):
    path = run.folder / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def write_settings(run, **changed):
    """What train.py writes of a run's settings."""
    given = trainings.settings_of(run, SETTINGS, tiny_size())
    options = {k: v for k, v in given.items() if k != "device"}
    run.folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizerWarning)
        text = resolve(HPARAMS, {**options, "out_n_neurons": 15, **changed})
    (run.folder / "hyperparams.yaml").write_text(text)


def test_what_is_done_is_not_done_again(runs):
    write_settings(runs[2])
    (runs[2].folder / "done").touch()
    train_all(runs, jobs=2)
    assert [starts(run) for run in runs.values()] == [1, 0, 1]
    assert all(run.is_done for run in runs.values())


def test_a_training_has_one_thread(runs, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    train_all({1: runs[1]})
    assert runs[1].log.read_text() == "seed 1 works 1\n"


@pytest.mark.parametrize("widest", ["AVX512", "AVX2", "DEFAULT"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_float32_is_computed_by_instructions_that_processors_have_in_common(
    runs, monkeypatch, widest, precision
):
    monkeypatch.setattr(determinism, "get_cpu_capability", lambda: widest)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    for key in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(key, raising=False)
    settings = {"precision": precision}
    condition = dataclasses.replace(runs[1].condition, settings=settings)
    train_all({1: dataclasses.replace(runs[1], condition=condition)})
    given = json.loads((runs[1].folder / "environment.json").read_text())
    wanted = precision == "fp32" and widest != "DEFAULT"
    assert given.get("ATEN_CPU_CAPABILITY") == ("avx2" if wanted else None)
    assert given.get("ONEDNN_MAX_CPU_ISA") == ("AVX2" if wanted else None)
    assert (
        given.items()
        >= {
            k: v for k, v in determinism.told_of(precision).items() if v is not None
        }.items()
    )
    # What the user has set stays.
    assert given["MKL_CBWR"] == "COMPATIBLE"


def test_torch_takes_the_instructions_that_it_is_told(monkeypatch):
    told = determinism.instructions_of("fp32")
    if not told:
        pytest.skip("this processor has no AVX2")
    script = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "AVX2\n"


def test_one_that_fails_does_not_stop_the_others_and_is_named(runs, monkeypatch):
    for run in runs.values():
        write_settings(run)
    monkeypatch.setenv("SEED_2", "fails")
    with pytest.raises(trainings.TrainingsFailed, match="the loss is NaN") as caught:
        train_all(runs)
    assert list(caught.value.failed) == [runs[2]]
    assert "revnet46, seed 2, ended with status 1" in str(caught.value)
    assert [run.is_done for run in runs.values()] == [True, False, True]
    monkeypatch.delenv("SEED_2")
    train_all(runs)
    assert [starts(run) for run in runs.values()] == [1, 2, 1]


def test_after_each_that_was_done_now_it_is_said_while_others_go_on(runs, monkeypatch):
    for run in runs.values():
        write_settings(run)
    (runs[1].folder / "done").touch()
    monkeypatch.setenv("SEED_2", "fails")
    done = []
    with pytest.raises(trainings.TrainingsFailed):
        train_all(
            runs,
            after=lambda run, lost: done.append(
                ([s for s in runs if runs[s].is_done], list(lost))
            ),
        )
    # With what failed by then.
    ((there, (lost,)),) = done
    assert there == [1, 3]
    assert "revnet46, seed 2, ended with status 1" in lost


def test_where_none_ever_worked_the_others_are_not_begun(runs, monkeypatch):
    for run in runs.values():
        write_settings(run)
    monkeypatch.setenv("SEED_1", "fails")
    with pytest.raises(trainings.TrainingsFailed, match=r"\d were not begun for that"):
        train_all(runs)
    assert starts(runs[3]) == 0
    # Where others of the study were done, it is this one that fails.
    with pytest.raises(trainings.TrainingsFailed) as caught:
        train_all(runs, proven=True)
    assert list(caught.value.failed) == [runs[1]]
    assert "not begun" not in str(caught.value)
    assert [run.is_done for run in runs.values()] == [False, True, True]


def test_a_killed_training_is_told_with_what_may_have_killed_it(runs, monkeypatch):
    monkeypatch.setenv("SEED_1", "is killed")
    with pytest.raises(trainings.TrainingsFailed, match="SIGKILL, by hand or because"):
        train_all({1: runs[1]})


def test_a_training_without_its_result_has_failed(runs, monkeypatch):
    monkeypatch.setenv("SEED_1", "forgets")
    with pytest.raises(trainings.TrainingsFailed, match="ended without done"):
        train_all({1: runs[1]})


def test_a_failure_is_noticed_while_an_earlier_training_still_runs(runs, monkeypatch):
    monkeypatch.setenv("SEED_1", "hangs")
    monkeypatch.setenv("SEED_2", "fails after the first began")
    told = []

    def told_then_stopped(run, status):
        told.append(run.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainings, "_what_became_of", told_then_stopped)
    with pytest.raises(KeyboardInterrupt):
        train_all(runs, jobs=2)
    assert told == [2]
    # The one that hung was ended.
    with pytest.raises(ProcessLookupError):
        os.kill(int((runs[1].folder / "pid").read_text()), 0)
    assert not runs[1].is_done


@pytest.mark.parametrize("begun", ["done", "save/CKPT+1/CKPT.yaml"])
def test_a_run_of_other_settings_is_refused(runs, begun):
    write_settings(runs[1], weight_decay=0.5)
    (runs[1].folder / begun).parent.mkdir(parents=True, exist_ok=True)
    (runs[1].folder / begun).touch()
    with pytest.raises(ValueError, match=r"weight_decay is 0.5 there and 0\.\d+ now"):
        train_all(runs)
    assert [starts(run) for run in runs.values()] == [0, 0, 0]


def test_a_study_that_was_moved_by_hand_is_told_how_to_move(runs):
    write_settings(runs[1], output_folder="/elsewhere/1")
    (runs[1].folder / "done").touch()
    with pytest.raises(ValueError, match=r"/elsewhere/1 there.*archive\.py moves"):
        train_all(runs)


def test_a_result_without_its_settings_is_refused(runs):
    runs[1].folder.mkdir(parents=True)
    (runs[1].folder / "done").touch()
    with pytest.raises(ValueError, match=r"no hyperparams\.yaml"):
        train_all(runs)


def test_a_run_that_failed_before_its_first_checkpoint_takes_other_settings(runs):
    write_settings(runs[1], weight_decay=0.5)
    train_all({1: runs[1]})
    assert runs[1].is_done


def test_the_command_gives_every_setting_as_it_is_meant(runs):
    data = Path("/a, b: #1/c")
    settings = {
        "data_folder": data,
        "noise_folder": None,
        "trial_lists": [data / "x.txt", data / "y.txt"],
    }
    changed = {"zero_init_residual": False, "final_lr": 1e-5, "mode": "store"}
    condition = conditions.Condition("c", "revnet46", {**changed, "optimizer_bits": 8})
    run = dataclasses.replace(runs[1], condition=condition)
    size = tiny_size()
    argv = trainings.command(run, settings, size, HPARAMS)
    assert argv[:3] == [sys.executable, str(run.work.script), str(HPARAMS)]
    given = dict(a.removeprefix("--").split("=", 1) for a in argv[3:] if "=" in a)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizerWarning)
        found = plain_settings(resolve(HPARAMS, given))
    wanted = {
        **size.settings,
        **changed,
        "widths": list(size.widths["revnet46"]),
        # The condition's, not the size's.
        "optimizer_bits": 8,
        "data_folder": str(data),
        "noise_folder": None,
        "trial_lists": [str(data / "x.txt"), str(data / "y.txt")],
        "seed": 1,
        "arch": "revnet46",
        "output_folder": str(run.folder),
    }
    assert {key: found[key] for key in wanted} == wanted


def test_runs_that_are_probed_keep_all_epochs(runs):
    for keep_all, kept in ((False, "1"), (True, "2")):
        run = dataclasses.replace(runs[1], keep_all=keep_all)
        given = trainings.settings_of(run, SETTINGS, tiny_size())
        assert given["keep_checkpoints"] == kept


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {study!r})
sys.path.insert(0, {root!r})
from tests.recipes.study import study
from tests.recipes.tiny_study import tiny_size
trainings, conditions = study("running.trainings"), study("design.conditions")
study("running.orphans").end_in_order()
run = trainings.Run(
    conditions.Condition("revnet46", "revnet46"), 1, Path({folder!r}),
    trainings.Work(Path({script!r}), Path("done")),
)
trainings.train_all([run], {{"data_folder": "d"}}, tiny_size(), Path({hparams!r}), jobs=1)
"""
ORPHAN = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(STUDY)!r})
from running.orphans import end_with_parent
end_with_parent()
given = dict(a[2:].split("=", 1) for a in sys.argv[2:] if "=" in a)
Path(given["output_folder"], "pid").write_text(str(os.getpid()))
time.sleep(600)
Path(given["output_folder"], "outlived").touch()
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux ends orphans")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_training_outlives_the_study(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(ORPHAN)
    folder = tmp_path / "runs" / "1"
    parent = PARENT.format(
        study=str(STUDY),
        root=str(STUDY.parents[1]),
        folder=str(folder),
        script=str(script),
        hparams=str(HPARAMS),
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    pid = folder / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    child = int(pid.read_text())
    process.send_signal(number)
    status = process.wait()
    assert status == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    while _lives(child):
        time.sleep(0.05)
    assert not (folder / "outlived").exists()


def _lives(pid):
    """Whether a process runs: one that ended may wait to be asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_training_that_is_done_alone_goes_on(monkeypatch):
    orphans = study("running.orphans")
    monkeypatch.delenv(orphans.PARENT, raising=False)
    orphans.end_with_parent()
    monkeypatch.setenv(orphans.PARENT, str(os.getppid() + 1))
    monkeypatch.setattr(orphans.ctypes, "CDLL", lambda name: _NoSystem())
    monkeypatch.setattr(orphans.sys, "platform", "linux")
    with pytest.raises(SystemExit, match="has ended"):
        orphans.end_with_parent()


class _NoSystem:
    def prctl(self, *arguments):
        pass
