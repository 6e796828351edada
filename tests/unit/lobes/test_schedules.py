"""Learning rates and margins of each step, kept and resumed."""

import warnings

import pytest
import torch
from speechbrain.nnet.losses import AdditiveAngularMargin, LogSoftmaxWrapper

from speechbrain_rev.data.seeding import write_step
from speechbrain_rev.lobes.classifier import AAMSoftmax
from speechbrain_rev.lobes.schedules import SpeakerSchedule

SGD = {
    "lr": 0.1, "final_lr": 5e-5, "number_of_epochs": 150, "warmup_epochs": 6,
    "steps_per_epoch": 100, "margin_start_epoch": 20, "margin_end_epoch": 40,
}  # fmt: skip


def schedule(**changed):
    return SpeakerSchedule(**{**SGD, **changed})


def any_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


#: Epochs, their rates of learning, and their margins.
EPOCHS = [
    (0.01, 0.1 / 600, None),  # the first step is not lost at a rate of 0
    (1, None, 0.0),
    (3, 0.05, None),
    (6, 0.1, None),
    (20, None, 0.0),
    (30, None, 0.2 * (1 - 1e-3**0.5)),
    (40, None, 0.2),
    (6 + 72, (0.1 * 5e-5) ** 0.5, 0.2),  # half way: the geometric mean
    (150, 5e-5, 0.2),
    (200, 5e-5, 0.2),
]


@pytest.mark.parametrize(("epoch", "lr", "margin"), EPOCHS)
def test_the_rate_rises_linearly_then_falls_and_the_margin_rises(epoch, lr, margin):
    step = round(epoch * 100)
    if lr is not None:
        # A step's rate: the warm-up counts the step itself, the decay those before it.
        index = step - 1 if epoch < 6 else step
        assert schedule().learning_rate(index) == pytest.approx(lr)
        larger = schedule(batch_size=256).learning_rate(index)
        assert larger == pytest.approx(4 * lr)
    if margin is not None:
        # Epoch 1 begins at step 0.
        assert schedule().margin_at(step - 100) == pytest.approx(margin)


#: Changed settings, and what is said of the margin.
WORDS = [
    ({}, "rises from epoch 20 on, 0.2 from epoch 40 on"),
    ({"margin_start_epoch": 0, "margin_end_epoch": 0}, "0.2 from the first step on"),
    ({"margin_start_epoch": 0, "margin_end_epoch": 1}, "0.2 from the first step on"),
    (
        {"margin_start_epoch": 0, "margin_end_epoch": 5},
        "rises from the first step on, 0.2 from epoch 5 on",
    ),
    (
        {"number_of_epochs": 20},
        "rises from epoch 20 on, but this run ends at 20, before it is 0.2 at epoch 40",
    ),
    (
        {"number_of_epochs": 19},
        "0 throughout, since it would rise from epoch 20 on, and this run ends at 19",
    ),
    (
        {"number_of_epochs": 14},
        "0 throughout, since it would rise from epoch 20 on, and this run ends at 14",
    ),
    (
        {"number_of_epochs": 30},
        "rises from epoch 20 on, but this run ends at 30, before it is 0.2 at epoch 40",
    ),
]


@pytest.mark.parametrize(("changed", "margin"), WORDS)
def test_a_schedule_says_what_it_does(changed, margin):
    scheduled = schedule(loss=AAMSoftmax(), **changed)
    words, last_step = scheduled.in_words(), 100 * scheduled.number_of_epochs - 1
    first, last = scheduled.margin_at(0), scheduled.margin_at(last_step)
    assert (first == 0.2) == ("0.2 from the first step on" in words)
    assert (last == 0) == ("0 throughout" in words)
    assert (0 < last < 0.2) == ("before it is 0.2" in words)
    last = changed.get("number_of_epochs", 150)
    rate = f"up to 0.1 in the first 6 epochs, then down to 5e-05 at the end of epoch {last}"
    assert words == f"Learning rate: {rate}. Margin: {margin}."


def test_equal_margin_epochs_fix_the_margin_from_the_first_step():
    loss = AAMSoftmax(margin=0.7)
    schedule(loss=loss, margin=0.2, margin_start_epoch=0, margin_end_epoch=0)
    assert loss.margin == 0.2


def test_each_step_gets_its_rate_before_it_is_taken_and_its_margin_before_its_loss():
    loss, optimizer = AAMSoftmax(), any_optimizer()
    epochs = {"warmup_epochs": 1, "margin_start_epoch": 1, "margin_end_epoch": 2}
    scheduled = schedule(loss=loss, **epochs)
    for step in range(100):
        assert loss.margin == scheduled.margin_at(step)
        scheduled.on_batch_end(optimizer)
        assert optimizer.param_groups[0]["lr"] == scheduled.learning_rate(step)
    assert scheduled(1) == (scheduled.learning_rate(99), scheduled.learning_rate(100))


def test_a_schedule_keeps_its_place_among_epochs_of_another_length(tmp_path):
    optimizer, path = any_optimizer(), tmp_path / "schedule.ckpt"
    saved, loaded = schedule(steps_per_epoch=6), schedule(steps_per_epoch=3)
    for _ in range(9):
        saved.on_batch_end(optimizer)
    saved._save(path)
    loaded._load(path, end_of_epoch=False)
    assert loaded.step == 4  # of an epoch and a half
    write_step(path, 9)
    with pytest.raises(ValueError, match="the position of a SpeakerSchedule"):
        loaded._load(path, end_of_epoch=False)


def test_a_loaded_schedule_continues_where_the_saved_one_was(tmp_path):
    optimizer = any_optimizer()
    saved, loaded = (schedule(loss=AAMSoftmax()) for _ in range(2))
    for _ in range(2500):
        saved.on_batch_end(optimizer)
    saved._save(tmp_path / "schedule.ckpt")
    loaded._load(tmp_path / "schedule.ckpt", end_of_epoch=False)
    assert loaded.loss.margin == saved.loss.margin > 0
    assert loaded.current_lr == saved.current_lr
    (tmp_path / "schedule.ckpt").write_text("{}")
    with pytest.raises(ValueError, match="the position of a SpeakerSchedule"):
        loaded._load(tmp_path / "schedule.ckpt", end_of_epoch=False)


def test_an_epoch_of_another_length_is_warned_of_once():
    scheduled, optimizer = schedule(steps_per_epoch=3), any_optimizer()
    message = "taken 7 steps, but with steps_per_epoch: 3 an epoch ends at step 6"
    for epoch, steps, expected in ((1, 3, None), (2, 4, message), (3, 4, None)):
        for _ in range(steps):
            scheduled.on_batch_end(optimizer)
        with pytest.warns(match=message) if expected else warnings.catch_warnings():
            warnings.simplefilter("always" if expected else "error")
            scheduled(epoch)


THEIRS = LogSoftmaxWrapper(AdditiveAngularMargin(margin=0.2, scale=30))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"final_lr": 0.0}, "final_lr"),
        ({"warmup_epochs": 150}, "number_of_epochs"),
        ({"margin_end_epoch": 10}, "margin_end_epoch"),
        ({"loss": THEIRS}, r"LogSoftmaxWrapper cannot.*AAMSoftmax"),
        ({"steps_per_epoch": None}, "utterances / batch_size"),
    ],
)
def test_settings_without_meaning_are_refused_by_name(changed, named):
    with pytest.raises(ValueError, match=named):
        schedule(**changed).on_batch_end(any_optimizer())
