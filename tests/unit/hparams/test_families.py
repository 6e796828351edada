"""What an encoder's family trains with, and the warning where it is not that."""

import os
import subprocess
import sys
import warnings

import pytest

from speechbrain_rev.architectures import ARCHITECTURES, TRAINING_DEFAULTS
from speechbrain_rev.hparams import OptimizerWarning, compose, resolve
from tests.recipes.runs import recipe
from tests.unit.hparams.files import FOLDER, TRAIN, values

train = recipe("train")


class TestDefaults:
    @pytest.mark.parametrize("arch", ["resnet34", "revnet57"])
    def test_residual_families_train_with_sgd(self, write, arch):
        found = values(resolve(write() / "train.yaml", {"arch": arch}))
        assert (found["optimizer_name"], found["lr"], found["weight_decay"]) == (
            "sgd",
            0.1,
            1e-4,
        )

    @pytest.mark.parametrize("arch", ["df_resnet56", "df_revnet89"])
    def test_depth_first_families_train_with_adamw(self, write, arch):
        found = values(resolve(write() / "train.yaml", {"arch": arch}))
        assert (found["optimizer_name"], found["lr"], found["weight_decay"]) == (
            "adamw",
            1.25e-4,
            0.05,
        )

    @pytest.mark.filterwarnings("ignore::speechbrain_rev.hparams.OptimizerWarning")
    def test_rates_and_decay_follow_the_optimizer_and_the_rest_the_family(self, write):
        overrides = {"arch": "df_revnet89", "optimizer_name": "sgd"}
        found = values(resolve(write() / "train.yaml", overrides))
        assert (found["lr"], found["weight_decay"]) == (0.1, 1e-4)
        assert found["number_of_epochs"] == 165

    def test_what_a_file_says_is_not_replaced(self, write):
        found = values(resolve(write() / "train.yaml", {"lr": "0.7"}))
        assert found["lr"] == 0.7

    def test_an_optimizer_without_published_settings_asks_for_all_of_them(self, write):
        with pytest.raises(
            ValueError,
            match=r"command line: .* adam .*: give final_lr, weight_decay too",
        ):
            resolve(write() / "train.yaml", {"optimizer_name": "adam", "lr": "0.1"})

    def test_nothing_is_filled_in_while_the_encoder_is_still_to_be_named(self, write):
        folder = write(near="base: train.yaml\narch: !PLACEHOLDER\n")
        assert "\nlr: null  # peak\n" in resolve(folder / "near.yaml")

    def test_rates_wait_for_an_optimizer_that_is_still_to_be_named(self, write):
        folder = write(near="base: train.yaml\noptimizer_name: !PLACEHOLDER\n")
        found = resolve(folder / "near.yaml")
        assert "\nlr: null  # peak\n" in found
        assert "\nnumber_of_epochs: 150\n" in found

    def test_an_encoder_may_be_named_by_a_reference(self, write):
        folder = write(mine="net: df_revnet89\narch: !ref <net>\nlr: null\n")
        assert values(resolve(folder / "mine.yaml"))["lr"] == 1.25e-4

    def test_an_unknown_encoder_is_refused_with_its_place_and_all_names(self, write):
        with pytest.raises(
            ValueError, match=r"^command line: arch .*revnet59"
        ) as error:
            resolve(write() / "train.yaml", {"arch": "revnet59"})
        assert "Did you mean revnet57 " in str(error.value)
        assert all(name in str(error.value) for name in ARCHITECTURES)

    def test_no_setting_is_left_to_the_family_once_resolved(self):
        for family, defaults in TRAINING_DEFAULTS.items():
            arch = next(a for a in ARCHITECTURES.values() if a.family == family)
            found = values(resolve(TRAIN, {"arch": arch.name}))
            assert {name: found[name] for name in vars(defaults)} == vars(defaults)


def caught(*arguments, call=resolve):
    """The warnings of a composition."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*arguments)
    return [str(warning.message) for warning in found]


class TestOtherOptimizer:
    @pytest.mark.parametrize("arch", ["resnet34", "revnet57", "df_resnet56"])
    def test_an_encoder_with_the_optimizer_of_its_family_is_no_reason(self, arch):
        family = ARCHITECTURES[arch].optimizer_name
        assert caught(TRAIN, {"arch": arch}) == []
        assert caught(TRAIN, {"arch": arch, "optimizer_name": family}) == []

    @pytest.mark.parametrize(
        ("arch", "other", "family"),
        [
            ("resnet34", "adamw", "sgd"),
            ("revnet57", "adamw", "sgd"),
            ("df_resnet56", "sgd", "adamw"),
            ("df_revnet89", "sgd", "adamw"),
        ],
    )
    def test_another_one_is_named_once_with_what_the_paper_uses_and_how_to_silence_it(
        self, arch, other, family
    ):
        (said,) = caught(TRAIN, {"arch": arch, "optimizer_name": other})
        assert f"{arch} is to be trained with {other} (command line)" in said
        assert f"the paper trains its family with {family}" in said
        assert "optimizer_name: null" in said
        assert "PYTHONWARNINGS" in said

    def test_the_file_that_chose_it_is_named(self):
        (said,) = caught(FOLDER / "minivox.yaml")
        assert "minivox.yaml, line 5)" in said

    def test_it_is_said_of_what_was_resolved_already(self, tmp_path):
        file = tmp_path / "resolved.yaml"
        file.write_text(resolve(TRAIN, {"arch": "revnet57"}))
        assert caught(file) == []
        file.write_text(file.read_text().replace("_name: sgd", "_name: adamw"))
        assert len(caught(file)) == 1

    def test_nothing_is_said_while_one_of_the_two_is_still_to_be_named(self):
        # It sets sgd and leaves the encoder open.
        assert caught(FOLDER / "fine_tune.yaml") == []

    def test_composing_a_command_line_says_it_once_where_it_was_asked_for(self, write):
        arguments = [str(write() / "train.yaml"), "--data_folder=x"]
        with pytest.warns(OptimizerWarning) as found:
            compose([*arguments, "--optimizer_name=adamw"])
        assert [warning.filename for warning in found] == [__file__]


class TestShown:
    """How the two programs show the warning."""

    def test_resolve_shows_it_beside_its_output_and_silences_it_as_it_says(self):
        command = [sys.executable, "-m", "speechbrain_rev", "resolve"]
        arguments = [str(TRAIN), "--optimizer_name=adamw"]
        shown, silent = (
            subprocess.run(
                [*command, *arguments],
                env={**os.environ, "PYTHONWARNINGS": filters},
                capture_output=True,
                text=True,
                check=True,
            )
            for filters in ("", "ignore:Not the family")
        )
        assert shown.stderr.startswith("speechbrain-rev: warning: Not the family's")
        assert shown.stderr.count("\n") == 1
        assert 'PYTHONWARNINGS="ignore:Not the family"' in shown.stderr
        assert silent.stderr == ""
        with pytest.warns(OptimizerWarning):
            expected = resolve(TRAIN, {"optimizer_name": "adamw"})
        assert shown.stdout == silent.stdout == expected

    def test_training_says_it_once_though_it_composes_twice(self, tmp_path):
        arguments = ["--data_folder=x", f"--output_folder={tmp_path}"]
        prepared = recipe("prepare").Prepared(512, 4, 0, 0, 0)

        def start():
            text, found, _ = train.compose_run(
                [str(TRAIN), *arguments, "--optimizer_name=adamw"]
            )
            train.write_hyperparams(tmp_path, text, found, prepared)

        assert len(caught(call=start)) == 1
        written = values((tmp_path / "hyperparams.yaml").read_text())
        assert (written["optimizer_name"], written["steps_per_epoch"]) == ("adamw", 2)

    def test_of_several_processes_the_first_says_it(self, monkeypatch):
        arguments = [str(TRAIN), "--data_folder=x", "--optimizer_name=adamw"]
        said = []
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            said.append(len(caught(arguments, call=train.compose_run)))
        assert said == [1, 0]
