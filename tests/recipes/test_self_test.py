"""train.py --self_test: its verdict and status, its speech, and what it leaves alone."""

import re
import shutil

import pytest
import torch

from speechbrain_rev import lobes
from speechbrain_rev.data import ChunkDataset
from speechbrain_rev.planner import Plan
from tests.recipes.runs import FEW_STEPS, arguments, contents
from tests.unit.reversible.chains import in_backward

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def planned(train, data, tmp_path_factory):
    """A run with checkpoints, and with a plan for more memory than it needs."""
    folder = tmp_path_factory.mktemp("planned")
    train.main(arguments(data, folder, **FEW_STEPS, memory_budget="1GB"))
    return folder


@pytest.fixture
def folder(planned, tmp_path):
    return shutil.copytree(planned, tmp_path / "run")


@pytest.fixture
def noise_test(train, capsys):
    """Run a self-test that names no speech, of ten speakers; returns the output."""

    def main(*options, **settings):
        given = {**FEW_STEPS, "embedding_dim": 32, "out_n_neurons": 30, **settings}
        argv = arguments("", "nowhere", **given)
        named = [a for a in argv if a != "--data_folder="]
        try:
            train.main([*named, *(options or ["--self_test"])])
        finally:
            output = capsys.readouterr().out
            main.verdict = (output.splitlines() or [""])[-1]
        return output

    return main


def test_a_run_s_settings_are_exact_on_its_speech_and_its_folder_stays_as_it_is(
    train, data, folder, capsys, monkeypatch
):
    read = []

    def reading(self, places, _read=ChunkDataset.__getitems__):
        read.append(places)
        return _read(self, places)

    monkeypatch.setattr(ChunkDataset, "__getitems__", reading)
    noise = data.parent / "noise"
    before = contents(folder)
    # Neither its modes nor its data must be those that it trained with.
    changed = {"noise_folder": noise, "mode": "reconstruct", "seed": 7}
    train.main([*arguments(data, folder, **FEW_STEPS, **changed), "--self_test"])
    output = capsys.readouterr().out
    assert contents(folder) == before
    assert output.splitlines()[-1].startswith("Exact: 3 steps as configured have the")
    assert "Training: 24 utterances of 6 speakers" in output
    assert f"Noise: 2 files in {noise}" in output
    assert re.search(r"^as configured +4 ", output, re.MULTILINE)
    assert "As configured: 4 recompute, 2 reconstruct." in output
    assert [len(places) for places in read] == [4, 4, 4]


def test_a_run_that_goes_on_is_tested_with_the_plan_that_it_keeps(
    train, data, folder, capsys
):
    path = folder / "plan.json"
    path.write_text(path.read_text().replace('"stem": "store"', '"stem": "recompute"'))
    assert Plan.load(path).modes["stem"] == "recompute"
    train.main([*arguments(data, folder, **FEW_STEPS), "--self-test"])
    output = capsys.readouterr().out
    assert f"of plan_file {path}" in output
    assert "As configured: 1 recompute, 5 store." in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"precision": "bf16", "verify": "raise"},
            "not given: noise of 10 speakers is",
        ),
        (
            {"mode": "store", "data_folder": "/nowhere.packed"},
            "/nowhere.packed, which does not exist: noise of 10 speakers is",
        ),
    ],
)
def test_without_speech_there_is_noise_of_as_many_speakers_as_are_set(
    train, noise_test, tmp_path, monkeypatch, settings, words
):
    """Blocks that begin as the identity would be reconstructed exactly by anything."""
    begins = []

    def take(self, *args, _take=train.SelfTestBrain.take):
        weights = dict(self.modules.named_parameters())
        name = "embedding_model.stages.0.chain.blocks.0.f.conv2.weight"
        begins.append(bool(weights[name].any()))
        _take(self, *args)

    monkeypatch.setattr(train.SelfTestBrain, "take", take)
    monkeypatch.chdir(tmp_path)
    output = noise_test(**settings)
    assert f"data_folder is {words} in its place" in output
    assert settings.get("precision", "fp32") in output
    assert noise_test.verdict.startswith("Exact: ")
    # Three steps and the one whose memory is counted, twice.
    assert begins == [True] * 8
    # Neither output_folder nor anything else.
    assert not list(tmp_path.iterdir())


class Differs(torch.nn.Module):
    """Computes something else in its second run."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return (self.function(*args) * (1.1 if in_backward() else 1)).tanh()


@pytest.mark.filterwarnings(
    "ignore:.*reconstruct:speechbrain_rev.reversible.StreamWarning",
    "ignore::speechbrain_rev.reversible.comparison.RecomputeWarning",
)
def test_a_block_that_does_not_compute_the_same_twice_ends_it_with_status_1(
    noise_test, monkeypatch
):
    def broken(self, *args, _build=lobes.SpeakerEncoder.__init__, **kwargs):
        _build(self, *args, **kwargs)
        block = self.stages[0].chain.blocks[0]
        block.f = Differs(block.f)

    monkeypatch.setattr(lobes.SpeakerEncoder, "__init__", broken)
    with pytest.raises(SystemExit) as ended:
        noise_test()
    assert ended.value.code == 1
    verdict = r"Differs: step 1, gradient of embedding_model\.stem\..*--mode=store"
    assert re.match(verdict, noise_test.verdict)


@pytest.mark.slow(drawn=False)
def test_steps_beyond_the_budget_are_compared_at_half_the_batch(noise_test):
    wide = {"n_mels": 80, "chunk_samples": 11840}
    with pytest.raises(ValueError, match="It lacks") as error:
        noise_test(**wide, memory_budget="0.05MB")
    output = noise_test(**wide, memory_budget=f"{error.value.needed_bytes + 20_000}B")
    assert "memory plan: " in output
    rows = re.findall(r"^(all|as) .*\S +([124])  ", output, re.MULTILINE)
    assert rows == [("all", "2"), ("as", "2"), ("as", "4")]
    assert "more than memory_budget gives" in output
    assert noise_test.verdict.startswith("Exact: ")


def test_what_cannot_be_asked_together_is_refused(noise_test, monkeypatch):
    with pytest.raises(ValueError, match="--dry_run and --self_test are given"):
        noise_test("--self_test", "--dry_run")
    with pytest.raises(ValueError, match="pretrained_run is a_run, whose speakers"):
        noise_test(pretrained_run="a_run")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="--self_test takes one process"):
        noise_test()
