from speechbrain_rev.plots import training_curves
from tests.pictures import points_of

LABELS = {
    "training loss": "train_loss",
    "validation EER, %": "valid_eer_percent",
    "learning rate": "lr",
    "margin, radians": "margin",
}


def epochs(count, **changes):
    return [
        {"epoch": n, "train_loss": 9.0 / n, "lr": 0.1**n, "margin": 0.1 * n,
         "valid_eer_percent": 30.0 / n} | changes
        for n in range(1, count + 1)
    ]  # fmt: skip


def test_training_curves_show_each_quantity_by_epoch_in_order(drawn):
    rows = epochs(5)
    figure = drawn(training_curves, rows[::-1])
    for axes, (label, key) in zip(figure.axes, LABELS.items(), strict=True):
        assert axes.get_ylabel() == label
        assert points_of(axes.lines[0]) == [(row["epoch"], row[key]) for row in rows]
    titles = [axes.get_title(loc="right") for axes in figure.axes]
    assert titles == ["", "lowest 6.00 % in epoch 5", "", ""]
    # A run without validation has no panel for it.
    rows = epochs(3, valid_eer_percent=None)
    del rows[1]["valid_eer_percent"]
    labels = [axes.get_ylabel() for axes in drawn(training_curves, rows).axes]
    assert labels == ["training loss", "learning rate", "margin, radians"]


def test_one_epoch_and_quantities_of_zero_or_fixed_can_be_drawn(drawn):
    fixed = {"lr": 0.0, "margin": 0.5, "valid_eer_percent": 0.0}
    *_, margin = drawn(training_curves, epochs(1, **fixed)).axes
    low, high = margin.get_xlim()
    assert [tick for tick in margin.get_xticks() if low <= tick <= high] == [1]
    low, high = margin.get_ylim()
    assert low < 0 < 0.5 < high < 1
