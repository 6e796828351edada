"""Names and places of audio: what a corpus in VoxCeleb's layout says of them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import speechbrain_rev
from speechbrain_rev.data import VoxCelebFolder, audio_files, open_corpus
from speechbrain_rev.data.corpus import (
    OutsideError,
    find_files,
    refuse_one_folder_twice,
    same_speakers,
)
from tests.corpus import write_corpus

from .test_packed import pack

SPEAKERS = "id1", "id2"


def write(folder, *names, content=b""):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def root(tmp_path):
    names = [f"{speaker}/s{n}/{n}.wav" for speaker in SPEAKERS for n in range(2)]
    return write(tmp_path / "data" / "wav", *names)


def test_audio_is_found_at_any_depth_in_sorted_order_and_other_files_are_not(tmp_path):
    write(tmp_path, "b/c/2.FLAC", "a.wav", "b/1.wav", "b/readme.txt")
    found = [path.relative_to(tmp_path).as_posix() for path in audio_files(tmp_path)]
    assert found == ["a.wav", "b/1.wav", "b/c/2.FLAC"]


def test_a_missing_and_an_empty_folder_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*nowhere"):
        audio_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no \.wav or \.flac file below"):
        audio_files(tmp_path)


def test_names_are_listed_in_one_order_whatever_order_the_disk_has(root):
    write(root, "id1/s0/9.m4a", "id1/s0/8.m4a", "id1/s0/8.flac", "id1/s0/notes.txt")
    names = list(open_corpus(root.parent).utterances())
    assert names == [
        *("id1/s0/0.wav", "id1/s0/8.flac", "id1/s0/9.m4a", "id1/s1/1.wav"),
        *("id2/s0/0.wav", "id2/s1/1.wav"),
    ]


def test_names_are_listed_before_all_folders_were_looked_through(root):
    (root / "id2" / "gone").symlink_to(root / "a disk that is not there")
    names = VoxCelebFolder(root).utterances()
    assert next(names) == "id1/s0/0.wav"
    with pytest.raises(FileNotFoundError, match="gone leads to"):
        list(names)


@pytest.mark.parametrize(
    ("name", "speaker", "session"),
    [
        ("id1/s0/0.wav", "id1", "s0"),
        ("id1/book/s0/0.wav", "id1", "book/s0"),
        ("id1/0.wav", "id1", None),
        ("0.wav", None, None),
        ("./id1/s0/0.wav", "id1", "s0"),
        ("id2/../id1/s0/0.wav", "id1", "s0"),
        ("id1//s0/./0.wav", "id1", "s0"),
        ("../wav/id1/s0/0.wav", "id1", "s0"),
        (".hidden/s0/0.wav", ".hidden", "s0"),
    ],
)
def test_speaker_and_session_are_folders_however_a_name_is_spelt(
    root, name, speaker, session
):
    corpus = VoxCelebFolder(root)
    assert (corpus.speaker(name), corpus.session(name)) == (speaker, session)


def test_names_alone_tell_the_speaker_without_a_folder():
    assert VoxCelebFolder(Path()).speaker("id1/s0/0.wav") == "id1"
    assert VoxCelebFolder(Path()).speaker("./id1/s0/0.wav") == "id1"


def test_names_that_lead_out_are_refused_unless_allowed(root):
    write(root.parent.parent, "secret.wav")
    (root / "id1/link.wav").symlink_to(root.parent.parent / "secret.wav")
    for name, why in (
        ("../../secret.wav", "has .."),
        ("/secret.wav", "is absolute"),
        ("id1/link.wav", "leads through a link"),
    ):
        with pytest.raises(OutsideError, match=f"{why}.*out of .*data"):
            VoxCelebFolder(root, root.parent).locate(name)
        assert VoxCelebFolder(root, outside_files=True).locate(name) == root / name


def test_another_extension_is_taken_where_it_is_allowed_and_alone(root):
    write(root, "id1/s0/5.flac", "id1/s0/6.FLAC", "id1/s0/0.flac")
    strict, lenient = (VoxCelebFolder(root, any_extension=x) for x in (False, True))
    for name, there in (
        ("id1/s0/5.wav", "id1/s0/5.flac"),
        ("id1/s0/6.m4a", "id1/s0/6.FLAC"),
        ("id1/s0/0.wav", "id1/s0/0.wav"),
        ("id1/s0/7.wav", "id1/s0/7.wav"),
        ("id1/s0/5.txt", "id1/s0/5.txt"),
    ):
        assert lenient.locate(name) == root / there
        assert strict.locate(name) == root / name


def test_files_of_a_list_are_there_renamed_missing_or_outside(root):
    write(root, "id1/s0/5.flac")
    names = ["id1/s0/0.wav", "id1/s0/5.wav", "id1/s0/6.wav", "../wav/id1/s0/0.wav"]
    found = find_files(VoxCelebFolder(root), names)
    assert dict(found.names) == {name: name for name in (names[0], names[3])}
    assert list(found.missing) == names[1:3]
    assert found.renamed == [root / "id1/s0/5.flac"]
    assert "2 of 4 files are missing, such as" in found.lacking()
    assert "1 are there with another extension, such as" in found.lacking()
    found.refuse_outside("list.txt", names[:3])
    with pytest.raises(ValueError, match=r"list\.txt: 1 names lead out .*'\.\./wav/"):
        found.refuse_outside("list.txt", names)
    lenient = find_files(VoxCelebFolder(root, any_extension=True), names)
    assert lenient.names[names[1]] == "id1/s0/5.flac"
    assert lenient.paths[names[1]] == root / "id1/s0/5.flac"
    assert (list(lenient.missing), lenient.renamed) == ([names[2]], [])


def test_a_digest_is_of_names_and_sizes_wherever_the_corpus_is(root, tmp_path):
    corpus = VoxCelebFolder(root)
    digest = corpus.digest()
    assert corpus.digest(reversed(list(corpus.utterances()))) == digest
    shutil.copytree(root, tmp_path / "copy")
    copy = VoxCelebFolder(tmp_path / "copy")
    assert copy.digest() == digest
    write(copy.root, "id1/s0/0.wav", content=b"1")
    longer = copy.digest()
    write(copy.root, "id1/s0/0.wav")
    (copy.root / "id1/s0/0.wav").rename(copy.root / "id1/s0/1.wav")
    renamed = copy.digest()
    (copy.root / "id1/s0/1.wav").unlink()
    shorter = copy.digest()
    assert len({digest, longer, renamed, shorter}) == 4
    assert copy.digest(["id1/s0/0.wav"]) != corpus.digest(["id1/s0/0.wav"])


def test_a_packed_corpus_has_names_places_and_a_digest(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", speakers=2, seconds=0.1)
    here = VoxCelebFolder(corpus / "wav", corpus)
    packed = open_corpus(pack(corpus, tmp_path / "corpus.packed"))
    assert sorted(packed.utterances()) == sorted(here.utterances())
    assert packed.locate("id00000/s00/00000.wav").is_relative_to(tmp_path)
    assert not find_files(packed, list(here.utterances())).missing
    assert packed.digest() == packed.digest(here.utterances())
    assert packed.digest(["nobody.wav"]) != packed.digest(["id00000/s00/00000.wav"])


def test_speakers_by_a_link_are_the_same_or_refused(root):
    (root / "alias").symlink_to(root / "id1")
    corpus = VoxCelebFolder(root)
    assert same_speakers(corpus, ["alias", "id1", "id2"], ["id1"]) == {"alias", "id1"}
    refuse_one_folder_twice(corpus, ["alias", "id2"])
    with pytest.raises(ValueError, match=r"alias and .*id1 are one folder"):
        refuse_one_folder_twice(corpus, ["alias", "id1"])


def test_names_and_places_need_neither_torch_nor_speechbrain():
    package = Path(speechbrain_rev.__file__).parent / "data"
    program = (
        "import sys, types; speech = types.ModuleType('speechbrain_rev.data'); "
        f"speech.__path__ = [{str(package)!r}]; "
        "sys.modules['speechbrain_rev.data'] = speech; "
        "import speechbrain_rev.data.corpus; "
        "print({'torch', 'speechbrain', 'soundfile'} & set(sys.modules))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert told.stdout == "set()\n", told.stderr
