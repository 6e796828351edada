"""Whose speech is trained on, held out and left out."""

import os
import re
import shutil
from pathlib import Path

import pytest
import soundfile

from speechbrain_rev.audio import audio_exists, audio_info
from speechbrain_rev.data import (
    FORMATS,
    LAYOUTS,
    Format,
    Layout,
    Row,
    folders,
    open_sources,
    read_manifest,
)
from speechbrain_rev.data.checking import take_account
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.data.listing import DataSettings, list_speech
from speechbrain_rev.data.manifest import Cause
from speechbrain_rev.data.packing import pack
from speechbrain_rev.data.rows import find_rows
from speechbrain_rev.scoring import read_trials
from tests.corpus import write_corpus
from tests.unit.data.conftest import left_out
from tests.unit.data.test_formats import as_kaldi, rows_of

TESTED = Cause.TESTED.words

TRIALS = (
    "1 id00003/s00/00000.wav id00003/s01/00000.wav\n"
    "0 id00003/s00/00000.wav id00005/s00/00000.wav\n"
)
SPEAKERS = [f"id0000{number}" for number in range(6)]


def write_list(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.fixture
def trials(tmp_path):
    return write_list(tmp_path / "trials.txt", TRIALS)


def speakers(save):
    return set(read_labels(save / "label_encoder.txt"))


@pytest.mark.parametrize(
    ("layout", "suffix"),
    [("wav", ".wav"), ("dev/wav", ".wav"), ("dev/aac", ".flac"), (".", ".flac")],
)
def test_each_accepted_layout_gives_the_same_manifest(
    prepared, tmp_path, layout, suffix
):
    write_corpus(tmp_path / "made", speakers=3, seconds=0.1, suffix=suffix)
    shutil.copytree(tmp_path / "made/wav", tmp_path / "data" / layout)
    summary = prepared(tmp_path / "data")
    utterances = read_manifest(tmp_path / "save/train.csv")
    assert (summary.utterances, summary.speakers, summary.seen()) == (12, 3, 12)
    assert [u.ID for u in utterances][:2] == ["id00000/s00/00000", "id00000/s00/00001"]
    for utterance in utterances:
        assert soundfile.info(utterance.wav).frames == utterance.samples
        assert utterance.ID.startswith(f"{utterance.spk_id}/")


class TestValidation:
    def test_held_out_speakers_are_tested_and_not_trained(self, prepared, tmp_path):
        summary = prepared(valid_speakers=2)
        trials = read_trials(tmp_path / "save/valid_trials.txt")
        held_out = {name.split("/")[0] for name in trials.utterances}
        assert len(held_out) == 2
        assert held_out | speakers(tmp_path / "save") == set(SPEAKERS)
        assert (summary.held_out, summary.valid_trials) == (8, len(trials))
        for label, a, b in zip(trials.labels, trials.enrol, trials.test, strict=True):
            same = a.split("/")[0] == b.split("/")[0]
            assert same == bool(label)
            # Within a session the channel would give a speaker away.
            assert not same or a.split("/")[1] != b.split("/")[1]

    def test_held_out_speakers_depend_on_the_seed_alone(self, prepared, tmp_path):
        def trials(seed, save):
            prepared(save=save, valid_speakers=2, seed=seed)
            return (tmp_path / save / "valid_trials.txt").read_text()

        assert trials(1, "again") == trials(1, "1")
        assert len({trials(seed, str(seed)) for seed in range(4)}) > 1

    def test_impostors_are_told_apart_by_the_training_list(self, prepared, tmp_path):
        """Two folders of one speaker are no impostors, whatever their names are."""
        lines = [
            f"{speaker} id0000{2 * number + part}/s00/00000.wav\n"
            for number, speaker in enumerate(("anna", "bert", "carl"))
            for part in range(2)
        ]
        lines += ["dora id00000/s01/00000.wav\n"]
        path = write_list(tmp_path / "list.txt", "".join(lines))
        prepared(train_list=path, valid_speakers=2, seed=3)
        of = {name: speaker for speaker, name in map(str.split, lines)}
        trials = read_trials(tmp_path / "save/valid_trials.txt")
        for label, a, b in zip(trials.labels, trials.enrol, trials.test, strict=True):
            assert bool(label) == (of[a] == of[b])

    def test_a_data_folder_of_a_level_too_high_is_asked_about(self, prepared, tmp_path):
        # One folder is one speaker there, as its speakers are taken for sessions.
        path = tmp_path / "data/corpus"
        shutil.copytree(write_corpus(tmp_path, seconds=0.1) / "wav/id00000", path)
        words = r"valid_speakers is 40, and .*data has 1 speaker .*\(corpus\): .* speaker_fr"
        with pytest.raises(ValueError, match=words):
            prepared(path.parent, valid_speakers=40)


class TestTrialLists:
    def test_their_speakers_are_left_out_and_counted(
        self, prepared, tmp_path, trials, caplog
    ):
        summary = prepared(trial_lists=(trials,))
        assert speakers(tmp_path / "save") == {*SPEAKERS} - {"id00003", "id00005"}
        assert summary.left_out == {TESTED: 8}
        assert f"Left out: 8 {TESTED}." in summary.in_words()
        assert not caplog.records

    @pytest.mark.parametrize(("old", "new"), [("id", "wav/id"), ("id00003/s01/", "")])
    def test_names_that_do_not_begin_with_the_speaker_are_refused(
        self, prepared, trials, old, new
    ):
        write_list(Path(trials), TRIALS.replace(old, new))
        for given in ({"trial_lists": (trials,)}, {"valid_trials": trials}):
            with pytest.raises(ValueError, match=r"trials\.txt.*contradicts its label"):
                prepared(**given)

    def test_missing_audio_is_a_warning_and_of_validation_an_error(
        self, prepared, trials, caplog
    ):
        write_list(Path(trials), TRIALS.replace("id00005/s00", "id00005/s09"))
        assert prepared(trial_lists=(trials,)).left_out == {TESTED: 8}
        assert "1 of 3 files is missing, such as" in caplog.text
        assert "id00005/s09/00000.wav. Training does without" in caplog.text
        prepared(save="other", trial_lists=(trials,), trials_folder="nowhere")
        assert "nowhere does not exist" in caplog.text
        with pytest.raises(ValueError, match=r"1 of 3 files is missing.*trials_fold"):
            prepared(valid_trials=trials)

    @pytest.mark.parametrize("spelling", ["./id00001", "id00000/../id00001"])
    def test_their_speakers_are_left_out_however_they_are_spelt(
        self, prepared, tmp_path, spelling
    ):
        write_corpus(tmp_path / "data", seconds=0.1)
        lines = (
            "1 id00000/s00/00000.wav id00000/s01/00000.wav\n"
            f"0 id00000/s00/00000.wav {spelling}/s00/00000.wav\n"
        )
        path = write_list(tmp_path / "trials.txt", lines)
        prepared(tmp_path / "data", trial_lists=(path,))
        assert speakers(tmp_path / "save") == set(SPEAKERS[2:])


class TestTrainingList:
    @pytest.mark.parametrize(
        ("content", "named"),
        [
            ("id1 id1/ü.wav\n".encode("latin-1"), r"list\.txt, line 1: no UTF-8 text"),
            ("", r"list\.txt is empty"),
            (
                "id1 id1/a.wav\nid1/b.wav\n",
                r"list\.txt, line 2: 'id1/b\.wav' has 1 field i",
            ),
            ("id1 my/a b.wav\n", r"line 1: .* 3 fields .*with a tab between"),
            (
                "id1 id1/a.wav\nid2 id1/b.wav\nid2 id1//a.wav\n",
                r"line 3: 'id1/a\.wav' is of the speakers 'id1' and 'id2'",
            ),
            ("id0 id00000/s00/no.wav\n", r"no\.wav cannot be read.*no such file"),
        ],
    )
    def test_an_unusable_one_is_refused_with_its_line(
        self, prepared, tmp_path, content, named
    ):
        with pytest.raises(ValueError, match=named):
            prepared(train_list=write_list(tmp_path / "list.txt", content))

    def test_names_with_spaces_are_separated_by_tabs(self, prepared, corpus, tmp_path):
        data = copied(corpus, tmp_path / "data", PLACES["spaces"])
        names = [f"{speaker} x" for speaker in SPEAKERS[:5]]
        lines = "".join(f"{name}\t{name}/my s00/00000.wav\n" for name in names)
        trials = [f"{s}/my s0{n}/00000.wav" for s in names[:2] for n in range(2)]
        own = f"1\t{trials[0]}\t{trials[1]}\n0\t{trials[0]}\t{trials[2]}\n"
        summary = prepared(
            data,
            train_list=write_list(tmp_path / "list.txt", lines),
            valid_trials=write_list(tmp_path / "own.txt", own),
        )
        assert (summary.utterances, summary.left_out) == (3, {TESTED: 2})
        assert (tmp_path / "save/valid_trials.txt").read_text() == own
        assert speakers(tmp_path / "save") == set(names[2:])

    def test_a_missing_name_is_looked_up_with_another_extension(
        self, prepared, tmp_path, trials
    ):
        data = write_corpus(tmp_path / "flac", seconds=0.1, suffix=".flac")
        lines = "".join(f"{s} {s}/s00/00000.wav\n" for s in SPEAKERS[:3])
        listed = {"train_list": write_list(tmp_path / "list.txt", lines)}
        own = {"valid_trials": trials}
        assert prepared(data, **own).left_out == {TESTED: 8}
        copy = (tmp_path / "save/valid_trials.txt").read_text()
        assert copy == TRIALS.replace(".wav", ".flac")
        assert prepared(data, "other", **listed).utterances == 3
        for utterance in read_manifest(tmp_path / "other/train.csv"):
            assert soundfile.info(utterance.wav).format == "FLAC"


def copied(source, folder, place):
    """Copy a corpus' files to other places in their speakers' folders."""
    for path in sorted((source / "wav").rglob("*.wav")):
        target = folder / place(*path.relative_to(source / "wav").parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return folder


PLACES = {
    "flat": lambda speaker, session, name: f"{speaker}/{session}-{name}",
    "deep": lambda speaker, session, name: f"{speaker}/book/{session}/part/{name}",
    "spaces": lambda speaker, session, name: f"{speaker} x/my {session}/{name}",
    "mixed": lambda speaker, session, name: (
        f"{speaker}/{session}-{name}"
        if session == "s00"
        else f"{speaker}/{session}/{name}"
    ),
}


class TestFolders:
    @pytest.mark.parametrize("place", [*PLACES, "mixed, packed"])
    def test_files_at_any_depth_are_their_speakers(
        self, prepared, corpus, tmp_path, place
    ):
        place, _, packed = place.partition(", ")
        data = copied(corpus, tmp_path / "data", PLACES[place])
        if packed:
            pack(data, tmp_path / "data.packed", sample_rate=16000)
            data = tmp_path / "data.packed"
        summary = prepared(data, valid_speakers=2)
        assert (summary.seen(), summary.utterances, summary.held_out) == (24, 16, 8)
        trials = read_trials(tmp_path / "save/valid_trials.txt")
        assert all(audio_exists(data / name) for name in trials.utterances)

    def test_audio_in_no_speakers_folder_is_refused_or_dropped(
        self, prepared, corpus, tmp_path
    ):
        data = tmp_path / "data"
        shutil.copytree(corpus / "wav", data)
        for number in range(4):
            shutil.copy(data / "id00000/s00/00000.wav", data / f"{number}.wav")
        with pytest.raises(
            ValueError, match=r"4 no speaker's folder .*/0\.wav.*/1\.wav.*/2\.wav; put"
        ):
            prepared(data)
        summary = prepared(data, bad_files="drop")
        assert (summary.seen(), summary.utterances) == (28, 24)
        assert summary.left_out == {Cause.NO_SPEAKER.words: 4}
        assert "Seen: 28 files of audio." in summary.in_words()

    def test_audio_beside_the_speakers_folders_is_counted_and_named(
        self, prepared, corpus, tmp_path, caplog
    ):
        shutil.copytree(corpus / "wav", tmp_path / "data/dev/wav")
        shutil.copytree(corpus / "wav/id00001", tmp_path / "data/test/wav/id9")
        summary = prepared(tmp_path / "data")
        assert (summary.seen(), summary.utterances) == (28, 24)
        assert f"{tmp_path}/data/test/wav/id9/s00/00000.wav" in left_out(
            tmp_path / "save"
        )
        assert "Left out: 4 beside the speakers' folders." in summary.in_words()

    def test_links_that_join_folders_of_the_data_folder_are_no_other_audio(
        self, prepared, corpus, tmp_path, caplog
    ):
        data = tmp_path / "data"
        shutil.copytree(corpus / "wav", data / "parts")
        (data / "wav").mkdir()
        for speaker in (data / "parts").iterdir():
            (data / "wav" / speaker.name).symlink_to(speaker)
        summary = prepared(data)
        assert (summary.seen(), summary.utterances, summary.left_out) == (24, 24, {})
        assert not caplog.text

    @pytest.mark.parametrize("name", [" first", "a\tb", "a\nb", "\ufeffmark"])
    def test_names_that_no_list_can_hold_are_refused_or_dropped(
        self, prepared, corpus, tmp_path, name
    ):
        data = tmp_path / "data"
        shutil.copytree(corpus / "wav", data)
        shutil.move(data / "id00002", data / name)
        with pytest.raises(ValueError, match=r"4 name for no list .*; rename it"):
            prepared(data)
        assert [*left_out(tmp_path / "save").values()] == [Cause.NAME.words] * 4
        summary = prepared(data, bad_files="drop", valid_speakers=2)
        assert (summary.seen(), summary.speakers) == (24, 3)

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            (
                {"data_folder": "nowhere"},
                r"nowhere does not exist\. Give the folder of VoxC",
            ),
            ({"valid_speakers": 5}, "valid_speakers is 5, and .* has 6 speakers"),
            ({"valid_speakers": 1}, "validation takes 2 or more"),
            ({"sample_rate": 8000}, r"has 16000 samples per second.*--resample=true"),
        ],
    )
    def test_settings_that_cannot_work_are_refused_by_name(
        self, prepared, tmp_path, settings, named
    ):
        with pytest.raises(ValueError, match=named):
            prepared(**settings)
        assert not (tmp_path / "save/prepared.json").exists()

    def test_too_few_training_speakers_are_refused(self, prepared, tmp_path):
        write_corpus(tmp_path / "data", speakers=1, seconds=0.1)
        with pytest.raises(ValueError, match=r"Only 1 speaker left for training: 1 f"):
            prepared(tmp_path / "data")

    def test_folders_that_cannot_be_speech_are_refused(self, prepared, tmp_path):
        (tmp_path / "data/wav").mkdir(parents=True)
        with pytest.raises(ValueError, match=r"no speech in .*<session>"):
            prepared(tmp_path / "data")
        (tmp_path / "data/wav/1.wma").touch()
        with pytest.raises(ValueError, match=r"ffmpeg -i IN\.wma"):
            prepared(tmp_path / "data")
        write_corpus(tmp_path / "data/wav", speakers=2, seconds=0.1)
        (tmp_path / "data/wav/id9").symlink_to(tmp_path / "unmounted")
        with pytest.raises(FileNotFoundError, match=r"id9 leads to .*unmounted, which"):
            prepared(tmp_path / "data")

    @pytest.mark.parametrize("depth", ["", "/wav"])
    def test_folders_of_a_split_are_no_speakers(self, prepared, tmp_path, depth):
        data = tmp_path / "data"
        corpus = write_corpus(tmp_path / "corpus", speakers=9, seconds=0.13)
        *paths, last = sorted((corpus / "wav").iterdir())
        for number, name in enumerate(("train", "dev-clean", "Test", "eval")):
            for path in paths[2 * number : 2 * number + 2]:
                to = data / depth.strip("/") / name / f"{number}{path.name}"
                shutil.copytree(path, to)
        with pytest.raises(
            ValueError,
            match=r"called Test, dev-clean, eval, train in .*=2 takes '0id00000' of",
        ):
            prepared(data)
        assert prepared(data, speaker_from=2).speakers == 8
        assert prepared(data, "one", speaker_from=1).speakers == 4
        shutil.copytree(last, data / depth.strip("/") / last.name)
        assert prepared(data, "other").speakers == 5

    def test_hidden_folders_and_stray_lists_change_no_speaker(
        self, prepared, corpus, tmp_path
    ):
        data = tmp_path / "data"
        shutil.copytree(corpus / "wav", data)
        (data / "SPEAKERS.TXT").write_text("Thanks to all \xe9\n", encoding="latin-1")
        for folder in (".cache", ".Trash-1000"):
            shutil.copytree(data / "id00000/s00", data / folder / "s")
        summary = prepared(data)
        assert (summary.speakers, summary.seen()) == (6, 28)
        assert "Left out: 4 hidden." in summary.in_words()

    @pytest.mark.parametrize(
        "names", [("ann", "ann "), ("Jos\u00e9", "Jose\u0301"), ("a b", "a  b")]
    )
    def test_speakers_whose_names_look_the_same_are_refused(
        self, prepared, corpus, tmp_path, names
    ):
        for speaker, name in zip(SPEAKERS, names, strict=False):
            shutil.copytree(corpus / "wav" / speaker, tmp_path / "data" / name)
        with pytest.raises(ValueError, match="differ in spaces or in the Unicode form"):
            prepared(tmp_path / "data")

    @pytest.mark.parametrize("shape", ["{0}_{1}", "{0}-{1}", "my_{0}-{1}", "{0}_{1}-x"])
    @pytest.mark.parametrize("odd", [False, True])
    def test_a_flat_folder_is_refused_with_what_reads_it(
        self, prepared, corpus, tmp_path, shape, odd
    ):
        for name, path, speaker in rows_of(corpus):
            (tmp_path / "data").mkdir(exist_ok=True)
            flat = shape.format(speaker, name.partition("-")[2].replace("-", ""))
            shutil.copy(path, tmp_path / "data" / f"{flat}.wav")
        if odd:
            shutil.copy(path, tmp_path / "data/odd.wav")
        with pytest.raises(ValueError, match="in no folder of a speaker") as error:
            prepared(tmp_path / "data")
        pattern = re.search("--speaker_from='(.*)' reads 6 speakers", str(error.value))
        given = {"speaker_from": pattern[1], "bad_files": "drop"}
        summary = prepared(tmp_path / "data", **given)
        assert (summary.speakers, summary.utterances) == (6, 24)
        assert summary.left_out == {Cause.NO_SPEAKER.words: 1} if odd else True

    def test_speakers_that_differ_in_case_alone_are_named(
        self, prepared, corpus, tmp_path, caplog
    ):
        for speaker, name in zip(SPEAKERS, ("Ann", "ann"), strict=False):
            shutil.copytree(corpus / "wav" / speaker, tmp_path / "data" / name)
        assert prepared(tmp_path / "data").speakers == 2
        words = (
            "1 name of speakers differ in case alone, and are speakers each: 'Ann' and"
        )
        assert words in caplog.text

    def test_a_folder_that_cannot_be_listed_is_an_error(self, prepared, monkeypatch):
        scandir = os.scandir

        def locked(folder):
            if str(folder).endswith("id00002/s01"):
                raise PermissionError(13, "Permission denied", str(folder))
            return scandir(folder)

        monkeypatch.setattr(os, "scandir", locked)
        with pytest.raises(PermissionError, match="id00002/s01"):
            prepared()


class TestOutside:
    @pytest.fixture
    def data(self, corpus, tmp_path):
        """A data folder, of which one session is a link to elsewhere."""
        shutil.copytree(corpus, tmp_path / "data")
        shutil.move(tmp_path / "data/wav/id00000/s01", tmp_path / "elsewhere")
        (tmp_path / "data/wav/id00000/s01").symlink_to(tmp_path / "elsewhere")
        return tmp_path / "data"

    def test_links_are_refused_unless_allowed(self, prepared, data, tmp_path):
        packed = tmp_path / "data.packed"
        with pytest.raises(
            ValueError, match=r"2 outside the folder .*else.*--outside_"
        ):
            prepared(data)
        with pytest.raises(ValueError, match=r"2 outside the folder .*elsewhere"):
            pack(data, packed, sample_rate=16000)
        dropped = prepared(data, bad_files="drop").left_out
        assert dropped == {Cause.OUTSIDE.words: 2}
        assert prepared(data, "other", outside_files=True).utterances == 24
        assert pack(data, packed, sample_rate=16000, outside_files=True) == 24
        assert prepared(packed, "packed").utterances == 24

    def test_trials_are_refused_unless_allowed(self, prepared, data, tmp_path):
        lines = f"1 id00000/s00/00000.wav id00000/s01/00000.wav\n{TRIALS}"
        path = write_list(tmp_path / "trials.txt", lines)
        for given in ({"trial_lists": (path,)}, {"valid_trials": path}):
            with pytest.raises(
                ValueError, match=r"trials\.txt: 1 name outside the folder"
            ):
                prepared(data, **given)
            assert prepared(data, **given, outside_files=True).speakers == 3


class TestAnotherFormat:
    """A format is a function and a row, and a layout is a row: no other place knows it."""

    def test_a_list_is_a_function_and_a_row(self, prepared, tmp_path, monkeypatch):
        # Each utterance is long enough for a trial.
        corpus = write_corpus(tmp_path / "corpus", seconds=0.16)

        def read_pairs(path):
            for number, line in enumerate(path.read_text().splitlines()):
                speaker, wav = line.split()
                yield Row(f"u{number:03}", wav, speaker)

        (tmp_path / "all.pairs").write_text(
            "".join(f"{speaker} {path}\n" for _, path, speaker in rows_of(corpus))
        )
        pairs = Format(lambda path: path.suffix == ".pairs", read_pairs)
        monkeypatch.setitem(FORMATS, "pairs", pairs)
        (tmp_path / "trials.txt").write_text("1 u000 u001\n0 u000 u004\n")
        settings = {"trial_lists": (str(tmp_path / "trials.txt"),)}
        summary = prepared(tmp_path / "all.pairs", valid_speakers=2, **settings)
        assert (summary.speakers, summary.left_out) == (2, {TESTED: 8})
        trials = read_trials(tmp_path / "save/valid_trials.txt")
        # Without sessions all pairs of a speaker's four utterances are target trials.
        assert int(trials.labels.sum()) == 2 * 6
        with pytest.raises(ValueError, match="is a pairs, whose lists name"):
            pack(tmp_path / "all.pairs", tmp_path / "a.packed", sample_rate=16000)

    def test_a_layout_is_a_row(self, corpus, prepared, tmp_path, monkeypatch):
        ours = Layout("by year", "years", r"\d+/(?P<speaker>\w+)/(?P<session>\w+)/.+")
        monkeypatch.setattr(folders, "LAYOUTS", (ours, *LAYOUTS))
        shutil.copytree(corpus / "wav", tmp_path / "data/years/2024")
        assert open_sources(tmp_path / "data")[0].format == "by year"
        assert prepared(tmp_path / "data", valid_speakers=2).speakers == 4

    def test_the_last_layout_takes_any_folder(self):
        last = LAYOUTS[-1]
        assert (last.place, last.speakers) == (".", "")
        assert re.match(last.first, "a.wav")


class TestKaldisTrials:
    """Lists of speakers who are enrolled with several utterances."""

    @pytest.fixture
    def trials(self, corpus, tmp_path):
        self.data = as_kaldi(rows_of(corpus), tmp_path / "kaldi")
        self.spk2utt = tmp_path / "spk2utt"
        self.spk2utt.write_text("id00001 id00001-s00-00000 id00001-s00-00001\n")
        path = tmp_path / "trials"
        path.write_text(
            "id00001 id00001-s01-00000 target\nid00001 id00002-s01-00000 nontarget\n"
        )
        return path

    def test_their_speakers_are_left_out(self, trials, prepared):
        summary = prepared(self.data, trial_lists=(str(trials),))
        assert summary.left_out == {TESTED: 8}

    def test_a_model_of_two_speakers_is_refused(self, trials, prepared):
        self.spk2utt.write_text("id00001 id00001-s00-00000 id00003-s00-00001\n")
        with pytest.raises(
            ValueError, match=r"'id00001' is enrolled with utterances of"
        ):
            prepared(self.data, trial_lists=(str(trials),))

    @pytest.mark.parametrize(
        ("where", "named"),
        [
            ("trials", r"1 utterance .* such as 'u9', which .*kaldi does not"),
            ("spk2utt", r"1 utterance .* such as 'u9', which .*kaldi does not"),
        ],
    )
    def test_an_utterance_that_is_not_in_the_list_is_named(
        self, trials, prepared, tmp_path, where, named
    ):
        path = tmp_path / where
        path.write_text(path.read_text().replace("id00001-s00-00001", "u9"))
        path.write_text(path.read_text().replace("id00002-s01-00000", "u9"))
        with pytest.raises(ValueError, match=named):
            prepared(self.data, trial_lists=(str(trials),))

    def test_a_label_that_contradicts_the_list_is_named(self, trials, prepared):
        lines = trials.read_text().split()
        lines[2::3] = reversed(lines[2::3])
        trials.write_text("{} {} {}\n{} {} {}\n".format(*lines))
        with pytest.raises(
            ValueError, match=r"'id00001' and .* \(Kaldi directory\), which contra"
        ):
            prepared(self.data, trial_lists=(str(trials),))

    def test_a_missing_file_of_a_model_is_named(self, trials, prepared, caplog):
        scp = self.data / "wav.scp"
        scp.write_text(scp.read_text().replace("id00001/s00/00001", "nowhere"))
        prepared(self.data, trial_lists=(str(trials),))
        assert "1 of 4 files is missing, such as" in caplog.text
        assert "nowhere.wav. Training does" in caplog.text

    def test_another_spk2utt_file_is_another_setting(self, trials):
        settings = DataSettings(str(self.data), trial_lists=(str(trials),))
        before = settings.fingerprint()
        self.spk2utt.write_text("id00001 id00001-s00-00000\n")
        assert settings.fingerprint() != before

    def test_validation_refuses_several_utterances_of_a_side(self, trials, prepared):
        with pytest.raises(ValueError, match=r"valid_trials is .* several utterances"):
            prepared(self.data, valid_trials=str(trials))
        self.spk2utt.unlink()
        trials.write_text(trials.read_text().replace("id00001 ", "id00001-s00-00000 "))
        assert prepared(self.data, valid_trials=str(trials)).valid_trials == 2


# ------------------------------------------------------------ odd files and names


def test_one_part_of_a_recording_is_found_however_it_is_written(corpus, tmp_path):
    audio = sorted(corpus.rglob("*.wav"))
    samples = audio_info(audio[0]).samples
    detour = f"{audio[0].parent}/../{audio[0].parent.name}/{audio[0].name}"
    for path, start, stop in (
        (audio[0], "0", str(samples)),
        (detour, "", ""),
        (detour, "0", str(samples)),
    ):
        lines = (
            f"ID,wav,start,stop,spk_id\na,{audio[0]},,,x\nb,{path},{start},{stop},y\n"
        )
        (tmp_path / "list.csv").write_text(lines)
        settings = DataSettings(str(tmp_path / "list.csv"))
        with pytest.raises(
            ValueError, match="'b' of 'y' is the same audio as 'a' of 'x'"
        ):
            take_account(list_speech(settings), settings)


def test_a_pipe_is_no_audio_and_is_not_waited_for(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "data")
    folder = next((tmp_path / "data").rglob("*.wav")).parent
    os.mkfifo(folder / "pipe.wav")
    settings = DataSettings(str(tmp_path / "data"))
    account = take_account(list_speech(settings), settings)
    (problem,) = account.problems
    assert problem.path.endswith("pipe.wav")
    assert "no regular file" in problem.detail


def test_a_link_that_leads_nowhere_cannot_be_read(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "data")
    folder = next((tmp_path / "data").rglob("*.wav")).parent
    (folder / "gone.wav").symlink_to(tmp_path / "nowhere.wav")
    settings = DataSettings(str(tmp_path / "data"))
    (problem,) = take_account(list_speech(settings), settings).problems
    assert problem.cause is Cause.UNREADABLE


def test_a_corpus_with_a_decomposed_name_has_names_as_others(corpus, tmp_path):
    for name in ("jose\u0301", "plain"):
        shutil.copytree(corpus / "wav", tmp_path / name)
    sources = open_sources([tmp_path / "jose\u0301", tmp_path / "plain"])
    (tmp_path / "plain" / "id00001" / "s00" / "00000.wav").unlink()
    found = find_rows(
        sources, ["id00001/s00/00000.wav", "jos\u00e9/id00000/s00/00000.wav"]
    )
    assert not found.missing
    assert {row.speaker for row in found.rows.values()} == {
        "jos\u00e9/id00001",
        "jos\u00e9/id00000",
    }


def test_one_name_before_all_files_is_no_speaker(corpus, tmp_path):
    (tmp_path / "flat").mkdir()
    for number, path in enumerate(sorted(corpus.rglob("*.wav"))[:4]):
        shutil.copy(path, tmp_path / "flat" / f"rec_{number}.wav")
    listing = list_speech(DataSettings(str(tmp_path / "flat")))
    assert {one.cause for one in listing.left_out} == {Cause.NO_SPEAKER}
