"""What each knob may be: the table, and what other modules say of the same."""

import itertools
import json
import math

import pytest
import torch
from speechbrain.lobes.features import Fbank
from speechbrain.utils import seed
from speechbrain.utils.run_opts import RunOptions

from speechbrain_rev.architectures import ARCHITECTURES, TRAINING_DEFAULTS
from speechbrain_rev.data import SpeakerAugment
from speechbrain_rev.hparams import placeholders, plain_settings, resolve
from speechbrain_rev.hparams.knobs import KNOBS
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import LOSSES
from speechbrain_rev.lobes.pooling import POOLINGS
from speechbrain_rev.lobes.schedules import SpeakerSchedule
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.reversible import Mode
from speechbrain_rev.reversible.streams import FORMATS
from tests.unit.hparams.files import DATA, TRAIN, refusal, values


class TestTable:
    def test_every_setting_of_train_yaml_has_a_row_and_no_row_is_left_over(self):
        flat = TRAIN.read_text().split("# What follows is built")[0]
        assert list(values(flat)) == list(KNOBS)

    @pytest.mark.parametrize("name", KNOBS)
    def test_the_edge_is_allowed_and_what_lies_beyond_is_not(self, name):
        knob = KNOBS[name]
        allowed = (*knob.edge, *knob.one_of)
        assert allowed
        assert knob.beyond or knob.kind == "bool"
        for value in allowed:
            assert knob.has_kind(value), value
            assert knob.allows(value), value
        for value in knob.beyond:
            assert knob.has_kind(value), value
            assert not knob.allows(value), value
        assert knob.has_kind(None) == knob.null

    @pytest.mark.parametrize("kind", ["bool", "int", "float", "str"])
    def test_truth_values_numbers_and_texts_are_kept_apart(self, kind):
        examples = {"bool": True, "int": 3, "float": 0.5, "str": "3"}
        fitting = {"float": {"int", "float"}}.get(kind, {kind})
        for name, knob in KNOBS.items():
            if knob.kind == kind:
                found = {k for k, value in examples.items() if knob.has_kind(value)}
                assert found == fitting, name

    def test_a_word_is_kept_apart_from_others(self):
        knob = KNOBS["chunk"]
        assert not any(map(knob.has_kind, ["Auto", "", "3", 1.5, True]))

    def test_every_family_default_is_in_range_and_null_stands_for_it(self):
        for defaults in TRAINING_DEFAULTS.values():
            for name, value in vars(defaults).items():
                assert KNOBS[name].null
                assert KNOBS[name].has_kind(value)
                assert KNOBS[name].allows(value)


# What can be written in any file; numbers that are none have a test of their own.
BEYOND = {
    name: value
    for name, knob in KNOBS.items()
    for value in knob.beyond[:1]
    if value not in (math.inf, -math.inf)
}


class TestRefusals:
    def test_a_word_is_taken_from_the_command_line_and_another_is_refused(self):
        refused = refusal(TRAIN, {"chunk": "large"})
        assert refused == "command line: chunk takes {}, not large.".format(
            KNOBS["chunk"].takes()
        )
        assert composes(chunk="auto")

    @pytest.mark.parametrize("name", BEYOND)
    def test_they_name_the_key_the_place_and_what_is_allowed(self, name, tmp_path):
        value = BEYOND[name]
        said = refusal(TRAIN, {name: value})
        assert said.startswith(f"command line: {name} takes {KNOBS[name].takes()}, not")
        for line in (f"base: {TRAIN}", "# A complete file of one setting."):
            file = tmp_path / "mine.yaml"
            file.write_text(f"{line}\n{name}: {json.dumps(value)}\n")
            assert refusal(file).startswith(f"{file}, line 2: {name} takes ")

    @pytest.mark.parametrize("name", KNOBS)
    def test_no_number_may_be_infinite_or_none(self, name, tmp_path):
        if KNOBS[name].kind != "float":
            return
        for written in (".inf", "-.INF", ".NaN", "1.0e+400", "-1.0e+400"):
            (tmp_path / "mine.yaml").write_text(f"base: {TRAIN}\n{name}: {written}\n")
            said = refusal(tmp_path / "mine.yaml")
            assert f"mine.yaml, line 2: {name} takes a number" in said
            assert said.endswith("It must be finite.")

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("batch_size", 0, "takes an integer of at least 1, not 0."),
            ("batch_size", 2**63, f"not {2**63}. It must fit 64 bits."),
            ("seed", -1, "takes an integer from 0 to 4294967295, not -1. For another"),
            ("margin", 4.0, "a number of at least 0 and below 3.14159, not 4.0."),
            ("lr", 0.0, "lr takes a number above 0, or null, not 0.0."),
            ("optimizer_bits", 16, "optimizer_bits takes 8 or 32, not 16."),
            ("optimizer_name", "adamv", "adamw, or null, not adamv. Did you mean adam"),
            ("mode", "recomput", "or null, not recomput. Did you mean recompute?"),
            ("precision", "FP16", "fp32, bf16 or fp16, not FP16. Did you mean fp16"),
            ("logger", "[wandb, tensorboard]", "not [wandb, tensorboard]. Give one of"),
            ("data_folder", "", "data_folder takes a text, not an empty one."),
            (
                "widths",
                [8, 8],
                "a list of 4 integers from 1 to 16384, or null, not [8, 8",
            ),
            ("sample_rate", 16, "It is in Hz"),
            ("max_grad_norm", -1.0, "would reverse every gradient"),
        ],
    )
    def test_the_nearest_name_or_the_reason_is_given(self, key, value, said):
        assert said in refusal(TRAIN, {key: value})

    def test_a_name_that_is_none_of_a_few_is_not_said_to_be_near_one(self):
        said = refusal(TRAIN, {"logger": "mlflow"})
        assert said.endswith("logger takes tensorboard or wandb, or null, not mlflow.")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("memory_budget", 11),
            ("mode", 3),
            ("arch", 57),
            ("optimizer_bits", True),
            ("sample_rate", "16kHz"),
            ("sentence_len", "3s"),
            ("chunk", 1.5),
            ("widths", 8),
            ("batch_size", None),
        ],
    )
    def test_another_type_is_told_the_same_of_what_is_taken_and_why(
        self, key, value, tmp_path
    ):
        knob, shown = KNOBS[key], json.dumps(value).strip('"')
        said = f"{key} takes {knob.takes()}, not {shown}.{knob.advice()}"
        file = tmp_path / "mine.yaml"
        for first in (f"base: {TRAIN}", "# A complete file of one setting."):
            file.write_text(f"{first}\n{key}: {shown}\n")
            assert refusal(file) == f"{file}, line 2: {said}"

    def test_a_size_without_its_unit_is_refused_alike_in_a_file_and_on_the_command_line(
        self, tmp_path
    ):
        file = tmp_path / "mine.yaml"
        file.write_text(f"base: {TRAIN}\nmemory_budget: 11\n")
        said = refusal(TRAIN, {"memory_budget": "11"}).removeprefix("command line")
        assert "takes a size such as 11GB, 10.5GiB or 800MB, or auto, or null" in said
        assert "not 11. 11GB is 11 GiB (2**30 bytes each)" in said
        assert refusal(file) == f"{file}, line 2{said}"

    def test_of_a_list_an_example_shows_the_brackets(self):
        said = refusal(TRAIN, {"trial_lists": "a.txt"})
        assert said.endswith("a list of texts, such as [a.txt, b.txt], not a.txt.")

    def test_null_and_placeholders_wait(self):
        overrides = {"batch_size": "!PLACEHOLDER", "widths": None}
        assert "batch_size" in placeholders(resolve(TRAIN, overrides))


def accepts(call, *arguments, **options):
    """Whether other code takes what a knob or a rule speaks of."""
    try:
        call(*arguments, **options)
    except ValueError:
        return False
    return True


def composes(**overrides):
    return not refusal(TRAIN, overrides)


@pytest.mark.filterwarnings("ignore::speechbrain_rev.hparams.OptimizerWarning")
class TestOtherModules:
    """What is repeated here is what those modules know themselves."""

    def test_names(self):
        assert KNOBS["arch"].one_of == tuple(ARCHITECTURES)
        assert set(KNOBS["mode"].one_of) == {mode.value for mode in Mode}
        assert set(KNOBS["streams"].one_of) == set(FORMATS)
        assert KNOBS["pooling"].one_of == tuple(POOLINGS)
        assert KNOBS["loss"].one_of == tuple(LOSSES)
        (precision,) = (
            action.choices
            for action in RunOptions._create_parser()._actions
            if action.dest == "precision"
        )
        assert set(KNOBS["precision"].one_of) == set(precision)
        with pytest.raises(ValueError, match="there are 'sgd', 'adam', 'adamw'"):
            build_optimizer([torch.zeros(1)], name="none", bits=8, lr=0.1)
        assert KNOBS["optimizer_name"].one_of == ("sgd", "adam", "adamw")

    def test_seeds_are_those_that_speechbrain_does_not_replace(self):
        knob = KNOBS["seed"]
        assert knob.at_least == seed.min_seed_value
        assert knob.at_most == seed.max_seed_value

    def test_the_highest_sample_rate_is_that_of_the_longest_window(self):
        highest = KNOBS["sample_rate"].at_most
        window_seconds = 0.025
        assert highest * window_seconds == Fbank().compute_STFT.n_fft
        wav = torch.randn(1, 16000)
        assert Fbank(sample_rate=highest)(wav).isfinite().all()
        with pytest.raises(RuntimeError, match="stft"):
            Fbank(sample_rate=22050)(wav)

    def test_rules_of_sizes_are_those_of_the_encoders(self):
        sizes = itertools.product(
            ["resnet34", "df_resnet56", "revnet46", "df_revnet66", "revnet57"],
            [[4, 4, 4, 4], [4, 4, 2, 4], [3, 4, 4, 4]],
            [[1, 1, 1, 1], [1, 0, 1, 1]],
            [8, 12],
        )
        outcomes = set()
        for arch, widths, blocks, n_mels in sizes:
            options = {"widths": widths, "blocks": blocks, "n_mels": n_mels}
            # Without data: a meta tensor has a shape alone.
            with torch.device("meta"):
                built = accepts(build_encoder, arch, **options)
            assert composes(arch=arch, **options) == built, (arch, options)
            outcomes.add(built)
        assert outcomes == {True, False}

    @pytest.mark.parametrize("arch", ["resnet34", "df_resnet56", "revnet46"])
    def test_the_rule_of_modes_is_that_of_the_encoders(self, arch):
        small = {"widths": [4, 4, 4, 4], "blocks": [1, 1, 1, 1]}
        for mode in (*KNOBS["mode"].one_of, None):
            built = accepts(build_encoder, arch, mode=mode, **small)
            assert composes(arch=arch, mode=mode) == built

    @pytest.mark.parametrize(
        ("knob", "values"),
        [("streams", ["float", "exact", "none"]), ("verify", [None, "raise", "none"])],
    )
    def test_other_names_are_those_of_the_encoders(self, knob, values):
        small = {"widths": [4, 4, 4, 4], "blocks": [1, 1, 1, 1]}
        for value in values:
            built = accepts(build_encoder, "revnet57", **small, **{knob: value})
            assert composes(**{knob: value}) == built == (value != "none")

    def test_rules_of_optimizers_are_those_of_the_factory(self):
        outcomes = set()
        for name, bits, momentum, decay in itertools.product(
            ["sgd", "adam", "adamw"], [8, 32], [0.0, 0.9], [0.0, 0.1]
        ):
            options = {"lr": 0.1, "momentum": momentum, "weight_decay": decay}
            weights = [torch.nn.Parameter(torch.zeros(2))]
            built = accepts(build_optimizer, weights, name=name, bits=bits, **options)
            chosen = {"optimizer_name": name, "optimizer_bits": bits, "final_lr": 0.1}
            assert composes(**chosen, **options) == built, (name, bits, options)
            outcomes.add(built)
        assert outcomes == {True, False}

    def test_what_the_schedule_refuses_is_refused(self):
        for warmup, epochs, start, end in itertools.product(
            [0.0, 2.0], [1, 2, 3], [0, 2], [0, 2]
        ):
            options = {
                "warmup_epochs": warmup,
                "number_of_epochs": epochs,
                "margin_start_epoch": start,
                "margin_end_epoch": end,
            }
            built = accepts(SpeakerSchedule, lr=0.1, final_lr=0.1, **options)
            assert composes(lr=0.1, final_lr=0.1, **options) == built, options

    def test_what_the_augmentation_refuses_is_refused(self):
        for speeds, low, high in itertools.product(
            [[1.0], [0.9, 1.0], [0.9], [1.0, 1.0], [1.0, -0.9]], [0.0, 5.0], [0.0, 5.0]
        ):
            options = {"speeds": speeds, "snr_low": low, "snr_high": high}
            built = accepts(SpeakerAugment, out_n_neurons=60, **options)
            assert composes(**options) == built, options

    def test_enough_speech_is_asked_for_and_not_more(self):
        # 31840 samples at speed 1.1 are 35024.
        augment = SpeakerAugment(out_n_neurons=60)
        needed = augment.samples_needed
        assert needed == 35024
        assert composes(sentence_len=needed / 16000)
        assert not composes(sentence_len=(needed - 1) / 16000)


@pytest.mark.parametrize("chunk_samples", [31840, 95840, 16000, 400])
def test_train_yaml_reads_enough_for_the_fastest_speed(chunk_samples):
    text = resolve(TRAIN, {"chunk_samples": chunk_samples, **DATA})
    found = plain_settings(text)
    assert int(found["sentence_len"] * found["sample_rate"]) >= 1.1 * chunk_samples
