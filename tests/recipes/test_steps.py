"""Steps whose gradient is not finite: skipped, counted, told of, and in the end too many."""

import json

import pytest
import torch

from speechbrain_rev.data import ChunkDataset
from tests.corpus import write_corpus
from tests.recipes.runs import SHORT, arguments, log, recipe, weights

#: Streams that hold NaN are warned of, too.
pytestmark = pytest.mark.filterwarnings("ignore:The streams of")

#: One epoch, or two, of four steps.
TWO_EPOCHS = {"valid_speakers": 0, "steps_per_epoch": 4}
ONE_EPOCH = SHORT | TWO_EPOCHS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture
def broken(train, monkeypatch):
    """A recipe in whose chosen steps speech turns into NaN; steps that were seen."""
    train.chosen, train.seen = set(), []

    class Broken(train.SpeakerBrain):
        def compute_forward(self, batch, stage):
            if stage == train.sb.Stage.TRAIN:
                step = self.hparams.epoch_counter.current, self.step
                train.seen.append(step)
                if step in train.chosen:
                    batch.wavs[1] = float("nan")
            return super().compute_forward(batch, stage)

    monkeypatch.setattr(train, "SpeakerBrain", Broken)
    return train


def read(folder):
    return [json.loads(line) for line in (folder / "skipped.jsonl").open()]


def test_one_bad_batch_costs_its_step_and_nothing_else(broken, data, tmp_path):
    broken.chosen.add((1, 2))
    broken.main(arguments(data, tmp_path, **TWO_EPOCHS))
    assert [line["skipped_steps"] for line in log(tmp_path)] == [1, 0]
    assert all(line["train_loss"] < 100 for line in log(tmp_path))
    # Running means and variances are among them.
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
    (line,) = read(tmp_path)
    assert (line["epoch"], line["step"], line["rank"]) == (1, 2, 0)
    assert len(line["utterances"]) == 4
    rows = (tmp_path / "save" / "train.csv").read_text()
    assert all(path in rows for path in line["utterances"])


def test_weights_and_statistics_are_those_before_the_step(broken, data, tmp_path):
    class Watching(broken.SpeakerBrain):
        def fit_batch(self, batch):
            before = {n: v.clone() for n, v in self.modules.state_dict().items()}
            loss = super().fit_batch(batch)
            changed = [
                name
                for name, value in self.modules.state_dict().items()
                if value.is_floating_point() and not torch.equal(value, before[name])
            ]
            assert bool(changed) == (broken.seen[-1] not in broken.chosen), changed
            return loss

    broken.SpeakerBrain = Watching
    broken.chosen.update({(1, 1), (1, 3)})
    broken.main(arguments(data, tmp_path, **ONE_EPOCH))
    assert [line["step"] for line in read(tmp_path)] == [1, 3]


def test_too_many_end_the_training_and_say_where_to_look(broken, data, tmp_path):
    broken.chosen.update((1, step) for step in (1, 2, 3))
    with pytest.raises(
        ValueError, match=r"3 steps of epoch 1.*patience=2.*skipped\.jsonl"
    ):
        broken.main([*arguments(data, tmp_path), "--nonfinite_patience=2"])
    assert len(read(tmp_path)) == 3


def test_with_accumulation_all_batches_of_the_step_are_named(broken, data, tmp_path):
    broken.chosen.add((1, 2))
    argv = arguments(data, tmp_path, **ONE_EPOCH)
    broken.main([*argv, "--grad_accumulation_factor=2"])
    (line,) = read(tmp_path)
    assert (line["step"], len(line["utterances"])) == (2, 8)
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


def test_gradients_of_all_groups_are_clipped_together(broken, data, tmp_path):
    norms = []

    class Grouped(broken.SpeakerBrain):
        def init_optimizers(self):
            super().init_optimizers()
            first, *others = self.modules.parameters()
            groups = [{"params": [first]}, {"params": others}]
            self.optimizer = torch.optim.SGD(groups, lr=0.1)

        def on_fit_start(self):
            super().on_fit_start()
            self.optimizer.register_step_pre_hook(self.look)

        def look(self, optimizer, *_):
            grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
            norms.append(float(torch.nn.utils.get_total_norm(grads)))

    broken.SpeakerBrain = Grouped
    argv = arguments(data, tmp_path, **ONE_EPOCH)
    broken.main([*argv, "--max_grad_norm=0.01"])
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)


@pytest.fixture
def lost(broken, tmp_path, monkeypatch):
    """A recipe in whose training some files cannot be read any more."""
    broken.lost = set()
    read = ChunkDataset._read

    def read_or_not(self, epoch, index, out):
        if index in broken.lost:
            return f"{self.path_of(index)} is gone"
        return read(self, epoch, index, out)

    monkeypatch.setattr(ChunkDataset, "_read", read_or_not)
    return broken


def test_files_that_get_lost_are_replaced_counted_and_named(lost, data, tmp_path):
    lost.lost.update({3, 5})
    lost.main(arguments(data, tmp_path))  # The sixteen files are read in each epoch.
    counts = [line["unread_files"] for line in log(tmp_path)]
    # A file that is drawn instead may be lost, too.
    assert min(counts) >= 2
    lines = [json.loads(line) for line in (tmp_path / "unread.jsonl").open()]
    assert len(lines) == sum(counts)
    for line in lines:
        assert line["why"] == f"{line['utterance']} is gone"
        assert line["epoch"] in (1, 2)
        assert 1 <= line["step"] <= 4


def test_too_many_of_them_end_the_training(lost, data, tmp_path):
    lost.lost.update({3, 5, 6})
    with pytest.raises(
        ValueError, match=r"[34] files of epoch 1.*max_unread: 2.*unread\.jsonl"
    ):
        lost.main(arguments(data, tmp_path, max_unread=2))


def test_batches_behind_the_last_step_leave_nothing_behind(broken, data, tmp_path):
    """Of four steps three make one of the optimizer; the fourth is dropped."""

    class Other(broken.SpeakerBrain):
        def compute_forward(self, batch, stage):
            outputs = super().compute_forward(batch, stage)
            if stage == broken.sb.Stage.TRAIN and broken.seen[-1] in broken.chosen:
                # As torch's own batch normalisation does; ours keeps them out.
                floats = (b for b in self.modules.buffers() if b.is_floating_point())
                next(floats).fill_(float("nan"))
            return outputs

    broken.SpeakerBrain = Other
    broken.chosen.update({(1, 4), (2, 1)})
    argv = arguments(data, tmp_path, **TWO_EPOCHS)
    broken.main([*argv, "--grad_accumulation_factor=3"])
    assert [line["skipped_steps"] for line in log(tmp_path)] == [1, 1]
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
    assert [(x["epoch"], len(x["utterances"])) for x in read(tmp_path)] == [
        (1, 4),
        (2, 12),
    ]


def test_no_checkpoint_is_made_of_a_sum_that_is_not_finished(broken, data, tmp_path):
    saved = []

    class Watching(broken.SpeakerBrain):
        def _save_intra_epoch_ckpt(self):
            saved.append((self.step, self.pending))
            return super()._save_intra_epoch_ckpt()

    broken.SpeakerBrain = Watching
    argv = arguments(data, tmp_path, ckpt_interval_steps=1, **ONE_EPOCH)
    broken.main([*argv, "--grad_accumulation_factor=2"])
    assert saved
    assert all(step % 2 == 0 and not pending for step, pending in saved)


def test_a_dry_run_tells_of_a_gradient_that_is_not_finite(broken, data, tmp_path):
    broken.chosen.update({(0, 1), (0, 2)})
    broken.main([*arguments(data, tmp_path), "--dry_run"])
    assert [line["step"] for line in read(tmp_path)] == [1, 2]


def test_what_was_told_of_steps_that_are_taken_again_is_forgotten(tmp_path):
    places = [(1, 4), (2, 2), (2, 3), (3, 1)]
    lines = [json.dumps({"epoch": epoch, "step": step}) for epoch, step in places]
    path = tmp_path / "skipped.jsonl"
    path.write_text("\n".join([*lines, '{"epoch": 1, "st']))
    steps = recipe("steps")
    steps.forget_after(path, (2, 2))
    assert path.read_text().splitlines() == lines[:2]
    steps.forget_after(tmp_path / "not there", (1, 1))


def test_a_lost_file_of_validation_costs_its_trials(broken, tmp_path, caplog):
    data, run = write_corpus(tmp_path / "corpus"), tmp_path / "run"
    argv = arguments(data, run, steps_per_epoch=2)
    recipe("prepare").main([arg for arg in argv if "device" not in arg])
    trials = (run / "save" / "valid_trials.txt").read_text().splitlines()
    lost = data / "wav" / trials[0].split()[1]
    lost.unlink()
    broken.main(argv)
    for line in log(run):
        assert line["unread_validation_files"] == 1
        assert 0 <= line["valid_eer_percent"] <= 100
    assert f"{lost.name} cannot be read as audio: there is no such file" in caplog.text
