import json
import sys

import numpy as np
import pytest

from speechbrain_rev import scoring
from speechbrain_rev.inference import EmbeddingArchive
from speechbrain_rev.inference.export import CardFacts, model_card
from speechbrain_rev.inference.run_folder import read_results
from speechbrain_rev.scoring.metrics import MEASURES, Measure, lowest_cost
from tests.corpus import write_corpus
from tests.recipes.runs import recipe
from tests.run_folders import write_run, write_scorable_run

SPEAKERS, UTTERANCES, DIM = 12, 4, 8


def archives(folder, *, noise=0.3, offset=0.0, fingerprint="one"):
    """Embeddings around a direction per speaker; half of the speakers are trained on."""
    draw = np.random.default_rng(3)
    voices = np.repeat(draw.standard_normal((SPEAKERS, DIM)), UTTERANCES, axis=0)
    rows = voices + noise * draw.standard_normal(voices.shape) + offset
    names = [f"s{i // UTTERANCES:02d}/{i % UTTERANCES}" for i in range(len(rows))]
    half = len(rows) // 2
    for name, part in (("trials", slice(half)), ("cohort", slice(half, None))):
        archive = EmbeddingArchive(
            tuple(names[part]), rows[part].astype(np.float32), fingerprint
        )
        archive.save(folder / "embeddings" / f"{name}.npz")
    return names[:half], {name: name[:3] for name in names[half:]}


def write_trials(path, names):
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    lines = [f"{int(a[:3] == b[:3])} {a} {b}\n" for a, b in pairs]
    path.write_text("".join(lines))
    return path


@pytest.fixture
def folder(tmp_path):
    names, speakers = archives(tmp_path)
    return tmp_path, write_trials(tmp_path / "trials.txt", names), speakers


def by_method(report):
    return {(row["trials"], row["method"]): row for row in report["results"]}


def test_figures_are_those_of_the_scoring_functions(folder):
    path, trials, speakers = folder
    report = recipe("score").score(path, [trials], speakers, cohort_top_n=4)
    listed = scoring.read_trials(trials)
    tested, cohort = (
        EmbeddingArchive.load(path / "embeddings" / f"{name}.npz")
        for name in ("trials", "cohort")
    )
    enrol, test = listed.rows(tested.names)
    _, means = scoring.speaker_means(
        cohort.embeddings, [speakers[name] for name in cohort.names]
    )
    mean, std = scoring.cohort_statistics(tested.embeddings, means, top_n=4)
    cosine = scoring.cosine_trials(tested.embeddings, enrol, test)
    expected = {
        "cosine": cosine,
        "as_norm": scoring.as_norm(
            cosine, mean[enrol], std[enrol], mean[test], std[test]
        ),
    }
    for method, scores in expected.items():
        row = by_method(report)["trials", method]
        assert row["eer"] == scoring.eer(scores, listed.labels)
        for p in (0.01, 0.05):
            cost = scoring.min_dcf(scores, listed.labels, p_target=p)
            assert row["min_dcf"][str(p)] == cost
        assert (row["targets"], row["impostors"]) == (
            int(listed.labels.sum()),
            int((1 - listed.labels).sum()),
        )
        written = np.loadtxt(path / "scores" / f"trials.{method}.txt", usecols=(2, 3))
        assert np.array_equal(written[:, 0], listed.labels)
        assert np.allclose(written[:, 1], scores, atol=1e-6)


def test_thresholds_have_the_rates_that_they_are_named_after(folder):
    path, trials, speakers = folder
    report = recipe("score").score(path, [trials], speakers, cohort_top_n=4)
    for row in report["results"]:
        labels, scores = np.loadtxt(
            path / "scores" / f"trials.{row['method']}.txt", usecols=(2, 3)
        ).T
        threshold = row["thresholds"]["EER"]
        rates = [(scores[labels == 0] >= threshold).mean()]
        rates.append((scores[labels == 1] < threshold).mean())
        # No threshold has two rates that are nearer than a trial of either kind.
        step = 1 / row["targets"] + 1 / row["impostors"]
        assert np.abs(np.array(rates) - row["eer"]).max() <= step
        for p in (0.01, 0.05):
            threshold = row["thresholds"][f"minDCF({p})"]
            accepted = scores >= (np.inf if threshold is None else threshold)
            cost = p * (~accepted[labels == 1]).mean()
            cost += (1 - p) * accepted[labels == 0].mean()
            assert cost / min(p, 1 - p) == pytest.approx(row["min_dcf"][str(p)])


def test_results_and_pictures_are_written(folder):
    path, trials, speakers = folder
    report = recipe("score").score(path, [trials], speakers, cohort_top_n=4)
    assert json.loads((path / "scores" / "results.json").read_text()) == report
    assert (path / "scores" / "det.png").read_bytes().startswith(b"\x89PNG")
    assert report["model"] == "one"
    assert report["cohort"] == {"speakers": SPEAKERS // 2, "top_n": 4}


def test_without_matplotlib_the_figures_are_there_and_the_missing_picture_is_said(
    folder, capsys, monkeypatch
):
    path, trials, speakers = folder
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = recipe("score").score(path, [trials], speakers)
    assert json.loads((path / "scores" / "results.json").read_text()) == report
    assert not (path / "scores" / "det.png").exists()
    assert "det.png is not drawn" in capsys.readouterr().out


def test_several_lists_are_scored_in_one_run_under_names_of_their_own(folder):
    path, trials, speakers = folder
    (path / "hard").mkdir()
    hard = path / "hard" / "trials.txt"
    lines = trials.read_text().splitlines(keepends=True)
    hard.write_text("".join(lines[: len(lines) // 2]))
    easy = path / "easy.txt"
    easy.write_text("".join(lines[::2]))
    report = recipe("score").score(path, [trials, hard, easy], speakers)
    names = {row["trials"] for row in report["results"]}
    assert len(report["results"]) == 6
    assert len(names) == 3
    assert "easy" in names
    assert len(list((path / "scores").glob("*.txt"))) == 6


def test_a_cohort_smaller_than_asked_for_is_used_whole_and_said(folder, capsys):
    path, trials, speakers = folder
    report = recipe("score").score(path, [trials], speakers)
    assert report["cohort"]["top_n"] == SPEAKERS // 2
    assert "6 instead of 600" in capsys.readouterr().out
    recipe("score").score(path, [trials], speakers, cohort_top_n=5)
    assert "instead of" not in capsys.readouterr().out


def test_subtracting_the_training_mean_repairs_shifted_embeddings(tmp_path):
    names, speakers = archives(tmp_path, noise=1.0, offset=20.0)
    trials = write_trials(tmp_path / "trials.txt", names)
    score = recipe("score").score
    shifted = score(tmp_path, [trials], speakers)
    centred = score(tmp_path, [trials], speakers, subtract_mean=True)
    assert (shifted["subtract_mean"], centred["subtract_mean"]) == (False, True)
    key = "trials", "cosine"
    assert by_method(centred)[key]["eer"] < by_method(shifted)[key]["eer"]
    rows = EmbeddingArchive.load(tmp_path / "embeddings" / "cohort.npz").embeddings
    tested = EmbeddingArchive.load(tmp_path / "embeddings" / "trials.npz")
    listed = scoring.read_trials(trials)
    scores = scoring.cosine_trials(
        tested.embeddings - rows.mean(axis=0), *listed.rows(tested.names)
    )
    expected = scoring.eer(scores, listed.labels)
    assert by_method(centred)[key]["eer"] == pytest.approx(expected)


def test_the_table_prints_percent(folder):
    path, trials, speakers = folder
    module = recipe("score")
    report = module.score(path, [trials], speakers)
    report["results"][0] |= {"eer": 0.12345}
    header, first, second = module.table(report).splitlines()
    assert "EER %" in header
    assert first.split()[:3] == ["trials", "cosine", "12.35"]
    assert second.split()[1] == "as_norm"


def test_rates_have_intervals_of_speakers_where_names_tell_them(folder, capsys):
    path, trials, speakers = folder
    script = recipe("score")
    report = script.score(path, [trials], speakers, cohort_top_n=4, replicates=50)
    for row in report["results"]:
        low, high = row["eer_95"]
        assert low <= row["eer"] <= high
        assert row["min_dcf_95"].keys() == row["min_dcf"].keys()
    shown = f"[{100 * low:.2f}, {100 * high:.2f}]"
    assert shown in script.table(report).splitlines()[-1]
    report = script.score(path, [trials], speakers, cohort_top_n=4, replicates=0)
    assert "[" not in script.table(report)
    assert "eer_95" not in report["results"][0]


def test_a_file_of_scores_gives_the_metrics_again(folder, capsys):
    path, trials, speakers = folder
    script = recipe("score")
    report = script.score(path, [trials], speakers, cohort_top_n=4, replicates=20)
    file = path / "scores" / "trials.as_norm.txt"
    script.main(["--from_scores", str(file), "--bootstrap", "20"])
    (row,) = json.loads((path / "scores/trials.as_norm.txt.json").read_text())[
        "results"
    ]
    expected = by_method(report)["trials", "as_norm"]
    assert row["eer"] == pytest.approx(expected["eer"], abs=1e-5)
    assert row["eer_95"] == pytest.approx(expected["eer_95"], abs=1e-5)
    assert (path / "scores/trials.as_norm.txt.png").stat().st_size > 10_000
    assert f"{100 * row['eer']:.2f} [" in capsys.readouterr().out


def test_names_without_speakers_have_no_intervals(tmp_path, capsys):
    file = tmp_path / "scores.txt"
    file.write_text("a b 1 0.5\na c 0 0.25\n")
    (row,) = recipe("score").score_file(file)["results"]
    assert (row["eer"], "eer_95" in row) == (0.0, False)
    assert "No intervals" in capsys.readouterr().out


def test_names_that_begin_otherwise_cost_the_intervals_alone(tmp_path, capsys):
    file = tmp_path / "scores.txt"
    file.write_text("wav/a/1 wav/a/2 1 0.5\nwav/a/1 wav/b/1 0 0.25\n")
    (row,) = recipe("score").score_file(file)["results"]
    assert (row["eer"], "eer_95" in row) == (0.0, False)
    assert "(--bootstrap 0)" in capsys.readouterr().out


def test_a_run_or_a_file_of_scores_is_asked_for(tmp_path, capsys):
    for argv in ([], [str(tmp_path), "--from-scores", "scores.txt"]):
        with pytest.raises(SystemExit):
            recipe("score").main(argv)
    assert "not allowed with" in capsys.readouterr().err


def test_an_utterance_without_an_embedding_is_named(folder):
    path, trials, speakers = folder
    with trials.open("a") as file:
        file.write("0 s00/0 s99/0\n")
    with pytest.raises(ValueError, match="s99/0"):
        recipe("score").score(path, [trials], speakers)


def test_a_cohort_without_some_training_speaker_is_refused(folder):
    path, trials, speakers = folder
    with pytest.raises(ValueError, match=r"1 training speakers .*s99.*extract\.py"):
        recipe("score").score(path, [trials], {**speakers, "s99/0": "s99"})


def test_embeddings_that_are_not_of_the_training_set_are_no_cohort(folder):
    path, trials, speakers = folder
    some = {name: speaker for name, speaker in speakers.items() if speaker != "s11"}
    report = recipe("score").score(path, [trials], some)
    assert report["cohort"]["speakers"] == SPEAKERS // 2 - 1


def test_a_malformed_list_is_named_with_its_line(folder):
    path, trials, speakers = folder
    with trials.open("a") as file:
        file.write("2 s00/0 s00/1\n")
    lines = len(trials.read_text().splitlines())
    with pytest.raises(ValueError, match=rf"trials\.txt, line {lines}"):
        recipe("score").score(path, [trials], speakers)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), seconds=0.4)


@pytest.fixture
def run(tmp_path, data):
    run = write_scorable_run(tmp_path / "run", data)
    recipe("extract").main([str(run), "--device=cpu"])
    return run


def test_a_run_is_scored_on_its_lists_and_its_speakers_at_their_own_speed(run, capsys):
    recipe("score").main([str(run)])
    report = json.loads((run / "scores" / "results.json").read_text())
    assert {row["trials"] for row in report["results"]} == {"one", "other"}
    # 4 speakers, though speed perturbation trained 12 classes.
    assert report["cohort"] == {"speakers": 4, "top_n": 4}
    assert "EER %" in capsys.readouterr().out


def test_options_replace_the_run_s_settings(run):
    lists = ["--trials", str(run / "one.txt")]
    recipe("score").main([str(run), *lists, "--cohort_top_n=3", "--subtract_mean"])
    report = json.loads((run / "scores" / "results.json").read_text())
    assert {row["trials"] for row in report["results"]} == {"one"}
    assert report["cohort"]["top_n"] == 3
    assert report["subtract_mean"]


def test_embeddings_of_earlier_weights_are_refused(run):
    write_run(run / "other", seed=1)
    (run / "other" / "embedding_model.ckpt").replace(run / "embedding_model.ckpt")
    with pytest.raises(ValueError, match=r"other weights.*extract\.py again"):
        recipe("score").main([str(run)])


def test_scoring_before_extracting_says_what_to_run(tmp_path, data):
    run = write_scorable_run(tmp_path / "run", data)
    with pytest.raises(FileNotFoundError, match=r"extract\.py"):
        recipe("score").main([str(run)])


def test_two_speakers_have_no_interval(tmp_path, capsys):
    file = tmp_path / "scores.txt"
    file.write_text("a/1 a/2 1 0.5\na/1 b/1 0 0.25\nb/1 b/2 1 0.125\n")
    (row,) = recipe("score").score_file(file)["results"]
    assert "eer_95" not in row
    said = capsys.readouterr().out
    assert (
        "No intervals: the list has 2 speaker(s), of whom each draw has the same"
        in said
    )
    assert "(--bootstrap 0)" in said


@pytest.mark.parametrize("top_n", ["0", "-1", "1"])
def test_a_cohort_of_too_few_speakers_is_refused_and_not_the_run_s_taken(run, top_n):
    with pytest.raises(ValueError, match=f"top_n is {top_n}, but the cohort has"):
        recipe("score").main([str(run), f"--cohort_top_n={top_n}"])


def cllr(curve):
    """Cost of log-likelihood ratios: Brümmer and du Preez, 2006, equation 11."""
    scores = curve.thresholds[:-1]
    targets, impostors = np.diff(curve.miss), -np.diff(curve.false_alarm)
    costs = targets * np.logaddexp(0, -scores), impostors * np.logaddexp(0, scores)
    return float(np.sum(costs) / (2 * np.log(2)))


NEW_MEASURES = [
    Measure("cllr", "Cllr", cllr),
    Measure("cllr", "Cllr", cllr, bootstrapped=False, digits=1, percent=True),
    lowest_cost(0.2),
]


@pytest.mark.parametrize("measure", NEW_MEASURES)
def test_a_measure_is_one_row_that_all_places_show(folder, monkeypatch, measure):
    path, trials, speakers = folder
    script = recipe("score")
    before = script.score(path, [trials], speakers, cohort_top_n=4, replicates=20)
    monkeypatch.setitem(MEASURES, measure.name, measure)
    report = script.score(path, [trials], speakers, cohort_top_n=4, replicates=20)
    assert read_results(path) == report
    heading, *lines = script.table(report).splitlines()
    assert heading.split()[-1] == measure.column.split()[-1]
    card = model_card(
        CardFacts(
            {"arch": "revnet57", "embedding_dim": 8, "sample_rate": 16000},
            parameters=10,
            speakers=2,
            prepared=None,
            results=report,
            cohort=None,
            thresholds=[],
            missing=[],
            fingerprint="one",
        )
    )
    assert f" | {measure.column} | target trials |" in card
    for row, old, line in zip(report["results"], before["results"], lines, strict=True):
        scores, labels = scores_of(path, row["method"])
        figure = measure.of(scoring.det_curve(scores, labels))
        assert measure.figure(row) == pytest.approx(figure, abs=1e-5)
        bounds = measure.figure(row, "_95")
        assert (bounds is not None) == measure.bootstrapped
        if measure.bootstrapped:
            assert bounds[0] <= measure.figure(row) <= bounds[1]
        assert (measure.heading in row["thresholds"]) == (measure.threshold is not None)
        assert line.endswith(measure.shown(row))
        assert f" | {measure.shown(row)} | {row['targets']:,} |" in card
        for known in MEASURES.values():
            if known is not measure:
                assert known.figure(row) == known.figure(old)
                assert known.figure(row, "_95") == known.figure(old, "_95")


def test_the_cost_of_ratios_is_that_of_the_scores_one_by_one():
    draws = np.random.default_rng(0)
    labels = np.array([0, 1] * 50)
    scores = (draws.standard_normal(100) + 2 * labels).round(1)
    targets, impostors = scores[labels == 1], scores[labels == 0]
    costs = [np.log2(1 + np.exp(-targets)), np.log2(1 + np.exp(impostors))]
    expected = np.mean([cost.mean() for cost in costs])
    assert cllr(scoring.det_curve(scores, labels)) == pytest.approx(expected)


def scores_of(path, method):
    labels, scores = np.loadtxt(path / f"scores/trials.{method}.txt", usecols=(2, 3)).T
    return scores, labels


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"eer": "low"}, "eer is"),
        ({"eer": True}, "eer is True"),
        ({"eer_95": [0.1]}, r"eer_95 is \[0.1\]"),
        ({"min_dcf": 0.5}, "min_dcf has no figure for each prior"),
        ({"min_dcf_95": {"0.01": [None, 1]}}, "min_dcf_0.01_95 is"),
    ],
)
def test_measures_that_are_none_are_refused(folder, broken, named):
    path, trials, speakers = folder
    recipe("score").score(path, [trials], speakers, cohort_top_n=4, replicates=0)
    file = path / "scores/results.json"
    report = json.loads(file.read_text())
    report["results"][0] |= broken
    file.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=named):
        read_results(path)
