"""Training speech: corpora, their preparation, segments to train on, augmentation."""

from speechbrain_rev import torchaudio_pair  # noqa: F401, imported before torchaudio

from .augmentation import SpeakerAugment, add_noise, reverberate
from .corpora import CORPORA, open_corpus
from .corpus import (
    Corpus,
    VoxCelebFolder,
    audio_files,
)
from .dataset import (
    ChunkBatch,
    ChunkDataset,
    WholeUtterances,
    collate_chunks,
    collate_whole,
    repeat_to,
)
from .formats import FORMATS, Row
from .manifest import Manifest, Utterance, read_manifest, write_manifest
from .sampling import EpochBatchSampler
from .seeding import GlobalRandomState, generator

__all__ = [
    "CORPORA",
    "FORMATS",
    "ChunkBatch",
    "ChunkDataset",
    "Corpus",
    "EpochBatchSampler",
    "GlobalRandomState",
    "Manifest",
    "Row",
    "SpeakerAugment",
    "Utterance",
    "VoxCelebFolder",
    "WholeUtterances",
    "add_noise",
    "audio_files",
    "collate_chunks",
    "collate_whole",
    "generator",
    "open_corpus",
    "read_manifest",
    "repeat_to",
    "reverberate",
    "write_manifest",
]
