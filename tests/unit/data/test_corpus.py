"""Names and places of audio, in a corpus of VoxCeleb's layout."""

import shutil
import subprocess
import sys
from pathlib import Path
from threading import Barrier, Event, Timer

import pytest

import speechbrain_rev
from speechbrain_rev.data import VoxCelebFolder, audio_files, open_corpus
from speechbrain_rev.data.corpora import find_files
from speechbrain_rev.data.corpus import THREADS, OutsideError, read_ahead
from speechbrain_rev.data.listing import refuse_one_folder_twice, same_speakers
from speechbrain_rev.data.manifest import Cause


def write(folder, *names, content=b""):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def root(tmp_path):
    names = [f"{speaker}/s{n}/{n}.wav" for speaker in ("id1", "id2") for n in range(2)]
    return write(tmp_path / "data/wav", *names)


def test_audio_files_are_found_at_any_depth_and_through_links(tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*nowhere"):
        audio_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no audio below .*\.mp3, \.m4a"):
        audio_files(tmp_path)
    write(tmp_path, "b/c/2.FLAC", "a.wav", "b/1.wav", "b/readme.txt")
    (tmp_path / "d").symlink_to(tmp_path / "b")
    (tmp_path / "d/self").symlink_to(tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in audio_files(tmp_path)]
    assert names == ["a.wav", "b/1.wav", "b/c/2.FLAC", "d/1.wav", "d/c/2.FLAC"]


def test_links_that_lead_to_each_other_are_named(tmp_path):
    write(tmp_path, "a/1.wav", "b/s/2.wav")
    (tmp_path / "a/to_b").symlink_to(tmp_path / "b")
    assert len(audio_files(tmp_path)) == 3
    (tmp_path / "b/s/to_a").symlink_to(tmp_path / "a")
    with pytest.raises(
        ValueError, match=r"s/to_a is a link to .*/a, and .* leads back"
    ):
        audio_files(tmp_path)


def test_few_files_are_read_by_a_thread_each():
    together = Barrier(THREADS)

    def read(item):
        together.wait()
        return item

    assert list(read_ahead(read, range(THREADS))) == list(range(THREADS))


def test_who_leaves_early_waits_for_the_files_that_are_being_read_alone():
    begun, go_on, first_task = [], Event(), 32

    def read(item):
        begun.append(item)
        if item >= first_task:
            go_on.wait()

    results = read_ahead(read, range(1000), together=first_task)
    next(results)
    Timer(0.5, go_on.set).start()
    results.close()
    assert len(begun) <= first_task + THREADS


def test_names_are_listed_in_one_order_and_one_by_one(root):
    write(root, "id1/s0/9.m4a", "id1/s0/8.m4a", "id1/s0/8.flac", "id1/s0/notes.txt")
    names = ["id1/s0/0.wav", "id1/s0/8.flac", "id1/s0/9.m4a", "id1/s1/1.wav"]
    names += ["id2/s0/0.wav", "id2/s1/1.wav"]
    corpus = VoxCelebFolder(root)
    assert list(corpus.utterances()) == names
    write(root, ".trash/s0/1.wav", "id1/s0/._0.wav")
    assert {name: cause for name, cause in corpus.audio() if cause} == {
        "id1/s0/8.m4a": Cause.ORIGINAL,
        ".trash/s0/1.wav": Cause.HIDDEN,
        "id1/s0/._0.wav": Cause.HIDDEN,
    }
    assert list(corpus.utterances()) == names
    (root / "id2/gone").symlink_to(root / "a disk that is not there")
    listed = corpus.utterances()
    assert next(listed) == names[0]
    with pytest.raises(FileNotFoundError, match="gone leads to"):
        list(listed)


@pytest.mark.parametrize(
    ("name", "speaker", "session"),
    [
        ("id1/s0/0.wav", "id1", "s0"),
        ("id1/book/s0/0.wav", "id1", "book/s0"),
        ("id1/0.wav", "id1", None),
        ("0.wav", None, None),
        ("./id1/s0/0.wav", "id1", "s0"),
        ("id2/../id1//s0/./0.wav", "id1", "s0"),
        ("../wav/id1/s0/0.wav", "id1", "s0"),
        (".hidden/s0/0.wav", ".hidden", "s0"),
    ],
)
def test_speaker_and_session_are_folders_however_a_name_is_spelt(
    root, name, speaker, session
):
    corpus = VoxCelebFolder(root)
    assert (corpus.speaker(name), corpus.session(name)) == (speaker, session)
    if not name.startswith("../"):
        # Names have their speaker without a folder, too.
        assert VoxCelebFolder(Path()).speaker(name) == speaker


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


def test_another_extension_is_taken_where_the_named_file_is_missing(root):
    write(root, "id1/s0/5.flac", "id1/s0/6.FLAC", "id1/s0/0.flac")
    corpus = VoxCelebFolder(root)
    for name, there in (
        ("5.wav", "5.flac"),
        ("6.m4a", "6.FLAC"),
        ("0.wav", "0.wav"),
        ("7.wav", "7.wav"),
        ("5.txt", "5.txt"),
    ):
        files = find_files(corpus, [f"id1/s0/{name}"])
        (path,) = (files.paths or files.missing).values()
        assert path == root / "id1/s0" / there


def test_another_extension_is_looked_up_in_each_of_several_corpora(tmp_path):
    for folder, name in (("a", "id1/s0/0.wav"), ("b", "id2/s0/5.flac")):
        write(tmp_path / folder / "wav", name)
    corpus = open_corpus([str(tmp_path / "a"), str(tmp_path / "b")])
    files = find_files(corpus, ["id2/s0/5.wav", "b/id2/s0/5.wav"])
    assert {*files.paths.values()} == {tmp_path / "b/wav/id2/s0/5.flac"}


def test_files_of_a_list_are_there_renamed_missing_or_outside(root):
    write(root, "id1/s0/5.flac")
    names = ["id1/s0/0.wav", "id1/s0/5.wav", "id1/s0/6.wav", "../wav/id1/s0/0.wav"]
    located = find_files(VoxCelebFolder(root), names)
    there = {name: name for name in (names[0], names[3])}
    assert located.names == there | {names[1]: "id1/s0/5.flac"}
    assert located.paths[names[1]] == root / "id1/s0/5.flac"
    assert list(located.missing) == names[2:3]
    assert "1 of 4 files are missing, such as" in located.lacking()
    located.refuse_outside("list.txt", names[:3])
    with pytest.raises(ValueError, match=r"list\.txt: 1 names lead out .*'\.\./wav/"):
        located.refuse_outside("list.txt", names)


def test_a_digest_is_of_names_and_sizes_wherever_the_corpus_is(root, tmp_path):
    corpus, copy = VoxCelebFolder(root), VoxCelebFolder(tmp_path / "copy")
    digests = [corpus.digest()]
    assert corpus.digest(reversed(list(corpus.utterances()))) == digests[0]
    shutil.copytree(root, copy.root)
    assert copy.digest() == digests[0]
    first = copy.root / "id1/s0/0.wav"
    for change in (
        lambda: first.write_bytes(b"1"),
        lambda: (first.write_bytes(b""), first.rename(first.with_name("1.wav"))),
        lambda: first.with_name("1.wav").unlink(),
    ):
        change()
        digests.append(copy.digest())
    assert len(set(digests)) == 4
    assert copy.digest(["id1/s0/0.wav"]) != corpus.digest(["id1/s0/0.wav"])


def test_speakers_by_a_link_are_the_same_or_refused(root):
    (root / "alias").symlink_to(root / "id1")
    corpus = VoxCelebFolder(root)
    assert same_speakers(corpus, ["alias", "id1", "id2"], ["id1"]) == {"alias", "id1"}
    # Names of trial lists may be written in another form of Unicode.
    assert same_speakers(corpus, ["Jos\u00e9", "ann "], ["Jose\u0301", "ann"]) == {
        "Jos\u00e9",
        "ann ",
    }
    refuse_one_folder_twice(corpus, ["alias", "id2"])
    with pytest.raises(ValueError, match=r"alias and .*id1 are one folder"):
        refuse_one_folder_twice(corpus, ["alias", "id1"])


def test_names_and_places_need_neither_torch_nor_speechbrain():
    package = Path(speechbrain_rev.__file__).parent
    # Without what the folders themselves import.
    program = (
        "import sys, types\n"
        "for name in ('audio', 'data'):\n"
        "    folder = types.ModuleType(f'speechbrain_rev.{name}')\n"
        f"    folder.__path__ = [{str(package)!r} + '/' + name]\n"
        "    sys.modules[folder.__name__] = folder\n"
        "import speechbrain_rev.data.corpus\n"
        "print({'torch', 'speechbrain', 'soundfile'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr
