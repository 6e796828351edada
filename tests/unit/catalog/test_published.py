"""Tables I, V, VI and VII: as printed, and what is counted beside them."""

import dataclasses
import math

import pytest

from speechbrain_rev.architectures import ARCHITECTURES, architecture
from speechbrain_rev.catalog import Training
from speechbrain_rev.catalog.table import CARD_BYTES
from tests.docs import published
from tests.docs.published import TRAINING_COLUMNS
from tests.docs.reproduced import (
    SHARED_PARTS,
    TABLE_SEVEN,
    published_trainings,
    reproduced_breakdowns,
    reproduced_cards,
    reproduced_trainings,
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


def test_rows_are_those_of_the_tables_and_their_figures_agree_with_each_other():
    rows, latest = published_trainings(), None
    published = [r for r in ARCHITECTURES.values() if r.published_params_m is not None]
    assert len(rows) == len(published) + sum(row.reversible for row in published)
    listed = {row.name for row in rows if row.optimizer_bits == 32}
    assert listed == {row.name for row in published}
    memory = {row.name: row.memory_gb for row in rows[::-1]}
    for row in rows:
        own = architecture(row.name)
        # Vanilla encoders stand before their counterparts.
        latest = latest if own.reversible else row.name
        assert latest == (own.counterpart or row.name)
        if row.optimizer_bits == 32:
            assert row.memory_gb == own.published_memory_gb
            assert row.max_batch == own.published_max_batch_11gb
            assert row.vox1_h_eer == own.vox1_h_eer
        assert (row.ratio is None) == (own.counterpart is None)
        if own.counterpart is not None:
            # Both are printed with two or three digits.
            exact = memory[own.counterpart] / row.memory_gb
            assert row.ratio == pytest.approx(exact, abs=0.01)
            assert row.vox1_o_eer < row.vox1_e_eer < row.vox1_h_eer
    compared = TRAINING_COLUMNS["compared: publ."]
    assert [compared(each) for each in reproduced_trainings()] == PRINTED


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
    least, most = round(min(totals_gb), 1), round(max(totals_gb), 1)
    assert f"largest batches are {least} to {most} GB" in published.training_note()
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


def test_table_one_is_reproduced_as_far_as_a_count_can():
    for column, ours in reproduced_breakdowns():
        report = ours.report
        assert (ours.mode, ours.optimizer_bits, ours.classes) == ("store", 32, 0)
        assert report.input_shape == (column.batch, 200, 80)
        assert report.weights_bytes / 1e9 == pytest.approx(column.weights_gb, rel=0.06)
        states = report.optimizer_states_bytes / 1e9
        assert states == pytest.approx(column.optimizer_states_gb, rel=0.2)
        # Workspaces and the allocator's share are in the published figure alone.
        activations = report.activations_bytes / 1e9
        assert 0.75 * column.activations_gb < activations < column.activations_gb
        shares = [
            parts["activations"] / sum(parts[p] for p in SHARED_PARTS)
            for parts in (column.parts_gb, report.parts)
        ]
        assert shares[0] == pytest.approx(shares[1], abs=0.003)


def test_an_encoder_of_which_not_all_was_published_has_no_row(monkeypatch, uncounted):
    partly = dataclasses.replace(uncounted, published_memory_gb=1.0)
    rows = published_trainings()
    monkeypatch.setitem(ARCHITECTURES, partly.name, partly)
    assert published_trainings() == rows
