"""The lists of a run on disk: kept, refused or made anew, as their record says."""

import hashlib
import os
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import soundfile

from speechbrain_rev.data import preparation, read_manifest
from speechbrain_rev.data.preparation import (
    read_prepared,
    read_valid_files,
    write_missing_sums,
)
from speechbrain_rev.scoring import read_trials
from tests.corpus import write_corpus

from .conftest import snapshot
from .test_formats import rows_of, write_tables
from .test_listing import TRIALS, write_list

LISTS = ("train.csv", "valid_trials.txt", "valid.csv", "label_encoder.txt")


def write_checkpoint(save):
    """Make the folder one of a run that has begun."""
    (save / "CKPT+1").mkdir(exist_ok=True)
    (save / "CKPT+1/CKPT.yaml").touch()


@pytest.fixture
def begun(prepared, corpus, tmp_path):
    """A run that has checkpoints, of a data folder of its own."""
    shutil.copytree(corpus, tmp_path / "data")
    prepared(tmp_path / "data", valid_speakers=2)
    write_checkpoint(tmp_path / "save")
    return tmp_path / "save"


def assert_readable(save):
    """Each row of the manifest is of a file of its length."""
    for utterance in read_manifest(save / "train.csv"):
        assert soundfile.info(utterance.wav).frames == utterance.samples


def test_nothing_is_written_into_the_data_folder(prepared, corpus, tmp_path):
    before = snapshot(corpus)
    corpus.chmod(0o500)  # an error for all but root, whom the comparison catches
    try:
        prepared(valid_speakers=2)
    finally:
        corpus.chmod(0o700)
    assert snapshot(corpus) == before
    assert not list(tmp_path.rglob("*.part"))


def test_checksums_are_those_of_sha256sum(prepared, tmp_path):
    prepared(valid_speakers=2)
    lines = (tmp_path / "save/SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1]: line.split("  ")[0] for line in lines} == {
        name: hashlib.sha256((tmp_path / "save" / name).read_bytes()).hexdigest()
        for name in (*LISTS, "prepared.json")
    }


def test_the_same_settings_reuse_the_lists_and_others_do_not(prepared, tmp_path):
    first = prepared()
    before = snapshot(tmp_path)
    assert prepared() == first
    assert snapshot(tmp_path) == before
    assert prepared(valid_speakers=2).speakers == first.speakers - 2
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match="valid_speakers is 5"):
        prepared(valid_speakers=5)
    assert snapshot(tmp_path) == before


class TestBegun:
    """With checkpoints speakers keep their numbers: only equal data are taken."""

    @pytest.mark.parametrize(
        ("changed", "named"),
        [
            (
                {"seed": 2},
                r"\(seed: was 1, is 2\).*list anew: --output_folder=FOLDER\.$",
            ),
            (
                {"sample_rate": 8000, "resample": True},
                r"\(sample_rate: was 16000, is 8000; resample: was False, is True\)",
            ),
            ({"channel": 0}, r"\(channel: was None, is 0\)"),
            ({"speaker_from": 1}, r"\(speaker_from: was None, is 1\)"),
            ({"short": "drop"}, r"\(short: was repeat or pad, is drop; "),
            ({"train_list": "list.txt"}, r"\(the content of train_list[;)]"),
            ({"trial_lists": ("list.txt",)}, r"\(the content of trial_lists\)"),
        ],
    )
    def test_changed_settings_are_refused_in_one_line(
        self, prepared, begun, tmp_path, monkeypatch, changed, named
    ):
        monkeypatch.chdir(tmp_path)
        write_list(
            tmp_path / "list.txt", "1 a.wav b.wav\n" * ("trial_lists" in changed)
        )
        with open("list.txt", "a") as file:
            file.write("id00000 id00000/s00/00000.wav\n" * ("train_list" in changed))
        before = snapshot(begun)
        settings = {"data": tmp_path / "data", "valid_speakers": 2}
        with pytest.raises(ValueError, match=named) as error:
            prepared(**settings, **changed)
        assert "\n" not in str(error.value)
        prepared(**settings, trials_folder="elsewhere")
        assert snapshot(begun) == before

    def test_a_changed_list_is_read_again_before_and_refused_then(
        self, prepared, tmp_path
    ):
        lines = [f"id0000{s} id0000{s}/s00/00000.wav\n" for s in range(4)]
        path = write_list(tmp_path / "list.txt", "".join(lines[:2]))
        assert prepared(train_list=path).speakers == 2
        write_list(tmp_path / "list.txt", "".join(lines))
        assert prepared(train_list=path).speakers == 4
        write_checkpoint(tmp_path / "save")
        write_list(tmp_path / "list.txt", "".join(lines[:3]))
        with pytest.raises(ValueError, match=r"\(the content of train_list\)"):
            prepared(train_list=path)

    @pytest.mark.parametrize("spelling", ["slash", "relative", "link", "moved"])
    def test_a_data_folder_by_another_path_is_the_same_data(
        self, prepared, begun, tmp_path, monkeypatch, spelling
    ):
        before = [
            (begun / name).read_bytes() for name in ("valid_trials.txt", LISTS[-1])
        ]
        rows = list(read_manifest(begun / "train.csv"))
        data = tmp_path / "data"
        if spelling == "relative":
            monkeypatch.chdir(tmp_path)
        elif spelling == "link":
            (tmp_path / "link").symlink_to(data)
        elif spelling == "moved":
            data.rename(tmp_path / "moved")
        given = {"slash": f"{data}/", "relative": "data"}
        summary = prepared(given.get(spelling, tmp_path / spelling), valid_speakers=2)
        assert (summary.utterances, summary.held_out) == (16, 8)
        after = [
            (begun / name).read_bytes() for name in ("valid_trials.txt", LISTS[-1])
        ]
        assert after == before
        now = list(read_manifest(begun / "train.csv"))
        assert [replace(u, wav="") for u in now] == [replace(u, wav="") for u in rows]
        assert_readable(begun)

    @pytest.mark.parametrize("last", ["train.csv", "SHA256SUMS", "prepared.json"])
    def test_moved_data_survive_a_kill(
        self, prepared, begun, tmp_path, monkeypatch, last
    ):
        moved = (tmp_path / "data").rename(tmp_path / "other")
        replace_file = os.replace

        def stopping(source, target):
            replace_file(source, target)
            if os.path.basename(target) == last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", stopping)
            with pytest.raises(KeyboardInterrupt):
                prepared(moved, valid_speakers=2)
        assert prepared(moved, valid_speakers=2).utterances == 16
        assert_readable(begun)

    def test_a_finished_run_whose_data_moved_stays_as_it_is(
        self, prepared, begun, tmp_path
    ):
        moved = (tmp_path / "data").rename(tmp_path / "other")
        before = snapshot(begun)
        assert prepared(moved, valid_speakers=2, begun=True).utterances == 16
        assert snapshot(begun) == before

    @pytest.mark.parametrize("change", ["gone", "longer", "added", "renamed"])
    @pytest.mark.parametrize("moved", [False, True])
    def test_other_data_are_refused(self, prepared, begun, tmp_path, change, moved):
        data = tmp_path / "data"
        if moved:
            data = data.rename(tmp_path / "other")
        path = data / "wav" / f"{read_manifest(begun / 'train.csv')[0].ID}.wav"
        if change == "gone":
            path.unlink()
        elif change == "longer":
            wav, rate = soundfile.read(path)
            soundfile.write(path, [*wav, 0.0], rate)
        elif change == "added":
            shutil.copy(path, path.with_name("77777.wav"))
        else:
            path.rename(path.with_name("77777.wav"))
        before = snapshot(begun)
        with pytest.raises(
            ValueError, match=r"other data \(names, sizes or speakers of"
        ):
            prepared(data, valid_speakers=2)
        assert snapshot(begun) == before

    def test_lists_that_moved_are_the_same_lists(self, prepared, tmp_path):
        trials = write_list(tmp_path / "trials.txt", TRIALS)
        first = prepared(trial_lists=(trials,))
        write_checkpoint(tmp_path / "save")
        moved = (tmp_path / "trials.txt").rename(tmp_path / "moved.txt")
        before = snapshot(tmp_path / "save")
        assert prepared(trial_lists=(str(moved),)) == first
        assert snapshot(tmp_path / "save") == before

    def test_lists_whose_checksums_were_deleted_are_taken(
        self, prepared, begun, tmp_path
    ):
        (begun / "SHA256SUMS").unlink()
        before = snapshot(begun)
        prepared(tmp_path / "data", valid_speakers=2)
        assert snapshot(begun) == before
        # Whoever trains on with them vouches for them as they are.
        write_missing_sums(begun)
        labels = (begun / "label_encoder.txt").read_text()
        (begun / "label_encoder.txt").write_text(labels.replace("id", "ID", 1))
        with pytest.raises(
            ValueError, match=r"label_encoder\.txt is not as it was wri"
        ):
            read_prepared(begun)

    def test_a_run_without_a_record_is_refused(self, prepared, begun, tmp_path):
        (begun / "prepared.json").unlink()
        with pytest.raises(ValueError, match="has checkpoints of a run on other data"):
            prepared(tmp_path / "data", valid_speakers=2)


def test_validation_reads_the_files_of_its_trials(prepared, tmp_path):
    prepared(valid_speakers=2)
    files = read_valid_files(tmp_path / "save")
    trials = read_trials(tmp_path / "save/valid_trials.txt")
    assert {*files} == {*trials.utterances}
    assert all(wav.endswith(f"/{name}") for name, wav in files.items())
    (tmp_path / "save/valid.csv").write_text("name,wav\n")
    with pytest.raises(ValueError, match=r"valid\.csv is not as it was written"):
        read_valid_files(tmp_path / "save")


def test_a_relative_data_folder_of_another_working_folder_is_another(
    prepared, tmp_path, monkeypatch
):
    for name, seconds in (("here", 0.1), ("there", 0.2)):
        write_corpus(tmp_path / name / "speech", speakers=2, seconds=seconds)
        monkeypatch.chdir(tmp_path / name)
        prepared("speech")
        first = read_manifest(tmp_path / "save/train.csv")[0]
        assert first.wav.startswith(str(tmp_path / name))


@pytest.mark.parametrize("written", range(len(LISTS)))
def test_a_preparation_that_was_cut_off_is_not_vouched_for(
    prepared, tmp_path, monkeypatch, written
):
    """Of one with other settings no list may pass for one of the first."""
    for save, count in (("wanted", 2), ("others", 3), ("run", 2)):
        prepared(save=save, valid_speakers=count)

    def wrote(path, *args, _write):
        _write(path, *args)
        if path.name == LISTS[written]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for writer in ("write_manifest", "write_whole", "write_labels"):
            write = getattr(preparation, writer)
            patch.setattr(preparation, writer, partial(wrote, _write=write))
        with pytest.raises(
            KeyboardInterrupt, match=r"^in the listing of .* The same command lists it"
        ):
            prepared(save="run", valid_speakers=3)
    path = LISTS[written]
    others = (tmp_path / "others" / path).read_bytes()
    assert (tmp_path / "run" / path).read_bytes() == others
    prepared(save="run", valid_speakers=2)
    for name in (*LISTS, "prepared.json", "SHA256SUMS"):
        wanted = (tmp_path / "wanted" / name).read_bytes()
        assert (tmp_path / "run" / name).read_bytes() == wanted, name


def test_a_list_that_is_missing_and_a_record_that_is_damaged_are_named(
    prepared, tmp_path
):
    prepared()
    path = tmp_path / "save/label_encoder.txt"
    path.rename(tmp_path / "kept")
    with pytest.raises(FileNotFoundError, match=r"label_encoder\.txt"):
        prepared()
    (tmp_path / "kept").rename(path)
    (tmp_path / "save/SHA256SUMS").unlink()
    for content, reason in (
        ("{", "Expecting"),
        ("{}", "'prepared' is missing"),
    ):
        (tmp_path / "save/prepared.json").write_text(content)
        with pytest.raises(ValueError, match=rf"prepared\.json is damaged \({reason}"):
            prepared()


def test_lists_without_checksums_are_made_anew_where_no_run_has_begun(
    prepared, tmp_path
):
    first = prepared(valid_speakers=2)
    path = tmp_path / "save/valid_trials.txt"
    trials = path.read_text()
    (tmp_path / "save/SHA256SUMS").unlink()
    path.write_text("1 ann lee/a.wav ann lee/b.wav\n")
    assert prepared(valid_speakers=2) == first
    assert path.read_text() == trials


@pytest.mark.parametrize("empty", [True, False])
def test_checksums_that_lack_lists_are_refused(prepared, tmp_path, empty):
    prepared()
    path = tmp_path / "save/SHA256SUMS"
    text = path.read_text().replace("  train.csv\n", "  urain.csv\n")
    path.write_text("" if empty else text)
    with pytest.raises(ValueError, match=r"SHA256SUMS lacks train\.csv"):
        read_prepared(tmp_path / "save")


def test_what_is_checked_may_change_until_there_are_checkpoints(
    prepared, tmp_path, caplog
):
    data = write_corpus(tmp_path / "data", speakers=3, seconds=0.1)
    soundfile.write(data / "wav/id00000/s00/silent.wav", [0.0] * 999, 16000)
    settings = {"data": data, "bad_files": "drop"}
    heard = [prepared(**settings, check_audio=c).left_out for c in (False, True)]
    (tmp_path / "save/CKPT+1").mkdir()
    # A checkpoint that was cut off is none.
    heard.append(prepared(**settings).left_out)
    assert heard == [{}, {"silent": 1}, {}]
    write_checkpoint(tmp_path / "save")
    assert prepared(**settings, check_audio=True).left_out == {}
    assert "check_audio: no effect. The lists of " in caplog.text
    assert "To check files anew, give a new output_folder." in caplog.text


@pytest.mark.parametrize("same", [False, True])
def test_a_list_of_other_files_of_equal_names_and_sizes_is_other_data(
    prepared, corpus, tmp_path, same
):
    """A list that moved with its files is the same; one of other files is not."""
    rows = rows_of(corpus)[:4] + rows_of(corpus)[-4:]
    lists = []
    for number in range(2):
        folder = tmp_path / f"data{number}"
        lines = [f"{n},{n if same else n + str(number)}.wav,{s}" for n, _, s in rows]
        write_tables(folder, **{"a.csv": ["ID,wav,spk_id", *lines]})
        for line, (_, path, _) in zip(lines, rows, strict=True):
            shutil.copy(path, folder / line.split(",")[1])
        lists.append(folder / "a.csv")
    prepared(lists[0])
    write_checkpoint(tmp_path / "save")
    if same:
        assert prepared(lists[1]).utterances == 8
        assert_readable(tmp_path / "save")
    else:
        with pytest.raises(ValueError, match="names, sizes or speakers of the files"):
            prepared(lists[1])


def test_a_begun_run_on_moved_data_keeps_its_checks(corpus, prepared, tmp_path):
    shutil.copytree(corpus, tmp_path / "data")
    first = min((tmp_path / "data").rglob("*.wav"))
    soundfile.write(first, np.zeros(2080), 16000)
    prepared(tmp_path / "data")
    (tmp_path / "save" / "CKPT+1").mkdir()
    (tmp_path / "save" / "CKPT+1" / "CKPT.yaml").touch()
    before = (tmp_path / "save" / "train.csv").read_text()
    (tmp_path / "data").rename(tmp_path / "moved")
    prepared(tmp_path / "moved", check_audio=True, bad_files="drop")
    after = (tmp_path / "save" / "train.csv").read_text()
    assert after == before.replace(f"{tmp_path}/data/", f"{tmp_path}/moved/")
