"""Scores, decisions and where their thresholds are from; speakers that are enrolled."""

import json
import sys

import numpy as np
import pytest
import safetensors.numpy

from speechbrain_rev import scoring
from speechbrain_rev.inference import (
    Cohort,
    EmbeddingArchive,
    EnrolledSpeaker,
    SpeakerEmbedder,
    Threshold,
    Thresholds,
    read_cohort,
)
from speechbrain_rev.inference.run_folder import RESULTS
from speechbrain_rev.inference.thresholds import run_thresholds
from speechbrain_rev.inference.untrusted import strict_json
from tests.run_folders import speech_like, write_audio, write_finished_run, write_run

RATE = 16000
# A row is that of another batch to 1e-5 of its length, on either side of a cosine.
COSINE = 2e-5
# AS-Norm divides cosines by deviations, here of about a fifth.
NORMED_SCORE = 1e-4
EER = Threshold("vox1_o", "EER", "cosine", 0.31, 18802, 18818, 0.0123)
DCF = Threshold("vox1_o", "minDCF(0.01)", "cosine", 0.45, 18802, 18818, 0.0123)
NORMED = Threshold("vox1_o", "EER", "as_norm", 4.5, 18802, 18818, 0.0111)
HARD = Threshold("vox1_h", "EER", "cosine", 0.29, 10, 10, 0.02)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(run):
    return SpeakerEmbedder.from_run(run, device="cpu")


def knowing(loaded, *known):
    return SpeakerEmbedder(
        loaded.model,
        device="cpu",
        fingerprint=loaded.fingerprint,
        thresholds=Thresholds(known, ""),
    )


def voices(count):
    return [speech_like(0.5, seed=seed) for seed in range(count)]


def test_the_score_is_the_cosine_of_the_embeddings(loaded, tmp_path):
    waves = voices(2)
    rows = loaded.embed(waves, RATE)
    expected = scoring.cosine(rows[:1], rows[1:])[0]
    found = loaded.verify(*waves, RATE)
    assert found.normalisation == "cosine"
    assert found.score == pytest.approx(expected, abs=COSINE)
    paths = [write_audio(tmp_path / f"{i}.wav", w) for i, w in enumerate(waves)]
    assert loaded.verify(*paths).score == pytest.approx(expected, abs=COSINE)
    assert loaded.verify(paths[0], waves[1], RATE).score == pytest.approx(
        expected, abs=1e-5
    )
    assert loaded.verify(paths[0], paths[0]).score == pytest.approx(1.0)


def test_without_a_threshold_nothing_is_decided_and_it_is_said_how_to_get_one(loaded):
    found = loaded.verify(*voices(2), RATE)
    assert (found.threshold, found.same_speaker) == (None, None)
    assert "run has no scores/results.json" in found.origin
    assert "threshold=SCORE" in found.origin


def test_the_caller_s_threshold_decides_and_counts_as_the_caller_s(loaded):
    score = loaded.verify(*voices(2), RATE).score
    for threshold, same in ((score, True), (np.nextafter(score, 2), False)):
        found = loaded.verify(*voices(2), RATE, threshold=float(threshold))
        assert (found.same_speaker, found.threshold) == (same, threshold)
        assert found.origin == "given by the caller"


@pytest.mark.parametrize(
    "threshold", [float("nan"), float("inf"), True, [0.3], np.ones(2)]
)
def test_a_threshold_that_is_none_is_refused(loaded, threshold):
    with pytest.raises(ValueError, match="threshold takes a finite score or a name"):
        loaded.verify(*voices(2), RATE, threshold=threshold)


def test_the_model_s_only_list_decides_at_its_equal_error_rate(loaded):
    found = knowing(loaded, EER, DCF, NORMED).verify(*voices(2), RATE)
    assert found.threshold == 0.31
    assert found.same_speaker == (found.score >= 0.31)
    assert found.origin == (
        "EER of the list vox1_o: 18,802 target and 18,818 impostor trials, EER 1.23 %"
    )


def test_of_several_lists_none_is_chosen_but_by_name(loaded):
    embedder = knowing(loaded, EER, DCF, HARD)
    found = embedder.verify(*voices(2), RATE)
    assert found.same_speaker is None
    assert "one of 'vox1_o', 'vox1_o minDCF(0.01)', 'vox1_h'" in found.origin
    found = embedder.verify(*voices(2), RATE, threshold="vox1_o minDCF(0.01)")
    assert found.threshold == 0.45
    assert found.origin.startswith("minDCF(0.01) of the list vox1_o")
    with pytest.raises(ValueError, match=r"no threshold 'vox2' of cosine .*'vox1_o'"):
        embedder.verify(*voices(2), RATE, threshold="vox2")


def cohort_of(fingerprint, centre=None):
    means = np.random.default_rng(0).standard_normal((5, 16))
    return Cohort(means, 3, fingerprint, centre)


@pytest.mark.parametrize("centred", [False, True])
def test_with_a_cohort_the_score_is_that_of_as_norm(loaded, centred):
    waves = voices(2)
    rows = loaded.embed(waves, RATE)
    centre = rows.mean(axis=0) + np.float32(0.01) if centred else None
    cohort = cohort_of(loaded.fingerprint, centre)
    found = knowing(loaded, EER, NORMED).verify(*waves, RATE, cohort=cohort)
    if centred:
        rows = scoring.subtract_mean(rows, centre)
    mean, std = scoring.cohort_statistics(rows, cohort.means, top_n=3)
    expected = scoring.as_norm(
        scoring.cosine(rows[:1], rows[1:]), mean[:1], std[:1], mean[1:], std[1:]
    )
    assert found.normalisation == "as_norm"
    assert found.score == pytest.approx(expected[0], rel=NORMED_SCORE)
    # Of AS-Norm's scores, and not of cosines.
    assert found.threshold == 4.5


def test_a_long_recording_in_windows_is_centred_as_a_short_one(loaded):
    first, second = voices(2)
    rows = loaded.embed([first, second], RATE)
    cohort = cohort_of(loaded.fingerprint, rows.mean(axis=0) * np.float32(0.9))
    short = loaded.verify(first, second, RATE, cohort=cohort)
    # Windows that are all the same say what one of them says.
    long = [np.tile(wave, 3) for wave in (first, second)]
    found = loaded.verify(*long, RATE, window=0.5, cohort=cohort)
    # A mean of three in float32, of which a tenth is left once it is centred.
    assert found.score == pytest.approx(short.score, rel=NORMED_SCORE)


@pytest.mark.parametrize("top_n", [-2, 0, 1, 2.5, True, None])
def test_a_cohort_that_looks_at_too_few_speakers_is_refused(top_n):
    means = np.eye(4)
    with pytest.raises(ValueError, match=rf"top_n is {top_n}, .* 4 speakers"):
        Cohort(means, top_n, "f00d")
    archive = EmbeddingArchive(tuple("abcd"), means.astype(np.float32), "f00d")
    speakers = dict(zip("abcd", "wxyz", strict=True))
    with pytest.raises(ValueError, match=rf"top_n is {top_n}, .* 4 speakers"):
        Cohort.of(archive, speakers, top_n=top_n)
    assert Cohort.of(archive, speakers, top_n=10**30).top_n == 4
    with pytest.raises(ValueError, match=r"top_n is 5, but the cohort has 4 speakers"):
        Cohort(means, 5, "f00d")


def test_a_cohort_of_another_model_or_precision_is_refused(loaded, run):
    wave = speech_like(0.5)
    other, half = (
        cohort_of("other"),
        SpeakerEmbedder.from_run(run, device="cpu", precision="bf16"),
    )
    with pytest.raises(ValueError, match="the cohort is of another model or of"):
        loaded.verify(wave, wave, RATE, cohort=other)
    with pytest.raises(ValueError, match=r"than this one \(.*, bf16\).*precision fp32"):
        half.verify(wave, wave, RATE, cohort=cohort_of(loaded.fingerprint))


def test_without_a_fingerprint_nothing_is_enrolled_or_normalised(loaded):
    nameless = SpeakerEmbedder(loaded.model, device="cpu")
    wave = speech_like(0.5)
    assert nameless.verify(wave, wave, RATE).score == pytest.approx(1.0)
    with pytest.raises(ValueError, match="without a fingerprint cannot enrol"):
        nameless.enrol([wave], RATE)
    speaker = EnrolledSpeaker(nameless.embed([wave], RATE), "")
    with pytest.raises(
        ValueError, match="a cannot be told from those of another model"
    ):
        nameless.verify(speaker, wave, RATE)
    with pytest.raises(ValueError, match="the cohort cannot be told"):
        nameless.verify(wave, wave, RATE, cohort=cohort_of(""))


def test_a_cosine_s_threshold_does_not_judge_as_norm_s_score(loaded):
    found = knowing(loaded, EER).verify(
        *voices(2), RATE, cohort=cohort_of(loaded.fingerprint)
    )
    assert found.same_speaker is None
    assert "not of as_norm scores" in found.origin


def test_an_enrolled_speaker_is_the_mean_of_unit_length_embeddings(loaded):
    waves = voices(3)
    speaker = loaded.enrol(waves, RATE)
    rows = loaded.embed(waves, RATE)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert speaker.utterances == 3
    assert np.allclose(speaker.embedding, unit.mean(axis=0), atol=1e-6)
    other = speech_like(0.5, seed=9)
    expected = scoring.cosine(unit.mean(axis=0)[None], loaded.embed(other, RATE)[None])[
        0
    ]
    for sides in ((speaker, other), (other, speaker)):
        found = loaded.verify(*sides, RATE)
        assert found.score == pytest.approx(expected, abs=COSINE)
    assert loaded.verify(speaker, speaker).score == pytest.approx(1.0)
    with pytest.raises(ValueError, match="sample_rate is 16000, but files"):
        loaded.verify(speaker, speaker, RATE)


def test_a_speaker_of_another_model_or_precision_is_refused(loaded, run, tmp_path):
    write_run(tmp_path / "other", seed=1)
    other = SpeakerEmbedder.from_run(tmp_path / "other", device="cpu")
    half = SpeakerEmbedder.from_run(run, device="cpu", precision="bf16")
    wave = speech_like(0.5)
    for embedder in (other, half):
        speaker = embedder.enrol([wave], RATE)
        with pytest.raises(
            ValueError, match="a is of another model or of another precision"
        ):
            loaded.verify(speaker, wave, RATE)


def test_a_saved_speaker_comes_back(loaded, tmp_path):
    speaker = loaded.enrol(voices(2), RATE)
    path = tmp_path / "ann.safetensors"
    speaker.save(path)
    again = EnrolledSpeaker.load(path)
    assert np.array_equal(again.embeddings, speaker.embeddings)
    assert again.fingerprint == speaker.fingerprint
    assert loaded.verify(again, speaker).score == pytest.approx(1.0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no tensors",
        b"\xff" * 100,
        safetensors.numpy.save({"embeddings": np.ones((1, 2), np.float32)}),
        safetensors.numpy.save(
            {"embeddings": np.ones((1, 2)), "fingerprint": np.zeros(1, np.uint8)}
        ),
        safetensors.numpy.save(
            {
                "embeddings": np.full((1, 2), np.nan, np.float32),
                "fingerprint": np.zeros(1, np.uint8),
            }
        ),
        safetensors.numpy.save(
            {
                "embeddings": np.ones((1, 2), np.float32),
                "fingerprint": np.full(3, 255, np.uint8),
            }
        ),
        safetensors.numpy.save(
            {
                "embeddings": np.ones((1, 2), np.float32),
                # Clears the screen of who sees it.
                "fingerprint": np.frombuffer(b"\x1b[2J", np.uint8),
            }
        ),
        safetensors.numpy.save(
            {
                "embeddings": np.ones((1, 2), np.float32),
                "fingerprint": np.full(10**6, ord("f"), np.uint8),
            }
        ),
    ],
)
def test_a_file_that_is_no_speaker_is_refused(tmp_path, content):
    path = tmp_path / "ann.safetensors"
    with pytest.raises(FileNotFoundError, match="enrol"):
        EnrolledSpeaker.load(path)
    path.write_bytes(content)
    said = r"ann\.safetensors is no enrolled speaker"
    with pytest.raises(ValueError, match=said) as error:
        EnrolledSpeaker.load(path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500 + len(str(path))


def test_other_dimensions_than_the_model_s_are_refused_in_words(loaded):
    wave, made = speech_like(0.5), loaded.fingerprint
    speaker = EnrolledSpeaker(np.ones((1, 3), np.float32), made)
    with pytest.raises(ValueError, match="but a has 3, b has 16"):
        loaded.verify(speaker, wave, RATE)
    with pytest.raises(ValueError, match="but a has 16, b has 16, the cohort has 3"):
        loaded.verify(wave, wave, RATE, cohort=Cohort(np.ones((5, 3)), 3, made))


def test_lists_and_single_utterances_are_not_taken_for_each_other(loaded):
    wave = speech_like(0.5)
    with pytest.raises(ValueError, match=r"a is a list\. Give one utterance, or enrol"):
        loaded.verify([wave], wave, RATE)
    with pytest.raises(ValueError, match=r"a list of utterances: \[utterance\]"):
        loaded.enrol(wave, RATE)


def report(sha256, **changed):
    row = {
        "trials": "one", "method": "cosine", "targets": 3, "impostors": 4, "eer": 0.25,
        "thresholds": {"EER": 0.4, "minDCF(0.01)": None},
    }  # fmt: skip
    return {"model": sha256, "subtract_mean": False, "results": [row], **changed}


def write_report(run, content):
    (run / "scores").mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (run / RESULTS).write_text(text)


def test_a_run_s_own_results_give_its_thresholds(tmp_path):
    write_run(tmp_path)
    sha256 = SpeakerEmbedder.from_run(tmp_path, device="cpu").fingerprint
    write_report(tmp_path, report(sha256))
    embedder = SpeakerEmbedder.from_run(tmp_path, device="cpu")
    found = embedder.verify(*voices(2), RATE)
    assert found.threshold == 0.4
    assert "list one: 3 target and 4 impostor trials, EER 25.00 %" in found.origin
    for content, why in (
        (report("older"), "of other weights"),
        # Cosines of embeddings that were centred are not those of verify.
        (report(sha256, subtract_mean=True), "has none: run"),
        (report(sha256, results=[]), "has none: run"),
    ):
        write_report(tmp_path, content)
        embedder = SpeakerEmbedder.from_run(tmp_path, device="cpu")
        found = embedder.verify(*voices(2), RATE)
        assert found.same_speaker is None
        assert why in found.origin


@pytest.mark.parametrize("name", ["x" * 201, "a\x1b[2J", ""])
def test_a_list_that_cannot_be_named_is_left_out_and_told_of(tmp_path, name):
    write_run(tmp_path)
    made = SpeakerEmbedder.from_run(tmp_path, device="cpu").fingerprint
    (row,) = report(made)["results"]
    content = report(made, results=[{**row, "trials": name}])
    write_report(tmp_path, content)
    found = SpeakerEmbedder.from_run(tmp_path, device="cpu").verify(*voices(2), RATE)
    assert found.same_speaker is None
    assert "A list of trials is left out for its name" in found.origin
    assert found.origin.isprintable()
    write_report(tmp_path, {**content, "results": [row, *content["results"]]})
    embedder = SpeakerEmbedder.from_run(tmp_path, device="cpu")
    assert embedder.verify(*voices(2), RATE).threshold == 0.4
    with pytest.raises(ValueError, match=r"one of 'one'\. .*left out for its name"):
        embedder.verify(*voices(2), RATE, threshold="other")


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[]",
        "{}",
        '{"model": 7, "subtract_mean": false, "results": []}',
        '{"model": "x", "results": []}',
        '{"model": "x", "subtract_mean": 0, "results": []}',
        '{"model": "x", "subtract_mean": false, "results": {}}',
        '{"model": "x", "subtract_mean": false, "results": [{"trials": "t"}]}',
        '{"model": "x", "subtract_mean": false, "results": [], "cohort": {}}',
        '{"model": "x", "subtract_mean": false, "results": [], "cohort": '
        '{"speakers": 3, "top_n": "2"}}',
        '{"model": "x", "subtract_mean": false, "results": [7]}',
        '{"model": "x", "subtract_mean": false, "results": [{"method": "cosine", '
        '"trials": "t", "targets": 1, "impostors": 1, "eer": 0.1, "thresholds": '
        '{"EER": NaN}}]}',
        "x" * 1_000_001,
        "[" * 100_000,
    ],
)
def test_results_that_are_none_are_named(tmp_path, content):
    tmp_path.joinpath("scores").mkdir()
    tmp_path.joinpath(RESULTS).write_text(content)
    with pytest.raises(ValueError, match=r"results\.json is not what .*score\.py"):
        run_thresholds(tmp_path, "x")


def test_a_key_that_stands_twice_among_many_is_found_at_once():
    keys = [f"k{i:05}" for i in range(80_000)]
    keys.append(keys[-1])
    content = ("{" + ", ".join(f'"{key}": 0' for key in keys) + "}").encode()
    assert len(content) > 1_000_000
    seen = 0

    def counted(frame, event, arg):
        nonlocal seen
        seen += event == "c_call" and arg.__name__ == "count"

    sys.setprofile(counted)
    try:
        with pytest.raises(ValueError, match=f"{keys[-1]} stands there twice"):
            strict_json(content)
    finally:
        sys.setprofile(None)
    # Each takes as long as the object is large.
    assert seen <= 1


def test_a_run_that_was_not_extracted_has_no_cohort(tmp_path):
    write_finished_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"cohort\.npz. Run .*extract\.py"):
        read_cohort(tmp_path)
