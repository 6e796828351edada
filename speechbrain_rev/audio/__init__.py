"""Audio: files opened, measured, read in part, resampled, and kept in tars and packs."""

from speechbrain_rev import torchaudio_pair  # noqa: F401, imported before torchaudio
