"""Files damaged at random, and a process of its own that reads them."""

from __future__ import annotations

import io
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile
import torch

from speechbrain_rev.data import (
    ChunkDataset,
    SpeakerAugment,
    Utterance,
    audio_info,
    dataset,
    read_audio,
    read_blocks,
    read_first_channel,
    read_manifest,
    write_manifest,
)
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


def write_damaged(folder: Path, count: int, seed: int) -> Path:
    """Write files, each in a folder of its own, and the list of what they were."""
    draws, listed = random.Random(seed), []
    voices = np.random.default_rng(seed)
    for i in range(count):
        speaker = f"id{i % SPEAKERS:05d}"
        samples = draws.randint(2000, 12000)
        wave = speak(100 + 30 * (i % SPEAKERS), 900, samples, voices)
        suffix, subtype = draws.choice(
            [(".wav", "PCM_16"), (".wav", "FLOAT"), (".flac", "PCM_16")]
        )
        whole = io.BytesIO()
        soundfile.write(whole, wave, RATE, subtype=subtype, format=suffix[1:])
        content = bytearray(whole.getvalue())
        # One in eight is as it was, so that there is something to read in all cases.
        for _ in range(draws.choice([0, 1, 1, 1, 2, 2, 3, 5])):
            content = draws.choice(KINDS)(content, suffix, draws)
        if draws.random() < 0.1:
            suffix = ".flac" if suffix == ".wav" else ".wav"
        path = folder / speaker / f"{i:04d}" / f"audio{suffix}"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        listed.append(Utterance(f"{speaker}/{i:04d}", str(path), samples, speaker))
    write_manifest(folder / "listed.csv", listed)
    return folder


def _flip_in_header(content: bytearray, suffix: str, draws: random.Random) -> bytearray:
    for _ in range(draws.randint(1, 4)):
        _flip(content, draws.randrange(64), draws)
    return content


def _flip_in_body(content: bytearray, suffix: str, draws: random.Random) -> bytearray:
    for _ in range(draws.randint(1, 20)):
        _flip(content, draws.randrange(1 << 20), draws)
    return content


def _flip(content: bytearray, place: int, draws: random.Random) -> None:
    if content:
        content[place % len(content)] ^= draws.randint(1, 255)


def _truncate(content: bytearray, suffix: str, draws: random.Random) -> bytearray:
    return content[: draws.randrange(len(content) + 1)]


def _zero(content: bytearray, suffix: str, draws: random.Random) -> bytearray:
    start, length = draws.randrange(len(content) + 1), draws.randint(1, 4096)
    length = len(content[start : start + length])
    content[start : start + length] = bytes(length)
    return content


def _lie(content: bytearray, suffix: str, draws: random.Random) -> bytearray:
    place, length = draws.choice(FIELDS[suffix])
    most = 256**length - 1
    number = draws.choice([0, 1, 2, most // 2, most - 1, most, draws.randint(0, most)])
    order = "little" if suffix == ".wav" else "big"
    content[place : place + length] = number.to_bytes(length, order)
    return content


def _cut_out(content: bytearray, suffix: str, draws: random.Random) -> bytearray:
    start = draws.randrange(len(content) + 1)
    return content[:start] + content[start + draws.randint(1, 4096) :]


def _repeat(content: bytearray, suffix: str, draws: random.Random) -> bytearray:
    start = draws.randrange(len(content) + 1)
    return content[:start] + content[: draws.randint(1, 4096)] + content[start:]


KINDS = (_flip_in_header, _flip_in_body, _truncate, _zero, _lie, _cut_out, _repeat)


def read_all(folder: Path) -> dict[str, dict[str, int]]:
    """Read each file with each reader: how often it could be read and was refused.

    What is neither right nor a refusal that names the file is an ``AssertionError``.
    """
    listed = read_manifest(folder / "listed.csv")
    found: dict[str, Counter[str]] = {}
    for utterance in listed:
        path = Path(utterance.wav)
        for name, read in READERS.items():
            outcomes = found.setdefault(name, Counter())
            outcomes[_outcome(name, read, path)] += 1
    found["ChunkDataset"] = _read_chunks(listed)
    found["ChunkDataset, listed after the damage"] = _read_chunks(_listed_anew(listed))
    return {name: dict(outcomes) for name, outcomes in found.items()}


def _outcome(name: str, read: Callable[[Path], None], path: Path) -> str:
    print(name, path, file=sys.stderr, flush=True)
    try:
        read(path)
    except (ValueError, OSError) as error:
        said = str(error)
    else:
        return "read"
    assert str(path) in said, f"does not name the file: {said}"
    return "refused"


def _check(wav: torch.Tensor, path: Path, *, most: int | None = None) -> None:
    assert wav.dtype == torch.float32
    assert wav.dim() == 1
    possible = SAMPLES_PER_BYTE * path.stat().st_size
    assert len(wav) <= min(possible, possible if most is None else most)


def _info(path: Path) -> None:
    info = audio_info(path)
    assert 0 <= info.samples <= SAMPLES_PER_BYTE * path.stat().st_size
    assert info.sample_rate > 0
    assert info.channels > 0


def _whole(path: Path) -> None:
    _check(read_audio(path, sample_rate=RATE), path)


def _mixed(path: Path) -> None:
    wav = torch.cat(list(read_blocks(path)), dim=1).mean(dim=0)
    _check(wav, path)


def _part(path: Path) -> None:
    wav = read_audio(path, sample_rate=RATE, start=1000, samples=CHUNK)
    _check(wav, path, most=CHUNK)


def _first_channel(path: Path) -> None:
    _check(read_first_channel(path, sample_rate=RATE), path)


def _waveform(path: Path) -> None:
    wav, channels = Recording.of(path, None, str(path)).waveform(RATE, "mean")
    assert wav.dtype == torch.float32
    assert channels > 0
    assert RATE / 4 - 1 <= len(wav) <= 600 * RATE + 1
    assert wav.isfinite().all()


def _augmented(path: Path, kind: str) -> None:
    augment = SpeakerAugment(
        out_n_neurons=2,
        chunk_samples=CHUNK,
        speeds=[1.0],
        augment_prob=1.0,
        **{kind: path.parent},
    )
    wavs, _ = augment(torch.full((1, CHUNK), 0.1), torch.ones(1))
    assert wavs.shape == (1, CHUNK)
    assert wavs.dtype == torch.float32


READERS: dict[str, Callable[[Path], None]] = {
    "audio_info": _info,
    "read_audio": _whole,
    "read_blocks, channels mixed": _mixed,
    "read_audio, a part": _part,
    "read_first_channel": _first_channel,
    "Recording.waveform": _waveform,
    "noise": lambda path: _augmented(path, "noise_folder"),
    "rooms": lambda path: _augmented(path, "rir_folder"),
}


def _listed_anew(listed: list[Utterance]) -> list[Utterance]:
    """List the files that have a header, with the lengths that these now say."""
    found = []
    for utterance in listed:
        try:
            samples = audio_info(utterance.wav).samples
        except ValueError:
            continue
        found.append(replace(utterance, samples=samples))
    return found


def _read_chunks(listed: list[Utterance]) -> Counter[str]:
    """Read a chunk for each; its label must be of whoever is in the file that was read."""
    numbers = {f"id{i:05d}": i for i in range(SPEAKERS)}
    chunks = ChunkDataset(listed, numbers, samples=CHUNK)
    last: list[tuple[str, torch.Tensor]] = []

    def noting(path: str, **options: int) -> torch.Tensor:
        wav = read_audio(path, **options)
        last.append((path, wav))
        return wav

    found: Counter[str] = Counter()
    with_note, dataset.read_audio = dataset.read_audio, noting
    try:
        for i in range(len(listed)):
            print("ChunkDataset", i, file=sys.stderr, flush=True)
            last.clear()
            try:
                chunk = chunks[0, i]
            except ValueError as error:
                said = str(error)
                assert any(utterance.wav in said for utterance in listed), said
                found["none of ten could be read"] += 1
                continue
            path, wav = last[-1]
            assert chunk.wav.shape == (CHUNK,)
            assert chunk.wav.dtype == torch.float32
            same = chunk.wav[: len(wav)].nan_to_num() == wav.nan_to_num()
            assert same.all()
            assert chunk.speaker == numbers[Path(path).parts[-3]]
            tried = [file for file, _ in chunk.unread]
            assert path not in tried
            assert all(file in reason for file, reason in chunk.unread)
            assert (tried[0] if tried else path) == chunks.path_of(i)
            found["another in its place" if tried else "read"] += 1
    finally:
        dataset.read_audio = with_note
    return found


def _bound() -> None:
    """Let a header that lies fail here, and neither take the machine nor its time."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


if __name__ == "__main__":
    torch.set_num_threads(1)
    _bound()
    print(json.dumps(read_all(Path(sys.argv[1]))))
