"""The demo: synthetic voices, and a run of it from memory to scores."""

import contextlib
import filecmp
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

from speechbrain_rev import cli
from speechbrain_rev.scoring import read_trials
from tests.pictures import points_of, texts_of

pytest.importorskip("espeakng_loader", reason="the demo's voices are not installed")
DEMO = Path(__file__).parents[2] / "recipes" / "demo"


def demo_module(name):
    if str(DEMO) not in sys.path:
        sys.path.insert(0, str(DEMO))
    return importlib.import_module(name)


corpus = demo_module("corpus")
SMALL = corpus.Request(
    train_speakers=3, test_speakers=3, sessions=2, utterances=2, numbers=1
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return corpus.make_corpus(tmp_path_factory.mktemp("corpus") / "made", SMALL)


class TestCorpus:
    def test_it_is_in_voxcelebs_layout_at_16_khz(self, made):
        files = sorted((made / "wav").glob("*/*/*.flac"))
        assert len(files) == 6 * SMALL.sessions * SMALL.utterances
        for file in files:
            info = soundfile.info(file)
            assert (info.samplerate, info.channels) == (16000, 1)
            assert info.duration > 0.3
            assert 0.1 < abs(soundfile.read(file)[0]).max() < 1

    def test_trials_compare_sessions_of_speakers_that_are_never_trained_on(self, made):
        lines = [
            line.split() for line in (made / "train_list.txt").read_text().splitlines()
        ]
        assert all((made / "wav" / name).is_file() for _, name in lines)
        trained, trials = (
            {speaker for speaker, _ in lines},
            read_trials(made / "trials.txt"),
        )
        tested = {name.split("/")[0] for name in trials.utterances}
        assert (len(trained), len(tested), trained & tested) == (3, 3, set())
        assert 2 * trials.labels.sum() == len(trials)
        for label, a, b in zip(trials.labels, trials.enrol, trials.test, strict=True):
            assert (a.split("/")[0] == b.split("/")[0]) == bool(label)
            assert Path(a).parent != Path(b).parent

    @pytest.mark.parametrize("languages", ["aaaa", "abcd", "aabc", "aabb"])
    def test_there_are_as_many_impostors_whatever_the_languages(self, languages):
        voices = [
            corpus.Voice(f"{i}", language, "f1", 50, 50, 170)
            for i, language in enumerate(languages)
        ]
        paths = {v.speaker: [f"{v.speaker}/{s}/0" for s in "xyz"] for v in voices}
        trials = corpus.trials(voices, paths, 0)
        labels = [label for label, _, _ in trials]
        assert len(set(trials)) == len(trials) == 2 * sum(labels) == 24
        for label, one, other in trials:
            assert (one[0] == other[0]) == bool(label)

    def test_it_is_made_once_and_equal_requests_give_equal_files(self, made, tmp_path):
        before = {p: p.stat().st_mtime_ns for p in made.rglob("*")}
        assert corpus.make_corpus(made, SMALL) == made
        assert {p: p.stat().st_mtime_ns for p in made.rglob("*")} == before
        again = corpus.make_corpus(tmp_path / "again", SMALL)
        names = [p.relative_to(made) for p in made.rglob("*") if p.is_file()]
        assert len(names) == 24 + 4
        same, different, missing = filecmp.cmpfiles(made, again, names, shallow=False)
        assert (len(same), different, missing) == (len(names), [], [])

    def test_nothing_is_written_over_or_half_made(self, made, tmp_path, monkeypatch):
        (tmp_path / "mine").write_text("precious")
        for folder, request in ((made, corpus.Request()), (tmp_path, SMALL)):
            with pytest.raises(ValueError, match="Remove it"):
                corpus.make_corpus(folder, request)
        with pytest.raises(ValueError, match="remove it"):
            corpus.main([str(tmp_path)])
        assert (tmp_path / "mine").read_text() == "precious"

        def fail(*_):
            raise OSError("disk full")

        monkeypatch.setattr(corpus, "write_session", fail)
        with pytest.raises(OSError, match="disk full"):
            corpus.main([str(tmp_path / "corpus"), "--train_speakers=2"])
        assert not (tmp_path / "corpus").exists()

    def test_voices_differ_and_are_those_that_espeak_has(self):
        import espeakng_loader

        drawn = corpus.voices(corpus.Request())
        assert len({voice.variant for voice in drawn}) == len(drawn)
        many = corpus.voices(corpus.Request(train_speakers=150))
        assert len({(v.variant, v.language) for v in many}) == len(many)
        folder = Path(espeakng_loader.get_data_path()) / "voices" / "!v"
        assert all((folder / name).is_file() for name in corpus.VARIANTS)
        with corpus.espeak(0) as speaker:
            for language in corpus.LANGUAGES:
                voice = corpus.Voice("spk000", language, "f1", 50, 50, 170)
                assert len(speaker.say("47", voice)) > speaker.sample_rate / 4
            for language, variant in (("de", "nobody"), ("klingonese", "f1")):
                wrong = corpus.Voice("spk000", language, variant, 50, 50, 170)
                with pytest.raises(RuntimeError, match=r"nobody|klingonese"):
                    speaker.say("47", wrong)

    @pytest.mark.parametrize(
        "wrong", [{"train_speakers": 1}, {"sessions": 1}, {"utterances": 0}]
    )
    def test_one_too_small_for_trials_is_refused(self, wrong):
        with pytest.raises(ValueError, match="at least"):
            corpus.Request(**wrong)


@pytest.fixture(scope="module")
def run():
    # Another recipe has a module of this name, too.
    spec = importlib.util.spec_from_file_location("demo_run", DEMO / "run.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", sys.path.copy())
        spec.loader.exec_module(module)
    return module


def test_bars_are_as_long_as_a_step_and_curves_go_through_their_depths(run, drawn):
    steps = {"store": (3.0 * 2**30, 1.5), "reconstruct": (2.0**20, 2.5)}
    depths = {"store": {9: 2**20, 5: 2**19}, "reconstruct": {5: 2**18, 9: 2**18}}
    figure = drawn(run.memory_by_depth, steps, depths, title="T", source="S")
    (peaks, seconds, curves), (legend,) = figure.axes, figure.legends
    assert [bar.get_width() for bar in peaks.patches] == [3072, 1]
    assert [bar.get_width() for bar in seconds.patches] == [1.5, 2.5]
    assert texts_of(peaks.get_yticklabels()) == list(steps)
    assert peaks.get_xlabel() == "peak of a step, MiB"
    assert seconds.get_xlabel() == "seconds of a step"
    assert texts_of(peaks.texts) == ["3,072", "1"]
    expected = [[(5, 0.5), (9, 1.0)], [(5, 0.25), (9, 0.25)]]
    assert [points_of(line) for line in curves.lines] == expected
    assert texts_of(legend.texts) == list(depths)


@pytest.mark.slow
def test_what_it_counts_is_what_models_lists(run, monkeypatch):
    committed = {mode: run.counted_bytes(mode, 89) for mode in run.MODES}
    monkeypatch.setattr(run, "PUBLISHED", {})
    counted = {mode: run.counted_bytes(mode, 89) for mode in run.MODES}
    assert counted == pytest.approx(committed, rel=1e-6)


@pytest.fixture(scope="module")
def demo(run, tmp_path_factory):
    """Its folder and what it prints, in this process."""
    output, printed = tmp_path_factory.mktemp("demo"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(run.train.sb, "create_experiment_directory", lambda folder: None)
        run.main(["--quick", "--device=cpu", "--output", str(output)])
    return output, printed.getvalue()


@pytest.mark.slow(drawn=False)
def test_the_demo_shows_memory_training_scores_and_pictures(demo, tmp_path, capsys):
    output, printed = demo
    for words in (
        "stored  ",
        "checkpointed  ",
        "reconstructed  ",
        "A step of 377 layers with one utterance, reconstructed, ran here",
        "baseline",
        "untrained",
        "one voice, two sessions",
        "prove the path, not the accuracy",
    ):
        assert words in printed
    assert printed.rindex("ran here") < printed.index("=== 3. Training")
    peaks = re.findall(r"^  \w+ed +([\d,]+) MiB", printed, re.MULTILINE)
    store, recompute, reconstruct = (int(p.replace(",", "")) for p in peaks)
    assert store > 2 * recompute > 2 * reconstruct
    shallow, deep = re.search(
        r"takes ([\d.]+) MiB at .* ([\d.]+) MiB at", printed
    ).groups()
    assert shallow == deep
    story = printed[printed.index("=== 7.") :]
    for name in ("trained", "trained/embeddings/trials.npz"):
        assert str(output / name) in story
    for name in ("memory.png", "trained/training_curves.png", "det.png"):
        assert str(output / name) in printed
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    text = (output / "trained/hyperparams.yaml").read_text()
    assert "optimizer_bits: 8" in text
    assert "arch: revnet57" in text
    reports = [
        json.loads((output / name / "scores/results.json").read_text())
        for name in ("baseline", "untrained", "trained")
    ]
    assert len({report["model"] for report in reports}) == 3
    for report in reports:
        assert [row["method"] for row in report["results"]] == ["cosine", "as_norm"]
        assert report["results"][0]["targets"] == 12
    assert cli.main(["export", str(output / "trained"), str(tmp_path / "model")]) == 0
    assert "lacks" not in capsys.readouterr().out


def table(printed):
    return printed[printed.index("EER %") : printed.index("=== 7.")]


@pytest.mark.slow(drawn=False)
def test_a_second_demo_makes_nothing_again(demo):
    output, printed = demo
    kept = ("corpus/corpus.json", "trained/embeddings/trials.npz")
    before = [(output / name).stat().st_mtime_ns for name in kept]
    log = (output / "trained/train_log.jsonl").read_text()
    command = [sys.executable, str(DEMO / "run.py"), "--quick", "--device=cpu"]
    again = subprocess.run(
        [*command, "--output", str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert [(output / name).stat().st_mtime_ns for name in kept] == before
    assert (output / "trained/train_log.jsonl").read_text() == log
    # Of the very same scores.
    assert table(again.stdout) == table(printed)
