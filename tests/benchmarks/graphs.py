"""Embedding by onnxruntime, beside PyTorch with the same encoder."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speechbrain_rev.inference import WaveformEncoder, export_graph
from speechbrain_rev.inference.run_folder import write_run
from speechbrain_rev.lobes import inference_form
from tests.corpus import RATE, speak

from .harness import NotEqual, Result, interleaved_seconds
from .inference import EVAL, FORM, encoder_of
from .inference import Setting as Sizes

#: Of an embedding's length.
TOLERANCE = 1e-4
BASELINE = f"PyTorch, {EVAL}"


@dataclass(frozen=True)
class Setting:
    """Which encoders embed what; widths and blocks of None are the encoder's."""

    encoders: tuple[str, ...] = ("resnet34", "df_resnet56", "revnet57", "df_revnet89")
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    batches: tuple[int, ...] = (1, 4)
    seconds: float = 3.0
    repeats: int = 5


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Embed waveforms of one length in each way."""
    if device.type != "cpu":
        raise NotEqual(f"onnxruntime runs on the CPU here, not on {device}.")
    setting = setting or Setting()
    rows, worst = [], 0.0
    for name in setting.encoders:
        found, off = _measure(name, setting)
        rows += found
        worst = max(worst, off)
    return Result(
        "graphs",
        "Is an embedding faster in onnxruntime than in PyTorch?",
        f"waveforms of {setting.seconds:g} s and one length, float32, features included; "
        f"onnxruntime {version('onnxruntime')} with as many threads as PyTorch; all ways "
        "of an encoder in turn",
        rows,
        f"embeddings, those of padded utterances too, within {worst:.1e} of PyTorch's "
        "in evaluation mode",
    )


def _measure(name: str, setting: Setting) -> tuple[list[dict[str, Any]], float]:
    encoder = encoder_of(name, setting.sizes)
    plain = WaveformEncoder(encoder).eval()
    form = WaveformEncoder(inference_form(encoder)).eval()
    row = encoder.architecture
    settings = {
        "arch": name,
        "widths": list(row.widths),
        "blocks": list(row.blocks),
        "n_mels": encoder.n_mels,
        "embedding_dim": encoder.fc.out_features,
        "sample_rate": RATE,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder, "run"), settings, encoder.state_dict())
        file = export_graph(Path(folder, "run"), Path(folder, "model.onnx"))
        session = session_of(file.path)
    graph = functools.partial(_by_graph, session)
    waves = voices(max(*setting.batches, 2), round(setting.seconds * RATE))
    worst = check(name, plain, {"graph": graph, "form": form}, waves)
    rows = []
    for batch in setting.batches:
        given = waves[:batch]
        steps: dict[str, Callable[[], Any]] = {
            BASELINE: functools.partial(_without_graph, plain, given),
            f"PyTorch, {FORM}": functools.partial(_without_graph, form, given),
            "onnxruntime": functools.partial(graph, given, _whole(given)),
        }
        cpu = torch.device("cpu")
        found = interleaved_seconds(steps, cpu, repeats=setting.repeats)
        rows += [
            {
                "encoder": name,
                "batch": batch,
                "way": way,
                "baseline": BASELINE,
                "utterances per s": batch / spread["median"],
                "times the baseline": found[BASELINE]["median"] / spread["median"],
                "20 to 80 %, s": [spread["p20"], spread["p80"]],
            }
            for way, spread in found.items()
        ]
    return rows, worst


def session_of(path: Path) -> Any:
    """Load a graph for as many threads as PyTorch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(path, options, providers=providers)


def voices(utterances: int, samples: int) -> Tensor:
    """Make synthetic voices: [utterances, samples]."""
    draws = np.random.default_rng(0)
    waves = [
        speak(draws.uniform(80, 300), draws.uniform(400, 3000), samples, draws)
        for _ in range(utterances)
    ]
    return torch.from_numpy(np.stack(waves).astype(np.float32))


@torch.no_grad()
def check(
    name: str,
    plain: WaveformEncoder,
    others: dict[str, Callable[[Tensor, Tensor], Tensor]],
    waves: Tensor,
) -> float:
    """Compare ways with PyTorch's, utterances padded or not.

    Raises
    ------
    NotEqual
        If an embedding is off by more than the tolerance.
    """
    counts = torch.linspace(0.4, 1, len(waves)) * waves.shape[1]
    shorter = counts.round().to(torch.int64)
    cut = waves * (torch.arange(waves.shape[1]) < shorter.unsqueeze(1))
    worst = 0.0
    for given in ((waves, _whole(waves)), (cut, shorter)):
        expected = plain(*given).squeeze(1)
        for way, embed in others.items():
            ours = embed(*given).reshape(expected.shape)
            off = float(((ours - expected).norm(dim=1) / expected.norm(dim=1)).max())
            if not off <= TOLERANCE:
                raise NotEqual(f"{name}, {way}: an embedding is off by {off}")
            worst = max(worst, off)
    return worst


def _whole(waves: Tensor) -> Tensor:
    return torch.full((len(waves),), waves.shape[1])


@torch.no_grad()
def _without_graph(model: WaveformEncoder, waves: Tensor) -> Tensor:
    embeddings: Tensor = model(waves)
    return embeddings


def _by_graph(session: Any, waves: Tensor, samples: Tensor) -> Tensor:
    given = {"waveforms": waves.numpy(), "samples": samples.numpy()}
    return torch.from_numpy(session.run(["embeddings"], given)[0])
