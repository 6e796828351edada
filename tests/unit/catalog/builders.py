"""Steps, plans and profiles that tests of this folder share."""

import torch

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog.plans import PlannedEncoder
from speechbrain_rev.catalog.table import ListedEncoder
from speechbrain_rev.devices import ASSUMED
from speechbrain_rev.lobes import build_encoder


def turns_of(encoder):
    """Modes of an encoder's blocks that take turns among those that each allows."""
    allowed = enumerate(encoder.allowed_modes().items())
    return {name: modes[i % len(modes)].value for i, (name, modes) in allowed}


def planned_as(name, training, step_bytes, *, modes=None):
    """An encoder as if a plan had chosen modes that take turns."""
    if modes is None:
        with torch.device("meta"):
            modes = turns_of(build_encoder(name))
    model = ListedEncoder(architecture(name), training)
    return PlannedEncoder(
        model, None, (None,) * 4, modes, step_bytes, 1.0, 1.0, ASSUMED
    )
