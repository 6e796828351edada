"""Steps whose gradient is not finite, files that are lost, and what an epoch counts."""

import json
import math

import pytest
import torch

from speechbrain_rev.compression import ActivationCompression
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.reversible.monitor import (
    StreamWarning,
    take_differences,
    warn_of_difference,
)
from speechbrain_rev.training import Tally
from speechbrain_rev.training.steps import drop_later_lines
from tests.unit.training.conftest import NoiseBrain


@pytest.mark.parametrize(
    ("bad", "accumulated", "lines", "skipped"),
    [
        ({(1, 2)}, 1, [(1, 2, 4)], [1, 0]),
        # All batches of the step are named.
        ({(1, 1)}, 2, [(1, 2, 8)], [1, 0]),
        # Of four batches three make a step; the fourth is dropped, and its statistics.
        ({(1, 4), (2, 1)}, 3, [(1, 4, 4), (2, 3, 12)], [1, 1]),
    ],
)
def test_bad_batches_cost_their_step_and_nothing_else(
    train, bad, accumulated, lines, skipped
):
    brain = train(bad=bad, grad_accumulation_factor=accumulated)
    # Running means and variances are among them.
    assert all(value.isfinite().all() for value in brain.modules.state_dict().values())
    assert [row["skipped_steps"] for row in brain.rows("train_log.jsonl")] == skipped
    skips = brain.rows("skipped.jsonl")
    assert [
        (one["epoch"], one["step"], len(one["utterances"])) for one in skips
    ] == lines
    assert {one["rank"] for one in skips} == {0}
    known = set(map(brain.train_dataset.path_of, range(16)))
    assert all(set(one["utterances"]) <= known for one in skips)


def test_compile_is_refused(noise_run):
    with pytest.raises(
        ValueError, match="trains chains and recomputed blocks no faster"
    ):
        noise_run(NoiseBrain, compile=True)


def test_weights_and_statistics_are_those_before_the_step(train):
    changed = {}

    class Watching(NoiseBrain):
        def fit_batch(self, batch):
            before = {n: v.clone() for n, v in self.modules.state_dict().items()}
            loss = super().fit_batch(batch)
            place = self.hparams.epoch_counter.current, self.step
            changed[place] = any(
                value.is_floating_point() and not torch.equal(value, before[name])
                for name, value in self.modules.state_dict().items()
            )
            return loss

    bad = {(1, 1), (1, 3)}
    train(Watching, bad=bad)
    assert changed == {(e, s): (e, s) not in bad for e in (1, 2) for s in (1, 2, 3, 4)}


def test_too_many_bad_steps_end_training_and_name_the_speech(noise_run, train):
    with pytest.raises(ValueError, match=r"3 steps of epoch 1.*patience=2.*skipped\.j"):
        train(bad={(1, 1), (1, 2), (1, 3)}, nonfinite_patience=2)
    assert len(noise_run().rows("skipped.jsonl")) == 3


def test_gradients_of_all_groups_are_clipped_together(train):
    norms = []

    class Grouped(NoiseBrain):
        def init_optimizers(self):
            super().init_optimizers()
            first, *others = self.modules.parameters()
            groups = [{"params": [first]}, {"params": others}]
            self.optimizer = torch.optim.SGD(groups, lr=0.1)
            self.optimizer.register_step_pre_hook(self.look)

        def look(self, optimizer, *_):
            grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
            norms.append(float(torch.nn.utils.get_total_norm(grads)))

    train(Grouped, max_grad_norm=0.01)
    assert norms == pytest.approx([0.01] * 8, rel=1e-3)


def test_a_difference_in_a_second_run_is_logged_once(train, caplog):
    class Differing(NoiseBrain):
        def fit_batch(self, batch):
            warn_of_difference("A block differs", StreamWarning, 1)
            return super().fit_batch(batch)

    take_differences()  # of tests before
    with pytest.warns(StreamWarning, match="A block differs"):
        train(Differing)
    assert caplog.text.count("In process 0 of 1: A block differs") == 1


def test_lost_files_are_counted_and_listed(train):
    brain = train(lost={3, 5})
    assert [row["unread_files"] for row in brain.rows("train_log.jsonl")] == [2, 2]
    lines = brain.rows("unread.jsonl")
    assert [line["epoch"] for line in lines] == [1, 1, 2, 2]
    assert {line["utterance"] for line in lines} == {"speaker/3.wav", "speaker/5.wav"}
    assert {line["why"] for line in lines} == {"it is gone"}


def test_too_many_lost_files_end_training_and_name_their_list(train):
    with pytest.raises(
        ValueError, match=r"3 files of epoch 1.*max_unread: 2.*unread\."
    ):
        train(lost={3, 5, 6})


def test_no_checkpoint_holds_a_gradient_that_is_not_complete(train):
    saved = []

    class Watching(NoiseBrain):
        def _save_intra_epoch_ckpt(self):
            saved.append((self.step, self.pending))
            return super()._save_intra_epoch_ckpt()

    train(Watching, grad_accumulation_factor=2, ckpt_interval_steps=1)
    assert saved == [(2, ()), (4, ())] * 2


def test_lines_about_steps_that_are_taken_again_are_dropped(tmp_path):
    places = [(1, 4), (2, 2), (2, 3), (3, 1)]
    lines = [json.dumps({"epoch": epoch, "step": step}) for epoch, step in places]
    path = tmp_path / "skipped.jsonl"
    # The last one was cut short by a full disk.
    path.write_text("\n".join([*lines, '{"epoch": 1, "st']))
    drop_later_lines(path, (2, 2))
    assert path.read_text().splitlines() == lines[:2]
    drop_later_lines(tmp_path / "not there", (1, 1))


@pytest.mark.parametrize("values", [(2.0, 1.0, 3.0), (2.0, math.nan, 9.0)])
def test_the_largest_value_of_an_epoch_is_kept(values):
    encoder, tally = torch.nn.Module(), Tally()
    for value in values:
        encoder.largest_streams = lambda value=value: {"stage": value}
        largest = tally.read(encoder)["largest_streams"]["stage"]
    expected = math.nan if math.nan in values else max(values)
    assert largest == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("arch", "streams"),
    [("revnet57", "exact"), ("revnet57", "float"), ("resnet34", "exact")],
)
def test_streams_are_read_where_they_are_exact(arch, streams):
    tiny = {"widths": (8, 8, 8, 8), "blocks": (1, 1, 1, 1), "embedding_dim": 8}
    encoder = build_encoder(arch, streams=streams, n_mels=24, **tiny)
    encoder(torch.randn(2, 43, 24))
    wrapped = torch.nn.Module()  # as DistributedDataParallel holds what it wraps
    wrapped.module = encoder
    largest = Tally().read(wrapped).get("largest_streams", {})
    exact = arch == "revnet57" and streams == "exact"
    assert list(largest) == [f"stages.{i}.chain" for i in range(4)] * exact
    assert all(0 < value < 2**14 for value in largest.values())


def test_nothing_is_read_of_an_encoder_that_compresses_nothing():
    encoder = torch.nn.Tanh()
    encoder.compression = ActivationCompression()
    assert Tally().read(encoder) == {}
