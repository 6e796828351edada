"""Trainings of a study that are done again."""

import itertools
import json
import shutil

import pytest

from tests.recipes.study import study
from tests.recipes.tiny_study import tiny_size

conditions, runs, repetition, trainings = (
    study("design.conditions"),
    study("results.runs"),
    study("running.repetition"),
    study("running.trainings"),
)
repeat, sentences = study("repeat"), study("report.sentences")
origin, origins = study("running.origin"), study("results.origins")
CONDITIONS = [
    conditions.Condition("resnet34", "resnet34"),
    conditions.Condition("revnet46", "revnet46"),
    conditions.Condition("revnet46, planned", "revnet46", half_memory=True),
]


@pytest.fixture
def whole(tmp_path):
    return runs.Study(tmp_path, CONDITIONS, [], (1, 2), ("easy", "hard"))


def score(folder, weights, scores):
    (folder / "scores").mkdir(parents=True)
    (folder / runs.SCORED).write_text(json.dumps({"model": weights}))
    for name, target in scores.items():
        lines = f"a/1 a/2 1 {target}\na/1 b/1 0 0\na/2 b/1 0 0.5\n"
        (folder / "scores" / f"{name}.as_norm.txt").write_text(lines)


def write(whole, seed):
    for condition in whole.conditions:
        score(
            whole.run_folder(condition.name, seed), "f00d", {"easy": "1", "hard": "2"}
        )


def test_all_conditions_of_the_seeds_are_repeated_or_those_that_are_named(whole):
    write(whole, 2)
    chosen = repeat.chosen_runs(whole, [2], None)
    assert [run.name for run in chosen] == [f"{c.name}, seed 2" for c in CONDITIONS]
    (one,) = repeat.chosen_runs(whole, [2], ["revnet46"])
    assert one.name == "revnet46, seed 2"


def test_they_are_repeated_in_the_order_that_they_are_named_and_once(whole):
    for seed in (1, 2):
        write(whole, seed)
    chosen = repeat.chosen_runs(whole, [2, 1, 2], ["revnet46", "resnet34", "revnet46"])
    assert [run.name for run in chosen] == [
        "revnet46, seed 2",
        "resnet34, seed 2",
        "revnet46, seed 1",
        "resnet34, seed 1",
    ]


@pytest.mark.parametrize(
    ("seeds", "names", "words"),
    [
        ([3], None, "no seed 3; it has 1, 2"),
        ([2], ["revnet57"], "no condition 'revnet57'; there are 'resnet34'"),
        ([1], ["revnet46"], "has not scored revnet46, seed 1: .*--seeds"),
    ],
)
def test_what_the_study_does_not_have_is_refused(whole, seeds, names, words):
    write(whole, 2)
    with pytest.raises(ValueError, match=words):
        repeat.chosen_runs(whole, seeds, names)


def test_what_comes_out_otherwise_is_named_and_the_study_stays(whole, monkeypatch):
    write(whole, 1)
    before = {path: path.read_bytes() for path in whole.folder.rglob("*.txt")}
    budgets = {}

    def train_all(wanted, settings, size, hparams, *, jobs, proven, after):
        for run in wanted:
            budgets[run.name] = run.settings.get("memory_budget")
            planned = run.condition.half_memory
            score(
                run.folder,
                "f00d" if run.condition.name == "resnet34" else "beef",
                {"easy": "1", "hard": "-3" if planned else "2"},
            )
            after(run, [])

    monkeypatch.setattr(repetition, "train_all", train_all)
    monkeypatch.setattr(repetition, "memory_budget", lambda *_: "1MB")
    chosen = repeat.chosen_runs(whole, [1], None)
    found, failed = repeated(whole, chosen)
    assert failed == []
    assert {one["weights"] for one in found} == {"f00d"}
    assert {one["name"]: one["differing"] for one in found} == {
        "resnet34, seed 1": [],
        "revnet46, seed 1": ["weights"],
        "revnet46, planned, seed 1": ["weights", "hard.as_norm.txt"],
    }
    rates = {one["name"]: (one["eer"], one["eer_again"]) for one in found}
    equal, other = {"easy": 0.0, "hard": 0.0}, {"easy": 0.0, "hard": 1.0}
    assert rates["revnet46, seed 1"] == (equal, equal)
    assert rates["revnet46, planned, seed 1"] == (equal, other)
    (planned,) = (one for one in found if "planned" in one["name"])
    assert planned["score_difference"] == 5.0
    assert repeat.told(planned) == (
        "other weights; EER in percent: easy 0.00 and 0.00, hard 0.00 and 100.00"
    )
    scores_alone = {**planned, "differing": ["hard.as_norm.txt"]}
    assert repeat.told(scores_alone) == "the same weights; scores are off by 5"
    assert budgets.pop("revnet46, planned, seed 1") == "1MB"
    assert set(budgets.values()) == {None}
    assert {path: path.read_bytes() for path in before} == before


def test_a_score_that_is_missing_differs(whole):
    write(whole, 1)
    again = runs.Study(whole.folder / "again", CONDITIONS, [], (1, 2))
    score(again.run_folder("revnet46", 1), "f00d", {"easy": "1"})
    assert whole.differing(again, "revnet46", 1) == ["hard.as_norm.txt"]
    assert again.differing(whole, "revnet46", 1) == ["hard.as_norm.txt"]


def repeated(whole, chosen, **options):
    """Repeat trainings of small encoders, by whatever stands for train_all."""
    return repetition.repeat(
        whole, chosen, {"device": "cpu"}, tiny_size(), None, jobs=1, **options
    )


def train_the_same(wanted, settings, size, hparams, *, jobs, proven, after):
    for run in wanted:
        if not run.is_done:
            score(run.folder, "f00d", {"easy": "1", "hard": "2"})
            after(run, [])


@pytest.mark.parametrize("key", ["torch", "processor", "commit", "told", "device"])
def test_what_was_begun_elsewhere_is_not_gone_on_with(whole, monkeypatch, key):
    write(whole, 1)
    here = {
        "torch": "2.9",
        "processor": "one",
        "commit": "a",
        "told": {},
        "device": "x",
    }
    here["since"] = "today"

    def origin_of(device, precision):
        assert (device, precision) == ("cpu", "fp32")
        return dict(here)

    monkeypatch.setattr(repetition, "origin_of", origin_of)
    monkeypatch.setattr(origin, "origin_of", origin_of)

    def train(wanted, *arguments, **options):
        for run in wanted:
            if not run.is_done:
                run.folder.mkdir(parents=True, exist_ok=True)
                origin.write_origin(run.folder, "cpu", "fp32")
                train_the_same([run], *arguments, **options)

    monkeypatch.setattr(repetition, "train_all", train)
    (chosen,) = repeat.chosen_runs(whole, [1], ["revnet46"])

    def again():
        return repeated(whole, [chosen])

    first = again()
    (written,) = first[0][0]["origin_again"]
    assert written.items() >= here.items()
    # What is done was done there, whoever asks.
    before, here[key] = here[key], "another"
    assert again() == first
    folder = whole.folder / "repeated" / "runs" / "revnet46" / "1"
    shutil.rmtree(folder / "scores")
    (folder / "save" / "CKPT+1").mkdir(parents=True)
    (folder / "save" / "CKPT+1" / "CKPT.yaml").touch()
    with pytest.raises(ValueError, match=f"{key} was .* and is another. Remove that"):
        again()
    here |= {key: before, "since": "tomorrow"}
    assert again() == first
    shutil.rmtree(folder / "scores")
    (folder / "origin.json").unlink()
    with pytest.raises(ValueError, match=f"{key} was None and is .*. Remove that"):
        again()


def test_of_what_was_begun_without_a_word_it_is_not_known_where(tmp_path):
    checkpoint = tmp_path / "save" / "CKPT+1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "CKPT.yaml").touch()
    origin.write_origin(tmp_path, "cpu", "fp32")
    machines = origins.machines_of(origins.read_origin(tmp_path))
    assert machines.startswith("not written down, then ")
    origin.write_origin(tmp_path, "cpu", "fp32")
    assert len(origins.read_origin(tmp_path)) == 2


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_what_ended_before_its_first_checkpoint_is_not_told_of(tmp_path, is_cut_short):
    earlier = {"processor": "one", "instructions": "AVX2", "torch": "2.9"}
    (tmp_path / "origin.json").write_text(json.dumps([earlier]))
    if is_cut_short:
        # Its last file is not there.
        (tmp_path / "save" / "CKPT+1").mkdir(parents=True)
    origin.write_origin(tmp_path, "cpu", "fp32")
    assert not origins.machines_of(origins.read_origin(tmp_path)).startswith("one")


def test_a_training_on_a_card_names_it():
    entry = {"processor": "one", "instructions": "AVX2", "torch": "2.9"}
    on_card = {**entry, "device": "NVIDIA H100"}
    assert origins.machines_of([on_card]) == "NVIDIA H100 and one, torch 2.9"
    assert origins.machines_of([{**entry, "device": "cpu"}]) == "one by AVX2, torch 2.9"


def test_what_was_found_of_one_is_known_before_the_next_is_done(whole, monkeypatch):
    write(whole, 1)
    told = []

    def train(wanted, *arguments, after, **options):
        for number, run in enumerate(wanted):
            assert len(told) == number
            train_the_same([run], *arguments, after=after, **options)

    monkeypatch.setattr(repetition, "train_all", train)
    monkeypatch.setattr(repetition, "memory_budget", lambda *_: "1MB")
    chosen = repeat.chosen_runs(whole, [1], None)
    found, _ = repeated(whole, chosen, after=told.append)
    assert told == found
    # Given again, what is done is told at once.
    monkeypatch.setattr(repetition, "train_all", train_the_same)
    repeated(whole, chosen, after=told.append)
    assert told == [*found, *found]


def test_one_that_fails_does_not_cost_what_was_found_of_others(whole, monkeypatch):
    write(whole, 1)

    def fail(wanted, *arguments, **options):
        train_the_same(wanted[:1], *arguments, **options)
        raise trainings.TrainingsFailed({wanted[1]: "It was ended."})

    monkeypatch.setattr(repetition, "train_all", fail)
    chosen = repeat.chosen_runs(whole, [1], ["resnet34", "revnet46"])
    found, failed = repeated(whole, chosen)
    assert [one["name"] for one in found] == ["resnet34, seed 1"]
    assert failed == ["It was ended."]


def test_what_was_known_of_other_trainings_and_machines_is_kept(whole):
    def of(name, machine, *differing):
        there = {"processor": machine, "instructions": "AVX2", "torch": "2.9"}
        there["since"] = str(next(days))
        origins = {"origin": [], "origin_again": [there], "differing_once_more": None}
        return {"name": name, "differing": list(differing), **origins}

    days = itertools.count()
    first = [of("a", "one"), of("b", "one", "weights")]
    then = [of("b", "one"), of("b", "two", "weights")]
    repeat.keep(whole.folder, first)
    repeat.keep(whole.folder, then)
    found = json.loads((whole.folder / "repeated.json").read_text())
    assert found == [first[0], *then]


def test_the_report_says_what_came_out_on_which_machine():
    def of(name, processor, *differing):
        here = {"processor": processor, "instructions": "AVX2", "torch": "2.9"}
        return {
            "name": name,
            "differing": list(differing),
            "distance_over_way": 0.5,
            "score_difference": 2e-6,
            "eer": {"easy": 0.1, "hard": 0.2},
            "eer_again": {"easy": 0.11, "hard": 0.2},
            "origin": [],
            "origin_again": [here],
        }

    again = [
        of("a", "one"),
        of("b", "one", "weights", "hard.txt"),
        of("d", "one", "hard.txt"),
        of("c", "two"),
    ]
    assert sentences.repetitions({"repeated": again}) == [
        "First on not written down, again on one by AVX2, torch 2.9: 1 of 3 trainings "
        "gave the same weights, to the last bit, and the same scores of all trials: a.",
        "b has other weights, 50 % of the way apart, and its EERs are 10.00 and 11.00 % on "
        "easy and 20.00 and 20.00 % on hard.",
        "d has the same weights, to the last bit, and scores that are off by up to 2e-06.",
        "First on not written down, again on two by AVX2, torch 2.9: 1 of 1 trainings "
        "gave the same weights, to the last bit, and the same scores of all trials: c.",
    ]
    once_more = [{**again[1], "differing_once_more": []}]
    assert sentences.repetitions({"repeated": once_more})[1].endswith(
        " on hard; trained there once more, it came out the same."
    )
    assert sentences.repetitions({"repeated": []})[0].startswith("None was")
