"""Graphs in files: parity with PyTorch, standard operators, nothing half-written."""

import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from speechbrain_rev import cli
from speechbrain_rev.inference import WaveformEncoder, export_graph, graph
from speechbrain_rev.inference.trained import read_trained, write_weights
from speechbrain_rev.lobes.description import FrontEnd
from tests.run_folders import TINY, speech_like, write_audio
from tests.unit.lobes.encoders import KINDS, tiny, with_statistics

#: Batches as lists of samples; ends and odd lengths, around where frames are added.
BATCHES = [
    [4000],
    [16159, 16160],
    [4000, 4159, 4160, 4161, 30001],
]
PLACE = str(Path(graph.__file__).parent).encode()


def write_encoder(folder, encoder, front_end="speechbrain"):
    """Write a folder of the weights of an encoder that is given."""
    front_end = FrontEnd(front_end, TINY["sample_rate"], encoder.n_mels)
    description = replace(encoder.description, front_end=front_end)
    folder.mkdir()
    write_weights(folder, description, encoder.state_dict())
    return folder


def padded(waves):
    """Utterances padded with zeros, and how many samples each has."""
    samples = np.array([len(wave) for wave in waves])
    rows = np.zeros((len(waves), samples.max()), np.float32)
    for row, wave in zip(rows, waves, strict=True):
        row[: len(wave)] = wave
    return rows, samples


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
    model = WaveformEncoder(trained.encoder, trained.front_end).eval()

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
        waves = [speech_like(n / 16000, seed=i)[:n] for i, n in enumerate(batch)]
        given = padded(waves)
        together = embed(*given)
        assert together.shape == (len(batch), 32)
        assert distance(together, expected(*given)) < graph.TOLERANCE
        for i, wave in enumerate(waves):
            one = embed(*padded([wave]))
            assert distance(one, together[i : i + 1]) < graph.TOLERANCE


@pytest.mark.parametrize("kind", ["speechbrain", "kaldi"])
@pytest.mark.parametrize("behind", [1.0, float("nan")])
def test_what_lies_behind_an_utterance_does_not_matter(kind, behind):
    encoder = with_statistics(tiny("revnet57"))
    front_end = FrontEnd(kind, 16000, encoder.n_mels)
    embed = graph.EmbeddingGraph(encoder, front_end).eval()
    waves, samples = map(torch.from_numpy, padded([speech_like(1.0), speech_like(0.5)]))
    expected = embed(waves, samples)
    waves[1, int(samples[1]) :] = behind
    assert torch.equal(embed(waves, samples), expected)


ALONE = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
waves = numpy.load(sys.argv[2])
given = {"waveforms": waves["waves"], "samples": waves["samples"]}
numpy.save(sys.argv[3], session.run(["embeddings"], given)[0])
print(session.get_modelmeta().custom_metadata_map["arch"])
assert not {"torch", "speechbrain", "speechbrain_rev"} & set(sys.modules)
"""


@pytest.mark.slow(drawn=False)
def test_an_onnx_file_runs_without_torch_and_this_package(trained, embedder, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    path = tmp_path / "model.onnx"
    assert cli.main(["export", str(trained[0]), str(path)]) == 0
    model = onnx.load(path)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert not model.functions
    facts = {entry.key: entry.value for entry in model.metadata_props}
    expected = {"arch": TINY["arch"], "sample_rate": "16000"}
    expected |= {"front_end": "speechbrain", "fingerprint": embedder.fingerprint}
    assert facts.items() >= expected.items()
    # No name of the machine it was made on.
    assert PLACE not in path.read_bytes()
    waves, samples = padded([speech_like(), speech_like(0.6, seed=1)])
    np.savez(tmp_path / "waves.npz", waves=waves, samples=samples)
    code = [sys.executable, "-c", ALONE, str(path), "waves.npz", "rows.npy"]
    options = {"cwd": tmp_path, "check": True, "capture_output": True, "text": True}
    done = subprocess.run(code, env={}, **options)
    assert done.stdout.split() == [TINY["arch"]]
    rows = np.load(tmp_path / "rows.npy")
    assert distance(rows, reference(trained[0])(waves, samples)) < graph.TOLERANCE
    # The program of the document compares two voices.
    document = Path(graph.__file__).parents[2] / "docs" / "deploying.md"
    page = document.read_text().partition("\n## ONNX\n")[2]
    program = re.findall(r"```python notest\n(.*?)```", page, re.DOTALL)
    files = [
        write_audio(tmp_path / f"{name}.wav", speech_like(seconds, seed=i))
        for i, (name, seconds) in enumerate({"a": 0.9, "b": 0.6}.items())
    ]
    done = subprocess.run([sys.executable, "-c", program[0]], **options)
    verified = embedder.verify(*files)
    assert float(done.stdout) == pytest.approx(verified.score, abs=1e-5)


@pytest.mark.slow(drawn=False)
def test_a_program_of_torch_has_its_facts_and_is_that_of_the_exported_folder(
    trained, model, tmp_path, capsys
):
    path = tmp_path / "model.pt2"
    assert cli.main(["export", str(trained[0]), str(path)]) == 0
    assert "of a generated signal" in capsys.readouterr().out.lower()
    extra = {graph.METADATA: ""}
    torch.export.load(path, extra_files=extra)
    assert json.loads(extra[graph.METADATA])["arch"] == TINY["arch"]
    with zipfile.ZipFile(path) as archive:
        assert not any(PLACE in archive.read(name) for name in archive.namelist())
    written = export_graph(model, tmp_path / "folder.pt2")
    given = padded([speech_like(), speech_like(0.5)])
    assert np.array_equal(runner(written.path)(*given), runner(path)(*given))


class TestWithoutATrace:
    """What is refused or printed; the graph, which takes seconds, is replaced."""

    @pytest.fixture(autouse=True)
    def _no_program(self, monkeypatch):
        monkeypatch.setattr(graph, "exported", lambda graph: None)

    @pytest.fixture
    def use(self, monkeypatch):
        """A function that lets files of an ending hold some bytes, and embed so."""

        def replace(embed, ending=".pt2"):
            made = {ending: (lambda *_: b"graph", lambda content: embed)}
            monkeypatch.setattr(graph, "_FORMATS", graph._FORMATS | made)

        return replace

    @pytest.mark.parametrize("error", [1.1e-4, torch.nan, 9e-5])
    def test_what_deviates_is_not_written(self, trained, tmp_path, use, error):
        path, expected = tmp_path / "model.pt2", reference(trained[0])

        def embed(waves, samples):
            rows = expected(waves.numpy(), samples.numpy())
            return (1 + error) * torch.from_numpy(rows)

        use(embed)
        if error == 9e-5:
            written = export_graph(trained[0], path)
            assert written.deviation == pytest.approx(error, rel=0.1)
            assert path.read_bytes() == b"graph"
        else:
            with pytest.raises(ValueError, match="was not written: its embeddings are"):
                export_graph(trained[0], path)
            assert not list(tmp_path.iterdir())

    def test_without_onnxruntime_nothing_is_compared(
        self, trained, tmp_path, use, capsys, monkeypatch
    ):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        use(graph._onnx_embed(b""), ".onnx")
        assert cli.main(["export", str(trained[0]), str(tmp_path / "a.ONNX")]) == 0
        out = capsys.readouterr().out
        assert "It was not compared with PyTorch" in out
        assert "speechbrain_rev[onnx]" in out
        assert (tmp_path / "a.ONNX").read_bytes() == b"graph"

    @pytest.mark.parametrize("package", ["onnx", "onnxscript"])
    def test_without_onnx_it_names_what_to_install(
        self, trained, tmp_path, monkeypatch, capsys, package
    ):
        monkeypatch.setitem(sys.modules, package, None)
        out = tmp_path / "model.onnx"
        assert cli.main(["export", str(trained[0]), str(out)]) == 2
        message = capsys.readouterr().err
        assert f"ONNX needs {package}, " in message
        assert "pip install 'speechbrain_rev[onnx]'" in message
        assert not out.exists()

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("model.pt", r"model\.pt ends in \.pt; a graph is"),
            ("no/model.onnx", "there is no folder"),
            ("run.onnx", "it is a folder"),
        ],
    )
    def test_a_place_that_is_none_is_refused_before_the_work(
        self, trained, tmp_path, monkeypatch, name, words
    ):
        (tmp_path / "run.onnx").mkdir()
        monkeypatch.setattr(graph, "read_trained", None)
        with pytest.raises(ValueError, match=words):
            export_graph(trained[0], tmp_path / name)

    def test_weights_that_no_message_holds_are_refused(self, monkeypatch):
        monkeypatch.setattr(graph, "_MOST_BYTES", 4095)
        constants = {"window": torch.zeros(24), "name": "no tensor"}
        weights = {"weight": torch.zeros(1000)}
        program = SimpleNamespace(state_dict=weights, constants=constants)
        with pytest.raises(ValueError, match=r"weights have 4,096 bytes.* in \.pt2"):
            graph._onnx_bytes(program, {})
