"""Another layout of a corpus is one class and one row: the recipe knows no layout."""

import shutil
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest
import torch

from speechbrain_rev.data import (
    CORPORA,
    Corpus,
    VoxCelebFolder,
    WholeUtterances,
    corpus,
    open_corpus,
    read_manifest,
)
from speechbrain_rev.lists import read_lines, split_line
from speechbrain_rev.scoring import read_trials
from tests.corpus import write_corpus
from tests.recipes.runs import recipe

prepare = recipe("prepare")


@dataclass(frozen=True)
class KaldiFolder(Corpus):
    """A folder with wav.scp and utt2spk: names are no paths, and tell no speaker."""

    folder: Path
    layout = "Or a folder with wav.scp and utt2spk."

    @classmethod
    def find(cls, folder, *, any_extension, outside_files):
        return cls(Path(folder)) if Path(folder, "wav.scp").is_file() else None

    def _table(self, name):
        lines = read_lines(self.folder / name, "'utterance value'")
        return dict(split_line(line, 2) for line in lines)

    def utterances(self):
        yield from self._table("wav.scp")

    def locate(self, name):
        return Path(self._table("wav.scp").get(name, self.folder / name))

    def speaker(self, name):
        return self._table("utt2spk").get(name)

    def session(self, name):
        return None


@pytest.fixture(scope="module")
def voxceleb(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), seconds=0.1)


@pytest.fixture
def kaldi(voxceleb, tmp_path, monkeypatch):
    """The same audio, as a folder of two lists."""
    rows = {"KaldiFolder": KaldiFolder, **CORPORA}
    monkeypatch.setattr(corpus, "CORPORA", rows)
    folder = tmp_path / "kaldi"
    folder.mkdir()
    paths = sorted((voxceleb / "wav").rglob("*.wav"))
    ids = [f"u{number:03d}" for number in range(len(paths))]
    for name, values in (
        ("wav.scp", paths),
        ("utt2spk", [path.parts[-3] for path in paths]),
    ):
        lines = [f"{one} {value}\n" for one, value in zip(ids, values, strict=True)]
        (folder / name).write_text("".join(lines))
    return folder


def settings(folder, **changed):
    return prepare.Settings(**{"data_folder": str(folder), "seed": 1, **changed})


def rows(manifest):
    return [(u.wav, u.samples, u.spk_id) for u in read_manifest(manifest)]


def test_a_folder_is_recognised_by_what_is_there(kaldi, voxceleb):
    assert isinstance(open_corpus(kaldi), KaldiFolder)
    assert isinstance(open_corpus(voxceleb), VoxCelebFolder)
    with pytest.raises(ValueError, match=r"Or a folder with wav\.scp.*Accepted are"):
        open_corpus(kaldi / "nowhere")


def test_its_files_are_listed_and_located(kaldi):
    found = open_corpus(kaldi)
    names = list(found.utterances())
    assert names == [f"u{number:03d}" for number in range(24)]
    assert all(found.locate(name).is_file() for name in names)
    whole = WholeUtterances(found, names, max_samples=100)
    assert all(len(wav) == 100 for _, wav in map(whole.__getitem__, range(24)))


def test_it_is_prepared_as_the_same_audio_in_voxcelebs_layout(
    kaldi, voxceleb, tmp_path
):
    prepared = prepare.prepare(settings(kaldi), tmp_path / "save")
    assert prepared == prepare.prepare(settings(voxceleb), tmp_path / "other")
    assert rows(tmp_path / "save/train.csv") == rows(tmp_path / "other/train.csv")
    names = [u.ID for u in read_manifest(tmp_path / "save/train.csv")]
    assert names == list(open_corpus(kaldi).utterances())


def test_validation_trials_are_drawn_from_it(kaldi, tmp_path):
    prepare.prepare(settings(kaldi, valid_speakers=2), tmp_path / "save")
    trials = read_trials(tmp_path / "save/valid_trials.txt")
    found, speaker = open_corpus(kaldi), open_corpus(kaldi).speaker
    trained = {u.spk_id for u in read_manifest(tmp_path / "save/train.csv")}
    assert not trained & {speaker(name) for name in trials.utterances}
    for label, a, b in zip(trials.labels, trials.enrol, trials.test, strict=True):
        assert bool(label) == (speaker(a) == speaker(b))
    # Without sessions all pairs of a speaker's four utterances are target trials.
    assert int(trials.labels.sum()) == 2 * len(list(combinations(range(4), 2)))
    located = recipe("extract").trial_files([tmp_path / "save/valid_trials.txt"], found)
    assert located == {name: found.locate(name) for name in trials.utterances}
    loaded = recipe("loaders").valid_loader(
        {
            "data_folder": str(kaldi),
            "valid_trials": None,
            "sample_rate": 16000,
            "num_workers": 0,
        },
        trials,
    )
    assert all(isinstance(batch.wavs, torch.Tensor) for _, batch in loaded)


def test_speakers_of_its_trial_lists_are_left_out(kaldi, tmp_path):
    (tmp_path / "trials.txt").write_text("1 u000 u001\n0 u000 u004\n")
    given = settings(kaldi, trial_lists=(str(tmp_path / "trials.txt"),))
    assert prepare.prepare(given, tmp_path / "save").left_out == 8
    assert "id00001" not in prepare.speaker_numbers(tmp_path / "save")


def test_a_training_list_names_its_utterances(kaldi, tmp_path):
    (tmp_path / "list.txt").write_text("anna u000\nanna u001\nbert u004\n")
    given = settings(kaldi, train_list=str(tmp_path / "list.txt"))
    prepare.prepare(given, tmp_path / "save")
    found = [(u.ID, u.spk_id) for u in read_manifest(tmp_path / "save/train.csv")]
    assert found == [("u000", "anna"), ("u001", "anna"), ("u004", "bert")]


def test_validation_trials_of_a_training_list_are_of_its_speakers(voxceleb, tmp_path):
    """Two folders of one speaker are no impostors, whatever the folders are called."""
    lines = [
        f"{speaker} id0000{2 * number + part}/s00/00000.wav\n"
        for number, speaker in enumerate(("anna", "bert", "carl"))
        for part in range(2)
    ]
    lines += ["dora id00000/s01/00000.wav\n"]
    (tmp_path / "list.txt").write_text("".join(lines))
    chosen = settings(
        voxceleb, train_list=str(tmp_path / "list.txt"), valid_speakers=2, seed=3
    )
    prepare.prepare(chosen, tmp_path / "save")
    of = {name: s for s, name in map(str.split, lines)}
    trials = read_trials(tmp_path / "save/valid_trials.txt")
    for label, a, b in zip(trials.labels, trials.enrol, trials.test, strict=True):
        assert bool(label) == (of[a] == of[b])


def test_moved_data_with_the_same_digest_are_not_read_again(
    voxceleb, tmp_path, monkeypatch, caplog
):
    shutil.copytree(voxceleb, tmp_path / "data")
    save = tmp_path / "save"
    prepare.prepare(settings(tmp_path / "data"), save)
    (save / "CKPT+1").mkdir()
    (save / "CKPT+1/CKPT.yaml").touch()
    (tmp_path / "data").rename(tmp_path / "other")
    read, looked = prepare.check_files, []
    monkeypatch.setattr(
        prepare,
        "check_files",
        lambda *args, **kwargs: looked.append(args) or read(*args, **kwargs),
    )
    prepare.prepare(settings(tmp_path / "other"), save)
    # To list where the files are now, and not to compare them.
    assert len(looked) == 1
    assert "holds the data of" in caplog.text
