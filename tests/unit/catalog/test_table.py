"""Selecting and sorting encoders."""

import pytest

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog import Training, select
from speechbrain_rev.catalog.table import MODES, SORT_KEYS
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.sizes import GIB

CARD = Training(11 * GIB, batch=128, frames=200)
NO_CARD = Training(None, batch=128, frames=200)


def names(models):
    return [model.row.name for model in models]


def test_all_encoders_come_in_the_order_of_the_published_tables():
    assert names(select(NO_CARD)) == list(ARCHITECTURES)
    assert names(select(NO_CARD, reverse=True)) == list(ARCHITECTURES)[::-1]


def test_filters_are_met_together_and_alternatives_of_one_added():
    chosen = select(NO_CARD, families=["revnet", "df_revnet"], types=["I"])
    assert names(chosen) == [
        name
        for name, row in ARCHITECTURES.items()
        if row.family in ("revnet", "df_revnet") and row.type == "I"
    ]
    named = ["revnet245", "resnet34", "revnet245"]
    assert names(select(NO_CARD, names=named)) == ["revnet245", "resnet34"]
    assert names(select(NO_CARD, names=named, types=["vanilla"])) == ["resnet34"]


def test_the_default_mode_is_that_of_the_encoder_built():
    for name in ("resnet34", "df_resnet56", "revnet57", "df_revnet66"):
        (model,) = select(NO_CARD, names=[name])
        encoder = build_encoder(
            name, widths=(8, 8, 8, 8), blocks=(1, 1, 1, 1), n_mels=8
        )
        assert model.row.default_mode in {
            m.value for m in encoder.block_modes().values()
        }
        assert model.row.default_mode == ("store", "reconstruct")[model.row.reversible]


def test_only_what_fits_in_its_default_mode_is_left():
    fitting = select(CARD, fitting=True)
    assert 0 < len(fitting) < len(ARCHITECTURES)
    for model in select(CARD):
        fits = model.largest_batch(model.row.default_mode) >= 128
        assert (model in fitting) == fits
        left = CARD.card_bytes - CARD.reserve_bytes
        assert fits == (model.needed_bytes(model.row.default_mode) <= left)


@pytest.mark.parametrize("key", SORT_KEYS)
@pytest.mark.parametrize("reverse", [False, True])
def test_sorting_is_by_the_figure_and_encoders_without_it_come_last(key, reverse):
    models = select(CARD, sort=key, reverse=reverse)
    figures = [SORT_KEYS[key](model) for model in models]
    known = [figure for figure in figures if figure is not None]
    assert known == sorted(known, reverse=reverse)
    assert figures[len(known) :] == [None] * (len(figures) - len(known))
    assert set(names(models)) == set(ARCHITECTURES)
    counted = {"reconstruct": 18, "store": 25, "recompute": 25}
    assert len(known) == counted.get(key, 0 if key in MODES else 25)


def test_memory_is_sorted_by_the_length_asked_about():
    for frames in (200, 600):
        training = Training(None, batch=1, frames=frames)
        models = select(training, sort="memory")
        sizes = [m.bytes_per_utterance(m.row.default_mode, frames) for m in models]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"names": ["revnet58"]}, "Did you mean revnet57"),
        ({"families": ["dfresnet"]}, "--family takes resnet, .*Did you mean df_resnet"),
        ({"types": ["reversible"]}, "--type takes vanilla, I, II, not reversible"),
        ({"sort": "vox1_h"}, "--sort takes layers, .* Did you mean vox1-h"),
        ({"fitting": True}, "--fits needs a card: add, for instance, --card=11GB"),
        ({"sort": "batch"}, "--sort=batch needs a card"),
        ({"families": ["resnet"], "types": ["I"]}, "No encoder is left. Leave out"),
    ],
)
def test_what_cannot_be_selected_is_refused_with_what_can(wrong, message):
    with pytest.raises(ValueError, match=message):
        select(NO_CARD, **wrong)


def test_when_nothing_fits_that_is_said():
    with pytest.raises(ValueError, match=r"No encoder is left.*--batch \(9000\)"):
        select(Training(GIB * 11, batch=9000, frames=200), fitting=True)
