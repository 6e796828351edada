"""A whole study of three conditions and two seeds, in processes of its own."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from speechbrain_rev.locks import writing_alone
from tests.recipes.study import study
from tests.recipes.tiny_study import recipe_settings, tiny_size, write_data

conditions, trainings, run = (
    study("design.conditions"),
    study("running.trainings"),
    study("run"),
)
archive, repeat = study("archive"), study("repeat")
instructions_of = study("running.determinism").instructions_of
CONDITIONS = [
    conditions.Condition("resnet34", "resnet34"),
    conditions.Condition("revnet46", "revnet46", {"mode": "store"}),
    # Two in one: its states, and a plan.
    conditions.Condition(
        "revnet46, 8 bit", "revnet46", {"optimizer_bits": 8}, half_memory=True
    ),
]
COMPARISONS = [
    conditions.Comparison("Is revnet46 as accurate?", "revnet46", "resnet34"),
    conditions.Comparison("Is it at 8 bit?", "revnet46, 8 bit", "revnet46"),
]


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    data, noise = write_data(tmp_path_factory.mktemp("corpus"))
    return [str(data), f"--noise={noise}", "--jobs=2"]


@pytest.fixture
def tiny(monkeypatch):
    for script in (run, repeat):
        monkeypatch.setattr(script, "conditions", lambda: CONDITIONS)
        monkeypatch.setattr(script, "comparisons", lambda: COMPARISONS)
    monkeypatch.setitem(run.SIZES, "small", tiny_size())


def begin(argv, folder, condition=CONDITIONS[1], seed=1):
    """Begin a training as the study does, and give its run and its process."""
    data, noise = Path(argv[0]), Path(argv[1].removeprefix("--noise="))
    path = folder / "runs" / condition.folder / str(seed)
    # What is probed keeps all its epochs.
    one = trainings.Run(condition, seed, path, keep_all=seed == 1)
    settings = recipe_settings(data.resolve(), noise.resolve())
    command = trainings.command(one, settings, tiny_size(), run.HPARAMS)
    path.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **instructions_of("fp32")}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return one, process


@pytest.mark.slow
def test_a_study_gives_a_report_and_another_one_its_figures(
    argv, tiny, tmp_path, capsys
):
    # A training that was killed goes on where it was.
    one = tmp_path / "one"
    begun, process = begin(argv, one, seed=2)
    while not any(begun.folder.glob("save/CKPT*/CKPT.yaml")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not begun.is_done
    run.main([*argv, f"--output={one}"])
    results = json.loads((one / "results.json").read_text())
    compared = results["figures"]["comparisons"]
    assert [c["question"] for c in compared] == [c.question for c in COMPARISONS]
    for found in results["figures"]["conditions"].values():
        assert set(found["rates"]) == {"veri_test", "veri_test_hard"}
        # A seed is another training.
        assert len(set(found["weights"].values())) == 2
    baseline = results["figures"]["baseline"]
    assert set(baseline) == {"deviation", "mean and deviation"}
    for lists in baseline.values():
        assert set(lists) == {"veri_test", "veri_test_hard"}
    assert results["figures"]["probes"]["angles"]
    assert set(results["figures"]["probes"]["drift"]) == {"revnet46, 8 bit"}
    assert {epoch["epoch"] for epoch in results["figures"]["probes"]["errors"]} == {
        1,
        2,
    }
    assert all(found["step"]["peak_bytes"] for found in results["measured"].values())
    assert "revnet46" in (one / "report.md").read_text()

    # Given again, it trains nothing and probes nothing.
    logs = {path: path.stat().st_mtime_ns for path in one.glob("runs/*/*.log")}
    made = {n: (one / n).stat().st_mtime_ns for n in ("probes.json", "measures.json")}
    assert len(logs) == 6
    capsys.readouterr()
    run.main([*argv, f"--output={one}"])
    assert "6 trainings, 6 of them done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in one.glob("runs/*/*.log")} == logs
    assert {name: (one / name).stat().st_mtime_ns for name in made} == made

    # A part of it, moved, is another study after the rest of it was trained: that which
    # was killed, now without a stop.
    shutil.rmtree(begun.folder / "scores")
    archive.main(["pack", str(one), str(tmp_path / "study.tar.xz")])
    moved = tmp_path / "moved"
    data, noise = argv[0], argv[1]
    archive.main(
        ["unpack", str(tmp_path / "study.tar.xz"), str(moved), f"--data={data}", noise]
    )
    assert not list(moved.rglob("*.ckpt"))
    capsys.readouterr()
    run.main([*argv, f"--output={moved}"])
    assert "6 trainings, 5 of them done" in capsys.readouterr().out
    run.main([f"--output={one}", f"--compare={moved}"])
    assert "same figures, to the last bit" in capsys.readouterr().out

    # A report needs no speech, and the same figures come out.
    origins = set(one.glob("runs/*/*/origin.json"))
    assert len(origins) == 6
    # Of two, if the code changed between the kill and what came after it.
    for origin in origins - {begun.folder / "origin.json"}:
        assert len(json.loads(origin.read_text())) == 1
    figures = json.loads((moved / "results.json").read_text())["figures"]
    (moved / "results.json").unlink()
    run.main(["--report_only", f"--output={moved}"])
    assert json.loads((moved / "results.json").read_text())["figures"] == figures

    # Without weights, what was trained elsewhere can be repeated.
    names = [condition.name for condition in CONDITIONS]
    repeat.main([str(moved), *argv, "--seeds", "2", "--conditions", *names[1:]])
    shown = capsys.readouterr().out
    assert shown.count("the same weights and scores") == 2
    run.main([*argv, f"--output={moved}"])
    assert "2 of 2 trainings gave the same weights" in capsys.readouterr().out
    run.main([f"--output={one}", f"--compare={moved}"])
    assert "same figures, to the last bit" in capsys.readouterr().out


@pytest.mark.slow
def test_a_second_training_does_not_write_to_the_folder_of_the_first(argv, tmp_path):
    with writing_alone(tmp_path / "runs" / "revnet46" / "1"):
        begun, process = begin(argv, tmp_path)
        said = process.communicate()[0].strip().splitlines()[-1]
    assert process.returncode == 1
    assert said.startswith("one_run.py: Another process is writing")
    assert not list(begun.folder.iterdir())
