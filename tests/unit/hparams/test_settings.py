"""Values with their places: references followed, ranges held, also at depth."""

import re

import pytest
from hyperpyyaml import resolve_references
from ruamel.yaml import YAML

from speechbrain_rev.hparams import plain_settings, resolve
from speechbrain_rev.hparams.composition import Settings
from speechbrain_rev.hparams.document import Document
from tests.unit.hparams.files import DATA, TRAIN, refusal, values


class TestReferences:
    def test_they_are_followed_as_hyperpyyaml_does(self):
        text = resolve(TRAIN, DATA)
        settings = Settings(Document("train.yaml", text))
        expected = YAML(typ="rt").load(resolve_references(text).getvalue())
        found = settings.plain_values()
        assert len(found) > 40
        assert found == {key: expected[key] for key in found}

    def test_a_placeholder_makes_what_refers_to_it_wait(self):
        settings = Settings(Document("x.yaml", "a: !PLACEHOLDER\nb: !ref <a>/x\n"))
        assert settings.plain_values() == {}
        settings.give({"a": "data"}, "command line")
        assert settings.plain_values() == {"a": "data", "b": "data/x"}

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (
                "folder: !ref <sead>/x",
                "folder refers to an unknown key 'sead'. Did you mean seed",
            ),
            (
                "encoder: {name: !copy <arhc>}",
                "encoder.name refers to an unknown key 'arhc'. Did you mean",
            ),
            (
                "folder: !ref <loader[batsh]>",
                "unknown key 'loader.batsh'. Did you mean loader.batch?",
            ),
            ("names: [a, !ref <nosuch>]", "names[1] refers to an unknown key 'nosuch'"),
            ("seed: !ref <seed>", "references go in a circle: seed -> seed"),
            ("seed: !ref <seconds>", "circle: seed -> seconds -> seed"),
            ("margin: !ref <seed> / 0", "margin cannot be computed: <seed> / 0 is"),
            (
                "lr: !ref <seed> ** <seed> ** 2",
                "lr cannot be computed: <seed> ** <seed> ** 2 is 1986 ** 1986 ** 2.",
            ),
            ("lr: !ref <seed> ** 999999", "lr cannot be computed: <seed> ** 999999"),
            (
                "data_folder: <nope>",
                "data_folder is <nope>, and where trials_folder refers to it, Hyper",
            ),
            ('data_folder: "<>/x"', "data_folder is <>/x, and where trials_folder"),
            (
                "seed: !ref <arch>",
                "to 4294967295, not revnet57 (!ref <arch>). For another",
            ),
            (
                "seed: !ref <margin>",
                "to 4294967295, not 0.2 (!ref <margin>). For another",
            ),
            ("margin: !ref <seed>", "and below 3.14159, not 1986 (!ref <seed>)"),
            (
                "speeds: [!ref <arch>]",
                "and of at most 10, such as [1.0, 0.9], not [<arch",
            ),
        ],
    )
    def test_one_to_nothing_in_a_circle_or_out_of_range_is_refused(
        self, write, content, said
    ):
        file = write(near=f"base: train.yaml\n{content}\n") / "near.yaml"
        assert re.search(rf"\S+\.yaml, line \d+: .*{re.escape(said)}", refusal(file))

    def test_one_on_the_command_line_is_refused_too(self):
        said = refusal(TRAIN, {"output_folder": "!ref results/<sed>"})
        assert said.startswith("command line: output_folder refers to an unknown key")

    def test_one_in_a_complete_file_is_refused_too(self, write):
        file = write(mine="seed: 1\nfolder: !ref results/<sed>\n") / "mine.yaml"
        assert refusal(file).startswith(f"{file}, line 2: folder refers to an unknown")

    @pytest.mark.parametrize(
        "reference", ["<encoder.width>", "<loader[inner][deep]>", "<names>", "<empty>"]
    )
    def test_one_to_an_attribute_an_entry_a_list_or_nothing_is_left_alone(
        self, write, reference
    ):
        file = write(near=f"base: train.yaml\nempty2: !ref {reference}\n")
        complete = file / "train.yaml"
        complete.write_text(f"{complete.read_text()}other: !ref {reference}\n")
        assert resolve(complete).endswith(f"other: !ref {reference}\n")

    def test_a_circle_may_be_broken_by_a_value(self, write):
        folder = write(mine="x: !ref <y>\ny: !ref <x>\nz: [!ref <z>]\n")
        said = refusal(folder / "mine.yaml")
        assert "references go in a circle: x -> y -> x" in said
        composed = resolve(folder / "mine.yaml", {"x": 1, "z": [2]})
        assert composed == "x: 1\ny: !ref <x>\nz: [2]\n"

    def test_an_attribute_is_known_once_objects_are_built(self):
        settings = Settings(Document("x.yaml", "x: 5\nmargin: !ref <x.imag>\n"))
        assert settings.plain_values() == {"x": 5}
        settings.check()


class TestPlaces:
    def test_each_value_is_known_to_be_where_it_was_written(self, write):
        folder = write(near="base: train.yaml\n\nnames: [c]\nlr: 0.1\n")
        complete = Document("train.yaml", (folder / "train.yaml").read_text())
        settings = Settings(complete)
        settings.override(Document("near.yaml", (folder / "near.yaml").read_text()))
        settings.give({"lr": 0.2}, "command line")
        places = {key: settings.where(key) for key in ("seed", "names", "lr", "empty")}
        assert places == {
            "seed": "train.yaml, line 2",
            "names": "near.yaml, line 3",
            "lr": "command line",
            "empty": "train.yaml, line 18",
        }

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (
                "wav_augment: {augment_prob: 2}",
                "wav_augment.augment_prob takes a numbe",
            ),
            (
                "wav_augment: {seed: null}",
                "wav_augment.seed takes an integer from 0 to 4294967295, not null",
            ),
            ("opt_class: {name: adamv}", "opt_class.name takes sgd, adam or adamw"),
            ("classifier: {out_neurons: 0}", "classifier.out_neurons takes an integer"),
        ],
    )
    def test_what_stands_for_a_knob_at_depth_is_held_to_its_range(
        self, tmp_path, content, said
    ):
        file = tmp_path / "mine.yaml"
        file.write_text(f"base: {TRAIN}\n{content}\n")
        assert refusal(file).startswith(f"{file}, line 2: {said}")

    def test_it_is_held_to_it_however_often_it_is_changed(self, tmp_path):
        for base, name, margin in (
            (TRAIN, "far", 0.5),
            ("far.yaml", "middle", 0.6),
            ("middle.yaml", "near", 9.0),
        ):
            lines = f"base: {base}\ncompute_cost: {{margin: {margin}}}\n"
            (tmp_path / f"{name}.yaml").write_text(lines)
        assert (
            values(resolve(tmp_path / "middle.yaml"))["compute_cost"]["margin"] == 0.6
        )
        said = "near.yaml, line 2: compute_cost.margin takes a number"
        assert said in refusal(tmp_path / "near.yaml")

    def test_null_at_depth_means_what_it_means_for_the_knob(self, tmp_path):
        file = tmp_path / "mine.yaml"
        file.write_text(f"base: {TRAIN}\nwav_augment: {{noise_folder: null}}\n")
        found = values(resolve(file, {"noise_folder": "x"}))
        assert found["wav_augment"]["noise_folder"] is None


class TestPlainSettings:
    def test_they_are_read_with_their_references_followed(self):
        found = plain_settings(
            "seed: 3\nrate: 16000\nspeeds: [1.0, 0.9]\nnothing: null\n"
            "folder: !ref results/<seed>\nseconds: !ref <rate> * 2\n"
        )
        assert found == {
            "seed": 3,
            "rate": 16000,
            "speeds": [1.0, 0.9],
            "nothing": None,
            "folder": "results/3",
            "seconds": 32000,
        }

    def test_objects_are_neither_built_nor_listed(self, tmp_path):
        mark = tmp_path / "mark"
        text = f"a: !apply:pathlib.Path.touch ['{mark}']\nb: {{c: 1}}\nd: !name:os.system\n"
        assert plain_settings(text) == {}
        assert not mark.exists()
