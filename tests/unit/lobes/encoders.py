"""Small encoders of every kind, and features for them."""

import torch

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.reversible.norm import BatchNorm

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


def with_statistics(encoder):
    """Give normalisations statistics and factors as after a training."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for norm in encoder.modules():
            if isinstance(norm, BatchNorm):
                norm.running_mean.normal_(0, 0.2, generator=draw)
                norm.running_var.uniform_(0.5, 2.0, generator=draw)
                norm.weight.uniform_(0.5, 1.5, generator=draw)
                norm.bias.normal_(0, 0.2, generator=draw)
    return encoder.eval()
