import contextlib
import filecmp
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
import torch
from hyperpyyaml import load_hyperpyyaml

from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.scoring import read_trials
from tests.run_folders import speech_like

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


def test_the_corpus_is_in_voxceleb_s_layout_at_16_khz(made):
    files = sorted((made / "wav").glob("*/*/*.flac"))
    voices = SMALL.train_speakers + SMALL.test_speakers
    assert len(files) == voices * SMALL.sessions * SMALL.utterances
    for file in files:
        info = soundfile.info(file)
        assert (info.samplerate, info.channels) == (16000, 1)
        assert info.duration > 0.3
        samples, _ = soundfile.read(file)
        assert 0.1 < abs(samples).max() < 1


def test_test_speakers_are_never_trained_on(made):
    lines = (made / "train_list.txt").read_text().splitlines()
    trained = {line.split()[0] for line in lines}
    trials = read_trials(made / "trials.txt")
    tested = {name.split("/")[0] for name in trials.utterances}
    assert len(trained) == SMALL.train_speakers
    assert len(tested) == SMALL.test_speakers
    assert not trained & tested
    assert all((made / "wav" / line.split()[1]).is_file() for line in lines)


def test_trials_compare_sessions_and_have_as_many_impostors(made):
    trials = read_trials(made / "trials.txt")
    assert 2 * trials.labels.sum() == len(trials)
    for label, one, other in zip(trials.labels, trials.enrol, trials.test, strict=True):
        same_voice = one.split("/")[0] == other.split("/")[0]
        assert same_voice == bool(label)
        assert Path(one).parent != Path(other).parent


def test_equal_requests_give_equal_files(made, tmp_path):
    again = corpus.make_corpus(tmp_path / "again", SMALL)
    names = [p.relative_to(made) for p in made.rglob("*") if p.is_file()]
    assert len(names) == 24 + 4
    same, different, missing = filecmp.cmpfiles(made, again, names, shallow=False)
    assert (len(same), different, missing) == (len(names), [], [])


def test_a_corpus_is_made_once(made):
    before = {p: p.stat().st_mtime_ns for p in made.rglob("*")}
    assert corpus.make_corpus(made, SMALL) == made
    assert {p: p.stat().st_mtime_ns for p in made.rglob("*")} == before


def test_another_corpus_is_never_written_over(made, tmp_path):
    with pytest.raises(ValueError, match="Remove it"):
        corpus.make_corpus(made, corpus.Request())
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ValueError, match="Remove it"):
        corpus.make_corpus(tmp_path, SMALL)
    with pytest.raises(ValueError, match="remove it"):
        corpus.main([str(tmp_path)])
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_half_made_corpus_never_has_the_final_name(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(corpus, "write_session", fail)
    with pytest.raises(OSError, match="disk full"):
        corpus.main([str(tmp_path / "corpus"), "--train_speakers=2"])
    assert not (tmp_path / "corpus").exists()


def test_voices_differ_from_one_another_until_the_variants_run_out():
    drawn = corpus.voices(corpus.Request())
    assert len({voice.variant for voice in drawn}) == len(drawn)
    many = corpus.voices(corpus.Request(train_speakers=150))
    assert len({(v.variant, v.language) for v in many}) == len(many)


def test_every_variant_and_language_is_one_that_espeak_has():
    import espeakng_loader

    folder = Path(espeakng_loader.get_data_path()) / "voices" / "!v"
    assert {name for name in corpus.VARIANTS if not (folder / name).is_file()} == set()
    with corpus.espeak(0) as speaker:
        for language in corpus.LANGUAGES:
            voice = corpus.Voice("spk000", language, "f1", 50, 50, 170)
            assert len(speaker.say("47", voice)) > speaker.sample_rate / 4
        for wrong in (
            corpus.Voice("spk000", "de", "nobody", 50, 50, 170),
            corpus.Voice("spk000", "klingonese", "f1", 50, 50, 170),
        ):
            with pytest.raises(RuntimeError, match=r"nobody|klingonese"):
                speaker.say("47", wrong)


@pytest.mark.parametrize(
    "wrong", [{"train_speakers": 1}, {"sessions": 1}, {"utterances": 0}]
)
def test_a_corpus_too_small_for_trials_is_refused(wrong):
    with pytest.raises(ValueError, match="at least"):
        corpus.Request(**wrong)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Its folder and what it prints, in this process and with memory of less speech."""
    output = tmp_path_factory.mktemp("demo")
    # Another recipe has a module of this name, too.
    spec = importlib.util.spec_from_file_location("demo_run", DEMO / "run.py")
    run, printed = importlib.util.module_from_spec(spec), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "path", sys.path.copy())
        spec.loader.exec_module(run)
        patch.setattr(run, "FRAMES", 40)
        patch.setattr(run.train.sb, "create_experiment_directory", lambda folder: None)
        run.main(["--quick", "--device=cpu", "--output", str(output)])
    return output, printed.getvalue()


def run_demo(output):
    """What the command prints."""
    command = [sys.executable, str(DEMO / "run.py"), "--quick", "--device=cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [*command, "--output", str(output)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_demo_shows_memory_training_scores_and_pictures(demo):
    output, printed = demo
    for words in (
        "resnet34  store",
        "resnet34  recompute",
        "revnet57  reconstruct",
        "times less",
        "baseline",
        "untrained",
        "trained",
        "one voice, two sessions",
        "prove the path, not the accuracy",
    ):
        assert words in printed
    for name in ("memory.png", "trained/training_curves.png", "det.png"):
        assert str(output / name) in printed
        assert (output / name).read_bytes().startswith(b"\x89PNG")


def test_memory_is_shown_before_training_starts(demo):
    _, printed = demo
    assert printed.rindex("times less") < printed.index("=== 3. Training")


def test_the_demo_trains_with_an_8_bit_optimizer_and_a_reversible_encoder(demo):
    text = (demo[0] / "trained" / "hyperparams.yaml").read_text()
    assert "optimizer_bits: 8" in text
    assert "arch: revnet57" in text


def test_every_system_is_scored_on_the_same_trials(demo):
    reports = [
        json.loads((demo[0] / name / "scores" / "results.json").read_text())
        for name in ("baseline", "untrained", "trained")
    ]
    assert len({report["model"] for report in reports}) == 3
    for report in reports:
        assert [row["method"] for row in report["results"]] == ["cosine", "as_norm"]
        assert report["results"][0]["targets"] == 12


def table(printed):
    return printed[printed.index("EER %") : printed.index("trained for")]


@pytest.mark.slow
def test_a_second_demo_makes_nothing_again(demo):
    output, printed = demo
    kept = ("corpus/corpus.json", "trained/embeddings/trials.npz")
    before = [(output / name).stat().st_mtime_ns for name in kept]
    log = (output / "trained" / "train_log.jsonl").read_text()
    again = run_demo(output)
    assert [(output / name).stat().st_mtime_ns for name in kept] == before
    assert (output / "trained" / "train_log.jsonl").read_text() == log
    # Of the very same scores.
    assert table(again) == table(printed)


def test_embedding_uses_the_features_of_the_training_yaml(demo):
    run = demo[0] / "trained"
    hparams = load_hyperpyyaml((run / "hyperparams.yaml").read_text())
    embedder = SpeakerEmbedder.from_run(run, device="cpu")
    wave = speech_like()
    heard = []
    embedder.model.encoder.register_forward_pre_hook(
        lambda _, inputs: heard.append(inputs[0])
    )
    embedder.embed(wave, 16000)
    batch = torch.from_numpy(wave).unsqueeze(0)
    modules = hparams["modules"]
    feats = modules["compute_features"](batch)
    expected = modules["mean_var_norm"](feats, torch.ones(1))
    assert torch.equal(heard[0], expected)
