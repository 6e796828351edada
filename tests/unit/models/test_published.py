"""Tables V, VI and VII: as printed, and what is counted beside them."""

import json
import math
import re

import pytest

from speechbrain_rev.architectures import ARCHITECTURES, architecture
from speechbrain_rev.models import Training
from speechbrain_rev.models.published import (
    CARD_BYTES,
    TABLE_SEVEN,
    published_trainings,
    reproduced_cards,
    reproduced_trainings,
)
from speechbrain_rev.models.published_render import (
    CARDS_COLUMNS,
    TRAINING_COLUMNS,
    cards_as_json,
    cards_as_text,
    trainings_as_json,
    trainings_as_text,
)

#: What the paper prints beside its largest batches, from which it follows.
PRINTED = [
    *("-", "1.53x", "+1", "1.95x", "+1"),
    *("-", "6.87x", "+2", "9.58x", "+2", "2.00x", "+1", "2.39x", "+1"),
    *("-", "9.59x", "+2", "13.41x", "+2", "2.18x", "+1", "3.32x", "+1"),
    *("-", "4.15x", "+1", "4.27x", "+1"),
    *("-", "5.78x", "+1", "5.96x", "+1"),
    *("-", "9.79x", "+1", "10.00x", "+1"),
    *("-", "12.17x", "+1", "12.42x", "+1"),
]


def test_rows_are_those_of_the_tables_vanilla_encoders_before_their_counterparts():
    rows = published_trainings()
    assert len(rows) == 25 + 18
    assert {row.name for row in rows if row.optimizer_bits == 32} == set(ARCHITECTURES)
    latest = None
    for row in rows:
        own = architecture(row.name)
        latest = latest if own.reversible else row.name
        assert latest == (own.counterpart or row.name)
        if row.optimizer_bits == 32:
            assert row.memory_gb == own.published_memory_gb
            assert row.max_batch == own.published_max_batch_11gb
            assert row.vox1_h_eer == own.vox1_h_eer


def test_published_figures_agree_with_each_other():
    memory = {row.name: row.memory_gb for row in published_trainings()[::-1]}
    for row in published_trainings():
        counterpart = architecture(row.name).counterpart
        assert (row.ratio is None) == (counterpart is None)
        if counterpart is not None:
            # Both are printed with two or three digits.
            exact = memory[counterpart] / row.memory_gb
            assert row.ratio == pytest.approx(exact, abs=0.01)
            assert row.vox1_o_eer < row.vox1_e_eer < row.vox1_h_eer
    (compared,) = [
        c for c in TRAINING_COLUMNS if (c.group, c.head) == ("compared", "publ.")
    ]
    assert [compared.cell(each) for each in reproduced_trainings()] == PRINTED


def test_memory_for_an_utterance_is_all_that_the_step_needs():
    for each in reproduced_trainings():
        row, published = each.row, each.published
        training = Training(CARD_BYTES, 1, 200, published.optimizer_bits)
        needed = training.needed_bytes(row, row.default_mode, published.max_batch)
        total_gb = each.memory_gb * published.max_batch
        assert total_gb == pytest.approx(sum(needed.values()) / 1e9)
        for batch, fits in ((each.max_batch, True), (each.max_batch + 1, False)):
            needed = training.needed_bytes(row, row.default_mode, batch)
            assert (sum(needed.values()) <= training.available_bytes) == fits


def test_what_the_notes_say_of_the_differences_is_so():
    rows = {
        (r.published.name, r.published.optimizer_bits): r
        for r in reproduced_trainings()
    }
    totals_gb = [r.published.memory_gb * r.published.max_batch for r in rows.values()]
    told = re.search(
        r"largest batches are ([\d.]+) to ([\d.]+) GB",
        " ".join(trainings_as_text().split()),
    )
    assert [float(each) for each in told.groups()] == [
        round(min(totals_gb), 1),
        round(max(totals_gb), 1),
    ]
    for (name, bits), each in rows.items():
        share = each.memory_gb / each.published.memory_gb
        if each.row.reversible:
            assert 1 / 6 < share < 0.54
            assert each.max_batch > 2 * each.published.max_batch
            assert each.ratio > 1.8 * each.published.ratio
        else:
            assert 0.78 < share < 1.09
            assert each.max_batch == pytest.approx(each.published.max_batch, rel=0.17)
        if bits == 8:
            at_32 = rows[name, 32]
            assert at_32.max_batch < each.max_batch <= at_32.max_batch + 7
            assert 0.95 < each.memory_gb / at_32.memory_gb < 1


def test_cards_are_those_of_the_largest_batch():
    rows = reproduced_cards()
    assert [row.name for row in rows] == list(TABLE_SEVEN)
    batches = {
        r.published.name: r.max_batch
        for r in reproduced_trainings()
        if r.published.optimizer_bits == 32
    }
    for row in rows:
        assert row.published.vox1_h_eer == architecture(row.name).vox1_h_eer
        assert row.cards == math.ceil(256 / batches[row.name])
        published = math.ceil(256 / architecture(row.name).published_max_batch_11gb)
        assert published == row.published.cards
        if architecture(row.name).reversible:
            assert row.cards == 1
        else:
            assert row.cards == pytest.approx(row.published.cards, rel=0.2)
        assert row.cards_recomputed < row.cards or row.cards == 1


@pytest.mark.parametrize(
    ("text", "columns", "rows"),
    [
        (trainings_as_text(), TRAINING_COLUMNS, reproduced_trainings()),
        (cards_as_text(), CARDS_COLUMNS, reproduced_cards()),
    ],
    ids=["V and VI", "VII"],
)
def test_text_shows_every_row_and_says_what_was_not_reproduced(text, columns, rows):
    lines = text.splitlines()
    assert max(map(len, lines)) <= 130
    for line, row in zip(lines[2:], rows, strict=False):
        cells = " ".join(column.cell(row) for column in columns)
        assert line.split() == cells.split()
    assert lines[2 + len(rows)] == ""
    words = " ".join(text.split())
    assert "reproduced here" in words
    assert "no card was tried" in words
    assert "11 GiB (11.81 GB)" in words


def test_json_has_the_figures_of_the_rows():
    document = json.loads(trainings_as_json())
    for plain, each in zip(
        document["tables_five_and_six"], reproduced_trainings(), strict=True
    ):
        assert plain["published"]["name"] == each.published.name
        assert plain["published"]["optimizer_bits"] == each.published.optimizer_bits
        assert plain["computed"]["memory_gb"] == each.memory_gb
        assert plain["computed"]["max_batch"] == each.max_batch
    document = json.loads(cards_as_json())
    for plain, row in zip(document["table_seven"], reproduced_cards(), strict=True):
        assert plain["name"] == row.name
        assert plain["published"]["days"] == row.published.days
        assert plain["computed"]["cards"] == row.cards
