"""The text and JSON of the table."""

import itertools
import json

import pytest

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog import Training, models_json, models_text, select
from speechbrain_rev.sizes import GIB, card_text

CARD = Training(11 * GIB, batch=128, frames=200)
NO_CARD = Training(None, batch=128, frames=200)
LONG = Training(24 * GIB, batch=64, frames=600)


def lines_of(training, **options):
    """The two lines of heads, a list of words per encoder, and the notes."""
    lines = models_text(select(training, **options)).splitlines()
    end = lines.index("")
    return lines[:2], [line.split() for line in lines[2:end]], lines[end + 1 :]


@pytest.mark.parametrize("training", [CARD, NO_CARD, LONG])
def test_text_fits_a_terminal_of_130_columns_and_columns_line_up(training):
    lines = models_text(select(training)).splitlines()
    assert max(map(len, lines)) <= 130
    table = lines[1 : lines.index("")]
    # No two columns touch: what is blank in all lines separates as many as there are.
    width = max(map(len, table))
    used = [any(line.ljust(width)[i] != " " for line in table) for i in range(width)]
    columns = sum(1 for is_used, _ in itertools.groupby(used) if is_used)
    assert columns == len(table[0].split()) == len(table[-1].split())


def test_every_figure_of_the_text_is_that_of_the_json():
    _, rows, _ = lines_of(CARD)
    document = json.loads(models_json(select(CARD)))
    assert [row[0] for row in rows] == list(ARCHITECTURES)
    for words, plain in zip(rows, document["encoders"], strict=True):
        published, counted = plain["published"], plain["counted"]
        computed = plain["computed"]
        per_utterance = counted["bytes_per_2_s_utterance"]
        modes = ("store", "recompute", "reconstruct")
        assert words == [
            plain["name"],
            "-" if plain["type"] == "vanilla" else plain["type"],
            str(plain["layers"]),
            f"{counted['parameters'] / 1e6:.2f}",
            f"{published['parameters_millions']:.1f}",
            words[5],
            *(f"{published[f'vox1_{trials}_eer_percent']:.2f}" for trials in "oeh"),
            *(f"{per_utterance[m] / 1e9:.4f}" if m in computed else "-" for m in modes),
            f"{published['gb_per_2_s_utterance']:g}",
            "yes" if computed[plain["default_mode"]]["fits"] else "no",
            *(
                str(computed[m]["largest_batch"]) if m in computed else "-"
                for m in modes
            ),
        ]
        difference = counted["parameters"] / 1e6 - published["parameters_millions"]
        assert float(words[5]) == pytest.approx(difference, abs=0.0051)
        assert words[5] != "-0.00"


def test_the_figures_of_longer_utterances_are_those_of_the_json():
    for training, first in ((LONG, 9), (NO_CARD, 13)):
        _, rows, _ = lines_of(training)
        for words, plain in zip(
            rows, json.loads(models_json(select(training)))["encoders"], strict=True
        ):
            sizes = plain["counted"]["bytes_per_6_s_utterance"]
            shown = [f"{size / 1e9:.4f}" for size in sizes.values()]
            assert words[first : first + 3] == [*shown, "-"][:3]


def test_published_figures_are_those_of_the_architectures():
    for plain in json.loads(models_json(select(NO_CARD)))["encoders"]:
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
    document = json.loads(models_json(select(LONG, names=["revnet57"])))
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
    assert "GB per 2 s utterance" in heads[0]
    assert "GB per 6 s utterance" in heads[0]
    assert "batch" not in heads[0]
    assert len(rows) == 1
    assert not any("Computed" in note for note in notes)
    document = json.loads(models_json(select(NO_CARD)))
    assert "computed" not in document["sources"]
    assert all("computed" not in plain for plain in document["encoders"])


@pytest.mark.parametrize("training", [CARD, LONG])
def test_the_text_says_where_its_figures_are_from_and_what_is_assumed(training):
    heads, _, notes = lines_of(training)
    text = " ".join(notes)
    for words in (
        "were not reproduced here",
        "on meta tensors",
        "No GPU was tried",
        f"{training.reserve_bytes / GIB:.1f} GiB stay free",
        f"fits {card_text(training.card_bytes)} with {training.frames} frames",
        "classifier of 17982",
    ):
        assert words in text
    assert f"largest batch on {training.card_bytes / GIB:g} GiB" in heads[0]
    assert "published EER" in heads[0]
    assert f"GB per {training.frames // 100} s utterance" in heads[0]
