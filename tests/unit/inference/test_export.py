"""A run becomes a folder that SpeechBrain loads, from wherever it is moved."""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from speechbrain.inference.classifiers import EncoderClassifier
from speechbrain.inference.speaker import SpeakerRecognition
from speechbrain.utils.fetching import LocalStrategy

from speechbrain_rev import cli, scoring
from speechbrain_rev.data import Utterance, write_manifest
from speechbrain_rev.inference import (
    EmbeddingArchive,
    SpeakerEmbedder,
    convert_from_speechbrain,
    export_run,
    read_cohort,
)
from speechbrain_rev.inference.run_folder import read_weights
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer
from speechbrain_rev.lobes.classifier import CosineClassifier
from speechbrain_rev.whole_files import digest_of, write_sums
from tests.run_folders import (
    SPEAKERS,
    TINY,
    speech_like,
    write_audio,
    write_finished_run,
)

CPU = {"device": "cpu"}
FILES = {
    "README.md",
    "SHA256SUMS",
    "classifier.ckpt",
    "embedding_model.ckpt",
    "embedding_model.safetensors",
    "hyperparams.yaml",
    "label_encoder.txt",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, write_finished_run(folder)


@pytest.fixture(scope="module")
def moved(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export_run(run[0], folder / "out")
    return (folder / "out").rename(folder / "moved")


@pytest.fixture
def out(moved, tmp_path, monkeypatch):
    """An exported folder, moved, seen from another working directory."""
    shutil.copytree(moved, tmp_path / "elsewhere" / "moved")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "elsewhere" / "moved"


@pytest.fixture(scope="module")
def wave():
    return torch.from_numpy(speech_like())


def scored(folder, seed=0, subtract_mean=False):
    """Add what extract.py and score.py leave in a run's folder."""
    fingerprint = read_weights(folder).fingerprint
    names = tuple(f"{s}/a/{i}.wav" for s in SPEAKERS for i in range(2))
    rows = np.random.default_rng(seed).standard_normal((6, 16)).astype(np.float32)
    EmbeddingArchive(names, rows, fingerprint).save(folder / "embeddings/cohort.npz")
    write_manifest(
        folder / "save/train.csv", [Utterance(n, n, 1, n.split("/")[0]) for n in names]
    )
    row = {
        "trials": "vox1_o",
        "method": "as_norm",
        "targets": 18802,
        "impostors": 18818,
        "eer": 0.01234,
        "min_dcf": {"0.01": 0.111, "0.05": 0.222},
        "eer_95": [0.0101, 0.0151],
        "thresholds": {"EER": 4.5, "minDCF(0.01)": 6.25, "minDCF(0.05)": None},
    }
    report = {
        "model": fingerprint,
        "cohort": {"speakers": 3, "top_n": 2},
        "subtract_mean": subtract_mean,
        "results": [row],
    }
    (folder / "scores").mkdir(exist_ok=True)
    (folder / "scores/results.json").write_text(json.dumps(report))
    return rows


def test_a_moved_folder_embeds_exactly_as_the_run(run, out, wave):
    expected = SpeakerEmbedder.from_run(run[0], device="cpu").embed(wave, 16000)
    embedder = SpeakerEmbedder.from_hparams(out, device="cpu")
    assert np.array_equal(embedder.embed(wave, 16000), expected)
    assert embedder.sample_rate == TINY["sample_rate"]
    # The file of PyTorch holds the same.
    convert_from_speechbrain(out / "embedding_model.ckpt", out.parent / "converted")
    embedder = SpeakerEmbedder.from_hparams(out.parent / "converted", device="cpu")
    assert np.array_equal(embedder.embed(wave, 16000), expected)


def test_what_the_run_made_is_used_with_the_exported_copy(run, out, wave):
    ran = SpeakerEmbedder.from_run(run[0], device="cpu")
    speaker = ran.enrol([wave], 16000)
    embedder = SpeakerEmbedder.from_hparams(out, device="cpu")
    assert embedder.fingerprint == ran.fingerprint
    assert embedder.verify(speaker, wave, 16000).score == pytest.approx(1.0)


@pytest.mark.parametrize("saved", [None, LocalStrategy.SYMLINK, LocalStrategy.COPY])
def test_speechbrain_s_own_interfaces_load_a_moved_folder(run, out, wave, saved):
    expected = SpeakerEmbedder.from_run(run[0], device="cpu").embed(wave, 16000)
    given = {"source": str(out), "run_opts": CPU}
    if saved is not None:
        given |= {"savedir": str(out.parent / "saved"), "local_strategy": saved}
    classifier = EncoderClassifier.from_hparams(**given)
    embedding = classifier.encode_batch(wave[None])[0, 0].numpy()
    assert np.abs(embedding - expected).max() <= 1e-5 * np.abs(expected).max()
    cosines, _, index, labels = classifier.classify_batch(wave[None])
    directions = torch.nn.functional.normalize(run[1].weight[: len(SPEAKERS)], dim=1)
    ours = directions @ torch.from_numpy(expected / np.linalg.norm(expected))
    assert torch.allclose(cosines[0], ours, atol=1e-5)
    assert labels == [SPEAKERS[int(index)]]
    verification = SpeakerRecognition.from_hparams(**given)
    other = torch.from_numpy(speech_like(seed=1))
    score, _ = verification.verify_batch(wave[None], other[None])
    embedder = SpeakerEmbedder.from_hparams(out, device="cpu")
    ours = scoring.cosine(expected[None], embedder.embed(other, 16000)[None])
    assert float(score) == pytest.approx(float(ours[0]), abs=1e-5)


def test_speechbrain_loads_a_folder_given_relative_to_the_working_directory(
    out, wave, monkeypatch
):
    monkeypatch.chdir(out.parent)
    classifier = EncoderClassifier.from_hparams(source="moved", run_opts=CPU)
    assert classifier.encode_batch(wave[None]).shape == (1, 1, TINY["embedding_dim"])


@pytest.mark.parametrize("name", ["embedding_model", "classifier"])
@pytest.mark.parametrize("change", ["missing", "surplus"])
def test_speechbrain_refuses_weights_that_are_missing_or_surplus(out, name, change):
    path = out / f"{name}.ckpt"
    state = torch.load(path, weights_only=True)
    key = next(iter(state))
    if change == "missing":
        del state[key]
    else:
        key = "one_too_many"
        state[key] = torch.zeros(1)
    torch.save(state, path)
    with pytest.raises(ValueError, match=rf"(?s){name}\.ckpt does not fit.*{key}"):
        EncoderClassifier.from_hparams(source=str(out), run_opts=CPU)


def test_speechbrain_refuses_labels_of_other_speakers(out):
    path = out / "label_encoder.txt"
    path.write_text("'x' => 3\n" + path.read_text())
    with pytest.raises(ValueError, match=r"numbers 4 speakers.*tells 3 apart"):
        EncoderClassifier.from_hparams(source=str(out), run_opts=CPU)


def test_everything_is_in_the_folder_and_its_checksums_hold(out):
    assert {path.name for path in out.iterdir()} == FILES
    assert not any(path.is_symlink() for path in out.iterdir())
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=out, capture_output=True
    )
    assert done.returncode == 0
    assert done.stdout.count(b": OK") == len(FILES) - 1
    assert out.stat().st_mode & 0o777 == 0o777 & ~current_mask()


def current_mask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_both_files_of_weights_and_the_run_s_are_the_same_numbers(run, out):
    trained = torch.load(run[0] / "embedding_model.ckpt", weights_only=True)
    for found in (
        load_file(out / "embedding_model.safetensors"),
        torch.load(out / "embedding_model.ckpt", weights_only=True),
    ):
        assert found.keys() == trained.keys()
        assert all(torch.equal(found[name], trained[name]) for name in trained)


def test_the_classifier_keeps_the_speed_recorded_of_each_speaker(run, out):
    weight = torch.load(out / "classifier.ckpt", weights_only=True)["weight"]
    assert torch.equal(weight, run[1].weight[: len(SPEAKERS)])
    # Of the whole one, no memory goes along.
    assert weight.untyped_storage().nbytes() == weight.nbytes


def test_no_file_names_a_place_of_the_training_machine(run, tmp_path):
    export_run(run[0], tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        content = path.read_bytes()
        for place in (b"/secret", str(run[0].parent).encode(), str(tmp_path).encode()):
            assert place not in content, path.name


def test_the_card_tells_data_settings_and_what_is_missing(run, tmp_path):
    missing = export_run(run[0], tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert len(missing) == 2
    assert "cohort.safetensors, for AS-Norm" in missing[0]
    assert "measured error rates" in missing[1]
    assert all(words in card for words in missing)
    assert "Error rates were not measured." in card
    assert "12 utterances of 3 speakers, of VoxCeleb2" in card
    assert "one.txt" in card
    assert "| speeds | [1.0, 0.9, 1.1] |" in card


@pytest.mark.parametrize("subtract", [False, True])
def test_measured_rates_and_the_cohort_travel_along(tmp_path, subtract):
    write_finished_run(tmp_path / "run")
    rows = scored(tmp_path / "run", subtract_mean=subtract)
    assert export_run(tmp_path / "run", tmp_path / "out") == []
    card = (tmp_path / "out/README.md").read_text()
    row = "| vox1_o | as_norm | 1.23 [1.01, 1.51] | 0.111 | 0.222 | 18,802 | 18,818 |"
    assert row in card
    assert ("subtract_mean(embeddings, cohort.centre)" in card) == subtract
    cohort = read_cohort(tmp_path / "out")
    assert cohort.top_n == 2
    if subtract:
        assert np.array_equal(cohort.centre, rows.mean(axis=0))
        rows = scoring.subtract_mean(rows, rows.mean(axis=0))
    else:
        assert cohort.centre is None
    _, means = scoring.speaker_means(rows, [s for s in SPEAKERS for _ in range(2)])
    assert np.array_equal(cohort.means, means)


def test_a_cohort_of_a_run_that_was_not_scored_is_as_its_settings_say(tmp_path):
    write_finished_run(tmp_path / "run", cohort_top_n=2)
    scored(tmp_path / "run")
    (tmp_path / "run/scores/results.json").unlink()
    (missing,) = export_run(tmp_path / "run", tmp_path / "out")
    assert missing.startswith("measured error rates")
    cohort = read_cohort(tmp_path / "out")
    assert (cohort.top_n, cohort.centre) == (2, None)


def test_what_the_card_shows_runs(tmp_path, monkeypatch):
    write_finished_run(tmp_path / "run")
    scored(tmp_path / "run", subtract_mean=True)
    export_run(tmp_path / "run", tmp_path / "FOLDER")
    for seed, name in enumerate(("a.wav", "b.wav")):
        write_audio(tmp_path / name, speech_like(seed=seed))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(.*?)```", (tmp_path / "FOLDER/README.md").read_text(), re.DOTALL
    )
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert len(blocks) == 3
    assert names["mean"].shape == names["std"].shape == (2,)
    ours = scoring.cosine(*np.split(names["embedder"].embed(["a.wav", "b.wav"]), 2))
    assert float(names["score"]) == pytest.approx(float(ours[0]), abs=1e-5)
    expected = names["embedder"].verify("a.wav", "b.wav", cohort=names["cohort"])
    assert names["verified"] == expected
    assert (expected.normalisation, expected.threshold) == ("as_norm", 4.5)
    # The card's second way, of many, is that of one.
    cosine = scoring.cosine(*np.split(names["embeddings"], 2))
    sides = [
        values[i : i + 1] for i in range(2) for values in (names["mean"], names["std"])
    ]
    normed = scoring.as_norm(cosine, *sides)
    assert float(normed[0]) == pytest.approx(expected.score, rel=1e-4)


@pytest.mark.parametrize("what", ["embeddings", "scores"])
def test_figures_of_other_weights_are_refused(tmp_path, what):
    write_finished_run(tmp_path / "run")
    scored(tmp_path / "run")
    if what == "embeddings":
        path = tmp_path / "run/embeddings/cohort.npz"
        stored = EmbeddingArchive.load(path)
        EmbeddingArchive(stored.names, stored.embeddings, "older").save(path)
    else:
        path = tmp_path / "run/scores/results.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model": "older"}))
    with pytest.raises(ValueError, match=f"{path.name} is of other weights"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_results_of_other_weights_do_not_decide_on_a_run_s_cohort(tmp_path):
    write_finished_run(tmp_path / "run")
    scored(tmp_path / "run")
    path = tmp_path / "run/scores/results.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps({**report, "model": "older"}))
    with pytest.raises(ValueError, match=r"results\.json is of other weights"):
        read_cohort(tmp_path / "run")
    path.write_text(json.dumps({**report, "cohort": {"speakers": 3, "top_n": -1}}))
    with pytest.raises(ValueError, match=r"results\.json is not what .*score\.py"):
        read_cohort(tmp_path / "run")


def test_a_run_s_cohort_is_not_read_through_links_out_of_it(tmp_path):
    write_finished_run(tmp_path / "run")
    scored(tmp_path / "run")
    for name in ("scores/results.json", "embeddings/cohort.npz"):
        path = tmp_path / "run" / name
        content = path.read_bytes()
        (tmp_path / "elsewhere").write_bytes(content)
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="is a link out of its folder"):
            read_cohort(tmp_path / "run")
        path.unlink()
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["x" * 201, "a\x1b[2J"])
def test_a_list_that_cannot_be_named_is_exported_by_another_name(tmp_path, name):
    write_finished_run(tmp_path / "run")
    scored(tmp_path / "run")
    path = tmp_path / "run/scores/results.json"
    report = json.loads(path.read_text())
    report["results"][0]["trials"] = name
    path.write_text(json.dumps(report))
    assert export_run(tmp_path / "run", tmp_path / "out") == []
    embedder = SpeakerEmbedder.from_hparams(tmp_path / "out", device="cpu")
    names = [one.name for one in embedder.thresholds.known]
    assert names == ["trials", "trials minDCF(0.01)"]
    assert "\x1b" not in (tmp_path / "out/README.md").read_text()


def test_thresholds_travel_with_the_model_and_decide(tmp_path, wave):
    write_finished_run(tmp_path / "run")
    scored(tmp_path / "run")
    assert export_run(tmp_path / "run", tmp_path / "out") == []
    ran = SpeakerEmbedder.from_run(tmp_path / "run", device="cpu")
    embedder = SpeakerEmbedder.from_hparams(tmp_path / "out", device="cpu")
    assert embedder.thresholds == ran.thresholds
    names = [one.name for one in embedder.thresholds.known]
    assert names == ["vox1_o", "vox1_o minDCF(0.01)"]
    cohort, own = (read_cohort(tmp_path / name) for name in ("out", "run"))
    assert np.array_equal(cohort.means, own.means)
    assert (cohort.top_n, own.top_n) == (2, 2)
    other = torch.from_numpy(speech_like(seed=1))
    found = embedder.verify(wave, other, 16000, cohort=cohort)
    assert found.threshold == 4.5
    assert found.same_speaker == (found.score >= 4.5)
    assert "vox1_o: 18,802 target" in found.origin
    assert found == ran.verify(wave, other, 16000, cohort=own)
    card = (tmp_path / "out/README.md").read_text()
    assert "| vox1_o | as_norm | 4.5000 |" in card


def test_results_of_before_thresholds_are_said_to_have_none(tmp_path):
    write_finished_run(tmp_path / "run")
    scored(tmp_path / "run")
    path = tmp_path / "run/scores/results.json"
    report = json.loads(path.read_text())
    del report["results"][0]["thresholds"]
    path.write_text(json.dumps(report))
    (missing,) = export_run(tmp_path / "run", tmp_path / "out")
    assert missing.startswith("thresholds.json")
    assert not (tmp_path / "out/thresholds.json").exists()


def test_a_run_that_has_not_ended_says_so(tmp_path):
    write_finished_run(tmp_path / "run")
    (tmp_path / "run/embedding_model.ckpt").unlink()
    missing = export_run(tmp_path / "run", tmp_path / "out")
    assert missing[0].startswith("the end of its training")
    assert missing[0] in (tmp_path / "out/README.md").read_text()


def test_a_folder_that_is_not_empty_is_left_as_it_is(run, tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ValueError, match="not empty: nothing is overwritten"):
        export_run(run[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    export_run(run[0], tmp_path / "empty")
    assert {path.name for path in (tmp_path / "empty").iterdir()} == FILES


@pytest.mark.parametrize("name", ["torch.save", "read_model"])
def test_nothing_half_written_is_left(run, tmp_path, monkeypatch, name):
    def fail(*_):
        raise OSError("disk full")

    module = "speechbrain_rev.inference.export"
    monkeypatch.setattr(f"{module}.{name}", fail)
    with pytest.raises(OSError, match="disk full"):
        export_run(run[0], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"speeds": [1.0]}, "9 classes, which is not 3 speakers times 1"),
        ({"speeds": "null"}, "does not say the speeds"),
        ({"arch": "revnet58"}, "revnet57"),
    ],
)
def test_a_run_that_does_not_fit_together_is_refused(tmp_path, changed, message):
    write_finished_run(tmp_path / "run", **changed)
    with pytest.raises(ValueError, match=message):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_labels_that_an_editor_saved_are_exported_and_damaged_ones_refused(tmp_path):
    write_finished_run(tmp_path / "run")
    path = tmp_path / "run/save/label_encoder.txt"
    text = path.read_text()
    path.write_bytes(("\ufeff" + text).replace("\n", "\r\n").encode())
    export_run(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/label_encoder.txt").read_text() == text
    path.write_text(text.replace("=> 1", "=> 7"))
    with pytest.raises(
        ValueError, match=r"label_encoder\.txt, line 2: .* next speaker, 1"
    ):
        export_run(tmp_path / "run", tmp_path / "other")


def test_a_classifier_of_other_embeddings_is_refused(tmp_path):
    write_finished_run(tmp_path / "run")
    save = tmp_path / "run/save"
    (old,) = save.glob("CKPT*")
    old.rename(tmp_path / "old")
    WholeCheckpointer(save, {"classifier": CosineClassifier(8, 9)}).save_checkpoint()
    with pytest.raises(
        ValueError, match="embeddings of 8 numbers, but embedding_dim is 16"
    ):
        export_run(tmp_path / "run", tmp_path / "out")


def test_a_cohort_that_cannot_be_read_is_not_handed_out(tmp_path):
    write_finished_run(tmp_path / "run")
    scored(tmp_path / "run")
    path = tmp_path / "run/scores/results.json"
    report = json.loads(path.read_text())
    report["cohort"]["top_n"] = 1
    path.write_text(json.dumps(report))
    with pytest.raises(ValueError, match="top_n is 1, but the cohort has 3 speakers"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_card_names_trial_lists_without_their_folders(tmp_path):
    write_finished_run(tmp_path / "run")
    scored(tmp_path / "run")
    save = tmp_path / "run/save/prepared.json"
    record = json.loads(save.read_text())
    record["settings"]["trial_lists"] = dict.fromkeys(
        ["/secret/place/a/one.txt", "/secret/place/b/one.txt", "/secret/vox1_o.txt"],
        "f0",
    )
    save.write_text(json.dumps(record))
    path = tmp_path / "run/scores/results.json"
    report = json.loads(path.read_text())
    (row,) = report["results"]
    names = ["secret_place_a_one.txt", "secret_place_b_one.txt", "vox1_o", "my_list"]
    names += ["secret_place_unknown_c.txt"]
    report["results"] = [
        {**row, "trials": name, "method": method, "thresholds": {"EER": 0.5}}
        for name in names
        for method in ("cosine", "as_norm")
    ]
    path.write_text(json.dumps(report))
    export_run(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "secret" not in card
    for name in ("one (1)", "one (2)", "vox1_o", "my_list", "trials"):
        assert f"| {name} | cosine |" in card
        assert f"| {name} | as_norm |" in card
    found = SpeakerEmbedder.from_hparams(tmp_path / "out", device="cpu").thresholds
    assert "secret" not in str(found)
    assert len(found.known) == 10


def test_results_with_thresholds_that_are_none_are_named(tmp_path):
    write_finished_run(tmp_path / "run")
    scored(tmp_path / "run")
    path = tmp_path / "run/scores/results.json"
    report = json.loads(path.read_text())
    report["results"][0]["thresholds"] = {"EER": "high"}
    path.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"results\.json is not what .*score\.py"):
        export_run(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("out", [".", "../empty", "./."])
def test_the_working_directory_may_be_written_where_it_is_empty(
    run, tmp_path, monkeypatch, out
):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    export_run(run[0], out)
    assert {path.name for path in (tmp_path / "empty").iterdir()} == FILES


def test_a_damaged_classifier_is_refused(tmp_path):
    write_finished_run(tmp_path / "run")
    path = next((tmp_path / "run/save").glob("CKPT*/classifier.ckpt"))
    torch.save({"weight": torch.zeros(9, 16)}, path)
    with pytest.raises(ValueError, match=r"classifier\.ckpt is damaged"):
        export_run(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("name", ["label_encoder.txt", "prepared.json"])
def test_what_a_run_was_made_of_is_exported_as_it_was_written(tmp_path, name):
    write_finished_run(tmp_path / "run")
    path = tmp_path / "run/save" / name
    write_sums(path.parent, {name: digest_of(path, "sha256")})
    export_run(tmp_path / "run", tmp_path / "out")
    path.write_bytes(path.read_bytes().replace(b"1", b"3"))
    with pytest.raises(ValueError, match=rf"{name} is not as it was written"):
        export_run(tmp_path / "run", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_command_exports_and_says_what_is_missing(run, tmp_path, capsys):
    assert cli.main(["export", str(run[0]), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "README.md says what is in it" in said
    assert "It lacks cohort.safetensors" in said
    assert cli.main(["export", str(run[0]), str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err


def test_an_exported_model_is_not_exported_again(out, tmp_path):
    with pytest.raises(ValueError, match=r"is an exported model already\. Copy"):
        export_run(out, tmp_path / "again")


@pytest.mark.parametrize("ending", [".pt", ".pth", ".ckpt", ".SAFETENSORS"])
def test_an_ending_of_files_names_no_folder(run, tmp_path, capsys, ending):
    assert cli.main(["export", str(run[0]), str(tmp_path / f"m1{ending}")]) == 2
    assert f"graph give {tmp_path / 'm1.pt2'} or " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_in_the_place_of_a_model_is_named_as_that(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run[0], copy)
    # As SpeechBrain's script leaves itself there.
    (copy / "train.py").touch()
    words = "output_folder of a training run .*from_run.*speechbrain-rev export "
    with pytest.raises(FileNotFoundError, match=words):
        SpeakerEmbedder.from_hparams(copy)
    with pytest.raises(FileNotFoundError, match=words):
        convert_from_speechbrain(copy, tmp_path / "out")


@pytest.mark.parametrize("source", ["owner/model", "a.wav", "folder"])
def test_what_is_converted_lies_here(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    for name in ("a.wav", "mine.py"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError, match="Give a local folder with") as error:
        convert_from_speechbrain(source, "out")
    assert "snapshot_download" in str(error.value)
    assert "brings code" not in str(error.value)
