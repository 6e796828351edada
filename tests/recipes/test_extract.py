import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechbrain_rev.data import VoxCelebFolder, read_manifest
from speechbrain_rev.inference import EmbeddingArchive, FbankStatistics, SpeakerEmbedder
from speechbrain_rev.scoring import read_trials
from tests.corpus import write_corpus
from tests.recipes.runs import recipe
from tests.run_folders import (
    speech_like,
    write_audio,
    write_run,
    write_scorable_run,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), seconds=0.5)


@pytest.fixture
def run(tmp_path, data):
    return write_scorable_run(tmp_path / "run", data)


@pytest.fixture
def embedded(monkeypatch):
    """The files that were embedded."""
    files = []
    original = SpeakerEmbedder.embed_each

    def counting(self, paths, **given):
        files.extend(paths)
        return original(self, paths, **given)

    monkeypatch.setattr(SpeakerEmbedder, "embed_each", counting)
    return files


def extract(run, *options):
    recipe("extract").main([str(run), "--device=cpu", *map(str, options)])
    return [
        EmbeddingArchive.load(run / "embeddings" / f"{name}.npz")
        for name in ("trials", "cohort")
    ]


def test_every_utterance_of_all_lists_is_embedded_once(run, data, embedded):
    trials, cohort = extract(run)
    listed = read_trials(run / "one.txt").utterances
    trained = [u.ID for u in read_manifest(run / "save" / "train.csv")]
    assert set(trials.names) == set(listed)
    assert list(cohort.names) == trained
    assert len(embedded) == len(set(embedded)) == len(listed) + len(trained)


def test_some_utterances_of_each_training_speaker_may_do_for_the_cohort(run):
    _, cohort = extract(run, "--utterances_per_speaker=2")
    manifest = read_manifest(run / "save" / "train.csv")
    speaker_of = {utterance.ID: utterance.spk_id for utterance in manifest}
    counts = Counter(speaker_of[name] for name in cohort.names)
    assert counts == dict.fromkeys(speaker_of.values(), 2)


def test_rows_are_the_embeddings_of_the_files_they_name(run, data):
    archives = extract(run)
    embedder = SpeakerEmbedder.from_run(run, device="cpu")
    for archive in archives:
        for name in archive.names[::3]:
            expected = embedder.embed([data / "wav" / name])[0]
            row = archive.embeddings[archive.names.index(name)]
            assert np.allclose(
                row, expected, rtol=0, atol=1e-5 * np.abs(expected).max()
            )


def test_embeddings_from_the_same_weights_are_kept(run, embedded):
    extract(run)
    embedded.clear()
    extract(run)
    assert embedded == []


def test_other_weights_make_all_embeddings_anew(run, embedded):
    before, _ = extract(run)
    count = len(embedded)
    (run / "other").mkdir()
    write_run(run / "other", seed=1)
    (run / "other" / "embedding_model.ckpt").replace(run / "embedding_model.ckpt")
    after, _ = extract(run)
    assert len(embedded) == 2 * count
    assert after.names == before.names
    assert not np.allclose(after.embeddings, before.embeddings)


def test_lists_given_on_the_command_line_replace_those_of_the_run(run, tmp_path):
    listed = (run / "one.txt").read_text().splitlines()
    short = [next(x for x in listed if x.startswith(label)) for label in ("0", "1")]
    (tmp_path / "short.txt").write_text("\n".join(short) + "\n")
    trials, _ = extract(run, "--trials", tmp_path / "short.txt")
    assert len(trials.names) <= 4 < len(read_trials(run / "one.txt").utterances)


def test_audio_elsewhere_is_found_by_its_folder(tmp_path, data):
    run = write_scorable_run(tmp_path / "run", data)
    text = (run / "hyperparams.yaml").read_text()
    moved = text.replace(f"trials_folder: {data}", "trials_folder: /nowhere")
    (run / "hyperparams.yaml").write_text(moved)
    with pytest.raises(ValueError, match="/nowhere"):
        extract(run)
    assert extract(run, "--trials_folder", data)[0].names


def test_a_run_without_trial_lists_says_what_to_give(tmp_path, data):
    run = write_scorable_run(tmp_path / "run", data)
    text = (run / "hyperparams.yaml").read_text().splitlines()
    kept = [line for line in text if not line.startswith("trial_lists")]
    (run / "hyperparams.yaml").write_text("\n".join([*kept, "trial_lists: []"]))
    with pytest.raises(ValueError, match=r"--trials LIST.*valid_trials\.txt"):
        extract(run)


def test_a_missing_utterance_is_named(run):
    with (run / "one.txt").open("a") as file:
        file.write("0 id00004/s00/00000.wav id00005/s00/99999.wav\n")
    with pytest.raises(ValueError, match=r"id00005/s00/99999\.wav"):
        extract(run)


def without_audio_there(run, data, here):
    """A run whose data folder, lists among them, is now another one."""
    (here / "lists").mkdir(parents=True)
    for name in ("one.txt", "other.txt"):
        shutil.copy(run / name, here / "lists" / name)
    shutil.copytree(data / "wav", here / "wav")
    text = (run / "hyperparams.yaml").read_text()
    text = text.replace(str(data), "/gone").replace(f"{run}/o", "/gone/lists/o")
    (run / "hyperparams.yaml").write_text(f"{text}\ndata_folder: /gone\n")
    path = run / "save" / "train.csv"
    path.write_text(path.read_text().replace(str(data), "/gone"))
    return here


def test_data_that_moved_are_found_by_their_folder(run, data, tmp_path, embedded):
    expected = extract(run)
    for name in ("trials", "cohort"):
        (run / "embeddings" / f"{name}.npz").unlink()
    here = without_audio_there(run, data, tmp_path / "here")
    with pytest.raises(
        ValueError,
        match=r"/gone does not exist.* --data_folder=\.\.\. or --trials_folder=",
    ):
        extract(run)
    with pytest.raises(FileNotFoundError, match=r"/gone/lists/one\.txt"):
        extract(run, "--trials_folder", here)
    with pytest.raises(ValueError, match=r"16 of 16 files.*--data_folder"):
        extract(run, "--trials", run / "one.txt", "--trials_folder", here)
    embedded.clear()
    found = extract(run, "--data_folder", here)
    assert all(Path(file).is_relative_to(here) for file in embedded)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.names == theirs.names
        assert np.array_equal(ours.embeddings, theirs.embeddings)
    recipe("score").main([str(run), "--data_folder", str(here), "--bootstrap=0"])
    assert (run / "scores" / "one.cosine.txt").is_file()


def test_files_of_another_extension_are_told_of_and_taken_if_asked(
    run, data, tmp_path, embedded
):
    here = without_audio_there(run, data, tmp_path / "here")
    for path in list((here / "wav").rglob("*.wav")):
        wav, rate = soundfile.read(path, dtype="int16")
        soundfile.write(path.with_suffix(".flac"), wav, rate)
        path.unlink()
    with pytest.raises(
        ValueError, match=r"8 of 8 files .* 8 are there .*\.flac: --any_extension takes"
    ):
        extract(run, "--data_folder", here)
    with pytest.raises(ValueError, match=r"training utterances 16 .*--any_extension"):
        recipe("extract").cohort_files(run / "save/train.csv", data_folder=here)
    trials, cohort = extract(run, "--data_folder", here, "--any_extension")
    assert all(str(file).endswith(".flac") for file in embedded)
    assert set(trials.names) == set(read_trials(run / "one.txt").utterances)
    assert list(cohort.names) == [u.ID for u in read_manifest(run / "save/train.csv")]


@pytest.mark.parametrize(
    "name", ["../secret.wav", "{tmp}/secret.wav", "id00005/link.wav"]
)
def test_trials_that_lead_out_of_their_folder_are_refused(run, data, tmp_path, name):
    shutil.copytree(data, tmp_path / "copy")
    shutil.copy(data / "wav/id00004/s00/00000.wav", tmp_path / "secret.wav")
    shutil.copy(tmp_path / "secret.wav", tmp_path / "copy/secret.wav")
    (tmp_path / "copy/wav/id00005/link.wav").symlink_to(tmp_path / "secret.wav")
    with (run / "one.txt").open("a") as file:
        file.write(f"0 id00004/s00/00000.wav {name.format(tmp=tmp_path)}\n")
    given = ("--trials", run / "one.txt", "--trials_folder", tmp_path / "copy")
    with pytest.raises(ValueError, match=r"one\.txt: 1 names lead out of .*--outside_"):
        extract(run, *given)
    root = VoxCelebFolder(tmp_path / "copy/wav")
    with pytest.raises(ValueError, match=r"1 names lead out of .*copy/wav, such as"):
        recipe("extract").trial_files([run / "one.txt"], root)
    trials, _ = extract(run, *given, "--outside_files")
    assert name.format(tmp=tmp_path) in trials.names


def test_channels_of_files_are_averaged_and_said(tmp_path, caplog):
    sides = np.stack([speech_like(seed=1), speech_like(seed=2)])
    stereo = {"s.wav": write_audio(tmp_path / "s.wav", sides.T)}
    mono = {"m.wav": write_audio(tmp_path / "m.wav", sides.mean(axis=0))}
    embedder = SpeakerEmbedder(FbankStatistics(), device="cpu", fingerprint="x")
    recipe("extract").extract(embedder, tmp_path, stereo, mono)
    found = [
        EmbeddingArchive.load(tmp_path / f"embeddings/{name}.npz").embeddings
        for name in ("trials", "cohort")
    ]
    assert np.allclose(*found, rtol=1e-5)
    assert "1 of 1 utterances have several channels, which were averaged" in caplog.text


@pytest.mark.parametrize("count", ["0", "-1"])
def test_no_utterances_of_a_speaker_are_refused(run, count, capsys):
    with pytest.raises(SystemExit):
        extract(run, f"--utterances_per_speaker={count}")
    assert f"takes 1 or more, not {count}" in capsys.readouterr().err
