"""Trained encoders as one graph of standard operators: ONNX, and torch.export's.

A short-time Fourier transform is a convolution, whose weights are what the library makes
of unit impulses. ONNX has an operator STFT, which is slower and less exact in onnxruntime
1.32.

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
from typing import Any, cast

import torch
import torch.nn.functional as F
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torchaudio.compliance import kaldi

from speechbrain_rev.audio.checks import MINIMUM_SECONDS
from speechbrain_rev.audio.packed import FULL_SCALE
from speechbrain_rev.files import check_file, write_whole
from speechbrain_rev.filterbanks import FILTERBANKS, HOP_MS, WINDOW_MS
from speechbrain_rev.inference.front_ends import (
    WaveformEncoder,
    within,
    without_padding,
)
from speechbrain_rev.inference.trained import Trained, read_trained
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.description import FrontEnd
from speechbrain_rev.lobes.inference_form import inference_form
from speechbrain_rev.lobes.pooling import is_quantized

# Defaults of torchaudio's kaldi.fbank, which KaldiFbank leaves as they are.
_PREEMPHASIS, _LOW_HZ = 0.97, 20.0


class PowerSpectra(nn.Module):
    """Power spectra of overlapping windows, by a convolution.

    Parameters
    ----------
    transform : torch.Tensor, [window, bins], complex
        The spectrum of a unit impulse at each place of a window.
    hop : int
        Samples from one window to the next.
    padding : int
        Zeros before and after the signal.

    Examples
    --------
    >>> spectra = PowerSpectra(torch.fft.rfft(torch.eye(8)), hop=4, padding=0)
    >>> spectra(torch.ones(1, 16)).shape
    torch.Size([1, 3, 5])
    """

    weight: Tensor

    def __init__(self, transform: Tensor, *, hop: int, padding: int) -> None:
        super().__init__()
        self.hop, self.padding = hop, padding
        parts = torch.cat([transform.real, transform.imag], dim=1)
        self.register_buffer("weight", parts.T.unsqueeze(1).float().contiguous())

    def forward(self, waveforms: Tensor) -> Tensor:
        """Map [batch, samples] to [batch, time, bins]."""
        parts = F.conv1d(
            waveforms.unsqueeze(1), self.weight, stride=self.hop, padding=self.padding
        )
        real, imaginary = parts.chunk(2, dim=1)
        return (real.square() + imaginary.square()).transpose(1, 2)


class SpeechBrainGraphFbank(nn.Module):
    """``SpeechBrainFbank`` in operators of any runtime.

    Parameters
    ----------
    n_mels : int
        Mel bands.
    sample_rate : int
        Hertz.

    Examples
    --------
    >>> samples = torch.tensor([16000, 8000])
    >>> features, lengths = SpeechBrainGraphFbank()(torch.randn(2, 16000), samples)
    >>> features.shape, lengths.shape
    (torch.Size([2, 101, 80]), torch.Size([2]))
    """

    def __init__(self, *, n_mels: int = 80, sample_rate: int = 16000) -> None:
        super().__init__()
        self.sample_rate = sample_rate
        fbank = Fbank(n_mels=n_mels, sample_rate=sample_rate)
        stft = fbank.compute_STFT
        impulses = torch.eye(stft.n_fft, dtype=torch.float64)
        transform = torch.stft(
            impulses, stft.n_fft, stft.hop_length, stft.win_length,
            stft.window.double(), center=False, return_complex=True,
        ).squeeze(2)  # fmt: skip
        self.power_spectra = PowerSpectra(
            transform, hop=stft.hop_length, padding=stft.n_fft // 2
        )
        self.compute_fbanks = fbank.compute_fbanks
        self.mean_var_norm = InputNormalization(norm_type="sentence", std_norm=False)

    def forward(self, waveforms: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features [batch, time, n_mels] and relative lengths [batch]."""
        power = self.power_spectra(waveforms)
        frames = FILTERBANKS["speechbrain"].frames(samples, self.sample_rate)
        longest = power.shape[1]
        features = self.compute_fbanks(without_padding(power, frames))
        return self.mean_var_norm(
            features, within(frames, longest)
        ), frames.float() / longest


class KaldiGraphFbank(nn.Module):
    """``KaldiFbank`` in operators of any runtime, for a whole batch at once.

    Parameters
    ----------
    n_mels : int
        Mel bands.
    sample_rate : int
        Hertz.

    Examples
    --------
    >>> samples = torch.tensor([16000, 8000])
    >>> features, lengths = KaldiGraphFbank()(torch.randn(2, 16000), samples)
    >>> features.shape, lengths.shape
    (torch.Size([2, 98, 80]), torch.Size([2]))
    """

    mels: Tensor

    def __init__(self, *, n_mels: int = 80, sample_rate: int = 16000) -> None:
        super().__init__()
        self.sample_rate = sample_rate
        window = sample_rate * WINDOW_MS // 1000
        n_fft = 1 << (window - 1).bit_length()
        frames = FULL_SCALE * torch.eye(window, dtype=torch.float64)
        frames = frames - frames.mean(dim=1, keepdim=True)
        before = torch.cat([frames[:, :1], frames[:, :-1]], dim=1)
        hamming = torch.hamming_window(
            window, periodic=False, dtype=torch.float32
        ).double()
        windowed = (frames - _PREEMPHASIS * before) * hamming
        transform = torch.fft.rfft(windowed, n_fft)
        self.power_spectra = PowerSpectra(
            transform, hop=sample_rate * HOP_MS // 1000, padding=0
        )
        filters, _ = kaldi.get_mel_banks(
            n_mels, n_fft, sample_rate, _LOW_HZ, 0.0, 100.0, -500.0, 1.0
        )
        # The highest bin is in none of them.
        self.register_buffer("mels", F.pad(filters, (0, 1)).T.contiguous())
        self.mean_var_norm = InputNormalization(norm_type="sentence", std_norm=False)

    def forward(self, waveforms: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features [batch, time, n_mels] and relative lengths [batch].

        No utterance may be shorter than a window: in a graph that cannot be refused, and
        what is given means nothing.
        """
        # The mean of each window is taken off in the convolution, where a larger constant
        # would take the precision of what is left.
        offset = waveforms.sum(dim=1, keepdim=True) / samples.unsqueeze(1)
        energies = self.power_spectra(waveforms - offset) @ self.mels
        features = energies.clamp_min(torch.finfo(torch.float32).eps).log()
        frames = FILTERBANKS["kaldi"].frames(samples, self.sample_rate)
        longest = features.shape[1]
        return self.mean_var_norm(
            features, within(frames, longest)
        ), frames.float() / longest


#: By the word that hyperparams.yaml has for each.
GRAPH_FRONT_ENDS: dict[str, type[SpeechBrainGraphFbank] | type[KaldiGraphFbank]] = {
    "speechbrain": SpeechBrainGraphFbank,
    "kaldi": KaldiGraphFbank,
}


class EmbeddingGraph(nn.Module):
    """Map waveforms to embeddings in operations that can be exported.

    Parameters
    ----------
    encoder : SpeakerEncoder
        The trained encoder, which stays as it is.
    front_end : FrontEnd
        How the features are made that it was trained with.

    Raises
    ------
    ValueError
        If the encoder is quantized, or was changed as ``inference_form`` refuses.

    Examples
    --------
    >>> from speechbrain_rev.lobes import build_encoder
    >>> encoder = build_encoder("revnet46", widths=(8,) * 4, blocks=(1,) * 4)
    >>> graph = EmbeddingGraph(encoder, FrontEnd("speechbrain", 16000, 80))
    >>> graph(torch.randn(2, 16000), torch.tensor([16000, 9000])).shape
    torch.Size([2, 256])
    """

    def __init__(self, encoder: SpeakerEncoder, front_end: FrontEnd) -> None:
        super().__init__()
        if is_quantized(encoder):
            raise ValueError(
                f"{encoder.architecture.name} has quantized layers, which torch.export does "
                "not know. Export the encoder as it was, and quantize the ONNX file with "
                "onnxruntime.quantization."
            )
        self.sample_rate = front_end.sample_rate
        self.front_end = GRAPH_FRONT_ENDS[front_end.kind](
            n_mels=front_end.n_mels, sample_rate=front_end.sample_rate
        )
        self.encoder = inference_form(encoder)

    def forward(self, waveforms: Tensor, samples: Tensor) -> Tensor:
        """Embed a batch.

        Parameters
        ----------
        waveforms : torch.Tensor, [batch, samples]
            Utterances from -1 to 1; what lies behind their samples does not matter.
        samples : torch.Tensor, [batch], int64
            How many samples of each are its own.

        Returns
        -------
        torch.Tensor, [batch, embedding_dim]
            Embeddings.
        """
        positions = torch.arange(
            waveforms.shape[1], device=waveforms.device, dtype=torch.int64
        )
        is_speech = positions < samples.unsqueeze(1)
        features, lengths = self.front_end(waveforms.where(is_speech, 0.0), samples)
        return self.encoder.embed(features, lengths).squeeze(1)


def exported(graph: EmbeddingGraph) -> ExportedProgram:
    """Trace a graph for batches of any size and utterances of any length.

    Parameters
    ----------
    graph : EmbeddingGraph
        What is traced.

    Returns
    -------
    torch.export.ExportedProgram
        Of inputs ``waveforms`` and ``samples``, both of dynamic batch; a quarter of a
        second is the shortest that it takes.
    """
    second = graph.sample_rate
    example = (
        torch.zeros(2, second // 2, dtype=torch.float32),
        torch.tensor([second // 2, second // 3], dtype=torch.int64),
    )
    batch = Dim("batch", min=1)
    longest = Dim("longest", min=int(MINIMUM_SECONDS * second))
    with torch.no_grad():
        program = torch.export.export(
            graph.eval(),
            example,
            dynamic_shapes={
                "waveforms": {0: batch, 1: longest},
                "samples": {0: batch},
            },
            strict=False,
            # Lengths are divided at each level: true for all, but not proven by torch.
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    for module in program.graph_module.modules():
        for node in cast(GraphModule, module).graph.nodes:
            # Stack traces name files of the machine that traced the graph.
            node.meta.pop("stack_trace", None)
    return program


#: The name of torch.export's extra file with the metadata.
METADATA = "metadata.json"
#: Largest distance from PyTorch's embedding, as a fraction of its length.
TOLERANCE = 1e-4
# onnxruntime reads this opset since early 2023.
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
        # A missing package is reported before the work, not after it.
        for name in ("onnx", "onnxscript"):
            _optional(name)
    trained = read_trained(source)
    graph = EmbeddingGraph(trained.encoder, trained.front_end)
    with _quiet():
        content = convert(exported(graph), metadata_of(trained))
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
    encoder, front_end = trained.encoder.description, trained.front_end
    facts = {
        "arch": encoder.name,
        "sample_rate": front_end.sample_rate,
        "embedding_dim": encoder.embedding_dim,
        "front_end": front_end.kind,
        "n_mels": encoder.n_mels,
        "shortest_samples": int(MINIMUM_SECONDS * front_end.sample_rate),
        "fingerprint": trained.fingerprint,
    }
    return {name: str(value) for name, value in facts.items()}


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
    rate = trained.front_end.sample_rate
    model = WaveformEncoder(trained.encoder, trained.front_end).eval()
    distances = []
    for seconds in ([1.0, 0.61, 0.25], [1.387]):
        samples = torch.tensor([int(s * rate) for s in seconds], dtype=torch.int64)
        waveforms = _signal(samples, rate)
        with torch.no_grad():
            expected = model(waveforms, samples).squeeze(1)
        off = (embed(waveforms, samples) - expected).norm(dim=1)
        distances.append(off / expected.norm(dim=1))
    # max() of distances with a NaN is NaN, which is refused.
    return float(torch.cat(distances).max())


def _signal(samples: Tensor, rate: int) -> Tensor:
    """Make harmonics of gliding pitch in noise, that stop where each utterance ends."""
    noise = torch.Generator().manual_seed(0)
    time = torch.arange(int(samples.max()), dtype=torch.float32) / rate
    pitch = torch.linspace(90, 240, len(samples), dtype=torch.float32).unsqueeze(1)
    phase = 2 * torch.pi * (pitch * time + 20 * time.square())
    voices = sum(torch.sin(k * phase) / k for k in range(1, 15))
    assert isinstance(voices, Tensor)
    loudness = 0.6 + 0.4 * torch.sin(2 * torch.pi * 3 * time)
    signal = 0.1 * voices * loudness
    signal = signal + 0.005 * torch.randn(
        signal.shape, generator=noise, dtype=torch.float32
    )
    return signal * (
        torch.arange(signal.shape[1], dtype=torch.int64) < samples.unsqueeze(1)
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
    parts = [*program.state_dict.values(), *program.constants.values()]
    size = sum(part.nbytes for part in parts if isinstance(part, Tensor))
    if size > _MOST_BYTES:
        raise ValueError(
            f"The graph's weights have {size:,} bytes, and a file of ONNX holds at most "
            f"{_MOST_BYTES:,}. Give a file that ends in .pt2."
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
        # Tracing left these; a runtime reads neither.
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
        inputs = {"waveforms": waveforms.numpy(), "samples": samples.numpy()}
        return torch.from_numpy(session.run(["embeddings"], inputs)[0])

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
    """Silence what torch's exporter logs about other packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
