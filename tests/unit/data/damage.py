"""Files damaged at random, and a process of its own that reads them."""

from __future__ import annotations

import io
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import torch

from speechbrain_rev.audio import audio_info, read_audio, read_blocks
from speechbrain_rev.data import SpeakerAugment, audio_files
from speechbrain_rev.data.checking import read_checked
from speechbrain_rev.data.manifest import LeftOut
from speechbrain_rev.inference.audio import Recording
from tests.corpus import RATE, speak

SPEAKERS = 4
CHUNK = 3000
#: Beyond what is mapped when reading begins.
ADDRESS_BYTES = 2 * 2**30
#: Of the processor; a hundredth of it is what reading takes.
SECONDS = 1000
#: Of a FLAC frame of silence.
SAMPLES_PER_BYTE = 8192
#: Places of numbers in the first bytes of a file, and how long they are: RIFF size, format,
#: channels, rate, bytes per second, block, bits, data size; block sizes, frame sizes, the
#: bits of rate, channels, depth and length.
FIELDS = {
    ".wav": ((4, 4), (20, 2), (22, 2), (24, 4), (28, 4), (32, 2), (34, 2), (40, 4)),
    ".flac": ((5, 3), (8, 2), (10, 2), (12, 3), (15, 3), (18, 4), (20, 1), (21, 5)),
}
KINDS = ("header", "body", "truncate", "zero", "lie", "cut out", "repeat")


def write_damaged(folder: Path, count: int, seed: int) -> Path:
    """Write files, each in a folder of its own."""
    draws = random.Random(seed)
    voices = np.random.default_rng(seed)
    for i in range(count):
        samples = draws.randint(2000, 12000)
        wave = speak(100 + 30 * (i % SPEAKERS), 900, samples, voices)
        suffix, subtype = draws.choice(
            [(".wav", "PCM_16"), (".wav", "FLOAT"), (".flac", "PCM_16")]
        )
        whole = io.BytesIO()
        soundfile.write(whole, wave, RATE, subtype=subtype, format=suffix[1:])
        content = whole.getvalue()
        # One in eight is as it was, so that there is something to read in all cases.
        for _ in range(draws.choice([0, 1, 1, 1, 2, 2, 3, 5])):
            content = damaged(content, draws.choice(KINDS), suffix, draws)
        if draws.random() < 0.1:
            suffix = ".flac" if suffix == ".wav" else ".wav"
        path = folder / f"{i:04d}" / f"audio{suffix}"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    return folder


def damaged(content: bytes, kind: str, suffix: str, draws: random.Random) -> bytes:
    """Damage the content of a file in one way."""
    start, length = draws.randrange(len(content) + 1), draws.randint(1, 4096)
    if kind == "truncate":
        return content[:start]
    if kind == "cut out":
        return content[:start] + content[start + length :]
    if kind == "repeat":
        return content[:start] + content[:length] + content[start:]
    changed = bytearray(content)
    if kind == "zero":
        changed[start : start + length] = bytes(len(content[start : start + length]))
    elif kind == "lie":
        place, length = draws.choice(FIELDS[suffix])
        most = 256**length - 1
        numbers = [0, 1, 2, most // 2, most - 1, most, draws.randint(0, most)]
        order = "little" if suffix == ".wav" else "big"
        number = draws.choice(numbers).to_bytes(length, order)  # type: ignore[arg-type]
        changed[place : place + length] = number
    elif content:
        most = 64 if kind == "header" else 1 << 20
        for _ in range(draws.randint(1, 4 if kind == "header" else 20)):
            changed[draws.randrange(most) % len(content)] ^= draws.randint(1, 255)
    return bytes(changed)


def _checked(path: Path) -> torch.Tensor:
    checked = read_checked(path, sample_rate=RATE, whole=True)
    if isinstance(checked, LeftOut):
        raise ValueError(f"{checked.path}: {checked.detail}")
    assert checked.wav is not None
    assert checked.samples == len(checked.wav)
    return checked.wav


def _augmented(path: Path, kind: str) -> torch.Tensor:
    augment = SpeakerAugment(
        out_n_neurons=2,
        chunk_samples=CHUNK,
        speeds=[1.0],
        augment_prob=1.0,
        **{kind: path.parent},
    )
    wavs, _ = augment(torch.full((1, CHUNK), 0.1), torch.ones(1))
    return wavs[0]


READERS: dict[str, Callable[[Path], torch.Tensor]] = {
    "audio_info": lambda path: torch.empty(audio_info(path).samples),
    "read_audio": lambda path: read_audio(path, sample_rate=RATE),
    "read_audio, a part": lambda path: read_audio(
        path, sample_rate=RATE, start=1000, samples=CHUNK
    ),
    "read_blocks": lambda path: torch.cat(list(read_blocks(path)), dim=1).mean(dim=0),
    "read_checked": _checked,
    "Recording": lambda path: Recording.of(path, None, str(path)).waveform(RATE, "mix")[
        0
    ],
    "noise": lambda path: _augmented(path, "noise_folder"),
    "reverberation": lambda path: _augmented(path, "rir_folder"),
}


def read_all(folder: Path) -> dict[str, dict[str, int]]:
    """Read each file with each reader: how often it could be read and was refused.

    What is neither right nor a refusal that names the file is an ``AssertionError``.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in READERS}
    for path in audio_files(folder):
        for name, read in READERS.items():
            print(name, path, file=sys.stderr, flush=True)
            counts[name][_outcome(read, path)] += 1
    return {name: dict(outcomes) for name, outcomes in counts.items()}


def _outcome(read: Callable[[Path], torch.Tensor], path: Path) -> str:
    refusal = ""
    try:
        wav = read(path)
    except (ValueError, OSError) as error:
        refusal = str(error)
    if refusal:
        assert str(path) in refusal, f"does not name the file: {refusal}"
        return "refused"
    assert wav.dtype == torch.float32
    assert wav.dim() == 1
    assert len(wav) <= max(CHUNK, SAMPLES_PER_BYTE * path.stat().st_size)
    return "read"


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A header that lies fails here, and takes neither the machine nor its time.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    print(json.dumps(read_all(Path(sys.argv[1]))))
