"""Blocks that make outputs of normalisations again, beside the same blocks stored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN
from torch import Tensor, nn

from speechbrain_rev.modes import Mode
from speechbrain_rev.reversible.wrapping import give_mode
from speechbrain_rev.sizes import MB

from .harness import Result, interleaved_seconds, peak_bytes, require, times
from .steps import Setting, Way, encoder_by

STORED, SELECTIVE = "store", "selective"
#: SpeechBrain's own network, and its blocks.
ECAPA, ECAPA_BLOCKS = "ECAPA-TDNN of SpeechBrain", ("blocks.*", "mfa", "asp")


SETTING = Setting(
    {
        "df_resnet56": 4,
        "resnet34": 4,
        "resnet152": 4,
        "revnet57": 4,
        "df_revnet89": 4,
        ECAPA: 16,
    }
)


def network(name: str, mode: str, row: Mapping[str, Any]) -> nn.Module:
    """Build a network whose blocks all have a mode."""
    if name != ECAPA:
        return encoder_by(Way(mode, mode, "exact", chunk=None), name, **row)
    torch.manual_seed(0)
    module = ECAPA_TDNN(80)
    if mode == SELECTIVE:
        give_mode(module, Mode.SELECTIVE, *ECAPA_BLOCKS)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    return module


def train_step(module: nn.Module, feats: Tensor) -> None:
    """Forward and backward pass of a batch."""
    module(feats).square().sum().backward()


def check_bits(name: str, modules: Mapping[str, nn.Module], feats: Tensor) -> None:
    """Hold that a step leaves the gradients and buffers of a stored one, to the bit."""
    after = []
    for module in modules.values():
        torch.manual_seed(1)
        train_step(module, feats)
        after.append([*(p.grad for p in module.parameters()), *module.buffers()])
    equal = all(map(torch.equal, *after))
    require(equal, f"{name}: gradients or buffers of selective blocks differ.")


def run(device: torch.device, setting: Setting = SETTING) -> Result:
    """Measure a step of each; the baseline is the network with all blocks stored."""
    rows = []
    for name, batch in setting.batches.items():
        torch.manual_seed(1)
        with device:
            feats = torch.randn(batch, setting.frames, 80)
            modules = {m: network(name, m, setting.row) for m in (STORED, SELECTIVE)}
        check_bits(name, modules, feats)
        steps: dict[str, Callable[[], Any]] = {
            mode: functools.partial(train_step, module, feats)
            for mode, module in modules.items()
        }
        peaks = {mode: peak_bytes(step, device) for mode, step in steps.items()}
        seconds = interleaved_seconds(steps, device, repeats=setting.repeats)
        rows.append(
            {
                "encoder": name,
                "batch": batch,
                "baseline": STORED,
                **{f"{mode} MB": peak / MB for mode, peak in peaks.items()},
                "of the baseline's peak": peaks[SELECTIVE] / peaks[STORED],
                **times(seconds[SELECTIVE], seconds[STORED]),
            }
        )
    return Result(
        "selective",
        "What do blocks take that make outputs of normalisations again?",
        f"float32, {setting.frames} frames, chunk null; peaks of live tensors above weights, "
        f"gradients and input; median of {setting.repeats} interleaved steps",
        rows,
        "gradients and buffers of each equal those of stored blocks to the bit",
    )
