import pickle

import pytest
import torch.multiprocessing

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


# Rows of all kinds, a block of the file with quotes behind one without, and blocks of a row.
@pytest.mark.parametrize("block", [1, 30, 2**20])
def test_a_manifest_comes_back_as_written(path, monkeypatch, block):
    monkeypatch.setattr(manifest_module, "_BLOCK_BYTES", block)
    manifest = read_manifest(path)
    assert list(manifest) == ROWS
    assert manifest[-1] == ROWS[-1]
    assert manifest[1:3] == ROWS[1:3]
    assert list(manifest.speaker_names) == ["id1", "id2", "id 1"]
    with pytest.raises(IndexError):
        manifest[4]


def test_rows_are_the_same_from_a_file_and_from_utterances_and_in_other_processes(path):
    rows = [
        Utterance("a", "a.wav", 7, "ann", (("city", "Ulm"), ("sex", "f"))),
        Utterance("b", "b.wav", 0, "bob", (("sex", ""),)),
    ]
    write_manifest(path, rows)
    assert path.read_text() == (
        "ID,wav,samples,spk_id,city,sex\na,a.wav,7,ann,Ulm,f\nb,b.wav,0,bob,,\n"
    )
    for manifest in (read_manifest(path), Manifest.of(rows)):
        again = pickle.loads(pickle.dumps(manifest))
        assert list(again) == list(manifest)
        assert again[0] == rows[0]
        assert dict(again[1].labels) == {"city": "", "sex": ""}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "no manifest"),
        ("ID,wav,spk_id\n", "it needs .*samples"),
        ("", "lists no utterance"),
        (HEADER, "lists no utterance"),
        (f"{HEADER}a,a.wav,7,s\nb,b.wav,long,s\n", "line 3 .*'long'"),
        (f"{HEADER}a,a.wav\n", r"line 2 is \['a', 'a.wav'\], and must be"),
        (f"{HEADER}a,a.wav,7\nb,b.wav,7,s,t\n", "line 2 is"),
        (f"{HEADER}a,a.wav,{10**18},s\n", "line 2 .*18 digits"),
        (f"{HEADER}a,a.wav,-1,s\n", "line 2 .*'-1'"),
        (f"{HEADER}a,a.wav,7,s\nb,b.wav,7,s,t\n", "line 3 .*'t'.*with commas in"),
        (f"{HEADER},a.wav,7,s\n", "line 2 .*not empty"),
        (f'{HEADER}"a",a.wav,7,s\n"b",,7,s\n', "line 3 .*not empty"),
        (f'{HEADER}a,"a.wav,7,s\n', "is no CSV .*ID,wav"),
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
    text = path.read_bytes().decode().replace("8000", "9000").replace("\n", ends)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode() + ends.encode())
    assert [u.samples for u in read_manifest(path)] == [16000, 9000, 7, 2**33]


def _answer(manifest, queue):
    columns = [manifest.rows.data, manifest.rows.ends, manifest._speakers]
    queue.put((manifest[-1], [column._tensor is not None for column in columns]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_is_sent_no_copy_of_the_rows(path, method):
    context, manifest = torch.multiprocessing.get_context(method), read_manifest(path)
    queue = context.SimpleQueue()
    process = context.Process(target=_answer, args=(manifest, queue))
    process.start()
    last, shared = queue.get()
    process.join()
    assert last == ROWS[-1]
    # Forked, it has the pages of this process.
    assert shared == [method == "spawn"] * 3
    # This process reads what it shares.
    assert list(manifest) == ROWS
    if method == "spawn":
        assert manifest._speakers._tensor.is_shared()
        assert manifest._speakers._tensor.data_ptr() == manifest.speakers.ctypes.data
