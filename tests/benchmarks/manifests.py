"""A manifest of a million rows: how soon there is a batch, and what each process costs.

Every case runs in a process of its own, with workers, beside the same on ten thousand
rows: what it costs is the resident memory beyond that of the small one, of each process
(what several share is counted in each) and of all together (counted once). The baseline is
SpeechBrain's dataset of the same rows, read as its recipe does.

Listing a corpus, which happens once, is timed apart, of a manifest in SpeechBrain's form:
ours by a preparation's own functions, theirs by `load_data_csv`. Ours also checks the header
of each file, here of packed ones; SpeechBrain checks none.
"""

from __future__ import annotations

import csv
import hashlib
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from speechbrain.dataio.dataset import load_data_csv

from speechbrain_rev.audio import read_audio
from speechbrain_rev.data import Utterance, read_manifest, repeat_to, write_manifest
from speechbrain_rev.data.checking import take_account
from speechbrain_rev.data.listing import DataSettings, list_speech
from speechbrain_rev.data.packing import Packing
from speechbrain_rev.sizes import MB
from tests.corpus import RATE

from .harness import Result, in_a_process, require
from .reading import ours, stock

_FILE_SAMPLES = 8
OURS, BASELINE = "speechbrain_rev", "SpeechBrain"
# SpeechBrain's data pipelines can be sent to no process.
SPAWNED = "speechbrain_rev, spawned workers"
PROCESSES = ("the main process", "the largest worker", "all")


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
    setting = setting or Setting()
    answers: dict[tuple[str, int], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for rows in (setting.few, setting.rows):
            path = Path(folder, f"{rows}.csv")
            write_rows(path, rows)
            for way in (OURS, SPAWNED, BASELINE):
                answers[way, rows] = in_a_process(
                    __name__, "measure", way, str(path), asdict(setting)
                )
        listed = {
            way: in_a_process(__name__, "listed", way, str(listing_of(path)))
            for way in (OURS, BASELINE)
        }
        listed[SPAWNED] = {"list": "", "check": ""}
    baseline = answers[BASELINE, setting.rows]
    require(
        all(
            answers[w, setting.rows]["rows"] == baseline["rows"]
            for w in (OURS, SPAWNED)
        ),
        f"the manifests are of other rows: {answers}",
    )
    require(
        listed[OURS]["rows"] == listed[BASELINE]["rows"] == setting.rows
        and listed[OURS]["digest"] == listed[BASELINE]["digest"],
        f"the listings are of other rows: {listed}",
    )
    table, worker = [], PROCESSES[1]
    for way in (OURS, SPAWNED, BASELINE):
        few, many = answers[way, setting.few], answers[way, setting.rows]
        table.append(
            {
                "manifest": way,
                "rows": setting.rows,
                "s to list": listed[way]["list"],
                "s to list and check": listed[way]["check"],
                "s to the first batch": many["seconds"],
                "s since the process began": many["since start"],
                **{f"MB of {p}": (many[p] - few[p]) / MB for p in PROCESSES},
                "bytes a row in the largest worker": (many[worker] - few[worker])
                / (setting.rows - setting.few),
                "baseline": BASELINE,
                "times its seconds": many["seconds"] / baseline["seconds"],
                "times its s to list": listed[way]["list"]
                and listed[way]["list"] / listed[BASELINE]["list"],
            }
        )
    return Result(
        "manifests",
        "What does a manifest of a million rows cost?",
        f"Batches of {setting.batch} chunks by {setting.workers} workers; resident memory "
        f"after {setting.batches} batches (of ours the main process has touched all rows), "
        f"beyond what it is for {setting.few} rows; of all: what processes share is "
        "counted once",
        table,
        "both have as many rows, the last of which is the same; both list the same files of "
        "the same speakers",
    )


def write_rows(path: Path, rows: int) -> None:
    """Write a manifest of so many rows, and a packed folder of as many small files."""
    source = path.with_suffix(".packed")
    names = [
        f"id{row // 180:05d}/{row * 7919 % 10**11:011d}/{row % 180:05d}.wav"
        for row in range(rows)
    ]
    speech = torch.rand(rows, _FILE_SAMPLES, generator=torch.Generator().manual_seed(0))
    with Packing(source, source="rows", sample_rate=RATE) as packing:
        for name, wav in zip(names, speech, strict=True):
            packing.add(name, wav)
        packing.finish()
    write_manifest(
        path,
        (
            Utterance(name[:-4], f"{source}/{name}", _FILE_SAMPLES, name[:7])
            for name in names
        ),
    )


def listing_of(manifest: Path) -> Path:
    """Write a manifest's rows as SpeechBrain's recipe does."""
    path = manifest.with_suffix(".sb.csv")
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("ID", "duration", "wav", "start", "stop", "spk_id"))
        for one in read_manifest(manifest):
            # It asks for floats.
            rows.writerow((one.ID, one.samples / RATE, one.wav, "", "", one.spk_id))
    return path


def listed(way: str, path: str) -> dict[str, Any]:
    """List a corpus, and check its files if that is part of the way."""
    check: float | str = ""
    begin = time.perf_counter()
    if way == BASELINE:
        data = load_data_csv(path)
        seconds = time.perf_counter() - begin
        rows = [(ID, row["wav"], row["spk_id"]) for ID, row in data.items()]
    else:
        settings = DataSettings(path)
        listing = list_speech(settings)
        seconds = time.perf_counter() - begin
        account = take_account(listing, settings)
        check = time.perf_counter() - begin
        rows = [
            (one.ID, one.wav, one.spk_id)
            for names in account.usable.values()
            for one in names.values()
        ]
    digest = hashlib.blake2b(repr(sorted(rows)).encode(), digest_size=8).hexdigest()
    return {"list": seconds, "check": check, "rows": len(rows), "digest": digest}


def measure(way: str, path: str, given: dict[str, int]) -> dict[str, Any]:
    """Read batches in this process; return seconds and bytes, with all rows read once."""
    import psutil

    setting, process = Setting(**given), psutil.Process()
    start = "spawn" if way == SPAWNED else "fork"
    options = {"num_workers": setting.workers, "multiprocessing_context": start}

    def read(wav: str, samples: str) -> torch.Tensor:
        """Read with our reader, which is not what is compared."""
        wave = read_audio(wav, sample_rate=RATE, samples=setting.samples)
        return repeat_to(wave, setting.samples)

    begin = time.perf_counter()
    if way != BASELINE:
        loader = ours(Path(path), setting.batch, setting.samples, **options)
        manifest = loader.dataset.manifest
        last = manifest[-1]
        rows = [len(manifest), last.ID, last.wav, last.spk_id]
    else:
        loader = stock(Path(path), setting.batch, read, **options)
        data = loader.dataset
        last = data.data[data.data_ids[-1]]
        rows = [len(data), data.data_ids[-1], last["wav"], last["spk_id"]]
    batches = iter(loader)
    next(batches)
    seconds = time.perf_counter() - begin
    since_start = time.time() - process.create_time()
    for _ in range(setting.batches):
        next(batches)
    if way != BASELINE:
        # All of it is read, as an epoch does in the end.
        texts = manifest.rows
        texts.data.array.sum(), texts.ends.array.sum(), manifest.speakers.sum()
    main, *others = [
        p.memory_full_info() for p in (process, *process.children(recursive=True))
    ]
    # Beside spawned workers is a process that watches what they share.
    workers = sorted(others, key=lambda info: info.rss)[-setting.workers :]
    sizes = main.rss, max(w.rss for w in workers), sum(i.pss for i in (main, *workers))
    return {
        "seconds": seconds,
        "since start": since_start,
        "rows": rows,
        **dict(zip(PROCESSES, sizes, strict=True)),
    }
