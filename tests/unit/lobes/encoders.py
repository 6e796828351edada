"""Small encoders of every kind, and features for them."""

import torch

from speechbrain_rev.lobes import build_encoder

#: One encoder of each way to be built.
KINDS = [
    "resnet34", "resnet101", "df_resnet56", "revnet46", "revnet57", "revnet140",
    "revnet155", "df_revnet66", "df_revnet89",
]  # fmt: skip


def tiny(name, **settings):
    """The same shape of network, small enough to run in a test."""
    torch.manual_seed(0)
    sizes = {"widths": (8, 8, 16, 16), "blocks": (1, 2, 1, 1), "embedding_dim": 32}
    return build_encoder(name, **(sizes | settings))


def feats(batch=2, time=43, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(batch, time, 80, dtype=dtype)
