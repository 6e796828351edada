"""What a run's folder keeps when something else is done in it."""

import shutil

import pytest

from speechbrain_rev.inference import SpeakerEmbedder
from tests.corpus import write_corpus
from tests.recipes.runs import SHORT, arguments, recipe


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def script():
    """The recipe's script, for use in this process: SpeechBrain's log stays off."""
    script = recipe("train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.sb, "create_experiment_directory", lambda folder: None)
        yield script


@pytest.fixture(scope="module")
def finished(script, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    script.main(arguments(data, folder, **SHORT))
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder):
    """Read all files of a run."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


@pytest.mark.parametrize("option", [[], ["--dry_run"], ["--debug"]])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"arch": "revnet46"}, "arch: was revnet57, is revnet46"),
        ({"n_mels": 40}, "n_mels: was 24, is 40"),
        ({"speeds": "[1.0]"}, r"speeds: was \[1\.0, 0\.9, 1\.1\], is \[1\.0\]"),
    ],
)
def test_another_network_is_refused_and_the_run_stays_as_it_is(
    script, data, folder, option, changed, words
):
    before = contents(folder)
    with pytest.raises(ValueError, match=rf"another network \({words}\).*another outp"):
        script.main([*arguments(data, folder, **SHORT | changed), *option])
    assert contents(folder) == before


def test_a_folder_of_weights_alone_is_not_written_into_either(script, data, folder):
    shutil.rmtree(folder / "save")
    before = contents(folder)
    with pytest.raises(ValueError, match="arch: was revnet57, is revnet46"):
        script.main([*arguments(data, folder, **SHORT, arch="revnet46"), "--dry_run"])
    assert contents(folder) == before


@pytest.mark.parametrize("option", ["--dry_run", "--debug"])
def test_a_trial_in_a_run_s_folder_leaves_its_settings_and_plan(
    script, data, folder, option, capsys
):
    before = contents(folder)
    changed = {"number_of_epochs": 3, "memory_budget": "1GB", "lr": 0.5}
    script.main([*arguments(data, folder, **SHORT | changed), option])
    assert contents(folder) == before
    # It was tried with what was given.
    assert option == "--debug" or "for 3 epochs" in capsys.readouterr().out
    assert SpeakerEmbedder.from_run(folder)


def test_a_folder_of_the_user_s_is_not_the_trial_s(script, data, folder):
    (folder / "trial").mkdir()
    (folder / "trial" / "notes.txt").write_text("mine")
    before = contents(folder)
    script.main([*arguments(data, folder, **SHORT), "--dry_run"])
    assert contents(folder) == before


def test_a_trial_with_another_batch_is_not_held_to_the_plan_of_the_run(
    script, data, folder
):
    budget = {"memory_budget": "1GB"}
    script.main(arguments(data, folder, **SHORT | budget | {"number_of_epochs": 2}))
    before = contents(folder)
    other = SHORT | budget | {"batch_size": 2}
    script.main([*arguments(data, folder, **other), "--dry_run"])
    assert contents(folder) == before


def test_what_debugging_persistently_leaves_has_its_settings(script, data, folder):
    argv = arguments(data, folder, **SHORT | {"number_of_epochs": 2, "lr": 0.5})
    script.main([*argv, "--debug", "--debug_persistently"])
    assert "lr: 0.5" in (folder / "hyperparams.yaml").read_text()


@pytest.mark.parametrize(
    ("widths", "other"), [("null", False), ("[8, 8, 8, 16]", True)]
)
def test_published_widths_are_those_that_are_meant_by_null(tmp_path, widths, other):
    settings = recipe("run_settings")
    record = f"arch: revnet57\nwidths: {widths}\nblocks: null\n"
    (tmp_path / "hyperparams.yaml").write_text(record)
    (tmp_path / "embedding_model.ckpt").touch()
    now = {"output_folder": str(tmp_path), "save_folder": str(tmp_path / "save")}
    now |= {"arch": "revnet57", "widths": [48, 96, 192, 300], "blocks": None}
    if not other:
        settings.refuse_other_network(now)
        return
    with pytest.raises(ValueError, match=r"widths: was \[8, 8, 8, 16\], is \[48"):
        settings.refuse_other_network(now)


def test_a_trial_that_fails_leaves_them_too(script, data, folder):
    before = contents(folder)
    argv = arguments(data, folder, **SHORT | {"memory_budget": "0.05MB"})
    with pytest.raises(ValueError, match="It lacks"):
        script.main([*argv, "--dry_run"])
    assert contents(folder) == before


def test_more_epochs_go_on_with_the_run(script, data, folder):
    script.main(arguments(data, folder, **SHORT | {"number_of_epochs": 2}))
    assert "number_of_epochs: 2" in (folder / "hyperparams.yaml").read_text()
