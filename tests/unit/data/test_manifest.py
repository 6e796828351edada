import pickle
from pathlib import Path

import numpy as np
import pytest

from speechbrain_rev.data import Manifest, Utterance, read_manifest, write_manifest
from speechbrain_rev.data import manifest as manifest_module
from speechbrain_rev.data.columns import TextColumn, map_columns, save_columns

ROWS = [
    Utterance("id1/a/1", "wav/id1/a/1.wav", 16000, "id1"),
    Utterance("id2/a/1", "wav/id2/a/1.wav", 8000, "id2"),
    Utterance('a,"b"', "with space/and ü.wav", 7, "id 1"),
    Utterance("id1/a/2", "wav/id1/a/2.wav", 2**33, "id1"),
]


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
        ("ID,wav,samples,spk_id\n", "lists no utterance"),
        ("", "columns None"),
        ("ID,wav,samples,spk_id\na,a.wav,7,s\nb,b.wav,long,s\n", "line 3.*'long'"),
        ("ID,wav,samples,spk_id\na,a.wav\n", "line 2.*None"),
        ("ID,wav,samples,spk_id\na,a.wav,7\n", "line 2 has fewer fields"),
        ("ID,wav,samples,spk_id\n\n", "lists no utterance"),
        (f"ID,wav,samples,spk_id\na,a.wav,{2**63},s\n", "line 2: samples is '9223"),
        ("ID,wav,samples,spk_id\na,a.wav,-1,s\n", "line 2: samples is '-1'"),
        ("ID,wav,samples,spk_id\na,a.wav,7,s,t\n", "line 2 has more fields than"),
        ("ID,wav,samples,spk_id\n,a.wav,7,s\n", "line 2 has fewer fields .* empty"),
        ('ID,wav,samples,spk_id\na,"a.wav,7,s\n', "from line 2 on: it is no CSV"),
    ],
)
def test_an_unusable_manifest_is_refused_by_name(tmp_path, content, named):
    path = tmp_path / "train.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=named):
        read_manifest(path)


def test_a_manifest_of_another_encoding_is_refused_with_its_line(tmp_path):
    path, text = tmp_path / "train.csv", "ID,wav,samples,spk_id\na,ü.wav,7,s\n"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"train\.csv, line 2: no UTF-8 text.*ID,wav"):
        read_manifest(path)
    path.write_text(text, encoding="utf-16")
    with pytest.raises(ValueError, match=r"train\.csv, line 1: no UTF-8 text"):
        read_manifest(path)


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_a_manifest_that_a_spreadsheet_saved_has_the_same_rows(path, ends):
    text = path.read_bytes().decode().replace("\r\n", ends)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert list(read_manifest(path)) == ROWS


def test_a_manifest_that_is_edited_is_read_as_it_is_now(path):
    assert len(read_manifest(path)) == 4
    text = path.read_text().replace("8000", "9000")
    path.write_text("".join(text.splitlines(keepends=True)[:3]))
    assert [u.samples for u in read_manifest(path)] == [16000, 9000]


def test_rows_are_mapped_and_a_process_is_sent_none_of_them(path):
    manifest = read_manifest(path)
    assert str(path) + ".columns" in Path("/proc/self/maps").read_text()
    assert len(pickle.dumps(manifest)) < 600
    assert list(pickle.loads(pickle.dumps(manifest))) == ROWS
    assert list(pickle.loads(pickle.dumps(Manifest.of(ROWS)))) == ROWS


def test_a_process_that_would_read_other_rows_is_told(path):
    sent = pickle.dumps(read_manifest(path))
    write_manifest(path, ROWS[1:])
    with pytest.raises(ValueError, match="written anew while processes read it"):
        pickle.loads(sent)


def test_a_damaged_mapped_form_is_made_anew(path, caplog):
    mapped = path.with_name("train.csv.columns")
    content = mapped.read_bytes()
    mapped.write_bytes(content[:-8])
    assert list(read_manifest(path)) == ROWS
    assert "train.csv.columns is damaged" in caplog.text
    save_columns(mapped, {"names": TextColumn.of(["a"])}, {})
    assert list(read_manifest(path)) == ROWS
    assert "has the columns ['names']" in caplog.text
    caplog.clear()
    assert list(read_manifest(path)) == ROWS
    assert not caplog.text


def test_rows_that_cannot_be_mapped_are_read_and_told_of(path, monkeypatch, caplog):
    path.with_name("train.csv.columns").unlink()

    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(manifest_module, "save_columns", read_only)
    assert list(read_manifest(path)) == ROWS
    assert "each process has all rows" in caplog.text


def test_texts_are_found_among_sorted_ones():
    texts = sorted(["", "b", "ba", "bb", "ü", "c/d"], key=str.encode)
    column = TextColumn.of(texts)
    assert [column.first_from(text) for text in texts] == list(range(6))
    assert column.first_from("bab") == 3
    assert column.first_from("üü") == 6
    assert column[1:3] == texts[1:3]
    assert TextColumn.of([]).first_from("") == 0


@pytest.mark.parametrize("ends", [[1, 2], [3, 2, 4], [-1, 4]])
def test_ends_that_are_not_those_of_the_texts_are_refused(tmp_path, ends):
    data = np.frombuffer(b"abcd", np.uint8)
    with pytest.raises(ValueError, match="ends of texts"):
        TextColumn(data, np.array(ends))
    save_columns(
        tmp_path / "x", {"t.bytes": data, "t.ends": np.array(ends, np.int64)}, {}
    )
    with pytest.raises(ValueError, match="is damaged"):
        map_columns(tmp_path / "x")
