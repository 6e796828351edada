"""Training speech: corpora, their preparation, reading by frame range, augmentation."""

from speechbrain_rev import torchaudio_pair  # noqa: F401, imported before torchaudio
from speechbrain_rev.audio.reading import (
    AudioInfo,
    audio_info,
    read_audio,
    read_blocks,
    read_first_channel,
)
from speechbrain_rev.audio.segments import audio_exists

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
    "AudioInfo",
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
    "audio_exists",
    "audio_files",
    "audio_info",
    "collate_chunks",
    "collate_whole",
    "generator",
    "open_sources",
    "read_audio",
    "read_blocks",
    "read_first_channel",
    "read_manifest",
    "repeat_to",
    "reverberate",
    "write_manifest",
]
