"""Training speech: corpora, their preparation, segments to train on, augmentation."""

from speechbrain_rev import torchaudio_pair  # noqa: F401, imported before torchaudio

from .augmentation import SpeakerAugment, add_noise, reverberate
from .corpora import open_sources
from .dataset import (
    ChunkBatch,
    ChunkDataset,
    WholeUtterances,
    collate_chunks,
    collate_whole,
    repeat_to,
)
from .folders import LAYOUTS, Layout, audio_files
from .formats import FORMATS, Format
from .manifest import Manifest, Utterance, read_manifest, write_manifest
from .rows import Row, Source
from .sampling import EpochBatchSampler
from .seeding import GlobalRandomState, generator

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "ChunkBatch",
    "ChunkDataset",
    "EpochBatchSampler",
    "Format",
    "GlobalRandomState",
    "Layout",
    "Manifest",
    "Row",
    "Source",
    "SpeakerAugment",
    "Utterance",
    "WholeUtterances",
    "add_noise",
    "audio_files",
    "collate_chunks",
    "collate_whole",
    "generator",
    "open_sources",
    "read_manifest",
    "repeat_to",
    "reverberate",
    "write_manifest",
]
