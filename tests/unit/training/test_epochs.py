"""Epochs: validation on trials, what is shown and logged, and a dry run."""

import itertools
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from speechbrain_rev.data import ChunkBatch
from speechbrain_rev.inference import running
from speechbrain_rev.inference.running import RepeatedShapes
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer
from speechbrain_rev.scoring import Trials
from speechbrain_rev.sizes import GIB
from speechbrain_rev.training import dry_run, epochs, progress
from speechbrain_rev.training.progress import PEAKS
from speechbrain_rev.training.steps import Tally
from tests.docs.documents import ROOT

NAMES = [f"{speaker}/{i}.wav" for speaker in "ab" for i in range(3)]


@pytest.fixture
def validated(noise_run, capsys):
    """Train with trials between utterances, of which some cannot be read."""

    def trained(unread=(), lines=None, lost=(), **run_opts):
        brain = noise_run(**run_opts)
        brain.train_dataset.lost.update(lost)
        if lines is not None:
            brain.hparams.train_logger.log_stats = lines.append
        pairs = list(itertools.combinations(NAMES, 2))
        labels = [int(one[0] == other[0]) for one, other in pairs]
        brain.valid_trials = Trials(labels, *zip(*pairs, strict=True))
        speech = {
            name: ChunkBatch(
                (torch.arange(6.0) - 5 * (name[0] == "a"))[None],
                torch.ones(1),
                torch.zeros(1),
            )
            for name in NAMES
        }
        items = [(n, "it is gone" if n in unread else one) for n, one in speech.items()]
        loader = DataLoader(items, batch_size=1, collate_fn=lambda one: one[0])
        counter = brain.hparams.epoch_counter
        brain.fit(counter, brain.train_set, loader, progressbar=False)
        return brain, capsys.readouterr().out

    return trained


@pytest.mark.parametrize(
    ("unread", "figures"),
    [
        ((), {"valid_eer_percent": 0.0}),
        (NAMES[:1], {"unread_validation_files": 1, "valid_eer_percent": 0.0}),
        (NAMES, {"unread_validation_files": 6}),
    ],
)
def test_each_epoch_is_validated_on_what_can_be_read(
    validated, unread, figures, caplog
):
    caplog.set_level(logging.WARNING, "train")
    brain, _ = validated(unread)
    rows = brain.rows("train_log.jsonl")
    assert [row["epoch"] for row in rows] == [1, 2]
    for row in rows:
        assert {k: v for k, v in row.items() if "valid" in k} == figures
        assert row["train_accuracy_percent"] == 100 * 4 / 16
        assert min(row[k] for k in ("minutes", "utterances_per_second")) > 0
    no_rate = [m for m in caplog.messages if "There is no validation EER: " in m]
    assert len(no_rate) == (2 if unread == NAMES else 0)
    lost = [m for m in caplog.messages if m.endswith("an utterance: it is gone")]
    assert len(lost) == 2 * len(unread)


@pytest.mark.parametrize("rounds", [False, True])
def test_validation_runs_lengths_that_repeat_where_lengths_choose_kernels(
    noise_run, rounds, monkeypatch
):
    if rounds:
        monkeypatch.setattr(running, "_LENGTHS_PER_OCTAVE", {"cpu": 32})
    brain, shapes = noise_run(), []
    encoder = build_encoder("revnet57", widths=(8,) * 4, blocks=(1,) * 4, n_mels=16)
    encoder.register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape))
    brain.modules["embedding_model"] = encoder.eval()
    brain.shapes = RepeatedShapes(torch.device("cpu"))
    for frames in range(129, 137):
        feats = torch.randn(1, frames, 16)
        with torch.no_grad():
            embedding = brain.embed(feats)
            # The mask of padding: sums of other grouping.
            expected = encoder(feats)
        assert embedding.shape == expected.shape
        assert (embedding - expected).norm() <= 1e-5 * expected.norm()
    taken = [shape[1] for shape in shapes[::2]]
    assert taken == ([132] * 4 + [136] * 4 if rounds else [*range(129, 137)])


def test_debugging_validates_without_eer_and_logs_nothing(validated, tmp_path):
    _, output = validated(debug=True)
    assert output.count("--debug: no EER, no log. epoch: ") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


@pytest.mark.parametrize("slow", ["the reader", "the step"])
def test_the_log_has_the_share_of_time_that_waited_for_data(
    noise_run, monkeypatch, slow
):
    """By a clock that moves only where a test lets time pass."""
    now = [0.0]
    monkeypatch.setattr(epochs.time, "monotonic", lambda: now[0])
    brain = noise_run()
    read, step = brain.train_set.collate_fn, brain.fit_batch

    def passing(function, seconds):
        def run(*arguments):
            now[0] += seconds
            return function(*arguments)

        return run

    seconds = (3.0, 1.0) if slow == "the reader" else (1.0, 3.0)
    brain.train_set.collate_fn = passing(read, seconds[0])
    monkeypatch.setattr(brain, "fit_batch", passing(step, seconds[1]))
    lines = []
    brain.hparams.train_logger.log_stats = lines.append
    brain.fit(brain.hparams.epoch_counter, brain.train_set, progressbar=False)
    share = 100 * seconds[0] / sum(seconds)
    rows = brain.rows("train_log.jsonl")
    assert [row["data_wait_percent"] for row in rows] == [share, share]
    assert [line["waited for data %"] for line in lines] == [f"{share:.2f}"] * 2


def test_a_dry_run_prints_what_training_takes_and_keeps_nothing(
    noise_run, tmp_path, capsys
):
    brain = noise_run(bad={(0, 1), (0, 2)})
    dry_run(brain, brain.train_set)
    output = capsys.readouterr().out
    assert output.startswith("4 steps per epoch, ")
    assert " for 2 epochs, without validation" in output
    assert f"Logs of each epoch: {tmp_path}/train_log.jsonl." in output
    # Gradients that are not finite are reported.
    assert [line["step"] for line in brain.rows("skipped.jsonl")] == [1, 2]
    assert not any((tmp_path / "save").iterdir())


def test_a_dry_run_counts_what_is_left_of_a_run_and_drops_no_line(
    noise_run, tmp_path, capsys
):
    first = noise_run()
    first.on_fit_start()
    first.hparams.epoch_counter.current, first.step, first.tally = 2, 3, Tally()
    first.checkpointer.save_checkpoint(end_of_epoch=False)
    later = '{"epoch": 2, "step": 4}\n'
    (tmp_path / "skipped.jsonl").write_text(later)
    brain = noise_run()
    dry_run(brain, brain.train_set)
    left = "for what is left of 2 epochs (1 done, 3 steps of the next), without"
    assert left in capsys.readouterr().out
    assert (tmp_path / "skipped.jsonl").read_text() == later


@pytest.mark.parametrize(("batch_size", "steps", "taken"), [(2, 8, 6), (8, 2, 1)])
def test_at_another_batch_an_epoch_goes_on_after_as_many_utterances(
    noise_run, tmp_path, batch_size, steps, taken
):
    first = noise_run()
    first.on_fit_start()
    # Three of four batches of 4 utterances.
    first.hparams.epoch_counter.current, first.step, first.tally = 1, 3, Tally()
    first.checkpointer.save_checkpoint(end_of_epoch=False)
    lines = [f'{{"epoch": 1, "step": {step}}}\n' for step in (3, 4)]
    (tmp_path / "skipped.jsonl").write_text("".join(lines))
    brain = noise_run(batch_size=batch_size)
    brain.on_fit_start()
    # What is left of a batch is seen again, and nothing is left out.
    assert len(brain.train_sampler) == steps
    assert brain.step == taken == 12 // batch_size
    # Lines of steps are dropped by the checkpoint's count.
    assert (tmp_path / "skipped.jsonl").read_text() == "".join(lines[:1])


@pytest.fixture
def interrupted(noise_run):
    """Train until Ctrl-C at a step of an epoch, and give its words."""

    def trained(epoch, step, **run_opts):
        brain = noise_run(**run_opts)
        fit_batch = brain.fit_batch

        def fit(batch):
            if (brain.hparams.epoch_counter.current, brain.step) == (epoch, step):
                raise KeyboardInterrupt
            return fit_batch(batch)

        brain.fit_batch = fit
        with pytest.raises(KeyboardInterrupt) as interrupt:
            brain.fit(brain.hparams.epoch_counter, brain.train_set, progressbar=False)
        return str(interrupt.value)

    return trained


ANEW = "No checkpoint yet: the same command begins anew."


@pytest.mark.parametrize(
    ("epoch", "step", "every", "words"),
    [
        (1, 3, 0, f"in epoch 1, at step 3 of it. {ANEW}"),
        (1, 4, 3, "in epoch 1, at step 4 of it. {} after step 3 of epoch 1."),
        (2, 1, 0, "in epoch 2, at step 1 of it. {} after epoch 1."),
    ],
)
def test_ctrl_c_names_where_a_run_stands_and_where_it_goes_on(
    interrupted, epoch, step, every, words
):
    shown = interrupted(epoch, step, ckpt_interval_steps=every)
    assert shown == words.format("The same command goes on")


def test_ctrl_c_in_validation_names_it(validated, monkeypatch):
    def stopped(self, batch, stage):
        raise KeyboardInterrupt

    monkeypatch.setattr(epochs.ValidatedEpochs, "evaluate_batch", stopped)
    with pytest.raises(
        KeyboardInterrupt, match=f"^in the validation of epoch 1. {ANEW}"
    ):
        validated()


def test_ctrl_c_names_what_is_wrong_with_a_checkpoint(interrupted, monkeypatch):
    def damaged(self):
        raise ValueError("The checkpoint CKPT cannot be trusted")

    monkeypatch.setattr(WholeCheckpointer, "find_checkpoint", damaged)
    words = "in epoch 1, at step 1 of it. The checkpoint CKPT cannot be trusted"
    with monkeypatch.context() as patch:
        patch.setattr(WholeCheckpointer, "recover_if_possible", lambda self: None)
        assert interrupted(1, 1) == words


def test_an_epoch_that_goes_on_names_the_step_that_its_times_begin_after(
    interrupted, train, caplog
):
    caplog.set_level(logging.INFO, "train")
    interrupted(2, 4, ckpt_interval_steps=3)
    assert not [m for m in caplog.messages if "goes on" in m]
    brain = train()
    assert "This run goes on after step 3 of epoch 2." in caplog.messages
    rows = brain.rows("train_log.jsonl")
    assert [row.get("resumed_after_step") for row in rows] == [None, 3]


def test_a_run_that_goes_on_after_an_epoch_names_it(interrupted, train, caplog):
    caplog.set_level(logging.INFO, "train")
    interrupted(2, 1)
    brain = train()
    assert "This run goes on after epoch 1." in caplog.messages
    assert "resumed_after_step" not in brain.rows("train_log.jsonl")[1]


class Figured(torch.nn.Sequential):
    """A network with figures of exact streams and of compressed activations."""

    compression = SimpleNamespace(
        records={
            "fc": SimpleNamespace(
                original_bytes=8, kept_bytes=4, error_bound=0.01, ratio=2.0
            )
        }
    )

    def largest_streams(self):
        return {"stages.0": 3.5}


@pytest.fixture
def all_figures(validated, interrupted, monkeypatch):
    """Train a run that has every figure that an epoch can have; give rows and lines."""
    monkeypatch.setattr(progress, "peak_memory", lambda _: dict.fromkeys(PEAKS, GIB))
    monkeypatch.setattr(torch.nn, "Sequential", Figured)
    interrupted(1, 4, ckpt_interval_steps=2)
    lines = []
    brain, _ = validated(NAMES[:1], lines=lines, bad={(1, 4)}, lost={0})
    return brain.rows("train_log.jsonl"), lines


def test_the_page_explains_every_column_and_key_of_the_log(all_figures):
    rows, lines = all_figures
    page = (ROOT / "recipes/VoxCeleb/README.md").read_text()
    table = page.partition("| column in `train_log.txt` |")[2].partition("\n\n")[0]
    cells = [row.split(" | ") for row in table.splitlines()[2:]]
    columns, keys = (
        {name for row in cells for name in re.findall("`(.+?)`", row[i])}
        for i in range(2)
    )
    assert keys == {key for row in rows for key in row}
    assert columns == {name for line in lines for name in line}
