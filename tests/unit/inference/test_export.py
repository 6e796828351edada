"""A run becomes a folder that SpeechBrain loads, from wherever it is moved."""

import json
import os
import re
import shlex
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
from speechbrain_rev.inference.run_folder import RESULTS

from speechbrain_rev import cli, scoring
from speechbrain_rev.inference import (
    EmbeddingArchive,
    SpeakerEmbedder,
    convert_from_speechbrain,
    export_run,
    read_cohort,
)
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer
from speechbrain_rev.lobes.classifier import CosineClassifier
from speechbrain_rev.whole_files import digest_of, write_sums
from tests.run_folders import SPEAKERS, speech_like, write_audio, write_scores
from tests.unit.inference.conftest import Attack, change_results, close, put

CPU = {"device": "cpu"}
CKPT, TENSORS = "embedding_model.ckpt", "embedding_model.safetensors"
YAML, LABELS, SUMS = "hyperparams.yaml", "label_encoder.txt", "SHA256SUMS"
CLASSIFIER, CARD = "classifier.ckpt", "README.md"
FILES = {CARD, SUMS, CLASSIFIER, CKPT, TENSORS, YAML, LABELS}


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
    assert "measured error rates" in missing[1]
    for words in (
        *missing,
        "Error rates were not measured.",
        "12 utterances of 3 speakers, of VoxCeleb2",
        "one.txt",
        "| speeds | [1.0, 0.9, 1.1] |",
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
        (lambda run: (run / RESULTS).unlink(), "measured error rates"),
        # As score.py wrote them before there were thresholds.
        (lambda run: change_results(run, thresholds={}), "thresholds.json"),
    ],
)
def test_what_is_missing_is_said_and_left_out(scored_run, tmp_path, change, missing):
    replace(YAML, "top_n: 600", "top_n: 2")(scored_run)
    change(scored_run)
    (words,) = export_run(scored_run, tmp_path / "out")
    assert words.startswith(missing)
    assert words in (tmp_path / "out" / CARD).read_text()
    assert (tmp_path / "out/thresholds.json").exists() == missing.startswith("the end")
    cohort = read_cohort(tmp_path / "out")
    assert (cohort.top_n, cohort.centre) == (2, None)


@pytest.mark.parametrize(
    ("line", "cited"),
    [
        ("loss: aam_softmax", {"ArcFace"}),
        ("compute_cost: !new:speechbrain.nnet.losses.AngularMargin", {"CosFace"}),
        ("loss: [another]", set()),
    ],
)
def test_the_card_cites_the_loss_of_the_run(run, tmp_path, line, cited):
    with (run / YAML).open("a") as file:
        file.write(f"{line}\n")
    export_run(run, tmp_path / "out")
    card = (tmp_path / "out" / CARD).read_text()
    assert {name for name in ("ArcFace", "CosFace") if name in card} == cited


def test_the_card_names_trial_lists_without_their_folders(scored_run, tmp_path):
    save = scored_run / "save/prepared.json"
    record = json.loads(save.read_text())
    lists = ["/secret/place/a/one.txt", "/secret/place/b/one.txt", "/secret/vox1_o.txt"]
    record["settings"]["trial_lists"] = dict.fromkeys(lists, "f0")
    save.write_text(json.dumps(record))
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
    shutil.rmtree(next((run / "save").glob("CKPT*")))
    modules = {"classifier": CosineClassifier(8, 9)}
    WholeCheckpointer(run / "save", modules).save_checkpoint()


def changed_since(name):
    def change(run):
        path = run / "save" / name
        write_sums(path.parent, {name: digest_of(path, "sha256")})
        path.write_bytes(path.read_bytes().replace(b"1", b"3"))

    return change


OLDER = replace(RESULTS, '"model": "', '"model": "x')
NEGATIVE, ONE = (replace(RESULTS, '"top_n": 2', f'"top_n": {n}') for n in (-1, 1))
HIGH = replace(RESULTS, "4.5", '"high"')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace(YAML, "[1.0, 0.9, 1.1]", "[1.0]"), "9 classes, which is not 3 spea"),
        (replace(YAML, "[1.0, 0.9, 1.1]", "null"), "does not say the speeds"),
        (older_embeddings, r"cohort\.npz is of other weights"),
        (OLDER, r"results\.json is of other we"),
        (NEGATIVE, r"results\.json is not what .*score\.py"),
        (ONE, "top_n is 1, but the cohort has"),
        (HIGH, r"results\.json is not what .*score\.py"),
        (damaged_classifier, r"classifier\.ckpt is damaged"),
        (
            other_classifier,
            r"holds {'weight': \[9, 8\]}, but a classifier of head cosine",
        ),
        (replace(f"save/{LABELS}", "=> 1", "=> 7"), r"line 2: .* next speaker, 1"),
        (changed_since(LABELS), r"label_encoder\.txt is not as it was written"),
        (changed_since("prepared.json"), r"prepared\.json is not as it was written"),
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
    for ending in (".pt", ".pth", ".ckpt", ".SAFETENSORS"):
        assert cli.main([*export, str(tmp_path / f"m1{ending}")]) == 2
        assert f"graph give {tmp_path / 'm1.pt2'} or " in capsys.readouterr().err
        assert not list(tmp_path.glob("m1*"))
    with pytest.raises(ValueError, match=r"is an exported model already\. Copy"):
        export_run(model, tmp_path / "again")


# ------------------------------------------------------------ weights in a .ckpt alone


@pytest.fixture
def unsafe(model):
    """An exported model without safetensors."""
    (model / TENSORS).unlink()
    return model


@pytest.mark.parametrize("given", ["../a model", ".", "inner/.."])
def test_a_checkpoint_alone_is_refused_with_the_command_that_helps(
    unsafe, monkeypatch, given, capsys
):
    folder, written = (unsafe.with_name(n) for n in ("a model", "a model_safetensors"))
    unsafe.rename(folder)
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=f"has its weights in {CKPT} alone") as error:
        SpeakerEmbedder.from_hparams(given, device="cpu")
    command = shlex.split(str(error.value).partition("Write a folder with both: ")[2])
    assert cli.main(command[1:]) == 0
    assert Path(command[-1]).samefile(written)
    assert f"embed {command[-1]} FILE" in capsys.readouterr().out
    SpeakerEmbedder.from_hparams(written, device="cpu")
    monkeypatch.chdir(folder.with_name("cwd"))


@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_with_a_checkpoint_alone_becomes_what_export_writes(
    unsafe, exported, tmp_path, whole
):
    state = safetensors.torch.load(exported[TENSORS])
    wrapped = {f"model.encoder.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 3, "state_dict": wrapped}, unsafe / CKPT)
    put(unsafe, CKPT, (unsafe / CKPT).read_bytes())
    (unsafe / "other.txt").write_text("stays")
    lacking, there = ["cohort.safetensors", "thresholds.json"], {*exported}
    if not whole:
        for name in (SUMS, CLASSIFIER):
            (unsafe / name).unlink()
        (unsafe / "thresholds.json").write_text('{"thresholds": []}')
        lacking = [CLASSIFIER, "cohort.safetensors"]
        there ^= {CLASSIFIER, "thresholds.json"}
    assert convert_from_speechbrain(unsafe, tmp_path / "new") == lacking
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert written.keys() == there
    for name in (TENSORS, YAML, LABELS, CARD):
        assert written[name] == exported[name], name
    if whole:
        EncoderClassifier.from_hparams(tmp_path / "new", savedir=tmp_path / "savedir")


def test_a_file_of_weights_is_taken_where_it_is_named(model, exported, tmp_path):
    state = {n: t * 2 for n, t in safetensors.torch.load(exported[TENSORS]).items()}
    torch.save(state, model / "averaged.pt")
    with pytest.raises(ValueError, match=f"has {TENSORS} already: load it as it is"):
        convert_from_speechbrain(model, tmp_path / "new")
    convert_from_speechbrain(model / "averaged.pt", tmp_path / "new")
    written = safetensors.torch.load_file(tmp_path / "new" / TENSORS)
    assert all(torch.equal(written[name], state[name]) for name in state)


def link(path):
    path.rename(path.parent.parent / "outside")
    path.symlink_to(path.parent.parent / "outside")


def of_weights(change):
    """Save another state dict, with its checksum, and without."""

    def save(path):
        state = safetensors.torch.load_file(path.with_name("kept"))
        torch.save(change(state), path)
        put(path.parent, path.name, path.read_bytes())

    return save


def other_sum(path):
    sums = path.with_name(SUMS)
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(f"{'10'[line[0] != '0']}{line[1:]}" for line in lines))


def code(path):
    path.with_name("custom.py").write_text("import os\nos.mkdir('executed')\n")


MKDIR = Attack(os.mkdir, "executed")
HALF = of_weights(lambda s: {**s, "fc.bias": s["fc.bias"].half()})
NAN = of_weights(lambda s: {**s, "fc.bias": s["fc.bias"] / 0})
HARM = [
    *((name, link, "link out of its folder") for name in (YAML, CKPT, CARD, SUMS)),
    *(
        (name, lambda p: os.truncate(p, 10**12), "more than")
        for name in (YAML, CKPT, CARD, SUMS)
    ),
    (CKPT, other_sum, "is not as it was written"),
    (CKPT, code, "brings code, custom.py"),
    (CKPT, of_weights(lambda s: {"stem": MKDIR}), "names 'posix.mkdir'"),
    (CLASSIFIER, of_weights(lambda s: MKDIR), "names 'posix.mkd"),
    (CLASSIFIER, of_weights(lambda s: s), "weight is missing"),
    (CKPT, HALF, "is torch.float16 [16]"),
    (CKPT, NAN, "fc.bias holds NaN"),
]


@pytest.mark.parametrize(("name", "harm", "words"), HARM, ids=range(len(HARM)))
def test_a_folder_that_was_made_to_harm_is_not_converted(
    unsafe, exported, tmp_path, name, harm, words
):
    (unsafe / "kept").write_bytes(exported[TENSORS])
    harm(unsafe / name)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        convert_from_speechbrain(unsafe, tmp_path / "new")
    assert str(unsafe) in str(error.value)
    assert not (tmp_path / "new").exists()


def test_a_conversion_needs_a_folder_of_its_kind_here(unsafe, run, tmp_path, capsys):
    for out in (unsafe, tmp_path / "cwd" / "no" / "new"):
        with pytest.raises(ValueError, match=r"there already|There is no folder"):
            convert_from_speechbrain(unsafe, out)
    (tmp_path / "a.wav").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/mine.py").touch()
    for source in ("owner/model", *(tmp_path / n for n in ("a.wav", "folder", "none"))):
        with pytest.raises(
            FileNotFoundError, match="Give a local folder with"
        ) as error:
            convert_from_speechbrain(source, tmp_path / "new")
        assert "snapshot_download" in str(error.value)
    # As SpeechBrain's script leaves itself there.
    (run / "train.py").touch()
    words = "output_folder of a training run .*from_run.*speechbrain-rev export "
    with pytest.raises(FileNotFoundError, match=words):
        SpeakerEmbedder.from_hparams(run)
    with pytest.raises(FileNotFoundError, match=words):
        convert_from_speechbrain(run, tmp_path / "new")
    # A copy of a run's weights and settings, and what convert wespeaker writes.
    shutil.rmtree(run / "save")
    with pytest.raises(
        FileNotFoundError, match=r"has no SHA256SUMS.* load it by Speaker"
    ):
        SpeakerEmbedder.from_hparams(run)
    assert cli.main(["convert", "speechbrain", "--back", str(unsafe), "new"]) != 0
    assert "--back is for wespeaker" in capsys.readouterr().err
