import json

import pytest
import torch
import yaml

from speechbrain_rev.hparams import plain_settings
from tests.corpus import write_corpus, write_noise
from tests.recipes.runs import SHORT, arguments, log, run, weights


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_noise(folder / "noise")
    return write_corpus(folder / "corpus")


def resumable(data, folder, **changed):
    """A run with noise and with 8-bit states: the linear layer is large enough."""
    noise = data.parent / "noise"
    adamw = {"optimizer_name": "adamw", "embedding_dim": 128}
    return arguments(data, folder, noise_folder=noise, **adamw, **changed)


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    finished = run(resumable(data, folder))
    assert finished.returncode == 0, finished.stderr
    return folder, finished.stdout + finished.stderr


@pytest.fixture
def dropping(train, monkeypatch):
    """The script as `run` has it: outputs are dropped out, in one thread."""

    def drop_out(self, batch, stage, _embed=train.SpeakerBrain.compute_forward):
        outputs = _embed(self, batch, stage)
        return torch.nn.functional.dropout(outputs, 0.1, stage == train.sb.Stage.TRAIN)

    monkeypatch.setattr(train.SpeakerBrain, "compute_forward", drop_out)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train
    torch.set_num_threads(before)


def test_a_run_leaves_everything_that_scoring_and_embedding_need(uninterrupted):
    folder, _ = uninterrupted
    for name in (
        "hyperparams.yaml",
        "embedding_model.ckpt",
        "train_log.txt",
        "train_log.jsonl",
        "training_curves.png",
        "save/label_encoder.txt",
        "save/train.csv",
        "save/valid_trials.txt",
    ):
        assert (folder / name).is_file(), name
    assert all(value.isfinite().all() for value in weights(folder).values())


def test_each_epoch_is_logged_with_its_validation_error(uninterrupted):
    folder, output = uninterrupted
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").open()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert [line["steps"] for line in lines] == [4, 8]
    for line in lines:
        assert 0 <= line["valid_eer_percent"] <= 100
        assert line["utterances_per_second"] > 0
        assert line["process_resident_peak_bytes"] > 0
    assert lines[-1]["margin"] == 0.2
    assert f"valid EER %: {lines[-1]['valid_eer_percent']:.2f}" in output


def test_the_complete_settings_are_written_with_what_was_counted(data, uninterrupted):
    text = (uninterrupted[0] / "hyperparams.yaml").read_text()
    settings = plain_settings(text)
    assert settings["out_n_neurons"] == 4 * 3
    assert settings["steps_per_epoch"] == 4
    assert settings["trials_folder"] == str(data)
    # Readers that follow no tag and no reference find plain values.
    top = {k.value: v.tag for k, v in yaml.compose(text).value}
    assert not any(top[key].startswith("!") for key in settings)


def test_the_result_is_the_average_of_the_last_checkpoints(uninterrupted):
    folder, _ = uninterrupted
    states = [
        torch.load(checkpoint / "embedding_model.ckpt", weights_only=True)
        for checkpoint in (folder / "save").glob("CKPT*")
        if "end-of-epoch: true" in (checkpoint / "CKPT.yaml").read_text()
    ]
    assert len(states) == 2
    for name, value in weights(folder).items():
        mean = sum(state[name].double() for state in states) / 2
        assert torch.allclose(value.double(), mean.to(value.dtype).double(), atol=1e-6)
    assert not torch.equal(*(state["fc.weight"] for state in states))


@pytest.mark.parametrize(
    ("killed_at_step", "num_workers"),
    [
        (7, 2),  # a step after a checkpoint within the second epoch
        (6, 0),  # the step of a checkpoint, which is not yet written
        (1, 0),  # before any checkpoint
    ],
)
@pytest.mark.slow
def test_a_run_killed_in_mid_epoch_resumes_to_the_same_weights(
    dropping, data, uninterrupted, tmp_path, killed_at_step, num_workers
):
    argv = resumable(data, tmp_path, num_workers=num_workers)
    killed = run(argv, killed_at_step=killed_at_step)
    assert killed.returncode == 9, killed.stderr
    assert not (tmp_path / "embedding_model.ckpt").exists()
    dropping.main(argv)
    assert_is_as(tmp_path, uninterrupted[0])


def test_a_run_killed_while_it_writes_a_checkpoint_resumes_to_the_same_weights(
    dropping, data, uninterrupted, tmp_path
):
    argv = resumable(data, tmp_path)
    killed = run(argv, killed_in_checkpoint=3)
    assert killed.returncode == 9, killed.stderr
    assert len(list((tmp_path / "save").glob("CKPT*"))) > 1
    dropping.main(argv)
    assert_is_as(tmp_path, uninterrupted[0])


def assert_is_as(folder, uninterrupted):
    expected = weights(uninterrupted)
    for name, value in weights(folder).items():
        assert torch.equal(value, expected[name]), name
    assert log(folder) == log(uninterrupted)


def test_the_run_that_must_resume_has_8_bit_states(uninterrupted):
    path = max((uninterrupted[0] / "save").glob("CKPT*/optimizer.ckpt"))
    states = torch.load(path, weights_only=True)["state"].values()
    quantized = [state["__bnb_optimizer_quant_state__"] for state in states]
    assert any(moment["state1"].dtype == torch.uint8 for moment in quantized)


@pytest.mark.slow
def test_a_run_without_validation_resumes_from_the_end_of_an_epoch(
    dropping, data, tmp_path
):
    settings = {"valid_speakers": 0, "ckpt_interval_steps": 0, "steps_per_epoch": 4}
    whole, parts = (arguments(data, tmp_path / name, **settings) for name in "ab")
    dropping.main(whole)
    assert run(parts, killed_at_step=7).returncode == 9
    dropping.main(parts)
    assert_is_as(tmp_path / "b", tmp_path / "a")
    assert "valid_eer_percent" not in log(tmp_path / "a")[0]


@pytest.mark.slow
def test_two_processes_share_each_batch_and_leave_one_result(data, tmp_path):
    argv = [*arguments(data, tmp_path, ckpt_interval_steps=0), "--noprogressbar"]
    finished = run([*argv, "--distributed_backend=gloo"], processes=2)
    assert finished.returncode == 0, finished.stderr
    assert [line["steps"] for line in log(tmp_path)] == [4, 8]
    assert (tmp_path / "train_log.txt").read_text().count("epoch:") == 2
    # Not "module.stem...", as the wrapper of several processes would name them.
    assert "fc.weight" in weights(tmp_path)


def test_a_run_ends_its_group_of_processes(train, data, tmp_path, monkeypatch):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)

    def one_process(run_opts):
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    monkeypatch.setattr(train.sb.utils.distributed, "ddp_init_group", one_process)
    argv = [*arguments(data, tmp_path / "run"), "--distributed_backend=gloo"]
    try:
        train.main([*argv, "--dry_run"])
        assert not torch.distributed.is_initialized()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_a_dry_run_says_what_training_would_take_and_trains_nothing(
    train, data, tmp_path, capsys
):
    train.main([*arguments(data, tmp_path), "--dry-run"])
    output = capsys.readouterr().out
    assert "4 steps per epoch" in output
    assert "min for 2 epochs" in output
    assert "GiB" in output
    assert not list((tmp_path / "save").glob("CKPT*"))


def test_a_dry_run_says_how_much_smaller_activations_become(
    train, data, tmp_path, capsys
):
    train.main([*arguments(data, tmp_path), "--dry_run", "--mode=compress"])
    assert "Compressed activations: " in capsys.readouterr().out


def test_a_run_continues_from_a_pretrained_one(train, data, uninterrupted, tmp_path):
    train.main(
        arguments(
            data,
            tmp_path,
            pretrained_run=uninterrupted[0],
            embedding_dim=128,
            valid_speakers=2,
            number_of_epochs=1,
            warmup_epochs=0.0,
            lr=1e-12,
            final_lr=1e-12,
            weight_decay=0.0,
            average_checkpoints=1,
        )
    )
    start, end = weights(uninterrupted[0]), weights(tmp_path)
    assert torch.allclose(start["fc.weight"], end["fc.weight"], atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"data_folder": "nowhere"}, r"data folder nowhere does not exist.*Accepted"),
        ({"max_grad_norm": -1.0}, "reverse every gradient"),
        ({"average_checkpoints": 3}, "keep_checkpoints is 2"),
        ({"pretrained_run": "nowhere"}, "pretrained_run is nowhere"),
        ({"batch_size": 400}, "16 utterances"),
        ({"data_parallel_count": 2}, "does not take 'data_parallel_count'"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    train, data, tmp_path, changed, named
):
    argv = arguments(data, tmp_path, **changed)
    with pytest.raises(ValueError, match=named):
        train.main(argv)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 3}, "has other speakers, or numbered differently"),
        (
            {"speeds": "[1.0, 0.9, 1.2]"},
            r"speeds \[1\.0, 0\.9, 1\.1\], this run \[1\.0",
        ),
        ({"embedding_dim": 64}, "do not fit: set arch, widths"),
    ],
)
def test_a_pretrained_run_of_other_classes_or_shape_is_refused(
    train, data, uninterrupted, tmp_path, changed, named
):
    settings = {"embedding_dim": 128, "sentence_len": 0.4, **changed}
    argv = arguments(data, tmp_path, pretrained_run=uninterrupted[0], **settings)
    with pytest.raises(ValueError, match=named):
        train.main(argv)


def test_a_run_with_checkpoints_refuses_other_data_settings(train, data, tmp_path):
    folder = tmp_path / "save" / "CKPT+2026"
    folder.mkdir(parents=True)
    (folder / "CKPT.yaml").touch()
    with pytest.raises(ValueError, match="has checkpoints, but no prepared"):
        train.main(arguments(data, tmp_path))


def test_debug_validates_without_eer_and_leaves_the_run_alone(
    train, data, tmp_path, capsys
):
    train.main([*arguments(data, tmp_path), "--debug"])
    output = capsys.readouterr().out
    assert output.count("no EER") == 2
    assert "embedding_model.ckpt is not written" in output
    assert not (tmp_path / "train_log.jsonl").exists()
    assert not (tmp_path / "embedding_model.ckpt").exists()
    assert not list((tmp_path / "save").glob("CKPT*"))


def test_the_augmentation_that_is_on_is_named(train, data, tmp_path, capsys):
    noise = data.parent / "noise"
    argv = arguments(data, tmp_path, noise_folder=noise, data_folder=data)
    train.main([*argv, "--dry_run"])
    output = capsys.readouterr().out
    assert f"Noise: 2 files in {noise}. Reverberation: none (rir_folder)." in output


def test_the_rate_is_that_of_the_utterances_of_an_optimizer_step(train, data, tmp_path):
    rates = []
    for factor in (1, 2):
        folder = tmp_path / str(factor)
        settings = {"warmup_epochs": 0.5, "steps_per_epoch": 4}
        argv = arguments(data, folder, **SHORT | settings)
        train.main([*argv, f"--grad_accumulation_factor={factor}"])
        rates.append(log(folder)[0]["lr"])
    assert rates[1] == pytest.approx(2 * rates[0])


def test_help_is_there_without_a_file(train, capsys):
    train.main(["--help"])
    assert "--dry_run" in capsys.readouterr().out
