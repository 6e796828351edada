"""What checkpoints of trained runs tell of gradients and optimizer states."""

import itertools
import json
import math
import random
import shutil

import numpy as np
import pytest
import torch

from speechbrain_rev.angles import angle_degrees
from speechbrain_rev.lobes.checkpointer import CHECKSUMS
from speechbrain_rev.optim.reference import dequantise, quantise
from speechbrain_rev.optim.strict import read_moments, write_moments
from speechbrain_rev.whole_files import digest_of
from tests.recipes.study import contents, copy_with, study, trained_run

angles, drift = study("measurements.angles"), study("measurements.drift")
rebuilt, state_errors = (
    study("measurements.rebuilt"),
    study("measurements.state_errors"),
)

# Each file trains its runs first.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def begun_and_run(tmp_path_factory):
    run, begun = trained_run(tmp_path_factory.mktemp("sgd"))
    return begun, run


@pytest.fixture(scope="module")
def run(begun_and_run):
    return begun_and_run[1]


@pytest.fixture
def turned(monkeypatch):
    """Turn gradients of reconstructed activations of streams in a format."""

    def turn_by(streams, turn, gradient=rebuilt.Rebuilt.gradient):
        def turned(self, batch, *, precision):
            found = gradient(self, batch, precision=precision)
            modes = {str(mode.value) for mode in self.encoder.block_modes().values()}
            planted = self.encoder.streams == streams and "reconstruct" in modes
            return turn(found) if planted else found

        monkeypatch.setattr(rebuilt.Rebuilt, "gradient", turned)

    return turn_by


def checkpoints(run):
    return rebuilt.Rebuilt.of(run, "cpu").epochs()


def test_exact_streams_turn_no_gradient_and_float_ones_and_bf16_do(run):
    rows = json.loads(json.dumps(angles.gradient_angles(run, batches=2)))
    assert [(row["epoch"], row["step"]) for row in rows[::6]] == [
        (0, 0),
        (1, 3),
        (2, 6),
    ]
    assert all(len(row["degrees"]) == 2 for row in rows)
    kinds = {(row["compared"], row["streams"], row["precision"]) for row in rows}
    assert len(kinds) == 6
    for row in rows:
        most = row["largest_degrees"]
        assert row["mean_degrees"] == pytest.approx(sum(row["degrees"]) / 2)
        if row["compared"] == "bf16 with fp32":
            assert 0.01 < most < 45
        elif row["streams"] == "exact":
            assert most == 0.0
        elif row["precision"] == "fp32":
            # Blocks begin as the identity, which rounds nothing.
            assert (most > 0) == (row["epoch"] > 0)
            assert most < 0.1


def test_a_planted_turn_of_the_gradient_is_found(run, turned):
    def by_14_degrees(gradient):
        across = torch.ones_like(gradient)
        across -= gradient * (across @ gradient) / (gradient @ gradient)
        turn = math.radians(14.0)
        across *= gradient.norm() / across.norm()
        return math.cos(turn) * gradient + math.sin(turn) * across

    turned("float", by_14_degrees)
    rows = angles.gradient_angles(run, batches=1, every=2)
    for row in rows:
        if row["compared"] == "bf16 with fp32":
            continue
        planted = 14.0 if row["streams"] == "float" else 0.0
        assert row["largest_degrees"] == pytest.approx(planted, abs=0.2)
    assert {row["epoch"] for row in rows} == {0, 2}


def test_both_formats_are_probed_at_the_weights_of_each_epoch(run, monkeypatch):
    gradient, seen = rebuilt.Rebuilt.gradient, {"exact": [], "float": []}

    def remembered(self, batch, *, precision):
        found = gradient(self, batch, precision=precision)
        if precision == "fp32" and "store" in set(self.encoder.block_modes().values()):
            seen[self.encoder.streams].append(found)
        return found

    monkeypatch.setattr(rebuilt.Rebuilt, "gradient", remembered)
    angles.gradient_angles(run, batches=1)
    assert [len(gradients) for gradients in seen.values()] == [3, 3]
    for exact, rounded in zip(*seen.values(), strict=True):
        # Exact streams are rounded to fixed-point numbers: a training's weights differ more.
        assert 0 < angle_degrees(exact, rounded) < 0.5
    epochs = seen["exact"]
    assert min(angle_degrees(*pair) for pair in itertools.pairwise(epochs)) > 1.0


def test_a_bit_that_exact_streams_turn_is_an_error(run, turned):
    def by_a_bit(gradient):
        gradient[0] = gradient[0].nextafter(torch.tensor(math.inf))
        return gradient

    turned("exact", by_a_bit)
    with pytest.raises(rebuilt.NotEqual, match="exact streams in fp32 differ"):
        angles.gradient_angles(run, batches=1)


def test_a_probe_leaves_the_run_and_random_numbers_as_they_were(run):
    before = contents(run)
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    torch_state = torch.get_rng_state()
    angles.gradient_angles(run, batches=1, every=2)
    state_errors.quantisation_errors(run)
    drift.drift(run, run)
    assert contents(run) == before
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_a_run_is_rebuilt_with_the_weights_that_it_began_with(begun_and_run):
    begun, run = begun_and_run
    found = rebuilt.Rebuilt.of(run, "cpu").modules.state_dict()
    assert found.keys() == begun.keys()
    assert all(torch.equal(found[name], begun[name]) for name in begun)


def test_an_epoch_has_its_weights_and_the_margin_of_its_time(run):
    again = rebuilt.Rebuilt.of(run, "cpu")
    margins = []
    for checkpoint in again.epochs():
        again.restore(checkpoint)
        margins.append(again.hparams["compute_cost"].margin)
        path = checkpoint.paramfiles["embedding_model"]
        kept = torch.load(path, weights_only=True)
        found = again.encoder.state_dict()
        assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert margins == [pytest.approx(0.2), pytest.approx(0.2)]
    again.hparams["lr_annealing"].margin_start_epoch = 1
    again.hparams["lr_annealing"].margin_end_epoch = 3
    again.restore(again.epochs()[0])
    assert 0 < again.hparams["compute_cost"].margin < 0.2 - 1e-6


def test_batches_are_always_the_same_and_no_two_alike(run):
    first, second = rebuilt.Rebuilt.of(run, "cpu").batches(2)
    again = rebuilt.Rebuilt.of(run, "cpu").batches(1)[0]
    assert torch.equal(first.feats, again.feats)
    assert torch.equal(first.classes, again.classes)
    assert not torch.equal(first.feats, second.feats)
    assert first.feats.shape == (4, 30, 24)
    with pytest.raises(ValueError, match=r"4 batches were asked for.* give 1 to 3"):
        rebuilt.Rebuilt.of(run, "cpu").batches(4)


def test_the_error_of_momentum_is_that_of_quantising_it(run):
    rows = json.loads(json.dumps(state_errors.quantisation_errors(run)))
    assert {row["state"] for row in rows} == {"momentum", "next step"}
    assert {row["layers"] for row in rows} == {"all", "linear"}
    for checkpoint, epoch in zip(checkpoints(run), (1, 2), strict=True):
        path = checkpoint.paramfiles["optimizer"]
        states = torch.load(path, weights_only=True)["state"].values()
        stored = [s["momentum_buffer"] for s in states]
        stored = [m for m in stored if m.numel() >= 4096]
        off = [
            dequantise(*quantise(m, **how), **how) - m
            for m in stored
            for how in [{"block_size": 256, "signed": True}]
        ]
        flat, off = (torch.cat([x.flatten() for x in xs]) for xs in (stored, off))
        (row,) = [
            row
            for row in rows
            if (row["epoch"], row["state"], row["layers"]) == (epoch, "momentum", "all")
        ]
        expected = float(off.norm() / flat.norm())
        assert row["relative_error"] == pytest.approx(expected, rel=1e-5)
        assert 1e-4 < expected < 0.05
        assert row["values"] == flat.numel()
        assert 0.3 < row["share_of_values"] < 1


def test_the_error_of_the_next_step_of_sgd_is_that_of_its_momentum(run):
    again = rebuilt.Rebuilt.of(run, "cpu")
    (batch,) = again.batches(1)
    rows = state_errors.quantisation_errors(run)
    for checkpoint in again.epochs():
        again.restore(checkpoint)
        again.modules.zero_grad()
        again.loss(batch, precision="fp32").backward()
        parameters = list(again.modules.parameters())
        torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        kept = torch.load(checkpoint.paramfiles["optimizer"], weights_only=True)
        step, off = 0.0, 0.0
        how = {"block_size": 256, "signed": True}
        for number, p in enumerate(parameters):
            if p.numel() >= 4096:
                m = kept["state"][number]["momentum_buffer"]
                error = dequantise(*quantise(m, **how), **how) - m
                off += float((0.9 * error).square().sum())
                step += float((0.9 * m + p.grad + 1e-4 * p).detach().square().sum())
        (row,) = [
            row
            for row in rows
            if (row["step"], row["state"]) == (checkpoint.meta["steps"], "next step")
            and row["layers"] == "all"
        ]
        assert row["relative_error"] == pytest.approx(math.sqrt(off / step), rel=1e-3)


def test_a_run_of_8_bit_states_is_refused(run, tmp_path):
    changed = copy_with(
        run, tmp_path / "run", "optimizer_bits: 32", "optimizer_bits: 8"
    )
    with pytest.raises(ValueError, match="states of 8 bit"):
        state_errors.quantisation_errors(changed)


def test_a_folder_without_a_run_is_refused_and_left_empty(tmp_path):
    with pytest.raises(ValueError, match="is no run that was trained"):
        angles.gradient_angles(tmp_path)
    assert not list(tmp_path.iterdir())


def test_drift_is_the_distance_of_weights(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    last = checkpoints(other)[-1]
    path = last.paramfiles["classifier"]
    state = torch.load(path, weights_only=True)
    moved = 1e-3 * torch.ones_like(state["weight"])
    torch.save({"weight": state["weight"] + moved}, path)
    sums = last.path / CHECKSUMS
    old = [line for line in sums.read_text().splitlines() if "classifier" not in line]
    new = f"{digest_of(path, 'sha256')}  {path.name}"
    sums.write_text("\n".join([*old, new]) + "\n")
    first, second = json.loads(json.dumps(drift.drift(run, other)))
    assert first == {
        "epoch": 1, "step": 3, "relative_distance": 0.0, "distance_over_way": 0.0
    }  # fmt: skip
    again = rebuilt.Rebuilt.of(run, "cpu")
    begin = [p.detach().clone() for p in again.modules.parameters()]
    again.restore(checkpoints(run)[-1])
    now = [p.detach() for p in again.modules.parameters()]
    norm = math.sqrt(sum(float(p.square().sum()) for p in now))
    way = [float((p - b).square().sum()) for p, b in zip(now, begin, strict=True)]
    distance = float(moved.norm())
    assert second["relative_distance"] == pytest.approx(distance / norm, rel=1e-4)
    over = distance / math.sqrt(sum(way))
    assert second["distance_over_way"] == pytest.approx(over, rel=1e-4)
    apart = study("measurements.of_study").distance_over_way
    assert apart(run, other) == second["distance_over_way"]
    shutil.rmtree(other / "save")
    assert apart(run, other) is None


def test_runs_that_began_otherwise_have_no_drift(run, tmp_path):
    other = copy_with(run, tmp_path / "run", "seed: 1986", "seed: 1987")
    with pytest.raises(ValueError, match=r"with seed: 1986 and .* with 1987"):
        drift.drift(run, other)


def test_a_run_that_began_with_another_one_s_weights_has_no_drift(run, tmp_path):
    began = copy_with(
        run, tmp_path / "run", "pretrained_run: null", "pretrained_run: /some/run"
    )
    with pytest.raises(ValueError, match=r"began with the weights of /some/run"):
        drift.drift(began, began)


def test_a_run_of_a_vanilla_encoder_has_nothing_to_reconstruct(tmp_path):
    run, _ = trained_run(tmp_path, arch="resnet34", blocks="[1, 1, 1, 1]")
    with pytest.raises(ValueError, match="run of resnet34, which has no reversible"):
        angles.gradient_angles(run)


def test_the_update_of_adamw_is_that_of_what_is_read_back(tmp_path):
    run, _ = trained_run(tmp_path, optimizer_name="adamw", lr=1e-3, final_lr=1e-5)
    rows = state_errors.quantisation_errors(run)
    assert {row["state"] for row in rows} == {
        "first moment", "second moment", "update", "next step"
    }  # fmt: skip
    for checkpoint in checkpoints(run):
        kept = torch.load(checkpoint.paramfiles["optimizer"], weights_only=True)
        updates, off = [], []
        for state in kept["state"].values():
            if state["exp_avg"].numel() < 4096:
                continue
            moments = [state["exp_avg"], state["exp_avg_sq"]]
            both = []
            for m, v in (moments, read_moments(write_moments(moments))):
                steps = float(state["step"])
                m, square = m / (1 - 0.9**steps), v / (1 - 0.999**steps)
                both.append(m / (square.sqrt() + 1e-8))
            updates.append(both[0].flatten())
            off.append((both[1] - both[0]).flatten())
        by_state = {
            row["state"]: row
            for row in rows
            if row["layers"] == "all" and row["step"] == checkpoint.meta["steps"]
        }
        expected = float(torch.cat(off).norm() / torch.cat(updates).norm())
        row = by_state["update"]
        assert row["relative_error"] == pytest.approx(expected, rel=1e-4)
        row = by_state["second moment"]
        assert row["share_read_as_zero"] == 0
