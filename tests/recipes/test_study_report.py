"""The report of a study, from made-up runs whose truth is known."""

import copy
import json
import re
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from speechbrain_rev import scoring
from speechbrain_rev.inference.fingerprint import fingerprint_of
from tests.recipes.study import study as study_module

LISTS = ("veri_test", "veri_test_hard")
SEEDS = (11, 12, 13)
SPEAKERS, UTTERANCES = 12, 4

report = study_module("report.writing")
conditions = study_module("design.conditions")
document = study_module("report.document")
figures = study_module("results.figures")
pictures = study_module("report.pictures")
sentences = study_module("report.sentences")
setting_tables = study_module("report.setting_tables")
tables = study_module("report.tables")
runs = study_module("results.runs")
verdicts = study_module("results.verdicts")
Condition, Comparison = conditions.Condition, conditions.Comparison

STORED = {"mode": "store"}
CONDITIONS = (
    Condition("resnet34", "resnet34"),
    Condition("revnet46", "revnet46", STORED),
    Condition("revnet46, 8 bit", "revnet46", {**STORED, "optimizer_bits": 8}),
    Condition("revnet46, reconstructed", "revnet46", {"mode": "reconstruct"}),
)
NAMES = [condition.name for condition in CONDITIONS]
# By how much each knows speakers better, and from where on its chance is drawn: the mode
# that must be equal to revnet46 is.
SYSTEMS = dict(zip(NAMES, [(0.0, 0), (0.0, 100), (-2.0, 200), (0.0, 100)], strict=True))
COMPARISONS = (
    Comparison("Is revnet46 as accurate as resnet34?", "revnet46", "resnet34"),
    Comparison("Are 8 bits enough?", "revnet46, 8 bit", "revnet46"),
    Comparison("Is it equal?", "revnet46, reconstructed", "revnet46", identical=True),
)
SETTING = {
    "size": "small",
    "seeds": list(SEEDS),
    "widths": {"revnet46": [8, 16]},
    "conditions": [{"name": "revnet46", "settings": {"mode": "store"}}],
    "data": "/some/where/corpus",
    "code": [
        {"processor": processor, "torch": "2.11", "since": f"2026-01-0{day}"}
        for day, processor in enumerate(("one", "other", "one"), start=1)
    ],
}
SETTINGS = """arch: {arch}
widths: [{first}, 8, 8, 32]
blocks: null
n_mels: 24
embedding_dim: 32
sample_rate: 16000
optimizer_bits: {bits}
lr: 0.5
seed: {seed}
max_grad_norm: 5.0
train_list: /some/where/train_list.txt
"""


def made_up_trials():
    names = [f"id{s}/a/{u}.wav" for s in range(SPEAKERS) for u in range(UTTERANCES)]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    labels = [int(a.split("/")[0] == b.split("/")[0]) for a, b in pairs]
    return scoring.Trials(labels, *zip(*pairs, strict=True))


def write_study_run(folder, condition, better, seed, trials):
    """Scores of half the deviation that is the speakers', and half the seed's."""
    common, own = np.random.default_rng(0), np.random.default_rng(seed)
    (folder / "scores").mkdir(parents=True)
    for name in LISTS:
        noise = common.standard_normal(len(trials)) + own.standard_normal(len(trials))
        scores = (3 + better) * trials.labels + noise
        for method in runs.METHODS:
            path = folder / "scores" / f"{name}.{method}.txt"
            scoring.write_scores(path, trials, scores)
            scores = scores + 0.5 * own.standard_normal(len(trials))
    weights = {"w": torch.full((2,), float(seed) + better)}
    torch.save(weights, folder / "embedding_model.ckpt")
    scored = {"model": fingerprint_of(weights)}
    settings = SETTINGS.format(
        arch=condition.arch,
        first=8 if condition.arch == "resnet34" else 4,
        bits=condition.settings.get("optimizer_bits", 32),
        seed=seed,
    )
    (folder / "hyperparams.yaml").write_text(settings)
    (folder / "scores" / "results.json").write_text(json.dumps(scored))
    epochs = [
        {
            "epoch": i,
            "steps": 10 * i,
            "train_loss": 5 / i,
            "train_accuracy_percent": 20.0 * i,
            "minutes": 0.5,
            "process_resident_peak_bytes": 10**9 + i,
        }
        for i in (1, 2)
    ]
    lines = "".join(f"{json.dumps(epoch)}\n" for epoch in epochs)
    (folder / "train_log.jsonl").write_text(lines)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A study whose margins are stated, and its results."""
    folder = tmp_path_factory.mktemp("study")
    study = runs.Study(folder, CONDITIONS, COMPARISONS, SEEDS, LISTS, replicates=100)
    trials = made_up_trials()
    for name in runs.BASELINES:
        # No system here errs as often.
        path = runs.baseline_folder(folder, name)
        write_study_run(path, CONDITIONS[0], -2.5, 300, trials)
    for condition in CONDITIONS:
        better, first = SYSTEMS[condition.name]
        for seed in SEEDS:
            path = study.run_folder(condition.name, seed)
            write_study_run(path, condition, better, first + seed, trials)
        if condition.name == "resnet34":
            figures.state_margins(study, ["resnet34"])
    measures = {
        "resnet34": {
            "peak_bytes": 52_300_000,
            "optimizer_state_bytes": 1_900_000,
            "seconds_per_step": 0.25,
            "device": "cpu",
        }
    }
    (folder / "measures.json").write_text(json.dumps(measures))
    return study, report.write_report(study, SETTING)


def copied(study, folder):
    """The same study in another folder, read anew."""
    shutil.copytree(study.folder, folder, dirs_exist_ok=True)
    return runs.Study(
        folder, study.conditions, study.comparisons, SEEDS, LISTS, replicates=100
    )


#: Rates of drawn speakers that reports have computed, by the scores that they are of.
DRAWN = {}


def written(study):
    """Its results, without pictures; equal scores are drawn once."""

    def drawn_once(self, folder, trials, method, _draw=runs.Study._bootstrap):
        path = folder / "scores" / f"{trials}.{method}.txt"
        key = path.read_bytes(), self.replicates
        if key not in DRAWN:
            DRAWN[key] = _draw(self, folder, trials, method)
        return DRAWN[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", lambda *_: ([], []))
        patch.setattr(runs.Study, "_bootstrap", drawn_once)
        return report.write_report(study, SETTING)


def row_of(table, first):
    """The first row with a cell, by the table's heads."""
    heads, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
    )
    row = next(row for row in rows if row[0] == first)
    return dict(zip(heads, row, strict=True))


def test_rates_are_those_of_the_files_of_scores(made):
    study, results = made
    for name in SYSTEMS:
        for trials in LISTS:
            for method in runs.METHODS:
                found = results["figures"]["conditions"][name]["rates"][trials][method]
                for seed in SEEDS:
                    path = study.run_folder(name, seed) / "scores"
                    listed, scores = scoring.read_scores(
                        path / f"{trials}.{method}.txt"
                    )
                    rates = {
                        "eer": scoring.eer(scores, listed.labels),
                        "min_dcf_0.01": scoring.min_dcf(scores, listed.labels),
                        "min_dcf_0.05": scoring.min_dcf(
                            scores, listed.labels, p_target=0.05
                        ),
                    }
                    for rate, expected in rates.items():
                        assert found[rate]["seeds"][str(seed)] == expected
                for rate in rates:
                    values = list(found[rate]["seeds"].values())
                    assert found[rate]["mean"] == pytest.approx(np.mean(values))
                    assert found[rate]["deviation"] == pytest.approx(
                        np.std(values, ddof=1)
                    )
                    assert found[rate]["low"] < found[rate]["high"]


@pytest.mark.parametrize(
    ("rate", "beyond", "end"), [(0.05, "low", 0), (0.95, "high", 1)]
)
def test_intervals_of_rates_are_of_what_rates_can_be(
    made, monkeypatch, rate, beyond, end
):
    study, _ = made
    spread = np.linspace(-0.3, 0.3, 200)
    system = scoring.SeedRates([rate] * 2, [rate + spread] * 2)
    monkeypatch.setattr(runs.Study, "rates", lambda *_: {"eer": system})
    condition = figures._condition(replace(study, seeds=SEEDS[:2]), CONDITIONS[0])
    found = condition["rates"]["veri_test"]["as_norm"]["eer"]
    whole = asdict(scoring.rate_over_seeds(system))
    assert not 0 <= whole[beyond] <= 1
    assert {key: found[key] for key in whole} == whole | {beyond: end}


def test_all_runs_are_of_the_same_drawn_speakers(made):
    study, _ = made
    found = study.rates("revnet46", "veri_test", "cosine")
    for row, seed in enumerate(SEEDS):
        path = study.run_folder("revnet46", seed) / "scores" / "veri_test.cosine.txt"
        listed, scores = scoring.read_scores(path)
        speakers = (
            [n.split("/")[0] for n in side] for side in (listed.enrol, listed.test)
        )
        expected = scoring.bootstrap(scores, listed.labels, *speakers, replicates=100)
        assert np.array_equal(found["eer"].draws[row], expected.eer)
        for p, costs in expected.min_dcf.items():
            assert np.array_equal(found[f"min_dcf_{p}"].draws[row], costs)


def test_differences_are_those_of_paired_draws(made):
    study, results = made
    (first, *_) = results["figures"]["comparisons"]
    margins = json.loads((study.folder / "margins.json").read_text())
    for trials in LISTS:
        ours, theirs = (
            study.rates(name, trials, "as_norm")["eer"]
            for name in ("revnet46", "resnet34")
        )
        margin = margins["margins"]["resnet34"][trials]["eer"]
        assert margin == scoring.detectable_margin(theirs)
        expected = scoring.rate_difference(ours, theirs, margin=margin)
        found = first["differences"][trials]["eer"]
        for key in ("mean", "low", "high", "upper", "margin", "p_value", "higher"):
            assert found[key] == getattr(expected, key)


def test_worse_equal_and_identical_conditions_are_told_apart(made):
    study, results = made
    as_good, worse, same = results["figures"]["comparisons"]
    for trials in LISTS:
        assert not as_good["differences"][trials]["eer"]["higher"]
        found = worse["differences"][trials]["eer"]
        assert (found["within"], found["higher"]) == ("not shown", True)
        found = same["differences"][trials]["eer"]
        assert (found["within"], found["higher"], found["high"]) == ("yes", False, 0)
        assert found["p_value"] is found["p_holm"] is None
    assert [c["identical"] for c in (as_good, worse, same)] == [False, False, True]
    text = (study.folder / "report.md").read_text()
    assert "That revnet46, 8 bit is as accurate as revnet46 is not shown" in text
    assert "equal to the bit" in text
    assert "NOT equal" not in text


RATES = [0.10, 0.11, 0.12]


def judged(higher_by=0.0, *, spread=0.001, baselines=(0.2,), **changed):
    """A verdict on a candidate whose seeds differ from the reference's by much the same."""
    draws = np.random.default_rng(0).standard_normal((3, 200))
    reference = scoring.SeedRates(RATES, np.array(RATES)[:, None] + 0 * draws)
    candidate = scoring.SeedRates(
        reference.rates + higher_by, reference.draws + higher_by + spread * draws
    )
    given = {
        "rate": "eer",
        "margin": 0.02,
        "identical": False,
        "must_be_identical": False,
    }
    # Speakers that err more or less do so with what needs no training, too.
    baselines = [
        scoring.SeedRates([rate] * 3, rate + reference.draws - reference.rates[:, None])
        for rate in baselines
    ]
    return verdicts.judged(candidate, reference, baselines=baselines, **given | changed)


@pytest.mark.parametrize(
    ("higher_by", "within", "higher"),
    [(0.0, "yes", False), (0.01, "yes", True), (0.03, "not shown", True)],
)
def test_a_rate_may_be_higher_and_yet_within_the_margin(higher_by, within, higher):
    found = judged(higher_by)
    assert (found["within"], found["higher"]) == (within, higher)
    assert found["reason"] is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        # Seeds are 0.01 apart: a mean of 0.11 and the margin are not shown to be below.
        ({"baselines": [0.1301]}, verdicts.BASELINE),
        ({"baselines": [0.16]}, None),
        ({"baselines": [0.16, 0.1301]}, verdicts.BASELINE),
        ({"baselines": []}, verdicts.NO_BASELINE),
        ({"margin": 0.4, "baselines": [0.9]}, verdicts.CEILING),
        ({"margin": 0.4, "baselines": [0.9], "rate": "min_dcf_0.01"}, None),
        (
            {"margin": 0.9, "baselines": [2.0], "rate": "min_dcf_0.01"},
            verdicts.CEILING,
        ),
        ({"identical": True}, verdicts.SAME_WEIGHTS),
    ],
)
def test_nothing_can_be_told_where_no_candidate_could_fail(changed, reason):
    found = judged(**changed)
    assert found["reason"] == reason
    assert found["within"] == ("cannot tell" if reason else "yes")
    assert (found["p_value"] is None) == (reason is not None)


def test_weights_that_had_to_be_equal_and_are_hold_whatever_the_margin():
    same = {"identical": True, "must_be_identical": True}
    found = judged(spread=0.0, margin=0.0, baselines=[], **same)
    assert (found["within"], found["reason"]) == ("yes", None)


def test_a_margin_is_wide_beyond_a_fifth_of_the_reference_s_rate():
    assert judged(margin=0.0221)["wide"]
    found = judged(margin=0.0219)
    assert not found["wide"]
    assert found["margin_share"] == pytest.approx(0.0219 / 0.11)


def test_p_values_are_corrected_for_the_tests_of_one_rate(made):
    _, results = made
    for rate in runs.RATES:
        found = [
            differences[rate]
            for comparison in results["figures"]["comparisons"]
            for differences in comparison["differences"].values()
        ]
        tested = [one for one in found if one["p_value"] is not None]
        corrected = scoring.holm([one["p_value"] for one in tested])
        assert [one["p_holm"] for one in tested] == corrected
        if rate == "eer":
            assert len(tested) == sentences.tests(results) == 4


def test_barely_trained_references_show_nothing_and_the_first_line_says_so(
    made, tmp_path
):
    study, _ = made
    again = copied(study, tmp_path)
    statistics = runs.baseline_folder(tmp_path, "mean and deviation")
    scores = "scores/veri_test_hard.as_norm.txt"
    shutil.copy(study.run_folder("resnet34", SEEDS[0]) / scores, statistics / scores)
    results = written(again)
    system = study.rates("resnet34", "veri_test_hard", "as_norm")["eer"]
    mean, one = (f"{100 * rate:.2f}" for rate in (system.rates.mean(), system.rates[0]))
    first = (tmp_path / "report.md").read_text().splitlines()[0]
    assert first == (
        "On veri_test_hard this study shows nothing of revnet46 compared to resnet34: "
        "the reference is not shown to be better than what needs no training by more "
        f"than the margin (EER {mean} % and {one} %)."
    )
    answer = row_of(tables.answers_table(results), COMPARISONS[0].question)
    assert answer["veri_test_hard"] == "cannot tell"
    assert answer["veri_test"] != "cannot tell"


def test_a_report_of_some_of_the_seeds_says_so_first(made, tmp_path):
    study, results = made
    again = replace(copied(study, tmp_path), seeds=SEEDS[1:])
    found = written(again)
    text = (tmp_path / "report.md").read_text()
    assert text.splitlines()[0] == (
        "Seeds 12 and 13 of 11, 12 and 13 are there. Verdicts are those of all seeds; of "
        "some, intervals are wider, and answers may change with the others."
    )
    assert "Seeds 12, 13. Each number is the mean" in text
    rate = found["figures"]["conditions"]["revnet46"]["rates"]["veri_test"]["as_norm"]
    seeds = results["figures"]["conditions"]["revnet46"]["rates"]["veri_test"]
    wanted = {s: v for s, v in seeds["as_norm"]["eer"]["seeds"].items() if s != "11"}
    assert rate["eer"]["seeds"] == wanted
    assert found["figures"]["margins"] == results["figures"]["margins"]
    assert sentences.seeds_so_far(results) == []


def test_without_a_baseline_only_equal_weights_can_be_told(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    shutil.rmtree(tmp_path / "baseline")
    results = written(again)
    found = [
        [c["differences"][trials]["eer"]["within"] for trials in LISTS]
        for c in results["figures"]["comparisons"]
    ]
    assert found == [["cannot tell"] * 2, ["cannot tell"] * 2, ["yes"] * 2]
    text = (tmp_path / "report.md").read_text()
    assert "what needs no training was not scored" in text.splitlines()[0]
    assert (
        "None in EER, the primary measure, of which the study can tell nothing" in text
    )
    assert "every candidate is within" not in text


def test_a_control_is_to_be_worse_and_tests_nothing_else(made):
    _, results = made
    seen, unseen = copy.deepcopy(results), copy.deepcopy(results)
    seen["figures"]["comparisons"][1]["control"] = True
    unseen["figures"]["comparisons"][0]["control"] = True
    answers = row_of(tables.answers_table(seen), COMPARISONS[1].question)
    assert {answers[trials] for trials in LISTS} == {"yes"}
    assert "8 bit" not in " ".join(sentences.claims_not_shown(seen))
    assert sentences.what_cannot_be_told(seen) == []
    answers = row_of(tables.answers_table(unseen), COMPARISONS[0].question)
    assert {answers[trials] for trials in LISTS} == {"no"}
    told = sentences.what_cannot_be_told(unseen)
    assert all(
        f"On {trials} this study does not see" in " ".join(told) for trials in LISTS
    )
    assert len(told) == len(LISTS)
    for with_control in (seen, unseen):
        assert sentences.tests(with_control) == sentences.tests(results) - len(LISTS)


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        ({}, "yes"),
        ({"higher": True}, "yes (worse within the margin)"),
        (
            {"higher": True, "wide": True},
            "yes (worse within the margin, within a wide margin)",
        ),
        ({"within": "not shown"}, "not shown"),
        ({"within": "not shown", "higher": True}, "no, it is worse"),
        ({"within": "cannot tell", "higher": True}, "cannot tell"),
    ],
)
def test_an_answer_says_no_more_than_was_shown(made, found, answer):
    results = copy.deepcopy(made[1])
    for differences in results["figures"]["comparisons"][0]["differences"].values():
        differences["eer"] |= {"within": "yes", "higher": False, "wide": False} | found
    row = row_of(tables.answers_table(results), COMPARISONS[0].question)
    assert {row[trials] for trials in LISTS} == {answer}


def test_claims_that_are_not_shown_are_sentences(made):
    _, results = made
    held = copy.deepcopy(results)
    for comparison in held["figures"]["comparisons"]:
        for found in comparison["differences"].values():
            found["eer"] |= {"within": "yes", "higher": False, "wide": False}
            found["eer"] |= {"upper": 0.0, "margin": 0.02}
    assert sentences.claims_not_shown(held) == []
    text = document.report_of(held, [])
    assert "None in EER, the primary measure: every candidate is within" in text
    assert re.search(r"secondary, of 8 comparisons \d are within", text)
    (first, second, same) = held["figures"]["comparisons"]
    first["differences"]["veri_test"]["eer"] |= {
        "within": "not shown",
        "mean": 0.001,
        "upper": 0.03,
        "wide": True,
    }
    first["differences"]["veri_test_hard"]["eer"] |= {
        "within": "not shown",
        "higher": True,
        "mean": 0.02,
        "low": 0.005,
        "upper": 0.035,
    }
    second["differences"]["veri_test"]["eer"] |= {
        "higher": True,
        "mean": 0.01,
        "low": 0.005,
    }
    same["identical"] = False
    assert sentences.claims_not_shown(held) == [
        "revnet46, reconstructed does not end with the weights of revnet46, to whose last "
        "bit it should be equal.",
        "That revnet46 is as accurate as resnet34 is not shown on veri_test: its EER "
        "differs by 0.10 percentage points and may be up to 3.00 higher, which is not "
        "below the margin of 2.00, which is wide.",
        "That revnet46 is as accurate as resnet34 is not shown on veri_test_hard: its EER "
        "differs by 2.00 percentage points, at least 0.50 of them by the interval, and "
        "may be up to 3.50 higher, which is not below the margin of 2.00.",
    ]
    text = document.report_of(held, [])
    assert "NOT equal to the bit" in text
    assert (
        "The EER of revnet46, 8 bit on veri_test is higher than that of revnet46: by 1.00 "
        "percentage points, at least 0.50 of them" in text
    )


def test_what_was_tested_and_how_far_encoders_differ_is_said(made):
    study, results = made
    text = (study.folder / "report.md").read_text()
    assert "8-bit states are tested in mode store only." in text
    assert "precisions are tested with revnet46 only, at 32 bit." in text
    found = results["figures"]["conditions"]
    ours, theirs = (
        found[name]["encoder"]["parameters"] for name in ("revnet46", "resnet34")
    )
    assert abs(ours / theirs - 1) > 0.02
    assert f"revnet46 has {ours / theirs:.3f} times the parameters of resnet34" in text
    equal = copy.deepcopy(results)
    for condition in equal["figures"]["conditions"].values():
        condition["encoder"]["parameters"] = theirs
    assert "times the parameters" not in document.report_of(equal, [])


def test_the_share_at_8_bit_is_of_tensors_that_optimizers_store_so(made):
    study, results = made
    found = results["figures"]["conditions"]
    at_8_bit = study.encoder("revnet46, 8 bit")
    sizes = [
        tensor.numel()
        for tensor in runs.encoder_of(
            runs.run_settings(study.run_folder("revnet46, 8 bit", 11))
        ).parameters()
    ]
    large = [size for size in sizes if size >= 4096]
    assert 0 < len(large) < len(sizes)
    assert at_8_bit["share_at_8_bit"] == sum(large) / sum(sizes)
    assert found["revnet46"]["encoder"]["share_at_8_bit"] == 0
    row = row_of(tables.differences_table(results, ["eer"]), "revnet46, 8 bit")
    expected = f"{100 * sum(large) / sum(sizes):.0f}"
    assert row["at 8 bit, % of the encoder"] == expected
    assert row["parameters, of the reference's"] == "1.000"


def test_seeds_of_other_encoders_are_refused(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    path = again.run_folder("revnet46", 12) / "hyperparams.yaml"
    path.write_text(path.read_text().replace("[4, 8", "[8, 8"))
    with pytest.raises(ValueError, match="revnet46 are not of one encoder"):
        again.encoder("revnet46")


def test_tables_have_percent_costs_and_what_was_measured(made):
    _, results = made
    row = row_of(tables.conditions_table(results, "as_norm"), "resnet34")
    condition = results["figures"]["conditions"]["resnet34"]
    rates = condition["rates"]["veri_test"]["as_norm"]
    mean, low, high = (100 * rates["eer"][key] for key in ("mean", "low", "high"))
    assert row["veri_test: EER, %"] == f"{mean:.2f} [{low:.2f}, {high:.2f}]"
    assert row["veri_test: minDCF(0.01)"].startswith(
        f"{rates['min_dcf_0.01']['mean']:.3f}"
    )
    assert row["veri_test: SD of the EER over seeds, percentage points"] == (
        f"{100 * rates['eer']['deviation']:.2f}"
    )
    taken = tables.taken_table(results)
    assert row_of(taken, "resnet34") == {
        "condition": "resnet34",
        "parameters": f"{condition['encoder']['parameters']:,}",
        "at 8 bit, % of the encoder": "0",
        "minutes of a training": "1.00",
        "peak of a step's tensors, counted, MB": "52.3",
        "optimizer states, MB": "1.9",
        "s per step": "0.25",
    }
    assert row_of(taken, "revnet46")["s per step"] == ""
    on_cuda = copy.deepcopy(results)
    on_cuda["measured"]["resnet34"]["step"]["device"] = "cuda"
    assert "allocator's peak" in tables.taken_table(on_cuda)


def row_count(table):
    return len(table.splitlines()) - 2


def test_every_comparison_but_equal_ones_has_a_row_for_each_list_and_rate(made):
    _, results = made
    table = tables.differences_table(results, runs.RATES)
    assert row_count(table) == 2 * len(LISTS) * len(runs.RATES)
    assert row_count(tables.answers_table(results)) == len(COMPARISONS)


def test_the_setting_is_what_runs_have_in_common_a_row_for_each_value(made):
    study, results = made
    common = results["setting"]["common"]
    assert common["lr"] == 0.5
    # As train.yaml has it, and another for each seed or encoder.
    assert not {"max_grad_norm", "seed", "arch", "optimizer_bits"} & common.keys()
    text = (study.folder / "report.md").read_text()
    assert "/some/where" not in text
    for row in (
        r"common > train_list +\| train_list.txt",
        r"widths > revnet46 +\| 8, 16",
        r"seeds +\| 11, 12, 13",
        r"conditions +\| name revnet46, settings > mode store",
        r"data +\| corpus",
    ):
        assert re.search(rf"\n\| {row} +\|\n", text)
    assert "{" not in text


def test_plans_and_their_budget_are_shown(made, tmp_path):
    study, results = made
    assert "## Plans" not in document.report_of(results, [])
    again = copied(study, tmp_path)
    half = {"memory_budget": "12.5MB", "stored_bytes": 25_000_000, "halved": "memory"}
    (tmp_path / "budget.json").write_text(json.dumps(half))
    modes = {"a": "store", "b": "reconstruct", "c": "reconstruct"}
    plan = report.Plan(modes, None, 1, 1, 1, 1.0, {})
    plan.save(again.run_folder("revnet46, reconstructed", 12) / "plan.json")
    written(again)
    text = (tmp_path / "report.md").read_text()
    assert "The budget of plans is 12.5MB, that of half the memory" in text
    assert re.search(r"revnet46, reconstructed \| 12 +\| 1 store, 2 reconstruct", text)
    assert report.compare(study.folder, tmp_path) == []


def break_loss(folder):
    log = folder / "train_log.jsonl"
    log.write_text(log.read_text().replace("2.5", "NaN"))


def remove_weights(folder):
    remove_scores(folder)
    (folder / "embedding_model.ckpt").unlink()


def remove_scores(folder):
    (folder / "scores" / "results.json").unlink()


def break_weights(folder):
    remove_scores(folder)
    torch.save({"w": torch.full((2,), np.nan)}, folder / "embedding_model.ckpt")


@pytest.mark.parametrize(
    ("break_run", "reason"),
    [
        (break_weights, ".*this training has diverged"),
        (remove_weights, "its training has not ended, after 2 epochs"),
        (remove_scores, "it was not scored"),
    ],
)
def test_what_is_missing_of_a_run_is_told(made, tmp_path, break_run, reason):
    again = copied(made[0], tmp_path)
    break_run(again.run_folder("revnet46, 8 bit", 12))
    ((seed, told),) = again.unfinished("revnet46, 8 bit").items()
    assert seed == "12"
    assert re.match(reason, told)


@pytest.mark.parametrize(
    ("break_run", "reason"),
    [
        (break_loss, "seed 12: it diverged: its loss is nan in epoch 2"),
        (shutil.rmtree, "seed 12: its training has not ended, after 0 epochs"),
    ],
)
def test_a_run_that_failed_is_named_and_costs_its_comparisons_alone(
    made, tmp_path, break_run, reason
):
    study, results = made
    again = copied(study, tmp_path)
    break_run(again.run_folder("revnet46, 8 bit", 12))
    found = written(again)["figures"]
    text = (tmp_path / "report.md").read_text()
    words = "revnet46, 8 bit and revnet46 are not compared. Of revnet46, 8 bit, "
    assert re.search(words + reason, text)
    expected = results["figures"]["comparisons"]
    assert found["comparisons"][0]["identical"] == expected[0]["identical"]
    assert found["comparisons"][1]["differences"] == {}
    assert "revnet46, 8 bit" not in found["conditions"]
    assert re.search(r"Are 8 bits enough\? +\| revnet46, 8 bit +\| not answered", text)


def test_a_picture_that_cannot_be_drawn_does_not_cost_the_report(
    made, tmp_path, monkeypatch
):
    study, _ = made
    again = copied(study, tmp_path)

    def fail(*_, **__):
        # The report is there before any picture is drawn.
        assert "# Study" in (tmp_path / "report.md").read_text()
        raise OSError("no room")

    (tmp_path / "report.md").unlink()
    monkeypatch.setattr(pictures.plots, "curves_over_seeds", lambda *_, **__: None)
    monkeypatch.setattr(pictures.plots, "forest_plot", fail)
    results = report.write_report(again, SETTING, failed=["Probes were not made."])
    sentence = "differences_resnet34.png was not drawn: OSError: no room"
    assert results["failed"] == ["Probes were not made."]
    assert results["undrawn"] == [sentence]
    text = (tmp_path / "report.md").read_text()
    assert f"## What failed\n\n- Probes were not made.\n- {sentence}\n" in text
    assert "![](differences_resnet34.png)" not in text
    assert "![](training_resnet34.png)" in text
    # Drawn later, it has failed no more.
    monkeypatch.setattr(pictures.plots, "forest_plot", lambda *_, **__: None)
    results = report.write_report(again, SETTING, failed=results["failed"])
    assert (results["failed"], results["undrawn"]) == (["Probes were not made."], [])
    assert sentence not in (tmp_path / "report.md").read_text()


def test_pictures_are_beside_the_report_that_shows_them(made):
    study, _ = made
    text = (study.folder / "report.md").read_text()
    names = ("differences_resnet34", "training_resnet34", "training_revnet46")
    for name in names:
        assert f"![]({name}.png)" in text
        assert (study.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_differences_are_drawn_in_percentage_points_as_they_were_judged(
    made, monkeypatch
):
    study, results = made
    drawn = {}
    monkeypatch.setattr(
        pictures.plots, "forest_plot", lambda panels, *_, **__: drawn.update(panels)
    )
    comparisons = results["figures"]["comparisons"]
    pictures.draw_differences(comparisons, study.folder / "unused.png", "S")
    stated = results["figures"]["margins"]["margins"]["resnet34"]
    for trials in LISTS:
        margin, rows = drawn[trials]
        assert margin == 100 * stated[trials]["eer"]
        for row, comparison in zip(rows, comparisons, strict=True):
            found = comparison["differences"][trials]["eer"]
            assert row.shown == (found["within"] == "yes")
            ends = [100 * found[key] for key in ("mean", "low", "high")]
            assert [row.mean, row.low, row.high] == ends
        assert {row.shown for row in rows} == {True, False}


def test_what_never_repeats_is_no_figure(made):
    _, results = made
    taken = results["measured"]["resnet34"]["trainings"]["11"]
    assert taken == {
        "minutes": 1.0,
        "seconds_per_step": 3.0,
        "skipped_steps": 0,
        "process_resident_peak_bytes": 10**9 + 2,
    }
    assert results["setting"]["size"] == "small"
    assert {"processor", "torch", "date", "threads"} <= set(
        results["setting"]["report_written_on"]
    )
    words = json.dumps(results["figures"])
    for key in ("minutes", "peak_bytes", "seconds_per_step", "date", "stated_at"):
        assert f'"{key}"' not in words


def test_a_second_study_repeats_all_figures_whatever_it_took(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    log = again.run_folder("resnet34", 11) / "train_log.jsonl"
    log.write_text(log.read_text().replace('"minutes": 0.5', '"minutes": 0.7'))
    written(again)
    assert report.compare(study.folder, tmp_path) == []


def test_what_differs_between_two_studies_is_named(made, tmp_path):
    study, results = made
    other = copied(study, tmp_path)
    scored = other.run_folder("revnet46, reconstructed", 12) / "scores" / "results.json"
    scored.write_text(json.dumps({"model": fingerprint_of({"w": torch.zeros(2)})}))
    written(other)
    # It has p-values now, and with them all others another correction.
    first, second = (
        line
        for line in report.compare(study.folder, tmp_path)
        if "differences" not in line
    )
    assert first.startswith("conditions > revnet46, reconstructed > weights > 12: '")
    assert second == "comparisons > 2 > identical: True and False"
    changed = copy.deepcopy(results)
    del changed["figures"]["conditions"]["resnet34"]
    assert figures.what_differs(results, changed) == [
        "conditions > resnet34: only in the first"
    ]
    changed = copy.deepcopy(results)
    rates = changed["figures"]["conditions"]["resnet34"]["rates"]["veri_test"]
    rates["cosine"]["eer"]["seeds"]["13"] += 1e-16
    assert len(figures.what_differs(results, changed)) == 1


def test_margins_are_of_the_references_alone_and_stay_once_stated(made, tmp_path):
    study, results = made
    again = copied(study, tmp_path)
    path = tmp_path / "margins.json"
    before = path.read_bytes(), path.stat().st_mtime_ns
    stated = figures.state_margins(again, ["resnet34"])
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert stated == figures.read_margins(study)
    assert stated["made_of"]["weights"] == {"resnet34": again.digests("resnet34")}
    with pytest.raises(ValueError, match="states other margins"):
        figures.state_margins(again, ["resnet34", "revnet46"])
    assert figures.read_margins(again) == stated
    assert results["setting"]["margins_stated_at"] == stated["stated_at"]
    assert "stated_at" not in results["figures"]["margins"]


def test_margins_of_fewer_draws_stay_as_they_were_stated(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    path = tmp_path / "margins.json"
    stated = json.loads(path.read_text())
    del stated["made_of"]["draws"]
    for trials, rates in stated["margins"]["resnet34"].items():
        for rate in rates:
            of_seeds = again.rates("resnet34", trials, "as_norm")[rate]
            fewer = scoring.detectable_margin(of_seeds, draws=again.replicates)
            assert fewer != rates[rate]
            rates[rate] = fewer
    path.write_text(json.dumps(stated))
    assert figures.state_margins(again, ["resnet34"]) == stated
    assert json.loads(path.read_text()) == stated
    stated["margins"]["resnet34"]["veri_test"]["eer"] *= 1.1
    path.write_text(json.dumps(stated))
    with pytest.raises(ValueError, match="states other margins"):
        figures.state_margins(again, ["resnet34"])


def test_nothing_is_judged_by_margins_of_other_trainings(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    path = tmp_path / "margins.json"
    stated = json.loads(path.read_text())
    digest = stated["made_of"]["weights"]["resnet34"]["12"]
    stated["made_of"]["weights"]["resnet34"]["12"] = "f00d"
    path.write_text(json.dumps(stated))
    words = (
        f"resnet34 are of a training of seed 12 whose weights were f00d, .* {digest}"
    )
    with pytest.raises(ValueError, match=words):
        figures.compute_figures(again)


def test_margins_are_not_stated_once_a_candidate_has_scores(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    (tmp_path / "margins.json").unlink()
    with pytest.raises(ValueError, match="scores of revnet46, revnet46, 8 bit"):
        figures.state_margins(again, ["resnet34"])
    assert not (tmp_path / "margins.json").exists()
    for name in NAMES[1:]:
        shutil.rmtree(tmp_path / "runs" / again.condition(name).folder)
    margins = figures.state_margins(again, ["resnet34"])["margins"]
    assert margins == figures.read_margins(study)["margins"]


def test_a_candidate_s_own_candidates_have_the_margin_of_its_reference(made):
    study, results = made
    assert {c["margin_of"] for c in results["figures"]["comparisons"]} == {"resnet34"}
    stated = {"resnet34": {}}
    astray = Comparison("?", "revnet46, 8 bit", "revnet57")
    with pytest.raises(ValueError, match="No margin was stated for revnet57"):
        figures.margin_of(study, astray, stated)
    circle = [Comparison("?", "a", "b"), Comparison("?", "b", "a")]
    with pytest.raises(ValueError, match="No margin was stated for a, b"):
        figures.margin_of(replace(study, comparisons=circle), circle[0], stated)


def test_nothing_is_compared_before_margins_are_stated(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    (tmp_path / "margins.json").unlink()
    with pytest.raises(FileNotFoundError, match="stated"):
        written(again)
    with pytest.raises(ValueError, match="at least one"):
        figures.state_margins(again, [])


def test_runs_of_other_trials_are_refused(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    path = again.run_folder("resnet34", 12) / "scores" / "veri_test.as_norm.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match=r"12.*veri_test.as_norm.txt has other trials"):
        again.rates("resnet34", "veri_test", "as_norm")


def test_measures_of_other_conditions_are_refused(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    (tmp_path / "measures.json").write_text(json.dumps({"resnet35": {}}))
    with pytest.raises(ValueError, match="resnet35"):
        report.measured(again)


def test_a_comparison_of_an_unknown_condition_is_refused(made):
    study, _ = made
    wrong = replace(study, comparisons=(Comparison("?", "resnet35", "resnet34"),))
    with pytest.raises(
        ValueError, match="no condition 'resnet35'; there are 'resnet34'"
    ):
        wrong.run_folder("resnet35", 11)


def test_what_a_study_was_run_on_is_told_and_not_who_writes_its_report(made):
    _, results = made
    assert (
        setting_tables.trained_on(results["setting"])
        == "one, torch 2.11; other, torch 2.11; since 2026-01-01."
    )


def test_each_part_of_the_setting_is_told_once(made):
    _, results = made
    table = setting_tables.setting_table(results)
    names = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert "report written on > torch" in names
    assert not [name for name in names if name.startswith("report_written_on")]
    assert {name for name in names if names.count(name) > 1} <= {"conditions", "code"}


def test_steps_that_were_skipped_are_told(made):
    _, results = made
    results = copy.deepcopy(results)
    assert "skipped" not in " ".join(sentences.notes(results))
    results["measured"]["revnet46"]["trainings"]["11"]["skipped_steps"] = 3
    (told,) = [note for note in sentences.notes(results) if "skipped" in note]
    assert told.startswith("revnet46, seed 11, skipped 3 steps")


@pytest.mark.parametrize("halved", ["memory", "activations"])
def test_a_plan_at_more_than_half_the_memory_is_told(made, halved):
    _, results = made
    results = copy.deepcopy(results)
    results["budget"] = {"halved": halved}
    results["figures"]["conditions"]["revnet46, reconstructed"]["half_memory"] = True
    told = [note for note in sentences.notes(results) if "No plan could" in note]
    assert bool(told) == (halved == "activations")
    assert all("that of revnet46, reconstructed takes half" in note for note in told)


def test_what_was_trained_again_is_told_of_the_weights_that_there_are(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    entry = {
        "differing": [],
        "distance_over_way": 0.0,
        "origin": [],
        "origin_again": [],
    }
    digest = again.digest("resnet34", 11)
    known = [
        {"name": "resnet34, seed 11", "weights": digest, **entry},
        {"name": "revnet46, seed 11", "weights": "of another training", **entry},
    ]
    (tmp_path / "repeated.json").write_text(json.dumps(known))
    assert [one["name"] for one in written(again)["repeated"]] == ["resnet34, seed 11"]


def test_it_is_told_which_machines_did_which_trainings(made, tmp_path):
    study, _ = made
    again = copied(study, tmp_path)
    begun = {"processor": "one", "instructions": "AVX2", "torch": "2.11"}
    folder = again.run_folder("revnet46", 12)
    (folder / "origin.json").write_text(
        json.dumps([begun, {**begun, "processor": "other"}])
    )
    found = written(again)["machines"]
    moved = "one by AVX2, torch 2.11, then other by AVX2, torch 2.11"
    assert found.pop(moved) == {"12": ["revnet46"]}
    (unknown,) = found
    assert unknown == "not written down"
    assert found[unknown]["11"] == NAMES
    assert found[unknown]["12"] == [name for name in NAMES if name != "revnet46"]
    assert f"| {moved} | 12 " in (tmp_path / "report.md").read_text()
