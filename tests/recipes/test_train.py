"""Whole runs of train.py: what they leave, how they go on, and what is refused."""

import contextlib
import subprocess
import sys
import types

import pytest
import torch
import yaml

from speechbrain_rev import lobes
from speechbrain_rev.devices import usable_cpus
from speechbrain_rev.hparams import plain_settings
from speechbrain_rev.planner import Plan
from speechbrain_rev.reversible import StreamError, StreamWarning
from tests.recipes.conftest import in_process
from tests.recipes.runs import (
    FEW_STEPS,
    HPARAMS,
    SHORT,
    TINY,
    arguments,
    assert_same_weights,
    log,
    run,
    weights,
)
from tests.unit.reversible.chains import Differs

SPEEDS, SPEAKERS = 3, 4


@pytest.fixture(scope="module")
def resumable(data):
    """Make the command of a run with noise, dither and 8-bit states."""
    noise = {"noise_folder": data.parent / "noise"}
    kaldi = {"features": "kaldi", "pooling_variance": "unbiased"}
    adamw = {"optimizer_name": "adamw", "embedding_dim": 128}
    return lambda folder, **changed: arguments(
        data, folder, **noise, **kaldi, **adamw, **changed
    )


@pytest.fixture(scope="module")
def dropping():
    """Run the script as ``run`` does: with dropout of outputs, in one thread."""

    def main(argv):
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        with in_process() as train, pytest.MonkeyPatch.context() as patch:
            embed = train.SpeakerBrain.compute_forward

            def drop_out(self, batch, stage):
                outputs = embed(self, batch, stage)
                if stage == train.sb.Stage.TRAIN:
                    outputs = outputs * (torch.rand_like(outputs) > 0.1)
                return outputs

            patch.setattr(train.SpeakerBrain, "compute_forward", drop_out)
            train.main(argv)
        torch.set_num_threads(before)

    return main


@pytest.fixture(scope="module")
def uninterrupted(dropping, resumable, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    dropping(resumable(folder))
    return folder


def test_a_run_leaves_what_scoring_needs_and_a_line_an_epoch(uninterrupted):
    for name in ("save/label_encoder.txt", "save/train.csv", "save/valid_trials.txt"):
        assert (uninterrupted / name).is_file(), name
    assert all(value.isfinite().all() for value in weights(uninterrupted).values())
    lines = log(uninterrupted)
    assert [(line["epoch"], line["steps"]) for line in lines] == [(1, 4), (2, 8)]
    assert all(0 <= line["valid_eer_percent"] <= 100 for line in lines)
    assert lines[-1]["margin"] == 0.2
    shown = (uninterrupted / "train_log.txt").read_text()
    assert f"valid EER %: {lines[-1]['valid_eer_percent']:.2f}" in shown


def test_the_complete_settings_are_written_with_what_was_counted(data, uninterrupted):
    text = (uninterrupted / "hyperparams.yaml").read_text()
    settings = plain_settings(text)
    assert settings["out_n_neurons"] == SPEAKERS * SPEEDS
    assert settings["steps_per_epoch"] == 4
    assert settings["trials_folder"] == str(data)
    # Readers that follow no tag and no reference find plain values.
    top = {k.value: v.tag for k, v in yaml.compose(text).value}
    assert not any(top[key].startswith("!") for key in settings)


def test_the_result_is_the_average_of_the_last_checkpoints(uninterrupted):
    states = [
        torch.load(checkpoint / "embedding_model.ckpt", weights_only=True)
        for checkpoint in (uninterrupted / "save").glob("CKPT*")
        if "end-of-epoch: true" in (checkpoint / "CKPT.yaml").read_text()
    ]
    assert len(states) == 2
    for name, value in weights(uninterrupted).items():
        mean = sum(state[name].double() for state in states) / 2
        assert torch.allclose(value.double(), mean.to(value.dtype).double(), atol=1e-6)
    assert not torch.equal(*(state["fc.weight"] for state in states))


def newest(folder, name):
    path = max((folder / "save").glob(f"CKPT*/{name}"), key=lambda p: p.stat().st_mtime)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("killed", "num_workers"),
    [
        ({"killed_in_checkpoint": 3}, 0),
        # A step after a checkpoint within the second epoch.
        pytest.param({"killed_at_step": 7}, 2, marks=pytest.mark.slow(drawn=False)),
        # The step of a checkpoint, which is not yet written.
        pytest.param({"killed_at_step": 6}, 0, marks=pytest.mark.slow(drawn=False)),
        # Before any checkpoint.
        pytest.param({"killed_at_step": 1}, 0, marks=pytest.mark.slow(drawn=False)),
    ],
)
def test_a_run_that_was_killed_resumes_to_the_same_weights(
    dropping, resumable, uninterrupted, tmp_path, killed, num_workers
):
    argv = resumable(tmp_path, num_workers=num_workers)
    ended = run(argv, **killed)
    assert ended.returncode == 9, ended.stderr
    assert not (tmp_path / "embedding_model.ckpt").exists()
    dropping(argv)
    assert_same_weights(tmp_path, uninterrupted)
    assert log(tmp_path) == log(uninterrupted)
    states = newest(tmp_path, "optimizer.ckpt")["state"].values()
    assert any(state["state1"].dtype == torch.uint8 for state in states)


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


@pytest.mark.parametrize("option", ["--dry-run", "--debug"])
def test_a_trial_prints_what_training_would_do_and_leaves_nothing(
    train, data, tmp_path, capsys, monkeypatch, option
):
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **_: pytest.fail("a trial is no run of wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    noise = data.parent / "noise"
    settings = {"mode": "compress", "noise_folder": noise, "logger": "wandb"}
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    argv = arguments(data, tmp_path, **settings)
    train.main([*argv, option])
    output = capsys.readouterr().out
    assert f"Noise: 2 files in {noise}. Reverberation: none (rir_folder)." in output
    if option == "--debug":
        assert output.count("no EER") == 2
        assert "embedding_model.ckpt is not written" in output
    else:
        assert "4 steps per epoch" in output
        assert "No block is computed twice with these modes." in output
        assert "Compressed activations: " in output
        assert "wandb in project mine, with files in" in output
    assert not list((tmp_path / "save").glob("CKPT*"))
    for name in ("train_log.jsonl", "embedding_model.ckpt"):
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("verify", "differs", "line"),
    [
        ("first", False, "Blocks that are computed twice: 6 with equal bits."),
        ("null", False, "Blocks that are computed twice: 6 not compared (verify: null"),
        ("warn", True, "Bits differ between the two runs of a block that is computed"),
        ("first", True, None),
    ],
)
def test_a_dry_run_compares_the_bits_of_what_is_computed_twice(
    train, data, tmp_path, capsys, monkeypatch, verify, differs, line
):
    def broken(self, *args, _build=lobes.SpeakerEncoder.__init__, **kwargs):
        _build(self, *args, **kwargs)
        block = self.stages[0].chain.blocks[0]
        block.f = Differs(block.f)

    if differs:
        monkeypatch.setattr(lobes.SpeakerEncoder, "__init__", broken)
    trains, named = contextlib.nullcontext(), r"In block 0 of stages\.0\.chain"
    if line is None:
        trains = pytest.raises(StreamError, match=named)
    elif differs:
        trains = pytest.warns(StreamWarning, match=named)
    argv = arguments(data, tmp_path, **FEW_STEPS, verify=verify)
    with trains:
        train.main([*argv, "--zero_init_residual=false", "--dry_run"])
    assert (line or "") in capsys.readouterr().out


@pytest.mark.slow
def test_a_terminal_is_shown_what_asks_something_and_the_log_has_the_rest(
    data, tmp_path
):
    routine = ["torchvision is not available", "Applied quirks", "Run option precision"]
    workers = usable_cpus() + 1
    argv = arguments(data, tmp_path, num_workers=workers, **FEW_STEPS)
    done = run([*argv, "--dry_run"])
    assert done.returncode == 0, done.stderr
    shown, log = done.stdout + done.stderr, (tmp_path / "log.txt").read_text()
    assert "2 steps per epoch" in shown
    assert f"num_workers is {workers}, more than the {workers - 1} CPUs" in shown
    assert "This DataLoader will create" not in shown
    assert [line in shown for line in routine] == [False] * 3
    assert [line in log for line in routine] == [True] * 3


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"data_folder": "nowhere"},
            r"data folder .*nowhere does not exist.*Give the folder",
        ),
        ({"max_grad_norm": -1.0}, "reverse every gradient"),
        ({"batch_size": 400}, "16 utterances"),
        ({"data_parallel_count": 2}, "does not take 'data_parallel_count'"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    train, data, tmp_path, changed, named
):
    argv = arguments(data, tmp_path / "run", **{"embedding_dim": 128, **changed})
    with pytest.raises(ValueError, match=named):
        train.main(argv)
    assert not (tmp_path / "run" / "embedding_model.ckpt").exists()


@pytest.mark.parametrize("options", [[], ["--dry_run"]])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"data_folder": "nowhere"}, "data folder .*nowhere does not exist"),
        ({"train_list": "nowhere.txt"}, "No such file or directory: 'nowhere.txt'"),
        ({"noise_folder": "nowhere"}, "noise_folder is nowhere, which does not exist"),
        ({"rir_folder": "nowhere"}, "rir_folder is nowhere, which does not exist"),
    ],
)
def test_data_that_are_not_there_are_refused_before_a_folder_is_made(
    train, data, tmp_path, options, changed, words
):
    argv = [*arguments(data, tmp_path / "results" / "run", **changed), *options]
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        train.main(argv)
    assert not any(tmp_path.iterdir())


def test_the_rate_is_that_of_the_utterances_of_an_optimizer_step(train, data, tmp_path):
    rates = []
    for factor in (1, 2):
        folder = tmp_path / str(factor)
        settings = {"warmup_epochs": 0.5, "steps_per_epoch": 4}
        argv = arguments(data, folder, **SHORT | settings)
        train.main([*argv, f"--grad_accumulation_factor={factor}"])
        rates.append(log(folder)[0]["lr"])
    assert rates[1] == pytest.approx(2 * rates[0])


def test_help_is_there_without_a_file_and_before_anything_is_imported(train, capsys):
    train.main(["--help"])
    printed = capsys.readouterr().out
    for option in ("--dry_run", "--batch_size", "--memory_budget", "--mode"):
        assert option in printed
    assert printed.splitlines()[-2:] == [
        "All settings: docs/yaml_reference.md",
        "Their values in a file: speechbrain-rev resolve FILE",
    ]
    command = [sys.executable, train.__file__, "--help"]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (alone.stdout, alone.stderr) == (printed, "")
    # As by head: whoever reads has seen enough.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as one:
        one.stdout.close()
        assert one.stderr.read() == b"train.py: ended, for its output was closed.\n"


def test_streams_that_overflow_end_training_and_are_named(
    train, data, tmp_path, monkeypatch
):
    class Overflowing(train.SpeakerBrain):
        def on_fit_start(self):
            super().on_fit_start()
            chain = self.modules.embedding_model.stages[0].chain
            torch.nn.init.constant_(chain.blocks[0].g.conv2.weight, 1e9)

    monkeypatch.setattr(train, "SpeakerBrain", Overflowing)
    with (
        pytest.warns(StreamWarning, match=r"stages\.0\.chain left their range"),
        pytest.raises(ValueError, match="more than --nonfinite_patience=1"),
    ):
        train.main(arguments(data, tmp_path, nonfinite_patience=1))


@pytest.mark.slow
def test_compression_is_logged_and_its_bounds_go_on(train, data, tmp_path):
    settings = {
        **SHORT,
        "arch": "resnet34",
        "blocks": "[1, 1, 1, 1]",
        "mode": "compress",
    }
    folder = tmp_path / "compressed"
    train.main(arguments(data, folder, **settings))
    (first,) = log(folder)
    assert first["compression_ratio"] > 2
    assert first["error_bounds"].keys() == first["compression_ratios"].keys()
    rule = newest(folder, "compression.ckpt")["processes"][0]["convolution"]
    # After a step there is a momentum, and a bound for each convolution.
    assert {"stages.0.blocks.0.conv1", "stages.1.blocks.0.conv2"} <= set(rule["bounds"])
    # Training goes where storing goes.
    train.main(arguments(data, tmp_path / "stored", **settings | {"mode": "store"}))
    (stored,) = log(tmp_path / "stored")
    assert first["train_loss"] == pytest.approx(stored["train_loss"], rel=0.05)
    trained = weights(folder).items()
    assert any(
        not torch.equal(v, weights(tmp_path / "stored")[key]) for key, v in trained
    )
    train.main(arguments(data, folder, **settings | {"number_of_epochs": 2}))
    again = newest(folder, "compression.ckpt")["processes"][0]["convolution"]
    assert again["steps"] == 2 * rule["steps"] > 0


@pytest.mark.slow(drawn=False)
def test_a_large_margin_run_starts_with_true_speakers_and_a_mixed_plan(
    train, data, tmp_path, monkeypatch
):
    start, finished = {}, tmp_path / "finished"
    folder = tmp_path / "large_margin"

    def remember_start(self, batch, _fit=train.SpeakerBrain.fit_batch):
        if not start:
            start.update({n: v.clone() for n, v in self.modules.state_dict().items()})
        return _fit(self, batch)

    def large_margin(budget):
        # The rest is the regime's, and the encoder the finished run's.
        given = {k: TINY[k] for k in ("chunk_samples", "batch_size", "valid_speakers")}
        given |= {"num_workers": 0, "data_folder": data, "pretrained": finished}
        given |= {"output_folder": folder, "memory_budget": budget}
        options = [f"--{k}={v}" for k, v in given.items()]
        train.main([str(HPARAMS / "large_margin.yaml"), *options, "--device=cpu"])

    train.main(arguments(data, finished, steps_per_epoch=2))
    with pytest.raises(ValueError, match="It lacks") as error:
        large_margin("0.05MB")
    monkeypatch.setattr(train.SpeakerBrain, "fit_batch", remember_start)
    large_margin(f"{error.value.needed_bytes + 20_000}B")
    directions = newest(finished, "classifier.ckpt")["weight"]
    assert len(directions) == SPEEDS * SPEAKERS
    assert torch.equal(start["classifier.weight"], directions[:SPEAKERS])
    for name, value in weights(finished).items():
        assert torch.equal(start[f"embedding_model.{name}"], value), name
    plan = Plan.load(folder / "plan.json")
    assert plan.measured_bytes <= plan.budget_bytes
    assert len(set(plan.modes.values())) > 1
    epochs = log(folder)
    assert [line["epoch"] for line in epochs] == [1, 2, 3, 4, 5]
    assert {line["margin"] for line in epochs} == {0.5}
    settings = plain_settings((folder / "hyperparams.yaml").read_text())
    assert settings["out_n_neurons"] == SPEAKERS
    result, last = weights(folder), newest(folder, "embedding_model.ckpt")
    assert all(torch.equal(result[name], value) for name, value in last.items())
    assert not torch.equal(result["fc.weight"], start["embedding_model.fc.weight"])
