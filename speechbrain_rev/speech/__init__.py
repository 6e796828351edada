"""Training speech: reading by frame range, augmentation, chunks and their order."""

from .augmentation import SpeakerAugment, add_noise, reverberate
from .dataset import (
    ChunkBatch,
    ChunkDataset,
    Utterance,
    WholeUtterances,
    collate_chunks,
    collate_whole,
    read_manifest,
    repeat_to,
    write_manifest,
)
from .reading import (
    AudioInfo,
    audio_files,
    audio_info,
    read_audio,
    read_first_channel,
)
from .sampling import EpochBatchSampler
from .seeding import GlobalRandomState, generator

__all__ = [
    "AudioInfo",
    "ChunkBatch",
    "ChunkDataset",
    "EpochBatchSampler",
    "GlobalRandomState",
    "SpeakerAugment",
    "Utterance",
    "WholeUtterances",
    "add_noise",
    "audio_files",
    "audio_info",
    "collate_chunks",
    "collate_whole",
    "generator",
    "read_audio",
    "read_first_channel",
    "read_manifest",
    "repeat_to",
    "reverberate",
    "write_manifest",
]
