"""Embedding speech with a trained encoder: audio in, numpy arrays out."""

from speechbrain_rev.inference.archive import EmbeddingArchive
from speechbrain_rev.inference.cohort import Cohort, read_cohort
from speechbrain_rev.inference.enrolment import EnrolledSpeaker
from speechbrain_rev.inference.export import convert_from_speechbrain, export_run
from speechbrain_rev.inference.extraction import embed_into, embed_share
from speechbrain_rev.inference.folders import FolderResult, embed_folder
from speechbrain_rev.inference.graph import EmbeddingGraph
from speechbrain_rev.inference.graph_files import GraphFile, export_graph
from speechbrain_rev.inference.speaker import SpeakerEmbedder
from speechbrain_rev.inference.thresholds import Threshold, Thresholds
from speechbrain_rev.inference.verification import Verification
from speechbrain_rev.inference.waveform import FbankStatistics, WaveformEncoder
from speechbrain_rev.inference.windows import Windows

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
    "convert_from_speechbrain",
    "embed_folder",
    "embed_into",
    "embed_share",
    "export_graph",
    "export_run",
    "read_cohort",
]
