"""Twelve plans: encoders, budgets, chunks and error limits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from speechbrain_rev.catalog import Training
from speechbrain_rev.catalog.plans import plan_encoders
from speechbrain_rev.devices import parse_card
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner import Plan, plan
from speechbrain_rev.sizes import GIB

#: What plans are made for, whichever GPUs are listed.
SPEED = parse_card("RTX 2080 Ti").speed

_SMALL = {
    "n_mels": 24,
    "embedding_dim": 16,
    "widths": (8, 8, 16, 16),
    "blocks": (2, 2, 2, 2),
}


def on_card(name: str, gib: float, batch: int, *, frames: int = 200) -> Plan:
    """Plan an encoder of the table for a GPU."""
    training = Training(int(gib * GIB), batch=batch, frames=frames)
    (planned,) = plan_encoders(training, names=[name], speed=SPEED)
    return planned.as_plan()


def in_budget(name: str, budget: int, *, chunk: int | str | None = "auto") -> Plan:
    """Plan a small encoder within bytes, counted; times are estimated."""
    torch.manual_seed(0)
    encoder = build_encoder(name, chunk=chunk, **_SMALL)
    feats = torch.randn(4, 64, 24, generator=torch.Generator().manual_seed(0))
    return plan(encoder, feats, budget, measure=False)


def of_other_network() -> Plan:
    """Plan a network that is none of ours."""
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)
    )
    feats = torch.randn(512, 64)
    return plan(nn.Sequential(*blocks), feats, 2_000_000, blocks=["?"], measure=False)


def compressing(budget: int, limit: float) -> Plan:
    """Plan blocks of many layers, which recomputing one at a time hardly helps."""
    torch.manual_seed(0)

    def layers(count: int) -> nn.Sequential:
        triples = (
            (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(count)
        )
        return nn.Sequential(*(layer for triple in triples for layer in triple))

    module, x = nn.Sequential(layers(8), layers(1)), torch.randn(2, 8, 30, 40)
    return plan(module, x, budget, blocks="?", measure=False, max_gradient_error=limit)


PLANS: dict[str, Callable[[], Plan]] = {
    "resnet34_5gib": lambda: on_card("resnet34", 5, 128),
    "resnet34_600_frames": lambda: on_card("resnet34", 11, 128, frames=600),
    "df_resnet56_10gib": lambda: on_card("df_resnet56", 10, 128),
    "revnet57_5gib": lambda: on_card("revnet57", 5, 128),
    "df_revnet66_11gib": lambda: on_card("df_revnet66", 11, 128),
    "small_resnet34": lambda: in_budget("resnet34", 1_650_000),
    "small_revnet57": lambda: in_budget("revnet57", 1_200_000),
    "small_revnet57_unchunked": lambda: in_budget("revnet57", 1_500_000, chunk=None),
    "small_revnet57_chunk": lambda: in_budget("revnet57", 1_500_000, chunk=50_000),
    "other_network": of_other_network,
    "error_limit_0.02": lambda: compressing(900_000, 0.02),
    "error_limit_0.001": lambda: compressing(1_450_000, 0.001),
}
