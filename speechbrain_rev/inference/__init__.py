"""Embedding speech with a trained encoder: audio in, numpy arrays out."""

from speechbrain_rev.inference.archive import (
    EmbeddingArchive,
    embed_into,
    embed_share,
)
from speechbrain_rev.inference.cohort import Cohort, read_cohort
from speechbrain_rev.inference.export import export_run
from speechbrain_rev.inference.speaker import SpeakerEmbedder
from speechbrain_rev.inference.waveform import FbankStatistics, WaveformEncoder

__all__ = [
    "Cohort",
    "EmbeddingArchive",
    "FbankStatistics",
    "SpeakerEmbedder",
    "WaveformEncoder",
    "embed_into",
    "embed_share",
    "export_run",
    "read_cohort",
]
