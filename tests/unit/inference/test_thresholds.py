"""Thresholds of a run and of an exported model, and files that hold none."""

import json
from dataclasses import asdict

import pytest

from speechbrain_rev.inference import SpeakerEmbedder, Threshold
from speechbrain_rev.inference.thresholds import RESULTS, read_thresholds
from tests.run_folders import speech_like
from tests.unit.inference.conftest import put

FILE = "thresholds.json"
THRESHOLD = Threshold(
    "vox1_o", "EER", "cosine", 0.31, 18802, 18818, 0.0123, (1, 1), None
)


def listed(*changed):
    return json.dumps({"thresholds": [{**asdict(THRESHOLD), **c} for c in changed]})


def test_thresholds_are_read_as_they_were_written(model):
    embedder = SpeakerEmbedder.from_hparams(model, device="cpu")
    verified = embedder.verify(speech_like(), speech_like(seed=1), 16000)
    assert verified.same_speaker is None
    assert f"has neither {FILE} nor {RESULTS}" in verified.origin
    put(model, FILE, listed({}, {"point": "minDCF(0.01)", "value": 1}))
    embedder = SpeakerEmbedder.from_hparams(model, device="cpu")
    assert [one.value for one in embedder.thresholds.known] == [0.31, 1]
    assert embedder.thresholds.known[0].trials == "vox1_o"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
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
        listed({}).replace("0.31", "1e999"),
        listed({"targets": 0}),
        listed({"impostors": 10**13}),
        listed({"eer": 1.1}),
        listed({"enrolled": [2, 1]}),
        listed({"enrolled": [1]}),
        listed({"enrolled": [1, 1.5]}),
        listed({"interval": [0.3]}),
        listed({"interval": "ab"}),
        listed({}).replace("18802", "9" * 900_000),
        "[" * 200_000,
        b"\xff\xfe{}",
    ],
)
def test_files_of_no_thresholds_are_refused(model, content):
    put(model, FILE, content)
    with pytest.raises(ValueError, match=r"thresholds\.json"):
        SpeakerEmbedder.from_hparams(model, device="cpu")


def row(**changed):
    counts = {"targets": 3, "impostors": 4, "eer": 0.25, "enrolled": [1, 1]}
    thresholds = {"EER": 0.4, "minDCF(0.01)": None}
    of = {"trials": "one", "method": "cosine", "thresholds": thresholds}
    return of | counts | changed


def write_results(run, **changed):
    (run / "scores").mkdir(exist_ok=True)
    report = {"model": "f00d", "subtract_mean": False, "results": [row()]}
    report |= {"cohort": {"speakers": 3, "top_n": 2}} | changed
    (run / RESULTS).write_text(json.dumps(report))


NAMELESS = {"results": [row(trials="a\x1b[2J")]}


@pytest.mark.parametrize(
    ("changed", "value", "words"),
    [
        (
            {},
            0.4,
            "list one: 3 target and 4 impostor trials of speakers enrolled with 1 utterance, EER 25.00 %",
        ),
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
    chosen, origin, _ = read_thresholds(tmp_path, "f00d").choose(None, "cosine")
    assert chosen == value
    assert words in origin
    assert origin.isprintable()


def test_a_list_that_was_left_out_is_named_where_it_is_asked_for(tmp_path):
    write_results(tmp_path, results=[row(), row(trials="")])
    with pytest.raises(ValueError, match=r"one of 'one'\. .*left out for its name"):
        read_thresholds(tmp_path, "f00d").choose("other", "cosine")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ("no json", "Expecting value"),
        ("[]", "does not say of which model"),
        ("x" * 1_000_001, "has more than 1,000,000 bytes"),
        ("[" * 100_000, "recursion depth"),
        ({"model": 7}, "does not say of which model"),
        ({"subtract_mean": 0}, "subtract_mean is 0"),
        ({"results": {}}, "results are {}"),
        ({"results": [{"trials": "t"}]}, "a result is"),
        ({"results": [row(eer="low")]}, "eer is 'low'"),
        ({"results": [row(eer=True)]}, "eer is True"),
        ({"results": [row(eer_95=[0.1])]}, r"eer_95 is \[0.1\]"),
        ({"results": [row(min_dcf=0.5)]}, "min_dcf has no figure for each prior"),
        ({"results": [row(min_dcf_95={"0.01": [None, 1]})]}, "min_dcf_0.01_95 is"),
        ({"results": [row(eer=float("nan"))]}, "eer is nan"),
        ({"cohort": {"speakers": 3, "top_n": "2"}}, "cohort is"),
        ({"cohort": None}, "cohort is None"),
    ],
)
def test_results_that_are_none_are_named(tmp_path, changed, why):
    write_results(tmp_path, **(changed if isinstance(changed, dict) else {}))
    if isinstance(changed, str):
        (tmp_path / RESULTS).write_text(changed)
    with pytest.raises(ValueError, match=rf"results\.json .*{why}"):
        read_thresholds(tmp_path, "f00d")
