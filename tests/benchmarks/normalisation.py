"""What kernels of batch normalisation with ReLU cost against plain torch operations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from speechbrain_rev.reversible import norm

from .harness import Result, distance, interleaved_seconds, peak_bytes, require, times

Step = Callable[[], list[Tensor]]
BASELINE = "plain"
LAYOUTS = {"contiguous": torch.contiguous_format, "last": torch.channels_last}


@dataclass(frozen=True)
class Setting:
    """Maps [batch, channel, freq, time] that are normalised, and how often."""

    #: Those of the four stages of a ResNet, of 2 s.
    shapes: tuple[tuple[int, int, int, int], ...] = (
        (64, 32, 80, 200),
        (64, 64, 40, 100),
        (64, 128, 20, 50),
        (64, 256, 10, 25),
    )
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    repeats: int = 20


def steps_of(x: Tensor, grad: Tensor) -> dict[str, Step]:
    """Make steps of a layer: of plain operations, of kernels, and of torch's own layers."""
    torch.manual_seed(0)
    ours = norm.BatchNorm(x.shape[1], relu=True)
    nn.init.uniform_(ours.weight)
    nn.init.uniform_(ours.bias)
    own = nn.BatchNorm2d(x.shape[1])
    own.load_state_dict(ours.state_dict())
    layers = {
        BASELINE: ours,
        "kernels": ours,
        "torch.nn": nn.Sequential(own, nn.ReLU(inplace=True)),
    }
    return {
        way: functools.partial(step, layer.to(x.device), x, grad, way)
        for way, layer in layers.items()
    }


def step(layer: nn.Module, x: Tensor, grad: Tensor, way: str) -> list[Tensor]:
    """Give the output and all gradients of a forward and backward pass."""
    x = x.detach().requires_grad_()
    sources = [x, *layer.parameters()]
    chosen = (lambda _: False) if way == BASELINE else norm._has_kernels
    with mock.patch.object(norm, "_has_kernels", chosen):
        y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, sources, grad)]


def check(case: str, steps: Mapping[str, Step], x: Tensor, grad: Tensor) -> None:
    """Compare the steps with one in float64.

    Raises
    ------
    NotEqual
        If that of the kernels is twice as far from it as the plain one, or not theirs.
    """
    layer, plain = (steps[way].args[0] for way in ("kernels", BASELINE))  # type: ignore[attr-defined]
    require(layer._is_fused(x, None), f"{case}: no kernel is launched.")
    assert layer is plain
    exact = step(layer.double(), x.double(), grad.double(), BASELINE)
    layer.float()
    off = {way: distance(steps[way](), exact) for way in ("kernels", BASELINE)}
    rounding = torch.finfo(x.dtype).eps
    require(
        off["kernels"] <= 2 * off[BASELINE] + rounding,
        f"{case}: kernels are {off['kernels']:.1e} from float64, plain operations "
        f"{off[BASELINE]:.1e}.",
    )


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Time all maps; the baseline is the same layer in plain torch operations."""
    setting = setting or Setting()
    rows: list[dict[str, Any]] = []
    cases = itertools.product(setting.shapes, setting.dtypes, LAYOUTS)
    for shape, dtype, layout in cases:
        torch.manual_seed(0)
        x, grad = (
            torch.randn(shape, device=device)
            .to(dtype)
            .contiguous(memory_format=LAYOUTS[layout])
            for _ in range(2)
        )
        steps = steps_of(x, grad)
        case = f"{list(shape)} {str(dtype).removeprefix('torch.')}, {layout}"
        check(case, steps, x, grad)
        seconds = interleaved_seconds(steps, device, repeats=setting.repeats)
        taken = {way: peak_bytes(steps[way], device) for way in steps}
        rows += [
            {
                "map": case,
                "way": way,
                "baseline": f"{case} {BASELINE}",
                **times(seconds[way], seconds[BASELINE]),
                "maps at the peak": taken[way] / x.nbytes,
            }
            for way in steps
        ]
    return Result(
        "normalisation",
        "What do kernels of batch normalisation with ReLU cost against plain operations?",
        "median of interleaved forward and backward passes of one layer, statistics "
        "included; peak: above input and gradient, in sizes of the input",
        rows,
        "outputs and gradients at most twice as far from float64 as those of plain "
        "operations",
    )
