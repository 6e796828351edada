"""Embedding speech with a trained encoder: audio in, numpy arrays out."""

from speechbrain_rev import torchaudio_pair  # noqa: F401, imported before torchaudio
from speechbrain_rev.inference.archive import EmbeddingArchive
from speechbrain_rev.inference.export import export_run
from speechbrain_rev.inference.extraction import (
    FolderResult,
    embed_folder,
    embed_into,
    embed_share,
)
from speechbrain_rev.inference.front_ends import FbankStatistics, WaveformEncoder
from speechbrain_rev.inference.graph import EmbeddingGraph, GraphFile, export_graph
from speechbrain_rev.inference.running import Windows
from speechbrain_rev.inference.speaker import SpeakerEmbedder
from speechbrain_rev.inference.thresholds import Threshold, Thresholds
from speechbrain_rev.inference.verification import (
    Cohort,
    EnrolledSpeaker,
    Verification,
    read_cohort,
)

__all__ = [
    "Cohort",
    "EmbeddingArchive",
    "EmbeddingGraph",
    "EnrolledSpeaker",
    "FbankStatistics",
    "FolderResult",
    "GraphFile",
    "SpeakerEmbedder",
    "Threshold",
    "Thresholds",
    "Verification",
    "WaveformEncoder",
    "Windows",
    "embed_folder",
    "embed_into",
    "embed_share",
    "export_graph",
    "export_run",
    "read_cohort",
]
