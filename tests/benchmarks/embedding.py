"""Embedding the utterances of a trial list, beside SpeechBrain's verification script.

Both have the same encoder with the same weights, on the same device. Each utterance is
enrolled in eight trials, as in VoxCeleb1-O, so that nearly all of them are on both sides of
the list. The speech is that of the folder named by SPEECHBRAIN_REV_SPEECH, a speaker's
utterances of its minivox/ joined; without it, synthetic voices.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from speechbrain_rev.inference import SpeakerEmbedder, WaveformEncoder, embed_into
from speechbrain_rev.scoring import cosine
from tests.corpus import RATE, speak

from .harness import Result, interleaved_seconds, require
from .inference import encoder_of
from .speech import FOLDER
from .verification_script import BATCH, VerificationScript

BASELINE, OURS = "SpeechBrain's script", "embed_into"
TRIALS_EACH = 8
#: Of an embedding's length: sums of other grouping.
TOLERANCE = 1e-5
#: Jobs, and the ways of each: what is measured by the names of steps.
JOBS = {
    "each utterance once": {BASELINE: "side", "one by one": "alone", OURS: "anew"},
    "both sides of the trials": {BASELINE: "both sides", OURS: "anew"},
    "both sides, run again": {BASELINE: "both sides", OURS: "again"},
}


@dataclass(frozen=True)
class Setting:
    """Which encoder embeds how much; ``row`` has other widths and blocks."""

    encoder: str = "resnet34"
    row: Mapping[str, Any] = field(default_factory=dict)
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
            wave = voices(i, round(seconds * RATE))
            name = f"id{i:05d}/s00/00000.wav"
            self.files[name] = folder / "wav" / name
            self.files[name].parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(self.files[name], wave, RATE)
            self.samples += len(wave)
        enrol = [name for name in self.files for _ in range(TRIALS_EACH)]
        test = draws.choice(list(self.files), len(enrol)).tolist()
        self.sides = {"enrol": sorted(set(enrol)), "test": sorted(set(test))}
        model = WaveformEncoder(encoder_of(setting.encoder, setting.row))
        self.embedder = SpeakerEmbedder(model, device=device, fingerprint="benchmark")
        self.script = VerificationScript(model, device, self.sides, self.files)
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
        embeddings = self.script.embed(["enrol"])["enrol"]
        return torch.cat([embeddings[name] for name in self.files]).cpu().numpy()


def _seconds(setting: Setting, draws: np.random.Generator) -> NDArray[Any]:
    """Draw lengths, of which neighbours are as alike as in a list of thousands."""
    ends = setting.shortest_seconds, setting.longest_seconds
    lengths = np.linspace(*ends, -(-setting.utterances // BATCH))
    seconds = np.repeat(lengths, BATCH)[: setting.utterances]
    return draws.permutation(seconds) * draws.uniform(0.99, 1.0, setting.utterances)


def _voices(
    draws: np.random.Generator,
) -> tuple[str, Callable[[int, int], NDArray[Any]]]:
    """Name the speech; give as many samples of a voice as are asked for."""
    folder = os.environ.get(FOLDER)
    if not folder:

        def synthetic(i: int, samples: int) -> NDArray[Any]:
            voice = draws.uniform(80, 300), draws.uniform(400, 3000)
            return speak(*voice, samples, draws)

        return f"synthetic voices, for {FOLDER} is not set", synthetic
    speakers = sorted(Path(folder, "minivox", "wav").iterdir())

    def real(i: int, samples: int) -> NDArray[Any]:
        files = sorted(speakers[i % len(speakers)].rglob("*.flac"))
        joined = np.concatenate([soundfile.read(path)[0] for path in files])
        return np.resize(joined, samples)

    return "real speech (minivox), a speaker's utterances joined", real


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
    off, script_off = (
        float((np.linalg.norm(rows - alone, axis=1) / scale).max())
        for rows in (ours, script)
    )
    require(off <= TOLERANCE, f"embeddings are off by {off} of their length")
    return off, script_off, float((1 - cosine(script, alone)).max())


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Embed each utterance once, then both sides of the list, then all again."""
    setting = setting or Setting()
    with tempfile.TemporaryDirectory() as folder:
        case = Case(setting, device, Path(folder))
        off, script_off, angle = check(case)
        steps: dict[str, Callable[[], Any]] = {
            "side": case.by_script,
            "both sides": lambda: case.script.embed(["enrol", "test"]),
            "alone": case.one_by_one,
            "anew": case.anew,
            "again": case.again,
        }
        seconds = interleaved_seconds(steps, device, repeats=setting.repeats)
    utterances = len(case.files)
    rows = [
        {
            "job": job,
            "way": way,
            "utterances per s": utterances / seconds[step].median,
            "20 % to 80 % s": str(seconds[step]),
            "baseline": BASELINE,
            "times the baseline": seconds[ways[BASELINE]].median / seconds[step].median,
        }
        for job, ways in JOBS.items()
        for way, step in ways.items()
    ]
    return Result(
        "embedding",
        "How fast are the utterances of a trial list embedded?",
        f"{setting.encoder}, {utterances} utterances of "
        f"{setting.shortest_seconds:g} to {setting.longest_seconds:g} s, "
        f"{case.samples / RATE:.0f} s in all, {case.source}; {utterances} of them "
        f"enrolled in {TRIALS_EACH} trials each, {len(case.sides['test'])} on the test "
        f"side; the script of SpeechBrain {version('speechbrain')} with its batches of "
        f"{BATCH}; median of {setting.repeats} interleaved runs",
        rows,
        f"embeddings within {off:.1e} of their length of those of utterances that are "
        f"alone; the script's within {script_off:.1e}, or {angle:.1e} less in cosine",
    )
