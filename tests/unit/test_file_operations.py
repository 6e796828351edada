"""What writes is stopped after each file operation, or has a full disk from there on."""

import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from speechbrain_rev import cli, scoring
from speechbrain_rev.inference import (
    Cohort,
    EmbeddingArchive,
    EnrolledSpeaker,
    SpeakerEmbedder,
    extraction,
    graph,
)
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer, verify_checkpoint
from speechbrain_rev.planner import Plan
from speechbrain_rev.plots.style import picture
from tests.reliability.operations import Case, Tried
from tests.run_folders import (
    speech_like,
    write_audio,
    write_finished_run,
    write_scores,
)
from tests.wespeaker import BASIC, ResNet, write_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    write_finished_run(folder)
    write_scores(folder)
    return folder


def command(*arguments):
    """The console command with these arguments."""
    return lambda: sys.exit(cli.main([str(one) for one in arguments]))


def embedding(run, out, monkeypatch):
    """What is there has the right numbers."""
    # Saved after each file.
    monkeypatch.setattr(extraction, "_SAVE_SECONDS", -1)
    audio = out.parents[1] / "audio"
    files = [audio / f"{n}.wav" for n in range(3)]
    for seed, file in enumerate(files):
        write_audio(file, speech_like(seconds=0.3 + 0.2 * seed, seed=seed))
    embedder = SpeakerEmbedder.from_run(run, device="cpu")
    expected = {file.name: embedder.embed(file) for file in files}

    def accept():
        archive = EmbeddingArchive.load(out)
        for name, row in zip(archive.names, archive.embeddings, strict=True):
            assert np.allclose(row, expected[name], atol=1e-5)

    return ("embed", run, audio, "--out", out, "--device=cpu"), accept


def export(run, out, monkeypatch):
    """There is no folder but one that is complete."""
    wave = torch.from_numpy(speech_like())
    expected = SpeakerEmbedder.from_run(run, device="cpu").embed(wave, 16000)

    def accept():
        embedder = SpeakerEmbedder.from_hparams(out, device="cpu")
        assert np.array_equal(embedder.embed(wave, 16000), expected)
        assert len(list(out.iterdir())) == 10

    return ("export", run, out), accept


def conversion(run, out, monkeypatch):
    """There is no folder but one that can be loaded."""
    weights = write_model(out.parents[1], ResNet(**BASIC))
    return (
        ("convert", "wespeaker", weights, out),
        lambda: SpeakerEmbedder.from_run(out, device="cpu"),
    )


def conversion_back(run, out, monkeypatch):
    """There are all weights, or none."""
    weights = write_model(out.parents[1], ResNet(**BASIC))
    there = out.parents[1] / "run"
    assert not cli.main(["convert", "wespeaker", str(weights), str(there)])

    def accept():
        back, given = (torch.load(p, weights_only=True) for p in (out, weights))
        assert back.keys() <= given.keys()
        assert all(given[name].equal(one) for name, one in back.items())

    return ("convert", "wespeaker", "--back", there, out), accept


def graph_of(run, out, monkeypatch):
    """Graphs are converted in memory, and then written."""
    content = b"a graph" * 100
    # To convert one takes seconds.
    made = (lambda program, metadata: content, lambda content: None)
    monkeypatch.setitem(graph._FORMATS, out.suffix, made)
    monkeypatch.setattr(graph, "exported", lambda graph: None)

    def accept():
        assert out.read_bytes() == content

    return ("export", run, out), accept


#: What each command writes, and what makes its arguments and accepts what is there.
COMMANDS = [
    (embedding, "rows.npz"),
    (conversion, "model"),
    *(
        pytest.param(command, marks=pytest.mark.slow)
        for command in (
            (export, "model"),
            (conversion_back, "avg_model.pt"),
            (graph_of, "model.onnx"),
            (graph_of, "model.pt2"),
        )
    ),
]


class TestCommand(Tried):
    @pytest.fixture(
        params=COMMANDS, ids=lambda param: f"{param[0].__name__}-{param[1]}"
    )
    def case(self, request, run, tmp_path, monkeypatch):
        make, name = request.param
        out = tmp_path / "out" / name
        out.parent.mkdir()
        arguments, accept = make(run, out, monkeypatch)

        def accept_if_there():
            if out.exists():
                accept()

        return Case(command(*arguments), out.parent, accept=accept_if_there)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
def test_what_torch_exports_is_written_by_nothing_else(run, tmp_path, ending):
    if ending == ".onnx":
        pytest.importorskip("onnxscript")
    out = tmp_path / "out" / f"model{ending}"
    case = Case(command("export", run, out), out.parent)
    _, written, _ = case.undisturbed()
    assert list(written) == [out.name]


def plan_of_two():
    modes = {"0": "store", "1": "recompute"}
    return Plan(modes, None, 9, 8, 8, 0.5, {"network": "Sequential"})


def some_rows(seed=0):
    return np.random.default_rng(seed).standard_normal((3, 4)).astype(np.float32)


def draw_nothing(path):
    with picture(path, 1, 1):
        pass


def read_picture(path):
    with Image.open(path) as picture:
        picture.load()


#: How each file is written and read.
FILES = {
    "plan.json": (lambda path: plan_of_two().save(path), Plan.load),
    "speaker.safetensors": (
        lambda path: EnrolledSpeaker(some_rows(), "f00d").save(path),
        EnrolledSpeaker.load,
    ),
    "cohort.safetensors": (
        lambda path: Cohort(some_rows().astype(float), 2, "f00d", None).write(path),
        lambda path: path.read_bytes(),
    ),
    "rows.npz": (
        lambda path: EmbeddingArchive(("a", "b", "c"), some_rows(), "f00d").save(path),
        EmbeddingArchive.load,
    ),
    "scores.txt": (
        lambda path: scoring.write_scores(
            path, scoring.Trials([1, 0], ["a", "a"], ["b", "c"]), [0.75, -0.5]
        ),
        scoring.read_scores,
    ),
    "det.png": (draw_nothing, read_picture),
}


class TestFile(Tried):
    """Files of one function: what was there before stays until the new one is whole."""

    @pytest.fixture(params=FILES)
    def case(self, request, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["script.py"])
        write, read = FILES[request.param]
        path = tmp_path / "out" / request.param

        return Case(
            work=lambda: cli.run_script(lambda: write(path)),
            folder=path.parent,
            begin=lambda: write(path),
            accept=lambda: read(path),
        )


class Steps:
    """Counts epochs, and is saved."""

    epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def train_and_save(folder, epochs):
    """Go on from the newest checkpoint, with one after each epoch, of which two stay."""
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = Steps()
    checkpointer = WholeCheckpointer(folder, {"model": model, "optimizer": optimizer})
    checkpointer.add_state("steps", steps)
    checkpointer.recover_if_possible()
    # Names and times of checkpoints are those of their epochs.
    time.time = lambda: float(steps.epoch)
    while steps.epoch < epochs:
        steps.epoch += 1
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(steps.epoch))
        optimizer.step()
        checkpointer.save_and_keep_only(meta={"epoch": steps.epoch}, num_to_keep=2)
    checkpointer.delete_checkpoints(num_to_keep=2)


class TestCheckpoints(Tried):
    @pytest.fixture
    def case(self, tmp_path, monkeypatch):
        save = tmp_path / "save"
        monkeypatch.setattr(time, "time", time.time)
        monkeypatch.setattr(sys, "argv", ["train.py"])

        def accept():
            """Each checkpoint is as it was written, and there is always one."""
            checkpoints = WholeCheckpointer(save).list_checkpoints()
            assert checkpoints
            for checkpoint in checkpoints:
                verify_checkpoint(checkpoint)
                torch.load(checkpoint.path / "model.ckpt", weights_only=True)

        return Case(
            work=lambda: cli.run_script(lambda: train_and_save(save, 3)),
            folder=save,
            begin=lambda: train_and_save(save, 2),
            accept=accept,
        )
