"""Steps of the recipe that tests of this folder share."""

import dataclasses
import functools

import torch

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.training.recipe_step import TrainingStep

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
