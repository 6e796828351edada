"""Trainings of a study that come out otherwise on this machine, and are done once more."""

import json
import shutil

import pytest

from tests.recipes.study import study
from tests.recipes.tiny_study import tiny_size

conditions, runs, repetition = (
    study("design.conditions"),
    study("results.runs"),
    study("running.repetition"),
)
repeat, origin = study("repeat"), study("running.origin")
CONDITIONS = [
    conditions.Condition("resnet34", "resnet34"),
    conditions.Condition("revnet46", "revnet46"),
    conditions.Condition("revnet46, planned", "revnet46", half_memory=True),
]


class Machine:
    """What stands for trainings: of resnet34 it makes what the study has.

    Of others the weights and scores of the second and third training are those given.
    """

    def __init__(self, *outcomes):
        self.outcomes = outcomes
        self.trained = []
        self.here = {"processor": "one", "torch": "2.9", "commit": "a", "told": {}}

    def origin_of(self, device, precision):
        return dict(self.here)

    def train_all(self, wanted, settings, size, hparams, *, jobs, proven, after):
        for run in wanted:
            if run.is_done:
                continue
            place = run.folder.parts.count("repeated")
            assert proven == (place == 2)
            budget = run.settings.get("memory_budget")
            self.trained.append((run.condition.name, place, budget))
            run.folder.mkdir(parents=True)
            origin.write_origin(run.folder, "cpu", "fp32")
            same = run.condition.arch == "resnet34"
            write(run.folder, *(("f00d", "1") if same else self.outcomes[place - 1]))
            after(run, [])


def write(folder, weights, target):
    (folder / "scores").mkdir(parents=True)
    (folder / runs.SCORED).write_text(json.dumps({"model": weights}))
    lines = f"a/1 a/2 1 {target}\na/1 b/1 0 0\na/2 b/1 0 0.5\n"
    (folder / "scores" / "easy.as_norm.txt").write_text(lines)


@pytest.fixture
def whole(tmp_path):
    whole = runs.Study(tmp_path, CONDITIONS, [], (1,), ("easy",))
    for condition in CONDITIONS:
        write(whole.run_folder(condition.name, 1), "f00d", "1")
    return whole


@pytest.fixture
def machine(monkeypatch):
    machine = Machine(("beef", "1"), ("beef", "1"))
    monkeypatch.setattr(repetition, "train_all", machine.train_all)
    monkeypatch.setattr(repetition, "origin_of", machine.origin_of)
    monkeypatch.setattr(origin, "origin_of", machine.origin_of)
    monkeypatch.setattr(repetition, "memory_budget", lambda *_: "1MB")
    return machine


def repeated(whole, *names, twice=True):
    """Repeat trainings, keep what is found, and give it."""
    chosen = repeat.chosen_runs(whole, [1], names or None)
    found, failed = repetition.repeat(
        whole,
        chosen,
        {"device": "cpu"},
        tiny_size(),
        None,
        jobs=1,
        twice=twice,
        after=lambda one: repeat.keep(whole.folder, [one]),
    )
    assert failed == []
    return found


def kept(whole):
    """Read what was found so far."""
    return json.loads((whole.folder / "repeated.json").read_text())


@pytest.mark.parametrize(
    ("third", "differing", "words"),
    [
        (("beef", "1"), [], "the same"),
        (("dead", "1"), ["weights"], "with other weights"),
        (("beef", "1.5"), ["easy.as_norm.txt"], "with other scores"),
    ],
)
def test_only_what_comes_out_otherwise_is_trained_once_more(
    whole, machine, third, differing, words
):
    machine.outcomes = (("beef", "1"), third)
    found = repeated(whole)
    assert machine.trained == [
        ("resnet34", 1, None),
        ("revnet46", 1, None),
        ("revnet46, planned", 1, "1MB"),
        ("revnet46", 2, None),
        ("revnet46, planned", 2, "1MB"),
    ]
    assert [one["differing_once_more"] for one in found] == [None, differing, differing]
    assert repeat.told(found[0]) == "the same weights and scores"
    assert kept(whole) == found
    told = f"; trained there once more, it came out {words}"
    assert repeat.told(found[1]).endswith(told)
    assert repeated(whole) == found
    assert len(machine.trained) == 5


def test_without_twice_nothing_is(whole, machine):
    (found,) = repeated(whole, "revnet46", twice=False)
    assert (found["differing"], found["differing_once_more"]) == (["weights"], None)
    assert machine.trained == [("revnet46", 1, None)]
    assert repeat.told(found).endswith("easy 0.00 and 0.00")


@pytest.mark.parametrize("key", ["processor", "commit"])
@pytest.mark.parametrize("twice_before", [False, True])
def test_trainings_of_two_machines_or_codes_say_nothing_of_one(
    whole, machine, key, twice_before
):
    before = repeated(whole, "revnet46", twice=twice_before)
    machine.here[key] = "another"
    if not twice_before:
        words = (
            rf"repeated/runs/revnet46/1 was .* elsewhere: {key} was .* and is another"
        )
        with pytest.raises(ValueError, match=words):
            repeated(whole, "revnet46")
    else:
        # Both are of there.
        assert repeated(whole, "revnet46") == before
    assert kept(whole) == before
    shutil.rmtree(whole.folder / "repeated" / "runs" / "revnet46" / "1")
    machine.outcomes = (("dead", "1"), ("dead", "1"))
    if twice_before:
        with pytest.raises(
            ValueError, match=r"repeated/repeated/.* was trained by other"
        ):
            repeated(whole, "revnet46")
        assert kept(whole)[-1]["differing_once_more"] is None
        shutil.rmtree(whole.folder / "repeated" / "repeated")
    (found,) = repeated(whole, "revnet46")
    assert found["differing_once_more"] == []
    assert kept(whole)[-1] == found


@pytest.mark.parametrize(("weights", "known"), [("beef", []), ("dead", None)])
def test_what_is_known_stays_where_the_same_comes_out_without_the_folders(
    whole, machine, weights, known
):
    repeated(whole, "revnet46")
    shutil.rmtree(whole.folder / "repeated")
    machine.outcomes = ((weights, "1"),)
    repeated(whole, "revnet46", twice=False)
    (found,) = kept(whole)
    assert found["differing_once_more"] == known
