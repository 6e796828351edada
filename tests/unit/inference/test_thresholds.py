"""Thresholds of a run and of an exported model, and files that hold none."""

import json

import pytest

from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.run_folder import RESULTS
from speechbrain_rev.inference.thresholds import run_thresholds
from tests.run_folders import speech_like
from tests.unit.inference.conftest import put

FILE = "thresholds.json"
THRESHOLD = {
    "trials": "vox1_o",
    "point": "EER",
    "normalisation": "cosine",
    "value": 0.31,
    "targets": 18802,
    "impostors": 18818,
    "eer": 0.0123,
}


def listed(*changed):
    return json.dumps({"thresholds": [{**THRESHOLD, **one} for one in changed]})


def test_thresholds_are_read_as_they_were_written(model):
    embedder = SpeakerEmbedder.from_hparams(model, device="cpu")
    found = embedder.verify(speech_like(), speech_like(seed=1), 16000)
    assert found.same_speaker is None
    assert f"has no {FILE}" in found.origin
    put(model, FILE, listed({}, {"point": "minDCF(0.01)", "value": 1}))
    embedder = SpeakerEmbedder.from_hparams(model, device="cpu")
    assert [one.value for one in embedder.thresholds.known] == [0.31, 1]
    assert embedder.thresholds.known[0].trials == "vox1_o"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"thresholds": {}}',
        '{"thresholds": [7]}',
        '{"thresholds": [], "more": 1}',
        '{"thresholds": [], "thresholds": []}',
        listed({"more": 1}),
        listed({}, {}),
        listed(*({"trials": f"t{i}"} for i in range(1001))),
        listed({"value": float("nan")}),
        listed({"value": 1.5}),
        listed({"normalisation": "as_norm", "value": 1e300}),
        listed({"normalisation": "s_norm"}),
        listed({"trials": "\x1b[2J"}),
        listed({"targets": 0}),
        listed({"impostors": 10**13}),
        listed({"eer": 1.1}),
        listed({}).replace("0.31", "1e999"),
        listed({}).replace("18802", "9" * 900_000),
        "[" * 200_000,
        " " * 1_000_001,
        b"\xff\xfe{}",
    ],
)
def test_files_of_no_thresholds_are_refused(model, content):
    put(model, FILE, content)
    with pytest.raises(ValueError, match=r"thresholds\.json"):
        SpeakerEmbedder.from_hparams(model, device="cpu")


def test_thresholds_are_of_the_folder_and_have_their_checksum(model, tmp_path):
    (model / FILE).write_text(listed({}))
    with pytest.raises(ValueError, match="is not listed"):
        SpeakerEmbedder.from_hparams(model, device="cpu")
    put(model, FILE, listed({}))
    (model / FILE).write_text(listed({"value": 0.0}))
    with pytest.raises(ValueError, match="is not as it was written"):
        SpeakerEmbedder.from_hparams(model, device="cpu")
    put(model, FILE, listed({}))
    (model / FILE).rename(tmp_path / "theirs.json")
    (model / FILE).symlink_to(tmp_path / "theirs.json")
    with pytest.raises(ValueError, match="is a link out of its folder"):
        SpeakerEmbedder.from_hparams(model, device="cpu")


def row(**changed):
    of = {
        "trials": "one",
        "method": "cosine",
        "targets": 3,
        "impostors": 4,
        "eer": 0.25,
    }
    return of | {"thresholds": {"EER": 0.4, "minDCF(0.01)": None}, **changed}


def write_results(run, **changed):
    (run / "scores").mkdir(exist_ok=True)
    report = {"model": "f00d", "subtract_mean": False, "results": [row()], **changed}
    (run / RESULTS).write_text(json.dumps(report))


NAMELESS = {"results": [row(trials="a\x1b[2J")]}


@pytest.mark.parametrize(
    ("changed", "value", "words"),
    [
        ({}, 0.4, "list one: 3 target and 4 impostor trials, EER 25.00 %"),
        ({"model": "older"}, None, "of other weights"),
        # Cosines of embeddings that were centred are not those of verify.
        ({"subtract_mean": True}, None, "has none: run"),
        ({"results": []}, None, "has none: run"),
        (NAMELESS, None, "A list of trials is left out for its name"),
        ({"results": [row(), row(trials="")]}, 0.4, "list one"),
    ],
)
def test_a_run_s_own_results_give_its_thresholds(tmp_path, changed, value, words):
    write_results(tmp_path, **changed)
    found, origin = run_thresholds(tmp_path, "f00d").choose(None, "cosine")
    assert found == value
    assert words in origin
    assert origin.isprintable()


def test_a_list_that_was_left_out_is_named_where_it_is_asked_for(tmp_path):
    write_results(tmp_path, results=[row(), row(trials="")])
    with pytest.raises(ValueError, match=r"one of 'one'\. .*left out for its name"):
        run_thresholds(tmp_path, "f00d").choose("other", "cosine")


@pytest.mark.parametrize(
    "changed",
    [
        "no json",
        "[]",
        "x" * 1_000_001,
        "[" * 100_000,
        {"model": 7},
        {"subtract_mean": 0},
        {"results": {}},
        {"results": [{"trials": "t"}]},
        {"results": [row(eer="low")]},
        {"results": [row(eer_95=[0.1])]},
        {"results": [row(thresholds={"EER": float("nan")})]},
        {"cohort": {"speakers": 3, "top_n": "2"}},
    ],
)
def test_results_that_are_none_are_named(tmp_path, changed):
    write_results(tmp_path, **(changed if isinstance(changed, dict) else {}))
    if isinstance(changed, str):
        (tmp_path / RESULTS).write_text(changed)
    with pytest.raises(ValueError, match=r"results\.json is not what .*score\.py"):
        run_thresholds(tmp_path, "f00d")
