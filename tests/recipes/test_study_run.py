"""The runner of the study: what it plans, trains, skips, resumes and refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from speechbrain_rev.files import writing_alone
from speechbrain_rev.hparams import OptimizerWarning, plain_settings, resolve
from speechbrain_rev.lobes import build_encoder
from tests.recipes.study import study, tiny_size, write_data

conditions, figures, run = study("conditions"), study("figures"), study("run")
report, one_run = study("report"), study("one_run")
CONDITIONS = {one.name: one for one in conditions.CONDITIONS}
SMALL = conditions.SIZES["small"]
TINY = ["--conditions", "resnet34", "revnet46"]


@pytest.fixture(scope="module")
def data_and_noise(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def argv(data_and_noise):
    data, noise = data_and_noise
    return [str(data), f"--noise_folder={noise}"]


@pytest.fixture
def scheduled(argv, tmp_path, monkeypatch):
    """Make a schedule of a tiny study below a folder of its own."""
    monkeypatch.setitem(run.SIZES, "small", tiny_size())

    def make(*options):
        given = [*argv, f"--output_folder={tmp_path / 'study'}", *(options or TINY)]
        return run.schedule_of(run._parser().parse_args(given))

    return make


# ------------------------------------------------------------------ the table


def test_what_a_condition_is_compared_with_is_trained_before_it():
    names = list(CONDITIONS)
    assert len({one.folder for one in CONDITIONS.values()}) == len(names) == 16
    for place, one in enumerate(CONDITIONS.values()):
        assert Path(one.folder).name == one.folder
        assert set(one.references) <= set(names[:place])
    claims = {one.claim for one in CONDITIONS.values()}
    assert claims == {conditions.NOT_WORSE, conditions.EQUAL, conditions.WORSE}


def settings_of(name, size=SMALL, **given):
    schedule = run.Schedule(
        figures.Study(Path("out"), list(CONDITIONS.values()), [1], []), size, given
    )
    return schedule.settings(run.Run(CONDITIONS[name], 1, Path("out")))


@pytest.mark.parametrize("size", list(conditions.SIZES))
def test_each_condition_of_each_size_has_settings_that_the_recipe_takes(size):
    for name in CONDITIONS:
        given = settings_of(name, conditions.SIZES[size], data_folder="data")
        texts = {key: run._as_text(value) for key, value in given.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizerWarning)
            resolve(run.HPARAMS, texts)


@pytest.mark.parametrize("size", conditions.SIZES.values())
def test_the_control_has_half_of_the_epochs_and_nothing_else_is_its_own(size):
    control, reference = (
        settings_of(n, size) for n in (conditions.CONTROL, "revnet46")
    )
    assert 2 * control.pop("number_of_epochs") == reference.pop("number_of_epochs")
    assert control == reference


def test_encoders_of_the_small_study_have_as_many_parameters():
    sizes = {}
    for name, one in CONDITIONS.items():
        if name == one.arch:
            keys = ("n_mels", "embedding_dim", "widths")
            given = {key: settings_of(name)[key] for key in keys}
            encoder = build_encoder(name, **given)
            sizes[name] = sum(p.numel() for p in encoder.parameters())
            for reference in one.references:
                assert sizes[name] == pytest.approx(sizes[reference], rel=0.02)
    assert len(sizes) == 6


# ------------------------------------------------------------------ the schedule


def test_references_of_all_seeds_come_first_then_a_seed_after_the_other(scheduled):
    runs = scheduled("--seeds", "3", "1", "--conditions", *CONDITIONS).runs()
    rows = [(one.condition.name, one.seed) for one in runs]
    references, *_, last = rows[:4], *rows
    assert references == [(n, s) for s in (3, 1) for n in ("resnet34", "df_resnet56")]
    assert [seed for _, seed in rows[4:]] == [3] * 14 + [1] * 14
    assert last == (conditions.CONTROL, 1)


def test_a_command_gives_every_setting_as_it_is_meant(scheduled):
    schedule = scheduled()
    data = Path("/a, b: #1/c")
    given = {
        "data_folder": data,
        "noise_folder": None,
        "trial_lists": [data / "x.txt", data / "y.txt"],
        "device": "cpu",
    }
    changed = {"zero_init_residual": False, "final_lr": 1e-5, "optimizer_bits": 8}
    one = schedule.runs()[-1]
    one = replace(one, condition=replace(one.condition, settings=changed))
    argv = replace(schedule, given=given).command(one)
    assert argv[:3] == [sys.executable, str(run.ONE_RUN), str(run.HPARAMS)]
    options = dict(a.removeprefix("--").split("=", 1) for a in argv[3:] if "=" in a)
    del options["device"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizerWarning)
        resolved = plain_settings(resolve(run.HPARAMS, options))
    wanted = {
        **schedule.size.settings,
        # The condition's override those of the size.
        **changed,
        "widths": list(schedule.size.widths["revnet46"]),
        "data_folder": str(data),
        "noise_folder": None,
        "trial_lists": [str(data / "x.txt"), str(data / "y.txt")],
        "seed": one.seed,
        "arch": "revnet46",
        "output_folder": str(one.folder),
    }
    assert {key: resolved[key] for key in wanted} == wanted


def test_a_dry_run_lists_runs_and_hours_and_writes_nothing(argv, tmp_path, capsys):
    output = tmp_path / "study"
    run.main([*argv, f"--output_folder={output}", "--dry_run"])
    shown = capsys.readouterr().out
    assert shown.count("to train  ") == 80
    assert f"80 to train, about {80 * SMALL.minutes / 60:.1f} hours" in shown
    assert "revnet46, plan at half the memory, seed 5" in shown
    run.main([*argv, f"--output_folder={output}", "--dry_run", "--size=full"])
    assert "how long a run takes is known once one is done" in capsys.readouterr().out
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--conditions", "revnet47"], "'revnet47' is none of resnet34, "),
        (["--conditions", "revnet46"], "'revnet46' is compared with 'resnet34'"),
        (["--seeds", "1"], "--seeds 1 shows no spread: give two or more"),
        (["--device=cuda:77"], "--device=cuda:77 is not there"),
        (["--repeat"], "holds no study to repeat"),
    ],
)
def test_what_cannot_be_a_study_is_one_line_and_nothing_is_written(
    argv, tmp_path, options, words
):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        run.main([*argv, f"--output_folder={tmp_path / 'study'}", *options])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_folders_without_noise_or_lists_are_refused(tmp_path, capsys):
    for wrong in ("nowhere", ""):
        with pytest.raises(SystemExit):
            run.main([str(tmp_path), f"--noise_folder={wrong}"])
        assert f"there is no folder {wrong!r}" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"lacks train_list\.txt or trial lists"):
        run.main([str(tmp_path)])


# ------------------------------------------------------------------ its setting


def test_a_study_goes_on_with_its_own_setting_and_refuses_another(
    scheduled, data_and_noise, monkeypatch
):
    schedule = scheduled()
    run.keep_setting(schedule, "small")
    path = schedule.study.folder / "setting.json"
    kept = path.read_bytes()
    run.keep_setting(scheduled(), "small")
    size = schedule.size
    faster = replace(size, settings={**size.settings, "lr": 2e-3})
    part = ["--repeat", "--seeds", "2", "--conditions"]
    run.keep_setting(scheduled(*part, "revnet46"), "small", may_be_part=True)
    for what, other in {
        "size": schedule,
        "seeds": scheduled(*TINY, "--seeds", "1", "2", "3"),
        "device": scheduled(*TINY, "--device=cuda"),
        "conditions": replace(schedule, size=faster),
        "noise": replace(schedule, given={**schedule.given, "noise_folder": None}),
    }.items():
        with pytest.raises(ValueError, match=f"a study with other {what}. Give what"):
            run.keep_setting(other, "full" if what == "size" else "small")
    for what, options in {
        "seeds": ["--repeat", "--seeds", "3", "--conditions", "revnet46"],
        "conditions": [*part, "revnet57"],
    }.items():
        with pytest.raises(ValueError, match=f"other {what}"):
            run.keep_setting(scheduled(*options), "small", may_be_part=True)
    with monkeypatch.context() as patch:
        patch.setattr(run, "HPARAMS", run.HPARAMS.with_name("demo.yaml"))
        with pytest.raises(ValueError, match="other hparams"):
            run.keep_setting(schedule, "small")
    # What lists and noise hold is a part of it.
    data, noise = data_and_noise
    clip, listed = noise / "noise" / "clip_0.wav", data / "veri_test.txt"
    before = listed.read_text()
    listed.write_text(f"{before}\n")
    clip.rename(clip.with_name("other.wav"))
    with pytest.raises(ValueError, match="other lists, noise"):
        run.keep_setting(schedule, "small")
    clip.with_name("other.wav").rename(clip)
    listed.write_text(before)
    assert path.read_bytes() == kept


# ------------------------------------------------------------------ its runs

#: Stands for one_run.py.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
given = dict(a[2:].split("=", 1) for a in sys.argv if "=" in a)
folder = Path(given["output_folder"])
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))
with (folder / "starts").open("a") as file:
    file.write("started\\n")
does = os.environ.get("SEED_" + given["seed"], "works")
print("seed", given["seed"], does)
if does == "fails":
    sys.exit("the loss is NaN")
if does == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "works":
    (folder / "scores").mkdir()
    (folder / "scores" / "results.json").write_text('{"model": "f00d"}')
"""


@pytest.fixture
def fake(scheduled, tmp_path, monkeypatch):
    """A schedule of four runs that a script stands for."""
    monkeypatch.setattr(run, "ONE_RUN", tmp_path / "script.py")
    run.ONE_RUN.write_text(SCRIPT)
    return scheduled()


def finish(one, minutes=(1.0,)):
    (one.folder / "scores").mkdir(parents=True)
    (one.folder / "scores" / "results.json").write_text('{"model": "f00d"}')
    rows = [f'{{"minutes": {minute}}}\n' for minute in minutes]
    (one.folder / "train_log.jsonl").write_text("".join(rows))


def starts(runs):
    files = [one.folder / "starts" for one in runs]
    return [len(f.read_text().splitlines()) if f.exists() else 0 for f in files]


def test_one_that_fails_is_named_and_does_not_stop_the_others(fake, monkeypatch):
    runs = fake.runs()
    finish(runs[0], minutes=[10.0, 20.0])
    assert [one.state for one in runs[:2]] == ["done", "to train"]
    assert "3 to train, about 1.5 hours" in fake.forecast(runs)
    monkeypatch.setenv("SEED_2", "fails")
    lost = run.train(fake, runs)
    name = "resnet34, seed 2, ended with status 1: the loss is NaN (all of it: "
    assert [line.startswith(name) for line in lost] == [True, False]
    assert [one.is_done for one in runs] == [True, False, True, False]
    monkeypatch.delenv("SEED_2")
    # What is done is not done again.
    assert run.train(fake, runs) == []
    assert starts(runs) == [0, 2, 1, 2]
    assert run.train(fake, runs) == []


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("fails", "ended with status 1: the loss is NaN"),
        ("is killed", "was ended by SIGKILL"),
        ("forgets", "ended with status 0"),
    ],
)
def test_where_none_ever_worked_the_others_are_not_begun(
    fake, monkeypatch, does, words
):
    monkeypatch.setenv("SEED_1", does)
    (lost,) = run.train(fake, fake.runs())
    assert words in lost
    assert starts(fake.runs()) == [1, 0, 0, 0]


def test_a_run_that_another_command_has_is_left_to_it(fake):
    runs = fake.runs()
    with writing_alone(runs[0].folder):
        (lost,) = run.train(fake, runs)
    assert lost.startswith("resnet34, seed 1: Another process is writing")
    assert starts(runs) == [0, 1, 1, 1]


def test_no_candidate_is_trained_before_all_references(fake, argv, monkeypatch):
    monkeypatch.setenv("SEED_2", "fails")
    with pytest.raises(SystemExit, match="references come first, and are not done"):
        run.main([*argv, f"--output_folder={fake.study.folder}", *TINY])
    assert starts(fake.runs()) == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("widest", "precision", "isa"),
    [("AVX512", "fp32", "AVX2"), ("DEFAULT", "fp32", None), ("AVX2", "bf16", None)],
)
def test_float32_is_computed_by_instructions_that_processors_have_in_common(
    fake, monkeypatch, widest, precision, isa
):
    monkeypatch.setattr(run, "get_cpu_capability", lambda: widest)
    # What the user has set stays.
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    one = fake.runs()[0]
    condition = replace(one.condition, settings={"precision": precision})
    assert run.train(fake, [replace(one, condition=condition)]) == []
    given = json.loads((one.folder / "environment.json").read_text())
    assert given.get("ONEDNN_MAX_CPU_ISA") == isa
    assert (given["MKL_CBWR"], given["OMP_NUM_THREADS"]) == ("COMPATIBLE", "1")


def test_torch_takes_the_instructions_that_it_is_given():
    if run.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has no AVX2")
    script = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, **run._AVX2}
    assert subprocess.check_output(command, env=environment) == b"AVX2\n"


def test_each_machine_that_made_a_run_is_written_down_once(tmp_path, monkeypatch):
    path = tmp_path / "run" / "origin.json"
    for processor in ("one", "other", "one"):
        facts = [("processor", processor)]
        monkeypatch.setattr(one_run, "environment", lambda facts=facts: facts)
        one_run.write_origin(path, "cpu")
    entries = json.loads(path.read_text())
    assert [entry["processor"] for entry in entries] == ["one", "other"]


def test_what_is_done_is_repeated_and_named_where_it_comes_out_otherwise(
    fake, argv, capsys
):
    run.keep_setting(fake, "small")
    given = [
        *argv,
        f"--output_folder={fake.study.folder}",
        *TINY,
        "--repeat",
        "--seeds",
        "1",
    ]
    with pytest.raises(ValueError, match="resnet34, seed 1; revnet46, seed 1 is not"):
        run.main(given)
    for one in fake.runs():
        finish(one)
    first, *_ = fake.runs()
    (first.folder / "scores" / "results.json").write_text('{"model": "beef"}')
    with pytest.raises(SystemExit, match="resnet34, seed 1 came out otherwise"):
        run.main(given)
    shown = capsys.readouterr().out
    assert "resnet34, seed 1: other weights\nrevnet46, seed 1: the same bits\n" in shown


# ------------------------------------------------------------------ the whole


@pytest.mark.slow(drawn=False)
def test_a_study_that_was_killed_goes_on_and_is_reported_and_repeats_its_bits(
    argv, scheduled, capsys
):
    schedule = scheduled()
    given = [*argv, f"--output_folder={schedule.study.folder}", *TINY]
    first, *_ = schedule.runs()
    with writing_alone(first.folder):
        words = run.call(schedule, first)
    assert "one_run.py: Another process is writing" in words
    assert not list(first.folder.iterdir())
    environment = {**os.environ, **run._AVX2, **run._THREADS}
    process = subprocess.Popen(schedule.command(first), env=environment)
    while not any(first.folder.glob("save/CKPT*/CKPT.yaml")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert first.state == "begun"
    run.main(given)
    results = json.loads((schedule.study.folder / "results.json").read_text())[
        "figures"
    ]
    weights = [one["weights"].values() for one in results["conditions"].values()]
    assert len({digest for digests in weights for digest in digests}) == 4
    assert set(results["baseline"]) == {"deviation", "mean and deviation"}
    archive = schedule.study.folder / "study.tar.xz"
    report.main([str(archive)])
    assert "| revnet46 | resnet34 |" in archive.with_name("report.md").read_text()
    # Given again it trains nothing, and the archive is the same.
    logs = {one.log: one.log.stat().st_mtime_ns for one in schedule.runs()}
    packed = archive.read_bytes()
    run.main(given)
    assert {log: log.stat().st_mtime_ns for log in logs} == logs
    assert archive.read_bytes() == packed
    # The run that was killed, once more without a stop.
    capsys.readouterr()
    run.main([*given[:-2], "resnet34", "--repeat", "--seeds", "1"])
    assert "resnet34, seed 1: the same bits" in capsys.readouterr().out
