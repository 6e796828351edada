"""From disk to collated chunks, on one core, beside SpeechBrain's stock path.

The stock path is the one of SpeechBrain's VoxCeleb recipe: rows of a CSV file, a random
chunk of each read with its audio reader, its label encoder, its batches. Features and
augmentation are no part of either, and what both take has a row of its own.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import speechbrain as sb
import torch
from speechbrain.dataio import audio_io
from speechbrain.dataio.dataloader import make_dataloader
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.encoder import CategoricalEncoder
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization
from torchaudio.transforms import Resample

from speechbrain_rev.data import (
    ChunkBatch,
    ChunkDataset,
    EpochBatchSampler,
    SpeakerAugment,
    Utterance,
    audio_files,
    audio_info,
    collate_chunks,
    read_audio,
    read_manifest,
    write_manifest,
)
from speechbrain_rev.data.packing import Packing
from tests.corpus import RATE, write_corpus, write_noise, write_rooms

from .harness import NotEqual, Result, interleaved_seconds

#: 200 frames at speed 1.1.
SAMPLES = 35200


@dataclass(frozen=True)
class Setting:
    """How much is read, and how often."""

    speakers: int = 20
    utterances: int = 10
    seconds: float = 8.0
    batch: int = 64
    repeats: int = 5
    #: Times that an epoch goes through the corpus.
    passes: int = 4


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Time all ways of reading in turn, then the stages of the whole input path."""
    setting = setting or Setting()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _run(device, setting, Path(folder))
    finally:
        torch.set_num_threads(threads)


def _run(device: torch.device, setting: Setting, folder: Path) -> Result:
    corpora = corpora_of(setting, folder)
    ways: dict[str, Callable[[], Iterator[Any]]] = {}
    for kind in ("WAV", "FLAC"):
        ways[f"SpeechBrain, {kind}"] = stock(corpora[kind], folder / kind, setting)
    for kind, root in corpora.items():
        ways[f"speechbrain_rev, {kind}"] = ours(root, folder / f"{kind}.csv", setting)
    _check(ways, corpora)
    read = setting.passes * setting.speakers * 2 * setting.utterances
    read -= read % setting.batch
    seconds = interleaved_seconds(
        {name: partial(_exhaust, way) for name, way in ways.items()},
        torch.device("cpu"),
        repeats=setting.repeats,
    )
    rows: list[dict[str, Any]] = []
    for name, found in seconds.items():
        kind = "FLAC" if "FLAC" in name else "WAV"
        baseline = f"SpeechBrain, {kind}"
        rows.append(
            {
                "input path": name,
                "utterances per second": read / found["median"],
                "ms per utterance": 1000 * found["median"] / read,
                "baseline": baseline,
                "times the baseline": seconds[baseline]["median"] / found["median"],
            }
        )
    rows += stages(device, setting, folder, corpora["packed"])
    return Result(
        "reading",
        "How fast is speech read, on one core?",
        f"Random chunks of {SAMPLES / RATE:.1f} s of {setting.seconds:.0f} s long 16-bit "
        f"files in the page cache, batches of {setting.batch}, no worker processes, one "
        "thread; rows below the input paths are the stages of a whole path, each alone, "
        f"augmentation and features on {device}",
        rows,
        "packed chunks have the bits of those of WAV and FLAC; SpeechBrain's are pieces "
        "of their files",
    )


def corpora_of(setting: Setting, folder: Path) -> dict[str, Path]:
    """Write the same speech as WAV, as FLAC and packed."""
    wav, flac = folder / "WAV", folder / "FLAC"
    write_corpus(
        wav,
        speakers=setting.speakers,
        utterances=setting.utterances,
        seconds=setting.seconds,
    )
    for path in audio_files(wav):
        other = flac / path.relative_to(wav).with_suffix(".flac")
        other.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(other, soundfile.read(path, dtype="int16")[0], RATE)
    return {"WAV": wav, "FLAC": flac, "packed": packed(wav, folder / "speech.packed")}


def packed(source: Path, made: Path) -> Path:
    """Pack a folder."""
    with Packing(made, source=str(source), sample_rate=RATE) as packing:
        for path in audio_files(source):
            wav = read_audio(path, sample_rate=RATE)
            packing.add(path.relative_to(source).as_posix(), wav)
        packing.finish()
    return made


def ours(
    root: Path, manifest: Path, setting: Setting
) -> Callable[[], Iterator[ChunkBatch]]:
    """Read batches as the recipe does, from files or from the packed form."""
    paths = sorted(audio_files(root))
    write_manifest(
        manifest,
        [
            Utterance(p.stem, str(p), audio_info(p).samples, p.parts[-3])
            for p in paths * setting.passes
        ],
    )
    rows = read_manifest(manifest)
    numbers = {name: n for n, name in enumerate(rows.speaker_names)}
    dataset = ChunkDataset(rows, numbers, samples=SAMPLES)
    sampler = EpochBatchSampler(len(rows), setting.batch)
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=sampler, collate_fn=collate_chunks
    )
    epochs = itertools.count(1)

    def epoch() -> Iterator[ChunkBatch]:
        sampler.set_epoch(next(epochs))
        return iter(loader)

    return epoch


def stock(root: Path, csv: Path, setting: Setting) -> Callable[[], Iterator[Any]]:
    """Read batches as SpeechBrain's VoxCeleb recipe does."""
    lines = ["ID,duration,wav,spk_id"]
    for number in range(setting.passes):
        for path in audio_files(root):
            name, seconds = f"{number}/{path}", audio_info(path).samples / RATE
            lines.append(f"{name},{seconds},{path},{path.parts[-3]}")
    csv.with_suffix(".csv").write_text("\n".join(lines) + "\n")
    data = DynamicItemDataset.from_csv(str(csv.with_suffix(".csv")))
    encoder = CategoricalEncoder()

    @sb.utils.data_pipeline.takes("wav", "duration")
    @sb.utils.data_pipeline.provides("sig")
    def audio(wav: str, duration: str) -> torch.Tensor:
        start = random.randint(0, int(float(duration) * RATE) - SAMPLES)
        sig, _ = audio_io.load(wav, num_frames=SAMPLES, frame_offset=start)
        return sig.transpose(0, 1).squeeze(1)

    @sb.utils.data_pipeline.takes("spk_id")
    @sb.utils.data_pipeline.provides("spk_id", "spk_id_encoded")
    def label(spk_id: str) -> Iterator[Any]:
        yield spk_id
        yield encoder.encode_sequence_torch([spk_id])

    data.add_dynamic_item(audio)
    data.add_dynamic_item(label)
    encoder.update_from_didataset(data, "spk_id")
    data.set_output_keys(["id", "sig", "spk_id_encoded"])
    loader = make_dataloader(
        data, batch_size=setting.batch, shuffle=True, drop_last=True
    )
    return lambda: iter(loader)


def stages(
    device: torch.device, setting: Setting, folder: Path, root: Path
) -> list[dict[str, Any]]:
    """Time the stages of the whole path: reading, augmentation, features."""
    batch = next(ours(root, folder / "stages.csv", setting)())
    wavs, lens = batch.wavs.to(device), batch.lens.to(device)
    augment = partial(
        SpeakerAugment, out_n_neurons=3 * setting.speakers, augment_prob=0.6
    )
    speeds = augment()
    noise = packed(write_noise(folder / "noise", seconds=5), folder / "noise.packed")
    rirs = packed(write_rooms(folder / "rirs"), folder / "rirs.packed")
    both = augment(speeds=[1.0], noise_folder=noise, rir_folder=rirs)
    whole = augment(noise_folder=noise, rir_folder=rirs)
    fbank, normalize = (
        Fbank(n_mels=80).to(device),
        InputNormalization(norm_type="sentence", std_norm=False).to(device),
    )
    read = ours(root, folder / "whole.csv", setting)

    def path() -> None:
        for part in read():
            chunk, ones = whole(part.wavs.to(device), part.lens.to(device))
            normalize(fbank(chunk), ones)

    # The filters are made once, as a worker would.
    slow, fast = Resample(9, 10).to(device), Resample(11, 10).to(device)

    def alone() -> None:
        for row, wav in enumerate(wavs):
            if row % 3:
                (slow, fast)[row % 3 - 1](wav)

    size = len(wavs)
    steps = {
        "one of three speeds, in a batch": (lambda: speeds(wavs, lens), size),
        "one of three speeds, each alone": (alone, size),
        "noise or reverberation, from packed folders": (lambda: both(wavs, lens), size),
        "80 filterbanks, mean subtracted": (
            lambda: normalize(fbank(wavs[:, :31840]), lens),
            size,
        ),
        "the whole path, from packed folders": (
            path,
            size * (setting.passes * setting.speakers * 2 * setting.utterances // size),
        ),
    }
    seconds = interleaved_seconds(
        {name: step for name, (step, _) in steps.items()},
        device,
        repeats=setting.repeats,
    )
    rows = []
    last = "the whole path, from packed folders"
    for name, (_, utterances) in steps.items():
        each = seconds[name]["median"] / utterances
        rows.append(
            {
                "input path": name,
                "utterances per second": 1 / each,
                "ms per utterance": 1000 * each,
                "baseline": last,
                "times the baseline": seconds[last]["median"] / steps[last][1] / each,
            }
        )
    return rows


def _exhaust(way: Callable[[], Iterator[Any]]) -> None:
    for _ in way():
        pass


def _check(
    ways: dict[str, Callable[[], Iterator[Any]]], corpora: dict[str, Path]
) -> None:
    """See that what is compared is the same speech."""
    batches = [list(ways[f"speechbrain_rev, {kind}"]()) for kind in corpora]
    for others in zip(*batches, strict=True):
        for other in others[1:]:
            for part in ("wavs", "speakers"):
                if not torch.equal(getattr(others[0], part), getattr(other, part)):
                    raise NotEqual(f"packed {part} are not those of the files")
    for kind in ("WAV", "FLAC"):
        batch = next(ways[f"SpeechBrain, {kind}"]())
        for name, wav in zip(batch.id, batch.sig.data, strict=True):
            file = read_audio(name.partition("/")[2], sample_rate=RATE).numpy()
            pieces = np.lib.stride_tricks.sliding_window_view(file, SAMPLES)
            found = np.flatnonzero(pieces[:, 0] == wav[0].item())
            if not any(np.array_equal(pieces[place], wav.numpy()) for place in found):
                raise NotEqual(f"SpeechBrain's chunk is no piece of {name}")
