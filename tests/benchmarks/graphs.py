"""Embedding by onnxruntime, beside PyTorch with the same encoder."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speechbrain_rev.inference import WaveformEncoder, export_graph
from speechbrain_rev.inference.trained import write_weights
from speechbrain_rev.lobes import inference_form
from speechbrain_rev.lobes.description import FrontEnd
from tests.corpus import RATE, speak

from .harness import CPU, Result, interleaved_seconds, require
from .inference import EVAL, FORM, encoder_of, largest_distance

#: Of an embedding's length.
TOLERANCE = 1e-4
BASELINE = f"PyTorch, {EVAL}"

#: From waveforms, and how many samples of each count if not all, to embeddings.
Embed = Callable[..., Tensor]


@dataclass(frozen=True)
class Setting:
    """Which encoders embed what; ``row`` has other widths and blocks."""

    encoders: tuple[str, ...] = ("resnet34", "df_resnet56", "revnet57", "df_revnet89")
    row: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (1, 4)
    seconds: float = 3.0
    repeats: int = 5


@torch.no_grad()
def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Embed waveforms of one length in each way."""
    setting = setting or Setting()
    rows, worst = [], 0.0
    waves = voices(max(*setting.batches, 2), round(setting.seconds * RATE))
    for name in setting.encoders:
        ways = ways_of(name, setting.row)
        worst = max(worst, check(name, ways, waves))
        for batch in setting.batches:
            steps = {w: functools.partial(e, waves[:batch]) for w, e in ways.items()}
            seconds = interleaved_seconds(steps, CPU, repeats=setting.repeats)
            rows += [
                {
                    "encoder": name,
                    "batch": batch,
                    "way": way,
                    "baseline": BASELINE,
                    "utterances per s": batch / spread.median,
                    "times the baseline": seconds[BASELINE].median / spread.median,
                    "20 % to 80 %": str(spread),
                }
                for way, spread in seconds.items()
            ]
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


def ways_of(name: str, row: Mapping[str, Any]) -> dict[str, Embed]:
    """Build an encoder, its form for inference, and its graph."""
    import onnxruntime

    encoder = encoder_of(name, row)
    front_end = FrontEnd("speechbrain", RATE, encoder.n_mels)
    description = replace(encoder.description, front_end=front_end)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), description, encoder.state_dict())
        file = export_graph(folder, Path(folder, "model.onnx"))
        session = onnxruntime.InferenceSession(
            file.path, options, providers=["CPUExecutionProvider"]
        )

    def graph(waves: Tensor, samples: Tensor | None = None) -> Tensor:
        counts = (
            torch.full((len(waves),), waves.shape[1]) if samples is None else samples
        )
        given = {"waveforms": waves.numpy(), "samples": counts.numpy()}
        return torch.from_numpy(session.run(["embeddings"], given)[0])

    return {
        BASELINE: WaveformEncoder(encoder).eval(),
        f"PyTorch, {FORM}": WaveformEncoder(inference_form(encoder)).eval(),
        "onnxruntime": graph,
    }


def voices(utterances: int, samples: int) -> Tensor:
    """Make synthetic voices: [utterances, samples]."""
    draws = np.random.default_rng(0)
    waves = [
        speak(draws.uniform(80, 300), draws.uniform(400, 3000), samples, draws)
        for _ in range(utterances)
    ]
    return torch.from_numpy(np.stack(waves).astype(np.float32))


@torch.no_grad()
def check(name: str, ways: Mapping[str, Embed], waves: Tensor) -> float:
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
    for given in ((waves,), (cut, shorter)):
        expected = ways[BASELINE](*given).squeeze(1)
        for way, embed in ways.items():
            ours = embed(*given).reshape(expected.shape)
            off = largest_distance(ours, expected)
            require(off <= TOLERANCE, f"{name}, {way}: an embedding is off by {off}")
            worst = max(worst, off)
    return worst
