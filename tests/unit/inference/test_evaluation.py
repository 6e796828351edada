"""A run's trial lists: which files are embedded, and how their scores are summed up."""

import json
import re
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from speechbrain_rev import scoring
from speechbrain_rev.data import Row, read_manifest
from speechbrain_rev.inference import (
    EmbeddingArchive,
    FbankStatistics,
    SpeakerEmbedder,
    evaluation,
)
from speechbrain_rev.inference.evaluation import (
    extract,
    files_of_run,
    score,
    score_file,
    score_run,
)
from speechbrain_rev.inference.export import CardFacts, model_card
from speechbrain_rev.inference.runs import RECORD
from speechbrain_rev.inference.thresholds import RESULTS, read_results
from speechbrain_rev.inference.trained import read_weights
from speechbrain_rev.scoring import MEASURES, Measure, read_trials
from speechbrain_rev.scoring.metrics import lowest_cost
from tests.corpus import write_corpus
from tests.recipes.runs import recipe
from tests.run_folders import (
    change_record,
    speech_like,
    tiny_encoder,
    write_audio,
    write_run,
    write_scorable_run,
)

SPEAKERS, UTTERANCES, DIM = 12, 4, 8


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), seconds=0.4)


@pytest.fixture
def run(tmp_path, data):
    return write_scorable_run(tmp_path / "run", data)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory, data):
    """A run that extract.py embedded; no test changes it."""
    run = write_scorable_run(tmp_path_factory.mktemp("embedded") / "run", data)
    recipe("extract").main([str(run), "--device=cpu"])
    return run


def archives(run):
    names = ("trials", "cohort")
    return [EmbeddingArchive.load(run / f"embeddings/{name}.npz") for name in names]


def replace(path, *pairs):
    text = path.read_text()
    for old, new in pairs:
        text = text.replace(old, new)
    path.write_text(text)


# ------------------------------------------------------------ files


def test_files_are_those_of_all_lists_and_of_each_training_speaker(run, data, tmp_path):
    trials, cohort = files_of_run(run, utterances_per_speaker=2)
    listed = read_trials(run / "one.txt").utterances
    assert {n: row.wav for n, row in trials.items()} == {
        name: str(data / "wav" / name) for name in listed
    }
    assert all(row.speaker == name[:7] for name, row in trials.items())
    speaker_of = {u.ID: u.spk_id for u in read_manifest(run / "save/train.csv")}
    counts = Counter(speaker_of[name] for name in cohort)
    assert counts == dict.fromkeys(speaker_of.values(), 2)
    assert list(files_of_run(run)[1]) == list(speaker_of)
    # A list that is given takes the place of the run's, and so does a folder.
    short = tmp_path / "short.txt"
    lines = (run / "one.txt").read_text().splitlines(keepends=True)
    short.write_text("".join(next(x for x in lines if x[0] == label) for label in "01"))
    trials, _ = files_of_run(run, trials=[str(short)])
    assert set(trials) == set(read_trials(short).utterances)
    change_record(run, {"trials_folder": "/nowhere"})
    with pytest.raises(ValueError, match="/nowhere"):
        files_of_run(run)
    assert files_of_run(run, trials_folder=str(data))[0]


def test_no_lists_and_missing_utterances_are_refused(run):
    with (run / "one.txt").open("a") as file:
        file.write("0 id00004/s00/00000.wav id00005/s00/99999.wav\n")
    with pytest.raises(ValueError, match=r"id00005/s00/99999\.wav"):
        files_of_run(run)
    change_record(run, {"trial_lists": []})
    with pytest.raises(ValueError, match=r"--trial_lists LIST.*valid_trials\.txt"):
        files_of_run(run)


def test_speakers_that_are_enrolled_need_the_file_of_their_utterances(
    run, data, tmp_path
):
    names = sorted(path.relative_to(data / "wav") for path in data.rglob("*.wav"))
    trials = tmp_path / "trials"
    trials.write_text(f"ann {names[0]} target\nbob {names[0]} nontarget\n")
    words = r"2 of 3 files are missing, .*ann\..*TRIALS\.spk2utt or spk2utt beside"
    with pytest.raises(ValueError, match=words):
        files_of_run(run, trials=[str(trials)])


def test_data_that_moved_are_read_in_their_folder(run, data, tmp_path):
    here, one = tmp_path / "here", str(run / "one.txt")
    (here / "lists").mkdir(parents=True)
    for name in ("one.txt", "other.txt"):
        shutil.copy(run / name, here / "lists" / name)
    shutil.copytree(data / "wav", here / "wav")
    replace(run / RECORD, (str(data), "/gone"), (f"{run}/o", "/gone/lists/o"))
    replace(run / "save/train.csv", (str(data), "/gone"))
    place = {"trials_folder": str(here)}
    lost = r"/gone does not exist.* as trials_folder or data_folder\."
    for given, error, words in (
        ({}, ValueError, lost),
        (place, FileNotFoundError, r"/gone/lists/one\.txt"),
        ({"trials": [one], **place}, ValueError, r"16 of 16 files.*--data_folder"),
    ):
        with pytest.raises(error, match=words):
            files_of_run(run, **given)
    trials, cohort = files_of_run(run, data_folder=str(here))
    for files in ([row.wav for row in trials.values()], [*cohort.values()]):
        assert files
        assert all(Path(file).is_relative_to(here) for file in files)
    # Of lists elsewhere the path stays.
    replace(run / RECORD, ("/gone/lists/o", f"{run}/o"))
    assert files_of_run(run, data_folder=str(here))[0]
    first = read_manifest(run / "save/train.csv")[0].ID
    replace(run / "save/train.csv", (f"{first},", f"{first}9,"))
    with pytest.raises(
        ValueError, match=r"training .* 1 of 16 files is missing.*9\. Give"
    ):
        files_of_run(run, data_folder=str(here))


@pytest.mark.parametrize("name", ["../secret.wav", "{tmp}/secret.wav", "id5/link.wav"])
def test_trials_that_lead_out_are_refused_unless_allowed(run, data, tmp_path, name):
    name, copy = name.format(tmp=tmp_path), tmp_path / "copy"
    shutil.copytree(data, copy)
    for secret in (tmp_path / "secret.wav", copy / "secret.wav"):
        shutil.copy(data / "wav/id00004/s00/00000.wav", secret)
    (copy / "wav/id5").mkdir()
    (copy / "wav/id5/link.wav").symlink_to(tmp_path / "secret.wav")
    with (run / "one.txt").open("a") as file:
        file.write(f"0 id00004/s00/00000.wav {name}\n")
    given = {"trials": [str(run / "one.txt")], "trials_folder": str(copy)}
    with pytest.raises(
        ValueError, match=r"one\.txt: 1 name outside the folder.*--outside_"
    ):
        files_of_run(run, **given)
    assert name in files_of_run(run, **given, outside_files=True)[0]


# ------------------------------------------------------------ embeddings


def test_embeddings_are_of_the_files_and_kept_until_the_weights_change(
    embedded, data, tmp_path, monkeypatch, capsys
):
    run = shutil.copytree(embedded, tmp_path / "run")
    embedder = SpeakerEmbedder.from_run(run, device="cpu")
    before, cohort = archives(run)
    for archive in (before, cohort):
        for name, row in list(zip(archive.names, archive.embeddings, strict=True))[::3]:
            expected = embedder.embed([data / "wav" / name])[0]
            limit = 1e-5 * np.abs(expected).max()
            assert np.allclose(row, expected, rtol=0, atol=limit)
    embed_each, files = SpeakerEmbedder.embed_each, []

    def noted(self, paths, **given):
        files.extend(paths)
        return embed_each(self, paths, **given)

    monkeypatch.setattr(SpeakerEmbedder, "embed_each", noted)
    recipe("extract").main([str(run), "--device=cpu"])
    assert files == []
    assert "trials.npz: 8 embeddings of 16 dimensions" in capsys.readouterr().out
    # A list of fewer utterances leaves those of others as they are, with their speakers.
    speakers = json.loads((run / evaluation.SPEAKERS).read_text())
    lines = (run / "one.txt").read_text().splitlines(keepends=True)
    short = next(x for x in lines if x[0] == "0") + next(
        x for x in lines if x[0] == "1"
    )
    (run / "short.txt").write_text(short)
    given = [str(run), "--device=cpu", "--trial_lists", str(run / "short.txt")]
    recipe("extract").main(given)
    assert files == []
    assert json.loads((run / evaluation.SPEAKERS).read_text()) == speakers
    torch.save(tiny_encoder(seed=1).state_dict(), run / "embedding_model.ckpt")
    change_record(run, weights=None)
    with pytest.raises(ValueError, match=r"other weights.*extract\.py and"):
        score_run(run)
    recipe("extract").main([str(run), "--device=cpu"])
    assert len(files) == len(before.names) + len(cohort.names)
    after, _ = archives(run)
    assert after.names == before.names
    assert not np.allclose(after.embeddings, before.embeddings)
    with pytest.raises(SystemExit):
        recipe("extract").main([str(run), "--utterances_per_speaker=0"])
    assert "takes 1 or more, not 0" in capsys.readouterr().err


def test_a_smaller_cohort_counts_alone_and_the_larger_one_is_kept(
    embedded, tmp_path, capsys, caplog
):
    run = shutil.copytree(embedded, tmp_path / "run")
    _, whole = archives(run)
    score_run(run, replicates=0)
    recipe("extract").main([str(run), "--device=cpu", "--utterances_per_speaker=1"])
    _, fewer = archives(run)
    aside = run / f"embeddings/cohort_{len(whole.names)}.npz"
    assert len(fewer.names) == 4 < len(whole.names)
    assert EmbeddingArchive.load(aside).names == whole.names
    assert f"{aside}: {len(whole.names)} embeddings" in capsys.readouterr().out
    report = score_run(run, replicates=0)
    assert report.content["cohort"]["utterances"] == 4
    assert "not finished" not in " ".join(report.remarks)
    change_record(run, weights=None)
    recipe("extract").main([str(run), "--device=cpu", "--utterances_per_speaker=1"])
    assert f"{run} is not finished: " in caplog.text
    assert f"{run} is not finished: " in score_run(run, replicates=0).remarks[0]


def test_channels_of_files_are_averaged_with_a_warning(tmp_path, caplog):
    sides = np.stack([speech_like(seed=1), speech_like(seed=2)])
    stereo = {"s.wav": Row("s", str(write_audio(tmp_path / "s.wav", sides.T)))}
    mono = {"m.wav": write_audio(tmp_path / "m.wav", sides.mean(axis=0))}
    embedder = SpeakerEmbedder(FbankStatistics(), device="cpu", fingerprint="x")
    made = extract(embedder, tmp_path, stereo, mono)
    assert np.allclose(*(one.embeddings for one in made.values()), rtol=1e-5)
    assert "1 of 1 utterances have several channels, which were" in caplog.text


# ------------------------------------------------------------ scores


@pytest.fixture
def undrawn(monkeypatch):
    """Without matplotlib a remark replaces the picture, which takes time."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def scorable(tmp_path):
    return write_embeddings(tmp_path)


#: Without intervals, which take time.
QUICK = {"cohort_top_n": 4, "replicates": 0}
DRAWN = {"cohort_top_n": 4, "replicates": 20}


def write_embeddings(folder, *, noise=0.3, offset=0.0):
    """Embeddings around a direction per speaker; half of the speakers are trained on."""
    draw = np.random.default_rng(3)
    voices = np.repeat(draw.standard_normal((SPEAKERS, DIM)), UTTERANCES, axis=0)
    rows = voices + noise * draw.standard_normal(voices.shape) + offset
    names = [f"s{i // UTTERANCES:02d}/{i % UTTERANCES}" for i in range(len(rows))]
    half = len(rows) // 2
    for name, part in (("trials", slice(half)), ("cohort", slice(half, None))):
        some = rows[part].astype(np.float32)
        archive = EmbeddingArchive(tuple(names[part]), some, "one")
        archive.save(folder / f"embeddings/{name}.npz")
    pairs = [(a, b) for i, a in enumerate(names[:half]) for b in names[i + 1 : half]]
    lines = [f"{int(a[:3] == b[:3])} {a} {b}\n" for a, b in pairs]
    (folder / "trials.txt").write_text("".join(lines))
    return folder, folder / "trials.txt", {name: name[:3] for name in names[half:]}


def scores_of(folder, method):
    path = folder / f"scores/trials.{method}.txt"
    labels, scores = np.loadtxt(path, usecols=(2, 3)).T
    return scores, labels


def test_figures_are_those_of_the_scoring_functions(scorable):
    folder, trials, speakers = scorable
    report = score(folder, [trials], speakers, cohort_top_n=4)
    listed, (tested, cohort) = read_trials(trials), archives(folder)
    enrol, test = listed.rows(tested.names)
    whose = [speakers[name] for name in cohort.names]
    _, means = scoring.speaker_means(cohort.embeddings, whose)
    mean, std = scoring.cohort_statistics(tested.embeddings, means, top_n=4)
    cosine = scoring.cosine_trials(tested.embeddings, enrol, test)
    sides = mean[enrol], std[enrol], mean[test], std[test]
    expected = {"cosine": cosine, "as_norm": scoring.as_norm(cosine, *sides)}
    for row in report.rows:
        scores = expected[row["method"]]
        assert row["eer"] == scoring.eer(scores, listed.labels)
        threshold = scoring.det_curve(scores, listed.labels).eer_threshold()
        assert row["thresholds"]["EER"] == threshold
        for p in (0.01, 0.05):
            cost = scoring.min_dcf(scores, listed.labels, p_target=p)
            assert row["min_dcf"][str(p)] == cost
        assert row["targets"] + row["impostors"] == len(listed)
        assert row["targets"] == listed.labels.sum()
        written, labels = scores_of(folder, row["method"])
        assert np.array_equal(labels, listed.labels)
        assert np.allclose(written, scores, atol=1e-6)
    assert read_results(folder) == report.content
    assert (folder / "scores/det.png").read_bytes().startswith(b"\x89PNG")
    assert report.content["model"] == "one"
    utterances = SPEAKERS // 2 * UTTERANCES
    numbers = {"speakers": SPEAKERS // 2, "utterances": utterances, "top_n": 4}
    assert report.content["cohort"] == numbers


@pytest.mark.parametrize("subtract_mean", [False, True])
@pytest.mark.parametrize("form", ["kaldi", "csv"])
def test_speakers_enrolled_with_several_utterances_score_as_their_mean(
    form, subtract_mean, scorable, undrawn
):
    folder, plain, speakers = scorable
    tested, cohort = archives(folder)
    # Each speaker by the first two utterances, or by one; and one list without models.
    models = {
        f"s{s:02d}": [f"s{s:02d}/{k}" for k in range(2 - s % 2)] for s in range(3)
    }
    enrolled = {file for files in models.values() for file in files}
    spk2utt = "".join(f"{name} {' '.join(files)}\n" for name, files in models.items())
    pairs = [(m, n) for m in models for n in tested.names if n not in enrolled]
    path = folder / ("trials.csv" if form == "csv" else "trials")
    lines = [
        f"{m} {n} {'target' if n.startswith(m) else 'nontarget'}" for m, n in pairs
    ]
    if form == "csv":
        lines = [",".join((n, m, str(int(n.startswith(m))), "")) for m, n in pairs]
        lines = ["test,enroll,label,note", *lines]
        (folder / "trials.csv.spk2utt").write_text(spk2utt)
    else:
        (folder / "spk2utt").write_text(spk2utt)
    path.write_text("\n".join(lines))
    report = score(
        folder,
        [plain, path],
        speakers,
        **QUICK | {"replicates": 5},
        subtract_mean=subtract_mean,
    )
    assert [row["enrolled"] for row in report.rows[::2]] == [[1, 1], [1, 2]]
    # The definition, in float64.
    vectors = dict(zip(tested.names, tested.embeddings.astype(float), strict=True))
    trained = cohort.embeddings.astype(float)
    centre = trained.mean(axis=0) if subtract_mean else 0
    unit = lambda x: (x - centre) / np.linalg.norm(x - centre)  # noqa: E731
    again = lambda x: x / np.linalg.norm(x)  # noqa: E731
    means = [
        again(
            np.mean(
                [
                    unit(x)
                    for x, n in zip(trained, cohort.names, strict=True)
                    if speakers[n] == s
                ],
                0,
            )
        )
        for s in sorted(set(speakers.values()))
    ]
    wanted = {"cosine": [], "as_norm": []}
    for m, n in pairs:
        sides = (
            again(np.mean([unit(vectors[f]) for f in models[m]], 0)),
            unit(vectors[n]),
        )
        cosine = sides[0] @ sides[1]
        nearest = [np.sort([side @ c for c in means])[-4:] for side in sides]
        wanted["cosine"].append(cosine)
        wanted["as_norm"].append(
            np.mean([(cosine - x.mean()) / x.std() for x in nearest])
        )
    for method, scores in wanted.items():
        (file,) = [
            f
            for f in (folder / "scores").glob(f"*.{method}.txt")
            if f.read_text().startswith("s00 s00/")
        ]
        # Six decimals; embeddings are float32, and deviations about 0.1.
        assert np.allclose(np.loadtxt(file, usecols=3), scores, rtol=0, atol=2e-5)


def test_speakers_of_a_list_who_were_trained_on_are_named(scorable):
    folder, trials, speakers = scorable
    renamed = {**speakers, "s06/0": "s00"}
    remarks = score(folder, [trials], renamed, **QUICK).remarks
    words = "1 of 6 speakers of trials is in training, such as s00: its error rates are"
    assert remarks[0].startswith(words)
    assert not any(
        "training, such as" in r
        for r in score(folder, [trials], speakers, **QUICK).remarks
    )


def test_speakers_are_those_of_rows_whatever_names_begin_with(scorable):
    folder, trials, speakers = scorable
    names = read_trials(trials).utterances
    in_corpora = {name: f"corpus/{name.partition('/')[0]}" for name in names}
    for known, words in (
        (in_corpora, None),
        (dict.fromkeys(names, None), "No intervals: names of utterances do not begin"),
    ):
        (folder / evaluation.SPEAKERS).write_text(json.dumps(known))
        report = score(folder, [trials], speakers, **DRAWN)
        assert any("training, such as" in r for r in report.remarks) is False
        if words is None:
            assert "eer_95" in report.rows[0]
        else:
            assert any(remark.startswith(words) for remark in report.remarks)
    # A corpus of several, of which the trials have the names of one.
    (folder / evaluation.SPEAKERS).write_text(json.dumps(in_corpora))
    remarks = score(
        folder, [trials], {**speakers, "s06/0": "corpus/s00"}, **QUICK
    ).remarks
    assert any("in training, such as corpus/" in remark for remark in remarks)


def test_lists_are_scored_under_names_of_their_own(scorable, undrawn):
    folder, trials, speakers = scorable
    (folder / "hard").mkdir()
    lines = trials.read_text().splitlines(keepends=True)
    (folder / "hard/trials.txt").write_text("".join(lines[: len(lines) // 2]))
    (folder / "easy.txt").write_text("".join(lines[::2]))
    lists = [trials, folder / "hard/trials.txt", folder / "easy.txt"]
    report = score(folder, lists, speakers, replicates=0)
    names = {row["trials"] for row in report.rows}
    assert (len(report.rows), len(names), "easy" in names) == (6, 3, True)
    assert len(list((folder / "scores").glob("*.txt"))) == 6
    assert report.content["cohort"]["top_n"] == SPEAKERS // 2
    assert read_results(folder) == report.content
    smaller, undrawn = report.remarks
    assert smaller == "AS-Norm uses all 6 training speakers: cohort_top_n is 600."
    assert "det.png is not drawn" in undrawn
    assert not (folder / "scores/det.png").exists()


def test_lists_that_are_scored_alike_stand_together_in_the_results(scorable, undrawn):
    folder, trials, speakers = scorable
    more = trials.with_name("more.txt")
    more.write_text("".join(trials.read_text().splitlines(keepends=True)[::2]))
    first = score(folder, [trials], speakers, **QUICK)
    second = score(folder, [more], speakers, **QUICK)
    assert {row["trials"] for row in second.rows} == {"more"}
    assert read_results(folder)["results"] == [*first.rows, *second.rows]
    again = score(folder, [trials], speakers, **QUICK)
    assert read_results(folder)["results"] == [*second.rows, *again.rows]
    other = score(folder, [more], speakers, **QUICK | {"cohort_top_n": 3})
    assert read_results(folder)["results"] == other.rows
    assert "no rates of trials any more" in other.remarks[0]
    (folder / RESULTS).write_text("{}")
    score(folder, [more], speakers, **QUICK)
    assert read_results(folder)["results"] == second.rows


def test_subtracting_the_training_mean_repairs_shifted_embeddings(tmp_path, undrawn):
    folder, trials, speakers = write_embeddings(tmp_path, noise=1.0, offset=20.0)
    shifted = score(folder, [trials], speakers, **QUICK)
    centred = score(folder, [trials], speakers, **QUICK, subtract_mean=True)
    assert centred.content["subtract_mean"]
    assert centred.rows[0]["eer"] < shifted.rows[0]["eer"]
    listed, (tested, cohort) = read_trials(trials), archives(folder)
    rows = tested.embeddings - cohort.embeddings.mean(axis=0)
    scores = scoring.cosine_trials(rows, *listed.rows(tested.names))
    expected = scoring.eer(scores, listed.labels)
    assert centred.rows[0]["eer"] == pytest.approx(expected)


def test_what_lacks_embeddings_is_refused_and_what_has_too_many_is_left_out(
    scorable, undrawn
):
    folder, trials, speakers = scorable
    words = r"1 training speakers .*s99.*extract\.py"
    with pytest.raises(ValueError, match=words):
        score(folder, [trials], {**speakers, "s99/0": "s99"})
    some = {name: speaker for name, speaker in speakers.items() if speaker != "s11"}
    report = score(folder, [trials], some, replicates=0)
    assert report.content["cohort"]["speakers"] == SPEAKERS // 2 - 1
    trials.write_text(trials.read_text() + "0 s00/0 s99/0\n")
    with pytest.raises(ValueError, match="s99/0"):
        score(folder, [trials], speakers)


def test_intervals_are_of_speakers_and_a_file_of_scores_has_the_same(scorable):
    folder, trials, speakers = scorable
    report = score(folder, [trials], speakers, **DRAWN)
    for row in report.rows:
        low, high = row["eer_95"]
        assert low <= row["eer"] <= high
        assert row["min_dcf_95"].keys() == row["min_dcf"].keys()
        least, most = row["thresholds_95"]["EER"]
        assert least <= row["thresholds"]["EER"] <= most
    assert f"[{100 * low:.2f}, {100 * high:.2f}]" in report.table()
    assert "In brackets: 95 % intervals, of speakers drawn" in report.table()
    path = folder / "scores/trials.as_norm.txt"
    (again,) = score_file(path, 20).rows
    for key in ("eer", "eer_95"):
        assert again[key] == pytest.approx(report.rows[1][key], abs=1e-5)
    written = json.loads(path.with_suffix(".txt.json").read_text())
    assert written["results"] == [again]
    assert path.with_suffix(".txt.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("lines", "remark"),
    [
        ("a b 1 0.5\na c 0 0.25\n", "names of utterances do not begin"),
        ("wav/a/1 wav/a/2 1 0.5\nwav/a/1 wav/b/1 0 0.25\n", r"\(--bootstrap 0\)"),
    ],
)
def test_names_and_speakers_that_give_no_intervals_are_a_remark(
    tmp_path, lines, remark
):
    (tmp_path / "scores.txt").write_text(lines)
    report = score_file(tmp_path / "scores.txt")
    assert (report.rows[0]["eer"], "eer_95" in report.rows[0]) == (0.0, False)
    assert re.search(f"No intervals: .*{remark}", *report.remarks)


def test_a_run_s_lists_are_scored_with_its_speakers_at_their_own_speed(
    embedded, tmp_path, capsys
):
    run = shutil.copytree(embedded, tmp_path / "run")
    recipe("score").main([str(run), "--bootstrap=0"])
    report = read_results(run)
    assert {row["trials"] for row in report["results"]} == {"one", "other"}
    # 4 speakers, though speed perturbation trained 12 classes.
    utterances = len(archives(run)[1].names)
    assert report["cohort"] == {"speakers": 4, "utterances": utterances, "top_n": 4}
    printed = capsys.readouterr().out
    assert "EER %" in printed
    assert "AS-Norm uses all 4 training speakers" in printed
    options = [
        "--trial_lists",
        str(run / "one.txt"),
        "--cohort_top_n=3",
        "--subtract_mean",
    ]
    recipe("score").main([str(run), *options, "--bootstrap=0"])
    report = read_results(run)
    assert {row["trials"] for row in report["results"]} == {"one"}
    assert (report["cohort"]["top_n"], report["subtract_mean"]) == (3, True)
    assert "no rates of other any more" in capsys.readouterr().out
    recipe("score").main(["--from_scores", str(run / "scores/one.cosine.txt")])
    assert "as given" in capsys.readouterr().out
    with pytest.raises(ValueError, match="top_n is 1, but the cohort has"):
        score_run(embedded, cohort_top_n=1)


@pytest.mark.parametrize("script", ["extract", "score"])
def test_the_help_of_a_script_has_examples_that_it_takes(script):
    parser = recipe(script).command_line()
    assert len(parser.examples) >= 2
    for example in parser.examples:
        words = shlex.split(example)
        assert words[:2] == ["python", f"recipes/VoxCeleb/{script}.py"]
        parser.parse_args(words[2:])


def test_what_is_missing_of_a_run_is_named(run, tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=r"extract\.py"):
        score_run(run)
    for argv in ([], [str(tmp_path), "--from-scores", "scores.txt"]):
        with pytest.raises(SystemExit):
            recipe("score").main(argv)
    assert "not allowed with" in capsys.readouterr().err


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


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("measure", NEW_MEASURES)
def test_a_measure_is_one_row_that_all_places_show(scorable, monkeypatch, measure):
    folder, trials, speakers = scorable
    before = score(folder, [trials], speakers, **DRAWN)
    monkeypatch.setitem(MEASURES, measure.name, measure)
    report = score(folder, [trials], speakers, **DRAWN)
    assert read_results(folder) == report.content
    heading, *lines, _ = report.table().splitlines()
    assert heading.split()[-1] == measure.column.split()[-1]
    write_run(folder / "run")
    weights = read_weights(folder / "run")
    card = model_card(CardFacts(weights, 2, None, report.content, None, [], []))
    assert f" | {measure.column} | target trials |" in card
    for row, old, line in zip(report.rows, before.rows, lines, strict=True):
        figure = measure.of(scoring.det_curve(*scores_of(folder, row["method"])))
        assert measure.figure(row) == pytest.approx(figure, abs=1e-5)
        bounds = measure.figure(row, "_95")
        assert (bounds is not None) == measure.bootstrapped
        if measure.bootstrapped:
            assert bounds[0] <= measure.figure(row) <= bounds[1]
        assert (measure.heading in row["thresholds"]) == (measure.threshold is not None)
        assert line.endswith(measure.shown(row))
        assert f" | {measure.shown(row)} | {row['targets']:,} |" in card
        for known in {*MEASURES.values()} - {measure}:
            assert known.figure(row) == known.figure(old)
            assert known.figure(row, "_95") == known.figure(old, "_95")
