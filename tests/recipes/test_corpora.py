"""The recipe on lists: what it trains and embeds is the utterances, wherever they lie."""

from pathlib import Path

import numpy as np
import pytest

from speechbrain_rev.audio import read_audio
from speechbrain_rev.cli import main as command
from speechbrain_rev.data import read_manifest
from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.evaluation import cohort_files
from tests.corpus import write_corpus
from tests.recipes.runs import FEW_STEPS, arguments, assert_same_weights, recipe
from tests.unit.data.test_formats import as_segments, as_shards, rows_of


@pytest.mark.slow
@pytest.mark.parametrize("layout", [as_segments, as_shards])
def test_lists_train_and_embed_the_bits_of_files(layout, train, data, tmp_path):
    runs = {}
    for name, folder in {
        "files": data,
        "listed": layout(rows_of(data), tmp_path / "data"),
    }.items():
        runs[name] = tmp_path / name
        train.main(arguments(folder, runs[name], **FEW_STEPS))
    assert_same_weights(runs["files"], runs["listed"])
    embedder = SpeakerEmbedder.from_run(runs["listed"])
    for one, other in zip(
        *(cohort_files(run / "save/train.csv", 1).values() for run in runs.values()),
        strict=True,
    ):
        assert one != other
        assert np.array_equal(embedder.embed(one), embedder.embed(other))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [as_segments, as_shards])
def test_a_run_on_lists_is_validated_extracted_and_scored(
    layout, train, data, tmp_path
):
    listed, run = layout(rows_of(data), tmp_path / "data"), tmp_path / "run"
    train.main(arguments(listed, run, **FEW_STEPS | {"valid_speakers": 2}))
    assert len(read_manifest(run / "save/train.csv")) == 16
    trials = f"--trial_lists={run / 'save/valid_trials.txt'}"
    recipe("extract").main([str(run), "--device=cpu", trials])
    recipe("score").main([str(run), "--bootstrap=0", trials])
    assert (run / "scores/results.json").is_file()
    # Once more, of speakers who are enrolled with several utterances.
    held_out = rows_of(data)[-8:]
    models = {s: [n for n, _, who in held_out if who == s][:2] for _, _, s in held_out}
    lines = [
        f"{s} {n} {'non' * (s != who)}target" for s in models for n, _, who in held_out
    ]
    enrolled = {name for names in models.values() for name in names}
    own = [line for line in lines if line.split()[1] not in enrolled]
    (tmp_path / "trials").write_text("\n".join(own))
    spk2utt = "".join(f"{s} {' '.join(names)}\n" for s, names in models.items())
    (tmp_path / "trials.spk2utt").write_text(spk2utt)
    trials = f"--trial_lists={tmp_path / 'trials'}"
    recipe("extract").main([str(run), "--device=cpu", trials])
    recipe("score").main([str(run), "--bootstrap=0", trials])
    scores = (run / "scores/trials.as_norm.txt").read_text().splitlines()
    assert [line.split()[:2] for line in scores] == [line.split()[:2] for line in own]


@pytest.mark.slow
def test_a_list_of_absolute_names_trains_is_validated_and_scored(train, data, tmp_path):
    lines = [f"{speaker} {path}\n" for _, path, speaker in rows_of(data)]
    (tmp_path / "list.txt").write_text("".join(lines))
    given = FEW_STEPS | {"train_list": tmp_path / "list.txt", "valid_speakers": 2}
    with pytest.raises(ValueError, match=r"24 outside the folder .* is absolute"):
        train.main(arguments(data, tmp_path / "run", **given))
    train.main(arguments(data, tmp_path / "run", **given, outside_files=True))
    trials = f"--trial_lists={tmp_path / 'run/save/valid_trials.txt'}"
    recipe("extract").main([str(tmp_path / "run"), "--device=cpu", trials])
    recipe("score").main([str(tmp_path / "run"), "--bootstrap=0", trials])
    assert (tmp_path / "run/scores/results.json").is_file()


@pytest.mark.slow
def test_two_corpora_train_as_one(train, data, tmp_path):
    # Of other voices: what is of two speakers would be refused.
    other = write_corpus(tmp_path / "other", seed=1)
    both = [str(data), str(as_shards(rows_of(other), tmp_path / "shards"))]
    run = tmp_path / "run"
    train.main(arguments(f"[{', '.join(both)}]", run, **FEW_STEPS))
    assert len(read_manifest(run / "save/train.csv").speaker_names) == 12
    command(["export", str(run), str(tmp_path / "model")])
    card = (tmp_path / "model/README.md").read_text()
    assert f"of {data.name} and shard.list: all speakers" in card
    trials = tmp_path / "trials.txt"
    key, (a, b, *_, c) = data.name, [name for name, *_ in rows_of(data)]
    names = [f"{key}/{n.replace('-', '/')}.wav" for n in (a, b, c)]
    trials.write_text(f"1 {names[0]} {names[1]}\n0 {names[0]} {names[2]}\n")
    recipe("extract").main([str(run), "--device=cpu", f"--trial_lists={trials}"])
    recipe("score").main([str(run), "--bootstrap=0", f"--trial_lists={trials}"])
    assert (run / "scores/results.json").is_file()


@pytest.mark.slow
def test_m4a_as_downloaded_trains_is_validated_extracted_and_scored(train, tmp_path):
    write_corpus(tmp_path / "made", suffix=".m4a")
    vox2, run = tmp_path / "vox2", tmp_path / "run"
    (vox2 / "dev").mkdir(parents=True)
    (tmp_path / "made/wav").rename(vox2 / "dev/aac")
    changed = {**FEW_STEPS, "valid_speakers": 2, "sample_rate": 8000}
    changed |= {"chunk_samples": 2320, "resample": "true", "channel": 0}
    train.main(arguments(vox2, run, **changed))
    rows = read_manifest(run / "save/train.csv")
    assert {Path(row.wav).suffix for row in rows} == {".m4a"}
    trials = f"--trial_lists={run / 'save/valid_trials.txt'}"
    recipe("extract").main([str(run), "--device=cpu", trials])
    recipe("score").main([str(run), "--bootstrap=0", trials])
    assert (run / "scores/results.json").is_file()
    # Packed, at the rate of the run, the speech is the same but for 16 bits.
    packed = tmp_path / "vox2.packed"
    recipe("prepare").main(
        ["--pack", str(vox2), str(packed), "--sample_rate=8000", "--resample=true"]
    )
    for row in rows:
        given = {"sample_rate": 8000, "resample": True}
        wav = read_audio(row.wav, **given)
        again = read_audio(packed / Path(row.wav).relative_to(vox2), **given)
        assert len(wav) == row.samples
        assert (wav - again).abs().max() <= 2**-15
