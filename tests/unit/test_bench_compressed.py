"""The benchmarks of compressed activations: what they compare, refuse and say."""

import functools
import json

import pytest
import torch
from torch.utils._pytree import tree_leaves

from speechbrain_rev.compression import ActivationCompression, GradientBound, encode
from tests.benchmarks import __main__ as command
from tests.benchmarks import (
    compressed,
    compressed_bounds,
    compressed_checks,
    compressed_tables,
    compressed_targets,
    compressed_training,
    compressed_ways,
    tables,
)
from tests.benchmarks.compressed_training import COMPRESSED, NUDGED, PLAIN, Run
from tests.benchmarks.harness import NotEqual, Result
from tests.corpus import write_corpus

CPU = torch.device("cpu")
ROW = {"widths": (8, 8, 8, 8), "blocks": (1, 1, 1, 1)}
FOUR = (compressed_training, compressed, compressed_bounds, compressed_targets)


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """A folder in minivox's layout, with synthetic voices."""
    root = tmp_path_factory.mktemp("speech")
    minivox = write_corpus(root / "minivox", speakers=3, seconds=1.2)
    files = sorted((minivox / "wav").glob("*/*/*"))
    lines = [f"{f.parts[-3]} {f.relative_to(minivox / 'wav')}" for f in files]
    (minivox / "train_list.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compressed_checks.FOLDER, str(root))
        yield root


@pytest.fixture(scope="module")
def folder(speech, tmp_path_factory):
    """What trainings of two seeds left, and their result."""
    setting = compressed_training.Setting(
        folder=tmp_path_factory.mktemp("runs"),
        batch=2,
        frames=48,
        steps=4,
        last=2,
        seeds=(1, 2),
        row=ROW,
    )
    return setting, compressed_training.run(CPU, setting)


def test_trainings_of_a_seed_begin_alike_and_are_compared(folder):
    _, result = folder
    rows = {(row["seed"], row["way"]): row for row in result.rows}
    assert len(rows) == 6
    for seed in (1, 2):
        plain, ours = rows[seed, PLAIN], rows[seed, COMPRESSED]
        assert plain["first loss"] == ours["first loss"]
        assert ours["loss"] == pytest.approx(plain["loss"], rel=0.1)
        assert ours["times the baseline"] == ours["loss"] / plain["loss"]
        assert ours["bounds"].keys() >= {"stages.0.blocks.0.conv1"}
        assert min(ours["ratios"].values()) > 1
    assert rows[1, PLAIN]["loss"] != rows[2, PLAIN]["loss"]
    assert "zeros and signs kept" in result.correctness


def test_a_finished_run_is_kept_and_another_setting_is_run(folder):
    setting, _ = folder
    file = setting.folder / "plain_1.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"losses": [7.0] * 4}))
    again = functools.partial(compressed_training.trained, PLAIN, 1)
    assert again(None, setting).losses == [7.0] * 4
    file.write_text(json.dumps(kept | {"setting": {}}))
    voices = compressed_checks.real_speech(80, 48)
    assert again(voices, setting).losses == kept["losses"]


def run_of(way, seed, losses):
    return Run(way, seed, {}, losses, 1.0, {}, {})


def test_the_verdict_is_of_the_worst_seed():
    setting = compressed_training.Setting(last=2)
    runs = [
        run_of(PLAIN, 1, [9.0, 2.0, 2.0]),
        run_of(COMPRESSED, 1, [0.0, 2.0, 2.02]),
        run_of(NUDGED, 1, [0.0, 2.0, 2.0]),
    ]
    rows = compressed_training.rows_of(runs, setting)
    told = compressed_training.verdict(rows)
    assert "at most 0.50 % from stored ones (mean +0.50 %), which is within" in told
    runs += [run_of(PLAIN, 2, [2.0, 2.0]), run_of(COMPRESSED, 2, [2.0, 1.9])]
    told = compressed_training.verdict(compressed_training.rows_of(runs, setting))
    assert "at most 2.50 % from stored ones (mean -1.00 %), which is NOT within" in told


@pytest.mark.slow
def test_all_ways_take_the_same_step(folder, tmp_path):
    setting, _ = folder
    network = compressed.Network(
        "resnet34", ("revnet57",), 2, 1, setting.folder / "plain_1.pt", row=ROW
    )
    result = compressed.run(CPU, compressed.Setting((network,), 64, repeats=2))
    rows = {row["way"]: row for row in result.rows}
    assert rows.pop("plain")["held fewer"] == 1
    for words in ("torch checkpoint", "reconstruct, exact"):
        assert rows.pop(words)["gradient error"] < 1e-4
    assert all(row["held fewer"] > 1.5 for row in rows.values())
    assert all(0 < row["gradient error"] < 1 for row in rows.values())
    fine, coarse = (rows[f"compressed, {f} of range"] for f in ("1e-3", "1e-2"))
    assert fine["held GB"] > coarse["held GB"]
    assert fine["gradient error"] < coarse["gradient error"]
    result.save(tmp_path, CPU)


@pytest.mark.parametrize("held", [4.9, 5.0])
def test_what_is_missed_is_said(held):
    row = {
        "encoder": "resnet34",
        "way": "compressed, 1e-3 of range",
        "held fewer": held,
        "peak lower": 4.0,
    }
    told = compressed.verdict([row, row | {"way": "bf16"}])
    assert told.startswith(
        f"resnet34 compressed, 1e-3 of range: held fewer {held:.2f} times"
    )
    assert ("MISSED" in told) == (held < 5)


@pytest.mark.slow
def test_bounds_are_measured_by_what_they_do_to_gradients(folder):
    setting, _ = folder
    given = compressed_bounds.Setting(
        state=setting.folder / "plain_1.pt", batch=2, frames=100, row=ROW
    )
    result = compressed_bounds.run(CPU, given)
    forms = {row["rule"].split()[-1]: row for row in result.rows[:3]}
    assert 0.8 < forms["derived"]["deviation / sigma"] < 1.2
    assert forms["paper-mean"]["least"] > 5
    rules = {row["rule"]: row for row in result.rows[3:]}
    fine, coarse = rules["deviation 0.001"], rules["deviation 0.03"]
    assert fine["inputs smaller"] < coarse["inputs smaller"]
    assert 10 * fine["handed down"] < coarse["handed down"]


@pytest.mark.slow
def test_a_training_goes_on_with_each_target(folder, tmp_path):
    setting, _ = folder
    given = compressed_targets.Setting(
        state=setting.folder / "plain_1.pt",
        batch=2,
        frames=48,
        steps=26,
        last=2,
        targets=(0.01, 0.05),
        row=ROW,
    )
    result = compressed_targets.run(CPU, given)
    base, fine, coarse = result.rows
    assert base["times the baseline"] == 1
    assert fine["losses"]["of each step"][0] == base["losses"]["of each step"][0]
    assert fine["inputs smaller"] < coarse["inputs smaller"]
    result.save(tmp_path, CPU)
    compressed_targets.draw(result, tmp_path / "targets.png")
    assert (tmp_path / "targets.png").read_bytes().startswith(b"\x89PNG")


def test_a_state_stays_when_a_training_goes_on_from_it(folder):
    setting, _ = folder
    file = setting.folder / "plain_1.pt"
    given = compressed_targets.Setting(batch=2, frames=48, steps=2, row=ROW)
    speech = compressed_checks.real_speech(compressed_training.N_MELS, given.frames)
    state = compressed_ways.read_state(file)
    compressed_targets.continued(None, speech, state, given)
    found, kept = (
        [x for x in tree_leaves(each) if isinstance(x, torch.Tensor)]
        for each in (state, compressed_ways.read_state(file))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))


def test_the_weights_that_bounds_are_made_for_stay(folder):
    setting, _ = folder
    state = compressed_ways.trained(
        "resnet34", batch=2, frames=64, state=setting.folder / "plain_1.pt", **ROW
    )
    training = state.build(compressed_ways.compressed("resnet34", "", "derived", None))
    for name, weight in training.encoder.named_parameters():
        assert torch.equal(weight, state.state["encoder"][name])
    rule = training.encoder.compression.rules["convolution"]
    assert isinstance(rule, GradientBound)
    assert rule.bounds


@pytest.mark.parametrize("wrong", ["more", "zero"])
def test_what_is_not_within_its_bound_ends_the_run(wrong):
    x = torch.randn(8, 32).relu()
    compressed_x = encode(x, 0.1)
    assert compressed_checks.checked_error("conv", x, compressed_x) <= 1
    other = x + 0.3 * (x > 0) if wrong == "more" else x * (x > 0.5)
    with pytest.raises(NotEqual, match=r"conv (is off by|has other zeros)"):
        compressed_checks.checked_error("conv", other, compressed_x)


def test_an_audit_leaves_the_rules_and_the_compression():
    encoder = compressed_training.build_encoder("resnet34", mode="compress", **ROW)
    own = encoder.compression
    with compressed_checks.audited(encoder) as audit:
        encoder(torch.randn(2, 48, 80)).square().sum().backward()
    assert audit.tensors > 10
    assert 0 < audit.largest <= 1
    assert encoder.compression is own
    assert type(own) is ActivationCompression


@pytest.mark.parametrize("module", FOUR)
def test_without_speech_it_is_said_what_is_missing(module, monkeypatch):
    monkeypatch.delenv(compressed_checks.FOLDER, raising=False)
    with pytest.raises(NotEqual, match=r"names no folder with minivox"):
        compressed_checks.real_speech(80, 48)
    name = module.__name__.split(".")[-1]
    assert command.BY_NAME[name] is module.run
    with pytest.raises(ValueError, match="cuda was asked for"):
        module.run(torch.device("cuda"))


def test_without_a_trained_state_it_is_said_how_to_make_one(tmp_path):
    with pytest.raises(NotEqual, match="run --only compressed_training first"):
        compressed_ways.read_state(tmp_path / "none.pt")


def test_the_readme_shows_a_row_for_each_seed(tmp_path, monkeypatch):
    setting = compressed_training.Setting(last=1)
    runs = [run_of(PLAIN, 1, [2.0]), run_of(COMPRESSED, 1, [2.01])]
    rows = compressed_training.rows_of(runs, setting)
    Result("compressed_training", "", "setting", rows, "ok").save(tmp_path, CPU)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    heads, _, line = compressed_tables.compressed_training().splitlines()[:3]
    assert heads.split() == [
        "|",
        "seed",
        "|",
        "plain",
        "|",
        "compressed",
        "|",
        "compressed:",
        "times",
        "plain",
        "|",
    ]
    assert line.split() == ["|", "1", "|", "2.000", "|", "2.010", "|", "1.0050", "|"]
