import pickle
from pathlib import Path

import pytest

from speechbrain_rev.audio.columns import TextColumn, save_columns
from speechbrain_rev.data import Manifest, Utterance, read_manifest, write_manifest
from speechbrain_rev.data import manifest as manifest_module

ROWS = [
    Utterance("id1/a/1", "wav/id1/a/1.wav", 16000, "id1"),
    Utterance("id2/a/1", "wav/id2/a/1.wav", 8000, "id2"),
    Utterance('a,"b"', "with space/and ü.wav", 7, "id 1"),
    Utterance("id1/a/2", "wav/id1/a/2.wav", 2**33, "id1"),
]
HEADER = "ID,wav,samples,spk_id\n"


@pytest.fixture
def path(tmp_path):
    write_manifest(tmp_path / "train.csv", ROWS)
    return tmp_path / "train.csv"


def test_a_manifest_comes_back_as_written(path):
    manifest = read_manifest(path)
    assert list(manifest) == ROWS
    assert manifest[-1] == ROWS[-1]
    assert manifest[1:3] == ROWS[1:3]
    assert list(manifest.speaker_names) == ["id1", "id2", "id 1"]
    with pytest.raises(IndexError):
        manifest[4]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "no manifest"),
        ("ID,wav,spk_id\n", "it needs .*samples"),
        ("", "columns None"),
        (HEADER, "lists no utterance"),
        (f"{HEADER}a,a.wav,7,s\nb,b.wav,long,s\n", "line 3.*'long'"),
        (f"{HEADER}a,a.wav\n", "line 2.*None"),
        (f"{HEADER}a,a.wav,7\n", "line 2 has fewer fields"),
        (f"{HEADER}a,a.wav,{2**63},s\n", "line 2: samples is '9223"),
        (f"{HEADER}a,a.wav,-1,s\n", "line 2: samples is '-1'"),
        (f"{HEADER}a,a.wav,7,s,t\n", "line 2 has more fields than"),
        (f"{HEADER},a.wav,7,s\n", "line 2 has fewer fields .* empty"),
        (f'{HEADER}a,"a.wav,7,s\n', "from line 2 on: it is no CSV"),
        (f"{HEADER}a,ü.wav,7,s\n".encode("latin-1"), "line 2: no UTF-8 text.*ID,wav"),
        (f"{HEADER}a,ü.wav,7,s\n".encode("utf-16"), "line 1: no UTF-8 text"),
    ],
)
def test_an_unusable_manifest_is_refused_by_name(tmp_path, content, named):
    path = tmp_path / "train.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"train\.csv.*{named}|{named}.*train\.csv"):
        read_manifest(path)


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_a_manifest_that_is_edited_is_read_as_it_is_now(path, ends):
    assert len(read_manifest(path)) == 4
    # As a spreadsheet saves it.
    text = path.read_bytes().decode().replace("\r\n", ends).replace("8000", "9000")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [u.samples for u in read_manifest(path)] == [16000, 9000, 7, 2**33]


def test_rows_are_mapped_and_a_process_is_sent_none_of_them(path):
    manifest = read_manifest(path)
    assert str(path) + ".columns" in Path("/proc/self/maps").read_text()
    sent = pickle.dumps(manifest)
    assert len(sent) < 600
    assert list(pickle.loads(sent)) == ROWS
    assert list(pickle.loads(pickle.dumps(Manifest.of(ROWS)))) == ROWS
    write_manifest(path, ROWS[1:])
    with pytest.raises(ValueError, match="written anew while processes read it"):
        pickle.loads(sent)


def test_a_damaged_mapped_form_is_made_anew(path, caplog):
    mapped = path.with_name("train.csv.columns")
    mapped.write_bytes(mapped.read_bytes()[:-8])
    assert list(read_manifest(path)) == ROWS
    assert "train.csv.columns is damaged" in caplog.text
    save_columns(mapped, {"names": TextColumn.of(["a"])}, {})
    assert list(read_manifest(path)) == ROWS
    assert "has the columns ['names']" in caplog.text
    caplog.clear()
    assert list(read_manifest(path)) == ROWS
    assert not caplog.text


def test_rows_that_cannot_be_mapped_are_read_with_a_warning(path, monkeypatch, caplog):
    path.with_name("train.csv.columns").unlink()

    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(manifest_module, "save_columns", read_only)
    assert list(read_manifest(path)) == ROWS
    assert "each process has all rows" in caplog.text
