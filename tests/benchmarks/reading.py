"""From disk to collated chunks, on one core, beside SpeechBrain's stock path and others.

The stock path is the one of SpeechBrain's VoxCeleb recipe: rows of a CSV file, a random
chunk of each read with its audio reader, its label encoder, its batches. Features and
augmentation are no part of either, and what both take has a row of its own. WebDataset and
lhotse's Shar have figures where they are installed: both read whole utterances in the order
of their tars, and a random chunk of each is kept.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import random
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

from speechbrain_rev.audio import audio_info, read_audio
from speechbrain_rev.data import (
    ChunkDataset,
    EpochBatchSampler,
    SpeakerAugment,
    Utterance,
    audio_files,
    collate_chunks,
    read_manifest,
    write_manifest,
)
from speechbrain_rev.data.packing import Packing
from tests.corpus import RATE, write_corpus, write_noise, write_rirs

from .harness import CPU, Result, interleaved_seconds, require

#: 200 frames at speed 1.1.
SAMPLES = 35200
WHOLE = "the whole path, from packed folders"

Epoch = Callable[[], Iterator[Any]]


class Named(NamedTuple):
    """Chunks of a library beside ours, and which files they are of."""

    files: list[str]
    wavs: torch.Tensor


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


def ours(manifest: Path, batch: int, samples: int, **options: Any) -> Any:
    """Give a loader as the recipe has it."""
    rows = read_manifest(manifest)
    numbers = {name: n for n, name in enumerate(rows.speaker_names)}
    dataset = ChunkDataset(rows, numbers, samples=samples)
    sampler = EpochBatchSampler(len(rows), batch)
    sampler.set_epoch(1)
    return torch.utils.data.DataLoader(
        dataset, batch_sampler=sampler, collate_fn=collate_chunks, **options
    )


def stock(
    manifest: Path,
    batch: int,
    read: Callable[[str, str], torch.Tensor],
    **options: Any,
) -> Any:
    """Give a loader as SpeechBrain's VoxCeleb recipe has it."""
    data = DynamicItemDataset.from_csv(str(manifest))
    encoder = CategoricalEncoder()

    @sb.utils.data_pipeline.takes("spk_id")
    @sb.utils.data_pipeline.provides("spk_id", "spk_id_encoded")
    def label(spk_id: str) -> Iterator[Any]:
        yield spk_id
        yield encoder.encode_sequence_torch([spk_id])

    data.add_dynamic_item(read, takes=["wav", "samples"], provides="sig")
    data.add_dynamic_item(label)
    encoder.update_from_didataset(data, "spk_id")
    encoder.ignore_len()
    data.set_output_keys(["id", "sig", "spk_id_encoded"])
    return make_dataloader(
        data, batch_size=batch, shuffle=True, drop_last=True, **options
    )


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Time all ways of reading in turn, then the stages of the whole input path."""
    setting = setting or Setting()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = _rows(device, setting, Path(folder))
    finally:
        torch.set_num_threads(threads)
    return Result(
        "reading",
        "How fast is speech read, on one core?",
        f"Random segments of {SAMPLES / RATE:.1f} s of {setting.seconds:.0f} s long 16-bit "
        f"files in the page cache, batches of {setting.batch}, no worker processes, one "
        "thread; rows below the input paths are the stages of a whole path, each alone, "
        f"augmentation and features on {device}",
        rows,
        "packed segments and those of tars have the bits of those of WAV and FLAC; those of "
        "others are parts of their files",
    )


def _rows(device: torch.device, setting: Setting, folder: Path) -> list[dict[str, Any]]:
    manifests = manifests_of(setting, folder)
    ways: dict[str, Epoch] = {}
    for kind in ("WAV", "FLAC"):
        loader = stock(manifests[kind], setting.batch, _random_chunk)
        ways[f"SpeechBrain, {kind}"] = partial(iter, loader)
    for kind, manifest in manifests.items():
        ways[f"speechbrain_rev, {kind}"] = epochs_of(manifest, setting)
    peers = {
        name: (way, importlib.util.find_spec(module) is not None)
        for name, (module, way) in PEERS.items()
    }
    for name, (way, there) in peers.items():
        if there:
            ways[name] = way(folder, setting)
    _check(ways, manifests)
    read = setting.passes * setting.speakers * 2 * setting.utterances
    read -= read % setting.batch
    seconds = interleaved_seconds(
        # All is read, and nothing kept.
        {name: lambda way=way: deque(way(), maxlen=0) for name, way in ways.items()},
        CPU,
        repeats=setting.repeats,
    )
    each = {name: spread.median / read for name, spread in seconds.items()}
    beside = {n: f"SpeechBrain, {'FLAC' if 'FLAC' in n else 'WAV'}" for n in ways}
    each |= stages(device, setting, folder, manifests["packed"])
    missing = [
        {
            "input path": f"{name}: not installed",
            "utterances per second": "",
            "ms per utterance": "",
            "baseline": "SpeechBrain, WAV",
            "times the baseline": "",
        }
        for name, (_, there) in peers.items()
        if not there
    ]
    return [
        {
            "input path": name,
            "utterances per second": 1 / taken,
            "ms per utterance": 1000 * taken,
            "baseline": beside.get(name, WHOLE),
            "times the baseline": each[beside.get(name, WHOLE)] / taken,
        }
        for name, taken in each.items()
    ] + missing


def webdataset(folder: Path, setting: Setting) -> Epoch:
    """Read the tar of `manifests_of` as WebDataset does."""
    import webdataset as wds

    def chunk(sample: dict[str, Any]) -> tuple[str, torch.Tensor]:
        return f"{sample['__key__']}.wav", _chunk_of(io.BytesIO(sample["wav"]))

    tars = [str(folder / "WAV.tar")] * setting.passes
    data = wds.WebDataset(tars, shardshuffle=False).shuffle(4 * setting.batch)
    return _batches(lambda: map(chunk, data), folder / "WAV", setting.batch)


def shar(folder: Path, setting: Setting) -> Epoch:
    """Write lhotse's Shar of the same files, and read it."""
    from lhotse import CutSet, Recording

    files = sorted(audio_files(folder / "WAV"))
    names = [path.relative_to(folder / "WAV").as_posix() for path in files]
    whole = CutSet.from_cuts(
        Recording.from_file(path, recording_id=name).to_cut()
        for path, name in zip(files, names, strict=True)
    )
    (folder / "shar").mkdir()
    whole.to_shar(folder / "shar", fields={"recording": "wav"}, shard_size=len(files))
    cuts = CutSet.from_shar(in_dir=folder / "shar").repeat(setting.passes)

    def chunk(cut: Any) -> tuple[str, torch.Tensor]:
        start = random.randint(0, cut.num_samples - SAMPLES)
        part = cut.truncate(offset=start / RATE, duration=SAMPLES / RATE)
        return cut.recording_id, torch.from_numpy(part.load_audio()[0])

    return _batches(lambda: map(chunk, cuts), folder / "WAV", setting.batch)


def _batches(
    chunks: Callable[[], Iterator[tuple[str, torch.Tensor]]], root: Path, batch: int
) -> Epoch:
    """Put chunks into batches, without what is left at the end."""

    def epoch() -> Iterator[Named]:
        left = chunks()
        while len(part := list(itertools.islice(left, batch))) == batch:
            names, wavs = zip(*part, strict=True)
            yield Named([str(root / name) for name in names], torch.stack(wavs))

    return epoch


def _chunk_of(file: io.BytesIO) -> torch.Tensor:
    with soundfile.SoundFile(file) as audio:
        audio.seek(random.randint(0, audio.frames - SAMPLES))
        return torch.from_numpy(audio.read(SAMPLES, dtype="float32"))


#: What reads shards beside us, by the package that must be there.
PEERS = {"WebDataset, tar": ("webdataset", webdataset), "lhotse Shar": ("lhotse", shar)}


def manifests_of(setting: Setting, folder: Path) -> dict[str, Path]:
    """Write the same speech as WAV, as FLAC and packed, and a manifest of each."""
    wav, flac = folder / "WAV", folder / "FLAC"
    size = {"speakers": setting.speakers, "utterances": setting.utterances}
    write_corpus(wav, seconds=setting.seconds, **size)
    for path in audio_files(wav):
        other = flac / path.relative_to(wav).with_suffix(".flac")
        other.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(other, soundfile.read(path, dtype="int16")[0], RATE)
    tar = folder / "WAV.tar"
    with tarfile.open(tar, "w") as file:
        for path in sorted(audio_files(wav)):
            file.add(path, path.relative_to(wav).as_posix())
    roots = {"WAV": wav, "FLAC": flac, "packed": packed(wav)}
    paths = {kind: sorted(audio_files(root)) for kind, root in roots.items()}
    paths["tar"] = [tar / path.relative_to(wav) for path in paths["WAV"]]
    manifests = {}
    for kind, files in paths.items():
        manifests[kind] = folder / f"{kind}.csv"
        write_manifest(
            manifests[kind],
            [
                Utterance(f"{n}:{p}", str(p), audio_info(p).samples, p.parts[-3])
                for n in range(setting.passes)
                for p in files
            ],
        )
    return manifests


def packed(source: Path) -> Path:
    """Pack a folder."""
    made = source.with_name(f"{source.name}.packed")
    with Packing(made, source=str(source), sample_rate=RATE) as packing:
        for path in audio_files(source):
            wav = read_audio(path, sample_rate=RATE)
            packing.add(path.relative_to(source).as_posix(), wav)
        packing.finish()
    return made


def _random_chunk(wav: str, samples: str) -> torch.Tensor:
    """Read as SpeechBrain's recipe does."""
    start = random.randint(0, int(samples) - SAMPLES)
    sig, _ = audio_io.load(wav, num_frames=SAMPLES, frame_offset=start)
    return sig.transpose(0, 1).squeeze(1)


def epochs_of(manifest: Path, setting: Setting) -> Epoch:
    """Read batches as the recipe does, of another epoch each time."""
    loader = ours(manifest, setting.batch, SAMPLES)
    epochs = itertools.count(1)

    def epoch() -> Iterator[Any]:
        loader.batch_sampler.set_epoch(next(epochs))
        return iter(loader)

    return epoch


def stages(
    device: torch.device, setting: Setting, folder: Path, manifest: Path
) -> dict[str, float]:
    """Take seconds per utterance of reading, augmentation and features."""
    read = epochs_of(manifest, setting)
    batch = next(read())
    wavs, lens = batch.wavs.to(device), batch.lens.to(device)
    augment = partial(
        SpeakerAugment, out_n_neurons=3 * setting.speakers, augment_prob=0.6
    )
    folders = {
        "noise_folder": packed(write_noise(folder / "noise", seconds=5)),
        "rir_folder": packed(write_rirs(folder / "rirs")),
    }
    speeds, both, whole = (
        augment(),
        augment(speeds=[1.0], **folders),
        augment(**folders),
    )
    fbank = Fbank(n_mels=80).to(device)
    normalize = InputNormalization(norm_type="sentence", std_norm=False).to(device)

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

    steps = {
        "one of three speeds, in a batch": lambda: speeds(wavs, lens),
        "one of three speeds, each alone": alone,
        "noise or reverberation, from packed folders": lambda: both(wavs, lens),
        "80 filterbanks, mean subtracted": lambda: normalize(
            fbank(wavs[:, :31840]), lens
        ),
        WHOLE: path,
    }
    size = len(wavs)
    read_whole = (
        setting.passes * setting.speakers * 2 * setting.utterances // size * size
    )
    seconds = interleaved_seconds(steps, device, repeats=setting.repeats)
    return {
        name: spread.median / (read_whole if name == WHOLE else size)
        for name, spread in seconds.items()
    }


def _check(ways: dict[str, Epoch], manifests: dict[str, Path]) -> None:
    """See that what is compared is the same speech."""
    batches = [list(ways[f"speechbrain_rev, {kind}"]()) for kind in manifests]
    for (first, *others), part in itertools.product(
        zip(*batches, strict=True), ("wavs", "speakers")
    ):
        require(
            all(torch.equal(getattr(first, part), getattr(o, part)) for o in others),
            f"packed {part} are not those of the files",
        )
    theirs = [name for name in ways if not name.startswith("speechbrain_rev")]
    for way in theirs:
        batch = next(ways[way]())
        if not isinstance(batch, Named):
            names = [name.partition(":")[2] for name in batch.id]
            batch = Named(names, batch.sig.data)
        for name, wav in zip(*batch, strict=True):
            file = read_audio(name, sample_rate=RATE).numpy()
            pieces = np.lib.stride_tricks.sliding_window_view(file, SAMPLES)
            places = np.flatnonzero(pieces[:, 0] == wav[0].item())
            require(
                any(np.array_equal(pieces[place], wav.numpy()) for place in places),
                f"{way}: its chunk is no piece of {name}",
            )
