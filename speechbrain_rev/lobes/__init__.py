"""Speaker encoders and training objectives in SpeechBrain's conventions."""

from speechbrain_rev.lobes.encoder import SpeakerEncoder, build_encoder

__all__ = ["SpeakerEncoder", "build_encoder"]
