"""Embedding speech with a trained encoder: audio in, numpy arrays out."""

from speechbrain_rev.inference.archive import (
    EmbeddingArchive,
    embed_into,
    embed_share,
)
from speechbrain_rev.inference.speaker import SpeakerEmbedder
from speechbrain_rev.inference.waveform import FbankStatistics, WaveformEncoder

__all__ = [
    "EmbeddingArchive",
    "FbankStatistics",
    "SpeakerEmbedder",
    "WaveformEncoder",
    "embed_into",
    "embed_share",
]
