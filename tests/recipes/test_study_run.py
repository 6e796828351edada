"""The study's command: what it trains in which order, what it refuses, what it tells."""

import json
import shutil
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from speechbrain_rev.hparams import OptimizerWarning, resolve
from tests.recipes.study import study
from tests.recipes.tiny_study import recipe_settings, tiny_size, write_data

conditions, trainings = study("design.conditions"), study("running.trainings")
origin = study("running.origin")
schedule, setting, computed = (
    study("running.schedule"),
    study("running.setting"),
    study("measurements.cached"),
)
run, runs, sizes = study("run"), study("results.runs"), study("design.sizes")


@pytest.fixture(scope="module")
def data_and_noise(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def whole(tmp_path):
    """The study as it is, with two seeds, in an empty folder."""
    return runs.Study(
        tmp_path / "study", conditions.conditions(), conditions.comparisons(), (1, 2)
    )


def test_what_is_compared_is_trained_once_and_references_come_first():
    found = conditions.conditions()
    names = [condition.name for condition in found]
    assert (
        len({condition.folder for condition in found}) == len(set(names)) == len(found)
    )
    assert names[: len(conditions.PAIRS)] == list(conditions.PAIRS)
    assert [c.name for c in conditions.references()] == list(conditions.PAIRS)
    compared = conditions.comparisons()
    assert {c.candidate for c in compared} | {c.reference for c in compared} == set(
        names
    )
    assert {c.candidate for c in compared} == set(names) - set(conditions.PAIRS)
    assert all(Path(condition.folder).name == condition.folder for condition in found)


@pytest.mark.parametrize("name", list(sizes.SIZES))
def test_each_condition_of_each_size_has_a_setting_that_may_be_trained(name):
    size = sizes.SIZES[name]
    for condition in conditions.conditions():
        one = trainings.Run(condition, 1, Path("out"))
        given = trainings.settings_of(one, {"data_folder": "data"}, size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizerWarning)
            resolve(run.HPARAMS, given)
        # The last epochs are averaged; fewer are not kept.
        assert int(given["keep_checkpoints"]) >= int(given["average_checkpoints"])


def test_the_control_has_half_of_the_epochs_and_nothing_else_is_its_own():
    (comparison,) = [c for c in conditions.comparisons() if c.control]
    found = {c.name: c for c in conditions.conditions()}
    control, reference = (
        trainings.settings_of(
            trainings.Run(found[name], 1, Path("out")), {}, sizes.SIZES["small"]
        )
        for name in (comparison.candidate, comparison.reference)
    )
    assert int(control.pop("number_of_epochs")) == 15
    assert int(reference.pop("number_of_epochs")) == 30
    assert control == reference


def test_all_epochs_are_kept_of_what_is_probed_and_of_nothing_else(whole):
    kept = [one.name for one in schedule.runs_of(whole) if one.keep_all]
    probed = ("revnet46", *study("measurements.of_study").DRIFTING)
    assert sorted(kept) == sorted(f"{name}, seed 1" for name in probed)
    assert all(whole.condition(name) for name in probed)


class _Trained:
    """Stands for train_all, and for what needs trained runs."""

    def __init__(self, monkeypatch, failing=()):
        self.done, self.budgets, self.failing = [], {}, failing
        self.stated_after, self.scored_after, self.proven = None, None, []
        monkeypatch.setattr(schedule, "train_all", self.train_all)
        monkeypatch.setattr(schedule, "score_without_training", self.score_baselines)
        monkeypatch.setattr(schedule, "state_margins", self.state_margins)
        monkeypatch.setattr(schedule, "memory_budget", self.memory_budget)

    def train_all(
        self, wanted, settings, *_, proven=False, after=lambda done, lost: None, **given
    ):
        self.proven.append(proven)
        failed = {}
        for one in wanted:
            if one.name in self.failing:
                failed[one] = f"{one.name} diverged."
            elif one.name not in self.done:
                self.done.append(one.name)
                self.budgets[one.name] = {**settings, **one.settings}.get(
                    "memory_budget"
                )
                after(one, list(failed.values()))
        if failed:
            raise trainings.TrainingsFailed(failed)

    def state_margins(self, study, references):
        assert references == list(conditions.PAIRS)
        # Verdicts depend on both.
        assert self.scored_after is not None
        self.stated_after = list(self.done)

    def score_baselines(self, study, settings, size):
        self.scored_after = list(self.done)

    def memory_budget(self, study, device):
        assert "revnet46, seed 1" in self.done
        self.budgets["device"] = device
        return "1MB"


def train(whole, **given):
    wanted = schedule.runs_of(whole)
    settings = {"device": "cuda:1"}
    return schedule.train(whole, wanted, settings, None, run.HPARAMS, jobs=2, **given)


def test_margins_are_stated_when_the_references_are_there_and_nothing_else(
    whole, monkeypatch
):
    trained = _Trained(monkeypatch)
    assert train(whole) == []
    assert sorted(trained.stated_after) == sorted(
        f"{name}, seed {seed}" for name in conditions.PAIRS for seed in (1, 2)
    )
    assert sorted(trained.done) == sorted(one.name for one in schedule.runs_of(whole))


def test_half_the_memory_is_of_the_device_and_given_to_that_condition_alone(
    whole, monkeypatch
):
    trained = _Trained(monkeypatch)
    train(whole)
    assert trained.budgets.pop("device") == "cuda:1"
    given = {name for name, budget in trained.budgets.items() if budget is not None}
    planned = "revnet46, plan at half the memory"
    assert given == {f"{planned}, seed 1", f"{planned}, seed 2"}
    # The first that is trained after the references.
    assert trained.done[len(trained.stated_after)] == "revnet46, seed 1"


def test_it_is_said_after_each_candidate_that_was_trained(whole, monkeypatch):
    trained, counts = _Trained(monkeypatch), []
    train(whole, after=lambda lost: counts.append(len(trained.done)))
    assert counts == list(range(len(trained.stated_after) + 1, len(trained.done) + 1))


def test_with_each_candidate_it_is_told_what_failed_before(whole, monkeypatch):
    _Trained(monkeypatch, failing=["revnet46, seed 1", "revnet57, seed 1"])
    told = []
    train(whole, after=lambda lost: told.append(list(lost)))
    assert told[-1] == ["revnet46, seed 1 diverged.", "revnet57, seed 1 diverged."]


def test_all_of_a_seed_is_trained_before_the_next_seed(whole, monkeypatch):
    trained = _Trained(monkeypatch)
    train(whole)
    seeds = [name[-1] for name in trained.done if name.startswith("revnet")]
    assert seeds == sorted(seeds)


def test_a_candidate_that_fails_is_told_once_and_the_others_are_trained(
    whole, monkeypatch
):
    failing = ("revnet46, bf16, seed 2", "revnet46, seed 1")
    trained = _Trained(monkeypatch, failing)
    told = train(whole)
    assert told[:2] == [f"{name} diverged." for name in reversed(failing)]
    # Without its run there is no budget.
    assert len(told) == 3
    assert told[2].startswith("Half the memory failed: AssertionError")
    lost = {f"revnet46, plan at half the memory, seed {seed}" for seed in (1, 2)}
    names = {one.name for one in schedule.runs_of(whole)}
    assert set(trained.done) == names - set(failing) - lost


def test_nothing_is_trained_after_a_reference_that_failed(whole, monkeypatch):
    trained = _Trained(monkeypatch, ("resnet34, seed 2",))
    with pytest.raises(trainings.TrainingsFailed, match="resnet34, seed 2 diverged"):
        train(whole)
    assert trained.stated_after is None
    assert not [name for name in trained.done if name.startswith("revnet")]


def test_references_and_the_first_seed_are_trained_before_the_others(whole):
    first = schedule.first_of(whole, schedule.runs_of(whole))
    references = {"resnet34", "df_resnet56"}
    seeds = {
        c.name: [r.seed for r in first if r.condition == c] for c in whole.conditions
    }
    assert {n for n, of in seeds.items() if of == list(whole.seeds)} == references
    assert all(of == [whole.seeds[0]] for n, of in seeds.items() if n not in references)


def test_the_first_seed_is_looked_at_before_the_others_are_trained(
    data_and_noise, tmp_path, monkeypatch
):
    data, noise = data_and_noise
    told = []

    def train(study, runs, *_, jobs, after=None):
        told.append([one.name for one in runs])
        return [f"{runs[0].name} diverged."]

    def evaluate(*arguments):
        told.append(arguments[-1])
        (tmp_path / "report.md").write_text("all of it")
        return []

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(run, "look_at_first", lambda *_: told.append("looked"))
    monkeypatch.setattr(run, "evaluate", evaluate)
    with pytest.raises(SystemExit, match=r"What failed:\n.*\n.* diverged"):
        run.main([str(data), f"--noise={noise}", f"--output={tmp_path}"])
    first, looked, others, failed = told
    assert looked == "looked"
    assert len(first) + len(others) == 80
    assert not set(first) & set(others)
    assert "bf16, seed 1" in " ".join(first)
    assert "seed 1" not in " ".join(others)
    assert failed == [f"{first[0]} diverged.", f"{others[0]} diverged."]


def test_without_a_study_there_is_no_report_alone(tmp_path):
    with pytest.raises(ValueError, match=r"lacks setting\.json and margins\.json"):
        run.main(["--report_only", f"--output={tmp_path}"])
    setting = {"lists": {"train_list.txt": "", "veri_test.txt": ""}, "seeds": [1, 2, 3]}
    (tmp_path / "setting.json").write_text(json.dumps(setting))
    with pytest.raises(ValueError, match=r"lacks margins\.json.*--output of one"):
        run.main(["--report_only", f"--output={tmp_path}"])
    (tmp_path / "margins.json").touch()
    with pytest.raises(
        ValueError, match=r"of 0 seeds.* lacks resnet34, seed 1; .*run\.py"
    ):
        run.main(["--report_only", f"--output={tmp_path}"])
    assert not (tmp_path / "report.md").exists()


def test_a_condition_that_lacks_a_seed_is_left_out_with_what_is_compared_with_it(whole):
    for one in schedule.runs_of(whole):
        if one.name != "revnet57, seed 2":
            (one.folder / one.work.result).parent.mkdir(parents=True)
            (one.folder / one.work.result).touch()
    left = schedule.finished(whole)
    names = {condition.name for condition in whole.conditions}
    assert names - {condition.name for condition in left.conditions} == {"revnet57"}
    lost = [c for c in whole.comparisons if c not in left.comparisons]
    assert [(c.candidate, c.reference) for c in lost] == [
        ("revnet57", "resnet34"),
        ("revnet57, 8 bit", "revnet57"),
    ]


def test_seeds_that_all_trainings_have_are_reported_while_others_go_on(
    whole, monkeypatch
):
    whole = replace(whole, seeds=(1, 2, 3, 4, 5))
    reports, told = [], []

    def write_report(study, setting, *, failed):
        reports.append(list(study.seeds))
        told.append(list(failed))
        results = {"figures": {"seeds": list(study.seeds)}, "failed": list(failed)}
        (whole.folder / "results.json").write_text(json.dumps(results))

    monkeypatch.setattr(run, "write_report", write_report)

    def end(seed, but=()):
        for one in schedule.runs_of(whole):
            if one.seed == seed and one.condition.name not in but:
                (one.folder / one.work.result).parent.mkdir(parents=True)
                (one.folder / one.work.result).touch()
        run.report_so_far(whole, {}, [])

    end(1)
    end(5)
    assert reports == []
    end(2, but=["revnet46, compressed"])
    assert reports == []
    end(4)
    assert reports == [[1, 4, 5]]
    run.report_so_far(whole, {}, [])
    assert reports == [[1, 4, 5]]
    # What fails is told with the seeds that it leaves.
    run.report_so_far(whole, {}, ["revnet46, compressed, seed 2, diverged."])
    assert (reports[1:], told[1:]) == (
        [[1, 4, 5]],
        [["revnet46, compressed, seed 2, diverged."]],
    )
    end(3)
    assert reports[2:] == [[1, 3, 4, 5]]
    compressed = whole.run_folder("revnet46, compressed", 2) / "scores" / "results.json"
    compressed.parent.mkdir(parents=True)
    compressed.touch()
    # Whoever trains the last one evaluates the study.
    run.report_so_far(whole, {}, [])
    assert len(reports) == 3


def test_encoders_are_measured_with_runs_of_any_seed(whole, monkeypatch):
    seeds = []
    monkeypatch.setattr(run, "finished", lambda study: study)
    monkeypatch.setattr(run, "measure_steps", lambda study, _: None)
    monkeypatch.setattr(run, "probe", lambda study, _: None)
    monkeypatch.setattr(
        run, "measure_encoders", lambda study, _: seeds.append(list(study.seeds))
    )
    assert run.look_at_first(whole, "cpu") == []
    assert seeds == [list(whole.seeds)]


def test_a_picture_that_cannot_be_drawn_does_not_have_reports_written_again(
    whole, monkeypatch
):
    whole = replace(whole, seeds=(1, 2, 3, 4))
    monkeypatch.setattr(run, "so_far", lambda study: replace(study, seeds=(1, 2, 3)))
    results = {"figures": {"seeds": [1, 2, 3]}, "failed": ["a died."]}
    results["undrawn"] = ["no picture."]
    whole.folder.mkdir(parents=True)
    (whole.folder / "results.json").write_text(json.dumps(results))
    written = []
    monkeypatch.setattr(run, "write_report", lambda *_, failed: written.append(failed))
    run.report_so_far(whole, {}, ["a died."])
    assert written == []
    run.report_so_far(whole, {}, ["a died.", "b died."])
    assert written == [["a died.", "b died."]]


def test_what_fails_late_does_not_cost_the_report(whole, monkeypatch, capsys):
    reports = []

    def fail(*_):
        raise study("measurements.rebuilt").NotEqual("1 degree off")

    monkeypatch.setattr(run, "finished", lambda study: study)
    monkeypatch.setattr(run, "measure_steps", fail)
    monkeypatch.setattr(run, "measure_encoders", lambda *_: None)
    monkeypatch.setattr(run, "probe", lambda *_: None)
    monkeypatch.setattr(
        run, "write_report", lambda *_, failed: reports.append(list(failed))
    )
    lost = run.evaluate(whole, {"size": "small"}, "cpu", ["bf16 died."])
    assert lost == ["Measures of a step failed: NotEqual: 1 degree off"]
    assert reports == [["bf16 died."], ["bf16 died.", *lost]]
    assert "Traceback" in capsys.readouterr().err


def test_figures_of_a_study_that_was_moved_are_those_of_its_weights(tmp_path):
    of_study = study("measurements.of_study")
    whole = runs.Study(
        tmp_path, [conditions.Condition("revnet46", "revnet46")], [], (1,)
    )
    folder = whole.run_folder("revnet46", 1)
    (folder / "scores").mkdir(parents=True)
    (folder / runs.SCORED).write_text(json.dumps({"model": "f00d"}))
    measures, made_of = tmp_path / "measures.json", tmp_path / "made_of.json"
    for file, words in (("{}", "f00d"), ("{}", "beef"), (None, "f00d")):
        measures.unlink(missing_ok=True)
        if file:
            measures.write_text(file)
        made_of.write_text(json.dumps({"measures.json": {"revnet46": words}}))
        if file and words == "f00d":
            of_study.measure_steps(whole, "cpu")
            assert measures.read_text() == file
            continue
        with pytest.raises(
            ValueError, match=r"measures\.json cannot be computed: .*1 has"
        ):
            of_study.measure_steps(whole, "cpu")


def test_encoders_are_measured_where_a_run_or_its_repetition_has_weights(
    tmp_path, monkeypatch
):
    of_study = study("measurements.of_study")
    names = "resnet34", "revnet46", "revnet46, 8 bit"
    whole = runs.Study(
        tmp_path,
        [conditions.Condition(name, name.partition(",")[0]) for name in names],
        [],
        (1, 2),
    )
    measured = []

    def measure(ways, device):
        measured.append(
            {str(way.folder.relative_to(tmp_path)) for way in ways.values()}
        )
        return {"found": len(measured)}

    monkeypatch.setattr(of_study, "measure", measure)
    monkeypatch.setattr(
        of_study,
        "ways_of",
        lambda folder: {"store": study("measurements.steps").Way(folder)},
    )

    def begin(folder):
        (folder / "save" / "CKPT+1").mkdir(parents=True)
        (folder / "hyperparams.yaml").write_text("seed: 1\n")

    begin(whole.run_folder("revnet46", 2))
    with pytest.raises(ValueError, match=r"ways\.json cannot .* of resnet34 has"):
        of_study.measure_encoders(whole, "cpu")
    begin(tmp_path / "repeated" / "runs" / "resnet34" / "1")
    of_study.measure_encoders(whole, "cpu")
    of_study.measure_encoders(whole, "cpu")
    assert measured == [{"runs/revnet46/2", "repeated/runs/resnet34/1"}]
    # A study that was moved has them, and no weights.
    shutil.rmtree(tmp_path / "runs")
    of_study.measure_encoders(whole, "cpu")
    assert len(measured) == 1


def described(data, noise, size=None, **changed):
    whole = runs.Study(
        Path("out"),
        changed.get("conditions", conditions.conditions()),
        conditions.comparisons(),
        changed.get("seeds", (1, 2)),
    )
    given = recipe_settings(data, noise, changed.get("device", "cpu"))
    return setting.setting_of(whole, "small", size or tiny_size(), run.HPARAMS, given)


def test_a_study_goes_on_with_its_own_setting_and_refuses_another(
    data_and_noise, tmp_path
):
    data, noise = data_and_noise
    kept = setting.keep_setting(tmp_path, described(data, noise))
    assert setting.keep_setting(tmp_path, described(data, noise)) == kept
    first, *others = conditions.conditions()
    size = tiny_size()
    slower = replace(size, settings={**size.settings, "lr": 2e-3, "final_lr": 1e-4})
    for name, other in {
        "seeds": described(data, noise, seeds=(1, 2, 3)),
        "noise": described(data, None),
        "device": described(data, noise, device="cuda"),
        "common": described(data, noise, slower),
        "conditions": described(
            data,
            noise,
            conditions=[replace(first, settings={"mode": "store"}), *others],
        ),
    }.items():
        with pytest.raises(ValueError, match=rf"other settings: {name} \(see"):
            setting.keep_setting(tmp_path, other)
    assert json.loads((tmp_path / "setting.json").read_text()) == kept


def test_a_study_refuses_lists_and_noise_that_changed_where_they_were(tmp_path):
    data, noise = write_data(tmp_path / "corpus")
    setting.keep_setting(tmp_path, described(data, noise))
    trials = data / "veri_test.txt"
    text = trials.read_text()
    trials.write_text(text + text.splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="lists"):
        setting.keep_setting(tmp_path, described(data, noise))
    trials.write_text(text)
    (noise / "noise" / "clip_0.wav").rename(noise / "noise" / "other.wav")
    with pytest.raises(ValueError, match="noise"):
        setting.keep_setting(tmp_path, described(data, noise))


def test_the_setting_says_nothing_that_is_not_true_of_all_runs(data_and_noise):
    found = described(*data_and_noise)["common"]
    assert not {"arch", "seed", "mode", "optimizer_bits", "streams"} & set(found)
    assert not {"out_n_neurons", "output_folder", "noise_folder"} & set(found)
    assert found["batch_size"] == tiny_size().settings["batch_size"]


def test_each_commit_that_a_study_was_run_by_is_listed_once(
    data_and_noise, tmp_path, monkeypatch
):
    wanted = described(*data_and_noise)
    for commit in ("a1", "a1", "b2", None):
        answer = commit and commit.encode()
        monkeypatch.setattr(origin, "_git", lambda *_, answer=answer: answer)
        monkeypatch.setattr(origin, "_changes", lambda: b"")
        kept = setting.keep_setting(tmp_path, wanted)
    assert [entry["commit"] for entry in kept["code"]] == ["a1", "b2", None]


def test_code_that_was_changed_is_other_code_for_each_change(tmp_path, monkeypatch):
    def git(*arguments):
        argv = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "one.py").write_text("x = 1\n")
    git("add", "one.py")
    git("commit", "-m", "m")
    monkeypatch.setattr(origin, "REPOSITORY", tmp_path)
    clean = origin.code_and_machine()
    assert clean["commit"]
    assert clean["changed"] is False
    seen = [clean]
    for name in ("one.py", "na\u00efve.py", "one.py"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"y = '\xff'\n")
        seen.append(origin.code_and_machine())
    assert len({one["changed"] for one in seen}) == 4
    assert origin.differing(seen[1], seen[2]) == ["changed"]
    # What is no code is not, nor what leads nowhere.
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".#one.py").symlink_to("nobody")
    assert origin.code_and_machine() == seen[-1]
    # The same code elsewhere is the same.
    shutil.copytree(tmp_path, tmp_path.with_name("copy"), symlinks=True)
    monkeypatch.setattr(origin, "REPOSITORY", tmp_path.with_name("copy"))
    assert origin.code_and_machine() == seen[-1]


def test_another_machine_is_listed_too(data_and_noise, tmp_path, monkeypatch):
    for processor in ("one", "other", "one"):
        monkeypatch.setattr(
            study("running.origin"),
            "environment",
            lambda p=processor: [("processor", p)],
        )
        kept = setting.keep_setting(tmp_path, described(*data_and_noise))
    assert [entry["processor"] for entry in kept["code"]] == ["one", "other"]


def test_figures_are_computed_once_of_one_thing(tmp_path):
    path, computations = tmp_path / "probes.json", []

    def compute():
        computations.append(len(computations))
        return {"angle": computations[-1]}

    for weights, angle in (("f00d", 0), ("f00d", 0), ("beef", 1), ("f00d", 2)):
        found = computed.computed_once(path, {"weights": weights}, compute)
        assert found == {"angle": angle}
    path.unlink()
    assert computed.computed_once(path, {"weights": "f00d"}, compute) == {"angle": 3}


def test_figures_of_unknown_weights_are_computed_again(tmp_path):
    path = tmp_path / "probes.json"
    path.write_text('{"angle": 90}')

    def fail():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        computed.computed_once(path, {"weights": "f00d"}, fail)
    computed.computed_once(path, {"weights": "f00d"}, lambda: {"angle": 0})
    with pytest.raises(RuntimeError):
        computed.computed_once(path, {"weights": "beef"}, fail)
    # What failed on the way vouches for nothing.
    found = computed.computed_once(path, {"weights": "f00d"}, lambda: {"angle": 1})
    assert found == {"angle": 1}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--jobs=0", "."], "it takes 1 or more, not '0'"),
        (["--noise=", "."], "there is no folder ''"),
        (["nowhere"], "there is no folder 'nowhere'"),
        ([], "DATA is needed"),
    ],
)
def test_a_wrong_command_line_is_told(argv, words, capsys):
    with pytest.raises(SystemExit):
        run.main(argv)
    assert words in capsys.readouterr().err


def test_a_card_that_is_not_there_is_told_before_anything_is_written(
    data_and_noise, tmp_path
):
    argv = [str(data_and_noise[0]), "--size=full", f"--output={tmp_path / 'study'}"]
    with pytest.raises(ValueError, match="--device=cuda:77 is not there"):
        run.main([*argv, "--device=cuda:77"])
    assert not list(tmp_path.iterdir())


def test_two_studies_do_not_write_to_one_folder(data_and_noise, tmp_path):
    with (
        run.writing_alone(tmp_path / "study"),
        pytest.raises(ValueError, match="Another process is writing"),
    ):
        run.main([str(data_and_noise[0]), f"--output={tmp_path / 'study'}"])


def test_trial_lists_are_those_of_the_study(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"lacks train_list\.txt or trial lists"
    ):
        run.trial_lists(tmp_path)
    for name in ("train_list", "veri_test", "veri_test_hard", "veri_test.bak", "vox"):
        (tmp_path / f"{name}.txt").touch()
    names = [path.name for path in run.trial_lists(tmp_path)]
    assert names == ["veri_test.txt", "veri_test_hard.txt"]


def test_studies_are_compared_without_data(tmp_path, capsys):
    folders = []
    for name, eer in (("one", 0.1), ("same", 0.1), ("other", 0.2)):
        folder = tmp_path / name
        folder.mkdir()
        figures = {"eer": eer, "conditions": {"revnet46": {}}, "seeds": [1, 2]}
        results = {"figures": figures, "measured": {"minutes": name}}
        (folder / "results.json").write_text(json.dumps(results))
        folders.append(folder)
    one, same, other = folders
    run.main([f"--output={one}", f"--compare={same}"])
    assert "to the last bit: of 1 conditions, seeds 1, 2." in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1 figures differ"):
        run.main([f"--output={one}", f"--compare={other}"])
    with pytest.raises(ValueError, match="would be compared with itself"):
        run.main([f"--output={one}", f"--compare={one}"])
    (other / "results.json").write_text("{}")
    for wrong in (other, tmp_path):
        with pytest.raises(ValueError, match=r"has no results\.json with the figures"):
            run.main([f"--output={one}", f"--compare={wrong}"])


def test_a_dry_run_lists_and_writes_nothing(data_and_noise, tmp_path, capsys):
    output = tmp_path / "study"
    run.main([str(data_and_noise[0]), f"--output={output}", "--dry_run", "--size=full"])
    told = capsys.readouterr().out
    assert "16 conditions, seeds 1, 2, 3: 48 trainings, 0 of them done" in told
    assert "revnet46, plan at half the memory" in told
    assert not output.exists()
