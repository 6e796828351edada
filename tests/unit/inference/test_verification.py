"""Scores, decisions, enrolled speakers and cohorts."""

from dataclasses import replace

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
from tests.run_folders import speech_like, write_audio, write_run
from tests.unit.inference.conftest import put

RATE = 16000
# A row is that of another batch to 1e-5 of its length, on either side of a cosine.
COSINE = 2e-5
# AS-Norm divides cosines by deviations, here of about a fifth.
NORMED_SCORE = 1e-4
EER = Threshold("vox1_o", "EER", "cosine", 0.31, 18802, 18818, 0.0123, (1, 1), None)
DCF = Threshold(
    "vox1_o", "minDCF(0.01)", "cosine", 0.45, 18802, 18818, 0.0123, (1, 1), None
)
NORMED = Threshold("vox1_o", "EER", "as_norm", 4.5, 18802, 18818, 0.0111, (1, 1), None)
HARD = Threshold("vox1_h", "EER", "cosine", 0.29, 10, 10, 0.02, (1, 1), None)
A, B, C = (speech_like(0.5, seed=seed) for seed in range(3))


@pytest.fixture
def knowing(embedder):
    """A function that gives the embedder thresholds."""

    def know(*known):
        given = {"fingerprint": embedder.fingerprint, "device": "cpu"}
        thresholds = Thresholds(known, "")
        return SpeakerEmbedder(embedder.model, thresholds=thresholds, **given)

    return know


def cohort_of(fingerprint, centre=None):
    means = np.random.default_rng(0).standard_normal((5, 16))
    return Cohort(means, 3, fingerprint, centre)


def test_the_score_is_the_cosine_of_the_embeddings(embedder, tmp_path):
    rows = embedder.embed([A, B], RATE)
    expected = scoring.cosine(rows[:1], rows[1:])[0]
    paths = [write_audio(tmp_path / f"{i}.wav", w) for i, w in enumerate((A, B))]
    for sides in ((A, B, RATE), paths, (paths[0], B, RATE)):
        verified = embedder.verify(*sides)
        assert verified.normalisation == "cosine"
        assert verified.score == pytest.approx(expected, abs=COSINE)
    assert embedder.verify(paths[0], paths[0]).score == pytest.approx(1.0)
    # Nothing is decided without a threshold.
    assert (verified.threshold, verified.same_speaker) == (None, None)
    assert "has neither thresholds.json nor scores/results.json" in verified.origin
    assert "threshold=SCORE" in verified.origin


def test_the_caller_s_threshold_decides(knowing):
    embedder = knowing(EER)
    score = embedder.verify(A, B, RATE).score
    for threshold, same in ((score, True), (np.nextafter(score, 2), False)):
        verified = embedder.verify(A, B, RATE, threshold=float(threshold))
        assert (verified.same_speaker, verified.threshold) == (same, threshold)
        assert verified.origin == "given by the caller"
    for none in (float("nan"), True, [0.3], np.ones(2)):
        with pytest.raises(ValueError, match="takes a finite score or a name"):
            embedder.verify(A, B, RATE, threshold=none)


def test_a_threshold_of_other_enrolments_is_named_with_what_measures_one(knowing):
    """As for a speaker of four utterances by a list whose speakers have one."""
    several = replace(EER, trials="four", enrolled=(3, 4), interval=(0.25, 0.375))
    embedder = knowing(EER, several)
    ann = embedder.enrol([A, B, C, A], RATE)
    verified = embedder.verify(ann, B, RATE, threshold="vox1_o")
    assert "of speakers enrolled with 1 utterance, and here one is known by 4" in (
        verified.remark
    )
    assert "--trial_lists LIST, with a file spk2utt beside" in verified.remark
    assert not embedder.verify(A, B, RATE, threshold="vox1_o").remark
    assert not embedder.verify(ann, B, RATE, threshold=0.5).remark
    fitting = embedder.verify(B, ann, RATE, threshold="four")
    assert not fitting.remark
    words = (
        "enrolled with 3 to 4 utterances, EER 1.23 %, 95 % interval 0.2500 to 0.3750"
    )
    assert fitting.origin.endswith(words)


def test_the_only_list_of_a_model_decides_and_several_by_name(knowing, embedder):
    verified = knowing(EER, DCF, NORMED).verify(A, B, RATE)
    assert verified.threshold == 0.31
    assert verified.same_speaker == (verified.score >= 0.31)
    assert verified.origin == (
        "EER of the list vox1_o: 18,802 target and 18,818 impostor trials of speakers enrolled with 1 utterance, EER 1.23 %"
    )
    several = knowing(EER, DCF, HARD)
    verified = several.verify(A, B, RATE)
    assert verified.same_speaker is None
    assert "one of 'vox1_o', 'vox1_o minDCF(0.01)', 'vox1_h'" in verified.origin
    verified = several.verify(A, B, RATE, threshold="vox1_o minDCF(0.01)")
    assert verified.threshold == 0.45
    assert verified.origin.startswith("minDCF(0.01) of the list vox1_o")
    with pytest.raises(ValueError, match=r"no threshold 'vox2' of cosine .*'vox1_o'"):
        several.verify(A, B, RATE, threshold="vox2")
    # A cosine's does not judge AS-Norm's score.
    cohort = cohort_of(embedder.fingerprint)
    verified = knowing(EER).verify(A, B, RATE, cohort=cohort)
    assert verified.same_speaker is None
    assert "not of as_norm scores" in verified.origin


@pytest.mark.parametrize("centred", [False, True])
def test_with_a_cohort_the_score_is_that_of_as_norm(embedder, knowing, centred):
    rows = embedder.embed([A, B], RATE)
    centre = rows.mean(axis=0) * np.float32(0.9) if centred else None
    cohort = cohort_of(embedder.fingerprint, centre)
    verified = knowing(EER, NORMED).verify(A, B, RATE, cohort=cohort)
    if centred:
        rows = scoring.subtract_mean(rows, centre)
    mean, std = scoring.cohort_statistics(rows, cohort.means, top_n=3)
    cosine = scoring.cosine(rows[:1], rows[1:])
    expected = scoring.as_norm(cosine, mean[:1], std[:1], mean[1:], std[1:])
    assert verified.normalisation == "as_norm"
    assert verified.score == pytest.approx(expected[0], rel=NORMED_SCORE)
    # Of AS-Norm's scores, and not of cosines.
    assert verified.threshold == 4.5
    # Windows that are all the same say what one of them says, up to a mean of three in
    # float32, of which a tenth is left once it is centred.
    long = [np.tile(wave, 3) for wave in (A, B)]
    windows = embedder.verify(*long, RATE, window=0.5, cohort=cohort)
    assert windows.score == pytest.approx(verified.score, rel=NORMED_SCORE)


def test_an_enrolled_speaker_is_the_mean_of_unit_length_embeddings(embedder, tmp_path):
    speaker, rows = (call([A, B, C], RATE) for call in (embedder.enrol, embedder.embed))
    mean = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(axis=0)
    assert speaker.utterances == 3
    assert np.allclose(speaker.embedding, mean, atol=1e-6)
    other = speech_like(0.5, seed=9)
    expected = scoring.cosine(mean[None], embedder.embed(other, RATE)[None])[0]
    for sides in ((speaker, other), (other, speaker)):
        assert embedder.verify(*sides, RATE).score == pytest.approx(
            expected, abs=COSINE
        )
    speaker.save(tmp_path / "ann.safetensors")
    again = EnrolledSpeaker.load(tmp_path / "ann.safetensors")
    assert np.array_equal(again.embeddings, speaker.embeddings)
    assert again.fingerprint == speaker.fingerprint
    assert embedder.verify(again, speaker).score == pytest.approx(1.0)
    with pytest.raises(ValueError, match="sample_rate is 16000, but files"):
        embedder.verify(speaker, speaker, RATE)


def test_what_another_model_or_precision_made_is_refused(embedder, trained, tmp_path):
    half = SpeakerEmbedder.from_run(trained[0], device="cpu", precision="bf16")
    write_run(tmp_path, seed=1)
    other = SpeakerEmbedder.from_run(tmp_path, device="cpu")
    words = "a is of another model or of another precision"
    for maker in (other, half):
        with pytest.raises(ValueError, match=words):
            embedder.verify(maker.enrol([A], RATE), A, RATE)
    with pytest.raises(ValueError, match="the cohort is of another model or of"):
        embedder.verify(A, A, RATE, cohort=cohort_of("other"))
    with pytest.raises(ValueError, match=r"than this one \(.*, bf16\).*precision fp32"):
        half.verify(A, A, RATE, cohort=cohort_of(embedder.fingerprint))


def test_without_a_fingerprint_nothing_is_enrolled_or_normalised(embedder):
    nameless = SpeakerEmbedder(embedder.model, device="cpu")
    assert nameless.verify(A, A, RATE).score == pytest.approx(1.0)
    with pytest.raises(ValueError, match="without a fingerprint cannot enrol"):
        nameless.enrol([A], RATE)
    speaker = EnrolledSpeaker(nameless.embed([A], RATE), "")
    with pytest.raises(ValueError, match="a cannot be distinguished from those of"):
        nameless.verify(speaker, A, RATE)
    with pytest.raises(ValueError, match="the cohort cannot be distinguished"):
        nameless.verify(A, A, RATE, cohort=cohort_of(""))


def test_sides_that_do_not_go_together_are_refused(embedder):
    made = embedder.fingerprint
    speaker = EnrolledSpeaker(np.ones((1, 3), np.float32), made)
    cohort = {"cohort": Cohort(np.ones((5, 3)), 3, made)}
    for a, given, words in (
        (speaker, {}, "but a has 3, b has 16"),
        (A, cohort, "but a has 16, b has 16, the cohort has 3"),
        ([A], {}, r"a is a list\. Give one utterance, or enrol"),
    ):
        with pytest.raises(ValueError, match=words):
            embedder.verify(a, A, RATE, **given)
    with pytest.raises(ValueError, match=r"a list of utterances: \[utterance\]"):
        embedder.enrol(A, RATE)


def text(content):
    return np.frombuffer(content, np.uint8)


def file_of(arrays, changed):
    """The file of some arrays but for those changed; None leaves one out."""
    if isinstance(changed, bytes):
        return changed
    arrays = {n: a for n, a in (arrays | changed).items() if a is not None}
    return safetensors.numpy.save(arrays)


SPEAKER = {"embeddings": np.ones((1, 2), np.float32), "fingerprint": text(b"f00d")}
MEANS = np.zeros((4, 16))
COHORT = {"means": MEANS, "top_n": np.array([2]), "fingerprint": text(b"f")}
COHORT_FILE = "cohort.safetensors"


@pytest.mark.parametrize(
    "changed",
    [
        b"no tensors",
        {"fingerprint": None},
        {"embeddings": np.ones((1, 2))},
        {"embeddings": np.full((1, 2), np.nan, np.float32)},
        {"fingerprint": text(b"\xff" * 3)},
        # Clears the screen of who sees it.
        {"fingerprint": text(b"\x1b[2J")},
        {"fingerprint": text(b"f" * 10**6)},
    ],
)
def test_a_file_that_is_no_speaker_is_refused(tmp_path, changed):
    path = tmp_path / "ann.safetensors"
    with pytest.raises(FileNotFoundError, match="enrol"):
        EnrolledSpeaker.load(path)
    path.write_bytes(file_of(SPEAKER, changed))
    words = r"ann\.safetensors is no enrolled speaker"
    with pytest.raises(ValueError, match=words) as error:
        EnrolledSpeaker.load(path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500 + len(str(path))


@pytest.mark.parametrize(
    "changed",
    [
        b"nothing",
        {"top_n": None},
        {"fingerprint": text(b"\x1b")},
        {"means": MEANS.astype(np.float32)},
        {"means": MEANS[0]},
        {"means": MEANS + np.inf},
        {"top_n": np.array([2, 3])},
        {"top_n": np.array(2)},
        {"top_n": np.array([5])},
        {"more": MEANS},
    ],
)
def test_a_cohort_of_anything_else_is_refused(model, changed):
    put(model, COHORT_FILE, file_of(COHORT, changed))
    with pytest.raises(ValueError, match=r"cohort\.safetensors is no cohort"):
        read_cohort(model)


def test_a_cohort_is_read_as_it_was_written(model):
    with pytest.raises(FileNotFoundError, match=r"has neither cohort\.saf.* export"):
        read_cohort(model)
    means = np.random.default_rng(0).standard_normal((4, 16))
    centre = means[0].astype(np.float32)
    Cohort(means, 3, "f00d, bf16", centre).write(model / COHORT_FILE)
    put(model, COHORT_FILE, (model / COHORT_FILE).read_bytes())
    cohort = read_cohort(model)
    assert np.array_equal(cohort.means, means)
    assert np.array_equal(cohort.centre, centre)
    assert (cohort.top_n, cohort.fingerprint) == (3, "f00d, bf16")


@pytest.mark.parametrize("top_n", [0, 1, 2.5, True, None])
def test_a_cohort_that_looks_at_too_few_speakers_is_refused(top_n):
    archive = EmbeddingArchive(tuple("abcd"), np.eye(4, dtype=np.float32), "f00d")
    speakers, words = (
        dict(zip("abcd", "wxyz", strict=True)),
        rf"top_n is {top_n}, .* 4 sp",
    )
    with pytest.raises(ValueError, match=words):
        Cohort(np.eye(4), top_n, "f00d")
    with pytest.raises(ValueError, match=words):
        Cohort.of(archive, speakers, top_n=top_n)
    assert Cohort.of(archive, speakers, top_n=10**30).top_n == 4


def test_a_run_s_cohort_is_of_its_own_files(run, scored_run, tmp_path):
    assert read_cohort(scored_run).top_n == 2
    for name in ("scores/results.json", "embeddings/cohort.npz"):
        path = scored_run / name
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="is a link out of its folder"):
            read_cohort(scored_run)
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"cohort\.npz\. If .*extract\.py"):
        read_cohort(scored_run)
