"""Audio: files opened, measured, read in part, resampled, and kept in tars and packs."""

from speechbrain_rev import torchaudio_pair  # noqa: F401, imported before torchaudio

from .reading import AudioInfo, audio_info, read_audio, read_blocks
from .segments import audio_exists

__all__ = ["AudioInfo", "audio_exists", "audio_info", "read_audio", "read_blocks"]
