"""Trained encoders as files of one graph: ONNX, and torch.export's.

Both take waveforms and give embeddings, without this package.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from speechbrain_rev.inference.audio import MINIMUM_SECONDS
from speechbrain_rev.inference.graph import EmbeddingGraph, exported
from speechbrain_rev.inference.trained import Trained, read_trained
from speechbrain_rev.inference.waveform import WaveformEncoder
from speechbrain_rev.whole_files import check_file, write_whole

#: The name of torch.export's extra file with the metadata.
METADATA = "metadata.json"
#: Of an embedding's length: how far a graph may be from the encoder in PyTorch.
TOLERANCE = 1e-4
# What onnxruntime of early 2023 on reads, and all that is needed here.
_OPSET = 18
# A message of protobuf has less than 2 GiB; nodes and names take some of them.
_MOST_BYTES = 2**31 - 2**24

Embed = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GraphFile:
    """What was written.

    Attributes
    ----------
    path : pathlib.Path
        The file.
    size_bytes : int
        Its size.
    deviation : float or None
        The largest distance from PyTorch's embeddings over their length, of a generated
        signal; None if onnxruntime is not installed, so that nothing was compared.
    """

    path: Path
    size_bytes: int
    deviation: float | None


def export_graph(source: str | PathLike[str], out: str | PathLike[str]) -> GraphFile:
    """Write a trained encoder as one file that maps waveforms to embeddings.

    The graph has inputs ``waveforms`` [batch, samples], float32 from -1 to 1 at the
    model's rate, and ``samples`` [batch], int64, how many of each are its own; its output
    is ``embeddings`` [batch, embedding_dim]. Before it is written, it is run and compared
    with the encoder in PyTorch.

    Parameters
    ----------
    source : str or path-like
        The ``output_folder`` of a training run, or what ``convert_from_wespeaker`` or
        ``export_run`` wrote.
    out : str or path-like
        A file that ends in .onnx or .pt2.

    Returns
    -------
    GraphFile
        Where it is, how large, and how far from PyTorch.

    Raises
    ------
    FileNotFoundError
        If the folder or its weights are missing.
    ImportError
        If onnx or onnxscript is not installed, for .onnx.
    ValueError
        If the ending is another, ``out`` is a folder or in none that is there, ``source``
        is no trained encoder, its weights are too large for .onnx, or the graph deviates by
        more than 1e-4; then nothing is written.
    """
    path = Path(out)
    ending = path.suffix.lower()
    if ending not in _FORMATS:
        raise ValueError(
            f"{path} ends in {path.suffix or 'nothing'}; a graph is written to a file "
            f"that ends in {' or '.join(_FORMATS)}."
        )
    check_file("out:", path)
    convert, load = _FORMATS[ending]
    if convert is _onnx_bytes:
        # Before the work and not after it.
        for name in ("onnx", "onnxscript"):
            _optional(name)
    trained = read_trained(source)
    with _quiet():
        content = convert(_program(trained), metadata_of(trained))
        embed = load(content)
    deviation = None if embed is None else deviation_of(embed, trained)
    if deviation is not None and not deviation <= TOLERANCE:
        raise ValueError(
            f"{path} was not written: its embeddings are off by {deviation:.1e} of those "
            f"of PyTorch, more than {TOLERANCE:.0e}. Are the weights of {source} finite "
            "(speechbrain-rev embed)? If so, please report it."
        )
    write_whole(path, content)
    return GraphFile(path, len(content), deviation)


def metadata_of(trained: Trained) -> dict[str, str]:
    """Give what a graph's file says about the encoder in it."""
    settings = trained.settings
    named = ("arch", "sample_rate", "embedding_dim", "front_end", "n_mels")
    facts = {name: str(settings[name]) for name in named}
    shortest = str(int(MINIMUM_SECONDS * settings["sample_rate"]))
    return facts | {"shortest_samples": shortest, "fingerprint": trained.fingerprint}


def deviation_of(embed: Embed, trained: Trained) -> float:
    """Compare embeddings of utterances of several lengths with those of PyTorch.

    Parameters
    ----------
    embed : callable
        Maps waveforms [batch, samples] and samples [batch] to [batch, embedding_dim].
    trained : Trained
        The encoder.

    Returns
    -------
    float
        The largest distance over the length of the embedding.
    """
    rate = trained.settings["sample_rate"]
    model = WaveformEncoder(
        trained.encoder,
        n_mels=trained.encoder.n_mels,
        sample_rate=rate,
        front_end=trained.settings["front_end"],
    ).eval()
    worst = 0.0
    for seconds in ([1.0, 0.61, 0.25], [1.387]):
        samples = torch.tensor([int(s * rate) for s in seconds])
        waveforms = _signal(samples, rate)
        with torch.no_grad():
            expected = model(waveforms, samples).squeeze(1)
        off = (embed(waveforms, samples) - expected).norm(dim=1)
        # A NaN is the largest.
        worst = max(worst, float((off / expected.norm(dim=1)).max()), key=_nan_last)
    return worst


def _nan_last(value: float) -> float:
    return float("inf") if value != value else value


def _signal(samples: Tensor, rate: int) -> Tensor:
    """Make harmonics of gliding pitch in noise, that stop where each utterance ends."""
    noise = torch.Generator().manual_seed(0)
    time = torch.arange(int(samples.max())) / rate
    pitch = torch.linspace(90, 240, len(samples)).unsqueeze(1)
    phase = 2 * torch.pi * (pitch * time + 20 * time.square())
    voices = sum(torch.sin(k * phase) / k for k in range(1, 15))
    assert isinstance(voices, Tensor)
    loudness = 0.6 + 0.4 * torch.sin(2 * torch.pi * 3 * time)
    signal = 0.1 * voices * loudness
    signal = signal + 0.005 * torch.randn(signal.shape, generator=noise)
    return signal * (torch.arange(signal.shape[1]) < samples.unsqueeze(1))


def _program(trained: Trained) -> ExportedProgram:
    settings = trained.settings
    return exported(
        EmbeddingGraph(
            trained.encoder,
            sample_rate=settings["sample_rate"],
            front_end=settings["front_end"],
        )
    )


def _pt2_bytes(program: ExportedProgram, metadata: Mapping[str, str]) -> bytes:
    content = io.BytesIO()
    extra = {METADATA: json.dumps(dict(metadata), indent=1)}
    torch.export.save(program, content, extra_files=extra)
    return content.getvalue()


def _pt2_embed(content: bytes) -> Embed:
    module = torch.export.load(io.BytesIO(content)).module()

    def embed(waveforms: Tensor, samples: Tensor) -> Tensor:
        with torch.no_grad():
            embeddings: Tensor = module(waveforms, samples)
        return embeddings

    return embed


def _onnx_bytes(program: ExportedProgram, metadata: Mapping[str, str]) -> bytes:
    held = [*program.state_dict.values(), *program.constants.values()]
    size = sum(part.nbytes for part in held if isinstance(part, Tensor))
    if size > _MOST_BYTES:
        raise ValueError(
            f"The graph's weights have {size:,} bytes, and in a file of ONNX there is room "
            f"for {_MOST_BYTES:,}. Give a file that ends in .pt2."
        )
    onnx = _optional("onnx")
    converted = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        opset_version=_OPSET,
        input_names=["waveforms", "samples"],
        output_names=["embeddings"],
    )
    assert converted is not None
    waveforms = converted.model.graph.inputs[0]
    assert waveforms.shape is not None
    axes = zip(waveforms.shape, ("batch", "longest"), strict=True)
    converted.rename_axes({str(axis): name for axis, name in axes})
    model = converted.model_proto
    graph = model.graph
    for part in [*graph.node, *graph.input, *graph.output, *graph.value_info]:
        # Of the tracing; a runtime reads none of it.
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString()
    return content


def _onnx_embed(content: bytes) -> Embed | None:
    try:
        runtime = import_module("onnxruntime")
    except ImportError:
        return None
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def embed(waveforms: Tensor, samples: Tensor) -> Tensor:
        given = {"waveforms": waveforms.numpy(), "samples": samples.numpy()}
        return torch.from_numpy(session.run(["embeddings"], given)[0])

    return embed


#: By the ending of a file's name: what makes its content, and what runs it.
_FORMATS: dict[
    str,
    tuple[
        Callable[[ExportedProgram, Mapping[str, str]], bytes],
        Callable[[bytes], Embed | None],
    ],
] = {".onnx": (_onnx_bytes, _onnx_embed), ".pt2": (_pt2_bytes, _pt2_embed)}
#: Endings of files that ``export_graph`` writes.
ENDINGS = tuple(_FORMATS)


def _optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"ONNX needs {name}, which cannot be imported here: pip install "
            "'speechbrain_rev[onnx]', or give a file that ends in .pt2."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what torch's exporter says of packages that are not concerned."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
