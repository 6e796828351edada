"""A manifest of a million rows: how soon there is a batch, and what each process costs.

Every case runs in a process of its own, with workers, beside the same on ten thousand
rows: what it costs is the resident memory beyond that of the small one, of each process
(what several share is counted in each) and of all together (counted once). The baseline is
SpeechBrain's dataset of the same rows, read as its recipe does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speechbrain_rev.data import (
    ChunkDataset,
    EpochBatchSampler,
    Manifest,
    Utterance,
    collate_chunks,
    read_manifest,
    write_manifest,
)
from speechbrain_rev.data.manifest import MAPPED
from speechbrain_rev.data.packing import Packing
from tests.corpus import RATE

from .harness import NotEqual, Result

MB = 1e6
_FILE_SAMPLES = 8
WAYS = ("speechbrain_rev", "SpeechBrain")


@dataclass(frozen=True)
class Setting:
    """How many rows, and what is read of them."""

    rows: int = 1_000_000
    few: int = 10_000
    workers: int = 4
    batch: int = 64
    #: After which memory is looked at.
    batches: int = 60
    samples: int = 16_000


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Measure each case in a process of its own."""
    if device.type != "cpu":
        raise ValueError(f"Manifests are read on the CPU; {device} was asked for.")
    setting = setting or Setting()
    found: dict[tuple[str, int], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for rows in (setting.few, setting.rows):
            path = Path(folder, f"{rows}.csv")
            write_rows(path, rows, Path(folder))
            for way in WAYS:
                found[way, rows] = _in_a_process(way, path, setting)
        mapping = _seconds_to_map(path)
    many = {way: found[way, setting.rows] for way in WAYS}
    if many["SpeechBrain"]["rows"] != many["speechbrain_rev"]["rows"]:
        raise NotEqual(f"the manifests are of other rows: {many}")
    table = []
    for way in WAYS:
        few, baseline = found[way, setting.few], many["SpeechBrain"]
        table.append(
            {
                "manifest": way,
                "rows": setting.rows,
                "s to the first batch": many[way]["seconds"],
                "s since the process began": many[way]["since start"],
                **{
                    f"MB of {which}": (many[way][which] - few[which]) / MB
                    for which in ("the main process", "the largest worker", "all")
                },
                "baseline": "SpeechBrain",
                "times its seconds": many[way]["seconds"] / baseline["seconds"],
            }
        )
    return Result(
        "manifests",
        "What does a manifest of a million rows cost?",
        f"Batches of {setting.batch} chunks by {setting.workers} workers; resident memory "
        f"after {setting.batches} batches (of ours the main process has touched all rows), "
        f"beyond what it is for {setting.few} rows; of "
        "all: what processes share is counted once. Mapping the rows, which the "
        f"preparation does once, takes {mapping:.1f} s",
        table,
        "both have as many rows, the last of which is the same",
    )


def _seconds_to_map(path: Path) -> float:
    Path(f"{path}{MAPPED}").unlink()
    begin = time.perf_counter()
    read_manifest(path)
    return time.perf_counter() - begin


def write_rows(path: Path, rows: int, folder: Path) -> None:
    """Write a manifest of so many rows, and a packed folder of as many small files."""
    source = folder / f"{rows}.packed"
    names = [
        f"id{row // 180:05d}/{row * 7919 % 10**11:011d}/{row % 180:05d}.wav"
        for row in range(rows)
    ]
    wav = torch.linspace(-0.5, 0.5, _FILE_SAMPLES)
    with Packing(source, source="rows", sample_rate=RATE) as packing:
        for name in names:
            packing.add(name, wav)
        packing.finish()
    write_manifest(
        path,
        (
            Utterance(name[:-4], f"{source}/{name}", _FILE_SAMPLES, name[:7])
            for name in names
        ),
    )


def measure(way: str, path: str, setting: Setting) -> dict[str, Any]:
    """Read batches in this process; return seconds and bytes, with all rows read once."""
    import psutil

    process = psutil.Process()
    begin = time.perf_counter()
    loader, rows = (ours if way == "speechbrain_rev" else stock)(path, setting)
    batches = iter(loader)
    next(batches)
    found: dict[str, Any] = {
        "seconds": time.perf_counter() - begin,
        "since start": time.time() - process.create_time(),
        "rows": rows,
    }
    for _ in range(setting.batches):
        next(batches)
    if way == "speechbrain_rev":
        _touch(loader.dataset.manifest)
    main, *workers = [
        p.memory_full_info() for p in (process, *process.children(recursive=True))
    ]
    return found | {
        "the main process": main.rss,
        "the largest worker": max(worker.rss for worker in workers),
        "all": sum(info.pss for info in (main, *workers)),
    }


def _touch(manifest: Manifest) -> None:
    """Read all of it, as an epoch does in the end."""
    for texts in (manifest.names, manifest.paths):
        texts.data.sum(), texts.ends.sum()
    manifest.samples.sum(), manifest.speakers.sum()


def ours(path: str, setting: Setting) -> tuple[Any, list[Any]]:
    """Give a loader as the recipe has it, and a function that lists its rows."""
    rows = read_manifest(path)
    numbers = {name: n for n, name in enumerate(rows.speaker_names)}
    dataset = ChunkDataset(rows, numbers, samples=setting.samples)
    sampler = EpochBatchSampler(len(rows), setting.batch)
    sampler.set_epoch(1)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate_chunks,
        num_workers=setting.workers,
        multiprocessing_context="fork",
    )
    last = rows[-1]
    return loader, [len(rows), last.ID, last.wav, last.spk_id]


def stock(path: str, setting: Setting) -> tuple[Any, list[Any]]:
    """Give a loader as SpeechBrain's recipe has it, the samples from our reader."""
    import speechbrain as sb
    from speechbrain.dataio.dataloader import make_dataloader
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.dataio.encoder import CategoricalEncoder

    from speechbrain_rev.data import read_audio, repeat_to

    data = DynamicItemDataset.from_csv(path)
    encoder = CategoricalEncoder()

    @sb.utils.data_pipeline.takes("wav")
    @sb.utils.data_pipeline.provides("sig")
    def audio(wav: str) -> torch.Tensor:
        wave = read_audio(wav, sample_rate=RATE, samples=setting.samples)
        return repeat_to(wave, setting.samples)

    @sb.utils.data_pipeline.takes("spk_id")
    @sb.utils.data_pipeline.provides("spk_id", "spk_id_encoded")
    def label(spk_id: str) -> Any:
        yield spk_id
        yield encoder.encode_sequence_torch([spk_id])

    data.add_dynamic_item(audio)
    data.add_dynamic_item(label)
    encoder.update_from_didataset(data, "spk_id")
    encoder.ignore_len()
    data.set_output_keys(["id", "sig", "spk_id_encoded"])
    loader = make_dataloader(
        data,
        batch_size=setting.batch,
        shuffle=True,
        num_workers=setting.workers,
        multiprocessing_context="fork",
    )
    last = data.data_ids[-1]
    row = data.data[last]
    return loader, [len(data), last, row["wav"], row["spk_id"]]


def _in_a_process(way: str, path: Path, setting: Setting) -> dict[str, Any]:
    code = (
        "import json, sys; from tests.benchmarks.manifests import Setting, measure; "
        "print(json.dumps(measure(sys.argv[1], sys.argv[2], "
        "Setting(**json.loads(sys.argv[3])))))"
    )
    given = json.dumps(vars(setting))
    done = subprocess.run(
        [sys.executable, "-c", code, way, str(path), given],
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
