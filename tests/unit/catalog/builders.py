"""Steps, plans and profiles that tests of this folder share."""

import dataclasses
import functools

import torch

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog.plans import PlannedEncoder
from speechbrain_rev.catalog.steps import TrainingStep
from speechbrain_rev.catalog.table import ListedEncoder
from speechbrain_rev.devices import ASSUMED
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier

CPU = torch.device("cpu")
TINY = {"widths": (8, 8, 8, 8), "blocks": (1, 0, 0, 1), "n_mels": 24}
#: Enough for the codec to compress something.
WIDE = {"widths": (16, 8, 8, 8), "frames": 48, "n_mels": 48}


def step_of(arch="revnet57", encoder=None, **changed):
    """A step of a recipe that trains a tiny encoder."""
    torch.manual_seed(0)
    if arch == "resnet34":
        changed = {"blocks": (1, 1, 1, 1), **changed}
    own = {k: changed.pop(k) for k in list(changed) if k in (*TINY, "streams", "chunk")}
    encoder = encoder or build_encoder(arch, **{**TINY, "embedding_dim": 16, **own})
    step = TrainingStep(
        encoder,
        CosineClassifier(16, 10),
        AAMSoftmax(),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        optimizer_name="sgd",
        optimizer_bits=32,
        batch=4,
        frames=24,
        precision="fp32",
        device=CPU,
    )
    return dataclasses.replace(step, **changed)


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
