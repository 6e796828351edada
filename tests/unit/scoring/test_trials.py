"""Trial lists and score files: read as written, and refused by file and line."""

import dataclasses
import os
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechbrain_rev.scoring import (
    Trials,
    read_scores,
    read_trials,
    write_scores,
)
from speechbrain_rev.scoring.trials import models_file

# Whatever a path may hold but white space, which separates the fields.
names = st.text(
    st.characters(exclude_categories=("Z", "C")), min_size=1, max_size=12
).filter(lambda name: len(name.split()) == 1)
spaced = st.text("ab \u00a0\u3000\x1c/ü'\"\\#", min_size=1, max_size=8).filter(
    lambda name: name == name.strip()
)


def trials_of(names):
    """Trials of any names, of which the first two have different labels."""
    # As they are compared: one pair has one label.
    pair = lambda pair: frozenset(map(os.path.normpath, pair))  # noqa: E731
    return st.lists(
        st.tuples(names, names), min_size=2, max_size=12, unique_by=pair
    ).map(
        lambda pairs: Trials(
            [n % 2 for n in range(len(pairs))], *zip(*pairs, strict=True)
        )
    )


@given(
    trials=trials_of(names),
    separator=st.sampled_from([" ", "\t", "  "]),
    newline=st.sampled_from(["\n", "\r\n"]),
    end=st.sampled_from(["", "\n", "\n\n", " \n"]),
    mark=st.sampled_from(["", "\ufeff"]),
)
@settings(deadline=None, max_examples=60)
def test_what_is_written_is_read(
    tmp_path_factory, trials, separator, newline, end, mark
):
    path = tmp_path_factory.mktemp("trials") / "trials.txt"
    rows = zip(map(str, trials.labels), trials.enrol, trials.test, strict=True)
    path.write_bytes((mark + newline.join(map(separator.join, rows)) + end).encode())
    read = read_trials(path)
    assert read.labels.tolist() == trials.labels.tolist()
    assert (read.enrol, read.test) == (trials.enrol, trials.test)
    assert len(read) == len(trials)


@given(trials=trials_of(spaced))
@settings(deadline=None, max_examples=60)
def test_names_with_spaces_come_back_from_scores(tmp_path_factory, trials):
    path = tmp_path_factory.mktemp("scores") / "scores.txt"
    write_scores(path, trials, trials.labels)
    read, scores = read_scores(path)
    assert (read.enrol, read.test) == (trials.enrol, trials.test)
    assert scores.tolist() == trials.labels.tolist()


GOOD = "1 a b\n0 a c\n"


ONE_PAIR = "one pair with two labels"


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_trials, GOOD + "1 a\n", "line 3: '1 a' has 2 fields instead of 3"),
        (read_trials, "1 a b\n\n0 a c\n", "line 2: '' has 0 fields"),
        (read_trials, "x" * 500, f"line 1: '{'x' * 60}...' has 1 fields"),
        (read_trials, "1 a b/my c\n0 a d\n", "has spaces, separate them with tabs"),
        (read_trials, GOOD + "2 a b\n", "line 3: the label is '2', neither 0 nor 1"),
        (read_trials, "01 a b\n", "line 1: the label is '01'"),
        (read_trials, "1 a b\n1 a c\n", "list.txt have the label 1"),
        (read_trials, "0 a b\n", "list.txt have the label 0"),
        (read_trials, " \n\n", "list.txt is empty"),
        (
            read_trials,
            GOOD + "1 a c\n",
            f"lines 2 and 3: {ONE_PAIR}, '0 a c' and '1 a c'",
        ),
        (read_trials, GOOD + "1 c a\n0 b a\n", f"{ONE_PAIR}, '0 a c' and '1 c a'"),
        (read_trials, "0 b a\n" + GOOD, f"lines 1 and 2: {ONE_PAIR}"),
        (read_trials, GOOD + "0 ./a x/../b\n", f"lines 1 and 3: {ONE_PAIR}"),
        (read_trials, GOOD.encode() + b"1 a \xff\n", "line 3: no UTF-8 text"),
        (read_trials, GOOD.encode("utf-16"), "list.txt, line 1: no UTF-8 text"),
        (read_trials, GOOD.encode("utf-16-le"), "list.txt, line 1: no UTF-8 text"),
        (read_scores, "1 a b\n", "line 1: '1 a b' has 3 fields instead of 4"),
        (read_scores, "a b 1 0.5\na c 0 nan\n", "line 2: the score is 'nan'"),
        (read_scores, "a b 1 0.5\na c 0 high\n", "line 2: the score is 'high'"),
        (read_scores, "a b 0.5 1\n", "line 1: the label is '0.5'"),
        (read_scores, "a b 1 0.5\n", "All 1 trials"),
        (read_scores, "a b 1 0.5\na c 0 0.2\nb a 0 0.5\n", "lines 1 and 3: one pair"),
        (read_scores, "", "score file"),
    ],
)
def test_a_bad_list_is_refused_with_file_and_line(tmp_path, read, content, message):
    path = tmp_path / "list.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(message)):
        read(path)


FORMS = {
    "voxceleb": ("trials.txt", "1 a b\n0 a c\n"),
    "kaldi": ("trials", "a b target\na c nontarget\n"),
    "kaldi with tabs": ("trials", "a\tb\ttarget\na\tc\tnontarget\n"),
    "csv": ("trials.csv", "enrol,test,label\na,b,1\na,c,0\n"),
    "csv in another order": (
        "t.txt",
        'Label,note,Test,Enroll\ntarget,,b,a\n0,"x,y",c,a\n',
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_format_gives_the_same_trials(form, tmp_path):
    name, content = FORMS[form]
    (tmp_path / name).write_text(content)
    trials = read_trials(tmp_path / name)
    assert (trials.labels.tolist(), trials.enrol, trials.test, trials.models) == (
        [1, 0],
        ("a", "a"),
        ("b", "c"),
        {},
    )
    # Of VoxCeleb's format a spk2utt file counts where it is given alone.
    for spk2utt in ("spk2utt", f"{name}.spk2utt"):
        (tmp_path / spk2utt).write_text("a e f\nb b\n")
        trials = read_trials(tmp_path / name)
        assert trials.models == ({} if form == "voxceleb" else {"a": ("e", "f")})
        assert (models_file(tmp_path / name) is None) == (form == "voxceleb")
        trials = read_trials(tmp_path / name, models=tmp_path / spk2utt)
        assert trials.utterances == ("e", "f", "b", "c")
        enrol, test = trials.rows(["c", "f", "b", "e"])
        assert (enrol.tolist(), test.tolist()) == ([4, 4], [2, 0])


@pytest.mark.parametrize(
    ("name", "content", "spk2utt", "message"),
    [
        (
            "t",
            "a b target\na c impostor\n",
            "",
            "line 2: the label is 'impostor', neither n",
        ),
        ("t", "a b target\na c\n", "", "line 2: 'a c' has 2 fields"),
        ("t", "1 a b\nb c target\n", "", "line 2: the label is 'b', neither 0 nor 1"),
        ("t.csv", "a,b\nc,d\n", "", r"columns are \['a', 'b'\]"),
        ("t.csv", "enrol,enroll,test,label\na,a,b,1\n", "", "columns are"),
        ("t.csv", "enrol,test,label\na,b,1\na,c\n", "", "line 3: 'a,c' has 2 fields"),
        ("t.csv", "enrol,test,label\na,b,1\n,c,0\n", "", "line 3: a name is empty"),
        ("t.csv", "enrol,test,label\n", "", "empty behind its header"),
        ("t.csv", "enrol,test,label\na,b,1\na,b,0\n", "", "lines 2 and 3: one pair"),
        (
            "t",
            "a b target\na c nontarget\n",
            "a b d",
            "line 1: 'a' is enrolled with 'b'",
        ),
        ("t", "a b target\na c nontarget\n", "a", "spk2utt, line 1: 'a' has no utt"),
        ("t", "a b target\na c nontarget\n", "a d\na e", "line 2: 'a' is there twice"),
        ("t", "a b target\na c nontarget\n", "a d e d", "line 1: 'a' has 'd' twice"),
        (
            "t.csv",
            f"enrol,test,label\na,b,1\na,{'c' * 140_000},0\n",
            "",
            r"t\.csv, line 3: it is no CSV \(field larger than",
        ),
    ],
)
def test_a_bad_list_of_another_format_is_refused(
    name, content, spk2utt, message, tmp_path
):
    (tmp_path / name).write_text(content)
    if spk2utt:
        (tmp_path / "spk2utt").write_text(spk2utt)
    with pytest.raises(ValueError, match=message):
        read_trials(tmp_path / name)


def test_a_model_of_an_utterance_s_name_is_another(tmp_path):
    (tmp_path / "t").write_text("a b target\nb a nontarget\n")
    (tmp_path / "spk2utt").write_text("a c d\n")
    trials = read_trials(tmp_path / "t")
    assert trials.utterances == ("c", "d", "b", "a")
    enrol, test = trials.rows(["a", "b", "c", "d"])
    assert (enrol.tolist(), test.tolist()) == ([4, 1], [1, 0])
    with pytest.raises(ValueError, match="labels holds 1 labels"):
        trials.among({"c", "b", "a"})


def test_marks_within_joined_lists_and_pairs_with_one_label_are_read(tmp_path):
    scores, trials = tmp_path / "scores.txt", tmp_path / "trials.txt"
    scores.write_text("\ufeffa b 1 0.5\n\ufeffa c 0 0.25\n")
    assert read_scores(scores)[0].utterances == ("a", "b", "c")
    trials.write_text(GOOD + "1 b a\n")
    assert read_trials(trials).labels.tolist() == [1, 0, 1]


def test_a_missing_list_and_a_folder_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.txt does not exist.*'label"):
        read_trials(tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        read_trials(str(tmp_path))


@pytest.mark.slow(drawn=False)
def test_voxceleb_sized_lists_keep_each_name_once(tmp_path):
    path = tmp_path / "trials.txt"
    count = 580_000
    line = "{} id1{:04d}/aBcDeFgHiJk/{:05d}.wav id1{:04d}/aBcDeFgHiJk/{:05d}.wav\n"
    with open(path, "w") as file:
        for row in range(count):
            other = row * 7919 % 1000
            file.write(line.format(row % 2, row % 1251, row % 100, other, other % 100))
    tracemalloc.start()
    trials = read_trials(path)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(trials) == count
    assert trials.labels.sum() == count // 2
    # Two pointers and a label per trial; a string for each would take 90 bytes a side.
    assert kept < 20 * count + 100 * 150_000


def test_trials_do_not_change_and_leave_the_callers_labels_alone():
    labels = np.array([1, 0], dtype=np.int8)
    trials = Trials(labels, enrol=("a", "a"), test=("b", "c"))
    labels[0] = 0
    assert labels.tolist() == [0, 0]
    assert trials.labels.tolist() == [1, 0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        trials.enrol = ()
    with pytest.raises(ValueError, match="read-only"):
        trials.labels[0] = 0


@pytest.mark.parametrize(
    ("labels", "enrol", "test", "message"),
    [
        ([1, 0], ["a"], ["b", "c"], "2 labels for 1 enrolment and 2 test names"),
        ([1, 3], ["a", "a"], ["b", "c"], "neither 1"),
        ([1, 1], ["a", "a"], ["b", "c"], "all of them 1"),
    ],
)
def test_trials_that_do_not_fit_together_are_refused(labels, enrol, test, message):
    with pytest.raises(ValueError, match=message):
        Trials(labels, enrol, test)


def test_rows_lead_back_to_the_names_in_any_list_that_holds_them():
    trials = Trials([1, 0, 1], enrol=("b", "a", "c"), test=("a", "c", "b"))
    assert trials.utterances == ("b", "a", "c")
    order = ["other", "c", "a", "b"]
    enrol, test = trials.rows(order)
    assert [order[row] for row in enrol] == list(trials.enrol)
    assert [order[row] for row in test] == list(trials.test)
    with pytest.raises(ValueError, match=r"1 of 3 utterances .* 'c'"):
        trials.rows(["a", "b"])
    with pytest.raises(ValueError, match="4 names of which only 3 are different"):
        trials.rows(["a", "b", "c", "a"])


def test_score_files_have_a_line_per_trial_and_are_read_as_written(tmp_path):
    trials = Trials([1, 0], ["a", "a"], ["b", "ü"])
    path = tmp_path / "scores.txt"
    write_scores(path, trials, [0.123456789, -1])
    assert path.read_text("utf-8") == "a b 1 0.123457\na ü 0 -1.000000\n"
    read, scores = read_scores(path)
    assert scores.tolist() == [0.123457, -1.0]
    assert read.labels.tolist() == [1, 0]
    assert (read.enrol, read.test) == (trials.enrol, trials.test)
    with pytest.raises(ValueError, match="trials 2, scores 3"):
        write_scores(path, trials, [1.0, 2.0, 3.0])


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a ", " a", "\ufeffa"])
def test_a_name_that_no_line_can_hold_is_not_written(tmp_path, name):
    trials = Trials([1, 0], [name, "a"], ["b", "c"])
    with pytest.raises(ValueError, match=r"cannot stand in a list.*Rename it"):
        write_scores(tmp_path / "scores.txt", trials, [1, 0])
    assert not (tmp_path / "scores.txt").exists()
