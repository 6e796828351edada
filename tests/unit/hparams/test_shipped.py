"""Files that come with the package are named without folder and ending."""

import pytest

from speechbrain_rev.cli import main
from speechbrain_rev.hparams import compose, resolve, shipped, top_level_keys
from tests.unit.hparams.files import DATA, FOLDER


def test_every_file_of_the_folder_has_its_name():
    assert shipped.shipped() == {file.stem: file for file in FOLDER.glob("*.yaml")}


def test_a_name_means_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = FOLDER / "df_revnet89.yaml"
    assert resolve("df_revnet89", DATA) == resolve(path, DATA)
    assert top_level_keys("df_revnet89") == top_level_keys(path)
    composed = compose(["df_revnet89", "--data_folder=data"])
    assert composed.text == resolve(path, DATA)


def test_a_file_in_the_current_folder_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "revnet57").write_text("arch: revnet46\n")
    assert resolve("revnet57") == "arch: revnet46\n"


@pytest.mark.parametrize("path", ["revnet57.yaml", "./revnet57", "hparams/revnet57"])
def test_a_path_is_never_taken_for_a_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        resolve(path)


def test_an_unknown_name_is_told_with_the_nearest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["resolve", "revnet75"]) == 2
    said = capsys.readouterr().err
    assert "revnet75 cannot be read: there is none here" in said
    assert "revnet57" in said


def test_files_that_are_nowhere_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "_FOLDERS", (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(FileNotFoundError, match=r"in neither .*a nor .*b\. Install"):
        shipped.file_of("revnet57")
