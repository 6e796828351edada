"""Graphs in files: parity with PyTorch, standard operators, nothing half-written."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev import cli
from speechbrain_rev.inference import (
    SpeakerEmbedder,
    WaveformEncoder,
    export_graph,
    export_run,
    graph,
)
from speechbrain_rev.inference.trained import read_trained
from speechbrain_rev.lobes import build_encoder
from tests.run_folders import (
    TINY,
    speech_like,
    write_audio,
    write_finished_run,
    write_run,
)
from tests.unit.lobes.encoders import KINDS, tiny, with_statistics

#: Batches as lists of samples; ends and odd lengths, around where frames are added.
BATCHES = [
    [4000],
    [16000],
    [16159, 16160],
    [4001, 7777, 20011],
    [4000, 4159, 4160, 4161, 30001],
]


def write_encoder(folder, encoder, **settings):
    """Write a run folder of an encoder that is given."""
    row = encoder.architecture
    own = {"arch": row.name, "embedding_dim": encoder.fc.out_features}
    sizes = {"widths": list(row.widths), "blocks": list(row.blocks)}
    folder.mkdir()
    lines = [f"{k}: {v}" for k, v in {**TINY, **own, **sizes, **settings}.items()]
    (folder / "hyperparams.yaml").write_text("\n".join(lines))
    torch.save(encoder.state_dict(), folder / "embedding_model.ckpt")
    return folder


def padded(samples):
    """Speech-like utterances of so many samples each, padded with zeros."""
    waves = np.zeros((len(samples), max(samples)), np.float32)
    for i, count in enumerate(samples):
        waves[i, :count] = speech_like(count / 16000, seed=i)[:count]
    return waves, np.array(samples, np.int64)


def runner(path):
    """What runs a file: numpy in, numpy out."""
    if path.suffix == ".onnx":
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda w, n: session.run(None, {"waveforms": w, "samples": n})[0]
    module = torch.export.load(path).module()

    @torch.no_grad()
    def run(waves, samples):
        return module(torch.from_numpy(waves), torch.from_numpy(samples)).numpy()

    return run


def reference(folder):
    """The trained encoder in PyTorch behind the library's front-end."""
    trained = read_trained(folder)
    model = WaveformEncoder(
        trained.encoder, front_end=trained.settings["front_end"]
    ).eval()

    @torch.no_grad()
    def run(waves, samples):
        given = torch.from_numpy(waves), torch.from_numpy(samples)
        return model(*given).squeeze(1).numpy()

    return run


def distance(ours, expected):
    off = np.linalg.norm(ours - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return off.max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ending"),
    # The program of torch is what the ONNX file is made of.
    [*((name, "onnx") for name in KINDS), ("resnet34", "pt2"), ("df_revnet89", "pt2")],
)
def test_graphs_of_all_families_give_the_embeddings_of_any_batch(
    name, ending, tmp_path
):
    front_end = "kaldi" if name in ("resnet34", "df_revnet66") else "speechbrain"
    encoder = with_statistics(tiny(name))
    run = write_encoder(tmp_path / "run", encoder, front_end=front_end)
    expected = reference(run)
    written = export_graph(run, tmp_path / f"model.{ending}")
    # Without onnxruntime nothing is compared, and the test ends.
    embed = runner(written.path)
    assert written.deviation < graph.TOLERANCE
    for batch in BATCHES:
        given = padded(batch)
        together = embed(*given)
        assert together.shape == (len(batch), 32)
        assert distance(together, expected(*given)) < graph.TOLERANCE
        for i, count in enumerate(batch):
            one = given[0][i : i + 1, :count], given[1][i : i + 1]
            assert distance(embed(*one), together[i : i + 1]) < graph.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet34", "df_revnet89"])
def test_graphs_of_whole_encoders_embed_real_speech(name, tmp_path):
    pytest.importorskip("onnxruntime")
    if "SPEECHBRAIN_REV_SPEECH" not in os.environ:
        pytest.skip("SPEECHBRAIN_REV_SPEECH names no folder with minivox")
    folder = Path(os.environ["SPEECHBRAIN_REV_SPEECH"]) / "minivox" / "wav"
    files = sorted(folder.rglob("*.flac"))[::97]
    waves = [soundfile.read(file, dtype="float32")[0] for file in files[:3]]
    samples = np.array([len(wave) for wave in waves])
    given = np.zeros((3, samples.max()), np.float32), samples
    for row, wave in zip(given[0], waves, strict=True):
        row[: len(wave)] = wave
    torch.manual_seed(0)
    front_end = "kaldi" if name == "resnet34" else "speechbrain"
    encoder = with_statistics(build_encoder(name))
    run = write_encoder(tmp_path / "run", encoder, front_end=front_end)
    written = export_graph(run, tmp_path / "model.onnx")
    assert (
        distance(runner(written.path)(*given), reference(run)(*given)) < graph.TOLERANCE
    )


ALONE = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
waves = numpy.load(sys.argv[2])
given = {"waveforms": waves["waves"], "samples": waves["samples"]}
numpy.save(sys.argv[3], session.run(["embeddings"], given)[0])
print(session.get_modelmeta().custom_metadata_map["arch"])
assert not {"torch", "speechbrain", "speechbrain_rev"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    write_finished_run(folder)
    return folder


@pytest.fixture(scope="module")
def onnx_file(finished, tmp_path_factory):
    pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    assert cli.main(["export", str(finished), str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def torch_file(finished, tmp_path_factory):
    """A program of torch, and what the command that wrote it printed."""
    path = tmp_path_factory.mktemp("torch") / "model.pt2"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["export", str(finished), str(path)]) == 0
    return path, printed.getvalue()


@pytest.mark.slow
def test_a_process_without_torch_and_this_package_runs_it(
    finished, onnx_file, tmp_path
):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(onnx_file)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert not model.functions
    facts = {entry.key: entry.value for entry in model.metadata_props}
    fingerprint = SpeakerEmbedder.from_run(finished, device="cpu").fingerprint
    assert facts["arch"] == TINY["arch"]
    assert facts["sample_rate"] == "16000"
    assert facts["front_end"] == "speechbrain"
    assert facts["fingerprint"] == fingerprint
    # Nothing tells on which machine it was made.
    assert str(Path(graph.__file__).parent).encode() not in onnx_file.read_bytes()
    waves, samples = padded([16000, 9000])
    np.savez(tmp_path / "waves.npz", waves=waves, samples=samples)
    code = [sys.executable, "-c", ALONE, str(onnx_file), "waves.npz", "rows.npy"]
    done = subprocess.run(
        code, cwd=tmp_path, env={}, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [TINY["arch"]]
    rows = np.load(tmp_path / "rows.npy")
    assert distance(rows, reference(finished)(waves, samples)) < graph.TOLERANCE


@pytest.mark.slow
def test_the_program_of_the_document_compares_two_voices(finished, onnx_file, tmp_path):
    document = Path(graph.__file__).parents[2] / "docs" / "deploying.md"
    program = re.findall(r"```python notest\n(.*?)```", document.read_text(), re.DOTALL)
    shutil.copy(onnx_file, tmp_path / "model.onnx")
    files = [
        write_audio(tmp_path / f"{name}.wav", speech_like(seconds, seed=i))
        for i, (name, seconds) in enumerate({"a": 0.9, "b": 0.6}.items())
    ]
    code = [sys.executable, "-c", program[0]]
    done = subprocess.run(
        code, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    verified = SpeakerEmbedder.from_run(finished, device="cpu").verify(*files)
    assert float(done.stdout) == pytest.approx(verified.score, abs=1e-5)


@pytest.mark.slow
def test_a_program_of_torch_says_what_is_in_it(torch_file):
    path, printed = torch_file
    assert "of a generated signal" in printed.lower()
    extra = {graph.METADATA: ""}
    torch.export.load(path, extra_files=extra)
    assert json.loads(extra[graph.METADATA])["arch"] == TINY["arch"]
    with zipfile.ZipFile(path) as archive:
        texts = [archive.read(name) for name in archive.namelist()]
    assert not any(str(Path(graph.__file__).parent).encode() in t for t in texts)


@pytest.mark.slow
def test_an_exported_folder_gives_the_graph_of_its_run(finished, torch_file, tmp_path):
    export_run(finished, tmp_path / "folder")
    written = export_graph(tmp_path / "folder", tmp_path / "model.pt2")
    given = padded([16000, 8000])
    ours, of_run = (runner(path)(*given) for path in (written.path, torch_file[0]))
    assert np.array_equal(ours, of_run)


class TestWithoutATrace:
    """What is refused or said; the graph itself is replaced, which takes seconds."""

    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        monkeypatch.setattr(graph, "_program", lambda trained: None)
        write_run(tmp_path / "run")
        return tmp_path / "run"

    def use(self, monkeypatch, embed, ending=".pt2"):
        """Let files of an ending hold some bytes, and give these embeddings."""
        formats = {**graph._FORMATS}
        formats[ending] = lambda *_: b"graph", lambda content: embed
        monkeypatch.setattr(graph, "_FORMATS", formats)

    @pytest.mark.parametrize("error", [1.1e-4, torch.nan])
    def test_what_deviates_is_not_written(self, run, tmp_path, monkeypatch, error):
        expected = reference(run)

        def embed(waves, samples):
            return (1 + error) * torch.from_numpy(
                expected(waves.numpy(), samples.numpy())
            )

        self.use(monkeypatch, embed)
        with pytest.raises(ValueError, match="was not written: its embeddings are off"):
            export_graph(run, tmp_path / "model.pt2")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    def test_what_is_within_the_tolerance_is_written(self, run, tmp_path, monkeypatch):
        expected = reference(run)

        def embed(waves, samples):
            return 1.00009 * torch.from_numpy(expected(waves.numpy(), samples.numpy()))

        self.use(monkeypatch, embed)
        written = export_graph(run, tmp_path / "model.pt2")
        assert written.deviation == pytest.approx(9e-5, rel=0.1)
        assert written.path.read_bytes() == b"graph"

    def test_without_onnxruntime_it_says_that_nothing_was_compared(
        self, run, tmp_path, monkeypatch, capsys
    ):
        self.use(monkeypatch, None, ".onnx")
        assert cli.main(["export", str(run), str(tmp_path / "model.onnx")]) == 0
        out = capsys.readouterr().out
        assert "It was not compared with PyTorch" in out
        assert "speechbrain_rev[onnx]" in out

    def test_without_onnxruntime_nothing_runs_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        assert graph._onnx_embed(b"") is None

    @pytest.mark.parametrize("package", ["onnx", "onnxscript"])
    def test_without_onnx_it_names_what_to_install(
        self, run, tmp_path, monkeypatch, capsys, package
    ):
        monkeypatch.setitem(sys.modules, package, None)
        assert cli.main(["export", str(run), str(tmp_path / "model.onnx")]) == 2
        said = capsys.readouterr().err
        assert f"ONNX needs {package}, " in said
        assert "pip install 'speechbrain_rev[onnx]'" in said
        assert not (tmp_path / "model.onnx").exists()

    def test_another_ending_is_refused(self, run, tmp_path):
        with pytest.raises(ValueError, match=r"model\.pt ends in \.pt; a graph is"):
            export_graph(run, tmp_path / "model.pt")

    @pytest.mark.parametrize("name", ["model.ONNX", "model.Onnx"])
    def test_an_ending_in_capitals_is_the_same_ending(
        self, run, tmp_path, monkeypatch, name
    ):
        self.use(monkeypatch, None, ".onnx")
        assert cli.main(["export", str(run), str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes() == b"graph"

    @pytest.mark.parametrize(
        ("name", "said"),
        [("no/model.onnx", "there is no folder"), ("run.onnx", "it is a folder")],
    )
    def test_a_place_that_is_none_is_refused_before_the_work(
        self, run, tmp_path, monkeypatch, capsys, name, said
    ):
        (tmp_path / "run.onnx").mkdir()
        monkeypatch.setattr(graph, "read_trained", None)
        with pytest.raises(ValueError, match=said):
            export_graph(run, tmp_path / name)
        assert cli.main(["export", str(run), str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err

    def test_weights_that_no_message_holds_are_refused_before_they_are_converted(
        self, monkeypatch
    ):
        monkeypatch.setattr(graph, "_MOST_BYTES", 4095)
        program = SimpleNamespace(
            state_dict={"weight": torch.zeros(1000)},
            constants={"window": torch.zeros(24), "name": "no tensor"},
        )
        with pytest.raises(ValueError, match=r"weights have 4,096 bytes.* in \.pt2"):
            graph._onnx_bytes(program, {})

    def test_weights_of_another_encoder_are_refused(self, run, tmp_path):
        state = io.BytesIO()
        torch.save({"weight": torch.zeros(1)}, state)
        (run / "embedding_model.ckpt").write_bytes(state.getvalue())
        with pytest.raises(ValueError, match="does not fit"):
            export_graph(run, tmp_path / "model.pt2")
