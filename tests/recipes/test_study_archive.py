"""A study in one small file."""

import io
import json
import lzma
import tarfile
from dataclasses import asdict

import pytest

from speechbrain_rev import locks
from tests.recipes.study import study

archive, conditions = study("archive"), study("design.conditions")
SCORES = "scores/results.json"

SETTINGS = """output_folder: {study}/runs/resnet34/1
trial_lists: [{data}/veri_test.txt, {data}/veri_test_hard.txt]
noise_folder: {noise}
verification_file: https://somewhere{data}/voxceleb/veri_test.txt
rir_folder: {data}2/rooms
others: {data}+rooms
"""


@pytest.fixture
def places(tmp_path):
    """A study, speech, and noise below it."""
    return {
        "study": tmp_path / "study",
        "data": tmp_path / "data",
        "noise": tmp_path / "data" / "noise",
    }


@pytest.fixture
def written(places):
    """A study of a training that was scored, and of one that was not."""
    setting = {
        "data": str(places["data"]),
        "noise": {"folder": str(places["noise"])},
        "conditions": [asdict(one) for one in conditions.conditions()],
        "comparisons": [asdict(one) for one in conditions.comparisons()],
        "seeds": [1, 2],
    }
    files = {
        "setting.json": json.dumps(setting),
        "margins.json": "{}",
        "report.md": "not kept",
        "runs/resnet34/1/hyperparams.yaml": SETTINGS.format(**places),
        "runs/resnet34/1/train_log.jsonl": "{}\n",
        "runs/resnet34/1/embedding_model.ckpt": "not kept",
        "runs/resnet34/1/save/CKPT+1/model.ckpt": "not kept",
        "runs/resnet34/1/save/train.csv": f"ID,wav\r\na,{places['data']}/a.wav\r\n",
        "runs/resnet34/1/scores/results.json": "{}",
        "runs/resnet34/1/scores/veri_test.cosine.txt": "0.5 a b\n",
        "runs/resnet34/1/scores/det.png": "not kept",
        "runs/resnet34/2/hyperparams.yaml": "not kept",
        "baseline/deviation/scores/results.json": "{}",
        "baseline/deviation/scores/veri_test.cosine.txt": "0.5 a b\n",
        "baseline/deviation/embeddings.npz": "not kept",
    }
    for name, text in files.items():
        path = places["study"] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return places["study"]


def files_below(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().decode()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_reports_read_is_put_where_speech_is(written, places, tmp_path, capsys):
    file, moved = tmp_path / "study.tar.xz", tmp_path / "moved"
    archive.main(["pack", str(written), str(file)])
    assert "measures.json is not there yet" in capsys.readouterr().out
    for name in ("d", "n"):
        (tmp_path / name).mkdir()
    data, noise = tmp_path / "d", tmp_path / "n"
    argv = ["unpack", str(file), str(moved), f"--data={data}", f"--noise={noise}"]
    archive.main(argv)
    # What needs no training is none.
    assert capsys.readouterr().out.endswith(": 1 trainings\n")
    found = files_below(moved)
    run = "runs/resnet34/1/"
    expected = SETTINGS.format(study=moved, data=data, noise=noise)
    # What only begins or ends like a place is none.
    for kept in ("somewhere{}/", "{}2/", "{}+rooms"):
        expected = expected.replace(kept.format(data), kept.format(places["data"]))
    assert found.pop(f"{run}hyperparams.yaml") == expected
    setting = json.loads((written / "setting.json").read_text())
    setting |= {"data": str(data), "noise": {"folder": str(noise)}}
    assert json.loads(found.pop("setting.json")) == setting
    assert found.pop(f"{run}save/train.csv") == f"ID,wav\r\na,{data}/a.wav\r\n"
    before = files_below(written)
    assert found == {name: before[name] for name in found}
    scores = (f"{run}scores/results.json", f"{run}scores/veri_test.cosine.txt")
    of_baseline = {name for name in before if name.startswith("baseline/deviation/s")}
    assert len(of_baseline) == 2
    assert set(found) == {
        *(*scores, "margins.json", f"{run}train_log.jsonl", *of_baseline)
    }
    with pytest.raises(ValueError, match="holds a study already"):
        archive.main(argv)


def test_what_must_be_equal_goes_together_or_not_at_all(written, tmp_path, capsys):
    reference, *modes = (
        "revnet46",
        "revnet46_reconstructed",
        "revnet46_plan_at_half_the_memory",
    )
    names = [reference, *modes, "revnet57", "revnet46_bf16"]
    scored = {f"runs/{name}/{seed}/{SCORES}" for name in names for seed in (1, 2)}
    lacking = f"runs/{modes[1]}/2/{SCORES}"
    for name in scored - {lacking}:
        path = written / name
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    file = tmp_path / "study.tar.xz"
    archive.main(["pack", str(written), str(file)])
    shown = capsys.readouterr().out
    left_out = {f"runs/{name}/2/{SCORES}" for name in (reference, modes[0])}
    for name in left_out:
        assert f"Left out, as what must be equal is not there yet: {written}" in shown
        assert (written / name).parents[1].as_posix() in shown
    with tarfile.open(file) as tar:
        packed = {name for name in tar.getnames() if name.endswith(SCORES)}
    others = {f"runs/resnet34/1/{SCORES}", f"baseline/deviation/{SCORES}"}
    assert packed == (scored | others) - left_out - {lacking}


def test_a_study_makes_the_same_file_wherever_it_is(written, tmp_path):
    first, second, moved = tmp_path / "1", tmp_path / "2", tmp_path / "moved"
    archive.pack(written, first)
    archive.unpack(first, moved, tmp_path / "elsewhere", tmp_path / "noise")
    archive.pack(moved, second)
    assert first.read_bytes() == second.read_bytes()


def test_paths_that_settings_would_quote_are_refused(written, tmp_path):
    archive.pack(written, tmp_path / "file")
    for name in ("a, b", "a b", "a]", 'a"', "a#b", "\u00fc"):
        with pytest.raises(ValueError, match="has characters"):
            archive.unpack(tmp_path / "file", tmp_path / name, tmp_path, tmp_path)


def test_noise_that_a_study_had_is_asked_for(written, tmp_path):
    archive.pack(written, tmp_path / "file")
    with pytest.raises(ValueError, match="had noise: give"):
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, None)
    setting = written / "setting.json"
    setting.write_text(json.dumps({**json.loads(setting.read_text()), "noise": None}))
    archive.pack(written, tmp_path / "quiet")
    with pytest.raises(ValueError, match="had none: leave out"):
        archive.unpack(tmp_path / "quiet", tmp_path / "moved", tmp_path, tmp_path)
    assert not (tmp_path / "moved").exists()


def test_a_damaged_file_is_told(written, tmp_path):
    archive.pack(written, tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"something else", b""):
        (tmp_path / "file").write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged, or no study"):
            archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, tmp_path)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"There is no file .*missing"):
        archive.unpack(tmp_path / "missing", tmp_path / "moved", tmp_path, None)


def test_a_place_that_cannot_be_written_is_told_before_the_work(written, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be written: there is no folder"):
        archive.pack(written, tmp_path / "nowhere" / "file")


def test_no_file_is_replaced(written, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"is there already\. Name another file"):
        archive.pack(written, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_study_that_was_moved_by_hand_is_not_packed(written, tmp_path):
    moved = written.rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=r"was trained as .*study/runs/resnet34/1, and"
    ):
        archive.pack(moved, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_what_is_no_study_is_not_packed(tmp_path):
    with pytest.raises(ValueError, match=r"lacks setting\.json"):
        archive.pack(tmp_path, tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("../outside.json", tarfile.REGTYPE, "which no study has"),
        ("/outside.json", tarfile.REGTYPE, "which no study has"),
        ("runs/a/../../../b/hyperparams.yaml", tarfile.REGTYPE, "which no study has"),
        ("runs/a/1/save/CKPT+1/CKPT.yaml", tarfile.REGTYPE, "which no study has"),
        ("runs/a/1/hyperparams.yaml/x", tarfile.REGTYPE, "which no study has"),
        ("link.json", tarfile.SYMTYPE, "which no study has"),
        ("folder.json", tarfile.DIRTYPE, "which no study has"),
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
    with pytest.raises(ValueError, match="holds more than 100 bytes"):
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, tmp_path)
    assert not (tmp_path / "moved").exists()


def test_names_that_would_be_huge_are_refused_before_they_are_read(
    tmp_path, monkeypatch
):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("a" * 100_000))
    (tmp_path / "file").write_bytes(lzma.compress(raw.getvalue()))
    with pytest.raises(ValueError, match="which no study has") as told:
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, None)
    assert len(str(told.value)) < 1000
    monkeypatch.setattr(archive, "MAX_BYTES", 50_000)
    with pytest.raises(ValueError, match="holds more than 50000 bytes"):
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, None)


def write_tar(path, *members):
    """Write an archive of members, each a name and what else its header says."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, pax in members:
            info = tarfile.TarInfo(name)
            info.pax_headers = pax
            tar.addfile(info)
    path.write_bytes(lzma.compress(raw.getvalue()))


def gnu_sparse(name, size):
    """Write the header of a file of holes, as GNU tar does."""
    info = tarfile.TarInfo(name)
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    # Of 24 pieces none is given; then there is the size without holes.
    header[483:495] = f"{size:011o} ".encode()
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


SPARSE = {
    "old": {"GNU.sparse.size": str(2**40), "GNU.sparse.numblocks": "0"},
    "middle": {"GNU.sparse.map": f"{2**40},0", "GNU.sparse.size": str(2**40)},
    "damaged": {"GNU.sparse.map": "a,b", "GNU.sparse.size": str(2**40)},
}


@pytest.mark.parametrize("kind", ["gnu", *SPARSE])
def test_files_of_holes_are_refused_before_they_are_filled(tmp_path, kind, monkeypatch):
    path = tmp_path / "file"
    if kind == "gnu":
        raw = gnu_sparse("setting.json", 2**36 - 1)
        path.write_bytes(lzma.compress(raw + bytes(1024)))
    else:
        write_tar(path, ("setting.json", SPARSE[kind]))

    def fill(*_):
        raise AssertionError("it is filled")

    monkeypatch.setattr(tarfile.TarFile, "extractfile", fill)
    with pytest.raises(ValueError, match=r"file (is damaged|holds 'setting\.json')"):
        archive.unpack(path, tmp_path / "moved", tmp_path, None)
    assert not (tmp_path / "moved").exists()


def test_one_file_is_there_once(tmp_path):
    write_tar(tmp_path / "file", ("setting.json", {}), ("setting.json", {}))
    with pytest.raises(
        ValueError, match=r"'setting\.json', which no study has, or not"
    ):
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, None)


def test_very_many_files_are_refused(written, tmp_path, monkeypatch):
    archive.pack(written, tmp_path / "file")
    monkeypatch.setattr(archive, "MAX_FILES", 3)
    with pytest.raises(ValueError, match="holds more than 3 files"):
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, tmp_path)
    assert not (tmp_path / "moved").exists()


def test_words_that_become_long_paths_are_counted_as_these(
    written, tmp_path, monkeypatch
):
    (written / "margins.json").write_text("{DATA}" * 10_000)
    archive.pack(written, tmp_path / "file")
    data = tmp_path / ("a" * 200)
    data.mkdir()
    monkeypatch.setattr(archive, "MAX_BYTES", 1_000_000)
    with pytest.raises(ValueError, match="holds more than 1000000 bytes"):
        archive.unpack(tmp_path / "file", tmp_path / "moved", data, data)
    assert not (tmp_path / "moved").exists()
    # What is packed has more than what is there of it.
    archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, tmp_path)
    text = (tmp_path / "moved" / "margins.json").read_text()
    assert text == str(tmp_path) * 10_000


def test_a_packed_file_that_is_too_large_itself_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 10_000)
    (tmp_path / "file").write_bytes(lzma.compress(b"", preset=0) + bytes(20_000))
    with pytest.raises(ValueError, match="holds more than 10000 bytes"):
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, None)


def test_memory_for_unpacking_is_bounded(written, tmp_path):
    archive.pack(written, tmp_path / "file")
    raw = lzma.decompress((tmp_path / "file").read_bytes())
    # A dictionary takes as much, whatever is packed.
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**29, "preset": 0}]
    (tmp_path / "file").write_bytes(lzma.compress(raw, filters=filters))
    with pytest.raises(ValueError, match="is damaged, or no study"):
        archive.unpack(tmp_path / "file", tmp_path / "moved", tmp_path, tmp_path)


def test_a_study_that_is_written_to_is_not_packed(written, tmp_path):
    with locks.writing_alone(written), pytest.raises(ValueError, match="Another"):
        archive.pack(written, tmp_path / "file")
    assert not (tmp_path / "file").exists()
