"""Speaker encoders and training objectives in SpeechBrain's conventions."""

from speechbrain_rev.lobes.encoder import SpeakerEncoder, build_encoder
from speechbrain_rev.lobes.inference_form import InferenceEncoder, inference_form

__all__ = ["InferenceEncoder", "SpeakerEncoder", "build_encoder", "inference_form"]
