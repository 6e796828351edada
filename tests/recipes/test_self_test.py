"""train.py --self_test: its verdict and status, its speech, and what it leaves alone."""

import re
import shutil

import pytest
import torch

from speechbrain_rev import lobes
from speechbrain_rev.data import ChunkDataset
from speechbrain_rev.planner import Plan
from tests.corpus import write_corpus, write_noise
from tests.recipes.runs import SHORT, arguments
from tests.unit.reversible.chains import in_backward

#: Whose chunk is not searched.
FEW_STEPS = SHORT | {"steps_per_epoch": 2, "chunk": "null", "embedding_dim": 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_noise(folder / "noise")
    return write_corpus(folder / "corpus")


@pytest.fixture(scope="module")
def finished(train, data, tmp_path_factory):
    """A run with checkpoints, and with a plan for more memory than it needs."""
    folder = tmp_path_factory.mktemp("finished")
    train.main(arguments(data, folder, **FEW_STEPS, memory_budget="1GB"))
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder):
    """Read all files, with the times at which they were written."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def without_data(**settings):
    """A command line that names no speech."""
    argv = arguments("", "nowhere", **FEW_STEPS | settings)
    argv = [a for a in argv if not a.startswith("--data_folder")]
    return [*argv, "--self_test"]


def test_a_run_s_own_settings_are_exact_and_its_folder_stays_as_it_is(
    train, data, folder, capsys, monkeypatch
):
    read = []

    def reading(self, places, _read=ChunkDataset.__getitems__):
        read.append(places)
        return _read(self, places)

    monkeypatch.setattr(ChunkDataset, "__getitems__", reading)
    noise = data.parent / "noise"
    before = contents(folder)
    # As it trained the first time, with modes that are not those of its plan.
    argv = arguments(data, folder, **FEW_STEPS, noise_folder=noise, mode="reconstruct")
    train.main([*argv, "--self_test"])
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
    plan = Plan.load(folder / "plan.json")
    modes = {**plan.modes, "stem": "recompute"}
    (folder / "plan.json").write_text(
        plan.to_json().replace('"stem": "store"', '"stem": "recompute"')
    )
    assert Plan.load(folder / "plan.json").modes == modes
    train.main([*arguments(data, folder, **FEW_STEPS), "--self_test"])
    output = capsys.readouterr().out
    assert f"of plan_file {folder / 'plan.json'}" in output
    assert "As configured: 1 recompute, 5 store." in output


def test_without_speech_there_is_noise_of_as_many_speakers_as_are_set(
    train, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    train.main(without_data(precision="bf16", out_n_neurons=30, verify="raise"))
    output = capsys.readouterr().out
    assert "data_folder is not given: noise of 10 speakers is in its place" in output
    assert "bf16" in output
    assert output.splitlines()[-1].startswith("Exact: ")
    # Neither output_folder nor anything else.
    assert not list(tmp_path.iterdir())
    missing = [*without_data(mode="store"), "--data_folder=/nowhere.packed"]
    train.main(missing)
    assert "/nowhere.packed, which does not exist: noise" in capsys.readouterr().out


def test_blocks_compute_something_in_the_steps_that_are_compared(train, monkeypatch):
    """Those that begin as the identity would be undone exactly by anything."""
    taken = []

    def take(self, *args, _take=train.SelfTestBrain.take):
        weights = dict(self.modules.named_parameters())
        name = "embedding_model.stages.0.chain.blocks.0.f.conv2.weight"
        taken.append(bool(weights[name].any()))
        _take(self, *args)

    monkeypatch.setattr(train.SelfTestBrain, "take", take)
    train.main([*without_data(out_n_neurons=30, mode="store"), "--self-test"])
    # Three steps and the one whose memory is counted, twice.
    assert taken == [True] * 8


class Differs(torch.nn.Module):
    """Computes something else in its second run."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return (self.function(*args) * (1.1 if in_backward() else 1)).tanh()


@pytest.mark.filterwarnings(
    "ignore:.*reconstruct:speechbrain_rev.reversible.StreamWarning"
)
def test_a_block_that_does_not_compute_the_same_twice_ends_it_with_status_1(
    train, capsys, monkeypatch
):
    def broken(self, *args, _build=lobes.SpeakerEncoder.__init__, **kwargs):
        _build(self, *args, **kwargs)
        block = self.stages[0].chain.blocks[0]
        block.f = Differs(block.f)

    monkeypatch.setattr(lobes.SpeakerEncoder, "__init__", broken)
    with pytest.raises(SystemExit) as ended:
        train.main(without_data(out_n_neurons=30))
    assert ended.value.code == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"Differs: step 1, gradient of embedding_model\.stem\.", verdict)
    assert "--mode=store" in verdict


def test_steps_beyond_the_budget_are_compared_at_half_the_batch(train, capsys):
    argv = without_data(out_n_neurons=30, n_mels=80, chunk_samples=11840)
    with pytest.raises(ValueError, match="It lacks") as error:
        train.main([*argv, "--memory_budget=0.05MB"])
    budget = f"{(error.value.needed_bytes + 20_000) / 1e6:.6f}MB"
    train.main([*argv, f"--memory_budget={budget}"])
    output = capsys.readouterr().out
    assert "memory plan: " in output
    rows = re.findall(r"^(all|as) .*\S +([124])  ", output, re.MULTILINE)
    assert rows == [("all", "2"), ("as", "2"), ("as", "4")]
    assert "more than memory_budget gives" in output
    assert output.splitlines()[-1].startswith("Exact: ")


def test_float_streams_are_not_held_to_bits(train, capsys):
    train.main(without_data(out_n_neurons=30, streams="float"))
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("Not exact by design (streams: float): relative error of")


def test_what_cannot_be_asked_together_is_refused(train, monkeypatch):
    with pytest.raises(ValueError, match="--dry_run and --self_test are given"):
        train.main([*without_data(), "--dry_run"])
    with pytest.raises(ValueError, match="pretrained_run is a_run, whose speakers"):
        train.main(without_data(pretrained_run="a_run"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="--self_test takes one process"):
        train.main(without_data())
