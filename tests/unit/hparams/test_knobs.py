"""What each knob may be: the table, and what other modules accept of the same."""

import itertools
import math

import pytest
import torch
from speechbrain.lobes.features import Fbank
from speechbrain.utils import seed
from speechbrain.utils.run_opts import RunOptions

from speechbrain_rev.architectures import TRAINING_DEFAULTS
from speechbrain_rev.data import SpeakerAugment
from speechbrain_rev.hparams import plain_settings, resolve
from speechbrain_rev.hparams.document import dump
from speechbrain_rev.hparams.knobs import KNOBS, Knob
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.schedules import SpeakerSchedule
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.optimizers import OPTIMIZERS
from tests.unit.hparams.files import DATA, TRAIN, flat, refusal, values

pytestmark = pytest.mark.filterwarnings(
    "ignore::speechbrain_rev.hparams.OptimizerWarning"
)
SMALL = {"widths": [4, 4, 4, 4], "blocks": [1, 1, 1, 1]}


INF = math.inf
# Knobs, values just inside of their bounds, and values just outside.
BOUNDS = [
    (Knob("int", at_least=1), [1, 2**63 - 1], [0, -1, 2**63, 10**30]),
    (Knob("int", at_least=0, at_most=8), [0, 8], [-1, 9]),
    (Knob("int", one_of=(8, 32)), [8, 32], [16, 0]),
    (Knob("int", at_least=1, or_word="auto"), [1, "auto"], [0]),
    (Knob("float", above=0, at_most=1), [5e-324, 1.0, 1], [0.0, 1.1, INF, math.nan]),
    (Knob("float", at_least=0, below=1), [0.0, -0.0, 0.99], [-0.1, 1.0, math.nan]),
    (Knob("float"), [-1e308, 1e308], [INF, -INF, math.nan]),
    (Knob("str"), ["x"], [""]),
    (Knob("str", one_of=("a", "b")), ["a", "b"], ["A", "c", ""]),
    (Knob("list of int", at_least=1), [[1, 1]], [[0, 1]]),
    (Knob("list of float", above=0), [[], [1, 0.5]], [[1.0, 0.0], [INF]]),
    (Knob("list of str"), [[], ["x"]], [["x", ""]]),
    (KNOBS["memory_budget"], ["11GB", "10.5 GiB", "auto"], ["", "11", "0GB", "11TB"]),
]


@pytest.mark.parametrize(("knob", "inside", "outside"), BOUNDS)
def test_the_edge_is_allowed_and_what_lies_beyond_is_not(knob, inside, outside):
    for value in inside + outside:
        assert knob.has_kind(value), value
        assert knob.allows(value) == (value in inside), value


def test_truth_values_numbers_and_texts_are_kept_apart():
    examples = {"bool": True, "int": 3, "float": 0.5, "str": "3"}
    for name, knob in KNOBS.items():
        if knob.kind in examples:
            taken = {k for k, value in examples.items() if knob.has_kind(value)}
            fitting = {"int", "float"} if knob.kind == "float" else {knob.kind}
            assert taken == fitting, name
            assert knob.has_kind(None) == knob.null
    assert not any(map(KNOBS["chunk"].has_kind, ["Auto", "", "3", 1.5, True]))


def test_every_setting_of_train_yaml_has_a_row_and_null_has_a_value():
    assert list(values(flat(TRAIN.read_text()))) == list(KNOBS)
    for defaults in TRAINING_DEFAULTS.values():
        for name, value in vars(defaults).items():
            assert KNOBS[name].null
            assert KNOBS[name].has_kind(value)
            assert KNOBS[name].allows(value)


def test_a_refusal_names_the_key_the_place_and_what_is_allowed(tmp_path):
    file = tmp_path / "mine.yaml"
    wrong = {"int": -1, "float": INF, "str": "", "any": 0}
    for name, knob in KNOBS.items():
        if knob.kind == "bool":
            continue
        value = wrong[knob.kind.removeprefix("list of ")]
        value = [value] if knob.kind.startswith("list") else value
        file.write_text(f"# A complete file of one setting.\n{name}: {dump(value)}\n")
        said = refusal(file)
        assert said.startswith(f"{file}, line 2: {name} takes {knob.takes()}, not")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", -1, "takes an integer from 0 to 4294967295, not -1. For another"),
        ("optimizer_name", "adamv", " or null, not adamv."),
        ("data_folder", "", "takes a text, or a list of them, not ''."),
        ("data_folder", [], "data_folder takes a text, or a list of them, not []."),
        ("trials_folder", ["a", 3], "takes a text, or a list of them, not [a, 3]."),
        ("widths", [0], "a list of integers from 1 to 16384, or null, not [0]"),
        ("sample_rate", "16kHz", "not 16kHz. It is in Hz"),
        ("arch", "revnet59", "not revnet59. Did you mean revnet57 "),
        ("memory_budget", "11", "not '11'. 11GB is 11 GiB (2**30 bytes each)"),
        ("trial_lists", "a.txt", "list of texts, such as [a.txt, b.txt], not a.txt."),
    ],
)
def test_a_refusal_gives_the_nearest_name_or_the_reason(key, value, message):
    said = refusal(TRAIN, {key: value})
    assert message in said
    assert said.startswith(f"command line: {key} takes ")


def accepts(call, *arguments, **options):
    """Whether other code takes what a knob or a rule checks."""
    try:
        call(*arguments, **options)
    except ValueError:
        return False
    return True


def composes(folder, **settings):
    """Whether a complete file of these settings does."""
    lines = [f"{key}: {dump(value)}\n" for key, value in settings.items()]
    (folder / "some.yaml").write_text("".join(lines))
    return not refusal(folder / "some.yaml")


def test_names_and_ranges_are_those_of_the_modules_that_read_them(tmp_path):
    actions = {action.dest: action for action in RunOptions._create_parser()._actions}
    assert set(KNOBS["precision"].one_of) == set(actions["precision"].choices)
    limits = seed.min_seed_value, seed.max_seed_value
    assert (KNOBS["seed"].at_least, KNOBS["seed"].at_most) == limits
    for verify in ("raise", "none"):
        built = accepts(build_encoder, "revnet57", verify=verify, **SMALL)
        assert composes(tmp_path, verify=verify) == built == (verify != "none")


def test_the_highest_sample_rate_is_that_of_the_longest_window():
    highest = KNOBS["sample_rate"].at_most
    assert highest * 0.025 == Fbank().compute_STFT.n_fft
    wav = torch.randn(1, 16000)
    assert Fbank(sample_rate=highest)(wav).isfinite().all()
    with pytest.raises(RuntimeError, match="stft"):
        Fbank(sample_rate=22050)(wav)


def meta_encoder(arch, **sizes):
    # Without data: a meta tensor has a shape alone.
    with torch.device("meta"):
        return build_encoder(arch, **sizes)


# What other code is called with, and the knobs of it: products of their values.
BUILT = {
    "sizes": (
        meta_encoder,
        {
            "arch": ["df_resnet56", "revnet57"],
            "widths": [[4, 4, 4, 4], [4, 4, 2, 4]],
            "blocks": [[1, 1, 1, 1], [1, 0, 1, 1]],
            "n_mels": [8, 12],
        },
        {},
    ),
    "modes": (
        lambda arch, mode: build_encoder(arch, mode=mode, **SMALL),
        {"arch": ["resnet34", "revnet46"], "mode": [*KNOBS["mode"].one_of, None]},
        {},
    ),
    "optimizers": (
        lambda optimizer_name, optimizer_bits, **options: build_optimizer(
            [torch.nn.Parameter(torch.zeros(2))],
            name=optimizer_name,
            bits=optimizer_bits,
            lr=0.1,
            **options,
        ),
        {
            "optimizer_name": [*OPTIMIZERS],
            "optimizer_bits": [8, 32],
            "nesterov": [None, True],
            "weight_decay": [0.0, 0.1],
        },
        {"lr": 0.1, "final_lr": 0.1, "optimizer_backend": "native"},
    ),
    "schedules": (
        lambda **options: SpeakerSchedule(lr=0.1, final_lr=0.1, **options),
        {
            "warmup_epochs": [0.0, 2.0],
            "number_of_epochs": [2, 3],
            "margin_start_epoch": [0, 2],
            "margin_end_epoch": [0, 2],
        },
        {"lr": 0.1, "final_lr": 0.1},
    ),
    "augmentations": (
        lambda **options: SpeakerAugment(out_n_neurons=60, **options),
        {
            "speeds": [[0.9, 1.0], [0.9], [1.0, 1.0], [1.0, -0.9]],
        },
        {},
    ),
}


@pytest.mark.parametrize("case", BUILT)
def test_rules_are_those_of_the_modules_that_are_built(case, tmp_path):
    build, knobs, beside = BUILT[case]
    outcomes = set()
    for given in itertools.product(*knobs.values()):
        options = dict(zip(knobs, given, strict=True))
        built = accepts(build, **options)
        assert composes(tmp_path, **beside, **options) == built, options
        outcomes.add(built)
    assert outcomes == {True, False}


def test_enough_speech_is_asked_for_and_not_more():
    # 31840 samples at speed 1.1 are 35024.
    needed = SpeakerAugment(out_n_neurons=60).samples_needed
    assert needed == 35024
    assert not refusal(TRAIN, {"sentence_len": needed / 16000})
    assert refusal(TRAIN, {"sentence_len": (needed - 1) / 16000})
    for samples in (95840, 400):
        read = plain_settings(resolve(TRAIN, {"chunk_samples": samples, **DATA}))
        assert int(read["sentence_len"] * read["sample_rate"]) >= 1.1 * samples
