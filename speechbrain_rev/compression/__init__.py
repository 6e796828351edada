"""Activations in less memory: every value is kept up to a bound of its error."""

from speechbrain_rev.compression.activations import (
    ActivationCompression,
    LayerRecord,
    compress_activations,
    stop_compressing,
)
from speechbrain_rev.compression.adaptive import GradientBound
from speechbrain_rev.compression.bounds import (
    DeviationBound,
    FixedBound,
    RangeBound,
    Rule,
)
from speechbrain_rev.compression.codec import Compressed, Form, Reason, decode, encode

__all__ = [
    "ActivationCompression",
    "Compressed",
    "DeviationBound",
    "FixedBound",
    "Form",
    "GradientBound",
    "LayerRecord",
    "RangeBound",
    "Reason",
    "Rule",
    "compress_activations",
    "decode",
    "encode",
    "stop_compressing",
]
