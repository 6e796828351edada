"""Several corpora are one whose speakers are apart, and noise comes from any list."""

import json
import shutil

import pytest
import soundfile
import torch

from speechbrain_rev.data import SpeakerAugment, open_sources, read_manifest
from speechbrain_rev.data.checking import take_account
from speechbrain_rev.data.corpora import noise_files
from speechbrain_rev.data.listing import DataSettings, list_speech
from speechbrain_rev.data.manifest import Cause
from speechbrain_rev.data.packing import pack
from tests.corpus import write_corpus
from tests.unit.data.test_formats import (
    as_csv,
    as_kaldi,
    as_shards,
    heard,
    rows_of,
    write_tables,
)

TESTED = Cause.TESTED.words


def keys_of(folders):
    return [source.key for source in open_sources(folders)]


@pytest.fixture
def two(corpus, tmp_path):
    """A Kaldi directory and a folder, of the same names of speakers."""
    kaldi = as_kaldi(rows_of(corpus), tmp_path / "kaldi")
    return [str(kaldi), str(write_corpus(tmp_path / "vox", speakers=3, seconds=0.1))]


def test_speakers_of_two_corpora_are_kept_apart(two, prepared, tmp_path, capsys):
    alone = [prepared(folder, f"alone{k}") for k, folder in enumerate(two)]
    capsys.readouterr()
    summary = prepared_of(prepared, two)
    said = capsys.readouterr().out
    assert "kaldi: Understood as Kaldi directory: 24 utterances of 6 speakers" in said
    assert "vox: Understood as VoxCeleb: 12 utterances of 3 speakers" in said
    assert summary.speakers == sum(one.speakers for one in alone) == 9
    assert summary.seen() == sum(one.seen() for one in alone) == 36
    wanted = [
        (f"{key}/{speaker}", *rest)
        for k, key in enumerate(("kaldi", "vox"))
        for speaker, *rest in heard(tmp_path / f"alone{k}/train.csv")
    ]
    assert heard(tmp_path / "save/train.csv") == wanted
    assert {
        one.ID.split("/")[0] for one in read_manifest(tmp_path / "save/train.csv")
    } == {
        "kaldi",
        "vox",
    }
    # Prepared again, and validated.
    assert prepared_of(prepared, two) == summary
    prepared_of(prepared, two, "valid", valid_speakers=2)


def prepared_of(prepared, folders, save="save", **settings):
    return prepared(save=save, **{"data_folder": folders, **settings})


@pytest.mark.parametrize(
    ("trials_folder", "names", "left_out"),
    [
        # Names of the corpora together; those that one of them alone has; other corpora.
        (None, ["vox/id00001/s00/00000.wav", "vox/id00002/s00/00000.wav"], 8),
        (None, ["id00001/s00/00000.wav", "id00002/s00/00000.wav"], 8),
        (1, ["id00001/s00/00000.wav", "id00002/s00/00000.wav"], 8 + 8),
        (None, ["kaldi/id00001-s00-00000", "kaldi/id00002-s00-00000"], 8),
    ],
)
def test_speakers_of_trial_lists_are_left_out_of_every_corpus_they_may_be_in(
    trials_folder, names, left_out, two, prepared, tmp_path
):
    path = tmp_path / "trials.txt"
    path.write_text(f"1 {names[0]} {names[0]}\n0 {names[0]} {names[1]}\n")
    given = {"trial_lists": (str(path),)}
    if trials_folder is not None:
        given["trials_folder"] = two[trials_folder]
    assert prepared_of(prepared, two, **given).left_out == {TESTED: left_out}


def test_lists_of_one_stem_and_one_folder_are_two(corpus, prepared, tmp_path):
    whole = as_csv(rows_of(corpus), tmp_path / "x")
    head, *lines = whole.read_text().splitlines()
    paths = []
    for name, part in {"raw.train.csv": lines[:16], "raw.dev.csv": lines[16:]}.items():
        paths.append(str(tmp_path / name))
        (tmp_path / name).write_text("\n".join([head, *part]))
    assert prepared_of(prepared, paths).seen() == 24
    assert keys_of(paths) == ["raw.train.csv", "raw.dev.csv"]


def test_a_folder_wav_of_each_speaker_is_his_own(corpus, prepared, tmp_path):
    for name, path, speaker in rows_of(corpus):
        to = tmp_path / "arctic" / speaker / "wav" / f"{name}.wav"
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    assert prepared(tmp_path / "arctic").speakers == 6


def test_utterances_that_no_encoder_embeds_are_in_no_trial(corpus, prepared, tmp_path):
    shutil.copytree(corpus, tmp_path / "own")
    for number, (_, path, _) in enumerate(rows_of(tmp_path / "own")[::4], start=1):
        soundfile.write(path.with_name("tiny.wav"), [0.1 * number] * 50, 16000)
    summary = prepared(tmp_path / "own", valid_speakers=2)
    assert summary.held_out == 2 * 5
    assert summary.valid_trials
    assert "tiny" not in (tmp_path / "save/valid_trials.txt").read_text()


def test_a_list_that_was_edited_is_listed_anew(corpus, prepared, tmp_path):
    path = as_csv(rows_of(corpus), tmp_path / "x")
    assert prepared(path).speakers == prepared(path).speakers == 6
    path.write_text(path.read_text().replace(",id00000", ",bob"))
    prepared(path)
    speakers = {one.spk_id for one in read_manifest(tmp_path / "save/train.csv")}
    assert "bob" in speakers
    assert "id00000" not in speakers


def test_speakers_of_trial_lists_are_left_out_whatever_a_training_list_calls_them(
    corpus, prepared, tmp_path
):
    names = [str(p.relative_to(corpus / "wav")) for _, p, _ in rows_of(corpus)]
    lines = [f"spk{name[:7]} {name}" for name in names]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    (tmp_path / "trials.txt").write_text(
        f"1 {names[0]} {names[1]}\n0 {names[0]} {names[-1]}\n"
    )
    settings = {"train_list": str(tmp_path / "train.txt")}
    settings["trial_lists"] = (str(tmp_path / "trials.txt"),)
    assert prepared(**settings).left_out == {TESTED: 8}


def test_corpora_of_one_name_are_named_by_what_tells_them_apart(corpus, tmp_path):
    folders = [shutil.copytree(corpus, tmp_path / name / "wav2") for name in ("a", "b")]
    assert keys_of(folders) == ["a-wav2", "b-wav2"]
    pack(folders[0], tmp_path / "c.packed", sample_rate=16000)
    listed = as_shards(rows_of(corpus), tmp_path / "d")
    assert keys_of([tmp_path / "c.packed", listed]) == ["c", "shard"]
    assert keys_of([str(folders[0])]) == keys_of(str(folders[0])) == [""]


def test_corpora_that_overlap_are_refused(corpus):
    settings = DataSettings([str(corpus), str(corpus / "wav")])
    with pytest.raises(ValueError, match="is the same audio as"):
        take_account(list_speech(settings), settings)
    with pytest.raises(ValueError, match="Give each folder or list once"):
        open_sources([corpus, corpus])


def as_parts(rows, folder):
    lines = [f"{n},{p},0,400,{s}" for n, p, s in rows]
    return (
        write_tables(folder, **{"p.csv": ["ID,wav,start,stop,spk_id", *lines]})
        / "p.csv"
    )


def as_list(rows, folder):
    lines = [f"{n},{p},{s}" for n, p, s in rows]
    return write_tables(folder, **{"l.csv": ["ID,wav,spk_id", *lines]}) / "l.csv"


@pytest.mark.parametrize("write", [as_list, as_kaldi])
def test_corpora_that_list_the_same_files_are_refused(
    write, corpus, prepared, tmp_path
):
    other = write(rows_of(corpus)[4:], tmp_path / "other")
    with pytest.raises(
        ValueError,
        match=r"is the same audio as '.*00000' of 'corpus.*00000\.wav\. Leave",
    ):
        prepared_of(prepared, [str(corpus), str(other)])


def test_parts_of_one_recording_may_be_of_two_corpora(corpus, prepared, tmp_path):
    rows = rows_of(corpus)
    paths = [as_parts(rows, tmp_path / "a"), tmp_path / "b.csv"]
    paths[1].write_text(paths[0].read_text().replace(",0,400,", ",400,800,"))
    assert prepared_of(prepared, list(map(str, paths))).seen() == 48


@pytest.mark.parametrize(
    "layout", ["Kaldi directory", "WeSpeaker's list", "tar", "csv"]
)
def test_noise_needs_no_speaker_in_a_list(layout, corpus, tmp_path):
    rows = rows_of(corpus)[:4]
    files = [path for _, path, _ in rows]
    if layout == "Kaldi directory":
        data = as_kaldi(rows, tmp_path / "data")
        (data / "utt2spk").unlink()
    elif layout == "WeSpeaker's list":
        lines = [json.dumps({"key": name, "wav": str(path)}) for name, path, _ in rows]
        data = write_tables(tmp_path / "data", **{"raw.list": lines}) / "raw.list"
    elif layout == "csv":
        lines = ["ID,duration,wav,wav_format,wav_opts"]
        lines += [f"{name},1.0,{path},wav," for name, path, _ in rows]
        data = write_tables(tmp_path / "data", **{"a.csv": lines}) / "a.csv"
    else:
        data = as_shards(rows, tmp_path / "data")
        files = noise_files(data)
        assert {path.parent.suffix for path in files} == {".tar"}
    assert noise_files(data) == files
    if layout != "tar":
        with pytest.raises(ValueError, match="it has no speaker"):
            list_speech(DataSettings(str(data)))
    plain = tmp_path / "plain"
    plain.mkdir()
    originals = {name: path for name, path, _ in rows}
    for number, file in enumerate(files):
        shutil.copy(originals.get(file.stem, file), plain / f"{number}.wav")
    settings = {"out_n_neurons": 4, "chunk_samples": 800, "speeds": [1.0]}
    augment = SpeakerAugment(**settings, augment_prob=1.0, noise_folder=data)
    same = SpeakerAugment(**settings, augment_prob=1.0, noise_folder=plain)
    wavs, lens = torch.randn(4, 800).clamp(-1, 1), torch.ones(4)
    assert torch.equal(augment(wavs, lens)[0], same(wavs, lens)[0])
    assert not torch.equal(augment(wavs, lens)[0], wavs)


@pytest.mark.parametrize(
    ("name", "lowest"),
    [("music", 5), ("speech", 13), ("noise", 0), ("speech/noise", 0)],
)
def test_noise_of_a_list_has_the_ratio_of_musans_folder(name, lowest, tmp_path):
    path = tmp_path / name / "x/a.wav"
    lines = [json.dumps({"key": "a", "wav": str(path)})]
    data = write_tables(tmp_path / "lists", **{"a.list": lines}) / "a.list"
    augment = SpeakerAugment(out_n_neurons=4, speeds=[1.0], noise_folder=data)
    (file,) = augment.noise_files
    assert augment._snr_range_of(file)[0] == lowest
