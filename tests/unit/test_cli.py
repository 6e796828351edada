import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from speechbrain_rev import __version__, cli, environment, whole_files
from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import ModelsReport, Training, plans, select, steps
from speechbrain_rev.catalog.breakdown import before_and_after
from speechbrain_rev.catalog.plans import plan_encoders, sweep_encoder
from speechbrain_rev.catalog.render import BreakdownReport, PlansReport, SweepReport
from speechbrain_rev.data.packing import Packing
from speechbrain_rev.hparams import resolve
from speechbrain_rev.inference import EmbeddingArchive, SpeakerEmbedder, export_run
from speechbrain_rev.inference.run_folder import read_weights
from speechbrain_rev.planner import Plan, profiling
from speechbrain_rev.planner.timing import ASSUMED, Speed
from speechbrain_rev.sizes import parse_card
from tests.run_folders import (
    speech_like,
    write_audio,
    write_finished_run,
    write_run,
)
from tests.wespeaker import ResNet

COMMANDS = ("env", "resolve", "models", "memory", "plan", "sweep", "calibrate",
            "embed", "verify", "export", "convert")  # fmt: skip
TRAIN = Path(__file__).parents[2] / "hparams" / "train.yaml"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return str(folder)


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audio")
    return [
        str(write_audio(folder / f"{name}.wav", speech_like(0.6, seed=seed)))
        for seed, name in enumerate(["a", "b"])
    ]


def refuse(arguments, capsys):
    """Run a command that must fail; the line it says."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("speechbrain-rev: ")
    return err


class TestCommand:
    def test_help_is_there_at_once(self):
        # Each of these takes about a second to import, or more.
        code = (
            "import sys\n"
            "from speechbrain_rev.cli import main\n"
            "try: main(['--help'])\n"
            "except SystemExit: pass\n"
            "heavy = {'torch', 'numpy', 'speechbrain', 'bitsandbytes', 'matplotlib',"
            " 'rich', 'ruamel.yaml', 'triton'} & set(sys.modules)\n"
            "assert not heavy, heavy"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        for command in COMMANDS:
            assert command in done.stdout

    def test_it_runs_as_a_module(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["speechbrain_rev", "--version"])
        with pytest.raises(SystemExit) as done:
            runpy.run_module("speechbrain_rev", run_name="__main__")
        assert done.value.code == 0
        assert capsys.readouterr().out == f"{__version__}\n"

    @pytest.mark.parametrize("closed", ["stdout", "stderr"])
    def test_an_output_that_was_closed_is_no_error(self, closed, monkeypatch):
        monkeypatch.setattr(sys, closed, None)
        assert cli.main(["models", "revnet57"]) == 0
        assert cli.main(["models", "revnet58"]) == 2

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_explains_itself(self, command, capsys):
        with pytest.raises(SystemExit) as done:
            cli.main([command, "--help"])
        assert done.value.code == 0
        assert len(capsys.readouterr().out.splitlines()) > 4

    @pytest.mark.parametrize(
        "arguments",
        [[], ["resolve"], ["plan"], ["sweep", "resnet34"], ["embed", "run"], ["emb"]],
    )
    def test_an_incomplete_command_is_refused(self, arguments, capsys):
        with pytest.raises(SystemExit) as done:
            cli.main(arguments)
        assert done.value.code == 2
        assert "usage: speechbrain-rev" in capsys.readouterr().err


#: Commands that run tensors: where memory runs out in each, and what it advises.
OUT_OF_MEMORY = [
    (["plan", "resnet34", "--card=4GB"], plans, "plan_encoders", "--card=11GB"),
    (
        ["memory", "resnet34", "--mode=plan", "--card=4GB"],
        plans,
        "plan_encoders",
        "leave out --stages",
    ),
    (
        ["sweep", "resnet34", "--card=4GB"],
        plans,
        "sweep_encoder",
        "smaller --batches, or leave out --device",
    ),
    (["calibrate", "speed.json"], steps, "calibrate", "another --device"),
    (["embed", "run", "a.wav"], SpeakerEmbedder, "from_run", "--device=cpu"),
    (["verify", "run", "a.wav", "b.wav"], SpeakerEmbedder, "from_run", "--device=cpu"),
]


@pytest.mark.parametrize(("arguments", "owner", "name", "advice"), OUT_OF_MEMORY)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_is_one_line_with_advice(
    arguments, owner, name, advice, error, tmp_path, monkeypatch, capsys
):
    def greedy(*_, **__):
        raise error

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(owner, name, greedy)
    assert cli.main(arguments) == 2
    *_, told = capsys.readouterr().err.splitlines()
    assert told.startswith("speechbrain-rev: Memory ran out. ")
    assert advice in told


def test_other_errors_of_the_runtime_keep_their_traceback(monkeypatch):
    def wrong(*_, **__):
        raise RuntimeError("Expected 4 channels")

    monkeypatch.setattr(plans, "plan_encoders", wrong)
    with pytest.raises(RuntimeError, match="Expected 4 channels"):
        cli.main(["plan", "resnet34", "--card=4GB"])


class TestEnv:
    def test_it_names_what_a_bug_report_needs(self, capsys):
        assert cli.main(["env"]) == 0
        lines = capsys.readouterr().out.splitlines()
        names = [line.split()[0] for line in lines]
        assert {
            "speechbrain_rev",
            "python",
            "system",
            "torch",
            "torchaudio",
            "speechbrain",
            "bitsandbytes",
            "processor",
            "cpus",
            "ram",
            "cuda",
        } <= set(names)
        assert all(len(line.split()) > 1 for line in lines)

    def test_a_package_that_cannot_be_imported_is_no_crash(self, monkeypatch):
        def broken(name):
            raise OSError(f"{name}: undefined\nsymbol")

        monkeypatch.setattr(environment.importlib, "import_module", broken)
        found = dict(environment.environment())
        assert "cannot be imported: torchaudio: undefined symbol" in found["torchaudio"]
        assert "unknown" in found["cuda"]

    def test_a_package_that_is_absent_is_named_so(self, monkeypatch):
        monkeypatch.setattr(environment, "_PACKAGES", ("no-such-package",))
        assert dict(environment.environment())["no-such-package"] == "not installed"

    def test_every_gpu_has_a_line(self, monkeypatch):
        import torch

        class Device:
            name, total_memory, major, minor = "Fake 1080", 11 * 2**30, 7, 5

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Device)
        found = dict(environment.environment())
        assert found["cuda:1"] == "Fake 1080, 11.0 GiB, compute capability 7.5"
        assert "2 device(s)" in found["cuda"]


class TestResolve:
    def test_it_prints_the_composition_and_nothing_else(self, capsys):
        arguments = ["resolve", str(TRAIN), "--lr=0.3", "--data_folder", "a=b"]
        assert cli.main(arguments) == 0
        expected = resolve(TRAIN, {"lr": "0.3", "data_folder": "a=b"})
        assert capsys.readouterr().out == expected

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["none.yaml"], "none.yaml cannot be read: No such file"),
            ([str(TRAIN), "--optimiser_bits=8"], "Did you mean optimizer_bits"),
            ([str(TRAIN), "--lr=fast"], "lr takes a number above 0, or null, not fast"),
            ([str(TRAIN), "--arch=resnet35"], "resnet34"),
            ([str(TRAIN), "--device=cpu"], "unknown key 'device'"),
        ],
    )
    def test_a_mistake_is_one_line(self, arguments, message, capsys):
        assert message in refuse(["resolve", *arguments], capsys)

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            (["--memory_budget=11GiB"], ["memory_budget"]),
            (["--plan_file=p.json"], ["plan_file"]),
            (["--memory_budget=11GiB", "--mode=store"], []),
            ([], []),
        ],
    )
    def test_what_the_other_script_does_not_read_is_said(self, given, named, capsys):
        assert cli.main(["resolve", str(TRAIN), *given]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == len(named)
        for line, name in zip(lines, named, strict=True):
            assert f"warning: {name} is read by the training recipe" in line
            assert "!apply:speechbrain_rev.planner.Plan.load [plan.json]" in line

    # Less than stdout's buffer holds, and more.
    @pytest.mark.parametrize("lines", [1, 1000])
    def test_a_reader_that_stops_early_is_no_error(self, lines, tmp_path):
        file = tmp_path / "long.yaml"
        file.write_text("".join(f"key{line}: 1\n" for line in range(lines)))
        # `true` is gone before the first line is written.
        command = f"{sys.executable} -m speechbrain_rev resolve {file} | true"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


class TestModels:
    def test_it_answers_in_a_moment_and_without_torch(self):
        code = (
            "import sys\n"
            "from speechbrain_rev.cli import main\n"
            "assert main(['models', '--card=11GB', '--batch=128']) == 0\n"
            "heavy = {'torch', 'numpy', 'speechbrain', 'bitsandbytes', 'matplotlib',"
            " 'ruamel.yaml', 'triton'} & set(sys.modules)\n"
            "assert not heavy, heavy"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(" ")

    def test_the_options_reach_the_table(self, capsys):
        options = ["--card=11GB", "--batch=96", "--frames=600", "--fits"]
        options += ["--family=revnet", "--family=resnet", "--type=I", "--type=II"]
        options += ["--sort=vox1-h", "--reverse"]
        assert cli.main(["models", *options]) == 0
        training = Training(parse_card("11GB"), batch=96, frames=600)
        expected = select(
            training,
            families=["revnet", "resnet"],
            types=["I", "II"],
            fitting=True,
            sort="vox1-h",
            reverse=True,
        )
        assert 0 < len(expected) < len(select(training, families=["revnet"]))
        assert capsys.readouterr().out == ModelsReport(expected).text()

    def test_it_prints_json_of_the_encoders_named(self, capsys):
        assert cli.main(["models", "revnet245", "resnet34", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        names = [encoder["name"] for encoder in document["encoders"]]
        assert names == ["revnet245", "resnet34"]

    def test_it_draws_a_picture(self, tmp_path, capsys):
        picture = tmp_path / "models.png"
        assert cli.main(["models", "--plot", str(picture)]) == 0
        assert capsys.readouterr().out == f"{picture}: 25 encoders\n"
        assert picture.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["revnet58"], "Did you mean revnet57"),
            (
                ["--card=11"],
                "--card takes a GPU's memory as 11GB or 11GiB (2**30 bytes each)",
            ),
            (["--batch=0"], "from 1 to 1000000 utterances, not 0"),
            (["--frames=300"], "200 and 600 frames, not of 300"),
            (["--family=dfrevnet"], "Did you mean df_revnet"),
            (["--sort=params"], "--sort takes layers, parameters"),
            (["--fits"], "--fits needs a card"),
            (["--plot=models.jpg"], "ends in .png, .pdf or .svg, not models.jpg"),
            (
                ["--plot=nowhere/models.png"],
                "nowhere/models.png cannot be written: there is no folder nowhere. Make",
            ),
        ],
    )
    def test_a_mistake_is_one_line(self, arguments, message, capsys):
        assert message in refuse(["models", *arguments], capsys)


class TestMemory:
    def test_the_options_reach_the_table(self, capsys):
        options = ["--batch=96", "--frames=600", "--mode=recompute", "--card=24GB"]
        names = ["df_resnet56", "resnet34", "df_resnet56"]
        assert cli.main(["memory", *names, *options, "--optimizer_bits=32"]) == 0
        expected = [
            before_and_after(
                name, mode="recompute", batch=96, frames=600, optimizer_bits=32
            )
            for name in ("df_resnet56", "resnet34")
        ]
        text = BreakdownReport(expected, parse_card("24GB")).text()
        assert capsys.readouterr().out == text

    def test_it_prints_json_of_before_and_after(self, capsys):
        assert cli.main(["memory", "revnet57", "--json"]) == 0
        cases = json.loads(capsys.readouterr().out)["breakdowns"]
        modes = [(case["mode"], case["optimizer_bits"]) for case in cases]
        assert modes == [("store", 32), ("reconstruct", 8)]

    def test_what_was_planned_for_a_card_comes_after(self, capsys):
        options = ["--mode=plan", "--card=4GB", "--batch=100"]
        assert cli.main(["memory", "resnet34", *options, "--json"]) == 0
        before, after = json.loads(capsys.readouterr().out)["breakdowns"]
        assert (before["mode"], after["mode"]) == ("store", "plan")
        assert (before["fits"], after["fits"]) == (False, True)
        assert after["how"] == "counted with the plan"
        assert min(after["blocks"]["store"], after["blocks"]["recompute"]) > 0

    def test_stages_are_shown_on_request(self, tmp_path, capsys):
        stored = ["--mode=store", "--optimizer_bits=32"]
        arguments = ["memory", "resnet34", "--batch=2", "--stages", *stored]
        assert cli.main(arguments) == 0
        assert "\npooling, embedding " in capsys.readouterr().out
        picture = tmp_path / "stages.png"
        assert cli.main([*arguments, "--plot", str(picture)]) == 0
        assert capsys.readouterr().out == f"{picture}: 1 encoders\n"
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_it_draws_a_picture(self, tmp_path, capsys):
        picture = tmp_path / "memory.svg"
        assert cli.main(["memory", "resnet34", "--plot", str(picture)]) == 0
        assert capsys.readouterr().out == f"{picture}: 1 encoders\n"
        assert picture.read_bytes().startswith(b"<?xml")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["revnet58"], "Did you mean revnet57"),
            (["resnet34", "--mode=reconstruct"], "resnet34 has no reversible blocks"),
            (
                ["resnet34", "--mode=recomput"],
                "--mode takes store, reconstruct, recompute, plan, not recomput. Did you "
                "mean recompute?",
            ),
            (
                ["revnet57", "--mode=compress"],
                "Give one of store, reconstruct, recompute, plan; the recipe's --dry_run",
            ),
            (["resnet34", "--batch=0"], "from 1 to 1000000 utterances, not 0"),
            (["resnet34", "--frames=0"], "from 1 to 100000 frames of 10 ms, not 0"),
            (["resnet34", "--optimizer_bits=16"], "bits is 16"),
            (["resnet34", "--card=11"], "--card takes a GPU's memory as 11GB"),
            (["resnet34", "--card=-1GB"], "11000000000B, not -1GB"),
            (["resnet34", "--batch=-3"], "utterances, not -3"),
            (["resnet34", "--frames=-3"], "frames of 10 ms, not -3"),
            (["resnet34", "--card=11GB", "--plot=a.png"], "leave out --card"),
            (["resnet34", "--mode=plan"], "none was named: add, for instance, --card"),
            (["resnet34", "--speed=s.json"], "add --mode=plan, or leave it out"),
            (
                ["resnet34", "--mode=plan", "--card=4GB", f"--speed={__file__}"],
                "no speed of a device",
            ),
            (
                ["resnet34", "--mode=plan", "--card=4GB", "--speed=missing.json"],
                "--speed: missing.json is no file. Write it by `speechbrain-rev cal",
            ),
            (
                ["--mode=plan", "--card=4GB", "--frames=300"],
                "200 and 600 frames, not of 300. Give one of these: what fits a longer",
            ),
            (["--mode=plan", "--card=4GB", "--optimizer_bits=4"], "or 32 bit, not 4"),
            (
                ["resnet34", "--mode=plan", "--card=2GB", "--batch=100"],
                "What helps: a batch of ",
            ),
            (["resnet34", "--plot=a.jpg"], "ends in .png, .pdf or .svg, not a.jpg"),
            (["revnet57", "--plot=nowhere/a.png"], "there is no folder nowhere. Make"),
        ],
    )
    def test_a_mistake_is_one_line(self, arguments, message, capsys):
        assert message in refuse(["memory", *arguments], capsys)


class TestPlan:
    OPTIONS = ("--batch=100", "--optimizer_bits=32", "--card=4GB")
    TRAINING = Training(parse_card("4GB"), 100, 200, optimizer_bits=32)

    def test_the_options_reach_the_table_and_the_plan_is_saved(self, tmp_path, capsys):
        file = tmp_path / "plan.json"
        arguments = ["plan", "resnet34", *self.OPTIONS, f"--save={file}"]
        assert cli.main(arguments) == 0
        expected = plan_encoders(self.TRAINING, names=["resnet34"])
        assert capsys.readouterr().out == PlansReport(expected).text()
        assert Plan.load(file) == expected[0].as_plan()

    def test_it_prints_json(self, capsys):
        assert cli.main(["plan", "resnet34", *self.OPTIONS, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["training"]["optimizer_state_bits"] == 32
        assert [encoder["name"] for encoder in document["encoders"]] == ["resnet34"]

    def test_it_draws_a_picture(self, tmp_path, capsys):
        picture = tmp_path / "plan.png"
        arguments = ["plan", "resnet34", *self.OPTIONS, f"--plot={picture}"]
        assert cli.main(arguments) == 0
        assert capsys.readouterr().out == f"{picture}: 1 encoders\n"
        assert picture.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["revnet58", "--card=11GB"], "Did you mean revnet57"),
            (["resnet34", "--card=11"], "--card takes a GPU's memory as 11GB"),
            (["resnet34", "--card=-1GB"], "11000000000B, not -1GB"),
            (["resnet34", "--card=0GB"], "11000000000B, not 0GB"),
            (["resnet34", "--card=nan"], "11000000000B, not nan"),
            (["resnet34", "--card=infGB"], "11000000000B, not infGB"),
            (
                ["resnet34", "--card=0.1GB", "--batch=100"],
                "but the budget is 102.4 MiB (107374182 bytes). It lacks ",
            ),
            (["resnet34", "--card=11GB", "--batch=0"], "utterances, not 0"),
            (["resnet34", "--card=11GB", "--batch=-5"], "utterances, not -5"),
            (["resnet34", "--card=11GB", "--frames=300"], "200 and 600 frames"),
            (["resnet34", "--card=11GB", "--optimizer_bits=4"], "8 or 32 bit, not 4"),
            (["resnet34", "--device=cpu"], "--device takes cuda, or cuda:N"),
            (["resnet34", "--device=cuda:99"], "cuda:99 is not there"),
            (["--card=11GB", "--save=p.json"], "one encoder; name one"),
            (
                ["resnet34", "--card=11GB", "--save=no/p"],
                "--save no/p cannot be written",
            ),
            (["resnet34", "--card=11GB", "--plot=no/p.png"], "--plot no/p.png cannot"),
            (["resnet34", "--card=11GB", "--plot=p.gif"], "or .svg, not p.gif"),
            (["resnet34", "--card=2GB", "--batch=100"], "What helps: a batch of "),
        ],
    )
    def test_a_mistake_is_one_line(self, arguments, message, capsys):
        assert message in refuse(["plan", *arguments], capsys)


class TestSweep:
    OPTIONS = ("resnet34", "--batches=16:48:32", "--card=4GB", "--optimizer_bits=32")
    TRAINING = Training(parse_card("4GB"), 16, 200, optimizer_bits=32)

    def test_the_options_reach_the_table(self, capsys):
        assert cli.main(["sweep", *self.OPTIONS]) == 0
        expected = sweep_encoder(architecture("resnet34"), self.TRAINING, [16, 48])
        assert capsys.readouterr().out == SweepReport(expected).text()

    def test_it_prints_json(self, capsys):
        assert cli.main(["sweep", *self.OPTIONS, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["training"]["optimizer_state_bits"] == 32
        assert [each["batch"] for each in document["batches"]] == [16, 48]

    def test_it_draws_a_picture(self, tmp_path, capsys):
        picture = tmp_path / "sweep.png"
        assert cli.main(["sweep", *self.OPTIONS, f"--plot={picture}"]) == 0
        assert capsys.readouterr().out == f"{picture}: 2 batches\n"
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_memory_that_ran_out_at_every_batch_is_one_line(self, monkeypatch, capsys):
        def taken(*_, **__):
            raise MemoryError

        monkeypatch.setattr(profiling, "measured_seconds", taken)
        monkeypatch.setattr(plans, "optimizer_seconds", lambda *_, **__: 0.1)
        message = "Memory ran out while batches [1, 2] were profiled"
        options = ["--card=4GB", "--batches=1:2", "--device=cpu"]
        assert message in refuse(["sweep", "resnet34", *options], capsys)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["revnet58", "--card=11GB"], "Did you mean revnet57"),
            (["resnet34", "--card=11"], "--card takes a GPU's memory as 11GB"),
            (["resnet34", "--card=-1GB"], "11000000000B, not -1GB"),
            (["resnet34", "--card=nanGB"], "11000000000B, not nanGB"),
            (
                ["resnet34", "--card=11GB", "--batches=16"],
                "as 16:256:16 or 1:32, not 16",
            ),
            (["resnet34", "--card=11GB", "--batches=-4:4"], "1:32, not -4:4"),
            (["resnet34", "--card=11GB", "--batches=0:4"], "utterances, not 0"),
            (["resnet34", "--card=11GB", "--batches=nan:4"], "1:32, not nan:4"),
            (["resnet34", "--card=11GB", "--frames=300"], "200 and 600 frames"),
            (["resnet34", "--card=11GB", "--optimizer_bits=4"], "8 or 32 bit, not 4"),
            (
                ["resnet34", "--card=11GB", "--device=tpu"],
                "cuda:N for the card of number",
            ),
            (["resnet34", "--card=11GB", "--device=cuda:99"], "cuda:99 is not there"),
            (["resnet34", "--card=11GB", "--plot=no/p.png"], "--plot no/p.png cannot"),
            (["resnet34", "--card=11GB", "--plot=p.gif"], "or .svg, not p.gif"),
            (["resnet34", "--card=1.2GB"], "What helps: "),
            (
                ["resnet34", "--card=11GB", f"--speed={__file__}"],
                "no speed of a device",
            ),
        ],
    )
    def test_a_mistake_is_one_line(self, arguments, message, capsys):
        assert message in refuse(["sweep", *arguments], capsys)

    def test_a_speed_is_not_for_times_that_are_taken(self, capsys):
        with pytest.raises(SystemExit):
            cli.main(["sweep", *self.OPTIONS, "--speed=s.json", "--device=cpu"])
        assert "not allowed with argument" in capsys.readouterr().err

    def test_what_it_advises_are_options_that_it_takes(self, capsys):
        small = ["resnet34", "--card=3GB", "--frames=600", "--batches=30:40"]
        told = refuse(["sweep", *small, "--optimizer_bits=32"], capsys)
        assert "a batch of " in told
        options = re.findall(r"--\w+(?==)", told.partition("What helps")[2])
        assert {"--frames", "--optimizer_bits"} >= set(options) != set()
        with pytest.raises(SystemExit):
            cli.main(["sweep", "--help"])
        takes = capsys.readouterr().out
        assert "both in GiB (2**30 bytes)" in " ".join(takes.split())
        assert all(option in takes for option in options)


class TestCalibrate:
    def test_plans_are_timed_by_the_speed_that_was_written(
        self, tmp_path, monkeypatch, capsys
    ):
        speed = Speed(1e12, 2e11, 3e5, {"device": "a test", "torch": "2"})
        monkeypatch.setattr(steps, "calibrate", lambda device, **_: speed)
        file = tmp_path / "speed.json"
        assert cli.main(["calibrate", str(file)]) == 0
        told, progress = capsys.readouterr()
        assert "Blocks of resnet34, resnet101" in progress
        assert f"{file}: 1 TFLOP/s, 186 GiB/s, 3e+05 operations/s" in told
        assert Speed.from_json(file.read_text()) == speed
        options = ["resnet34", "--card=4GB", "--batch=16", f"--speed={file}", "--json"]
        assert cli.main(["plan", *options]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["speed"] == json.loads(speed.to_json())
        assert "for a test, 1 TFLOP/s" in document["sources"]["time"]

    def test_a_disk_that_is_full_leaves_the_speed_that_was_there(
        self, tmp_path, monkeypatch, capsys
    ):
        def full(*_):
            raise OSError(28, "No space left on device")

        speed = Speed(1e12, 2e11, 3e5, {"device": "a test"})
        monkeypatch.setattr(steps, "calibrate", lambda device, **_: speed)
        monkeypatch.setattr(whole_files.os, "replace", full)
        file = tmp_path / "speed.json"
        file.write_text("old")
        assert cli.main(["calibrate", str(file)]) == 2
        assert "No space left" in capsys.readouterr().err
        assert file.read_text() == "old"
        assert list(tmp_path.iterdir()) == [file]

    @pytest.mark.parametrize(
        "change",
        [
            {"about": None},
            {"flops_per_second": "fast"},
            dict.fromkeys(
                ["flops_per_second", "bytes_per_second", "operations_per_second"]
            ),
        ],
    )
    def test_a_damaged_speed_is_named_in_one_line(self, change, tmp_path, capsys):
        file = tmp_path / "speed.json"
        file.write_text(json.dumps(json.loads(ASSUMED.to_json()) | change))
        options = ["resnet34", "--card=4GB", f"--speed={file}"]
        told = refuse(["plan", *options], capsys)
        assert f"--speed {file}: This is no speed of a device" in told
        file.write_bytes(b"\xff\xfe")
        assert f"--speed {file}: " in refuse(["plan", *options], capsys)

    def test_sweeps_and_breakdowns_of_plans_are_of_that_speed_too(
        self, tmp_path, capsys
    ):
        # Operations take long to start, and then no time whatever the batch.
        speed = Speed(1e15, 1e15, 1e3, {"torch": "2", "device": "a test"})
        file = tmp_path / "speed.json"
        file.write_text(speed.to_json())
        options = ["--batches=16:48:32", "--card=4GB", f"--speed={file}", "--json"]
        assert cli.main(["sweep", "resnet34", *options]) == 0
        swept = json.loads(capsys.readouterr().out)
        few, many = (each["step_seconds"] for each in swept["batches"])
        assert many < 1.5 * few
        assert swept["times"]["speed"] == json.loads(speed.to_json())
        assert "for a test, 1e+03 TFLOP/s" in swept["sources"]["time"]

        options = ["--mode=plan", "--card=4GB", "--batch=16", f"--speed={file}"]
        assert cli.main(["memory", "resnet34", *options, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["breakdowns"][1]["speed"] == json.loads(speed.to_json())
        assert "speed" not in told["breakdowns"][0]
        assert "for a test, 1e+03 TFLOP/s" in told["sources"]["plan"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["calibrate", "no/speed.json"], "SPEED.json no/speed.json cannot be"),
            (["calibrate", "speed.json", "--device=tpu"], "takes cpu, cuda, or cuda:N"),
            (["calibrate", "speed.json", "--device=cuda:99"], "cuda:99 is not there"),
            (["plan", "--card=4GB", "--speed=no.json"], "no.json is no file. Write"),
            (["plan", "--card=4GB", f"--speed={__file__}"], "no speed of a device"),
        ],
    )
    def test_a_mistake_is_one_line(self, arguments, message, capsys):
        assert message in refuse(arguments, capsys)


class TestEmbed:
    def test_it_writes_what_the_embedder_gives(
        self, run_folder, audio, tmp_path, capsys
    ):
        out = str(tmp_path / "embeddings.npz")
        arguments = ["embed", run_folder, *audio, "--out", out, "--device=cpu"]
        assert cli.main(arguments) == 0
        assert out in capsys.readouterr().out
        expected = SpeakerEmbedder.from_run(run_folder, device="cpu").embed(audio)
        with np.load(out) as written:
            assert written["names"].tolist() == audio
            np.testing.assert_array_equal(written["embeddings"], expected)
        assert cli.main(arguments) == 0
        assert cli.main([*arguments, "--precision=bf16"]) == 2
        assert "of another model, or of another precision" in capsys.readouterr().err

    def test_a_folder_is_looked_through_and_embedded(
        self, run_folder, tmp_path, capsys
    ):
        folder, out = tmp_path / "speech", tmp_path / "rows.parquet"
        for name in ("a.wav", "b/c.wav"):
            write_audio(folder / name, speech_like(0.5))
        write_audio(folder / "two.wav", np.stack([speech_like(0.5)] * 2, axis=1))
        (folder / "notes.txt").touch()
        arguments = ["embed", run_folder, str(folder), "--device=cpu"]
        assert cli.main([*arguments, "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert "2 files can be embedded as far as headers tell, 0.00 h" in said
        assert "1 files cannot be embedded:\n- two.wav: " in said
        assert (
            "1 files that are no audio by their names were passed over: 1 .txt" in said
        )
        arguments.append(f"--out={out}")
        assert cli.main(arguments) == 2
        assert "The other 2 are in" in capsys.readouterr().err
        assert cli.main([*arguments, "--bad-files=skip"]) == 0
        assert "two.wav has 2 channels" in capsys.readouterr().out
        assert cli.main([*arguments, "--channels=mean"]) == 0
        assert "embeddings [3, 16]" in capsys.readouterr().out

    def test_a_folder_in_a_packed_one_is_embedded_as_a_folder(
        self, run_folder, tmp_path, monkeypatch, capsys
    ):
        with Packing(tmp_path / "c.packed", source="c", sample_rate=16000) as packing:
            packing.add("id1/a.wav", torch.from_numpy(speech_like(0.5)))
            packing.finish()
        monkeypatch.chdir(tmp_path)
        arguments = ["embed", run_folder, "c.packed/id1", "--out=o.npz", "--device=cpu"]
        assert cli.main(arguments) == 0
        assert EmbeddingArchive.load("o.npz").names == ("a.wav",)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--bad-files=skip"], "--bad-files goes with --out"),
            (["--window=0.1"], "a window of 0.1 s is no utterance"),
            (["--precision=fp16"], "fp16 is for GPUs"),
            (["--channels=-1"], "channels takes"),
        ],
    )
    def test_options_that_do_not_go_are_one_line(
        self, run_folder, audio, options, message, capsys
    ):
        arguments = ["embed", run_folder, *audio, "--device=cpu", *options]
        assert message in refuse(arguments, capsys)

    def test_channels_that_are_none_are_named_with_their_option(
        self, run_folder, audio, capsys
    ):
        with pytest.raises(SystemExit):
            cli.main(["embed", run_folder, *audio, "--channels=left"])
        assert "argument --channels: invalid" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["embed", "verify"])
    def test_an_exported_model_is_read_as_strictly_as_by_from_hparams(
        self, command, audio, tmp_path, capsys
    ):
        write_finished_run(tmp_path / "run")
        export_run(tmp_path / "run", tmp_path / "model")
        arguments = [command, str(tmp_path / "model"), *audio[:2], "--device=cpu"]
        assert cli.main(arguments) == 0
        # A run's hyperparams.yaml may say anything more; a model's may not.
        with (tmp_path / "model/hyperparams.yaml").open("a") as settings:
            settings.write("more: 1\n")
        capsys.readouterr()
        assert "hyperparams.yaml is not as it was written" in refuse(arguments, capsys)

    def test_without_a_file_it_prints_a_line_for_each_utterance(
        self, run_folder, audio, capsys
    ):
        assert cli.main(["embed", run_folder, *audio, "--device=cpu"]) == 0
        lines = capsys.readouterr().out.splitlines()
        for file, line in zip(audio, lines, strict=False):
            assert line.startswith(f"{file}: 16 values")

    def test_a_name_that_numpy_would_change_is_refused(self, run_folder, audio, capsys):
        arguments = ["embed", run_folder, *audio, "--out=embeddings.txt"]
        assert "ends in .npz or .parquet, not embeddings.txt" in refuse(
            arguments, capsys
        )

    @pytest.mark.parametrize(
        ("out", "message"),
        [
            ("nowhere/e.npz", "there is no folder nowhere. Make it first."),
            ("file/e.npz", "there is no folder file. Make it first."),
            ("folder.npz", "it is a folder. Give the name of a file."),
            ("locked/e.npz", "you may not write into the folder locked. Give another"),
        ],
    )
    def test_a_place_that_cannot_be_written_is_refused_before_the_work(
        self, out, message, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        Path("file").touch()
        Path("folder.npz").mkdir()
        Path("locked").mkdir()
        access = os.access
        # Who runs the tests may be one who may write everywhere.
        monkeypatch.setattr(
            os,
            "access",
            lambda path, mode: path.name != "locked" and access(path, mode),
        )
        arguments = ["embed", "no-run", "a.wav", "--out", out]
        assert f"--out {out} cannot be written: {message}" in refuse(arguments, capsys)

    def test_a_failed_write_leaves_the_old_file_and_no_other(
        self, run_folder, audio, tmp_path, monkeypatch, capsys
    ):
        out = tmp_path / "embeddings.npz"
        arguments = ["embed", run_folder, *audio[:1], f"--out={out}", "--device=cpu"]
        assert cli.main(arguments) == 0
        capsys.readouterr()
        old = out.read_bytes()

        def fail(file, **_):
            file.write(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(np, "savez", fail)
        arguments = ["embed", run_folder, *audio, f"--out={out}", "--device=cpu"]
        assert "disk full" in refuse(arguments, capsys)
        assert out.read_bytes() == old
        assert list(tmp_path.iterdir()) == [out]

    def test_audio_without_a_header_is_one_line(self, run_folder, tmp_path, capsys):
        (tmp_path / "x.raw").write_bytes(bytes(32000))
        arguments = ["embed", run_folder, str(tmp_path / "x.raw"), "--device=cpu"]
        assert "x.raw cannot be read as audio" in refuse(arguments, capsys)

    def test_a_folder_that_is_none_is_one_line(self, audio, capsys):
        assert "no folder nowhere" in refuse(["embed", "nowhere", *audio], capsys)

    def test_audio_that_is_none_is_one_line(self, run_folder, capsys):
        arguments = ["embed", run_folder, "nothing.wav", "--device=cpu"]
        assert "nothing.wav" in refuse(arguments, capsys)


class TestVerify:
    def test_it_prints_the_score_first(self, run_folder, audio, capsys):
        assert cli.main(["verify", run_folder, *audio, "--device=cpu"]) == 0
        said = capsys.readouterr().out
        found = SpeakerEmbedder.from_run(run_folder, device="cpu").verify(*audio)
        assert float(said.split()[0]) == round(found.score, 4)
        assert found.origin in said

    def test_a_threshold_decides(self, run_folder, audio, capsys):
        arguments = ["verify", run_folder, *audio, "--device=cpu"]
        assert cli.main([*arguments, "--threshold=-1"]) == 0
        assert "the same speaker, by the threshold -1.0000: given by the caller" in (
            capsys.readouterr().out
        )
        assert cli.main([*arguments, "--threshold=1.0"]) == 0
        assert "different speakers" in capsys.readouterr().out
        assert "there is no threshold 'vox1_o'" in refuse(
            [*arguments, "--threshold=vox1_o"], capsys
        )

    def test_a_list_that_is_called_by_a_number_is_found_by_its_name(
        self, audio, tmp_path, capsys
    ):
        write_run(tmp_path / "run")
        row = {
            "trials": "2019", "method": "cosine", "targets": 3, "impostors": 4,
            "eer": 0.25, "thresholds": {"EER": 0.4},
        }  # fmt: skip
        made = read_weights(tmp_path / "run").fingerprint
        report = {"model": made, "subtract_mean": False, "results": [row]}
        (tmp_path / "run/scores").mkdir()
        (tmp_path / "run/scores/results.json").write_text(json.dumps(report))
        arguments = ["verify", str(tmp_path / "run"), *audio, "--device=cpu"]
        assert cli.main([*arguments, "--threshold=2019"]) == 0
        assert "threshold 0.4000: EER of the list 2019" in capsys.readouterr().out
        assert cli.main([*arguments, "--threshold=2020"]) == 0
        assert "threshold 2020.0000: given by the caller" in capsys.readouterr().out

    def test_advice_about_thresholds_can_be_followed(self, audio, tmp_path, capsys):
        write_run(tmp_path / "run")
        arguments = ["verify", str(tmp_path / "run"), *audio, "--device=cpu"]
        assert cli.main(arguments) == 0
        assert "Give threshold=SCORE (--threshold=SCORE)" in capsys.readouterr().out
        rows = [
            {
                "trials": name, "method": "cosine", "targets": 3, "impostors": 4,
                "eer": 0.25, "thresholds": {"EER": 0.4},
            }
            for name in ("one", "my other")
        ]  # fmt: skip
        made = read_weights(tmp_path / "run").fingerprint
        report = {"model": made, "subtract_mean": False, "results": rows}
        (tmp_path / "run/scores").mkdir()
        (tmp_path / "run/scores/results.json").write_text(json.dumps(report))
        assert cli.main(arguments) == 0
        said = capsys.readouterr().out
        assert "(--threshold=NAME), one of 'one', 'my other'." in said
        option, names = re.search(
            r"\((--threshold=)NAME\), one of (.*)\.", said
        ).groups()
        for name in ast.literal_eval(names):
            assert cli.main([*arguments, f"{option}{name}"]) == 0
            assert f"EER of the list {name}" in capsys.readouterr().out

    def test_as_norm_without_a_cohort_is_one_line(self, run_folder, audio, capsys):
        arguments = ["verify", run_folder, *audio, "--device=cpu", "--as-norm"]
        assert "has no embeddings/cohort.npz" in refuse(arguments, capsys)

    @pytest.mark.parametrize(
        ("device", "message"),
        [
            ("gpu", "device takes cpu, cuda, or cuda:N for the GPU of number N, not g"),
            ("meta", "not meta"),
            ("mps", "not mps"),
            ("cuda:99", "device cuda:99 is not there"),
        ],
    )
    def test_a_device_that_is_none_is_one_line(
        self, run_folder, audio, device, message, capsys
    ):
        arguments = ["verify", run_folder, *audio, f"--device={device}"]
        assert message in refuse(arguments, capsys)


def run_as_script(tmp_path, code):
    path = tmp_path / "script.py"
    path.write_text(f"from speechbrain_rev.cli import run_script\n{code}\n")
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False
    )


class TestConvert:
    @pytest.fixture
    def weights(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        model = ResNet((1, 1, 1, 1), channels=4, embed_dim=16)
        torch.save(model.state_dict(), "avg_model.pt")

    def test_there_and_back_says_what_was_written(self, weights, audio, capsys):
        assert cli.main(["convert", "wespeaker", "avg_model.pt", "model"]) == 0
        out = capsys.readouterr().out
        assert "model: arch resnet34, widths [4, 8, 16, 32], blocks [1, 1, 1, 1]" in out
        assert "front_end kaldi, pooling_variance unbiased" in out
        assert "no config.yaml beside the weights: TSTP pooling" in out
        assert cli.main(["embed", "model", audio[0], "--device=cpu"]) == 0
        assert "16 values" in capsys.readouterr().out
        back = ["convert", "wespeaker", "--back", "model", "back.pt"]
        assert cli.main(back) == 0
        assert "back.pt: weights of model, as" in capsys.readouterr().out
        there, here = (torch.load(f) for f in ("avg_model.pt", "back.pt"))
        assert all(torch.equal(here[name], there[name]) for name in there)
        Path("config.yaml").write_text("model_args: {pooling_func: TSTP}\n")
        assert cli.main(["convert", "wespeaker", "avg_model.pt", "again"]) == 0
        assert "no config.yaml" not in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["none.pt", "model"], "There is no file none.pt. Give the avg_model.pt"),
            ([TRAIN, "model"], "train.yaml is not loaded: it is no zip archive"),
            (["avg_model.pt", "."], " is there already, and nothing is written over"),
            (["--back", "model", "back.pt"], "There is no folder model"),
            (
                ["--back", "model", "no/back.pt"],
                "TO no/back.pt cannot be written: there",
            ),
        ],
    )
    def test_a_mistake_is_one_line(self, weights, arguments, message, capsys):
        arguments = ["convert", "wespeaker", *map(str, arguments)]
        assert message in refuse(arguments, capsys)

    def test_a_run_of_this_package_does_not_go_there(self, weights, run_folder, capsys):
        arguments = ["convert", "wespeaker", "--back", run_folder, "back.pt"]
        message = refuse(arguments, capsys)
        assert "front_end is speechbrain, not kaldi; pooling_variance is" in message


def test_a_recipes_own_errors_end_in_one_line(tmp_path):
    ended = run_as_script(
        tmp_path,
        "def main():\n    raise ValueError('no such\\n folder')\nrun_script(main)",
    )
    assert ended.returncode == 1
    assert ended.stderr == "script.py: no such folder\n"


def test_ctrl_c_is_one_line_of_recipes_and_commands(tmp_path, capsys, monkeypatch):
    code = "def main():\n    raise KeyboardInterrupt\nrun_script(main)"
    ended = run_as_script(tmp_path, code)
    assert ended.returncode == 130
    assert ended.stderr == "\nscript.py: interrupted.\n"

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("speechbrain_rev.cli.command._env", interrupted)
    assert cli.main(["env"]) == 130
    assert capsys.readouterr().err == "\nspeechbrain-rev: interrupted.\n"


def test_other_errors_of_a_recipe_keep_their_traceback(tmp_path):
    ended = run_as_script(tmp_path, "import json\nrun_script(lambda: json.loads('{'))")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


def test_memory_that_a_recipe_has_not_got_is_one_line_where_it_is_said(tmp_path):
    words = "raise MemoryError('A step takes 3 GiB. End what else runs.')"
    ended = run_as_script(tmp_path, f"def main():\n    {words}\nrun_script(main)")
    assert ended.stderr.startswith("script.py: A step takes 3 GiB. End")
    bare = "def main():\n    raise MemoryError\nrun_script(main)"
    assert "Traceback" in run_as_script(tmp_path, bare).stderr


_NOBODY = """
import os, sys
os.getuid = lambda: 54321
from speechbrain_rev.cli.command import main
sys.exit(main(["memory", "resnet34", "--batch", "4"]))
"""


def test_a_command_runs_for_a_user_without_name_and_home():
    known = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", _NOBODY], env=known, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Optimizer states" in done.stdout
