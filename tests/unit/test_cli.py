import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from speechbrain_rev import __version__, cli, environment
from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import Training, breakdown, plans, select
from speechbrain_rev.catalog.breakdown import before_and_after
from speechbrain_rev.catalog.plans import plan_encoders, sweep_encoder
from speechbrain_rev.catalog.table import training_days
from speechbrain_rev.cli.command import _parser
from speechbrain_rev.cli.options import COMPUTES, OUTPUT, READS
from speechbrain_rev.data.packing import Packing
from speechbrain_rev.devices import parse_card
from speechbrain_rev.heads import Head
from speechbrain_rev.hparams import resolve
from speechbrain_rev.inference import (
    EmbeddingArchive,
    EnrolledSpeaker,
    SpeakerEmbedder,
    export_run,
)
from speechbrain_rev.inference.trained import read_weights
from speechbrain_rev.lobes.description import weights_in
from speechbrain_rev.planner import Plan
from speechbrain_rev.sizes import GIB
from tests.corpus import write_corpus
from tests.run_folders import (
    TINY,
    speech_like,
    write_audio,
    write_finished_run,
    write_run,
)
from tests.wespeaker import ResNet

EMBED = "embed --device=cpu run a.wav b.wav"
VERIFY = "verify run a.wav b.wav --device=cpu"
COMMANDS = ("env", "resolve", "models", "memory", "plan", "sweep", "embed",
            "enrol", "verify", "export", "convert", "data")  # fmt: skip
TRAIN = Path(__file__).parents[2] / "hparams" / "train.yaml"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a run, speech, weights, and what nothing can be done with."""
    place = tmp_path_factory.mktemp("files")
    write_run(place / "run")
    for seed, name in enumerate(["a", "b"]):
        write_audio(place / f"{name}.wav", speech_like(0.6, seed=seed))
    model = ResNet((1, 1, 1, 1), channels=4, embed_dim=16)
    torch.save(model.state_dict(), place / "avg_model.pt")
    (place / "x.raw").write_bytes(bytes(32000))
    (place / "model.onnx").write_bytes(b"a graph")
    for name in ("folder.npz", "locked"):
        (place / name).mkdir()
    return place


@pytest.fixture
def in_files(files, monkeypatch):
    monkeypatch.chdir(files)
    access = os.access
    # Who runs the tests may be one who may write everywhere.
    may = lambda path, mode: path.name != "locked" and access(path, mode)  # noqa: E731
    monkeypatch.setattr(os, "access", may)


@pytest.fixture
def printed(capsys):
    """Run a command, and give what it prints."""

    def run(*arguments):
        assert cli.main([*arguments]) == 0
        return capsys.readouterr().out

    return run


def refuse(arguments, capsys):
    """Run a command that must fail, and give its one line."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    # On a busy machine plans take so long that a line says how far they are.
    *progress, line = err.splitlines()
    assert all(each.startswith("planning ") for each in progress)
    assert line.startswith("speechbrain-rev: ")
    return line


class TestCommand:
    def test_help_is_there_at_once_and_models_need_no_torch(self):
        # Each of these takes about a second to import, or more.
        code = (
            "import sys\n"
            "from speechbrain_rev.cli import main\n"
            "heavy = {'torch', 'numpy', 'speechbrain', 'bitsandbytes', 'matplotlib',"
            " 'ruamel.yaml', 'triton'}\n"
            "try: main(['--help'])\n"
            "except SystemExit: pass\n"
            "assert not (heavy | {'rich'}) & set(sys.modules)\n"
            "assert main(['models', '--card=11GB', '--batch=128']) == 0\n"
            "assert not heavy & set(sys.modules)"
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
        text = capsys.readouterr().out
        titles = re.findall(r"^([a-z ]+):$", text, re.MULTILINE)
        if command == "env":
            assert titles == ["options", "examples"]
        else:
            assert {READS, COMPUTES, OUTPUT} & set(titles)
            assert (titles[0], titles[-1]) == ("options", "examples")

    def test_every_command_has_examples_that_it_takes(self):
        (choices,) = _parser()._subparsers._group_actions
        assert set(choices.choices) == set(COMMANDS)
        for name, command in choices.choices.items():
            assert command.examples
            for example in command.examples:
                words = shlex.split(example.partition(" > ")[0])
                assert words[:2] == ["speechbrain-rev", name]
                assert _parser().parse_args(words[1:]).run

    @pytest.mark.parametrize(
        ("arguments", "usage", "message"),
        [
            ("modelz", "", "invalid choice: 'modelz' (choose from "),
            ("plan --crad=11GB", "plan ", "is required"),
            ("models --sorted x", "models ", "unrecognized arguments: --sorted"),
            ("embed m a.wav --bad_files=drops", "embed ", "'drops' (choose from "),
            ("models --zzz", "models ", "unrecognized arguments: --zzz\n"),
            ("models --batch=0", "models ", "--batch/--batch_size: 0 is below 1"),
            ("models --classes=x", "models ", "invalid count value: 'x'"),
            (
                "models --family=dfresnet",
                "models ",
                "invalid choice: 'dfresnet' (choose",
            ),
            (
                "models --sort=vox1_h",
                "models ",
                "invalid choice: 'vox1_h' (choose from",
            ),
            ("memory resnet34 --mode=compress", "memory ", "'compress' (choose from"),
            (
                "plan a --card=4GB --optimizer_bits=16",
                "plan ",
                "16 (choose from 8, 32)",
            ),
            ("sweep a --card=4GB --batches=nan:4", "sweep ", "batches value: 'nan:4'"),
            (
                "verify run a.wav",
                "verify ",
                "one of the arguments B --speaker is required",
            ),
            (
                "verify run a.wav b.wav --speaker=c",
                "verify ",
                "not allowed with argument",
            ),
        ],
    )
    def test_what_is_misspelt_is_refused(self, arguments, usage, message, capsys):
        with pytest.raises(SystemExit) as done:
            cli.main(arguments.split())
        assert done.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith(f"usage: speechbrain-rev {usage}")
        assert message in err

    def test_a_setting_and_its_option_have_one_name(self):
        parse = _parser().parse_args
        assert parse(["models", "--batch_size=7"]).batch == 7
        given = parse(["embed", "m", "a.wav", "--bad-files=drop"])
        assert given == parse(["embed", "m", "a.wav", "--bad_files=drop"])

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
    ("plan resnet34 --card=4GB", plans, "plan_encoders", "--card=11GB"),
    ("memory resnet34", breakdown, "before_and_after", "Leave out --stages"),
    ("sweep resnet34 --card=4GB", plans, "sweep_encoder", "smaller --batches, or leav"),
    ("embed run a.wav", SpeakerEmbedder, "from_hparams", "--device=cpu"),
    (
        "enrol run ann a.wav --speakers=s",
        SpeakerEmbedder,
        "from_hparams",
        "--device=cpu",
    ),
    ("verify run a.wav b.wav", SpeakerEmbedder, "from_hparams", "--device=cpu"),
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
    arguments, owner, name, advice, error, in_files, monkeypatch, capsys
):
    def greedy(*_, **__):
        raise error

    monkeypatch.setattr(owner, name, greedy)
    assert cli.main(arguments.split()) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("speechbrain-rev: Memory ran out. ")
    assert advice in line


def test_other_errors_of_the_runtime_keep_their_traceback(monkeypatch):
    def wrong(*_, **__):
        raise RuntimeError("Expected 4 channels")

    monkeypatch.setattr(plans, "plan_encoders", wrong)
    with pytest.raises(RuntimeError, match="Expected 4 channels"):
        cli.main(["plan", "resnet34", "--card=4GB"])


class TestEnv:
    def test_it_names_what_a_bug_report_needs(self, printed):
        lines = [line.split(maxsplit=1) for line in printed("env").splitlines()]
        names = {name for name, _ in lines}
        assert {"speechbrain_rev", "python", "system", "processor", "ram"} <= names
        assert {"torch", "torchaudio", "speechbrain", "bitsandbytes", "cuda"} <= names

    def test_a_package_that_cannot_be_imported_is_no_crash(self, monkeypatch):
        def broken(name):
            raise OSError(f"{name}: undefined\nsymbol")

        monkeypatch.setattr(environment.importlib, "import_module", broken)
        monkeypatch.setattr(environment, "_PACKAGES", ("no-such-package", "torchaudio"))
        facts = dict(environment.environment())
        assert "cannot be imported: " in facts["torchaudio"]
        assert ": undefined symbol" in facts["torchaudio"]
        assert "unknown" in facts["cuda"]
        assert facts["no-such-package"] == "not installed"

    def test_every_gpu_has_a_line(self, monkeypatch):
        class Device:
            name, total_memory, major, minor = "Fake 1080", 11 * 2**30, 7, 5

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Device)
        facts = dict(environment.environment())
        assert facts["cuda:1"] == "Fake 1080, 11.0 GiB, compute capability 7.5"
        assert "2 device(s)" in facts["cuda"]


class TestResolve:
    def test_it_prints_the_composition_and_nothing_else(self, printed):
        text = printed("resolve", str(TRAIN), "--lr=0.3", "--data_folder", "a=b")
        assert text == resolve(TRAIN, {"lr": "0.3", "data_folder": "a=b"})

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


ON_CARD = ["resnet34", "--card=4GB", "--optimizer_bits=32"]


def on_4_gib(batch, bits=32):
    return Training(4 * GIB, batch, 200, optimizer_bits=bits)


#: Arguments of a command whose options all reach what it prints: the same from Python.
REACHED = {
    "models": (
        ["--card=11GB", "--batch=96", "--frames=600", "--fits", "--family=revnet",
         "--family=resnet", "--type=I", "--type=II", "--sort=vox1-h", "--reverse",
         "--optimizer_bits=32", "--classes=99", "--loss=am_softmax"],
        lambda: select(
            Training(11 * GIB, 96, 600, 32, Head(99, loss="am_softmax")),
            families=["revnet", "resnet"], types=["I", "II"], fitting=True, sort="vox1-h",
            reverse=True,
        ),
    ),
    "memory": (
        ["df_resnet56", "resnet34", "df_resnet56", "--batch=96", "--frames=600",
         "--mode=recompute", "--optimizer_bits=32", "--stages"],
        lambda: [
            case for name in ("df_resnet56", "resnet34")
            for case in before_and_after(
                name, mode="recompute", batch=96, frames=600, optimizer_bits=32, stages=True
            )
        ],
    ),
    "plan": (
        [*ON_CARD, "--batch=100"], lambda: plan_encoders(on_4_gib(100), names=["resnet34"])
    ),
    "sweep": (
        [*ON_CARD, "--batches=16:48:32"],
        lambda: sweep_encoder(architecture("resnet34"), on_4_gib(1), [16, 48]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", REACHED)
def test_the_options_reach_json_and_picture(command, tmp_path, printed):
    options, expected = REACHED[command]
    results = expected()
    plain = [asdict(r) for r in results] if command != "sweep" else asdict(results)
    same = json.loads(json.dumps(plain))
    assert json.loads(printed(command, *options, "--json")) == same
    if command != "plan":
        picture = tmp_path / "picture.png"
        text = printed(command, *options, f"--plot={picture}")
        assert text.startswith(f"{picture}: ")
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_gpu_s_name_is_its_memory_and_its_speed(printed):
    for command in (["models"], ["plan", "resnet34", "--batch=16"]):
        plain, *_ = json.loads(printed(*command, "--card=rtx 3090", "--json"))
        model = plain.get("model", plain)
        assert model["training"]["card_bytes"] == 24 * GIB
        assert model["speed"]["device"] == "an assumed RTX 3090"


def test_a_plan_is_saved(tmp_path, printed):
    file = tmp_path / "plan.json"
    text = printed("plan", *ON_CARD, "--batch=100", f"--save={file}")
    (expected,) = plan_encoders(on_4_gib(100), names=["resnet34"])
    assert Plan.load(file) == expected.as_plan()
    last = text.splitlines()[-1]
    assert last.startswith(f"{file}: the plan of resnet34. ")
    assert last.endswith(f": --plan_file={file} --batch_size=100")


def test_where_a_plan_was_saved_is_no_part_of_json(tmp_path, capsys):
    file = tmp_path / "plan.json"
    cli.main(["plan", *ON_CARD, "--batch=16", "--json", f"--save={file}"])
    captured = capsys.readouterr()
    (plain,) = json.loads(captured.out)
    assert plain["model"]["training"]["batch"] == 16
    assert f"--plan_file={file} --batch_size=16" in captured.err


@pytest.mark.parametrize("command", ["models", "plan", "sweep"])
def test_an_answer_has_the_reserve_of_its_gpu_once(command, printed):
    options = ["resnet34", "--card=11GB"]
    options += ["--batches=8:8"] if command == "sweep" else ["--batch=8"]
    text = " ".join(printed(command, *options).split())
    whole, left = (
        "11 GiB, 1.88 GiB reserved for CUDA and fragmentation",
        "9.12 GiB left",
    )
    assert text.count(f"{whole}, {left}") == text.count("reserve") == 1


@pytest.mark.parametrize("batch", [128, 256])
def test_what_does_not_fit_a_gpu_has_the_reserve_of_that_gpu(batch, capsys):
    line = refuse(["plan", "resnet34", "--card=2GB", f"--batch={batch}"], capsys)
    reserve = (
        "(2147483648 bytes), 1.16 GiB reserved for CUDA and fragmentation. It lacks "
    )
    assert reserve in line
    peak, lacking = re.findall(r"peaks at (\S+) GiB|lacks (\S+) GiB", line)
    assert float(peak[0]) + 1.16 - 2 == pytest.approx(float(lacking[1]), abs=0.002)


@pytest.mark.parametrize("command", ["models", "memory", "plan", "sweep"])
@pytest.mark.parametrize("frames", [9, 201, 400, 900])
def test_utterances_of_any_length_are_taken(command, frames, printed):
    options = ["resnet34", f"--frames={frames}", "--json"]
    options += ["--batches=8:8"] if command == "sweep" else ["--batch=8"]
    options += [] if command == "memory" else ["--card=11GB"]
    plain = json.loads(printed(command, *options))
    if command == "memory":
        shapes = [each["report"]["input_shape"] for each in plain]
        assert shapes == 2 * [[8, frames, 80]]
    else:
        first = plain if command == "sweep" else plain[0]
        assert first.get("model", first)["training"]["frames"] == frames


def test_what_a_sweep_advises_are_options_that_it_takes(capsys):
    small = ["resnet34", "--card=3GB", "--frames=600", "--batches=40:50"]
    words = refuse(["sweep", *small, "--optimizer_bits=32"], capsys)
    options = re.findall(r"--\w+(?==)", words.partition("What helps")[2])
    assert {"--frames", "--optimizer_bits"} >= set(options) != set()


#: What is refused in one line, after what it says.
MISTAKES = {
    "resolve none.yaml": "none.yaml cannot be read: No such file",
    f"resolve {TRAIN} --optimiser_bits=8": "Did you mean optimizer_bits",
    f"resolve {TRAIN} --lr=fast": "lr takes a number above 0, or null, not fast",
    f"resolve {TRAIN} --arch=resnet35": "resnet34",
    f"resolve {TRAIN} --device=cpu": "unknown key 'device'",
    "resolve revnet57 --batch-size=64": "'batch-size'. Did you mean batch_size",
    "models revnet58": "Did you mean revnet57",
    "models --card=11": "--card takes a GPU's memory as 11GB or 11GiB (2**30 bytes each)",
    "models --card=RTX-5": "or one of RTX 2060, ",
    "models --fits": "--fits needs a GPU: add, for instance, --card=11GB",
    "models --family=resnet --type=I": "No encoder is left. Leave out a name, --family",
    "models --plot=models.jpg": "ends in .png, .pdf or .svg, not models.jpg",
    "models --plot=no/a.png": "no/a.png cannot be written: there is no folder no. Make",
    "memory resnet34 --mode=reconstruct": "resnet34 has no reversible blocks",
    "plan resnet34 --card=infGB": "11000000000B, not infGB",
    "plan resnet34 --card=0.1GB": "fragmentation. It lacks ",
    "plan resnet34 --device=cpu": "--device takes cuda, or cuda:N",
    "plan resnet34 --device=cuda:99": "cuda:99 is not there",
    "plan --card=11GB --save=p.json": "one encoder; name one",
    "plan resnet34 --card=11GB --save=no/p": "--save no/p cannot be written",
    "plan resnet34 --card=2GB --batch=100": "What helps: a batch of ",
    "sweep revnet58 --card=11GB": "Did you mean revnet57",
    "sweep resnet34 --card=nanGB": "11000000000B, not nanGB",
    "sweep resnet34 --card=11GB --device=tpu": "cuda:N for the GPU of number",
    "sweep resnet34 --card=1.2GB": "What helps: ",
    "sweep resnet34 --card=4GB --batches=9:8": "batches are []; there must be a batch",
    "sweep resnet34 --card=4GB --batches=0:8": "and none below 1",
    "embed nowhere a.wav": "no folder nowhere",
    "embed model.onnx a.wav": "model.onnx is not loaded: it is damaged, or holds more than",
    "embed run a.wav --out=embeddings.txt": "ends in .npz, not embeddings.txt",
    "embed run a.wav --out=rows.parquet": "ends in .npz, not rows.parquet",
    "embed run a.wav --bad-files=drop": "--bad_files goes with --out",
    **{f"{EMBED} {given}": words for given, words in {
        "--window=0.1": "a window of 0.1 s is no utterance",
        "--precision=fp16": "fp16 is for GPUs",
        "--channel=-1": "channel takes",
        "nothing.wav": "nothing.wav",
        "x.raw": "x.raw cannot be read as audio",
        "--out a.wav/e.npz": "File exists",
        "--out folder.npz": "no embeddings at folder.npz",
        "--out locked/e.npz": "cannot be written: you may not write into the folder loc",
    }.items()},
    **{f"{VERIFY} {given}": words for given, words in {
        "--threshold=vox1_o": "there is no threshold 'vox1_o'",
        "--as_norm": "has neither cohort.safetensors nor embeddings/cohort.npz",
        "--device=gpu": "device takes cpu, cuda, or cuda:N for the GPU of number N",
        "--device=mps": "not mps",
        "--device=cuda:99": "device cuda:99 is not there",
    }.items()},
    "verify run a.wav --speaker=ann": "no enrolled speaker at speakers/ann.safetensors. ",
    "enrol run ann a.wav --speakers=a.wav": "a.wav",
    "enrol run ../ann a.wav": "takes no slash and no dot at its beginning, not '../ann'",
    "enrol run .ann a.wav": "takes no slash and no dot at its beginning, not '.ann'",
    "verify run a.wav --speaker=../ann": "takes no slash and no dot at its beginning",
    **{
        f"export run model{ending}": f"model{ending} would be a folder, and {ending} is an"
        for ending in (".pt", ".pth", ".ckpt", ".safetensors", ".CKPT")
    },
    "enrol run ann folder.npz --speakers=.": "folder.npz cannot be read as audio",
    "data nowhere": "nowhere does not exist. Give the folder of VoxCeleb, or of your "
    "speech, as PATH.",
    "data x.raw": "x.raw is no list that is known.",
    "data . --speaker_from=(": "speaker_from takes a level, or a regular expression",
    "data . --short=cut": "short takes repeat, pad or drop, not cut",
    "data . --plot=p.jpg": "--plot takes a name that ends in .png",
    **{f"convert wespeaker {given}": words for given, words in {
        "none.pt model": "There is no file none.pt. Give the avg_model.pt",
        f"{TRAIN} model": "train.yaml is not loaded: it is damaged, or holds more than",
        "avg_model.pt .": " is there already and not empty: nothing is overwritten",
        "--back model back.pt": "There is no folder model",
        "--back run back.pt": "front_end is {'kind': 'speechbrain', ",
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize("arguments", MISTAKES)
@pytest.mark.usefixtures("in_files")
def test_a_mistake_is_one_line(arguments, capsys):
    assert MISTAKES[arguments] in refuse(arguments.split(), capsys)


def test_measured_rates_of_a_gpu_reach_all_commands_and_are_marked(printed):
    speed = parse_card("H100").speed
    plain = json.loads(json.dumps(asdict(speed)))
    assert plain["measured"] == ["operations_per_second"]
    commands = {
        "models": ["resnet34", "--batch=16", "--card=H100"],
        "plan": ["resnet34", "--batch=16", "--card=H100"],
        "sweep": ["resnet34", "--batches=16:32:16", "--card=H100"],
    }
    (listed,), (planned,), swept = (
        json.loads(printed(name, *options, "--json"))
        for name, options in commands.items()
    )
    assert listed["speed"] == planned["model"]["speed"] == swept["speed"] == plain
    days = training_days(16 / planned["seconds"])
    assert listed["days"] == pytest.approx(days, 0.1)
    for name, options in commands.items():
        text = " ".join(printed(name, *options).split())
        assert "for an assumed H100 80GB, 33.5 TFLOP/s, " in text
        assert " 28,000 operations/s (measured); rates are assumed from peak" in text


@pytest.mark.usefixtures("in_files")
class TestEmbed:
    def test_it_writes_what_the_embedder_gives(self, tmp_path, printed, capsys):
        out = str(tmp_path / "embeddings.npz")
        lines = printed(*EMBED.split()).splitlines()
        for name, line in zip(("a", "b"), lines, strict=False):
            assert line.startswith(f"{name}.wav: 16 values")
        arguments = [*EMBED.split(), f"--out={out}"]
        assert out in printed(*arguments)
        names = ["a.wav", "b.wav"]
        expected = SpeakerEmbedder.from_run("run", device="cpu").embed(names)
        with np.load(out) as written:
            assert written["names"].tolist() == names
            np.testing.assert_array_equal(written["embeddings"], expected)
        printed(*arguments)
        words = refuse([*arguments, "--precision=bf16"], capsys)
        assert "of another model, or of another precision" in words

    def test_a_folder_is_looked_through_and_embedded(self, tmp_path, printed, capsys):
        folder, out = tmp_path / "speech", tmp_path / "rows.npz"
        for name in ("a.wav", "b/c.wav"):
            write_audio(folder / name, speech_like(0.5))
        write_audio(folder / "two.wav", np.stack([speech_like(0.5)] * 2, axis=1))
        (folder / "notes.txt").touch()
        arguments = ["embed", "run", str(folder), "--device=cpu"]
        text = printed(*arguments, "--dry-run")
        assert "2 files can be embedded by their headers, 0.00 h" in text
        assert "1 files cannot be embedded:\n- two.wav: " in text
        assert "are hidden or no audio were passed over: 1 .txt" in text
        arguments.append(f"--out={out}")
        assert cli.main(arguments) == 2
        refused = capsys.readouterr().err
        assert "\n- two.wav: " in refused
        assert (
            "Give --channel=mix for their mean or --channel=0 for the first" in refused
        )
        assert "\nThe other 2 are in" in refused
        assert "two.wav has 2 channels" in printed(*arguments, "--bad-files=drop")
        assert "embeddings [3, 16]" in printed(*arguments, "--channel=mix")

    def test_a_folder_in_a_packed_one_is_embedded_as_a_folder(self, tmp_path, printed):
        packed, out = tmp_path / "c.packed", tmp_path / "o.npz"
        with Packing(packed, source="c", sample_rate=16000) as packing:
            packing.add("id1/a.wav", torch.from_numpy(speech_like(0.5)))
            packing.finish()
        printed("embed", "run", str(packed / "id1"), f"--out={out}", "--device=cpu")
        assert EmbeddingArchive.load(out).names == ("a.wav",)

    def test_an_exported_model_is_read_as_strictly_as_by_from_hparams(
        self, tmp_path, printed, capsys
    ):
        write_finished_run(tmp_path / "run")
        export_run(tmp_path / "run", tmp_path / "model")
        model = str(tmp_path / "model")
        printed("embed", model, "a.wav", "--device=cpu")
        with (tmp_path / "model/embedding_model.safetensors").open("ab") as weights:
            weights.write(b"more")
        for command in ("embed", "verify"):
            words = refuse([command, model, "a.wav", "b.wav", "--device=cpu"], capsys)
            assert "embedding_model.safetensors is not as it was written" in words

    def test_weights_alone_say_what_they_are_of_or_are_told(
        self, tmp_path, printed, capsys
    ):
        state, path = read_weights("run").state_dict, str(tmp_path / "weights.pt")
        torch.save(state, path)
        expected = printed("embed", "run", "a.wav", "--device=cpu")
        assert printed("embed", path, "a.wav", "--device=cpu") == expected
        torch.save(weights_in(state), path)
        embed = ["embed", path, "a.wav", "--device=cpu"]
        words = "do not say of which encoder they are. Give --encoder='{"
        assert words in refuse(embed, capsys)
        front_end = {"kind": "speechbrain", "sample_rate": 16000}
        sizes = {"widths": TINY["widths"], "blocks": TINY["blocks"]}
        given = {"name": TINY["arch"], **sizes, "embedding_dim": 16}
        for encoder, words in (
            (given, "does not say how the features of its encoder were made"),
            ({"name": "revnet57", "front_end": front_end}, "has other weights than"),
            ({**given, "depth": 5}, "depth"),
            ({**given, "front_end": {"kind": "htk"}}, "front_end is"),
            ({**given, "mode": "all"}, "mode"),
        ):
            assert words in refuse([*embed, f"--encoder={json.dumps(encoder)}"], capsys)
        told = f"--encoder={json.dumps({**given, 'front_end': front_end})}"
        assert printed(*embed, told) == expected
        words = "its weights say what encoder they are of"
        assert words in refuse(["embed", "run", "a.wav", told], capsys)


def with_thresholds(folder, *names):
    """A run that was scored, whose lists have a threshold each."""
    write_run(folder)
    row = {"method": "cosine", "targets": 3, "impostors": 4, "eer": 0.25}
    row |= {"thresholds": {"EER": 0.4}, "enrolled": [1, 1]}
    report = {"model": read_weights(folder).fingerprint, "subtract_mean": False}
    report["cohort"] = {"speakers": 3, "top_n": 2}
    report["results"] = [row | {"trials": name} for name in names]
    (folder / "scores").mkdir()
    (folder / "scores/results.json").write_text(json.dumps(report))
    return str(folder)


@pytest.mark.usefixtures("in_files")
class TestVerify:
    def test_it_prints_the_score_first_and_a_threshold_decides(self, printed):
        text = printed(*VERIFY.split())
        verdict = SpeakerEmbedder.from_run("run", device="cpu").verify("a.wav", "b.wav")
        assert float(text.split()[0]) == round(verdict.score, 4)
        assert verdict.origin.partition(" Give ")[0] in text
        assert "Give --threshold=SCORE, chosen" in text
        for score, words in (
            ("-1", "the same speaker, by the threshold -1.0000: given by the caller"),
            ("1.0", "different speakers"),
        ):
            assert words in printed(*VERIFY.split(), f"--threshold={score}")

    def test_a_list_is_named_as_it_is_advised_or_by_a_number(self, tmp_path, printed):
        run = with_thresholds(tmp_path / "run", "2019", "my other")
        arguments = ["verify", run, "a.wav", "b.wav", "--device=cpu"]
        advised = re.search(
            r"Give --threshold=NAME, one of (.*)\.", printed(*arguments)
        )
        assert ast.literal_eval(advised[1]) == ("2019", "my other")
        for name, words in (
            ("2019", "threshold 0.4000: EER of the list 2019"),
            ("2020", "threshold 2020.0000: given by the caller"),
            ("my other", "EER of the list my other"),
        ):
            assert words in printed(*arguments, f"--threshold={name}")


@pytest.mark.usefixtures("in_files")
class TestEnrol:
    def enrol(self, *given, folder):
        command = ["enrol", "run", *given, f"--speakers={folder}", "--device=cpu"]
        return cli.main(command)

    def test_a_speaker_is_compared_as_in_python(self, tmp_path, printed, capsys):
        folder = tmp_path / "new" / "speakers"
        assert self.enrol("ann", "a.wav", "b.wav", folder=folder) == 0
        first, advice = capsys.readouterr().out.splitlines()
        assert first == f"{folder}/ann.safetensors: ann, known by 2 utterances"
        embedder = SpeakerEmbedder.from_run("run", device="cpu")
        ann = EnrolledSpeaker.load(folder / "ann.safetensors")
        same = embedder.enrol(["a.wav", "b.wav"])
        assert np.array_equal(ann.embeddings, same.embeddings)
        command = shlex.split(advice.replace("FILE", "a.wav").partition(" compares")[0])
        text = printed(*command[1:], "--threshold=-1", "--device=cpu")
        verdict = embedder.verify("a.wav", ann, threshold=-1.0)
        assert text.splitlines()[0].split()[0] == f"{verdict.score:.4f}"
        assert "the same speaker, by the threshold -1.0000" in text
        self.enrol("ann", "b.wav", folder=folder)
        words = "ann, known by 1 utterance, in the place of an earlier one"
        assert words in capsys.readouterr().out

    def test_a_speaker_of_another_model_or_precision_is_refused(self, tmp_path, capsys):
        EnrolledSpeaker(np.ones((1, 16), np.float32), "f00d").save(
            tmp_path / "ann.safetensors"
        )
        (tmp_path / "bob.safetensors").write_bytes(b"1")
        self.enrol("cleo", "a.wav", folder=tmp_path)
        capsys.readouterr()
        for name, options, message in (
            ("ann", [], "b is of another model or of another precision"),
            (
                "cleo",
                ["--precision=bf16"],
                "b is of another model or of another precision",
            ),
            ("bob", [], "bob.safetensors is no enrolled speaker"),
            (
                "dan",
                [],
                f"no enrolled speaker at {tmp_path}/dan.safetensors",
            ),
        ):
            given = [f"--speaker={name}", f"--speakers={tmp_path}", "--device=cpu"]
            words = refuse(["verify", "run", "a.wav", *given, *options], capsys)
            assert message in words


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """A corpus, one speaker of which has one utterance."""
    folder = write_corpus(tmp_path_factory.mktemp("speech"), seconds=0.2)
    write_audio(folder / "wav/id9/s/a.wav", speech_like(0.2, seed=1))
    return folder


class TestData:
    def test_it_prints_text_or_one_document_and_draws_a_picture(
        self, speech, tmp_path, printed
    ):
        picture = tmp_path / "lengths.png"
        text = printed("data", str(speech), f"--plot={picture}")
        assert text.startswith("Understood as VoxCeleb: 25 utterances of 7 speakers")
        assert re.search("speakers with one utterance +1, such as id9\n", text)
        assert picture.read_bytes().startswith(b"\x89PNG")
        given = "--speaker_from=2", "--short=drop", "--chunk_samples=2400", "--json"
        plain = json.loads(printed("data", str(speech), *given))
        assert (plain["speakers"], plain["treated"]) == (3, {})
        assert plain["left_out"]["shorter than a segment"] > 0

    @pytest.mark.parametrize("form", [[], ["--json"]])
    def test_what_a_training_refuses_is_shown_and_then_an_error(
        self, speech, capsys, form
    ):
        assert cli.main(["data", str(speech), "--sample_rate=8000", *form]) == 2
        out, err = capsys.readouterr()
        assert "other sample rate" in out
        words = err.splitlines()[-1]
        assert words.startswith(
            "speechbrain-rev: 25 of 25 files cannot be used: 25 other sample rate"
        )
        if form:
            assert f"speechbrain-rev: {json.loads(out)['refused']}" == words

    @pytest.mark.parametrize(
        ("below", "words"),
        [
            (["", ""], "PATH is ["),
            (["", "wav"], "is the same audio as"),
            (["split"], "Give the one to train on as PATH ("),
        ],
    )
    def test_errors_name_the_folder_by_what_was_typed(
        self, speech, tmp_path, capsys, below, words
    ):
        data = tmp_path / "data"
        shutil.copytree(speech, data)
        write_audio(data / "split/train/id9/a.wav", speech_like(0.2))
        assert cli.main(["data", *(str(data / one) for one in below)]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.usefixtures("in_files")
def test_conversion_there_and_back_prints_what_was_written(tmp_path, printed):
    weights, model, back = (str(tmp_path / n) for n in ("w.pt", "model", "back.pt"))
    shutil.copy("avg_model.pt", weights)
    text = printed("convert", "wespeaker", weights, model)
    assert "model: resnet34, blocks [1, 1, 1, 1], widths [4, 8, 16, 32], n_mels" in text
    assert "features of Kaldi" in text
    assert "no config.yaml beside the weights: TSTP pooling" in text
    assert "16 values" in printed("embed", model, "a.wav", "--device=cpu")
    text = printed("convert", "wespeaker", "--back", model, back)
    assert f"back.pt: weights of {model}, as" in text
    there, here = torch.load(weights), torch.load(back)
    assert all(torch.equal(here[name], there[name]) for name in there)
    (tmp_path / "config.yaml").write_text("model_args: {pooling_func: TSTP}\n")
    text = printed("convert", "wespeaker", weights, str(tmp_path / "again"))
    assert "no config.yaml" not in text


#: What a recipe does, the status it ends with, and the end of what it says.
SCRIPTS = {
    "raise ValueError('no such\\n folder')": (1, "script.py: no such folder\n"),
    "raise KeyboardInterrupt": (130, "\nscript.py: interrupted.\n"),
    "raise KeyboardInterrupt('at step 7.')": (
        130,
        "\nscript.py: interrupted at step 7.\n",
    ),
    "raise BrokenPipeError": (141, "script.py: ended, for its output was closed.\n"),
    "raise MemoryError('A step takes 3 GiB.')": (1, "script.py: A step takes 3 GiB.\n"),
    "raise MemoryError": (1, None),
    "import json; json.loads('{')": (1, None),
}


@pytest.mark.parametrize("work", SCRIPTS)
def test_a_recipes_own_errors_end_in_one_line_and_others_in_a_traceback(work, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "from speechbrain_rev.cli import run_script\n"
        f"def main():\n    {work}\nrun_script(main)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False
    )
    status, words = SCRIPTS[work]
    assert ended.returncode == status
    if words is None:
        assert "Traceback" in ended.stderr
    else:
        assert ended.stderr == words


@pytest.mark.parametrize(
    ("words", "shown"), [((), "."), (("at 3 of 7.",), " at 3 of 7.")]
)
def test_ctrl_c_of_a_command_is_one_line(capsys, monkeypatch, words, shown):
    def interrupted(arguments):
        raise KeyboardInterrupt(*words)

    monkeypatch.setattr("speechbrain_rev.cli.command._env", interrupted)
    assert cli.main(["env"]) == 130
    assert capsys.readouterr().err == f"\nspeechbrain-rev: interrupted{shown}\n"


_NOBODY = """
import os, sys
os.getuid = lambda: 54321
from speechbrain_rev.cli.command import main
sys.exit(main(["memory", "resnet34", "--batch", "4"]))
"""


@pytest.mark.slow
def test_a_command_runs_for_a_user_without_name_and_home():
    known = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", _NOBODY], env=known, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "optimizer states" in done.stdout
