"""Embedding the utterances of a trial list, beside SpeechBrain's verification script.

Both have the same encoder with the same weights, on the same device. Each utterance is
enrolled in eight trials, as in VoxCeleb1-O, so that nearly all of them are on both sides of
the list. The speech is that of the folder named by SPEECHBRAIN_REV_SPEECH, a speaker's
utterances of its minivox/ joined; without it, synthetic voices.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from speechbrain_rev.data import read_audio
from speechbrain_rev.inference import SpeakerEmbedder, WaveformEncoder, embed_into
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.scoring import cosine
from tests.corpus import RATE, speak

from .harness import NotEqual, Result, interleaved_seconds
from .verification_script import BATCH, VerificationScript

BASELINE = "SpeechBrain's script"
TRIALS_EACH = 8
#: Of an embedding's length: sums of other grouping.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Setting:
    """Which encoder embeds how much; widths and blocks of None are the encoder's."""

    encoder: str = "resnet34"
    widths: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    utterances: int = 40
    shortest_seconds: float = 2.0
    longest_seconds: float = 12.0
    repeats: int = 3


class Case:
    """Utterances as files, a list of trials between them, and what embeds them."""

    def __init__(self, setting: Setting, device: torch.device, folder: Path) -> None:
        self.setting, self.device, self.folder = setting, device, folder
        draws = np.random.default_rng(0)
        self.source, voices = _voices(draws)
        self.files: dict[str, Path] = {}
        self.samples = 0
        for i, seconds in enumerate(_seconds(setting, draws)):
            speaker, wave = voices(i, round(seconds * RATE))
            name = f"{speaker}/s00/{i:05d}.wav"
            self.files[name] = folder / "wav" / name
            self.files[name].parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(self.files[name], wave, RATE)
            self.samples += len(wave)
        enrol = [name for name in self.files for _ in range(TRIALS_EACH)]
        test = draws.choice(list(self.files), len(enrol)).tolist()
        self.sides = {"enrol": sorted(set(enrol)), "test": sorted(set(test))}
        model = WaveformEncoder(_encoder(setting, list(self.files.values())))
        self.embedder = SpeakerEmbedder(model, device=device, fingerprint="benchmark")
        self.script = VerificationScript(
            model, device, sides=self.sides, files=self.files, folder=folder
        )
        self._archives = 0

    def anew(self) -> NDArray[np.float32]:
        """Embed each utterance into a new archive."""
        self._archives += 1
        return self.again()

    def again(self) -> NDArray[np.float32]:
        """Embed each utterance into the archive that was written last."""
        path = self.folder / f"{self._archives}.npz"
        return embed_into(path, self.embedder, self.files).embeddings

    def one_by_one(self) -> NDArray[np.float32]:
        """Embed each utterance by itself, without padding."""
        paths = self.files.values()
        return np.concatenate([self.embedder.embed([path]) for path in paths])

    def by_script(self) -> NDArray[np.float32]:
        """Embed the enrolment side, which has them all, as the script does."""
        found = self.script.embed(["enrol"])["enrol"]
        return torch.cat([found[name] for name in self.files]).cpu().numpy()


def _seconds(setting: Setting, draws: np.random.Generator) -> NDArray[Any]:
    """Draw lengths, of which neighbours are as alike as in a list of thousands."""
    lengths = np.linspace(
        setting.shortest_seconds,
        setting.longest_seconds,
        -(-setting.utterances // BATCH),
    )
    seconds = np.repeat(lengths, BATCH)[: setting.utterances]
    return draws.permutation(seconds) * draws.uniform(0.99, 1.0, setting.utterances)


def _voices(
    draws: np.random.Generator,
) -> tuple[str, Callable[[int, int], tuple[str, NDArray[Any]]]]:
    """Name the speech; give a speaker's name and as many samples as are asked for."""
    folder = os.environ.get("SPEECHBRAIN_REV_SPEECH")
    if not folder:

        def synthetic(i: int, samples: int) -> tuple[str, NDArray[Any]]:
            voice = draws.uniform(80, 300), draws.uniform(400, 3000)
            return f"id{i:05d}", speak(*voice, samples, draws)

        return "synthetic voices, for SPEECHBRAIN_REV_SPEECH is not set", synthetic
    speakers = sorted(Path(folder, "minivox", "wav").iterdir())

    def real(i: int, samples: int) -> tuple[str, NDArray[Any]]:
        speaker = speakers[i % len(speakers)]
        parts = [soundfile.read(path)[0] for path in sorted(speaker.rglob("*.flac"))]
        return speaker.name, np.resize(np.concatenate(parts), samples)

    return "real speech (minivox), a speaker's utterances joined", real


def _encoder(setting: Setting, paths: list[Path]) -> nn.Module:
    """Build an encoder whose normalisation has the statistics of some of the speech."""
    torch.manual_seed(0)
    shape = {"widths": setting.widths, "blocks": setting.blocks}
    given = {name: value for name, value in shape.items() if value}
    encoder = build_encoder(setting.encoder, **given)
    waves = [read_audio(path, sample_rate=RATE) for path in paths[:8]]
    shortest = min(len(wave) for wave in waves)
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.momentum = 1.0
    with torch.no_grad():
        WaveformEncoder(encoder)(torch.stack([wave[:shortest] for wave in waves]))
    return encoder.eval()


def check(case: Case) -> tuple[float, float, float]:
    """Measure distances from embeddings of utterances that are alone.

    Returns
    -------
    ours : float
        Largest distance over the length of the embedding.
    script_s : float
        The same of the script's embeddings.
    angle : float
        One less the smallest cosine of the script's.

    Raises
    ------
    NotEqual
        If ours are not those of utterances that are alone.
    """
    # As exact on a GPU as on a CPU.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        alone, ours, script = case.one_by_one(), case.anew(), case.by_script()
    scale = np.linalg.norm(alone, axis=1)
    found, other = (
        float((np.linalg.norm(rows - alone, axis=1) / scale).max())
        for rows in (ours, script)
    )
    if not found <= TOLERANCE:
        raise NotEqual(f"embeddings are off by {found} of their length")
    return found, other, float((1 - cosine(script, alone)).max())


@dataclass
class Parts:
    """Where the time of one way goes, and how much of what it embeds is padding."""

    seconds: float = 0.0
    features: float = 0.0
    encoder: float = 0.0
    samples: int = 0
    calls: int = 0


@contextmanager
def watched(model: WaveformEncoder, device: torch.device) -> Iterator[Parts]:
    """Measure what a model does in a block of code."""
    parts, begun = Parts(), []

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def begin(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        begun.append(now())
        if module is model.front_end.compute_features:
            parts.samples += args[0].numel()
            parts.calls += 1

    def end(module: nn.Module, *_: Any) -> None:
        name = "encoder" if module is model.encoder else "features"
        spent = now() - begun.pop()
        setattr(parts, name, getattr(parts, name) + spent)

    modules = (
        model.front_end.compute_features,
        model.front_end.mean_var_norm,
        model.encoder,
    )
    hooks: list[Any] = []
    for module in modules:
        hooks.append(module.register_forward_pre_hook(begin))
        hooks.append(module.register_forward_hook(end))
    start = now()
    try:
        yield parts
        parts.seconds = now() - start
    finally:
        for hook in hooks:
            hook.remove()


def _shares(case: Case, ways: Iterable[Callable[[], Any]]) -> list[dict[str, Any]]:
    """Run each way once more to see where its time goes."""
    found = []
    for way in ways:
        with watched(case.script.model, case.device) as parts:
            way()
        rest = parts.seconds - parts.features - parts.encoder
        found.append(
            {
                "batches": parts.calls,
                "padding, %": 100 * (1 - case.samples / parts.samples),
                "encoder, %": 100 * parts.encoder / parts.seconds,
                "features, %": 100 * parts.features / parts.seconds,
                "reading and rest, %": 100 * rest / parts.seconds,
            }
        )
    return found


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Embed each utterance once, then both sides of the list, then all again."""
    setting = setting or Setting()
    with tempfile.TemporaryDirectory() as folder:
        return _measure(Case(setting, device, Path(folder)))


def _measure(case: Case) -> Result:
    setting = case.setting
    off, script_off, angle = check(case)
    steps: dict[str, Callable[[], Any]] = {
        "side": case.by_script,
        "both sides": lambda: case.script.embed(["enrol", "test"]),
        "alone": case.one_by_one,
        "anew": case.anew,
        "again": case.again,
    }
    seconds = interleaved_seconds(steps, case.device, repeats=setting.repeats)
    shares = dict(
        zip(
            ("side", "alone", "anew"),
            _shares(case, [case.by_script, case.one_by_one, case.anew]),
            strict=True,
        )
    )
    nothing = dict.fromkeys(shares["anew"], "")
    ours = "embed_into"
    jobs = [
        ("each utterance once", BASELINE, "side", "side"),
        ("each utterance once", "one by one", "alone", "side"),
        ("each utterance once", ours, "anew", "side"),
        ("both sides of the trials", BASELINE, "both sides", "both sides"),
        ("both sides of the trials", ours, "anew", "both sides"),
        ("both sides, run again", BASELINE, "both sides", "both sides"),
        ("both sides, run again", ours, "again", "both sides"),
    ]
    rows = []
    for job, way, step, baseline in jobs:
        rows.append(
            {
                "job": job,
                "way": way,
                "utterances per s": len(case.files) / seconds[step]["median"],
                "20 % to 80 % s": "{p20:.3g} to {p80:.3g}".format(**seconds[step]),
                "baseline": BASELINE,
                "times the baseline": seconds[baseline]["median"]
                / seconds[step]["median"],
                **(shares.get(step, nothing) if job == jobs[0][0] else nothing),
            }
        )
    test = len(case.sides["test"])
    return Result(
        "embedding",
        "How fast are the utterances of a trial list embedded?",
        f"{setting.encoder}, {len(case.files)} utterances of "
        f"{setting.shortest_seconds:g} to {setting.longest_seconds:g} s, "
        f"{case.samples / RATE:.0f} s in all, {case.source}; {len(case.files)} of them "
        f"enrolled in {TRIALS_EACH} trials each, {test} on the test side; the script of "
        f"SpeechBrain {version('speechbrain')} with its batches of {BATCH}; median of "
        f"{setting.repeats} interleaved runs",
        rows,
        f"embeddings within {off:.1e} of their length of those of utterances that are "
        f"alone; the script's within {script_off:.1e}, or {angle:.1e} less in cosine",
    )
