"""Speaker encoders and training objectives in SpeechBrain's conventions."""

from speechbrain_rev.lobes.build import build_encoder
from speechbrain_rev.lobes.encoder import SpeakerEncoder

__all__ = ["SpeakerEncoder", "build_encoder"]
