"""What a run's folder keeps when something else is done in it."""

import shutil

import pytest

from speechbrain_rev.inference import SpeakerEmbedder
from tests.corpus import write_corpus
from tests.recipes.runs import SHORT, arguments, recipe

#: Whose chunk is not searched: what was counted for one trial serves the others.
FEW_STEPS = SHORT | {"steps_per_epoch": 2, "chunk": "null"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def finished(train, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train.main(arguments(data, folder, **FEW_STEPS))
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder):
    """Read all files of a run."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


OTHER_ARCH = {"arch": "revnet46"}, "arch: was revnet57, is revnet46"


@pytest.mark.parametrize(
    ("option", "changed", "words"),
    [
        ([], *OTHER_ARCH),
        (["--dry_run"], *OTHER_ARCH),
        (["--debug"], *OTHER_ARCH),
        ([], {"n_mels": 40}, "n_mels: was 24, is 40"),
        ([], {"speeds": "[1.0]"}, r"speeds: was \[1\.0, 0\.9, 1\.1\], is \[1\.0\]"),
    ],
)
def test_another_network_is_refused_and_the_run_stays_as_it_is(
    train, data, folder, option, changed, words
):
    before = contents(folder)
    with pytest.raises(ValueError, match=rf"another network \({words}\).*another outp"):
        train.main([*arguments(data, folder, **FEW_STEPS | changed), *option])
    assert contents(folder) == before


def test_a_folder_of_weights_alone_is_not_written_into_either(train, data, folder):
    shutil.rmtree(folder / "save")
    before = contents(folder)
    with pytest.raises(ValueError, match="arch: was revnet57, is revnet46"):
        train.main(
            [*arguments(data, folder, **FEW_STEPS, arch="revnet46"), "--dry_run"]
        )
    assert contents(folder) == before


@pytest.mark.parametrize("option", ["--dry_run", "--debug"])
def test_a_trial_in_a_run_s_folder_leaves_its_settings_and_plan(
    train, data, folder, option, capsys
):
    """Nor is it held to that plan, which may be of another batch."""
    (folder / "plan.json").write_text("no plan of this batch")
    before = contents(folder)
    changed = {"number_of_epochs": 3, "memory_budget": "1GB", "lr": 0.5}
    train.main([*arguments(data, folder, **FEW_STEPS | changed), option])
    assert contents(folder) == before
    # It was tried with what was given.
    assert option == "--debug" or "for 3 epochs" in capsys.readouterr().out
    assert SpeakerEmbedder.from_run(folder)


def test_a_folder_of_the_user_s_is_not_the_trial_s(train, data, folder):
    (folder / "trial").mkdir()
    (folder / "trial" / "notes.txt").write_text("mine")
    before = contents(folder)
    train.main([*arguments(data, folder, **FEW_STEPS), "--dry_run"])
    assert contents(folder) == before


def test_what_debugging_persistently_leaves_has_its_settings(train, data, folder):
    argv = arguments(data, folder, **FEW_STEPS | {"number_of_epochs": 2, "lr": 0.5})
    train.main([*argv, "--debug", "--debug_persistently"])
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


def test_a_trial_that_fails_leaves_them_too(train, data, folder):
    before = contents(folder)
    argv = arguments(data, folder, **FEW_STEPS | {"memory_budget": "0.05MB"})
    with pytest.raises(ValueError, match="It lacks"):
        train.main([*argv, "--dry_run"])
    assert contents(folder) == before


def test_more_epochs_go_on_with_the_run(train, data, folder):
    train.main(arguments(data, folder, **FEW_STEPS | {"number_of_epochs": 2}))
    assert "number_of_epochs: 2" in (folder / "hyperparams.yaml").read_text()
