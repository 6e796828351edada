"""The text and JSON of the table."""

import json
import re

import pytest

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog import ModelsReport, Training, select
from speechbrain_rev.catalog.table import MODES
from speechbrain_rev.sizes import GIB, MIB, card_text

CARD = Training(11 * GIB, batch=128, frames=200)
NO_CARD = Training(None, batch=128, frames=200)
LONG = Training(24 * GIB, batch=64, frames=600)


def lines_of(training, **options):
    """The two lines of heads, a list of words per encoder, and the notes."""
    lines = ModelsReport(select(training, **options)).text().splitlines()
    end = lines.index("")
    return lines[:2], [line.split() for line in lines[2:end]], lines[end + 1 :]


def test_every_figure_of_the_text_is_that_of_the_json():
    _, rows, _ = lines_of(CARD)
    document = json.loads(ModelsReport(select(CARD)).json())
    assert [row[0] for row in rows] == list(ARCHITECTURES)
    for words, plain in zip(rows, document["encoders"], strict=True):
        published, counted = plain["published"], plain["counted"]
        computed = plain["computed"]
        per_utterance = counted["bytes_per_2_s_utterance"]
        assert words == [
            plain["name"],
            "-" if plain["type"] == "vanilla" else plain["type"],
            str(plain["layers"]),
            f"{counted['parameters'] / 1e6:.2f}",
            f"{published['parameters_millions']:.1f}",
            *(f"{published[f'vox1_{trials}_eer_percent']:.2f}" for trials in "oeh"),
            f"{published['gb_per_2_s_utterance']:g}",
            "yes" if computed[plain["default_mode"]]["fits"] else "no",
            *(
                str(computed[m]["largest_batch"]) if m in computed else "-"
                for m in MODES
            ),
            *(f"{per_utterance[m] / MIB:.1f}" if m in computed else "-" for m in MODES),
        ]


def test_the_figures_of_longer_utterances_are_those_of_the_json():
    for training in (LONG, NO_CARD):
        _, rows, _ = lines_of(training)
        document = json.loads(ModelsReport(select(training)).json())
        for words, plain in zip(rows, document["encoders"], strict=True):
            sizes = plain["counted"]["bytes_per_6_s_utterance"]
            shown = [f"{sizes[m] / MIB:.1f}" if m in sizes else "-" for m in MODES]
            assert words[-3:] == shown


def test_published_figures_are_those_of_the_architectures():
    for plain in json.loads(ModelsReport(select(NO_CARD)).json())["encoders"]:
        row = ARCHITECTURES[plain["name"]]
        assert plain["published"] == {
            "parameters_millions": row.published_params_m,
            "vox1_o_eer_percent": row.vox1_o_eer,
            "vox1_e_eer_percent": row.vox1_e_eer,
            "vox1_h_eer_percent": row.vox1_h_eer,
            "gb_per_2_s_utterance": row.published_memory_gb,
            "largest_batch_on_11_gib": row.published_max_batch_11gb,
        }
        assert plain["counterpart"] == row.counterpart
        assert plain["counted"]["parameters"] == row.parameters


def test_json_says_what_was_asked_and_its_parts_make_the_need():
    document = json.loads(ModelsReport(select(LONG, names=["revnet57"])).json())
    assert document["training"] == {
        "batch": 64,
        "frames": 600,
        "precision": "float32",
        "card_bytes": 24 * GIB,
        "reserve_bytes": LONG.reserve_bytes,
        "optimizer_state_bits": 8,
        "classes": 17982,
    }
    assert set(document["counted_with"]) == {"date", "torch"}
    (plain,) = document["encoders"]
    for mode, computed in plain["computed"].items():
        parts = computed["needed_bytes"]
        assert parts["encoder_step"] == plain["counted"]["step_peak_bytes"][mode]
        left = 24 * GIB - LONG.reserve_bytes
        assert computed["fits"] == (sum(parts.values()) <= left)


def test_without_a_card_nothing_is_computed_and_both_lengths_are_shown():
    heads, rows, notes = lines_of(NO_CARD, names=["resnet34"])
    assert "MiB per 2 s utterance" in heads[0]
    assert "MiB per 6 s utterance" in heads[0]
    assert "batch" not in heads[0]
    assert len(rows) == 1
    assert not any("Computed" in note for note in notes)
    document = json.loads(ModelsReport(select(NO_CARD)).json())
    assert "computed" not in document["sources"]
    assert all("computed" not in plain for plain in document["encoders"])


@pytest.mark.parametrize("training", [CARD, LONG])
def test_the_text_says_where_its_figures_are_from_and_what_is_assumed(training):
    heads, _, notes = lines_of(training)
    text = " ".join(" ".join(notes).split())
    for words in (
        "Not reproduced here",
        "on meta tensors",
        "No GPU was tried",
        f"{training.reserve_bytes / GIB:.2f} GiB stay free",
        f"fits {card_text(training.card_bytes)} with {training.frames} frames",
        "classifier of 17982",
    ):
        assert words in text
    assert f"largest batch on {training.card_bytes / GIB:g} GiB" in heads[0]
    assert f"MiB per {training.frames // 100} s utterance" in heads[0]


@pytest.mark.parametrize("training", [CARD, NO_CARD, LONG])
def test_gb_stands_under_the_heading_published_alone(training):
    heads, _, _ = lines_of(training)
    places = [match.span() for match in re.finditer(r"\bGB\b", heads[1])]
    assert len(places) == 1
    # The heading is above the middle of its columns, whose last is this one.
    begin, end = re.search("published +", heads[0]).span()
    assert begin < places[0][0] < places[0][1] <= end
    assert heads[1].split().count("EER") == 3
    assert "GB" not in heads[0]
