import hashlib
import os
import shutil
from dataclasses import replace
from functools import partial

import pytest
import soundfile

from speechbrain_rev.data import audio_exists, read_manifest
from speechbrain_rev.locks import LOCK, locked
from speechbrain_rev.scoring import read_trials
from speechbrain_rev.whole_files import digest_of, sums_in, write_sums
from tests.corpus import write_corpus
from tests.recipes.runs import arguments, recipe

prepare = recipe("prepare")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), seconds=0.1)


def settings(corpus, **changed):
    return prepare.Settings(**{"data_folder": str(corpus), "seed": 1, **changed})


def speakers_of(manifest):
    return {u.spk_id for u in read_manifest(manifest)}


def snapshot(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


@pytest.mark.parametrize("layout", ["wav", "dev/wav", "dev/aac", "aac", "."])
@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_each_accepted_layout_gives_the_same_manifest(tmp_path, layout, suffix):
    write_corpus(tmp_path / "made", speakers=3, seconds=0.1, suffix=suffix)
    root = tmp_path / "data" / layout
    shutil.copytree(tmp_path / "made" / "wav", root)
    prepared = prepare.prepare(settings(tmp_path / "data"), tmp_path / "save")
    utterances = read_manifest(tmp_path / "save" / "train.csv")
    assert (prepared.utterances, prepared.speakers) == (12, 3)
    assert [u.ID for u in utterances][:2] == ["id00000/s00/00000", "id00000/s00/00001"]
    for utterance in utterances:
        assert soundfile.info(utterance.wav).frames == utterance.samples
        assert utterance.ID.startswith(f"{utterance.spk_id}/")


def test_the_data_folder_is_left_as_it_is(corpus, tmp_path):
    before = snapshot(corpus)
    prepare.prepare(settings(corpus, valid_speakers=2), tmp_path)
    assert snapshot(corpus) == before
    assert not list(tmp_path.glob("*.part"))


def test_the_same_settings_reuse_the_lists_and_others_do_not(corpus, tmp_path):
    first = prepare.prepare(settings(corpus), tmp_path)
    before = snapshot(tmp_path)
    assert prepare.prepare(settings(corpus), tmp_path) == first
    assert snapshot(tmp_path) == before
    other = prepare.prepare(settings(corpus, valid_speakers=2), tmp_path)
    assert other.speakers == first.speakers - 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 2}, r"\(seed: was 1, is 2\).*another output_folder"),
        ({"valid_speakers": 2}, r"valid_speakers: was 0, is 2\)"),
        ({"sample_rate": 8000, "seed": 3}, r"sample_rate: was 16000.*; seed: was 1"),
    ],
)
def test_with_checkpoints_changed_settings_are_refused_and_nothing_is_renumbered(
    corpus, tmp_path, changed, named
):
    first = prepare.prepare(settings(corpus), tmp_path)
    (tmp_path / "CKPT+1").mkdir()
    (tmp_path / "CKPT+1" / "CKPT.yaml").touch()
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=named):
        prepare.prepare(settings(corpus, **changed), tmp_path)
    assert snapshot(tmp_path) == before
    assert prepare.prepare(settings(corpus), tmp_path) == first


def test_with_checkpoints_a_changed_list_is_refused_by_name(corpus, tmp_path):
    train_list, save = tmp_path / "list.txt", tmp_path / "save"
    lines = [f"id0000{s} id0000{s}/s00/00000.wav\n" for s in range(4)]
    train_list.write_text("".join(lines))
    prepare.prepare(settings(corpus), save)
    (save / "CKPT+1").mkdir()
    (save / "CKPT+1" / "CKPT.yaml").touch()
    chosen = settings(corpus, train_list=str(train_list))
    with pytest.raises(ValueError, match=r"train_list: was None, is .*list\.txt"):
        prepare.prepare(chosen, save)
    shutil.rmtree(save / "CKPT+1")
    prepare.prepare(chosen, save)
    (save / "CKPT+1").mkdir()
    (save / "CKPT+1" / "CKPT.yaml").touch()
    train_list.write_text("".join(lines[:3]))
    with pytest.raises(ValueError, match=r"the content of .*list\.txt changed"):
        prepare.prepare(chosen, save)


def test_the_folder_of_trial_audio_may_change_at_any_time(corpus, tmp_path):
    first = prepare.prepare(settings(corpus), tmp_path)
    (tmp_path / "CKPT+1").mkdir()
    (tmp_path / "CKPT+1" / "CKPT.yaml").touch()
    moved = settings(corpus, trials_folder="elsewhere")
    assert prepare.prepare(moved, tmp_path) == first


def test_a_changed_list_of_the_same_name_is_read_again(corpus, tmp_path):
    train_list = tmp_path / "list.txt"
    lines = [f"id0000{s} id0000{s}/s00/00000.wav\n" for s in range(4)]
    train_list.write_text("".join(lines[:3]))
    chosen = settings(corpus, train_list=str(train_list))
    assert prepare.prepare(chosen, tmp_path / "save").speakers == 3
    train_list.write_text("".join(lines))
    assert prepare.prepare(chosen, tmp_path / "save").speakers == 4


def test_held_out_speakers_are_tested_and_not_trained(corpus, tmp_path):
    prepared = prepare.prepare(settings(corpus, valid_speakers=2), tmp_path)
    trials = read_trials(tmp_path / "valid_trials.txt")
    held_out = {name.split("/")[0] for name in trials.utterances}
    assert len(held_out) == 2
    assert not held_out & speakers_of(tmp_path / "train.csv")
    assert prepared.held_out == 8
    assert prepared.valid_trials == len(trials)
    for label, a, b in zip(trials.labels, trials.enrol, trials.test, strict=True):
        same = a.split("/")[0] == b.split("/")[0]
        assert same == bool(label)
        # Within a session the channel would give a speaker away.
        assert not same or a.split("/")[1] != b.split("/")[1]


def test_held_out_speakers_depend_on_the_seed_alone(corpus, tmp_path):
    def held_out(seed, name):
        chosen = settings(corpus, valid_speakers=2, seed=seed)
        prepare.prepare(chosen, tmp_path / name)
        return (tmp_path / name / "valid_trials.txt").read_text()

    assert held_out(1, "a") == held_out(1, "b")
    assert len({held_out(seed, str(seed)) for seed in range(6)}) > 1


def test_speakers_of_trial_lists_are_left_out_and_counted(corpus, tmp_path):
    trials = tmp_path / "trials.txt"
    trials.write_text(
        "1 id00003/s00/00000.wav id00003/s01/00000.wav\n"
        "0 id00003/s00/00000.wav id00005/s00/00000.wav\n"
    )
    prepared = prepare.prepare(
        settings(corpus, trial_lists=(str(trials),)), tmp_path / "save"
    )
    assert speakers_of(tmp_path / "save/train.csv") == {
        f"id0000{speaker}" for speaker in (0, 1, 2, 4)
    }
    assert prepared.left_out == 8
    assert "trial lists: 8." in prepared.in_words()


TRIALS = (
    "1 id00003/s00/00000.wav id00003/s01/00000.wav\n"
    "0 id00003/s00/00000.wav id00005/s00/00000.wav\n"
)


@pytest.fixture
def trials(tmp_path):
    path = tmp_path / "trials.txt"
    path.write_text(TRIALS)
    return path


@pytest.mark.parametrize(
    ("old", "new"),
    [("id", "wav/id"), ("id00003/s01/", "")],
    ids=["a folder before the speaker", "no speaker"],
)
@pytest.mark.parametrize("setting", ["trial_lists", "valid_trials"])
def test_trials_whose_names_do_not_begin_with_the_speaker_are_refused(
    corpus, tmp_path, trials, setting, old, new
):
    trials.write_text(TRIALS.replace(old, new))
    given = (str(trials),) if setting == "trial_lists" else str(trials)
    with pytest.raises(ValueError, match=r"trials\.txt.*contradicts its label.*begin"):
        prepare.prepare(settings(corpus, **{setting: given}), tmp_path / "save")


def test_missing_audio_of_a_trial_list_is_counted_and_named_before_training(
    corpus, tmp_path, trials, caplog
):
    trials.write_text(TRIALS.replace("id00005/s00", "id00005/s09"))
    chosen = settings(corpus, trial_lists=(str(trials),))
    assert prepare.prepare(chosen, tmp_path / "save").left_out == 8
    assert "1 of 3 files are missing, such as" in caplog.text
    assert "id00005/s09/00000.wav. Training does without" in caplog.text
    assert "set trials_folder" in caplog.text


def test_a_trials_folder_that_does_not_exist_is_named_before_training(
    corpus, tmp_path, trials, caplog
):
    chosen = settings(corpus, trial_lists=(str(trials),), trials_folder="nowhere")
    prepare.prepare(chosen, tmp_path / "save")
    assert "nowhere does not exist" in caplog.text


def test_complete_trial_audio_is_no_reason_for_a_warning(
    corpus, tmp_path, trials, caplog
):
    prepare.prepare(settings(corpus, trial_lists=(str(trials),)), tmp_path / "save")
    assert not caplog.records


def test_missing_audio_of_validation_trials_is_refused(corpus, tmp_path, trials):
    trials.write_text(TRIALS.replace("id00005/s00", "id00005/s09"))
    with pytest.raises(ValueError, match=r"1 of 3 files are missing.*trials_folder"):
        prepare.prepare(settings(corpus, valid_trials=str(trials)), tmp_path / "save")


def test_own_validation_trials_are_used_and_their_speakers_left_out(corpus, tmp_path):
    trials = tmp_path / "trials.txt"
    text = (
        "1 id00000/s00/00000.wav id00000/s01/00000.wav\n"
        "0 id00000/s00/00000.wav id00001/s00/00000.wav\n"
    )
    trials.write_text(text)
    chosen = settings(corpus, valid_trials=str(trials), valid_speakers=3)
    prepared = prepare.prepare(chosen, tmp_path / "save")
    assert (tmp_path / "save/valid_trials.txt").read_text() == text
    assert prepared.speakers == 4


def test_labels_number_the_training_speakers_in_speechbrains_format(corpus, tmp_path):
    prepare.prepare(settings(corpus, valid_speakers=2), tmp_path)
    encoder = prepare.CategoricalEncoder()
    encoder.load(tmp_path / "label_encoder.txt")
    assert sorted(encoder.lab2ind.values()) == [0, 1, 2, 3]
    assert set(encoder.lab2ind) == speakers_of(tmp_path / "train.csv")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"data_folder": "nowhere"}, r"nowhere does not exist.*DATA/wav/<speaker>"),
        ({"train_list": "none.txt"}, r"list none\.txt does not exist"),
        ({"valid_speakers": 5}, "valid_speakers is 5, of 6 speakers"),
        ({"valid_speakers": 1}, "2 to 4"),
        ({"sample_rate": 8000}, r"has 16000 samples per second.*sox"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    corpus, tmp_path, changed, named
):
    with pytest.raises(ValueError, match=named):
        prepare.prepare(replace(settings(corpus), **changed), tmp_path / "save")
    assert not (tmp_path / "save" / "prepared.json").exists()


def test_a_data_folder_of_a_level_too_high_is_asked_about(tmp_path):
    # One folder is one speaker there, as its speakers are taken for sessions.
    path = tmp_path / "data" / "corpus"
    shutil.copytree(write_corpus(tmp_path, seconds=0.1) / "wav" / "id00000", path)
    with pytest.raises(ValueError, match="valid_speakers is 40, and 1 speaker") as told:
        prepare.prepare(settings(path.parent, valid_speakers=40), tmp_path / "save")
    said = str(told.value)
    assert f"were found in {path.parent} (corpus): too few to hold any out" in said
    assert "Is data_folder the right level? Accepted are DATA/wav/<speaker>/" in said
    assert said.endswith("valid_speakers 0 means no validation.")


def test_too_few_speakers_of_a_list_are_no_matter_of_levels(corpus, tmp_path):
    train_list = tmp_path / "list.txt"
    names = [f"id0000{number}" for number in range(3)]
    train_list.write_text("".join(f"{s} {s}/s00/00000.wav\n" for s in names))
    chosen = settings(corpus, train_list=str(train_list), valid_speakers=2)
    with pytest.raises(
        ValueError, match=r"3 speaker\(s\) were found in .*list"
    ) as told:
        prepare.prepare(chosen, tmp_path / "save")
    assert "level" not in str(told.value)


def test_a_malformed_line_of_the_train_list_is_named_by_its_number(corpus, tmp_path):
    train_list = tmp_path / "list.txt"
    train_list.write_text("id1 id1/a/1.wav\nid1/a/2.wav\n")
    with pytest.raises(ValueError, match=r"list\.txt, line 2: 'id1/a/2\.wav'"):
        prepare.prepare(settings(corpus, train_list=str(train_list)), tmp_path)


def test_a_listed_file_that_is_missing_or_broken_is_named(corpus, tmp_path):
    train_list = tmp_path / "list.txt"
    train_list.write_text("id00000 id00000/s00/none.wav\nid1 id00001/s00/00000.wav\n")
    with pytest.raises(ValueError, match=r"none\.wav cannot be read.*no such file"):
        prepare.prepare(settings(corpus, train_list=str(train_list)), tmp_path)


@pytest.mark.parametrize("name", ["a" * 300 + ".wav", "x/" * 2100 + "a.wav"])
def test_a_name_that_no_file_can_have_is_refused_with_list_and_line(
    corpus, tmp_path, name
):
    train_list, trial_list = tmp_path / "list.txt", tmp_path / "trials.txt"
    train_list.write_text(f"id00000 id00000/s00/00000.wav\nid1 id1/{name}\n")
    trial_list.write_text(f"1 id1/a.wav id1/b.wav\n0 id1/a.wav id2/{name}\n")
    words = r"txt, line 2: 'id\S*\.\.\.' has a (name|path) of \d+ bytes; .*Correct"
    for given in ({"train_list": str(train_list)}, {"trial_lists": [str(trial_list)]}):
        with pytest.raises(ValueError, match=words):
            prepare.prepare(settings(corpus, **given), tmp_path / "save")


@pytest.mark.skipif(os.name != "posix", reason="there are no pipes elsewhere")
def test_a_pipe_among_the_audio_is_a_file_that_cannot_be_used(tmp_path):
    corpus = write_corpus(tmp_path / "data", speakers=2, utterances=1, seconds=0.1)
    os.mkfifo(corpus / "wav" / "id00000" / "s00" / "x.wav")
    with pytest.raises(ValueError, match=r"x\.wav is a named pipe .*bad_files: drop"):
        prepare.prepare(settings(corpus), tmp_path / "save")
    chosen = settings(corpus, bad_files="drop")
    assert prepare.prepare(chosen, tmp_path / "save").dropped == 1


def write_copies(source, folder, place):
    """Copy a corpus' files to other places in their speakers' folders."""
    for path in sorted((source / "wav").rglob("*.wav")):
        speaker, session, name = path.relative_to(source / "wav").parts
        target = folder / place(speaker, session, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return folder


PLACES = {
    "flat": lambda speaker, session, name: f"{speaker}/{session}-{name}",
    "deep": lambda speaker, session, name: f"{speaker}/book/{session}/part/{name}",
    "spaces": lambda speaker, session, name: f"{speaker} x/my {session}/{name}",
    "mixed": lambda speaker, session, name: (
        f"{speaker}/{session}-{name}"
        if "s00" in session
        else f"{speaker}/{session}/{name}"
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["folder", "packed"])
def test_speech_of_any_depth_is_used_and_accounted_for(corpus, tmp_path, place, kind):
    data = write_copies(corpus, tmp_path / "data", PLACES[place])
    if kind == "packed":
        prepare.main(["--pack", str(data), str(tmp_path / "data.packed")])
        data = tmp_path / "data.packed"
    prepared = prepare.prepare(settings(data, valid_speakers=2), tmp_path / "save")
    assert (prepared.seen, prepared.utterances, prepared.held_out) == (24, 16, 8)
    assert prepared.speakers == 4
    trials = read_trials(tmp_path / "save" / "valid_trials.txt")
    assert len(trials) == prepared.valid_trials
    for name in trials.utterances:
        assert audio_exists(data / name)


def test_other_depths_than_voxcelebs_are_told_of_with_examples(
    corpus, tmp_path, caplog
):
    data = write_copies(corpus, tmp_path / "data", PLACES["mixed"])
    prepare.prepare(settings(data), tmp_path / "save")
    assert (
        "The first folder is taken for the speaker: 12 files at depth 2" in caplog.text
    )
    assert "; 12 files at depth 3, such as id00000/s01/00000.wav, id00" in caplog.text
    caplog.clear()
    prepare.prepare(settings(corpus), tmp_path / "usual")
    assert not caplog.text


@pytest.mark.parametrize("drop", [False, True])
def test_audio_in_no_speakers_folder_is_counted_with_three_examples(
    corpus, tmp_path, drop
):
    shutil.copytree(corpus / "wav", tmp_path / "data")
    for number in range(4):
        shutil.copy(
            corpus / "wav/id00000/s00/00000.wav", tmp_path / f"data/{number}.wav"
        )
    chosen = settings(tmp_path / "data", bad_files="drop" if drop else "refuse")
    if drop:
        prepared = prepare.prepare(chosen, tmp_path / "save")
        assert (prepared.seen, prepared.utterances, prepared.dropped) == (28, 24, 4)
        assert "Seen: 28 files of audio." in prepared.in_words()
        return
    with pytest.raises(
        ValueError, match=r"4 no speaker's folder .*/0\.wav.*/1\.wav.*/2\.wav; put"
    ):
        prepare.prepare(chosen, tmp_path / "save")


def test_audio_beside_the_speakers_folders_is_counted_and_named(
    corpus, tmp_path, caplog
):
    shutil.copytree(corpus / "wav", tmp_path / "data/dev/wav")
    shutil.copytree(corpus / "wav/id00001", tmp_path / "data/test/wav/id9")
    prepared = prepare.prepare(settings(tmp_path / "data"), tmp_path / "save")
    assert (prepared.seen, prepared.utterances, prepared.passed_over) == (28, 24, 4)
    assert "4 files of audio in" in caplog.text
    assert "test/wav/id9/s00/00000.wav" in caplog.text
    assert "Passed over beside the speakers' folders: 4." in prepared.in_words()


def test_links_that_join_folders_of_the_data_folder_are_no_other_audio(
    corpus, tmp_path, caplog
):
    data = tmp_path / "data"
    shutil.copytree(corpus / "wav", data / "parts")
    (data / "wav").mkdir()
    for speaker in (data / "parts").iterdir():
        (data / "wav" / speaker.name).symlink_to(speaker)
    prepared = prepare.prepare(settings(data), tmp_path / "save")
    assert (prepared.seen, prepared.utterances, prepared.passed_over) == (24, 24, 0)
    assert not caplog.text


@pytest.mark.parametrize("name", [" first", "a\tb", "a\nb", "\ufeffmark"])
def test_names_that_no_list_can_hold_are_refused_or_dropped(corpus, tmp_path, name):
    shutil.copytree(corpus / "wav", tmp_path / "data")
    shutil.move(tmp_path / "data/id00002", tmp_path / "data" / name)
    with pytest.raises(ValueError, match=r"4 name for no list .*; rename it"):
        prepare.prepare(settings(tmp_path / "data"), tmp_path / "save")
    assert (tmp_path / "save/bad_files.txt").read_text().count("\n") == 4
    prepared = prepare.prepare(
        settings(tmp_path / "data", bad_files="drop", valid_speakers=2),
        tmp_path / "save",
    )
    assert (prepared.seen, prepared.dropped, prepared.speakers) == (24, 4, 3)
    assert len(read_trials(tmp_path / "save/valid_trials.txt")) == prepared.valid_trials


def test_a_folder_that_cannot_be_listed_is_an_error(corpus, tmp_path, monkeypatch):
    scandir = os.scandir

    def locked(folder):
        if str(folder).endswith("id00002/s01"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(PermissionError, match="id00002/s01"):
        prepare.prepare(settings(corpus), tmp_path / "save")


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("separator", [" ", "\t"])
def test_a_byte_order_mark_in_the_training_list_makes_no_speaker(
    corpus, tmp_path, mark, end, separator
):
    lines = [
        f"id0000{speaker}{separator}id0000{speaker}/s0{session}/00000.wav{end}"
        for session in range(2)
        for speaker in range(6)
    ]
    # Two lists that were joined.
    text = mark + "".join(lines[:6]) + mark + "".join(lines[6:])
    (tmp_path / "list.txt").write_bytes(text.encode())
    chosen = settings(corpus, train_list=str(tmp_path / "list.txt"))
    prepared = prepare.prepare(chosen, tmp_path / "save")
    assert (prepared.utterances, prepared.speakers, prepared.seen) == (12, 6, 12)
    assert speakers_of(tmp_path / "save/train.csv") == {f"id0000{s}" for s in range(6)}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("id1 id1/ü.wav\n".encode("latin-1"), r"list\.txt, line 1: no UTF-8 text"),
        ("id1 id1/a.wav\n".encode("utf-16"), r"list\.txt, line 1: no UTF-8 text"),
        ("id1 id1/a.wav\n".encode("utf-16-le"), r"line 1: no UTF-8 text.*NUL"),
        (b"", r"list\.txt is empty"),
        (b"id1 my/a b.wav\n", r"line 1: .* 3 fields .*with a tab between"),
        (
            b"id1 id1/a.wav\nid2 id1/b.wav\nid2 id1//a.wav\n",
            r"lines 1 and 3: 'id1/a\.wav' is of the speakers 'id1' and 'id2'",
        ),
    ],
)
def test_an_unusable_training_list_is_refused_with_its_line(
    corpus, tmp_path, content, named
):
    (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(ValueError, match=named):
        prepare.prepare(
            settings(corpus, train_list=str(tmp_path / "list.txt")), tmp_path / "save"
        )


def test_names_with_spaces_in_lists_are_separated_by_tabs(corpus, tmp_path):
    data = write_copies(corpus, tmp_path / "data", PLACES["spaces"])
    speakers = [f"id0000{number} x" for number in range(5)]
    lines = [f"{speaker}\t{speaker}/my s00/00000.wav\n" for speaker in speakers]
    (tmp_path / "list.txt").write_text("".join(lines))
    names = [f"{s}/my s0{k}/00000.wav" for s in speakers[:2] for k in range(2)]
    own = f"1\t{names[0]}\t{names[1]}\n0\t{names[0]}\t{names[2]}\n"
    (tmp_path / "own.txt").write_text(own)
    chosen = settings(
        data,
        train_list=str(tmp_path / "list.txt"),
        valid_trials=str(tmp_path / "own.txt"),
    )
    prepared = prepare.prepare(chosen, tmp_path / "save")
    assert (prepared.utterances, prepared.left_out) == (3, 2)
    assert speakers_of(tmp_path / "save/train.csv") == set(speakers[2:])
    assert (tmp_path / "save/valid_trials.txt").read_text() == own
    assert list(prepare.speaker_numbers(tmp_path / "save")) == speakers[2:]


@pytest.fixture
def outside(corpus, tmp_path):
    """A data folder, of which one session is a link to elsewhere."""
    shutil.copytree(corpus, tmp_path / "data")
    shutil.move(tmp_path / "data/wav/id00000/s01", tmp_path / "elsewhere")
    (tmp_path / "data/wav/id00000/s01").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "data"


def test_links_that_leave_the_data_folder_are_refused_unless_allowed(outside, tmp_path):
    with pytest.raises(
        ValueError, match=r"2 outside the folder .*elsewhere.*--outside_"
    ):
        prepare.prepare(settings(outside), tmp_path / "save")
    dropping = settings(outside, bad_files="drop")
    assert prepare.prepare(dropping, tmp_path / "save").dropped == 2
    with pytest.raises(ValueError, match=r"2 outside the folder .*elsewhere"):
        prepare.main(["--pack", str(outside), str(tmp_path / "data.packed")])
    allowed = settings(outside, outside_files=True)
    assert prepare.prepare(allowed, tmp_path / "other").utterances == 24
    prepare.main(
        ["--pack", str(outside), str(tmp_path / "data.packed"), "--outside_files"]
    )
    packed = prepare.prepare(settings(tmp_path / "data.packed"), tmp_path / "packed")
    assert packed.utterances == 24


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../../elsewhere/00000.wav", r"has \.\."),
        ("id00000/../id00000/s00/00000.wav", r"has \.\."),
        ("{tmp}/elsewhere/00000.wav", "is absolute"),
        ("id00000/s01/00000.wav", "leads through a link"),
    ],
)
def test_names_that_leave_the_data_folder_are_refused_unless_allowed(
    outside, tmp_path, name, why
):
    name = name.format(tmp=tmp_path)
    lines = [f"id0000{s} id0000{s}/s00/00000.wav\n" for s in range(1, 3)]
    (tmp_path / "list.txt").write_text("".join([*lines, f"id7 {name}\n"]))
    listed = {"train_list": str(tmp_path / "list.txt")}
    with pytest.raises(ValueError, match=f"1 outside the folder .*{why}"):
        prepare.prepare(settings(outside, **listed), tmp_path / "save")
    allowed = settings(outside, **listed, outside_files=True)
    assert prepare.prepare(allowed, tmp_path / "save").utterances == 3


@pytest.mark.parametrize("setting", ["trial_lists", "valid_trials"])
@pytest.mark.parametrize("name", ["id00000/s01/00000.wav", "id00000/../id00000/x.wav"])
def test_trials_that_leave_their_folder_are_refused_unless_allowed(
    outside, tmp_path, setting, name
):
    path = tmp_path / "trials.txt"
    path.write_text(f"1 id00000/s00/00000.wav {name}\n{TRIALS}")
    given = (str(path),) if setting == "trial_lists" else str(path)
    with pytest.raises(ValueError, match=r"trials\.txt: 1 names lead out of .*such as"):
        prepare.prepare(settings(outside, **{setting: given}), tmp_path / "save")
    if "s01" in name:
        allowed = settings(outside, **{setting: given}, outside_files=True)
        assert prepare.prepare(allowed, tmp_path / "save").speakers == 3


def test_a_list_that_says_another_extension_is_told_so(corpus, tmp_path, trials):
    data = write_corpus(tmp_path / "flac", seconds=0.1, suffix=".flac")
    lines = [f"id0000{s} id0000{s}/s00/00000.wav\n" for s in range(3)]
    (tmp_path / "list.txt").write_text("".join(lines))
    for listed in (
        {"train_list": str(tmp_path / "list.txt")},
        {"valid_trials": str(trials)},
    ):
        with pytest.raises(
            ValueError, match=r"3 of 3 files.* 3 are there .*\.flac: --any_extension"
        ):
            prepare.prepare(settings(data, **listed), tmp_path / "save")
    chosen = settings(data, **listed, any_extension=True)
    assert prepare.prepare(chosen, tmp_path / "save").left_out == 8
    assert (tmp_path / "save/valid_trials.txt").read_text() == TRIALS.replace(
        ".wav", ".flac"
    )
    chosen = settings(data, train_list=str(tmp_path / "list.txt"), any_extension=True)
    assert prepare.prepare(chosen, tmp_path / "other").utterances == 3
    for utterance in read_manifest(tmp_path / "other/train.csv"):
        assert soundfile.info(utterance.wav).format == "FLAC"


@pytest.fixture
def begun(corpus, tmp_path):
    """A run that has checkpoints, of a data folder of its own."""
    shutil.copytree(corpus, tmp_path / "data")
    prepare.prepare(settings(tmp_path / "data", valid_speakers=2), tmp_path / "save")
    (tmp_path / "save/CKPT+1").mkdir()
    (tmp_path / "save/CKPT+1/CKPT.yaml").touch()
    return tmp_path / "save"


@pytest.mark.parametrize("spelling", ["slash", "relative", "link", "moved"])
def test_a_data_folder_by_another_path_is_the_same_data(
    begun, tmp_path, monkeypatch, spelling
):
    names = "valid_trials.txt", "label_encoder.txt"
    before = [(begun / name).read_bytes() for name in names]
    data = tmp_path / "data"
    if spelling == "slash":
        data = f"{data}/"
    elif spelling == "relative":
        monkeypatch.chdir(tmp_path)
        data = "data"
    elif spelling == "link":
        data = tmp_path / "link"
        data.symlink_to(tmp_path / "data")
    else:
        data = data.rename(tmp_path / "other")
    rows = list(read_manifest(begun / "train.csv"))
    prepared = prepare.prepare(settings(data, valid_speakers=2), begun)
    assert (prepared.utterances, prepared.held_out) == (16, 8)
    assert [(begun / name).read_bytes() for name in names] == before
    now = list(read_manifest(begun / "train.csv"))
    assert [replace(u, wav="") for u in now] == [replace(u, wav="") for u in rows]
    for utterance in now:
        assert soundfile.info(utterance.wav).frames == utterance.samples


@pytest.mark.parametrize("stopped_at", ["train.csv", "SHA256SUMS", "prepared.json"])
def test_a_run_whose_data_moved_survives_a_kill(
    begun, tmp_path, monkeypatch, stopped_at
):
    moved = settings((tmp_path / "data").rename(tmp_path / "other"), valid_speakers=2)
    replace_file = os.replace

    def stopping(source, target):
        replace_file(source, target)
        if os.path.basename(target) == stopped_at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(moved, begun)
    assert prepare.prepare(moved, begun).utterances == 16
    for utterance in read_manifest(begun / "train.csv"):
        assert soundfile.info(utterance.wav).frames == utterance.samples


def test_a_finished_run_whose_data_moved_stays_as_it_is(begun, tmp_path):
    (tmp_path / "embedding_model.ckpt").write_bytes(b"weights")
    sums = sums_in(begun)
    sums["../embedding_model.ckpt"] = digest_of(
        tmp_path / "embedding_model.ckpt", "sha256"
    )
    write_sums(begun, sums)
    moved = (tmp_path / "data").rename(tmp_path / "other")
    before = snapshot(begun)
    assert prepare.prepare(settings(moved, valid_speakers=2), begun).utterances == 16
    assert snapshot(begun) == before


def test_a_data_folder_that_was_converted_is_the_same_data(begun, tmp_path):
    for path in list((tmp_path / "data").rglob("*.wav")):
        wav, rate = soundfile.read(path, dtype="int16")
        target = tmp_path / "other" / path.relative_to(tmp_path / "data")
        target.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(target.with_suffix(".flac"), wav, rate)
    trials = (begun / "valid_trials.txt").read_text()
    prepare.prepare(settings(tmp_path / "other", valid_speakers=2), begun)
    now = (begun / "valid_trials.txt").read_text()
    assert now == trials.replace(".wav", ".flac")


def test_a_relative_data_folder_of_another_working_folder_is_another(
    corpus, begun, tmp_path, monkeypatch
):
    prepare.prepare(settings(corpus, valid_speakers=2), tmp_path / "first")
    for name, seconds in (("here", 0.1), ("there", 0.2)):
        write_corpus(tmp_path / name / "speech", seconds=seconds)
    monkeypatch.chdir(tmp_path / "here")
    prepare.prepare(settings("speech"), tmp_path / "run/save")
    monkeypatch.chdir(tmp_path / "there")
    first = next(iter(read_manifest(tmp_path / "run/save/train.csv")))
    assert first.wav.startswith(str(tmp_path / "here"))
    prepare.prepare(settings("speech"), tmp_path / "run/save")
    first = next(iter(read_manifest(tmp_path / "run/save/train.csv")))
    assert first.wav.startswith(str(tmp_path / "there"))


@pytest.mark.parametrize("change", ["gone", "longer", "added"])
def test_a_data_folder_that_holds_other_data_is_refused_with_checkpoints(
    begun, tmp_path, change
):
    data = (tmp_path / "data").rename(tmp_path / "other")
    row = read_manifest(begun / "train.csv")[0]
    path = data / "wav" / f"{row.ID}.wav"
    if change == "gone":
        path.unlink()
    elif change == "longer":
        wav, rate = soundfile.read(path)
        soundfile.write(path, [*wav, 0.0], rate)
    else:
        shutil.copy(path, path.with_name("77777.wav"))
    before = snapshot(begun)
    with pytest.raises(
        ValueError, match=r"other holds other data: [0-9]+ utterances or"
    ):
        prepare.prepare(settings(data, valid_speakers=2), begun)
    assert snapshot(begun) == before


def test_lists_that_moved_are_the_same_lists(begun, tmp_path, trials):
    (begun / "CKPT+1/CKPT.yaml").unlink()
    data, moved = tmp_path / "data", tmp_path / "moved.txt"
    first = prepare.prepare(settings(data, trial_lists=(str(trials),)), begun)
    (begun / "CKPT+1/CKPT.yaml").touch()
    trials.rename(moved)
    before = snapshot(begun)
    assert prepare.prepare(settings(data, trial_lists=(str(moved),)), begun) == first
    assert snapshot(begun) == before


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda text: text.replace("=> 2", "=> 99999999999999999999"), 3),
        (lambda text: text.replace("=> 2", "=> 1"), 3),
        (lambda text: text.replace("'id00001'", "'id00000'"), 2),
        (lambda text: text.replace("'id00001'", "id00001"), 2),
        (lambda text: "\n" + text, 1),
    ],
)
def test_labels_that_number_no_speakers_are_refused_with_their_line(
    corpus, tmp_path, edit, line
):
    prepare.prepare(settings(corpus), tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    path = tmp_path / "label_encoder.txt"
    expected = {f"id0000{number}": number for number in range(6)}
    assert prepare.speaker_numbers(tmp_path) == expected
    text = path.read_text()
    path.write_bytes(("\ufeff" + text).replace("\n", "\r\n").encode())
    assert prepare.speaker_numbers(tmp_path) == expected
    path.write_text(edit(text))
    with pytest.raises(ValueError, match=rf"label_encoder\.txt, line {line}: "):
        prepare.speaker_numbers(tmp_path)


def test_m4a_files_get_the_command_that_converts_them(tmp_path):
    path = tmp_path / "dev/aac/id00012/video/00001.m4a"
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ValueError, match=r"ffmpeg -i IN\.m4a"):
        prepare.prepare(settings(tmp_path), tmp_path / "save")


def test_a_folder_without_speech_gets_the_accepted_layouts(tmp_path):
    (tmp_path / "data" / "wav").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no speech in .*<session>"):
        prepare.prepare(settings(tmp_path / "data"), tmp_path / "save")


def test_nothing_is_written_into_the_data_folder(corpus, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    corpus.chmod(0o500)  # an error for all but root, whom the comparison catches
    try:
        prepare.prepare(settings(corpus), tmp_path)
    finally:
        corpus.chmod(0o700)
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before
    assert (tmp_path / "train.csv").exists()


LISTS = ("train.csv", "valid_trials.txt", "label_encoder.txt")


@pytest.mark.parametrize("list_written", range(len(LISTS)))
def test_a_preparation_that_was_cut_off_is_not_vouched_for(
    corpus, tmp_path, monkeypatch, list_written
):
    """Of one with other settings no list may pass for one of the first."""
    first, other = (
        settings(corpus, valid_speakers=2),
        settings(corpus, valid_speakers=3),
    )
    for name, chosen in (("wanted", first), ("others", other), ("run", first)):
        prepare.prepare(chosen, tmp_path / name)

    def wrote(path, *args, _write):
        _write(path, *args)
        if path.name == LISTS[list_written]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for writer in ("write_manifest", "write_whole", "write_label_encoder"):
            patch.setattr(
                prepare, writer, partial(wrote, _write=getattr(prepare, writer))
            )
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(other, tmp_path / "run")
    files = [
        (tmp_path / n / LISTS[list_written]).read_bytes() for n in ("run", "others")
    ]
    assert files[0] == files[1]
    prepare.prepare(first, tmp_path / "run")
    for name in (*LISTS, "prepared.json", "SHA256SUMS"):
        wanted = (tmp_path / "wanted" / name).read_bytes()
        assert (tmp_path / "run" / name).read_bytes() == wanted, name


def test_a_preparation_that_is_refused_leaves_an_earlier_one_in_force(corpus, tmp_path):
    first = prepare.prepare(settings(corpus), tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match="valid_speakers is 5"):
        prepare.prepare(settings(corpus, valid_speakers=5), tmp_path)
    assert prepare.prepare(settings(corpus), tmp_path) == first
    assert snapshot(tmp_path) == before


def test_a_list_that_was_prepared_and_is_missing_is_named(corpus, tmp_path):
    prepare.prepare(settings(corpus), tmp_path)
    (tmp_path / "label_encoder.txt").unlink()
    with pytest.raises(ValueError, match=r"prepared\.json but no label_encoder\.txt"):
        prepare.prepare(settings(corpus), tmp_path)


def test_checksums_of_lists_are_those_of_sha256sum(corpus, tmp_path):
    prepare.prepare(settings(corpus, valid_speakers=2), tmp_path)
    lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1]: line.split("  ")[0] for line in lines} == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in (*LISTS, "train.csv.columns", "prepared.json")
    }


def test_mapped_rows_with_a_flipped_bit_are_made_anew(corpus, tmp_path, caplog):
    prepare.prepare(settings(corpus), tmp_path)
    mapped = tmp_path / "train.csv.columns"
    written = mapped.read_bytes()
    names = list(read_manifest(tmp_path / "train.csv"))
    mapped.write_bytes(written.replace(b"id00001/s00/00000", b"id00001/s00/00001"))
    assert list(read_manifest(tmp_path / "train.csv")) == names
    assert "made anew" in caplog.text
    assert mapped.read_bytes() == written


def test_lists_of_a_time_without_checksums_are_taken(corpus, tmp_path):
    first = prepare.prepare(settings(corpus), tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    (tmp_path / "CKPT+1").mkdir()
    (tmp_path / "CKPT+1/CKPT.yaml").touch()
    before = snapshot(tmp_path)
    assert prepare.prepare(settings(corpus), tmp_path) == first
    assert snapshot(tmp_path) == before
    # Whoever trains on with them vouches for them as they are.
    prepare.write_missing_sums(tmp_path)
    labels = tmp_path / "label_encoder.txt"
    labels.write_text(labels.read_text().replace("id00001", "id00007"))
    with pytest.raises(
        ValueError, match=r"label_encoder\.txt is not as it was written"
    ):
        prepare.read_prepared(tmp_path)


def test_lists_that_an_earlier_version_wrote_are_made_anew(corpus, tmp_path):
    first = prepare.prepare(settings(corpus, valid_speakers=2), tmp_path)
    trials = (tmp_path / "valid_trials.txt").read_text()
    (tmp_path / "SHA256SUMS").unlink()
    (tmp_path / "valid_trials.txt").write_text("1 ann lee/a.wav ann lee/b.wav\n")
    assert prepare.prepare(settings(corpus, valid_speakers=2), tmp_path) == first
    assert (tmp_path / "valid_trials.txt").read_text() == trials


@pytest.mark.parametrize("text", ["", None])
def test_checksums_that_lack_lists_are_refused(corpus, tmp_path, text):
    prepare.prepare(settings(corpus), tmp_path)
    path = tmp_path / "SHA256SUMS"
    path.write_text(path.read_text().replace("  train.csv\n", "  urain.csv\n"))
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"SHA256SUMS lacks train\.csv"):
        prepare.read_prepared(tmp_path)


@pytest.mark.parametrize("spelling", ["./id00001", "id00000/../id00001", "alias"])
def test_test_speakers_are_left_out_however_they_are_spelt(tmp_path, spelling):
    write_corpus(tmp_path / "data")
    if spelling == "alias":
        wav = tmp_path / "data" / "wav"
        (wav / "id00001").rename(tmp_path / "apart")
        (wav / "alias").symlink_to(tmp_path / "apart")
        (wav / "id00001").symlink_to(tmp_path / "apart")
    trials = tmp_path / "trials.txt"
    trials.write_text(
        "1 id00000/s00/00000.wav id00000/s01/00000.wav\n"
        f"0 id00000/s00/00000.wav {spelling}/s00/00000.wav\n"
    )
    given = settings(
        tmp_path / "data",
        trial_lists=(str(trials),),
        outside_files=spelling != "./id00001",
    )
    if spelling == "alias":
        with pytest.raises(ValueError, match=r"alias and .*id00001 are one folder"):
            prepare.prepare(given, tmp_path / "save")
        (tmp_path / "data/wav/id00001").unlink()
    prepare.prepare(given, tmp_path / "save")
    found = prepare.speaker_numbers(tmp_path / "save")
    assert not {"id00000", "id00001", "alias"} & found.keys()
    assert len(found) == 4


def test_a_folder_of_corpora_is_refused(tmp_path):
    for name in ("vox1/wav", "vox2/dev/aac"):
        write_corpus(tmp_path / "made", speakers=3, seconds=0.1)
        shutil.copytree(tmp_path / "made/wav", tmp_path / "data" / name)
    with pytest.raises(ValueError, match=r"such as vox1/wav, vox2/dev/aac: each would"):
        prepare.prepare(settings(tmp_path / "data"), tmp_path / "save")


def test_a_folder_on_a_disk_that_is_not_there_is_named(tmp_path):
    write_corpus(tmp_path / "data")
    (tmp_path / "data/wav/id00009").symlink_to(tmp_path / "unmounted")
    with pytest.raises(FileNotFoundError, match=r"id00009 leads to .*unmounted, which"):
        prepare.prepare(settings(tmp_path / "data"), tmp_path / "save")


def test_nothing_is_prepared_where_another_command_writes(corpus, tmp_path):
    argv = arguments(corpus, tmp_path)
    with (
        locked(tmp_path / LOCK, "the run", "writing into"),
        pytest.raises(ValueError, match=r"Another process is writing into .*: process"),
    ):
        prepare.main(argv[:-1])
    assert not (tmp_path / "save").exists()
    prepare.main(argv[:-1])
    assert (tmp_path / "save" / "prepared.json").is_file()
    assert not (tmp_path / LOCK).exists()
