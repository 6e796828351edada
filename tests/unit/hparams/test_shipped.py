"""Files that come with the package are named without folder and ending."""

import pytest

from speechbrain_rev.cli import main
from speechbrain_rev.hparams import compose, resolve, shipped, top_level_keys
from tests.unit.hparams.files import DATA, FOLDER, refusal


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
    with pytest.raises(
        ValueError, match=r"cannot be read: No such file.* give revnet57, without"
    ):
        resolve(path)


def test_an_unknown_name_is_told_with_the_nearest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["resolve", "revnet75"]) == 2
    said = capsys.readouterr().err
    assert "revnet75 cannot be read: there is none here" in said
    assert "revnet57" in said


class TestBases:
    """A file outside the folder builds on those of the package."""

    @pytest.mark.parametrize("base", ["train.yaml", "train", "df_revnet89.yaml"])
    def test_a_name_means_the_file_from_any_folder(self, base, tmp_path):
        (tmp_path / "mine.yaml").write_text(f"base: {base}\nbatch_size: 7\n")
        own = resolve(tmp_path / "mine.yaml", DATA)
        path = FOLDER / f"{base.removesuffix('.yaml')}.yaml"
        assert own == resolve(path, {"batch_size": 7, **DATA})

    def test_a_file_beside_goes_before_one_of_the_package(self, tmp_path):
        (tmp_path / "train.yaml").write_text("seed: 1\n")
        (tmp_path / "mine.yaml").write_text("base: train.yaml\nseed: 2\n")
        assert resolve(tmp_path / "mine.yaml") == "seed: 2\n"

    def test_the_current_folder_is_not_looked_in(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.yaml").write_text("seed: 1\n")
        (tmp_path / "below").mkdir()
        (tmp_path / "below" / "mine.yaml").write_text("base: train.yaml\nseed: 2\n")
        assert resolve("below/mine.yaml") == resolve(FOLDER / "train.yaml", {"seed": 2})

    def test_a_broken_link_beside_is_not_replaced_by_one_of_the_package(self, tmp_path):
        (tmp_path / "train.yaml").symlink_to(tmp_path / "moved.yaml")
        (tmp_path / "mine.yaml").write_text("base: train.yaml\n")
        with pytest.raises(
            ValueError, match=r"train\.yaml, the base of .*No such file"
        ):
            resolve(tmp_path / "mine.yaml")

    @pytest.mark.parametrize(
        "base", ["tran.yaml", "./train.yaml", "hparams/train.yaml", "train.yml"]
    )
    def test_what_is_in_neither_place_is_told_with_all_names(self, base, tmp_path):
        file = tmp_path / "mine.yaml"
        file.write_text(f"seed: 1\nbase: {base}\n")
        said = refusal(file)
        assert said.startswith(
            f"{file}, line 2: its base {base} is not there: no file of"
        )
        assert (
            "lies beside mine.yaml, and none of that name comes with the pack" in said
        )
        assert "Did you mean train?" in said
        assert said.endswith(f"or one of {', '.join(shipped.shipped())}.")


def test_files_that_are_nowhere_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "_FOLDERS", (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(FileNotFoundError, match=r"in neither .*a nor .*b\. Install"):
        shipped.file_of("revnet57")
