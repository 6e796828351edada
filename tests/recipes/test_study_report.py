"""Figures and report of the study: from made-up runs, and from the committed archive."""

import copy
import json
import re
import shutil
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from speechbrain_rev import scoring
from speechbrain_rev.sizes import MIB
from tests.recipes.study import ARCHIVE, STUDY, study

conditions, figures, report = study("conditions"), study("figures"), study("report")
paired = study("paired")
Condition = conditions.Condition
LISTS, SEEDS = ("veri_test", "veri_test_hard"), (11, 12, 13)
SPEAKERS, UTTERANCES = 12, 4
CONDITIONS = (
    Condition("resnet34"),
    Condition("revnet46", {}, ("resnet34",)),
    Condition("revnet46, 8 bit", {}, ("revnet46",)),
    Condition("revnet46, reconstructed", {}, ("revnet46",), "equal"),
)
#: By how much each knows speakers better, and from where on its chance is drawn: the one
#: that must be equal to revnet46 is.
TRUTH = dict(
    zip(CONDITIONS, [(0.0, 0), (0.0, 100), (-2.0, 200), (0.0, 100)], strict=True)
)


def made_up_trials():
    names = [f"id{s}/a/{u}.wav" for s in range(SPEAKERS) for u in range(UTTERANCES)]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    labels = [int(a.split("/")[0] == b.split("/")[0]) for a, b in pairs]
    return scoring.Trials(labels, *zip(*pairs, strict=True))


def write_scores(folder, better, seed, trials):
    """Scores of half the deviation that is the speakers', and half the seed's."""
    common, own = np.random.default_rng(0), np.random.default_rng(seed)
    (folder / "scores").mkdir(parents=True)
    for name in LISTS:
        noise = common.standard_normal(len(trials)) + own.standard_normal(len(trials))
        path = folder / "scores" / f"{name}.as_norm.txt"
        scoring.write_scores(path, trials, (3 + better) * trials.labels + noise)
    scored = {"model": f"{seed} {better}"}
    (folder / "scores" / "results.json").write_text(json.dumps(scored))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A study whose margins are stated, its results written, and its archive."""
    folder = tmp_path_factory.mktemp("study")
    whole = figures.Study(folder, CONDITIONS, SEEDS, LISTS, replicates=100)
    trials = made_up_trials()
    for name in figures.BASELINES:
        # No system here errs as often.
        write_scores(whole.baseline_folder(name), -2.5, 300, trials)
    for condition in CONDITIONS:
        better, first = TRUTH[condition]
        for seed in SEEDS:
            run = whole.run_folder(condition.name, seed)
            write_scores(run, better, first + seed, trials)
            epochs = '{"train_loss": 5, "train_accuracy_percent": 20}\n'
            epochs += '{"train_loss": 2.5, "train_accuracy_percent": 40}\n'
            (run / "train_log.jsonl").write_text(epochs)
        if not condition.references:
            figures.state_margins(whole)
    code = [
        {"processor": processor, "torch": "2.11", "since": f"2026-01-0{day}"}
        for day, processor in enumerate(("one", "other", "one"), start=1)
    ]
    contents = {
        "setting": {"seeds": SEEDS},
        "measures": {c.name: {"peak_bytes": 12_340_000} for c in CONDITIONS},
        "results": {"figures": figures.compute(whole), "setting": {"code": code}},
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    figures.pack(folder, folder / "study.tar.xz")
    return whole, contents["results"]["figures"]


def copied(whole, folder):
    """The same study in another folder, read anew."""
    shutil.copytree(whole.folder, folder, dirs_exist_ok=True)
    return figures.Study(folder, CONDITIONS, SEEDS, LISTS, replicates=100)


def eers(comparison):
    return [comparison["differences"][trials]["eer"] for trials in LISTS]


# ------------------------------------------------------------------ figures


def test_rates_are_those_of_the_files_of_scores_and_of_the_same_drawn_speakers(made):
    whole, computed = made
    for name, condition in computed["conditions"].items():
        for trials in LISTS:
            rate = condition["rates"][trials]["as_norm"]["eer"]
            draws = whole.rates(name, trials).draws
            for seed, drawn in zip(SEEDS, draws, strict=True):
                path = whole.run_folder(name, seed) / "scores" / f"{trials}.as_norm.txt"
                listed, scores = scoring.read_scores(path)
                assert rate["seeds"][str(seed)] == scoring.eer(scores, listed.labels)
                sides = (
                    [n.split("/")[0] for n in side]
                    for side in (listed.enrol, listed.test)
                )
                own = scoring.bootstrap(scores, listed.labels, *sides, replicates=100)
                assert np.array_equal(drawn, own.eer)
            values = list(rate["seeds"].values())
            assert rate["mean"] == pytest.approx(np.mean(values))
            assert rate["deviation"] == pytest.approx(np.std(values, ddof=1))
            assert rate["low"] < rate["high"]


@pytest.mark.parametrize(
    ("rate", "beyond", "end"), [(0.05, "low", 0), (0.95, "high", 1)]
)
def test_intervals_of_rates_are_of_what_rates_can_be(
    made, monkeypatch, rate, beyond, end
):
    spread = np.linspace(-0.3, 0.3, 200)
    system = paired.SeedRates(np.full(3, rate), np.tile(rate + spread, (3, 1)))
    monkeypatch.setattr(figures.Study, "rates", lambda *_: system)
    interval = figures._rates_of(made[0], "resnet34", "veri_test")
    whole = asdict(paired.rate_over_seeds(system))
    assert not 0 <= whole[beyond] <= 1
    assert {key: interval[key] for key in whole} == whole | {beyond: end}


def test_differences_are_those_of_paired_draws(made):
    whole, computed = made
    margins = json.loads((whole.folder / "margins.json").read_text())["margins"]
    for trials in LISTS:
        ours, theirs = (whole.rates(n, trials) for n in ("revnet46", "resnet34"))
        margin = margins["resnet34"][trials]["eer"]
        assert margin == paired.detectable_margin(theirs)
        expected = paired.rate_difference(ours, theirs, margin=margin)
        one = computed["comparisons"][0]["differences"][trials]["eer"]
        for key in ("mean", "low", "high", "upper", "margin", "p_value", "higher"):
            assert one[key] == getattr(expected, key)


def test_worse_equal_and_identical_conditions_are_told_apart(made):
    as_good, worse, same = made[1]["comparisons"]
    assert not any(verdict["higher"] for verdict in eers(as_good))
    for verdict in eers(worse):
        assert (verdict["within"], verdict["higher"]) == ("not shown", True)
    for verdict in eers(same):
        assert (verdict["within"], verdict["higher"], verdict["high"]) == (
            "yes",
            False,
            0,
        )
        assert verdict["p_value"] is verdict["p_holm"] is None
    assert [c["identical"] for c in (as_good, worse, same)] == [False, False, True]
    # A candidate's own candidates have the margin of its reference.
    assert {c["margin_of"] for c in (as_good, worse, same)} == {"resnet34"}


RATES = np.array([0.10, 0.11, 0.12])


def judged(higher_by=0.0, *, spread=0.001, baselines=(0.2,), **changed):
    """A verdict on a candidate whose seeds differ from the reference's by much the same."""
    draws = np.random.default_rng(0).standard_normal((3, 200))
    reference = paired.SeedRates(RATES, RATES[:, None] + 0 * draws)
    candidate = paired.SeedRates(
        reference.rates + higher_by, reference.draws + higher_by + spread * draws
    )
    given = {"margin": 0.02, "identical": False, "must_be_identical": False}
    # Speakers that err more or less do so with what needs no training, too.
    others = [
        paired.SeedRates(
            np.full(3, rate), rate + reference.draws - reference.rates[:, None]
        )
        for rate in baselines
    ]
    return figures.judged(candidate, reference, baselines=others, **given | changed)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ("yes", False, None, False)),
        # A rate may be higher and yet within the margin.
        ({"higher_by": 0.01}, ("yes", True, None, False)),
        ({"higher_by": 0.03}, ("not shown", True, None, False)),
        # Seeds are 0.01 apart: a mean of 0.11 and the margin are not shown to be below.
        ({"baselines": [0.1301]}, ("cannot tell", False, figures.BASELINE, False)),
        (
            {"margin": 0.4, "baselines": [0.9]},
            ("cannot tell", False, figures.CEILING, True),
        ),
        ({"identical": True}, ("cannot tell", False, figures.SAME_WEIGHTS, False)),
        # Equal weights that had to be equal hold whatever the margin.
        (
            {"spread": 0.0, "margin": 0.0, "baselines": [0.1]}
            | {"identical": True, "must_be_identical": True},
            ("yes", False, None, False),
        ),
        # A margin is wide beyond a fifth of the reference's rate.
        ({"margin": 0.0221}, ("yes", False, None, True)),
        ({"margin": 0.0219}, ("yes", False, None, False)),
    ],
)
def test_a_verdict_is_given_where_a_candidate_could_fail(changed, expected):
    verdict = judged(**changed)
    keys = ("within", "higher", "reason", "wide")
    assert tuple(verdict[key] for key in keys) == expected
    untested = verdict["reason"] is not None or changed.get("identical", False)
    assert (verdict["p_value"] is None) == untested
    margin = changed.get("margin", 0.02)
    assert verdict["margin_share"] == pytest.approx(margin / 0.11)


def test_p_values_are_corrected_for_all_tests_but_those_of_the_control(made, tmp_path):
    verdicts = [one for c in made[1]["comparisons"] for one in eers(c)]
    tested = [one for one in verdicts if one["p_value"] is not None]
    corrected = paired.holm([one["p_value"] for one in tested])
    assert [one["p_holm"] for one in tested] == corrected
    assert len(tested) == 4
    again = copied(made[0], tmp_path)
    worse = replace(CONDITIONS[2], claim="worse")
    again = replace(again, conditions=[*CONDITIONS[:2], worse])
    as_good, control = figures.compute(again)["comparisons"]
    assert control["control"]
    assert all(one["p_holm"] is None for one in eers(control))
    ps = [one["p_value"] for one in eers(as_good)]
    assert [one["p_holm"] for one in eers(as_good)] == paired.holm(ps)


def test_a_condition_that_lacks_a_run_costs_its_comparisons_alone(made, tmp_path):
    again = copied(made[0], tmp_path)
    shutil.rmtree(again.run_folder("revnet46, 8 bit", 12))
    computed = figures.compute(again)
    assert computed["unfinished"] == ["revnet46, 8 bit"]
    assert list(computed["conditions"]) == [
        "resnet34",
        "revnet46",
        "revnet46, reconstructed",
    ]
    pairs = [(c["candidate"], c["reference"]) for c in computed["comparisons"]]
    assert ("revnet46, reconstructed", "revnet46") in pairs
    assert len(pairs) == 2


def test_margins_are_of_the_references_alone_and_stay_once_stated(made, tmp_path):
    whole, _ = made
    again = copied(whole, tmp_path)
    path = tmp_path / "margins.json"
    before = path.read_bytes(), path.stat().st_mtime_ns
    stated = figures.state_margins(again)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert stated["made_of"]["weights"] == {"resnet34": again.digests("resnet34")}
    stated["made_of"]["weights"]["resnet34"]["12"] = "f00d"
    path.write_text(json.dumps(stated))
    with pytest.raises(
        ValueError, match="margins of other weights than the references"
    ):
        figures.state_margins(again)
    path.unlink()
    with pytest.raises(ValueError, match="but scores of revnet46: "):
        figures.state_margins(again)
    assert not path.exists()


def test_what_two_runs_do_not_share_is_named(made, tmp_path):
    again = copied(made[0], tmp_path)
    path = again.run_folder("resnet34", 12) / "scores" / "veri_test.as_norm.txt"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(ValueError, match=r"12.*veri_test.as_norm.txt has other trials"):
        again.rates("resnet34", "veri_test")
    one, other = (s.run_folder("revnet46", 11) for s in (made[0], again))
    assert figures.differing(one, other) == []
    with (other / "scores" / "veri_test.as_norm.txt").open("a") as file:
        file.write("\n")
    assert figures.differing(one, other) == ["veri_test.as_norm.txt"]
    (other / "scores" / "results.json").write_text('{"model": "f00d"}')
    assert figures.differing(one, other) == ["weights", "veri_test.as_norm.txt"]


# ------------------------------------------------------------------ the archive


def test_an_archive_holds_scores_and_figures_and_no_weights(made, tmp_path):
    whole, _ = made
    again = copied(whole, tmp_path / "again")
    (again.run_folder("revnet46", 11) / "embedding_model.ckpt").touch()
    figures.pack(again.folder, tmp_path / "study.tar.xz")
    # The same wherever it is.
    packed = tmp_path.joinpath("study.tar.xz").read_bytes()
    assert packed == (whole.folder / "study.tar.xz").read_bytes()
    with tarfile.open(tmp_path / "study.tar.xz") as tar:
        names = tar.getnames()
    assert "runs/revnet46_8_bit/12/scores/veri_test.as_norm.txt" in names
    assert "baseline/mean_and_deviation/scores/results.json" in names
    assert "margins.json" in names
    assert not [name for name in names if name.endswith(".ckpt")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "There is no file"),
        (b"nothing", "is damaged, or no archive"),
        (b"cut", "is damaged, or no archive"),
        (b"large", "more than 9 bytes"),
        (b"empty", "lacks measures.json, results.json, setting.json"),
    ],
)
def test_what_is_no_archive_is_refused_in_a_line(
    made, tmp_path, monkeypatch, content, words
):
    file, whole = tmp_path / "study.tar.xz", made[0].folder / "study.tar.xz"
    if content == b"large":
        monkeypatch.setattr(figures, "MAX_BYTES", 9)
    if content == b"empty":
        figures.pack(tmp_path, file)
    elif content:
        parts = {b"cut": whole.read_bytes()[:500], b"large": whole.read_bytes()}
        file.write_bytes(parts.get(content, content))
    with pytest.raises(ValueError, match=words) as caught:
        report.main([str(file)])
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ the report


def test_a_report_has_its_tables_and_pictures_beside_the_archive(made, tmp_path):
    archive = tmp_path / "study.tar.xz"
    shutil.copyfile(made[0].folder / archive.name, archive)
    report.main([str(archive)])
    text = (tmp_path / "report.md").read_text()
    assert text.count("\n| revnet46, 8 bit |") == 2
    assert "| 40 |" in text
    assert "| 11.8 |" in text
    pictures = re.findall(r"\]\((.*?)\)", text)
    names = ["study_differences_resnet34.png", "study_training_resnet34.png"]
    assert pictures == names
    assert all((tmp_path / name).stat().st_size > 10_000 for name in pictures)
    # On another page only the tables are written anew.
    page = tmp_path / "page.md"
    page.write_text(text.replace("# Study", "# Mine").replace("| 11.8 |", "| 9.9 |"))
    report.main([str(archive), f"--page={page}"])
    assert page.read_text() == text.replace("# Study", "# Mine")
    page.write_text("no place")
    with pytest.raises(ValueError, match="no place for the table study_compared"):
        report.main([str(archive), f"--page={page}"])


def test_differences_are_drawn_in_percentage_points_as_they_were_judged(
    made, monkeypatch
):
    drawn = {}
    for name in ("forest_plot", "curves_over_seeds"):
        monkeypatch.setattr(
            report,
            name,
            lambda panels, path, name=name, **words: drawn.update(
                {name: (panels, words)}
            ),
        )
    results = report.Results.of(made[0].folder / "study.tar.xz")
    report.draw(results, Path())
    panels, words = drawn["forest_plot"]
    margin, rows = panels["veri_test"]
    difference = made[1]["comparisons"][0]["differences"]["veri_test"]["eer"]
    assert margin == 100 * difference["margin"]
    assert (rows[0].mean, rows[0].bound) == (
        100 * difference["mean"],
        100 * difference["upper"],
    )
    assert [row.shown for row in rows] == [difference["within"] == "yes", False, True]
    assert rows[0].label == "revnet46 \N{MINUS SIGN} resnet34"
    assert words["source"].endswith(
        " one, torch 2.11; other, torch 2.11; since 2026-01-01."
    )
    panels, _ = drawn["curves_over_seeds"]
    assert panels["training loss"] == dict.fromkeys(
        ("resnet34", "revnet46"), [[5.0, 2.5]] * 3
    )
    # Where all candidates failed there is a table of references.
    only = {"resnet34": results.figures["conditions"]["resnet34"]}
    failed = {**results.figures, "conditions": only, "comparisons": []}
    results = replace(results, figures=failed)
    assert len(report.compared_table(results).splitlines()) == 2
    assert len(report.rates_table(results).splitlines()) == 4
    assert report.draw(results, Path()) == []


@pytest.mark.parametrize(
    ("changed", "judged_as", "verdict"),
    [
        ({}, {}, "yes"),
        ({}, {"p_holm": 0.049}, "**yes**"),
        ({}, {"wide": True, "higher": True}, "yes, wide, but worse"),
        ({}, {"within": "not shown", "wide": True, "higher": True}, "not shown"),
        ({"must_be_identical": True, "identical": True}, {}, "equal bits"),
        ({"must_be_identical": True, "identical": False}, {}, "NOT EQUAL"),
        ({"control": True}, {"higher": True}, "worse, as it must"),
        ({"control": True}, {}, "NOT SEEN"),
    ],
)
def test_a_verdict_says_no_more_than_was_shown(made, changed, judged_as, verdict):
    comparison = copy.deepcopy(made[1]["comparisons"][0]) | changed
    rate = {"within": "yes", "higher": False, "wide": False, "p_holm": 0.05}
    assert report._verdict(comparison, rate | judged_as) == verdict


# ------------------------------------------------------------------ the committed page

PAGE = STUDY.parents[1] / "docs" / "study.md"


def section(title):
    """A section of the page, without its tables."""
    text = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)


def evidence(name):
    """What was measured beside the runs, from the archive."""
    with tarfile.open(ARCHIVE) as tar:
        return json.load(tar.extractfile(f"{name}.json"))


def test_every_number_that_the_page_quotes_is_in_its_tables_or_the_archive():
    results = report.Results.of(ARCHIVE)
    tables = "".join(table(results) for table in report.TABLES.values())
    known = set(re.findall(r"\d+\.\d+", tables))
    ways = evidence("ways")
    for name in ("resnet34, recompute, 8 bit", "revnet46, reconstruct, 8 bit"):
        known.add(f"{ways[name]['peak_bytes'] / MIB:.1f}")
    for title in ("The answer", "What limits it"):
        quoted = re.findall(r"(?<!arXiv )(?<![\d.:])\d+\.\d+(?![\d.])", section(title))
        assert quoted
        assert set(quoted) - known == set(), title


def test_defaults_are_argued_by_what_the_archive_has():
    text, probes = section("What follows for the defaults"), evidence("probes")
    for layers, low, high in (("all", 0.95, 2.5), ("classifier", 2.5, 6.5)):
        errors = [
            100 * row["relative_error"]
            for row in probes["errors"]
            if (row["state"], row["layers"]) == ("next step", layers)
        ]
        assert low <= min(errors) <= max(errors) < high
    assert "AdamW differs by 1 to 2 % from that with 32-bit states, that of" in text
    assert "that of the classifier by 3 to 6 %" in text
    angles = [
        max(
            row["largest_degrees"]
            for row in probes["angles"]
            if (row["streams"], row["precision"], row["compared"])
            == ("float", precision, "reconstructed with stored")
        )
        for precision in ("fp32", "bf16")
    ]
    assert f"{angles[0]:.5f} degrees in float32 and {angles[1]:.2f} in bf16" in text
    same = sum(not one["differing"] for one in evidence("repeated"))
    words = f"{same} runs gave the same weights and\n  scores"
    assert words in section("What limits it")


@pytest.mark.slow(drawn=False)
def test_the_figures_of_the_committed_study_come_out_of_its_scores(tmp_path):
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(tmp_path, filter="data")
    then = json.loads((tmp_path / "results.json").read_text())["figures"]
    known = {one.name: one for one in conditions.CONDITIONS}
    assert list(known) == [*then["conditions"]]
    whole = figures.Study(tmp_path, list(known.values()), then["seeds"], LISTS)
    assert figures.state_margins(whole)["margins"] == then["margins"]["margins"]
    now = figures.compute(whole)
    for name, again in now["conditions"].items():
        assert again["weights"] == then["conditions"][name]["weights"]
        for trials in LISTS:
            rates = then["conditions"][name]["rates"][trials]["as_norm"]
            assert again["rates"][trials]["as_norm"]["eer"] == rates["eer"]
    pairs = {(c["candidate"], c["reference"]): c for c in now["comparisons"]}
    assert len(pairs) == len(then["comparisons"])
    for comparison in then["comparisons"]:
        again = pairs[comparison["candidate"], comparison["reference"]]
        for key in ("identical", "must_be_identical", "control", "margin_of"):
            assert again[key] == comparison[key]
        assert eers(again) == eers(comparison)
