"""Steps, plans and profiles that tests of this folder share."""

import torch

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog.plans import PlannedEncoder
from speechbrain_rev.catalog.table import ListedEncoder
from speechbrain_rev.lobes import build_encoder


def turns_of(encoder):
    """Modes of an encoder's blocks that take turns among those that each allows."""
    allowed = enumerate(encoder.allowed_modes().items())
    return {name: modes[i % len(modes)].value for i, (name, modes) in allowed}


class OfSize:
    """A profile of which no more is asked than its peak and its time."""

    def __init__(self, step_bytes):
        self.step_bytes, self.about = step_bytes, {}

    def peak_bytes(self, modes):
        return self.step_bytes

    def seconds(self, modes):
        return 1.0


def planned_as(name, training, step_bytes, *, modes=None, channels=(None,) * 4):
    """An encoder as if a plan had chosen modes, by default such that take turns."""
    if modes is None:
        with torch.device("meta"):
            modes = turns_of(build_encoder(name))
    model = ListedEncoder.of(architecture(name), training)
    return PlannedEncoder.of(
        model, OfSize(step_bytes), channels, modes, step_bytes, 1.0
    )
