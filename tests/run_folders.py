"""Small run folders, as training leaves them, and audio to embed."""

import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile
import torch
from speechbrain.dataio.encoder import CategoricalEncoder
from speechbrain.utils.epoch_loop import EpochCounter

from speechbrain_rev.data import Utterance, write_manifest
from speechbrain_rev.inference import EmbeddingArchive
from speechbrain_rev.inference.archive import fingerprint_of
from speechbrain_rev.inference.runs import (
    Augmentation,
    DataCounts,
    FinalWeights,
    TrainingRecord,
    read_record,
)
from speechbrain_rev.inference.thresholds import RESULTS
from speechbrain_rev.inference.trained import read_weights
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer
from speechbrain_rev.lobes.classifier import CosineClassifier

TINY = {
    "arch": "revnet57",
    "widths": [8, 16, 16, 16],
    "blocks": [1, 1, 1, 1],
    "n_mels": 80,
    "embedding_dim": 16,
    "sample_rate": 16000,
}
#: Other settings of a run that its record is asked for.
SETTINGS = {
    "pooling": "statistics",
    "loss": "aam_softmax",
    "speeds": [1.0, 0.9, 1.1],
    "number_of_epochs": 2,
    "freeze_epochs": 0,
    "average_checkpoints": 1,
    "batch_size": 4,
    "lr": 0.1,
    "final_lr": 5e-5,
    "data_folder": "/secret/place/VoxCeleb2",
    "train_list": None,
    "trial_lists": ["/secret/place/one.txt"],
    "trials_folder": None,
    "any_extension": False,
    "outside_files": False,
    "channel": None,
    "cohort_top_n": 600,
}
SPEAKERS = ("id00001", "id00002", "id00003")
#: What happened in it.
HAPPENED = {
    "data": DataCounts(12, len(SPEAKERS), held_out_speakers=2, left_out=0),
    "augmentation": Augmentation(
        tuple(SETTINGS["speeds"]), noise=False, reverberation=False
    ),
    "device": "cpu, 1 process(es)",
    "versions": {"torch": torch.__version__},
    "epochs": 2,
    "seconds": 90.0,
    "lr": 0.01,
    "margin": 0.2,
    "earlier": (),
}
#: Of the features that encoders here take.
FRONT_END = {"kind": "speechbrain", "sample_rate": TINY["sample_rate"]}


def tiny_encoder(
    seed: int = 0, front_end: Mapping[str, object] = FRONT_END
) -> SpeakerEncoder:
    torch.manual_seed(seed)
    encoder = build_encoder(
        TINY["arch"],
        widths=TINY["widths"],
        blocks=TINY["blocks"],
        n_mels=TINY["n_mels"],
        embedding_dim=TINY["embedding_dim"],
        front_end=front_end,
    )
    # Statistics that differ from the initial ones: eval mode must use them.
    with torch.no_grad():
        for name, buffer in encoder.named_buffers():
            if name.endswith("running_mean"):
                buffer.uniform_(-0.1, 0.1)
    return encoder


def write_run(folder: Path, seed: int = 0, **changed: object) -> SpeakerEncoder:
    """Write a finished run's record and weights, and settings that run code; its encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    hostile = "checkpointer: !new:os.system [touch executed]\n"
    (folder / "hyperparams.yaml").write_text(hostile)
    encoder = tiny_encoder(seed)
    torch.save(encoder.state_dict(), folder / "embedding_model.ckpt")
    fingerprint = fingerprint_of(encoder.state_dict(), encoder.description)
    TrainingRecord(
        run="the run",
        settings={
            "output_folder": str(folder), "save_folder": str(folder / "save"),
            **TINY, **SETTINGS, **changed,
        },
        weights=FinalWeights((2,), fingerprint, 0.01, 0.2, 90.0),
        **HAPPENED,
    ).write(folder)  # fmt: skip
    return encoder


def change_record(
    folder: Path, settings: Mapping[str, object] | None = None, **changed: object
) -> TrainingRecord:
    """Change what a run's record says, and some of its settings; the new record."""
    record = read_record(folder)
    record = replace(
        record, settings={**record.settings, **(settings or {})}, **changed
    )
    record.write(folder)
    return record


def speech_like(seconds: float = 1.0, rate: int = 16000, seed: int = 0) -> np.ndarray:
    """Buzz through slowly moving formants: [samples], from -1 to 1."""
    return _speech_like(seconds, rate, seed).copy()


@functools.cache
def _speech_like(seconds: float, rate: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    pitch = draw.uniform(90, 250) * (1 + 0.05 * np.sin(2 * np.pi * 3 * time))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    wave = sum(
        draw.uniform(0.1, 1.0) * np.sin(k * phase) * (1 + np.sin(k * time)) / k
        for k in range(1, 20)
    )
    noise = 0.01 * draw.standard_normal(len(time))
    return 0.5 * (wave / np.abs(wave).max() + noise).astype(np.float32)


def write_audio(path: Path, samples: np.ndarray, rate: int = 16000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(
        path, samples, rate, subtype="FLOAT" if path.suffix == ".wav" else None
    )
    return path


def write_scorable_run(folder: Path, data: Path, **changed: object) -> Path:
    """Write a run on a tests.corpus whose last two speakers were kept for trials."""
    names = sorted(p.relative_to(data / "wav") for p in (data / "wav").rglob("*.wav"))
    speakers = sorted({name.parts[0] for name in names})
    tested, trained = speakers[-2:], speakers[:-2]
    pairs = [
        (int(a.parts[0] == b.parts[0]), a, b)
        for a, b in itertools.combinations(names, 2)
        if {a.parts[0], b.parts[0]} <= set(tested)
    ]
    folder.mkdir(parents=True)
    for name, some in (("one.txt", pairs), ("other.txt", pairs[::-2])):
        lines = "".join(f"{label} {a} {b}\n" for label, a, b in some)
        (folder / name).write_text(lines)
    settings = {
        "trial_lists": [str(folder / "one.txt"), str(folder / "other.txt")],
        "data_folder": str(data),
        "trials_folder": str(data),
        # Speed perturbation made three classes of each speaker.
        "out_n_neurons": 3 * len(trained),
    }
    write_run(folder, **{**settings, **changed})
    (folder / "save").mkdir()
    write_manifest(
        folder / "save" / "train.csv",
        [
            Utterance(str(name), str(data / "wav" / name), 0, name.parts[0])
            for name in names
            if name.parts[0] in trained
        ],
    )
    return folder


def write_finished_run(
    folder: Path, speakers: tuple[str, ...] = SPEAKERS, **changed: object
) -> CosineClassifier:
    """Write a run with its labels, data and last checkpoint; the classifier in it."""
    encoder = write_run(folder, **changed)
    save = folder / "save"
    save.mkdir(exist_ok=True)
    labels = CategoricalEncoder()
    labels.update_from_iterable(speakers)
    labels.save(save / "label_encoder.txt")
    torch.manual_seed(1)
    classes = len(speakers) * len(SETTINGS["speeds"])
    classifier = CosineClassifier(TINY["embedding_dim"], classes)
    modules = {"embedding_model": encoder, "classifier": classifier}
    counter = EpochCounter(limit=2)
    counter.current = 2
    checkpointer = WholeCheckpointer(save, {**modules, "counter": counter})
    checkpointer.save_checkpoint(meta={"epoch": 2})
    return classifier


def write_scores(folder: Path, *, subtract_mean: bool = False) -> np.ndarray:
    """Add to a finished run what extract.py and score.py leave; the cohort's rows."""
    fingerprint = read_weights(folder).fingerprint
    names = tuple(f"{s}/a/{i}.wav" for s in SPEAKERS for i in range(2))
    rows = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    EmbeddingArchive(names, rows, fingerprint).save(folder / "embeddings/cohort.npz")
    write_manifest(
        folder / "save/train.csv", [Utterance(n, n, 1, n.split("/")[0]) for n in names]
    )
    row = {
        "trials": "vox1_o",
        "method": "as_norm",
        "targets": 18802,
        "impostors": 18818,
        "enrolled": [1, 1],
        "eer": 0.01234,
        "min_dcf": {"0.01": 0.111, "0.05": 0.222},
        "eer_95": [0.0101, 0.0151],
        "thresholds": {"EER": 4.5, "minDCF(0.01)": 6.25, "minDCF(0.05)": None},
    }
    report = {
        "model": fingerprint,
        "cohort": {"speakers": 3, "top_n": 2},
        "subtract_mean": subtract_mean,
        "results": [row],
    }
    (folder / "scores").mkdir(exist_ok=True)
    (folder / RESULTS).write_text(json.dumps(report))
    return rows
