"""Files that earlier versions wrote are read, resumed and give what they gave."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import yaml

from speechbrain_rev.cli import main
from speechbrain_rev.inference import (
    EmbeddingArchive,
    EnrolledSpeaker,
    SpeakerEmbedder,
    read_cohort,
)
from speechbrain_rev.inference.wespeaker import convert_from_wespeaker
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer, verify_checkpoint
from speechbrain_rev.planner import Plan, Profile
from speechbrain_rev.planner.timing import Speed
from speechbrain_rev.reversible import Mode
from speechbrain_rev.speech import read_audio
from tests.compatibility import make
from tests.compatibility.plans import PLANS

ARCHIVES = sorted(Path(__file__).parent.glob("*.tar.xz"))
INTERRUPTED = [name for name, (_, killed) in make.RUNS.items() if killed]
#: Of embeddings and scores, whose sums other processors make in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
#: Of weights and losses after some steps, likewise.
TRAINED_CLOSE = 1e-3
#: What may differ between machines and versions, in what subcommands print.
UNCOMPARED = {"counted_with", "sources"}


def test_there_is_an_archive():
    assert ARCHIVES


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name)
def kept(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(request.param) as file:
        file.extractall(folder, filter="data")
    return folder


@pytest.fixture
def copied(kept, tmp_path):
    """The files, for tests that change them."""
    return shutil.copytree(kept, tmp_path / "copied")


@pytest.fixture(scope="module")
def expected(kept):
    return json.loads((kept / make.EXPECTED).read_text())


@pytest.fixture(scope="module")
def same_arithmetic(kept, expected):
    """Whether this machine computes to the bit what the one that recorded did."""
    return make.arithmetic_here(kept) == expected["arithmetic"]


def checkpoints(run):
    return WholeCheckpointer(run / "save").list_checkpoints()


@pytest.mark.parametrize("name", make.RUNS)
def test_checkpoints_are_whole_and_of_the_expected_moment(kept, name):
    (found,) = checkpoints(kept / name)
    verify_checkpoint(found)
    assert found.meta["end-of-epoch"] == (name == make.FINISHED)


@pytest.mark.parametrize(
    ("name", "states"),
    [
        (make.FINISHED, {torch.uint8, torch.float32}),
        ("mid_epoch_sgd_8bit", {torch.uint8, torch.float32}),
        ("mid_epoch_adamw_32bit", {torch.float32}),
    ],
)
def test_optimizer_checkpoints_have_the_bits_they_were_made_with(kept, name, states):
    (found,) = checkpoints(kept / name)
    saved = torch.load(found.paramfiles["optimizer"], weights_only=True)
    assert {t.dtype for t in tensors_in(saved["state"]) if t.numel() > 1} == states


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_run_resumes_to_the_recorded_weights(
    copied, expected, same_arithmetic, name
):
    run, recorded = copied / name, expected["runs"][name]
    make.train(copied, name, name)
    losses = make.losses_of(run)
    assert losses == pytest.approx(recorded["losses"], rel=TRAINED_CLOSE)
    if same_arithmetic:
        assert make.digest(make.weights_of(run)) == recorded["weights"]
        assert losses == recorded["losses"]


def test_a_finished_run_is_what_was_recorded_and_stays_so(copied, expected):
    run, recorded = copied / make.FINISHED, expected["runs"][make.FINISHED]
    assert make.digest(make.weights_of(run)) == recorded["weights"]
    make.train(copied, make.FINISHED, make.FINISHED)
    assert make.digest(make.weights_of(run)) == recorded["weights"]
    assert make.losses_of(run) == recorded["losses"]


def test_models_give_the_recorded_embeddings_and_scores(kept, expected):
    for name, found in make.heard(kept).items():
        for what, value in expected["heard"][name].items():
            np.testing.assert_allclose(found[what], value, err_msg=f"{name}", **CLOSE)


def test_a_graph_gives_the_embeddings_of_its_run(kept, expected):
    session = onnxruntime.InferenceSession(kept / "model.onnx")
    recorded = expected["heard"][make.FINISHED]["embeddings"]
    for name, row in zip(make.HEARD, recorded, strict=True):
        wav = read_audio(kept / "corpus" / "wav" / name, sample_rate=16000)
        given = {"waveforms": wav[None].numpy(), "samples": np.array([len(wav)])}
        (found,) = session.run(["embeddings"], given)
        np.testing.assert_allclose(found.squeeze(), row, **CLOSE)


def test_wespeaker_s_weights_are_converted_to_the_same_run(kept, tmp_path):
    convert_from_wespeaker(kept / "avg_model.pt", tmp_path / "converted")
    converted, before = (
        make.weights_of(run)
        for run in (tmp_path / "converted", kept / "converted_wespeaker")
    )
    assert make.digest(converted) == make.digest(before)


def test_archives_of_embeddings_hold_what_the_model_gives(kept, expected):
    recorded = expected["heard"][make.FINISHED]["embeddings"][0]
    embedder = SpeakerEmbedder.from_run(kept / make.FINISHED)
    for name in ("embeddings.npz", "embeddings.parquet"):
        archive = EmbeddingArchive.load(kept / name)
        assert archive.names == ("s01/00001.flac", "s02/00001.flac")
        assert archive.fingerprint == embedder.fingerprint
        np.testing.assert_allclose(archive.embeddings[0], recorded, **CLOSE)


def test_an_enrolled_speaker_is_known_to_the_run_and_to_the_exported_model(
    kept, expected
):
    speaker = EnrolledSpeaker.load(kept / "spk003.safetensors")
    other = kept / "corpus" / "wav" / make.HEARD[1]
    for load, name in (
        (SpeakerEmbedder.from_run, make.FINISHED),
        (SpeakerEmbedder.from_hparams, "model"),
    ):
        score = load(kept / name).verify(speaker, other).score
        assert score == pytest.approx(expected["heard"][name]["cosine"], abs=1e-4)


def test_cohort_and_thresholds_travel_with_the_exported_model(kept):
    run, model = (read_cohort(kept / name) for name in (make.FINISHED, "model"))
    np.testing.assert_array_equal(run.means, model.means)
    assert (run.top_n, run.fingerprint) == (model.top_n, model.fingerprint)
    known = SpeakerEmbedder.from_hparams(kept / "model").thresholds.known
    assert {(one.name, one.normalisation) for one in known} >= {
        ("trials", "cosine"),
        ("trials", "as_norm"),
    }
    assert known == SpeakerEmbedder.from_run(kept / make.FINISHED).thresholds.known


def test_a_packed_folder_has_the_samples_of_its_files(kept):
    for name in ("s01/00001.flac", "s02/00001.flac"):
        packed, file = (
            read_audio(kept / folder / name, sample_rate=16000)
            for folder in ("spk003.packed", "corpus/wav/spk003")
        )
        assert len(packed) > 8000
        assert torch.equal(packed, file)


def test_plan_profile_and_speed_are_read(kept):
    saved = Plan.load(kept / "plan.json")
    assert set(saved.modes.values()) == {"store", "recompute"}
    profile = Profile.from_json((kept / "profile.json").read_text())
    stored = profile.uniform(Mode.STORE)
    lighter = profile.fastest(profile.peak_bytes(stored) * 3 // 4)
    assert profile.peak_bytes(lighter) <= profile.peak_bytes(stored) * 3 // 4
    speed = Speed.from_json((kept / "speed.json").read_text())
    assert speed.flops_per_second > 1e8


def test_a_run_keeps_the_plan_of_its_budget(kept):
    saved = Plan.load(kept / "mid_epoch_sgd_8bit" / "plan.json")
    assert saved.about["memory_budget"] == "0.5MB"
    assert len(set(saved.modes.values())) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_what_was_planned_is_planned_as_well_today(kept, name):
    before, today = Plan.load(kept / "plans" / f"{name}.json"), PLANS[name]()
    assert today.budget_bytes == before.budget_bytes
    assert today.measured_bytes <= today.budget_bytes
    assert today.measured_gradient_error <= before.measured_gradient_error * 1.001
    # Times are estimated from counts of operations, which machines agree about.
    assert today.seconds <= before.seconds * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", make.COMMANDS)
def test_subcommands_print_the_recorded_figures(kept, capsys, name):
    main([*make.COMMANDS[name], "--json"])
    printed = json.loads(capsys.readouterr().out)
    recorded = json.loads((kept / "json" / f"{name}.json").read_text())
    assert _figures(printed) == _figures(recorded)


def _figures(document):
    """Leave out versions and explanations, and the last digits of floats."""
    if isinstance(document, dict):
        kept = document.keys() - UNCOMPARED
        return {name: _figures(document[name]) for name in kept}
    if isinstance(document, list):
        return [_figures(value) for value in document]
    return float(f"{document:.9g}") if isinstance(document, float) else document


def test_settings_of_a_run_are_plain_yaml_without_paths_of_a_machine(kept):
    for name in make.RUNS:
        text = (kept / name / "hyperparams.yaml").read_text()
        assert "data_folder: corpus" in text
        assert yaml.compose(text) is not None


def test_a_copy_elsewhere_is_as_good(kept, expected, tmp_path):
    shutil.copytree(kept / "model", tmp_path / "moved")
    files = [kept / "corpus" / "wav" / name for name in make.HEARD]
    score = SpeakerEmbedder.from_hparams(tmp_path / "moved").verify(*files).score
    assert score == pytest.approx(expected["heard"]["model"]["cosine"], abs=1e-4)
