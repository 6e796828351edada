"""A study in one small file."""

import io
import json
import lzma
import tarfile

import pytest

from tests.recipes.study import study

archive = study("archive")


@pytest.fixture
def written(tmp_path):
    """A study of a training that was scored, and of one that was not."""
    folder = tmp_path / "study"
    data, noise = tmp_path / "data", tmp_path / "data" / "noise"
    setting = {"data": str(data), "noise": {"folder": str(noise)}}
    files = {
        "setting.json": json.dumps(setting),
        "margins.json": "{}",
        "report.md": "not kept",
        "runs/resnet34/1/hyperparams.yaml": f"a: {noise}/x\nb: {data}\nc: {folder}/runs",
        "runs/resnet34/1/train_log.jsonl": "{}\n",
        "runs/resnet34/1/embedding_model.ckpt": "not kept",
        "runs/resnet34/1/save/CKPT+1/model.ckpt": "not kept",
        "runs/resnet34/1/save/train.csv": "ID\n",
        "runs/resnet34/1/scores/results.json": "{}",
        "runs/resnet34/1/scores/veri_test.cosine.txt": "0.5 a b\n",
        "runs/resnet34/2/hyperparams.yaml": "not kept",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def files_below(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_reports_read_is_put_where_speech_is(written, tmp_path):
    file, moved = tmp_path / "study.tar.xz", tmp_path / "moved"
    archive.main(["pack", str(written), str(file)])
    packed = lzma.decompress(file.read_bytes())
    assert str(tmp_path).encode() not in packed
    argv = ["unpack", str(file), str(moved), "--data=/d", "--noise=/n"]
    archive.main(argv)
    found = files_below(moved)
    run = "runs/resnet34/1/"
    assert found.pop(f"{run}hyperparams.yaml") == f"a: /n/x\nb: /d\nc: {moved}/runs"
    setting = {"data": "/d", "noise": {"folder": "/n"}}
    assert json.loads(found.pop("setting.json")) == setting
    before = files_below(written)
    assert found == {name: before[name] for name in found}
    scores = (f"{run}scores/results.json", f"{run}scores/veri_test.cosine.txt")
    others = ("margins.json", f"{run}train_log.jsonl", f"{run}save/train.csv")
    assert set(found) == {*scores, *others}
    with pytest.raises(ValueError, match="holds a study already"):
        archive.main(argv)


def test_a_study_makes_the_same_file_wherever_it_is(written, tmp_path):
    first, second, moved = tmp_path / "1", tmp_path / "2", tmp_path / "moved"
    archive.pack(written, first)
    archive.unpack(first, moved, tmp_path / "elsewhere", tmp_path / "noise")
    archive.pack(moved, second)
    assert first.read_bytes() == second.read_bytes()


def test_noise_that_a_study_had_is_asked_for(written, tmp_path):
    archive.pack(written, tmp_path / "file")
    with pytest.raises(ValueError, match="had noise"):
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, None)
    assert not (tmp_path / "moved").exists()


def test_what_is_no_study_is_not_packed(tmp_path):
    with pytest.raises(ValueError, match=r"lacks setting\.json"):
        archive.pack(tmp_path, tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("../outside", tarfile.REGTYPE, "leads out of it"),
        ("/outside", tarfile.REGTYPE, "leads out of it"),
        ("link", tarfile.SYMTYPE, "is no file"),
        ("folder", tarfile.DIRTYPE, "is no file"),
        ("margins.json", tarfile.REGTYPE, r"lacks setting\.json"),
    ],
)
def test_files_of_others_write_nothing_elsewhere(tmp_path, name, kind, words):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        tar.addfile(info)
    (tmp_path / "file").write_bytes(lzma.compress(raw.getvalue()))
    with pytest.raises(ValueError, match=words):
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, None)
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_files_that_would_be_huge_are_refused(written, tmp_path, monkeypatch):
    archive.pack(written, tmp_path / "file")
    monkeypatch.setattr(archive, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="too large"):
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, tmp_path)
    assert not (tmp_path / "moved").exists()
