"""A run becomes a folder that SpeechBrain loads, from wherever it is moved."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from speechbrain.inference.classifiers import EncoderClassifier
from speechbrain.inference.speaker import SpeakerRecognition
from speechbrain.utils.fetching import LocalStrategy

from speechbrain_rev import cli, scoring
from speechbrain_rev.files import digest_of, write_sums
from speechbrain_rev.inference import (
    EmbeddingArchive,
    SpeakerEmbedder,
    export_run,
    read_cohort,
)
from speechbrain_rev.inference.runs import EarlierEpochs, read_record
from speechbrain_rev.inference.thresholds import RESULTS
from speechbrain_rev.lobes.classifier import CosineClassifier
from tests.run_folders import (
    SPEAKERS,
    change_record,
    speech_like,
    tiny_encoder,
    write_audio,
    write_scores,
)
from tests.unit.inference.conftest import Attack, change_results, close, put

CPU = {"device": "cpu"}
CKPT, TENSORS = "embedding_model.ckpt", "embedding_model.safetensors"
YAML, LABELS, SUMS = "hyperparams.yaml", "label_encoder.txt", "SHA256SUMS"
CLASSIFIER, CARD, SETTINGS = "classifier.ckpt", "README.md", "settings.json"
FILES = {CARD, SUMS, CLASSIFIER, CKPT, TENSORS, YAML, LABELS, SETTINGS}


@pytest.fixture(scope="module")
def wave():
    return torch.from_numpy(speech_like())


@pytest.mark.parametrize("saved", [None, LocalStrategy.SYMLINK, LocalStrategy.COPY])
def test_a_moved_folder_is_the_run_to_us_and_to_speechbrain(
    trained, embedder, model, wave, saved, tmp_path
):
    expected = embedder.embed(wave, 16000)
    ours = SpeakerEmbedder.from_hparams(model, device="cpu")
    assert np.array_equal(ours.embed(wave, 16000), expected)
    speaker = embedder.enrol([wave], 16000)
    assert ours.verify(speaker, wave, 16000).score == pytest.approx(1.0)
    given = {"source": "../model" if saved is None else str(model), "run_opts": CPU}
    if saved is not None:
        given |= {"savedir": str(tmp_path / "saved"), "local_strategy": saved}
    classifier = EncoderClassifier.from_hparams(**given)
    assert close(classifier.encode_batch(wave[None])[0, 0].numpy(), expected)
    cosines, _, index, labels = classifier.classify_batch(wave[None])
    # Of each speaker the speed recorded is kept.
    kept = trained[1].weight[: len(SPEAKERS)]
    unit = torch.from_numpy(expected / np.linalg.norm(expected))
    by_hand = torch.nn.functional.normalize(kept, dim=1) @ unit
    assert torch.allclose(cosines[0], by_hand, atol=1e-5)
    assert labels == [SPEAKERS[int(index)]]
    other = torch.from_numpy(speech_like(seed=1))
    verification = SpeakerRecognition.from_hparams(**given)
    score, _ = verification.verify_batch(wave[None], other[None])
    by_us = scoring.cosine(expected[None], ours.embed(other, 16000)[None])
    assert float(score) == pytest.approx(float(by_us[0]), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            CKPT,
            lambda state: state.pop("fc.bias"),
            r"(?s)l\.ckpt does not fit.*fc\.bias",
        ),
        (CLASSIFIER, lambda state: state.update(x=torch.ones(1)), "(?s)not fit.*x"),
        (LABELS, None, r"numbers 4 speakers.*has 3 classes"),
    ],
)
def test_speechbrain_refuses_files_of_another_model(model, name, change, words):
    if change is None:
        (model / name).write_text("'x' => 3\n" + (model / name).read_text())
    else:
        state = torch.load(model / name, weights_only=True)
        change(state)
        torch.save(state, model / name)
    with pytest.raises(ValueError, match=words):
        EncoderClassifier.from_hparams(source=str(model), run_opts=CPU)


def test_everything_is_in_the_folder_and_names_no_place_of_its_making(
    run, tmp_path, monkeypatch
):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    missing = export_run(run, ".")
    # The folder at hand was replaced.
    monkeypatch.chdir(tmp_path / "out")
    files = {path.name: path.read_bytes() for path in Path().iterdir()}
    assert files.keys() == FILES
    assert not any(path.is_symlink() for path in Path().iterdir())
    mask = os.umask(0)
    os.umask(mask)
    assert Path().stat().st_mode & 0o777 == 0o777 & ~mask
    subprocess.run(["sha256sum", "--strict", "-c", SUMS], check=True)
    assert files[SUMS].count(b"\n") == len(FILES) - 1
    for content in files.values():
        assert b"/secret" not in content
        assert str(tmp_path).encode() not in content
    expected = torch.load(run / CKPT, weights_only=True)
    tensors = safetensors.torch.load(files[TENSORS])
    for written in (tensors, torch.load(CKPT, weights_only=True)):
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], expected[name]) for name in expected)
    # The whole classifier's memory does not go along.
    weight = torch.load(CLASSIFIER, weights_only=True)["weight"]
    assert weight.untyped_storage().nbytes() == weight.nbytes
    assert len(missing) == 2
    assert "cohort.safetensors, for AS-Norm" in missing[0]
    assert "thresholds.json, for decisions" in missing[1]
    for words in (
        *missing,
        "Error rates were not measured.",
        "12 utterances of 3 speakers, of VoxCeleb2",
        "one.txt",
        "augmentation | speeds 1.0, 0.9, 1.1; no noise; no reverberation |",
    ):
        assert words in files[CARD].decode()


@pytest.mark.parametrize("subtract", [False, True])
def test_rates_thresholds_and_the_cohort_travel_along(
    run, tmp_path, wave, subtract, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = write_scores(run, subtract_mean=subtract)
    assert export_run(run, "FOLDER") == []
    card = Path("FOLDER", CARD).read_text()
    row = "| vox1_o | as_norm | 1.23 [1.01, 1.51] | 0.111 | 0.222 | 18,802 | 18,818 |"
    assert row in card
    assert "| vox1_o | as_norm | 4.5000 |" in card
    ran = SpeakerEmbedder.from_run(run, device="cpu")
    cohort, own = read_cohort("FOLDER"), read_cohort(run)
    assert (cohort.top_n, cohort.fingerprint) == (2, ran.fingerprint)
    assert (cohort.centre is not None) == subtract
    if subtract:
        assert np.array_equal(cohort.centre, rows.mean(axis=0))
        rows = scoring.subtract_mean(rows, rows.mean(axis=0))
    _, means = scoring.speaker_means(rows, [s for s in SPEAKERS for _ in range(2)])
    assert np.array_equal(cohort.means, means)
    assert np.array_equal(own.means, means)
    # What the card shows runs.
    for seed, name in enumerate(("a.wav", "b.wav")):
        write_audio(Path(name), speech_like(0.5, seed=seed))
    names = {}
    for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        exec(compile(block, CARD, "exec"), names)
    cosine = scoring.cosine(*np.split(names["embedder"].embed(["a.wav", "b.wav"]), 2))
    assert float(names["score"]) == pytest.approx(float(cosine[0]), abs=1e-5)
    assert names["embedder"].thresholds == ran.thresholds
    assert [t.name for t in ran.thresholds.known] == ["vox1_o", "vox1_o minDCF(0.01)"]
    verified = names["verified"]
    assert verified == ran.verify("a.wav", "b.wav", cohort=own)
    assert (verified.normalisation, verified.threshold) == ("as_norm", 4.5)
    assert "vox1_o: 18,802 target" in verified.origin
    # The card's second way, of many, is that of one.
    sides = np.stack([names["mean"], names["std"]], axis=1).reshape(-1, 1)
    cosine = scoring.cosine(*np.split(names["embeddings"], 2))
    normed = scoring.as_norm(cosine, *sides)
    assert float(normed[0]) == pytest.approx(verified.score, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (lambda run: (run / CKPT).unlink(), "the end of its training"),
        (lambda run: (run / RESULTS).unlink(), "thresholds.json"),
        # As score.py wrote them before there were thresholds.
        (lambda run: change_results(run, thresholds={}), "thresholds.json"),
    ],
)
def test_what_is_missing_is_said_and_left_out(scored_run, tmp_path, change, missing):
    change_record(scored_run, {"cohort_top_n": 2})
    change(scored_run)
    (words,) = export_run(scored_run, tmp_path / "out")
    assert words.startswith(missing)
    assert words in (tmp_path / "out" / CARD).read_text()
    assert (tmp_path / "out/thresholds.json").exists() == missing.startswith("the end")
    cohort = read_cohort(tmp_path / "out")
    assert (cohort.top_n, cohort.centre) == (2, None)


@pytest.mark.parametrize(
    ("loss", "cited"), [("aam_softmax", {"ArcFace"}), ("another", set())]
)
def test_the_card_cites_the_loss_of_the_run(run, tmp_path, loss, cited):
    change_record(run, {"loss": loss})
    export_run(run, tmp_path / "out")
    card = (tmp_path / "out" / CARD).read_text()
    assert {name for name in ("ArcFace", "CosFace") if name in card} == cited


def card_of(run, out):
    export_run(run, out)
    return (out / CARD).read_text()


@pytest.mark.parametrize("margin", [0.0, 0.15])
def test_the_card_shows_the_margin_that_was_reached(run, tmp_path, margin):
    # A run of few epochs may end before its schedule has raised the margin.
    weights = dataclasses.replace(read_record(run).weights, margin=margin)
    change_record(run, {"final_margin": 0.2}, weights=weights)
    card = card_of(run, tmp_path / "out")
    assert f"| margin at their end | {margin:g} |" in card
    assert "| 0.2 |" not in card


def test_the_card_counts_the_speakers_that_were_held_out(run, tmp_path):
    assert "2 more speakers were held out for validation" in card_of(
        run, tmp_path / "out"
    )


def test_the_card_names_augmentation_that_there_was_none_of(run, tmp_path):
    settings = {"noise_prob": 0.6, "rir_prob": 0.4, "noise_folder": None}
    used = {"speeds": [1.0], "noise": False, "reverberation": True}
    change_record(run, settings, augmentation=used)
    row = "| augmentation | speeds 1.0; no noise; reverberation |"
    assert row in card_of(run, tmp_path / "out")


def test_the_card_names_the_epochs_that_were_averaged(run, tmp_path):
    # Of ten that were asked for there were three.
    settings = {"average_checkpoints": 10, "number_of_epochs": 3}
    weights = dataclasses.replace(read_record(run).weights, epochs=(1, 2, 3))
    change_record(run, settings, epochs=3, weights=weights)
    with pytest.raises(
        FileNotFoundError, match="no checkpoint of the end of epoch 3 a"
    ):
        export_run(run, tmp_path / "out")
    (counter,) = (run / "save").glob("CKPT*/counter.ckpt")
    counter.write_text("3")
    (counter.parent / SUMS).unlink()
    card = card_of(run, tmp_path / "out")
    assert "| weights | mean of epochs 1, 2, 3 |" in card
    assert "| epochs | 3 of 3 |" in card


def test_the_card_lists_what_earlier_epochs_had_otherwise(run, tmp_path):
    values = {"batch_size": 2, "noise": True, "save_folder": "/secret/place"}
    extended = EarlierEpochs(1.5, {"number_of_epochs": 1})
    change_record(run, earlier=(EarlierEpochs(1.25, values), extended))
    card = card_of(run, tmp_path / "out")
    assert "first 1.5 epochs" not in card
    row = "| otherwise in the first 1.25 epochs | batch_size 2; noise True |"
    assert row in card


def test_the_classifier_is_of_the_epoch_that_the_weights_end_with(run, tmp_path):
    (meta,) = (run / "save").glob("CKPT*/CKPT.yaml")
    of_weights = torch.load(meta.parent / CLASSIFIER, weights_only=True)
    newer = run / "save" / "CKPT+newer"
    shutil.copytree(meta.parent, newer)
    (newer / "counter.ckpt").write_text("3")
    (newer / SUMS).unlink()
    torch.save({"weight": of_weights["weight"] + 1}, newer / CLASSIFIER)
    export_run(run, tmp_path / "out")
    exported = torch.load(tmp_path / "out" / CLASSIFIER, weights_only=True)["weight"]
    assert torch.equal(exported, of_weights["weight"][: len(exported)])


def test_an_extension_that_was_interrupted_is_named_wherever_weights_are_used(
    run, tmp_path, caplog
):
    change_record(run, {"number_of_epochs": 9}, lr=0.003, seconds=7200.0)
    words = (
        "being extended to 9 epochs, 2 are done, and its weights are those of an earl"
    )
    (early, *_) = export_run(run, tmp_path / "out")
    assert early.startswith("the end of its training")
    card = (tmp_path / "out" / CARD).read_text()
    for said in (early, card):
        assert words in said
    # What is said of the end is of the weights, not of the epochs since.
    assert "| weights | mean of epochs 2 |" in card
    assert "| learning rate at their end | 0.01 |" in card
    assert "| time | 1.50 minutes |" in card
    assert str(tmp_path) not in card
    audio = [
        str(write_audio(tmp_path / n, speech_like(0.5))) for n in ("a.wav", "b.wav")
    ]
    for command in (["embed", str(run), audio[0]], ["verify", str(run), *audio]):
        caplog.clear()
        assert cli.main([*command, "--device=cpu"]) == 0
        assert words in caplog.text


def test_the_card_names_trial_lists_without_their_folders(scored_run, tmp_path):
    lists = ["/secret/place/a/one.txt", "/secret/place/b/one.txt", "/secret/vox1_o.txt"]
    change_record(scored_run, {"trial_lists": lists})
    names = ["secret_place_a_one.txt", "secret_place_b_one.txt", "vox1_o", "my_list"]
    names += ["secret_place_unknown_c.txt", "x" * 201, "a\x1b[2J"]
    change_results(scored_run, *({"trials": n} for n in names), thresholds={"EER": 0.5})
    export_run(scored_run, tmp_path / "out")
    card = (tmp_path / "out" / CARD).read_text()
    assert "secret" not in card
    assert "\x1b" not in card
    for name in ("one (1)", "one (2)", "vox1_o", "my_list", "trials (1)", "trials (3)"):
        assert f"| {name} | as_norm |" in card
    thresholds = SpeakerEmbedder.from_hparams(tmp_path / "out", device="cpu").thresholds
    assert "secret" not in str(thresholds)
    assert len(thresholds.known) == 7


def replace(name, old, new):
    return lambda run: (run / name).write_text(
        (run / name).read_text().replace(old, new)
    )


def older_embeddings(run):
    path = run / "embeddings/cohort.npz"
    stored = EmbeddingArchive.load(path)
    EmbeddingArchive(stored.names, stored.embeddings, "older").save(path)


def damaged_classifier(run):
    path = next((run / "save").glob("CKPT*/classifier.ckpt"))
    torch.save({"weight": torch.zeros(9, 16)}, path)


def other_classifier(run):
    path = next((run / "save").glob("CKPT*/classifier.ckpt"))
    torch.save(CosineClassifier(8, 9).state_dict(), path)
    (path.parent / SUMS).unlink()


def changed_since(name):
    def change(run):
        path = run / "save" / name
        write_sums(path.parent, {name: digest_of(path)})
        path.write_bytes(path.read_bytes().replace(b"1", b"3"))

    return change


OLDER = replace(RESULTS, '"model": "', '"model": "x')
NEGATIVE, ONE = (replace(RESULTS, '"top_n": 2', f'"top_n": {n}') for n in (-1, 1))
HIGH = replace(RESULTS, "4.5", '"high"')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda run: change_record(run, {"speeds": [1.0]}),
            "9 classes, which is not 3 spea",
        ),
        (older_embeddings, r"cohort\.npz is of other weights"),
        (OLDER, r"results\.json is of other we"),
        (NEGATIVE, r"results\.json is not what .*score\.py"),
        (ONE, "top_n is 1, but the cohort has"),
        (HIGH, r"results\.json is not what .*score\.py"),
        (damaged_classifier, r"classifier\.ckpt is damaged"),
        (
            other_classifier,
            r"holds weight \[9, 8\], and a model of this package has a classifier",
        ),
        (replace(f"save/{LABELS}", "=> 1", "=> 7"), r"line 2: .* next speaker, 1"),
        (changed_since(LABELS), r"label_encoder\.txt is not as it was written"),
    ],
)
def test_a_run_that_does_not_fit_together_is_refused(
    scored_run, tmp_path, change, message
):
    change(scored_run)
    with pytest.raises(ValueError, match=message):
        export_run(scored_run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_exports_once_and_prints_what_is_missing(
    trained, model, tmp_path, capsys
):
    export, out = ["export", str(trained[0])], tmp_path / "out"
    assert cli.main([*export, str(out)]) == 0
    assert "It lacks cohort.safetensors" in capsys.readouterr().out
    (out / "mine").write_text("precious")
    assert cli.main([*export, str(out)]) == 2
    assert "not empty: nothing is overwritten" in capsys.readouterr().err
    assert (out / "mine").read_text() == "precious"
    with pytest.raises(ValueError, match=rf"has {TENSORS} already\. Copy the folder"):
        export_run(model, tmp_path / "again")


# ------------------------------------------------------------ weights in a .ckpt alone


@pytest.fixture
def unsafe(model):
    """An exported model without safetensors."""
    (model / TENSORS).unlink()
    return model


@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_with_a_checkpoint_alone_becomes_what_export_writes(
    unsafe, exported, tmp_path, whole
):
    state = safetensors.torch.load(exported[TENSORS])
    wrapped = {f"model.encoder.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 3, "state_dict": wrapped}, unsafe / CKPT)
    put(unsafe, CKPT, (unsafe / CKPT).read_bytes())
    (unsafe / "other.txt").write_text("stays")
    there = {*exported}
    if not whole:
        for name in (SUMS, SETTINGS, YAML):
            (unsafe / name).unlink()
        known = {"trials": "one", "point": "EER", "normalisation": "cosine"}
        known |= {"value": 0.5, "targets": 3, "impostors": 4, "eer": 0.25}
        known |= {"enrolled": [1, 1], "interval": None}
        (unsafe / "thresholds.json").write_text(json.dumps({"thresholds": [known]}))
        there |= {"thresholds.json"}
    assert len(export_run(unsafe, tmp_path / "new")) == 1 + whole
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert written.keys() == there
    for name in (TENSORS, YAML, LABELS, CARD, SETTINGS):
        assert written[name] == exported[name], name
    EncoderClassifier.from_hparams(tmp_path / "new", savedir=tmp_path / "savedir")


def test_weights_alone_are_loaded_as_they_are_and_are_no_run_to_export(
    unsafe, embedder, tmp_path
):
    torch.save(tiny_encoder().state_dict(), unsafe / "averaged.pt")
    ours = SpeakerEmbedder.from_hparams(unsafe / "averaged.pt", device="cpu")
    assert ours.fingerprint == embedder.fingerprint
    (unsafe / CLASSIFIER).unlink()
    with pytest.raises(
        FileNotFoundError, match=f"has no {CLASSIFIER}, and no checkpoint"
    ):
        export_run(unsafe, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def link(path):
    path.rename(path.parent.parent / "outside")
    path.symlink_to(path.parent.parent / "outside")


def of_weights(change):
    """Save another state dict, with its checksum, and without."""

    def save(path):
        state = torch.load(path.with_name("kept"), weights_only=True)
        torch.save(change(state), path)
        put(path.parent, path.name, path.read_bytes())

    return save


def other_sum(path):
    sums = path.with_name(SUMS)
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(f"{'10'[line[0] != '0']}{line[1:]}" for line in lines))


MKDIR = Attack(os.mkdir, "executed")
HALF = of_weights(lambda s: {**s, "fc.bias": s["fc.bias"].half()})
NAN = of_weights(lambda s: {**s, "fc.bias": s["fc.bias"] / 0})
HARM = [
    *(
        (name, link, "link out of its folder")
        for name in (CKPT, CARD, LABELS, CLASSIFIER)
    ),
    (CKPT, other_sum, "is not as it was written"),
    (SUMS, lambda p: os.truncate(p, 10**12), "more than"),
    (CKPT, of_weights(lambda s: {"stem": MKDIR}), "is not loaded"),
    (CLASSIFIER, of_weights(lambda s: MKDIR), "is not loaded"),
    (
        CLASSIFIER,
        of_weights(lambda s: s),
        "and a model of this package has a classifier",
    ),
    (CKPT, HALF, "fc.bias is of torch.float16"),
    (CKPT, NAN, "holds NaN or infinity in fc.bias"),
]


@pytest.mark.parametrize(("name", "harm", "words"), HARM, ids=range(len(HARM)))
def test_a_folder_that_was_made_to_harm_is_not_exported(
    unsafe, tmp_path, name, harm, words
):
    shutil.copy(unsafe / CKPT, unsafe / "kept")
    harm(unsafe / name)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        export_run(unsafe, tmp_path / "new")
    assert str(unsafe) in str(error.value)
    assert not (tmp_path / "new").exists()


def test_a_model_needs_a_folder_of_its_own(unsafe, tmp_path):
    for out in (unsafe, tmp_path / "cwd" / "no" / "new"):
        with pytest.raises(ValueError, match=r"there already|There is no folder"):
            export_run(unsafe, out)
    for source in ("owner/model", tmp_path / "none"):
        with pytest.raises(
            FileNotFoundError, match=r"There is no f.*Give the folder of a tr"
        ):
            export_run(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
