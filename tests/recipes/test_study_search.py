"""The search of one setting for all encoders."""

import json

import pytest

from tests.recipes.study import study
from tests.recipes.tiny_study import tiny_size, write_data

search, trainings = study("search"), study("running.trainings")
SMALL = search.SIZES["small"]


def test_every_candidate_trains_every_encoder_of_the_study(tmp_path):
    runs = search.runs_of(tmp_path, SMALL)
    encoders = {"resnet34", "revnet46", "revnet57"}
    encoders |= {"df_resnet56", "df_revnet66", "df_revnet89"}
    for candidate, changed in search.CANDIDATES.items():
        own = [r for r in runs if r.condition.name.startswith(f"{candidate}: ")]
        assert {run.condition.arch for run in own} == encoders
        assert all(changed.items() <= run.condition.settings.items() for run in own)
    assert len({run.folder for run in runs}) == len(runs)


def test_the_best_mean_of_the_last_epochs_is_first(tmp_path):
    runs = search.runs_of(tmp_path, SMALL)
    for run in runs:
        run.folder.mkdir(parents=True)
        last = 10.0 if run.condition.name.startswith("scale 64: ") else 20.0
        lines = [json.dumps({"valid_eer_percent": rate}) for rate in (1.0, last)]
        (run.folder / "train_log.jsonl").write_text("\n".join(lines) + "\n")
    rows = search.table(search.valid_eers(runs)).splitlines()[2:]
    assert len(rows) == len(search.CANDIDATES)
    assert rows[0].startswith("| scale 64 ")
    assert rows[0].split("|")[-2].strip() == "10.0"


def test_held_out_speakers_are_asked_for_whatever_the_size_says(tmp_path, monkeypatch):
    asked = {}

    def remember(runs, settings, size, hparams, *, jobs):
        asked.update(settings | size.settings_of("resnet34"))
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "train_all", remember)
    argv = [str(tmp_path), f"--output={tmp_path / 'out'}", "--valid_speakers=7"]
    with pytest.raises(KeyboardInterrupt):
        search.main(argv)
    assert asked["valid_speakers"] == 7
    assert "trial_lists" not in asked


def test_what_was_searched_before_is_kept_beside_what_is_chosen(
    tmp_path, monkeypatch, capsys
):
    data, output = tmp_path, tmp_path / "out"
    checked = []
    monkeypatch.setattr(
        search, "check_settings", lambda run, *arguments: checked.append(run.name)
    )

    def pretend(runs, settings, size, hparams, *, jobs):
        for run in runs:
            rate = 20.0 if run.condition.arch == "resnet34" else 10.0
            run.folder.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"valid_eer_percent": rate})
            (run.folder / "train_log.jsonl").write_text(f"{line}\n")
            (run.folder / run.work.result).touch()

    monkeypatch.setattr(search, "train_all", pretend)
    monkeypatch.setattr(search, "without_training", lambda *arguments: {})
    argv = [str(data), f"--output={output}", "--candidates", "scale 10", "--encoders"]
    search.main([*argv, "resnet34"])
    search.main([*argv, "revnet46"])
    found = json.loads((output / search.RESULTS).read_text())
    assert found == {"scale 10": {"resnet34": 20.0, "revnet46": 10.0}}
    assert [name.partition(",")[0] for name in checked] == ["scale 10: resnet34"]
    second = capsys.readouterr().out.split("trainings")[-1]
    assert "revnet46" in second
    assert "resnet34" not in second


@pytest.mark.parametrize("size", ["small", "full"])
def test_rates_are_parts_of_the_rate_of_the_size(tmp_path, size):
    size = search.SIZES[size]
    given = {"data_folder": "data", **size.settings}
    rate = trainings.resolved(search.HPARAMS, given)["lr"]
    rates = {
        run.condition.name.partition(":")[0]: run.condition.settings.get("lr", rate)
        for run in search.runs_of(tmp_path, size)
    }
    assert rates.pop("half the rate") == rate / 2
    assert rates.pop("twice the rate") == 2 * rate
    assert set(rates.values()) == {rate}


def test_what_failed_does_not_cost_what_was_found(tmp_path, monkeypatch, capsys):
    def fail(runs, settings, size, hparams, *, jobs):
        one, other = runs
        one.folder.mkdir(parents=True)
        line = json.dumps({"valid_eer_percent": 12.5})
        (one.folder / "train_log.jsonl").write_text(f"{line}\n")
        (one.folder / one.work.result).touch()
        raise trainings.TrainingsFailed({other: "It diverged."})

    monkeypatch.setattr(search, "train_all", fail)
    monkeypatch.setattr(search, "without_training", lambda *arguments: {})
    output = tmp_path / "out"
    argv = [str(tmp_path), f"--output={output}", "--candidates", "as it is"]
    with pytest.raises(SystemExit, match="It diverged"):
        search.main([*argv, "--encoders", "resnet34", "revnet46"])
    assert json.loads((output / search.RESULTS).read_text()) == {
        "as it is": {"resnet34": 12.5}
    }
    assert "12.5" in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_trains_alone_and_tells_what_needs_no_training(
    tmp_path, monkeypatch, capsys
):
    data, noise = write_data(tmp_path)
    monkeypatch.setitem(search.SIZES, "small", tiny_size())
    output = tmp_path / "out"
    argv = [str(data), f"--noise={noise}", f"--output={output}", "--valid_speakers=2"]
    argv += ["--candidates", "as it is", "--encoders", "resnet34", "revnet46"]
    search.main(argv)
    shown = capsys.readouterr().out
    assert "| as it is |" in shown
    for name in ("deviation", "mean and deviation"):
        assert f"Without training, {name} of filterbanks, cosine: " in shown
    found = json.loads((output / search.RESULTS).read_text())
    assert found["as it is"].keys() == {"resnet34", "revnet46"}
    for run in search.runs_of(output, tiny_size(), ["as it is"], found["as it is"]):
        assert (run.folder / "embedding_model.ckpt").is_file()
        assert not (run.folder / "embeddings").exists()
